"""How many parameters the layers of a model have, and of which sort, counted from its configuration."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from vllm_headroom.sizing.fields import Config, whole
from vllm_headroom.sizing.heads import KvHeads
from vllm_headroom.sizing.matrices import Matrix, expert_count, expert_inner, inner, matrices, shared_inner
from vllm_headroom.sizing.quantisation import kept_plain


class Adapter(Struct, frozen=True, kw_only=True):
    """The values that an adapter of rank 1 adds: what tensor parallelism leaves whole, and what it divides."""

    whole: int
    divided: int


class LayerParameters(Struct, frozen=True, kw_only=True):
    """Parameters of all layers together, without embeddings, biases and norms.

    `plain` are those that the checkpoint's quantisation leaves out, `experts` those of experts that not every token
    passes. `expert_adapter` is of these, `adapter` of all others.
    """

    total: int
    plain: int
    experts: int
    adapter: Adapter
    expert_adapter: Adapter


def layer_parameters(config: Config, kinds: Sequence[str], full: KvHeads, windowed: KvHeads) -> LayerParameters | None:
    """Return the parameters of layers of these kinds; None where they cannot be counted."""
    found = matrices(config, kinds, full, windowed)
    if found is None:
        return None
    plain = kept_plain(config)
    experts = [each for each in found if ".experts." in each.name]
    return LayerParameters(
        total=sum(each.parameters for each in found),
        plain=sum(each.parameters for each in found if each.router or plain(each.name)),
        experts=sum(each.parameters for each in experts),
        adapter=_adapter([each for each in found if not each.router and ".experts." not in each.name]),
        expert_adapter=_adapter(experts),
    )


def _adapter(found: Sequence[Matrix]) -> Adapter:
    return Adapter(
        whole=sum(each.copies * (each.outputs if each.by_rows else each.inputs) for each in found),
        divided=sum(each.copies * (each.inputs if each.by_rows else each.outputs) for each in found),
    )


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
