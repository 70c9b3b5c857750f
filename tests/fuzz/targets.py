"""What reads text that others write, each with good texts to spoil and with what it may raise."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.command import run_command
from tests.fakes.api_server.cluster import NAMESPACE
from tests.fakes.api_server.fleet import Connection
from tests.fakes.proc_tree import ProcTree
from tests.unit.daemon.test_evict import Bench
from vllm_headroom.daemon.evict import EvictionPolicy, Evictor
from vllm_headroom.daemon.state.file import HISTORY, UnusableState
from vllm_headroom.expose.web.config import WebConfigError, read_web_config
from vllm_headroom.model import Failure
from vllm_headroom.parse.engines import parse_engines
from vllm_headroom.parse.log.reader import read_log
from vllm_headroom.parse.probe import parse_probe
from vllm_headroom.scrape.http.reader import Reply
from vllm_headroom.scrape.proc.host import read_host, read_process_parts
from vllm_headroom.scrape.proc.options import read_options, star_secrets
from vllm_headroom.scrape.proc.reader import Processes
from vllm_headroom.scrape.proc.smaps import read_mappings
from vllm_headroom.yaml_file import NotYamlError, parse_yaml
from vllm_headroom_tools.bad_input import BadInput
from vllm_headroom_tools.openai import parse_first_model
from vllm_headroom_tools.options import BadOptions
from vllm_headroom_tools.serve_line import read_serve_line
from vllm_headroom_tools.sizing.model_config import count_checkpoint_bytes, read_model
from vllm_headroom_tools.trace import read_trace

ENGINES: Final = Path(__file__).parents[1] / "contract" / "engines"
PORT: Final = 8000
Play = Callable[[bytes, Path], object]
"""Reads a text; the folder is empty."""


class Target(NamedTuple):
    """A reader, good texts for it, and the errors by which it refuses a text."""

    play: Play
    samples: tuple[bytes, ...]
    refusals: tuple[type[Exception], ...] = ()


def play_command(*words: str, name: str = "trace.jsonl") -> Play:
    """Return what runs a command over a file: it answers with status 0, 1 or 2, and raises nothing."""

    def play(content: bytes, folder: Path) -> None:
        (folder / name).write_bytes(content)
        process = run_command(*words, str(folder / name))
        assert process.returncode in {0, 1, 2}
        assert "Traceback" not in process.stderr

    return play


def play_trace(content: bytes, folder: Path) -> None:
    (folder / "trace").write_bytes(content)
    list(read_trace(str(folder / "trace")))


def play_proc(name: str) -> Play:
    """Return what reads an engine in /proc with this file of its server, or of the machine."""

    def play(content: bytes, folder: Path) -> None:
        tree = ProcTree(folder)
        tree.add(20, 1, "vllm", "serve", "m", "--port", str(PORT))
        tree.add(21, 20, "VLLM::EngineCore")
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        processes = Processes(engine_port=PORT, engine_is_here=True, monotonic=lambda: 5.0, proc=folder)
        asyncio.run(processes.read(30))
        read_host(folder, 20)
        read_process_parts(folder, 20)
        read_mappings(folder, 20)

    return play


def play_command_line(content: bytes, _folder: Path) -> None:
    words = tuple(content.decode(errors="replace").split("\0"))
    read_options(words)
    star_secrets(words)


def play_serve_line(content: bytes, _folder: Path) -> None:
    read_serve_line(content.decode(errors="replace").split("\0"))


def play_web_config(content: bytes, folder: Path) -> None:
    (folder / "web.yml").write_bytes(content)
    read_web_config(folder / "web.yml")


def play_settings_file(content: bytes, _folder: Path) -> None:
    parse_yaml(content)
    parse_yaml(content, as_text=True)


def play_api_answer(content: bytes, _folder: Path) -> None:
    class Odd(Connection):
        """Answers one of the requests with the text."""

        count = 0

        async def send(self, method: str, path: str, body: Any) -> Reply | Failure:
            self.count += 1
            if self.count % 3 == len(content) % 3:
                return Reply(status=200 + len(content) % 2, text=content.decode(errors="replace"))
            return await super().send(method, path, body)

    bench = Bench()
    policy = EvictionPolicy(is_dry_run=False, near_seconds=1800.0, quiet_hour=None)
    name = next(iter(bench.cluster.pods))
    evictor = Evictor(Odd(bench.cluster, lambda _: ""), policy, namespace=NAMESPACE, name=name, clock=bench.clock)
    bench.turn(evictor, seconds=120.0)
    evictor.read_guardrail()


def play_model(name: str) -> Play:
    """Return what reads a model's folder with this file."""

    def play(content: bytes, folder: Path) -> None:
        (folder / "config.json").write_bytes(CONFIG)
        (folder / name).write_bytes(content)
        read_model(folder)
        count_checkpoint_bytes(folder)

    return play


def encode(*documents: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(document).encode() + b"\n" for document in documents)


CONFIG: Final = encode(
    {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "hidden_size": 1024,
        "vocab_size": 1000,
        "text_config": {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 9},
        "quantization_config": {"quant_method": "fp8", "ignore": ["lm_head"]},
        "rope_scaling": {"type": "yarn", "factor": 4.0},
    }
)
GPU: Final = {"gpu": 0, "uuid": "GPU-0", "total": 80 << 30, "used": 40 << 30, "engine": 39 << 30, "processes": 1}
ENGINE: Final = {"model_name": "m", "engine": "0", "running": 3.0, "finished_total": 10.0, "kv_used_ratio": 0.4}
SAMPLES: Final = [
    {"t": 1.7e9 + seconds, "gpus": [GPU], "engines": [ENGINE], "processes": [{"role": "worker", "rss": 5}]}
    for seconds in (0, 5, 10)
]
TRACE: Final = encode({"headroom_trace": 1}, *SAMPLES)
EVENT: Final = {"t": 1.7e9, "what": "ended", "reason": "gone"}
BEFORE: Final = {"used": {"GPU-0": [[1.7e9, 5]]}, "mappings": [{"pid": 8, "kinds": {"heap": 5}}]}
INCIDENT: Final = encode({"headroom_trace": 1, "incident": {**EVENT, "events": [EVENT], "before": BEFORE}}, *SAMPLES)
PROBE: Final = encode(
    {
        "headroom_probe": 1,
        "t": 1.7e9,
        "pid": 20,
        "started_at": 1.6e9,
        "boot_id": "boot",
        "role": "worker",
        "devices": [{"uuid": "GPU-0", "allocated": 3}],
        "parts": {"weights": 1, "pool": {"kv_cache": 2}},
        "oom": {"t": 1.69e9, "asked": 5},
        "host": {"cgroup": {"used": 5}},
    }
)
MOUNTS: Final = (
    b"36 35 98:0 / /dev/shm rw,noatime shared:1 - tmpfs shm rw,size=65536k\n"
    b"40 35 0:30 / /sys/fs/cgroup rw - cgroup2 cgroup rw\n"
)
SMAPS: Final = (
    b"7f00-7f10 r-xp 00000000 fe:01 123 /usr/lib/libc.so.6\nRss:  12 kB\nSwap:  0 kB\n"
    b"8000-9000 rw-p 00000000 00:00 0 [heap]\nRss:  8 kB\n"
)
STATUS: Final = b"Name:\tvllm\nVmRSS:\t  123 kB\nRssAnon:\t 5 kB\nVmHWM:\t 200 kB\nNSpid:\t20\t1\n"
STAT: Final = b"20 (vllm) S 1 1 1 0 -1 4194560 1 1 2 2 603 287 5 1 20 0 9 0 5000 1998102528 157408 1844\n"
SOCKETS: Final = b"  sl  local_address rem_address\n   0: 0100007F:1F40 00000000:0000 0A 0:0 00:0 0 0 0 123 1\n"
LINE: Final = b'vllm\0serve\0org/m\0--port\08000\0--max-model-len=8k\0--api-key\0s\0--hf-overrides\0{"a": 1}'
WEB: Final = (
    b"tls_server_config:\n  cert_file: a\n  key_file: b\nhttp_server_config:\n  headers: {X-Frame-Options: deny}\n"
    b"basic_auth_users:\n  alice: $2y$10$QOauhQNbBCuQDKes6eFzPeMqBSjb7Mr5DUmpZ/VcEd00UAV/LDeSi\n"
)
POD: Final = encode({"metadata": {"name": "a", "uid": "u", "labels": {"app": "b"}}, "status": {"phase": "Running"}})
LEASE: Final = encode({"metadata": {"resourceVersion": "5"}, "spec": {"holderIdentity": "a", "renewTime": "x"}})
LOG: Final = (
    b"INFO 06-01 12:00:00 [config.py:12] non-default args: {'model': 'm', 'max_model_len': 8192}\n"
    b"(EngineCore_0 pid=12) INFO 06-01 12:00:09 [gpu_worker.py:298] Available KV cache memory: 12.34 GiB\n"
    b'{"log": "ERROR torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\\n", "stream": "stderr"}\n'
)

TARGETS: Final = {
    "exposition": Target(
        lambda content, _: parse_engines(content.decode(errors="replace")),
        tuple(file.read_bytes()[:4000] for file in sorted(ENGINES.glob("*.prom"))[:6]),
    ),
    "trace": Target(play_trace, (TRACE,), (BadInput,)),
    "replay": Target(play_command("replay", "--json"), (TRACE,)),
    "check": Target(play_command("check", "--max-leak-per-thousand-requests", "1MiB", "--trace"), (TRACE,)),
    "incident": Target(play_command("postmortem", name="2026-01-01T00-00-00Z.jsonl"), (INCIDENT,)),
    "probe": Target(lambda content, _: parse_probe(content), (PROBE,)),
    "mountinfo": Target(play_proc("20/mountinfo"), (MOUNTS,)),
    "cgroup": Target(play_proc("20/cgroup"), (b"0::/kubepods/burstable/podabc/def\n", b"4:memory:/docker/abc\n")),
    "cmdline": Target(play_proc("20/cmdline"), (LINE,)),
    "cmdline-of-core": Target(play_proc("21/cmdline"), (b"VLLM::EngineCore\0", LINE)),
    "status": Target(play_proc("20/status"), (STATUS,)),
    "stat": Target(play_proc("20/stat"), (STAT,)),
    "statm": Target(play_proc("20/statm"), (b"489576 38332 12007 689 0 120734 0\n",)),
    "buddyinfo": Target(play_proc("buddyinfo"), (b"Node 0, zone   Normal   4381   1093    185   1530    567\n",)),
    "smaps": Target(play_proc("20/smaps"), (SMAPS,)),
    "sockets": Target(play_proc("20/net/tcp"), (SOCKETS,)),
    "meminfo": Target(play_proc("meminfo"), (b"MemTotal: 125000000 kB\nMemAvailable: 70000000 kB\n",)),
    "options": Target(play_command_line, (LINE,)),
    "serve-line": Target(play_serve_line, (LINE, b"docker run vllm/vllm-openai:v0.20.0 --model m"), (BadOptions,)),
    "web-config": Target(play_web_config, (WEB,), (WebConfigError,)),
    "settings-file": Target(play_settings_file, (WEB, b"engine_url: http://x\ngpus: [0, 1]\n"), (NotYamlError,)),
    "api-answer": Target(play_api_answer, (POD, LEASE, encode({"kind": "Status", "status": "Success"}))),
    "models-answer": Target(
        lambda content, _: parse_first_model(content), (encode({"data": [{"id": "m", "max_model_len": 9}]}),)
    ),
    "config": Target(play_model("config.json"), (CONFIG,)),
    "quantisation": Target(play_model("hf_quant_config.json"), (encode({"quantization": {"quant_algo": "FP8"}}),)),
    "index": Target(play_model("model.safetensors.index.json"), (encode({"metadata": {"total_size": 5}}),)),
    "log": Target(lambda content, _: read_log([content]), (LOG,)),
    "state": Target(
        lambda content, _: HISTORY.decode(content), (encode({"format": 1, "checksum": "x"}),), (UnusableState,)
    ),
}
