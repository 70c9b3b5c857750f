"""Everything an operator can set."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import InstanceOf, PlainSerializer, SecretStr
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from vllm_headroom.config.fields import (
    HEADERS,
    HOST,
    MODEL,
    PORT,
    PROFILE,
    URL,
    ModelFile,
    file,
    matching,
    seconds,
    setting,
    size,
)
from vllm_headroom.config.kinds import FOLDER, GPUS, Value, above_zero, bounded, choice, in_any_case
from vllm_headroom.config.plain import PlainSettings

Model = Annotated[InstanceOf[ModelFile], PlainSerializer(lambda model: str(model.path))]


class Settings(BaseSettings):
    """What the daemon is told, understood, checked and frozen; unset, a gate is always open."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, protected_namespaces=())

    no_options: ClassVar[frozenset[str]] = frozenset()
    """Settings that the command line does not take."""

    engine_url: str = setting(
        URL,
        "http://127.0.0.1:8000/metrics",
        "URL",
        "Where the engine serves its metrics; a URL without a path gets /metrics.",
        repr=False,
    )
    engine_profile: str = setting(
        PROFILE,
        "auto",
        "NAME",
        "Which engine's series to read; auto takes the first engine whose series are on the page.",
    )
    engine_timeout_seconds: float = seconds(
        4, 0.05, 60, "How long to wait for the engine's page; never longer than the sample interval."
    )
    engine_max_page_bytes: int = size("4MiB", "The largest page to read from the engine; a larger one is a failure.")
    engine_bearer_token_file: Path | None = file(
        "A file with the token to send to the engine as 'Authorization: Bearer ...'; read for every page."
    )
    engine_ca_file: Path | None = file("The certificates, in PEM, to trust for an https engine.")
    engine_headers: dict[str, SecretStr] = setting(
        HEADERS, {}, "JSON", "More headers to send to the engine; their values are never shown.", shown="none"
    )
    gate_ready_seconds: float | None = seconds(
        None,
        60,
        86400,
        "Close /gate/ready while the engine may be out of memory within this time.",
        shown="always open",
    )
    gate_ready_most_seconds: float = seconds(
        900, 60, 86400, "The longest that /gate/ready stays closed; then it stays open for as long."
    )
    gate_live_seconds: float | None = seconds(
        None,
        3600,
        604800,
        "Let /gate/live fail when an engine surely leaks and the quietest hour before its end is here, at most once in"
        " this time.",
        shown="always open",
    )
    gate_name: str = setting(
        matching(r"[^\0]{0,253}", "a name"),
        "",
        "NAME",
        "The name of this replica among those of its Service, by which they take turns: that of the pod.",
        shown="the host name, which is the pod's",
    )
    canary_interval_seconds: float | None = seconds(
        None, 10, 3600, "How often to have an idle engine complete one token, to see that it does; without it, never."
    )
    sample_interval_seconds: float = seconds(
        5, 0.1, 300, "Time from one sample of the engine and the GPUs to the next."
    )
    gpu_sample_interval_seconds: float = seconds(
        1, 0.05, 60, "Time from one look at the GPUs' memory to the next, between samples, for its peak."
    )
    gpus: Literal["auto", "all"] | tuple[str, ...] = setting(
        GPUS,
        "auto",
        "GPUS",
        "Which GPUs are the engine's: auto finds those its processes use, else takes the only visible one.",
    )
    gpu_fatal_grace_seconds: float = seconds(
        60,
        0,
        3600,
        "How long the driver may fail in a way that only a new container mends (NVML errors 17, 18 and 999) before the"
        " daemon ends with status 3.",
    )
    reported_bytes: int | None = size(
        None,
        "What the engine should use of each GPU, to compare with what it holds; for an engine that does not say.",
        example="72GiB",
    )
    kv_bytes_per_token: float | None = setting(
        Value(read=above_zero(bounded(float, 0, 10**9)), accepts="a number above 0, at most 1000000000"),
        None,
        "BYTES",
        "Bytes one token takes in the KV cache of one engine; without it or a model's configuration, the KV cache is"
        " known in tokens only.",
    )
    model_config_: Model | None = setting(
        MODEL,
        None,
        "PATH",
        "The configuration of the model that the engine serves, to tell the bytes per token from, unless they are set.",
    )
    baseline_bytes_per_request: int | None = size(
        None,
        "What a running request should cost in GPU memory on each GPU at full load, to compare with; without it, it is "
        "learned.",
        example="9500kB",
        shown="learned",
    )
    host_memory_limit_bytes: int | None = size(
        None,
        "What vLLM's container may take of the host's memory, where the kernel's own limit cannot be seen from here.",
        example="64GiB",
        shown="the kernel's",
    )
    probe_dir: Path | None = setting(
        FOLDER,
        None,
        "DIRECTORY",
        "The folder that the probe inside vLLM writes to, HEADROOM_PROBE_DIR for vLLM too; without it, what only the"
        " engine's processes know is absent.",
    )
    listen_host: str = setting(
        HOST, "", "HOST", "The address to serve /metrics on.", shown="all interfaces, IPv4 and IPv6"
    )
    listen_port: int = setting(PORT, 9839, "PORT", "The port to serve /metrics on; 0 takes any free one.")
    web_config_file: Path | None = file(
        "TLS, client certificates, users and headers of the daemon's own pages: a web.config.yml as Prometheus's."
    )
    runbooks_url: str | None = setting(
        matching(r"https?://[A-Za-z0-9._~:/@%+,={}\[\]-]+", "an http or https URL"),
        None,
        "URL",
        "Where alerts/runbooks is served, for the page to link to; {alert} in it stands for the alert's name, which"
        " else goes to its end. Without it there are no links.",
    )
    state_dir: Path | None = setting(
        FOLDER,
        None,
        "DIRECTORY",
        "A directory of this daemon's own, for what survives its restart: what the leak detector learned, the life of"
        " the engine, and the record of its last hours and of its ends, for vllm-headroom postmortem.",
    )
    trace_file: Path | None = file("A file to record every sample in, as a trace for vllm-headroom replay.")
    trace_max_bytes: int = size(
        "64MiB", "At this size the trace becomes FILE.1, in place of an older one, and a new one begins."
    )
    log_format: Literal["logfmt", "json"] = setting(
        in_any_case(choice(("logfmt", "json"))), "logfmt", "FORMAT", "How log lines are written, to stderr."
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        in_any_case(choice(("debug", "info", "warning", "error"))), "info", "LEVEL", "The least serious lines to log."
    )

    def values(self) -> PlainSettings:
        """Return the daemon's settings as plain values, secrets included."""
        told = {name: getattr(self, name) for name in Settings.model_fields if name != "model_config_"}
        told["engine_headers"] = {name: value.get_secret_value() for name, value in self.engine_headers.items()}
        return PlainSettings(**told, model_shape=None if self.model_config_ is None else self.model_config_.shape)

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
