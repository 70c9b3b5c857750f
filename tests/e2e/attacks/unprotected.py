"""The daemon without the bounds that $WITHOUT names: what holds then is the next protection."""

from __future__ import annotations

import os
from importlib import import_module

from vllm_headroom.__main__ import main

if __name__ == "__main__":
    for bound in os.environ["WITHOUT"].split(","):
        module, _, name = bound.rpartition(".")
        variables = vars(import_module(f"vllm_headroom.{module}"))
        assert isinstance(variables[name], int | float)
        variables[name] = 10**7
    main()
