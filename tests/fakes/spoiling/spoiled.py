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
    for name, thing in list(vars(place).items()):
        if getattr(thing, "__module__", None) != module or name in SPARED:
            continue
        if inspect.isclass(thing):
            _spoil(thing, module)
        elif inspect.isfunction(thing):
            setattr(place, name, _raises)


def spoil() -> None:
    for found in pkgutil.iter_modules(vllm_headroom_probe.__path__):
        module = importlib.import_module(f"vllm_headroom_probe.{found.name}")
        _spoil(module, module.__name__)
