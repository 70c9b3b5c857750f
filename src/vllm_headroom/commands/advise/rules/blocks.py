"""A rule on blocks of the KV cache that no request holds."""

from __future__ import annotations

from vllm_headroom.commands.advise.engine_facts import EngineFacts
from vllm_headroom.commands.advise.facts import Facts
from vllm_headroom.commands.advise.finding import Advice, Cause, Change, Evidence, called, percent
from vllm_headroom.commands.advise.limits import LOST_RATIO, LOST_RISES
from vllm_headroom.commands.advise.rules.leaks import EVIDENCE_FIRST, RESTART
from vllm_headroom.derive.verdicts import STRANDED


def kv_block_leak(facts: Facts) -> Advice | None:
    """Fit where an idle engine holds more of its KV cache each time, or a twentieth of it at all."""
    lost = [engine for engine in facts.engines if _loses(engine)]
    if not lost:
        return None
    return Advice(
        cause=Cause.KV_BLOCK_LEAK,
        summary=f"Blocks of the KV cache are lost: {', '.join(called(facts, engine) for engine in lost)}.",
        evidence=tuple(each for engine in lost for each in _evidence(engine)),
        changes=(
            Change(text=f"Restart the engine in a quiet hour. {EVIDENCE_FIRST}", cost=RESTART),
            Change(
                text="Upgrade vLLM; where a KV connector transfers blocks, look in the log for transfers that failed,"
                " and try without it",
                cost="another version or another setting to be tried out; a restart",
            ),
        ),
        remark="GPU memory is not in danger: the cache only holds fewer requests, in the end none.",
    )


def _loses(engine: EngineFacts) -> bool:
    lost = engine.stranded
    if lost is None:
        return False
    return lost.ratio > STRANDED or (lost.rises >= LOST_RISES and lost.ratio > LOST_RATIO)


def _evidence(engine: EngineFacts) -> tuple[Evidence, ...]:
    lost = engine.stranded
    if lost is None:
        return ()
    held = f"{percent(lost.ratio)} of the KV cache stayed in use a minute after the last request"
    rose = f"it was more at {lost.rises} idle times, after {percent(lost.first_ratio)} at the first"
    return (
        Evidence("stranded_ratio", lost.ratio, held),
        *((Evidence("rises", lost.rises, rose),) if lost.rises else ()),
    )
