"""What an engine was started with."""

from __future__ import annotations

from dataclasses import dataclass, replace

from vllm_headroom.commands.advise.flags import OLDEST, SIZES_CACHE_IN_BYTES, Version
from vllm_headroom.model import EnginePage


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the engine was started with, as far as it is known.

    `version` is None where nobody told it; `at_least` is what its page shows it to be. `sizes_cache_in_bytes` is True
    where kv_cache_memory_bytes is set, so that the utilization means nothing.
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
        """The version that the engine has at least."""
        return self.at_least if self.version is None else self.version


def with_page(settings: Settings, page: EnginePage) -> Settings:
    """Return the settings with what the engine's page says of them; what is known already is believed."""
    ratios = {engine.gpu_memory_utilization_ratio for engine in page.engines}
    sizes = {engine.kv_cache_memory_bytes for engine in page.engines}
    size = sizes.pop() if len(sizes) == 1 else None
    utilization = settings.gpu_memory_utilization or (ratios.pop() if len(ratios) == 1 else None)
    if size is None:
        return replace(settings, gpu_memory_utilization=utilization)
    return replace(
        settings,
        gpu_memory_utilization=utilization,
        at_least=max(settings.at_least, SIZES_CACHE_IN_BYTES),
        sizes_cache_in_bytes=True,
        kv_cache_memory_bytes=settings.kv_cache_memory_bytes or size,
    )
