"""Recognise an engine's server by its command line, and find the port that it serves."""

import re
from collections.abc import Iterator
from itertools import chain
from typing import Final

from msgspec import Struct

from vllm_headroom.vocabulary import Role

_INTERPRETER: Final = re.compile(r"(python|pypy)[\d.]*")
_MODULE_OPTION: Final = re.compile(r"-[A-Za-z]*m")
_OPTIONS_WITH_VALUE: Final = ("-X", "-W")


CommandLine = tuple[str, ...]
"""A process's command line: its program and arguments."""


class ServerKind(Struct, frozen=True, kw_only=True):
    """How to recognise a kind of server, and how such a server chooses its port."""

    product: str
    commands: tuple[str, ...]
    """The prefixes of the server's command line, without an interpreter. Each is a program or
    module, followed by the subcommand if the program has several.
    """
    scripts: tuple[str, ...] = ()
    """The path suffixes of scripts that start the server."""
    default_port: int
    """The port if it is not set by an option or by the environment variable."""
    port_options: tuple[str, ...] = ("--port",)
    port_variable: str = ""
    """The environment variable that sets the port if no option does."""
    page_path: str = "/metrics"
    """The path of the server's metrics page."""
    options_hiding_port: frozenset[str] = frozenset()
    """The port is unknown if one of these options is set without a port option."""
    titles: tuple[tuple[str, Role], ...] = ()
    """The title prefixes of the server's processes, with their roles. Like process names, they have
    at most 15 characters. The first match is used.
    """


SERVERS: Final = (
    ServerKind(
        product="vLLM",
        commands=(
            *("vllm.entrypoints.openai.api_server", "vllm.entrypoints.api_server"),
            *("vllm serve", "vllm.entrypoints.cli.main serve", "vllm-rs serve", "vllm-rs frontend"),
        ),
        scripts=("/vllm/entrypoints/openai/api_server.py",),
        default_port=8000,
        # The port is in a file, or there is none (vllm/entrypoints/openai/cli_args.py,
        # cli/serve.py).
        options_hiding_port=frozenset({"--config", "--uds", "--headless"}),
        # vLLM 0.10.1 and newer set titles (`set_process_title`). Ray names its processes after the
        # actor's class.
        titles=(
            ("VLLM::APIServer", Role.API_SERVER),
            ("VLLM::ExternalL", Role.API_SERVER),
            ("VLLM::EngineCor", Role.ENGINE_CORE),
            ("VLLM::DPEngineC", Role.ENGINE_CORE),
            ("VLLM::Worker", Role.WORKER),
            ("VLLM::", Role.OTHER),
            ("ray::RayWorker", Role.WORKER),
            ("ray::EngineCore", Role.ENGINE_CORE),
            ("ray::DPMoEEngin", Role.ENGINE_CORE),
        ),
    ),
    ServerKind(
        product="SGLang",
        commands=("sglang.launch_server", "sglang serve"),
        scripts=("/sglang/launch_server.py",),
        default_port=30000,
        options_hiding_port=frozenset({"--config"}),
        titles=(("sglang::schedul", Role.ENGINE_CORE), ("sglang::", Role.OTHER)),
    ),
    ServerKind(
        product="TensorRT-LLM",
        commands=("trtllm-serve",),
        default_port=8000,
        page_path="/prometheus/metrics",
    ),
    ServerKind(
        product="LMDeploy",
        commands=("lmdeploy serve",),
        default_port=23333,
        port_options=("--server-port",),
    ),
    ServerKind(
        product="Text Generation Inference",
        commands=("text-generation-launcher", "text-generation-router"),
        default_port=3000,
        port_options=("--port", "-p"),
        port_variable="PORT",  # The server's image sets PORT=80.
        titles=(("text-generation-server", Role.WORKER),),
    ),
    ServerKind(
        product="llama.cpp",
        commands=("llama-server",),
        default_port=8080,
        port_variable="LLAMA_ARG_PORT",
    ),
    ServerKind(
        product="Aphrodite",
        commands=("aphrodite.endpoints.openai.api_server", "aphrodite run", "aphrodite serve"),
        default_port=2242,
        options_hiding_port=frozenset({"--config", "--uds"}),
    ),
    ServerKind(
        product="Dynamo",
        commands=("dynamo.frontend", "dynamo.vllm", "dynamo.sglang", "dynamo.trtllm"),
        default_port=8000,
        port_options=("--http-port",),
        port_variable="DYN_HTTP_PORT",
    ),
)
"""Every kind of server that the daemon recognises. The titles were observed or taken from the
server's source.
"""


_COMMANDS: Final = tuple(chain.from_iterable(server.commands for server in SERVERS))
_FIRST_WORDS: Final = {re.split("[ .]", command)[0] for command in _COMMANDS}
_ANY_SERVER: Final = re.compile("|".join(sorted(_FIRST_WORDS)))
_TITLE_ROLES: Final = tuple(chain.from_iterable(server.titles for server in SERVERS))
_TITLES: Final = tuple(title for title, _ in _TITLE_ROLES)


def find_role(command: CommandLine) -> Role | None:
    """Return a process's role from its title or command line, or None.

    A process without a title that runs a server has the role API_SERVER.
    """
    program = command[0]
    if program.startswith(_TITLES):
        return next(role for title, role in _TITLE_ROLES if program.startswith(title))
    return Role.API_SERVER if find_server(command) else None


def find_server(command: CommandLine) -> ServerKind | None:
    """Return the kind of server that this command line runs, or None.

    A command line that only mentions a server does not run one. An example is an editor's command
    line.
    """
    # This is the fast path: most processes on a host do not mention a server. The check takes a
    # microsecond.
    if not _ANY_SERVER.search("\0".join(command)):
        return None
    if _INTERPRETER.fullmatch(_strip_folder(command[0])):
        command = _strip_interpreter(command)
    program = _strip_folder(command[0])
    subcommand = command[1] if len(command) > 1 else ""
    program_and_subcommand = f"{program} {subcommand} "
    for server in SERVERS:
        # A script is recognised by its path, which is directly followed by its own options.
        if server.scripts and command[0].endswith(server.scripts):
            return server
        if any(program_and_subcommand.startswith(f"{start} ") for start in server.commands):
            return server
    return None


def find_default_port(command: CommandLine) -> int | None:
    """Return the default port of the server in a command line or title.

    Returns None if the port is unknown.
    """
    server = find_server(command)
    if server is not None:
        return server.default_port
    for titled_server in SERVERS:
        if any(command[0].startswith(title) for title, _ in titled_server.titles):
            return titled_server.default_port
    return None


def _strip_interpreter(command: CommandLine) -> CommandLine:
    """Return the script or module that an interpreter's command line runs, with its arguments.

    If the interpreter runs no script or module, the result is one empty argument.
    """
    position = 1
    while position < len(command):
        argument = command[position]
        if _MODULE_OPTION.fullmatch(argument):
            position += 1
            break
        if not argument.startswith("-"):
            break
        # If the option has a value, the value is the next argument.
        position += 2 if argument in _OPTIONS_WITH_VALUE else 1
    return command[position:] or ("",)


_SUPERVISOR_OPTIONS: Final = frozenset({"--data-parallel-multi-port-external-lb", "-dpm"})
_LOCAL_SIZE_OPTIONS: Final = frozenset({"--data-parallel-size-local", "-dpl"})
MAX_PORT: Final = 65535
_MAX_DIGITS: Final = 5
"""The number of digits of the largest port."""


def is_supervisor(command: CommandLine) -> bool:
    """Return whether this vLLM process only starts a server for each data-parallel rank."""
    return not _SUPERVISOR_OPTIONS.isdisjoint(command)


def list_options(command: CommandLine) -> Iterator[tuple[str, str]]:
    """Yield each argument as an option: the text before any `=`, and the value.

    The value is the text after `=` or, without `=`, the next argument. Only the caller knows which
    arguments are options.
    """
    for argument, next_argument in zip(command, (*command[1:], ""), strict=True):
        name, separator, value = argument.partition("=")
        yield name, value if separator else next_argument


def find_server_port(
    command: CommandLine,
    wanted_port: int | None = None,
    parent_command: CommandLine = (),
) -> int | None:
    """Return a server's port from its command line, or None if unknown.

    The last port option determines the port. Without a port option, the result is the default port
    of this kind of server. If an environment variable may change the default port, the default is
    returned only if `wanted_port` is None or the default. A supervisor's ranks get their ports from
    the supervisor, whose command line is `parent_command`.
    """
    if is_supervisor(parent_command):
        return _find_rank_port(command, parent_command)
    server = find_server(command) if command else None
    if server is None:
        return None
    options = list(list_options(command))
    # As in argparse, the last of several values is used.
    ports = [value for name, value in options if name in server.port_options]
    if ports:
        return _parse_port(ports[-1])
    # For example, the options name a settings file, or a socket instead of a port.
    if any(name in server.options_hiding_port for name, _ in options):
        return None
    if server.port_variable and wanted_port not in {None, server.default_port}:
        return None
    return server.default_port


def _find_rank_port(command: CommandLine, supervisor_command: CommandLine) -> int | None:
    """Return the port of a supervisor's rank, or None if unknown.

    The ports of ranks are consecutive, starting at the supervisor's port
    (vllm/entrypoints/openai/dp_supervisor.py).
    """
    sizes = [
        value for name, value in list_options(supervisor_command) if name in _LOCAL_SIZE_OPTIONS
    ]
    first_port = find_server_port(supervisor_command)
    local_ranks = _parse_count(sizes[-1]) if sizes else None
    if not command:
        return None  # The rank is exiting, and the kernel has released its command line's memory.
    # The title ends with the rank's number across all nodes: VLLM::ExternalLBRank_5.
    global_rank = _parse_count(command[0].rpartition("_")[2])
    if first_port is None or not local_ranks or global_rank is None:
        return None
    port = first_port + global_rank % local_ranks
    return port if port <= MAX_PORT else None


def _parse_port(text: str) -> int | None:
    """Return a port number, or None for any other text, such as 80000."""
    port = _parse_count(text)
    return port if port is not None and port <= MAX_PORT else None


def _parse_count(text: str) -> int | None:
    """Return a number of up to five digits, or None for any other text."""
    return int(text) if text.isdecimal() and len(text) <= _MAX_DIGITS else None


def _strip_folder(program: str) -> str:
    return program.rstrip("/").rpartition("/")[2]
