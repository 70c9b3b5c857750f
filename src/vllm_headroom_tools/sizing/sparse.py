"""The sparse attention index, which selects the tokens that a token attends to."""

from typing import Final

from msgspec import Struct

from vllm_headroom.units import FLOAT16_BYTES
from vllm_headroom_tools.sizing.config_fields import Config, read_integer, read_mapping

SCALED_VALUES: Final = 128
"""The number of values in an 8-bit index that share a 32-bit scale. The source is vLLM 0.33,
models/deepseek_v32/attention.py, `quant_block_size`.
"""

SCALE_BYTES: Final = 4


class SparseIndex(Struct, frozen=True, kw_only=True):
    """The index of a model's sparse attention."""

    # Whether each layer of the model has an index. A layer without one uses another layer's.
    layers: tuple[bool, ...]
    head_size: int
    heads: int
    # The bytes per token of one layer's index, which every GPU holds in full.
    bytes_per_token: int

    @property
    def layer_count(self) -> int:
        """Return the number of layers that have an index."""
        return sum(1 for has_index in self.layers if has_index)


def read_sparse_index(config: Config, layer_count: int) -> SparseIndex | None:
    """Return the attention index of DeepSeek V3.2, GLM-5 or MiniMax M3, or None for others.

    DeepSeek's index has 8 bits per value plus scales (vLLM 0.33, `DeepseekV32IndexerCache`).
    MiniMax's index has 16 bits per value (models/minimax_m3/common/indexer.py). Raises ValueError
    for a value that is not a size.
    """
    head_size = read_integer(config, "index_head_dim")
    if head_size is not None:
        scales_bytes = head_size // SCALED_VALUES * SCALE_BYTES
        return SparseIndex(
            layers=_list_indexed_layers(config, layer_count),
            head_size=head_size,
            heads=read_integer(config, "index_n_heads") or 0,
            bytes_per_token=head_size + scales_bytes,
        )
    sparse = read_mapping(config, "sparse_attention_config")
    flags = sparse.get("sparse_attention_freq")
    head_size = read_integer(sparse, "sparse_index_dim")
    if not isinstance(flags, list) or head_size is None:
        return None
    return SparseIndex(
        layers=tuple(flag == 1 for flag in flags),
        head_size=head_size,
        heads=read_integer(sparse, "sparse_num_index_heads") or 0,
        bytes_per_token=head_size * FLOAT16_BYTES,
    )


def _list_indexed_layers(config: Config, layer_count: int) -> tuple[bool, ...]:
    """Return for each layer whether it has an index.

    In GLM-5.2, most layers use another layer's index.
    """
    types = config.get("indexer_types")
    if isinstance(types, list):
        return tuple(kind == "full" for kind in types)
    return (True,) * layer_count
