"""Replaces torchvision, which is not installed where nothing looks at an image."""

import importlib.machinery
import sys
from unittest.mock import MagicMock

for name in ("", ".io", ".ops", ".transforms", ".transforms.v2", ".transforms.v2.functional", ".transforms.functional"):
    module = MagicMock(__path__=[], __version__="0.28.0")
    module.__spec__ = importlib.machinery.ModuleSpec(f"torchvision{name}", None)
    sys.modules[f"torchvision{name}"] = module
