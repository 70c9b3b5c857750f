"""Is the daemon's own address free, or is the daemon already there?"""

from __future__ import annotations

import errno
from typing import Final

import httpx

from vllm_headroom import catalog
from vllm_headroom.commands.doctor.finding import Finding, Fix, Name, State
from vllm_headroom.commands.doctor.fixes import setting
from vllm_headroom.daemon.look import fetched
from vllm_headroom.expose.server import listen
from vllm_headroom.model import Failure
from vllm_headroom.parse.exposition import wanted_samples
from vllm_headroom.scrape.http.reader import PageReader
from vllm_headroom.scrape.worker import Worker

ANSWER_SECONDS: Final = 2.0
EVERY_INTERFACE: Final = frozenset({"", "0.0.0.0", "::"})
USUAL_PORTS: Final = (9839, 9840)
ANOTHER_HOST: Final = setting("HEADROOM_LISTEN_HOST=  # nothing: all interfaces")


async def listen_port(host: str, port: int) -> Finding:
    """Tell whether the daemon serves at its address already, or could."""
    if port == 0:
        text = "HEADROOM_LISTEN_PORT is 0, so that the daemon takes any free one"
        return Finding(name=Name.LISTEN_PORT, state=State.NOT_APPLICABLE, text=text)
    version = await _daemon(host, port)
    if version is not None:
        text = f"a daemon is running here and serves port {port}: vllm-headroom {version}"
        return Finding(name=Name.LISTEN_PORT, state=State.OK, text=text)
    try:
        await Worker[None]("listen").call(lambda: listen(host, port).close(), ANSWER_SECONDS)
    except TimeoutError:
        return _refused(f"no daemon can listen on {host}, port {port}: the name is not resolved", ANOTHER_HOST)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            text = f"port {port} is taken by something that does not answer as vllm-headroom"
            return _refused(text, _another_port(port))
        where = f"{host or 'all interfaces'}, port {port}"
        problem = (error.strerror or str(error)).partition(" (")[0]  # Python adds the address
        fix = _another_port(port) if error.errno == errno.EACCES else ANOTHER_HOST
        return _refused(f"no daemon can listen on {where}: {problem}", fix)
    text = f"port {port} is free: no daemon is running here"
    return Finding(name=Name.LISTEN_PORT, state=State.OK, text=text)


def _refused(text: str, fix: Fix) -> Finding:
    return Finding(name=Name.LISTEN_PORT, state=State.MISSING, text=text, absent=("headroom_*",), fixes=(fix,))


def _another_port(port: int) -> Fix:
    return setting(f"HEADROOM_LISTEN_PORT={next(other for other in USUAL_PORTS if other != port)}")


async def _daemon(host: str, port: int) -> str | None:
    """Return the version of the daemon that serves there; None where none does."""
    url = httpx.URL(scheme="http", host="127.0.0.1" if host in EVERY_INTERFACE else host, port=port, path="/metrics")
    page = await fetched(PageReader(url=str(url), timeout_seconds=ANSWER_SECONDS))
    samples = page if isinstance(page, Failure) else wanted_samples(page, catalog.BUILD_INFO.name)
    if isinstance(samples, Failure) or not samples:
        return None
    return samples[0].labels.get("version", "")
