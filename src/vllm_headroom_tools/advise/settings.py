"""The version and the options that vLLM was started with."""

from collections.abc import Iterable
from enum import StrEnum
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from vllm_headroom.model import EnginePage, EngineReading
from vllm_headroom_tools.versions import OLDEST, Version


class Flag(StrEnum):
    """The options of `vllm serve` that may be advised; no other is ever named."""

    GPU_MEMORY_UTILIZATION = "--gpu-memory-utilization"
    MAX_NUM_SEQS = "--max-num-seqs"
    MAX_MODEL_LEN = "--max-model-len"
    MAX_NUM_BATCHED_TOKENS = "--max-num-batched-tokens"
    ENFORCE_EAGER = "--enforce-eager"
    TENSOR_PARALLEL_SIZE = "--tensor-parallel-size"
    NO_ENABLE_PREFIX_CACHING = "--no-enable-prefix-caching"
    KV_CACHE_MEMORY_BYTES = "--kv-cache-memory-bytes"
    MM_PROCESSOR_CACHE_GB = "--mm-processor-cache-gb"


NEWEST: Final[Version] = (0, 33, 0)
"""The newest version whose options were checked."""

FIRST_VERSIONS: Final[dict[Flag, Version]] = dict.fromkeys(Flag, OLDEST) | {
    Flag.NO_ENABLE_PREFIX_CACHING: (0, 6, 5),
    Flag.KV_CACHE_MEMORY_BYTES: (0, 10, 2),
    Flag.MM_PROCESSOR_CACHE_GB: (0, 11, 0),
}
"""The first version that has each (vllm/engine/arg_utils.py of its wheel); `--mm-processor-cache-gb` may be older.
Before 0.6.5 prefix caching was off by default; `--kv-cache-memory`, which vLLM's own guide names, exists in none
(vllm-project/vllm#55834).
"""

COUNTS_PREFIXES_ONCE: Final[Version] = (0, 27, 0)
"""Since then a waiting request is not looked up again in each step (vllm-project/vllm#48860)."""

FIELD_VERSIONS: Final[dict[str, Version]] = {
    "prefix_queries_total": (0, 7, 3),
    "kv_cache_memory_bytes": (0, 10, 2),
    "awake": (0, 11, 1),
}
"""The first version that exports a field of EngineReading: a lower bound of the engine's version."""


class EngineArgs(Struct, frozen=True, kw_only=True):
    """What the engine was started with, as far as it is known.

    `at_least` is the lower bound of its version that its page shows. `sizes_cache_in_bytes` is whether
    kv_cache_memory_bytes is set, which overrides the utilization.
    """

    version: Version | None = None
    at_least: Version = OLDEST
    gpu_memory_utilization: float | None = None
    sizes_cache_in_bytes: bool = False
    kv_cache_memory_bytes: float | None = None
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None

    @property
    def known(self) -> Version:
        """The version, or its lower bound."""
        return self.at_least if self.version is None else self.version


def find_oldest_version(engines: Iterable[EngineReading]) -> Version:
    """Return the lower bound of the version that engines with these fields have."""
    first = (
        FIELD_VERSIONS[field]
        for each in engines
        for field in FIELD_VERSIONS
        if getattr(each, field) is not None
    )
    return max(first, default=OLDEST)


def add_page_settings(settings: EngineArgs, page: EnginePage) -> EngineArgs:
    """Fill in settings from the engine's page; known ones stay."""

    def read_common(field: str) -> Any:  # noqa: ANN401 - of any field
        values = {getattr(engine, field) for engine in page.engines}
        return values.pop() if len(values) == 1 else None

    size, batch = read_common("kv_cache_memory_bytes"), read_common("max_num_seqs")
    return replace(
        settings,
        gpu_memory_utilization=settings.gpu_memory_utilization
        or read_common("gpu_memory_utilization_ratio"),
        max_num_seqs=settings.max_num_seqs or (None if batch is None else int(batch)),
        at_least=max(settings.at_least, find_oldest_version(page.engines)),
        sizes_cache_in_bytes=settings.sizes_cache_in_bytes or size is not None,
        kv_cache_memory_bytes=settings.kv_cache_memory_bytes or size,
    )
