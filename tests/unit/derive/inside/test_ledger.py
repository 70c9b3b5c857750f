"""The engine's own ledger: what is known sums to what it holds, and no remainder is invented."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.samples import failure, gpu, probed
from vllm_headroom.derive.inside import PROBE_RACE_BYTES, Sums, add_inside, build_ledger
from vllm_headroom.model import AllocatorReading, Failure, Gpu, Inside, ProbeReadings, WorkerMeasurements
from vllm_headroom.vocabulary import MemoryPart, Source

SIZES = st.integers(0, 2**40)


def parts_of(held_bytes: int | None = 1000, **allocator_fields: int) -> dict[str, int]:
    facts: dict[str, Any] = dict.fromkeys(("allocated", "reserved", "split", "weights", "kv_cache", "graphs"))
    return {str(part): value for part, value in build_ledger(Sums(**facts | allocator_fields), held_bytes).items()}


WHOLE = {"allocated": 700, "reserved": 850, "split": 30, "weights": 300, "kv_cache": 350}


def test_every_byte_that_is_held_counts_once() -> None:
    parts = parts_of(**WHOLE)

    assert parts == {
        "weights": 300,
        "kv_cache": 350,
        "other_tensors": 50,
        "fragmented": 30,
        "cached": 120,
        "outside_torch": 150,
    }
    assert sum(parts.values()) == 1000


@pytest.mark.parametrize(
    ("graphs", "cached", "fragmented", "outside"),
    [(100, 20, 30, 150), (140, 0, 10, 150), (250, 0, 0, 50), (300, 0, 0, 0)],
)
def test_graphs_are_taken_out_of_what_they_are_counted_in_otherwise(
    graphs: int, cached: int, fragmented: int, outside: int
) -> None:
    parts = parts_of(**WHOLE, graphs=graphs)

    assert (parts["cuda_graphs"], parts["cached"]) == (graphs, cached)
    assert (parts["fragmented"], parts["outside_torch"]) == (fragmented, outside)
    assert sum(parts.values()) == 1000


def test_graphs_larger_than_all_they_could_be_in_are_not_believed() -> None:
    assert parts_of(**WHOLE, graphs=301) == parts_of(**WHOLE)


@pytest.mark.parametrize(
    ("without", "missing_parts"),
    [
        ("weights", {"weights", "other_tensors"}),
        ("kv_cache", {"kv_cache", "other_tensors"}),
        ("allocated", {"other_tensors", "cached"}),
        ("reserved", {"cached", "outside_torch"}),
        ("split", {"fragmented", "cached"}),
    ],
)
def test_what_is_not_known_is_absent_with_its_remainder(without: str, missing_parts: set[str]) -> None:
    known_parts = {name: value for name, value in WHOLE.items() if name != without}

    assert set(parts_of(**WHOLE)) - set(parts_of(**known_parts)) == missing_parts


def test_a_probe_that_has_not_looked_since_the_engine_fell_asleep_is_not_believed() -> None:
    assert parts_of(PROBE_RACE_BYTES, weights=PROBE_RACE_BYTES, kv_cache=PROBE_RACE_BYTES + 1) == {}
    assert parts_of(PROBE_RACE_BYTES, weights=PROBE_RACE_BYTES, kv_cache=PROBE_RACE_BYTES) != {}


def test_without_nvml_nothing_is_outside_and_no_graphs_are_placed() -> None:
    parts = parts_of(None, **WHOLE, graphs=100)

    assert "outside_torch" not in parts
    assert "cuda_graphs" not in parts


def test_what_was_freed_between_two_looks_is_no_negative_remainder() -> None:
    large = WHOLE | {name: WHOLE[name] + PROBE_RACE_BYTES for name in ("allocated", "reserved")}

    assert parts_of(large["reserved"] - PROBE_RACE_BYTES, **large)["outside_torch"] == 0
    assert "outside_torch" not in parts_of(large["reserved"] - PROBE_RACE_BYTES - 1, **large)


def test_figures_that_contradict_each_other_give_no_remainder() -> None:
    assert "other_tensors" not in parts_of(**WHOLE | {"weights": 400})
    assert set(parts_of(**WHOLE | {"split": 151})) == {"weights", "kv_cache", "other_tensors", "outside_torch"}


@given(SIZES, SIZES, SIZES, SIZES, SIZES, SIZES, st.none() | SIZES)
def test_a_whole_ledger_sums_to_what_is_held(  # noqa: PLR0917 - each is a size
    weights: int, kv_cache: int, other_tensors: int, split: int, cached: int, outside: int, graphs: int | None
) -> None:
    allocated = weights + kv_cache + other_tensors
    reserved = allocated + split + cached
    sums = Sums(allocated=allocated, reserved=reserved, split=split, weights=weights, kv_cache=kv_cache, graphs=graphs)

    ledger = build_ledger(sums, reserved + outside)

    assert sum(ledger.values()) == reserved + outside
    assert min(ledger.values()) >= 0
    assert set(MemoryPart) - ledger.keys() <= {MemoryPart.CUDA_GRAPHS}


def device(**reading_fields: Any) -> AllocatorReading:
    facts: dict[str, Any] = {"uuid": "GPU-a", "allocated_bytes": 700, "reserved_bytes": 850, "inactive_split_bytes": 30}
    return AllocatorReading(**facts | reading_fields)


PARTS = WorkerMeasurements(weights_bytes=300, kv_cache_bytes=350)


def inside(*present: Any, card: Gpu | None = None) -> Inside | None:
    gpu_sample = gpu(used=1000) if card is None else card
    gpus_with_inside = add_inside((gpu_sample,), ProbeReadings(present=present))
    assert not isinstance(gpus_with_inside, Failure)
    return gpus_with_inside[0].inside


def test_a_worker_fills_the_ledger_of_its_gpu() -> None:
    ledger_inside = inside(probed(devices=(device(uuid="gpu-A"),), parts=PARTS), probed(pid=8))

    assert ledger_inside is not None
    assert (ledger_inside.allocated_bytes, ledger_inside.reserved_bytes) == (700, 850)
    assert dict(ledger_inside.parts)[MemoryPart.OUTSIDE_TORCH] == 150
    assert [part for part, _ in ledger_inside.parts] == [
        part for part in MemoryPart if part is not MemoryPart.CUDA_GRAPHS
    ]


def test_two_processes_on_one_gpu_count_together_and_one_that_does_not_say_leaves_it_open() -> None:
    half = device(allocated_bytes=350, reserved_bytes=400, inactive_split_bytes=10)
    both = inside(probed(devices=(half,), parts=PARTS), probed(pid=8, devices=(half,)))

    assert both is not None
    assert (both.allocated_bytes, both.reserved_bytes) == (700, 800)
    assert {str(part) for part, _ in both.parts} == {"fragmented", "cached", "outside_torch"}


def test_another_gpus_figures_and_another_engines_gpu_are_left_alone() -> None:
    assert inside(probed(devices=(device(uuid="GPU-b"),))) is None
    assert inside(probed(devices=(device(),)), card=gpu(attribution=None)) is None


def test_figures_that_no_such_device_can_have_are_not_believed() -> None:
    assert inside(probed(devices=(device(reserved_bytes=1001),))) is None
    assert inside(probed(devices=(device(),), parts=WorkerMeasurements(kv_cache_bytes=1001))) is None


def test_parts_of_a_process_on_several_devices_are_nobodys() -> None:
    ledger_inside = inside(probed(devices=(device(), device(uuid="GPU-b")), parts=PARTS))

    assert ledger_inside is not None
    assert MemoryPart.WEIGHTS not in dict(ledger_inside.parts)


def test_a_pool_tells_what_torch_does_not() -> None:
    pool = WorkerMeasurements(weights_bytes=310, kv_cache_bytes=0)
    parts = WorkerMeasurements(weights_bytes=300, kv_cache_bytes=350, asleep=True, pool=pool)

    ledger_inside = inside(probed(devices=(AllocatorReading(uuid="GPU-a"),), parts=parts))

    assert ledger_inside == Inside(parts=((MemoryPart.WEIGHTS, 310), (MemoryPart.KV_CACHE, 0)))


def test_what_was_measured_awake_is_not_held_asleep() -> None:
    parts = WorkerMeasurements(weights_bytes=300, kv_cache_bytes=350, asleep=True)

    ledger_inside = inside(probed(devices=(device(),), parts=parts))

    assert ledger_inside is not None
    assert {str(part) for part, _ in ledger_inside.parts} == {"fragmented", "cached", "outside_torch"}


def test_without_a_word_from_inside_gpus_stay_as_they_are() -> None:
    gpus = (gpu(),)

    assert add_inside(gpus, None) is gpus
    assert add_inside(gpus, failure(Source.PROBE)) is gpus
    assert add_inside(failure(Source.NVML), ProbeReadings()) == failure(Source.NVML)
