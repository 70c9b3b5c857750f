import re
import shutil
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Final

import pytest
import yaml

from tests.command import OWN, run_command, run_process
from vllm_headroom.config import Settings, name_key
from vllm_headroom_tools.cli import COMMANDS
from vllm_headroom_tools.options import name_option

SCENARIOS = (
    "healthy, leak, burst, neighbour, restart, crash, hang, slow-start, sleep, mig, over-budget, low-memory, "
    "host-leak, filling, stranded, blind or fleet"
)


@pytest.mark.parametrize("argv", [("--help",), ("-h",), ("run", "--help"), ("--listen-port", "x", "--help")])
def test_help_has_the_commands_and_every_setting(argv: tuple[str, ...]) -> None:
    process = run_process(*argv, COLUMNS="80")

    assert (process.returncode, process.stderr) == (0, "")
    assert process.stdout.startswith("usage: vllm-headroom [run] [OPTION VALUE]...\n")
    assert "\n  demo       Runs the daemon over a simulated engine and GPU.\n" in process.stdout
    assert all(f"\n  {name_option(name_key(name))} " in process.stdout for name in Settings.model_fields)
    assert max(map(len, process.stdout.splitlines())) <= 80


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_help_a_version_and_tells_every_mistake_at_once(name: str) -> None:
    process, version = run_process(name, "--help", COLUMNS="80"), run_process(name, "--version")
    wrong = run_command(name, "--versoin", "--colour", "--help-me")

    assert (process.returncode, process.stderr) == (version.returncode, version.stderr) == (0, "")
    assert process.stdout.startswith("usage: vllm-headroom ")
    assert max(map(len, process.stdout.splitlines())) <= 80
    assert name == "doctor" or f"\n  vllm-headroom {'' if name == 'run' else name}" in process.stdout, (
        "it has an example"
    )
    assert version.stdout == f"vllm-headroom {metadata.version('vllm-headroom')}\n"
    assert (wrong.returncode, wrong.stdout) == (2, "")
    # plan and preflight take vLLM's options too, and say so.
    assert wrong.stderr.replace(f" of {name} or of vLLM 0.19 to 0.33", "").splitlines()[:3] == [
        f"vllm-headroom {name}: --versoin: not an option, did you mean --version?",
        f"vllm-headroom {name}: --colour: not an option, see --help",
        f"vllm-headroom {name}: --help-me: not an option, did you mean --help?",
    ]


def test_an_option_that_lacks_its_value_is_no_question_for_the_version() -> None:
    process = run_command("load", "--model", "--version", "--concurrency", "1")

    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr.splitlines() == [
        "vllm-headroom load: --model: got nothing, accepts a text",
        "vllm-headroom load: --engine-url: needed, accepts an http or https URL without user, password and query",
    ]


def test_the_demo_has_a_help_of_its_own() -> None:
    process = run_command("demo", "--help")

    assert (process.returncode, process.stderr) == (0, "")
    assert process.stdout.startswith("usage: vllm-headroom demo [OPTION VALUE]...\n")
    assert f"Accepts {SCENARIOS}." in " ".join(process.stdout.split())


def test_version_is_that_of_the_distribution() -> None:
    process = run_process("--version", HEADROOM_LISTEN_PORT="x")

    assert (process.returncode, process.stdout) == (0, f"vllm-headroom {metadata.version('vllm-headroom')}\n")


def test_print_config_shows_what_is_in_force_without_secrets(tmp_path: Path) -> None:
    file = tmp_path / "headroom.yaml"
    file.write_text("listen_port: 1\nengine_headers: {X-Key: hunter2}\n")

    process = run_process("--print-config", "--config", str(file), "--gpus=0,1", HEADROOM_LOG_LEVEL="debug")
    printed = yaml.safe_load(process.stdout)

    assert (process.returncode, process.stderr) == (0, "")
    assert list(printed) == list(map(name_key, Settings.model_fields))
    assert printed["listen_port"] == 1
    assert printed["gpus"] == ["0", "1"]
    assert printed["log_level"] == "debug"
    assert printed["engine_headers"] == {"X-Key": "***"}
    assert "hunter2" not in process.stdout


def test_bad_settings_end_with_status_2_and_a_line_for_each() -> None:
    process = run_process("--listen-port", "high", "--colour=blue", HEADROOM_GPUS="gpu0", HEADROOM_LOG_LEVEL="loud")

    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr.splitlines() == [
        "vllm-headroom run: --colour: not an option, see --help",
        "vllm-headroom run: --listen-port: got 'high', accepts a port number from 0 to 65535",
        "vllm-headroom run: HEADROOM_GPUS: got 'gpu0', accepts auto, all, or GPU indices or UUIDs separated by commas",
        "vllm-headroom run: HEADROOM_LOG_LEVEL: got 'loud', accepts debug, info, warning or error",
    ]


def test_the_demo_tells_its_own_mistakes_with_the_others_and_takes_no_engine() -> None:
    process = run_command("demo", "--scenario=x", "--speed=0", "--engine-url=http://engine", "--listen-port=x")

    assert process.returncode == 2
    assert process.stderr.splitlines() == [
        "vllm-headroom demo: --engine-url: not an option, see --help",
        f"vllm-headroom demo: --scenario: got 'x', accepts {SCENARIOS}",
        "vllm-headroom demo: --speed: got '0', accepts a number above 0, at most 1000",
        "vllm-headroom demo: --listen-port: got 'x', accepts a port number from 0 to 65535",
    ]


def test_only_the_demo_knows_scenarios() -> None:
    assert run_command("run", "--scenario=leak", "--print-config").returncode == 2
    assert yaml.safe_load(run_command("demo", "--scenario=leak", "--print-config").stdout)["scenario"] == "leak"


@pytest.mark.parametrize("argv", [(), ("watch", "--json")])
def test_without_files_to_open_it_ends_with_a_line(argv: tuple[str, ...]) -> None:
    few = 'ulimit -n 12 && exec "$@"'
    process = subprocess.run(
        ["sh", "-c", few, "sh", sys.executable, "-m", "vllm_headroom", *argv],
        env=OWN,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )

    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr == (
        "vllm-headroom: only 12 files may be open at once, 40 are needed: raise the limit (ulimit -n)\n"
    )


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("doctr", "did you mean doctor?"),
        ("x", "see --help"),
    ],
)
def test_an_unknown_command_is_shown_the_one_that_is_meant(word: str, hint: str) -> None:
    process = run_process(word)

    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr == f"vllm-headroom: {word!r}: not a command, {hint}\n"


@pytest.mark.parametrize("words", [(), ("run",), ("doctor",), ("smoke",)])
def test_a_first_word_that_is_a_url_is_the_engines(words: tuple[str, ...]) -> None:
    process = run_process(*words, "http://gpu-7:8000", "--print-config")

    assert yaml.safe_load(process.stdout)["engine_url"] == "http://gpu-7:8000/metrics", process.stderr


def test_a_first_option_that_holds_a_url_is_that_option() -> None:
    for word, name in (
        ("--engine-url=http://gpu-7:8000/metrics", "engine_url"),
        ("--runbooks-url=http://r/", "runbooks_url"),
    ):
        process = run_process(word, "--print-config")

        assert yaml.safe_load(process.stdout)[name] == word.partition("=")[2], process.stderr


@pytest.mark.parametrize("name", ["run", "demo", "plan", "check", "advise", "postmortem", "replay"])
def test_help_imports_nothing_of_the_daemon(name: str) -> None:
    code = (
        "import sys; from importlib import import_module; from vllm_headroom_tools.cli import execute;"
        f" execute(import_module('vllm_headroom_tools.{COMMANDS[name][0]}').COMMAND, '{name}', ['--help']);"
        " print(*sys.modules, file=sys.stderr)"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=OWN)

    heavy = {"uvloop", "uvicorn", "rich", "prometheus_client.asgi"}
    assert not heavy & set(process.stderr.split())


EARLY: Final = """
import os, signal, sys
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
sys.argv = ["vllm-headroom", {command!r}]
from vllm_headroom.__main__ import main
main()
"""


@pytest.mark.parametrize("name", ["vllm_headroom.__main__", "vllm_headroom_tools"])
def test_an_interrupt_before_the_command_is_known_ends_without_a_traceback(name: str) -> None:
    process = subprocess.run(
        [sys.executable, "-c", EARLY.format(name=name, command="run")],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=OWN,
    )

    assert (process.returncode, process.stdout, process.stderr) == (-signal.SIGINT, "", "")


def test_the_version_needs_no_settings() -> None:
    code = (
        "import os, sys; sys.argv = ['', '--version']; os._exit = lambda _: print(*sys.modules, file=sys.stderr);"
        " from vllm_headroom.__main__ import main; main()"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=OWN)

    assert process.stdout == f"vllm-headroom {metadata.version('vllm-headroom')}\n"
    assert not {"pydantic", "yaml", "vllm_headroom_tools.run"} & set(process.stderr.split())


@pytest.mark.parametrize(
    ("command", "status", "name"),
    [
        ("run", 0, "vllm_headroom_tools.cli"),
        ("run", 0, "argparse"),
        ("run", 0, "vllm_headroom.config"),
        ("run", 0, "uvloop"),
        ("demo", 0, "argparse"),
        ("doctor", -signal.SIGINT, "argparse"),
    ],
)
def test_an_interrupt_during_the_imports_ends_without_a_traceback(name: str, command: str, status: int) -> None:
    process = subprocess.run(
        [sys.executable, "-c", EARLY.format(name=name, command=command)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=OWN,
    )

    assert (process.returncode, process.stdout, process.stderr) == (status, "", "")


@pytest.mark.parametrize(
    ("words", "completion"),
    [
        (("demo", "--scenario", "le"), "leak"),
        (("pl",), "plan"),
        (("plan", "--max-lora-"), "--max-lora-rank"),
        (("--log-f",), "--log-format"),
        (("--log-level", "w"), "warning"),
        (("probe", "in"), "install"),
    ],
)
def test_bash_completes_commands_options_and_values(words: tuple[str, ...], completion: str) -> None:
    typed = f"COMP_WORDS=(vllm-headroom {' '.join(words)}); COMP_CWORD={len(words)}; _shtab_vllm_headroom"
    script = f'{run_command("completion", "bash").stdout}{typed}; echo "${{COMPREPLY[@]}}"'

    assert (
        subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout == f"{completion}\n"
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_the_commands_own_and_its_man_page_has_every_option(name: str) -> None:
    text, page = run_command("help", name).stdout, run_command("help", "--man", name).stdout.replace("\\-", "-")

    assert text == run_command(name, "--help").stdout
    options = re.findall(r"^  (-.*?)(?:  |$)", text, re.MULTILINE)
    assert options
    assert all(
        re.search(rf"^\.B .*{re.escape(option.split()[-2 if ' ' in option else 0])}", page, re.MULTILINE)
        for option in options
    )


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_every_command_too(shell: str) -> None:
    done = run_command("completion", shell)

    assert done.returncode == 0
    assert all(name in done.stdout for name in COMMANDS)
    if shutil.which(shell) is not None:
        subprocess.run([shell, "-n"], input=done.stdout, text=True, check=True)


@pytest.mark.skipif(shutil.which("zsh") is None, reason="this machine has no zsh")
def test_zsh_knows_the_function_once_the_script_was_sourced(tmp_path: Path) -> None:
    script = tmp_path / "completion"
    script.write_text(run_command("completion", "zsh").stdout)
    shown = f"autoload -U compinit && compinit -u -D; source {script}; echo $_comps[vllm-headroom]"

    assert subprocess.run(["zsh", "-fc", shown], capture_output=True, text=True, check=True).stdout == (
        "_shtab_vllm_headroom\n"
    )


@pytest.mark.skipif(shutil.which("fish") is None, reason="this machine has no fish")
@pytest.mark.parametrize(
    ("words", "completed"),
    [("demo --scenario le", "leak"), ("plan -t", "-tp"), ("probe in", "install"), ("pl", "plan")],
)
def test_fish_completes_words_with_their_help(words: str, completed: str) -> None:
    typed = f"{run_command('completion', 'fish').stdout}\ncomplete -C 'vllm-headroom {words}'"
    process = subprocess.run(["fish", "--no-config", "-c", typed], capture_output=True, text=True, check=True)

    word, _, described = process.stdout.splitlines()[0].partition("\t")
    assert word == completed
    assert described


READ_AND_WRITTEN: Final = [
    ("replay", "{}", "--svg"),
    ("replay", "{}", "--openmetrics"),
    ("check", "--max-preemptions-per-thousand-requests", "1", "--trace", "{}", "--junit"),
]


@pytest.mark.parametrize("words", READ_AND_WRITTEN)
def test_an_output_never_replaces_what_was_read(words: tuple[str, ...], tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl.gz"
    shutil.copy(Path(__file__).parents[1] / "contract" / "card" / "h100-sleep.jsonl.gz", trace)
    old_content = trace.read_bytes()

    process = run_command(*(word.format(trace) for word in words), str(trace))

    assert process.returncode == 2
    assert process.stderr.endswith(f"{trace}: is what was read, and would be lost: name another file\n")
    assert trace.read_bytes() == old_content
