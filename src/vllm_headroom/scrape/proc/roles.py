"""Which processes are vLLM's, told by their titles, command lines and parents."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Final

from vllm_headroom.scrape.proc.files import ProcEntry
from vllm_headroom.vocabulary import Role

_TITLES: Final = (
    ("VLLM::APIServer", Role.API_SERVER),
    ("VLLM::EngineCor", Role.ENGINE_CORE),
    ("VLLM::DPEngineC", Role.ENGINE_CORE),
    ("VLLM::Worker", Role.WORKER),
    ("VLLM::", Role.OTHER),
    ("ray::RayWorker", Role.WORKER),
    ("ray::EngineCore", Role.ENGINE_CORE),
    ("ray::DPMoEEngin", Role.ENGINE_CORE),
)
"""What vLLM calls its processes from 0.10.1 on (`set_process_title`; Ray names its own by the actor's class), by the
first 15 characters: a process's name, all there is where the title is missing from the command line, is cut there."""

_TITLED: Final = ("VLLM::", "ray::")

_SERVER_MODULES: Final = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.api_server")
_SERVING_COMMANDS: Final = (
    ("vllm", "serve"),
    ("vllm.entrypoints.cli.main", "serve"),
    ("vllm-rs", "serve"),
    ("vllm-rs", "frontend"),
)
_INTERPRETER: Final = re.compile(r"(python|pypy)[\d.]*")
_MODULE_OPTION: Final = re.compile(r"-[A-Za-z]*m")
_OPTIONS_WITH_VALUE: Final = ("-X", "-W")


def engine_roles(entries: Mapping[int, ProcEntry], own_pid: int, roots: Iterable[int]) -> dict[int, Role]:
    """Return the role of each process of an engine by pid: its `roots` and all their descendants.

    `own_pid` and its descendants are never among them: an entrypoint that starts this daemon and then becomes vLLM
    is its parent.
    """
    children: dict[int, list[int]] = defaultdict(list)
    for pid, process in entries.items():
        children[process.parent_pid].append(pid)
    roles: dict[int, Role] = {}
    waiting = list(roots)
    while waiting:
        pid = waiting.pop()
        if pid in roles or pid == own_pid:
            continue
        roles[pid] = _role(entries[pid], entries.get(entries[pid].parent_pid))
        waiting.extend(children[pid])
    return roles


def _role(process: ProcEntry, parent: ProcEntry | None) -> Role:
    """Return the role by name; a fork that has not taken another name is no second one of its parent."""
    forked = parent is not None and process.command == parent.command
    return (None if forked else named_role(process.command)) or Role.OTHER


@lru_cache(maxsize=512)  # asked of every process whenever one comes or goes
def named_role(command: tuple[str, ...]) -> Role | None:
    """Return the role that a title or a server's command line tells; None where it is not vLLM's."""
    if not command[0].startswith(_TITLED):
        return Role.API_SERVER if serves(command) else None
    return next((role for title, role in _TITLES if command[0].startswith(title)), None)


def serves(command: tuple[str, ...]) -> bool:
    """Tell whether this is the command line of a vLLM server, and not only one that mentions it."""
    if not any("vllm" in word for word in command):  # most of a host's processes, told in a microsecond
        return False
    program, *arguments = _past_interpreter(command)
    if program in _SERVER_MODULES or program.endswith("/vllm/entrypoints/openai/api_server.py"):
        return True
    return (_base(program), *arguments[:1]) in _SERVING_COMMANDS


def _base(program: str) -> str:
    return program.rstrip("/").rpartition("/")[2]


def _past_interpreter(command: tuple[str, ...]) -> tuple[str, ...]:
    """Return the command line of the script or module that an interpreter runs, else the command line itself."""
    if not _INTERPRETER.fullmatch(_base(command[0])):
        return command
    rest = command[1:]
    while rest and rest[0].startswith("-") and not _MODULE_OPTION.fullmatch(rest[0]):
        rest = rest[2:] if rest[0] in _OPTIONS_WITH_VALUE else rest[1:]
    if rest and rest[0].startswith("-"):
        rest = rest[1:]
    return rest or ("",)
