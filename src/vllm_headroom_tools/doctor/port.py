"""Checks of the daemon's own address and files."""

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
    """Check whether a daemon is already serving at this address, or could do so.

    With TLS, the daemon is recognised by the certificate that `web_config` names. The check is
    UNKNOWN if the server has a password or another certificate. The check is NOT_APPLICABLE for
    port 0.
    """
    if port == 0:
        return Check(
            Status.NOT_APPLICABLE,
            "HEADROOM_LISTEN_PORT is 0, so that the daemon takes any free one",
        )
    # A daemon on all interfaces also responds on the loopback address.
    asked_host = "127.0.0.1" if host in EVERY_INTERFACE else host
    daemon_check = await _find_daemon(asked_host, port, web_config)
    if daemon_check is not None:
        return daemon_check
    other_port = fix_setting(f"HEADROOM_LISTEN_PORT={min({9839, 9840} - {port})}")
    try:
        await Worker[None]("listen").call(lambda: listen(host, port).close(), ANSWER_SECONDS)
    except TimeoutError:
        text = f"no daemon can listen on {host}, port {port}: the name is not resolved"
        fix = ANOTHER_HOST
    except OSError as error:
        problem = (error.strerror or str(error)).partition(" (")[0]  # Python adds the address
        text = f"no daemon can listen on {host or 'all interfaces'}, port {port}: {problem}"
        if error.errno == errno.EADDRINUSE:
            text = f"port {port} is taken by something that does not answer as vllm-headroom"
        fix = ANOTHER_HOST
        # The port is in use, or is below 1024 and needs a privilege. Another port solves both
        # problems.
        if error.errno in {errno.EADDRINUSE, errno.EACCES}:
            fix = other_port
    else:
        return Check(Status.OK, f"port {port} is free: no daemon is running here")
    return Check(Status.MISSING, text, absent=("headroom_*",), fixes=(fix,))


async def _find_daemon(host: str, port: int, web_config: Path | None) -> Check | None:
    """Return the check's result if this address's server is, or may be, a daemon.

    Returns None if nothing responds, or if the server is not vllm-headroom.
    """
    url = httpx.URL(scheme="http", host=host, port=port, path="/metrics")
    page = await fetch_once(PageReader(url=str(url), timeout_seconds=ANSWER_SECONDS))
    if isinstance(page, Failure):
        return await _check_locked(page, host, port, web_config)
    # A page with our build info series is a daemon's page.
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
    """Return the check's result for a server that requires a password or uses TLS.

    Returns None if there is no such server.
    """
    if failure.reason is Reason.UNAUTHORIZED:
        server = f"port {port} asks for a user and a password"
    else:
        server = f"port {port} speaks TLS"
        try:
            # The handshake alone reveals the certificate, so no request is made.
            certificate = await Worker[str]("tls").call(
                lambda: ssl.get_server_certificate((host, port), timeout=ANSWER_SECONDS),
                2 * ANSWER_SECONDS,
            )
        except OSError:  # including TimeoutError
            return None
        if _is_own_certificate(certificate, web_config):
            text = f"{server} with the certificate of HEADROOM_WEB_CONFIG_FILE"
            return Check(Status.OK, f"a daemon is running here: {text}")
    text = f"{server}, as a daemon with HEADROOM_WEB_CONFIG_FILE does"
    return Check(Status.UNKNOWN, f"{text}: whether it is one is not known")


def _is_own_certificate(certificate: str, web_config: Path | None) -> bool:
    """Return whether a PEM certificate is in the certificate file that `web_config` names.

    Returns False if no certificate file is named, or if it cannot be read.
    """
    if web_config is None:
        return False
    with suppress(OSError, ValueError, WebConfigError):
        tls = read_web_config(web_config).tls
        if tls is not None:
            own_certificates = tls.cert_file.read_text()
            return _strip_spaces(certificate) in _strip_spaces(own_certificates)
    return False


def _strip_spaces(text: str) -> str:
    return "".join(text.split())


FILE_SECONDS: Final = 2.0
"""The time limit for writing a file. The daemon has the same limit for its state. A slower volume
is considered hung.
"""

WRITTEN_BYTES: Final = 4096
"""The number of bytes written (our choice). This is one block of most file systems. The write
therefore fails on a full volume.
"""

FOLDER: Final = "/var/lib/vllm-headroom"


async def check_state_dir(folder: Path | None) -> Check:
    """Check whether the daemon can write its state; NOT_APPLICABLE if no folder is set."""
    if folder is None:
        text = (
            "HEADROOM_STATE_DIR is not set: a restart of the daemon forgets what the leak detector"
            " learned, and nothing is kept for vllm-headroom postmortem"
        )
        return Check(Status.NOT_APPLICABLE, text)
    return await _check_writable(folder, partial(_write_into, folder), "HEADROOM_STATE_DIR", FOLDER)


async def check_trace_file(file: Path | None) -> Check:
    """Check whether the daemon can record samples in the file.

    The check is NOT_APPLICABLE if no file is set.
    """
    if file is None:
        return Check(Status.NOT_APPLICABLE, "HEADROOM_TRACE_FILE is not set: nothing is recorded")
    return await _check_writable(
        file, partial(_record_in, file), "HEADROOM_TRACE_FILE", f"{FOLDER}/trace.jsonl"
    )


async def _check_writable(
    path: Path, attempt: Callable[[], None], variable: str, value: str
) -> Check:
    """Run `attempt` in a thread, and return the result for the path.

    A thread is used because a volume can hang. The fix mounts a volume and sets `variable` to
    `value`, a path on that volume.
    """
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
    # The file contains something else. A different file is needed, and no volume.
    if problem == NOT_A_TRACE:
        ways = (fix_setting(f"{variable}={path}.jsonl"),)
    return Check(Status.MISSING, f"{path} cannot be written by {user}: {problem}", fixes=ways)


def _write_into(folder: Path) -> None:
    """Write a temporary file to a folder; raise OSError if that fails.

    If the folder does not exist, the nearest existing parent is used. The daemon would create the
    folder there.
    """
    while not folder.exists():
        folder = folder.parent
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".vllm-headroom-doctor-") as file:
        file.write(b"\0" * WRITTEN_BYTES)
        file.flush()
        os.fsync(file.fileno())


def _record_in(file: Path) -> None:
    """Try the operations that the daemon performs on its trace, without changing the file.

    Raises OSError if one of them fails. Raises ValueError if the file is not a trace.
    """
    file.parent.stat()
    _write_into(file.parent)
    if file.exists():
        with file.open("a+b") as stream:
            stream.seek(0)
            if not is_trace_start(stream.readline(LONGEST_LINE_BYTES)):
                raise ValueError(NOT_A_TRACE)
