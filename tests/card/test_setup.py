"""What the set-up says, in one line, on a machine that lacks something; no network, so that `make test` has it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

SETUP: Final = Path(__file__).with_name("setup.sh")
TOOLS: Final = ("bash", "cp", "df", "dirname", "grep", "head", "mkdir", "rm", "tail", "touch")
VENV: Final = """#!/bin/sh
mkdir -p "$3/bin"
cat >"$3/bin/pip" <<'END'
#!/bin/sh
echo "$@" | grep -q "{fails}" && echo "ERROR: No matching distribution found" >&2 && exit 1
exit 0
END
cat >"$3/bin/python" <<'END'
#!/bin/sh
echo "{versions}"
END
chmod +x "$3/bin/pip" "$3/bin/python"
"""


def set_up(place: Path, *, without: str = "", fails: str = "nothing", versions: str = "", free: str = "99") -> str:
    """Run the set-up with these tools alone; return what it says, which is one line, and expect status 1."""
    tools = place / "tools"
    tools.mkdir()
    for name in (*TOOLS, "cat", "chmod"):
        (tools / name).symlink_to(str(shutil.which(name)))
    (tools / "df").unlink()
    programs = {"python3.11": VENV.format(fails=fails, versions=versions), "df": f"#!/bin/sh\necho {free}\n"}
    programs |= dict.fromkeys(("gcc", "nm", "readelf"), "#!/bin/sh\n")
    for name, text in programs.items():
        if name != without:
            (tools / name).write_text(text)
            (tools / name).chmod(0o755)
    command = [tools / "bash", SETUP, place / "card"]
    done = subprocess.run(command, env={"PATH": str(tools)}, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    return line


@pytest.mark.parametrize("tool", ["python3.11", "gcc", "nm", "readelf"])
def test_without_a_tool(tmp_path: Path, tool: str) -> None:
    assert set_up(tmp_path, without=tool).startswith(f"card-test: {tool} is missing (Debian: apt install ")


def test_without_space(tmp_path: Path) -> None:
    assert set_up(tmp_path, free="3").endswith("/card has 3 GB free, and the set-up needs 12")


def test_with_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "card").write_text("a file")

    assert set_up(tmp_path).startswith("card-test: cannot make the folder ")


@pytest.mark.parametrize(
    ("fails", "message"),
    [
        ("install vllm", "pip cannot install vllm 0.32.0: ERROR: No matching distribution found"),
        (
            "download",
            "the package index has no CUDA build of torch 2.13.0: ERROR: No matching distribution found",
        ),
    ],
)
def test_an_index_that_lacks_a_distribution(tmp_path: Path, fails: str, message: str) -> None:
    assert set_up(tmp_path, fails=fails) == f"card-test: {message}"


def test_another_version_in_the_folder(tmp_path: Path) -> None:
    (tmp_path / "card").mkdir()
    (tmp_path / "card" / "torch-2.13.0-any.whl").touch()

    line = set_up(tmp_path, versions="0.33.0 2.14.0")

    assert line.endswith("/card has vllm and torch 0.33.0 2.14.0, and the tests are written for 0.32.0 2.13.0")
