"""Who holds what, what the engines do, and which sources answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape
from typing import Final

from vllm_headroom import catalog
from vllm_headroom.expose.view import View
from vllm_headroom.model import Metric, Snapshot, Values
from vllm_headroom.units import duration, gib

HOLDERS: Final = ("engine", "other", "unattributed")
NOT_KNOWN: Final = "not known"


def tables(view: View, snapshot: Snapshot) -> Iterator[str]:
    """Yield the tables that have rows."""
    values = view.values
    yield _table("Who holds the memory", ("GPU", *HOLDERS, "free", "total"), _gpus(values), kind="figures")
    yield _table("Engines", ("engine", *(title for title, _, _ in ENGINE)), _engines(values), kind="figures")
    head = ("source", "last reading", "took", "last worked", "cause and cure")
    yield _table("Sources", head, _sources(values, snapshot), kind="words")


def _gpus(values: Values) -> Iterator[tuple[str, ...]]:
    for gpu, uuid, name, attribution in values.of(catalog.GPU_INFO):
        held = (values.value(catalog.GPU_MEMORY_HELD, gpu, uuid, holder) for holder in HOLDERS)
        room = (values.value(metric, gpu, uuid) for metric in (catalog.GPU_MEMORY_FREE, catalog.GPU_MEMORY_TOTAL))
        whose = f"the engine's by {attribution}" if attribution else "not the engine's"
        yield (f"{gpu} {name}, {whose}", *map(_gib, (*held, *room)))


def _engines(values: Values) -> Iterator[tuple[str, ...]]:
    for model_name, engine, _profile in values.of(catalog.ENGINE_INFO):
        shown = (
            NOT_KNOWN if (value := values.value(metric, model_name, engine)) is None else form.format(value)
            for _, metric, form in ENGINE
        )
        yield (f"{model_name} / {engine}", *shown)


ENGINE: Final[tuple[tuple[str, Metric, str], ...]] = (
    ("running", catalog.ENGINE_RUNNING, "{:.0f}"),
    ("waiting", catalog.ENGINE_WAITING, "{:.0f}"),
    ("KV cache used", catalog.ENGINE_KV_USED, "{:.1%}"),
    ("prefix hits, 5 min", catalog.ENGINE_PREFIX_HIT_RATIO, "{:.1%}"),
    ("more requests fit", catalog.ENGINE_ADDITIONAL_REQUESTS, "{:.0f}"),
)


def _sources(values: Values, snapshot: Snapshot) -> Iterator[tuple[str, ...]]:
    failures = {str(failure.source): failure for failure in snapshot.failures}
    for (source,), up in values.of(catalog.SOURCE_UP).items():
        took = values.value(catalog.SOURCE_READ_SECONDS, source)
        worked = values.value(catalog.SOURCE_LAST_SUCCESS, source)
        ago = "never" if worked is None else f"{duration(max(0.0, snapshot.time_seconds - worked))} before"
        failure = failures.get(source)
        yield (
            source,
            "answers" if up else "failed",
            NOT_KNOWN if took is None else f"{1000 * took:.1f} ms",
            "this time" if up else ago,
            "" if failure is None else f"{failure.reason}: {failure.message}",
        )


def _table(title: str, head: tuple[str, ...], rows: Iterable[tuple[str, ...]], *, kind: str) -> str:
    """Return a table of this class with a heading, nothing without rows."""
    lines = "".join(
        f"<tr><th scope=row>{escape(first)}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in rest)}</tr>"
        for first, *rest in rows
    ).replace("<td>failed</td>", "<td><b class=alarm>failed</b></td>")
    titles = "".join(f"<th scope=col>{escape(each)}</th>" for each in head)
    if not lines:
        return ""
    return (
        f'<h2>{escape(title)}</h2><div class=wide role=region tabindex=0 aria-label="{escape(title)}">'
        f"<table class={kind}><thead><tr>{titles}</tr></thead><tbody>{lines}</tbody></table></div>"
    )


def _gib(n_bytes: float | None) -> str:
    return NOT_KNOWN if n_bytes is None else gib(n_bytes)
