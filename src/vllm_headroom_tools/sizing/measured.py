"""The figures from a startup log.

The measured figures replace assumptions about a start with similar settings.
"""

from collections.abc import Mapping
from typing import Final

from msgspec import Struct

GROUP_SETTINGS: Final = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "release",
)
"""The settings that determine how much memory libraries and communication take."""

WEIGHT_SETTINGS: Final = (
    *GROUP_SETTINGS,
    "shape",
    "checkpoint_bytes",
    "parameters",
    "enable_expert_parallel",
    "cpu_offload_bytes",
    "max_loras",
    "max_lora_rank",
    "draft",
)
"""The settings that determine the weights on each GPU."""

MODEL_SETTINGS: Final = (*GROUP_SETTINGS, "shape", "draft", "max_loras", "max_lora_rank")
"""The settings that, together with the batch settings, determine activations and graphs."""

BATCH_SETTINGS: Final = ("max_num_seqs", "max_num_batched_tokens")
"""The settings that make activations and graphs grow."""


class MeasuredStart(Struct, frozen=True, kw_only=True):
    """The settings of one start, and its figures per GPU.

    Figures missing from the log are None. A figure depends on some of the settings. The figure
    applies to a question only if these settings have the same values.
    """

    # The log file and vLLM's version.
    source: str
    # The settings of the start, under their names in Question.
    settings: Mapping[str, object]
    total_bytes: float | None = None
    # The memory that was already in use before the start.
    missing_bytes: float | None = None
    weights_bytes: float | None = None
    activation_bytes: float | None = None
    non_torch_bytes: float | None = None
    graphs_bytes: float | None = None
    kv_cache_bytes: float | None = None
    kv_cache_tokens: float | None = None

    def has_same(self, question: object, names: tuple[str, ...]) -> bool:
        """Return whether a question has the same values for all of these settings."""
        return all(getattr(question, name) == self.settings[name] for name in names)

    def is_batch_within(self, question: object) -> bool:
        """Return whether the question's batches are at most as large as the start's."""
        return all(getattr(question, name) <= self.settings[name] for name in BATCH_SETTINGS)

    def is_batch_beyond(self, question: object) -> bool:
        """Return whether the question's batches are at least as large as the start's."""
        return all(getattr(question, name) >= self.settings[name] for name in BATCH_SETTINGS)
