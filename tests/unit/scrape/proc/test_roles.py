from __future__ import annotations

import pytest

from vllm_headroom.scrape.proc.files import ProcEntry
from vllm_headroom.scrape.proc.reader import assign_roles
from vllm_headroom.scrape.proc.servers import find_role
from vllm_headroom.vocabulary import Role

OWN_PID = 9999


def entries(*processes: tuple[int, int, tuple[str, ...]]) -> dict[int, ProcEntry]:
    return {
        pid: ProcEntry(pid=pid, parent_pid=parent_pid, started_seconds=1.0, command=command)
        for pid, parent_pid, command in processes
    }


def role(*command: str) -> Role | None:
    return find_role(command)


SERVERS = [
    ("vllm", "serve", "m"),
    ("/opt/vllm/bin/vllm", "serve"),
    ("/opt/venv/bin/python3.11", "/opt/venv/bin/vllm", "serve", "m", "--port", "8123"),  # vLLM 0.32
    ("python", "-X", "dev", "-u", "-W", "ignore", "vllm", "serve"),
    ("python3", "-m", "vllm.entrypoints.openai.api_server", "--model", "m"),
    ("python3", "-um", "vllm.entrypoints.openai.api_server"),
    ("python3.12", "-m", "vllm.entrypoints.cli.main", "serve", "m"),
    ("python", "-m", "vllm.entrypoints.api_server"),
    ("python", "/usr/lib/python3/vllm/entrypoints/openai/api_server.py"),
    ("/usr/lib/python3/vllm/vllm-rs", "frontend", "--listen-fd", "5"),
    ("vllm-rs", "serve", "m"),
    ("VLLM::APIServer",),
    ("VLLM::APIServer_0",),
    ("VLLM::APIServer_DP1",),
]
OTHERS = [
    ("grep", "vllm", "serve"),
    ("grep", "VLLM::EngineCore"),
    ("vim", "vllm.py"),
    ("vim", "vllm", "serve"),
    ("vllm-headroom",),
    ("vllm-headroom", "serve"),
    ("python", "/usr/bin/vllm-headroom", "run"),
    ("python", "-m", "vllm_headroom"),
    ("vllm", "bench", "serve"),
    ("vllm", "chat"),
    ("vllm",),
    ("python", "/usr/bin/vllm", "bench", "serve"),
    ("vllm-rs", "bench"),
    ("python",),
    ("python", "-m"),
    ("python", "-c", "import vllm", "serve"),
    ("python", "-m", "http.server", "vllm", "serve"),
    ("python", "train.py", "vllm", "serve"),
    ("bash", "-c", "vllm serve m"),
    ("tini", "--", "vllm", "serve", "m"),
    ("curl", "http://vllm/serve"),
    ("",),
]


@pytest.mark.parametrize("command", SERVERS, ids=" ".join)
def test_a_server_is_found(command: tuple[str, ...]) -> None:
    assert role(*command) is Role.API_SERVER


@pytest.mark.parametrize("command", OTHERS, ids=" ".join)
def test_what_only_mentions_a_server_is_none(command: tuple[str, ...]) -> None:
    assert role(*command) is None


@pytest.mark.parametrize(
    ("title", "expected"),
    [
        ("VLLM::EngineCore", Role.ENGINE_CORE),
        ("VLLM::EngineCor", Role.ENGINE_CORE),
        ("VLLM::EngineCore_DP0", Role.ENGINE_CORE),
        ("VLLM::DPEngineCore_0", Role.ENGINE_CORE),
        ("VLLM::DPEngineC", Role.ENGINE_CORE),
        ("VLLM::Worker", Role.WORKER),
        ("VLLM::Worker_TP0", Role.WORKER),
        ("VLLM::Worker_DP1_PP0_TP3_EP7", Role.WORKER),
        ("VLLM::DPCoordinator", Role.OTHER),
        ("VLLM::something new", Role.OTHER),
        ("ray::RayWorkerWrapper.execute_method", Role.WORKER),
        ("ray::DPMoEEngineCoreActor", Role.ENGINE_CORE),
        ("ray::EngineCoreActor.run", Role.ENGINE_CORE),
        ("ray::train", None),
    ],
)
def test_a_title_tells_the_role(title: str, expected: Role | None) -> None:
    assert role(title) is expected


def test_descendants_are_the_engines_too() -> None:
    entry_list = entries(
        (1, 0, ("bash", "entrypoint.sh")),
        (4380, 1, ("python3.11", "/venv/bin/vllm", "serve", "tiny")),
        (4425, 4380, ("python3.11", "-B", "-c", "from multiprocessing.resource_tracker import main;main(32)")),
        (4426, 4380, ("VLLM::EngineCore",)),
        (4438, 4426, ("VLLM::Worker",)),
        (4500, 4438, ("gcc", "kernel.c")),
        (4501, 4500, ("cc1",)),
        (5000, 1, ("nginx",)),
    )

    assert assign_roles(entry_list, OWN_PID, [4380]) == {
        4380: Role.API_SERVER,
        4425: Role.OTHER,
        4426: Role.ENGINE_CORE,
        4438: Role.WORKER,
        4500: Role.OTHER,
        4501: Role.OTHER,
    }


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (("python", "/venv/bin/vllm", "serve", "m"), Role.API_SERVER),  # vLLM before 0.10.1 titles no engine core
        (("VLLM::EngineCore",), Role.ENGINE_CORE),
    ],
)
def test_a_forked_copy_is_no_second_one(command: tuple[str, ...], expected: Role) -> None:
    assert assign_roles(entries((7, 1, command), (8, 7, command)), OWN_PID, [7]) == {7: expected, 8: Role.OTHER}


def test_a_frontend_is_a_server_below_its_launcher() -> None:
    entry_list = entries((7, 1, ("vllm", "serve", "m")), (8, 7, ("/x/vllm-rs", "frontend")))

    assert assign_roles(entry_list, OWN_PID, [7]) == {7: Role.API_SERVER, 8: Role.API_SERVER}


def test_the_daemon_is_not_the_engines_even_as_its_child() -> None:
    entry_list = entries(
        (1, 0, ("vllm", "serve", "m")),
        (OWN_PID, 1, ("python", "/usr/bin/vllm-headroom")),
        (10000, OWN_PID, ("sh",)),
    )

    assert assign_roles(entry_list, OWN_PID, [1]) == {1: Role.API_SERVER}


def test_what_is_not_below_a_root_is_not_the_engines() -> None:
    entry_list = entries((7, 1, ("vllm", "serve")), (8, 1, ("vllm", "serve")), (9, 8, ("VLLM::EngineCore",)))

    assert assign_roles(entry_list, OWN_PID, [8]) == {8: Role.API_SERVER, 9: Role.ENGINE_CORE}
    assert assign_roles(entry_list, OWN_PID, []) == {}


def test_a_circle_of_parents_is_walked_once() -> None:
    entry_list = entries((7, 8, ("vllm", "serve")), (8, 7, ("sh",)))

    assert assign_roles(entry_list, OWN_PID, [7]) == {7: Role.API_SERVER, 8: Role.OTHER}


def test_titles_below_a_server_may_have_another_prefix() -> None:
    """VLLM_PROCESS_NAME_PREFIX."""
    entry_list = entries(
        (7, 1, SERVERS[0]), (8, 7, ("prod::EngineCore",)), (9, 8, ("prod::Worker_TP0",)), (10, 8, ("gcc",))
    )

    assert assign_roles(entry_list, OWN_PID, [7]) == {
        7: Role.API_SERVER,
        8: Role.ENGINE_CORE,
        9: Role.WORKER,
        10: Role.OTHER,
    }
