"""Read the options on vLLM's command line in the same way as vLLM's own parser."""

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
"""How each option's value is parsed, keyed by the option's name in EngineOptions."""

_CONNECTOR_SIZES: Final = {
    "kv_connector_bytes": re.compile(r'"cpu_bytes_to_use"\s*:\s*"?(\d{1,15})(?!\d)'),
    "lmcache_gb": re.compile(
        r'"lmcache\.max_local_cpu_size"\s*:\s*"?(\d{1,6}(?:\.\d{1,6})?)(?!\d)'
    ),
}
"""Patterns for the sizes in the JSON of --kv-transfer-config, by field of EngineOptions. Each
connector in this JSON may have a size (vllm/v1/kv_offload/, LMCache's config.py).
"""

_MAX_SHOWN_CHARACTERS: Final = 4096
"""How many characters of a command line are shown. Some command lines are megabytes long."""

_MAX_OPTION_NAMES: Final = 1000
"""The maximum number of options kept from one command line. vLLM has about 300."""

_MAX_SEARCHED_CHARACTERS: Final = 2**16
"""The number of characters of an argument that are searched for secrets. More characters are
searched than shown. A pattern cannot match a secret whose end is cut off.
"""

_SECRET_OPTION: Final = re.compile(
    r"--[\w-]{0,60}(key|token|password|secret|credentials?)$", re.IGNORECASE
)
_SECRETS: Final = re.compile(
    # Secrets in URLs.
    r"(?P<before>://)[^/\s]+(?=@)"
    # The pattern matches secrets in JSON and in NAME=VALUE.
    r"|(?P<name>(?:key|token|password|secret)[\"']?\s?[:=]\s?[\"']?)[^\"',}\s]+"
    r"|(?P<start>\b(?:hf_|sk-|Bearer\s))[\w.~+/-]{8,}",
    re.IGNORECASE,
)
_STARS: Final = "***"
_STARRED: Final = rf"\g<before>\g<name>\g<start>{_STARS}"


def read_options(command: CommandLine) -> EngineOptions | None:
    """Return the options on the command line of a vLLM server.

    As in vLLM, an option may have underscores or dashes. The value of an option follows a space or
    `=`. If an option is given more than once, its last value is used. Values of the wrong type are
    ignored. Returns None for any other command line.
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
        # The last value of an option is used, as in vLLM's argparse.
        texts[name] = text
        if name in _PARSERS:
            value = _parse_value(name, text)
            if value is not None:
                values[name] = value
    if "model" not in values:
        model = _find_positional_model(command)
        if model is not None:
            values["model"] = model
    # The option's value is JSON with the connector's settings. The sizes are found with patterns.
    connector = texts.get("kv_transfer_config", "")
    for name, pattern in _CONNECTOR_SIZES.items():
        sizes = pattern.findall(connector)
        if sizes:
            values[name] = sum(map(float, sizes))
    return EngineOptions(
        **values, option_names=tuple(texts)[:_MAX_OPTION_NAMES], command=star_secrets(command)
    )


def _find_option_name(argument: str) -> str | None:
    """Return an option's long name with underscores.

    Returns None if the argument is not an option.
    """
    if argument in _SHORT_OPTIONS:
        return _SHORT_OPTIONS[argument]
    if argument.startswith("--") and argument != "--":
        return argument[2:].replace("-", "_")
    return None


def _find_positional_model(command: CommandLine) -> str | None:
    """Return the model in `vllm serve MODEL`.

    Returns None if an option or nothing follows `serve`.
    """
    if "serve" not in command[:-1]:
        return None
    argument = command[command.index("serve") + 1]
    if argument.startswith("-"):
        return None
    return argument


def _parse_value(name: str, text: str) -> Any:  # noqa: ANN401 - of the type in EngineOptions
    """Return the value of an option.

    A text must not exceed _MAX_SHOWN_CHARACTERS. A number must be between 0 and
    LARGEST_EXACT_BYTES, and gpu_memory_utilization must not exceed 1. Returns None if the value has
    the wrong type or is out of bounds.
    """
    try:
        value = _PARSERS[name](text)
    # The value is "auto", or the next argument is another option.
    except (ValueError, InvalidOperation):
        return None
    if isinstance(value, str):
        if len(value) > _MAX_SHOWN_CHARACTERS:
            return None
        return value
    max_value = 1 if name == "gpu_memory_utilization" else LARGEST_EXACT_BYTES
    return value if 0 <= value <= max_value else None


def star_secrets(command: CommandLine) -> str:
    """Return a command line for display, with its secrets replaced by asterisks.

    If an option's name indicates a secret, all of its values are treated as secrets. So is any text
    that looks like a secret. A command line that is too long is cut off and ends with "...".
    """
    shown_arguments: list[str] = []
    room_characters = _MAX_SHOWN_CHARACTERS
    is_secret_value = False
    for argument in command:
        if argument.startswith("-"):
            # All values up to the next option belong to this option.
            is_secret_value = bool(_SECRET_OPTION.match(argument))
            shown = _star_argument(argument)[:room_characters]
        elif is_secret_value:
            # The option may take several values, all of which are secret.
            shown = _STARS
        else:
            shown = _star_argument(argument)[:room_characters]
        shown_arguments.append(shown)
        room_characters -= len(shown) + 1
        if room_characters <= 0:
            return f"{' '.join(shown_arguments)[:_MAX_SHOWN_CHARACTERS]}..."
    return " ".join(shown_arguments)


def _star_argument(argument: str) -> str:
    """Return the start of an argument, with everything that looks like a secret replaced."""
    return _SECRETS.sub(_STARRED, argument[:_MAX_SEARCHED_CHARACTERS])
