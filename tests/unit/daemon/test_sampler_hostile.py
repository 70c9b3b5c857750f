"""Whatever the files of the probe's folder say, the daemon samples on and its page is whole."""

from __future__ import annotations

import json
import math
import time
from typing import Any, Final

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.logs import capture_logs
from tests.unit.daemon.test_sampler_probe import Folder, sampler, ticked
from vllm_headroom import catalog
from vllm_headroom.model import ProbedProcess
from vllm_headroom.parse.probe import parse_probe

NOW: Final = time.time()
numbers = st.sampled_from([None, 0, 1, 900, 2**53, 0.5])


def block(*names: str, **strategies: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | st.fixed_dictionaries({}, optional=dict.fromkeys(names, numbers) | strategies)


texts = st.sampled_from([None, "", "0.32.0", "x" * 300])
uuids = st.sampled_from(["GPU-0", "gpu-0", "GPU-1", "GPU-2", ""])
device = st.fixed_dictionaries(
    {"uuid": uuids}, optional=dict.fromkeys(("allocated", "reserved", "inactive_split", "retries", "ooms"), numbers)
)
documents = st.fixed_dictionaries(
    {
        "headroom_probe": st.just(1),
        "pid": st.sampled_from([0, 7, 2**53]),
        "started_at": st.sampled_from([0, 1.5, NOW, 2**53]),
        "t": st.sampled_from([NOW, NOW, NOW, NOW + 30, 0, 2**53]),
        "interval_seconds": st.sampled_from([0, 5, 3600, 2**53]),
        "role": st.sampled_from(["worker", "engine_core", "api_server", "other", "nobody"]),
        "devices": st.lists(device, max_size=3),
    },
    optional={
        "stopped": texts,
        "vllm": texts,
        "data_parallel_rank": numbers,
        "parts": block(
            "weights",
            "kv_cache",
            "cuda_graphs",
            "activation_peak",
            "requested",
            asleep=st.sampled_from([None, True, False]),
            pool=block("weights", "kv_cache", "runtime", "workspace"),
        ),
        "scheduler": block(
            *(
                "kv_blocks_total",
                "kv_blocks_free",
                "kv_blocks_live",
                "kv_tokens_live",
                "block_size",
                "running",
                "waiting",
                "steps_total",
            ),
            *("max_num_seqs", "max_model_len"),
        ),
        "host": block(cgroup=block("used", "file", "limit", "oom_kills"), shm=block("used", "limit")),
        "oom": st.none()
        | st.fixed_dictionaries(
            {"t": st.sampled_from([0, NOW, 2**53])},
            optional=dict.fromkeys(("asked", "free", "allocated", "reserved", "running", "seen"), numbers)
            | {"uuid": uuids},
        ),
    },
)


def understood(document: dict[str, Any]) -> ProbedProcess:
    parsed_file = parse_probe(json.dumps(document).encode())
    assert not isinstance(parsed_file, str), parsed_file
    return parsed_file[0]


@settings(max_examples=60)
@given(st.lists(st.lists(documents, max_size=4), min_size=1, max_size=3))
def test_no_file_costs_more_than_its_own_series(ticks: list[list[dict[str, Any]]]) -> None:
    folder = Folder()
    subject = sampler(folder)
    with capture_logs() as lines:
        for written in ticks:
            folder.files = tuple(map(understood, written))
            samples = ticked(subject)

            names = {sample.metric.name for sample in samples}
            assert {catalog.GPU_MEMORY_USED.name, catalog.LEAK_STATE.name, catalog.ENGINE_RUNNING.name} <= names
            assert all(math.isfinite(sample.value) for sample in samples)
            assert len({(sample.metric.name, sample.labels) for sample in samples}) == len(samples)

    assert [line for line in lines if line["log_level"] == "error"] == []
