"""Recognise each kind of engine's server by its command line, and find the port it serves."""

import re
from collections.abc import Iterator
from typing import Final

from msgspec import Struct

from vllm_headroom.vocabulary import Role

_INTERPRETER: Final = re.compile(r"(python|pypy)[\d.]*")
_MODULE_OPTION: Final = re.compile(r"-[A-Za-z]*m")
_OPTIONS_WITH_VALUE: Final = ("-X", "-W")


class ServerKind(Struct, frozen=True, kw_only=True):
    """A kind of server: the start of its command line after the interpreter, and the place of its port.

    `commands` are a program or module and, where it has several, its subcommand. The port is that of `port_options`,
    else of the environment's `variable`, else `port`; with one of `elsewhere` it is unknown. `titles` are the names
    that its processes take, cut to 15 characters as process names are, and their roles.
    """

    product: str
    commands: tuple[str, ...]
    port: int
    scripts: tuple[str, ...] = ()
    port_options: tuple[str, ...] = ("--port",)
    variable: str = ""
    elsewhere: frozenset[str] = frozenset()
    titles: tuple[tuple[str, Role], ...] = ()


SERVERS: Final = (
    ServerKind(
        product="vLLM",
        commands=(
            *("vllm.entrypoints.openai.api_server", "vllm.entrypoints.api_server"),
            *("vllm serve", "vllm.entrypoints.cli.main serve", "vllm-rs serve", "vllm-rs frontend"),
        ),
        scripts=("/vllm/entrypoints/openai/api_server.py",),
        port=8000,
        # A port in a file, or none (vllm/entrypoints/openai/cli_args.py, cli/serve.py).
        elsewhere=frozenset({"--config", "--uds", "--headless"}),
        titles=(  # from 0.10.1 on (`set_process_title`; Ray names its own by the actor's class)
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
        port=30000,
        elsewhere=frozenset({"--config"}),
        titles=(("sglang::schedul", Role.ENGINE_CORE), ("sglang::", Role.OTHER)),
    ),
    ServerKind(product="TensorRT-LLM", commands=("trtllm-serve",), port=8000),
    ServerKind(
        product="LMDeploy",
        commands=("lmdeploy serve",),
        port=23333,
        port_options=("--server-port",),
    ),
    ServerKind(
        product="Text Generation Inference",
        commands=("text-generation-launcher", "text-generation-router"),
        port=3000,
        port_options=("--port", "-p"),
        variable="PORT",  # 80 in its image
        titles=(("text-generation-server", Role.WORKER),),
    ),
    ServerKind(
        product="llama.cpp", commands=("llama-server",), port=8080, variable="LLAMA_ARG_PORT"
    ),
    ServerKind(
        product="Aphrodite",
        commands=("aphrodite.endpoints.openai.api_server", "aphrodite run", "aphrodite serve"),
        port=2242,
        elsewhere=frozenset({"--config", "--uds"}),
    ),
    ServerKind(
        product="Dynamo",
        commands=("dynamo.frontend", "dynamo.vllm", "dynamo.sglang", "dynamo.trtllm"),
        port=8000,
        port_options=("--http-port",),
        variable="DYN_HTTP_PORT",
    ),
)
"""Every kind of server that the daemon recognises; the titles were observed, or are in the server's source."""


_MENTIONED: Final = re.compile(
    "|".join(sorted({re.split("[ .]", each)[0] for s in SERVERS for each in s.commands}))
)
_ROLES: Final = tuple(each for server in SERVERS for each in server.titles)
_TITLES: Final = tuple(title for title, _ in _ROLES)


def find_role(command: tuple[str, ...]) -> Role | None:
    """Return the role of a title or a server's command line; None for any other process."""
    if command[0].startswith(_TITLES):
        return next(role for title, role in _ROLES if command[0].startswith(title))
    return Role.API_SERVER if find_server(command) else None


def find_server(command: tuple[str, ...]) -> ServerKind | None:
    """Return the kind of server that this command line runs; None where it only mentions one."""
    if not _MENTIONED.search("\0".join(command)):  # most of a host's processes, in a microsecond
        return None
    if _INTERPRETER.fullmatch(_strip_folder(command[0])):  # it runs a script or a module
        command = command[1:]
        while command and command[0].startswith("-") and not _MODULE_OPTION.fullmatch(command[0]):
            command = command[2:] if command[0] in _OPTIONS_WITH_VALUE else command[1:]
        command = (command[1:] if command and command[0].startswith("-") else command) or ("",)
    named = f"{_strip_folder(command[0])} {' '.join(command[1:2])} "
    for server in SERVERS:
        if server.scripts and command[0].endswith(server.scripts):
            return server
        if any(named.startswith(f"{each} ") for each in server.commands):
            return server
    return None


_SUPERVISOR: Final = frozenset({"--data-parallel-multi-port-external-lb", "-dpm"})
_MOST_DIGITS: Final = 5


def is_supervisor(command: tuple[str, ...]) -> bool:
    """Return whether a vLLM serves nothing itself but starts a server for each data-parallel rank."""
    return not _SUPERVISOR.isdisjoint(command)


def list_options(command: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield each argument with what would be its value as an option: the text after `=`, or the next argument."""
    for argument, following in zip(command, (*command[1:], ""), strict=True):
        name, joined, value = argument.partition("=")
        yield name, value if joined else following


def find_port(
    command: tuple[str, ...], wanted: int | None = None, above: tuple[str, ...] = ()
) -> int | None:
    """Return the port that a server's command line names, else its default; None where it is unknown.

    A default other than the `wanted` port is unknown too where a variable may have changed it. Ranks have consecutive
    ports from that of the supervisor `above` them (vllm/entrypoints/openai/dp_supervisor.py).
    """
    if is_supervisor(above):
        local = {"--data-parallel-size-local", "-dpl"}
        first, ranks = (
            find_port(above),
            _parse_count([v for name, v in list_options(above) if name in local]),
        )
        rank = _parse_count([command[0].rpartition("_")[2]])
        return None if first is None or not ranks or rank is None else first + rank % ranks
    server = find_server(command) if command else None
    if server is None:
        return None
    options = list(list_options(command))
    if ports := [value for name, value in options if name in server.port_options]:
        return _parse_count(ports)
    is_elsewhere = any(name in server.elsewhere for name, _ in options)
    may_be_set = server.variable and wanted not in {None, server.port}
    return None if is_elsewhere or may_be_set else server.port


def _parse_count(texts: list[str]) -> int | None:
    """Return the last number, of up to five digits, as ports have."""
    return (
        int(texts[-1])
        if texts and texts[-1].isdecimal() and len(texts[-1]) <= _MOST_DIGITS
        else None
    )


def _strip_folder(program: str) -> str:
    return program.rstrip("/").rpartition("/")[2]
