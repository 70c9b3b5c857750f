"""The readings under our names, and the ledger."""

from __future__ import annotations

from msgspec.structs import replace

from tests.samples import A_GPU, AN_ENGINE, engine, failure, gpu, only, page, snapshot, values
from vllm_headroom import catalog
from vllm_headroom.derive.readings import derive_readings
from vllm_headroom.model import Fate, Leftover
from vllm_headroom.vocabulary import Source


def derive_held_bytes(**gpu_fields: int | None) -> dict[tuple[str, ...], float]:
    return values(derive_readings(snapshot(gpus=(gpu(used=900, **gpu_fields),))), catalog.GPU_MEMORY_HELD)  # type: ignore[arg-type]


def test_the_ledger_sums_to_used() -> None:
    assert derive_held_bytes(engine=700, other=150) == {
        (*A_GPU, "engine"): 700.0,
        (*A_GPU, "other"): 150.0,
        (*A_GPU, "unattributed"): 50.0,
    }


def test_holders_that_cannot_be_distinguished_are_absent_and_all_is_unattributed() -> None:
    assert derive_held_bytes() == {(*A_GPU, "unattributed"): 900.0}


def test_a_gpu_that_is_not_the_engines_says_so_by_an_empty_attribution() -> None:
    samples = derive_readings(snapshot(gpus=(gpu(attribution=None),)))

    assert only(samples, catalog.GPU_INFO).labels == (*A_GPU, "H100", "")


def test_a_lost_gpu_keeps_its_name_and_nothing_else() -> None:
    lost = gpu(memory=False, failure=failure(Source.NVML))

    samples = derive_readings(snapshot(engines=failure(Source.ENGINE), gpus=(lost, gpu(index=1, uuid="GPU-b"))))

    assert values(samples, catalog.GPU_UP) == {A_GPU: 0.0, ("1", "GPU-b"): 1.0}
    assert {sample.metric.name for sample in samples if sample.labels[:2] == A_GPU} == {
        "headroom_gpu_info",
        "headroom_gpu_up",
    }


def test_what_no_engine_holds_any_more_is_summed_as_far_as_it_is_reported() -> None:
    leftovers = tuple(
        Leftover(pid=pid, fate=Fate.ZOMBIE, used_bytes=used) for pid, used in ((7, 40), (8, 2), (9, None))
    )

    def told(*leftovers: Leftover) -> dict[tuple[str, ...], float]:
        return values(
            derive_readings(snapshot(gpus=(replace(gpu(), leftovers=leftovers),))), catalog.GPU_MEMORY_LEFT_BEHIND
        )

    assert (told(*leftovers), told(leftovers[2]), told()) == ({A_GPU: 42.0}, {}, {})


def test_xid_errors_are_counted_by_code() -> None:
    samples = derive_readings(snapshot(gpus=(gpu(xid_errors=((79, 1), (31, 4))),)))

    assert values(samples, catalog.GPU_XID_ERRORS) == {(*A_GPU, "79"): 1.0, (*A_GPU, "31"): 4.0}


def test_unknown_engine_facts_are_absent_and_zero_is_not() -> None:
    samples = derive_readings(snapshot(engines=page(engine(running=0.0, awake=False)), gpus=()))

    assert [(sample.metric.name, sample.labels, sample.value) for sample in samples] == [
        ("headroom_engine_info", (*AN_ENGINE, "vllm"), 1.0),
        ("headroom_engine_requests_running", AN_ENGINE, 0.0),
        ("headroom_engine_awake", AN_ENGINE, 0.0),
    ]


def test_a_failed_page_shows_no_engine_and_no_input() -> None:
    samples = derive_readings(snapshot(engines=failure(Source.ENGINE), gpus=failure(Source.NVML)))

    assert samples == ()


def test_inputs_show_what_the_page_offers() -> None:
    samples = derive_readings(
        snapshot(engines=page(inputs=(("requests_running", True), ("sleep_state", False))), gpus=())
    )

    assert values(samples, catalog.INPUT_AVAILABLE) == {("requests_running",): 1.0, ("sleep_state",): 0.0}


def test_an_engine_without_a_name_has_settings_and_no_series() -> None:
    samples = derive_readings(snapshot(engines=page(engine(model_name="", kv_capacity_tokens=64.0)), gpus=()))

    assert samples == ()
