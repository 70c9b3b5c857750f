"""Read what vLLM's command line sets, as vLLM's own parser does."""

import re
from collections.abc import Callable, Mapping
from decimal import InvalidOperation
from typing import Any, Final, get_type_hints

from vllm_headroom.model import EngineOptions
from vllm_headroom.scrape.proc.servers import find_server, list_options
from vllm_headroom.units import MOST_BYTES, parse_vllm_number

_SHORT: Final = {
    "-tp": "tensor_parallel_size",
    "-pp": "pipeline_parallel_size",
    "-dp": "data_parallel_size",
    "-asc": "api_server_count",
}
_READS: Final[Mapping[object, Callable[[str], Any]]] = {
    int | None: parse_vllm_number,
    float | None: float,
    str | None: str,
}
_VALUES: Final = {
    name: _READS[kind] for name, kind in get_type_hints(EngineOptions).items() if kind in _READS
}
_CONNECTOR: Final = {
    "kv_connector_bytes": re.compile(r'"cpu_bytes_to_use"\s*:\s*"?(\d{1,15})(?!\d)'),
    "lmcache_gb": re.compile(
        r'"lmcache\.max_local_cpu_size"\s*:\s*"?(\d{1,6}(?:\.\d{1,6})?)(?!\d)'
    ),
}
"""Sizes in the JSON of --kv-transfer-config, of any of its connectors (vllm/v1/kv_offload/, LMCache's config.py)."""

_LONGEST_SHOWN: Final = 4096
"""Characters of a command line that are shown: some are megabytes."""

_MOST_NAMES: Final = 1000
"""Options in one command line: vLLM has about 300."""

_LONGEST_READ: Final = 2**16
"""Characters of an argument that are searched for secrets, more than are shown: a cut hides where a secret ends."""

_NAMES_A_SECRET: Final = re.compile(
    r"--[\w-]{0,60}(key|token|password|secret|credentials?)$", re.IGNORECASE
)
_SECRETS: Final = re.compile(
    r"(?P<before>://)[^/\s]+(?=@)"  # in URLs
    r"|(?P<name>(?:key|token|password|secret)[\"']?\s?[:=]\s?[\"']?)[^\"',}\s]+"  # in JSON and NAME=VALUE
    r"|(?P<start>\b(?:hf_|sk-|Bearer\s))[\w.~+/-]{8,}",
    re.IGNORECASE,
)
_STARS: Final = r"\g<before>\g<name>\g<start>***"


def read_options(command: tuple[str, ...]) -> EngineOptions | None:
    """Return what a vLLM's command line sets; None for any other program's.

    vLLM accepts an option with underscores or dashes, and its value behind a space or `=`; of several the last counts.
    What does not have the option's type is as if it was not given.
    """
    server = find_server(command) if command else None
    if server is None or server.product != "vLLM":
        return None
    pairs = [
        (_SHORT.get(name) or name[2:].replace("-", "_"), value)
        for name, value in list_options(command)
        if name in _SHORT or name[:2] == "--" != name
    ]
    found = {
        name: value
        for name, text in pairs
        if name in _VALUES and (value := _read(name, text)) is not None
    }
    if "model" not in found and "serve" in command[:-1]:
        named = command[command.index("serve") + 1]
        found |= {} if named.startswith("-") else {"model": named}
    connector = dict(pairs).get("kv_transfer_config", "")
    found |= {
        name: sum(map(float, sizes))
        for name, each in _CONNECTOR.items()
        if (sizes := each.findall(connector))
    }
    given = tuple(dict.fromkeys(name for name, _ in pairs))[:_MOST_NAMES]
    return EngineOptions(**found, option_names=given, command=star_secrets(command))


def _read(name: str, text: str) -> Any:  # noqa: ANN401 - of the type in EngineOptions
    try:
        value = _VALUES[name](text)
    except (ValueError, InvalidOperation):  # "auto", or another option where none has a value
        return None
    if isinstance(value, str):
        return value if len(value) <= _LONGEST_SHOWN else None
    return value if 0 <= value <= (1 if name == "gpu_memory_utilization" else MOST_BYTES) else None


def star_secrets(command: tuple[str, ...]) -> str:
    """Return a command line to show: the values of options that name a secret, and what looks like one, are stars."""
    shown, is_secret, room = [], False, _LONGEST_SHOWN
    for argument in command:
        is_option = argument.startswith("-")
        is_secret = (is_option and bool(_NAMES_A_SECRET.match(argument))) or (
            is_secret and not is_option
        )
        shown.append(
            "***"
            if is_secret and not is_option
            else _SECRETS.sub(_STARS, argument[:_LONGEST_READ])[:room]
        )
        room -= len(shown[-1]) + 1
        if room <= 0:
            return f"{' '.join(shown)[:_LONGEST_SHOWN]}..."
    return " ".join(shown)
