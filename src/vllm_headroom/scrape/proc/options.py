"""Read the options on vLLM's command line, as vLLM's own parser does."""

import re
from collections.abc import Callable, Mapping
from decimal import InvalidOperation
from typing import Any, Final, get_type_hints

from vllm_headroom.model import EngineOptions
from vllm_headroom.scrape.proc.servers import CommandLine, find_server, list_options
from vllm_headroom.units import LARGEST_EXACT_BYTES, parse_vllm_number

_SHORT_OPTIONS: Final = {
    "-tp": "tensor_parallel_size",
    "-pp": "pipeline_parallel_size",
    "-dp": "data_parallel_size",
    "-asc": "api_server_count",
}
_PARSERS_BY_TYPE: Final[Mapping[object, Callable[[str], Any]]] = {
    int | None: parse_vllm_number,
    float | None: float,
    str | None: str,
}
_PARSERS: Final = {
    name: _PARSERS_BY_TYPE[kind]
    for name, kind in get_type_hints(EngineOptions).items()
    if kind in _PARSERS_BY_TYPE
}
"""For each option, by its name in EngineOptions, how its value is parsed."""

_CONNECTOR_SIZES: Final = {
    "kv_connector_bytes": re.compile(r'"cpu_bytes_to_use"\s*:\s*"?(\d{1,15})(?!\d)'),
    "lmcache_gb": re.compile(
        r'"lmcache\.max_local_cpu_size"\s*:\s*"?(\d{1,6}(?:\.\d{1,6})?)(?!\d)'
    ),
}
"""The patterns of the sizes in the JSON of --kv-transfer-config, by the field of EngineOptions.
Each connector in this JSON may have a size (vllm/v1/kv_offload/, LMCache's config.py).
"""

_MAX_SHOWN_CHARACTERS: Final = 4096
"""This many characters of a command line are shown, because some lines are megabytes long."""

_MAX_OPTION_NAMES: Final = 1000
"""One command line may have at most this many options. vLLM has about 300."""

_MAX_SEARCHED_CHARACTERS: Final = 2**16
"""This many characters of an argument are searched for secrets. They are more than the characters
that are shown, because a pattern cannot match a secret whose end is cut off.
"""

_SECRET_OPTION: Final = re.compile(
    r"--[\w-]{0,60}(key|token|password|secret|credentials?)$", re.IGNORECASE
)
_SECRETS: Final = re.compile(
    # Secrets in URLs.
    r"(?P<before>://)[^/\s]+(?=@)"
    # Secrets in JSON and in NAME=VALUE.
    r"|(?P<name>(?:key|token|password|secret)[\"']?\s?[:=]\s?[\"']?)[^\"',}\s]+"
    r"|(?P<start>\b(?:hf_|sk-|Bearer\s))[\w.~+/-]{8,}",
    re.IGNORECASE,
)
_STARS: Final = "***"
_STARRED: Final = rf"\g<before>\g<name>\g<start>{_STARS}"


def read_options(command: CommandLine) -> EngineOptions | None:
    """Return what the command line of a vLLM server sets; None for any other command line.

    As in vLLM, an option may have underscores or dashes, and its value follows a space or `=`. If
    an option is given several times, its last value counts. If a value has a wrong type, it is
    ignored.
    """
    server = find_server(command) if command else None
    if server is None or server.product != "vLLM":
        return None
    texts: dict[str, str] = {}
    values: dict[str, Any] = {}
    for argument, text in list_options(command):
        name = _find_option_name(argument)
        if name is None:
            continue
        # The last value of an option counts, as in vLLM's argparse.
        texts[name] = text
        if name in _PARSERS:
            value = _parse_value(name, text)
            if value is not None:
                values[name] = value
    if "model" not in values:
        model = _find_positional_model(command)
        if model is not None:
            values["model"] = model
    # The connector's settings are JSON within an option. Patterns find the sizes in it.
    connector = texts.get("kv_transfer_config", "")
    for name, pattern in _CONNECTOR_SIZES.items():
        sizes = pattern.findall(connector)
        if sizes:
            values[name] = sum(map(float, sizes))
    return EngineOptions(
        **values, option_names=tuple(texts)[:_MAX_OPTION_NAMES], command=star_secrets(command)
    )


def _find_option_name(argument: str) -> str | None:
    """Return an option's long name with underscores; None for an argument that is no option."""
    if argument in _SHORT_OPTIONS:
        return _SHORT_OPTIONS[argument]
    if argument.startswith("--") and argument != "--":
        return argument[2:].replace("-", "_")
    return None


def _find_positional_model(command: CommandLine) -> str | None:
    """Return the model in `vllm serve MODEL`; None if no argument or an option follows."""
    if "serve" not in command[:-1]:
        return None
    argument = command[command.index("serve") + 1]
    if argument.startswith("-"):
        return None
    return argument


def _parse_value(name: str, text: str) -> Any:  # noqa: ANN401 - of the type in EngineOptions
    """Return the value of an option; None if it has another type or is out of bounds.

    A text must not be longer than what is shown. A number must be from 0 to an exact integer, and
    the ratio gpu_memory_utilization must not be above 1.
    """
    try:
        value = _PARSERS[name](text)
    # The value is "auto", or another option is in its place.
    except (ValueError, InvalidOperation):
        return None
    if isinstance(value, str):
        if len(value) > _MAX_SHOWN_CHARACTERS:
            return None
        return value
    max_value = 1 if name == "gpu_memory_utilization" else LARGEST_EXACT_BYTES
    return value if 0 <= value <= max_value else None


def star_secrets(command: CommandLine) -> str:
    """Return a command line to show, with its secrets replaced by stars.

    Secrets are all values of an option with a secret's name, and any text that looks like a secret.
    If a line is too long, it is cut and ends with "...".
    """
    shown_arguments: list[str] = []
    room_characters = _MAX_SHOWN_CHARACTERS
    is_secret_value = False
    for argument in command:
        if argument.startswith("-"):
            # Until the next option, values belong to this one.
            is_secret_value = bool(_SECRET_OPTION.match(argument))
            shown = _star_argument(argument)[:room_characters]
        elif is_secret_value:
            # The option may take several values, and all values up to the next option are secret.
            shown = _STARS
        else:
            shown = _star_argument(argument)[:room_characters]
        shown_arguments.append(shown)
        room_characters -= len(shown) + 1
        if room_characters <= 0:
            return f"{' '.join(shown_arguments)[:_MAX_SHOWN_CHARACTERS]}..."
    return " ".join(shown_arguments)


def _star_argument(argument: str) -> str:
    """Return the start of an argument, with all that looks like a secret replaced by stars."""
    return _SECRETS.sub(_STARRED, argument[:_MAX_SEARCHED_CHARACTERS])
