"""The runbooks, read, and what may be wrong with what they report about metrics and vLLM."""

from __future__ import annotations

import re
from typing import Final

from tests.assets.alerts import FOLDER, KNOWN

RUNBOOKS: Final = {path.stem: path.read_text(encoding="utf-8") for path in sorted((FOLDER / "runbooks").glob("*.md"))}

VLLM_FLAGS: Final = frozenset(
    {
        "--disable-log-stats",
        "--enforce-eager",
        "--gpu-memory-utilization",
        "--kv-cache-memory-bytes",
        "--limit-mm-per-prompt",
        "--mm-processor-kwargs",
        "--max-logprobs",
        "--max-loras",
        "--max-model-len",
        "--max-num-batched-tokens",
        "--max-num-seqs",
        "--mm-processor-cache-gb",
        "--no-enable-prefix-caching",
    }
)
"""Flags that vLLM has, in the releases themselves; a new one is looked up there before it is written here."""

INVENTED_FLAGS: Final = frozenset(
    {
        "--chunked-prefill-max-len",
        "--disable-prefix-cache",
        "--disable-prefix-caching",
        "--enable-memory-budget",
        "--enable-multimodal",
        "--max-num-on-the-fly-batches",
    }
)
"""Flags that go round in articles, one in vLLM's own error texts, and that no release has."""

OTHER_FLAGS: Final = frozenset({"--duration", "--previous"})
"""Flags of other tools that a text names by themselves: amtool's, kubectl's."""

_FLAG: Final = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
_CODE: Final = re.compile(r"`([^`\n]+)`")
_METRIC: Final = re.compile(r"(?<![\w:^])(?:\w+:)?headroom_\w+(?::\w+)?\*?")
_PATTERN: Final = re.compile(r"\^(headroom_[^'/]*)['/]")


def page_queries(page: str) -> list[str]:
    """Return the PromQL of a page, a query to a block; what the shell puts in is inside quotation marks."""
    return re.findall(r"^```promql\n(.*?)^```", page, re.DOTALL | re.MULTILINE)


def unknown_metrics(page: str) -> set[str]:
    """Return the names on a page that begin no metric's: words must be the whole name, patterns after ^ its beginning.

    `headroom_gpu_*` in words represents several. Of a pattern every alternative has to find something.
    """
    words = {name for name in _METRIC.findall(page) if name.removesuffix("*") == name}
    metric_starts = {name.removesuffix("*") for name in _METRIC.findall(page)} - words
    metric_starts |= {
        metric_match[0]
        for match in _PATTERN.findall(page)
        for way in _ways(match)
        if (metric_match := re.match(r"\w+", way))
    }
    return words - KNOWN.keys() | {
        start for start in metric_starts if not any(name.startswith(start) for name in KNOWN)
    }


def _ways(pattern: str) -> list[str]:
    """Return what a regular expression with alternatives reads without them."""
    group = re.search(r"\(([^()]*)\)", pattern)
    if group is None:
        return [pattern]
    text_before, text_after = pattern[: group.start()], pattern[group.end() :]
    return [way for word in group[1].split("|") for way in _ways(text_before + word + text_after)]


def flag_faults(page: str) -> list[str]:
    """Return the flags that vLLM does not have.

    What a flag belongs to is shown by the code it is in: by itself or behind `vllm` it is vLLM's, behind another
    command that command's. Known inventions are found anywhere.
    """
    spans = [*_CODE.findall(page), *re.findall(r"^.*\bvllm serve\b.*$", page, re.MULTILINE)]
    ours = {flag for span in spans if re.match(r"--|.*\bvllm serve\b", span) for flag in _FLAG.findall(span)}
    return sorted((ours - VLLM_FLAGS - OTHER_FLAGS) | (set(_FLAG.findall(page)) & INVENTED_FLAGS))
