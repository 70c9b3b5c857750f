"""The daemon's door as Prometheus's own tool sees it: the same files are good, and the same requests come in."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Final

import bcrypt
import pytest

from tests.fakes.certificates import write_self_signed
from tests.process import daemon
from vllm_headroom.expose.web.config import WebConfigError
from vllm_headroom.expose.web.door import Door

PASSWORD: Final = "pa55word"  # noqa: S105 - of nobody
HASHED: Final = bcrypt.hashpw(PASSWORD.encode(), bcrypt.gensalt(4)).decode()
PAIR: Final = "cert_file: server.crt, key_file: server.key"
GUARDED: Final = f"tls_server_config: {{{PAIR}}}\nbasic_auth_users: {{prometheus: {HASHED}}}\n"
GOOD: Final = {
    "nothing": "",
    "TLS": f"tls_server_config: {{{PAIR}, min_version: TLS12, max_version: TLS13}}",
    "client certificates": (
        f"tls_server_config: {{{PAIR}, client_ca_file: client.crt, client_auth_type: RequireAndVerifyClientCert}}"
    ),
    "users": f"basic_auth_users: {{prometheus: {HASHED}}}",
    "headers": "http_server_config: {headers: {X-Frame-Options: deny, Content-Security-Policy: default-src 'self'}}",
}
BAD: Final = {
    "no mapping": "- a",
    "an unknown key": "tls_config: {}",
    "a key of the pair alone": "tls_server_config: {cert_file: server.crt}",
    "files that are not there": "tls_server_config: {cert_file: no.crt, key_file: no.key}",
    "an unknown version": f"tls_server_config: {{{PAIR}, min_version: TLS09}}",
    "an authority that is not asked for": f"tls_server_config: {{{PAIR}, client_ca_file: client.crt}}",
    "an unknown header": "http_server_config: {headers: {X-Own: a}}",
}


@pytest.fixture
def promtool() -> str:
    path = shutil.which("promtool")
    if path is None:
        pytest.skip("no promtool on the PATH")
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    for name in ("server", "client"):
        write_self_signed(tmp_path, name)
    return tmp_path / "web.config.yml"


def is_good(file: Path) -> bool:
    try:
        Door(file)
    except WebConfigError:
        return False
    return True


@pytest.mark.parametrize("name", [*GOOD, *BAD])
def test_a_file_is_as_good_here_as_to_promtool(promtool: str, file: Path, name: str) -> None:
    file.write_text({**GOOD, **BAD}[name])
    checked = subprocess.run([promtool, "check", "web-config", str(file)], capture_output=True, text=True, check=False)

    assert checked.returncode in (0, 1), checked.stderr
    assert (is_good(file), checked.returncode == 0) == (name in GOOD, name in GOOD), checked.stderr


def fetched(promtool: str, folder: Path, url: str) -> str | None:
    """Return the page of metrics that promtool fetched over TLS, None where it was refused."""
    trust = {"SSL_CERT_FILE": str(folder / "server.crt")}
    archive = folder / "debug.tar.gz"
    subprocess.run(
        [promtool, "debug", "metrics", url], cwd=folder, env={**os.environ, **trust}, capture_output=True, check=False
    )
    with tarfile.open(archive) as tar_file:
        page = tar_file.extractfile("metrics.txt") if "metrics.txt" in tar_file.getnames() else None
        return None if page is None else page.read().decode()


@pytest.mark.parametrize(("password", "comes_in"), [(PASSWORD, True), ("guess", False)])
def test_promtool_fetches_the_page_with_the_password_alone(
    promtool: str, file: Path, *, password: str, comes_in: bool
) -> None:
    file.write_text(GUARDED)
    with daemon(WEB_CONFIG_FILE=str(file)) as running:
        port = running.url.rpartition(":")[2]
        page = fetched(promtool, file.parent, f"https://prometheus:{password}@127.0.0.1:{port}")

    assert ("headroom_build_info" in (page or "")) == comes_in
