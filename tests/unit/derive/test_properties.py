"""Whatever the readings are, no derivation lies in its numbers or its labels."""

from __future__ import annotations

from math import isfinite
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import fields

from tests.samples import failure, gpu, snapshot
from vllm_headroom.catalog import METRICS
from vllm_headroom.derive.tick import answer, build_derivations
from vllm_headroom.model import EnginePage, EngineProcess, EngineReading, Failure, Gpu, Snapshot
from vllm_headroom.vocabulary import Attribution, Role, Source

amounts = st.floats(min_value=0, allow_nan=False, allow_infinity=False)
ratios = st.floats(min_value=0, max_value=1, allow_nan=False)
sizes = st.integers(min_value=0, max_value=2**50)
names = st.text(max_size=5)
SIGNED = {"headroom_memory_discrepancy_bytes", "headroom_memory_discrepancy_ratio"}


def fact(name: str) -> st.SearchStrategy[Any]:
    if name in {"model_name", "engine"}:
        return names
    if name == "awake":
        return st.none() | st.booleans()
    return st.none() | (ratios if name.endswith("_ratio") else amounts)


engines = st.builds(EngineReading, **{field.name: fact(field.name) for field in fields(EngineReading)})
pages = st.builds(
    EnginePage,
    profile=st.just("vllm"),
    engines=st.lists(engines, max_size=3, unique_by=lambda engine: (engine.model_name, engine.engine)).map(tuple),
    inputs=st.just((("requests_running", True),)),
)


@st.composite
def devices(draw: st.DrawFn) -> tuple[Gpu, ...]:
    count = draw(st.integers(0, 3))
    drawn_gpus = []
    for index in range(count):
        total = draw(st.integers(1, 2**50))
        used = draw(st.integers(0, total))
        engine = draw(st.none() | st.integers(0, used))
        other_bytes = None if engine is None else draw(st.integers(0, used - engine))
        attribution = draw(st.none() | st.sampled_from(Attribution))
        memory = draw(st.booleans())
        drawn_gpus.append(
            gpu(
                index=index,
                uuid=f"GPU-{index}",
                total=total,
                used=used,
                engine=engine,
                other=other_bytes,
                attribution=attribution,
                memory=memory,
                utilization_ratio=draw(st.none() | ratios),
            )
        )
    return tuple(drawn_gpus)


processes = st.lists(
    st.builds(EngineProcess, pid=sizes, role=st.sampled_from(Role), rss_bytes=sizes, started_at_seconds=amounts),
    max_size=4,
).map(tuple)


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    either: dict[str, tuple[Any, Failure]] = {
        "engines": (draw(pages), failure(Source.ENGINE)),
        "gpus": (draw(devices()), failure(Source.NVML)),
        "processes": (draw(processes), failure(Source.PROCESS)),
    }
    parts = {name: draw(st.sampled_from(choices)) for name, choices in either.items()}
    return snapshot(at=draw(st.floats(0, 1e6)), **parts)


@given(drawn_snapshots=st.lists(snapshots(), min_size=1, max_size=4), bytes_per_token=st.none() | amounts.filter(bool))
def test_no_derivation_yields_an_absurd_number_a_foreign_label_or_a_series_twice(
    drawn_snapshots: list[Snapshot], bytes_per_token: float | None
) -> None:
    for derivation in build_derivations(reported_bytes=1e9, kv_bytes_per_token=bytes_per_token):
        state = derivation.initial
        for drawn_snapshot in sorted(drawn_snapshots, key=lambda snapshot: snapshot.monotonic_seconds):
            state, samples = answer(derivation, state, drawn_snapshot)
            for sample in samples:
                assert isfinite(sample.value)
                assert sample.value >= 0 or sample.metric.name in SIGNED
                assert sample.metric in METRICS
                assert len(sample.labels) == len(sample.metric.labels)
            assert len({(sample.metric.name, sample.labels) for sample in samples}) == len(samples)
