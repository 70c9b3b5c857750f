"""Is anything leaking: load, GPUs and host looked at together."""

from __future__ import annotations

from msgspec import Struct, field

from vllm_headroom.derive.leak.asleep import residues
from vllm_headroom.derive.leak.gpus import Tracks, gpu_leaks
from vllm_headroom.derive.leak.host import host_leaks
from vllm_headroom.derive.leak.inside import InsideTracks, insides
from vllm_headroom.derive.leak.load import LoadState, load
from vllm_headroom.derive.leak.observed import observations
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
    """Return whether load is stable and the leak family of every GPU of the engine and every role of its processes."""
    loaded, load_samples = load(state.load, snapshot)
    settled = loaded.stable is not False
    inside = insides(state.inside, snapshot)
    slept, _ = sleep(state.sleep, snapshot)
    asleep = residues(state.asleep, state.gpus, slept.least_bytes, observations(snapshot, snapshot.owned))
    gpus, gpu_samples = gpu_leaks(state.gpus, snapshot, settled=settled, inside=inside, asleep=asleep)
    host, host_samples = host_leaks(state.host, snapshot, settled=settled)
    memory = LeakMemory(load=loaded, gpus=gpus, host=host, inside=inside, sleep=slept, asleep=asleep)
    return memory, (*load_samples, *gpu_samples, *host_samples)
