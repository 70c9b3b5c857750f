from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.unit.scrape.proc.engines import ANYTHING, NEIGHBOUR, OURS, choice, named, tree
from vllm_headroom.scrape.proc.reader import Choice, assign_roles
from vllm_headroom.scrape.proc.servers import find_server_port
from vllm_headroom.vocabulary import Role


@pytest.mark.parametrize(
    ("command", "port"),
    [
        ("vllm serve m", 8000),
        ("vllm serve m --port 8123", 8123),
        ("vllm serve m --port=8123", 8123),
        ("python3 -m vllm.entrypoints.openai.api_server --port 8123 --model m", 8123),
        ("vllm serve m --port 1 --port=2", 2),
        ("vllm serve m --master-port 7 --data-parallel-rpc-port 8", 8000),
        ("vllm serve m --port", None),
        ("vllm serve m --port $PORT", None),
        ("vllm serve m --port " + "9" * 5000, None),
        ("vllm serve --config /c.yaml", None),
        ("vllm serve --config=/c.yaml --port 8123", 8123),
        ("vllm serve m --uds /run/vllm.sock", None),
        ("vllm serve m --headless", None),
        ("VLLM::APIServer", None),
        ("python3 -m sglang.launch_server --model-path m", 30000),
        ("python3 -m sglang.launch_server --port 31000", 31000),
        ("sglang serve m --config c.yaml", None),
        ("python3 /usr/local/bin/trtllm-serve m --port 8001", 8001),
        ("lmdeploy serve api_server m --server-port 23334", 23334),
        ("lmdeploy chat m", None),
        ("text-generation-launcher --model-id m -p 3001", 3001),
        ("/app/llama-server -m m.gguf --metrics", 8080),
        ("aphrodite run m", 2242),
        ("python3 -m dynamo.frontend --http-port 8100", 8100),
        ("grep llama-server", None),
        ("", None),
    ],
)
def test_a_servers_port_is_read_from_its_command_line(command: str, port: int | None) -> None:
    assert find_server_port(tuple(command.split())) == port


SUPERVISOR = "python /bin/vllm serve m --data-parallel-multi-port-external-lb --port 7998 --data-parallel-size-local"
RANKS = [
    *((20 + rank, 10, f"VLLM::ExternalLBRank_{4 + rank}") for rank in range(4)),
    *((30 + rank, 20 + rank, f"VLLM::EngineCore_DP{4 + rank}") for rank in range(4)),
]


def test_a_rank_that_exits_has_no_command_line_and_no_port() -> None:
    assert find_server_port((), parent_command=tuple(f"{SUPERVISOR} 4".split())) is None


@pytest.mark.parametrize("port", ["65536", "80000", "99999"])
def test_what_is_above_the_largest_port_is_none(port: str) -> None:
    assert find_server_port(("vllm", "serve", "m", "--port", port)) is None
    assert find_server_port(("vllm", "serve", "m", "--port", "65535")) == 65535
    supervisor = f"{SUPERVISOR} 4".replace("7998", "65534")
    ranks = [f"VLLM::ExternalLBRank_{rank}" for rank in range(3)]
    assert [find_server_port((rank,), parent_command=tuple(supervisor.split())) for rank in ranks] == [
        65534,
        65535,
        None,
    ]


def test_each_rank_below_a_supervisor_is_an_engine_with_a_port_of_its_own() -> None:
    choice_made = choice(tree((10, 1, f"{SUPERVISOR} 4"), *RANKS))

    assert choice_made.roots == (22,)
    assert choice_made.neighbours == {(20, 1.0), (21, 1.0), (23, 1.0)}
    assert assign_roles(tree(*RANKS), 99, choice_made.roots) == {22: Role.API_SERVER, 32: Role.ENGINE_CORE}


@pytest.mark.parametrize("local", ["0", "$N", "9" * 5000])
def test_ranks_whose_ports_do_not_tell_are_reported_by_their_start_on_the_page(local: str) -> None:
    process_tree = tree((10, 1, f"{SUPERVISOR} {local}"), *RANKS)
    process_tree[23] = replace(process_tree[23], started_seconds=1.5)

    assert choice(process_tree, page_state=ANYTHING).ambiguous_engines == 4
    assert choice(process_tree, page_state=named(1.5)).roots == (23,)


@pytest.mark.parametrize("server", ["text-generation-launcher", "llama-server", "python3 -m dynamo.frontend"])
def test_a_default_port_tells_nothing_where_the_environment_may_have_set_another(server: str) -> None:
    """TGI's image sets 80."""
    command, default = tuple(server.split()), find_server_port(tuple(server.split()))

    assert default in {3000, 8000, 8080}
    assert (find_server_port(command, default), find_server_port(command, 80)) == (default, None)
    assert find_server_port(("vllm", "serve"), 80) == 8000


@pytest.mark.parametrize(
    ("server", "child", "roles"),
    [
        ("python3 -m sglang.launch_server", "sglang::scheduler_TP0", (Role.API_SERVER, Role.ENGINE_CORE)),
        ("python3 -m sglang.launch_server", "sglang::detokenizer", (Role.API_SERVER, Role.OTHER)),
        ("text-generation-launcher", "text-generation-server serve", (Role.API_SERVER, Role.WORKER)),
        ("trtllm-serve m", "python3 -m mpi4py.futures.server", (Role.API_SERVER, Role.OTHER)),
    ],
)
def test_another_engines_processes_are_found_by_its_server(server: str, child: str, roles: tuple[Role, Role]) -> None:
    process_tree = tree((10, 1, server), (11, 10, child), (12, 1, "nginx"))

    assert choice(process_tree, page_state=ANYTHING).roots == (10,)
    assert tuple(assign_roles(process_tree, 99, (10,)).values()) == roles


def test_nothing_of_vllms_is_no_engine() -> None:
    assert choice(tree((1, 0, "init"), (7, 1, "nginx"))) == Choice()


def test_what_is_below_a_server_belongs_to_it() -> None:
    process_tree = tree(
        (1, 0, "bash entrypoint.sh"),
        (10, 1, "vllm serve m --data-parallel-size 2"),
        (11, 10, "VLLM::APIServer_0"),
        (12, 10, "VLLM::APIServer_1"),
        (13, 10, "VLLM::DPEngineCore_0"),
        (14, 10, "sh"),
        (15, 14, "VLLM::DPEngineCore_1"),
        (16, 10, "vllm serve m --data-parallel-size 2"),
        (17, 10, "vllm-rs frontend"),
    )

    assert choice(process_tree).roots == (10,)


def test_a_core_without_a_server_is_nothing_beside_one_that_serves() -> None:
    assert choice(tree((1, 0, "init"), (11, 1, "VLLM::EngineCore"), OURS)).roots == (10,)


def test_programs_that_embed_vllm_are_engines_without_a_port() -> None:
    first_program = ((7, 1, "python serve.py"), (8, 7, "VLLM::EngineCore_DP0"), (9, 7, "VLLM::EngineCore_DP1"))
    second_program = ((17, 1, "python serve.py"), (18, 17, "VLLM::EngineCore"))

    assert choice(tree(*first_program)).roots == (8, 9)
    assert choice(tree(*first_program, *second_program)).ambiguous_engines == 2


RAY = ((40, 1, "raylet"), (41, 40, "ray::RayWorkerWrapper.execute_method"), (42, 40, "ray::EngineCoreActor.run"))


@pytest.mark.parametrize(
    ("engine", "roots"),
    [
        ((), (41, 42)),
        ((OURS,), (10, 41, 42)),
        ((NEIGHBOUR,), (20, 41, 42)),
        (((50, 40, "ray::ServeReplica"), (51, 50, "VLLM::EngineCore")), (51, 41, 42)),
    ],
    ids=["another node's engine", "a server", "a server with another port", "embedded in Ray Serve"],
)
def test_rays_actors_are_the_only_engines(engine: tuple[tuple[int, int, str], ...], roots: tuple[int, ...]) -> None:
    assert choice(tree(*RAY, *engine), page_state=ANYTHING).roots == roots


def test_rays_actors_are_nothing_that_comes_to_listen_here() -> None:
    assert choice(tree(*RAY)).roots == ()


def test_nothing_tells_whose_rays_actors_are_beside_several_servers() -> None:
    assert choice(tree(*RAY, OURS, NEIGHBOUR)).ambiguous_engines == 2


def test_a_circle_of_parents_is_walked_once() -> None:
    assert choice(tree((7, 8, "vllm serve m"), (8, 7, "sh"))).roots == (7,)
    assert choice(tree((7, 8, "vllm serve m"), (8, 9, "sh"), (9, 8, "sh"))).roots == (7,)


def test_connections_are_sought_on_the_port_of_the_engine() -> None:
    """While none is chosen, they are sought on the ports of all visible engines."""
    alone = choice(tree(OURS), page_state=named())
    beside_another = choice(tree(OURS, NEIGHBOUR), page_state=named())
    without_port = choice(tree((10, 1, "vllm serve m --uds /run/vllm.sock")), page_state=named())
    ambiguous = choice(tree(NEIGHBOUR, *((pid, 1, "vllm serve m --uds /run/vllm.sock") for pid in (40, 41))))

    assert alone.ports == {8000}
    assert beside_another.ports == {8000}
    assert without_port.ports == frozenset()
    assert ambiguous.roots == ()
    assert ambiguous.ports == {9000}
