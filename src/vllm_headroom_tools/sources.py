"""Settings from options, the environment and a file, with a line for each mistake."""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from pydantic import ValidationError
from pydantic_settings import EnvSettingsSource

from vllm_headroom.config import (
    VARIABLE_PREFIX,
    Settings,
    find_display,
    list_conflicts,
    name_key,
    name_variable,
)
from vllm_headroom.inputs import describe_refused, describe_unknown, show_url, show_urls, show_value

CONFIG: Final = "config"
"""The key of --config and HEADROOM_CONFIG. They name the settings file, and are not settings
themselves.
"""

AnySettings = TypeVar("AnySettings", bound=Settings)


class Entry(NamedTuple):
    """A value as it was written, and its name in its source."""

    name: str
    value: object


Entries = Mapping[str, Entry]
"""The values from one source, by the key of the setting."""


class SettingsSource(NamedTuple):
    """The values from one source.

    Each mistake in the names or the format of the source has a line.
    """

    entries: Entries
    mistakes: tuple[str, ...]


NO_SOURCE: Final = SettingsSource(entries={}, mistakes=())
"""The source that is used if no file is given."""

SERVICE_VARIABLE: Final = re.compile(
    r"HEADROOM_(?:\w+_)?"
    r"(?:SERVICE_HOST|SERVICE_PORT(?:_\w+)?|PORT_\d+_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))?)=.*"
    r"|HEADROOM_(?:\w+_)?PORT=(?:tcp|udp|sctp)://.*",
    re.DOTALL,
)
"""A variable that Kubernetes sets in each container for a Service named headroom or headroom-*."""

PROBE_VARIABLES: Final = frozenset({"HEADROOM_PROBE_SNAPSHOT", "HEADROOM_PROBE_PEAKS"})
"""Variables that only the probe reads. They belong in vLLM's environment, but the sidecar may have
the same environment.
"""

SHOW_SECRET: Final[Mapping[str, Callable[[object], str]]] = {
    "engine_url": show_url,
    "engines": show_urls,
    "runbooks_url": show_url,
    "engine_headers": lambda _: "a value that is kept secret",
}
"""The functions that display rejected values that may contain a secret, by setting key."""


def read_settings(
    kind: type[AnySettings], options: Entries, config: Entry | None = None
) -> AnySettings | tuple[str, ...]:
    """Return the settings, or a line for each mistake in any of the sources.

    Options take precedence over the environment. The environment takes precedence over the file.
    `config` names the file, or else HEADROOM_CONFIG does. An empty variable is treated as not set.
    Values that another source overrides are checked too.
    """
    # The options, the environment and the file are checked separately.
    environment = _read_environment(kind)
    config = config or environment.entries.get(CONFIG)
    file = NO_SOURCE if config is None else _read_file(kind, config)
    mistakes = (
        *_list_refused(kind, options),
        *environment.mistakes,
        *_list_refused(kind, environment.entries),
        *file.mistakes,
        *_list_refused(kind, file.entries),
    )
    if mistakes:
        return mistakes
    # Later sources in this order override earlier ones.
    merged = {**file.entries, **environment.entries, **options}
    settings = kind.model_validate(_list_values(merged))
    # Settings from different sources may conflict with each other.
    return list_conflicts(settings) or settings


def _list_values(entries: Entries) -> dict[str, object]:
    return {key: entry.value for key, entry in entries.items() if key != CONFIG}


def _list_refused(kind: type[Settings], entries: Entries) -> Iterator[str]:
    """Yield a line for each value that pydantic rejects, in the order of the entries."""
    try:
        kind.model_validate(_list_values(entries))
    except ValidationError as error:
        # pydantic's own messages are written for programmers and are not used. If one of our
        # parsers raised the error, the reason is in `ctx`. Any other error has no reason.
        reasons = {
            details["loc"][0]: details.get("ctx", {}).get("error")
            for details in error.errors(include_input=False)
        }
        accepts = {
            name_key(name): find_display(field).accepts for name, field in kind.model_fields.items()
        }
        for key, entry in entries.items():
            if key in reasons:
                show = SHOW_SECRET.get(key, show_value)
                yield describe_refused(entry.name, entry.value, accepts[key], reasons[key], show)


def _read_environment(kind: type[Settings]) -> SettingsSource:
    """Read the variables that begin with HEADROOM_; an empty variable is treated as not set."""
    variables = {
        name: text
        for name, text in sorted(os.environ.items())
        if name.startswith(VARIABLE_PREFIX) and text.strip()
    }
    values = EnvSettingsSource(kind)()
    # HEADROOM_CONFIG is not a field of the settings, so pydantic's result does not contain it.
    values[CONFIG] = variables.get(name_variable(CONFIG))
    entries = {
        key: Entry(name_variable(key), value)
        for key, value in values.items()
        if name_variable(key) in variables
    }
    setting_names = [name_variable(name) for name in (*kind.model_fields, CONFIG)]
    mistakes = []
    for name, text in variables.items():
        # A variable set by Kubernetes is not the operator's mistake.
        is_service = SERVICE_VARIABLE.fullmatch(f"{name}={text}") is not None
        is_known = name in setting_names or name in PROBE_VARIABLES
        if not is_known and not is_service:
            mistakes.append(describe_unknown(name, setting_names))
    return SettingsSource(entries=entries, mistakes=tuple(mistakes))


def _read_file(kind: type[Settings], config: Entry) -> SettingsSource:
    """Read the YAML file.

    Null is treated as not set. Invalid YAML is a mistake.
    """
    from vllm_headroom.yaml_file import NotYamlError, read_yaml  # noqa: PLC0415 - YAML costs 25 ms

    path = str(config.value)
    try:
        document, repeated_keys = read_yaml(Path(path), as_text=True)
    except OSError as error:
        accepts = "accepts the path of a YAML file"
        return SettingsSource({}, (f"{config.name}: got {path!r} ({error.strerror}), {accepts}",))
    except NotYamlError as error:
        return SettingsSource({}, (f"{path}{error.place}: not YAML ({error.problem})",))
    if not isinstance(document, dict | None):
        accepts = "accepts settings such as 'sample_interval_seconds: 5'"
        return SettingsSource({}, (f"{path}: not a mapping, {accepts}",))
    setting_keys = {name_key(name) for name in kind.model_fields}
    entries = {}
    mistakes = []
    for key, value in (document or {}).items():
        name = f"{key or 'a key that is no text'} in {path}"
        if str(key) not in setting_keys:
            mistakes.append(describe_unknown(name, setting_keys))
        elif value is not None:
            entries[str(key)] = Entry(name, value)
    mistakes += [f"{key} in {path}: given twice" for key in repeated_keys]
    return SettingsSource(entries=entries, mistakes=tuple(mistakes))


def format_settings(settings: Settings) -> str:
    """Return all effective settings as YAML that --config accepts, with secrets masked by stars."""
    import yaml  # noqa: PLC0415 - YAML costs 25 ms of the start

    in_force = settings.model_dump(mode="json", exclude=set(settings.no_options), by_alias=True)
    return yaml.safe_dump(in_force, sort_keys=False, allow_unicode=True)
