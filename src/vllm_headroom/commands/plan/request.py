"""What was asked for on the command line: options to a question."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final

from msgspec.structs import fields, replace

from vllm_headroom.sizing.model_config import checkpoint_bytes, parse_model_config, read_model
from vllm_headroom.sizing.quantisation import DTYPE_BYTES, QUANTISED_BYTES
from vllm_headroom.sizing.question import Question, defaults, unusable
from vllm_headroom.sizing.shape import ModelShape
from vllm_headroom.trace.errors import BadInput
from vllm_headroom.units import GIB

SIZES: Final = (
    ("layers", "num_hidden_layers", "hidden layers"),
    ("kv_heads", "num_key_value_heads", "key-value heads"),
    ("head_size", "head_dim", "values of a head"),
    ("hidden_size", "hidden_size", "values of a token between two layers"),
    ("vocabulary", "vocab_size", "tokens of the vocabulary"),
)
"""Options that say a model's size, the fields of its configuration that they stand for, and their meaning."""

ALONE: Final = ("layers", "kv_heads", "head_size")
"""What the KV cache's size cannot be told without."""


def question(given: argparse.Namespace) -> Question:
    """Return what is asked; raises BadInput where that cannot be."""
    shape = _shape(given)
    if isinstance(shape, str):
        raise BadInput(shape)
    checkpoint, parameters = _weights(given, shape)
    sequences, tokens = defaults(given.gpu_memory_bytes)
    sequences = given.max_num_seqs or sequences
    told = {each.name: getattr(given, each.name) for each in fields(Question) if hasattr(given, each.name)}
    told |= {
        "shape": _served(shape, given.dtype, given.quantization, language_model_only=given.language_model_only),
        "checkpoint_bytes": checkpoint,
        "parameters": parameters,
        "max_model_len": given.max_model_len or shape.max_model_len,
        "max_num_seqs": sequences,
        "max_num_batched_tokens": given.max_num_batched_tokens or max(tokens, sequences),
        "max_loras": given.max_loras if given.enable_lora else 0,
        "cpu_offload_bytes": given.cpu_offload_gb * GIB,
        "draft": _draft(given.draft_model_config),
    }
    asked = Question(**told)
    if problem := unusable(asked):
        raise BadInput(problem)
    return asked


def _shape(given: argparse.Namespace) -> ModelShape | str:
    overrides = {field: getattr(given, name) for name, field, _ in SIZES if getattr(given, name) is not None}
    if given.kv_heads is not None:
        overrides["multi_query"] = False
    if given.model_config is not None:
        shape = read_model(given.model_config, overrides)
        if isinstance(shape, str):
            return f"{given.model_config}: {shape}"
        told = all(getattr(given, name) is not None for name in ALONE)
        return replace(shape, unknown_type=None) if told else shape
    missing = [_flag(name) for name in ALONE if getattr(given, name) is None]
    if missing:
        return f"needs --model-config, or without it {', '.join(map(_flag, ALONE))}; missing: {', '.join(missing)}"
    return parse_model_config("{}", overrides)


def _draft(path: Path | None) -> ModelShape | None:
    shape = None if path is None else read_model(path)
    if isinstance(shape, str):
        raise BadInput(f"{path}: {shape}")
    return shape


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _weights(given: argparse.Namespace, shape: ModelShape) -> tuple[int | None, int | None]:
    """Return the bytes of the weights and the number of parameters, as far as they are known without counting.

    Weights that are quantised in the file are served as they lie there; others in the dtype that is asked for.
    """
    if given.parameters is not None or given.model_config is None:
        return None, given.parameters
    path: Path = given.model_config
    found = checkpoint_bytes(path if path.is_dir() else path.parent)
    if found is None:
        return None, None
    if shape.quantisation is None:
        return None, int(found / shape.stored_bytes)
    return (found, None) if given.quantization is None else (None, None)


def _served(shape: ModelShape, dtype: str, quantization: str | None, *, language_model_only: bool) -> ModelShape:
    """Return the shape as it is served: in the dtype and with the quantisation that were asked for, if any."""
    changed: dict[str, Any] = {}
    if language_model_only:
        changed["encoder"] = None
    if dtype != "auto":
        size = DTYPE_BYTES[dtype]
        changed["dtype_bytes"] = size
        if shape.kv_dtype_bytes == shape.dtype_bytes:
            changed["kv_dtype_bytes"] = size
        if shape.quantisation is None:
            changed["weight_bytes_per_parameter"] = size
    served = replace(shape, **changed)
    return served if quantization is None else served.quantised(quantization, QUANTISED_BYTES[quantization])
