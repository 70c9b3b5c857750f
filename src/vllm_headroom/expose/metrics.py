"""Serve the metrics page, which is encoded once per sample and format."""

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
from prometheus_client.utils import floatToGoString

from vllm_headroom import catalog
from vllm_headroom.expose.answers import NO_SNIFF, NO_STORE, Header, Request, Response
from vllm_headroom.model import Metric, Published, Sample
from vllm_headroom.vocabulary import MetricType


class HeadroomCollector(Collector):
    """Turns the published samples into metric families. Does no I/O and never raises.

    `published` returns the samples of the latest tick, or None before the first tick. `list_others`
    returns additional samples. `build` contains the build's labels: version, revision and Python
    version.
    """

    def __init__(
        self,
        published: Callable[[], Published | None],
        monotonic: Callable[[], float],
        build: tuple[str, str, str],
        list_others: Callable[[], Iterable[Sample]] = tuple,
    ) -> None:
        self.published = published
        self._monotonic = monotonic
        self._list_others = list_others
        self._build = Sample(catalog.BUILD_INFO, build, 1.0)

    def collect(self) -> Iterator[Family]:
        """Yield the families that have samples, in the catalogue's order."""
        for metric, samples in self.group_samples():
            yield _build_family(metric, samples)

    def group_samples(self) -> Iterator[tuple[Metric, list[Sample]]]:
        """Yield the metrics that have samples, in the catalogue's order, each with its samples.

        Before the first tick, the build info is the only metric.
        """
        samples = [self._build]
        published = self.published()
        if published is not None:
            samples.append(Sample(catalog.SAMPLE_AGE, (), self.age_seconds(published)))
            samples += self._list_others()
            samples += published.samples
        groups: defaultdict[str, list[Sample]] = defaultdict(list)
        # The page follows the catalogue's order, regardless of the order of the samples.
        for sample in samples:
            groups[sample.metric.name].append(sample)
        for metric in catalog.METRICS:
            if metric.name in groups:
                yield metric, groups[metric.name]

    def age_seconds(self, published: Published) -> float:
        """Return the time since the tick of these samples."""
        return max(0.0, self._monotonic() - published.monotonic_seconds)


def _build_family(metric: Metric, samples: list[Sample]) -> Family:
    """Return the samples of one metric as a metric family of the Prometheus client library."""
    kind = CounterMetricFamily if metric.kind is MetricType.COUNTER else GaugeMetricFamily
    family = kind(metric.name, metric.help, labels=metric.labels)
    # With several engines, some series in a family have more labels than others.
    for sample in samples:
        labels = dict(zip(sample.metric.labels, sample.labels, strict=True))
        family.add_sample(metric.name, labels, sample.value)
    return family


Encode = Callable[[Collector], bytes]

_AGE_LINE: Final = re.compile(rf"\n{catalog.SAMPLE_AGE.name} .*".encode())
"""The line with the sample's age, which changes on every scrape."""

_ZERO_WEIGHT: Final = re.compile(r"q\s*=\s*0(\.0*)?")
_END_LINE: Final = b"# EOF\n"
"""The last line of an OpenMetrics page."""

_FASTEST_LEVEL: Final = 1
"""The fastest level of gzip. This level compresses a page with eight GPUs to a sixth of its size in
60 µs.
"""

_MOST_FORMATS: Final = 3
"""The number of formats in which the newest page is cached. There are two formats, but a scraper
also chooses a version and an escaping scheme. With the longest names that an engine can have, a
page takes 8 MiB.
"""

_HEADERS: Final[tuple[Header, ...]] = (NO_SNIFF, NO_STORE, ("Vary", "Accept, Accept-Encoding"))


class _EncodedFamily(Struct, frozen=True):
    """A metric's samples and their encoded text."""

    samples: list[Sample]
    text: bytes

    def has_series_of(self, samples: list[Sample]) -> bool:
        """Return whether `samples` have the same labels in the same order as this family."""
        labels = [sample.labels for sample in samples]
        return labels == [sample.labels for sample in self.samples]

    def replace_values(self, samples: list[Sample]) -> "_EncodedFamily":
        """Return this family with the values of `samples`, which have the same labels."""
        # The comments are followed by one line per sample. Each of these lines ends with the
        # sample's value.
        lines = self.text.split(b"\n")
        first = len(lines) - 1 - len(samples)
        # Most values in a family, such as failure counts, have not changed.
        for index, (sample, former) in enumerate(
            zip(samples, self.samples, strict=True), start=first
        ):
            if sample.value == former.value:
                continue
            series, _, _ = lines[index].rpartition(b" ")
            value: str = floatToGoString(sample.value)  # type: ignore[no-untyped-call]
            lines[index] = b"%b %b" % (series, value.encode())
        return _EncodedFamily(samples, b"\n".join(lines))


class MetricsPage:
    """Serves /metrics with the collector's samples."""

    def __init__(self, collector: HeadroomCollector) -> None:
        self._collector = collector
        self._process = ProcessCollector(registry=None)
        self._encoded_samples: Published | None = None
        """The samples that `_pages` were encoded from."""
        self._pages: dict[str, bytes] = {}
        """The page in each requested content type."""
        self._families: dict[str, dict[str, _EncodedFamily]] = {}
        """The families of the last page, by content type and metric name."""

    def __call__(self, request: Request) -> Response:
        """Return the page.

        If the query names families, only those are returned. The request's headers select the
        format and the encoding.
        """
        encode, content_type = _choose_encoder(request.headers.get("accept", ""))
        names = parse_qs(request.query).get("name[]")
        if names:
            body = self._encode_families(encode, names)
        else:
            body = self._build_page(encode, content_type)
        headers = _HEADERS
        if _is_gzip_accepted(request.headers.get("accept-encoding", "")):
            # mtime=0 ensures that the same page always gives the same bytes.
            body = gzip.compress(body, _FASTEST_LEVEL, mtime=0)
            headers = (*_HEADERS, ("Content-Encoding", "gzip"))
        return Response(status=200, body=body, content_type=content_type, headers=headers)

    def _encode_families(self, encode: Encode, names: list[str]) -> bytes:
        """Return the encoded families whose first sample has one of these names."""
        families = (*self._collector.collect(), *self._process.collect())
        named_families = [family for family in families if family.samples[0].name in names]
        return encode(_Families(named_families))

    def _build_page(self, encode: Encode, content_type: str) -> bytes:
        """Return the page with the sample's current age."""
        published = self._collector.published()
        # Clients choose the formats, so the number of cached pages is limited.
        if len(self._pages) > _MOST_FORMATS:
            self._pages = {}
            self._families = {}
        elif published is not self._encoded_samples:
            self._pages = {}
        self._encoded_samples = published
        if content_type not in self._pages:
            self._pages[content_type] = self._encode_page(encode, content_type)
        page = self._pages[content_type]
        if published is None:
            return page
        # The page may have been encoded for an earlier scrape. The age in it is therefore updated.
        age_seconds = self._collector.age_seconds(published)
        age_line = f"\n{catalog.SAMPLE_AGE.name} {age_seconds!r}"
        return _AGE_LINE.sub(age_line.encode(), page, count=1)

    def _encode_page(self, encode: Encode, content_type: str) -> bytes:
        """Return the encoded page; encode a family again only if its samples have changed."""
        families = self._families.setdefault(content_type, {})
        parts = []
        for metric, samples in self._collector.group_samples():
            encoded = families.get(metric.name)
            if encoded is None or not encoded.has_series_of(samples):
                text = encode(_Families([_build_family(metric, samples)]))
                # The EOF line comes with the process metrics, which are last on the page.
                families[metric.name] = _EncodedFamily(samples, text.removesuffix(_END_LINE))
            # Usually, only the values change. Encoding the family again takes ten times as long as
            # replacing its values.
            elif encoded.samples != samples:
                families[metric.name] = encoded.replace_values(samples)
            parts.append(families[metric.name].text)
        parts.append(encode(self._process))
        return b"".join(parts)


class _Families(Struct):
    """A collection of families in the form that the encoders accept."""

    families: Iterable[Family]

    def collect(self) -> Iterable[Family]:
        return self.families


@lru_cache(maxsize=_MOST_FORMATS)
def _choose_encoder(accept: str) -> tuple[Encode, str]:
    """Return the encoder and the content type requested by an Accept header.

    If the header is empty, not ASCII or invalid, the defaults are returned.
    """
    if not accept.isascii():
        return choose_encoder("")
    choices = [choice for choice in accept.split(",") if not _is_refused(choice)]
    try:
        return choose_encoder(",".join(choices))
    except TypeError:  # The library cannot compare a version such as 1.0.0-beta.
        return choose_encoder("")


def _is_gzip_accepted(accept_encoding: str) -> bool:
    """Return whether the header lists gzip with a weight other than 0."""
    for choice in accept_encoding.lower().split(","):
        encoding, _, _ = choice.partition(";")
        if encoding.strip() in ("gzip", "x-gzip"):
            return not _is_refused(choice)
    return False


def _is_refused(choice: str) -> bool:
    """Return whether an entry of a header has the weight 0 (RFC 9110, 12.4.2)."""
    _, *parameters = choice.lower().split(";")
    return any(_ZERO_WEIGHT.fullmatch(parameter.strip()) for parameter in parameters)
