"""What fits, in numbers: bytes per GPU, tokens and sequences."""

from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from vllm_headroom.derive.configured import OFFLOAD_FACTOR
from vllm_headroom.units import GIB
from vllm_headroom_tools.sizing.encoder import USUAL_WIDTH
from vllm_headroom_tools.sizing.footprint import (
    KvLayout,
    ModelShape,
    build_kv_layout,
    count_bytes_per_token,
)
from vllm_headroom_tools.sizing.question import Question

LOGITS_LOW, LOGITS_HIGH = 0.5, 4
FORWARD_HIGH: Final = 1.3


class Range(Struct, frozen=True, kw_only=True):
    """Bytes that are known between two bounds."""

    low: float
    high: float

    def __add__(self, other: "Range") -> "Range":
        """Return the bounds of both together."""
        return Range(low=self.low + other.low, high=self.high + other.high)


NOTHING: Final = Range(low=0.0, high=0.0)
GRAPHS: Final = Range(low=0.15 * GIB, high=1.0 * GIB)
"""CUDA graphs, in the budget since vLLM 0.20.

Start-up logs: 0.16 GiB (Llama 3.1 8B, 0.26 on an H100, decode only), 0.23 GiB (the same, 0.31), 0.67 GiB (a 7B model,
0.10.2). vllm#7553: 2.4 GB (0.5.4, on top of the budget then). The largest mixtures of experts take up to 5 GiB.
"""

LIBRARIES: Final = Range(low=0.05 * GIB, high=0.3 * GIB)
"""What CUDA libraries take during the profiling run: "non-torch memory" of 0.05 to 0.26 GiB in start-up logs."""

RESERVED_BYTES: Final = 3 * GIB // 4
"""Of a card's total, what the driver keeps, and vLLM takes no share of: 0.3 to 0.75 GiB (A100 of 80 GiB: 79.25)."""

CONTEXT: Final = Range(low=0.1 * GIB, high=0.6 * GIB)
"""The CUDA context, which is there before vLLM looks.

Start-up logs: 0.07 to 0.53 GiB are missing from "Free memory on device"; pytorch#107667: about 300 MB. Fragments of
the allocator and late kernels come on top (vllm#10637).
"""

COMMUNICATION: Final = Range(low=0.1 * GIB, high=3.0 * GIB)
"""NCCL and the buffers of all-reduce, outside the budget since vLLM 0.11.

NVIDIA/nccl#964: 544 to 688 MB for a group of GPUs. Start-up logs of four ranks on the largest cards: 2.5 to 3.5 GiB are
missing from "Free memory on device".
"""

LEFT_TO_THE_MACHINE_BYTES: Final = 8 * GIB
"""Ours: half for vLLM's own processes on the host, of which each takes one or two, half for the rest of the system.
Where a GPU works on the machine's memory, what vLLM leaves is all there is for both; a machine that runs out of it
does not fail an allocation, it swaps and hangs (vllm-project/vllm#46307, NVIDIA/dgx-spark-playbooks#97).
"""


def estimate_activations(question: Question) -> Range | None:
    """Return the peak of vLLM's profiling run; None where the hidden size or the vocabulary is not known.

    The larger of three. A forward pass: the tokens of a batch x bytes of the dtype x (2 x hidden size for the residual,
    and the widest layer's values: 3 x MLP width, but not of experts, or queries, keys, values and output; what tensor
    parallelism divides, divided), to 1.3 times that. Sampling: sequences x vocabulary x 4 bytes of logits, half of that
    in 16 bits (v1/worker/gpu/model_runner.py, `_dummy_sampler_run`), to 4 times by the first model runner; it is not
    divided. Both as vLLM 0.32 measured on the stand-in card (tests/card/shapes). Releases before sorted the logits:
    9.7 to 10 times in start-up logs (Llama 3.1 8B, 0.31; Qwen3 8B, 0.8.5). And the encoder of images, whose tokens stay
    beside the other two (v1/worker/gpu_model_runner.py, `profile_run`): a patch takes what a token does in the language
    model; whether tensor parallelism divides it, is each encoder's own.
    """
    hidden, vocabulary = question.shape.hidden_size, question.shape.vocabulary
    if hidden is None or vocabulary is None:
        return None
    forward, _ = _estimate_forward(question, hidden)
    logits = question.max_num_seqs * vocabulary * 4
    images, kept = NOTHING, 0.0
    if (largest := question.largest) is not None and (items := question.encoder_items) is not None:
        size = items * question.shape.dtype_bytes
        low = largest.whole_values + largest.divided_values / question.tensor_parallel_size
        high = FORWARD_HIGH * (largest.whole_values + largest.divided_values)
        images, kept = (
            Range(low=size * low, high=size * high),
            size * largest.tokens * largest.copies * hidden,
        )
    return Range(
        low=max(images.low, kept + max(forward, LOGITS_LOW * logits)),
        high=max(images.high, kept + max(FORWARD_HIGH * forward, LOGITS_HIGH * logits)),
    )


def _estimate_forward(question: Question, hidden: int) -> tuple[float, float]:
    """Return what a batch takes in the widest layer, and in the workspace of experts, which stays (0 without)."""
    shape, ranks = question.shape, question.tensor_parallel_size
    longest = question.max_num_seqs * (question.max_model_len or question.max_num_batched_tokens)
    batch_bytes = min(question.max_num_batched_tokens, longest) * shape.dtype_bytes
    attention = (
        2 * ((shape.attention_heads or 1) + shape.heads.count) * shape.heads.key_size / ranks
    )
    streams = 2 * hidden + shape.beside_width
    inside = 3 * (shape.mlp_width or USUAL_WIDTH * hidden) / ranks
    if shape.experts_per_token > 1:
        return batch_bytes * (streams + attention), batch_bytes * (
            inside + shape.experts_per_token * hidden
        )
    return batch_bytes * (streams + max(attention, inside)), 0


def estimate_rest(question: Question) -> Range:
    """Return what else the budget has to hold: libraries, what experts and sampler keep, the driver's part.

    Experts keep a workspace for the tokens of a batch (vLLM, v1/worker/workspace.py), the sampler a count in 32 bits
    and a bit of each sequence and token of the vocabulary for penalties (v1/worker/gpu/sample/penalties.py).
    """
    _, experts = _estimate_forward(question, question.shape.hidden_size or 0)
    kept = question.max_num_seqs * (question.shape.vocabulary or 0) * (4 + 1 / 8)
    reserved = 0 if question.unified_memory else RESERVED_BYTES * question.gpu_memory_utilization
    return LIBRARIES + Range(low=experts, high=FORWARD_HIGH * experts + kept + reserved)


HOST_BYTES_PER_PROCESS: Final = 6 * GIB // 10
"""What server and core of vLLM 0.32 hold on the CPU, 0.6 GiB each (tests/contract); a worker with CUDA holds more."""


def estimate_host(question: Question) -> Range:
    """Return what all of vLLM's processes take of the host's memory.

    Each engine has a core, a server and, with several GPUs, a worker for each; the cache of images is in every server
    and core (vLLM 0.33, config/multimodal.py), and fills with use.
    """
    engines, workers = question.data_parallel_size, question.gpus
    processes = 2 * engines + (workers if workers > engines else 0)
    images = 2 * engines * question.mm_processor_cache_bytes if question.shape.encoder else 0
    offloaded = question.cpu_offload_bytes * workers + question.kv_offloading_bytes * engines
    own = processes * HOST_BYTES_PER_PROCESS
    return Range(low=own + offloaded, high=own + images + OFFLOAD_FACTOR * offloaded)


def estimate_outside(question: Question) -> Range:
    """Return what the engine takes of the card on top of its budget, and what a machine of one memory needs besides."""
    found = CONTEXT if question.gpus == 1 else CONTEXT + COMMUNICATION
    machine = LEFT_TO_THE_MACHINE_BYTES + question.cpu_offload_bytes + question.kv_offloading_bytes
    return found + Range(low=machine, high=machine) if question.unified_memory else found


SEQUENCES: Final = (1, 4, 16, 64, 256, 1024)
LENGTHS: Final = (1024, 4096, 16384, 65536, 262144)


class MemoryEstimate(Struct, frozen=True, kw_only=True):
    """What one GPU needs and has, all in bytes; None where it is not known.

    `engine_bytes_per_token` is one token on all GPUs of an engine together.
    """

    question: Question
    layout: KvLayout
    bytes_per_token: int
    engine_bytes_per_token: int
    weights: int | None
    budget: float | None
    activations: Range | None
    rest: Range
    graphs: Range
    outside: Range
    host: Range

    @property
    def overhead(self) -> Range | None:
        """What the budget has to hold besides weights and KV cache."""
        return None if self.activations is None else self.activations + self.graphs + self.rest

    @property
    def kv_cache(self) -> Range | None:
        """What is left for the KV cache: the low end with the highest overhead; both the same where it is set."""
        given, overhead = self.question.kv_cache_memory_bytes, self.overhead
        if given is not None:
            return Range(low=given, high=given)
        if self.budget is None or self.weights is None or overhead is None:
            return None
        left = self.budget - self.weights
        return Range(low=left - overhead.high, high=left - overhead.low)

    @property
    def blocks(self) -> int | None:
        """The blocks that the KV cache has at least, vLLM's `num_gpu_blocks`; None, too, where nothing is kept."""
        if self.kv_cache is None or not self.layout.block_bytes:
            return None
        return int(max(0.0, self.kv_cache.low) // self.layout.block_bytes)

    @property
    def capacity_tokens(self) -> int | None:
        """The tokens that the KV cache holds at least, counted as vLLM counts them (`get_kv_cache_capacity`).

        Where layers keep a window or a state, that is how many sequences of `max_model_len` fit, times this length.
        """
        if self.blocks is None or self.question.shape.has_every_token:
            return None if self.blocks is None else self.blocks * self.layout.block_tokens
        length = self.question.max_model_len
        return None if length is None else self.blocks * length // self.layout.count_blocks(length)

    def count_sequence_bytes(self, tokens: int) -> int:
        """Return what a sequence of this many tokens takes."""
        return self.layout.count_blocks(tokens) * self.layout.block_bytes

    def count_sequences(self, tokens: int) -> float | None:
        """Return how many sequences of this many tokens fit at once, at least."""
        return None if self.blocks is None else self.blocks / self.layout.count_blocks(tokens)

    def find_longest(self, sequences: int) -> int | None:
        """Return the most tokens, up to the model's own limit, that so many sequences can have at once; 0 for none."""
        limits = [
            limit
            for limit in (self.question.shape.max_model_len, self.question.max_model_len)
            if limit
        ]
        ceiling = max(limits, default=2**24)  # tokens: no model takes more
        return (
            None
            if self.blocks is None
            else self.layout.find_longest(self.blocks // sequences, ceiling)
        )


def estimate_memory(question: Question) -> MemoryEstimate:
    """Return the estimate; a draft's layers, which keep every token too, make the blocks of the cache larger."""
    ranks, stages = question.tensor_parallel_size, question.pipeline_parallel_size

    def count(shape: ModelShape, stages: int = 1) -> int:
        dtype = question.kv_cache_dtype
        return count_bytes_per_token(
            shape, kv_dtype=dtype, tensor_parallel=ranks, pipeline_parallel=stages
        )

    draft = 0 if question.draft is None else count(question.draft)
    layout = build_kv_layout(
        question.shape,
        block_tokens=question.block_size,
        in_flight_tokens=(stages + 1) * question.max_num_batched_tokens,
        kv_dtype=question.kv_cache_dtype,
        tensor_parallel=ranks,
        pipeline_parallel=stages,
    )
    total = None if question.kv_cache_memory_bytes is not None else question.gpu_memory_bytes
    return MemoryEstimate(
        question=question,
        layout=replace(layout, block_bytes=layout.block_bytes + draft * layout.block_tokens),
        bytes_per_token=count(question.shape, stages) + draft,
        engine_bytes_per_token=(count(question.shape) + draft) * ranks,
        weights=question.weights_bytes,
        budget=None if total is None else total * question.gpu_memory_utilization,
        activations=estimate_activations(question),
        rest=estimate_rest(question),
        graphs=NOTHING if question.enforce_eager else GRAPHS,
        outside=estimate_outside(question),
        host=estimate_host(question),
    )


def can_start(found: MemoryEstimate) -> bool | None:
    """Return whether vLLM starts: one sequence of `max_model_len` fits, and everything is on the card.

    None where it starts with the low end of the estimates and not with the high one, or something is not known: such as
    this type of model, or the weights or the largest input of its encoder.
    """
    if found.question.shape.unknown_type is not None:
        return None
    surely, possibly = _has_room(found, worst=True), _has_room(found, worst=False)
    if possibly is False:
        return False
    uncounted = found.question.has_more_weights or found.question.has_more_activations
    return True if surely and not uncounted else None


def _has_room(found: MemoryEstimate, *, worst: bool) -> bool | None:
    """Return whether a sequence fits, the card has the budget and the rest free, and the host has room."""
    question, room, overhead = found.question, found.kv_cache, found.overhead
    length, card, given = (
        question.max_model_len,
        question.gpu_memory_bytes,
        question.kv_cache_memory_bytes,
    )
    held = (
        None
        if room is None
        else (room.high, room.low)[worst] >= found.count_sequence_bytes(length or 1)
    )
    within = None
    if card is not None and found.budget is not None:
        within = card - found.budget >= found.outside.low
    elif (
        card is not None
        and found.weights is not None
        and overhead is not None
        and given is not None
    ):
        rest = overhead + found.outside
        within = found.weights + given + (rest.low, rest.high)[worst] <= card
    host = question.host_memory_bytes
    hosted = host is None or (found.host.low, found.host.high)[worst] <= host
    if False in (held, within, hosted):
        return False
    return None if None in (held, within, length) else True


def list_longest(found: MemoryEstimate) -> list[tuple[int, int]]:
    """Return for several `max_num_seqs` the largest `max_model_len` that all can use up at once; 0 for none."""
    asked = found.question.max_num_seqs
    counts = sorted({count for count in SEQUENCES if count <= asked} | {asked})
    return [
        (count, length) for count in counts if (length := found.find_longest(count)) is not None
    ]


def list_most(found: MemoryEstimate) -> list[tuple[int, int]]:
    """Return for several `max_model_len`, up to what one sequence can have, how many can use it up at once."""
    limit, asked = found.find_longest(1) or 0, found.question.max_model_len
    lengths = sorted(
        {length for length in LENGTHS if length <= limit}
        | ({asked} if asked is not None else set())
    )
    return [
        (length, int(count))
        for length in lengths
        if (count := found.count_sequences(length)) is not None
    ]
