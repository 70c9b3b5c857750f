"""Options and figures from a startup log, which replace defaults and assumptions."""

from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any, Final

from msgspec.structs import fields

from vllm_headroom.model.start import EngineLog, EngineStart, Scalar
from vllm_headroom.units import GIB, format_gib
from vllm_headroom_tools.bad_input import BadInput
from vllm_headroom_tools.options import name_option
from vllm_headroom_tools.sizing.estimate import MemoryEstimate
from vllm_headroom_tools.sizing.measured import MeasuredStart
from vllm_headroom_tools.sizing.question import Question
from vllm_headroom_tools.sizing.releases import NEWEST_MINOR, OLDEST_MINOR, parse_release
from vllm_headroom_tools.terminal import wrap_text

MODEL_NAMES: Final = frozenset({"model", "model_config", "layers", "kv_heads", "head_size"})
"""Options that may name a different model from the one in the log."""

CARD_NAMES: Final = frozenset({"gpu", "gpu_memory_bytes"})
"""Options that may name a different card from the one in the log."""

COUNTS: Final = {
    "tensor_parallel_size": ("tensor_parallel_size",),
    "pipeline_parallel_size": ("pipeline_parallel_size",),
    "data_parallel_size": ("data_parallel_size",),
    "max_model_len": ("max_model_len", "max_seq_len"),
    "max_num_seqs": ("max_num_seqs",),
    "max_num_batched_tokens": ("max_num_batched_tokens",),
    "kv_cache_memory_bytes": ("kv_cache_memory_bytes",),
    "max_loras": ("max_loras",),
    "max_lora_rank": ("max_lora_rank",),
}
"""The options whose values are whole numbers, with their names in a log."""

FIGURES: Final = {
    "max_model_len": "context_tokens",
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "batched_tokens",
}
"""Values that vLLM chose itself and logged, and that can also be set by options."""

UNSET: Final[Mapping[str, Any]] = {
    **dict.fromkeys(("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"), 1),
    **dict.fromkeys(
        (
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "kv_cache_memory_bytes",
            "gpu_memory_utilization",
            "quantization",
        ),
        None,
    ),
    **dict.fromkeys(
        (
            "enforce_eager",
            "enable_expert_parallel",
            "enable_lora",
            "enable_prefix_caching",
            "no_enable_prefix_caching",
        ),
        False,
    ),
    "kv_cache_dtype": "auto",
    "dtype": "auto",
    "cpu_offload_gb": 0.0,
}
"""The values for options that a startup log omits, because vLLM used their defaults."""

SAME_LOGGED_CARD_BYTES: Final = GIB
"""Our choice: two cards are the same if their sizes differ by less. For example, CUDA sees 79.2 GiB
of a card with 79.6 GiB.
"""


def choose_start(log: EngineLog) -> EngineStart:
    """Return the latest engine start that logged a KV cache size; raise BadInput without one."""
    for start in reversed(log.starts):
        if start.engine == "vllm" and start.find_largest("kv_cache_bytes") is not None:
            return start
    raise BadInput(
        "--log: no start of vLLM in it got as far as its KV cache; vllm-headroom advise explains"
        " a start that failed"
    )


def apply_log_options(options: Namespace, start: EngineStart, *, with_typed: bool) -> Namespace:
    """Return the options, completed with those of an engine start.

    Typed options take precedence over those of the start. If `with_typed` is False, only typed
    options for the model or card take precedence. Raises BadInput if the start's release is
    unknown.
    """
    applied = Namespace(**vars(options))
    typed_names = options.typed_names
    if not with_typed:
        typed_names = typed_names & (MODEL_NAMES | CARD_NAMES)
        # Reset the options to their defaults, because the typed values were not measured.
        vars(applied).update(UNSET)
    for name, value in list_log_options(start):
        if name not in typed_names:
            setattr(applied, name, value)
    if not typed_names & MODEL_NAMES and start.model is not None:
        applied.model = start.model
    total_bytes = start.find_largest("total_bytes")
    # The size reported by CUDA is more accurate than the nominal size of the card.
    if total_bytes is not None and is_logged_card(options, total_bytes):
        applied.gpu = None
        applied.gpu_memory_bytes = round(total_bytes)
    return applied


def is_logged_card(options: Namespace, total_bytes: float) -> bool:
    """Return whether the options name the log's card, or no card at all."""
    named_bytes = options.gpu_memory_bytes
    if named_bytes is None and options.gpu is not None:
        named_bytes = options.gpu.card.memory_bytes
    return named_bytes is None or abs(named_bytes - total_bytes) < SAME_LOGGED_CARD_BYTES


def list_log_options(start: EngineStart) -> Iterator[tuple[str, Any]]:
    """Yield a start's options under their `plan` names; raise BadInput for an unknown release."""
    try:
        yield "release", parse_release(start.version or "")
    except ValueError:
        version = start.version or "of an unknown version"
        problem = f"plan computes releases from 0.{OLDEST_MINOR} to 0.{NEWEST_MINOR}"
        raise BadInput(f"--log: the start is of vLLM {version}; {problem}") from None
    # A figure missing from the logged options may be in another log line.
    for name, log_names in COUNTS.items():
        count = start.find_option(*log_names)
        if not _is_count(count) and name in FIGURES:
            count = start.find_largest(FIGURES[name])
        # In Python, a boolean is also an integer, but it is not a count.
        if isinstance(count, int | float) and _is_count(count):
            yield name, int(count)
    utilization = start.find_option("gpu_memory_utilization")
    if isinstance(utilization, float):
        yield "gpu_memory_utilization", utilization
    for name in ("kv_cache_dtype", "dtype"):
        value = start.find_option(name)
        if isinstance(value, str):
            yield name, value.removeprefix("torch.")
    quantization = start.arguments.get("quantization")
    if isinstance(quantization, str):
        yield "quantization", quantization
    offload_gib = start.arguments.get("cpu_offload_gb")
    if isinstance(offload_gib, int | float):
        yield "cpu_offload_gb", float(offload_gib)
    for name in ("enforce_eager", "enable_expert_parallel", "enable_lora", "language_model_only"):
        if start.find_option(name) is True:
            yield name, True
    is_caching = start.find_option("enable_prefix_caching")
    # Set both options explicitly, because the default depends on the release.
    if isinstance(is_caching, bool):
        yield "enable_prefix_caching", is_caching
        yield "no_enable_prefix_caching", not is_caching


def _is_count(value: Scalar) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def measure_start(start: EngineStart, name: str, question: Question) -> MeasuredStart:
    """Return the figures of an engine start that used the question's settings."""
    total_bytes = start.find_largest("total_bytes")
    free_bytes = start.find_smallest("free_at_start_bytes")
    missing_bytes = None
    # The memory in use before the start, including the CUDA context of the process itself.
    if total_bytes is not None and free_bytes is not None:
        missing_bytes = float(total_bytes - free_bytes)
    weights_bytes = start.find_largest("profiled_weights_bytes")
    if weights_bytes is None:
        weights_bytes = start.find_largest("weights_bytes")
    graphs_bytes = start.find_largest("graphs_estimated_bytes")
    return MeasuredStart(
        source=f"{name}, vLLM {start.version}",
        settings={field.name: getattr(question, field.name) for field in fields(Question)},
        total_bytes=None if total_bytes is None else round(total_bytes),
        missing_bytes=missing_bytes,
        weights_bytes=weights_bytes,
        activation_bytes=start.find_largest("activation_bytes"),
        non_torch_bytes=start.find_largest("non_torch_bytes"),
        graphs_bytes=graphs_bytes,
        kv_cache_bytes=start.find_smallest("kv_cache_bytes"),
        kv_cache_tokens=start.find_smallest("kv_cache_tokens"),
    )


CHANGED_OPTIONS: Final = (
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "kv_cache_dtype",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "enforce_eager",
)
"""The options that are listed if their values differ from the log's."""


def describe_log(estimate: MemoryEstimate) -> Iterator[str]:
    """Yield lines that compare the logged KV cache with the estimate for the changed options.

    Yields nothing without a log.
    """
    measured = estimate.question.measured
    if measured is None:
        return
    cache = "a KV cache of unknown size"
    if measured.kv_cache_bytes is not None:
        cache = f"{format_gib(measured.kv_cache_bytes)} of KV cache"
    if measured.kv_cache_tokens is not None:
        cache = f"{cache}, {measured.kv_cache_tokens:,.0f} tokens"
    yield from wrap_text("", f"You have: {cache} ({measured.source}).")
    changes = list(_list_changes(estimate.question, measured))
    if changes and estimate.capacity_tokens is not None:
        planned = f"at least {estimate.capacity_tokens:,} tokens"
        yield from wrap_text("", f"With {' '.join(changes)}: {planned}.")
    yield ""


def _list_changes(question: Question, measured: MeasuredStart) -> Iterator[str]:
    """Yield the options whose values differ from the log's, as they would be typed."""
    for name in CHANGED_OPTIONS:
        value = getattr(question, name)
        if value == measured.settings[name]:
            continue
        option = name_option(name)
        yield option if value is True else f"{option} {value}"


def build_measured_data(estimate: MemoryEstimate) -> dict[str, Any] | None:
    """Return the log's figures for --json, or None if there is no log."""
    measured = estimate.question.measured
    if measured is None:
        return None
    names = [
        field.name for field in fields(MeasuredStart) if field.name not in ("settings", "source")
    ]
    figures = {name: getattr(measured, name) for name in names}
    changes = list(_list_changes(estimate.question, measured))
    return {"source": measured.source, **figures, "changes": changes}
