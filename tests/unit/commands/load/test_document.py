"""What is reported about a load, and the exit status, over facts made by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.conftest import Golden
from tests.samples import A_GPU, AN_ENGINE, failure, gpu, snapshot
from vllm_headroom import catalog
from vllm_headroom.model import Failure, Sample
from vllm_headroom.vocabulary import CONTROLS, LeakState, Reason, Source
from vllm_headroom_tools.cli import build_parser
from vllm_headroom_tools.conclusion import Conclusion, Report
from vllm_headroom_tools.history import LeakCourse, LeakReplay, Moment
from vllm_headroom_tools.load.command import COMMAND, read_order
from vllm_headroom_tools.load.report import build_report
from vllm_headroom_tools.load.run import SHARES, Stage
from vllm_headroom_tools.load.sampling import LoadObservation
from vllm_headroom_tools.load.stream import Completion, Outcome
from vllm_headroom_tools.load.tally import Tally

HERE = Path(__file__).parent
GB = 10**9
HANGS = Failure(source=Source.NVML, reason=Reason.TIMEOUT, message="it hangs")
WORDS = ("--engine-url", "http://engine:8000", "--concurrency", "8", "--trace", "t.jsonl")
AN_HOUR = 3600.0


def shown(load_report: Report) -> str:
    return "".join(f"{line.translate(CONTROLS)}\n" for line in load_report.lines)


def tally(outcomes: Mapping[Outcome, int], text: str = "") -> Tally:
    new_tally = Tally(100.0)
    for outcome, count in outcomes.items():
        for number in range(count):
            new_tally.started_requests += 1
            answer = Completion(outcome=outcome, text=text, prompt_tokens=512, generation_tokens=128)
            if outcome is Outcome.SUCCEEDED:
                answer = replace(answer, text="")
                began = 100.0 + number
                new_tally.add_success(
                    answer, start_seconds=began, first_token_seconds=began + 0.0432, end_seconds=began + 3.21
                )
                new_tally.inter_token_seconds.add(0.000_02 * (number + 1))
            new_tally.add_end(answer)
    new_tally.own_delay_seconds.add(0.001)
    return new_tally


def observed(running: float) -> LoadObservation:
    observation = LoadObservation()
    samples = [
        Sample(catalog.ENGINE_RUNNING, AN_ENGINE, running),
        Sample(catalog.ENGINE_WAITING, AN_ENGINE, 0.0),
        Sample(catalog.ENGINE_KV_USED, AN_ENGINE, running / 100),
        Sample(catalog.ENGINE_PREEMPTIONS, AN_ENGINE, 0.0),
        Sample(catalog.MEMORY_PER_RUNNING_REQUEST, A_GPU, 72 * GB / running),
    ]
    observation.add(snapshot(gpus=(gpu(total=80 * GB, used=73 * GB, engine=72 * GB),)), samples)
    return observation


def step(outcomes: Mapping[Outcome, int], *, share: float = 1.0, error_text: str = "") -> Stage:
    return Stage(
        share=share,
        clients=round(8 * share),
        seconds=60.0,
        tally=tally(outcomes, error_text),
        observation=observed(8 * share),
    )


def whole(
    *, finished: int | None = 4000, host: bool = False, is_gone: bool = False, unread: int = 0
) -> LoadObservation:
    """Return what was seen in 240 samples of an hour or more: 70 GB held, 73 at most, 72 at the end."""
    observation = LoadObservation()
    for number in range(240):
        held_bytes = {0: 70, 239: 72}.get(number, 73) * GB
        counts = [Sample(catalog.ENGINE_PREEMPTIONS, AN_ENGINE, 0.0)]
        counts += [] if finished is None else [Sample(catalog.ENGINE_FINISHED, AN_ENGINE, finished * number // 239)]
        counts += [Sample(catalog.HOST_MEMORY, ("worker",), held_bytes)] if host else []
        observation.add(
            snapshot(
                at=number * AN_HOUR / 239,
                engines=failure(Source.ENGINE) if is_gone and number == 239 else None,
                gpus=HANGS if 0 < number <= unread else (gpu(total=80 * GB, used=73 * GB, engine=held_bytes),),
            ),
            counts,
        )
    return observation


def make_replay(state: LeakState, *series: str) -> LeakReplay:
    leak_replay = LeakReplay()
    for name in series:
        course = leak_replay._courses[name] = LeakCourse()
        course.step(state, Moment(seconds=1.0, bytes_per_request=500.0))
    return leak_replay


STABLE = make_replay(LeakState.STABLE, "GPU-a")
LEAK = make_replay(LeakState.LEAKING, "GPU-a", "worker")


def report(
    *steps: Stage,
    observation: LoadObservation | None = None,
    watch: LeakReplay = STABLE,
    stopped: bool = False,
    limits: tuple[str, ...] = (),
) -> Report:
    load_order = read_order(build_parser(COMMAND, "load").read((*WORDS, *limits)))
    return build_report(load_order, "m", steps, observation or whole(), watch, is_interrupted=stopped)


GOOD_STEP = step({Outcome.SUCCEEDED: 20})


def test_a_good_load_is_reported(golden: Golden) -> None:
    printed_report = report(*(step({Outcome.SUCCEEDED: 10}, share=share) for share in SHARES))

    golden(HERE / "good.json", json.dumps(printed_report.build_envelope("load"), indent=2) + "\n")
    golden(HERE / "good.txt", shown(printed_report))


@pytest.mark.parametrize(
    ("limits", "share", "faults"),
    [
        (("--max-ttft-p99", "40ms"), 1.0, ["at 100% the p99 of the first token was 0.0432 s, more than 0.04 s"]),
        (("--max-latency-p99", "3s"), 1.0, ["at 100% the p99 of the whole request was 3.21 s, more than 3 s"]),
        (("--max-ttft-p99", "50ms", "--max-latency-p99", "4s"), 1.0, []),
        (("--max-ttft-p99", "40ms"), 1.2, []),
    ],
    ids=["first token", "whole request", "within both", "beyond the load asked for"],
)
def test_a_load_slower_than_its_limits_is_not_good(limits: tuple[str, ...], share: float, faults: list[str]) -> None:
    judged = report(step({Outcome.SUCCEEDED: 20}, share=share), limits=limits)

    assert [finding.text for finding in judged.findings] == faults
    assert judged.verdict is (Conclusion.NOT_GOOD if faults else Conclusion.GOOD)


def test_a_bad_load_is_reported(golden: Golden) -> None:
    bad = step(dict.fromkeys(Outcome, 2), share=1.2, error_text="500: CUDA out of memory.\x1b[2J")
    bad.tally.own_delay_seconds.add(0.321)
    printed_report = report(
        GOOD_STEP, bad, observation=whole(host=True, is_gone=True, unread=3), watch=LEAK, stopped=True
    )

    golden(HERE / "bad.txt", shown(printed_report))
    assert printed_report.verdict is Conclusion.NOT_GOOD
    assert printed_report.data["requests"] == {"began": 38} | dict.fromkeys(Outcome, 2) | {"succeeded": 22}


@pytest.mark.parametrize(
    ("outcomes", "report_options", "verdict"),
    [
        ({Outcome.SUCCEEDED: 1}, {}, Conclusion.GOOD),
        ({Outcome.SUCCEEDED: 99, Outcome.FAILED: 1}, {}, Conclusion.GOOD),
        ({Outcome.SUCCEEDED: 98, Outcome.FAILED: 1, Outcome.CLOSED: 1}, {}, Conclusion.NOT_GOOD),
        ({Outcome.SUCCEEDED: 25, Outcome.REJECTED: 20, Outcome.UNFINISHED: 2}, {}, Conclusion.NOT_GOOD),
        ({Outcome.SUCCEEDED: 1}, {"stopped": True}, Conclusion.CANNOT_TELL),
        ({Outcome.SUCCEEDED: 9, Outcome.UNFINISHED: 5}, {"stopped": True}, Conclusion.CANNOT_TELL),
        ({Outcome.SUCCEEDED: 99, Outcome.OUT_OF_MEMORY: 1}, {}, Conclusion.NOT_GOOD),
        ({Outcome.SUCCEEDED: 99}, {"observation": whole(is_gone=True)}, Conclusion.NOT_GOOD),
        ({Outcome.SUCCEEDED: 99}, {"watch": LEAK}, Conclusion.NOT_GOOD),
        ({Outcome.REFUSED: 1}, {}, Conclusion.NOT_GOOD),
        ({Outcome.UNFINISHED: 1}, {}, Conclusion.NOT_GOOD),
        ({Outcome.UNFINISHED: 1}, {"stopped": True}, Conclusion.CANNOT_TELL),
        ({Outcome.SUCCEEDED: 9, Outcome.NOT_SENT: 1}, {}, Conclusion.CANNOT_TELL),
        ({Outcome.NOT_SENT: 1}, {}, Conclusion.CANNOT_TELL),
        ({Outcome.OUT_OF_MEMORY: 1, Outcome.NOT_SENT: 1}, {}, Conclusion.NOT_GOOD),
        ({}, {}, Conclusion.CANNOT_TELL),
    ],
)
def test_the_verdict_says_whether_it_is_good(
    outcomes: Mapping[Outcome, int], report_options: dict[str, object], verdict: Conclusion
) -> None:
    printed_report = report(step(outcomes), **report_options)  # type: ignore[arg-type]

    assert printed_report.verdict is verdict
    assert shown(printed_report).splitlines()[-1].startswith(("GOOD: ", "NOT GOOD: ", "CANNOT TELL: ")[verdict.status])


def test_a_server_that_says_its_engine_died_is_not_good() -> None:
    stage = step({Outcome.SUCCEEDED: 99})
    stage.tally.started_requests += 1
    stage.tally.add_end(Completion(outcome=Outcome.FAILED, is_engine_dead=True))

    assert report(stage).data["faults"] == ["the engine died: its web server says so"]


def test_an_answer_without_counts_makes_the_sum_unknown() -> None:
    stage = step({Outcome.SUCCEEDED: 9})
    stage.tally.add_success(
        Completion(outcome=Outcome.SUCCEEDED, prompt_tokens=3),
        start_seconds=100.0,
        first_token_seconds=101.0,
        end_seconds=102.0,
    )

    (step_data,) = report(stage).data["steps"]

    assert (step_data["prompt_tokens"], step_data["generation_tokens"], step_data["generation_tokens_per_second"]) == (
        None,
    ) * 3


def test_growth_is_per_thousand_requests_that_the_engine_finished() -> None:
    (counted,), (none,), (untold,) = (
        report(observation=whole(finished=count)).data["gpus"] for count in (4000, 0, None)
    )

    assert counted["delta_bytes_per_thousand_requests"] == 2 * GB / 4
    assert none["delta_bytes_per_thousand_requests"] is None
    assert untold["delta_bytes_per_thousand_requests"] is None


def test_gpus_of_which_none_is_the_engines_are_reported() -> None:
    observation = LoadObservation()
    observation.add(snapshot(gpus=(gpu(attribution=None),)), ())

    unread = report(observation=observation).data["unread"]
    assert unread == ["nvml: which of them are the engine's is not known: name them with --gpus"]
