"""Whatever the daemon saw comes back out of the line it wrote."""

from __future__ import annotations

import json
from typing import Any, Final, get_type_hints

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import fields

from tests.samples import engine, gpu, page, snapshot
from vllm_headroom.model import (
    INPUTS,
    EnginePage,
    EngineProcess,
    EngineReading,
    Failure,
    Fate,
    Gpu,
    GpuMemory,
    GpuReading,
    HostMemory,
    Inside,
    Leftover,
    Pool,
    ServerReply,
    Snapshot,
)
from vllm_headroom.parse.fields import LARGEST
from vllm_headroom.trace.entries import HEADER, build_record, encode_line
from vllm_headroom.vocabulary import (
    REASONS,
    Attribution,
    HostBasis,
    HostPart,
    MemoryPart,
    Reason,
    Role,
    ServerAnswer,
    Source,
)
from vllm_headroom_tools.trace import parse_trace

SHOWN: Final = st.text().filter(str.isprintable)
NUMBERS: Final = st.floats(min_value=0, max_value=LARGEST)
SIZES: Final = st.integers(min_value=0, max_value=2**43)
OF_TYPE: Final[dict[Any, st.SearchStrategy[Any]]] = {
    str: SHOWN,
    str | None: st.none() | SHOWN,
    float | None: st.none() | NUMBERS,
    bool | None: st.none() | st.booleans(),
}
FACTS: Final = {name: OF_TYPE[kind] for name, kind in get_type_hints(EngineReading).items()}


LEFTOVERS: Final = st.builds(Leftover, pid=st.just(0), fate=st.sampled_from(Fate), used_bytes=st.none() | SIZES)


@st.composite
def gpus(draw: st.DrawFn) -> tuple[Gpu, ...]:
    """Return GPUs of the engine's, each with what the daemon knows of one."""
    uuids = draw(st.lists(st.uuids().map(lambda uuid: f"GPU-{uuid}"), unique=True, max_size=3))
    return tuple(_gpu(draw, index, uuid) for index, uuid in enumerate(uuids))


def _gpu(draw: st.DrawFn, index: int, uuid: str) -> Gpu:
    used, free, other_bytes = draw(SIZES), draw(SIZES), draw(st.none() | SIZES)
    reserved, engine_bytes = draw(st.none() | SIZES), draw(st.none() | SIZES)
    total = used + free + (reserved or 0)
    return Gpu(
        reading=GpuReading(
            index=index,
            uuid=uuid,
            name="",
            memory=GpuMemory(total_bytes=total, used_bytes=used, free_bytes=free, reserved_bytes=reserved),
            used_peak_bytes=draw(st.none() | SIZES),
            utilization_ratio=draw(st.none() | st.floats(0, 1)),
        ),
        attribution=Attribution.UUID if engine_bytes is None else Attribution.PROCESS,
        engine_bytes=engine_bytes,
        other_bytes=other_bytes,
        held_bytes=max(0, used - (other_bytes or 0)) if engine_bytes is None else engine_bytes,
        process_count=draw(st.none() | st.integers(0, 9)),
        leftovers=tuple(draw(st.lists(LEFTOVERS, max_size=2))),
        inside=_inside(draw),
    )


def _inside(draw: st.DrawFn) -> Inside | None:
    parts = draw(st.dictionaries(st.sampled_from(MemoryPart), SIZES))
    inside = Inside(
        granted_bytes=draw(st.none() | SIZES),
        allocated_bytes=draw(st.none() | SIZES),
        reserved_bytes=draw(st.none() | SIZES),
        parts=tuple((part, parts[part]) for part in MemoryPart if part in parts),
    )
    return None if inside == Inside() else inside


PROCESSES: Final = st.builds(
    EngineProcess,
    pid=st.just(0),
    role=st.sampled_from(Role),
    rss_bytes=SIZES,
    started_at_seconds=NUMBERS,
    anonymous_bytes=st.none() | SIZES,
    file_bytes=st.none() | SIZES,
    state=st.none() | st.sampled_from("RSDTt"),
    **dict.fromkeys(("cpu_seconds", "cpu_pressure_ratio", "wait_seconds"), st.none() | NUMBERS),
    waiting_requests=st.none() | st.integers(0, 9),
    swap_bytes=st.none() | SIZES,
)
REPLIES: Final = st.builds(
    ServerReply, answer=st.sampled_from(ServerAnswer), requests=st.none() | st.integers(0, 9).map(float)
)
HOST: Final = st.builds(
    HostMemory,
    basis=st.none() | st.sampled_from(HostBasis),
    **{field.name: st.none() | SIZES for field in fields(HostMemory) if field.name != "basis"},
)
TIMES: Final = st.integers(0, 2_000_000_000_000).map(lambda milliseconds: milliseconds / 1000)


@given(
    time=TIMES,
    engines=st.lists(st.builds(EngineReading, **FACTS), max_size=3),
    gpus=gpus(),
    processes=st.lists(PROCESSES, max_size=3),
    host=st.none() | HOST,
    server=st.none() | REPLIES,
    has_silent_core=st.booleans(),
    pools=st.lists(
        st.builds(Pool, part=st.sampled_from(HostPart), role=st.none() | st.sampled_from(Role), size_bytes=SIZES)
    ),
)
def test_what_was_seen_comes_back(
    time: float,
    engines: list[EngineReading],
    gpus: tuple[Gpu, ...],
    processes: list[EngineProcess],
    host: HostMemory | None,
    *,
    server: ServerReply | None,
    has_silent_core: bool,
    pools: list[Pool],
) -> None:
    original = Snapshot(
        time_seconds=time,
        monotonic_seconds=time,
        engines=EnginePage(profile="vllm", engines=tuple(engines), inputs=()),
        gpus=gpus,
        processes=tuple(processes),
        host=host,
        server=server,
        has_silent_core=has_silent_core,
        pools=tuple(pools),
    )

    assert back(original) == original


def back(sample: Snapshot) -> Snapshot:
    (read_back,) = parse_trace((encode_line(HEADER), encode_line(build_record(sample))))
    return read_back


@pytest.mark.parametrize("http_status", [None, 204, 500])
@pytest.mark.parametrize("reason", REASONS[Source.ENGINE])
def test_why_the_page_failed_comes_back(reason: Reason, http_status: int | None) -> None:
    failed = Failure(source=Source.ENGINE, reason=reason, message="it failed", http_status=http_status)
    engines = back(snapshot(engines=failed)).engines

    assert isinstance(engines, Failure)
    assert (engines.reason, engines.http_status) == (reason, http_status)


def test_an_answer_of_a_later_version_is_unknown() -> None:
    lines = (encode_line(HEADER), encode_line({"t": 1.0, "server": {"answer": "of a later version"}}))
    (read_back,) = parse_trace(lines)

    assert read_back.server is None


@pytest.mark.parametrize("written", [{}, {"engines_failure": "of a later version"}])
def test_a_page_that_failed_for_an_unknown_reason_was_out_of_reach(written: dict[str, str]) -> None:
    lines = (encode_line(HEADER), encode_line({"t": 1.0, "engines": None, **written}))
    (read_back,) = parse_trace(lines)

    assert isinstance(read_back.engines, Failure)
    assert read_back.engines.reason is Reason.UNREACHABLE


def back_engine(**engine_fields: Any) -> EngineReading:
    engines = back(snapshot(engines=page(engine(**engine_fields)))).engines
    assert not isinstance(engines, Failure)
    return engines.engines[0]


@given(name=st.text(st.characters()))
@example(name="a\nb")
@example(name="\ud800")
def test_no_name_of_a_model_makes_a_line_that_cannot_be_read(name: str) -> None:
    assert back_engine(model_name=name).model_name == (
        name if name.isprintable() else name.encode("unicode_escape").decode()
    )


@pytest.mark.parametrize("fact", [name for name, kind in get_type_hints(EngineReading).items() if kind == float | None])
def test_a_number_that_no_reader_takes_is_left_out(fact: str) -> None:
    assert back_engine(**{fact: 2.0**54}) == engine()


def test_the_names_of_the_format_are_those_of_the_contract() -> None:
    facts: dict[str, Any] = dict.fromkeys(INPUTS, 1.0)

    (entry,) = build_record(snapshot(engines=page(engine(**facts)), gpus=(gpu(used_peak_bytes=950),)))["engines"]

    assert set(entry) == {
        *("model_name", "engine", "running", "waiting", "kv_used_ratio", "kv_capacity_tokens", "finished_total"),
        *("preemptions_total", "prefix_queries_total", "prefix_hits_total", "prefix_hit_lifetime_ratio", "awake"),
        *("prompt_tokens_total", "generation_tokens_total", "kv_cache_dtype", "gpu_memory_utilization"),
        *("kv_cache_memory_bytes", "memory_bytes", "started_at", "steps_total"),
    }


def test_the_host_has_the_names_of_the_contract() -> None:
    host = HostMemory(
        basis=HostBasis.CGROUP, used_bytes=1, limit_bytes=2, shm_used_bytes=3, shm_limit_bytes=4, oom_kills=0
    )

    assert build_record(snapshot(host=host))["host"] == {
        "basis": "cgroup",
        "used": 1,
        "limit": 2,
        "shm_used": 3,
        "shm_limit": 4,
        "oom_kills": 0,
    }
    assert "host" not in build_record(snapshot())


def test_what_is_inside_has_the_names_of_the_contract() -> None:
    inside = Inside(granted_bytes=7, allocated_bytes=5, reserved_bytes=6, parts=((MemoryPart.WEIGHTS, 4),))

    (entry,) = build_record(snapshot(gpus=(gpu(inside=inside),)))["gpus"]

    names = ("granted", "allocated", "reserved_by_torch", "parts")
    assert tuple(entry[name] for name in names) == (7, 5, 6, {"weights": 4})


def test_fields_that_have_no_home_yet_are_passed_over() -> None:
    record = build_record(snapshot(gpus=(gpu(used_peak_bytes=950),)))
    (entry,) = record["gpus"]
    assert entry["used_peak"] == 950
    entry |= {"parts": {"ballast": 4}}

    (read_back,) = parse_trace((encode_line(HEADER), json.dumps(record).encode()))

    assert isinstance(read_back, Snapshot)
