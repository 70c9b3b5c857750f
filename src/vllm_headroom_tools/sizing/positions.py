"""The tables of rotary positions, which vLLM computes once and keeps in GPU memory."""

from collections.abc import Mapping
from typing import Final

from vllm_headroom_tools.sizing.config_fields import (
    MODEL_LENGTH,
    SIZE_LIMIT,
    Config,
    read_integer,
    read_mapping,
)

VIDEO_FACTOR: Final = 4
"""The number of positions in a table as a multiple of the model's length. It applies to models that
read videos (vLLM 0.33, layers/rotary_embedding/mrope.py).
"""

OTHER_POSITIONS: Final = frozenset(
    {
        "bert",
        "bloom",
        "gpt2",
        "gpt_bigcode",
        "granitemoehybrid",
        "jamba",
        "modernbert",
        "mpt",
        "nemotron_h",
        "opt",
        "roberta",
        "xlm-roberta",
    }
)
"""Model types with no rotary positions or with only small tables."""

LENGTHENING_ROTARIES: Final = ("linear", "dynamic", "ntk")
"""Kinds of rotary embedding whose table is `factor` times the model's length."""


def count_position_values(config: Config, head_size: int, windowed_head_size: int) -> int:
    """Return the number of values in the tables.

    Every GPU holds the tables in the model's dtype. A table has a row of `rotary_dim` values per
    position. Layers with the same positions share a table. A model has two tables if its windowed
    layers use different positions. Returns 0 for a model without rotary positions. Raises
    ValueError for a value that is not a size.
    """
    length = read_integer(config, *MODEL_LENGTH)
    scaling = read_mapping(config, "rope_parameters", "rope_scaling")
    model_type = config.get("model_type")
    if length is None or str(model_type) in OTHER_POSITIONS:
        return 0
    if model_type is None and not (scaling or config.get("rope_theta")):
        return 0
    latent_size = read_integer(config, "qk_rope_head_dim")
    # Newer configurations give the parameters separately for each kind of layer.
    by_kind = [part for part in scaling.values() if isinstance(part, dict)]
    if by_kind:
        full = read_mapping(scaling, "full_attention")
        windowed = read_mapping(scaling, "sliding_attention")
    else:
        full = scaling
        windowed = {}
    values = _count_rows(full, length) * _count_row_values(config, full, latent_size or head_size)
    has_second_table = bool(windowed) or config.get("rope_local_base_freq") is not None
    if has_second_table:
        row_values = _count_row_values(config, windowed, windowed_head_size)
        values += _count_rows(windowed, length) * row_values
    return values


def _count_rows(scaling: Mapping[str, object], length: int) -> int:
    """Return the number of positions in a table."""
    if scaling.get("mrope_section"):
        return VIDEO_FACTOR * length
    kind = str(scaling.get("rope_type") or scaling.get("type"))
    factor = scaling.get("factor")
    if kind not in LENGTHENING_ROTARIES or not isinstance(factor, int | float):
        return length
    return int(length * factor) if 1 <= factor <= SIZE_LIMIT else length


def _count_row_values(config: Config, scaling: Mapping[str, object], head_size: int) -> int:
    """Return the number of values per position: the rotated part of a head."""
    share = scaling.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    # With Gemma 4's proportional positions, the table covers whole heads.
    if scaling.get("rope_type") == "proportional" or not isinstance(share, int | float):
        return head_size
    return int(head_size * share) if 0 < share < 1 else head_size
