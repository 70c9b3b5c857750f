"""Fleets drawn by a seed: rollouts, for which nobody is paged, and losses of a whole model, for which somebody is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from alerts.tests.engines import Engine, Phase
from alerts.tests.situations import Situation, at_work, down, gone, idle, loading

MINUTES: Final = 100
"""How long each fleet is played: a load of 40 minutes and what comes after it."""

EVENT: Final = 30
"""The minute in which a rollout or a loss begins."""

SIZES: Final = (1, 1, 1, 2, 2, 3, 4, 4, 6, 8, 16)
SIZE_OF_MANY: Final = 100
SEED: Final = 53


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A fleet whose model is lost at the minute `EVENT`, and by which minute after it somebody has to be paged."""

    situation: Situation
    within: int


def make_rollouts(count: int, *, seed: int = SEED) -> list[Situation]:
    """Return so many healthy changes of fleets; two of them have a hundred replicas."""
    random = Random(seed)  # noqa: S311 - drawn to be repeated
    situations = []
    for number in range(count):
        kind = ROLLOUTS[number % len(ROLLOUTS)]
        size = SIZE_OF_MANY if number in {0, count // 2} else random.choice(SIZES)
        load_minutes = random.randint(1, 40)
        engines, others = kind(random, size, load_minutes)
        name = f"rollout {number} {kind.__name__.strip('_')} of {size} that loads for {load_minutes}"
        situations.append(Situation(name=name.replace("_", " "), engines=engines, more=others))
    return situations


def make_losses(count: int, *, seed: int = SEED) -> list[Loss]:
    """Return so many fleets of which no replica serves from the minute `EVENT` on."""
    random = Random(seed + 1)  # noqa: S311 - drawn to be repeated
    losses = []
    for number in range(count):
        kind, within = LOSSES[number % len(LOSSES)]
        size = random.choice(SIZES)
        load_minutes = random.randint(4, 40)
        engines, others = kind(random, size, load_minutes)
        name = f"loss {number} {kind.__name__.strip('_')} of {size} that loads for {load_minutes}"
        situation = Situation(name=name.replace("_", " "), engines=engines, more=others)
        losses.append(Loss(situation=situation, within=within))
    return losses


Fleet = tuple[list[Engine], list[tuple[str, str]]]
Kind = Callable[[Random, int, int], Fleet]


def _fill(*phases: Phase, last: Callable[..., Phase] = at_work) -> tuple[Phase, ...]:
    """Return these phases, cut at the end of the play, and one that fills the time."""
    left: float = MINUTES
    kept = []
    for phase in phases:
        if phase.minutes > left:
            break
        kept.append(phase)
        left -= phase.minutes
    if left:
        kept.append(last(minutes=left))
    return tuple(kept)


def _new(name: str, begins: int, load_minutes: int, *, pull_minutes: int = 2) -> Engine:
    """Return a new pod: its image is pulled, then its model loads."""
    phases = _fill(gone(minutes=begins), Phase(minutes=pull_minutes, state="down"), loading(load_minutes))
    return Engine(name=name, model="llama", phases=phases)


def _workload(
    replicas: int, available: Sequence[tuple[int, int]], generation_changes: int = 0
) -> list[tuple[str, str]]:
    """Return what kube-state-metrics shows of a Deployment: how many are available from which minute on."""
    labels = '{namespace="{namespace}",deployment="vllm"}'
    ends = [minute for minute, _ in available[1:]] + [MINUTES]
    values = " ".join(f"{n}x{end - begin - 1}" for (begin, n), end in zip(available, ends, strict=True) if end > begin)
    generation = f"7x{MINUTES - 1}"
    if generation_changes:
        generation = f"7x{generation_changes - 1} 8x{MINUTES - generation_changes - 1}"
    return [
        (f"kube_deployment_spec_replicas{labels}", f"{replicas}x{MINUTES - 1}"),
        (f"kube_deployment_status_replicas_available{labels}", values),
        (f"kube_deployment_status_observed_generation{labels}", generation),
    ]


def _rolling(random: Random, size: int, load_minutes: int) -> Fleet:
    """Replace one after the other, each when its successor serves; some sidecars go without a word on the stop."""
    engines = []
    step = max(1, min(5, 20 // size))
    for i in range(size):
        ready = EVENT + i * step % 25 + 2 + load_minutes
        stop = min(ready + 1, MINUTES - 4)
        seen = [idle(1), down(random.randint(1, 2), "stopped")] if random.choice((True, True, False)) else []
        engines.append(Engine(name=f"a-{i}", model="llama", phases=_fill(at_work(stop), *seen, last=gone)))
        engines.append(_new(f"b-{i}", EVENT + i * step % 25, load_minutes))
    return engines, []


def _recreated(random: Random, size: int, load_minutes: int) -> Fleet:
    """Stop all, requests drained or cut off, then start all."""
    engines = []
    pull_minutes = random.randint(1, 3)
    for i in range(size):
        end = down(random.randint(1, 3), "stopped")
        before = [at_work(EVENT - 2), idle(2)] if random.choice((True, False)) else [at_work(EVENT)]
        engines.append(Engine(name=f"a-{i}", model="llama", phases=_fill(*before, end, last=gone)))
        engines.append(_new(f"b-{i}", EVENT + 3 + random.randint(0, 1), load_minutes, pull_minutes=pull_minutes))
    return engines, []


def _recreated_with_state_metrics(random: Random, size: int, load_minutes: int) -> Fleet:
    """Replace all at once by a change of the Deployment, which kube-state-metrics shows; no stop is seen."""
    engines = [Engine(name=f"a-{i}", model="llama", phases=_fill(at_work(EVENT), last=gone)) for i in range(size)]
    begins = EVENT + random.randint(1, 2)
    load_minutes = min(load_minutes, 25)
    engines += [_new(f"b-{i}", begins, load_minutes) for i in range(size)]
    back = begins + 2 + load_minutes
    return engines, _workload(size, [(0, size), (EVENT, 0), (back, size)], EVENT)


def _restarted_in_place(random: Random, size: int, load_minutes: int) -> Fleet:
    """Restart the containers, one after the other or together; the pods and their sidecars stay."""
    together = random.choice((True, False))
    engines = []
    for i in range(size):
        begins = EVENT + (0 if together else i % 20)
        restart = loading(load_minutes, ended=("stopped",))
        engines.append(Engine(name=f"a-{i}", model="llama", phases=_fill(at_work(begins - 2), idle(2), restart)))
    return engines, []


def _scaled_to_zero(random: Random, size: int, _: int) -> Fleet:
    """Scale to zero after half an hour without a request, or by the owner at work, which kube-state-metrics shows."""
    if random.choice((True, False)):
        phases = _fill(at_work(EVENT), idle(30), last=gone)
        return [Engine(name=f"a-{i}", model="llama", phases=phases) for i in range(size)], []
    phases = _fill(at_work(EVENT), down(1, "stopped"), last=gone)
    replicas = f"{size}x{EVENT - 1} 0x{MINUTES - EVENT - 1}"
    shown = [('kube_deployment_spec_replicas{namespace="{namespace}",deployment="vllm"}', replicas)]
    return [Engine(name=f"a-{i}", model="llama", phases=phases) for i in range(size)], shown


def _drained(random: Random, size: int, load_minutes: int) -> Fleet:
    """Drain a node: a part of the pods stops and is made again elsewhere."""
    moved = random.randint(1, size)
    engines = [Engine(name=f"a-{i}", model="llama", phases=_fill(at_work(EVENT))) for i in range(moved, size)]
    for i in range(moved):
        stop = down(random.randint(1, 2), "stopped")
        engines.append(Engine(name=f"a-{i}", model="llama", phases=_fill(at_work(EVENT), stop, last=gone)))
        engines.append(_new(f"b-{i}", EVENT + 2, load_minutes))
    return engines, []


def _put_to_sleep(random: Random, size: int, _: int) -> Fleet:
    """Put all to sleep for some minutes."""
    phases = _fill(at_work(EVENT), Phase(minutes=random.randint(10, 60), state="asleep", held=3))
    return [Engine(name=f"a-{i}", model="llama", phases=phases) for i in range(size)], []


def _missed_by_prometheus(_: Random, size: int, load_minutes: int) -> Fleet:
    """Stop and start all while Prometheus is away for ten minutes."""
    restart = loading(load_minutes)
    phases = _fill(at_work(EVENT), loading(10, missed=True, ended=("stopped",)), restart)
    return [Engine(name=f"a-{i}", model="llama", phases=phases) for i in range(size)], []


def _with_their_sidecars(random: Random, size: int, load_minutes: int) -> Fleet:
    """Restart the pods under the same names, their sidecars with them."""
    away = gone(minutes=random.randint(1, 3))
    phases = _fill(at_work(EVENT - 2), idle(2), away, down(1, new_pod=True), loading(load_minutes))
    return [Engine(name=f"a-{i}", model="llama", phases=phases) for i in range(size)], []


def _scaled_out(random: Random, size: int, load_minutes: int) -> Fleet:
    """Add replicas, and take them away again."""
    engines = [Engine(name=f"a-{i}", model="llama", phases=_fill(at_work(EVENT))) for i in range(size)]
    for i in range(random.randint(1, size)):
        added = (gone(minutes=EVENT), Phase(minutes=2, state="down"), loading(load_minutes), at_work(10))
        phases = _fill(*added, down(1, "stopped"), last=gone)
        engines.append(Engine(name=f"b-{i}", model="llama", phases=phases))
    return engines, []


ROLLOUTS: Final[Sequence[Kind]] = (
    _rolling,
    _recreated,
    _recreated_with_state_metrics,
    _restarted_in_place,
    _scaled_to_zero,
    _drained,
    _put_to_sleep,
    _missed_by_prometheus,
    _with_their_sidecars,
    _scaled_out,
)


def _crashed(random: Random, size: int, load_minutes: int) -> Fleet:
    """Crash, each by a reason drawn, and load again."""
    engines = []
    for i in range(size):
        reason = random.choice(("gone", "out_of_memory", "oom_killed", "over_budget"))
        again = loading(load_minutes, ended=(reason,))
        engines.append(Engine(name=f"a-{i}", model="llama", phases=_fill(at_work(EVENT), again)))
    return engines, []


def _crashed_one_after_the_other(_: Random, size: int, load_minutes: int) -> Fleet:
    """Crash within twenty minutes, the last at the event; all load for long."""
    engines = []
    for i in range(size):
        begins = EVENT - i % 20
        again = loading(max(load_minutes, 25), ended=("gone",))
        engines.append(Engine(name=f"a-{i}", model="llama", phases=_fill(at_work(begins), again)))
    return engines, []


def _not_started_again(random: Random, size: int, _: int) -> Fleet:
    """Crash, and stay down."""
    reason = random.choice(("gone", "out_of_memory", "oom_killed"))
    phases = _fill(at_work(EVENT), down(MINUTES - EVENT, reason))
    return [Engine(name=f"a-{i}", model="llama", phases=phases) for i in range(size)], []


def _hung(_: Random, size: int, load_minutes: int) -> Fleet:
    """Hang, as the sidecar says, and are restarted later."""
    hang = Phase(minutes=20, state="stalled", running=20)
    phases = _fill(at_work(EVENT), hang, loading(load_minutes, ended=("gone",)))
    return [Engine(name=f"a-{i}", model="llama", phases=phases) for i in range(size)], []


def _crashed_during_a_rollout(random: Random, size: int, load_minutes: int) -> Fleet:
    """Crash while their successors load."""
    load_minutes = max(load_minutes, 12)
    again = loading(load_minutes, ended=("out_of_memory",))
    engines = [Engine(name=f"a-{i}", model="llama", phases=_fill(at_work(EVENT), again)) for i in range(size)]
    begins = EVENT - random.randint(3, 6)
    return engines + [_new(f"b-{i}", begins, load_minutes + 4) for i in range(max(1, size // 4))], []


def _behind_an_unreachable_node(_: Random, size: int, __: int) -> Fleet:
    """Stop answering together with their sidecars; their targets stay."""
    phases = _fill(at_work(EVENT), Phase(minutes=40, up=False))
    return [Engine(name=f"a-{i}", model="llama", phases=phases) for i in range(size)], []


def _taken_away_with_state_metrics(random: Random, size: int, load_minutes: int) -> Fleet:
    """Go with their spot nodes, which kube-state-metrics shows, and are made again."""
    engines = [Engine(name=f"a-{i}", model="llama", phases=_fill(at_work(EVENT), last=gone)) for i in range(size)]
    begins = EVENT + random.randint(1, 6)
    engines += [_new(f"b-{i}", begins, load_minutes) for i in range(size)]
    return engines, _workload(size, [(0, size), (EVENT, 0), (begins + 2 + load_minutes, size)])


def _taken_away(_: Random, size: int, __: int) -> Fleet:
    """Go with their nodes and their sidecars, and nothing else knows of them."""
    return [Engine(name=f"a-{i}", model="llama", phases=_fill(at_work(EVENT), last=gone)) for i in range(size)], []


LOSSES: Final[Sequence[tuple[Kind, int]]] = (
    (_crashed, 3),
    (_crashed_one_after_the_other, 3),
    (_not_started_again, 3),
    (_hung, 3),
    (_crashed_during_a_rollout, 3),
    (_behind_an_unreachable_node, 3),
    (_taken_away_with_state_metrics, 3),
    (_crashed, 3),
    (_taken_away, 10),
    (_not_started_again, 3),
)
"""How a model is lost, and within how many minutes somebody is paged: 10 where no witness survives, else 3."""
