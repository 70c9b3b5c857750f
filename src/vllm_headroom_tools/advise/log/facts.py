"""The facts about one engine start, read from the engine's log."""

from math import ceil, floor
from typing import Final

from msgspec import Struct

from vllm_headroom.model.start import EngineStart, LogFailure
from vllm_headroom.model.status import ROUNDING_TOLERANCE
from vllm_headroom.units import MIB
from vllm_headroom.vocabulary import LogEventKind, LogFailureKind
from vllm_headroom_tools.advise.facts import Facts, FactsSource
from vllm_headroom_tools.advise.finding import Change
from vllm_headroom_tools.advise.rules.capacity import change_share
from vllm_headroom_tools.advise.settings import EngineArgs, Flag
from vllm_headroom_tools.sizing.question import (
    DEFAULT_BLOCK_TOKENS,
    DEFAULT_UTILIZATION,
    SAFE_UTILIZATION,
)
from vllm_headroom_tools.versions import Version, parse_version

OLD_DEFAULT_UTILIZATION: Final = 0.9
"""vLLM's default for `gpu_memory_utilization` before NEW_DEFAULT_VERSION."""

NEW_DEFAULT_VERSION: Final[Version] = (0, 20, 0)
"""The first version whose default is DEFAULT_UTILIZATION (config/cache.py)."""

VLLM: Final = "vllm"
"""The only engine whose options are known here."""


class StartFacts(Struct, frozen=True, kw_only=True):
    """What the log shows about one start.

    Amounts are per GPU, and missing values are None.
    """

    start: EngineStart
    failure: LogFailure | None
    facts: Facts
    """The engine's settings, in the form used by the rules on traces."""

    total_bytes: float | None
    requested_bytes: float | None
    """The GPU memory that vLLM requests as its share."""

    free_bytes: float | None
    """The smallest amount of free memory on any of the engine's GPUs before the start."""

    weights_bytes: float | None
    activation_bytes: float | None
    non_torch_bytes: float | None
    graphs_bytes: float | None
    kv_cache_bytes: float | None
    """The size of the smallest KV cache of any rank. It is negative if the other parts exceed the
    share.
    """

    kv_cache_tokens: float | None
    context_tokens: float | None
    tensor_parallel_size: int

    @property
    def settings(self) -> EngineArgs:
        """Return the version and the options of this start."""
        return self.facts.settings

    @property
    def bytes_per_token(self) -> float | None:
        """Return the bytes per token in one GPU's KV cache, or None if unknown."""
        if not self.kv_cache_bytes or not self.kv_cache_tokens or self.kv_cache_bytes < 0:
            return None
        return self.kv_cache_bytes / self.kv_cache_tokens

    def read_figure(self, name: str) -> float | None:
        """Return a figure from the failure message, or None if it is not there."""
        return None if self.failure is None else self.failure.figures.get(name)


def read_start_facts(start: EngineStart, option_args: EngineArgs) -> StartFacts:
    """Return the facts about a start; the operator's settings take precedence."""
    failure = start.root_failure
    figures = {} if failure is None else failure.figures
    # The figure from the log takes precedence over the one in the failure message.
    total_bytes = _choose(start.find_largest("total_bytes"), figures.get("total_bytes"))
    if total_bytes is None and failure is not None and failure.refusal is not None:
        total_bytes = failure.refusal.total_bytes
    settings = _read_settings(start, option_args, figures.get("utilization_ratio"))
    requested_bytes = _choose(start.find_largest("requested_bytes"), figures.get("requested_bytes"))
    if requested_bytes is None and total_bytes and settings.gpu_memory_utilization:
        requested_bytes = settings.gpu_memory_utilization * total_bytes
    free_figures = [start.find_smallest("free_at_start_bytes")]
    if failure is not None and failure.kind is LogFailureKind.LITTLE_FREE_MEMORY:
        free_figures.append(figures.get("free_bytes"))
    kv_cache_bytes = _choose(start.find_smallest("kv_cache_bytes"), figures.get("kv_cache_bytes"))
    context_tokens = _choose(
        settings.max_model_len,
        start.find_largest("context_tokens"),
        start.find_largest("concurrency_tokens"),
        figures.get("context_tokens"),
    )
    return StartFacts(
        start=start,
        failure=failure,
        facts=Facts(origin=FactsSource.LOG, settings=settings, samples=0),
        total_bytes=total_bytes,
        requested_bytes=requested_bytes,
        # Use the smallest figure, because the fullest GPU limits all others.
        free_bytes=min((figure for figure in free_figures if figure is not None), default=None),
        weights_bytes=_choose(
            start.find_largest("weights_bytes"), start.find_largest("profiled_weights_bytes")
        ),
        activation_bytes=start.find_largest("activation_bytes"),
        non_torch_bytes=start.find_largest("non_torch_bytes"),
        graphs_bytes=_choose(
            start.find_largest("graphs_bytes"), start.find_largest("graphs_estimated_bytes")
        ),
        kv_cache_bytes=kv_cache_bytes,
        kv_cache_tokens=_choose(
            start.find_smallest("kv_cache_tokens"), figures.get("kv_cache_tokens")
        ),
        context_tokens=context_tokens,
        tensor_parallel_size=int(_find_number(start, "tensor_parallel_size", "tp_size", "tp") or 1),
    )


def _read_settings(
    start: EngineStart, option_args: EngineArgs, failed_ratio: float | None
) -> EngineArgs:
    """Return the start's options, with the operator's options replacing those in the log."""
    version = option_args.version or (
        None if start.version is None else parse_version(start.version)
    )
    if start.engine != VLLM:
        return EngineArgs(version=version)
    # The sources, from most to least trusted:
    #
    # - the operator
    # - the options in the log
    # - vLLM's messages
    # - the failure message
    utilization = _choose(
        option_args.gpu_memory_utilization,
        _find_number(start, "gpu_memory_utilization"),
        start.find_largest("utilization_ratio"),
        failed_ratio,
    )
    has_options = bool(start.arguments or start.config)
    # If the options are known but lack the utilization, vLLM used its default.
    if utilization is None and has_options and version is not None:
        utilization = _find_default_utilization(version)
    cache_bytes = _choose(
        option_args.kv_cache_memory_bytes, _find_number(start, "kv_cache_memory_bytes")
    )
    max_num_seqs = _choose(
        option_args.max_num_seqs,
        _find_number(start, "max_num_seqs"),
        start.find_largest("max_num_seqs"),
    )
    max_model_len = _choose(
        option_args.max_model_len, _find_number(start, "max_model_len", "max_seq_len")
    )
    batched_tokens = _choose(
        option_args.max_num_batched_tokens,
        _find_number(start, "max_num_batched_tokens"),
        start.find_largest("batched_tokens"),
    )
    return EngineArgs(
        version=version,
        gpu_memory_utilization=utilization,
        sizes_cache_in_bytes=option_args.sizes_cache_in_bytes or cache_bytes is not None,
        kv_cache_memory_bytes=cache_bytes,
        max_num_seqs=_round(max_num_seqs),
        max_model_len=_round(max_model_len),
        max_num_batched_tokens=_round(batched_tokens),
    )


def _find_default_utilization(version: Version) -> float:
    """Return the default `gpu_memory_utilization` of a vLLM version."""
    return DEFAULT_UTILIZATION if version >= NEW_DEFAULT_VERSION else OLD_DEFAULT_UTILIZATION


def _choose(*figures: float | None) -> float | None:
    """Return the first known figure, or None if all are unknown."""
    return next((figure for figure in figures if figure is not None), None)


def _round(figure: float | None) -> int | None:
    """Return a count as a whole number.

    Returns None for -1, because it means "auto" in vLLM.
    """
    return None if figure is None or figure <= 0 else int(figure)


def _find_number(start: EngineStart, *names: str) -> float | None:
    """Return the value of an option under any of its names.

    Returns None if the value is not a number.
    """
    value = start.find_option(*names)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    return None


def raise_share(start_facts: StartFacts, missing_bytes: float, text: str) -> Change | None:
    """Return the change that gives vLLM `missing_bytes` more on each GPU, rounded up.

    Until the cache is allocated, vLLM logs the GPU's size only at level DEBUG. If the size is
    unknown, the proposed share is vLLM's default. The current share must be lower than the proposed
    share. Returns None if the current share is unknown. Also returns None if the new share would
    exceed the safe share or need more memory than was free before the start.
    """
    settings = start_facts.settings
    total_bytes = start_facts.total_bytes
    cost = "less room for bursts; a restart"
    if settings.sizes_cache_in_bytes:
        return change_share(start_facts.facts, total_bytes or 0.0, missing_bytes + MIB, text, cost)
    now = settings.gpu_memory_utilization
    flag = Flag.GPU_MEMORY_UTILIZATION
    if now is None:
        return None
    if not total_bytes:
        if settings.version is None or now >= _find_default_utilization(settings.version):
            return None
        return Change(
            flag=flag,
            value=_find_default_utilization(settings.version),
            now=now,
            text="vLLM's default: the log does not have the GPU's size, from which to compute it",
            cost=cost,
        )
    hundredths = 100 * (now + missing_bytes / total_bytes)
    # Round the share up to hundredths, because a smaller share would fail like the current share.
    value = ceil(hundredths - ROUNDING_TOLERANCE) / 100
    if value > SAFE_UTILIZATION or value <= now:
        return None
    if start_facts.free_bytes is not None and value * total_bytes > start_facts.free_bytes:
        return None
    return Change(flag=flag, value=value, now=now, text=text, cost=cost)


def fit_context(start_facts: StartFacts, cache_bytes: float) -> int | None:
    """Return the longest request length that fits, rounded down to whole blocks.

    Returns None if the bytes per token or the current limit is unknown. Also returns None if
    requests of the maximum length already fit.
    """
    context_tokens = start_facts.context_tokens
    bytes_per_token = start_facts.bytes_per_token
    if bytes_per_token is None or context_tokens is None:
        return None
    fitting_tokens = cache_bytes / bytes_per_token
    if fitting_tokens >= context_tokens:
        return None
    return floor(fitting_tokens / DEFAULT_BLOCK_TOKENS) * DEFAULT_BLOCK_TOKENS


def list_loads(start: EngineStart) -> list[dict[str, float]]:
    """Return the figures of the latest load reports in the log, newest last."""
    return [dict(event.figures) for event in start.recent_events if event.kind is LogEventKind.LOAD]
