"""The memory of a model on a GPU: KV cache bytes per token, and weights."""

from math import ceil
from typing import Final, Self

from msgspec import Struct
from msgspec.structs import replace

from vllm_headroom.model import NO_TOKEN_BYTES
from vllm_headroom_tools.sizing.compressed import (
    COMPRESSED_BLOCK_TOKENS,
    CompressedCache,
    WindowedPart,
)
from vllm_headroom_tools.sizing.encoder import Encoder
from vllm_headroom_tools.sizing.layers import KvHeads
from vllm_headroom_tools.sizing.parameters import LayerParameters
from vllm_headroom_tools.sizing.sparse import SparseIndex


class ModelShape(Struct, frozen=True, kw_only=True):
    """A model's sizes from its configuration; a size is None if the configuration lacks it."""

    layers: int
    # The number of layers that keep keys and values of every token.
    full_layers: int
    # The number of layers that only keep keys and values of the last `window_tokens`.
    windowed_layers: int = 0
    window_tokens: int | None = None
    # Whether the window begins at the last multiple of `window_tokens` (a chunk). A window that is
    # not a chunk moves with each token.
    has_chunks: bool = False
    # The heads of a windowed layer. None if they equal `heads`, the heads of a full-attention
    # layer.
    windowed_heads: KvHeads | None = None
    # The number of layers that keep `state_bytes` per sequence instead of its tokens.
    stateful_layers: int = 0
    state_bytes: int | None = None
    # The number of additional states per sequence that this kind of state-space layer keeps.
    state_checkpoints: int = 0
    # The number of states that a layer keeps for speculative tokens.
    speculative_states: int = 0
    attention_heads: int | None = None
    heads: KvHeads
    # The values per token that multi-head latent attention keeps in each layer. None for other
    # kinds of attention.
    latent_width: int | None = None
    hidden_size: int | None = None
    vocabulary: int | None = None
    # The values per token in addition to the hidden state, summed over all layers.
    side_values: int = 0
    # The number of values per token in the widest MLP, summed over its experts.
    mlp_width: int | None = None
    experts_per_token: int = 1
    # The size of a draft head's own vocabulary. None if the head uses the model's vocabulary.
    draft_vocabulary: int | None = None
    # The class that serves the model, or None if the configuration does not name one.
    class_name: str | None = None
    # Whether the model computes embeddings, classes or rewards instead of generating tokens.
    is_pooling: bool = False
    # Whether there is no separate output matrix. Either the embedding also serves as one, or no
    # output is needed.
    has_tied_embeddings: bool = False
    parameters: LayerParameters | None = None
    # The image, video or audio encoder.
    encoder: Encoder | None = None
    max_model_len: int | None = None
    # The original length times YaRN's factor, or None if the model uses other rotary embeddings.
    yarn_length: int | None = None
    # The width of an expert, and the size of its input and output. MXFP4 pads all three.
    expert_width: int = 0
    expert_inputs: int | None = None
    # The compressed cache of DeepSeek V4.
    compression: CompressedCache | None = None
    # The index of sparse attention.
    index: SparseIndex | None = None
    # The number of values in the rotary position tables, which every GPU holds in full.
    position_values: int = 0
    # The bytes per parameter of the output matrix, if it is quantised.
    head_bytes: float | None = None
    # The number of the model's layers for speculative decoding.
    speculative_layers: int = 1
    # The bytes per parameter that is served without quantisation.
    dtype_bytes: float = 2.0
    # The bytes per parameter in the checkpoint.
    stored_bytes: float = 2.0
    # The bytes per value in the KV cache, unless overridden by a vLLM option.
    kv_dtype_bytes: float = 2.0
    # The bytes per quantised parameter, or None if unknown.
    weight_bytes_per_parameter: float | None = 2.0
    # The quantisation method, or None if the model is not quantised.
    quantisation: str | None = None
    # The model type, or None if its KV cache has been checked against vLLM's.
    unknown_type: str | None = None

    @property
    def has_every_token(self) -> bool:
        """Return whether every layer that has a cache keeps every token.

        Only a KV cache of which this is true can be described in bytes per token.
        """
        return self.full_layers > 0 and self.windowed_layers == 0 and self.stateful_layers == 0

    @property
    def has_groups(self) -> bool:
        """Return whether several kinds of layers share the KV cache's blocks."""
        kinds = (self.full_layers, self.windowed_layers, self.stateful_layers)
        return sum(layers > 0 for layers in kinds) > 1

    @property
    def embeddings(self) -> int | None:
        """Return the number of parameters of the embedding and the output matrix.

        Returns None if their sizes are unknown.
        """
        if self.vocabulary is None or self.hidden_size is None:
            return None
        matrices = 1 if self.has_tied_embeddings else 2
        return self.vocabulary * self.hidden_size * matrices

    @property
    def position_bytes(self) -> int:
        """Return the bytes of the position tables, which vLLM counts as weights."""
        return ceil(self.position_values * self.dtype_bytes)

    @property
    def embeddings_bytes(self) -> float:
        """Return the bytes of the embeddings, or 0 if their sizes are unknown."""
        parameters = self.embeddings or 0
        if self.head_bytes is None or self.has_tied_embeddings:
            return parameters * self.dtype_bytes
        return parameters / 2 * (self.dtype_bytes + self.head_bytes)

    def add_speculation(self, tokens: int) -> Self:
        """Return the shape with the model's heads for multi-token prediction.

        The heads are `speculative_layers` additional layers that keep every token. Each additional
        layer is as large as the model's average layer. A state is also kept for each speculative
        token (vLLM 0.33, v1/kv_cache_interface.py, `MambaSpec.num_speculative_blocks`).
        """
        parameters = self.parameters
        if parameters is not None:
            parameters = parameters.scale(1 + self.speculative_layers / self.layers)
        index = self.index
        if index is not None:
            further_layers = (True,) * self.speculative_layers
            index = replace(index, layers=index.layers + further_layers)
        return replace(
            self,
            full_layers=self.full_layers + self.speculative_layers,
            speculative_states=tokens,
            parameters=parameters,
            index=index,
        )

    def apply_quantisation(self, method: str, bytes_per_parameter: float | None) -> Self:
        """Return the shape with all of its layers quantised by this method.

        `bytes_per_parameter` is None if it is unknown.
        """
        parameters = self.parameters
        if parameters is not None:
            parameters = replace(parameters, unquantised=0)
        return replace(
            self,
            quantisation=method,
            weight_bytes_per_parameter=bytes_per_parameter,
            parameters=parameters,
        )


class KvDtype(Struct, frozen=True):
    """The bytes per value of one of vLLM's KV cache dtypes."""

    value_bytes: float
    # The bytes of the scales kept per head and token.
    scale_bytes: int = 0


FLOAT16_CACHE: Final = KvDtype(2.0)
FP8_CACHE: Final = KvDtype(1.0)

HEAD_SCALES_BYTES: Final = 8
"""The bytes that the per-token-head methods add to each head for two 32-bit scales
(v1/attention/backends/triton_attn.py).
"""

SPARSE_FP8_DTYPE: Final = "fp8_ds_mla"
SPARSE_NVFP4_DTYPE: Final = "nvfp4_ds_mla"

KV_DTYPES: Final = {
    "float16": FLOAT16_CACHE,
    "bfloat16": FLOAT16_CACHE,
    "fp8": FP8_CACHE,
    "fp8_e4m3": FP8_CACHE,
    "fp8_e5m2": FP8_CACHE,
    "fp8_inc": FP8_CACHE,
    SPARSE_FP8_DTYPE: FP8_CACHE,
    "fp8_per_token_head": KvDtype(1.0, HEAD_SCALES_BYTES),
    "int8_per_token_head": KvDtype(1.0, HEAD_SCALES_BYTES),
    "int4_per_token_head": KvDtype(0.5, HEAD_SCALES_BYTES),
    "nvfp4": KvDtype(9 / 16),
    "nvfp4_4over6": KvDtype(9 / 16),
    SPARSE_NVFP4_DTYPE: KvDtype(9 / 16),
}
"""The KV cache dtypes by their names in vLLM (0.33, config/cache.py), except PACKED_KV_DTYPES."""


class PackedKvDtype(Struct, frozen=True):
    """A KV cache dtype that packs each head's keys, values and scales together."""

    key_bits: int
    value_bits: int

    def count_head_bytes(self, heads: KvHeads) -> int:
        """Return the bytes per token in one head.

        Keys with fewer than 8 bits have a 16-bit norm. Values have a 16-bit scale and a 16-bit
        offset. The sum is rounded to an even number (layers/quantization/turboquant/config.py,
        `slot_size_aligned`).
        """
        key_bytes = heads.key_size
        if self.key_bits < FP8_BITS:
            key_bytes = ceil(heads.key_size * self.key_bits / 8) + 2
        value_bytes = ceil(heads.value_size * self.value_bits / 8) + 4
        return 2 * ceil((key_bytes + value_bytes) / 2)


FP8_BITS: Final = 8

PACKED_KV_DTYPES: Final = {
    "turboquant_k8v4": PackedKvDtype(key_bits=8, value_bits=4),
    "turboquant_4bit_nc": PackedKvDtype(key_bits=4, value_bits=4),
    "turboquant_k3v4_nc": PackedKvDtype(key_bits=3, value_bits=4),
    "turboquant_3bit_nc": PackedKvDtype(key_bits=3, value_bits=3),
}
"""The TurboQuant presets (vLLM 0.24 to 0.33)."""

BOUNDARY_LAYERS: Final = 2
"""With these presets, the model's first and last layers keep the model's own dtype. This is the
number of layers at each end. If any layers keep a state, no layer keeps the model's dtype
(`get_boundary_skip_layers`).
"""


SPARSE_FP8_BYTES: Final = 656
"""The bytes per token in FP8 with sparse attention on Hopper. They are 512 values, their scales,
and a rotary key. The key has 64 16-bit values (vLLM 0.33, "fp8_ds_mla"). Blackwell needs only 576
bytes.
"""

SPARSE_NVFP4_BYTES: Final = 352
"""The bytes per token in NVFP4 with sparse attention on Blackwell (vLLM 0.33,
layers/attention/mla_attention.py, "nvfp4_ds_mla").
"""

SPARSE_BLOCK_TOKENS: Final = 64
"""The number of tokens in a block of latent attention with an index (FlashMLA)."""


def count_bytes_per_token(
    shape: ModelShape,
    *,
    kv_dtype: str = "auto",
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
) -> int:
    """Return the KV cache bytes per token on the GPU that holds the most.

    The result is layers x KV heads x head bytes. The head bytes are (key size + value size) x bytes
    of the dtype. Layers and heads are those on the rank. The source is vLLM,
    v1/kv_cache_interface.py, `AttentionSpec.page_size_bytes`. Heads that tensor parallelism cannot
    divide are replicated on each rank. Latent attention keeps one vector per layer, in full on
    every rank. Sliding-window layers are counted like any others, and states are not counted.
    """
    if shape.compression is not None:
        return ceil(shape.compression.bytes_per_token / pipeline_parallel)
    full_bytes, windowed_bytes = count_layer_bytes(
        shape, kv_dtype=kv_dtype, tensor_parallel=tensor_parallel
    )
    index_bytes = count_index_bytes(shape, pipeline_parallel)
    index_bytes += _count_boundary_bytes(shape, kv_dtype, tensor_parallel, pipeline_parallel)
    if full_bytes == windowed_bytes:
        layers = shape.full_layers + shape.windowed_layers
        return ceil(layers / pipeline_parallel) * full_bytes + index_bytes
    # How vLLM distributes full and windowed layers across the stages is unknown here. Both numbers
    # are therefore rounded up.
    full_layers = ceil(shape.full_layers / pipeline_parallel)
    windowed_layers = ceil(shape.windowed_layers / pipeline_parallel)
    return full_layers * full_bytes + windowed_layers * windowed_bytes + index_bytes


def _count_boundary_bytes(
    shape: ModelShape, kv_dtype: str, tensor_parallel: int, pipeline_parallel: int
) -> int:
    """Return a stage's additional bytes per token if not all layers are packed."""
    if kv_dtype not in PACKED_KV_DTYPES or shape.stateful_layers:
        return 0
    packed_bytes, _ = count_layer_bytes(shape, kv_dtype=kv_dtype, tensor_parallel=tensor_parallel)
    own_bytes, _ = count_layer_bytes(shape, kv_dtype="auto", tensor_parallel=tensor_parallel)
    # A single stage contains both ends of the model. With several stages, each contains at most one
    # end.
    layers = BOUNDARY_LAYERS if pipeline_parallel > 1 else 2 * BOUNDARY_LAYERS
    return min(layers, shape.full_layers) * (own_bytes - packed_bytes)


def count_index_bytes(shape: ModelShape, pipeline_parallel: int) -> int:
    """Return the bytes per token in the sparse attention index, summed over a stage's layers.

    Returns 0 for a model without an index.
    """
    if shape.index is None:
        return 0
    return ceil(shape.index.layer_count / pipeline_parallel) * shape.index.bytes_per_token


def count_layer_bytes(shape: ModelShape, *, kv_dtype: str, tensor_parallel: int) -> tuple[int, int]:
    """Return the bytes per token in one layer's KV cache on each GPU.

    The first value is for a layer with every token. The second is for a sliding-window layer.
    """
    packed = PACKED_KV_DTYPES.get(kv_dtype)
    if packed is not None:
        heads_on_rank = max(1, shape.heads.count // tensor_parallel)
        packed_bytes = heads_on_rank * packed.count_head_bytes(shape.heads)
        return packed_bytes, packed_bytes
    cache = KvDtype(shape.kv_dtype_bytes) if kv_dtype == "auto" else KV_DTYPES[kv_dtype]
    if shape.latent_width is not None and kv_dtype == SPARSE_NVFP4_DTYPE:
        return SPARSE_NVFP4_BYTES, SPARSE_NVFP4_BYTES
    if shape.latent_width is not None:
        # DeepSeek's sparse attention has a special FP8 layout with scales between the values.
        latent_bytes = ceil(shape.latent_width * cache.value_bytes)
        if shape.index is not None and cache.value_bytes == 1:
            latent_bytes = SPARSE_FP8_BYTES
        return latent_bytes, latent_bytes
    full_bytes = _count_heads_bytes(shape.heads, cache, tensor_parallel)
    windowed_heads = shape.windowed_heads or shape.heads
    return full_bytes, _count_heads_bytes(windowed_heads, cache, tensor_parallel)


def _count_heads_bytes(heads: KvHeads, cache: KvDtype, tensor_parallel: int) -> int:
    """Return the bytes per token that one layer keeps for the heads on one rank."""
    heads_on_rank = max(1, heads.count // tensor_parallel)
    values_bytes = ceil((heads.key_size + heads.value_size) * cache.value_bytes)
    return heads_on_rank * (values_bytes + cache.scale_bytes)


def count_engine_bytes_per_token(shape: ModelShape, kv_dtype: str, gpus: int | None) -> int | None:
    """Return the KV cache bytes per token, summed over all of an engine's GPUs.

    Returns NO_TOKEN_BYTES if layers form groups. The result does not depend on how the engine is
    spread across its GPUs. `gpus` is None if their number is unknown. Returns None if the bytes
    cannot be determined, for one of these reasons:

    - There may be copies of latent vectors, as with two or more GPUs.
    - There may be copies of KV heads, as with more GPUs than heads.
    - The dtype or the model type is unknown.
    - The dtype's layout depends on the card.
    - Bytes per token do not describe the cache, due to sliding-window or state-space layers.
    - There is a sparse attention index, which every GPU holds in full.
    """
    if shape.has_groups:
        return NO_TOKEN_BYTES
    if shape.unknown_type is not None or not shape.has_every_token or shape.index is not None:
        return None
    if kv_dtype == SPARSE_FP8_DTYPE or kv_dtype not in {"auto", *KV_DTYPES}:
        return None
    # If there are more GPUs than heads, each head is stored several times.
    has_copied_heads = shape.latent_width is None and (gpus or 1) > shape.heads.count
    has_copied_latents = shape.latent_width is not None and gpus != 1
    if has_copied_heads or has_copied_latents:
        return None
    return count_bytes_per_token(shape, kv_dtype=kv_dtype)


def count_weights_bytes(
    shape: ModelShape,
    *,
    total_bytes: float | None = None,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    data_parallel: int = 1,
) -> int | None:
    """Return the bytes of weights on the GPU that holds the most.

    Returns None if the weights are unknown. If `total_bytes` gives the size of the whole model,
    nothing is counted. Tensor parallelism is assumed to divide all weights. The weights that tensor
    parallelism replicates, such as norms and routers, amount to about one percent. Data parallelism
    divides the experts and replicates everything else. The first and last pipeline stages have one
    embedding matrix each.
    """
    model_bytes = count_model_bytes(shape) if total_bytes is None else total_bytes
    if model_bytes is None:
        return None
    embeddings_bytes = shape.embeddings_bytes
    # All parameters except the embeddings are in the layers, which the pipeline divides.
    layers_bytes = max(0.0, model_bytes - embeddings_bytes)
    experts_on_others = 1 - 1 / data_parallel
    layers_bytes *= 1 - _measure_experts_ratio(shape) * experts_on_others
    if pipeline_parallel == 1:
        stage_embeddings_bytes = min(model_bytes, embeddings_bytes)
    elif shape.has_tied_embeddings:
        # Tied embeddings are a single matrix, which both the first and the last stage need.
        stage_embeddings_bytes = embeddings_bytes
    else:
        stage_embeddings_bytes = embeddings_bytes / 2
    padding_ratio = _measure_padding_ratio(shape, tensor_parallel)
    layers_bytes *= 1 + _measure_experts_ratio(shape) * padding_ratio
    stage_bytes = layers_bytes / pipeline_parallel + stage_embeddings_bytes
    return ceil(stage_bytes / tensor_parallel)


MXFP4_INPUT_STEP: Final = 256
MXFP4_WIDTH_STEP: Final = 128
"""vLLM pads MXFP4 experts to multiples of these widths. Marlin's and FlashInfer's kernels require
it. The source is vLLM 0.33, fused_moe/oracle/mxfp4.py,
`mxfp4_round_up_hidden_size_and_intermediate_size`. Logs show 65.97 GiB for gpt-oss 120B on an H100.
For gpt-oss 20B on an A100, they show 13.72 GiB.
"""


def _measure_padding_ratio(shape: ModelShape, tensor_parallel: int) -> float:
    """Return the fraction by which padding enlarges the experts.

    Returns 0 if vLLM does not pad them.
    """
    is_mxfp4 = shape.quantisation is not None and "mxfp4" in shape.quantisation
    if not is_mxfp4 or not shape.expert_width or shape.expert_inputs is None:
        return 0.0
    width = shape.expert_width / tensor_parallel
    padded_inputs = ceil(shape.expert_inputs / MXFP4_INPUT_STEP) * MXFP4_INPUT_STEP
    padded_width = ceil(width / MXFP4_WIDTH_STEP) * MXFP4_WIDTH_STEP
    return padded_inputs / shape.expert_inputs * padded_width / width - 1


def _measure_experts_ratio(shape: ModelShape) -> float:
    """Return the experts' share, between 0 and 1, of the bytes of all layers.

    Returns 0 if the parameters cannot be counted.
    """
    parameters = shape.parameters
    if parameters is None or parameters.total == 0:
        return 0.0
    parameter_bytes = shape.weight_bytes_per_parameter or shape.dtype_bytes
    quantised_bytes = (parameters.total - parameters.unquantised) * parameter_bytes
    layers_bytes = quantised_bytes + parameters.unquantised * shape.dtype_bytes
    return parameters.experts * parameter_bytes / layers_bytes


def count_model_bytes(shape: ModelShape, parameters: int | None = None) -> float | None:
    """Return the size of the whole model's weights, or None if they cannot be counted.

    If given, `parameters` replaces the number counted from the configuration. Embeddings, encoders
    and layers that are not quantised are in the model's dtype.
    """
    parameter_bytes = shape.weight_bytes_per_parameter
    counted = shape.parameters
    if parameter_bytes is None or (counted is None and parameters is None):
        return None
    # If the size of the embeddings is unknown, they cannot be counted separately.
    if shape.embeddings is None:
        return None if parameters is None else parameters * parameter_bytes
    encoder_parameters = 0
    if shape.encoder is not None:
        encoder_parameters = shape.encoder.parameters or 0
    layers_parameters = 0
    # A given number is for the whole model, including embeddings and encoders.
    if parameters is not None:
        layers_parameters = max(0, parameters - shape.embeddings - encoder_parameters)
    elif counted is not None:
        layers_parameters = counted.total
    unquantised = 0
    if counted is not None:
        unquantised = min(layers_parameters, counted.unquantised)
    in_model_dtype = unquantised + encoder_parameters
    quantised = layers_parameters - unquantised
    layers_bytes = quantised * parameter_bytes + in_model_dtype * shape.dtype_bytes
    return layers_bytes + shape.embeddings_bytes


STATE_BLOCKS: Final = 2
"""The number of states that a layer keeps per sequence. There is the current one and one for prefix
caching (`MambaSpec.max_memory_usage_bytes`, mode "align").

Mamba-2 keeps an additional state, from the end of the prompt
(model_executor/layers/mamba/mamba_mixer2.py, `get_kv_cache_spec`).
"""

PADDING_LIMIT: Final = 1.5
"""The limit on the ratio of layers between the most frequent and the rarest kind. Below it, vLLM
pads the rarer kinds to groups of the same size.
"""

LATENT_BLOCK_TOKENS: Final = 128
"""A block of latent attention holds a multiple of this many tokens. This applies to models with
state-space layers.
"""


class KvLayout(Struct, frozen=True, kw_only=True):
    """vLLM's division of one GPU's KV cache into blocks of equal size.

    Layers of the same kind form groups, and a sequence has blocks in each group. In a model without
    a cache, a block has 0 bytes and a sequence takes no blocks.
    """

    # The number of tokens in a block of a full-attention group.
    block_tokens: int
    # The number of layers in a group, whose keys and values share a block.
    block_layers: int
    block_bytes: int
    # The number of full-attention groups. In each of these groups, a sequence takes one block per
    # `block_tokens` tokens.
    full_groups: int
    # The number of windowed groups. In each windowed group, a sequence takes one block per
    # `windowed_block_tokens` of its window. The window is its last `window_tokens`. The sequence
    # also takes `window_ends` blocks.
    windowed_groups: int
    windowed_block_tokens: int
    window_tokens: int
    window_ends: int
    # The number of blocks that a sequence takes for its states, regardless of its length.
    state_blocks: int
    # Additional windowed groups with other window lengths (DeepSeek V4).
    windowed_parts: tuple[WindowedPart, ...] = ()

    def count_blocks(self, tokens: int) -> int:
        """Return how many blocks a sequence with this many tokens takes across all groups."""
        full_blocks = ceil(tokens / self.block_tokens)
        tokens_in_window = min(tokens, self.window_tokens)
        windowed_blocks = ceil(tokens_in_window / self.windowed_block_tokens) + self.window_ends
        part_blocks = 0
        for part in self.windowed_parts:
            part_tokens = min(tokens, part.window_tokens)
            # Add one block, because a window may begin within a block.
            part_blocks += part.groups * (ceil(part_tokens / part.block_tokens) + 1)
        return (
            self.full_groups * full_blocks
            + self.windowed_groups * windowed_blocks
            + self.state_blocks
            + part_blocks
        )

    def find_longest(self, blocks: int, ceiling: int) -> int:
        """Return the maximum length of a sequence that takes at most this many blocks.

        The result is a multiple of the tokens in a block, capped at `ceiling`. The result is found
        by bisection, and is 0 if not even one block fits.
        """
        # In units of whole blocks.
        low = 0
        high = ceil(ceiling / self.block_tokens)
        while low < high:
            # Round the middle up, so that the search ends when a single value is left.
            middle = (low + high + 1) // 2
            if self.count_blocks(middle * self.block_tokens) <= blocks:
                low = middle
            else:
                high = middle - 1
        return min(ceiling, low * self.block_tokens)


def build_kv_layout(
    shape: ModelShape,
    *,
    block_tokens: int,
    in_flight_tokens: int,
    kv_dtype: str = "auto",
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    sequence_states: int | None = None,
) -> KvLayout:
    """Return how vLLM divides the KV cache of one GPU into blocks.

    `sequence_states` is the number of states that a layer keeps per sequence. The default is that
    of vLLM 0.32.

    - All blocks have the same size, because all groups have equally many layers. The source is
      v1/core/kv_cache_utils.py, `_get_kv_cache_groups_uniform_page_size`.
    - Layers that keep fewer bytes per token have more tokens per block
      (`unify_kv_cache_spec_page_size`).
    - A window is extended by `in_flight_tokens`, the scheduled but unfinished tokens
      (v1/kv_cache_interface.py, `max_admission_blocks_per_request`). A window may begin within a
      block and therefore takes one more block. A chunk always begins with a block.
    """
    if shape.compression is not None:
        return _build_compressed_layout(shape.compression, in_flight_tokens, pipeline_parallel)
    full_bytes, windowed_bytes = count_layer_bytes(
        shape, kv_dtype=kv_dtype, tensor_parallel=tensor_parallel
    )
    full_layers = ceil(shape.full_layers / pipeline_parallel)
    windowed_layers = ceil(shape.windowed_layers / pipeline_parallel)
    stateful_layers = ceil(shape.stateful_layers / pipeline_parallel)
    group_layers = _choose_group_layers((full_layers, windowed_layers, stateful_layers))
    tokens = _choose_block_tokens(shape, block_tokens, full_bytes, tensor_parallel)

    # A page is one layer's part of a block. Full and windowed layers may need pages of different
    # sizes. vLLM uses the larger size for all layers. The kind of layer that needs less may have
    # several times as many tokens per page.
    full_page_bytes = full_bytes * tokens
    windowed_page_bytes = windowed_bytes * tokens
    page_bytes = 0
    if full_layers:
        page_bytes = full_page_bytes
    if windowed_layers:
        page_bytes = max(page_bytes, windowed_page_bytes)

    if sequence_states is None:
        sequence_states = STATE_BLOCKS + shape.state_checkpoints
    window_ends = 0 if shape.has_chunks else 1
    return KvLayout(
        block_tokens=tokens * _count_pages(page_bytes, full_page_bytes),
        block_layers=group_layers,
        block_bytes=group_layers * page_bytes
        + count_index_bytes(shape, pipeline_parallel) * tokens
        + _count_boundary_bytes(shape, kv_dtype, tensor_parallel, pipeline_parallel) * tokens,
        full_groups=_count_groups(full_layers, group_layers),
        windowed_groups=_count_groups(windowed_layers, group_layers),
        windowed_block_tokens=tokens * _count_pages(page_bytes, windowed_page_bytes),
        window_tokens=(shape.window_tokens or 0) - window_ends + in_flight_tokens,
        window_ends=window_ends,
        state_blocks=sequence_states * _count_groups(stateful_layers, group_layers),
    )


def _build_compressed_layout(
    cache: CompressedCache, in_flight_tokens: int, pipeline_parallel: int
) -> KvLayout:
    """Return how vLLM divides DeepSeek V4's compressed cache, which every GPU holds in full."""
    blocks = cache.build_blocks(pipeline_parallel)
    parts = []
    for part in blocks.windowed_parts:
        # As with other windows, the latest token is one of the tokens in flight.
        window_tokens = part.window_tokens - 1 + in_flight_tokens
        parts.append(replace(part, window_tokens=window_tokens))
    return KvLayout(
        block_tokens=COMPRESSED_BLOCK_TOKENS,
        block_layers=cache.fine_layers + cache.coarse_layers,
        block_bytes=blocks.block_bytes,
        full_groups=1,
        windowed_groups=0,
        windowed_block_tokens=COMPRESSED_BLOCK_TOKENS,
        window_tokens=0,
        window_ends=0,
        state_blocks=0,
        windowed_parts=tuple(parts),
    )


def _choose_group_layers(layer_counts: tuple[int, ...]) -> int:
    """Return the number of layers in a group, or 0 if there are no layers.

    A group has as many layers as the rarest kind. If the kinds are almost equally frequent, the
    most frequent kind sets the number, and vLLM pads the other kinds.
    """
    counts = [count for count in layer_counts if count]
    if not counts:
        return 0
    if max(counts) < PADDING_LIMIT * min(counts):
        return max(counts)
    return min(counts)


def _count_groups(layers: int, group_layers: int) -> int:
    return ceil(layers / group_layers) if layers else 0


def _choose_block_tokens(
    shape: ModelShape, block_tokens: int, full_bytes: int, tensor_parallel: int
) -> int:
    """Return the tokens per block: `block_tokens`, or more if a block must hold a state.

    Source: platforms/interface.py, `_align_hybrid_block_size`. A state of unknown size is assumed
    to fit in a block.
    """
    step_tokens = block_tokens
    if shape.latent_width and shape.index is not None:
        step_tokens = max(block_tokens, SPARSE_BLOCK_TOKENS)
    if shape.latent_width and shape.stateful_layers:
        step_tokens = max(block_tokens, LATENT_BLOCK_TOKENS)
    state_bytes = ceil((shape.state_bytes or 0) / tensor_parallel)
    steps = ceil(state_bytes / full_bytes / step_tokens)
    return step_tokens * max(1, steps)


def _count_pages(page_bytes: int, own_page_bytes: int) -> int:
    """Return how many pages of one kind of layer fit in a common page.

    If the common size is not a multiple of the kind's own page size, vLLM pads the page and the
    number is 1.
    """
    if page_bytes and own_page_bytes and page_bytes % own_page_bytes == 0:
        return page_bytes // own_page_bytes
    return 1
