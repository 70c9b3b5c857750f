"""Rules for a failed start or an exit that the engine's own log explains."""

from collections.abc import Callable, Mapping
from math import floor
from typing import Final

from vllm_headroom.derive.attribution import NEIGHBOUR_BYTES
from vllm_headroom.derive.engine_log import describe_failure, describe_place
from vllm_headroom.model.start import LogFailure, Refusal
from vllm_headroom.units import GIB, format_size
from vllm_headroom.vocabulary import LogFailureKind, StartPhase
from vllm_headroom_tools.advise.facts import AIM_BYTES
from vllm_headroom_tools.advise.finding import (
    Advice,
    Change,
    Figure,
    drop_none,
    list_evidence,
    lower_option,
)
from vllm_headroom_tools.advise.log.facts import (
    VLLM,
    StartFacts,
    fit_context,
    raise_share,
)
from vllm_headroom_tools.advise.log.planned import find_enough_gpus, would_start
from vllm_headroom_tools.advise.rules.capacity import change_share
from vllm_headroom_tools.advise.settings import Flag

NO_COST: Final = "none: the engine has to start again anyway"
RESTART: Final = "a restart"

MOVE_OTHERS: Final = Change(
    text=(
        "Find what else is on the GPU with nvidia-smi on the node, and move or stop it; end a"
        " left-over process of this engine with kill"
    ),
    cost=NO_COST,
)
DEFRAGMENT_TEXT: Final = (
    "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the engine's environment: torch's own"
    " cache had the memory, but in pieces"
)
DEFRAGMENT_COST: Final = "not with sleep mode, which refuses it; a restart"

LOG_ROUNDING_BYTES: Final = GIB / 100
"""vLLM logs sizes in hundredths of a GiB."""

FailureRule = Callable[[StartFacts, LogFailure], tuple[Change, ...]]


def advise_on_failure(start_facts: StartFacts, failure: LogFailure) -> Advice:
    """Return the advice on the failure that ended a start or a running engine."""
    changes: tuple[Change, ...] = ()
    rule = RULES.get(failure.kind)
    # The rules propose vLLM's options, so other engines get general steps instead.
    if rule is not None and start_facts.start.engine == VLLM:
        changes = rule(start_facts, failure)
    elif failure.kind in MEMORY_KINDS:
        changes = _change_other_engine(start_facts)
    steps = STEPS.get(failure.kind, ())
    changes += tuple(Change(text=step, cost=NO_COST) for step in steps)
    return Advice(
        cause=failure.kind,
        summary=f"{describe_failure(failure)}.",
        evidence=_list_evidence(start_facts, failure),
        changes=changes,
        remark=_find_remark(failure),
    )


def _find_remark(failure: LogFailure) -> str | None:
    """Return how to distinguish a failure from a similar one.

    Returns None if there is no similar one.
    """
    if failure.kind is LogFailureKind.GPU_OUT_OF_MEMORY:
        # Once the cache is allocated, further allocations lie outside vLLM's share. Therefore, a
        # larger share does not help.
        is_after_profile = failure.phase in (
            StartPhase.CACHE,
            StartPhase.READY,
            StartPhase.SERVING,
        )
        return BEYOND_SHARE if is_after_profile else None
    if failure.kind is LogFailureKind.LITTLE_FREE_MEMORY:
        return BESIDE_OTHERS
    return NO_OPTION_HELPS if failure.kind not in RULES else None


def _list_evidence(start_facts: StartFacts, failure: LogFailure) -> tuple[Figure, ...]:
    """Return the log line, the failure's figures, and the parts of GPU memory."""
    refusal = failure.refusal or Refusal()
    cache_bytes = start_facts.kv_cache_bytes
    missing_bytes = None
    # A negative size means that the other parts exceed the share.
    if cache_bytes is not None and cache_bytes < 0:
        missing_bytes = -cache_bytes
        cache_bytes = None
    place = Figure("line", float(failure.line_number), describe_place(failure))
    figures = list_evidence(
        ("process_bytes", refusal.process_bytes, "the process held {} of the GPU"),
        ("allocated_bytes", refusal.allocated_bytes, "{} of that were tensors"),
        ("graph_bytes", refusal.graph_bytes, "{} were in the CUDA graphs' pools"),
        ("total_bytes", start_facts.total_bytes, "the GPU has {}"),
        ("free_at_start_bytes", start_facts.free_bytes, "{} of it were free before the start"),
        ("requested_bytes", start_facts.requested_bytes, "vLLM's share was {}"),
        ("weights_bytes", start_facts.weights_bytes, "the weights take {}"),
        ("activation_bytes", start_facts.activation_bytes, "the activations take {}"),
        ("non_torch_bytes", start_facts.non_torch_bytes, "memory outside torch takes {}"),
        ("graphs_bytes", start_facts.graphs_bytes, "the CUDA graphs take {}"),
        ("kv_cache_bytes", cache_bytes, "{} are left for the KV cache"),
        ("missing_bytes", missing_bytes, "these parts take {} more than the share"),
        ("kv_cache_tokens", start_facts.kv_cache_tokens, "the cache holds {} tokens"),
    )
    return (place, *figures)


# A refused allocation of GPU memory.


def _change_for_refusal(start_facts: StartFacts, failure: LogFailure) -> tuple[Change, ...]:
    """Return the changes for a refused allocation, depending on the phase of the start."""
    refusal = failure.refusal or Refusal()
    move = MOVE_OTHERS if (refusal.other_bytes or 0) >= NEIGHBOUR_BYTES else None
    defragment = None
    if _is_fragmented(refusal):
        defragment = Change(text=DEFRAGMENT_TEXT, cost=DEFRAGMENT_COST)
    # Before the profile run, neither the batch nor the cache is allocated. Only the weights matter.
    if failure.phase in (StartPhase.BEGINNING, StartPhase.LOADING):
        return drop_none(move, split_weights(start_facts, "the weights do not fit into one GPU"))
    if failure.phase is StartPhase.PROFILING:
        return drop_none(
            move,
            *_shrink_batch(start_facts, failure),
            split_weights(start_facts, "spreads the weights, and leaves more for the rest"),
        )
    changes = (move, defragment, *_shrink_share(start_facts, refusal))
    return drop_none(*changes, *_shrink_batch(start_facts, failure))


def _is_fragmented(refusal: Refusal) -> bool:
    """Return whether free memory plus torch's cached memory covered the refused bytes."""
    if refusal.asked_bytes is None or not refusal.cached_bytes:
        return False
    return refusal.asked_bytes <= refusal.cached_bytes + (refusal.free_bytes or 0)


def _shrink_share(start_facts: StartFacts, refusal: Refusal) -> tuple[Change, ...]:
    """Return a smaller share for vLLM that leaves the refused bytes and AIM_BYTES free.

    The smaller cache may be unable to hold a request of the maximum length. In that case, the
    changes include a lower maximum length.
    """
    total_bytes = start_facts.total_bytes
    if not total_bytes:
        return ()
    missing_bytes = 0.0
    if refusal.asked_bytes is not None and refusal.free_bytes is not None:
        missing_bytes = max(0.0, refusal.asked_bytes - refusal.free_bytes)
    freed_bytes = missing_bytes + AIM_BYTES
    text = f"leaves {format_size(freed_bytes)} more free: what was missing, and room for the next"
    cost = "the KV cache of each GPU shrinks by about as much; a restart"
    smaller_share = change_share(start_facts.facts, total_bytes, -freed_bytes, text, cost)
    if smaller_share is None or start_facts.kv_cache_bytes is None:
        return drop_none(smaller_share)
    shorter_context = None
    # Rounding down the share can take another hundredth of the GPU from the cache.
    cache_bytes = start_facts.kv_cache_bytes - freed_bytes - total_bytes / 100
    fitting_tokens = fit_context(start_facts, cache_bytes)
    if fitting_tokens is not None:
        shorter_context = lower_option(
            start_facts.facts,
            Flag.MAX_MODEL_LEN,
            fitting_tokens,
            "the smaller cache holds no longer request",
            "longer requests are refused; a restart",
        )
        if shorter_context is None:
            return drop_none(split_weights(start_facts, "leaves each GPU more beside the weights"))
    return drop_none(smaller_share, shorter_context)


SAMPLING_FILES: Final = ("/sample/", "/sampling/", "sampler", "logits", "logprob", "penalties")
"""Substrings of the names of source files that contain sampling code. This code needs memory for
each request and each word of the vocabulary.
"""


def _shrink_batch(start_facts: StartFacts, failure: LogFailure) -> tuple[Change, ...]:
    """Return a limit on requests or tokens.

    The choice depends on which code needed the memory.
    """
    settings = start_facts.settings
    is_sampling = "dummy_requests" in failure.figures or any(
        part in frame.file for frame in failure.frames for part in SAMPLING_FILES
    )
    requests = settings.max_num_seqs or int(failure.figures.get("dummy_requests", 0))
    fewer_requests = lower_option(
        start_facts.facts,
        Flag.MAX_NUM_SEQS,
        requests // 2,
        "sampling takes memory for each request and each word of the vocabulary",
        "in a burst requests wait in the queue; a restart",
    )
    # A batch has at least one token per request.
    batch_tokens = (settings.max_num_batched_tokens or 0) // 2
    fewer_tokens = lower_option(
        start_facts.facts,
        Flag.MAX_NUM_BATCHED_TOKENS,
        batch_tokens if batch_tokens >= requests else 0,
        "the activations of a step shrink with its tokens",
        "long prompts take more steps; a restart",
    )
    # Sampling memory depends only on the requests; the layers' memory depends on the tokens.
    if is_sampling:
        return drop_none(fewer_requests)
    return drop_none(fewer_tokens, fewer_requests)


def split_weights(start_facts: StartFacts, text: str) -> Change:
    """Return the change that spreads the model across the number of GPUs computed by `plan`.

    If `plan` does not know the model, the number of GPUs is doubled.
    """
    now = start_facts.tensor_parallel_size
    enough_gpus = find_enough_gpus(start_facts)
    if enough_gpus is not None:
        text = f"{text}; by plan it starts on {enough_gpus}"
    return Change(
        flag=Flag.TENSOR_PARALLEL_SIZE,
        value=enough_gpus or 2 * now,
        now=now,
        text=text,
        cost="more GPUs; a restart",
    )


# A KV cache that is too small.


def _change_for_no_cache(start_facts: StartFacts, failure: LogFailure) -> tuple[Change, ...]:
    """Return the changes that leave memory for the cache, such as a larger share."""
    missing_bytes = AIM_BYTES + max(0.0, -_find_cache_bytes(start_facts))
    text = f"{format_size(missing_bytes)} more: what is missing, and a cache of 1 GiB"
    no_graphs = None
    # Turning off CUDA graphs helps only if they free the missing memory.
    graphs_bytes = start_facts.start.find_largest("graphs_estimated_bytes")
    if graphs_bytes is not None and graphs_bytes >= missing_bytes:
        no_graphs = Change(
            flag=Flag.ENFORCE_EAGER,
            text=f"captures no CUDA graphs, for which {format_size(graphs_bytes)} are set aside",
            cost="every token comes slower; a restart",
        )
    return drop_none(
        raise_share(start_facts, missing_bytes, text),
        no_graphs,
        *_shrink_batch(start_facts, failure),
        split_weights(start_facts, "spreads the weights, and leaves each GPU more for the cache"),
    )


def _find_cache_bytes(start_facts: StartFacts) -> float:
    """Return the bytes left for the cache, as logged or else as computed."""
    if start_facts.kv_cache_bytes is not None:
        return start_facts.kv_cache_bytes
    requested_bytes = start_facts.requested_bytes
    weights_bytes = start_facts.weights_bytes
    if requested_bytes is None or weights_bytes is None:
        return 0.0
    others_bytes = (start_facts.activation_bytes or 0.0) + (start_facts.non_torch_bytes or 0.0)
    return min(0.0, requested_bytes - weights_bytes - others_bytes)


def _change_for_context(start_facts: StartFacts, failure: LogFailure) -> tuple[Change, ...]:
    """Return changes that let the longest request fit.

    The changes are a larger cache, the longest length that fits, and more GPUs.
    """
    needed_bytes = failure.figures.get("needed_bytes")
    cache_bytes = failure.figures.get("kv_cache_bytes")
    larger_share = None
    if needed_bytes is not None and cache_bytes is not None:
        missing_bytes = needed_bytes - cache_bytes
        text = f"the cache lacks {format_size(missing_bytes)} for one request of full length"
        larger_share = raise_share(start_facts, missing_bytes, text)
    shorter_context = None
    fitting_tokens = _find_fitting_tokens(failure)
    if fitting_tokens:
        shorter_context = lower_option(
            start_facts.facts,
            Flag.MAX_MODEL_LEN,
            fitting_tokens,
            "the longest request that the cache holds",
            "longer requests are refused; a restart",
        )
    return drop_none(
        larger_share,
        shorter_context,
        split_weights(start_facts, "spreads weights and cache over more GPUs"),
    )


def _find_fitting_tokens(failure: LogFailure) -> int:
    """Return the length of the longest request that fits, or 0 if unknown.

    The length is logged or computed.
    """
    figures = failure.figures
    if "fitting_tokens" in figures:
        return int(figures["fitting_tokens"])
    if "kv_cache_tokens" in figures:
        return int(figures["kv_cache_tokens"])
    context_tokens = figures.get("context_tokens")
    needed_bytes = figures.get("needed_bytes")
    cache_bytes = figures.get("kv_cache_bytes")
    if not context_tokens or not needed_bytes or cache_bytes is None:
        return 0
    # The whole context needs `needed_bytes`, so the length that fits is proportional to
    # `cache_bytes`.
    return floor(context_tokens * cache_bytes / needed_bytes)


def _change_for_state_blocks(start_facts: StartFacts, failure: LogFailure) -> tuple[Change, ...]:
    """Return a limit on running requests: the number of state blocks in the cache."""
    blocks = failure.figures.get("state_blocks")
    if not blocks:
        return ()
    fewer_requests = Change(
        flag=Flag.MAX_NUM_SEQS,
        value=blocks,
        now=failure.figures.get("max_num_seqs") or start_facts.settings.max_num_seqs,
        text="each running request needs a block for the state of its Mamba layers",
        cost="more requests than this wait in the queue; a restart",
    )
    return (fewer_requests,)


# Starts that vLLM aborts before its profile run.


def _change_for_used_gpu(start_facts: StartFacts, failure: LogFailure) -> tuple[Change, ...]:
    """Return two changes.

    The changes move other processes away, or request only the share that was free.
    """
    total_bytes = failure.figures.get("total_bytes") or start_facts.total_bytes
    free_bytes = start_facts.free_bytes
    lower_share = None
    if total_bytes and free_bytes is not None:
        # vLLM refuses a share that is larger than the free memory. vLLM's log rounds both the share
        # and the free memory.
        share = floor(100 * (free_bytes - LOG_ROUNDING_BYTES) / total_bytes) / 100
        starts = would_start(start_facts, gpu_memory_utilization=share) if share > 0 else False
        if starts is False:
            return (MOVE_OTHERS, split_weights(start_facts, "the rest of the GPU is too small"))
        cost = "a smaller KV cache; a restart"
        text = f"{format_size(free_bytes)} of {format_size(total_bytes)} were free"
        if starts:
            text = f"{text}; by plan it starts with that"
        else:
            cost = "a smaller KV cache, or none at all if the model does not fit; a restart"
        lower_share = lower_option(
            start_facts.facts, Flag.GPU_MEMORY_UTILIZATION, share, text, cost
        )
    return drop_none(MOVE_OTHERS, lower_share)


def _change_for_block(start_facts: StartFacts, failure: LogFailure) -> tuple[Change, ...]:
    """Return a batch size large enough for one cache block."""
    block_tokens = failure.figures.get("block_tokens")
    if not block_tokens:
        return ()
    now = failure.figures.get("batched_tokens") or start_facts.settings.max_num_batched_tokens
    larger_batch = Change(
        flag=Flag.MAX_NUM_BATCHED_TOKENS,
        value=block_tokens,
        now=now,
        text="a batch has to hold a whole block of this model's cache",
        cost="slightly more memory for activations; a restart",
    )
    return (larger_batch,)


def _change_for_model_limit(start_facts: StartFacts, failure: LogFailure) -> tuple[Change, ...]:
    """Return the model's own limit on the length of a request."""
    model_tokens = failure.figures.get("model_tokens")
    if not model_tokens:
        return ()
    shorter_context = Change(
        flag=Flag.MAX_MODEL_LEN,
        value=model_tokens,
        now=failure.figures.get("context_tokens") or start_facts.context_tokens,
        text="the model was trained for no longer request",
        cost=RESTART,
    )
    return (shorter_context,)


def _change_for_gpus(start_facts: StartFacts, failure: LogFailure) -> tuple[Change, ...]:
    """Return options with which the engine uses no more GPUs than it sees."""
    start = start_facts.start
    changes = [Change(text="Give the container all GPUs that the options name", cost=RESTART)]
    available_gpus = failure.figures.get("available_gpus")
    if available_gpus and available_gpus < start_facts.tensor_parallel_size:
        fewer_gpus = Change(
            flag=Flag.TENSOR_PARALLEL_SIZE,
            # Tensor parallelism divides the attention heads. In every model, only powers of two
            # divide their number.
            value=float(2 ** (int(available_gpus).bit_length() - 1)),
            now=start_facts.tensor_parallel_size,
            text=f"the engine sees {available_gpus:.0f} GPUs",
            cost="less memory for the KV cache, if the model fits at all; a restart",
        )
        changes.append(fewer_gpus)
    local_rank = failure.figures.get("local_rank")
    ranks = start.arguments.get("data_parallel_size") or start.config.get("data_parallel_size")
    if local_rank and isinstance(ranks, int) and ranks > local_rank:
        fewer_engines = Change(
            flag=Flag.DATA_PARALLEL_SIZE,
            value=local_rank,
            now=ranks,
            text=f"rank {local_rank:.0f} of the engines has no GPU",
            cost="fewer engines behind one server; a restart",
        )
        changes.append(fewer_engines)
    return tuple(changes)


def _change_other_engine(start_facts: StartFacts) -> tuple[Change, ...]:
    """Return the option that sets the GPU share of an engine other than vLLM."""
    option = OTHER_SHARES.get(start_facts.start.engine)
    if option is None:
        return ()
    return (Change(text=f"Change {option}: it sizes the KV cache", cost=RESTART),)


OTHER_SHARES: Final[Mapping[str, str]] = {
    "sglang": "--mem-fraction-static",
    "tensorrt_llm": "kv_cache_config.free_gpu_memory_fraction",
}
"""For other engines, the option that determines the size of the KV cache. After a refused
allocation, this option should be lowered. If no memory was left for the cache, it should be raised.
"""

MEMORY_KINDS: Final = frozenset(
    {LogFailureKind.GPU_OUT_OF_MEMORY, LogFailureKind.NO_KV_CACHE_MEMORY}
)

RULES: Final[Mapping[LogFailureKind, FailureRule]] = {
    LogFailureKind.GPU_OUT_OF_MEMORY: _change_for_refusal,
    LogFailureKind.NO_KV_CACHE_MEMORY: _change_for_no_cache,
    LogFailureKind.CONTEXT_TOO_LONG: _change_for_context,
    LogFailureKind.TOO_FEW_STATE_BLOCKS: _change_for_state_blocks,
    LogFailureKind.LITTLE_FREE_MEMORY: _change_for_used_gpu,
    LogFailureKind.BLOCK_BEYOND_BATCH: _change_for_block,
    LogFailureKind.CONTEXT_BEYOND_MODEL: _change_for_model_limit,
    LogFailureKind.TOO_FEW_GPUS: _change_for_gpus,
}
"""The rule for each failure that changing an option can fix."""

STEPS: Final[Mapping[LogFailureKind, tuple[str, ...]]] = {
    LogFailureKind.MEMORY_CHANGED: (
        (
            "Start it again once the other process has gone, and start engines on one GPU one after"
            " another"
        ),
    ),
    LogFailureKind.MODEL_UNAVAILABLE: (
        (
            "Accept the model's licence on its page, and give the engine a token that may read it"
            " (HF_TOKEN from a Secret)"
        ),
        "Without access to the internet, mount the model and give its folder; set HF_HUB_OFFLINE=1",
    ),
    LogFailureKind.NCCL: (
        "Start it once with NCCL_DEBUG=INFO, which names the call and the cause",
        "Check that all GPUs answer (nvidia-smi), and that /dev/shm is large enough (df /dev/shm)",
    ),
    LogFailureKind.SHARED_MEMORY: (
        "Remove what a killed run left in /dev/shm (vllm_*, psm_*, nccl-*)",
        "Make /dev/shm larger (--shm-size, or an emptyDir with medium: Memory)",
    ),
    LogFailureKind.CUDA: (
        "Look for an XID in the kernel's log: dmesg -T | grep -i xid",
        "Start it once with CUDA_LAUNCH_BLOCKING=1, so that the traceback names the kernel",
    ),
    LogFailureKind.DRIVER: (
        (
            "Check that the container sees its GPU (nvidia-smi), and that the driver is new enough"
            " for the image's CUDA"
        ),
    ),
    LogFailureKind.HOST_OUT_OF_MEMORY: (
        (
            "Raise the container's memory limit, or keep less in host memory"
            " (--mm-processor-cache-gb, --cpu-offload-gb)"
        ),
    ),
    LogFailureKind.KILLED: (
        (
            "Look at why it was killed: kubectl describe pod has OOMKilled for a lack of host"
            " memory, dmesg -T names the process"
        ),
        (
            "After OOMKilled raise the container's memory limit, or keep less in host memory"
            " (--mm-processor-cache-gb, --cpu-offload-gb)"
        ),
    ),
    LogFailureKind.HANG: (
        "Take a stack of every process before the next restart: py-spy dump --pid PID",
        "Look for an XID in the kernel's log: dmesg -T | grep -i xid",
    ),
    LogFailureKind.DISK_FULL: (
        "Make the volume of the model's cache or of /tmp larger, or remove old models from it",
    ),
    LogFailureKind.PORT_IN_USE: ("End the other process, or give the engine another --port",),
    LogFailureKind.UNSUPPORTED: (
        "Look the model up in the engine's list of supported models, for this version and GPU",
    ),
    LogFailureKind.BAD_OPTION: (
        "Compare the options with --help of the engine's version; the log's line names the option",
    ),
    LogFailureKind.EXCEPTION: ("Read the traceback above that line, and report it to the engine",),
    LogFailureKind.ENGINE_DIED: (
        (
            "Look at its exit code (kubectl describe pod): 137 is a kill, by the kernel if the"
            " container ran out of memory"
        ),
        "Look for an XID in the kernel's log: dmesg -T | grep -i xid",
    ),
}
"""The steps for failures that no option can fix."""

NO_OPTION_HELPS: Final = "No option that sizes GPU memory affects it."

BEYOND_SHARE: Final = (
    "vLLM had taken its share of the GPU before: what was refused came on top of it."
)
BESIDE_OTHERS: Final = (
    "A lower share only helps beside others that stay; vllm-headroom plan computes what fits."
)
