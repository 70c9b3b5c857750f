"""All rules asked of the facts: what fits, what may be advised of it, and what cannot be told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from vllm_headroom.commands.advise.facts import Facts
from vllm_headroom.commands.advise.finding import Advice
from vllm_headroom.commands.advise.missing import missing, notes
from vllm_headroom.commands.advise.rules.cache import full_cache
from vllm_headroom.commands.advise.rules.crash import crash, host_memory_short
from vllm_headroom.commands.advise.rules.leaks import gpu_leak, host_leak, kv_block_leak
from vllm_headroom.commands.advise.rules.prefix import prefix_cache
from vllm_headroom.commands.advise.rules.shortage import burst, chronic, configuration_overshoot
from vllm_headroom.commands.advise.rules.starting import failing_starts
from vllm_headroom.commands.advise.rules.tenant import another_tenant, left_behind
from vllm_headroom.commands.advise.rules.waiting import too_few_requests
from vllm_headroom.commands.advise.settings import FIRST, Flag, spelt
from vllm_headroom.commands.conclusion import Conclusion
from vllm_headroom.vocabulary import LeakState

Rule = Callable[[Facts], Advice | None]

LEAKS: Final[tuple[Rule, ...]] = (gpu_leak, host_leak)
EVEN_WITH_A_LEAK: Final[tuple[Rule, ...]] = (left_behind, another_tenant, failing_starts, kv_block_leak)
"""What fits whether the engine leaks or not, but without a figure for an option: that would be the leak's."""

WITHOUT_A_LEAK: Final[tuple[Rule, ...]] = (
    crash,
    host_memory_short,
    configuration_overshoot,
    chronic,
    burst,
    full_cache,
    too_few_requests,
    prefix_cache,
)
"""In the order in which they are told: what can end the engine before what makes it slow."""

NOTHING_ELSE: Final = (
    "No option is advised from what a leaking or growing engine shows: its figures are those of the growth."
    " Look again at a trace from after the restart."
)


class Assessment(Struct, frozen=True, kw_only=True):
    """What is said; `missing` is what would have to be known to call it healthy, `notes` what else to know."""

    verdict: Conclusion
    facts: Facts
    advice: tuple[Advice, ...]
    missing: tuple[str, ...]
    notes: tuple[str, ...]


def judge(facts: Facts) -> Assessment:
    """Ask every rule; nothing to change is said only where nothing that matters is unknown."""
    leaks = (*(gpu.leak for gpu in facts.gpus), *(host.leak for host in facts.hosts))
    growing = any(leak.alarm or leak.state in (LeakState.GROWING, LeakState.LEAKING) for leak in leaks)
    found = _ask(LEAKS, facts)
    always = _ask(EVEN_WITH_A_LEAK, facts)
    found += [_without_flags(advice) for advice in always] if growing else always + _ask(WITHOUT_A_LEAK, facts)
    advice, left_out = _that_exist(found, facts)
    unknown = tuple(missing(facts))
    verdict = Conclusion.NOT_GOOD if advice else Conclusion.CANNOT_TELL if unknown else Conclusion.GOOD
    told = (*((NOTHING_ELSE,) if growing else ()), *left_out, *notes(facts, advice))
    return Assessment(verdict=verdict, facts=facts, advice=advice, missing=unknown, notes=told)


def _ask(rules: tuple[Rule, ...], facts: Facts) -> list[Advice]:
    return [advice for advice in (rule(facts) for rule in rules) if advice is not None]


def _without_flags(advice: Advice) -> Advice:
    return replace(advice, changes=tuple(change for change in advice.changes if change.flag is None))


def _that_exist(found: list[Advice], facts: Facts) -> tuple[tuple[Advice, ...], tuple[str, ...]]:
    """Leave out the options that this version may not have, and say which and why."""
    known, advice = facts.settings.known, []
    absent: dict[Flag, None] = {}
    for each in found:
        absent |= {
            change.flag: None for change in each.changes if change.flag is not None and FIRST[change.flag] > known
        }
        changes = tuple(change for change in each.changes if change.flag is None or change.flag not in absent)
        advice.append(replace(each, changes=changes))
    return tuple(advice), tuple(_left_out(flag, facts) for flag in absent)


def _left_out(flag: Flag, facts: Facts) -> str:
    """Say what is left out without the dashes: it is not there to be copied."""
    version, name, first = facts.settings.version, flag.removeprefix("--"), spelt(FIRST[flag])
    if version is not None:
        return f"Left out: {name} is no option of vLLM {spelt(version)}; {first} is the first that has it."
    return (
        f"Left out: {name}, which vLLM has since {first}, because this may be an older one; --vllm-version says which."
    )
