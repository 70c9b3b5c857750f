"""All settings, each with its type, its default and its help text."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, NamedTuple, cast

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    SecretStr,
    field_validator,
)
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from vllm_headroom import inputs
from vllm_headroom.model import USUAL_CONTAINER
from vllm_headroom.parse.profiles import PROFILES
from vllm_headroom.units import parse_size

VARIABLE_PREFIX: Final = "HEADROOM_"
"""The prefix of all environment variables of the sidecar."""

AUTO: Final = "auto"
"""A setting with this value lets the daemon detect the engine's profile or GPUs."""

PROFILE_NAMES: Final = (AUTO, *(profile.name for profile in PROFILES))


def from_text(parse: Callable[[str], object]) -> BeforeValidator:
    """Return a validator that parses text and leaves other values, such as defaults, unchanged."""

    def validate(value: object) -> object:
        if isinstance(value, str):
            return parse(value)
        return value

    return BeforeValidator(validate)


def parse_mapping(text: str) -> object:
    """Parse YAML, including JSON; raise NotYamlError if this fails."""
    from vllm_headroom.yaml_file import parse_yaml  # noqa: PLC0415 - YAML costs 25 ms of the start

    return parse_yaml(text.encode(errors="replace"), as_text=True).document


RedactedUrl: Final = PlainSerializer(inputs.redact_url, when_used="json")
RedactedValue: Final = PlainSerializer(lambda _: "***", when_used="json")

InAnyCase: Final = from_text(str.lower)
Bytes = Annotated[int, from_text(parse_size)]
FilePath = Annotated[Path, from_text(inputs.parse_path)]
Url = Annotated[str, AfterValidator(inputs.parse_metrics_url), RedactedUrl, Field(repr=False)]
Engines = Annotated[
    Literal["node"] | tuple[str, ...] | None,
    from_text(inputs.parse_engine_urls),
    PlainSerializer(inputs.redact_urls, when_used="json"),
    Field(repr=False),
]
GpuNames = Annotated[Literal["auto", "all"] | tuple[str, ...], BeforeValidator(inputs.parse_gpus)]
LogPlace = Annotated[str, from_text(inputs.parse_log_place)]
HeaderName = Annotated[str, from_text(inputs.parse_header_name)]
HeaderValue = Annotated[
    SecretStr,
    from_text(partial(inputs.require_match, inputs.HEADER_VALUE)),
    RedactedValue,
]
Headers = Annotated[dict[HeaderName, HeaderValue], from_text(parse_mapping)]
Host = Annotated[str, from_text(inputs.parse_listen_host)]
Number = Annotated[float, from_text(inputs.parse_number)]
Seconds = Annotated[float, from_text(inputs.parse_seconds)]
WholeNumber = Annotated[int, from_text(inputs.parse_whole_number)]


class Display(NamedTuple):
    """How a setting is shown in --help and in error messages."""

    metavar: str
    """The placeholder that --help shows for the value."""

    accepts: str
    """The accepted values, as the end of a sentence that begins with "accepts"."""

    default: str


def setting(
    default: object,
    description: str,
    *,
    metavar: str,
    accepts: str,
    shown_default: str = "",
    **limits: Any,  # noqa: ANN401 - as pydantic's Field
) -> Any:  # noqa: ANN401 - as pydantic's Field
    """Declare a setting with its help text and its accepted values.

    `shown_default` replaces the default in --help. `limits` are passed to pydantic's Field.
    """
    if not shown_default:
        shown_default = "none" if default is None else str(default)
    display = Display(metavar=metavar, accepts=accepts, default=shown_default)
    extra = cast("Any", {"display": display})
    return Field(default, description=description, json_schema_extra=extra, **limits)


def duration(
    default: float | None,
    description: str,
    *,
    low: float,
    high: float,
    shown_default: str = "",
) -> Any:  # noqa: ANN401 - as pydantic's Field
    """Declare a duration between `low` and `high` seconds."""
    return setting(
        default,
        description,
        metavar="SECONDS",
        accepts=f"a number of seconds from {low:g} to {high:g}",
        shown_default=shown_default,
        ge=low,
        le=high,
    )


def size_setting(
    default: str | None,
    description: str,
    *,
    example: str = "",
    shown_default: str = "",
) -> Any:  # noqa: ANN401 - as pydantic's Field
    """Declare a setting that holds a size.

    If the setting has no default, the help shows `example` as an accepted size. Raises ValueError
    if `default` is not a size.
    """
    return setting(
        None if default is None else parse_size(default),
        description,
        metavar="SIZE",
        accepts=f"a size such as {default or example}, or a number of bytes from 1 MiB on",
        shown_default=default or shown_default,
    )


def file_path(description: str) -> Any:  # noqa: ANN401 - as pydantic's Field
    """Declare a file path, which has no default."""
    return setting(None, description, metavar="FILE", accepts="the path of a file")


def directory_path(description: str) -> Any:  # noqa: ANN401 - as pydantic's Field
    """Declare a directory path, which has no default."""
    return setting(None, description, metavar="DIRECTORY", accepts="the path of a directory")


LINK: Final = r"^https?://[A-Za-z0-9._~:{}\[\]-]+(/[A-Za-z0-9._~:/@%+,={}\[\]-]*)?$"
"""A URL without a user or password, because the page would show them."""


RUNBOOKS_URL: Final = (
    "https://github.com/vllm-headroom/vllm-headroom/blob/main/alerts/runbooks/{alert}.md"
)
"""The runbooks in the public repository; alerts/generate.py and the charts use the same URL."""


class Settings(BaseSettings):
    """The daemon's settings, validated and frozen."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        hide_input_in_errors=True,
        allow_inf_nan=False,
        env_prefix=VARIABLE_PREFIX,
        env_prefix_target="all",
        enable_decoding=False,
    )

    no_options: ClassVar[frozenset[str]] = frozenset()
    """Settings that are not accepted on the command line."""

    engine_url: Url = setting(
        "http://127.0.0.1:8000/metrics",
        "Where the engine serves its metrics; a URL without a path gets /metrics.",
        metavar="URL",
        accepts="an http or https URL",
    )
    engines: Engines = setting(
        None,
        "Watch several engines: node finds every engine of this machine by /proc, else those at"
        " these URLs. Without it, the one engine of engine_url is watched.",
        metavar="ENGINES",
        accepts="node, or http or https URLs separated by commas",
    )
    engine_container: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")] = (
        setting(
            USUAL_CONTAINER,
            "The name of the engine's container: for commands that texts name, for engines that are"
            " found in pods with several containers, and for HEADROOM_ENGINE_LOG=kubernetes.",
            metavar="NAME",
            accepts="the name of a container",
        )
    )
    engine_profile: Annotated[str, InAnyCase, Field(pattern=f"^({'|'.join(PROFILE_NAMES)})$")] = (
        setting(
            AUTO,
            "Which engine's series to read; auto takes the first engine whose series are on the"
            " page.",
            metavar="NAME",
            accepts=", ".join(PROFILE_NAMES),
        )
    )
    engine_timeout_seconds: Seconds = duration(
        4,
        "How long to wait for the engine's page; never longer than the sample interval.",
        low=0.05,
        high=60,
    )
    engine_max_page_bytes: Bytes = size_setting(
        "4MiB",
        "The largest page to read from the engine; a larger one is a failure.",
    )
    engine_bearer_token_file: FilePath | None = file_path(
        "A file with the token to send to the engine as 'Authorization: Bearer ...'; read for"
        " every page."
    )
    engine_ca_file: FilePath | None = file_path(
        "The certificates, in PEM, to trust for an https engine."
    )
    engine_headers: Headers = setting(
        {},
        "More headers to send to the engine; their values are never shown.",
        metavar="JSON",
        accepts="a mapping of header names to values, in JSON or YAML",
        shown_default="none",
    )
    evict: Annotated[Literal["off", "dry-run", "on"], InAnyCase] = setting(
        "off",
        "Have Kubernetes evict the engine's pod before a leak ends the engine; dry-run only logs"
        " and counts what it would do.",
        metavar="MODE",
        accepts="off, dry-run or on",
    )
    evict_seconds: Seconds = duration(
        1800,
        "Evict the pod when its engine leaks and may be out of memory within this time.",
        low=60,
        high=86400,
    )
    evict_quiet_hour: WholeNumber | None = setting(
        None,
        "In this hour, evict the pod already when its engine leaks and may be out of memory"
        " within a day.",
        metavar="HOUR",
        accepts="an hour of the day from 0 to 23, in UTC",
        ge=0,
        le=23,
    )
    gate_ready_seconds: Seconds | None = duration(
        None,
        "Close /gate/ready while the engine may be out of memory within this time and this pod"
        " is the one of its workload to restart (HEADROOM_EVICT=on).",
        low=60,
        high=86400,
        shown_default="always open",
    )
    canary_interval_seconds: Seconds | None = duration(
        None,
        "How often to have an idle engine complete one token, to see that it does; without it,"
        " never.",
        low=10,
        high=3600,
    )
    sample_interval_seconds: Seconds = duration(
        5,
        "Time from one sample of the engine and the GPUs to the next.",
        low=0.1,
        high=300,
    )
    gpu_sample_interval_seconds: Seconds = duration(
        1,
        "Time from one look at the GPUs' memory to the next, between samples, for its peak.",
        low=0.05,
        high=60,
    )
    gpus: GpuNames = setting(
        AUTO,
        "Which GPUs are the engine's: auto finds those its processes use, else takes the only"
        " visible one.",
        metavar="GPUS",
        accepts="auto, all, or GPU indices or UUIDs separated by commas",
    )
    gpu_fatal_grace_seconds: Seconds = duration(
        60,
        "How long the driver may fail in a way that only a new container fixes (NVML errors 17,"
        " 18 and 999) before the daemon ends with status 3.",
        low=0,
        high=3600,
    )
    reported_bytes: Bytes | None = size_setting(
        None,
        "What the engine should use of each GPU, to compare with what it holds; for an engine"
        " that does not say.",
        example="72GiB",
    )
    kv_bytes_per_token: Number | None = setting(
        None,
        "Bytes one token takes in the KV cache of one engine; without it or a model's"
        " configuration, the KV cache is known in tokens only.",
        metavar="BYTES",
        accepts="a number above 0, at most 1000000000",
        gt=0,
        le=10**9,
    )
    # pydantic reserves the name `model_config`.
    model_config_: FilePath | None = setting(
        None,
        "The configuration of the model that the engine serves, for the bytes per token; without"
        " it, the file that vLLM's own processes load, where it is visible.",
        metavar="PATH",
        accepts="the path of a model's config.json, or of the folder that has one",
        alias="model_config",
    )
    baseline_bytes_per_request: Bytes | None = size_setting(
        None,
        "What a running request should cost in GPU memory on each GPU at full load, to compare"
        " with; without it, it is learned.",
        example="9500kB",
        shown_default="learned",
    )
    host_memory_limit_bytes: Bytes | None = size_setting(
        None,
        "What vLLM's container may take of the host's memory, where the kernel's own limit cannot"
        " be seen from here.",
        example="64GiB",
        shown_default="the kernel's",
    )
    probe_dir: FilePath | None = directory_path(
        "The folder that the probe inside vLLM writes to, HEADROOM_PROBE_DIR for vLLM too; without"
        " it, what only the engine's processes know is absent."
    )
    engine_log: LogPlace | None = setting(
        None,
        "The engine's own log, for its sizes at the start and the cause of an exit: a file or a"
        " pattern of files, journal:UNIT of systemd, or kubernetes for the container of this pod."
        " Without it no log is read.",
        metavar="PLACE",
        accepts="the path of a file, a pattern such as /var/log/vllm/*.log, journal:UNIT or"
        " kubernetes",
    )
    listen_host: Host = setting(
        "",
        "The address to serve /metrics on.",
        metavar="HOST",
        accepts="an address or name of this machine, or nothing for all interfaces, IPv4 and IPv6",
        shown_default="all interfaces, IPv4 and IPv6",
    )
    listen_port: WholeNumber = setting(
        9839,
        "The port to serve /metrics on; 0 takes any free one.",
        metavar="PORT",
        accepts="a port number from 0 to 65535",
        ge=0,
        le=65535,
    )
    web_config_file: FilePath | None = file_path(
        "TLS, client certificates, users and headers of the daemon's own pages: a web.config.yml"
        " as Prometheus's."
    )
    role: Annotated[Literal["serving", "batch", "swapped", "shared-gpu"], InAnyCase] = setting(
        "serving",
        "What the engine is for, which alerts and the page respect: a batch server may queue and"
        " end; a swapped one sleeps while others take its GPU; on a shared GPU neighbours are"
        " planned.",
        metavar="ROLE",
        accepts="serving, batch, swapped or shared-gpu",
    )
    runbooks_url: Annotated[str | None, Field(pattern=LINK)] = setting(
        RUNBOOKS_URL,
        "Where alerts/runbooks is served, for the page to link to; the alert's name replaces"
        " {alert} in it, or else goes to its end.",
        metavar="URL",
        accepts="an http or https URL without user and password",
        shown_default="those of this project's repository",
    )
    state_dir: FilePath | None = directory_path(
        "A directory that only this daemon uses, for what survives its restart: what the leak"
        " detector learned, the engine's run, and the record of its last hours and of its exits,"
        " for vllm-headroom postmortem."
    )
    trace_file: FilePath | None = file_path(
        "A file to record every sample in, as a trace for vllm-headroom replay."
    )
    trace_max_bytes: Bytes = size_setting(
        "64MiB",
        "At this size the trace becomes FILE.1, in place of an older one, and a new one begins.",
    )
    log_format: Annotated[Literal["logfmt", "json"], InAnyCase] = setting(
        "logfmt",
        "How log lines are written, to stderr.",
        metavar="FORMAT",
        accepts="logfmt or json",
    )
    log_level: Annotated[Literal["debug", "info", "warning", "error"], InAnyCase] = setting(
        "info",
        "The least serious lines to log.",
        metavar="LEVEL",
        accepts="debug, info, warning or error",
    )

    @field_validator("*", mode="before")
    @classmethod
    def _strip(cls, value: object) -> object:
        return value.strip() if isinstance(value, str) else value

    @classmethod
    def settings_customise_sources(
        cls,
        *_: Any,  # noqa: ANN401 - not ours to type
        **sources: Any,  # noqa: ANN401 - the same
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Make pydantic use only the values that are passed to the constructor.

        `read_settings` reads the sources itself and validates each source separately, including
        values that another source overrides.
        """
        return (sources["init_settings"],)


ONE_ENGINE_SETTINGS: Final[Mapping[str, str]] = {
    "engine_url": "the engines are those of engines",
    "gpus": "each engine's are found by its processes",
    "host_memory_limit_bytes": "each engine has its own",
    "gate_ready_seconds": "only the daemon's own pod has a gate",
    "trace_file": "a trace has one engine",
    "engine_log": "a log has one engine",
}
"""The settings that cannot be used with several engines, with the reason for each."""

FOUND_ENGINE_SETTINGS: Final[Mapping[str, str]] = {
    "evict": "the pod of a URL is not known",
}
"""Settings that cannot be used if the engines are given by URL, with reasons."""

SECRET_SETTINGS: Final = ("engine_bearer_token_file", "engine_headers")
"""Settings that cannot be used if the daemon finds the engines itself. Any process that looks like
an engine would receive the secret.
"""


def list_conflicts(settings: Settings) -> tuple[str, ...]:
    """Return a line for each configured setting that does not work with several engines."""
    if settings.engines is None:
        return ()
    # A setting counts as set if its value differs from its default.
    defaults = type(settings).model_construct()
    lines = []
    reasons = dict(ONE_ENGINE_SETTINGS)
    if settings.engines != "node":
        reasons |= FOUND_ENGINE_SETTINGS
    for key, reason in reasons.items():
        if getattr(settings, key) != getattr(defaults, key):
            lines.append(f"{name_variable(key)}: not with HEADROOM_ENGINES: {reason}")
    if settings.engines == "node":
        lines += [
            f"{name_variable(key)}: not with HEADROOM_ENGINES=node, which would send it to whatever"
            " looks like an engine: name the engines' URLs"
            for key in SECRET_SETTINGS
            if getattr(settings, key)
        ]
    return tuple(lines)


def find_display(field: FieldInfo) -> Display:
    """Return how a field is shown in --help and in error messages."""
    extra = cast("dict[str, Display]", field.json_schema_extra)
    return extra["display"]


def name_key(field_name: str) -> str:
    """Return the name of a setting in the configuration file.

    For the field `model_config_`, this is `model_config`.
    """
    return field_name.removesuffix("_")


def name_variable(field_name: str) -> str:
    """Return the name of a setting's environment variable."""
    return VARIABLE_PREFIX + name_key(field_name).upper()
