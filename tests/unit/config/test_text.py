from pathlib import Path

import pytest
import yaml

from tests.settings import load, load_as, settings_table
from vllm_headroom.config import Settings, find_display, name_key, name_variable
from vllm_headroom_tools.demo.command import DemoSettings
from vllm_headroom_tools.options import Parser, name_option
from vllm_headroom_tools.sources import format_settings


def test_every_setting_says_what_it_is_for_and_what_it_accepts() -> None:
    for name, field in DemoSettings.model_fields.items():
        assert (field.description or "").endswith("."), name
        assert find_display(field).accepts, name
        assert find_display(field).default, name
        assert find_display(field).metavar.isupper(), name


def help_of(kind: type[Settings], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", "80")
    parser = Parser("vllm-headroom")
    parser.add_settings(kind)
    return parser.format_help()


def test_help_has_every_setting_with_its_variable_and_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    text = " ".join((*help_of(Settings, monkeypatch).split(), ""))

    for name, field in Settings.model_fields.items():
        assert f" {name_option(name_key(name))} {find_display(field).metavar} " in text
        assert f" {name_variable(name)}; default: {find_display(field).default} " in text
    assert " Accepts a number of seconds from 0 to 3600. HEADROOM_GPU_FATAL_GRACE_SECONDS; default: 60 " in text


def test_the_demos_help_starts_with_its_own_settings_and_has_none_of_a_real_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = help_of(DemoSettings, monkeypatch)

    assert text.index("--scenario") < text.index("--speed NUMBER") < text.index("--sample-interval-seconds SECONDS")
    assert "--listen-port" in text
    assert "--engine-" not in text


def test_the_table_has_a_row_per_setting() -> None:
    rows = settings_table().splitlines()

    assert rows[0] == "| setting | default | meaning | accepts |"
    assert len(rows) == 2 + len(Settings.model_fields)
    assert all(row.count("|") == 5 for row in rows)
    assert (
        "| `HEADROOM_SAMPLE_INTERVAL_SECONDS` | 5 | Time from one sample of the engine and the GPUs to the next. |"
        " a number of seconds from 0.1 to 300 |"
    ) in rows


def test_what_is_printed_is_what_config_accepts(tmp_path: Path) -> None:
    file = tmp_path / "headroom.yaml"
    settings = load(["--gpus", "0,GPU-8a1b0d6e", "--reported-bytes=72GiB", "--engine-ca-file=/ca"], {})
    file.write_text(format_settings(settings))

    assert load(["--config", str(file)], {}) == settings


def test_the_printed_defaults_are_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "headroom.yaml"
    file.write_text(format_settings(Settings()))

    assert load_as(Settings, ["--config", str(file)], {}) == Settings()


def test_secrets_are_neither_printed_nor_shown_by_repr() -> None:
    environ = {
        "HEADROOM_ENGINE_URL": "http://user:hunter2@engine:8000",
        "HEADROOM_ENGINE_HEADERS": '{"X-Key": "hunter2"}',
    }
    settings = load([], environ)
    printed = format_settings(settings)

    assert yaml.safe_load(printed)["engine_url"] == "http://***@engine:8000/metrics"
    assert yaml.safe_load(printed)["engine_headers"] == {"X-Key": "***"}
    for text in (printed, repr(settings), str(settings)):
        assert "hunter2" not in text
