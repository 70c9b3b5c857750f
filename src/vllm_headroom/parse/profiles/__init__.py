"""The profiles of engines, one per file."""

from typing import Final

from vllm_headroom.parse.profile import Profile
from vllm_headroom.parse.profiles.dynamo import DYNAMO
from vllm_headroom.parse.profiles.llama_cpp import LLAMA_CPP
from vllm_headroom.parse.profiles.lmdeploy import LMDEPLOY
from vllm_headroom.parse.profiles.sglang import SGLANG
from vllm_headroom.parse.profiles.tensorrt_llm import TENSORRT_LLM
from vllm_headroom.parse.profiles.tgi import TGI
from vllm_headroom.parse.profiles.triton import TRITON
from vllm_headroom.parse.profiles.vllm import APHRODITE, VLLM

PROFILES: Final[tuple[Profile, ...]] = (
    VLLM,
    SGLANG,
    TENSORRT_LLM,
    TRITON,
    LMDEPLOY,
    TGI,
    LLAMA_CPP,
    APHRODITE,
    DYNAMO,
)
"""Every supported engine; add new ones here.

The page is read with the first profile that has matching series. Dynamo is last. The engine inside
Dynamo may export its own series on the same page.
"""
