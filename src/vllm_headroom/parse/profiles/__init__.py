"""One engine a file, as data."""

from __future__ import annotations

from typing import Final

from vllm_headroom.parse.profile import Profile
from vllm_headroom.parse.profiles.vllm import VLLM

PROFILES: Final[tuple[Profile, ...]] = (VLLM,)
"""Every engine the daemon can read: what a newcomer adds to. The first that finds its series on a page reads it."""
