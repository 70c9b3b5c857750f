"""How many parameters the layers of a model have, and of which sort, counted from its configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from vllm_headroom.sizing.fields import Config, whole
from vllm_headroom.sizing.heads import KvHeads
from vllm_headroom.sizing.matrices import Matrix, expert_count, expert_inner, inner, matrices, shared_inner
from vllm_headroom.sizing.quantisation import kept_plain

GATES: Final = ("silu", "swish", "swiglu")
"""Activations of encoders whose MLP has a gate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParameters:
    """Parameters of all layers together, without embeddings, biases and norms.

    `plain` are those that the checkpoint's quantisation leaves out, `experts` those of experts that not every token
    passes. `adapter_whole` and `adapter_divided` are the values that an adapter of rank 1 adds to all matrices: what
    tensor parallelism leaves whole, and what it divides.
    """

    total: int
    plain: int
    experts: int
    adapter_whole: int
    adapter_divided: int


def layer_parameters(config: Config, kinds: Sequence[str], full: KvHeads, windowed: KvHeads) -> LayerParameters | None:
    """Return the parameters of layers of these kinds; None where they cannot be counted."""
    found = matrices(config, kinds, full, windowed)
    if found is None:
        return None
    plain = kept_plain(config)
    return LayerParameters(
        total=sum(each.parameters for each in found),
        plain=sum(each.parameters for each in found if each.router or plain(each.name)),
        experts=sum(each.parameters for each in found if ".experts." in each.name),
        adapter_whole=sum(each.copies * (each.outputs if each.by_rows else each.inputs) for each in _adapted(found)),
        adapter_divided=sum(each.copies * (each.inputs if each.by_rows else each.outputs) for each in _adapted(found)),
    )


def _adapted(found: Sequence[Matrix]) -> list[Matrix]:
    """Return the matrices that an adapter can change: all but the routers."""
    return [each for each in found if not each.router]


def encoder_parameters(encoder: Config) -> int | None:
    """Return the parameters of an image or audio encoder's layers; None where its configuration does not tell them."""
    layers = whole(encoder, "num_hidden_layers", "depth", "encoder_layers", "vt_num_hidden_layers")
    hidden = whole(encoder, "hidden_size", "embed_dim", "d_model", "vt_hidden_size")
    width = whole(encoder, "intermediate_size", "encoder_ffn_dim", "vt_intermediate_size")
    if layers is None or hidden is None or width is None:
        return None
    matrices = 3 if str(encoder.get("hidden_act")) in GATES else 2
    return layers * (4 * hidden * hidden + matrices * hidden * width)


def mlp(config: Config) -> tuple[int, int] | None:
    """Return the width of the widest MLP that a token passes, and its experts; None where the size is not told.

    An expert is as wide as `moe_intermediate_size`, else as the MLP; shared experts are passed beside the chosen.
    """
    width = inner(config)
    names = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "top_k_experts", "moe_k")
    if not expert_count(config):
        return None if width is None else (width, 1)
    chosen = whole(config, *names) or 1
    return max(width or 0, chosen * expert_inner(config) + shared_inner(config)), chosen
