"""Is anything leaking: load, GPUs and host looked at together."""

from __future__ import annotations

from msgspec import Struct, field

from vllm_headroom.derive.leak.asleep import residues
from vllm_headroom.derive.leak.gpus import Tracks, gpu_leaks
from vllm_headroom.derive.leak.host import host_leaks
from vllm_headroom.derive.leak.inside import InsideTracks, insides
from vllm_headroom.derive.leak.load import LoadState, load
from vllm_headroom.derive.leak.observed import observations
from vllm_headroom.derive.life.service import of_service, out_of_service
from vllm_headroom.derive.sleep import SleepState, sleep
from vllm_headroom.model import Sample, Snapshot


class LeakMemory(Struct, frozen=True, kw_only=True):
    """Everything the detector remembers."""

    load: LoadState = field(default_factory=LoadState)
    gpus: Tracks = field(default_factory=dict)
    host: Tracks = field(default_factory=dict)
    inside: InsideTracks = field(default_factory=dict)
    sleep: SleepState = field(default_factory=SleepState)
    asleep: Tracks = field(default_factory=dict)


def leaks(state: LeakMemory, snapshot: Snapshot) -> tuple[LeakMemory, tuple[Sample, ...]]:
    """Return what is kept asleep, whether load is stable and the leak family of every GPU and role of the engine's.

    Only a life that has worked and goes on is looked at for leaks; any other is asleep or not, all the same.
    """
    slept, kept = sleep(state.sleep, snapshot)
    served = of_service(snapshot)
    loaded, load_samples = load(state.load, served)
    settled = loaded.stable is not False
    inside = insides(state.inside, served)
    seen = tuple(observations(served, served.owned))
    asleep = residues(state.asleep, state.gpus, slept.least_bytes, seen)
    gpus, gpu_samples = gpu_leaks(state.gpus, seen, settled=settled, inside=inside, asleep=asleep)
    host, host_samples = host_leaks(state.host, served, settled=settled)
    memory = LeakMemory(load=loaded, gpus=gpus, host=host, inside=inside, sleep=slept, asleep=asleep)
    samples = (*load_samples, *gpu_samples, *host_samples)
    return memory, (*kept, *(samples if snapshot.in_service else out_of_service(snapshot, samples)))
