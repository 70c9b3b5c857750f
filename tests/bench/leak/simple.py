"""The simple rules of plain.py as a program that score.py can run: an example to start from.

usage: python simple.py RULE [FILE]
Reads a trace from FILE or standard input, and prints the JSON of `vllm-headroom replay --json`. A rule reports once,
and its alarm stays until the end of the trace. It gives no time left, so it never pages.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import plain


def describe(readings: list[plain.Reading], rule: str) -> dict[str, Any]:
    """Return the entry of one series."""
    began = plain.RULES[rule](readings)
    alarms = [] if began is None else [[began, None]]
    return {
        "state": "leaking" if alarms else "stable",
        "growing_intervals": [],
        "leaking_intervals": alarms,
        "first_leaking": None,
        "last_leaking": None,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rule", choices=plain.RULES)
    parser.add_argument("file", type=Path, nargs="?")
    arguments = parser.parse_args()
    try:
        text = sys.stdin.read() if arguments.file is None else arguments.file.read_text()
        header, *samples = [json.loads(line) for line in text.splitlines()]
    except (OSError, ValueError) as error:
        print(f"simple.py: no trace: {error}", file=sys.stderr)
        return 2
    if header != {"headroom_trace": 1}:
        print('simple.py: the first line is not {"headroom_trace": 1}', file=sys.stderr)
        return 2
    gpu = describe(plain.read_series(samples, "gpu"), arguments.rule)
    roles = {process["role"] for sample in samples for process in sample.get("processes") or ()}
    host = [{"process": role} | describe(plain.read_series(samples, role), arguments.rule) for role in sorted(roles)]
    print(json.dumps({"samples": len(samples), "gpus": [{"gpu": 0} | gpu], "host": host}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
