"""The setting HEADROOM_MODEL_CONFIG."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.settings import load
from tests.unit.sizing.models import FOLDER, config_text, model
from vllm_headroom_tools.options import BadOptions
from vllm_headroom_tools.settings import ModelSettings
from vllm_headroom_tools.sources import format_settings

TINY = FOLDER / "tiny.json"


def refused(argv: list[str], environ: dict[str, str]) -> str:
    with pytest.raises(BadOptions) as error:
        load(argv, environ)
    (line,) = error.value.lines
    return line


def test_without_it_no_model_is_known() -> None:
    assert ModelSettings().model_shape is None


def test_a_file_or_its_folder_says_the_model_by_any_way_to_set_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config_text("tiny"))
    (tmp_path / "headroom.yaml").write_text(f"model_config: {TINY}\n")

    ways = (
        load([], {"HEADROOM_MODEL_CONFIG": str(TINY)}),
        load([], {"HEADROOM_MODEL_CONFIG": str(tmp_path)}),
        load(["--model-config", str(TINY)], {"HEADROOM_MODEL_CONFIG": str(FOLDER / "gpt2.json")}),
        load(["--config", str(tmp_path / "headroom.yaml")], {}),
    )

    assert [settings.model_shape for settings in ways] == [model("tiny")] * len(ways)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            None,
            "it cannot be read: No such file or directory; it takes a config.json or its folder, and downloads none",
        ),
        ("", "it is not JSON: Expecting value: line 1 column 1 (char 0)"),
        ("\xff", "it is not JSON: it is no text in UTF-8"),
        ("{}", "it is not a model's configuration that is understood here: num_hidden_layers is missing"),
        ('{"index_head_dim": 1}', "what its attention keeps in the cache is not known here: it has index_head_dim"),
    ],
)
def test_a_file_that_says_no_model_is_refused_in_a_line_with_the_reason(
    text: str | None, reason: str, tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    if text is not None:
        file.write_text(text, encoding="latin-1")

    line = refused([], {"HEADROOM_MODEL_CONFIG": str(file)})

    assert line.startswith("HEADROOM_MODEL_CONFIG: got ")
    assert line.endswith(f" ({reason}), accepts the path of a model's config.json, or of the folder that has one")


def test_an_empty_or_a_misspelt_option_is_reported() -> None:
    assert refused(["--model-config="], {}).startswith("--model-config: got '', accepts the path")
    assert refused(["--model-confg", "x"], {}) == "--model-confg: not an option, did you mean --model-config?"


def test_what_is_printed_of_it_is_what_config_accepts(tmp_path: Path) -> None:
    settings = load(["--model-config", str(TINY)], {})
    printed = format_settings(settings)
    (tmp_path / "headroom.yaml").write_text(printed)

    assert yaml.safe_load(printed)["model_config"] == str(TINY)
    assert load(["--config", str(tmp_path / "headroom.yaml")], {}) == settings
