"""The report on sizes: what the traffic needs, what is unused, and which sizes suffice."""

from collections.abc import Iterator
from math import floor
from typing import Any, Final

from msgspec.structs import asdict

from vllm_headroom.units import DAY_SECONDS, GIB, PERCENT, format_duration
from vllm_headroom_tools.conclusion import Conclusion, Finding, Report
from vllm_headroom_tools.plan.report import build_data
from vllm_headroom_tools.plan.sizes import Size, Sizing
from vllm_headroom_tools.plan.verdict import list_unknown
from vllm_headroom_tools.terminal import join_paragraphs, wrap_text

MOST_ROWS: Final = 6
"""Our choice: the maximum number of other sizes in the table. With --json, all of them are listed.
"""

SHORT_DAY_SECONDS: Final = 0.9 * DAY_SECONDS
"""Our choice: a shorter history does not show a day's peaks."""


SAME_START_RATIO: Final = 0.97
"""Our choice: a KV cache below this share shows a start with other options. It is a share of the
planned lower bound ("at least"). In 2 of 100 starts with equal options, the cache is slightly below
the bound.
"""


def build_sizes_report(sizing: Sizing) -> Report:
    """Return the report on the sizes that suit an engine's traffic."""
    unknown = list_unknown(sizing.estimate)
    verdict = Conclusion.NOT_GOOD if sizing.traffic.has_hurt else Conclusion.GOOD
    headline = _conclude(sizing)
    if unknown:
        verdict = Conclusion.CANNOT_TELL
        headline = f"Cannot tell what holds this traffic. Not known: {', '.join(unknown)}."
    notes = list(_list_notes(sizing))
    fix = tuple(_write_settings(size) for size in _choose_rows(sizing))
    findings = [Finding("size", verdict, headline, fix)]
    findings += [Finding("note", Conclusion.GOOD, note) for note in notes]
    data = {
        "fits": None if unknown else not sizing.traffic.has_hurt,
        **build_data(sizing.estimate, ()),
        "notes": notes,
        "log": None,
        "traffic": _build_traffic_data(sizing),
    }
    return Report(
        verdict=verdict,
        headline=headline,
        findings=findings,
        data=data,
        lines=join_paragraphs(
            (
                _format_traffic(sizing),
                _format_waste(sizing),
                _format_sizes(sizing),
                _format_answer(headline, notes),
            )
        ),
    )


def _conclude(sizing: Sizing) -> str:
    """Return the verdict as a sentence."""
    traffic = sizing.traffic
    larger = "no size that is known here holds this traffic"
    if sizing.larger:
        larger = f"{sizing.larger[0].name} holds this traffic with a quarter to spare"
    # The worst result comes first. If preemptions did harm, free memory does not matter.
    if traffic.has_hurt:
        duration = format_duration(traffic.full_seconds)
        return f"It is too small: its KV cache was full for {duration} and preempted; {larger}."
    if traffic.queued_waiting is not None:
        duration = format_duration(traffic.queued_seconds)
        queue = f"It queues: {traffic.queued_waiting:,.0f} requests waited for {duration}"
        if traffic.has_capped_queue and sizing.has_room:
            return (
                f"{queue} although its KV cache has room:"
                f" --max-num-seqs {sizing.needed_requests} lets them run."
            )
        return f"{queue}; {larger}."
    if not sizing.has_room:
        return f"It holds this traffic with less than a quarter to spare; {larger}."
    smaller = []
    if sizing.smaller_share is not None:
        option, value = sizing.smaller_share.settings[0]
        smaller.append(f"{option} {value}")
    if sizing.smaller:
        smaller.append(sizing.smaller[0].name)
    if smaller:
        choice = " or ".join(smaller)
        return f"It is larger than this traffic needs: {choice} holds it with a quarter to spare."
    return "It has the right size: nothing smaller holds this traffic with a quarter to spare."


def _list_notes(sizing: Sizing) -> Iterator[str]:
    """Yield the limitations of the verdict."""
    traffic = sizing.traffic
    question = sizing.estimate.question
    yield (
        f"Planned as vLLM {question.release.version} with --max-model-len"
        f" {question.max_model_len or 0}; give the engine's own options where they differ."
    )
    yield (
        "Sizes are judged by the KV cache alone: a smaller card is often slower, and whether memory"
        " leaks or runs short says vllm-headroom advise."
    )
    if traffic.seconds < SHORT_DAY_SECONDS:
        yield f"The history has only {traffic.span}: a day or more has the usual peaks."
    if traffic.max_num_seqs and traffic.highest_running >= traffic.max_num_seqs:
        yield (
            f"As many requests ran as --max-num-seqs {traffic.max_num_seqs:,.0f} allows:"
            " more may have waited."
        )
    if traffic.has_prefix_hits:
        yield (
            "Unused blocks of the KV cache keep prefixes of earlier prompts: a smaller cache finds"
            " fewer of them again."
        )
    capacity_tokens = traffic.capacity_tokens
    planned_tokens = sizing.estimate.capacity_tokens
    if capacity_tokens and planned_tokens and capacity_tokens < SAME_START_RATIO * planned_tokens:
        yield (
            f"The engine's KV cache has {capacity_tokens:,.0f} tokens, and with these options it"
            f" would have at least {planned_tokens:,}: it was started with others."
        )


def _format_traffic(sizing: Sizing) -> Iterator[str]:
    """Yield the lines about what the traffic used."""
    traffic = sizing.traffic
    yield f"The traffic of {traffic.span} ({traffic.source})"
    yield (
        f"  requests at once      at most {traffic.highest_running:,.0f}:"
        f" --max-num-seqs {sizing.needed_requests} has a quarter to spare"
    )
    used = _format_ratio(traffic.highest_used_ratio)
    if traffic.capacity_tokens is not None:
        used_tokens = traffic.highest_used_ratio * traffic.capacity_tokens
        used = f"{used_tokens:,.0f} of {traffic.capacity_tokens:,.0f} tokens, {used}"
    yield f"  KV cache in use       at most {used}"
    if traffic.full_seconds:
        yield f"  KV cache full         for {format_duration(traffic.full_seconds)}"
    if traffic.queued_waiting is not None:
        duration = format_duration(traffic.queued_seconds)
        yield f"  requests waiting      {traffic.queued_waiting:,.0f}, usually, for {duration}"
    yield f"  with a quarter more   {sizing.needed_tokens:,.0f} tokens"


def _format_waste(sizing: Sizing) -> Iterator[str]:
    """Yield the table of memory that the traffic never used.

    Yields nothing if that memory is unknown.
    """
    waste = sizing.waste
    if waste.total_bytes is None:
        return
    yield f"{'Never used, of each GPU':<36}GiB"
    rows = (
        ("KV cache beyond that", waste.kv_cache_bytes),
        ("free on the card, at its peak", waste.free_bytes),
        ("together", waste.total_bytes),
    )
    memory_bytes = sizing.estimate.question.gpu_memory_bytes
    for name, unused_bytes in rows:
        if unused_bytes is None:
            continue
        share = ""
        if memory_bytes:
            share = f"   {_format_ratio(unused_bytes / memory_bytes)} of its memory"
        yield f"  {name:<30}{unused_bytes / GIB:>7,.2f}{share}"


def _choose_rows(sizing: Sizing) -> list[Size]:
    """Return the smaller sizes or, if the current size is too small, the larger ones."""
    sizes = sizing.smaller if sizing.has_room else sizing.larger
    return list(sizes[:MOST_ROWS])


def _format_sizes(sizing: Sizing) -> Iterator[str]:
    """Yield the table that compares the current engine with sizes that can handle the traffic."""
    rows = [("as it is", sizing.now)]
    if sizing.has_room and sizing.smaller_share is not None:
        option, value = sizing.smaller_share.settings[0]
        rows.append((f"{option} {value}", sizing.smaller_share))
    rows += [("", size) for size in _choose_rows(sizing)]
    names = [f"{size.name}, {remark}" if remark else size.name for remark, size in rows]
    width = max(map(len, names)) + 2
    yield (
        f"{'What holds it':<{width + 2}}{'GiB in all':>10}{'longest':>12}"
        f"{'KV cache tokens':>18}{'traffic takes':>16}"
    )
    for name, (_, size) in zip(names, rows, strict=True):
        yield f"  {name:<{width}}{_format_size(size)}"


def _format_size(size: Size) -> str:
    """Return a size's figures as table columns."""
    longest = "-" if size.longest_tokens is None else f"{size.longest_tokens:,}"
    tokens = "-" if size.capacity_tokens is None else f"{size.capacity_tokens:,}"
    used = "-" if size.used_ratio is None else _format_ratio(size.used_ratio)
    return f"{size.total_bytes / GIB:>10,.1f}{longest:>12}{tokens:>18}{used:>16}"


def _format_answer(headline: str, notes: list[str]) -> Iterator[str]:
    for sentence in (*notes, headline):
        yield from wrap_text("", sentence)


def _format_ratio(ratio: float) -> str:
    return f"{floor(ratio * PERCENT + 0.5)} %"


def _write_settings(size: Size) -> str:
    """Return a size with its options as they would be typed."""
    options = " ".join(f"{option} {value}" for option, value in size.settings)
    return f"{size.name}: {options}"


def _build_traffic_data(sizing: Sizing) -> dict[str, Any]:
    """Return the figures about the traffic and the sizes for --json; unknown figures are None."""
    traffic = sizing.traffic
    share = sizing.smaller_share
    return {
        "source": traffic.source,
        "seconds": traffic.seconds,
        "highest_running": traffic.highest_running,
        "highest_kv_cache_used_ratio": traffic.highest_used_ratio,
        "kv_capacity_tokens": traffic.capacity_tokens,
        "kv_cache_full_seconds": traffic.full_seconds,
        "queued_seconds": traffic.queued_seconds,
        "queued_waiting": traffic.queued_waiting,
        "needed_max_num_seqs": sizing.needed_requests,
        "needed_tokens": sizing.needed_tokens,
        "unused_kv_cache_bytes": sizing.waste.kv_cache_bytes,
        "unused_card_bytes": sizing.waste.free_bytes,
        "now": _build_size_data(sizing.now),
        "smaller_share": None if share is None else _build_size_data(share),
        "smaller": [_build_size_data(size) for size in sizing.smaller],
        "larger": [_build_size_data(size) for size in sizing.larger],
    }


def _build_size_data(size: Size) -> dict[str, Any]:
    return {**asdict(size), "settings": dict(size.settings)}
