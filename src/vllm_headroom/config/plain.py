"""The settings as plain values: what the daemon keeps of them, without what read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from vllm_headroom.derive.attribution import Selection
from vllm_headroom_tools.sizing.footprint import ModelShape

AUTO: Final = "auto"


def selected(names: str | tuple[str, ...]) -> Selection:
    """Return what `auto`, `all` or a list of names selects."""
    return Selection(listed=names) if isinstance(names, tuple) else Selection(everything=names == "all")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainSettings:
    """The values of `Settings`, under their names; `model_shape` is what `model_config_` says.

    A copy of the names, and worth it: pydantic takes 12 MiB, of which a daemon that runs for months needs nothing.
    """

    engine_url: str = field(repr=False)
    engine_profile: str
    engine_timeout_seconds: float
    engine_max_page_bytes: int
    engine_bearer_token_file: Path | None
    engine_ca_file: Path | None
    engine_headers: Mapping[str, str] = field(repr=False)
    gate_ready_seconds: float | None
    gate_ready_most_seconds: float
    gate_live_seconds: float | None
    gate_name: str
    canary_interval_seconds: float | None
    sample_interval_seconds: float
    gpu_sample_interval_seconds: float
    gpus: Literal["auto", "all"] | tuple[str, ...]
    gpu_fatal_grace_seconds: float
    reported_bytes: int | None
    kv_bytes_per_token: float | None
    model_shape: ModelShape | None
    baseline_bytes_per_request: int | None
    host_memory_limit_bytes: int | None
    probe_dir: Path | None
    listen_host: str
    listen_port: int
    web_config_file: Path | None
    runbooks_url: str | None
    state_dir: Path | None
    trace_file: Path | None
    trace_max_bytes: int
    log_format: Literal["logfmt", "json"]
    log_level: Literal["debug", "info", "warning", "error"]

    @property
    def profile(self) -> str | None:
        """Return the name of the profile that is forced, None for none."""
        return None if self.engine_profile == AUTO else self.engine_profile

    @property
    def selection(self) -> Selection:
        """Return `gpus` as the attribution understands it."""
        return selected(self.gpus)
