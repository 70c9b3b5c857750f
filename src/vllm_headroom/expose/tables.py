"""List and render the rows of the page's tables."""

from collections.abc import Iterator, Mapping
from typing import Final

from msgspec import Struct

from vllm_headroom import catalog
from vllm_headroom.expose.drawing import escape_text
from vllm_headroom.model import Metric, ProbeReadings, Snapshot, Values, find_part, name_device
from vllm_headroom.units import HOUR_SECONDS, format_duration, format_gib, format_size
from vllm_headroom.vocabulary import Level, Work

NOT_KNOWN: Final = "not known"
"""The text of a cell whose value is unknown."""


LEAST_SHOWN_MS: Final = 0.1
"""The shortest time that is shown (our choice), because shorter ones would appear as 0.0."""


class Cell(Struct, frozen=True):
    """A table cell.

    If the cell has a level, its text is bold and in the level's colour.
    """

    text: str
    level: Level | None = None


class Table(Struct, frozen=True, kw_only=True):
    """A table as plain data; the first cell of each row is the row's heading."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    kind: str = "figures"
    """The table's class in the page's style: `figures` are right-aligned, `words` left-aligned."""


def list_tables(values: Values, snapshot: Snapshot) -> tuple[Table, ...]:
    """Return the page's tables, including those without rows."""
    return (
        Table(
            title="Who holds the memory",
            columns=("GPU", "used by", *HOLDERS, "free", "total"),
            rows=tuple(_list_gpus(values)),
        ),
        _build_roles(values, snapshot),
        Table(
            title="Engines",
            columns=("engine", *(title for title, _, _ in ENGINE_COLUMNS)),
            rows=tuple(_list_engines(values)),
        ),
        *_list_peak_tables(values),
        Table(
            title="Sources",
            columns=("source", "last reading", "took", "last worked", "cause and cure"),
            rows=tuple(_list_sources(values, snapshot)),
            kind="words",
        ),
    )


PEAK_SAFE_SIZES: Final = {
    Work.PREFILL: (catalog.ENGINE_SAFE_PROMPT_TOKENS, "{:,.0f} tokens"),
    Work.PROMPT_LOGPROBS: (catalog.ENGINE_SAFE_PROMPT_LOGPROBS_TOKENS, "{:,.0f} tokens"),
    Work.ENCODER: (catalog.ENGINE_SAFE_IMAGE_PIXELS, "{:,.0f} pixels"),
}
"""The metric for the largest safe request size, and its format, by kind of work."""


def _list_peak_tables(values: Values) -> tuple[Table, ...]:
    """Return the table of peaks by kind of work.

    The result is empty if the probe does not measure peaks.
    """
    rows = tuple(_list_peaks(values))
    if not rows:
        return ()
    columns = ("work", "highest peak of the last minute", "of the room", "largest that fits")
    return (Table(title="Peaks of steps", columns=columns, rows=rows),)


def _list_peaks(values: Values) -> Iterator[tuple[Cell, ...]]:
    """Yield a row for each GPU and kind of work.

    Rows without a peak or a safe size are omitted.
    """
    for gpu, uuid in values.find_all(catalog.ENGINE_PEAK_ROOM):
        for work in Work:
            peak_bytes = values.value(catalog.ENGINE_PEAK, gpu, uuid, work)
            safe_size = None
            safe_text = ""
            if work in PEAK_SAFE_SIZES:
                metric, safe_format = PEAK_SAFE_SIZES[work]
                safe_size = values.value(metric, gpu, uuid)
                safe_text = _format_known(safe_size, safe_format)
            if peak_bytes is None and safe_size is None:
                continue
            ratio = values.value(catalog.ENGINE_PEAK_RATIO, gpu, uuid, work)
            name = f"{work.replace('_', ' ')}, {name_device(gpu, uuid)}"
            yield (
                Cell(name),
                Cell("none" if peak_bytes is None else format_size(peak_bytes)),
                Cell("" if ratio is None else f"{ratio:.1%}"),
                Cell(safe_text),
            )


HOLDERS: Final = ("engine", "other", "unattributed")
"""The possible holders of a GPU's memory, used as label values and as column titles."""


def _list_gpus(values: Values) -> Iterator[tuple[Cell, ...]]:
    """Yield a row for each visible GPU: name, owner, and holders of its memory."""
    for gpu, uuid, name, attribution in values.find_all(catalog.GPU_INFO):
        # A MIG instance's name may already contain the short form of its UUID.
        part = find_part(uuid)
        number = gpu if part in name else f"{gpu} {part}"
        owner = f"the engine (by {attribution})" if attribution else "not the engine"
        sizes_bytes = [
            *(values.value(catalog.GPU_MEMORY_HELD, gpu, uuid, holder) for holder in HOLDERS),
            values.value(catalog.GPU_MEMORY_FREE, gpu, uuid),
            values.value(catalog.GPU_MEMORY_TOTAL, gpu, uuid),
        ]
        yield (
            Cell(f"GPU {number} {name}"),
            Cell(owner),
            *(Cell(_format_known_gib(size_bytes)) for size_bytes in sizes_bytes),
        )


def _build_roles(values: Values, snapshot: Snapshot) -> Table:
    """Return the table of host memory, with torch's pinned memory if the probe reports it."""
    pinned_bytes = _sum_pinned(snapshot)
    pinned_columns = ("pinned by torch",) if pinned_bytes else ()
    return Table(
        title="Host memory by process",
        columns=("processes", "resident", *pinned_columns, "swapped out", "leak", "growth an hour"),
        rows=tuple(_list_roles(values, pinned_bytes)),
    )


def _sum_pinned(snapshot: Snapshot) -> dict[str, int]:
    """Return the host memory pinned by torch, by process role."""
    sizes_bytes: dict[str, int] = {}
    if isinstance(snapshot.probe, ProbeReadings):
        for process in snapshot.probe.present:
            if process.pinned_bytes is not None:
                role_bytes = sizes_bytes.get(process.role, 0)
                sizes_bytes[process.role] = role_bytes + process.pinned_bytes
    return sizes_bytes


def _list_roles(values: Values, pinned_bytes: Mapping[str, int]) -> Iterator[tuple[Cell, ...]]:
    """Yield a row for each role of the engine's processes: host memory, leak and growth.

    `pinned_bytes` is keyed by role. If `pinned_bytes` is empty, the rows have no cell for pinned
    memory.
    """
    for (role,), resident_bytes in values.find_all(catalog.HOST_MEMORY).items():
        swapped_bytes = values.value(catalog.HOST_SWAP, role)
        leak_state = values.state(catalog.HOST_LEAK_STATE, role)
        bytes_per_second = values.value(catalog.HOST_LEAK_RATE, role)
        growth = ""
        if bytes_per_second is not None:
            growth = format_size(HOUR_SECONDS * bytes_per_second)
        pinned_cells = []
        if pinned_bytes:
            pinned_cells.append(Cell(_format_known_gib(pinned_bytes.get(role))))
        yield (
            Cell(role),
            Cell(_format_known_gib(resident_bytes)),
            *pinned_cells,
            Cell(_format_known_gib(swapped_bytes)),
            Cell((leak_state or NOT_KNOWN).replace("_", " ")),
            Cell(growth),
        )


ENGINE_COLUMNS: Final[tuple[tuple[str, Metric, str], ...]] = (
    ("running", catalog.ENGINE_RUNNING, "{:.0f}"),
    ("waiting", catalog.ENGINE_WAITING, "{:.0f}"),
    ("KV cache used", catalog.ENGINE_KV_USED, "{:.1%}"),
    ("prefix hits, 5 min", catalog.ENGINE_PREFIX_HIT_RATIO, "{:.1%}"),
    ("more requests fit", catalog.ENGINE_ADDITIONAL_REQUESTS, "{:.0f}"),
)
"""The title, metric and value format of each column."""


def _list_engines(values: Values) -> Iterator[tuple[Cell, ...]]:
    """Yield a row for each engine on the page; its columns are ENGINE_COLUMNS."""
    for model_name, engine, _profile in values.find_all(catalog.ENGINE_INFO):
        cells = [Cell(f"{model_name} / {engine}")]
        for _, metric, value_format in ENGINE_COLUMNS:
            value = values.value(metric, model_name, engine)
            cells.append(Cell(_format_known(value, value_format)))
        yield tuple(cells)


def _list_sources(values: Values, snapshot: Snapshot) -> Iterator[tuple[Cell, ...]]:
    """Yield a row for each configured source.

    The row shows when the source was read, or why it could not be.
    """
    failures = {str(failure.source): failure for failure in snapshot.failures}
    for (source,), up in values.find_all(catalog.SOURCE_UP).items():
        read_seconds = values.value(catalog.SOURCE_READ_SECONDS, source)
        read_ms = None if read_seconds is None else 1000 * read_seconds
        success_seconds = values.value(catalog.SOURCE_LAST_SUCCESS, source)
        cause = ""
        if source in failures:
            failure = failures[source]
            cause = f"{failure.reason}: {failure.message}"
        if up:
            last_success = "this time"
        elif success_seconds is None:
            last_success = "never"
        else:
            # The clock may have been set back, but the age must not be negative.
            age_seconds = max(0.0, snapshot.time_seconds - success_seconds)
            last_success = f"{format_duration(age_seconds)} before"
        yield (
            Cell(source),
            Cell("answers") if up else Cell("failed", Level.ALARM),
            Cell(_format_read_time(read_ms)),
            Cell(last_success),
            Cell(cause),
        )


def render_table(table: Table) -> str:
    """Return a foldable table, or "" if the table has no rows.

    The table is open if it contains an alarm. Columns whose cells are all empty are omitted.
    """
    if not table.rows:
        return ""
    title = escape_text(table.title)
    # Columns that no row needs, such as swap on most machines, would only waste space.
    columns = [
        place for place in range(len(table.columns)) if any(row[place].text for row in table.rows)
    ]
    column_titles = [escape_text(table.columns[place]) for place in columns]
    head = "".join(f"<th scope=col>{column_title}</th>" for column_title in column_titles)
    rows = "".join(
        _render_row(tuple(row[place] for place in columns), column_titles) for row in table.rows
    )
    has_alarm = any(cell.level is Level.ALARM for row in table.rows for cell in row)
    opened = " open" if has_alarm else ""
    return (
        f"<details class=more{opened}><summary><h2>{title}</h2></summary>"
        f'<div class=wide role=region tabindex=0 aria-label="{title}">'
        f"<table class={table.kind}><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
        "</div></details>"
    )


def _render_row(row: tuple[Cell, ...], column_titles: list[str]) -> str:
    """Return a table row, whose first cell is its heading."""
    heading, *cells = row
    # On narrow screens, the style hides the table's head and shows `data-t` before each cell.
    rendered_cells = "".join(
        f'<td data-t="{column_title}">{_render_cell(cell)}</td>'
        for column_title, cell in zip(column_titles[1:], cells, strict=True)
    )
    return f"<tr><th scope=row>{escape_text(heading.text)}</th>{rendered_cells}</tr>"


def _render_cell(cell: Cell) -> str:
    text = escape_text(cell.text)
    if cell.level is None:
        return text
    return f"<b class={cell.level}>{text}</b>"


def _format_known(value: float | None, value_format: str) -> str:
    return NOT_KNOWN if value is None else value_format.format(value)


def _format_known_gib(n_bytes: float | None) -> str:
    return NOT_KNOWN if n_bytes is None else format_gib(n_bytes)


def _format_read_time(milliseconds: float | None) -> str:
    if milliseconds is None:
        return NOT_KNOWN
    if milliseconds < LEAST_SHOWN_MS:
        return f"under {LEAST_SHOWN_MS} ms"
    return f"{milliseconds:.1f} ms"
