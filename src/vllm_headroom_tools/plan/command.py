"""The command `plan`."""

import argparse
import re
from argparse import Namespace
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Final

from msgspec.structs import fields, replace

from vllm_headroom.inputs import parse_number
from vllm_headroom.units import GIB, VLLM_NUMBER, parse_size, parse_vllm_number
from vllm_headroom_tools.cli import Command
from vllm_headroom_tools.conclusion import Report
from vllm_headroom_tools.options import (
    FILE,
    RATIO,
    Parser,
    Value,
    bounded,
    choice,
    name_option,
    size,
    tokens,
    whole_number,
)
from vllm_headroom_tools.plan.report import build_report, read_parts
from vllm_headroom_tools.sizing.estimate import estimate_memory
from vllm_headroom_tools.sizing.footprint import KV_DTYPES, ModelShape
from vllm_headroom_tools.sizing.model_config import (
    NAME,
    count_checkpoint_bytes,
    parse_model_config,
    read_model,
)
from vllm_headroom_tools.sizing.quantisation import DTYPE_BYTES, QUANTISED_BYTES
from vllm_headroom_tools.sizing.question import (
    BLOCK_TOKENS,
    LORA_RANK,
    TYPICAL_TOKENS,
    UTILIZATION,
    Question,
    choose_defaults,
    find_problem,
)
from vllm_headroom_tools.trace import BadInput

SIZES: Final = (
    ("layers", "num_hidden_layers", "hidden layers"),
    ("kv_heads", "num_key_value_heads", "key-value heads"),
    ("head_size", "head_dim", "values of a head"),
    ("hidden_size", "hidden_size", "values of a token between two layers"),
    ("vocabulary", "vocab_size", "tokens of the vocabulary"),
)
"""Options for a model's size, the fields of its configuration that they replace, and their meaning."""

NEEDED_SIZES: Final = ("layers", "kv_heads", "head_size")
"""What the KV cache's size cannot be computed without."""


def build_question(given: argparse.Namespace) -> Question:
    """Build the question from the options; raises BadInput where that is not possible."""
    shape = _read_shape(given)
    if isinstance(shape, str):
        raise BadInput(shape)
    draft = None if given.draft_model_config is None else read_model(given.draft_model_config)
    if isinstance(draft, str):
        raise BadInput(f"{given.draft_model_config}: {draft}")
    checkpoint, parameters = _read_weights(given, shape)
    sequences, tokens = choose_defaults(given.gpu_memory_bytes)
    sequences = given.max_num_seqs or sequences
    values = {
        each.name: getattr(given, each.name)
        for each in fields(Question)
        if hasattr(given, each.name)
    }
    values |= {
        "shape": _apply_dtype(
            shape, given.dtype, given.quantization, language_model_only=given.language_model_only
        ),
        "checkpoint_bytes": checkpoint,
        "parameters": parameters,
        "max_model_len": shape.max_model_len
        if given.max_model_len in (AUTO, None)
        else given.max_model_len,
        "max_num_seqs": sequences,
        "max_num_batched_tokens": given.max_num_batched_tokens or max(tokens, sequences),
        "max_loras": given.max_loras if given.enable_lora else 0,
        "cpu_offload_bytes": given.cpu_offload_gb * GIB,
        "kv_offloading_bytes": given.kv_offloading_size * GIB,
        "mm_processor_cache_bytes": given.mm_processor_cache_gb * GIB,
        "draft": draft,
    }
    asked = Question(**values)
    if problem := find_problem(asked):
        raise BadInput(problem)
    if given.max_model_len == AUTO:
        return replace(
            asked, max_model_len=estimate_memory(asked).find_longest(1) or shape.max_model_len
        )
    return asked


def _read_shape(given: argparse.Namespace) -> ModelShape | str:
    overrides = {
        field: getattr(given, name) for name, field, _ in SIZES if getattr(given, name) is not None
    }
    if given.kv_heads is not None:
        overrides["multi_query"] = False
    if given.model_config is not None:
        shape = read_model(given.model_config, overrides)
        if isinstance(shape, str):
            return f"{given.model_config}: {shape}"
        is_complete = all(getattr(given, name) is not None for name in NEEDED_SIZES)
        return replace(shape, unknown_type=None) if is_complete else shape
    missing = [name_option(name) for name in NEEDED_SIZES if getattr(given, name) is None]
    if missing:
        return f"needs --model-config, or without it {', '.join(map(name_option, NEEDED_SIZES))}; missing: {', '.join(missing)}"
    return parse_model_config("{}", overrides)


def _read_weights(given: argparse.Namespace, shape: ModelShape) -> tuple[int | None, int | None]:
    """Return the bytes of the weights and the number of parameters, as far as they are known without counting.

    Weights that are quantised in the file are served as they lie there; others in the dtype of the options.
    """
    if given.parameters is not None or given.model_config is None:
        return None, given.parameters
    path: Path = given.model_config
    found = count_checkpoint_bytes(path if path.is_dir() else path.parent)
    if found is None:
        return None, None
    if shape.quantisation is None:
        return None, int(found / shape.stored_bytes)
    return (found, None) if given.quantization is None else (None, None)


def _apply_dtype(
    shape: ModelShape, dtype: str, quantization: str | None, *, language_model_only: bool
) -> ModelShape:
    """Return the shape as it is served: in the dtype and with the quantisation of the options, if any."""
    if language_model_only:
        shape = replace(shape, encoder=None)
    if size := DTYPE_BYTES.get(dtype):
        kv_size = size if shape.kv_dtype_bytes == shape.dtype_bytes else shape.kv_dtype_bytes
        weight = size if shape.quantisation is None else shape.weight_bytes_per_parameter
        shape = replace(
            shape, dtype_bytes=size, kv_dtype_bytes=kv_size, weight_bytes_per_parameter=weight
        )
    return (
        shape
        if quantization is None
        else shape.apply_quantisation(quantization, QUANTISED_BYTES[quantization])
    )


MAX_WHOLE_NUMBER: Final = 2**24
COUNT: Final = whole_number(1, MAX_WHOLE_NUMBER)
TOKENS: Final = tokens(MAX_WHOLE_NUMBER)
AUTO: Final = -1
LENGTH: Final = Value(
    read=lambda text: AUTO if text in {"auto", str(AUTO)} else TOKENS.read(text),
    accepts=f"{TOKENS.accepts}, or auto",
)
PARAMETERS: Final = re.compile(r"(\d+|\d*\.\d+)([KMBT]?)", re.IGNORECASE | re.ASCII)
THOUSANDS: Final = {"": 0, "K": 1, "M": 2, "B": 3, "T": 4}
MOST_PARAMETERS: Final = 10**14


def add_options(parser: Parser) -> None:
    """Add the options to the parser."""
    card = "of one card in all"
    parser.add_argument(
        "--gpu-memory", dest="gpu_memory_bytes", metavar="SIZE", type=size("80GiB"), help=card
    )
    host = "of the host, or vLLM's container's limit"
    parser.add_argument(
        "--host-memory", dest="host_memory_bytes", metavar="SIZE", type=size("256GiB"), help=host
    )
    unified = (
        "the card works on its machine's memory, which --gpu-memory is then (GB10, Thor, Jetson)"
    )
    parser.add_argument("--unified-memory", action="store_true", help=unified)
    parser.add_argument(
        "--typical-len",
        metavar="TOKENS",
        type=TOKENS,
        default=TYPICAL_TOKENS,
        help="default %(default)s",
    )
    probe = "a file of the probe in a worker that serves this model: what it measured, beside what is planned"
    parser.add_argument("--probe", metavar="FILE", type=FILE, help=probe)
    group = parser.add_argument_group("the model")
    add = group.add_argument
    add(
        "--model-config",
        metavar="PATH",
        type=FILE,
        help=f"its {NAME}, or the folder of it and the weights",
    )
    add(
        "--draft-model-config",
        metavar="PATH",
        type=FILE,
        help="the same of the model that speculates",
    )
    for name, _, meaning in SIZES:
        add(name_option(name), metavar="N", type=COUNT, help=f"{meaning}, instead of the file's")
    parameters = Value(
        read=_parse_parameters, accepts="a number of parameters, such as 70600000000 or 70.6B"
    )
    add(
        "--parameters", metavar="N", type=parameters, help="such as 70.6B, instead of counting them"
    )
    dtypes = ("auto", "half", "float16", "bfloat16", "float", "float32")
    _add_choice(
        group, ("--dtype",), dtypes, "of what is not quantised; auto is 16 bits", default="auto"
    )
    _add_choice(
        group,
        ("-q", "--quantization"),
        sorted(QUANTISED_BYTES),
        "of the weights, instead of the file's",
    )
    _add_engine(parser.add_argument_group("vLLM's options, by its own names"))


def _add_engine(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    share = f"default {UTILIZATION}, vLLM's since 0.20; before, 0.9"
    add("--gpu-memory-utilization", metavar="RATIO", type=RATIO, default=UTILIZATION, help=share)
    cache = Value(
        read=lambda text: (
            parse_vllm_number(text) if VLLM_NUMBER.fullmatch(text) else parse_size(text)
        ),
        accepts="a size such as 20GiB, or as vLLM takes it, 20G",
    )
    add(
        "--kv-cache-memory-bytes",
        metavar="SIZE",
        type=cache,
        help="of the KV cache, instead of a ratio of the card",
    )
    _add_choice(
        group,
        ("--kv-cache-dtype",),
        ("auto", *KV_DTYPES),
        "auto is the model's own",
        default="auto",
    )
    add("-tp", "--tensor-parallel-size", metavar="N", type=COUNT, default=1, help="default 1")
    add("-pp", "--pipeline-parallel-size", metavar="N", type=COUNT, default=1, help="default 1")
    add(
        "-dp",
        "--data-parallel-size",
        metavar="N",
        type=COUNT,
        default=1,
        help="engines, which share the experts",
    )
    offload = Value(read=bounded(parse_number, 0, 2**20), accepts="a number of GiB, such as 10")
    add(
        "--enable-expert-parallel",
        action="store_true",
        help="each GPU has some experts whole: less room for their adapters",
    )
    add(
        "--cpu-offload-gb",
        metavar="GIB",
        type=offload,
        default=0.0,
        help="of each GPU's weights, on the host",
    )
    tier = "a tier of each engine's KV cache, on the host"
    add("--kv-offloading-size", metavar="GIB", type=offload, default=0.0, help=tier)
    images = "of processed images in each server and core, default 4"
    add("--mm-processor-cache-gb", metavar="GIB", type=offload, default=4.0, help=images)
    add("--enable-lora", action="store_true", help="room for adapters")
    add("--max-loras", metavar="N", type=COUNT, default=1, help="default 1")
    add("--max-lora-rank", metavar="N", type=COUNT, default=LORA_RANK, help=f"default {LORA_RANK}")
    add("--language-model-only", action="store_true", help="no image or audio encoder")
    longest = "of prompt and answer, auto the most that fit; default the model's limit"
    add("--max-model-len", metavar="TOKENS", type=LENGTH, help=longest)
    add(
        "--max-num-seqs",
        metavar="N",
        type=COUNT,
        help="default 256; from 70 GiB 1024, but for an A100",
    )
    batched = "default 2048; from 70 GiB 8192, but for an A100; from 160 GiB 16384"
    add("--max-num-batched-tokens", metavar="TOKENS", type=TOKENS, help=batched)
    add(
        "--block-size",
        metavar="TOKENS",
        type=TOKENS,
        default=BLOCK_TOKENS,
        help=f"default {BLOCK_TOKENS}",
    )
    add("--enforce-eager", action="store_true", help="without CUDA graphs")


def _add_choice(
    group: argparse._ArgumentGroup,
    flags: Sequence[str],
    names: Sequence[str],
    meaning: str,
    default: str | None = None,
) -> None:
    kind = choice(names)
    group.add_argument(
        *flags, metavar="NAME", type=kind, default=default, help=f"{meaning}: {kind.accepts}"
    )


def _parse_parameters(text: str) -> int:
    found = PARAMETERS.fullmatch(text)
    number = (
        int(Decimal(found[1]) * 1000 ** THOUSANDS[found[2].upper()])
        if found and len(text) <= len("x" * 20)
        else 0
    )
    if not 1 <= number <= MOST_PARAMETERS:
        raise ValueError
    return number


def _run(given: Namespace) -> Report:
    measured = None if given.probe is None else read_parts(Path(given.probe))
    return build_report(estimate_memory(build_question(given)), measured)


COMMAND: Final[Command] = Command(
    usage="%(prog)s --model-config PATH --gpu-memory SIZE [OPTION]...",
    description="""\
Will it fit? Computes from a model's configuration what vLLM needs of each GPU,
how many tokens and sequences its KV cache will hold, and what to change where
that is too little. It needs no GPU and no vLLM.
""",
    epilog="""\
Figures are of each GPU. It ends with status 0 when vLLM would start, with 1
when it would not, and with 2 when that is not known: bad input, something is
missing, or too close to call.

Example:
  vllm-headroom plan --model-config Llama-3.1-70B/config.json \\
    --gpu-memory 80GiB -tp 4 --max-model-len 32K --max-num-seqs 64
  vllm-headroom plan --layers 80 --kv-heads 8 --head-size 128 \\
    --hidden-size 8192 --vocabulary 128256 --parameters 70.6B \\
    --gpu-memory 141GiB
""",
    options=add_options,
    run=_run,
)
