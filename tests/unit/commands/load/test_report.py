"""What is told of a load, and the exit status, over facts made by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Golden
from tests.samples import A_GPU, AN_ENGINE, gpu, snapshot
from vllm_headroom import catalog
from vllm_headroom.commands.load.answer import Answer, Outcome
from vllm_headroom.commands.load.document import document
from vllm_headroom.commands.load.observed import Observed, Span
from vllm_headroom.commands.load.report import Growth, Kind, LeakVerdict, Memory, Report
from vllm_headroom.commands.load.run import SHARES, Step
from vllm_headroom.commands.load.tally import MOST_TEXTS, OTHERS, Tally
from vllm_headroom.commands.load.text import text
from vllm_headroom.commands.verdict import Verdict
from vllm_headroom.model import Sample
from vllm_headroom.vocabulary import CONTROLS, LeakState

HERE = Path(__file__).parent
GB = 10**9
NO_GROWTH = Growth(verdict=LeakVerdict.NO_LEAK, state=LeakState.STABLE, reason="no growth that load does not explain")


def shown(found: Mapping[str, Any]) -> str:
    return "".join(f"{line.translate(CONTROLS)}\n" for line in text(found))


def tally(outcomes: Mapping[Outcome, int], said: str = "") -> Tally:
    made = Tally(100.0)
    for outcome, count in outcomes.items():
        for number in range(count):
            made.begin()
            answer = Answer(outcome=outcome, text=said, prompt_tokens=512, generation_tokens=128)
            if outcome is Outcome.SUCCEEDED:
                answer = replace(answer, text="")
                began = 100.0 + number
                made.succeed(answer, began=began, first=began + 0.0432, ended=began + 3.21)
                made.between.add(0.000_02 * (number + 1))
            made.end(answer)
    made.delays.add(0.001)
    return made


def observed(running: float) -> Observed:
    made = Observed()
    samples = [
        Sample(catalog.ENGINE_RUNNING, AN_ENGINE, running),
        Sample(catalog.ENGINE_WAITING, AN_ENGINE, 0.0),
        Sample(catalog.ENGINE_KV_USED, AN_ENGINE, running / 100),
        Sample(catalog.ENGINE_PREEMPTIONS, AN_ENGINE, 0.0),
        Sample(catalog.MEMORY_PER_RUNNING_REQUEST, A_GPU, 72 * GB / running),
    ]
    made.take(snapshot(gpus=(gpu(total=80 * GB, used=73 * GB, engine=72 * GB),)), samples)
    return made


def step(outcomes: Mapping[Outcome, int], *, share: float = 1.0, said: str = "") -> Step:
    return Step(
        share=share, clients=round(8 * share), seconds=60.0, tally=tally(outcomes, said), observed=observed(8 * share)
    )


def memory(growth: Growth = NO_GROWTH, kind: Kind = Kind.GPU) -> Memory:
    name, uuid = A_GPU if kind is Kind.GPU else ("worker", "")
    span = Span(70 * GB, 72 * GB, 73 * GB)
    return Memory(kind=kind, name=name, uuid=uuid, span=span, growth=growth, finished=4000)


def report(
    *steps: Step,
    memories: tuple[Memory, ...] = (memory(),),
    ended: str | None = None,
    unread: tuple[str, ...] = (),
    stopped: bool = False,
) -> Report:
    return Report(
        target="http://engine:8000",
        model="m",
        asked="completions, prompts of about 512 tokens, answers of 128",
        steps=steps,
        memory=memories,
        whole=observed(8),
        ended=ended,
        unread=unread,
        trace="t.jsonl",
        samples=240,
        stopped=stopped,
    )


GOOD_STEP = step({Outcome.SUCCEEDED: 20})
LEAK = Growth(
    verdict=LeakVerdict.LEAKING,
    state=LeakState.LEAKING,
    reason="even growth that load does not explain",
    bytes_per_request=500.0,
)


def test_a_good_load_is_told(golden: Golden) -> None:
    found = document(report(*(step({Outcome.SUCCEEDED: 10}, share=share) for share in SHARES)))

    golden(HERE / "good.json", json.dumps(found, indent=2) + "\n")
    golden(HERE / "good.txt", shown(found))


def test_a_bad_load_is_told(golden: Golden) -> None:
    bad = step(dict.fromkeys(Outcome, 2), share=1.2, said="500: CUDA out of memory.\x1b[2J")
    bad.tally.delays.add(0.321)
    found = document(
        report(
            GOOD_STEP,
            bad,
            memories=(memory(LEAK), memory(LEAK, Kind.HOST)),
            ended="the engine is gone: its page refuses connections",
            unread=("nvml in 3 of 240 samples: it hangs",),
            stopped=True,
        )
    )

    golden(HERE / "bad.txt", shown(found))
    assert found["verdict"] == "not_good"
    assert found["requests"] == {"began": 38} | dict.fromkeys(Outcome, 2) | {"succeeded": 22}


@pytest.mark.parametrize(
    ("outcomes", "how", "verdict"),
    [
        ({Outcome.SUCCEEDED: 1}, {}, Verdict.GOOD),
        ({Outcome.SUCCEEDED: 99, Outcome.FAILED: 1}, {}, Verdict.GOOD),
        ({Outcome.SUCCEEDED: 98, Outcome.FAILED: 1, Outcome.CLOSED: 1}, {}, Verdict.NOT_GOOD),
        ({Outcome.SUCCEEDED: 25, Outcome.REJECTED: 20, Outcome.UNFINISHED: 2}, {}, Verdict.NOT_GOOD),
        ({Outcome.SUCCEEDED: 1}, {"stopped": True}, Verdict.CANNOT_TELL),
        ({Outcome.SUCCEEDED: 9, Outcome.UNFINISHED: 5}, {"stopped": True}, Verdict.CANNOT_TELL),
        ({Outcome.SUCCEEDED: 99, Outcome.OUT_OF_MEMORY: 1}, {}, Verdict.NOT_GOOD),
        ({Outcome.SUCCEEDED: 99}, {"ended": "the engine was restarted meanwhile"}, Verdict.NOT_GOOD),
        ({Outcome.SUCCEEDED: 99}, {"memories": (memory(LEAK),)}, Verdict.NOT_GOOD),
        ({Outcome.REFUSED: 1}, {}, Verdict.NOT_GOOD),
        ({Outcome.UNFINISHED: 1}, {}, Verdict.NOT_GOOD),
        ({Outcome.UNFINISHED: 1}, {"stopped": True}, Verdict.CANNOT_TELL),
        ({Outcome.SUCCEEDED: 9, Outcome.NOT_SENT: 1}, {}, Verdict.CANNOT_TELL),
        ({Outcome.NOT_SENT: 1}, {}, Verdict.CANNOT_TELL),
        ({Outcome.OUT_OF_MEMORY: 1, Outcome.NOT_SENT: 1}, {}, Verdict.NOT_GOOD),
        ({}, {}, Verdict.CANNOT_TELL),
    ],
)
def test_the_verdict_says_whether_it_is_good(
    outcomes: Mapping[Outcome, int], how: dict[str, object], verdict: Verdict
) -> None:
    made = report(step(outcomes), **how)  # type: ignore[arg-type]

    assert made.verdict is verdict
    assert shown(document(made)).splitlines()[-1].startswith(("GOOD: ", "NOT GOOD: ", "CANNOT TELL: ")[verdict.status])


def test_a_server_that_says_its_engine_died_is_not_good() -> None:
    made = step({Outcome.SUCCEEDED: 99})
    made.tally.begin()
    made.tally.end(Answer(outcome=Outcome.FAILED, engine_dead=True))

    assert report(made).faults == ("the engine died: its web server says so",)


def test_an_answer_without_counts_makes_the_sum_unknown() -> None:
    made = step({Outcome.SUCCEEDED: 9})
    made.tally.succeed(Answer(outcome=Outcome.SUCCEEDED, prompt_tokens=3), began=100.0, first=101.0, ended=102.0)

    (found,) = document(report(made))["steps"]

    assert (found["prompt_tokens"], found["generation_tokens"], found["generation_tokens_per_second"]) == (None,) * 3


def test_growth_is_per_thousand_requests_that_the_engine_finished() -> None:
    assert memory().bytes_per_thousand_requests == 2 * GB / 4
    assert replace(memory(), finished=0).bytes_per_thousand_requests is None
    assert replace(memory(), finished=None).bytes_per_thousand_requests is None


def test_a_server_that_always_says_something_new_is_quoted_so_often_only() -> None:
    made = Tally(0.0)
    for number in range(100):
        made.begin()
        made.end(Answer(outcome=Outcome.FAILED, text=f"error {number}"))
    made.begin()
    made.end(Answer(outcome=Outcome.FAILED, text="error 3"))

    assert len(made.texts) == MOST_TEXTS + 1
    assert made.texts[Outcome.FAILED, OTHERS] == 100 - MOST_TEXTS
    assert made.texts[Outcome.FAILED, "error 3"] == 2
