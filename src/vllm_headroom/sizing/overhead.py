"""What vLLM needs of a GPU besides weights and KV cache: estimates, as ranges."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from vllm_headroom.sizing.question import Question
from vllm_headroom.units import GIB

LOGITS_BYTES: Final = 4
LOGITS_LOW, LOGITS_HIGH = 4, 11
FORWARD_HIGH: Final = 1.3
USUAL_WIDTH: Final = 4
"""Times the hidden size, where the configuration does not tell an MLP's width; GPT's, and near most others'."""


class Range(Struct, frozen=True, kw_only=True):
    """Bytes that are known between two bounds."""

    low: float
    high: float

    def __add__(self, other: Range) -> Range:
        """Return the bounds of both together."""
        return Range(low=self.low + other.low, high=self.high + other.high)


NOTHING: Final = Range(low=0.0, high=0.0)
GRAPHS: Final = Range(low=0.2 * GIB, high=1.0 * GIB)
"""CUDA graphs, in the budget since vLLM 0.20.

Start-up logs: 0.23 GiB (Llama 3.1 8B, 0.31), 0.67 GiB (a 7B model, 0.10.2). vllm#7553: 2.4 GB (0.5.4, on top of the
budget then). The largest mixtures of experts take up to 5 GiB.
"""

LIBRARIES: Final = Range(low=0.05 * GIB, high=0.3 * GIB)
"""What CUDA libraries take during the profiling run: "non-torch memory" of 0.05 to 0.26 GiB in start-up logs."""

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


def activations(question: Question) -> Range | None:
    """Return the peak of vLLM's profiling run; None where the hidden size or the vocabulary is not known.

    The larger of three. A forward pass: the tokens of a batch x bytes of the dtype x (2 x hidden size for the residual,
    and the widest layer's values: 3 x MLP width, or queries, keys, values and output; what tensor parallelism divides,
    divided), to 1.3 times that. Sampling: sequences x vocabulary x 4 bytes of logits, 4 to 11 times, since they are
    converted, sorted and summed up (v1/worker/gpu_model_runner.py, `_dummy_sampler_run`); it is not divided.
    Start-up logs: 10.0 times the logits (Qwen3 8B on 4 GPUs, 0.8.5; Llama 3 8B, 0.7), 9.7 (Llama 3.1 8B, 0.31); 1.1
    times the forward pass (Qwen2.5 1.5B with 32,768 tokens, 0.7). And the encoder of images, whose tokens stay beside
    the other two (v1/worker/gpu_model_runner.py, `profile_run`).
    """
    shape, ranks = question.shape, question.tensor_parallel_size
    hidden, vocabulary = shape.hidden_size, shape.vocabulary
    if hidden is None or vocabulary is None:
        return None
    width = shape.mlp_width or USUAL_WIDTH * hidden
    chosen = shape.experts_per_token * hidden if shape.experts_per_token > 1 else 0
    attention = 2 * ((shape.attention_heads or 1) + shape.heads.count) * shape.heads.key_size / ranks
    values = 2 * hidden + max(attention, 3 * width / ranks + chosen)
    longest = question.max_num_seqs * (question.max_model_len or question.max_num_batched_tokens)
    forward = min(question.max_num_batched_tokens, longest) * values * shape.dtype_bytes
    logits = question.max_num_seqs * vocabulary * LOGITS_BYTES
    images, kept = _encoding(question, hidden)
    return Range(
        low=max(images.low, kept + max(forward, LOGITS_LOW * logits)),
        high=max(images.high, kept + max(FORWARD_HIGH * forward, LOGITS_HIGH * logits)),
    )


def _encoding(question: Question, hidden: int) -> tuple[Range, float]:
    """Return what the encoder takes of the largest items that vLLM profiles, and what its tokens take afterwards.

    A patch takes what a token does in the language model; whether tensor parallelism divides it, is each encoder's own.
    """
    largest, items = question.largest, question.encoder_items
    if largest is None or items is None:
        return NOTHING, 0
    size = items * question.shape.dtype_bytes
    low = largest.whole_values + largest.divided_values / question.tensor_parallel_size
    high = FORWARD_HIGH * (largest.whole_values + largest.divided_values)
    return Range(low=size * low, high=size * high), size * largest.tokens * largest.copies * hidden


def outside(question: Question) -> Range:
    """Return what the engine takes of the card on top of its budget, and what a machine of one memory needs besides."""
    found = CONTEXT if question.gpus == 1 else CONTEXT + COMMUNICATION
    machine = LEFT_TO_THE_MACHINE_BYTES + question.cpu_offload_bytes
    return found + Range(low=machine, high=machine) if question.unified_memory else found
