"""The options of the command line that vLLM would be started with."""

import pytest

from vllm_headroom_tools.conclusion import Conclusion
from vllm_headroom_tools.options import BadOptions, Parser
from vllm_headroom_tools.preflight.checks import check_unknown_options
from vllm_headroom_tools.preflight.command import COMMAND


def read_line(*words: str) -> tuple[str, ...]:
    """Return the lines on the options that no release has."""
    parser = Parser(prog="preflight")
    COMMAND.options(parser)
    unknown_options: tuple[str, ...] = parser.read(["--", "vllm", "serve", "m/m", *words]).unknown_options
    return unknown_options


def test_a_misspelt_option_of_vllm_is_named_with_the_one_that_was_meant() -> None:
    (line,) = read_line("--max-model-length", "8192", "--port", "8000")

    assert "--max-model-length: not an option of preflight or of vLLM 0.19 to 0.33" in line
    assert "did you mean --max-model-len?" in line


def test_options_of_vllm_are_read_from_its_line() -> None:
    parser = Parser(prog="preflight")
    COMMAND.options(parser)
    arguments = parser.read(["--", "vllm", "serve", "m/m", "-tp", "4", "--gpu-memory-util=0.8", "--enforce-eager"])

    assert (arguments.tensor_parallel_size, arguments.gpu_memory_utilization) == (4, 0.8)
    assert arguments.unknown_options == ()


def test_the_release_of_an_image_is_no_option_of_vllm() -> None:
    parser = Parser(prog="preflight")
    COMMAND.options(parser)
    arguments = parser.read(["--", "docker", "run", "vllm/vllm-openai:v0.28.0", "m/m", "-tp", "2"])

    assert (arguments.tensor_parallel_size, arguments.unknown_options) == (2, ())


def test_an_option_of_preflight_itself_is_still_refused() -> None:
    parser = Parser(prog="preflight")
    COMMAND.options(parser)

    with pytest.raises(BadOptions, match="--ctl"):
        parser.read(["--ctl", "3"])


@pytest.mark.parametrize(
    ("version", "verdict"),
    [
        (None, Conclusion.GOOD),
        ("0.40.1", Conclusion.GOOD),
        ("1.0", Conclusion.GOOD),
        ("0.33.0", Conclusion.NOT_GOOD),
        ("0.28.0+cu129", Conclusion.NOT_GOOD),
        ("unknown", Conclusion.GOOD),
    ],
)
def test_only_a_vllm_whose_options_are_known_refuses_an_unknown_one(version: str | None, verdict: Conclusion) -> None:
    (finding,) = check_unknown_options(read_line("--ctl", "3"), version)

    assert finding.verdict is verdict
    assert finding.text.startswith("--ctl: not an option of preflight or of vLLM 0.19 to 0.33")
