"""The compose file starts what it says, hardened and pinned, and each part finds the others."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import pytest
import yaml

from tests.assets.compose import FOLDER, PROFILES, SERVICES, by_default, lay_out, mounts, reachable_names, started
from vllm_headroom.config import Settings
from vllm_headroom_tools.demo.command import SCENARIOS

OURS: Final = ("processes", "probe", "headroom", "demo")
PROMETHEUS: Final[dict[str, Any]] = yaml.safe_load((FOLDER / "prometheus.yml").read_text(encoding="utf-8"))


def composing() -> tuple[list[str], bool]:
    """Return the command, and whether it is the first Compose, which knows no name of a project; else skip the test."""
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]):
            result = run(*command, "version", "--short")
            if result.returncode == 0:
                return command, result.stdout.startswith("1.")
    pytest.skip("neither docker compose nor docker-compose: install Docker's compose plugin")


def test_compose_accepts_the_file(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for profile in PROFILES:
        with subtests.test(profile=profile):
            command, is_first = composing()
            text = (FOLDER / "compose.yaml").read_text(encoding="utf-8")
            file = tmp_path / "compose.yaml"
            file.write_text(
                re.sub(r"^name: .*\n", "", text, flags=re.MULTILINE) if is_first else text, encoding="utf-8"
            )
            place = ("--project-directory", str(FOLDER), "--file", str(file), "--profile", profile)
            done = run(*command, *place, "config", "--services")

            assert (done.returncode, done.stderr) == (0, "")
            assert set(done.stdout.split()) == set(SERVICES if is_first else started(profile))


def test_a_profile_starts_the_engine_or_the_demo_beside_the_same_monitoring() -> None:
    monitoring = {"prometheus", "alertmanager", "grafana"}

    assert set(started("vllm")) == {"processes", "probe", "vllm", "headroom"} | monitoring
    assert set(started("demo")) == {"demo"} | monitoring


def test_an_image_is_pinned(subtests: pytest.Subtests) -> None:
    for service in SERVICES:
        with subtests.test(service=service):
            assert re.search(r":v?\d+\.\d+\.\d+$", by_default(SERVICES[service]["image"]))


def test_a_port_is_this_machine_s_only(subtests: pytest.Subtests) -> None:
    for service in SERVICES:
        with subtests.test(service=service):
            assert all(port.startswith("127.0.0.1:") for port in SERVICES[service].get("ports", ()))


def test_a_file_that_is_mounted_exists_and_cannot_be_written(subtests: pytest.Subtests) -> None:
    for service in SERVICES:
        with subtests.test(service=service):
            assert [source for source, _ in mounts(service) if not source.exists()] == []
            assert all(
                volume.endswith(":ro") for volume in SERVICES[service].get("volumes", ()) if volume.startswith(".")
            )


def test_our_containers_are_hardened(subtests: pytest.Subtests) -> None:
    for service in OURS:
        with subtests.test(service=service):
            spec = SERVICES[service]

            assert spec["user"] == "65532:65532"
            assert spec["read_only"] is True
            assert spec["cap_drop"] == ["ALL"]
            assert spec["security_opt"] == ["no-new-privileges:true"]


def test_the_sidecar_shares_the_engine_s_processes_and_does_not_die_with_it() -> None:
    assert SERVICES["headroom"]["pid"] == SERVICES["vllm"]["pid"] == "service:processes"
    assert SERVICES["processes"]["init"] is True  # it is process 1, and takes over what dies without a parent


def test_the_sidecar_sees_all_gpus_for_nvml_only() -> None:
    (request,) = SERVICES["headroom"]["deploy"]["resources"]["reservations"]["devices"]

    assert request == {"driver": "nvidia", "count": "all", "capabilities": ["gpu", "utility"]}


def test_the_sidecar_s_settings_exist_and_name_the_engine() -> None:
    environment = SERVICES["headroom"]["environment"]
    url = urlsplit(environment["HEADROOM_ENGINE_URL"])

    assert {name.removeprefix("HEADROOM_").lower() for name in environment} <= set(Settings.model_fields)
    assert (url.hostname, url.port) == ("vllm", 8000)
    assert f"headroom-state:{environment['HEADROOM_STATE_DIR']}" in SERVICES["headroom"]["volumes"]


def test_vllm_finds_the_probe_and_the_sidecar_its_files() -> None:
    vllm, sidecar, installer = (SERVICES[name] for name in ("vllm", "headroom", "probe"))
    folder = vllm["environment"]["HEADROOM_PROBE_DIR"]

    assert sidecar["environment"]["HEADROOM_PROBE_DIR"] == folder
    assert all(f"headroom-probe-files:{folder}" in service["volumes"] for service in (vllm, sidecar))
    assert f"headroom-probe:{vllm['environment']['PYTHONPATH']}:ro" in vllm["volumes"]
    (place,) = installer["volumes"]
    assert f"probe install {place.removeprefix('headroom-probe:')} || true" in installer["entrypoint"][-1]
    assert vllm["depends_on"] == {"probe": {"condition": "service_completed_successfully"}}
    assert installer["restart"] == "no"
    assert not any(volume.startswith("headroom-probe:") for volume in sidecar["volumes"])
    dockerfile = (FOLDER.parents[1] / "Dockerfile").read_text(encoding="utf-8")
    assert f"--chown=65532:65532 /source/state {place.partition(':')[2]}\n" in dockerfile


def test_the_demo_plays_a_scenario_that_there_is() -> None:
    command = [by_default(word) for word in SERVICES["demo"]["command"]]

    assert command[command.index("--scenario") + 1] in SCENARIOS


def test_prometheus_finds_the_sidecar_and_alertmanager(subtests: pytest.Subtests) -> None:
    for profile in PROFILES:
        with subtests.test(profile=profile):
            (job,) = PROMETHEUS["scrape_configs"]
            (alertmanager,) = PROMETHEUS["alerting"]["alertmanagers"]
            targets = [
                target
                for part in (job, alertmanager)
                for static_config in part["static_configs"]
                for target in static_config["targets"]
            ]

            assert job["job_name"] == "vllm-headroom"  # the alerts and the dashboards go by it
            assert targets == ["headroom:9839", "alertmanager:9093"]
            assert {target.split(":")[0] for target in targets} <= reachable_names(profile)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not on the PATH: install Prometheus")
def test_prometheus_accepts_its_configuration_and_finds_the_rules(tmp_path: Path) -> None:
    lay_out("prometheus", tmp_path)
    done = run("promtool", "check", "config", str(tmp_path / "etc" / "prometheus" / "prometheus.yml"))

    assert done.returncode == 0, done.stderr
    assert re.search(r"\b[1-9]\d* rule files? found", done.stdout)


@pytest.mark.skipif(shutil.which("amtool") is None, reason="amtool is not on the PATH: install Alertmanager")
def test_alertmanager_accepts_its_configuration(tmp_path: Path) -> None:
    lay_out("alertmanager", tmp_path)
    done = run("amtool", "check-config", str(tmp_path / "etc" / "alertmanager" / "alertmanager.yml"))

    assert done.returncode == 0, done.stderr


def test_alertmanager_s_keys_are_where_the_readme_puts_them() -> None:
    ((config, _), (secrets, place)) = mounts("alertmanager")
    files = {Path(path) for path in re.findall(r"routing_key_file: (\S+)", config.read_text(encoding="utf-8"))}

    assert {file.parent for file in files} == {place}
    assert secrets == FOLDER / "secrets"
    named = re.search(r"for team in ([\w -]+);", (FOLDER / "README.md").read_text(encoding="utf-8"))
    assert named
    assert set(named[1].split()) == {file.name for file in files}


def test_grafana_finds_prometheus_and_the_dashboards(tmp_path: Path) -> None:
    lay_out("grafana", tmp_path)
    provisioning = tmp_path / "etc" / "grafana" / "provisioning"
    (source,) = provisioned(provisioning / "datasources")["datasources"]
    (provider,) = provisioned(provisioning / "dashboards")["providers"]
    folder = tmp_path / Path(provider["options"]["path"]).relative_to("/")
    home = tmp_path / Path(SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]).relative_to(
        "/"
    )

    assert (source["type"], source["url"], source["isDefault"]) == ("prometheus", "http://prometheus:9090", True)
    assert source["jsonData"]["timeInterval"] == PROMETHEUS["global"]["scrape_interval"]
    assert (provider["type"], provider["allowUiUpdates"]) == ("file", False)
    assert home in set(folder.glob("*.json"))


def provisioned(folder: Path) -> dict[str, Any]:
    (file,) = folder.iterdir()
    document: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert document["apiVersion"] == 1
    return document


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
