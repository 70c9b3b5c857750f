"""The command `plan`."""

from __future__ import annotations

import argparse
import re
from argparse import Namespace
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Final

from vllm_headroom.commands.cli import Command
from vllm_headroom.commands.plan.document import Planned, parts_of, planned_document, planned_text
from vllm_headroom.commands.plan.request import SIZES, question
from vllm_headroom.config.kinds import FILE, RATIO, Value, bounded, choice, size, tokens, whole
from vllm_headroom.config.options import Parser
from vllm_headroom.sizing.estimate import estimate, fits
from vllm_headroom.sizing.footprint import KV_DTYPES
from vllm_headroom.sizing.model_config import NAME
from vllm_headroom.sizing.quantisation import QUANTISED_BYTES
from vllm_headroom.sizing.question import BLOCK_TOKENS, LORA_RANK, TYPICAL_TOKENS, UTILIZATION
from vllm_headroom.trace.errors import BadInput
from vllm_headroom.units import VLLM_NUMBER, size_bytes, vllm_number

DESCRIPTION: Final = """\
Will it fit? Tells from a model's configuration what vLLM will need of each GPU,
how many tokens and sequences its KV cache will hold, and what to change where
that is too little. It needs no GPU and no vLLM.
"""

EXAMPLES: Final = """\
Figures are of each GPU. It ends with status 0 when vLLM would start, with 1
when it would not, and with 2 when that cannot be told: bad input, something is
not known, or too close to call.

Example:
  vllm-headroom plan --model-config Llama-3.1-70B/config.json \\
    --gpu-memory 80GiB -tp 4 --max-model-len 32K --max-num-seqs 64
  vllm-headroom plan --layers 80 --kv-heads 8 --head-size 128 \\
    --hidden-size 8192 --vocabulary 128256 --parameters 70.6B \\
    --gpu-memory 141GiB
"""

MOST: Final = 2**24
COUNT: Final = whole(1, MOST)
TOKENS: Final = tokens(MOST)
DTYPES: Final = ("auto", "half", "float16", "bfloat16", "float", "float32")
PARAMETERS: Final = re.compile(r"(\d+|\d*\.\d+)([KMBT]?)", re.IGNORECASE | re.ASCII)
THOUSANDS: Final = {"": 0, "K": 1, "M": 2, "B": 3, "T": 4}
MOST_PARAMETERS: Final = 10**14


MOST_GIBIBYTES: Final = 2**20


def options(parser: Parser) -> None:
    """Add the options to the parser."""
    card = "of one card in all"
    parser.add_argument("--gpu-memory", dest="gpu_memory_bytes", metavar="SIZE", type=size("80GiB"), help=card)
    unified = "the card works on its machine's memory, which --gpu-memory is then (GB10, Thor, Jetson)"
    parser.add_argument("--unified-memory", action="store_true", help=unified)
    parser.add_argument(
        "--typical-len", metavar="TOKENS", type=TOKENS, default=TYPICAL_TOKENS, help="default %(default)s"
    )
    probe = "a file of the probe in a worker that serves this model: what it measured, beside what is planned"
    parser.add_argument("--probe", metavar="FILE", type=FILE, help=probe)
    _model(parser.add_argument_group("the model"))
    _engine(parser.add_argument_group("what vLLM is told, by its own names"))


def _model(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--model-config", metavar="PATH", type=FILE, help=f"its {NAME}, or the folder of it and the weights")
    add("--draft-model-config", metavar="PATH", type=FILE, help="the same of the model that speculates")
    for name, _, meaning in SIZES:
        add(f"--{name.replace('_', '-')}", metavar="N", type=COUNT, help=f"{meaning}, instead of the file's")
    parameters = Value(read=_parameters, accepts="a number of parameters, such as 70600000000 or 70.6B")
    add("--parameters", metavar="N", type=parameters, help="such as 70.6B, instead of counting them")
    _choice(group, ("--dtype",), DTYPES, "of what is not quantised; auto is 16 bits", default="auto")
    _choice(group, ("-q", "--quantization"), sorted(QUANTISED_BYTES), "of the weights, instead of the file's")


def _engine(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    share = f"default {UTILIZATION}, vLLM's since 0.20; before, 0.9"
    add("--gpu-memory-utilization", metavar="RATIO", type=RATIO, default=UTILIZATION, help=share)
    cache = Value(
        read=lambda text: vllm_number(text) if VLLM_NUMBER.fullmatch(text) else size_bytes(text),
        accepts="a size such as 20GiB, or as vLLM takes it, 20G",
    )
    add("--kv-cache-memory-bytes", metavar="SIZE", type=cache, help="of the KV cache, instead of a ratio of the card")
    _choice(group, ("--kv-cache-dtype",), ("auto", *KV_DTYPES), "auto is the model's own", default="auto")
    add("-tp", "--tensor-parallel-size", metavar="N", type=COUNT, default=1, help="default 1")
    add("-pp", "--pipeline-parallel-size", metavar="N", type=COUNT, default=1, help="default 1")
    add("-dp", "--data-parallel-size", metavar="N", type=COUNT, default=1, help="engines, which share the experts")
    offload = Value(read=bounded(float, 0, MOST_GIBIBYTES), accepts="a number of GiB, such as 10")
    add(
        "--enable-expert-parallel",
        action="store_true",
        help="each GPU has some experts whole: less room for their adapters",
    )
    add("--cpu-offload-gb", metavar="GIB", type=offload, default=0.0, help="of each GPU's weights, on the host")
    add("--enable-lora", action="store_true", help="room for adapters")
    add("--max-loras", metavar="N", type=COUNT, default=1, help="default 1")
    add("--max-lora-rank", metavar="N", type=COUNT, default=LORA_RANK, help=f"default {LORA_RANK}")
    add("--language-model-only", action="store_true", help="no image or audio encoder")
    add("--max-model-len", metavar="TOKENS", type=TOKENS, help="of prompt and answer; default the model's limit")
    add("--max-num-seqs", metavar="N", type=COUNT, help="default 256; from 70 GiB 1024, but for an A100")
    batched = "default 2048; from 70 GiB 8192, but for an A100; from 160 GiB 16384"
    add("--max-num-batched-tokens", metavar="TOKENS", type=TOKENS, help=batched)
    add("--block-size", metavar="TOKENS", type=TOKENS, default=BLOCK_TOKENS, help=f"default {BLOCK_TOKENS}")
    add("--enforce-eager", action="store_true", help="without CUDA graphs")


def _choice(
    group: argparse._ArgumentGroup,
    flags: Sequence[str],
    names: Sequence[str],
    meaning: str,
    default: str | None = None,
) -> None:
    kind = choice(names)
    group.add_argument(*flags, metavar="NAME", type=kind, default=default, help=f"{meaning}: {kind.accepts}")


def _parameters(text: str) -> int:
    found = PARAMETERS.fullmatch(text)
    number = int(Decimal(found[1]) * 1000 ** THOUSANDS[found[2].upper()]) if found and len(text) <= len("x" * 20) else 0
    if not 1 <= number <= MOST_PARAMETERS:
        raise ValueError
    return number


STATUS: Final = {True: 0, False: 1, None: 2}


def _run(given: Namespace) -> Planned:
    found = estimate(question(given))
    if found is None:
        raise BadInput("the KV cache's dtype is not known here")
    return Planned(estimate=found, measured=None if given.probe is None else parts_of(Path(given.probe)))


COMMAND: Final[Command[Planned]] = Command(
    usage="%(prog)s --model-config PATH --gpu-memory SIZE [OPTION]...",
    description=DESCRIPTION,
    epilog=EXAMPLES,
    options=options,
    run=_run,
    text=planned_text,
    document=planned_document,
    status=lambda found: STATUS[fits(found.estimate)],
)
