"""What a model takes of a GPU: bytes of KV cache per token, bytes of weights."""

from math import ceil
from typing import Final, Self

from msgspec import Struct
from msgspec.structs import replace

from vllm_headroom_tools.sizing.encoder import Encoder
from vllm_headroom_tools.sizing.layers import KvHeads
from vllm_headroom_tools.sizing.parameters import LayerParameters


class ModelShape(Struct, frozen=True, kw_only=True):
    """The size of a model by its configuration; None where it is not given.

    `full_layers` keep keys and values of every token, `windowed_layers` only of the last `window_tokens` (`chunked`:
    since the last multiple of them), and `stateful_layers` keep `state_bytes` of each sequence instead,
    `state_checkpoints` times more than others. `windowed_heads` are those of a layer with a window, where they differ
    from a full one's `heads`. `latent_width` is what multi-head latent
    attention keeps per token and layer. `beside_width` is how many values a token takes beside its hidden state through
    all layers. `mlp_width` is how many values a token takes in the widest MLP, all its experts
    together. `stored_bytes` is a parameter of the checkpoint, `dtype_bytes` one that is served without quantisation,
    `kv_dtype_bytes` a value in the KV cache without a dtype option for it. `weight_bytes_per_parameter` holds for
    all of `parameters` but the plain ones. `tied_embeddings` also means that there is no output layer.
    `encoder` reads images or sound. `unknown_type` names a type of model that has not been checked here.
    """

    layers: int
    full_layers: int
    windowed_layers: int = 0
    window_tokens: int | None = None
    chunked: bool = False
    windowed_heads: KvHeads | None = None
    stateful_layers: int = 0
    state_bytes: int | None = None
    state_checkpoints: int = 0
    attention_heads: int | None = None
    heads: KvHeads
    latent_width: int | None = None
    hidden_size: int | None = None
    vocabulary: int | None = None
    beside_width: int = 0
    mlp_width: int | None = None
    experts_per_token: int = 1
    tied_embeddings: bool = False
    parameters: LayerParameters | None = None
    encoder: Encoder | None = None
    max_model_len: int | None = None
    dtype_bytes: float = 2.0
    stored_bytes: float = 2.0
    kv_dtype_bytes: float = 2.0
    weight_bytes_per_parameter: float | None = 2.0
    quantisation: str | None = None
    unknown_type: str | None = None

    @property
    def has_every_token(self) -> bool:
        """Whether all that the cache holds of a sequence grows with each token, so that bytes per token say it all."""
        return self.full_layers > 0 and self.windowed_layers == 0 and self.stateful_layers == 0

    @property
    def embeddings(self) -> int | None:
        """The parameters of the embedding and of the output; None where they are not given."""
        if self.vocabulary is None or self.hidden_size is None:
            return None
        return self.vocabulary * self.hidden_size * (1 if self.tied_embeddings else 2)

    def apply_quantisation(self, method: str, bytes_per_parameter: float) -> Self:
        """Return the shape with this quantisation of all its layers."""
        return replace(
            self,
            quantisation=method,
            weight_bytes_per_parameter=bytes_per_parameter,
            parameters=self.parameters and replace(self.parameters, plain=0),
        )


FP8: Final = (1.0, 0)
SCALED_PER_HEAD: Final = 8
"""Bytes of the two 32-bit scales per head of the per-token-head methods (v1/attention/backends/triton_attn.py)."""

KV_DTYPES: Final = {
    "float16": (2.0, 0),
    "bfloat16": (2.0, 0),
    "fp8": FP8,
    "fp8_e4m3": FP8,
    "fp8_e5m2": FP8,
    "fp8_inc": FP8,
    "fp8_per_token_head": (1.0, SCALED_PER_HEAD),
    "int8_per_token_head": (1.0, SCALED_PER_HEAD),
    "int4_per_token_head": (0.5, SCALED_PER_HEAD),
    "nvfp4": (9 / 16, 0),
}
"""Bytes of a value and of each head's scales, by vLLM's name of the cache's dtype (0.32, config/cache.py)."""


def count_bytes_per_token(
    shape: ModelShape,
    *,
    kv_dtype: str = "auto",
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
) -> int:
    """Return the bytes of KV cache that a token takes on the GPU that holds most.

    Keys and values: layers on the rank x KV heads on the rank x (key size + value size) x bytes of the dtype (vLLM,
    v1/kv_cache_interface.py, `AttentionSpec.page_size_bytes`); heads that tensor parallelism cannot divide are
    repeated on each rank. Latent attention keeps one vector per layer, on every rank whole. Layers with a window count
    in full, and states not at all.
    """
    layer, windowed = count_layer_bytes(shape, kv_dtype=kv_dtype, tensor_parallel=tensor_parallel)
    counts = shape.full_layers, shape.windowed_layers
    if layer == windowed:
        return ceil(sum(counts) / pipeline_parallel) * layer
    full, rest = (ceil(count / pipeline_parallel) for count in counts)
    return full * layer + rest * windowed


def count_layer_bytes(shape: ModelShape, *, kv_dtype: str, tensor_parallel: int) -> tuple[int, int]:
    """Return the bytes that a layer keeps of a token on each GPU: one that keeps every token, and one with a window."""
    value_bytes, scale_bytes = (
        (shape.kv_dtype_bytes, 0) if kv_dtype == "auto" else KV_DTYPES[kv_dtype]
    )
    if shape.latent_width is not None:
        latent = ceil(shape.latent_width * value_bytes)
        return latent, latent
    full, windowed = (
        max(1, kept.count // tensor_parallel)
        * (ceil((kept.key_size + kept.value_size) * value_bytes) + scale_bytes)
        for kept in (shape.heads, shape.windowed_heads or shape.heads)
    )
    return full, windowed


def count_engine_bytes_per_token(shape: ModelShape, kv_dtype: str, gpus: int | None) -> int | None:
    """Return the bytes of KV cache that a token takes on all GPUs of an engine; None where they cannot be known.

    They are the same however the engine is spread over its `gpus` (None: not known), unless it could keep copies: of a
    latent vector on any two, of KV heads on more GPUs than there are heads. A dtype or a type of model can be one that
    is not known here, and where layers keep a window or a state, bytes per token do not say what the cache holds.
    """
    copied = gpus != 1 if shape.latent_width is not None else (gpus or 1) > shape.heads.count
    is_known = shape.unknown_type is None and kv_dtype in {"auto", *KV_DTYPES}
    certain = shape.has_every_token and is_known and not copied
    return count_bytes_per_token(shape, kv_dtype=kv_dtype) if certain else None


def count_weights_bytes(
    shape: ModelShape,
    *,
    total_bytes: float | None = None,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    data_parallel: int = 1,
) -> int | None:
    """Return the bytes of weights on the GPU that holds most; None where they cannot be counted.

    `total_bytes` are those of the whole model, where they are known better than by counting. Tensor parallelism is
    taken to divide everything: what it repeats (norms, routers, some projections) is about one per cent. Data
    parallelism repeats everything but experts. The first and the last pipeline stage hold an embedding each.
    """
    total = count_model_bytes(shape) if total_bytes is None else total_bytes
    if total is None:
        return None
    embeddings, found = (shape.embeddings or 0) * shape.dtype_bytes, shape.parameters
    layers = max(0.0, total - embeddings)
    if found and found.total:
        each = shape.weight_bytes_per_parameter or shape.dtype_bytes
        counted = (found.total - found.plain) * each + found.plain * shape.dtype_bytes
        layers *= 1 - found.experts * each / counted * (1 - 1 / data_parallel)
    one = embeddings if shape.tied_embeddings else embeddings / 2
    ends = min(total, embeddings) if pipeline_parallel == 1 else one
    return ceil((layers / pipeline_parallel + ends) / tensor_parallel)


def count_model_bytes(shape: ModelShape, parameters: int | None = None) -> float | None:
    """Return the bytes of the whole model, of `parameters` or as many as are counted; None where they cannot be.

    Embeddings, encoders, and what the quantisation leaves out, keep the model's dtype.
    """
    each, counted = shape.weight_bytes_per_parameter, shape.parameters
    if each is None or (counted is None and parameters is None):
        return None
    if shape.embeddings is None:
        return None if parameters is None else parameters * each
    others = (shape.encoder and shape.encoder.parameters) or 0
    layers = counted.total if counted else 0
    if parameters is not None:
        layers = max(0, parameters - shape.embeddings - others)
    plain = min(layers, counted.plain) if counted else 0
    return (layers - plain) * each + (plain + shape.embeddings + others) * shape.dtype_bytes


STATE_BLOCKS: Final = 2
"""For a state: the running one, and one for prefix caching (`MambaSpec.max_memory_usage_bytes`, mode "align").

Mamba-2 keeps one more, at the end of the prompt (model_executor/layers/mamba/mamba_mixer2.py, `get_kv_cache_spec`).
"""


class KvLayout(Struct, frozen=True, kw_only=True):
    """vLLM's cut of one GPU's KV cache: blocks of equal size, each for the tokens of `block_layers`, a group.

    A sequence takes a block of every full group for each `block_tokens`, of every windowed group one for each
    `windowed_block_tokens` of its last `window_tokens` and `window_ends` more, and a fixed number for its states. A
    model that keeps nothing has blocks of 0 bytes, and takes none.
    """

    block_tokens: int
    block_layers: int
    block_bytes: int
    full_groups: int
    windowed_groups: int
    windowed_block_tokens: int
    window_tokens: int
    window_ends: int
    state_blocks: int

    def count_blocks(self, tokens: int) -> int:
        """Return the blocks that a sequence of this many tokens takes."""
        full = ceil(tokens / self.block_tokens)
        windowed = (
            ceil(min(tokens, self.window_tokens) / self.windowed_block_tokens) + self.window_ends
        )
        return self.full_groups * full + self.windowed_groups * windowed + self.state_blocks

    def find_longest(self, blocks: int, ceiling: int) -> int:
        """Return the most tokens, at most `ceiling`, of a sequence that takes at most so many blocks; 0 for none."""
        low, high = 0, ceil(ceiling / self.block_tokens)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (
                (middle, high)
                if self.count_blocks(middle * self.block_tokens) <= blocks
                else (low, middle - 1)
            )
        return min(ceiling, low * self.block_tokens)


def build_kv_layout(
    shape: ModelShape,
    *,
    block_tokens: int,
    in_flight_tokens: int,
    kv_dtype: str = "auto",
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
) -> KvLayout:
    """Return the cut of the KV cache.

    Groups are as large as the rarest kind of layers, so that all blocks are equal (vLLM 0.32,
    v1/core/kv_cache_utils.py, `_get_kv_cache_groups_uniform_page_size`); layers that keep less of a token have more
    tokens in a block (`unify_kv_cache_spec_page_size`). A window is longer by `in_flight_tokens`, those that are
    scheduled and not yet settled (v1/kv_cache_interface.py, `max_admission_blocks_per_request`), and may begin within a
    block; a chunk begins with one. Where layers keep a state, a block has as many tokens as it takes to hold one
    (platforms/interface.py, `_align_hybrid_block_size`), of latent attention a multiple of 128; a state whose size is
    not known counts as no larger than a block.
    """
    layer, windowed_layer = count_layer_bytes(
        shape, kv_dtype=kv_dtype, tensor_parallel=tensor_parallel
    )
    counts = [
        ceil(count / pipeline_parallel)
        for count in (shape.full_layers, shape.windowed_layers, shape.stateful_layers)
    ]
    there = [count for count in counts if count] or [0]
    group = (
        max(there) if max(there) < 1.5 * min(there) else min(there)
    )  # up to there, vLLM pads the rarer kind
    full, windowed, stateful = (ceil(count / group) if count else 0 for count in counts)
    least = max(block_tokens, 128) if shape.latent_width and shape.stateful_layers else block_tokens
    tokens = least * max(1, ceil(ceil((shape.state_bytes or 0) / tensor_parallel) / layer / least))
    page = max(layer if full else 0, windowed_layer if windowed else 0) * tokens
    full_pages, windowed_pages = (  # those that do not divide the common page are padded to it
        page // own if own and page and page % own == 0 else 1
        for own in (layer * tokens, windowed_layer * tokens)
    )
    return KvLayout(
        block_tokens=tokens * full_pages,
        block_layers=group,
        block_bytes=group * page,
        full_groups=full,
        windowed_groups=windowed,
        windowed_block_tokens=tokens * windowed_pages,
        window_tokens=(shape.window_tokens or 0) - (0 if shape.chunked else 1) + in_flight_tokens,
        window_ends=0 if shape.chunked else 1,
        state_blocks=(STATE_BLOCKS + shape.state_checkpoints) * stateful,
    )
