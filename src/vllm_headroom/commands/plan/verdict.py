"""The answer in a sentence: whether it fits, and why."""

from __future__ import annotations

from vllm_headroom.commands.plan.estimate import Estimate, fits
from vllm_headroom.commands.plan.overhead import Range
from vllm_headroom.units import GIB, gib


def unknown(found: Estimate) -> list[str]:
    """Return what is not known and would be needed to tell whether it fits, each with the options that say it."""
    question = found.question
    needs = (
        (question.gpu_memory_bytes, "the card (--gpu-memory)"),
        (found.weights, "the weights (--parameters)"),
        (found.activations, "the activations (--hidden-size and --vocabulary)"),
        (question.max_model_len, "the length (--max-model-len)"),
    )
    return [name for value, name in needs if value is None]


def verdict(found: Estimate) -> str:
    """Return whether vLLM starts, and why."""
    answer, missing = fits(found), unknown(found)
    if answer:
        return f"It fits: vLLM starts. {_all_at_once(found)}"
    if answer is False:
        return f"It does not fit: {_obstacle(found)}."
    if missing:
        return f"Cannot tell whether it fits: not known {'is' if len(missing) == 1 else 'are'} {', '.join(missing)}."
    return f"Too close to call: {_margin(found)}."


def spread(amount: Range) -> str:
    """Return a range in GiB."""
    if amount.low == amount.high:
        return gib(amount.low)
    return f"{amount.low / GIB:,.2f} to {amount.high / GIB:,.2f} GiB"


def _obstacle(found: Estimate) -> str:
    question, kv_cache, overhead = found.question, found.kv_cache, found.overhead
    card, budget, length = question.gpu_memory_bytes or 0, found.budget, question.max_model_len or 1
    if budget is not None and overhead is not None and kv_cache is not None and kv_cache.high <= 0:
        rest = (found.weights or 0) + overhead.low
        return f"weights and activations need at least {gib(rest)} of each GPU, and the budget is {gib(budget)}"
    if kv_cache is not None and kv_cache.high < found.sequence_bytes(length):
        needed, left = gib(found.sequence_bytes(length)), gib(kv_cache.high)
        return f"one sequence of {length:,} tokens needs {needed} of KV cache, of at most {left}"
    if budget is not None:
        return f"the budget leaves {gib(card - budget)} of the card, and {spread(found.outside)} lie outside of it"
    return f"weights, activations and the KV cache are more than the card's {gib(card)}"


def _margin(found: Estimate) -> str:
    if found.kv_cache is None or found.budget is None:
        return "with the higher estimates it is more than the card has"
    needed = gib(found.sequence_bytes(found.question.max_model_len or 1))
    return f"{spread(found.kv_cache)} are left for the KV cache, and one sequence needs {needed}"


def _all_at_once(found: Estimate) -> str:
    length, sequences = found.question.max_model_len or 1, found.question.max_num_seqs
    at_once = int(found.sequences(length) or 0)
    if at_once >= sequences:
        return f"All {sequences:,} sequences of {length:,} tokens fit at once."
    return (
        f"But {sequences:,} sequences of {length:,} tokens do not fit at once, {at_once:,} do: further ones wait or are"
        " preempted."
    )
