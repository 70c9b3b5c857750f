"""An engine that slept: it ended no run, and takes hold of its GPU again."""

from __future__ import annotations

from collections.abc import Iterator

from tests.unit.commands.advise import traces
from vllm_headroom_tools.advise.facts import Shortage
from vllm_headroom_tools.advise.verdict import judge_facts


def test_a_sleep_ends_no_engine() -> None:
    """Little is left just before it sleeps, and the memory goes."""

    def asleep() -> Iterator[traces.Record]:
        for step in traces.steps(4):
            if step == 200:
                yield traces.sample(step, engine_mib=traces.USABLE_MIB - 420)
            elif 200 < step < 300:
                yield traces.sample(step, engine_mib=2_000, awake=False, running=0)
            else:
                yield traces.sample(step)

    assert judge_facts(traces.facts(asleep())).advice == ()


def test_what_is_short_since_it_woke_is_short_from_its_start() -> None:
    asleep = range(300, 320)
    records = [
        traces.sample(step, engine_mib=2_000, awake=False, running=0)
        if step in asleep
        else traces.sample(step, engine_mib=traces.USABLE_MIB - (180 if step > 320 else 2_000))
        for step in range(960)
    ]

    (gpu,) = traces.facts(records).gpus

    assert [(spell.kind, spell.has_engine_exited) for spell in gpu.spells] == [(Shortage.LEVEL, False)]
