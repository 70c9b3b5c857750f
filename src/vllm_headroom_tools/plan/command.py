"""The command `plan`."""

import argparse
import json
import re
from argparse import Namespace
from collections.abc import Coroutine, Sequence
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import fields, replace

from vllm_headroom.inputs import parse_number, redact_url
from vllm_headroom.units import (
    GIB,
    PERCENT,
    VLLM_NUMBER,
    RefusedError,
    parse_share,
    parse_size,
    parse_vllm_number,
)
from vllm_headroom_tools.bad_input import BadInput
from vllm_headroom_tools.cli import Command
from vllm_headroom_tools.conclusion import Report
from vllm_headroom_tools.engine_choice import ENGINE_HELP, ENGINE_METAVAR
from vllm_headroom_tools.engine_log import read_engine_log
from vllm_headroom_tools.options import (
    FILE,
    LOG,
    RATIO,
    SMALLEST_FLOAT,
    TEXT,
    TRACE,
    BadOptions,
    Parser,
    Value,
    bounded,
    choice,
    name_option,
    size_value,
    tokens,
    url,
    whole_number,
)
from vllm_headroom_tools.plan.engine_log import apply_log_options, choose_start, measure_start
from vllm_headroom_tools.plan.report import build_report, read_worker_parts
from vllm_headroom_tools.plan.sizes import judge_sizes
from vllm_headroom_tools.plan.sizes_report import build_sizes_report
from vllm_headroom_tools.plan.traffic import (
    Traffic,
    apply_traffic_options,
    read_document_traffic,
    read_trace_traffic,
)
from vllm_headroom_tools.plan.vllm_options import (
    Speculation,
    has_no_images,
    read_speculation,
)
from vllm_headroom_tools.serve_line import ENVIRONMENT, SWITCHES, read_serve_line
from vllm_headroom_tools.sizing.cards import parse_gpus_by_name
from vllm_headroom_tools.sizing.drafts import (
    DRAFT_MODEL,
    add_assumed_head,
    build_head,
    name_head_method,
)
from vllm_headroom_tools.sizing.estimate import estimate_memory
from vllm_headroom_tools.sizing.footprint import KV_DTYPES, PACKED_KV_DTYPES, ModelShape
from vllm_headroom_tools.sizing.model_config import (
    CONFIG_FILE,
    count_checkpoint_bytes,
    has_config_file,
    parse_model_config,
    read_model,
)
from vllm_headroom_tools.sizing.public_models import find_public_model
from vllm_headroom_tools.sizing.quantisation import (
    CHECKPOINT_METHODS,
    DTYPE_BYTES,
    QUANTISED_BYTES,
    is_same_method,
)
from vllm_headroom_tools.sizing.question import (
    DEFAULT_BLOCK_TOKENS,
    DEFAULT_LORA_RANK,
    DEFAULT_UTILIZATION,
    SMALL_CARD,
    TYPICAL_TOKENS,
    Question,
    choose_defaults,
    find_problem,
)
from vllm_headroom_tools.sizing.releases import (
    NEWEST_MINOR,
    NEWEST_RELEASE,
    OLDEST_MINOR,
    Release,
    apply_environment,
    parse_release,
)
from vllm_headroom_tools.vllm_options import VLLM_RELEASES, list_vllm_options

SIZE_OPTIONS: Final = (
    ("layers", "num_hidden_layers", "hidden layers"),
    ("kv_heads", "num_key_value_heads", "key-value heads"),
    ("head_size", "head_dim", "values of a head"),
    ("hidden_size", "hidden_size", "values of a token between two layers"),
    ("vocabulary", "vocab_size", "tokens of the vocabulary"),
)
"""The options that set a model's sizes. Each entry has an option, the configuration field it
overrides, and its meaning.
"""

NEEDED_SIZES: Final = ("layers", "kv_heads", "head_size")
"""The size options that determine the KV cache's size. They are required if there is no model
configuration.
"""


def build_question(options: Namespace) -> Question:
    """Build the question from the options.

    Raises BadInput if the model cannot be read, or if vLLM would reject a value.
    """
    shape = _read_shape(options)
    if isinstance(shape, str):
        raise BadInput(shape)
    options.release = apply_environment(options.release, options.vllm_env)
    shape = _set_longest(shape, options)
    speculation = read_speculation(options)
    _check_speculation(speculation, options.release)
    checkpoint_bytes, parameters = _read_weights(options, shape)
    # Read the weights first, because a checkpoint's size already includes the speculative layers.
    drafting = _add_drafts(shape, speculation, options)
    _apply_gpu_choice(options)
    defaults = choose_defaults(options.gpu_memory_bytes, options.release)
    if options.gpu is not None and options.gpu.card.has_small_defaults:
        defaults = SMALL_CARD
    max_num_batched_tokens = options.max_num_batched_tokens
    max_num_seqs = options.max_num_seqs
    if max_num_seqs is None:
        # A given batch size limits the default number of sequences, as in vLLM 0.33
        # (engine/arg_utils.py).
        batch_limit = max_num_batched_tokens or defaults.max_num_seqs
        max_num_seqs = min(defaults.max_num_seqs, batch_limit)
    if max_num_batched_tokens is None:
        # Our choice: if only max_num_seqs is given, assume one token per request in a batch.
        max_num_batched_tokens = max(defaults.max_num_batched_tokens, max_num_seqs)
    max_model_len = options.max_model_len
    if max_model_len in (AUTO_LENGTH, None):
        # Without the option, vLLM uses the model's own limit.
        max_model_len = shape.max_model_len
    utilization = options.gpu_memory_utilization
    if utilization is None:
        utilization = options.release.utilization
    # Most options have the name of a field of the question. The other values are computed above.
    values = {
        field.name: getattr(options, field.name)
        for field in fields(Question)
        if hasattr(options, field.name)
    }
    values |= {
        "shape": _apply_options(drafting.shape, options),
        "checkpoint_bytes": checkpoint_bytes,
        "parameters": parameters,
        "gpu_memory_utilization": utilization,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_loras": options.max_loras if options.enable_lora else 0,
        "cpu_offload_bytes": options.cpu_offload_gb * GIB,
        "kv_offloading_bytes": options.kv_offloading_size * GIB,
        "mm_processor_cache_bytes": options.mm_processor_cache_gb * GIB,
        "card_name": None if options.gpu is None else options.gpu.card.name,
        "card_count": None if options.gpu is None else options.gpu.count,
        "draft": drafting.draft,
        "enable_prefix_caching": _read_prefix_caching(options),
        "assumed_draft": drafting.assumed_name,
        "has_speculation": speculation.tokens > 0,
        "speculation_method": speculation.method,
        "has_unknown_draft": drafting.is_unknown,
        "has_whole_encoder": options.mm_encoder_tp_mode == "data",
    }
    question = Question(**values)
    problem = find_problem(question)
    if problem is not None:
        raise BadInput(problem)
    if options.max_model_len == AUTO_LENGTH:
        # As in vLLM, the longest sequence is limited by the cache and by the model.
        longest = estimate_memory(question).find_longest(1)
        return replace(question, max_model_len=longest or shape.max_model_len)
    return question


def _read_prefix_caching(options: Namespace) -> bool | None:
    """Return whether prefix caching is enabled, or None if no option sets it."""
    if options.no_enable_prefix_caching:
        return False
    return True if options.enable_prefix_caching else None


def _apply_gpu_choice(options: Namespace) -> None:
    """Set the options implied by --gpu, except those that the operator typed."""
    if options.gpu is None:
        return
    if options.gpu_memory_bytes is None:
        options.gpu_memory_bytes = options.gpu.card.memory_bytes
    options.unified_memory = options.unified_memory or options.gpu.card.has_unified_memory
    is_spread = (
        options.tensor_parallel_size * options.pipeline_parallel_size * options.data_parallel_size
    ) > 1
    # With a whole vLLM command line, the default is one GPU, as in vLLM. Without a command line,
    # all GPUs named by --gpu are used.
    if options.gpu.count is not None and not is_spread and not options.has_line:
        options.tensor_parallel_size = options.gpu.count


def _check_speculation(speculation: Speculation, release: Release) -> None:
    """Raise BadInput if vLLM would reject the speculation method."""
    method = speculation.method
    if method is None:
        return
    if method not in release.speculation_methods:
        methods = ", ".join(sorted(release.speculation_methods))
        raise BadInput(
            f"--speculative-config: vLLM {release.version} has no method {method!r}, but {methods}"
        )
    if speculation.needs_draft:
        raise BadInput(f"--speculative-config: the method {method} needs a model")


def _set_longest(shape: ModelShape, options: Namespace) -> ModelShape:
    """Return the shape with the maximum length that this vLLM release allows for the model."""
    longest = shape.max_model_len
    if options.release.has_multiplied_yarn and shape.yarn_length is not None:
        longest = shape.yarn_length
    length = options.max_model_len
    is_longer = None not in (length, longest) and length > longest
    if is_longer and options.vllm_env.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN"):
        longest = length
    return replace(shape, max_model_len=longest)


class Drafting(Struct, frozen=True, kw_only=True):
    """A model and the parts that generate its drafts."""

    # The model's shape, including its own draft heads and any assumed draft head.
    shape: ModelShape
    # The draft model, if its sizes are known.
    draft: ModelShape | None = None
    # The name of a draft head that is included even though its configuration is unknown.
    assumed_name: str | None = None
    # Whether there is a draft model whose memory cannot be counted.
    is_unknown: bool = False


def _add_drafts(shape: ModelShape, speculation: Speculation, options: Namespace) -> Drafting:
    """Return the model with the parts that generate drafts, if there are any."""
    if speculation.has_own_heads:
        shape = shape.add_speculation(speculation.tokens)
    name = speculation.draft_name
    method = speculation.method or DRAFT_MODEL
    draft = _read_draft(options, name)
    if draft is not None:
        draft = build_head(draft, name_head_method(draft, method), shape)
        return Drafting(shape=shape, draft=draft)
    if name is None:
        return Drafting(shape=shape)
    # If the configuration of a head is unknown, assume an upper bound for its size. Other drafts
    # stay unknown.
    shape_with_head = add_assumed_head(shape, method, speculation.tokens)
    if shape_with_head is None:
        return Drafting(shape=shape, is_unknown=True)
    return Drafting(shape=shape_with_head, assumed_name=name)


def _read_draft(options: Namespace, name: str | None) -> ModelShape | None:
    """Return the draft model from a configuration, a folder or a public name.

    Returns None if there is no draft model, or if its sizes are unknown. Raises BadInput if its
    configuration cannot be read.
    """
    if options.draft_model_config is not None:
        draft = read_model(options.draft_model_config)
        if isinstance(draft, str):
            raise BadInput(f"{options.draft_model_config}: {draft}")
        return draft
    if name is None:
        return None
    if has_config_file(name):
        found_draft = read_model(Path(name))
    else:
        config = find_public_model(name)
        if isinstance(config, str):
            return None
        found_draft = parse_model_config(json.dumps(config))
    return None if isinstance(found_draft, str) else found_draft


def _read_shape(options: Namespace) -> ModelShape | str:
    """Return the shape from the model's file and options, or the problem as text."""
    overrides = _read_overrides(options)
    if options.model is not None and options.model_config is None:
        if has_config_file(options.model):
            options.model_config = Path(options.model)
        elif any(getattr(options, name) is None for name in NEEDED_SIZES):
            return _read_public_model(options.model, overrides)
    if options.kv_heads is not None:
        # The given number of heads takes precedence even if the file turns on multi-query
        # attention.
        overrides["multi_query"] = False
    missing_sizes = [name for name in NEEDED_SIZES if getattr(options, name) is None]
    if options.model_config is not None:
        shape = read_model(options.model_config, overrides)
        if isinstance(shape, str):
            return f"{options.model_config}: {shape}"
        # If all sizes are given, an unknown model type is acceptable.
        return shape if missing_sizes else replace(shape, unknown_type=None)
    if missing_sizes:
        needed = ", ".join(map(name_option, NEEDED_SIZES))
        problem = f"needs --model or --model-config, or without them {needed}"
        if len(missing_sizes) == len(NEEDED_SIZES):
            return problem
        missing = ", ".join(map(name_option, missing_sizes))
        return f"{problem}; missing: {missing}"
    # Without a file, the options describe a standard decoder, in which each layer keeps every
    # token.
    return parse_model_config("{}", overrides)


def _read_overrides(options: Namespace) -> dict[str, Any]:
    """Return the configuration fields that options override, by their names in the file."""
    overrides: dict[str, Any] = dict(options.hf_overrides or {})
    for name, field, _ in SIZE_OPTIONS:
        size = getattr(options, name)
        if size is not None:
            overrides[field] = size
    return overrides


def _read_public_model(name: str, overrides: dict[str, Any]) -> ModelShape | str:
    """Return the shape of the public model with this name, or the problem as text."""
    config = find_public_model(name)
    if isinstance(config, str):
        return f"--model {config}"
    return parse_model_config(json.dumps(config), overrides)


def _read_weights(options: Namespace, shape: ModelShape) -> tuple[int | None, int | None]:
    """Return the size of the weights as served, in bytes, and the number of parameters.

    At most one of the two is returned; the other is None. If both are None, they are derived from
    the configuration. Quantised weights are served as stored, so the size of the files is used.
    Other weights are served in the dtype from the options. For them, only the number of parameters
    is used.
    """
    if options.parameters is not None or options.model_config is None:
        return None, options.parameters
    path: Path = options.model_config
    stored_bytes = count_checkpoint_bytes(path if path.is_dir() else path.parent)
    if stored_bytes is None:
        return None, None
    # The files may have a different dtype. The size of the files gives the number of parameters.
    if shape.quantisation is None:
        return None, int(stored_bytes / shape.stored_bytes)
    # If an option changes the quantisation, the size of the weight files no longer applies.
    method: str | None = options.quantization
    if method is not None and not is_same_method(method, shape.quantisation):
        return None, None
    return stored_bytes, None


def _apply_options(shape: ModelShape, options: Namespace) -> ModelShape:
    """Return the shape as served, with the dtype and quantisation set by the options."""
    if options.language_model_only or has_no_images(options.limit_mm_per_prompt):
        shape = replace(shape, encoder=None)
    dtype_bytes = DTYPE_BYTES.get(options.dtype)
    # "auto" means the dtype of the file, which the shape already has.
    if dtype_bytes is not None:
        shape = _apply_dtype(shape, dtype_bytes)
    method: str | None = options.quantization
    if method is None or is_same_method(method, shape.quantisation):
        return shape
    return shape.apply_quantisation(method, QUANTISED_BYTES.get(method))


def _apply_dtype(shape: ModelShape, dtype_bytes: float) -> ModelShape:
    """Return the shape with this dtype; a quantised cache and quantised weights are unchanged."""
    kv_dtype_bytes = shape.kv_dtype_bytes
    # If the KV cache uses the model's dtype, the new dtype applies to both.
    if kv_dtype_bytes == shape.dtype_bytes:
        kv_dtype_bytes = dtype_bytes
    weight_bytes = shape.weight_bytes_per_parameter
    if shape.quantisation is None:
        weight_bytes = dtype_bytes
    return replace(
        shape,
        dtype_bytes=dtype_bytes,
        kv_dtype_bytes=kv_dtype_bytes,
        weight_bytes_per_parameter=weight_bytes,
    )


COUNT_LIMIT: Final = 2**24
"""Our choice: the largest count or length that an option accepts."""

COUNT_VALUE: Final = whole_number(1, COUNT_LIMIT)
TOKENS_VALUE: Final = tokens(COUNT_LIMIT)

AUTO_LENGTH: Final = -1
"""The value of --max-model-len that makes vLLM use the longest sequence that fits."""


def _parse_length(text: str) -> int:
    return AUTO_LENGTH if text in {"auto", str(AUTO_LENGTH)} else TOKENS_VALUE.read(text)


LENGTH_VALUE: Final = Value(read=_parse_length, accepts=f"{TOKENS_VALUE.accepts}, or auto")

RELEASE_VALUE: Final = Value(
    read=parse_release, accepts=f"a release from 0.{OLDEST_MINOR} to 0.{NEWEST_MINOR}"
)

PARAMETERS_PATTERN: Final = re.compile(r"(\d+|\d*\.\d+)([KMBT]?)", re.IGNORECASE | re.ASCII)
PARAMETERS_UNITS: Final = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
PARAMETERS_LENGTH: Final = 20
"""The maximum number of characters in a parameter count such as 70.6B."""

PARAMETERS_LIMIT: Final = 10**14
"""The largest accepted number of parameters: no model has more."""


def _parse_parameters(text: str) -> int:
    """Parse a number such as 70.6B; raise ValueError for any other text."""
    match = PARAMETERS_PATTERN.fullmatch(text)
    if match is None or len(text) > PARAMETERS_LENGTH:
        raise ValueError
    parameters = int(Decimal(match[1]) * PARAMETERS_UNITS[match[2].upper()])
    if not 1 <= parameters <= PARAMETERS_LIMIT:
        raise ValueError
    return parameters


PARAMETERS_VALUE: Final = Value(
    read=_parse_parameters, accepts="a number of parameters, such as 70600000000 or 70.6B"
)


def _parse_cache_size(text: str) -> float:
    return parse_vllm_number(text) if VLLM_NUMBER.fullmatch(text) else parse_size(text)


CACHE_SIZE_VALUE: Final = Value(
    read=_parse_cache_size, accepts="a size such as 20GiB, or as vLLM takes it, 20G"
)

OFFLOAD_LIMIT_GIB: Final = 2**20
"""Our choice: a larger value in GiB is considered a mistake. It was probably given in bytes."""

OFFLOAD_VALUE: Final = Value(
    read=bounded(parse_number, 0, OFFLOAD_LIMIT_GIB), accepts="a number of GiB, such as 10"
)


def _parse_json(text: str) -> dict[str, Any]:
    """Parse a JSON object; raise ValueError if the text is not one."""
    try:
        content = json.loads(text)
    except RecursionError:
        raise ValueError from None
    if not isinstance(content, dict):
        raise ValueError  # noqa: TRY004 - what a kind of value raises for a text it refuses
    return content


JSON_VALUE: Final = Value(
    read=_parse_json, accepts='a JSON object such as {"method": "mtp"}', is_json=True
)


def _parse_limits(text: str) -> dict[str, Any]:
    """Parse vLLM's limits per prompt, as JSON or in the older form image=1,video=0.

    Raises ValueError for any other text.
    """
    if text.lstrip().startswith("{"):
        return _parse_json(text)
    return {name: int(count) for name, count in (part.split("=") for part in text.split(","))}


LIMITS_VALUE: Final = Value(
    read=_parse_limits, accepts='JSON such as {"image": 2, "video": 0}', is_json=True
)


def _parse_environment(text: str) -> dict[str, bool]:
    """Parse switches in the form A=1,B=0; raise ValueError for any other text."""
    environment = {}
    for setting in text.split(","):
        name, _, value = setting.partition("=")
        if name not in ENVIRONMENT:
            raise ValueError
        switch = SWITCHES.get(value.strip().lower())
        if switch is None:
            raise ValueError
        environment[name] = switch
    return environment


ENVIRONMENT_VALUE: Final = Value(
    read=_parse_environment, accepts=f"1 or 0 of {', '.join(ENVIRONMENT)}, as NAME=1,NAME=0"
)


def _parse_utilization(text: str) -> float:
    """Parse a ratio.

    A percentage is also accepted if the text ends in %. Raises RefusedError for a number above 1
    without a percent sign. Raises ValueError for any other invalid text.
    """
    if text.strip().endswith("%"):
        return bounded(parse_share, SMALLEST_FLOAT, 1)(text)
    ratio = parse_number(text)
    if 1 < ratio <= PERCENT:
        raise RefusedError(f"it is a ratio: {ratio / PERCENT:g} or {text}%?")
    return RATIO.read(text)


UTILIZATION_VALUE: Final = Value(read=_parse_utilization, accepts=RATIO.accepts)

DTYPES: Final = ("auto", "half", "float16", "bfloat16", "float", "float32")
"""The dtype names that vLLM accepts for `--dtype`."""


def add_options(parser: Parser) -> None:
    """Add all options of `plan` to the parser."""
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        type=Value(read=parse_gpus_by_name, accepts="a card such as H100, or 8xH100"),
        help="a card by its name, and how many: H100, 8xH100",
    )
    parser.add_argument(
        "--gpu-memory",
        dest="gpu_memory_bytes",
        metavar="SIZE",
        type=size_value("81559MiB"),
        help="of one card in all, as nvidia-smi shows it: 81559MiB",
    )
    parser.add_argument(
        "--host-memory",
        dest="host_memory_bytes",
        metavar="SIZE",
        type=size_value("256GiB"),
        help="of the host, or vLLM's container's limit",
    )
    parser.add_argument(
        "--unified-memory",
        action="store_true",
        help=(
            "the card works on its machine's memory, which --gpu-memory is then"
            " (GB10, Thor, Jetson)"
        ),
    )
    parser.add_argument(
        "--vllm-version",
        dest="release",
        metavar="VERSION",
        type=RELEASE_VALUE,
        default=NEWEST_RELEASE,
        help=f"0.{OLDEST_MINOR} to 0.{NEWEST_MINOR}, default the newest",
    )
    parser.add_argument(
        "--vllm-env",
        metavar="NAME=1",
        type=ENVIRONMENT_VALUE,
        default={},
        help="variables of its environment that change its memory, separated by commas",
    )
    parser.add_argument(
        "--typical-len",
        metavar="TOKENS",
        type=TOKENS_VALUE,
        default=TYPICAL_TOKENS,
        help="default %(default)s",
    )
    parser.add_argument(
        "--probe",
        metavar="FILE",
        type=FILE,
        help=(
            "a file of the probe in a worker that serves this model: what it measured,"
            " beside what is planned"
        ),
    )
    parser.add_argument(
        "--log",
        metavar="FILE",
        type=LOG,
        help=(
            "the engine's log of a start: its options and its figures are planned from, and the"
            " options here replace its own; - for standard input"
        ),
    )
    group = parser.add_argument_group(
        "the traffic of a running engine, to find the right size for it"
    )
    group.add_argument(
        "--trace", metavar="FILE", type=TRACE, help="of its sidecar; - for standard input"
    )
    group.add_argument(
        "--headroom-url",
        metavar="URL",
        type=url("http://gpu-7:9839"),
        help="its sidecar, which has the last day",
    )
    group.add_argument("--engine", metavar=ENGINE_METAVAR, help=ENGINE_HELP)
    _add_model_options(parser.add_argument_group("the model"))
    _add_engine_options(parser.add_argument_group("vLLM's options, by its own names"))
    parser.accept_line(
        list_vllm_options(),
        partial(read_serve_line, with_surroundings=True),
        f"an option of plan or of {VLLM_RELEASES}",
    )


def _add_model_options(group: argparse._ArgumentGroup) -> None:
    """Declare the options that describe the model."""
    group.add_argument(
        "--model",
        metavar="NAME",
        type=TEXT,
        help="a public model by its name, such as Qwen/Qwen3-32B",
    )
    group.add_argument(
        "--model-config",
        metavar="PATH",
        type=FILE,
        help=f"its {CONFIG_FILE}, or the folder of it and the weights",
    )
    group.add_argument(
        "--draft-model-config",
        metavar="PATH",
        type=FILE,
        help="the same of the model that speculates",
    )
    for name, _, meaning in SIZE_OPTIONS:
        group.add_argument(
            name_option(name),
            metavar="N",
            type=COUNT_VALUE,
            help=f"{meaning}, instead of the file's",
        )
    group.add_argument(
        "--parameters",
        metavar="N",
        type=PARAMETERS_VALUE,
        help="such as 70.6B, instead of counting them",
    )
    _add_choice(
        group, ("--dtype",), DTYPES, "of what is not quantised; auto is 16 bits", default="auto"
    )
    _add_choice(
        group,
        ("-q", "--quantization"),
        sorted({*QUANTISED_BYTES, *CHECKPOINT_METHODS}),
        "of the weights, instead of the file's",
    )


def _add_engine_options(group: argparse._ArgumentGroup) -> None:
    """Declare the options that have the same names in vLLM."""
    add = group.add_argument
    add(
        "--gpu-memory-utilization",
        "--device-memory-utilization",
        metavar="RATIO",
        type=UTILIZATION_VALUE,
        help=f"default {DEFAULT_UTILIZATION}, vLLM's since 0.20; before, 0.9",
    )
    add(
        "--kv-cache-memory-bytes",
        metavar="SIZE",
        type=CACHE_SIZE_VALUE,
        help="of the KV cache, instead of a ratio of the card",
    )
    _add_choice(
        group,
        ("--kv-cache-dtype",),
        ("auto", *KV_DTYPES, *PACKED_KV_DTYPES),
        "auto is the model's own",
        default="auto",
    )
    add("-tp", "--tensor-parallel-size", metavar="N", type=COUNT_VALUE, default=1, help="default 1")
    add(
        "-pp",
        "--pipeline-parallel-size",
        metavar="N",
        type=COUNT_VALUE,
        default=1,
        help="default 1",
    )
    add(
        "-dp",
        "--data-parallel-size",
        metavar="N",
        type=COUNT_VALUE,
        default=1,
        help="engines, which share the experts",
    )
    add(
        "-dcp",
        "--decode-context-parallel-size",
        metavar="N",
        type=COUNT_VALUE,
        default=1,
        help="GPUs of a tensor-parallel group that share the tokens, default 1",
    )
    add(
        "-ep",
        "--enable-expert-parallel",
        action="store_true",
        help="each GPU has some experts whole: less room for their adapters",
    )
    add(
        "--cpu-offload-gb",
        metavar="GIB",
        type=OFFLOAD_VALUE,
        default=0.0,
        help="of each GPU's weights, on the host",
    )
    add(
        "--kv-offloading-size",
        metavar="GIB",
        type=OFFLOAD_VALUE,
        default=0.0,
        help="a tier of each engine's KV cache, on the host",
    )
    add(
        "--mm-processor-cache-gb",
        metavar="GIB",
        type=OFFLOAD_VALUE,
        default=4.0,
        help="of processed images in each server and core, default 4",
    )
    add("--enable-lora", action="store_true", help="room for adapters")
    add("--max-loras", metavar="N", type=COUNT_VALUE, default=1, help="default 1")
    add(
        "--max-lora-rank",
        metavar="N",
        type=COUNT_VALUE,
        default=DEFAULT_LORA_RANK,
        help=f"default {DEFAULT_LORA_RANK}",
    )
    add("--language-model-only", action="store_true", help="no image or audio encoder")
    add(
        "--max-model-len",
        metavar="TOKENS",
        type=LENGTH_VALUE,
        help="of prompt and answer, auto the most that fit; default the model's limit",
    )
    add(
        "--max-num-seqs",
        metavar="N",
        type=COUNT_VALUE,
        help="default 256; from 70 GiB 1024, but for an A100",
    )
    add(
        "--max-num-batched-tokens",
        metavar="TOKENS",
        type=TOKENS_VALUE,
        help="default 2048; from 70 GiB 8192, but for an A100; from 160 GiB 16384",
    )
    add(
        "--block-size",
        metavar="TOKENS",
        type=TOKENS_VALUE,
        default=DEFAULT_BLOCK_TOKENS,
        help=f"default {DEFAULT_BLOCK_TOKENS}",
    )
    add("--enforce-eager", action="store_true", help="without CUDA graphs")
    add(
        "--enable-prefix-caching",
        action="store_true",
        help="states of prefixes too, for models with states the default since 0.28",
    )
    add(
        "--no-enable-prefix-caching", action="store_true", help="no prefixes, and no states of them"
    )
    add(
        "-sc",
        "--speculative-config",
        metavar="JSON",
        type=JSON_VALUE,
        help="method, model and num_speculative_tokens",
    )
    add("--spec-method", metavar="NAME", type=TEXT, help="the method, without the JSON")
    add("--spec-model", metavar="NAME", type=TEXT, help="the draft model, without the JSON")
    add("--spec-tokens", metavar="N", type=COUNT_VALUE, help="how many tokens, without the JSON")
    add(
        "--limit-mm-per-prompt",
        metavar="JSON",
        type=LIMITS_VALUE,
        help='images and videos of a prompt, such as {"image": 0}',
    )
    _add_choice(
        group,
        ("--mm-encoder-tp-mode",),
        ("weights", "data"),
        "data has the whole encoder on each GPU",
        default="weights",
    )
    add(
        "--hf-overrides",
        metavar="JSON",
        type=JSON_VALUE,
        help="fields that replace the configuration's",
    )


def _add_choice(
    group: argparse._ArgumentGroup,
    flags: Sequence[str],
    names: Sequence[str],
    meaning: str,
    default: str | None = None,
) -> None:
    """Add an option that takes one of these names; the option's help lists the names."""
    value = choice(names)
    group.add_argument(
        *flags, metavar="NAME", type=value, default=default, help=f"{meaning}: {value.accepts}"
    )


def _run(options: Namespace) -> Report | Coroutine[Any, Any, Report]:
    """Return the report.

    If a sidecar has to be queried, returns a coroutine with the report. Raises BadOptions if both a
    trace and a sidecar are named.
    """
    if options.trace is not None and options.headroom_url is not None:
        raise BadOptions("takes --trace or --headroom-url, and not both")
    if options.headroom_url is not None:
        return _size_live(options)
    if options.trace is not None:
        return _size(options, read_trace_traffic(options.trace))
    measured = None
    if options.probe is not None:
        measured = read_worker_parts(Path(options.probe))
    return build_report(estimate_memory(_build_logged_question(options)), measured)


def _build_logged_question(options: Namespace, traffic: Traffic | None = None) -> Question:
    """Build the question from the options and, if given, a startup log and the traffic.

    Typed options take precedence over those in the log. The log shows all options that the engine
    was started with. Without a log, some of the options are taken from the traffic.
    """
    start_figures = None
    if options.log is not None:
        start = choose_start(read_engine_log(options.log))
        name = "the log" if options.log == "-" else options.log
        logged_question = build_question(apply_log_options(options, start, with_typed=False))
        start_figures = measure_start(start, name, logged_question)
        options = apply_log_options(options, start, with_typed=True)
    elif traffic is not None:
        options = apply_traffic_options(options, traffic)
    return replace(build_question(options), measured=start_figures)


async def _size_live(options: Namespace) -> Report:
    """Return the report on sizes, based on the last day of a sidecar's history.

    Raises BadInput if the sidecar does not answer.
    """
    # Imported here because only this function needs an HTTP client.
    from vllm_headroom.daemon.sources import close_all  # noqa: PLC0415
    from vllm_headroom.scrape.http.reader import PageReader  # noqa: PLC0415
    from vllm_headroom_tools.sidecar import (  # noqa: PLC0415
        FETCH_TIMEOUT_SECONDS,
        MOST_DOCUMENT_BYTES,
        fetch_document,
    )

    url = options.headroom_url.copy_with(path="/snapshot.json", query=None)
    reader = PageReader(
        url=str(url), timeout_seconds=FETCH_TIMEOUT_SECONDS, max_bytes=MOST_DOCUMENT_BYTES
    )
    try:
        document = await fetch_document(reader, options.engine)
    finally:
        await close_all(reader)
    if isinstance(document, str):
        raise BadInput(document)
    return _size(options, read_document_traffic(document, redact_url(str(options.headroom_url))))


def _size(options: Namespace, traffic: Traffic) -> Report:
    """Return the report on the sizes that suit the traffic."""
    question = _build_logged_question(options, traffic)
    is_length_known = options.log is not None or "max_model_len" in options.typed_names
    if not is_length_known and question.max_model_len is not None:
        # vLLM has started, so its KV cache holds a sequence of the maximum length.
        longest = int(traffic.capacity_tokens or question.max_model_len)
        question = replace(question, max_model_len=min(question.max_model_len, longest))
    return build_sizes_report(judge_sizes(question, traffic, options.max_num_batched_tokens))


COMMAND: Final[Command] = Command(
    usage="%(prog)s --model NAME --gpu NAME [OPTION]... [-- vllm serve]",
    description="""\
Will it fit? Computes from a model's configuration what vLLM needs of each GPU,
how many tokens and sequences its KV cache will hold, and what to change where
that is too little. It needs no GPU and no vLLM. With --trace or --headroom-url
it finds which cards hold the traffic of an engine that runs.
""",
    epilog="""\
Figures are of each GPU. It ends with status 0 when vLLM would start, with 1
when it would not, and with 2 when that is not known: bad input, something is
missing, or too close to call.

Options of vLLM's that need no memory are accepted, and listed as not counted.
After -- comes a whole line, or one word: a script or manifest, - for standard
input, or the number of a process.

Example:
  vllm-headroom plan --model Qwen/Qwen3-32B --gpu H100 -tp 2
  vllm-headroom plan --gpu 8xH200 -- vllm serve zai-org/GLM-5-FP8 -tp 8
  vllm-headroom plan --trace trace.jsonl -- vllm serve Qwen/Qwen3-32B -tp 2
  kubectl get deployment llm -o yaml | vllm-headroom plan --gpu L40S -- -
  vllm-headroom plan --model-config Llama-3.1-70B/config.json \\
    --gpu-memory 81559MiB -tp 4 --max-model-len 32K --max-num-seqs 64
  vllm-headroom plan --layers 80 --kv-heads 8 --head-size 128 \\
    --hidden-size 8192 --vocabulary 128256 --parameters 70.6B \\
    --gpu-memory 141GiB
""",
    options=add_options,
    run=_run,
)
