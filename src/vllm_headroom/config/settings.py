"""Everything an operator can set."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Final

from pydantic import ValidationInfo, field_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from vllm_headroom.config.connection import EngineConnection
from vllm_headroom.config.fields import (
    Gpus,
    LogFormat,
    LogLevel,
    Model,
    Size,
    file,
    seconds,
    setting,
    size,
)
from vllm_headroom.config.gates import GateSettings
from vllm_headroom.config.kinds import GPUS
from vllm_headroom.config.plain import PlainSettings

MAY_BE_EMPTY: Final = ("listen_host", "gate_name")


class Settings(GateSettings, EngineConnection, BaseSettings):
    """What the daemon is told, understood, checked and frozen."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        hide_input_in_errors=True,
        str_strip_whitespace=True,
        protected_namespaces=(),
    )

    no_options: ClassVar[frozenset[str]] = frozenset()
    """Settings that the command line does not take."""

    canary_interval_seconds: float | None = seconds(
        None, 10, 3600, "How often to have an idle engine complete one token, to see that it does; without it, never."
    )
    sample_interval_seconds: float = seconds(
        5, 0.1, 300, "Time from one sample of the engine and the GPUs to the next."
    )
    gpu_sample_interval_seconds: float = seconds(
        1, 0.05, 60, "Time from one look at the GPUs' memory to the next, between samples, for its peak."
    )
    gpus: Gpus = setting(
        "auto",
        "Which GPUs are the engine's: auto finds those its processes use, else takes the only visible one.",
        accepts=GPUS.accepts,
        word="GPUS",
    )
    gpu_fatal_grace_seconds: float = seconds(
        60,
        0,
        3600,
        "How long the driver may fail in a way that only a new container mends (NVML errors 17, 18 and 999) before the"
        " daemon ends with status 3.",
    )
    reported_bytes: Size | None = size(
        None,
        "What the engine should use of each GPU, to compare with what it holds; for an engine that does not say.",
        example="72GiB",
    )
    kv_bytes_per_token: float | None = setting(
        None,
        "Bytes one token takes in the KV cache of one engine; without it or a model's configuration, the KV cache is"
        " known in tokens only.",
        accepts="a number above 0, at most 1000000000",
        word="BYTES",
        gt=0,
        le=10**9,
    )
    model_config_: Model | None = setting(
        None,
        "The configuration of the model that the engine serves, to tell the bytes per token from, unless they are set.",
        accepts="the path of a model's config.json, or of the folder that has one",
        word="PATH",
    )
    baseline_bytes_per_request: Size | None = size(
        None,
        "What a running request should cost in GPU memory on each GPU at full load, to compare with; without it, it is "
        "learned.",
        example="9500kB",
        shown="learned",
    )
    host_memory_limit_bytes: Size | None = size(
        None,
        "What vLLM's container may take of the host's memory, where the kernel's own limit cannot be seen from here.",
        example="64GiB",
        shown="the kernel's",
    )
    probe_dir: Path | None = setting(
        None,
        "The folder that the probe inside vLLM writes to, HEADROOM_PROBE_DIR for vLLM too; without it, what only the"
        " engine's processes know is absent.",
        accepts="the path of a directory",
        word="DIRECTORY",
    )
    listen_host: str = setting(
        "",
        "The address to serve /metrics on.",
        accepts="an address or name of this machine, or nothing for all interfaces, IPv4 and IPv6",
        word="HOST",
        pattern=r"^[0-9A-Za-z.:_%-]*$",
        shown="all interfaces, IPv4 and IPv6",
    )
    listen_port: int = setting(
        9839,
        "The port to serve /metrics on; 0 takes any free one.",
        accepts="a port number from 0 to 65535",
        word="PORT",
        ge=0,
        le=65535,
    )
    web_config_file: Path | None = file(
        "TLS, client certificates, users and headers of the daemon's own pages: a web.config.yml as Prometheus's."
    )
    runbooks_url: str | None = setting(
        None,
        "Where alerts/runbooks is served, for the page to link to; {alert} in it stands for the alert's name, which"
        " else goes to its end. Without it there are no links.",
        accepts="an http or https URL",
        word="URL",
        pattern=r"^https?://[A-Za-z0-9._~:/@%+,={}\[\]-]+$",
    )
    state_dir: Path | None = setting(
        None,
        "A directory of this daemon's own, for what survives its restart: what the leak detector learned, the life of"
        " the engine, and the record of its last hours and of its ends, for vllm-headroom postmortem.",
        accepts="the path of a directory",
        word="DIRECTORY",
    )
    trace_file: Path | None = file("A file to record every sample in, as a trace for vllm-headroom replay.")
    trace_max_bytes: Size = size(
        "64MiB", "At this size the trace becomes FILE.1, in place of an older one, and a new one begins."
    )
    log_format: LogFormat = setting(
        "logfmt", "How log lines are written, to stderr.", accepts="logfmt or json", word="FORMAT"
    )
    log_level: LogLevel = setting(
        "info", "The least serious lines to log.", accepts="debug, info, warning or error", word="LEVEL"
    )

    def values(self) -> PlainSettings:
        """Return the daemon's settings as plain values, secrets included."""
        told = {name: getattr(self, name) for name in Settings.model_fields if name != "model_config_"}
        told["engine_headers"] = {name: value.get_secret_value() for name, value in self.engine_headers.items()}
        return PlainSettings(**told, model_shape=None if self.model_config_ is None else self.model_config_.shape)

    @field_validator("*", mode="before")
    @classmethod
    def _text(cls, value: object, info: ValidationInfo) -> object:
        """Refuse what a type would bend: a truth value to 1, an empty text to the file `.`, NUL to another name."""
        text = value.strip() if isinstance(value, str) else value
        if isinstance(text, bool) or (text == "" and info.field_name not in MAY_BE_EMPTY):
            raise ValueError
        if isinstance(text, str) and "\0" in text:
            raise ValueError
        return text

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003 - the signature is pydantic-settings'
        init_settings: PydanticBaseSettingsSource,
        *_: PydanticBaseSettingsSource,
        **__: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Take values from `load` alone: the built-in sources forget where a value was written, and stop at one."""
        return (init_settings,)
