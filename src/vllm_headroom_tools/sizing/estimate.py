"""Calculate what fits: bytes per GPU, tokens and sequences."""

from math import ceil
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from vllm_headroom.derive.configured import OFFLOAD_FACTOR
from vllm_headroom.units import GIB, MIB
from vllm_headroom_tools.sizing.assumptions import (
    LOGIT_BYTES,
    NO_BYTES,
    Origin,
    Range,
    StartAssumptions,
    add_all,
    add_independent,
    assume_start,
)
from vllm_headroom_tools.sizing.encoder import UNGIVEN_MLP_WIDTH_RATIO
from vllm_headroom_tools.sizing.footprint import (
    KvLayout,
    ModelShape,
    build_kv_layout,
    count_bytes_per_token,
)
from vllm_headroom_tools.sizing.measured import (
    BATCH_SETTINGS,
    MODEL_SETTINGS,
    WEIGHT_SETTINGS,
    MeasuredStart,
)
from vllm_headroom_tools.sizing.question import Question

UNEXPLAINED_BYTES: Final = 0.15 * GIB
"""The largest amount by which measured activations exceeded the estimate. On an H100 with vLLM
0.19, it was 0.13 GiB with 8-bit weights. For Gemma 3, it was 0.11 GiB.
"""

LEFT_TO_THE_MACHINE_BYTES: Final = 8 * GIB
"""Our choice: the memory that a machine with unified memory needs besides the GPU's use. Half of it
is for the rest of the system. The other half is for vLLM's processes on the host. They take one or
two GiB each.

On such a machine, the CPU only has the memory that vLLM leaves. When this memory runs out,
allocations do not fail. Instead, the machine swaps and hangs (vllm-project/vllm#46307,
NVIDIA/dgx-spark-playbooks#97).
"""

HOST_BYTES_PER_PROCESS: Final = 6 * GIB // 10
"""The host memory of one process. On a CPU, vLLM 0.32's API server and engine core take 0.6 GiB
each (tests/contract). A worker with CUDA takes more.
"""

SHM_QUEUE_BYTES: Final = 256 * MIB
"""The free space that vLLM needs in /dev/shm. vLLM's largest inter-process queue takes 240 MiB.
With less free space, vLLM does not start (vllm/distributed/device_communicators/shm_broadcast.py:
MessageQueue, check_shm_free_space).
"""

PENALTY_BYTES: Final = 4 + 1 / 8
"""The sampler's memory per sequence and vocabulary token: a 32-bit count and one bit
(v1/worker/gpu/sample/penalties.py).
"""


def estimate_activations(question: Question, assumptions: StartAssumptions) -> Range | None:
    """Return the peak activation memory of vLLM's profile run.

    Returns None if the hidden size or the vocabulary is unknown. The peak is the largest of these:

    - A forward pass: `_estimate_forward` times `forward_ratio`.
    - Sampling: sequences x vocabulary x 4 bytes of logits, times `sampling_ratio`. One or two
      copies of the batch's hidden states are added. Tensor parallelism does not divide the sampling
      memory. In a pipeline, only the last stage samples. The last stage also holds the hidden
      states and residuals that it received.
    - The image encoder. The encoder's tokens also stay in memory during the forward pass and
      sampling (v1/worker/gpu_model_runner.py, `profile_run`). A patch takes as much memory as a
      token in the language model. Tensor parallelism divides some encoders but not others.
    """
    hidden_size = question.shape.hidden_size
    vocabulary = question.shape.vocabulary
    if hidden_size is None or vocabulary is None:
        return None
    forward_bytes = _estimate_forward(question, hidden_size).layer_bytes
    forward = assumptions.forward_ratio.range.scale(forward_bytes)
    logits_bytes = question.max_num_seqs * vocabulary * LOGIT_BYTES
    sampling = assumptions.sampling_ratio.range.scale(logits_bytes)
    hidden_bytes = _count_batch_bytes(question) * hidden_size
    hidden_copies = 2
    text_low = forward.low
    # In a pipeline, the last stage also holds the hidden states and residuals it received.
    if question.pipeline_parallel_size > 1:
        hidden_copies += 2
    else:
        text_low = max(forward.low, sampling.low)
    text_high = max(forward.high, sampling.high + hidden_copies * hidden_bytes) + UNEXPLAINED_BYTES
    encoding = _estimate_encoding(question, assumptions)
    kept_bytes = _count_encoder_output_bytes(question, hidden_size)
    low = max(encoding.low, kept_bytes + text_low)
    if question.may_have_second_runner and not question.release.has_second_runner_encoder:
        low = text_low
    return Range(low=low, high=max(encoding.high, kept_bytes + text_high))


def estimate_sampler_warmup(question: Question, assumptions: StartAssumptions) -> Range | None:
    """Return the memory of the sampler's warm-up, which follows the capture of CUDA graphs.

    Returns None if the vocabulary is unknown.
    """
    vocabulary = question.shape.vocabulary
    if vocabulary is None:
        return None
    requests = question.max_num_seqs
    if question.has_only_second_runner:
        # Each warm-up request takes two tokens of a batch (vLLM 0.29, v1/worker/gpu/warmup.py).
        requests = min(requests, question.max_num_batched_tokens // 2)
    return assumptions.warmup_ratio.range.scale(requests * vocabulary * LOGIT_BYTES)


def _count_batch_bytes(question: Question) -> float:
    """Return the bytes needed for one value per token in the largest batch."""
    sequence_tokens = question.max_model_len or question.max_num_batched_tokens
    all_tokens = question.max_num_seqs * sequence_tokens
    return min(question.max_num_batched_tokens, all_tokens) * question.shape.dtype_bytes


def _estimate_encoding(question: Question, assumptions: StartAssumptions) -> Range:
    """Return the memory that the encoder needs for the largest images or videos.

    Returns 0 if the largest images and videos are unknown. Only the lower bound assumes that tensor
    parallelism divides this memory.
    """
    item = question.largest_input
    items = question.encoder_items
    if item is None or items is None:
        return NO_BYTES
    value_bytes = items * question.shape.dtype_bytes
    # Every GPU computes one part in full; the other part is divided among the GPUs.
    spread_values = item.replicated_values + item.divided_values / question.tensor_parallel_size
    all_values = item.replicated_values + item.divided_values
    high_ratio = assumptions.forward_ratio.range.high
    return Range(low=value_bytes * spread_values, high=value_bytes * high_ratio * all_values)


def _count_encoder_output_bytes(question: Question, hidden_size: int) -> float:
    """Return the bytes of encoded images or videos during the profile run.

    Returns 0 if the largest images or videos are unknown.
    """
    item = question.largest_input
    items = question.encoder_items
    if item is None or items is None:
        return 0.0
    return items * question.shape.dtype_bytes * item.tokens * item.copies * hidden_size


class ForwardPass(Struct, frozen=True, kw_only=True):
    """The memory of a forward pass on one GPU."""

    # The bytes that a batch takes in the widest layer.
    layer_bytes: float
    # The experts' workspace, which is never freed, or 0 if there are no experts.
    workspace_bytes: float


def _estimate_forward(question: Question, hidden_size: int) -> ForwardPass:
    """Return the memory that a batch takes in a forward pass.

    A layer takes tokens x bytes of the dtype x values per token. The values are 2 x hidden size
    plus those of the widest layer. The residual accounts for 2 x hidden size. The widest layer has
    either 3 x MLP width or queries, keys, values and output. Tensor parallelism divides both. The
    experts' MLP is not counted here, because it is part of the workspace.
    """
    shape = question.shape
    ranks = question.tensor_parallel_size
    batch_bytes = _count_batch_bytes(question)
    residual_values = 2 * hidden_size + shape.side_values
    heads = (shape.attention_heads or 1) + shape.heads.count
    attention_values = 2 * heads * shape.heads.key_size / ranks
    mlp_width = shape.mlp_width or UNGIVEN_MLP_WIDTH_RATIO * hidden_size
    mlp_values = 3 * mlp_width / ranks
    if shape.experts_per_token <= 1:
        layer_values = residual_values + max(attention_values, mlp_values)
        return ForwardPass(layer_bytes=batch_bytes * layer_values, workspace_bytes=0)
    # Each chosen expert produces a separate output.
    workspace_values = mlp_values + shape.experts_per_token * hidden_size
    return ForwardPass(
        layer_bytes=batch_bytes * (residual_values + attention_values),
        workspace_bytes=batch_bytes * workspace_values,
    )


def estimate_other_parts(question: Question, assumptions: StartAssumptions) -> tuple[Range, ...]:
    """Return what the budget must hold besides weights, KV cache, activations and graphs.

    The parts are:

    - The memory that libraries and communication take during the profile run.
    - The experts' workspace for the tokens of a batch (vLLM, v1/worker/workspace.py).
    - With the second model runner, the sampler's PENALTY_BYTES per sequence and vocabulary token.
    - The gaps that remain after weights are repacked.
    - The uncertainty of the budget, a share of the memory that CUDA sees.
    """
    experts_bytes = _estimate_forward(question, question.shape.hidden_size or 0).workspace_bytes
    # Some kernels free the workspace after the pass.
    experts = Range(low=0.0, high=assumptions.forward_ratio.range.high * experts_bytes)
    sampler = NO_BYTES
    if question.may_have_second_runner:
        sampler_bytes = question.max_num_seqs * (question.shape.vocabulary or 0) * PENALTY_BYTES
        # Neither the first model runner nor a pooling model has the sampler's table of tokens.
        sampler = Range(low=0.0, high=sampler_bytes)
    reserved = assumptions.driver_reserved.range
    uncertain_bytes = question.gpu_memory_utilization * (reserved.high - reserved.low)
    uncertain_budget = Range(low=0.0, high=uncertain_bytes)
    gaps = _estimate_gaps(question)
    return (assumptions.non_torch.range, experts, sampler, gaps, uncertain_budget)


REPACKED_METHODS: Final = ("awq", "auto_awq", "gptq", "auto_gptq", "compressed-tensors")
"""Prefixes of the methods whose 4-bit weights vLLM repacks for its kernels. It repacks one matrix
at a time (layers/quantization, `process_weights_after_loading`).
"""

UNUSED_LAYERS: Final = 2
"""The largest number of layers whose old weights leave gaps in torch's memory. At most 1.6 layers
were measured (the stand-in card, vLLM 0.32, Qwen2.5 7B in AWQ). The gap left by a matrix is reused
by the next one of its shape.
"""


def _estimate_gaps(question: Question) -> Range:
    """Return the unused memory that torch keeps after vLLM repacks the weights.

    These gaps only matter in releases that compute the KV cache's size from consumed memory.
    """
    shape = question.shape
    weights_bytes = question.weights_bytes
    bytes_per_parameter = shape.weight_bytes_per_parameter
    method = shape.quantisation or ""
    is_repacked = method.startswith(REPACKED_METHODS) and (bytes_per_parameter or 1) < 1
    if not is_repacked or weights_bytes is None or not question.release.counts_consumed_memory:
        return NO_BYTES
    stage_layers = ceil(shape.layers / question.pipeline_parallel_size)
    matrices_bytes = weights_bytes - shape.embeddings_bytes / question.tensor_parallel_size
    return Range(low=0.0, high=max(0.0, UNUSED_LAYERS * matrices_bytes / stage_layers))


def estimate_host(question: Question) -> Range:
    """Return the host memory used by all of vLLM's processes.

    Each engine has a core and a server. With several GPUs, each engine also has a worker for each
    GPU. Each server and core has an image cache (vLLM 0.33, config/multimodal.py). The cache fills
    up over time, so it is only included in the upper bound.
    """
    engines = question.data_parallel_size
    workers = question.gpus
    # Each engine has a core and a server. With a single GPU, the core drives the GPU directly.
    servers_and_cores = 2 * engines
    processes = servers_and_cores
    if workers > engines:
        processes += workers
    images_bytes = 0.0
    if question.shape.encoder is not None:
        images_bytes = servers_and_cores * question.mm_processor_cache_bytes
    # The size of offloaded weights is given per GPU. The size of an offloaded cache is given per
    # engine.
    offloaded_bytes = question.cpu_offload_bytes * workers + question.kv_offloading_bytes * engines
    own_bytes = processes * HOST_BYTES_PER_PROCESS
    return Range(
        low=own_bytes + offloaded_bytes,
        high=own_bytes + images_bytes + OFFLOAD_FACTOR * offloaded_bytes,
    )


def estimate_outside(question: Question, assumptions: StartAssumptions) -> Range:
    """Return the memory that the engine uses on the card outside its budget.

    With unified memory, the result includes the memory that the machine itself needs.
    """
    outside = assumptions.missing_at_start.range
    if not question.release.has_graphs_in_budget:
        outside += assumptions.graphs.range
    if question.unified_memory:
        offloaded_bytes = question.cpu_offload_bytes + question.kv_offloading_bytes
        machine_bytes = LEFT_TO_THE_MACHINE_BYTES + offloaded_bytes
        outside += Range(low=machine_bytes, high=machine_bytes)
    return outside


SEQUENCE_COUNTS: Final = (1, 4, 16, 64, 256, 1024)
"""The values of `max_num_seqs` for which the longest `max_model_len` is shown."""

SEQUENCE_LENGTHS: Final = (1024, 4096, 16384, 65536, 262144)
"""The values of `max_model_len`, in tokens, for which the largest `max_num_seqs` is shown."""

LENGTH_LIMIT: Final = 2**24
"""The longest sequence considered, in tokens: no model accepts a longer one."""


class MemoryEstimate(Struct, frozen=True, kw_only=True):
    """The memory that one GPU needs and has, in bytes; unknown figures are None."""

    question: Question
    assumptions: StartAssumptions
    layout: KvLayout
    # The KV cache bytes per token, on this GPU and on an engine's GPUs together.
    bytes_per_token: int
    engine_bytes_per_token: int
    weights_bytes: int | None
    # The upper bound of vLLM's share of the memory that CUDA sees. The bound is also None if an
    # option sets the KV cache's size instead.
    budget_bytes: float | None
    activations: Range | None
    sampler_warmup: Range | None
    # The parts for libraries, communication, the experts' workspace, the sampler and the driver.
    other_parts: tuple[Range, ...]
    graphs: Range
    # The memory that the engine uses on the card outside the budget.
    outside: Range
    # The host memory used by all of vLLM's processes.
    host: Range

    @property
    def visible(self) -> Range | None:
        """Return the part of the card's memory that CUDA sees.

        Returns None if that part is unknown.
        """
        card_bytes = self.question.gpu_memory_bytes
        if card_bytes is None:
            return None
        reserved = self.assumptions.driver_reserved.range
        return Range(low=card_bytes - reserved.high, high=card_bytes - reserved.low)

    @property
    def other_overhead(self) -> Range:
        """Return the sum of the other parts, as if all reached their bounds at once."""
        return add_all(self.other_parts)

    @property
    def overhead(self) -> Range | None:
        """Return the memory that the budget must hold besides weights and KV cache.

        Returns None if the activations are unknown.
        """
        if self.activations is None:
            return None
        parts = [self.activations, *self.other_parts]
        if self.question.release.has_graphs_in_budget:
            parts.append(self.graphs)
        # With unified memory, the page cache also counts as used. On one machine, all parts were
        # close to their maximum together (14.6 of 15.6 GiB). On two machines, communication and
        # graphs were close to their maximum.
        if self.question.unified_memory:
            return add_all(parts)
        return add_independent(parts)

    @property
    def kv_cache(self) -> Range | None:
        """Return the bytes left for the KV cache.

        The lower bound assumes the highest overhead. If an option sets the cache's size, both
        bounds equal that size. The bounds are negative if the budget is too small. Returns None if
        the budget, the weights or the overhead is unknown.
        """
        set_bytes = self.question.kv_cache_memory_bytes
        if set_bytes is not None:
            return Range(low=set_bytes, high=set_bytes)
        overhead = self.overhead
        if self.budget_bytes is None or self.weights_bytes is None or overhead is None:
            return None
        budget_without_weights = self.budget_bytes - self.weights_bytes
        return Range(
            low=budget_without_weights - overhead.high, high=budget_without_weights - overhead.low
        )

    @property
    def blocks(self) -> int | None:
        """Return the minimum number of KV cache blocks, vLLM's `num_gpu_blocks`.

        Returns None if the cache's size is unknown or the model uses no cache.
        """
        if self.kv_cache is None or not self.layout.block_bytes:
            return None
        return int(max(0.0, self.kv_cache.low) // self.layout.block_bytes)

    @property
    def capacity_tokens(self) -> int | None:
        """Return the minimum number of tokens that the KV cache holds (`get_kv_cache_capacity`).

        With sliding-window or state-space layers, the result is for sequences of length
        `max_model_len`. The result is `max_model_len` times the number of sequences that fit.
        Returns None if the blocks are unknown. For models with sliding-window or state-space
        layers, `max_model_len` must be known too.
        """
        blocks = self.blocks
        if blocks is None:
            return None
        if self.question.shape.has_every_token:
            return blocks * self.layout.block_tokens
        length = self.question.max_model_len
        return None if length is None else blocks * length // self.layout.count_blocks(length)

    def count_sequence_bytes(self, tokens: int) -> int:
        """Return the bytes that a sequence with this many tokens takes in the KV cache."""
        return self.layout.count_blocks(tokens) * self.layout.block_bytes

    def count_sequences(self, tokens: int) -> float | None:
        """Return how many sequences of this length certainly fit, including fractions.

        Returns None if the blocks are unknown.
        """
        return None if self.blocks is None else self.blocks / self.layout.count_blocks(tokens)

    def find_longest(self, sequences: int) -> int | None:
        """Return the maximum length at which this many sequences fit at once.

        The length is at most the model's limit. A higher `max_model_len` in the question replaces
        the limit. The result is 0 if not even one block fits. Returns None if the blocks are
        unknown.
        """
        if self.blocks is None:
            return None
        model_limit = self.question.shape.max_model_len or 0
        question_limit = self.question.max_model_len or 0
        ceiling = max(model_limit, question_limit) or LENGTH_LIMIT
        return self.layout.find_longest(self.blocks // sequences, ceiling)


def estimate_memory(question: Question) -> MemoryEstimate:
    """Return the estimate for a question.

    A draft model's layers also keep every token, which makes each cache block larger.
    """
    assumptions = assume_start(question)
    stages = question.pipeline_parallel_size
    draft_bytes = 0
    cache_shape = question.cache_shape
    if question.draft is not None and cache_shape is question.shape:
        draft_bytes = _count_token_bytes(question, question.draft)
    engine_token_bytes = _count_token_bytes(question, cache_shape) + draft_bytes
    layout = build_kv_layout(
        cache_shape,
        block_tokens=question.block_size,
        # Each stage may have a batch in flight, and one more batch is scheduled.
        in_flight_tokens=(stages + 1) * question.max_num_batched_tokens,
        kv_dtype=question.kv_cache_dtype,
        tensor_parallel=question.tensor_parallel_size,
        pipeline_parallel=stages,
        sequence_states=question.sequence_states,
    )
    block_bytes = layout.block_bytes + draft_bytes * layout.block_tokens
    # Each GPU keeps every n-th token. Therefore, each block covers n times as many tokens (vLLM
    # 0.33, v1/core/kv_cache_utils.py, `get_kv_cache_capacity`).
    context_ranks = question.decode_context_parallel_size
    budget_bytes = None
    # If the cache's size is set, vLLM ignores its share of the card.
    if question.gpu_memory_bytes is not None and question.kv_cache_memory_bytes is None:
        visible_bytes = question.gpu_memory_bytes - assumptions.driver_reserved.range.low
        budget_bytes = visible_bytes * question.gpu_memory_utilization
    estimate = MemoryEstimate(
        question=question,
        assumptions=assumptions,
        layout=replace(
            layout,
            block_bytes=block_bytes,
            block_tokens=layout.block_tokens * context_ranks,
        ),
        bytes_per_token=ceil(
            (_count_token_bytes(question, cache_shape, stages) + draft_bytes) / context_ranks
        ),
        engine_bytes_per_token=engine_token_bytes * question.tensor_parallel_size // context_ranks,
        weights_bytes=question.weights_bytes,
        budget_bytes=budget_bytes,
        activations=estimate_activations(question, assumptions),
        sampler_warmup=estimate_sampler_warmup(question, assumptions),
        other_parts=estimate_other_parts(question, assumptions),
        graphs=assumptions.graphs.range,
        outside=estimate_outside(question, assumptions),
        host=estimate_host(question),
    )
    return estimate if question.measured is None else _apply_log(estimate, question.measured)


def _apply_log(estimate: MemoryEstimate, measured: MeasuredStart) -> MemoryEstimate:
    """Return the estimate with the figures from a startup log that apply to these settings.

    Activations grow with the batch. For smaller batches, the log's figure is therefore an upper
    bound. For larger batches, it is a lower bound.
    """
    question = estimate.question
    weights_bytes = estimate.weights_bytes
    if measured.weights_bytes is not None and measured.has_same(question, WEIGHT_SETTINGS):
        weights_bytes = round(measured.weights_bytes)
    other_parts = estimate.other_parts
    if estimate.assumptions.non_torch.origin is Origin.LOG:
        # The log's figure covers everything except weights, activations and graphs.
        other_parts = (estimate.assumptions.non_torch.range,)
    activations = estimate.activations
    logged_bytes = measured.activation_bytes
    if logged_bytes is not None and measured.has_same(question, MODEL_SETTINGS):
        if measured.has_same(question, BATCH_SETTINGS):
            activations = Range(low=logged_bytes, high=logged_bytes)
        elif activations is not None and measured.is_batch_within(question):
            low = min(activations.low, logged_bytes)
            activations = Range(low=low, high=min(activations.high, logged_bytes))
        elif activations is not None and measured.is_batch_beyond(question):
            high = max(activations.high, logged_bytes)
            activations = Range(low=max(activations.low, logged_bytes), high=high)
    return replace(
        estimate,
        weights_bytes=weights_bytes,
        other_parts=other_parts,
        activations=activations,
    )


def _count_token_bytes(question: Question, shape: ModelShape, stages: int = 1) -> int:
    """Return the bytes per token in one GPU's KV cache.

    The model is split into `stages`.
    """
    return count_bytes_per_token(
        shape,
        kv_dtype=question.kv_cache_dtype,
        tensor_parallel=question.tensor_parallel_size,
        pipeline_parallel=stages,
    )


def list_longest(estimate: MemoryEstimate) -> list[tuple[int, int]]:
    """Return pairs of `max_num_seqs` and the largest `max_model_len` that fits with it.

    In each pair, `max_num_seqs` sequences of this length fit at the same time. The length is 0 if
    that number of sequences does not fit at all. The list is empty if the cache is unknown.
    """
    asked_count = estimate.question.max_num_seqs
    counts = {count for count in SEQUENCE_COUNTS if count <= asked_count}
    rows = []
    for count in sorted(counts | {asked_count}):
        length = estimate.find_longest(count)
        if length is not None:
            rows.append((count, length))
    return rows


def list_most_sequences(estimate: MemoryEstimate) -> list[tuple[int, int]]:
    """Return pairs: `max_model_len`, and how many sequences of that length fit at once.

    At the longest length, only a single sequence fits. The question's `max_model_len` is always
    included. The list is empty if the cache is unknown.
    """
    # Lengths beyond the longest sequence would only yield zeros.
    longest = estimate.find_longest(1) or 0
    lengths = {length for length in SEQUENCE_LENGTHS if length <= longest}
    if estimate.question.max_model_len is not None:
        lengths.add(estimate.question.max_model_len)
    rows = []
    for length in sorted(lengths):
        sequences = estimate.count_sequences(length)
        if sequences is not None:
            rows.append((length, int(sequences)))
    return rows
