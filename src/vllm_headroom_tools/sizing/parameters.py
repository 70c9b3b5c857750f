"""How many parameters the layers of a model have, and of which sort, counted from its configuration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from msgspec import Struct

from vllm_headroom_tools.sizing.layers import HEADS, HIDDEN, NOTHING, STATEFUL, WINDOWED, Config, KvHeads, needed, whole
from vllm_headroom_tools.sizing.quantisation import kept_plain

NOT_GATED: Final = frozenset(
    {
        *("gpt2", "gpt_bigcode", "gpt_neox", "gptj", "opt", "falcon", "bloom", "mpt", "starcoder2"),
        *("bert", "roberta", "xlm-roberta", "nemotron", "nemotron_h", "arcee", "phi", "persimmon"),
    }
)
"""Model types whose MLP has two matrices instead of three; without a size of its own it is four times as wide."""

INNER: Final = ("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim")
EXPERTS: Final = ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts")

PLACED: Final = frozenset({"gpt2", "gpt_bigcode", "opt", "bert", "roberta", "xlm-roberta"})
"""Model types that have a weight for each place of a token in a sequence."""

LENGTHS: Final = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")

OWN_WAYS: Final = ("ffn_config", "conv_L_cache", "moe_latent_size", "hidden_size_per_layer_input", "zero_expert_num")
"""Fields of models whose layers are not alike enough to be counted here."""


class Matrix(Struct, frozen=True, kw_only=True):
    """`copies` of a matrix, such as one for each expert; `router` is one that no method quantises or adapts."""

    name: str
    inputs: int
    outputs: int
    copies: int = 1
    router: bool = False

    @property
    def parameters(self) -> int:
        """How many parameters all copies have."""
        return self.inputs * self.outputs * self.copies

    @property
    def by_rows(self) -> bool:
        """Whether tensor parallelism divides its inputs, and not its outputs."""
        return self.name.endswith(("o_proj", "down_proj", "out_proj"))


def matrices(
    config: Config, kinds: Sequence[str], heads_of_full: KvHeads, heads_of_windowed: KvHeads
) -> tuple[Matrix, ...] | None:
    """Return the matrices of layers of these kinds; None where they cannot be told."""
    hidden, heads = whole(config, *HIDDEN), whole(config, *HEADS)
    told = hidden and heads and (inner(config) or expert_count(config))
    if hidden is None or heads is None or not told or any(config.get(name) for name in OWN_WAYS):
        return None
    if any(kind in STATEFUL for kind in kinds) and not {"linear_num_value_heads", "mamba_num_heads"} & set(config):
        return None
    found: list[Matrix] = []
    if str(config.get("model_type")) in PLACED:
        found.append(Matrix(name="positions", inputs=whole(config, *LENGTHS) or 0, outputs=hidden, router=True))
    for number, kind in enumerate(kinds):
        place = f"layers.{number}."
        if kind in STATEFUL:
            found += _stateful(config, f"{place}mixer.", hidden)
        elif kind not in NOTHING:
            kept = heads_of_windowed if kind in WINDOWED else heads_of_full
            found += _attention(config, f"{place}self_attn.", (hidden, heads), kept)
        if kind in NOTHING or not isinstance(config.get("hybrid_override_pattern"), str):
            found += _mlp(config, f"{place}mlp.", hidden, sparse=_sparse(config, number, kind))
    return tuple(found)


def inner(config: Config) -> int | None:
    """Return the width of the MLP; None where it is not told."""
    found = whole(config, *INNER)
    if found is None and str(config.get("model_type")) in NOT_GATED:
        hidden = whole(config, *HIDDEN)
        return None if hidden is None else 4 * hidden
    return found


def expert_count(config: Config) -> int | None:
    """Return how many experts a sparse layer has; None for none."""
    return whole(config, *EXPERTS)


def expert_inner(config: Config) -> int:
    """Return the width of one expert."""
    return whole(config, "moe_intermediate_size") or inner(config) or 0


def shared_inner(config: Config) -> int:
    """Return the width of the experts that every token passes, together."""
    if config.get("model_type") == "llama4_text":
        return inner(config) or 0  # always one, which its configuration does not say
    shared = whole(config, "n_shared_experts", "num_shared_experts", "moe_num_shared_experts") or 0
    told = whole(config, "moe_shared_expert_intermediate_size")
    return shared * (told or expert_inner(config)) + (whole(config, "shared_expert_intermediate_size") or 0)


def _sparse(config: Config, number: int, kind: str) -> bool:
    if not expert_count(config) or number in _numbers(config, "mlp_only_layers"):
        return False
    if isinstance(config.get("hybrid_override_pattern"), str):
        return kind == "moe"
    flags = config.get("mlp_layer_types") or config.get("moe_layer_freq")
    if isinstance(flags, list) and number < len(flags):
        return flags[number] in ("sparse", 1)
    first = whole(config, "first_k_dense_replace", "moe_layer_start_index") or 0
    step = whole(config, "decoder_sparse_step", "interleave_moe_layer_step") or 1
    return number >= first and (number + 1) % step == 0


def _numbers(config: Config, name: str) -> Sequence[int]:
    found = config.get(name)
    return found if isinstance(found, list) else ()


def _mlp(config: Config, place: str, hidden: int, *, sparse: bool) -> Iterator[Matrix]:
    if not sparse:
        width = whole(config, "intermediate_size_mlp") or inner(config) or 0
        yield from _gated(config, place, hidden, width, 1)
        return
    count = expert_count(config) or 0
    if config.get("enable_moe_block"):  # Gemma 4 passes both
        yield from _gated(config, place, hidden, inner(config) or 0, 1)
    yield Matrix(name=f"{place}gate", inputs=hidden, outputs=count, router=True)
    yield from _gated(config, f"{place}experts.", hidden, expert_inner(config), count)
    if shared := shared_inner(config):
        yield from _gated(config, f"{place}shared_experts.", hidden, shared, 1)


def _gated(config: Config, place: str, hidden: int, width: int, copies: int) -> Iterator[Matrix]:
    names = ("up_proj",) if str(config.get("model_type")) in NOT_GATED else ("gate_proj", "up_proj")
    for name in names:
        yield Matrix(name=f"{place}{name}", inputs=hidden, outputs=width, copies=copies)
    yield Matrix(name=f"{place}down_proj", inputs=width, outputs=hidden, copies=copies)


def _attention(config: Config, place: str, sizes: tuple[int, int], kept: KvHeads) -> Iterator[Matrix]:
    hidden, heads = sizes
    if whole(config, "kv_lora_rank"):
        yield from _latent(config, place, heads, hidden)
        return
    queries = 2 if config.get("attn_output_gate") or config.get("model_type") == "qwen3_next" else 1  # and their gates
    yield Matrix(name=f"{place}q_proj", inputs=hidden, outputs=queries * heads * kept.key_size)
    yield Matrix(name=f"{place}k_proj", inputs=hidden, outputs=kept.count * kept.key_size)
    yield Matrix(name=f"{place}v_proj", inputs=hidden, outputs=kept.count * kept.value_size)
    yield Matrix(name=f"{place}o_proj", inputs=heads * kept.value_size, outputs=hidden)


def _latent(config: Config, place: str, heads: int, hidden: int) -> Iterator[Matrix]:
    """Yield latent attention's projections (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""
    latent, rotary = needed(config, "kv_lora_rank"), whole(config, "qk_rope_head_dim") or 0
    plain, value = needed(config, "qk_nope_head_dim"), needed(config, "v_head_dim")
    query, asked = whole(config, "q_lora_rank"), heads * (plain + rotary)
    if query:
        yield Matrix(name=f"{place}q_a_proj", inputs=hidden, outputs=query)
    yield Matrix(name=f"{place}q_b_proj" if query else f"{place}q_proj", inputs=query or hidden, outputs=asked)
    yield Matrix(name=f"{place}kv_a_proj_with_mqa", inputs=hidden, outputs=latent + rotary)
    yield Matrix(name=f"{place}kv_b_proj", inputs=latent, outputs=heads * (plain + value))
    yield Matrix(name=f"{place}o_proj", inputs=heads * value, outputs=hidden)


def _stateful(config: Config, place: str, hidden: int) -> Iterator[Matrix]:
    """Yield a gated delta net's projections (transformers, qwen3_next) or those of Mamba-2 (nemotron_h)."""
    if "linear_num_value_heads" in config:
        keys = needed(config, "linear_num_key_heads") * needed(config, "linear_key_head_dim")
        heads = needed(config, "linear_num_value_heads")
        width = heads * needed(config, "linear_value_head_dim")
        asked = 2 * keys + 2 * width + 2 * heads
    else:
        heads = needed(config, "mamba_num_heads")
        width = heads * needed(config, "mamba_head_dim")
        asked = 2 * width + 2 * (whole(config, "n_groups") or 1) * needed(config, "ssm_state_size") + heads
    yield Matrix(name=f"{place}in_proj", inputs=hidden, outputs=asked)
    yield Matrix(name=f"{place}out_proj", inputs=width, outputs=hidden)


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
