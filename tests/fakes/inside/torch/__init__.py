"""What the probe sees of torch: a CPU build until `torch.cuda.begin()` makes it one with a GPU."""

from types import SimpleNamespace
from typing import Any

from . import cuda

__version__ = "2.13.0"

observers: list[Any] = []
_C = SimpleNamespace(
    _cuda_attach_out_of_memory_observer=observers.append,
    _cuda_isHistoryEnabled=lambda: bool(cuda.histories) and cuda.histories[-1][0] is not None,
)

__all__ = ["cuda"]
