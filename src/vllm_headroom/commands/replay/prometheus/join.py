"""The series of one side of history, over one page: no older than it may be, and one for each thing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from vllm_headroom.commands.replay.prometheus.api import Api, Series
from vllm_headroom.commands.replay.prometheus.text import Span
from vllm_headroom.trace.errors import BadInput

Value = tuple[Series, float]
"""A series and what it is at the time of the sample."""

Side = list[dict[str, Any]]


class Exporter(Struct, frozen=True, kw_only=True):
    """The series one exporter has for one side of a sample; `side` is its key in a trace's line.

    `lead` are the names of which one is there wherever this exporter is scraped, `names` all that are read. Series that
    agree in name and in the labels of `identity` are the same thing, whatever the other labels, which their scrapes
    gave them. `has_start_time` is whether the start of the exporting process is the engine's.
    """

    side: str
    lead: tuple[str, ...]
    names: tuple[str, ...]
    identity: frozenset[str]
    sample: Callable[[Iterable[Value]], Side]
    has_start_time: bool = False

    @property
    def option(self) -> str:
        """The option of the command that narrows this side alone."""
        return "--match-gpu" if self.side == "gpus" else "--match-engine"


_MAY_BE_LATE: Final = 1.5
"""How old a value may be, in scrape intervals: one scrape late is a jitter, one missing is a gap."""

_TARGET: Final = ("job", "instance")
_START_TIME: Final = "process_start_time_seconds"
_MOST_VALUES: Final = 5


class Scraped(Struct, frozen=True, kw_only=True):
    """A kind of history that is there: what narrows it, the name of its lead and how often it is scraped."""

    kind: Exporter
    matchers: tuple[str, ...]
    lead: str
    interval_ms: int

    @property
    def window_ms(self) -> int:
        """How old a value of this source may be."""
        return round(self.interval_ms * _MAY_BE_LATE)


def selector(names: Sequence[str], matchers: Sequence[str]) -> str:
    """Return PromQL for the series of these names that the matchers let through."""
    return "{" + ",".join((f'__name__=~"{"|".join(names)}"', *matchers)) + "}"


def read(api: Api, source: Scraped, page: Span) -> list[Series]:
    """Return the series of the source over the page, without the labels their scrapes gave them; or raise BadInput.

    `last_over_time` bounds the age of a value; a plain selector would show the last one for five minutes after the end
    of a series that ends without a staleness marker, and a leak detector would take a dead engine's memory for level.
    """
    series = api.query_range(_latest(selector(source.kind.names, source.matchers), source.window_ms), page)
    if source.kind.has_start_time:
        series += _start_times(api, source, page, [each for each in series if each.name == source.lead])
    handover = -(-source.window_ms // page.step_ms)
    return _one_each(source.kind, series, handover)


def _latest(selected: str, window_ms: int) -> str:
    return f"last_over_time({selected}[{window_ms}ms])"


def _start_times(api: Api, source: Scraped, page: Span, leads: Sequence[Series]) -> list[Series]:
    """Return, for each engine, when the process of its target started; every target of Prometheus has that series."""
    targets = {label: sorted({each.labels.get(label, "") for each in leads}) for label in _TARGET}
    if not leads:
        return []
    matchers = [f"{label}=~{json.dumps('|'.join(map(re.escape, values)))}" for label, values in targets.items()]
    found = api.query_range(_latest(selector((_START_TIME,), matchers), source.window_ms), page)
    return [
        replace(start, labels=lead.labels)
        for lead in leads
        for start in found
        if start.labels.items() <= lead.labels.items()  # a target's labels are on all its series
    ]


def _one_each(kind: Exporter, found: Iterable[Series], handover: int) -> list[Series]:
    """Return one series for each thing: those that followed each other are joined, by the newest where they overlap.

    They may overlap for as many steps as a value may be old; longer, they are two things that look the same.
    """
    groups: dict[tuple[str, ...], list[Series]] = {}
    for series in found:
        own = sorted(item for item in series.labels.items() if item[0] in kind.identity)
        groups.setdefault((series.name, *(text for item in own for text in item)), []).append(series)
    return [
        _joined(kind, sorted(group, key=lambda each: min(each.values, default=0)), handover)
        for group in groups.values()
    ]


def _joined(kind: Exporter, group: Sequence[Series], handover: int) -> Series:
    values: dict[int, float] = {}
    for series in group:
        if len(values.keys() & series.values.keys()) > handover:
            raise BadInput(_ambiguous(kind, group))
        values.update(series.values)
    labels = {name: text for name, text in group[0].labels.items() if name in kind.identity}
    return Series(name=group[0].name, labels=labels, values=values)


def _ambiguous(kind: Exporter, group: Sequence[Series]) -> str:
    names = sorted({name for series in group for name in series.labels} - kind.identity)
    values = {name: sorted({series.labels.get(name, "") for series in group}) for name in names}
    differing = {name: texts for name, texts in values.items() if len(texts) > 1}
    if not differing:
        return f"{len(group)} series of {group[0].name} cannot be told apart by any label: query one Prometheus alone"
    own = ", ".join(f'{name}="{text}"' for name, text in group[0].labels.items() if name in kind.identity)
    shown = "; ".join(f"{name} is {_some(texts)}" for name, texts in differing.items())
    name, texts = next(iter(differing.items()))
    choice = f"{kind.option} '{name}=\"{texts[-1]}\"'"
    return f"{len(group)} series of {group[0].name}{{{own}}} at once: choose one, as with {choice} ({shown})"


def _some(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - _MOST_VALUES} more" if len(texts) > _MOST_VALUES else ""
    return " or ".join(f'"{text}"' for text in texts[:_MOST_VALUES]) + more
