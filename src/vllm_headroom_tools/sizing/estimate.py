"""What fits, in numbers: bytes per GPU, tokens and sequences."""

from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from vllm_headroom.derive.configured import OFFLOAD_FACTOR
from vllm_headroom.units import GIB, MIB
from vllm_headroom_tools.sizing.encoder import UNGIVEN_MLP_WIDTH_RATIO
from vllm_headroom_tools.sizing.footprint import (
    KvLayout,
    ModelShape,
    build_kv_layout,
    count_bytes_per_token,
)
from vllm_headroom_tools.sizing.question import Question


class Range(Struct, frozen=True, kw_only=True):
    """Bytes that are known between two bounds."""

    low: float
    high: float

    def __add__(self, other: "Range") -> "Range":
        """Return the bounds of both together."""
        return Range(low=self.low + other.low, high=self.high + other.high)


NO_BYTES: Final = Range(low=0.0, high=0.0)

FORWARD_HIGH: Final = 1.3
"""Highest measured to estimated memory of a forward pass (vLLM 0.32 on the stand-in card,
tests/card/shapes)."""

LOGITS_LOW: Final = 0.5
"""Least memory of sampling, to the logits in 32 bits: half of them, in 16 bits."""

LOGITS_HIGH: Final = 4
"""Most memory of sampling, to the logits in 32 bits: by the first model runner of vLLM 0.32."""

LOGIT_BYTES: Final = 4
"""Sampling takes the logits in 32 bits."""

CUDA_GRAPHS: Final = Range(low=0.15 * GIB, high=1.0 * GIB)
"""CUDA graphs, in the budget since vLLM 0.20.

Start-up logs: 0.16 GiB (Llama 3.1 8B, 0.26 on an H100, decode only), 0.23 GiB (the same, 0.31),
0.67 GiB (a 7B model, 0.10.2). vllm#7553: 2.4 GB (0.5.4, on top of the budget then). The largest
mixtures of experts take up to 5 GiB.
"""

CUDA_LIBRARIES: Final = Range(low=0.05 * GIB, high=0.3 * GIB)
"""What CUDA libraries take during the profiling run: "non-torch memory" of 0.05 to 0.26 GiB in
start-up logs."""

DRIVER_RESERVED_BYTES: Final = 3 * GIB // 4
"""Of a card's total, what the driver keeps, and vLLM takes no share of: 0.3 to 0.75 GiB (A100 of 80
GiB: 79.25)."""

CUDA_CONTEXT: Final = Range(low=0.1 * GIB, high=0.6 * GIB)
"""The CUDA context, which is there before vLLM looks.

Start-up logs: 0.07 to 0.53 GiB are missing from "Free memory on device"; pytorch#107667: about 300
MB. Fragments of the allocator and late kernels come on top (vllm#10637).
"""

COMMUNICATION: Final = Range(low=0.1 * GIB, high=3.0 * GIB)
"""NCCL and the buffers of all-reduce, outside the budget since vLLM 0.11.

NVIDIA/nccl#964: 544 to 688 MB for a group of GPUs. Start-up logs of four ranks on the largest
cards: 2.5 to 3.5 GiB are missing from "Free memory on device".
"""

LEFT_TO_THE_MACHINE_BYTES: Final = 8 * GIB
"""Our choice: half for vLLM's own processes on the host, of which each takes one or two, half for
the rest of the system.

Where a GPU works on the machine's memory, what vLLM leaves is all there is for both; a machine that
runs out of it does not fail an allocation, it swaps and hangs (vllm-project/vllm#46307,
NVIDIA/dgx-spark-playbooks#97).
"""

HOST_BYTES_PER_PROCESS: Final = 6 * GIB // 10
"""What server and core of vLLM 0.32 hold on the CPU, 0.6 GiB each (tests/contract); a worker with
CUDA holds more."""

SHM_QUEUE_BYTES: Final = 256 * MIB
"""vLLM's largest queue between its processes takes 240 MiB, and it does not start with less free
(vllm/distributed/device_communicators/shm_broadcast.py: MessageQueue, check_shm_free_space).
"""

PENALTY_BYTES: Final = 4 + 1 / 8
"""A count in 32 bits and a bit, of each sequence and token of the vocabulary
(v1/worker/gpu/sample/penalties.py)."""


def estimate_activations(question: Question) -> Range | None:
    """Return the peak of vLLM's profiling run.

    None where the hidden size or the vocabulary is not known. The largest of three, of which vLLM
    0.32 measured the first two on the stand-in card (tests/card/shapes):

    - A forward pass: from `_estimate_forward` to FORWARD_HIGH times that.
    - Sampling: sequences x vocabulary x 4 bytes of logits, from LOGITS_LOW to LOGITS_HIGH times
      that (v1/worker/gpu/model_runner.py, `_dummy_sampler_run`). Tensor parallelism does not
      divide it. Releases before sorted the logits: 9.7 to 10 times in start-up logs (Llama 3.1 8B,
      0.31; Qwen3 8B, 0.8.5).
    - The encoder of images, whose tokens stay in memory during the other two
      (v1/worker/gpu_model_runner.py, `profile_run`). A patch takes what a token does in the
      language model. Some encoders are divided by tensor parallelism and some are not.
    """
    hidden_size = question.shape.hidden_size
    vocabulary = question.shape.vocabulary
    if hidden_size is None or vocabulary is None:
        return None
    forward_bytes = _estimate_forward(question, hidden_size).layer_bytes
    logits_bytes = question.max_num_seqs * vocabulary * LOGIT_BYTES
    encoding = _estimate_encoding(question)
    kept_bytes = _count_encoder_output_bytes(question, hidden_size)
    text_low = max(forward_bytes, LOGITS_LOW * logits_bytes)
    text_high = max(FORWARD_HIGH * forward_bytes, LOGITS_HIGH * logits_bytes)
    return Range(
        low=max(encoding.low, kept_bytes + text_low),
        high=max(encoding.high, kept_bytes + text_high),
    )


def _estimate_encoding(question: Question) -> Range:
    """Return what the encoder takes of the largest images or videos.

    Nothing where these are not known.
    """
    item = question.largest_input
    items = question.encoder_items
    if item is None or items is None:
        return NO_BYTES
    value_bytes = items * question.shape.dtype_bytes
    spread_values = item.replicated_values + item.divided_values / question.tensor_parallel_size
    all_values = FORWARD_HIGH * (item.replicated_values + item.divided_values)
    return Range(low=value_bytes * spread_values, high=value_bytes * all_values)


def _count_encoder_output_bytes(question: Question, hidden_size: int) -> float:
    """Return what stays of encoded images or videos while the language model is profiled."""
    item = question.largest_input
    items = question.encoder_items
    if item is None or items is None:
        return 0.0
    return items * question.shape.dtype_bytes * item.tokens * item.copies * hidden_size


class ForwardPass(Struct, frozen=True, kw_only=True):
    """What a forward pass takes on one GPU."""

    # A batch in the widest layer.
    layer_bytes: float
    # The workspace of experts, which stays; 0 without experts.
    workspace_bytes: float


def _estimate_forward(question: Question, hidden_size: int) -> ForwardPass:
    """Return what the tokens of a batch take.

    Tokens x bytes of the dtype x (2 x hidden size for the residual, and the widest layer's values:
    3 x MLP width, but not of experts, or queries, keys, values and output; what tensor parallelism
    divides, divided).
    """
    shape = question.shape
    ranks = question.tensor_parallel_size
    sequence_tokens = question.max_model_len or question.max_num_batched_tokens
    all_tokens = question.max_num_seqs * sequence_tokens
    batch_bytes = min(question.max_num_batched_tokens, all_tokens) * shape.dtype_bytes
    residual_values = 2 * hidden_size + shape.side_values
    heads = (shape.attention_heads or 1) + shape.heads.count
    attention_values = 2 * heads * shape.heads.key_size / ranks
    mlp_width = shape.mlp_width or UNGIVEN_MLP_WIDTH_RATIO * hidden_size
    mlp_values = 3 * mlp_width / ranks
    if shape.experts_per_token <= 1:
        layer_values = residual_values + max(attention_values, mlp_values)
        return ForwardPass(layer_bytes=batch_bytes * layer_values, workspace_bytes=0)
    # Each chosen expert has its own output.
    workspace_values = mlp_values + shape.experts_per_token * hidden_size
    return ForwardPass(
        layer_bytes=batch_bytes * (residual_values + attention_values),
        workspace_bytes=batch_bytes * workspace_values,
    )


def estimate_other_overhead(question: Question) -> Range:
    """Return what else the budget has to hold.

    That is CUDA's libraries, what experts and sampler keep, and the driver's part. Experts keep a
    workspace for the tokens of a batch (vLLM, v1/worker/workspace.py), the sampler PENALTY_BYTES of
    each sequence and token of the vocabulary.
    """
    experts_bytes = _estimate_forward(question, question.shape.hidden_size or 0).workspace_bytes
    sampler_bytes = question.max_num_seqs * (question.shape.vocabulary or 0) * PENALTY_BYTES
    reserved_bytes = 0.0
    if not question.unified_memory:
        reserved_bytes = DRIVER_RESERVED_BYTES * question.gpu_memory_utilization
    experts_high = FORWARD_HIGH * experts_bytes
    return CUDA_LIBRARIES + Range(
        low=experts_bytes, high=experts_high + sampler_bytes + reserved_bytes
    )


def estimate_host(question: Question) -> Range:
    """Return what all of vLLM's processes take of the host's memory.

    Each engine has a core, a server and, with several GPUs, a worker for each; the cache of images
    is in every server and core (vLLM 0.33, config/multimodal.py), and fills with use.
    """
    engines = question.data_parallel_size
    workers = question.gpus
    servers_and_cores = 2 * engines
    processes = servers_and_cores
    if workers > engines:
        processes += workers
    images_bytes = 0.0
    if question.shape.encoder is not None:
        images_bytes = servers_and_cores * question.mm_processor_cache_bytes
    offloaded_bytes = question.cpu_offload_bytes * workers + question.kv_offloading_bytes * engines
    own_bytes = processes * HOST_BYTES_PER_PROCESS
    return Range(
        low=own_bytes + offloaded_bytes,
        high=own_bytes + images_bytes + OFFLOAD_FACTOR * offloaded_bytes,
    )


def estimate_outside(question: Question) -> Range:
    """Return what the engine takes of the card on top of its budget.

    With unified memory also what the machine needs besides.
    """
    outside = CUDA_CONTEXT
    if question.gpus > 1:
        outside += COMMUNICATION
    if question.unified_memory:
        offloaded_bytes = question.cpu_offload_bytes + question.kv_offloading_bytes
        machine_bytes = LEFT_TO_THE_MACHINE_BYTES + offloaded_bytes
        outside += Range(low=machine_bytes, high=machine_bytes)
    return outside


SEQUENCE_COUNTS: Final = (1, 4, 16, 64, 256, 1024)
"""Values of `max_num_seqs` for which the longest `max_model_len` is shown."""

SEQUENCE_LENGTHS: Final = (1024, 4096, 16384, 65536, 262144)
"""Values of `max_model_len` in tokens for which the largest `max_num_seqs` is shown."""

LENGTH_LIMIT: Final = 2**24
"""Tokens: no model takes more."""


class MemoryEstimate(Struct, frozen=True, kw_only=True):
    """What one GPU needs and has, all in bytes; None where it is not known."""

    question: Question
    layout: KvLayout
    # One token in the KV cache of this GPU, and of all GPUs of an engine together.
    bytes_per_token: int
    engine_bytes_per_token: int
    weights_bytes: int | None
    # vLLM's share of the card; None, too, where the KV cache's size is set instead.
    budget_bytes: float | None
    activations: Range | None
    # What else the budget has to hold.
    other_overhead: Range
    graphs: Range
    # What lies on the card outside of the budget.
    outside: Range
    # What all of vLLM's processes take of the host.
    host: Range

    @property
    def overhead(self) -> Range | None:
        """What the budget has to hold besides weights and KV cache."""
        return (
            None
            if self.activations is None
            else self.activations + self.graphs + self.other_overhead
        )

    @property
    def kv_cache(self) -> Range | None:
        """What is left for the KV cache: the low end with the highest overhead.

        Both the same where it is set.
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
        """The blocks that the KV cache has at least, vLLM's `num_gpu_blocks`.

        None, too, where nothing is kept.
        """
        if self.kv_cache is None or not self.layout.block_bytes:
            return None
        return int(max(0.0, self.kv_cache.low) // self.layout.block_bytes)

    @property
    def capacity_tokens(self) -> int | None:
        """The tokens that the KV cache holds at least, counted as vLLM counts them.

        Source: `get_kv_cache_capacity`. Where layers keep a window or a state, that is how many
        sequences of `max_model_len` fit, times this length.
        """
        blocks = self.blocks
        if blocks is None:
            return None
        if self.question.shape.has_every_token:
            return blocks * self.layout.block_tokens
        length = self.question.max_model_len
        return None if length is None else blocks * length // self.layout.count_blocks(length)

    def count_sequence_bytes(self, tokens: int) -> int:
        """Return what a sequence of this many tokens takes."""
        return self.layout.count_blocks(tokens) * self.layout.block_bytes

    def count_sequences(self, tokens: int) -> float | None:
        """Return how many sequences of this many tokens fit at once, at least."""
        return None if self.blocks is None else self.blocks / self.layout.count_blocks(tokens)

    def find_longest(self, sequences: int) -> int | None:
        """Return the most tokens that so many sequences can have at once; 0 for none.

        Up to the model's own limit, or that of the question if it is higher.
        """
        if self.blocks is None:
            return None
        model_limit = self.question.shape.max_model_len or 0
        question_limit = self.question.max_model_len or 0
        ceiling = max(model_limit, question_limit) or LENGTH_LIMIT
        return self.layout.find_longest(self.blocks // sequences, ceiling)


def estimate_memory(question: Question) -> MemoryEstimate:
    """Return the estimate.

    A draft's layers, which keep every token too, make the blocks of the cache larger.
    """
    stages = question.pipeline_parallel_size
    draft_bytes = 0
    if question.draft is not None:
        draft_bytes = _count_token_bytes(question, question.draft)
    engine_token_bytes = _count_token_bytes(question, question.shape) + draft_bytes
    layout = build_kv_layout(
        question.shape,
        block_tokens=question.block_size,
        in_flight_tokens=(stages + 1) * question.max_num_batched_tokens,
        kv_dtype=question.kv_cache_dtype,
        tensor_parallel=question.tensor_parallel_size,
        pipeline_parallel=stages,
    )
    block_bytes = layout.block_bytes + draft_bytes * layout.block_tokens
    budget_bytes = None
    if question.gpu_memory_bytes is not None and question.kv_cache_memory_bytes is None:
        budget_bytes = question.gpu_memory_bytes * question.gpu_memory_utilization
    return MemoryEstimate(
        question=question,
        layout=replace(layout, block_bytes=block_bytes),
        bytes_per_token=_count_token_bytes(question, question.shape, stages) + draft_bytes,
        engine_bytes_per_token=engine_token_bytes * question.tensor_parallel_size,
        weights_bytes=question.weights_bytes,
        budget_bytes=budget_bytes,
        activations=estimate_activations(question),
        other_overhead=estimate_other_overhead(question),
        graphs=NO_BYTES if question.enforce_eager else CUDA_GRAPHS,
        outside=estimate_outside(question),
        host=estimate_host(question),
    )


def _count_token_bytes(question: Question, shape: ModelShape, stages: int = 1) -> int:
    """Return the bytes of a token in the KV cache of one GPU, of a model in so many stages."""
    return count_bytes_per_token(
        shape,
        kv_dtype=question.kv_cache_dtype,
        tensor_parallel=question.tensor_parallel_size,
        pipeline_parallel=stages,
    )


def can_start(estimate: MemoryEstimate) -> bool | None:
    """Return whether vLLM starts.

    It does where one sequence of `max_model_len` fits, and everything is on the card. None where it
    starts with the low end of the estimates and not with the high one, or something is not known:
    such as this type of model, or the weights or the largest input of its encoder.
    """
    question = estimate.question
    if question.shape.unknown_type is not None:
        return None
    if _has_room(estimate, at_worst=False) is False:
        return False
    if question.has_uncounted_weights or question.has_uncounted_activations:
        return None
    if _has_room(estimate, at_worst=True):
        return True
    return None


def _has_room(estimate: MemoryEstimate, *, at_worst: bool) -> bool | None:
    """Return whether the KV cache, the card and the host have room.

    By the bounds that need most, or at best by those that need least. None where something that
    decides it is not known.
    """
    answers = (
        _fits_sequence(estimate, at_worst=at_worst),
        _fits_card(estimate, at_worst=at_worst),
        _fits_host(estimate, at_worst=at_worst),
    )
    if False in answers:
        return False
    if None in answers or estimate.question.max_model_len is None:
        return None
    return True


def _fits_sequence(estimate: MemoryEstimate, *, at_worst: bool) -> bool | None:
    """Return whether the KV cache has room for one sequence of `max_model_len`.

    For one token where the length is not known; None where the size of the cache is not.
    """
    kv_cache = estimate.kv_cache
    if kv_cache is None:
        return None
    room_bytes = kv_cache.low if at_worst else kv_cache.high
    return room_bytes >= estimate.count_sequence_bytes(estimate.question.max_model_len or 1)


def _fits_card(estimate: MemoryEstimate, *, at_worst: bool) -> bool | None:
    """Return whether the card has room for the budget and for what lies outside of it.

    Where the KV cache's size is set there is no budget: then for all parts together.
    """
    card_bytes = estimate.question.gpu_memory_bytes
    if card_bytes is None:
        return None
    if estimate.budget_bytes is not None:
        # Our choice: the low end alone decides. A note warns of what more it may take.
        return card_bytes - estimate.budget_bytes >= estimate.outside.low
    cache_bytes = estimate.question.kv_cache_memory_bytes
    overhead = estimate.overhead
    if estimate.weights_bytes is None or overhead is None or cache_bytes is None:
        return None
    other_parts = overhead + estimate.outside
    other_bytes = other_parts.high if at_worst else other_parts.low
    return estimate.weights_bytes + cache_bytes + other_bytes <= card_bytes


def _fits_host(estimate: MemoryEstimate, *, at_worst: bool) -> bool:
    """Return whether the host has room; also where its memory is not given."""
    host_bytes = estimate.question.host_memory_bytes
    if host_bytes is None:
        return True
    needed_bytes = estimate.host.high if at_worst else estimate.host.low
    return needed_bytes <= host_bytes


def list_longest(estimate: MemoryEstimate) -> list[tuple[int, int]]:
    """Return for several `max_num_seqs` the largest `max_model_len` that all can use up at once.

    0 for none.
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
    """Return for several `max_model_len` how many sequences can use it up at once.

    Up to what one sequence can have.
    """
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
