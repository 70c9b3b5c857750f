"""The question that `plan` answers: a model and vLLM's settings."""

from math import ceil
from typing import Final

from msgspec import Struct

from vllm_headroom.units import GIB
from vllm_headroom_tools.sizing.drafts import add_draft_cache
from vllm_headroom_tools.sizing.encoder import EncoderInput
from vllm_headroom_tools.sizing.footprint import (
    PACKED_KV_DTYPES,
    SPARSE_NVFP4_DTYPE,
    ModelShape,
    count_model_bytes,
    count_weights_bytes,
)
from vllm_headroom_tools.sizing.measured import MeasuredStart
from vllm_headroom_tools.sizing.releases import NEWEST_RELEASE, Release

DEFAULT_UTILIZATION: Final = NEWEST_RELEASE.utilization
"""The default `gpu_memory_utilization` of the newest vLLM release."""

SAFE_UTILIZATION: Final = 0.95
"""The highest value that vLLM's author considers safe (vllm-project/vllm#1298)."""

DEFAULT_LORA_RANK: Final = 16
"""vLLM's default `max_lora_rank` (config/lora.py)."""

DEFAULT_BLOCK_TOKENS: Final = 16
"""vLLM's `DEFAULT_BLOCK_SIZE` on NVIDIA GPUs (config/cache.py)."""

TYPICAL_TOKENS: Final = 2048
"""Our choice: the length of a typical request. The report shows how many requests of this length
fit at the same time.
"""


class CardDefaults(Struct, frozen=True):
    """The defaults of vLLM's server for cards of at least a certain size."""

    # The size of the smallest card with these defaults.
    card_bytes: int
    max_num_seqs: int
    max_num_batched_tokens: int


SMALL_CARD: Final = CardDefaults(0, 256, 2048)
LARGE_CARD: Final = CardDefaults(70 * GIB, 1024, 8192)
LARGEST_CARD: Final = CardDefaults(160 * GIB, 1024, 16384)

CARD_DEFAULTS: Final = (LARGEST_CARD, LARGE_CARD, SMALL_CARD)
"""The rows by size, largest first. A card uses the first row whose size is at most the card's size.

Source: vLLM 0.32, engine/arg_utils.py, `get_batch_defaults`. It treats an A100 with 80 GiB as a
small card.
"""


class Question(Struct, frozen=True, kw_only=True):
    """A model and vLLM's settings, under their names in vLLM; unknown settings are None."""

    shape: ModelShape
    release: Release = NEWEST_RELEASE
    # The whole model's bytes of weights as served, and its number of parameters. A value that is
    # None is derived from the configuration.
    checkpoint_bytes: int | None = None
    parameters: int | None = None
    kv_cache_dtype: str = "auto"
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    enable_expert_parallel: bool = False
    # The part of each GPU's weights that is kept in host memory.
    cpu_offload_bytes: float = 0
    # The size of each engine's KV cache tier in host memory.
    kv_offloading_bytes: float = 0
    # The size of the cache for processed images in host memory. Each server and each core has its
    # own image cache.
    mm_processor_cache_bytes: float = 4 * GIB
    host_memory_bytes: int | None = None
    # The number of LoRA adapters that can be loaded. 0 if adapters are not used.
    max_loras: int = 0
    max_lora_rank: int = DEFAULT_LORA_RANK
    # The draft model of speculative decoding.
    draft: ModelShape | None = None
    # The memory of one card. With `unified_memory`, it is the memory of the machine, which the card
    # shares.
    gpu_memory_bytes: int | None = None
    # The card's name in the table of cards. None if only the card's memory is given.
    card_name: str | None = None
    # The number of cards, or None if it is not given.
    card_count: int | None = None
    gpu_memory_utilization: float = DEFAULT_UTILIZATION
    max_model_len: int | None = None
    max_num_seqs: int = SMALL_CARD.max_num_seqs
    max_num_batched_tokens: int = SMALL_CARD.max_num_batched_tokens
    block_size: int = DEFAULT_BLOCK_TOKENS
    typical_len: int = TYPICAL_TOKENS
    # The size of the KV cache, if an option sets it. With this option, vLLM ignores the
    # utilization.
    kv_cache_memory_bytes: int | None = None
    enforce_eager: bool = False
    # Whether prefix caching is enabled, or None for the release's default.
    enable_prefix_caching: bool | None = None
    unified_memory: bool = False
    # The number of GPUs in a tensor-parallel group that share a sequence's tokens.
    decode_context_parallel_size: int = 1
    # Whether every GPU holds the whole encoder (`--mm-encoder-tp-mode data`).
    has_whole_encoder: bool = False
    # Whether speculative decoding is used, and vLLM's name for the method.
    has_speculation: bool = False
    speculation_method: str | None = None
    # Whether a draft model is used whose configuration is not given.
    has_unknown_draft: bool = False
    # The figures from a startup log, or None if there is no log.
    measured: MeasuredStart | None = None
    # The name of an EAGLE head that is included even though its configuration is unknown.
    assumed_draft: str | None = None
    # vLLM options that were given but have no effect on the estimate.
    ignored_options: tuple[str, ...] = ()

    @property
    def has_prefix_states(self) -> bool:
        """Return whether state-space layers also keep states of cached prefixes."""
        if self.enable_prefix_caching is not None:
            return self.enable_prefix_caching
        return self.release.has_prefix_states

    @property
    def has_only_second_runner(self) -> bool:
        """Return whether vLLM's second model runner is certain to serve the model."""
        return self.release.has_only_second_runner and self.may_have_second_runner

    @property
    def may_have_second_runner(self) -> bool:
        """Return whether vLLM's second model runner may serve the model (config/vllm.py)."""
        release = self.release
        shape = self.shape
        if self.speculation_method in release.first_runner_methods:
            return False
        if release.has_only_second_runner:
            return True
        has_experts = shape.experts_per_token > 1
        is_plain = not has_experts and shape.quantisation is None
        if shape.is_pooling or (release.has_plain_second_runner and not is_plain):
            return False
        if shape.class_name in release.second_runner_classes:
            return True
        if shape.stateful_layers:
            return False
        # If the model's class is unknown, the second runner may serve it.
        if shape.class_name is None and release.second_runner_classes:
            return True
        return release.has_dense_second_runner and not has_experts

    @property
    def sequence_states(self) -> int:
        """Return how many states a layer keeps per sequence (`MambaSpec.max_memory_usage_bytes`).

        A layer keeps the current state, and one for each speculative token. With prefix caching, it
        keeps an additional state. With prefix caching, a Mamba-2 layer also keeps the state at the
        end of the prompt.
        """
        states = 1 + self.shape.speculative_states
        if self.has_prefix_states:
            states += 1
            if self.release.has_state_checkpoints:
                states += self.shape.state_checkpoints
        return states

    @property
    def cache_shape(self) -> ModelShape:
        """Return the shape with all layers that share the KV cache's blocks, including a draft's.

        If the model and the draft keep every token, the draft's cache enlarges each block.
        """
        draft = self.draft
        if draft is None or (self.shape.has_every_token and draft.has_every_token):
            return self.shape
        return add_draft_cache(self.shape, draft)

    @property
    def gpus(self) -> int:
        """Return the total number of GPUs of all engines."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size

    @property
    def weights_bytes(self) -> int | None:
        """Return the bytes of weights on the GPU that holds the most.

        Draft and adapters are included. Returns None if any of these cannot be counted.
        """
        model_bytes: float | None = self.checkpoint_bytes
        if model_bytes is None:
            model_bytes = count_model_bytes(self.shape, self.parameters)
        own_bytes = count_weights_bytes(
            self.shape,
            total_bytes=model_bytes,
            tensor_parallel=self.tensor_parallel_size,
            pipeline_parallel=self.pipeline_parallel_size,
            data_parallel=self.data_parallel_size,
        )
        draft_bytes: int | None = 0
        if self.draft is not None:
            draft_bytes = count_weights_bytes(self.draft, tensor_parallel=self.tensor_parallel_size)
        adapters_bytes = self.adapters_bytes
        if own_bytes is None or draft_bytes is None or adapters_bytes is None:
            return None
        # Offloaded weights are on the host.
        own_on_gpu_bytes = max(0, ceil(own_bytes - self.cpu_offload_bytes))
        own_on_gpu_bytes += self.shape.position_bytes + self._repeated_encoder_bytes
        return own_on_gpu_bytes + draft_bytes + adapters_bytes

    @property
    def _repeated_encoder_bytes(self) -> int:
        """Return the additional bytes per GPU that a replicated encoder takes."""
        encoder = self.shape.encoder
        if encoder is None or encoder.parameters is None or not self.has_whole_encoder:
            return 0
        repeated_ratio = 1 - 1 / self.tensor_parallel_size
        return ceil(encoder.parameters * self.shape.dtype_bytes * repeated_ratio)

    @property
    def has_uncounted_weights(self) -> bool:
        """Return whether there is an image or audio encoder whose weights cannot be counted."""
        if self.checkpoint_bytes is not None or self.parameters is not None:
            return False
        return self.shape.encoder is not None and self.shape.encoder.parameters is None

    @property
    def has_uncounted_activations(self) -> bool:
        """Return whether vLLM profiles an encoder whose largest image or video is unknown."""
        return self.shape.encoder is not None and self.largest_input is None

    @property
    def largest_input(self) -> EncoderInput | None:
        """Return the largest image or video.

        Returns None if it is unknown or there is no encoder.
        """
        return self.shape.encoder.largest_input if self.shape.encoder else None

    @property
    def encoder_items(self) -> int | None:
        """Return how many of the largest images or videos vLLM profiles at once.

        The number is at least 1. More items must fit in the tokens of a batch. The source is vLLM
        0.32, multimodal/encoder_budget.py, `_get_max_items`. Returns None if the largest image and
        video are unknown.
        """
        if self.largest_input is None:
            return None
        item_tokens = self.largest_input.tokens
        prompt_tokens = self.max_model_len or self.max_num_batched_tokens
        items_per_prompt = max(1, prompt_tokens // item_tokens)
        items_per_batch = self.max_num_batched_tokens // item_tokens
        return max(1, min(items_per_batch, self.max_num_seqs * items_per_prompt))

    @property
    def adapters_bytes(self) -> int | None:
        """Return the bytes that vLLM reserves on each GPU for LoRA adapters.

        The result may be 0. Returns None if the model's parameters cannot be counted. For each
        matrix of the model, an adapter has two matrices in the model's dtype. The two matrices have
        inputs x rank and rank x outputs values. Tensor parallelism divides one of the two (vLLM
        0.32, lora/layers, `create_lora_weights`). Expert parallelism divides both matrices of
        experts. Each GPU holds only some experts, but each of these experts is whole. Adapters of
        the embedding and the output matrix are ignored. The ignored adapters are as small as those
        of a single layer.
        """
        if not self.max_loras:
            return 0
        parameters = self.shape.parameters
        if parameters is None:
            return None
        adapter = parameters.adapter
        values = adapter.replicated_values + adapter.divided_values / self.tensor_parallel_size
        expert_adapter = parameters.expert_adapter
        expert_gpus = self.tensor_parallel_size * self.data_parallel_size
        values += expert_adapter.divided_values / expert_gpus
        if self.enable_expert_parallel:
            values += expert_adapter.replicated_values / expert_gpus
        else:
            values += expert_adapter.replicated_values
        return ceil(self.max_loras * self.max_lora_rank * values * self.shape.dtype_bytes)


def choose_defaults(
    gpu_memory_bytes: int | None, release: Release = NEWEST_RELEASE
) -> CardDefaults:
    """Return the defaults that vLLM's server uses on a card of this size.

    If the size is unknown, the defaults for a large card are returned.
    """
    if gpu_memory_bytes is None:
        return LARGE_CARD
    defaults = next(row for row in CARD_DEFAULTS if gpu_memory_bytes >= row.card_bytes)
    if defaults == LARGEST_CARD and not release.has_largest_defaults:
        return LARGE_CARD
    return defaults


def find_problem(question: Question) -> str | None:
    """Return a sentence on why vLLM rejects these numbers or `plan` cannot handle them.

    Returns None if there is no problem with the numbers.
    """
    shape = question.shape
    draft = question.draft
    ranks = question.tensor_parallel_size
    stages = question.pipeline_parallel_size
    engines = question.data_parallel_size
    attention_heads = shape.attention_heads
    if attention_heads and attention_heads % ranks:
        return (
            f"--tensor-parallel-size {ranks} does not divide"
            f" the model's {attention_heads} attention heads"
        )
    # If there are fewer KV heads than ranks, vLLM keeps each head on several ranks.
    kv_heads = shape.heads.count
    is_uneven = max(ranks, kv_heads) % min(ranks, kv_heads) != 0
    if shape.latent_width is None and is_uneven:
        return (
            f"--tensor-parallel-size {ranks} and the model's {kv_heads} KV heads:"
            " one has to divide the other"
        )
    context_ranks = question.decode_context_parallel_size
    if ranks % context_ranks:
        return (
            f"--tensor-parallel-size {ranks} is not divisible by"
            f" --decode-context-parallel-size {context_ranks}"
        )
    # The ranks of decode context parallelism divide the tokens in these copies of the cache among
    # themselves.
    copies = 1 if shape.latent_width is not None else max(1, ranks // kv_heads)
    if context_ranks > 1 and shape.latent_width is None and copies % context_ranks:
        return (
            f"--decode-context-parallel-size {context_ranks}: with --tensor-parallel-size {ranks}"
            f" each of the model's {kv_heads} KV heads is kept {copies} times,"
            " which it has to divide"
        )
    if context_ranks > 1 and not shape.has_every_token:
        return (
            f"--decode-context-parallel-size {context_ranks}: how layers with a window or a state"
            " share tokens is not known here"
        )
    kv_dtype = question.kv_cache_dtype
    if kv_dtype in PACKED_KV_DTYPES and (shape.latent_width is not None or shape.windowed_layers):
        return (
            f"--kv-cache-dtype {kv_dtype}: how it packs latent attention, or layers with a window,"
            " is not known here"
        )
    if kv_dtype == SPARSE_NVFP4_DTYPE and shape.index is None:
        return (
            f"--kv-cache-dtype {kv_dtype} is for sparse attention, which this model does not have"
        )
    if engines > 1 and shape.parameters is None:
        return f"--data-parallel-size {engines}: which weights are experts is not known here"
    if draft is not None and (draft.stateful_layers or draft.compression is not None):
        return "--draft-model-config: how the states of a draft are kept is not known here"
    if stages > shape.layers:
        return f"--pipeline-parallel-size {stages} is more than the model's {shape.layers} layers"
    tokens = question.max_num_batched_tokens
    if tokens < question.max_num_seqs:
        return (
            f"--max-num-batched-tokens {tokens} is less than --max-num-seqs {question.max_num_seqs}"
        )
    return None
