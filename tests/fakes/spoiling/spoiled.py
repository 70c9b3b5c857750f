"""A plugin that makes every function of the probe raise, but the one that vLLM calls and those that are spared."""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
from types import ModuleType
from typing import Any

import vllm_headroom_probe

SPARED = frozenset(os.environ.get("SPOILING_SPARES", "").split())


class SpoiledError(Exception):
    pass


def _raises(*_: Any, **__: Any) -> None:
    raise SpoiledError


def _spoil(place: ModuleType | type, module: str) -> None:
    for name, member in list(vars(place).items()):
        if getattr(member, "__module__", None) != module or name in SPARED:
            continue
        if inspect.isclass(member):
            _spoil(member, module)
        elif inspect.isfunction(member):
            setattr(place, name, _raises)


def spoil() -> None:
    for module_info in pkgutil.iter_modules(vllm_headroom_probe.__path__):
        module = importlib.import_module(f"vllm_headroom_probe.{module_info.name}")
        _spoil(module, module.__name__)
