"""One engine a file, as data."""

from __future__ import annotations

from typing import Final

from vllm_headroom.parse.profile import Profile
from vllm_headroom.parse.profiles.aphrodite import APHRODITE
from vllm_headroom.parse.profiles.dynamo import DYNAMO
from vllm_headroom.parse.profiles.llama_cpp import LLAMA_CPP
from vllm_headroom.parse.profiles.lmdeploy import LMDEPLOY
from vllm_headroom.parse.profiles.sglang import SGLANG
from vllm_headroom.parse.profiles.tensorrt_llm import TENSORRT_LLM
from vllm_headroom.parse.profiles.tgi import TGI
from vllm_headroom.parse.profiles.vllm import VLLM

PROFILES: Final[tuple[Profile, ...]] = (VLLM, SGLANG, TENSORRT_LLM, LMDEPLOY, TGI, LLAMA_CPP, APHRODITE, DYNAMO)
"""Every engine the daemon can read: what a newcomer adds to. The first that finds its series on a page reads it; Dynamo
comes last, since the engine that it runs shows its own series beside Dynamo's."""
