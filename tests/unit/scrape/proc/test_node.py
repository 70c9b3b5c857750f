"""Every engine of a node, found in /proc."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.fakes.node_tree import UID, NodeTree, write_listening
from vllm_headroom.model import EngineName, Failure, MachineMemory, ProcessReadings
from vllm_headroom.scrape.proc import node as node_module
from vllm_headroom.scrape.proc.network import Network, read_network
from vllm_headroom.scrape.proc.node import MOST_NODE_ENGINES, LocatedEngine, NodeProcesses
from vllm_headroom.scrape.proc.owners import parse_owner
from vllm_headroom.scrape.proc.reader import Processes, Scope
from vllm_headroom.vocabulary import EngineKind, Reason, Source

SERVER = ("python3", "/usr/bin/vllm", "serve", "m")


@pytest.fixture
def node(tmp_path: Path) -> NodeTree:
    return NodeTree(tmp_path)


def processes(node: NodeTree) -> NodeProcesses:
    return NodeProcesses(
        proc=node.path,
        container_logs=node.container_logs,
        pod_logs=node.pod_logs,
        monotonic=lambda: 0.0,
        rescan_seconds=0,
    )


def find(node: NodeTree, subject: NodeProcesses | None = None) -> tuple[LocatedEngine, ...]:
    subject = subject or processes(node)

    async def scan() -> tuple[LocatedEngine, ...]:
        await subject.scan(30)
        return await subject.find_engines(30)

    return asyncio.run(scan())


def test_the_network_of_an_engine_is_read_again_after_a_while_or_for_a_new_process(node: NodeTree) -> None:
    now_seconds = 0.0
    subject = NodeProcesses(
        proc=node.path,
        container_logs=node.container_logs,
        pod_logs=node.pod_logs,
        monotonic=lambda: now_seconds,
        rescan_seconds=15,
    )
    node.add_pod(1, 100, *SERVER, name="llama-0", listening=[("127.0.0.1", 8000)])
    assert [engine.kind for engine in find(node, subject)] == [EngineKind.UNREADABLE]

    node.connect(100, "10.244.1.1", [("0.0.0.0", 8000)])
    assert [engine.kind for engine in find(node, subject)] == [EngineKind.UNREADABLE]
    now_seconds = 15.0
    assert [engine.kind for engine in find(node, subject)] == [EngineKind.WATCHED]

    node.connect(100, "10.244.1.1", [("0.0.0.0", 8000), ("0.0.0.0", 9839)])
    assert [engine.kind for engine in find(node, subject)] == [EngineKind.WATCHED]
    now_seconds = 30.0
    assert [engine.kind for engine in find(node, subject)] == [EngineKind.OWN_SIDECAR]

    # The server has restarted, without its sidecar.
    node.remove(100)
    node.add_pod(1, 101, *SERVER, name="llama-0", address="10.244.1.7")
    assert [engine.page_url for engine in find(node, subject)] == ["http://10.244.1.7:8000/metrics"]


def test_a_network_that_engines_share_is_read_once_in_a_search(node: NodeTree, monkeypatch: pytest.MonkeyPatch) -> None:
    read_pids: list[int] = []

    def note(proc: Path, pid: int) -> Network | None:
        read_pids.append(pid)
        return read_network(proc, pid)

    monkeypatch.setattr(node_module, "read_network", note)
    for number in (1, 2, 3):
        node.add_pod(number, 100 * number, *SERVER)
    namespaces = {100: "shared", 200: "shared", 300: "other"}
    for pid, namespace in namespaces.items():
        (node.path / namespace).touch()
        (node.path / f"{pid}/net/stat").rmdir()
        (node.path / f"{pid}/net/stat").symlink_to(node.path / namespace)
    subject = processes(node)

    for _ in range(2):
        assert [engine.kind for engine in find(node, subject)] == [EngineKind.WATCHED] * 3

    assert len(read_pids) == 4


def test_an_engine_in_a_pod_has_the_pods_names_and_its_page(node: NodeTree) -> None:
    uid = node.add_pod(1, 100, *SERVER, name="llama-0")
    node.add(101, 100, "VLLM::EngineCore")
    node.join(101, (node.path / "100/cgroup").read_text().strip().removeprefix("0::"))

    subject = processes(node)
    (engine,) = find(node, subject)

    assert engine.kind is EngineKind.WATCHED
    assert engine.page_url == "http://10.244.1.1:8000/metrics"
    assert engine.name == EngineName(namespace="default", pod="llama-0", container="vllm")
    assert subject.read_scope(f"pod:{uid}").own_pids == {100, 101}
    assert subject.read_scope(f"pod:{uid}").visible_pids == {1, 100, 101, 9999}


def test_the_state_of_the_machine_is_read_once_for_all_engines_and_is_unknown_after_a_failed_scan(
    node: NodeTree,
) -> None:
    owners = [f"pod:{node.add_pod(number, 100 * number, *SERVER)}" for number in (1, 2)]
    meminfo = node.path / "meminfo"
    meminfo.write_text("MemTotal: 8 kB\nMemAvailable: 4 kB\n")
    subject = processes(node)
    asyncio.run(subject.scan(30))
    meminfo.unlink()

    machines = [subject.read_scope(owner).machine.memory for owner in owners]
    assert machines == [MachineMemory(total_bytes=8192, available_bytes=4096)] * 2

    node.path.rename(node.path.with_name("unmounted"))
    with pytest.raises(FileNotFoundError):
        asyncio.run(subject.scan(30))
    assert subject.read_scope(owners[0]).machine.memory is None


def test_waiting_requests_are_read_once_per_scan_for_all_engines(
    node: NodeTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    owners = [f"pod:{node.add_pod(number, 100 * number, *SERVER)}" for number in (1, 2)]
    readings: list[dict[int, tuple[float, ...]] | None] = [{8001: (9.0,), 8002: (3.0, 5.0)}, None]
    monkeypatch.setattr(node_module, "list_waits_by_port", lambda: readings.pop(0))
    subject = processes(node)

    asyncio.run(subject.scan(30))
    waits = [subject.read_scope(owner).list_waits({port}) for owner, port in zip(owners, (8001, 8003), strict=True)]
    assert waits == [(9.0,), ()]
    assert subject.read_scope(owners[0]).list_waits({8001, 8002}) == (9.0, 3.0, 5.0)
    assert len(readings) == 1

    asyncio.run(subject.scan(30))
    assert subject.read_scope(owners[0]).list_waits({8001}) is None


def test_any_process_of_the_machine_can_be_named_with_its_pod(node: NodeTree) -> None:
    node.add_pod(1, 100, *SERVER, name="llama-0")
    node.add_pod(2, 200, "python3", "/work/train.py", "--token=secret", name="train-0")
    node.add(300, 1, "/usr/bin/tritonserver", "--model-repository=/m")
    subject = processes(node)
    find(node, subject)

    assert subject.names.find(200) == "python3 train.py (pid 200, pod default/train-0)"
    assert subject.names.find(300) == "tritonserver (pid 300)"
    assert subject.names.find(9_876) is None


def test_engines_of_several_pods_are_several_though_all_serve_the_same_port(node: NodeTree) -> None:
    for number in range(1, 7):
        node.add_pod(number, 100 * number, *SERVER, name=f"llama-{number}")

    engines = find(node)

    assert {engine.name.pod for engine in engines} == {f"llama-{number}" for number in range(1, 7)}
    assert {engine.page_url for engine in engines} == {
        f"http://10.244.1.{number}:8000/metrics" for number in range(1, 7)
    }


def test_an_engine_with_its_own_sidecar_is_left_to_it(node: NodeTree) -> None:
    node.add_pod(1, 100, *SERVER, name="llama-0", listening=[("0.0.0.0", 8000), ("::", 9839)])

    (engine,) = find(node)

    assert (engine.kind, engine.page_url, engine.problem) == (EngineKind.OWN_SIDECAR, "", "")


@pytest.mark.parametrize(
    ("command", "listening", "url"),
    [
        ((*SERVER, "--port", "9000"), [("0.0.0.0", 9000)], "http://10.244.1.1:9000/metrics"),
        ((*SERVER, "--port", "9000"), [], "http://10.244.1.1:9000/metrics"),
        (("VLLM::APIServer_0",), [("::", 8123)], "http://10.244.1.1:8123/metrics"),
        (("VLLM::APIServer_0",), [("0.0.0.0", 8000), ("0.0.0.0", 40001)], "http://10.244.1.1:8000/metrics"),
        ((*SERVER, "--config", "f"), [("0.0.0.0", 8123), ("127.0.0.1", 9)], "http://10.244.1.1:8123/metrics"),
        ((*SERVER, "--ssl-keyfile=k"), [("0.0.0.0", 8000)], "https://10.244.1.1:8000/metrics"),
        ((*SERVER,), [("10.9.9.9", 8000)], "http://10.9.9.9:8000/metrics"),
        (("trtllm-serve", "m"), [("0.0.0.0", 8000)], "http://10.244.1.1:8000/prometheus/metrics"),
        (("text-generation-launcher",), [("0.0.0.0", 80)], "http://10.244.1.1:80/metrics"),
        (("python3", "-m", "sglang.launch_server"), [("0.0.0.0", 30000)], "http://10.244.1.1:30000/metrics"),
    ],
)
def test_the_page_is_where_the_command_line_or_the_only_listening_port_says(
    node: NodeTree, command: Sequence[str], listening: Sequence[tuple[str, int]], url: str
) -> None:
    node.add_pod(1, 100, *command, listening=listening)

    (engine,) = find(node)

    assert (engine.kind, engine.page_url) == (EngineKind.WATCHED, url)


@pytest.mark.parametrize(
    ("command", "listening", "problem"),
    [
        ((*SERVER,), [("127.0.0.1", 8000)], "listens on 127.0.0.1 only"),
        (("VLLM::APIServer_0",), [("0.0.0.0", 8002), ("0.0.0.0", 8001)], "start it with --port"),
    ],
)
def test_an_engine_that_cannot_be_reached_says_why(
    node: NodeTree, command: Sequence[str], listening: Sequence[tuple[str, int]], problem: str
) -> None:
    node.add_pod(1, 100, *command, name="llama-0", listening=listening)

    (engine,) = find(node)

    assert (engine.kind, engine.page_url) == (EngineKind.UNREADABLE, "")
    assert problem in engine.problem


def test_a_second_server_in_the_same_container_is_not_watched_under_the_same_name(node: NodeTree) -> None:
    node.add_pod(1, 100, *SERVER, name="llama-0", listening=[("0.0.0.0", 8000), ("0.0.0.0", 8001)])
    node.add_pod(1, 200, *SERVER, "--port", "8001", listening=[("0.0.0.0", 8000), ("0.0.0.0", 8001)])

    assert [engine.kind for engine in find(node)] == [EngineKind.WATCHED, EngineKind.UNREADABLE]


def test_cores_workers_and_programs_that_embed_an_engine_are_no_engines_of_their_own(node: NodeTree) -> None:
    node.add_pod(1, 100, *SERVER)
    for number, title in enumerate(("VLLM::EngineCore_DP0", "VLLM::EngineCore_DP1", "VLLM::Worker_TP0"), start=101):
        node.add(number, 100, title)
        node.join(number, (node.path / "100/cgroup").read_text().strip().removeprefix("0::"))
    node.add_pod(2, 200, "VLLM::EngineCore")

    assert [engine.name.pod for engine in find(node)] == [UID.format(1)]


def test_an_engine_of_a_service_has_its_unit_and_others_their_address(node: NodeTree) -> None:
    node.add(100, 1, *SERVER)
    node.join(100, "/system.slice/vllm-llama.service")
    node.add(200, 1, *SERVER, "--port", "8001")
    node.join(200, "/user.slice/user-1000.slice/session-4.scope")
    for pid in (100, 200):
        node.connect(pid, "192.0.2.7", [("0.0.0.0", 8000), ("0.0.0.0", 8001)])

    assert {engine.name.labels for engine in find(node)} == {
        (("unit", "vllm-llama.service"),),
        (("engine_url", "http://192.0.2.7:8001/metrics"),),
    }


def test_engines_of_the_host_are_watched_beside_those_of_pods(node: NodeTree) -> None:
    host = "192.0.2.7"
    node.add_pod(1, 100, *SERVER, name="llama-0")
    for pid, port, cgroup in (
        (200, 8001, "/../../system.slice/vllm-llama.service"),
        (300, 8002, "/../../user.slice/user-1000.slice/session-4.scope"),
        (400, 8003, "/../../system.slice/vllm-local.service"),
    ):
        node.add(pid, 1, *SERVER, "--port", str(port))
        node.join(pid, cgroup)
        listening = [("127.0.0.1" if port == 8003 else "0.0.0.0", port)]
        node.connect(pid, host, listening)

    engines = {engine.port: engine for engine in find(node)}

    assert engines[8000].name.labels == (("namespace", "default"), ("pod", "llama-0"), ("container", "vllm"))
    assert engines[8001].name.labels == (("unit", "vllm-llama.service"),)
    assert engines[8001].page_url == f"http://{host}:8001/metrics"
    assert engines[8002].name.labels == (("engine_url", f"http://{host}:8002/metrics"),)
    assert engines[8003].kind is EngineKind.UNREADABLE
    assert engines[8003].problem == "its port 8003 listens on 127.0.0.1 only: start it with --host 0.0.0.0"


def test_servers_of_one_unit_are_named_by_their_address_also_while_one_is_down(node: NodeTree) -> None:
    for pid, port in ((100, "8000"), (200, "8001")):
        node.add(pid, 1, *SERVER, "--port", port)
        node.join(pid, "/system.slice/engines.service")
        node.connect(pid, "192.0.2.7", [("0.0.0.0", 8000), ("0.0.0.0", 8001)])
    subject = processes(node)

    assert [engine.kind for engine in find(node, subject)] == [EngineKind.WATCHED] * 2
    node.remove(100)
    (engine,) = find(node, subject)
    assert engine.name == EngineName(engine_url="http://192.0.2.7:8001/metrics")


def test_an_engine_in_the_daemons_own_network_is_asked_on_this_machine(node: NodeTree) -> None:
    node.add_pod(1, 100, *SERVER, listening=[("127.0.0.1", 8000), ("0.0.0.0", 9839)])
    (node.path / "9999" / "net").symlink_to(node.path / "100" / "net")

    (engine,) = find(node)

    assert engine.page_url == "http://127.0.0.1:8000/metrics"


def test_a_restart_keeps_the_key_and_a_pod_that_goes_leaves_no_process(node: NodeTree) -> None:
    uid = node.add_pod(1, 100, *SERVER)
    node.add(90, 1, "/pause")
    node.join(90, f"/kubepods/burstable/pod{uid}/{'9' * 64}")
    subject = processes(node)
    (engine,) = find(node, subject)
    node.remove(100)

    assert find(node, subject) == ()
    assert subject.has_processes(engine.owner_key)

    node.add_pod(1, 110, *SERVER)
    (restarted,) = find(node, subject)
    assert restarted.key == engine.key

    node.remove(110)
    node.remove(90)
    find(node, subject)
    assert not subject.has_processes(engine.owner_key)


def test_the_number_of_watched_engines_is_bounded(node: NodeTree) -> None:
    for number in range(MOST_NODE_ENGINES + 2):
        node.add_pod(number, 1000 + number, *SERVER, address=f"10.244.2.{number}")

    kinds = [engine.kind for engine in find(node)]

    assert (kinds.count(EngineKind.WATCHED), kinds.count(EngineKind.UNREADABLE)) == (MOST_NODE_ENGINES, 2)


def test_of_several_interfaces_the_one_with_the_default_route_is_used(node: NodeTree) -> None:
    node.add_pod(1, 100, *SERVER, address="192.168.5.1")
    net = node.path / "100" / "net"
    with (net / "fib_trie").open("a") as trie:
        trie.write("        |-- 192.168.9.1\n           /32 host LOCAL\n")
    head = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\n"
    gateway = write_listening("192.168.9.254", 1).split()[1].partition(":")[0]
    network = write_listening("192.168.9.0", 1).split()[1].partition(":")[0]
    mask = write_listening("255.255.255.0", 1).split()[1].partition(":")[0]
    (net / "route").write_text(
        f"{head}eth0\t00000000\t{gateway}\t3\t0\t0\t0\t00000000\neth0\t{network}\t00000000\t1\t0\t0\t0\t{mask}\n"
    )

    (engine,) = find(node)

    assert engine.page_url == "http://192.168.9.1:8000/metrics"


def test_of_several_containers_the_one_with_the_log_or_the_usual_name_is_the_engines(node: NodeTree) -> None:
    uid = node.add_pod(1, 100, *SERVER, name="llama-0", containers=("proxy", "vllm"))
    assert find(node)[0].name.container == "vllm"

    log = node.pod_logs / f"default_llama-0_{uid}" / "proxy" / "0.log"
    log.symlink_to(f"/var/lib/docker/containers/{'01' * 32}/{'01' * 32}-json.log")
    assert find(node)[0].name.container == "proxy"


def test_a_container_is_named_by_its_link_where_the_kubelets_folder_of_logs_is_roots_alone(node: NodeTree) -> None:
    """A kubelet of today makes /var/log/pods with mode 0750, and /var/log/containers for all to list."""
    uid = node.add_pod(1, 100, *SERVER)
    names = {"init": "ab", "server-2": "01", "proxy": "cd"}
    for container, digits in names.items():
        link = node.container_logs / f"llama-0.example_llm_{container}-{digits * 32}.log"
        link.symlink_to(f"/var/log/pods/llm_llama-0.example_{uid}/{container}/0.log")

    (engine,) = find(node)

    assert engine.name == EngineName(namespace="llm", pod="llama-0.example", container="server-2")


def test_a_container_that_starts_later_is_named_too(node: NodeTree) -> None:
    node.add_pod(1, 100, *SERVER)
    subject = processes(node)
    (unnamed,) = find(node, subject)
    (node.container_logs / f"llama-0_llm_vllm-{'01' * 32}.log").symlink_to("/var/log/pods/any")

    (engine,) = find(node, subject)

    assert unnamed.name.namespace is None
    assert engine.name.text == "llm/llama-0"


POD = "0a1b2c3d-1111-2222-3333-444455556666"


@pytest.mark.parametrize(
    "path",
    [
        f"0::/kubepods.slice/kubepods-pod{POD.replace('-', '_')}.slice/crio-{'ab' * 32}.scope",
        f"0::/kubepods/besteffort/pod{POD}/{'ab' * 32}",
        f"12:pids:/\n4:memory:/kubepods/pod{POD}/{'ab' * 32}",
        f"0::/../../kubepods-pod{POD.replace('-', '_')}.slice/docker-{'ab' * 32}.scope/nested",
        f"0::/system.slice/containerd.service/kubepods-burstable-pod{POD.replace('-', '_')}.slice:cri:{'ab' * 32}",
    ],
)
def test_the_pod_and_the_container_are_in_the_cgroup_of_every_runtime(path: str) -> None:
    owner = parse_owner(path + "\n")

    assert owner is not None
    assert (owner.pod_uid, owner.container_id, owner.unit) == (POD, "ab" * 32, None)


@pytest.mark.parametrize("text", ["", "nonsense", "\0\n\n"])
def test_a_cgroup_file_without_a_cgroup_has_no_owner(text: str) -> None:
    assert parse_owner(text) is None


def test_files_that_make_no_sense_cost_that_engine_alone(node: NodeTree) -> None:
    node.add_pod(1, 100, *SERVER)
    node.add_pod(2, 200, *SERVER)
    (node.path / "100/net/tcp").write_bytes(b"\xff 1: zz 2 0A\n   0: 0:zz 0:0 0A\n" * 10)
    (node.path / "100/net/fib_trie").write_text("|-- 999.1\n/32 host LOCAL\n")
    (node.path / "100/net/if_inet6").write_text("zz 1 1 00 1 eth0\n")
    (node.path / "100/net/route").write_text("\n1 2 3\neth0 00000000 0 0 0 0 0 zz\neth0 01 0 0 0 0 0 zz\n")

    assert {engine.name.pod: engine.kind for engine in find(node)} == {
        UID.format(1): EngineKind.UNREADABLE,
        UID.format(2): EngineKind.WATCHED,
    }


class TestScope:
    """The processes of one engine among those of a node."""

    @staticmethod
    def read(subject: Processes, page: Failure | None = None) -> ProcessReadings:
        readings = asyncio.run(subject.read(30, page))
        assert isinstance(readings, ProcessReadings), readings
        return readings

    @staticmethod
    def look_at(node: NodeTree, number: int) -> Processes:
        """Return the processes of a pod as they are now."""
        scan = processes(node)

        def read_scope() -> Scope:
            asyncio.run(scan.scan(30))
            return scan.read_scope(f"pod:{UID.format(number)}")

        return Processes(
            engine_port=8000,
            engine_is_here=True,
            proc=node.path,
            monotonic=lambda: 0.0,
            rescan_seconds=0,
            read_scope=read_scope,
        )

    def test_each_engine_has_the_processes_of_its_pod_though_all_have_the_same_port(self, node: NodeTree) -> None:
        for number in (1, 2):
            node.add_pod(number, 100 * number, *SERVER)
        for number in (1, 2):
            readings = self.read(self.look_at(node, number))

            assert [process.pid for process in readings.engine] == [100 * number]
            assert readings.visible_pids == {1, 100, 200, 9999}
            assert (readings.ambiguous_engines, readings.neighbours) == (0, frozenset())

    def test_an_engine_that_is_down_has_no_processes_and_those_of_its_neighbour_are_not_taken(
        self, node: NodeTree
    ) -> None:
        for number in (1, 2):
            node.add_pod(number, 100 * number, *SERVER)
        subject = self.look_at(node, 1)
        self.read(subject)
        node.remove(100)
        refused = Failure(source=Source.ENGINE, reason=Reason.UNREACHABLE, message="refused")

        assert self.read(subject, refused).engine == ()

    def test_an_engine_that_does_not_answer_yet_is_known_by_its_pod(self, node: NodeTree) -> None:
        node.add_pod(1, 100, *SERVER, "--config", "c.yaml")  # which has its port
        silent = Failure(source=Source.ENGINE, reason=Reason.TIMEOUT, message="no answer")

        assert [process.pid for process in self.read(self.look_at(node, 1), silent).engine] == [100]
