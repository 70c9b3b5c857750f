"""The version and the options that vLLM was started with."""

from collections.abc import Iterable
from enum import StrEnum
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from vllm_headroom.model import EnginePage, EngineReading
from vllm_headroom_tools.versions import OLDEST_SUPPORTED, Version


class Flag(StrEnum):
    """The options of `vllm serve` that advice may name. Advice never names any other option."""

    GPU_MEMORY_UTILIZATION = "--gpu-memory-utilization"
    MAX_NUM_SEQS = "--max-num-seqs"
    MAX_MODEL_LEN = "--max-model-len"
    MAX_NUM_BATCHED_TOKENS = "--max-num-batched-tokens"
    ENFORCE_EAGER = "--enforce-eager"
    TENSOR_PARALLEL_SIZE = "--tensor-parallel-size"
    DATA_PARALLEL_SIZE = "--data-parallel-size"
    NO_ENABLE_PREFIX_CACHING = "--no-enable-prefix-caching"
    KV_CACHE_MEMORY_BYTES = "--kv-cache-memory-bytes"
    MM_PROCESSOR_CACHE_GB = "--mm-processor-cache-gb"
    MAX_LOGPROBS = "--max-logprobs"
    LIMIT_MM_PER_PROMPT = "--limit-mm-per-prompt"
    MM_PROCESSOR_KWARGS = "--mm-processor-kwargs"


NEWEST_CHECKED: Final[Version] = (0, 33, 0)
"""The newest version whose options have been checked."""

FIRST_VERSIONS: Final[dict[Flag, Version]] = dict.fromkeys(Flag, OLDEST_SUPPORTED) | {
    # Before 0.6.5, prefix caching was off by default.
    Flag.NO_ENABLE_PREFIX_CACHING: (0, 6, 5),
    Flag.DATA_PARALLEL_SIZE: (0, 8, 3),
    # vLLM's own guide mentions --kv-cache-memory, which no version has (vllm-project/vllm#55834).
    Flag.KV_CACHE_MEMORY_BYTES: (0, 10, 2),
    # Older vLLM versions may also have this option.
    Flag.MM_PROCESSOR_CACHE_GB: (0, 11, 0),
    # Older vLLM versions may also have this option.
    Flag.LIMIT_MM_PER_PROMPT: (0, 5, 5),
    # Older vLLM versions may also have this option.
    Flag.MM_PROCESSOR_KWARGS: (0, 6, 3),
}
"""The first version that has each option (vllm/engine/arg_utils.py in that version's wheel)."""

COUNTS_PREFIXES_ONCE: Final[Version] = (0, 27, 0)
"""The first version that looks up a waiting request only once. Older versions do so in each step
(vllm-project/vllm#48860).
"""

FIELD_VERSIONS: Final[dict[str, Version]] = {
    "prefix_queries_total": (0, 7, 3),
    "kv_cache_memory_bytes": (0, 10, 2),
    "awake": (0, 11, 1),
}
"""The first version that exports each field of EngineReading. An engine whose page has the field
runs this version or a newer one.
"""


class EngineArgs(Struct, frozen=True, kw_only=True):
    """The version and options with which the engine was started; unknown ones are None."""

    version: Version | None = None
    # A lower bound for the version, derived from the engine's page.
    at_least: Version = OLDEST_SUPPORTED
    gpu_memory_utilization: float | None = None
    # Whether kv_cache_memory_bytes is set, even if its value is unknown; it overrides the
    # utilization.
    sizes_cache_in_bytes: bool = False
    kv_cache_memory_bytes: float | None = None
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None

    @property
    def earliest_version(self) -> Version:
        """Return the version, or a lower bound for the version if it is unknown."""
        return self.at_least if self.version is None else self.version

    def read_value(self, flag: Flag) -> float | None:
        """Return the value of an option, or None if it is unknown.

        Raises AttributeError for an option that is not a field of this class.
        """
        field = flag.removeprefix("--").replace("-", "_")
        value: float | None = getattr(self, field)
        return value


def find_oldest_version(engines: Iterable[EngineReading]) -> Version:
    """Return a lower bound for the engines' version, derived from the fields that they export."""
    oldest_version = OLDEST_SUPPORTED
    for engine in engines:
        for field, first_version in FIELD_VERSIONS.items():
            if getattr(engine, field) is not None:
                oldest_version = max(oldest_version, first_version)
    return oldest_version


def add_page_settings(settings: EngineArgs, page: EnginePage) -> EngineArgs:
    """Return the settings, with unknown settings filled in from the engine's page."""
    cache_bytes = _read_common(page, "kv_cache_memory_bytes")
    max_num_seqs = _read_common(page, "max_num_seqs")
    utilization = _read_common(page, "gpu_memory_utilization_ratio")
    return replace(
        settings,
        gpu_memory_utilization=settings.gpu_memory_utilization or utilization,
        max_num_seqs=settings.max_num_seqs or (None if max_num_seqs is None else int(max_num_seqs)),
        at_least=max(settings.at_least, find_oldest_version(page.engines)),
        sizes_cache_in_bytes=settings.sizes_cache_in_bytes or cache_bytes is not None,
        kv_cache_memory_bytes=settings.kv_cache_memory_bytes or cache_bytes,
    )


def _read_common(page: EnginePage, field: str) -> float | None:
    """Return the value of a field on which all engines on the page agree.

    Returns None if their values differ, or if the value is unknown.
    """
    values = {getattr(engine, field) for engine in page.engines}
    return values.pop() if len(values) == 1 else None
