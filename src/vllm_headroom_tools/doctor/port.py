"""Is the daemon's own address free, or is the daemon already there?"""

from __future__ import annotations

import errno
import os
import socket
import ssl
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import httpx

from vllm_headroom import catalog
from vllm_headroom.expose.server import listen
from vllm_headroom.expose.web.config import WebConfigError, read_web_config
from vllm_headroom.model import Failure
from vllm_headroom.parse.exposition import wanted_samples
from vllm_headroom.scrape.http.reader import PageReader
from vllm_headroom.trace.parse import LONGEST_LINE
from vllm_headroom.trace.recorder import FOREIGN, attempted, begins_one
from vllm_headroom.vocabulary import Reason
from vllm_headroom.worker import Worker
from vllm_headroom_tools.doctor.fixes import POD, Check, Fix, Status, setting
from vllm_headroom_tools.look import fetched

ANSWER_SECONDS: Final = 2.0
EVERY_INTERFACE: Final = frozenset({"", "0.0.0.0", "::"})
USUAL_PORTS: Final = (9839, 9840)
ANOTHER_HOST: Final = setting("HEADROOM_LISTEN_HOST=  # nothing: all interfaces")
PEM_BEGIN: Final = "-----BEGIN CERTIFICATE-----"
PEM_END: Final = "-----END CERTIFICATE-----"
"""What a file of certificates has around each; the first one is shown."""


async def listen_port(host: str, port: int, web_config: Path | None = None) -> Check:
    """Tell whether the daemon serves at its address already, or could.

    Behind TLS it is known by the certificate that `web_config` names; what asks for more is told as such.
    """
    if port == 0:
        text = "HEADROOM_LISTEN_PORT is 0, so that the daemon takes any free one"
        return Check(Status.NOT_APPLICABLE, text)
    serving = await _serving("127.0.0.1" if host in EVERY_INTERFACE else host, port, web_config)
    if serving is not None:
        return serving
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
    return Check(Status.OK, text)


def _refused(text: str, fix: Fix) -> Check:
    return Check(Status.MISSING, text, absent=("headroom_*",), fixes=(fix,))


def _another_port(port: int) -> Fix:
    return setting(f"HEADROOM_LISTEN_PORT={next(other for other in USUAL_PORTS if other != port)}")


async def _serving(host: str, port: int, web_config: Path | None) -> Check | None:
    """Tell of the daemon that serves there, or of what may be one; None where there is none."""
    url = httpx.URL(scheme="http", host=host, port=port, path="/metrics")
    page = await fetched(PageReader(url=str(url), timeout_seconds=ANSWER_SECONDS))
    if isinstance(page, Failure):
        return await _locked(page, host, port, web_config)
    samples = wanted_samples(page, catalog.BUILD_INFO.name)
    if isinstance(samples, Failure) or not samples:
        return None
    version = samples[0].labels.get("version", "")
    text = f"a daemon is running here and serves port {port}: vllm-headroom {version}"
    return Check(Status.OK, text)


async def _locked(failure: Failure, host: str, port: int, web_config: Path | None) -> Check | None:
    """Return what stands behind a password or TLS there; None where neither does."""
    if failure.reason is Reason.UNAUTHORIZED:
        return _untold(f"port {port} asks for a user and a password")
    try:
        shown = await Worker[bytes | None]("tls").call(lambda: _certificate(host, port), 2 * ANSWER_SECONDS)
    except OSError:  # TimeoutError is one
        return None
    if shown is None:
        return None
    if web_config is not None and shown == _own_certificate(web_config):
        text = f"a daemon is running here: port {port} speaks TLS with the certificate of HEADROOM_WEB_CONFIG_FILE"
        return Check(Status.OK, text)
    return _untold(f"port {port} speaks TLS")


def _untold(found: str) -> Check:
    text = f"{found}, as a daemon with HEADROOM_WEB_CONFIG_FILE does: whether it is one cannot be told from here"
    return Check(Status.UNKNOWN, text)


def _certificate(host: str, port: int) -> bytes | None:
    """Return the certificate that is shown there, None where no TLS is spoken."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # it is looked at, and told nothing
    try:
        with (
            socket.create_connection((host, port), ANSWER_SECONDS) as plain,
            context.wrap_socket(plain, server_hostname=host) as secured,
        ):
            return secured.getpeercert(binary_form=True)
    except OSError:
        return None


def _own_certificate(web_config: Path) -> bytes | None:
    try:
        tls = read_web_config(web_config).tls
        if tls is None:
            return None
        first = tls.cert_file.read_text().partition(PEM_END)[0].partition(PEM_BEGIN)[2]
        return ssl.PEM_cert_to_DER_cert(f"{PEM_BEGIN}{first}{PEM_END}")
    except (OSError, ValueError, WebConfigError):
        return None


FILE_SECONDS: Final = 2.0
"""As the daemon waits for its state: beyond this the volume counts as hung."""

FOLDER: Final = "/var/lib/vllm-headroom"


async def state_dir(folder: Path | None) -> Check:
    """Tell whether the leak detector's state can be kept."""
    if folder is None:
        text = (
            "HEADROOM_STATE_DIR is not set: a restart of the daemon forgets what the leak detector learned, and nothing"
            " is kept for vllm-headroom postmortem"
        )
        return Check(Status.NOT_APPLICABLE, text)
    problem = await _problem(partial(_write_into, folder))
    return _judged(folder, problem, _volume("HEADROOM_STATE_DIR", FOLDER))


async def trace_file(file: Path | None) -> Check:
    """Tell whether samples can be recorded."""
    if file is None:
        text = "HEADROOM_TRACE_FILE is not set: nothing is recorded"
        return Check(Status.NOT_APPLICABLE, text)
    problem = await _problem(partial(_record_in, file))
    if problem == FOREIGN:
        return _judged(file, problem, (setting(f"HEADROOM_TRACE_FILE={file}.jsonl"),))
    return _judged(file, problem, _volume("HEADROOM_TRACE_FILE", f"{FOLDER}/trace.jsonl"))


def _judged(path: Path, problem: str | None, fixes: tuple[Fix, ...]) -> Check:
    user = f"user {os.getuid()}"
    if problem is None:
        return Check(Status.OK, f"{path} can be written by {user}")
    return Check(Status.MISSING, f"{path} cannot be written by {user}: {problem}", fixes=fixes)


def _volume(variable: str, value: str) -> tuple[Fix, ...]:
    lines = (
        "volumes: [{name: headroom-state, emptyDir: {}}]",
        "containers:  # initContainers, where the sidecar is a native one",
        "- name: headroom",
        f"  volumeMounts: [{{name: headroom-state, mountPath: {FOLDER}}}]",
        f"  env: [{{name: {variable}, value: {value}}}]",
    )
    return (
        Fix(where=POD, lines=lines),
        Fix(where=f"{POD}, for a volume that is not an emptyDir", lines=("securityContext: {fsGroup: 65532}",)),
        Fix(where="in the systemd unit", lines=("StateDirectory=vllm-headroom", f"Environment={variable}={value}")),
    )


async def _problem(attempt: Callable[[], None]) -> str | None:
    """Return what went wrong; on a thread of its own, since a volume can hang."""
    return await attempted(Worker[None]("files"), attempt, FILE_SECONDS)


def _write_into(folder: Path) -> None:
    """Write a file that is gone afterwards where the daemon would make one, or its folder; raise OSError."""
    while not folder.exists():
        folder = folder.parent
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".vllm-headroom-doctor-") as file:
        file.write(b"\0" * 4096)
        file.flush()
        os.fsync(file.fileno())


def _record_in(file: Path) -> None:
    """Try what the daemon does with its trace, and leave it as it is; raise OSError, or ValueError for no trace."""
    file.parent.stat()
    _write_into(file.parent)
    if not file.exists():
        return
    with file.open("a+b") as stream:
        stream.seek(0)
        head = stream.readline(LONGEST_LINE)
    if not begins_one(head):
        raise ValueError(FOREIGN)
