"""Is the daemon's own address free, or is the daemon already there?"""

import errno
import os
import ssl
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

import httpx

from vllm_headroom import catalog
from vllm_headroom.expose.server import listen
from vllm_headroom.expose.web.config import WebConfigError, read_web_config
from vllm_headroom.model import Failure
from vllm_headroom.parse.exposition import parse_samples
from vllm_headroom.scrape.http.reader import PageReader
from vllm_headroom.trace.entries import LONGEST_LINE_BYTES
from vllm_headroom.trace.recorder import NOT_A_TRACE, is_trace_start
from vllm_headroom.vocabulary import Reason
from vllm_headroom.worker import Worker
from vllm_headroom_tools.doctor.fixes import POD, Check, Fix, Status, fix_setting, put
from vllm_headroom_tools.look import fetch_once

ANSWER_SECONDS: Final = 2.0
EVERY_INTERFACE: Final = frozenset({"", "0.0.0.0", "::"})
ANOTHER_HOST: Final = fix_setting("HEADROOM_LISTEN_HOST=  # nothing: all interfaces")


async def check_listen_port(host: str, port: int, web_config: Path | None = None) -> Check:
    """Check whether the daemon serves at its address already, or could.

    Behind TLS the certificate that `web_config` names identifies it; a server that needs a password stays unknown.
    """
    if port == 0:
        return Check(
            Status.NOT_APPLICABLE,
            "HEADROOM_LISTEN_PORT is 0, so that the daemon takes any free one",
        )
    serving = await _find_daemon("127.0.0.1" if host in EVERY_INTERFACE else host, port, web_config)
    if serving is not None:
        return serving
    other_port = fix_setting(f"HEADROOM_LISTEN_PORT={min({9839, 9840} - {port})}")
    try:
        await Worker[None]("listen").call(lambda: listen(host, port).close(), ANSWER_SECONDS)
    except TimeoutError:
        text, fix = (
            f"no daemon can listen on {host}, port {port}: the name is not resolved",
            ANOTHER_HOST,
        )
    except OSError as error:
        problem = (error.strerror or str(error)).partition(" (")[0]  # Python adds the address
        text = f"no daemon can listen on {host or 'all interfaces'}, port {port}: {problem}"
        if error.errno == errno.EADDRINUSE:
            text = f"port {port} is taken by something that does not answer as vllm-headroom"
        fix = other_port if error.errno in {errno.EADDRINUSE, errno.EACCES} else ANOTHER_HOST
    else:
        return Check(Status.OK, f"port {port} is free: no daemon is running here")
    return Check(Status.MISSING, text, absent=("headroom_*",), fixes=(fix,))


async def _find_daemon(host: str, port: int, web_config: Path | None) -> Check | None:
    """Find the daemon that serves there, or what may be one; None where there is none."""
    url = httpx.URL(scheme="http", host=host, port=port, path="/metrics")
    page = await fetch_once(PageReader(url=str(url), timeout_seconds=ANSWER_SECONDS))
    if isinstance(page, Failure):
        return await _check_locked(page, host, port, web_config)
    samples = parse_samples(page, catalog.BUILD_INFO.name)
    if isinstance(samples, Failure) or not samples:
        return None
    version = samples[0].labels.get("version", "")
    return Check(
        Status.OK, f"a daemon is running here and serves port {port}: vllm-headroom {version}"
    )


async def _check_locked(
    failure: Failure, host: str, port: int, web_config: Path | None
) -> Check | None:
    """Check a server behind a password or TLS; None where neither answers."""
    if failure.reason is Reason.UNAUTHORIZED:
        found = f"port {port} asks for a user and a password"
    else:
        found = f"port {port} speaks TLS"
        try:
            shown = await Worker[str]("tls").call(
                lambda: ssl.get_server_certificate((host, port), timeout=ANSWER_SECONDS),
                2 * ANSWER_SECONDS,
            )
        except OSError:  # TimeoutError is one
            return None
        with suppress(OSError, ValueError, WebConfigError):
            tls = None if web_config is None else read_web_config(web_config).tls
            if tls is not None and "".join(shown.split()) in "".join(
                tls.cert_file.read_text().split()
            ):
                text = f"a daemon is running here: {found} with the certificate of HEADROOM_WEB_CONFIG_FILE"
                return Check(Status.OK, text)
    text = (
        f"{found}, as a daemon with HEADROOM_WEB_CONFIG_FILE does: whether it is one is not known"
    )
    return Check(Status.UNKNOWN, text)


FILE_SECONDS: Final = 2.0
"""As the daemon waits for its state: beyond this the volume counts as hung."""

FOLDER: Final = "/var/lib/vllm-headroom"


async def check_state_dir(folder: Path | None) -> Check:
    """Check whether the leak detector's state can be kept."""
    if folder is None:
        text = (
            "HEADROOM_STATE_DIR is not set: a restart of the daemon forgets what the leak detector learned, and nothing"
            " is kept for vllm-headroom postmortem"
        )
        return Check(Status.NOT_APPLICABLE, text)
    return await _check_writable(folder, partial(_write_into, folder), "HEADROOM_STATE_DIR", FOLDER)


async def check_trace_file(file: Path | None) -> Check:
    """Check whether samples can be recorded."""
    if file is None:
        return Check(Status.NOT_APPLICABLE, "HEADROOM_TRACE_FILE is not set: nothing is recorded")
    return await _check_writable(
        file, partial(_record_in, file), "HEADROOM_TRACE_FILE", f"{FOLDER}/trace.jsonl"
    )


async def _check_writable(
    path: Path, attempt: Callable[[], None], variable: str, value: str
) -> Check:
    """Try to write, on a separate thread, since a volume can hang; the fix is a volume, and `value` on it."""
    _, problem = await Worker[None]("files").attempt(attempt, FILE_SECONDS)
    user = f"user {os.getuid()}"
    if problem is None:
        return Check(Status.OK, f"{path} can be written by {user}")
    lines = (
        "volumes: [{name: headroom-state, emptyDir: {}}]",
        "containers:  # initContainers, where the sidecar is a native one",
        "- name: headroom",
        f"  volumeMounts: [{{name: headroom-state, mountPath: {FOLDER}}}]",
        f"  env: [{{name: {variable}, value: {value}}}]",
    )
    ways: tuple[Fix, ...] = (
        put(POD, *lines),
        put(f"{POD}, for a volume that is not an emptyDir", "securityContext: {fsGroup: 65532}"),
        put(
            "in the systemd unit", "StateDirectory=vllm-headroom", f"Environment={variable}={value}"
        ),
    )
    if problem == NOT_A_TRACE:
        ways = (fix_setting(f"{variable}={path}.jsonl"),)
    return Check(Status.MISSING, f"{path} cannot be written by {user}: {problem}", fixes=ways)


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
    if file.exists():
        with file.open("a+b") as stream:
            stream.seek(0)
            if not is_trace_start(stream.readline(LONGEST_LINE_BYTES)):
                raise ValueError(NOT_A_TRACE)
