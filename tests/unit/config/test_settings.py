from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tests.settings import load
from vllm_headroom.config import Settings
from vllm_headroom.derive.attribution import Selection
from vllm_headroom_tools.settings import ModelSettings

UUID = "GPU-8a1b0d6e-0b64-4f7c-9a53-1d1f1a2b3c4d"


def in_force(setting: str, text: str) -> Any:
    return getattr(load([], {f"HEADROOM_{setting.upper()}": text}), setting)


def test_every_default_passes_its_own_check() -> None:
    assert Settings.model_validate(Settings().model_dump(by_alias=True)) == Settings()


def test_the_command_line_beats_the_environment_which_beats_the_file_which_beats_the_default(tmp_path: Path) -> None:
    file = tmp_path / "headroom.yaml"
    file.write_text("listen_port: 1\nlog_level: debug\nlog_format: json\n")
    environ = {"HEADROOM_CONFIG": str(file), "HEADROOM_LISTEN_PORT": "2", "HEADROOM_LOG_LEVEL": "error"}

    settings = load(["--listen-port", "3"], environ)

    assert settings.listen_port == 3
    assert settings.log_level == "error"
    assert settings.log_format == "json"
    assert settings.gpus == "auto"


def test_config_on_the_command_line_beats_the_one_in_the_environment(tmp_path: Path) -> None:
    (tmp_path / "wanted.yaml").write_text("listen_port: 1\n")

    settings = load([f"--config={tmp_path}/wanted.yaml"], {"HEADROOM_CONFIG": str(tmp_path / "absent.yaml")})

    assert settings.listen_port == 1


def test_a_value_may_follow_its_option_or_an_equals_sign() -> None:
    settings = load(["--listen-port=0", "--gpus", "1", "--listen-host="], {"HEADROOM_LISTEN_HOST": "127.0.0.1"})

    assert (settings.listen_port, settings.gpus, settings.listen_host) == (0, ("1",), "")


def test_an_empty_variable_an_empty_file_and_a_null_count_as_not_set(tmp_path: Path) -> None:
    empty, null = tmp_path / "empty.yaml", tmp_path / "null.yaml"
    empty.write_text("# nothing yet\n")
    null.write_text("reported_bytes: null\nlisten_port:\n")

    assert load([], {"HEADROOM_REPORTED_BYTES": "", "HEADROOM_LISTEN_PORT": " "}) == ModelSettings()
    assert load(["--config", str(empty)], {}) == ModelSettings()
    assert load(["--config", str(null)], {}) == ModelSettings()


def test_the_environment_is_the_one_that_load_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADROOM_LISTEN_PORT", "1")
    monkeypatch.setenv("LISTEN_PORT", "2")

    assert load([], {}).listen_port == 9839


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://engine:8000", "http://engine:8000/metrics"),
        ("http://engine:8000/", "http://engine:8000/metrics"),
        ("https://engine", "https://engine/metrics"),
        ("http://engine?a=b", "http://engine/metrics?a=b"),
        ("http://user:word@engine:8000", "http://user:word@engine:8000/metrics"),
        ("http://[::1]:8000", "http://[::1]:8000/metrics"),
        ("http://engine:8000/v1/metrics?a=b", "http://engine:8000/v1/metrics?a=b"),
        (" http://engine:8000/metrics\n", "http://engine:8000/metrics"),
    ],
)
def test_a_url_without_a_path_gets_metrics(text: str, url: str) -> None:
    assert in_force("engine_url", text) == url


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1048576", 2**20),
        ("8MiB", 8 * 2**20),
        ("8Mi", 8 * 2**20),
        ("72 GiB", 72 * 2**30),
        ("1.5gib", 3 * 2**29),
        ("80GB", 80 * 10**9),
        ("512B", 512),
    ],
)
def test_sizes_are_bytes_or_carry_a_unit(text: str, size: int) -> None:
    assert in_force("engine_max_page_bytes", text) == size
    assert in_force("reported_bytes", text) == size


@pytest.mark.parametrize(
    ("text", "selection"),
    [
        ("auto", Selection()),
        ("all", Selection(everything=True)),
        ("0", Selection(listed=("0",))),
        (f"0, {UUID}", Selection(listed=("0", UUID))),
        ("MIG-8a1b0d6e-0b64-4f7c-9a53-1d1f1a2b3c4d", Selection(listed=("MIG-8a1b0d6e-0b64-4f7c-9a53-1d1f1a2b3c4d",))),
    ],
)
def test_gpus_are_auto_all_or_a_list(text: str, selection: Selection) -> None:
    assert Selection.of(load(["--gpus", text], {}).gpus) == selection


def test_yaml_gives_lists_mappings_and_plain_values(tmp_path: Path) -> None:
    file = tmp_path / "headroom.yaml"
    file.write_text(
        f"gpus: [0, {UUID}]\nengine_headers: {{X-Key: 5}}\nsample_interval_seconds: 0.5\n"
        "reported_bytes: 72GiB\nengine_ca_file: /etc/ca.pem\n"
    )

    settings = load(["--config", str(file)], {})

    assert settings.gpus == ("0", UUID)
    assert settings.engine_headers["X-Key"].get_secret_value() == "5"
    assert settings.sample_interval_seconds == 0.5
    assert settings.reported_bytes == 72 * 2**30
    assert settings.engine_ca_file == Path("/etc/ca.pem")


def test_headers_are_json_on_the_command_line() -> None:
    settings = load(["--engine-headers", '{"X-Key": "a b", "Accept": "text/plain"}'], {})

    assert {name: value.get_secret_value() for name, value in settings.engine_headers.items()} == {
        "X-Key": "a b",
        "Accept": "text/plain",
    }


def test_a_choice_is_taken_in_any_case() -> None:
    assert in_force("log_level", "WARNING") == "warning"
    assert in_force("log_format", "JSON") == "json"


def test_files_that_are_missing_are_for_the_reading_to_say() -> None:
    assert in_force("engine_bearer_token_file", "/nowhere/token") == Path("/nowhere/token")


def test_settings_are_frozen_and_know_no_other_names() -> None:
    with pytest.raises(ValidationError):
        Settings().listen_port = 1
    with pytest.raises(ValidationError):
        Settings(home_dir="/var/lib")  # type: ignore[call-arg]


def test_an_error_raised_by_the_class_itself_hides_its_input() -> None:
    with pytest.raises(ValidationError) as raised:
        Settings(engine_url=["ftp://user:hunter2@engine"])  # type: ignore[arg-type]

    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "seconds"), [("5s", 5.0), ("2m", 120.0), ("1m30s", 90.0), ("500ms", 0.5), ("7.5", 7.5)]
)
def test_a_duration_may_have_a_unit(text: str, seconds: float) -> None:
    assert load([], {"HEADROOM_SAMPLE_INTERVAL_SECONDS": text}).sample_interval_seconds == seconds
