"""Aphrodite, which has vLLM's page under its own prefix."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from vllm_headroom.parse.profiles.vllm import VLLM

APHRODITE: Final = replace(VLLM, name="aphrodite", product="Aphrodite", prefixes=("aphrodite:",))
