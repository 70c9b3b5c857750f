"""The daemon's own door: TLS, client certificates and passwords as Prometheus's exporters have them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.e2e.door import PASSWORD, client, guarded, port, secured, write
from tests.fakes.certificates import write_self_signed
from tests.fakes.engine_server import LOOPBACK
from tests.fakes.ports import free_port
from tests.process import Daemon, eventually

PROMETHEUS = """\
global: {{scrape_interval: 1s}}
scrape_configs:
  - job_name: headroom
    scheme: https
    tls_config: {{ca_file: {folder}/server.crt, cert_file: {folder}/client.crt, key_file: {folder}/client.key}}
    basic_auth: {{username: prometheus, password: {password}}}
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""


def test_who_has_certificate_and_password_comes_in_and_nobody_else(folder: Path) -> None:
    with guarded(folder) as running, client(folder, running) as trusted_client:
        answer = trusted_client.get("/healthz", auth=("prometheus", PASSWORD))

        assert answer.status_code == 200
        assert answer.headers["strict-transport-security"] == "max-age=31536000"
        for auth in (None, ("prometheus", "guess"), ("nobody", PASSWORD), ("", "")):
            refused = trusted_client.get("/metrics", auth=auth)
            assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Basic")
        with client(folder, running, certified=False) as stranger, pytest.raises(httpx.TransportError):
            stranger.get("/healthz", auth=("prometheus", PASSWORD))
        with pytest.raises(httpx.TransportError):
            running.get("/healthz")
        assert PASSWORD not in running.log()


def test_a_certificate_with_another_name_does_not_come_in(folder: Path) -> None:
    write(folder, san="elsewhere")
    with guarded(folder) as running, client(folder, running) as trusted_client, pytest.raises(httpx.TransportError):
        trusted_client.get("/healthz", auth=("prometheus", PASSWORD))


def served_certificate(folder: Path, running: Daemon) -> bytes | None:
    with secured(folder, running) as connection:
        return connection.getpeercert(binary_form=True)


def test_a_renewed_certificate_is_shown_and_a_broken_one_is_not(folder: Path) -> None:
    with guarded(folder) as running:
        first_certificate = served_certificate(folder, running)
        (folder / "server.key").write_text("broken")
        eventually(lambda: "not read again" in running.log(), "the broken key is found")
        assert served_certificate(folder, running) == first_certificate

        write_self_signed(folder, "server")
        eventually(lambda: served_certificate(folder, running) != first_certificate, "the renewed certificate is shown")


def test_a_file_that_cannot_be_used_ends_it_with_status_2_and_a_line_each(tmp_path: Path) -> None:
    file = tmp_path / "web.config.yml"
    file.write_text("rate_limit: {}\nhttp_server_config: {http2: true}\n")
    result = subprocess.run(
        [sys.executable, "-m", "vllm_headroom", "--web-config-file", str(file), "--listen-port", "0"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert result.returncode == 2
    assert [("rate_limit" in line, "http2" in line) for line in result.stderr.splitlines()] == [
        (True, False),
        (False, True),
    ]


def test_a_real_prometheus_scrapes_over_mutual_tls(folder: Path, tmp_path: Path) -> None:
    prometheus = shutil.which("prometheus")
    if prometheus is None:
        pytest.skip("no prometheus on the PATH")
    with guarded(folder) as running:
        file, own = tmp_path / "prometheus.yml", free_port()
        file.write_text(PROMETHEUS.format(folder=folder, password=PASSWORD, port=port(running)))
        command = [prometheus, f"--config.file={file}", f"--storage.tsdb.path={tmp_path / 'data'}"]
        with subprocess.Popen(
            [*command, f"--web.listen-address={LOOPBACK}:{own}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            try:
                series = eventually(lambda: scraped(own), "Prometheus has the page")
            finally:
                process.kill()

    assert series[0]["metric"]["__name__"] == "headroom_build_info"


def scraped(own: int) -> list[dict[str, dict[str, str]]]:
    try:
        answer = httpx.get(f"http://{LOOPBACK}:{own}/api/v1/query", params={"query": "headroom_build_info"}).json()
    except (httpx.TransportError, ValueError):
        return []
    series: list[dict[str, dict[str, str]]] = answer.get("data", {}).get("result", [])
    return series
