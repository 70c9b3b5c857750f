"""The command `load`."""

import os
from argparse import Namespace
from datetime import UTC, datetime
from typing import Final

from msgspec.structs import fields

from vllm_headroom.inputs import show_url
from vllm_headroom_tools.cli import Command
from vllm_headroom_tools.conclusion import Report
from vllm_headroom_tools.load.target import (
    CompletionApi,
    LoadOrder,
    parse_base_url,
    parse_image_size,
    parse_lengths,
)
from vllm_headroom_tools.options import (
    DURATION,
    FILE,
    FOLDER,
    GPUS,
    NUMBER,
    SHARE,
    Parser,
    Value,
    page_url,
    whole_number,
)

PROBE_DIR: Final = "HEADROOM_PROBE_DIR"


def add_options(parser: Parser) -> None:
    """Add the options to the parser."""
    add = parser.add_argument
    base = Value(
        read=parse_base_url,
        accepts="an http or https URL without user, password and query",
        show=show_url,
    )
    add(
        "--engine-url",
        dest="url",
        metavar="URL",
        type=base,
        required=True,
        help="the server; there is no default",
    )
    add(
        "--api",
        metavar="NAME",
        type=Value(read=CompletionApi, accepts="completions or chat"),
        default="completions",
        help="how to ask: completions, the default, or chat",
    )
    add(
        "--model",
        metavar="NAME",
        help="the model to ask; without it the first that the server lists",
    )
    token, authorities = (
        "a file with the token to send",
        "the certificates, in PEM, to trust for https",
    )
    add(
        "--engine-bearer-token-file",
        dest="bearer_token_file",
        metavar="FILE",
        type=FILE,
        help=token,
    )
    add("--engine-ca-file", dest="ca_file", metavar="FILE", type=FILE, help=authorities)
    add(
        "--concurrency",
        metavar="NUMBER",
        type=whole_number(1, 1_000_000),
        required=True,
        help="clients in the step of 100 %%",
    )
    of_tokens = Value(read=parse_lengths, accepts="a number of tokens, or two such as 256..2048")
    prompts = "a dataset to take prompts from: ShareGPT's JSON, JSON lines with `prompt`, or a text a line"
    add("--prompts", metavar="FILE", type=FILE, help=prompts)
    add(
        "--prompt-tokens",
        metavar="LENGTHS",
        type=of_tokens,
        default="512",
        help="without it %(default)s",
    )
    add(
        "--output-tokens",
        metavar="LENGTHS",
        type=of_tokens,
        default="128",
        help="without it %(default)s",
    )
    shared = "of each prompt, the same in all"
    add(
        "--shared-prefix",
        dest="shared_ratio",
        metavar="SHARE",
        type=SHARE,
        default="0",
        help=shared,
    )
    pixels = Value(read=parse_image_size, accepts="width and height in pixels, such as 1280x720")
    image = "a new image in each prompt, of so many pixels, by --api chat"
    add("--image-size", metavar="PIXELS", type=pixels, help=image)
    for name, field, default, of in (
        ("--duration", "seconds", "60s", "of each step"),
        ("--grace", "grace_seconds", "30s", "for what is open then"),
        ("--timeout", "timeout_seconds", "5m", "of one request"),
    ):
        add(
            name,
            dest=field,
            metavar="TIME",
            type=DURATION,
            default=default,
            help=f"{of}; without it %(default)s",
        )
    most = "requests of all steps together, at most"
    add("--max-requests", dest="most_requests", metavar="NUMBER", type=whole_number(), help=most)
    rate = "open loop: requests a second in the step of 100 %%, by Poisson; --concurrency are then the most at once"
    add("--rate", dest="requests_per_second", metavar="NUMBER", type=NUMBER, help=rate)
    page = page_url("http://127.0.0.1:8000")
    when = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    add(
        "--metrics-url",
        metavar="URL",
        type=page,
        help="the engine's page; without it /metrics of --engine-url",
    )
    gpus = "the engine's; without it those its processes use"
    add("--gpus", metavar="GPUS", type=GPUS, default="auto", help=gpus)
    probe, usual = (
        f"where the probe inside vLLM writes; without it {PROBE_DIR}",
        os.environ.get(PROBE_DIR),
    )
    add("--probe-dir", metavar="DIRECTORY", type=FOLDER, default=usual or None, help=probe)
    trace = "the new file to record in; without it one named by the time"
    add(
        "--trace", metavar="FILE", type=FILE, default=f"vllm-headroom-load-{when}.jsonl", help=trace
    )


def read_order(given: Namespace) -> LoadOrder:
    """Build the order from the options."""
    if given.image_size is not None:
        given.api = CompletionApi.CHAT
    return LoadOrder(**{each.name: getattr(given, each.name) for each in fields(LoadOrder)})


async def _run(given: Namespace) -> Report:
    from vllm_headroom.daemon import logs  # noqa: PLC0415 - the same
    from vllm_headroom_tools.load.compose import run_load  # noqa: PLC0415 - --help need not wait for the sampler

    logs.configure("logfmt", "error")  # the readers log what the report has in full
    return await run_load(read_order(given))


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
died or leaks; with 2 when it cannot tell, was interrupted or cannot use its
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
