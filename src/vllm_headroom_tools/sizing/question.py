"""The question of `plan`: a model, and vLLM's settings."""

from math import ceil
from typing import Final

from msgspec import Struct

from vllm_headroom.units import GIB
from vllm_headroom_tools.sizing.encoder import EncoderInput
from vllm_headroom_tools.sizing.footprint import ModelShape, count_model_bytes, count_weights_bytes

UTILIZATION: Final = 0.92
"""vLLM's `gpu_memory_utilization` since 0.20; before, it was 0.9 (config/cache.py)."""

LORA_RANK: Final = 16
"""vLLM's `max_lora_rank` (config/lora.py)."""

TYPICAL_TOKENS: Final = 2048
BLOCK_TOKENS: Final = 16
"""vLLM's `DEFAULT_BLOCK_SIZE` on NVIDIA GPUs (config/cache.py)."""

BATCHES: Final = ((160 * GIB, 1024, 16384), (70 * GIB, 1024, 8192), (0, 256, 2048))
"""From so much memory on, vLLM's server takes so many sequences and batched tokens by default.

Source: engine/arg_utils.py, `get_batch_defaults`, 0.32. An A100 of 80 GiB counts there as a small card.
"""


class Question(Struct, frozen=True, kw_only=True):
    """A model and vLLM's settings by vLLM's names; None where they are not known.

    `checkpoint_bytes` are the weights of the whole model as they are served, `parameters` how many it has, where these
    are known better than by counting. `gpu_memory_bytes` is one card's total: with `unified_memory` that of its
    machine, on whose memory it works. `kv_cache_memory_bytes` is the KV cache's size when vLLM is given it, and then
    counts instead of the utilization. `cpu_offload_bytes` of each GPU's weights lie in the host's memory. `max_loras`
    is 0 without adapters. `draft` is the model that speculates. `kv_offloading_bytes` of each engine's KV cache and
    `mm_processor_cache_bytes` of processed images in each server and core lie in the host's memory, of which there is
    `host_memory_bytes`.
    """

    shape: ModelShape
    checkpoint_bytes: int | None = None
    parameters: int | None = None
    kv_cache_dtype: str = "auto"
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    enable_expert_parallel: bool = False
    cpu_offload_bytes: float = 0
    kv_offloading_bytes: float = 0
    mm_processor_cache_bytes: float = 4 * GIB
    host_memory_bytes: int | None = None
    max_loras: int = 0
    max_lora_rank: int = LORA_RANK
    draft: ModelShape | None = None
    gpu_memory_bytes: int | None = None
    gpu_memory_utilization: float = UTILIZATION
    max_model_len: int | None = None
    max_num_seqs: int = BATCHES[-1][1]
    max_num_batched_tokens: int = BATCHES[-1][2]
    block_size: int = BLOCK_TOKENS
    typical_len: int = TYPICAL_TOKENS
    kv_cache_memory_bytes: int | None = None
    enforce_eager: bool = False
    unified_memory: bool = False

    @property
    def gpus(self) -> int:
        """The GPUs of all engines."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size

    @property
    def weights_bytes(self) -> int | None:
        """What weights take of the GPU that holds most, a draft model's and adapters' room among them."""
        total, ranks = self.checkpoint_bytes, self.tensor_parallel_size
        own = count_weights_bytes(
            self.shape,
            total_bytes=count_model_bytes(self.shape, self.parameters) if total is None else total,
            tensor_parallel=ranks,
            pipeline_parallel=self.pipeline_parallel_size,
            data_parallel=self.data_parallel_size,
        )
        draft = 0 if self.draft is None else count_weights_bytes(self.draft, tensor_parallel=ranks)
        adapters = self.adapters_bytes
        if own is None or draft is None or adapters is None:
            return None
        return max(0, ceil(own - self.cpu_offload_bytes)) + draft + adapters

    @property
    def has_more_weights(self) -> bool:
        """Whether there are weights that are not counted: those of an image or audio encoder."""
        is_counted = self.shape.encoder is None or self.shape.encoder.parameters is not None
        return not is_counted and self.checkpoint_bytes is None and self.parameters is None

    @property
    def has_more_activations(self) -> bool:
        """Whether vLLM profiles an encoder whose largest image or video is not known here."""
        return self.shape.encoder is not None and self.largest is None

    @property
    def largest(self) -> EncoderInput | None:
        """The largest image or video; None without an encoder, too."""
        return self.shape.encoder.largest if self.shape.encoder else None

    @property
    def encoder_items(self) -> int | None:
        """How many of the largest images or videos vLLM profiles at once; None where these are not known.

        As many as the batch has tokens for, one at least (vLLM 0.32, multimodal/encoder_budget.py, `_get_max_items`).
        """
        if self.largest is None:
            return None
        in_prompt = max(
            1, (self.max_model_len or self.max_num_batched_tokens) // self.largest.tokens
        )
        return max(
            1,
            min(self.max_num_batched_tokens // self.largest.tokens, self.max_num_seqs * in_prompt),
        )

    @property
    def adapters_bytes(self) -> int | None:
        """What vLLM reserves on each GPU for LoRA adapters; None where that is not known.

        Of every matrix, inputs x rank and rank x outputs, in the model's dtype; tensor parallelism divides one of the
        two (vLLM 0.32, lora/layers, `create_lora_weights`), expert parallelism both, for each GPU has some of the
        experts whole. All engines share the experts. Those of embedding and output are as small as one layer's.
        """
        found, ranks = self.shape.parameters, self.tensor_parallel_size
        if not self.max_loras or found is None:
            return None if self.max_loras else 0
        experts, shared = found.expert_adapter, ranks * self.data_parallel_size
        values = found.adapter.whole + found.adapter.divided / ranks + experts.divided / shared
        values += experts.whole / (shared if self.enable_expert_parallel else 1)
        return ceil(self.max_loras * self.max_lora_rank * values * self.shape.dtype_bytes)


def choose_defaults(gpu_memory_bytes: int | None) -> tuple[int, int]:
    """Return `max_num_seqs` and `max_num_batched_tokens` as vLLM's server chooses them for a card of this size."""
    size = BATCHES[1][0] if gpu_memory_bytes is None else gpu_memory_bytes
    return next((seqs, tokens) for floor, seqs, tokens in BATCHES if size >= floor)


def find_problem(question: Question) -> str | None:
    """Return why vLLM refuses these numbers, in a sentence; None where it does not."""
    shape, draft, ranks = question.shape, question.draft, question.tensor_parallel_size
    heads, kv_heads, stages = (
        shape.attention_heads,
        shape.heads.count,
        question.pipeline_parallel_size,
    )
    sequences, tokens = question.max_num_seqs, question.max_num_batched_tokens
    is_uneven = shape.latent_width is None and max(ranks, kv_heads) % min(ranks, kv_heads)
    is_mixed = draft is not None and not (shape.has_every_token and draft.has_every_token)
    problems = (
        (
            heads and heads % ranks,
            f"--tensor-parallel-size {ranks} does not divide the model's {heads} attention heads",
        ),
        (
            is_uneven,
            f"--tensor-parallel-size {ranks} and the model's {kv_heads} KV heads: one has to divide the other",
        ),
        (
            question.data_parallel_size > 1 and shape.parameters is None,
            f"--data-parallel-size {question.data_parallel_size}: which weights are experts is not known here",
        ),
        (
            is_mixed,
            "--draft-model-config: how a draft's cache lies beside layers with a window or a state is not known here",
        ),
        (
            stages > shape.layers,
            f"--pipeline-parallel-size {stages} is more than the model's {shape.layers} layers",
        ),
        (
            tokens < sequences,
            f"--max-num-batched-tokens {tokens} is less than --max-num-seqs {sequences}",
        ),
    )
    return next((text for is_so, text in problems if is_so), None)
