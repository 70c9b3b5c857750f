"""Clients that scrape at random moments, as Prometheus servers do that know nothing of each other."""

from __future__ import annotations

import http.client
import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Final

CLIENTS: Final = 4
SCRAPES_PER_SECOND: Final = 50


def scrape(host: str, port: int, seconds: float) -> list[float]:
    """Scrape for some seconds, all clients together; return how long each scrape took, in seconds, the shortest first.

    The time of a scrape begins when it was due, so that one that waits for the one before it counts in full.
    """
    with ThreadPoolExecutor(CLIENTS) as pool:
        shares = pool.map(lambda seed: _client(host, port, seconds, random.Random(seed)), range(CLIENTS))  # noqa: S311 - not for secrets
        return sorted(took for share in shares for took in share)


def _client(host: str, port: int, seconds: float, chance: random.Random) -> list[float]:
    connection = http.client.HTTPConnection(host, port, timeout=30)
    took: list[float] = []
    due = began = time.monotonic()
    while due < began + seconds:
        due += chance.expovariate(SCRAPES_PER_SECOND / CLIENTS)
        time.sleep(max(0.0, due - time.monotonic()))
        connection.request("GET", "/metrics", headers={"Accept-Encoding": "gzip"})
        answer = connection.getresponse()
        body = answer.read()
        took.append(time.monotonic() - due)
        assert answer.status == http.client.OK
        assert body
    connection.close()
    return took
