"""Serve the metrics page, encoded once per sample and format, with the sample's age at the scrape."""

import gzip
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Final
from urllib.parse import parse_qs

from msgspec import Struct
from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from vllm_headroom import catalog
from vllm_headroom.expose.answers import NO_SNIFF, NO_STORE, Header, Request, Response
from vllm_headroom.model import Metric, Published, Sample
from vllm_headroom.vocabulary import MetricType


class HeadroomCollector(Collector):
    """Turns what `published` returns (None before the first sample) into families, without I/O or errors.

    `others` returns the samples that belong to no tick.
    """

    def __init__(
        self,
        published: Callable[[], Published | None],
        monotonic: Callable[[], float],
        build: tuple[str, str, str],
        others: Callable[[], Iterable[Sample]] = tuple,
    ) -> None:
        self.published = published
        self._monotonic = monotonic
        self._others = others
        self._build = Sample(catalog.BUILD_INFO, build, 1.0)

    def collect(self) -> Iterator[Family]:
        """Yield the families that have a sample, in the catalogue's order."""
        return (_build_family(metric, samples) for metric, samples in self.groups())

    def groups(self) -> Iterator[tuple[Metric, list[Sample]]]:
        """Yield each metric that has samples, with them, in the catalogue's order."""
        samples, published = [self._build], self.published()
        if published is not None:
            age = Sample(catalog.SAMPLE_AGE, (), self.age_seconds(published))
            samples += [age, *self._others(), *published.samples]
        groups: defaultdict[str, list[Sample]] = defaultdict(list)
        for sample in samples:
            groups[sample.metric.name].append(sample)
        return (
            (metric, groups[metric.name]) for metric in catalog.METRICS if metric.name in groups
        )

    def age_seconds(self, published: Published) -> float:
        """Return the time since its tick ended."""
        return max(0.0, self._monotonic() - published.monotonic_seconds)


def _build_family(metric: Metric, samples: list[Sample]) -> Family:
    kind = CounterMetricFamily if metric.kind is MetricType.COUNTER else GaugeMetricFamily
    family = kind(metric.name, metric.help, labels=metric.labels)
    for sample in samples:
        family.add_metric(sample.labels, sample.value)
    return family


Encode = Callable[[Collector], bytes]

_AGE: Final = re.compile(rf"\n{catalog.SAMPLE_AGE.name} .*".encode())
_ZERO: Final = re.compile(r"q\s*=\s*0(\.0*)?")
_FASTEST: Final = 1
"""Of gzip's levels; a page of eight GPUs takes 60 us, and becomes a sixth."""

_MOST_FORMATS: Final = 3
"""Formats kept per sample: there are two, times a version and an escaping scheme that a scraper
chooses. Each takes 8 MiB for the largest page that an engine's names can produce."""

_HEADERS: Final[tuple[Header, ...]] = (NO_SNIFF, NO_STORE, ("Vary", "Accept, Accept-Encoding"))


class MetricsPage:
    """Answers /metrics with the collector's samples."""

    def __init__(self, collector: HeadroomCollector) -> None:
        self._collector = collector
        self._process = ProcessCollector(registry=None)
        self._shown: Published | None = None
        self._formats: dict[str, bytes] = {}
        self._encoded: dict[str, dict[str, tuple[list[Sample], bytes]]] = {}

    def __call__(self, request: Request) -> Response:
        """Return the page, or the families that the query names, in the requested format and encoding."""
        encode, content_type = _choose_encoder(request.headers.get("accept", ""))
        if names := parse_qs(request.query).get("name[]"):
            families = (*self._collector.collect(), *self._process.collect())
            body = encode(_Families(each for each in families if each.samples[0].name in names))
        else:
            body = self._page(encode, content_type)
        headers = _HEADERS
        if _is_gzip_accepted(request.headers.get("accept-encoding", "")):
            body, headers = (
                gzip.compress(body, _FASTEST, mtime=0),
                (*_HEADERS, ("Content-Encoding", "gzip")),
            )
        return Response(status=200, body=body, content_type=content_type, headers=headers)

    def _page(self, encode: Encode, content_type: str) -> bytes:
        """Return the page; families that have not changed since the last one stay as they were encoded then."""
        published = self._collector.published()
        if len(self._formats) > _MOST_FORMATS:
            self._formats, self._encoded = {}, {}
        elif published is not self._shown:
            self._formats = {}
        self._shown = published
        if content_type not in self._formats:
            known, parts = self._encoded.setdefault(content_type, {}), []
            for metric, samples in self._collector.groups():
                before, encoded = known.get(metric.name, ([], b""))
                if before != samples:
                    encoded = encode(_Families([_build_family(metric, samples)])).removesuffix(
                        b"# EOF\n"
                    )
                    known[metric.name] = samples, encoded
                parts.append(encoded)
            self._formats[content_type] = b"".join((*parts, encode(self._process)))
        page = self._formats[content_type]
        if published is None:
            return page
        age = f"\n{catalog.SAMPLE_AGE.name} {self._collector.age_seconds(published)!r}"
        return _AGE.sub(age.encode(), page, count=1)


class _Families(Struct):
    """Some families, as the encoders take them."""

    families: Iterable[Family]

    def collect(self) -> Iterable[Family]:
        return self.families


@lru_cache(maxsize=_MOST_FORMATS)
def _choose_encoder(accept: str) -> tuple[Encode, str]:
    """Return the format that a header requests; the default for a header that is not ASCII or not valid."""
    wanted = [each for each in accept.split(",") if not _is_refused(each)]
    try:
        return choose_encoder(",".join(wanted) if accept.isascii() else "")
    except (
        TypeError
    ):  # a version that is none, such as 1.0.0-beta, which the library cannot compare
        return choose_encoder("")


def _is_gzip_accepted(accept_encoding: str) -> bool:
    for each in accept_encoding.lower().split(","):
        if each.partition(";")[0].strip() in ("gzip", "x-gzip"):
            return not _is_refused(each)
    return False


def _is_refused(choice: str) -> bool:
    """Return whether a choice of a weighted header has the weight 0 (RFC 9110, 12.4.2)."""
    return any(_ZERO.fullmatch(parameter.strip()) for parameter in choice.lower().split(";")[1:])
