"""Aphrodite: vLLM's page with another prefix."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from vllm_headroom.parse.profiles.vllm import VLLM

APHRODITE: Final = replace(VLLM, name="aphrodite", product="Aphrodite", prefixes=("aphrodite:",))
