"""The options of `replay`."""

from __future__ import annotations

from typing import Final

from vllm_headroom.config.kinds import FILE, TRACE, url
from vllm_headroom.config.options import Parser

DESCRIPTION: Final = """\
Feeds a recorded past through the daemon's leak detector: would it have caught
our outage?

TRACE is a file that HEADROOM_TRACE_FILE let the daemon record, or - for
standard input.
"""

EXAMPLES: Final = """\
It ends with status 0, with 1 when a leak was found and --fail-on-leak was
given, and with 2 when the past cannot be read.

Example:
  vllm-headroom replay trace.jsonl
  cat trace.jsonl.1 trace.jsonl | vllm-headroom replay - --json
"""

HISTORY: Final = """\
Reads this exporter's series, or DCGM's or nvidia_gpu_exporter's together with
vLLM's own. A history is as coarse as the interval of its scrapes, and what
happened between two of them is not in it."""


def options(parser: Parser) -> None:
    """Add the options to the parser."""
    parser.add_argument("trace", metavar="TRACE", nargs="?", type=TRACE, help="the trace, - for standard input")
    parser.add_argument("--fail-on-leak", action="store_true", help="end with status 1 when there was an alarm")
    add = parser.add_argument_group("history", HISTORY).add_argument
    add("--from-prometheus", metavar="URL", type=url("http://prometheus:9090"), help="Prometheus")
    add("--start", metavar="TIME", help="2026-01-31T08:00:00Z, seconds since the epoch, or -24h")
    add("--end", metavar="TIME", default="now", help="the same, or now, which is the default")
    add("--step", metavar="TIME", default="15s", help="between samples: 15s, or the scrape interval where it is longer")
    for option, whose in (("--match", "all"), ("--match-gpu", "the GPUs'"), ("--match-engine", "the engine's")):
        text = f"choose among {whose} series; may be given again"
        add(option, metavar='LABEL="VALUE"', default=[], help=text)
    add("--bearer-token-file", metavar="FILE", type=FILE, help="a token for Prometheus")
    add("--ca-file", metavar="FILE", type=FILE, help="the authority behind its certificate, PEM")
