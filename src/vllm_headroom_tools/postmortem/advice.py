"""The recommended steps for each cause of an exit."""

from typing import Final

from vllm_headroom.derive.life.causes import describe_lower_budget, find_over_budget_gpu
from vllm_headroom.model import ANY_LOG_COMMAND, Ending, EnginePod
from vllm_headroom.vocabulary import EndCause, Situation

CONSERVING_MEMORY: Final = "https://docs.vllm.ai/en/latest/configuration/conserving_memory.html"
TROUBLESHOOTING: Final = "https://docs.vllm.ai/en/latest/usage/troubleshooting.html"
NEW_ISSUE: Final = "https://github.com/vllm-project/vllm/issues/new/choose"
XID_ERRORS: Final = "https://docs.nvidia.com/deploy/xid-errors/index.html"
CONTAINER_MEMORY: Final = (
    "https://kubernetes.io/docs/concepts/configuration/manage-resources-containers/"
)
READ_LOG: Final = f"Read vLLM's log up to the end: {ANY_LOG_COMMAND}"

TODO: Final[dict[EndCause, tuple[tuple[str, str | None], ...]]] = {
    EndCause.LEAK: (
        ("No option fixes a leak: restart before the GPU is full, and upgrade vLLM", None),
        ("Report it to vLLM, with the figures above", NEW_ISSUE),
        (
            (
                "Have HeadroomOutOfMemorySoon page somebody next time "
                "(alerts/runbooks/HeadroomOutOfMemorySoon.md)"
            ),
            None,
        ),
    ),
    EndCause.BURST: (
        (
            "Lower --gpu-memory-utilization, --max-num-batched-tokens or --max-num-seqs",
            CONSERVING_MEMORY,
        ),
        ("`vllm-headroom advise` on this file computes the values", None),
    ),
    EndCause.OVER_BUDGET: (
        ("The next start holds as much again: lower --gpu-memory-utilization", CONSERVING_MEMORY),
        (
            "No replica of the same configuration fits better: change it before adding any",
            None,
        ),
    ),
    EndCause.NEIGHBOUR: (
        ("Give the engine a dedicated GPU, or move the other process away", None),
        ("Until then leave room for it: a lower --gpu-memory-utilization", CONSERVING_MEMORY),
    ),
    EndCause.KILLED: (
        (
            "Raise the memory limit of vLLM's container, or lower what it keeps on the host",
            CONTAINER_MEMORY,
        ),
        ("Find out what was killed: dmesg -T | grep -i 'killed process'", None),
    ),
    EndCause.NEVER_FITTED: (
        ("Run `vllm-headroom preflight` and `vllm-headroom plan` before the next start", None),
        (
            (
                "Lower --gpu-memory-utilization where others hold memory, "
                "else raise --tensor-parallel-size"
            ),
            CONSERVING_MEMORY,
        ),
    ),
    EndCause.HANG: (
        (
            "Take a stack of every process before the restart: py-spy dump --pid PID",
            TROUBLESHOOTING,
        ),
        ("Look for an XID and for NCCL in the logs", XID_ERRORS),
    ),
    EndCause.CRASH: (
        (READ_LOG, TROUBLESHOOTING),
        ("Look for an XID in the kernel's log: dmesg -T | grep -i xid", XID_ERRORS),
    ),
    EndCause.STOPPED: (
        (
            (
                "Running requests were cut off: drain the engine first, "
                "or give vLLM --shutdown-timeout"
            ),
            None,
        ),
    ),
    EndCause.IDLE: (
        ("Nothing, if it was planned: see kubectl get events", None),
        ("Look at its exit code (kubectl describe pod): 0 or 143 is a stop, 137 a kill", None),
    ),
    EndCause.UNKNOWN: ((READ_LOG, TROUBLESHOOTING),),
    EndCause.NOTHING: (),
}
"""The steps for each cause in order. Each has a link to the documentation, or None."""


def list_steps(
    cause: EndCause, end: Ending | None, pod: EnginePod | None
) -> tuple[tuple[str, str | None], ...]:
    """Return the steps for a cause, each with a link or None.

    Commands contain the name of the engine's `pod` if it is known.
    """
    steps = TODO[cause]
    if pod is not None:
        steps = tuple(
            (step.replace(ANY_LOG_COMMAND, pod.log_command), link) for step, link in steps
        )
    if cause is not EndCause.OVER_BUDGET or end is None:
        return steps
    gpu = find_over_budget_gpu(end)
    if gpu is None or gpu.excess is None:
        return steps
    lower_budget = describe_lower_budget(end, gpu.excess)
    first_step = f"The next start holds as much again: start it with {lower_budget}"
    return (first_step, CONSERVING_MEMORY), *steps[1:]


SITUATIONS: Final = {
    EndCause.LEAK: Situation.LEAKING,
    EndCause.BURST: Situation.LOW_MEMORY,
    EndCause.NEIGHBOUR: Situation.NEIGHBOUR,
    EndCause.OVER_BUDGET: Situation.OVER_BUDGET,
    EndCause.KILLED: Situation.LOW_MEMORY,
    EndCause.HANG: Situation.STALLED,
    EndCause.NOTHING: None,
}
"""The situation in docs/situations.md for each cause. For causes that are not in this table, it is
"down".
"""
