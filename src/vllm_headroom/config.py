"""Everything an operator can set: each setting, the sources that give it, and a line for each mistake in them."""

import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, NamedTuple, TypeVar, cast

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    SecretStr,
    ValidationError,
    field_validator,
)
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from vllm_headroom import inputs
from vllm_headroom.model import TokenBytes
from vllm_headroom.parse.profiles import PROFILES
from vllm_headroom.units import parse_size

PREFIX: Final = "HEADROOM_"
CONFIG: Final = "config"
"""What names the file; it is no setting itself."""

AUTO: Final = "auto"
PROFILE_NAMES: Final = (AUTO, *(each.name for each in PROFILES))


def from_text(read: Callable[[str], object]) -> BeforeValidator:
    """Return the validator that reads a text; what is none, as a default, is left to the type."""
    return BeforeValidator(lambda given: read(given) if isinstance(given, str) else given)


def parse_mapping(text: str) -> object:
    """Return what a text holds in YAML, of which JSON is a part."""
    from vllm_headroom.yaml_file import parse_yaml  # noqa: PLC0415 - YAML costs 25 ms of the start

    return parse_yaml(text.encode(errors="replace"), as_text=True)[0]


Bytes = Annotated[int, from_text(parse_size)]
File = Annotated[Path, from_text(inputs.parse_path)]
Redacted: Final = PlainSerializer(inputs.redact_url, when_used="json")
Url = Annotated[str, AfterValidator(inputs.parse_metrics_url), Redacted, Field(repr=False)]
Gpus = Annotated[Literal["auto", "all"] | tuple[str, ...], BeforeValidator(inputs.parse_gpus)]
Hidden: Final = PlainSerializer(lambda _: "***", when_used="json")
HeaderName = Annotated[str, from_text(inputs.parse_header_name)]
HeaderValue = Annotated[SecretStr, from_text(partial(inputs.match, inputs.HEADER_VALUE)), Hidden]
Headers = Annotated[dict[HeaderName, HeaderValue], from_text(parse_mapping)]
InAnyCase: Final = from_text(str.lower)
Host = Annotated[str, from_text(inputs.parse_host)]
Number = Annotated[float, from_text(inputs.parse_number)]
Whole = Annotated[int, from_text(inputs.parse_whole)]


def setting(default: object, word: str, accepts: str, *, shown: str = "", **limits: Any) -> Any:  # noqa: ANN401 - as pydantic's Field
    """Declare a setting: --help has `word` in place of its value, and `shown` where the default is no plain text."""
    words = {
        "word": word,
        "accepts": accepts,
        "default": shown or ("none" if default is None else str(default)),
    }
    return Field(default, json_schema_extra=cast("Any", words), **limits)


def seconds(default: float | None, low: float, high: float, *, shown: str = "") -> Any:  # noqa: ANN401 - as pydantic's Field
    """Declare a duration of `low` to `high` seconds."""
    accepts = f"a number of seconds from {low:g} to {high:g}"
    return setting(default, "SECONDS", accepts, shown=shown, ge=low, le=high)


def size(default: str | None, *, example: str = "", shown: str = "") -> Any:  # noqa: ANN401 - as pydantic's Field
    """Declare a size; `example` is one that is accepted, where there is no default to show."""
    accepts = f"a size such as {default or example}, or a number of bytes from 1 MiB on"
    n_bytes = None if default is None else parse_size(default)
    return setting(n_bytes, "SIZE", accepts, shown=default or shown)


FILE: Final = ("FILE", "the path of a file")
FOLDER: Final = ("DIRECTORY", "the path of a directory")


LINK: Final = r"^https?://[A-Za-z0-9._~:{}\[\]-]+(/[A-Za-z0-9._~:/@%+,={}\[\]-]*)?$"
"""Without user and password, which the page would show."""


class Settings(BaseSettings):
    """The daemon's settings, validated and frozen; the text below each is its description, for --help and docs."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        hide_input_in_errors=True,
        allow_inf_nan=False,
        env_prefix=PREFIX,
        env_prefix_target="all",
        enable_decoding=False,
    )

    no_options: ClassVar[frozenset[str]] = frozenset()
    """Settings that the command line does not take."""

    engine_url: Url = setting("http://127.0.0.1:8000/metrics", "URL", "an http or https URL")
    """Where the engine serves its metrics; a URL without a path gets /metrics."""
    engine_profile: Annotated[str, InAnyCase, Field(pattern=f"^({'|'.join(PROFILE_NAMES)})$")] = (
        setting(AUTO, "NAME", ", ".join(PROFILE_NAMES))
    )
    """Which engine's series to read; auto takes the first engine whose series are on the page."""
    engine_timeout_seconds: Number = seconds(4, 0.05, 60)
    """How long to wait for the engine's page; never longer than the sample interval."""
    engine_max_page_bytes: Bytes = size("4MiB")
    """The largest page to read from the engine; a larger one is a failure."""
    engine_bearer_token_file: File | None = setting(None, *FILE)
    """A file with the token to send to the engine as 'Authorization: Bearer ...'; read for every page."""
    engine_ca_file: File | None = setting(None, *FILE)
    """The certificates, in PEM, to trust for an https engine."""
    engine_headers: Headers = setting(
        {}, "JSON", "a mapping of header names to values, in JSON or YAML", shown="none"
    )
    """More headers to send to the engine; their values are never shown."""
    evict: Annotated[Literal["off", "dry-run", "on"], InAnyCase] = setting(
        "off", "MODE", "off, dry-run or on"
    )
    """Have Kubernetes evict this pod before a leak ends the engine; dry-run only logs and counts what it would do."""
    evict_seconds: Number = seconds(1800, 60, 86400)
    """Evict this pod when its engine leaks and may be out of memory within this time."""
    evict_quiet_hour: Whole | None = setting(
        None, "HOUR", "an hour of the day from 0 to 23, in UTC", ge=0, le=23
    )
    """In this hour, evict this pod already when its engine leaks and may be out of memory within a day."""
    gate_ready_seconds: Number | None = seconds(None, 60, 86400, shown="always open")
    """Close /gate/ready while the engine may be out of memory within this time and this pod is the one of its
    workload to restart (HEADROOM_EVICT=on)."""
    canary_interval_seconds: Number | None = seconds(None, 10, 3600)
    """How often to have an idle engine complete one token, to see that it does; without it, never."""
    sample_interval_seconds: Number = seconds(5, 0.1, 300)
    """Time from one sample of the engine and the GPUs to the next."""
    gpu_sample_interval_seconds: Number = seconds(1, 0.05, 60)
    """Time from one look at the GPUs' memory to the next, between samples, for its peak."""
    gpus: Gpus = setting(AUTO, "GPUS", "auto, all, or GPU indices or UUIDs separated by commas")
    """Which GPUs are the engine's: auto finds those its processes use, else takes the only visible one."""
    gpu_fatal_grace_seconds: Number = seconds(60, 0, 3600)
    """How long the driver may fail in a way that only a new container mends (NVML errors 17, 18 and 999) before the
    daemon ends with status 3."""
    reported_bytes: Bytes | None = size(None, example="72GiB")
    """What the engine should use of each GPU, to compare with what it holds; for an engine that does not say."""
    kv_bytes_per_token: Number | None = setting(
        None, "BYTES", "a number above 0, at most 1000000000", gt=0, le=10**9
    )
    """Bytes one token takes in the KV cache of one engine; without it or a model's configuration, the KV cache is
    known in tokens only."""
    model_config_: File | None = setting(
        None,
        "PATH",
        "the path of a model's config.json, or of the folder that has one",
        alias="model_config",
    )
    """The configuration of the model that the engine serves, for the bytes per token; without it, the file that
    vLLM's own processes load, where it is visible."""
    baseline_bytes_per_request: Bytes | None = size(None, example="9500kB", shown="learned")
    """What a running request should cost in GPU memory on each GPU at full load, to compare with; without it, it
    is learned."""
    host_memory_limit_bytes: Bytes | None = size(None, example="64GiB", shown="the kernel's")
    """What vLLM's container may take of the host's memory, where the kernel's own limit cannot be seen from here."""
    probe_dir: File | None = setting(None, *FOLDER)
    """The folder that the probe inside vLLM writes to, HEADROOM_PROBE_DIR for vLLM too; without it, what only the
    engine's processes know is absent."""
    listen_host: Host = setting(
        "",
        "HOST",
        "an address or name of this machine, or nothing for all interfaces, IPv4 and IPv6",
        shown="all interfaces, IPv4 and IPv6",
    )
    """The address to serve /metrics on."""
    listen_port: Whole = setting(9839, "PORT", "a port number from 0 to 65535", ge=0, le=65535)
    """The port to serve /metrics on; 0 takes any free one."""
    web_config_file: File | None = setting(None, *FILE)
    """TLS, client certificates, users and headers of the daemon's own pages: a web.config.yml as Prometheus's."""
    role: Annotated[Literal["serving", "batch", "swapped", "shared-gpu"], InAnyCase] = setting(
        "serving", "ROLE", "serving, batch, swapped or shared-gpu"
    )
    """What the engine is for, which alerts and the page respect: a batch server may queue and end; a swapped one
    sleeps while others take its GPU; on a shared GPU neighbours are planned."""
    runbooks_url: Annotated[str | None, Field(pattern=LINK)] = setting(
        None, "URL", "an http or https URL without user and password"
    )
    """Where alerts/runbooks is served, for the page to link to; the alert's name replaces {alert} in it, or else
    goes to its end. Without it there are no links."""
    state_dir: File | None = setting(None, *FOLDER)
    """A directory that only this daemon uses, for what survives its restart: what the leak detector learned, the
    engine's run, and the record of its last hours and of its exits, for vllm-headroom postmortem."""
    trace_file: File | None = setting(None, *FILE)
    """A file to record every sample in, as a trace for vllm-headroom replay."""
    trace_max_bytes: Bytes = size("64MiB")
    """At this size the trace becomes FILE.1, in place of an older one, and a new one begins."""
    log_format: Annotated[Literal["logfmt", "json"], InAnyCase] = setting(
        "logfmt", "FORMAT", "logfmt or json"
    )
    """How log lines are written, to stderr."""
    log_level: Annotated[Literal["debug", "info", "warning", "error"], InAnyCase] = setting(
        "info", "LEVEL", "debug, info, warning or error"
    )
    """The least serious lines to log."""

    @field_validator("*", mode="before")
    @classmethod
    def _strip(cls, given: object) -> object:
        return given.strip() if isinstance(given, str) else given

    @property
    def token_bytes(self) -> TokenBytes | None:
        """None here: vllm_headroom_tools.settings reads `model_config_` and overrides this."""
        return None

    @property
    def parse_model(self) -> Callable[[Path], TokenBytes | None] | None:
        """As `token_bytes`, of any model's configuration; None where the operator configured the bytes."""
        return None

    @property
    def model_problem(self) -> str:
        """Why the model's configuration gives no bytes per token, empty where it does or is not set."""
        return ""

    @classmethod
    def settings_customise_sources(
        cls,
        *_: Any,  # noqa: ANN401 - not ours to type
        **sources: Any,  # noqa: ANN401 - the same
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Take the values given alone: `read_settings` validates each source, also what another source overrides."""
        return (sources["init_settings"],)


DESCRIBED: Final = re.compile(
    r'^    (\w+): .+\n(?:     .+\n)*(?:    \)\n)?    """((?:.|\n)+?)"""', re.MULTILINE
)


def read_descriptions(kind: type[Settings]) -> dict[str, str]:
    """Return the text below each setting in the source; pydantic's own reading of it takes 50 ms of every start."""
    modules = {each.__module__: each for each in kind.__mro__ if issubclass(each, Settings)}
    sources = (inspect.getsource(sys.modules[name]) for name in modules)
    return {
        name: " ".join(text.split())
        for source in sources
        for name, text in DESCRIBED.findall(source)
    }


def words(field: FieldInfo) -> Mapping[str, str]:
    """Return what `setting` was given of a field: its `word` in --help, what it `accepts` and its `default`."""
    return cast("Mapping[str, str]", field.json_schema_extra)


def key(setting: str) -> str:
    """Return how the file spells a setting: pydantic uses the name `model_config`, so ours is `model_config_`."""
    return setting.removesuffix("_")


def variable(setting: str) -> str:
    """Return how the environment spells a setting."""
    return PREFIX + key(setting).upper()


class Given(NamedTuple):
    """A value as its author wrote it, and the name of it in its source."""

    name: str
    value: object


Source = Mapping[str, Given]
"""What one source gives, by the key of the setting."""

AnySettings = TypeVar("AnySettings", bound=Settings)
OF_A_SERVICE: Final = re.compile(
    r"HEADROOM_(?:\w+_)?(?:SERVICE_HOST|SERVICE_PORT(?:_\w+)?|PORT_\d+_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))?)=.*"
    r"|HEADROOM_(?:\w+_)?PORT=(?:tcp|udp|sctp)://.*",
    re.DOTALL,
)
"""What Kubernetes puts into every container's environment for a Service named headroom or headroom-anything."""

SHOWN: Final[Mapping[str, Callable[[object], str]]] = {
    "engine_url": inputs.show_url,
    "runbooks_url": inputs.show_url,
    "engine_headers": lambda _: "a value that is kept secret",
}
"""How a refused value that may hold a secret is shown."""


def read_settings(
    kind: type[AnySettings], options: Source, config: Given | None = None
) -> AnySettings | tuple[str, ...]:
    """Return the settings, or a line for each mistake, also for one in a value that another source overrides.

    The options beat the environment, where an empty variable counts as not set, and the environment beats the file,
    which `config` or HEADROOM_CONFIG names.
    """
    ours = {
        name: text
        for name, text in sorted(os.environ.items())
        if name.startswith(PREFIX) and text.strip()
    }
    known = [variable(name) for name in (*kind.model_fields, CONFIG)]
    values = EnvSettingsSource(kind)() | {CONFIG: ours.get(variable(CONFIG))}
    environment = {
        key: Given(variable(key), value) for key, value in values.items() if variable(key) in ours
    }
    strange = [
        name
        for name in ours
        if name not in known and not OF_A_SERVICE.fullmatch(f"{name}={ours[name]}")
    ]
    config = config or environment.get(CONFIG)
    file, mistakes = ({}, ()) if config is None else _read_file(kind, config)
    lines = [*_refused(kind, options), *(inputs.describe_unknown(name, known) for name in strange)]
    lines += [*_refused(kind, environment), *mistakes, *_refused(kind, file)]
    return tuple(lines) or kind.model_validate(_values({**file, **environment, **options}))


def _values(source: Source) -> dict[str, object]:
    return {key: given.value for key, given in source.items() if key != CONFIG}


def _refused(kind: type[Settings], source: Source) -> Iterator[str]:
    """Yield a line for each value that pydantic refuses, in the order in which they were given."""
    try:
        kind.model_validate(_values(source))
    except ValidationError as error:
        errors = {
            each["loc"][0]: each.get("ctx", {}).get("error")
            for each in error.errors(include_input=False)
        }
        accepted = {key(name): words(field)["accepts"] for name, field in kind.model_fields.items()}
        for name, given in source.items():
            if name in errors:
                shown = SHOWN.get(name, inputs.show_value)
                yield inputs.describe_refused(
                    given.name, given.value, accepted[name], errors[name], shown
                )


def _read_file(kind: type[Settings], config: Given) -> tuple[dict[str, Given], tuple[str, ...]]:
    """Return what the YAML file gives, where null counts as not set, and a line for each mistake in it."""
    from vllm_headroom.yaml_file import NotYamlError, read_yaml  # noqa: PLC0415 - YAML costs 25 ms of the start

    path = str(config.value)
    try:
        document, twice = read_yaml(Path(path), as_text=True)
    except OSError as error:
        return {}, (
            f"{config.name}: got {path!r} ({error.strerror}), accepts the path of a YAML file",
        )
    except NotYamlError as error:
        return {}, (f"{path}{error.place}: not YAML ({error.problem})",)
    if not isinstance(document, dict | None):
        return {}, (
            f"{path}: not a mapping, accepts settings such as 'sample_interval_seconds: 5'",
        )
    known = {key(name) for name in kind.model_fields}
    given = {
        str(name): Given(f"{name or 'a key that is no text'} in {path}", value)
        for name, value in (document or {}).items()
    }
    strange = (
        inputs.describe_unknown(each.name, known)
        for name, each in given.items()
        if name not in known
    )
    again = (f"{name} in {path}: given twice" for name in twice)
    return {
        name: each for name, each in given.items() if name in known and each.value is not None
    }, (*strange, *again)


def settings_yaml(settings: Settings) -> str:
    """Return what is in force as YAML that --config accepts, with stars for secrets."""
    import yaml  # noqa: PLC0415 - as above

    in_force = settings.model_dump(mode="json", exclude=set(settings.no_options), by_alias=True)
    return yaml.safe_dump(in_force, sort_keys=False, allow_unicode=True)
