"""What an engine was started with."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_headroom.commands.advise.flags import OLDEST, Version


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
