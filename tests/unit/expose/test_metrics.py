"""The page of metrics, whatever format and encoding is requested."""

from __future__ import annotations

import gzip
import time
import zlib
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from vllm_headroom import catalog
from vllm_headroom.expose.answers import Request, Response
from vllm_headroom.expose.metrics import HeadroomCollector, MetricsPage
from vllm_headroom.model import Published, Sample

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
HOSTILE = 'm"\\\nheadroom_sample_age_seconds 1'


class World:
    """What is published, and the time."""

    def __init__(self) -> None:
        self.now = 101.0
        self.published: Published | None = None
        self.page = MetricsPage(HeadroomCollector(lambda: self.published, lambda: self.now, ("1.2.3", "abc", "3.11.7")))

    def publish(self, running: float) -> None:
        samples = (Sample(catalog.ENGINE_RUNNING, (HOSTILE, "0"), running),)
        self.published = Published(samples=samples, monotonic_seconds=100.0)

    def asked(self, query: str = "", **headers: str) -> Response:
        return self.page(Request(method="GET", path="/metrics", query=query, headers=headers))


@pytest.fixture
def world() -> World:
    world = World()
    world.publish(3.0)
    return world


def header(answer: Response, name: str) -> str | None:
    return dict(answer.headers).get(name)


def age(answer: Response) -> str:
    (line,) = (line for line in answer.body.decode().splitlines() if line.startswith("headroom_sample_age_seconds "))
    return line.split()[1]


@pytest.mark.parametrize("accept", ["", OPENMETRICS])
def test_the_age_is_that_at_the_scrape(world: World, accept: str) -> None:
    first_page = world.asked(accept=accept)
    world.now = 107.5
    second = world.asked(accept=accept)

    assert (age(first_page), age(second)) == ("1.0", "7.5")


def test_the_daemons_own_series_are_of_the_moment_of_the_sample(world: World) -> None:
    def cpu() -> bytes:
        (line,) = (line for line in world.asked().body.splitlines() if line.startswith(b"process_cpu_seconds_total"))
        return line

    first_cpu = cpu()
    used = time.process_time()
    while time.process_time() - used < 0.02:  # two of the ticks in which the kernel shows it
        pass
    assert cpu() == first_cpu

    world.publish(4.0)

    assert cpu() != first_cpu


@pytest.mark.parametrize("accept", ["", OPENMETRICS])
def test_a_new_sample_is_on_the_next_page(world: World, accept: str) -> None:
    assert b'engine="0"' in world.asked(accept=accept).body

    world.publish(4.0)

    assert world.asked(accept=accept).body.count(b"} 4.0\n") == 1


@pytest.mark.parametrize("accept", ["", OPENMETRICS])
def test_compressed_it_is_the_same_page_in_one_stream(world: World, accept: str) -> None:
    plain = world.asked(accept=accept)
    packed = world.asked(accept=accept, **{"accept-encoding": "gzip"})
    stream = zlib.decompressobj(16 + zlib.MAX_WBITS)

    assert header(packed, "Content-Encoding") == "gzip"
    assert stream.decompress(packed.body) == gzip.decompress(packed.body) == plain.body
    assert (stream.eof, stream.unused_data) == (True, b"")


@pytest.mark.parametrize("accept", ["", OPENMETRICS])
def test_a_family_is_as_it_is_now_whatever_it_was_on_the_last_page(world: World, accept: str) -> None:
    world.asked(accept=accept)
    idle = Sample(catalog.ENGINE_WAITING, (HOSTILE, "0"), 0.0)
    other_engine = Sample(catalog.ENGINE_WAITING, (HOSTILE, "1"), 7.0)
    running = Sample(catalog.ENGINE_RUNNING, (HOSTILE, "0"), 4.0)
    busy = other_engine._replace(value=8.0)
    pages = ((idle, running), (idle,), (idle, other_engine), (idle, busy), (other_engine, idle), (other_engine,), ())
    for samples in pages:
        world.published = Published(samples=samples, monotonic_seconds=100.0)

        page, fresh = world.asked(accept=accept), World()
        fresh.published = world.published
        assert strip_process(page.body) == strip_process(fresh.asked(accept=accept).body)
        assert page.body.count(b"# EOF") == (accept == OPENMETRICS)


def strip_process(body: bytes) -> list[bytes]:
    return [line for line in body.splitlines() if b"process_" not in line]


def test_openmetrics_ends_with_its_only_end_mark(world: World) -> None:
    body = world.asked(accept=OPENMETRICS).body

    assert body.endswith(b"\n# EOF\n")
    assert body.count(b"# EOF") == 1


def test_before_the_first_sample_there_is_no_age() -> None:
    body = World().asked().body

    assert b"headroom_build_info" in body
    assert b"process_resident_memory_bytes" in body
    assert b"headroom_sample_age_seconds" not in body


@pytest.mark.parametrize(
    ("accepted", "encoding"),
    [
        ("gzip", "gzip"),
        ("deflate, GZIP;q=0.5", "gzip"),
        ("gzip;q=1.0", "gzip"),
        ("gzip;q=0", None),
        ("gzip; q=0.000", None),
        ("br, deflate", None),
        ("notgzip", None),
        ("", None),
    ],
)
def test_gzip_is_sent_when_it_is_wanted(world: World, accepted: str, encoding: str | None) -> None:
    answer = world.asked(**{"accept-encoding": accepted})

    assert header(answer, "Content-Encoding") == encoding
    assert header(answer, "Vary") == "Accept, Accept-Encoding"


@pytest.mark.parametrize("weight", ["q=0", " Q = 0.00"])
def test_a_format_of_no_weight_is_not_sent(world: World, weight: str) -> None:
    assert world.asked(accept=f"{OPENMETRICS};{weight}, text/plain").content_type.startswith("text/plain")
    assert world.asked(accept=f"{OPENMETRICS};q=0.5").content_type.startswith("application/openmetrics-text")


def test_a_scraper_may_name_the_families_it_wants(world: World) -> None:
    names = ("headroom_build_info", "headroom_sample_age_seconds", "process_resident_memory_bytes")
    body = world.asked("&".join(f"name[]={name}" for name in names)).body.decode()

    assert {line.split()[2] for line in body.splitlines() if line.startswith("# TYPE")} == set(names)
    assert world.asked("name[]=nothing").body == b""


def test_what_scrapers_make_up_is_not_kept_for_ever(world: World) -> None:
    for number in range(100):
        world.asked(accept=f"application/openmetrics-text; version=1.0.{number}")

    page_attributes: dict[str, Any] = vars(world.page)
    assert all(len(value) < 20 for value in page_attributes.values() if isinstance(value, dict))


@pytest.mark.parametrize("accept", ["", OPENMETRICS, "text/plain; version=1.0.0; escaping=allow-utf-8"])
def test_it_is_what_prometheus_client_writes(accept: str) -> None:
    world, page = World(), one_of_each()
    for step, running in enumerate((3.0, 4e9, 1e-7, float("inf"))):
        changing_samples = (
            Sample(catalog.ENGINE_RUNNING, (HOSTILE, "0"), running),
            Sample(catalog.SOURCE_UP, ("nvml",), step),
        )
        world.published = Published(samples=(*page, *changing_samples), monotonic_seconds=100.0)
        encode, _ = choose_encoder(accept)
        own = HeadroomCollector(lambda: world.published, lambda: world.now, ("1.2.3", "abc", "3.11.7"))
        registry = CollectorRegistry(auto_describe=False)
        registry.register(own)

        official = encode(registry).decode().removesuffix("# EOF\n")

        assert world.asked(accept=accept).body.decode().startswith(official)


def one_of_each() -> tuple[Sample, ...]:
    """Return a sample of every metric there is."""
    return tuple(Sample(metric, tuple(f"{name}-1" for name in metric.labels), 1.5) for metric in catalog.METRICS[2:])
