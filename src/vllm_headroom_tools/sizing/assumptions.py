"""Assumptions, with evidence, about figures of an engine start that cannot be computed."""

from collections.abc import Sequence
from enum import StrEnum
from math import ceil, sqrt
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from vllm_headroom.units import GIB, MIB
from vllm_headroom_tools.sizing.cards import SAME_MODEL_BYTES, TOTALS_MIB
from vllm_headroom_tools.sizing.measured import (
    BATCH_SETTINGS,
    GROUP_SETTINGS,
    MODEL_SETTINGS,
    MeasuredStart,
)
from vllm_headroom_tools.sizing.question import Question


class Range(Struct, frozen=True, kw_only=True):
    """An amount that is known to lie between two bounds."""

    low: float
    high: float

    def __add__(self, other: "Range") -> "Range":
        """Return the range whose bounds are the sums of the two ranges' bounds."""
        return Range(low=self.low + other.low, high=self.high + other.high)

    def scale(self, factor: float) -> "Range":
        """Return the range multiplied by a factor, which must not be negative."""
        return Range(low=self.low * factor, high=self.high * factor)


NO_BYTES: Final = Range(low=0.0, high=0.0)

KEPT_DEVIATIONS: Final = 2.05
"""Our choice: the standard deviations from a sum's mean to its upper bound. A normally distributed
sum exceeds the bound in 2 of 100 cases.
"""

UNIFORM_VARIANCE: Final = 1 / 12
"""The variance of a uniformly distributed amount, in units of its range's width squared."""


def add_all(parts: Sequence[Range]) -> Range:
    """Return the bounds of a sum whose parts may all reach their bounds together."""
    return Range(low=sum(part.low for part in parts), high=sum(part.high for part in parts))


def add_independent(parts: Sequence[Range]) -> Range:
    """Return the bounds of a sum of independent parts.

    The lower bound is the sum of the parts' lower bounds. The parts hardly ever reach their upper
    bounds at the same time. Therefore, the sum exceeds the upper bound in only 2 of 100 cases. Each
    part is assumed to be uniformly distributed over its range. If only one part is uncertain, its
    own upper bound is used.
    """
    bounds = add_all(parts)
    variance = sum((part.high - part.low) ** 2 for part in parts) * UNIFORM_VARIANCE
    likely_high = (bounds.low + bounds.high) / 2 + KEPT_DEVIATIONS * sqrt(variance)
    return Range(low=bounds.low, high=min(bounds.high, likely_high))


class Origin(StrEnum):
    """The origin of a figure."""

    CONSTRUCTION = "by construction"
    REAL_CARDS = "measured on real cards"
    STAND_IN = "measured on the stand-in card"
    REPORTS = "from public reports"
    LOG = "from the log of this start"


class Assumption(Struct, frozen=True, kw_only=True):
    """A range and the evidence for it."""

    range: Range
    origin: Origin
    # The cards, the releases and the number of starts.
    evidence: str


class StartAssumptions(Struct, frozen=True, kw_only=True):
    """The assumptions about one GPU at the start.

    Figures from a log can replace each assumption.
    """

    # The part of the memory given in the question that CUDA does not see.
    driver_reserved: Assumption
    # The memory outside the budget that is already in use before the weights are loaded.
    missing_at_start: Assumption
    # vLLM's "non-torch forward increase", inside the budget.
    non_torch: Assumption
    # vLLM's own estimate of its CUDA graphs.
    graphs: Assumption
    # Sampling memory, as a multiple of the size of the 32-bit logits.
    sampling_ratio: Assumption
    # The sampler's warm-up memory, as a multiple of the size of the 32-bit logits. The warm-up
    # follows the allocation of the KV cache.
    warmup_ratio: Assumption
    # The memory of a forward pass, as a multiple of the estimate.
    forward_ratio: Assumption


H100_STARTS: Final = "H100 80 GB, vLLM 0.19"
"""24 starts of 12 models with complete public logs (llm-d-incubation/llm-d-planner, accuracy, April
2026).
"""

H100: Final = "H100"
"""The card of the known starts, by its name in the table of cards."""

H100_VISIBLE_BYTES: Final = 79.19 * GIB
"""The memory of an H100 80 GB as CUDA sees it (H100_STARTS)."""

H100_LABEL_BYTES: Final = 80 * GIB
"""A size that operators commonly give for this card."""

MEASURED_GPUS: Final = 4
"""The largest number of GPUs used in any of the known starts."""


def _is_size(memory_bytes: float | None, card_bytes: float) -> bool:
    return memory_bytes is not None and abs(memory_bytes - card_bytes) < SAME_MODEL_BYTES


def _is_measured_card(question: Question) -> bool:
    """Return whether the known starts used this card, or one of the same size."""
    if question.card_name is not None:
        return question.card_name == H100
    sizes = (TOTALS_MIB[H100] * MIB, H100_VISIBLE_BYTES, H100_LABEL_BYTES)
    return any(_is_size(question.gpu_memory_bytes, card_bytes) for card_bytes in sizes)


def _is_measured_start(question: Question) -> bool:
    """Return whether known starts cover this release, this card and this number of GPUs."""
    has_release = question.release.version == "0.19"
    is_small_group = _count_group_gpus(question) <= MEASURED_GPUS
    return has_release and _is_measured_card(question) and is_small_group


def _count_group_gpus(question: Question) -> int:
    """Return how many GPUs communicate: those of one engine, or of all engines sharing experts."""
    if question.shape.experts_per_token > 1:
        return question.gpus
    return question.tensor_parallel_size * question.pipeline_parallel_size


def assume_start(question: Question) -> StartAssumptions:
    """Return the assumptions about a start with these settings, or the figures from its log."""
    assumptions = _assume_unmeasured(question)
    measured = question.measured
    if measured is None:
        return assumptions
    replacements = {}
    # A figure from the log replaces an assumption only if its settings are the same.
    is_same_group = measured.has_same(question, GROUP_SETTINGS)
    if question.gpu_memory_bytes == measured.total_bytes:
        replacements["driver_reserved"] = _assume_logged(0.0, measured)
    if is_same_group and measured.missing_bytes is not None:
        replacements["missing_at_start"] = _assume_logged(measured.missing_bytes, measured)
    if is_same_group and measured.non_torch_bytes is not None:
        replacements["non_torch"] = _assume_logged(measured.non_torch_bytes, measured)
    is_same_batch = measured.has_same(question, (*MODEL_SETTINGS, *BATCH_SETTINGS, "enforce_eager"))
    if is_same_batch and measured.graphs_bytes is not None:
        replacements["graphs"] = _assume_logged(measured.graphs_bytes, measured)
    return replace(assumptions, **replacements)


def _assume_logged(logged_bytes: float, measured: MeasuredStart) -> Assumption:
    """Return a figure from a log in the form of an assumption."""
    exact_range = Range(low=logged_bytes, high=logged_bytes)
    return Assumption(range=exact_range, origin=Origin.LOG, evidence=measured.source)


def _assume_unmeasured(question: Question) -> StartAssumptions:
    """Return the assumptions about a start without a log."""
    return StartAssumptions(
        driver_reserved=_assume_driver_reserved(question),
        missing_at_start=_assume_missing_at_start(question),
        non_torch=_assume_non_torch(question),
        graphs=_assume_graphs(question),
        sampling_ratio=_assume_sampling_ratio(question),
        warmup_ratio=_assume_warmup_ratio(question),
        forward_ratio=FORWARD_RATIO,
    )


CARDS_RESERVED: Final = {
    "L20": Range(low=0.44 * GIB, high=0.7 * GIB),
    "L40S": Range(low=0.44 * GIB, high=0.7 * GIB),
    "A100-80GB": Range(low=0.55 * GIB, high=0.87 * GIB),
    "RTX PRO 6000": Range(low=0.55 * GIB, high=0.7 * GIB),
}
"""The part of these cards' memory that CUDA does not see. CUDA sees 44.32 to 44.53 of 44.99 GiB. It
sees 79.15 to 79.35 of 80.00 GiB, and 94.97 of 95.59 GiB. The source is torch's messages in public
issues.
"""

LARGEST_SMALL_CARD_BYTES: Final = 33 * GIB
SMALL_CARD_RESERVED_HIGH: Final = 0.5 * GIB
"""The largest part of nvidia-smi's total that CUDA does not see on small cards. This part is 0.31
to 0.44 GiB on an RTX 3090. It is 0.44 GiB on an L4 and an RTX 5080. On an RTX 5090, it is 0.48 GiB.
The source is torch's messages.
"""

FORWARD_RATIO: Final = Assumption(
    range=Range(low=1.0, high=1.3),
    origin=Origin.STAND_IN,
    evidence="vLLM 0.32, 20 models (tests/card/shapes)",
)
"""The memory of the forward pass, as a multiple of the estimate. The range is from 1 to the highest
ratio measured.
"""


def _assume_driver_reserved(question: Question) -> Assumption:
    """Return how much of the memory given in the question is reserved by the driver.

    The question may give nvidia-smi's total, CUDA's total, or the size on the label.
    """
    memory_bytes = question.gpu_memory_bytes
    if question.unified_memory:
        return Assumption(
            range=NO_BYTES, origin=Origin.CONSTRUCTION, evidence="CUDA sees the machine's memory"
        )
    if _is_size(memory_bytes, H100_VISIBLE_BYTES):
        return Assumption(range=NO_BYTES, origin=Origin.REAL_CARDS, evidence=H100_STARTS)
    # The operator may know any of three totals: nvidia-smi's, CUDA's or the label's.
    if _is_size(memory_bytes, TOTALS_MIB[H100] * MIB):
        # CUDA sees 79.11 GiB with older drivers.
        h100_range = Range(low=0.45 * GIB, high=0.55 * GIB)
        return Assumption(range=h100_range, origin=Origin.REAL_CARDS, evidence=H100_STARTS)
    reserved_range = CARDS_RESERVED.get(question.card_name or "")
    if reserved_range is not None:
        return Assumption(
            range=reserved_range,
            origin=Origin.REPORTS,
            evidence=f"torch's messages on {question.card_name}",
        )
    if any(_is_size(memory_bytes, total_mib * MIB) for total_mib in TOTALS_MIB.values()):
        high = SMALL_CARD_RESERVED_HIGH
        if memory_bytes is None or memory_bytes > LARGEST_SMALL_CARD_BYTES:
            high = 0.85 * GIB
        return Assumption(
            range=Range(low=0.3 * GIB, high=high),
            origin=Origin.REPORTS,
            evidence="torch's messages of missing memory beside nvidia-smi's total",
        )
    return Assumption(
        range=Range(low=0.0, high=0.85 * GIB),
        origin=Origin.REPORTS,
        evidence="0.3 to 0.75 GiB; a label of 80 GiB is 79.15 to CUDA (A100, H100)",
    )


def _assume_missing_at_start(question: Question) -> Assumption:
    """Return the memory that the CUDA context and communication between GPUs use at the start."""
    is_measured = _is_measured_card(question)
    group_gpus = _count_group_gpus(question)
    # A single GPU has only the CUDA context. A group of GPUs also sets up communicators (NCCL).
    if group_gpus == 1:
        if is_measured:
            h100_range = Range(low=0.45 * GIB, high=0.6 * GIB)
            return Assumption(range=h100_range, origin=Origin.REAL_CARDS, evidence=H100_STARTS)
        return Assumption(
            range=Range(low=0.1 * GIB, high=0.6 * GIB),
            origin=Origin.REPORTS,
            evidence="start-up logs: 0.07 to 0.53 GiB; pytorch#107667: about 300 MB",
        )
    if is_measured and group_gpus <= MEASURED_GPUS:
        h100_range = Range(low=1.4 * GIB, high=1.65 * GIB)
        return Assumption(range=h100_range, origin=Origin.REAL_CARDS, evidence=H100_STARTS)
    return Assumption(
        range=Range(low=0.2 * GIB, high=3.6 * GIB),
        origin=Origin.REPORTS,
        evidence="NVIDIA/nccl#964: 0.5 to 0.7 GB; logs of the largest cards: up to 3.5 GiB",
    )


CARDS_OF_PCIE: Final = frozenset(
    {"T4", "A10", "A10G", "A40", "L4", "L40", "L40S", "RTX PRO 6000", "RTX A6000", "RTX 6000 Ada"}
)
"""Cards on which vLLM does not use large all-reduce buffers. NVLink does not connect all of these
GPUs.
"""

LARGEST_PCIE_BYTES: Final = 60 * GIB
"""Our choice: the largest memory of an unknown card without large all-reduce buffers. Such a card
has no NVLink or is too old.
"""


def _has_small_buffers(question: Question) -> bool:
    """Return whether all-reduce does not use large buffers on this card."""
    name = question.card_name
    if name is not None and (name in CARDS_OF_PCIE or name.startswith("RTX")):
        return True
    memory_bytes = question.gpu_memory_bytes
    return memory_bytes is not None and memory_bytes < LARGEST_PCIE_BYTES


def _assume_non_torch(question: Question) -> Assumption:
    """Return the memory that libraries and communication take from the budget during profiling.

    In a group of GPUs, all-reduce buffers take most of this memory. The last stage of a pipeline
    also loads the sampler's library. Without a pipeline, every GPU loads this library.
    """
    # Experts on several engines exchange tokens using all-to-all, which has the largest buffers.
    if question.data_parallel_size > 1 and question.shape.experts_per_token > 1:
        return Assumption(
            range=Range(low=0.05 * GIB, high=9.0 * GIB),
            origin=Origin.REPORTS,
            evidence="buffers of all-to-all between engines: 4.5 and 8.8 GiB",
        )
    # Without tensor parallelism, there is no all-reduce and therefore no buffer for it.
    if question.tensor_parallel_size == 1:
        if _is_measured_start(question):
            low = 0.05 if question.pipeline_parallel_size > 1 else 0.22
            h100_range = Range(low=low * GIB, high=0.48 * GIB)
            return Assumption(range=h100_range, origin=Origin.REAL_CARDS, evidence=H100_STARTS)
        high = 0.5
        evidence = f"{H100_STARTS}: 0.07 to 0.46 GiB; the stand-in card: 0.05"
        if question.release.counts_consumed_memory:
            high = 0.9
            evidence += "; A100 80 GB, vLLM 0.31: at least 0.86 beside the other parts"
        return Assumption(
            range=Range(low=0.05 * GIB, high=high * GIB), origin=Origin.REPORTS, evidence=evidence
        )
    if _is_measured_start(question):
        h100_range = Range(low=2.0 * GIB, high=2.25 * GIB)
        return Assumption(range=h100_range, origin=Origin.REAL_CARDS, evidence=H100_STARTS)
    if question.unified_memory:
        # vLLM compares the free memory before loading with that after the profile run. The
        # difference includes the page cache of the weight files.
        return Assumption(
            range=Range(low=0.05 * GIB, high=10.0 * GIB),
            origin=Origin.REPORTS,
            evidence="2 x DGX Spark, vLLM 0.29: 7 to 9 GiB",
        )
    if _has_small_buffers(question):
        return Assumption(
            range=Range(low=0.05 * GIB, high=1.2 * GIB),
            origin=Origin.REPORTS,
            evidence="2 x RTX 5090, vLLM 0.26: 0.6 GiB; 4 x RTX PRO 6000: 0.5",
        )
    high = 2.6 if question.tensor_parallel_size <= MEASURED_GPUS else 3.5
    return Assumption(
        range=Range(low=0.05 * GIB, high=high * GIB),
        origin=Origin.REPORTS,
        evidence=f"{H100_STARTS}: 2.07 to 2.21 GiB; the stand-in card: 0.05",
    )


SMALL_GRAPHS: Final = (1, 2, 4)
FINE_STEP: Final = 8
COARSE_STEP: Final = 16
COARSE_FROM: Final = 256
LARGEST_GRAPH: Final = 512
"""The largest batch for which vLLM captures graphs. The batch sizes begin with 1, 2 and 4.
Multiples of 8 up to 256 and multiples of 16 up to 512 follow. The sizes end at twice `max_num_seqs`
if that is less (config/vllm.py, `_set_cudagraph_sizes`).
"""

LARGEST_BLACKWELL_GRAPH: Final = 1024
BLACKWELL_CARDS: Final = frozenset({"B200", "GB200", "B300", "GB300"})
"""Cards for which vLLM 0.28 doubled LARGEST_GRAPH (config/vllm.py, "device capability family 100").
"""


def count_graph_sizes(question: Question) -> int:
    """Return the number of batch sizes for which vLLM captures graphs of the model's parts."""
    limit = LARGEST_GRAPH
    if question.release.has_largest_defaults and question.card_name in BLACKWELL_CARDS:
        limit = LARGEST_BLACKWELL_GRAPH
    return _count_sizes_up_to(
        min(2 * question.max_num_seqs, limit, question.max_num_batched_tokens)
    )


def count_whole_graph_sizes(question: Question) -> int:
    """Return the number of batch sizes for which vLLM also captures a whole-model graph.

    A decoding step has at most `max_num_seqs` tokens. With speculation, it has several tokens per
    sequence (v1/cudagraph_dispatcher.py, `initialize_cudagraph_keys`).
    """
    if question.has_speculation:
        return count_graph_sizes(question)
    return min(count_graph_sizes(question), _count_sizes_up_to(question.max_num_seqs))


def _count_sizes_up_to(largest: int) -> int:
    small = sum(size <= largest for size in SMALL_GRAPHS)
    fine = len(range(FINE_STEP, min(largest + 1, COARSE_FROM), FINE_STEP))
    coarse = len(range(COARSE_FROM, largest + 1, COARSE_STEP))
    return small + fine + coarse


FIRST_GRAPH: Final = Range(low=0.06 * GIB, high=0.33 * GIB)
"""The size of the first captured graph, which was 70 to 328 MiB (H100_STARTS)."""

FIRST_PARTS_GRAPH_HIGH: Final = 0.23 * GIB
"""The largest first graph if FlashAttention 3 is not used. With FlashAttention 3, a whole-model
graph has a buffer of 256 MiB for splits (v1/attention/backends/flash_attn.py, `max_num_splits`).
The first graph of the model's parts takes up to 224 MiB (H100_STARTS).
"""

HOPPER_CARDS: Final = frozenset({"H20", "H100", "H800", "H100 NVL", "GH200", "H200", "H200 NVL"})
"""Cards on which vLLM uses FlashAttention 3."""

LAYER_GRAPHS: Final = Range(low=0.06 * MIB, high=0.225 * MIB)
"""Each additional batch size needs a graph of the model or of its parts. Its size per layer is 0.10
to 0.22 MiB on one GPU (H100_STARTS). On a 24 GB card, it is 0.07 MiB (Qwen3 8B, vLLM 0.21).
"""

SHARED_LAYER_GRAPHS: Final = Range(low=0.11 * MIB, high=0.83 * MIB)
"""The size per layer of a graph of the model's parts with tensor parallelism. It was 0.12 to
0.81 MiB. A whole-model graph is as large as on one GPU (H100_STARTS).
"""

SHARED_PARTS_HIGH: Final = 27 * MIB
SHARED_WHOLE_HIGH: Final = 14 * MIB
"""The largest sizes of a graph with tensor parallelism. The graphs are of the model's parts and of
the whole model. The graph of the parts takes 26 MiB with 32 layers. With 80 layers, it takes
20 MiB. The whole-model graph takes 14 MiB with 80 layers (H100_STARTS). For a dense model with 70
billion parameters, the two graphs together take 38 MiB. Public reports show 2.2 GiB for 51 sizes.
"""

LARGEST_MIXTURE_GPUS: Final = 8
LARGEST_MIXTURE_PARTS_HIGH: Final = 82 * MIB
"""The largest size of a graph of the model's parts, for a mixture of experts. The model runs on at
least LARGEST_MIXTURE_GPUS GPUs. For 51 batch sizes, both graphs together take 5 GiB (public
reports).
"""

HYBRID_GRAPHS_HIGH: Final = 84 * MIB
"""For a state-space model, the largest total of the two graphs for a batch size. It was 4.2 GiB for
51 sizes (public reports, since vLLM 0.26).
"""

UNIFIED_GRAPHS_HIGH: Final = 100 * MIB
"""The largest total size of the two graphs for a batch size. It applies to several machines with
unified memory. It was 5.1 GiB for 51 sizes (two DGX Spark, vLLM 0.29).
"""

MEASURED_GRAPHS_LOW: Final = 0.05 * GIB
"""The lower bound for the second model runner's graphs. They took 0.16 and 0.23 GiB (Llama 3.1 8B,
vLLM 0.26 and 0.31).
"""


def _assume_graphs(question: Question) -> Assumption:
    """Return vLLM's estimate of its CUDA graphs.

    For the first batch size, the estimate covers one graph. For each further size, it covers a
    whole-model graph and one of the model's parts. The source is vLLM 0.19,
    v1/worker/gpu_model_runner.py, `profile_cudagraph_memory`. Since vLLM 0.29, the graphs of the
    parts are measured instead, and the measured figure is smaller.
    """
    if question.enforce_eager:
        return Assumption(
            range=NO_BYTES, origin=Origin.CONSTRUCTION, evidence="--enforce-eager has none"
        )
    # Graphs grow with the number of layers, and a stage captures only its own layers.
    stage_layers = ceil(question.shape.layers / question.pipeline_parallel_size)
    whole_range = LAYER_GRAPHS.scale(stage_layers)
    parts_range = whole_range
    both_most = 0.0
    if question.tensor_parallel_size > 1:
        shared = SHARED_LAYER_GRAPHS.scale(stage_layers)
        parts_high = SHARED_PARTS_HIGH
        is_mixture = question.shape.experts_per_token > 1
        if is_mixture and question.tensor_parallel_size >= LARGEST_MIXTURE_GPUS:
            parts_high = LARGEST_MIXTURE_PARTS_HIGH
        parts_range = Range(low=shared.low, high=min(shared.high, parts_high))
        whole_range = Range(low=whole_range.low, high=min(whole_range.high, SHARED_WHOLE_HIGH))
    evidence = f"{H100_STARTS}: 0.49 to 1.92 GiB"
    origin = Origin.REAL_CARDS if _is_measured_start(question) else Origin.REPORTS
    if question.shape.stateful_layers:
        both_most = max(both_most, HYBRID_GRAPHS_HIGH)
        origin = Origin.REPORTS
        evidence += "; hybrid models since 0.26: 0.56 to 4.2"
    # Unified memory makes the estimate unreliable, so raise the upper bound only.
    if question.unified_memory and question.gpus > 1:
        both_most = max(both_most, UNIFIED_GRAPHS_HIGH)
        evidence += "; 2 x DGX Spark, vLLM 0.29: 5.1"
    parts_sizes = count_graph_sizes(question) - 1
    whole_sizes = count_whole_graph_sizes(question) - 1
    further = parts_range.scale(parts_sizes) + whole_range.scale(whole_sizes)
    # Reports only give the total size of the two graphs for a batch size. The graph of the model's
    # parts may account for the entire size.
    further = Range(low=further.low, high=max(further.high, both_most * parts_sizes))
    first = FIRST_GRAPH
    if question.card_name is not None and question.card_name not in HOPPER_CARDS:
        first = Range(low=FIRST_GRAPH.low, high=FIRST_PARTS_GRAPH_HIGH)
    graphs_range = first + further
    if question.may_have_second_runner:
        low = 0.0
        if question.release.has_second_runner_graphs:
            low = min(graphs_range.low, MEASURED_GRAPHS_LOW)
        graphs_range = Range(low=low, high=graphs_range.high)
        evidence += "; vLLM 0.26 and 0.31, Llama 3.1 8B: 0.16 and 0.23"
    return Assumption(range=graphs_range, origin=origin, evidence=evidence)


LOGIT_BYTES: Final = 4
"""The size of a logit in bytes: sampling uses 32-bit values."""

NARROW_PROFILE_HIGH: Final = 1.25
"""The sampler's profile as a multiple of the size of the 32-bit logits. It applies to the second
model runner before vLLM 0.33. At most this multiple was measured (the stand-in card, vLLM 0.32).
"""


WIDE_LOGITS: Final = 3.0
WIDE_LOGITS_HIGH: Final = 3.15
"""The first runner's memory for the 32-bit logits, as a multiple of their size. By design, this
runner keeps WIDE_LOGITS copies at the same time. WIDE_LOGITS_HIGH is the highest multiple measured.
"""


def _assume_sampling_ratio(question: Question) -> Assumption:
    """Return the sampler's profiling memory, as a multiple of the size of the 32-bit logits.

    The first model runner keeps four copies of the logits:

    - one in the model's dtype
    - three in 32 bits: unchanged, as probabilities, and filtered by top-k and top-p

    Before vLLM 0.33, the second runner keeps fewer copies. In vLLM 0.33, it keeps at least the
    unchanged logits.
    """
    # The unit is the size of the 32-bit logits.
    narrow_ratio = question.shape.dtype_bytes / LOGIT_BYTES
    all_low = narrow_ratio + WIDE_LOGITS
    all_high = narrow_ratio + WIDE_LOGITS_HIGH
    release = question.release
    if not question.may_have_second_runner:
        return Assumption(
            range=Range(low=all_low, high=all_high),
            origin=Origin.REAL_CARDS,
            evidence=f"{H100_STARTS}, 12 models",
        )
    if release.has_wide_profile:
        return Assumption(
            range=Range(low=narrow_ratio + 1, high=all_high),
            origin=Origin.CONSTRUCTION,
            evidence="_dummy_sampler_run: the logits in two dtypes, and up to two copies",
        )
    if question.has_only_second_runner:
        return Assumption(
            range=Range(low=narrow_ratio, high=NARROW_PROFILE_HIGH),
            origin=Origin.STAND_IN,
            evidence="vLLM 0.32, 20 models (tests/card/shapes)",
        )
    return Assumption(
        range=Range(low=narrow_ratio, high=all_high),
        origin=Origin.STAND_IN,
        evidence="both model runners of vLLM 0.32 (tests/card/shapes)",
    )


def _assume_warmup_ratio(question: Question) -> Assumption:
    """Return the sampler's warm-up memory, as a multiple of the size of the 32-bit logits.

    The first model runner repeats the steps of its profile. The second runs all sampler steps
    (v1/worker/gpu/warmup.py, `warmup_kernels`). Since vLLM 0.33, they are part of its profile run
    too.
    """
    narrow_ratio = question.shape.dtype_bytes / LOGIT_BYTES
    low = narrow_ratio + WIDE_LOGITS
    evidence = f"as the profile ({H100_STARTS})"
    if question.may_have_second_runner:
        low = narrow_ratio + 1
        evidence = (
            "SamplingParams.for_sampler_warmup: the logits in two dtypes, and up to two copies"
        )
    return Assumption(
        range=Range(low=low, high=narrow_ratio + WIDE_LOGITS_HIGH),
        origin=Origin.CONSTRUCTION,
        evidence=evidence,
    )
