"""Compare two starts of an engine by the parts of memory in their logs."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

from vllm_headroom.derive.engine_log import describe_failure, describe_place, describe_time
from vllm_headroom.model.start import EngineStart, Scalar
from vllm_headroom.units import GIB, format_size
from vllm_headroom.vocabulary import StartPart
from vllm_headroom_tools.check.judgement import Judgement, Unit, format_figure
from vllm_headroom_tools.check.report import format_annotations, format_rows, summarize
from vllm_headroom_tools.conclusion import Conclusion, Finding, Report, find_worst
from vllm_headroom_tools.terminal import wrap_text

PARTS: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    (StartPart.WEIGHTS, ("weights_bytes", "profiled_weights_bytes")),
    (StartPart.ACTIVATIONS, ("activation_bytes",)),
    (StartPart.NON_TORCH, ("non_torch_bytes",)),
    (StartPart.CUDA_GRAPHS, ("graphs_bytes", "graphs_estimated_bytes")),
)
"""The parts that may be larger in a newer version. Each part has its fields in a log."""

ROUNDING_BYTES: Final = GIB / 50
"""vLLM logs sizes in hundredths of a GiB. Equal sizes may therefore differ by this much."""

SETTINGS: Final = (
    "model",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "enforce_eager",
    "cpu_offload_gb",
)
"""Options that affect how much memory an engine uses. If two starts differ in any of these options,
they are not judged.
"""

EQUAL_CARDS_BYTES: Final = GIB // 8
"""Two cards are of the same kind if their sizes differ by less. For example, two H100 cards with
80 GB differ by 0.1 GiB.
"""


def judge_starts(
    older: EngineStart, newer: EngineStart, limit_ratio: float | None
) -> tuple[Judgement, ...]:
    """Return the judgements on the newer start's memory, compared with the older start's.

    A part may grow, and the KV cache may shrink, by the share `limit_ratio`. Without a limit, the
    figures are only shown.
    """
    failure = newer.root_failure
    if failure is not None and not newer.has_served:
        reason = f"{describe_failure(failure)} ({describe_place(failure)})"
        judgement = Judgement(
            limit="the start", verdict=Conclusion.NOT_GOOD, value_text="failed", reason=reason
        )
        return (judgement,)
    # Different settings explain a difference, so it is shown but not judged.
    doubt = "; ".join(list_differences(older, newer)) if limit_ratio is not None else ""
    judgements = []
    for part, fields in PARTS:
        older_bytes = find_figure(older, fields)
        newer_bytes = find_figure(newer, fields)
        if older_bytes is None and newer_bytes is None:
            continue
        judgements.append(_judge_part(part, older_bytes, newer_bytes, limit_ratio, doubt))
    judgements += _judge_cache(older, newer, limit_ratio, doubt)
    if judgements:
        return tuple(judgements)
    missing = "neither log has a size: vLLM writes them at the level INFO"
    return (Judgement(limit="the start", verdict=Conclusion.CANNOT_TELL, reason=missing),)


def find_figure(start: EngineStart, fields: Sequence[str]) -> float | None:
    """Return the largest value on any rank, from the first known field.

    Returns None if no field is known.
    """
    for field in fields:
        figure = start.find_largest(field)
        if figure is not None:
            return figure
    return None


def _judge_part(
    part: str,
    older_bytes: float | None,
    newer_bytes: float | None,
    limit_ratio: float | None,
    doubt: str,
) -> Judgement:
    """Judge the growth of one part."""
    highest_bytes = None
    bound_text = ""
    if limit_ratio is not None and older_bytes is not None:
        # vLLM rounds the sizes in its log. A difference in the last digit must not decide the
        # verdict.
        highest_bytes = (1 + limit_ratio) * older_bytes + ROUNDING_BYTES
        bound_text = f"{100 * limit_ratio:.3g}% more"
    is_over = highest_bytes is not None and newer_bytes is not None and newer_bytes > highest_bytes
    return Judgement(
        limit=part,
        verdict=_conclude(older_bytes, newer_bytes, limit_ratio, doubt, is_over=is_over),
        value=newer_bytes,
        highest_allowed=highest_bytes,
        baseline=older_bytes,
        value_text=_describe_change(older_bytes, newer_bytes, Unit.BYTES),
        bound_text=bound_text,
        reason=doubt or _explain_missing(older_bytes, newer_bytes),
    )


def _judge_cache(
    older: EngineStart, newer: EngineStart, limit_ratio: float | None, doubt: str
) -> Iterator[Judgement]:
    """Judge by how much the KV cache shrank.

    The rank with the smallest cache is measured.
    """
    # Try both bytes and tokens. A log may contain only one of the two.
    for field, unit in (("kv_cache_bytes", Unit.BYTES), ("kv_cache_tokens", Unit.TOKENS)):
        older_size = older.find_smallest(field)
        newer_size = newer.find_smallest(field)
        if older_size is None and newer_size is None:
            continue
        lowest_size = None
        bound_text = ""
        if limit_ratio is not None and older_size is not None:
            lowest_size = (1 - limit_ratio) * older_size
            bound_text = f"{100 * limit_ratio:.3g}% less"
        is_under = lowest_size is not None and newer_size is not None and newer_size < lowest_size
        yield Judgement(
            limit=StartPart.KV_CACHE,
            verdict=_conclude(older_size, newer_size, limit_ratio, doubt, is_over=is_under),
            unit=unit,
            value=newer_size,
            lowest_allowed=lowest_size,
            baseline=older_size,
            value_text=_describe_change(older_size, newer_size, unit),
            bound_text=bound_text,
            reason=doubt or _explain_missing(older_size, newer_size),
        )


def _conclude(
    older_size: float | None,
    newer_size: float | None,
    limit_ratio: float | None,
    doubt: str,
    *,
    is_over: bool,
) -> Conclusion:
    """Return the verdict on one figure: "good" if the figure is only shown."""
    if limit_ratio is None:
        return Conclusion.GOOD
    if doubt or older_size is None or newer_size is None:
        return Conclusion.CANNOT_TELL
    return Conclusion.NOT_GOOD if is_over else Conclusion.GOOD


def _describe_change(older_size: float | None, newer_size: float | None, unit: Unit) -> str | None:
    """Return a figure and its change, or None if the figure is unknown."""
    if newer_size is None:
        return None
    text = format_figure(newer_size, unit)
    if not older_size:
        return text
    return f"{text}, {newer_size / older_size - 1:+.2%}"


def _explain_missing(older_size: float | None, newer_size: float | None) -> str:
    if older_size is None:
        return "the older log does not have it"
    return "the newer log does not have it" if newer_size is None else ""


def list_differences(older: EngineStart, newer: EngineStart) -> Iterator[str]:
    """Yield a text for each setting in which the starts differ.

    Different cards add another text.
    """
    older_bytes = older.find_largest("total_bytes")
    newer_bytes = newer.find_largest("total_bytes")
    are_known = older_bytes is not None and newer_bytes is not None
    if are_known and abs((older_bytes or 0) - (newer_bytes or 0)) > EQUAL_CARDS_BYTES:
        sizes = f"{format_size(older_bytes or 0)}, {format_size(newer_bytes or 0)}"
        yield f"the cards differ: {sizes}"
    for name in SETTINGS:
        older_value = read_setting(older, name)
        newer_value = read_setting(newer, name)
        if older_value != newer_value:
            yield f"{name} differs: {older_value}, {newer_value}"


def read_setting(start: EngineStart, name: str) -> Scalar:
    """Return a setting of a start, or None if it is unknown."""
    return start.model if name == "model" else start.find_option(name)


def build_start_report(
    starts: Sequence[tuple[str, EngineStart]],
    judgements: Sequence[Judgement],
    *,
    for_github: bool,
) -> Report:
    """Return the report on named starts: the older one, then the newer one."""
    lines = [_describe_start(name, start) for name, start in starts]
    (_, older), (_, newer) = starts
    differences = list(list_differences(older, newer))
    for difference in differences:
        lines += wrap_text("note: ", difference)
    headline = summarize(judgements)
    # Without a limit, nothing was judged, so the headline gives the number of differences.
    if all(judgement.has_no_bound for judgement in judgements):
        changed = sum(judgement.value != judgement.baseline for judgement in judgements)
        headline = f"Compared {len(judgements)} figures without a limit: {changed} differ."
    heading_line, *judgement_lines = format_rows(judgements)
    lines += ["", heading_line, *judgement_lines]
    for reason in dict.fromkeys(judgement.reason for judgement in judgements):
        if reason and reason not in differences:
            lines += wrap_text("", reason)
    lines += ["", headline]
    if for_github:
        lines += format_annotations(judgements)
    return Report(
        verdict=find_worst(judgement.verdict for judgement in judgements),
        headline=headline,
        findings=[
            Finding(judgement.name, judgement.verdict, judgement.texts[0])
            for judgement in judgements
        ],
        data=_build_data(starts, judgements, differences),
        lines=tuple(lines),
    )


def _describe_start(name: str, start: EngineStart) -> str:
    version = start.version or "of an unknown version"
    begin = describe_time(start.begin)
    when = "" if begin is None else f", {begin}"
    return f"{name}: vLLM {version}, {start.model or 'unknown model'}{when}"


def _build_data(
    starts: Sequence[tuple[str, EngineStart]],
    judgements: Sequence[Judgement],
    differences: Sequence[str],
) -> dict[str, Any]:
    """Return the report as JSON."""
    return {
        "logs": [
            {"file": name, "version": start.version, "model": start.model, "phase": start.phase}
            for name, start in starts
        ],
        "differences": list(differences),
        "parts": [
            {
                "part": judgement.limit,
                "unit": judgement.unit,
                "older": judgement.baseline,
                "newer": judgement.value,
                "most": judgement.highest_allowed,
                "least": judgement.lowest_allowed,
                "verdict": judgement.verdict,
                "why": judgement.reason or None,
            }
            for judgement in judgements
        ],
    }
