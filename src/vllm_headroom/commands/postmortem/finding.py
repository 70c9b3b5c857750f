"""What a post-mortem finds, and what to do then."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from msgspec import Struct


class EndCause(StrEnum):
    """What ended an engine, or made it useless; a closed set, for scripts."""

    LEAK = "out_of_memory_leak"
    BURST = "out_of_memory_burst"
    NEIGHBOUR = "out_of_memory_neighbour"
    KILLED = "killed_by_kernel"
    NEVER_FITTED = "start_never_fitted"
    HANG = "hang"
    CRASH = "crash"
    STOPPED = "orderly_end"
    IDLE = "ended_while_idle"
    UNKNOWN = "unknown"
    NOTHING = "nothing_ended"


class Sureness(StrEnum):
    """How sure a finding is, the surest first: nothing else fits; what fits best; what cannot be excluded."""

    SURE = "sure"
    LIKELY = "likely"
    POSSIBLE = "possible"


class Diagnosis(Struct, frozen=True, kw_only=True):
    """One cause that fits, in a sentence, and what shows it."""

    cause: EndCause
    sureness: Sureness
    sentence: str
    evidence: tuple[str, ...] = ()


Remedy = tuple[str, str | None]
"""What to do, and a link that helps."""

CONSERVE: Final = "https://docs.vllm.ai/en/latest/configuration/conserving_memory.html"
TROUBLE: Final = "https://docs.vllm.ai/en/latest/usage/troubleshooting.html"
REPORT: Final = "https://github.com/vllm-project/vllm/issues/new/choose"
XIDS: Final = "https://docs.nvidia.com/deploy/xid-errors/index.html"
OOM: Final = "https://kubernetes.io/docs/concepts/configuration/manage-resources-containers/"
LOGS: Final = "Read vLLM's log up to the end: kubectl logs --previous"

TODO: Final[dict[EndCause, tuple[Remedy, ...]]] = {
    EndCause.LEAK: (
        ("No option mends a leak: restart before it is full, and upgrade vLLM", None),
        ("Tell the authors, with the figures above", REPORT),
        ("Let HeadroomOutOfMemorySoon wake somebody next time (alerts/runbooks/HeadroomOutOfMemorySoon.md)", None),
    ),
    EndCause.BURST: (
        ("Lower --gpu-memory-utilization, --max-num-batched-tokens or --max-num-seqs", CONSERVE),
        ("`vllm-headroom advise` on this file computes the values", None),
    ),
    EndCause.NEIGHBOUR: (
        ("Give the engine a GPU of its own, or move the other process away", None),
        ("Until then leave room for it: a lower --gpu-memory-utilization", CONSERVE),
    ),
    EndCause.KILLED: (
        ("Raise the memory limit of vLLM's container, or lower what it keeps on the host", OOM),
        ("See what was killed: dmesg -T | grep -i 'killed process'", None),
    ),
    EndCause.NEVER_FITTED: (
        ("Ask `vllm-headroom preflight` and `vllm-headroom plan` before the next start", None),
        (
            "Lower --gpu-memory-utilization where others hold memory, else raise --tensor-parallel-size",
            CONSERVE,
        ),
    ),
    EndCause.HANG: (
        ("Take a stack of every process before the restart: py-spy dump --pid PID", TROUBLE),
        ("Look for an XID and for NCCL in the logs", XIDS),
    ),
    EndCause.CRASH: ((LOGS, TROUBLE), ("Look for an XID in the kernel's log: dmesg -T | grep -i xid", XIDS)),
    EndCause.STOPPED: (("What ran was cut off: let it drain before, or give vLLM --shutdown-timeout", None),),
    EndCause.IDLE: (
        ("Nothing, if somebody meant it: kubectl get events tells", None),
        ("Its exit code tells them apart (kubectl describe pod): 0 or 143 is a stop, 137 a kill", None),
    ),
    EndCause.UNKNOWN: ((LOGS, TROUBLE),),
    EndCause.NOTHING: (),
}
