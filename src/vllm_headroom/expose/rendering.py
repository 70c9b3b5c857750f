"""Samples as text, with all but the values taken from what prometheus-client wrote for the same series before."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Final

from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.utils import floatToGoString

from vllm_headroom.expose.collector import OneFamily, grouped
from vllm_headroom.model import Sample

_NO_VALUE: Final = 0.0
_number: Final = lru_cache(maxsize=1024)(floatToGoString)
"""Most values are those of the last page, or 0 and 1; writing one takes a microsecond."""

Encode = Callable[[Collector], bytes]


class Rendering:
    """Writes the samples of one moment after another in the format of `encode`.

    Rendering 244 samples takes 0.3 ms, and 1.5 with `encode` itself. It remembers the series of the last moment only.
    """

    def __init__(self, encode: Encode) -> None:
        self._encode = encode
        self._written: dict[tuple[str, tuple[str, ...]], tuple[str, str]] = {}

    def text(self, samples: Iterable[Sample]) -> str:
        """Return the families of these samples, in the catalogue's order, without an end mark."""
        before, self._written = self._written, {}
        lines: list[str] = []
        for family in grouped(samples):
            title = ""
            for sample in family:
                key = (sample.metric.name, sample.labels)
                written = self._written[key] = before.get(key) or self._first(sample)
                if not title:
                    title = written[0]
                    lines.append(title)
                lines.append(f"{written[1]} {_number(sample.value)}\n")
        return "".join(lines)

    def _first(self, sample: Sample) -> tuple[str, str]:
        """Return the family's title and the series as prometheus-client writes them."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(OneFamily(Sample(sample.metric, sample.labels, _NO_VALUE)))
        title, _, series = self._encode(registry).decode().removesuffix("# EOF\n").rstrip("\n").rpartition("\n")
        return f"{title}\n", series.rpartition(" ")[0]
