"""One sentence of each GPU, the engine and its host memory."""

from __future__ import annotations

from typing import Final

import pytest
from msgspec.structs import replace

from tests.samples import A_GPU, engine, failure, gpu, page, snapshot
from tests.unit.derive.life.watch import NO_GPU, REFUSED, SERVER, UNSEEN, WORKER, Watch, serving, working
from vllm_headroom import catalog
from vllm_headroom.derive.leak.leak import LeakMemory
from vllm_headroom.derive.verdicts import derive_verdicts, judge_snapshot
from vllm_headroom.model import (
    BudgetExcess,
    EnginePage,
    EngineStatus,
    Failure,
    Fate,
    HangSign,
    HostMemory,
    Leftover,
    Metric,
    Sample,
    ServerReply,
    Snapshot,
    Values,
    Verdict,
    find_worst_level,
)
from vllm_headroom.units import GIB, MIB
from vllm_headroom.vocabulary import (
    EngineState,
    ExitReason,
    HostBasis,
    LeakLocation,
    LeakState,
    Level,
    Reason,
    ServerAnswer,
    Situation,
    Source,
)

HOUR: Final = 3600.0


def state(value: str, metric: Metric = catalog.LEAK_STATE, labels: tuple[str, ...] = A_GPU) -> Sample:
    return Sample(metric, (*labels, value), 1.0)


def make_snapshot(engine_state: EngineState = EngineState.SERVING) -> Snapshot:
    return replace(
        snapshot(engines=page(engine()), gpus=(replace(gpu(), process_count=1),)),
        engine_status=EngineStatus(state=engine_state, exits=((ExitReason.GONE, 1),)),
    )


def of(subject: str, *samples: Sample, at: Snapshot | None = None) -> Verdict:
    verdicts = [
        verdict for verdict in judge_snapshot(at or make_snapshot(), Values(samples)) if verdict.subject == subject
    ]
    assert verdicts, subject
    return verdicts[0]


LEAK: Final = (
    Sample(catalog.LEAK_RATE, A_GPU, 100_000.0),
    Sample(catalog.LEAK_PER_REQUEST, A_GPU, 12.6 * MIB / 1000),
    Sample(catalog.TIME_TO_OOM, A_GPU, 7.6 * HOUR),
    Sample(catalog.TIME_TO_OOM_LOWER, A_GPU, 5 * HOUR),
)


PAGE_ERROR: Final = Failure(
    source=Source.ENGINE, reason=Reason.HTTP_STATUS, message="the page answers 500: check df", http_status=500
)
LATE_PAGE: Final = Failure(source=Source.ENGINE, reason=Reason.TIMEOUT, message="no page: wait")


def judge_state(
    engine_state: EngineState, engines: EnginePage | Failure, answer: ServerAnswer | None, *, is_doubted: bool = False
) -> Verdict:
    """Return the verdict on an engine whose server gives this answer beside its page."""
    server = None if answer is None else ServerReply(answer=answer)
    status = EngineStatus(state=engine_state, are_gauges_doubted=is_doubted)
    shown = replace(snapshot(engines=engines), engine_status=status, server=server)
    return of("engine", Sample(catalog.ENGINE_RUNNING, ("m", "0"), 106.0), at=shown)


@pytest.mark.parametrize(
    ("engines", "answer", "part"),
    [
        (
            PAGE_ERROR,
            ServerAnswer.HEALTHY,
            "only its metrics page fails: whether it makes progress is not known; the page",
        ),
        (PAGE_ERROR, None, "has a server that runs, and reports an error"),
        (PAGE_ERROR, ServerAnswer.UNCLEAR, "has a server that runs, and reports an error"),
        (LATE_PAGE, ServerAnswer.HEALTHY, "a PROMETHEUS_MULTIPROC_DIR that is full or on a network volume does this"),
        (LATE_PAGE, None, "may be up or down"),
    ],
)
def test_an_engine_whose_page_alone_fails_is_not_restarted(
    engines: Failure, answer: ServerAnswer | None, part: str
) -> None:
    verdict = judge_state(EngineState.UNKNOWN, engines, answer)

    assert part in verdict.sentence
    assert verdict.sentence.endswith(f"{engines.message}.")
    assert (verdict.situation, verdict.level) == (Situation.BLIND, Level.UNKNOWN)
    assert "restart" not in verdict.situation.action


def test_gauges_that_nothing_supports_are_called_stale() -> None:
    stale = judge_state(EngineState.SERVING, page(engine()), ServerAnswer.HEALTHY, is_doubted=True)
    doubted = judge_state(EngineState.UNKNOWN, page(engine()), ServerAnswer.HEALTHY, is_doubted=True)

    assert stale.sentence.startswith("The engine serves: 106 running; these gauges are stale")
    assert (stale.situation, stale.level) == (Situation.HEALTHY, Level.GOOD)
    assert "send one request, which updates stale gauges" in doubted.sentence
    assert doubted.situation is Situation.BLIND


def test_a_stalled_engine_shows_what_else_than_its_page_fails() -> None:
    assert (
        "its health check reports an error"
        in judge_state(EngineState.STALLED, page(engine()), ServerAnswer.UNHEALTHY).sentence
    )
    assert (
        "its health check does not answer; no page"
        in judge_state(EngineState.STALLED, LATE_PAGE, ServerAnswer.SILENT).sentence
    )


def test_a_leak_is_an_alarm_with_its_rate_and_its_end() -> None:
    verdict = of("GPU 0", state(LeakState.LEAKING), *LEAK)

    assert verdict.sentence == (
        "GPU 0 leaks 12.6 MiB per 1,000 requests: out of memory in 5 h 0 min at the earliest,"
        " likely in about 7 h 36 min."
    )
    assert (verdict.level, verdict.alert) == (Level.ALARM, "HeadroomGpuMemoryLeak")


def test_a_gpu_whose_memory_is_not_reported_is_not_healthy() -> None:
    silent = gpu(memory=False)
    verdict = of("GPU 0", at=replace(make_snapshot(), gpus=(silent,)))

    assert (
        verdict.sentence
        == "The memory of GPU 0 is not known: the driver does not report it, or reports what cannot be."
    )
    assert (verdict.level, verdict.situation) == (Level.UNKNOWN, Situation.BLIND)
    assert verdict.alert == "HeadroomSidecarBlind"


def test_a_gpu_that_a_list_leaves_out_is_not_passed_over_in_silence() -> None:
    left_out = gpu(index=1, uuid="GPU-b", engine=70 * GIB, attribution=None)
    at = replace(make_snapshot(), gpus=(gpu(), left_out))

    verdict = of("GPU 1", at=at)

    assert verdict.sentence == (
        "GPU 1 is not judged: the engine's processes hold 70 GiB of it, and HEADROOM_GPUS leaves it out."
    )
    assert verdict.level is Level.WARNING
    dead = Leftover(pid=7, fate=Fate.ORPHANED, used_bytes=70 * GIB)
    for unlisted_gpu in (replace(left_out, engine_bytes=0), replace(left_out, leftovers=(dead,))):
        verdicts = judge_snapshot(replace(at, gpus=(gpu(), unlisted_gpu)), Values(()))
        assert not [verdict for verdict in verdicts if verdict.subject == "GPU 1"]


def test_what_is_not_known_of_a_leak_is_not_said() -> None:
    assert of("GPU 0", state(LeakState.LEAKING)).sentence == "GPU 0 leaks."
    assert of("GPU 0", state(LeakState.LEAKING), LEAK[0]).sentence == "GPU 0 leaks 343 MiB an hour."


@pytest.mark.parametrize(
    ("where", "location_text"),
    [
        (LeakLocation.TENSORS, "tensors"),
        (LeakLocation.FRAGMENTATION, "what torch has reserved and cannot use"),
        (LeakLocation.OUTSIDE_TORCH, "what torch knows nothing of"),
    ],
)
def test_where_it_leaks_is_said_where_the_probe_knows_it(where: LeakLocation, location_text: str) -> None:
    verdict = of("GPU 0", state(LeakState.LEAKING), LEAK[1], state(where, catalog.LEAK_LOCATION))

    assert verdict.sentence == f"GPU 0 leaks 12.6 MiB per 1,000 requests, in {location_text}."


def test_with_less_than_an_hour_left_the_runbook_is_the_pages() -> None:
    soon = Sample(catalog.TIME_TO_OOM, A_GPU, 1800.0)

    assert of("GPU 0", state(LeakState.LEAKING), soon).alert == "HeadroomOutOfMemorySoon"
    assert of("GPU 0", state(LeakState.GROWING), soon).level is Level.ALARM
    assert of("GPU 0", state(LeakState.GROWING), soon).alert == "HeadroomGpuMemoryLeak"


def test_a_leak_with_more_than_a_day_left_has_the_alert_of_growth() -> None:
    late = Sample(catalog.TIME_TO_OOM, A_GPU, 25 * HOUR)

    assert of("GPU 0", state(LeakState.LEAKING), late).alert == "HeadroomGpuMemoryGrowing"


def test_growth_is_a_warning_that_claims_less() -> None:
    verdict = of("GPU 0", state(LeakState.GROWING), LEAK[1])

    assert verdict.sentence == "GPU 0 may leak 12.6 MiB per 1,000 requests."
    assert (verdict.level, verdict.alert) == (Level.WARNING, "HeadroomGpuMemoryGrowing")


@pytest.mark.parametrize(
    ("leak", "level", "sentence"),
    [
        (LeakState.STABLE, Level.GOOD, "GPU 0: no leak seen; 5 GiB are free."),
        (LeakState.UNSETTLED, Level.GOOD, "GPU 0: no leak seen under a load that changes; 5 GiB are free."),
        (LeakState.WARMING_UP, Level.UNKNOWN, "GPU 0: too early to tell whether it leaks; 5 GiB are free."),
        (LeakState.UNKNOWN, Level.UNKNOWN, "GPU 0: whether it leaks is not known; 5 GiB are free."),
        (LeakState.ASLEEP, Level.GOOD, "GPU 0: the engine sleeps; 5 GiB are free."),
    ],
)
def test_without_growth_the_free_memory_is_said(leak: LeakState, level: Level, sentence: str) -> None:
    verdict = of("GPU 0", state(leak), Sample(catalog.GPU_MEMORY_FREE, A_GPU, 5.0 * GIB))

    assert (verdict.level, verdict.sentence, verdict.alert) == (level, sentence, None)


def test_a_neighbour_is_never_all_green() -> None:
    verdict = of("GPU 0", state(LeakState.STABLE), Sample(catalog.GPU_MEMORY_HELD, (*A_GPU, "other"), 3.0 * GIB))

    assert (verdict.level, verdict.alert) == (Level.WARNING, "HeadroomNeighbourGrowing")
    assert verdict.sentence == "GPU 0: other processes hold 3 GiB of it; no leak seen."


def test_a_lost_gpu_is_an_alarm_whatever_was_said_before() -> None:
    lost = replace(gpu(), reading=replace(gpu().reading, failure=failure(Source.NVML)))
    at = replace(make_snapshot(), gpus=(lost,))

    verdict = of("GPU 0", state(LeakState.STABLE), at=at)

    assert (verdict.level, verdict.alert) == (Level.ALARM, "HeadroomGpuLost")
    assert verdict.sentence == "GPU 0 cannot be read: it failed."


def test_gpus_that_cannot_be_read_or_reported_are_not_known() -> None:
    unread = replace(make_snapshot(), gpus=failure(Source.NVML))
    unowned = replace(make_snapshot(), gpus=(gpu(attribution=None),))

    assert of("GPUs", at=unread).sentence == "The GPUs cannot be read: it failed."
    assert of("GPUs", at=unowned).level is Level.UNKNOWN


@pytest.mark.parametrize("engine_state", list(EngineState))
def test_each_state_of_the_engine_has_its_sentence(engine_state: EngineState) -> None:
    verdict = of("engine", at=make_snapshot(engine_state))

    assert verdict.sentence.startswith("The engine ")
    assert (verdict.level is Level.ALARM) == (engine_state in {EngineState.DOWN, EngineState.STALLED})


def test_an_engine_that_was_never_seen_is_no_alarm() -> None:
    at = replace(make_snapshot(), engine_status=EngineStatus(state=EngineState.DOWN, was_seen=False))

    verdict = of("engine", at=at)
    assert (verdict.level, verdict.alert) == (Level.UNKNOWN, None)
    assert (
        verdict.sentence
        == "The engine has not been seen yet: its metrics page does not answer and no engine process is running."
    )


def test_an_engine_that_served_and_whose_exit_cannot_be_counted_has_been_seen() -> None:
    """Neither processes nor held memory are visible: a closed port is no proof of an exit."""
    watch = Watch(processes=UNSEEN, gpus=NO_GPU)
    watch.look(working(10))
    watch.look(REFUSED)

    assert watch.seen is not None
    assert of("engine", at=watch.seen).sentence.startswith("The engine is down: ")


def test_little_free_memory_is_news_where_there_was_more_at_first() -> None:
    def said(free_mib: int, first_mib: int) -> tuple[Level, str | None]:
        at = replace(
            make_snapshot(),
            engine_status=EngineStatus(state=EngineState.SERVING, first_room_bytes=((A_GPU[1], first_mib * MIB),)),
        )
        verdict = of(
            "GPU 0", state(LeakState.STABLE), Sample(catalog.GPU_MEMORY_FREE, A_GPU, float(free_mib * MIB)), at=at
        )
        return verdict.level, verdict.alert

    low = (Level.WARNING, "HeadroomGpuMemoryLow")
    assert [said(500, 5000), said(100, 300)] == [low, low]
    assert [said(520, 5000), said(200, 300)] == 2 * [(Level.GOOD, None)]


def test_a_closed_gate_is_reported_and_an_open_one_is_not() -> None:
    verdicts = judge_snapshot(make_snapshot(), Values([Sample(catalog.GATE_OPEN, ("ready",), 0.0)]))

    assert [verdict.sentence for verdict in verdicts if verdict.subject == "gates"] == [
        "The gate /gate/ready is closed; its answer has the reason."
    ]


def test_a_silent_page_is_reported_with_its_cause() -> None:
    silent = replace(make_snapshot(EngineState.DOWN), engines=failure(Source.ENGINE))

    assert of("engine", at=silent).sentence == (
        "The engine is down: its metrics page does not answer and no engine process is running; it failed."
    )


def test_of_a_server_without_a_core_it_is_not_said_that_it_has_work() -> None:
    watch = serving()
    watch.look(working(20, running=0.0), processes=(SERVER,))
    assert watch.seen is not None

    assert of("engine", at=watch.seen).sentence == "The engine is stalled: it should make progress and makes none."


def test_a_stalled_engine_says_how_many_requests_are_stuck() -> None:
    samples = (
        Sample(catalog.ENGINE_RUNNING, ("m", "0"), 4.0),
        Sample(catalog.ENGINE_RUNNING, ("m", "1"), 3.0),
        Sample(catalog.ENGINE_WAITING, ("m", "0"), 2.0),
    )

    assert of("engine", *samples, at=make_snapshot(EngineState.STALLED)).sentence == (
        "The engine is stalled: it should make progress and makes none, with 7 requests running and 2 waiting."
    )


def test_a_serving_engine_says_its_load() -> None:
    samples = (
        Sample(catalog.ENGINE_RUNNING, ("m", "0"), 4.0),
        Sample(catalog.ENGINE_RUNNING, ("m", "1"), 3.0),
        Sample(catalog.ENGINE_KV_USED, ("m", "0"), 0.412),
        Sample(catalog.ENGINE_ADDITIONAL_REQUESTS, ("m", "0"), 9.0),
    )

    assert of("engine", *samples).sentence == "The engine serves: 7 running, KV cache 41 % used, room in it for 9 more."
    waiting = Sample(catalog.ENGINE_WAITING, ("m", "0"), 5.0)
    assert of("engine", *samples, waiting).sentence == "The engine serves: 7 running, 5 waiting, KV cache 41 % used."


def test_where_memory_is_low_no_room_for_more_requests_is_named() -> None:
    low = replace(
        make_snapshot(),
        engine_status=EngineStatus(state=EngineState.SERVING, first_room_bytes=((A_GPU[1], 5 * GIB),)),
    )
    samples = (
        Sample(catalog.ENGINE_RUNNING, ("m", "0"), 4.0),
        Sample(catalog.ENGINE_ADDITIONAL_REQUESTS, ("m", "0"), 9.0),
    )

    scarce = Sample(catalog.GPU_MEMORY_FREE, A_GPU, 100.0 * MIB)
    assert of("engine", *samples, scarce, at=low).sentence == "The engine serves: 4 running."
    ample = Sample(catalog.GPU_MEMORY_FREE, A_GPU, 5.0 * GIB)
    assert of("engine", *samples, ample, at=low).sentence == "The engine serves: 4 running, room in it for 9 more."


@pytest.mark.parametrize(
    ("doing", "says"),
    [(EngineState.SERVING, "served when last seen"), (EngineState.ASLEEP, "was asleep when last seen")],
)
def test_without_a_page_it_is_said_what_the_engine_was(doing: EngineState, says: str) -> None:
    """Its state stays what it was for a minute, in which nobody knows that it still serves."""
    at = replace(make_snapshot(doing), engines=failure(Source.ENGINE))

    verdict = of("engine", at=at)
    assert (verdict.level, verdict.sentence) == (Level.UNKNOWN, f"The engine {says}; it failed.")


@pytest.mark.parametrize(
    ("doing", "signs", "level", "says"),
    [
        (
            EngineState.UNKNOWN,
            (HangSign.STUCK,),
            Level.UNKNOWN,
            "may be stalled: its page shows no work, and a core or worker is stopped, or blocked in the kernel",
        ),
        (
            EngineState.STALLED,
            (HangSign.MUTE, HangSign.UNANSWERED),
            Level.ALARM,
            "is stalled: its page shows no work, and the probe in the core is silent, and a request gets no answer",
        ),
    ],
)
def test_an_idle_engine_that_hangs_is_described_by_its_signs(
    doing: EngineState, signs: tuple[HangSign, ...], level: Level, says: str
) -> None:
    verdict = of("engine", at=replace(make_snapshot(), engine_status=EngineStatus(state=doing, hang_signs=signs)))

    assert (verdict.level, verdict.sentence, verdict.alert) == (level, f"The engine {says}.", "HeadroomEngineStalled")


@pytest.mark.parametrize(
    ("doing", "pressure", "says"),
    [
        (EngineState.UNKNOWN, 0.9, "may be up or down: that is not known; the machine is short of CPU; it failed"),
        (EngineState.UNKNOWN, 0.3, "may be up or down: that is not known; it failed"),
        (EngineState.UNKNOWN, None, "may be up or down: that is not known; it failed"),
        (EngineState.STALLED, 0.9, "is stalled: it should make progress and makes none; it failed"),
    ],
)
def test_a_silent_server_on_a_machine_that_is_short_of_cpu_is_starved(
    doing: EngineState, pressure: float | None, says: str
) -> None:
    server = replace(SERVER, cpu_pressure_ratio=pressure)
    verdict = of("engine", at=replace(make_snapshot(doing), engines=failure(Source.ENGINE), processes=(server,)))

    assert verdict.sentence == f"The engine {says}."


def test_a_run_that_nobody_follows_is_not_known() -> None:
    assert of("engine", at=replace(make_snapshot(), engine_status=None)).level is Level.UNKNOWN


def test_stranded_blocks_are_a_warning() -> None:
    verdicts = judge_snapshot(make_snapshot(), Values([Sample(catalog.ENGINE_KV_STRANDED, ("m", "0"), 0.2)]))

    assert [verdict.alert for verdict in verdicts if verdict.level is Level.WARNING] == ["HeadroomKvCacheStranded"]


def test_host_memory_is_said_by_role_where_it_grows_and_once_where_not() -> None:
    core = state(LeakState.LEAKING, catalog.HOST_LEAK_STATE, ("engine_core",))
    worker = state(LeakState.STABLE, catalog.HOST_LEAK_STATE, ("worker",))
    sample = Sample(catalog.HOST_MEMORY, ("worker",), 2.0 * GIB)

    leaking = of("host memory", core, worker, Sample(catalog.HOST_LEAK_RATE, ("engine_core",), 1000.0))
    assert leaking.sentence == "Host memory of engine_core leaks 3.43 MiB an hour."
    assert of("host memory", worker, sample).sentence == (
        "Host memory: no leak seen; the engine's processes hold 2 GiB."
    )


@pytest.mark.parametrize(
    ("left_hours", "leaking", "growing"),
    [
        (0.5, "HeadroomHostOutOfMemorySoon", "HeadroomHostMemoryRunsOut"),
        (23.0, "HeadroomHostMemoryRunsOut", "HeadroomHostMemoryLeak"),
        (25.0, "HeadroomHostMemoryLeak", "HeadroomHostMemoryLeak"),
    ],
)
def test_growth_on_the_host_has_the_alert_of_its_time(left_hours: float, leaking: str, growing: str) -> None:
    sample = Sample(catalog.HOST_TIME_TO_OOM, (), left_hours * HOUR)
    sure, unsure = (
        state(leak_state, catalog.HOST_LEAK_STATE, ("worker",)) for leak_state in (LeakState.LEAKING, LeakState.GROWING)
    )

    assert (of("host memory", sure, sample).alert, of("host memory", unsure, sample).alert) == (leaking, growing)


@pytest.mark.parametrize(
    ("leak", "level", "sentence"),
    [
        (LeakState.UNSETTLED, Level.GOOD, "Host memory: no leak seen under a load that changes; "),
        (LeakState.WARMING_UP, Level.UNKNOWN, "Host memory: too early to tell whether it leaks; "),
        (LeakState.UNKNOWN, Level.UNKNOWN, "Host memory: whether it leaks is not known; "),
        (LeakState.ASLEEP, Level.GOOD, "Host memory: the engine sleeps; "),
    ],
)
def test_host_memory_is_judged_in_the_words_of_a_gpu(leak: LeakState, level: Level, sentence: str) -> None:
    core = state(leak, catalog.HOST_LEAK_STATE, ("engine_core",))
    sample = Sample(catalog.HOST_MEMORY, ("engine_core",), 2.0 * GIB)

    verdict = of("host memory", core, sample)

    assert (verdict.level, verdict.sentence) == (level, f"{sentence}the engine's processes hold 2 GiB.")


@pytest.mark.parametrize(
    ("watched", "sentence_end"),
    [
        (720.0, ": watched for 12 min 0 s, no leak seen"),
        (4 * HOUR - 1, ": watched for 3 h 59 min, no leak seen"),
        (4 * HOUR, ": no leak seen"),
        (None, ": no leak seen"),
    ],
)
def test_what_was_watched_for_minutes_is_not_said_to_have_no_leak(watched: float | None, sentence_end: str) -> None:
    stable = (state(LeakState.STABLE), state(LeakState.STABLE, catalog.HOST_LEAK_STATE, ("worker",)))
    core = state(LeakState.WARMING_UP, catalog.HOST_LEAK_STATE, ("engine_core",))
    watches = {} if watched is None else {"GPU-a": watched, "worker": watched, "engine_core": 9 * HOUR, "gone": 1.0}

    verdicts = {
        verdict.subject: verdict for verdict in judge_snapshot(make_snapshot(), Values((*stable, core)), watches)
    }

    assert verdicts["GPU 0"].sentence.startswith(f"GPU 0{sentence_end}")
    assert verdicts["host memory"].sentence.startswith(f"Host memory{sentence_end};")
    assert verdicts["host memory"].level is Level.GOOD


def test_an_engine_that_ends_again_and_again_is_not_well_while_it_serves() -> None:
    def said(ends: int) -> list[tuple[Level, str | None]]:
        at = replace(make_snapshot(), engine_status=EngineStatus(state=EngineState.SERVING, recent_exits=ends))
        return [
            (verdict.level, verdict.alert) for verdict in judge_snapshot(at, Values(())) if verdict.subject == "engine"
        ]

    assert said(2) == [(Level.GOOD, None)]
    assert said(3) == [(Level.ALARM, "HeadroomEngineCrashLoop"), (Level.GOOD, None)]


def test_a_host_leak_has_its_time_and_a_container_its_limit() -> None:
    leaking = state(LeakState.LEAKING, catalog.HOST_LEAK_STATE, ("worker",))
    stable = state(LeakState.STABLE, catalog.HOST_LEAK_STATE, ("worker",))
    soon, sample = Sample(catalog.HOST_TIME_TO_OOM, (), 1800.0), Sample(catalog.HOST_TIME_TO_OOM_LOWER, (), 1200.0)
    room = (Sample(catalog.HOST_MEMORY_USED, (), 12.0 * GIB), Sample(catalog.HOST_MEMORY_LIMIT, (), 64.0 * GIB))

    verdict = of("host memory", leaking, soon, sample)
    assert (
        verdict.sentence
        == "Host memory of worker leaks: out of memory in 20 min 0 s at the earliest, likely in about 30 min 0 s."
    )
    assert verdict.alert == "HeadroomHostOutOfMemorySoon"
    now = Sample(catalog.HOST_TIME_TO_OOM, (), 0.0)
    assert of("host memory", leaking, now).sentence == "Host memory of worker leaks: out of memory at any moment."
    assert of("host memory", stable, *room).sentence == "Host memory: no leak seen; 12 GiB of 64 GiB are in use."
    at = replace(make_snapshot(), host=HostMemory(basis=HostBasis.MACHINE, swap_bytes=3 * GIB, shm_used_bytes=8 * GIB))
    sentence = of("host memory", stable, *room, at=at).sentence
    assert sentence.endswith(
        "; 12 GiB of 64 GiB are in use on the machine, 8 GiB of it in /dev/shm, and 3 GiB are swapped out."
    )
    parts = {"kv_offload": 4.0 * GIB, "weights_offload": GIB, "multimodal_cache": 8.0 * GIB}
    planned = [Sample(catalog.HOST_MEMORY_PLANNED, (part,), size) for part, size in parts.items()]
    assert of("host memory", stable, *room, *planned).sentence.endswith(
        "12 GiB of 64 GiB are in use; offloads of 5 GiB may take up to 1.92 times that."
    )


GB200 = (192.2, 192.2, 192.2, 192.2)
"""The shared memory of four workers, of 769 GiB in all, where 400 were planned (vllm-project/vllm#53042)."""


@pytest.mark.parametrize(
    ("planned", "shm", "workers", "neighbours", "offload_text"),
    [
        (400, 1.0, GB200, (), "400 GiB take 766 GiB, 1.91 times that (vllm-project/vllm#53042, #56410)"),
        (400, None, GB200, (), "400 GiB may take up to 1.92 times that"),
        (400, 1.0, GB200, ((5, 1.0),), "400 GiB may take up to 1.92 times that"),
        (40, 41.0, (40, 40, 40, 40), (), "40 GiB take 41 GiB"),
        (40, 46.5, (12, 12, 12, 12), (), "40 GiB take 46.5 GiB, 1.16 times that (vllm-project/vllm#53042, #56410)"),
        (40, 90.0, (40, 1), (), "40 GiB take 41 GiB"),
        (1, 1.9, (1.9,), (), "1 GiB take 1.9 GiB"),
        (40, 90.0, (), (), "40 GiB may take up to 1.92 times that"),
    ],
)
def test_what_offloads_really_take_is_said_beside_what_was_planned(
    planned: float,
    shm: float | None,
    workers: tuple[float, ...],
    neighbours: tuple[tuple[int, float], ...],
    offload_text: str,
) -> None:
    stable = state(LeakState.STABLE, catalog.HOST_LEAK_STATE, ("worker",))
    processes = tuple(replace(WORKER, pid=pid, shared_bytes=int(shared * GIB)) for pid, shared in enumerate(workers))
    host = HostMemory(shm_used_bytes=None if shm is None else int(shm * GIB))
    at = replace(make_snapshot(), processes=processes, host=host, neighbours=frozenset(neighbours))
    offload = Sample(catalog.HOST_MEMORY_PLANNED, ("kv_offload",), planned * GIB)

    assert of("host memory", stable, offload, at=at).sentence.endswith(f"; offloads of {offload_text}.")


@pytest.mark.parametrize(
    ("used", "first_gib", "alert"),
    [
        (61.5, 6.0, "HeadroomHostMemoryLow"),
        (61.5, 4.0, None),
        (61.5, None, None),
        (60.5, 20.0, None),
    ],
)
def test_little_host_memory_that_was_more_is_a_warning(used: float, first_gib: float | None, alert: str | None) -> None:
    stable = state(LeakState.STABLE, catalog.HOST_LEAK_STATE, ("worker",))
    room = None if first_gib is None else int(first_gib * GIB)
    at = replace(
        make_snapshot(),
        host=HostMemory(used_bytes=int(used * GIB), limit_bytes=64 * GIB),
        engine_status=EngineStatus(state=EngineState.SERVING, first_host_room_bytes=room),
    )

    verdict = of("host memory", stable, at=at)

    assert (verdict.level, verdict.alert) == (Level.WARNING if alert else Level.GOOD, alert)


def test_the_worst_comes_first() -> None:
    verdicts = judge_snapshot(make_snapshot(EngineState.DOWN), Values([state(LeakState.GROWING)]))

    assert [verdict.level for verdict in verdicts] == [Level.ALARM, Level.WARNING]
    assert find_worst_level(verdicts) is Level.ALARM
    assert find_worst_level(()) is Level.UNKNOWN


def test_what_is_left_of_an_engine_that_ended_is_a_warning_beside_what_else_is_said_of_the_gpu() -> None:
    leftover = Leftover(pid=4711, fate=Fate.ORPHANED, used_bytes=38 * GIB)
    at = replace(make_snapshot(), gpus=(replace(gpu(), leftovers=(leftover,)),))

    first_verdict, *_ = [
        verdict for verdict in judge_snapshot(at, Values([state(LeakState.STABLE)])) if verdict.subject == "GPU 0"
    ]

    assert first_verdict.sentence.startswith(
        "GPU 0: 38 GiB held by pid 4711, left behind by an engine that has ended: end it"
    )
    assert (first_verdict.level, first_verdict.alert) == (Level.WARNING, "HeadroomMemoryLeftBehind")


@pytest.mark.parametrize(
    ("to_wake", "level", "says"),
    [
        (2 * GIB, Level.GOOD, "the engine sleeps; to wake takes 2 GiB; 5 GiB are free."),
        (9 * GIB, Level.WARNING, "to wake takes 9 GiB, and only 5 GiB are free; the engine sleeps."),
        (0, Level.GOOD, "the engine sleeps; 5 GiB are free."),
    ],
)
def test_of_a_sleeping_engine_it_is_said_whether_it_could_wake(to_wake: int, level: Level, says: str) -> None:
    at = replace(
        make_snapshot(), engine_status=EngineStatus(state=EngineState.ASLEEP, wake_bytes=(("GPU-a", to_wake),))
    )

    verdict = of("GPU 0", state(LeakState.ASLEEP), Sample(catalog.GPU_MEMORY_FREE, A_GPU, 5.0 * GIB), at=at)

    assert verdict.sentence == f"GPU 0: {says}"
    assert verdict.level is level


def test_where_little_is_free_it_is_still_said_what_waking_lacks() -> None:
    status = EngineStatus(
        state=EngineState.ASLEEP, wake_bytes=(("GPU-a", 9 * GIB),), first_room_bytes=(("GPU-a", 5 * GIB),)
    )
    at = replace(make_snapshot(), engine_status=status)

    verdict = of("GPU 0", state(LeakState.ASLEEP), Sample(catalog.GPU_MEMORY_FREE, A_GPU, 256.0 * MIB), at=at)

    assert verdict.sentence == ("GPU 0: to wake takes 9 GiB, and only 256 MiB are free; the engine sleeps.")
    assert verdict.alert == "HeadroomGpuMemoryLow"


FREE: Final = Sample(catalog.GPU_MEMORY_FREE, A_GPU, 640.0 * MIB)
TOTAL: Final = Sample(catalog.GPU_MEMORY_TOTAL, A_GPU, 80.0 * GIB)
EXCESS: Final = BudgetExcess(
    budget_bytes=74 * GIB,
    excess_bytes=4 * GIB,
    first_excess_bytes=4 * GIB,
    total_bytes=80 * GIB,
    seconds=300.0,
    is_from_start=True,
    needed_bytes=GIB,
)
OTHERS: Final = Sample(catalog.GPU_MEMORY_HELD, (*A_GPU, "other"), 3.0 * GIB)
STRANDED: Final = Sample(catalog.ENGINE_KV_STRANDED, ("m", "0"), 0.2)
GROWS: Final = state(LeakState.GROWING)
HOST_LEAKS: Final = state(LeakState.LEAKING, catalog.HOST_LEAK_STATE, ("engine_core",))
LOOPS: Final = replace(
    make_snapshot(), engine_status=EngineStatus(state=EngineState.DOWN, was_seen=True, recent_exits=3)
)


def over_budget(engine_state: EngineState = EngineState.SERVING, **excess_fields: float) -> Snapshot:
    excess = replace(EXCESS, **excess_fields)
    return replace(make_snapshot(), engine_status=EngineStatus(state=engine_state, excesses=((A_GPU[1], excess),)))


UNREAD: Final = replace(make_snapshot(), gpus=failure(Source.NVML))


@pytest.mark.parametrize(
    ("at", "samples", "situation"),
    [
        pytest.param(make_snapshot(), (state(LeakState.STABLE),), Situation.HEALTHY, id="healthy"),
        pytest.param(make_snapshot(EngineState.ASLEEP), (state(LeakState.ASLEEP),), Situation.ASLEEP, id="asleep"),
        pytest.param(make_snapshot(EngineState.STARTING), (), Situation.STARTING, id="starting"),
        pytest.param(make_snapshot(EngineState.UNKNOWN), (), Situation.BLIND, id="unknown engine"),
        pytest.param(UNREAD, (), Situation.BLIND, id="unread GPUs"),
        pytest.param(UNREAD, (STRANDED,), Situation.STRANDED, id="stranded before blind"),
        pytest.param(make_snapshot(), (GROWS,), Situation.GROWING, id="growing"),
        pytest.param(make_snapshot(), (GROWS, OTHERS), Situation.GROWING, id="a GPU has one sentence"),
        pytest.param(make_snapshot(), (OTHERS, STRANDED), Situation.NEIGHBOUR, id="neighbour"),
        pytest.param(over_budget(), (FREE, STRANDED), Situation.OVER_BUDGET, id="over budget"),
        pytest.param(make_snapshot(), (HOST_LEAKS, FREE), Situation.HOST_LEAK, id="host leak"),
        pytest.param(make_snapshot(), (HOST_LEAKS, *LEAK, state(LeakState.LEAKING)), Situation.LEAKING, id="leaking"),
        pytest.param(make_snapshot(EngineState.STALLED), (state(LeakState.LEAKING),), Situation.STALLED, id="stalled"),
        pytest.param(make_snapshot(EngineState.DOWN), (HOST_LEAKS,), Situation.DOWN, id="down"),
        pytest.param(LOOPS, (), Situation.CRASH_LOOP, id="crash loop"),
    ],
)
def test_the_worst_situation_is_the_first_sentence(
    at: Snapshot, samples: tuple[Sample, ...], situation: Situation
) -> None:
    verdicts, situation_samples = derive_verdicts(at, Values(samples), LeakMemory())

    assert verdicts[0].situation is situation
    assert {sample.labels[0]: sample.value for sample in situation_samples} == {
        listed_situation: float(listed_situation is situation) for listed_situation in Situation
    }


def free(gib: float) -> Sample:
    return Sample(catalog.GPU_MEMORY_FREE, A_GPU, gib * GIB)


@pytest.mark.parametrize(
    ("at", "room", "level", "alert"),
    [
        pytest.param(over_budget(), free(1.5), Level.WARNING, "HeadroomMemoryDiscrepancy", id="little left"),
        pytest.param(over_budget(), free(0.9), Level.ALARM, "HeadroomMemoryDiscrepancyHigh", id="less than a peak"),
        pytest.param(over_budget(), free(2.3), Level.GOOD, None, id="enough left"),
        pytest.param(over_budget(needed_bytes=2 * GIB), free(2.3), Level.WARNING, "HeadroomGpuMemoryTight", id="peak"),
        pytest.param(over_budget(seconds=299.0), free(0.9), Level.GOOD, None, id="not for long"),
        pytest.param(over_budget(EngineState.ASLEEP), free(0.9), Level.GOOD, None, id="asleep"),
        pytest.param(make_snapshot(), free(0.9), Level.GOOD, None, id="within its budget"),
    ],
)
def test_an_engine_over_its_budget_is_trouble_where_little_is_left(
    at: Snapshot, room: Sample, level: Level, alert: str | None
) -> None:
    verdict = of("GPU 0", state(LeakState.STABLE), room, at=at)

    assert (verdict.level, verdict.alert) == (level, alert)


def test_what_others_or_a_burst_hold_now_is_not_missing_because_of_the_budget() -> None:
    burst = Sample(catalog.GPU_MEMORY_HELD, (*A_GPU, "engine"), 79.5 * GIB)

    assert of("GPU 0", state(LeakState.STABLE), free(0.9), burst, at=over_budget()).level is Level.GOOD
    assert of("GPU 0", state(LeakState.STABLE), free(0.9), OTHERS, at=over_budget()).situation is Situation.NEIGHBOUR


def test_an_engine_over_its_budget_is_said_with_what_a_burst_takes() -> None:
    assert of("GPU 0", state(LeakState.STABLE), free(0.9), at=over_budget()).sentence == (
        "GPU 0: the engine holds 4 GiB (5.4 %) more than its budget, and a burst takes 1 GiB;"
        " 922 MiB are free; no leak seen."
    )


def test_unified_memory_in_the_page_cache_is_not_free() -> None:
    available = Sample(catalog.GPU_MEMORY_FREE, A_GPU, 22.5 * GIB)
    blocks = Sample(catalog.UNIFIED_FREE_BLOCKS, A_GPU, 600.0 * MIB)

    waits = Sample(catalog.MEMORY_PRESSURE, (), 0.3)

    verdict = of("GPU 0", state(LeakState.STABLE), available, blocks, waits)

    assert (verdict.level, verdict.situation) == (Level.WARNING, Situation.LOW_MEMORY)
    assert verdict.alert == "HeadroomUnifiedMemoryCached"
    assert verdict.sentence == (
        "GPU 0: the card's memory is in the page cache: only 600 MiB are free in blocks of 2 MiB; no leak seen."
    )
    assert of("GPU 0", state(LeakState.STABLE), available, blocks).level is Level.GOOD, "a page cache is always full"


@pytest.mark.parametrize(("role", "level"), [("serving", Level.WARNING), ("shared-gpu", Level.GOOD)])
def test_a_neighbour_on_a_gpu_that_is_shared_by_plan_is_no_warning(role: str, level: Level) -> None:
    samples = [state(LeakState.STABLE), Sample(catalog.GPU_MEMORY_HELD, (*A_GPU, "other"), 2.0 * 2**30)]
    verdicts, verdict_samples = derive_verdicts(make_snapshot(), Values(samples), LeakMemory(), role)

    assert {
        text.level for text in verdicts if text.alert == "HeadroomNeighbourGrowing" or "other proc" in text.sentence
    } == {level}
    assert [sample.labels for sample in verdict_samples if sample.metric is catalog.ROLE] == (
        [] if role == "serving" else [(role,)]
    )
