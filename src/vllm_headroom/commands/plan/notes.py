"""What to know about the figures, a sentence each."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_headroom.commands.plan.estimate import Estimate
from vllm_headroom.commands.plan.verdict import spread
from vllm_headroom.units import gib


def notes(found: Estimate) -> list[str]:
    """Return where the figures are bounds, and what one might not expect of them."""
    return [*_layers(found), *_copies(found), *_left_out(found)]


def _layers(found: Estimate) -> Iterator[str]:
    shape, ranks = found.question.shape, found.question.tensor_parallel_size
    if shape.windowed_layers:
        yield (
            f"{shape.windowed_layers} layers keep only the last {shape.window_tokens or 0:,} tokens: bytes per token"
            " are an upper bound; tokens and sequences are counted as vLLM's hybrid KV cache manager holds them."
        )
    if shape.stateful_layers and shape.state_bytes is not None:
        yield (
            f"{shape.stateful_layers} layers keep {shape.state_bytes // ranks:,} bytes of each sequence instead of its"
            f" tokens; a block has {found.layout.block_tokens} tokens to be as large as one of these."
        )
    if shape.stateful_layers and shape.state_bytes is None:
        yield (
            f"{shape.stateful_layers} layers keep a state of each sequence whose size is not known here: tokens and"
            " sequences are an upper bound."
        )


def _copies(found: Estimate) -> Iterator[str]:
    shape, ranks = found.question.shape, found.question.tensor_parallel_size
    if shape.latent_width is not None and ranks > 1:
        yield "Latent attention keeps its whole vector on every GPU: tensor parallelism does not divide the KV cache."
    elif ranks > shape.kv_heads:
        yield f"{ranks} GPUs share {shape.kv_heads} KV heads: each is kept {ranks // shape.kv_heads} times."


def _left_out(found: Estimate) -> Iterator[str]:
    question, card, budget = found.question, found.question.gpu_memory_bytes, found.budget
    if question.shape.other_parts and question.checkpoint_bytes is None and question.parameters is None:
        yield "The weights are the language model's alone: an image or audio encoder's come on top."
    if card is not None and budget is not None and found.outside.low <= card - budget < found.outside.high:
        yield (
            f"Beside its budget vLLM takes {spread(found.outside)} of the card, and {gib(card - budget)} are left for"
            " that."
        )
