"""The command `load`."""

import os
from argparse import Namespace
from datetime import UTC, datetime
from typing import Final

from msgspec.structs import fields

from vllm_headroom.inputs import show_url
from vllm_headroom_tools.cli import Command
from vllm_headroom_tools.conclusion import Report
from vllm_headroom_tools.load.order import (
    LoadOrder,
    parse_base_url,
    parse_image_size,
    parse_lengths,
)
from vllm_headroom_tools.load.prompts import CompletionApi
from vllm_headroom_tools.options import (
    DURATION,
    FILE,
    FOLDER,
    GPUS,
    POSITIVE_NUMBER,
    SHARE,
    Parser,
    Value,
    page_url,
    whole_number,
)

PROBE_DIR: Final = "HEADROOM_PROBE_DIR"
"""The environment variable that configures the probe and provides the default for --probe-dir."""


def add_options(parser: Parser) -> None:
    """Add all options of `load` to the parser."""
    _add_server_options(parser)
    _add_request_options(parser)
    _add_pace_options(parser)
    _add_gate_options(parser)
    _add_sampling_options(parser)


def _add_server_options(parser: Parser) -> None:
    """Add the options for the server (address, API, model, credentials) and for the clients."""
    parser.add_argument(
        "--engine-url",
        dest="url",
        metavar="URL",
        type=Value(
            read=parse_base_url,
            accepts="an http or https URL without user, password and query",
            show=show_url,
        ),
        required=True,
        help="the server; there is no default",
    )
    parser.add_argument(
        "--api",
        metavar="NAME",
        type=Value(read=CompletionApi, accepts="completions or chat"),
        default="completions",
        help="how to ask: completions, the default, or chat",
    )
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="the model to ask; without it the first that the server lists",
    )
    parser.add_argument(
        "--engine-bearer-token-file",
        dest="bearer_token_file",
        metavar="FILE",
        type=FILE,
        help="a file with the token to send",
    )
    parser.add_argument(
        "--engine-ca-file",
        dest="ca_file",
        metavar="FILE",
        type=FILE,
        help="the certificates, in PEM, to trust for https",
    )
    parser.add_argument(
        "--concurrency",
        metavar="NUMBER",
        type=whole_number(1, 1_000_000),
        required=True,
        help="how many clients ask in the step of 100 %%",
    )


def _add_request_options(parser: Parser) -> None:
    """Add the options for a request's content: prompt, answer and image."""
    lengths = Value(read=parse_lengths, accepts="a number of tokens, or two such as 256..2048")
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        type=FILE,
        help=(
            "a dataset to take prompts from: ShareGPT's JSON, JSON lines with `prompt`, "
            "or a text a line"
        ),
    )
    parser.add_argument(
        "--prompt-tokens",
        metavar="LENGTHS",
        type=lengths,
        default="512",
        help="without it %(default)s",
    )
    parser.add_argument(
        "--output-tokens",
        metavar="LENGTHS",
        type=lengths,
        default="128",
        help="without it %(default)s",
    )
    parser.add_argument(
        "--shared-prefix",
        dest="shared_ratio",
        metavar="SHARE",
        type=SHARE,
        default="0",
        help="how much of each prompt is the same in all prompts",
    )
    parser.add_argument(
        "--image-size",
        metavar="PIXELS",
        type=Value(read=parse_image_size, accepts="width and height in pixels, such as 1280x720"),
        help="a new image in each prompt, of so many pixels, by --api chat",
    )


def _add_pace_options(parser: Parser) -> None:
    """Add the options for timing and for the number of requests."""
    for name, field, default, meaning in (
        ("--duration", "seconds", "60s", "how long each step lasts"),
        ("--grace", "grace_seconds", "30s", "how long requests may go on after their step"),
        ("--timeout", "timeout_seconds", "5m", "how long one request may take"),
    ):
        parser.add_argument(
            name,
            dest=field,
            metavar="TIME",
            type=DURATION,
            default=default,
            help=f"{meaning}; without it %(default)s",
        )
    parser.add_argument(
        "--max-requests",
        dest="most_requests",
        metavar="NUMBER",
        type=whole_number(),
        help="requests of all steps together, at most",
    )
    parser.add_argument(
        "--rate",
        dest="requests_per_second",
        metavar="NUMBER",
        type=POSITIVE_NUMBER,
        help=(
            "open loop: requests per second in the step of 100 %%, as a Poisson process; "
            "--concurrency then limits how many are open at once"
        ),
    )


def _add_gate_options(parser: Parser) -> None:
    """Add the options for latency limits.

    If a limit is exceeded, the verdict is "not good".
    """
    for name, field, meaning in (
        ("--max-ttft-p99", "most_first_token_seconds", "the time to the first token"),
        ("--max-latency-p99", "most_request_seconds", "the time of a whole request"),
    ):
        parser.add_argument(
            name,
            dest=field,
            metavar="TIME",
            type=DURATION,
            help=f"{meaning} that 99 %% of the requests may take, in the steps up to 100 %%",
        )


def _add_sampling_options(parser: Parser) -> None:
    """Add the options for sampling the engine during the load, and for the trace."""
    parser.add_argument(
        "--metrics-url",
        metavar="URL",
        type=page_url("http://127.0.0.1:8000"),
        help="the engine's page; without it /metrics of --engine-url",
    )
    parser.add_argument(
        "--gpus",
        metavar="GPUS",
        type=GPUS,
        default="auto",
        help="the engine's; without it those its processes use",
    )
    parser.add_argument(
        "--probe-dir",
        metavar="DIRECTORY",
        type=FOLDER,
        default=os.environ.get(PROBE_DIR) or None,
        help=f"where the probe inside vLLM writes; without it {PROBE_DIR}",
    )
    # The time is in UTC and without colons. Some file systems do not allow colons.
    time = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    parser.add_argument(
        "--trace",
        metavar="FILE",
        type=FILE,
        default=f"vllm-headroom-load-{time}.jsonl",
        help="the new file to record in; without it one named by the time",
    )


def read_order(options: Namespace) -> LoadOrder:
    """Build the order from the options; an image implies the chat API."""
    if options.image_size is not None:
        options.api = CompletionApi.CHAT
    return LoadOrder(**{field.name: getattr(options, field.name) for field in fields(LoadOrder)})


async def _run(options: Namespace) -> Report:
    """Put the load on the server and return the report."""
    # imported here so that --help does not have to load the sampler
    from vllm_headroom.daemon import logs  # noqa: PLC0415
    from vllm_headroom_tools.load.compose import run_load  # noqa: PLC0415

    # otherwise, the readers would log what the report already contains
    logs.configure("logfmt", "error")
    return await run_load(read_order(options))


COMMAND: Final[Command] = Command(
    usage="%(prog)s --engine-url URL --concurrency NUMBER [OPTION]...",
    description="""\
Puts a bounded load on a server that you name, and watches its memory meanwhile
as the daemon does: steps of 50, 75, 100 and 120 % of --concurrency, in which
each client asks again as soon as it has its answer. Run it beside vLLM, so that
it sees the GPUs and the processes.
""",
    epilog="""\
LENGTHS are a number of tokens, or two such as 256..2048: all lengths between
them, each doubling as likely as the next. Of prompts they are about so many:
words are counted as tokens, and the report has the server's own counts.

It ends with status 0 when requests were served, next to none failed and no
answer was out of memory; with 1 when one was, when more failed, when the engine
died or leaks, or when a step up to 100 % took longer than a --max- option
allows; with 2 when it cannot tell, was interrupted or cannot use its
options. Ctrl-C ends the step and reports what there is.

Example:
  vllm-headroom load --engine-url http://127.0.0.1:8000 --concurrency 64
  vllm-headroom load --engine-url http://127.0.0.1:8000 --concurrency 200 \\
    --api chat --prompt-tokens 256..8192 --output-tokens 64..512 \\
    --shared-prefix 30% --duration 5m --max-requests 20000 --json
""",
    options=add_options,
    run=_run,
)
