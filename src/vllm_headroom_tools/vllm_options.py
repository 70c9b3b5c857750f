"""The names of all options of vLLM's server."""

from pathlib import Path
from typing import Final

VLLM_RELEASES: Final = "vLLM 0.19 to 0.33"
"""The releases that the table covers."""

LAST_RELEASE: Final = (0, 33)
"""The newest release in the table."""

TABLE: Final = Path(__file__).with_name("vllm_options.tsv")
"""All options of `vllm serve` in these releases: their names and accepted values. The sources are
engine/arg_utils.py, entrypoints/openai/cli_args.py and entrypoints/common/cli_args.py.
"""

OPTIMISATION_LEVEL: Final = "-O"
"""The short option for the optimisation level, which vLLM's command line parser adds."""


def list_vllm_options() -> set[str]:
    """Return the names of all options, including the --no- forms of switches."""
    names = {OPTIMISATION_LEVEL}
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        row_names, takes = line.split("\t")
        for name in row_names.split(","):
            names.add(name)
            if takes == "flag" and name.startswith("--"):
                names.add(f"--no-{name.removeprefix('--')}")
    return names
