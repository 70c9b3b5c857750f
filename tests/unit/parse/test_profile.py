from __future__ import annotations

import pytest
from msgspec.structs import fields

from vllm_headroom.model import INPUTS, EnginePage, EngineReading
from vllm_headroom.parse.engines import parse_engines
from vllm_headroom.parse.profile import Combine, Profile
from vllm_headroom.parse.profiles import PROFILES
from vllm_headroom.parse.profiles.llama_cpp import LLAMA_CPP

STEPS = {"kv_blocks", "kv_block_tokens", "kv_state_block_tokens", "kv_used_tokens"}


OPTIONAL = {
    *("max_num_seqs", "kv_stranded_ratio", "kv_token_ratio", "kv_offload_bytes", "multimodal_cache_queries_total")
}
"""What an engine may be configured to do, and is nothing that its page lacks."""


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
def test_a_profile_fills_fields_of_a_reading(profile: Profile) -> None:
    reading_fields = {field.name for field in fields(EngineReading)} - {"model_name", "engine"}

    assert {fact.field for fact in profile.facts} <= reading_fields | STEPS
    assert len(set(profile.facts)) == len(profile.facts)


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
def test_a_profile_says_of_every_input_that_it_offers_it_or_why_not(profile: Profile) -> None:
    filled = {fact.field for fact in profile.facts}
    filled |= {"kv_capacity_tokens"} if {"kv_blocks", "kv_block_tokens"} <= filled else set()
    filled |= {"kv_used_ratio", "kv_capacity_tokens"} if "kv_used_tokens" in filled else set()
    offered, absent = (
        [page_input.name for field, page_input in INPUTS.items() if field in filled],
        [name for name, _ in profile.absent],
    )

    assert {*offered, *absent} == {page_input.name for page_input in INPUTS.values()}
    assert len(set(absent)) == len(absent)
    assert set(offered) & set(absent) == ({"kv_cache_usage", "kv_cache_capacity"} if profile is LLAMA_CPP else set())


def test_a_page_says_0_of_what_its_engine_never_tells_and_no_bytes_where_there_are_none() -> None:
    page = parse_engines('sglang:num_running_reqs{model_name="m"} 1\n')
    assert isinstance(page, EnginePage)

    assert dict(page.inputs).keys() == {page_input.name for page_input in INPUTS.values()}
    assert dict(page.inputs)["scheduler_steps"] is False
    assert "memory_bytes" not in dict(PROFILES[0].inputs)


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
def test_a_ratio_is_never_added_up(profile: Profile) -> None:
    ratios = {fact.combine for fact in profile.facts if fact.field.endswith("_ratio")}

    assert ratios <= {Combine.MEAN, Combine.SAME}


def test_every_field_of_a_reading_is_an_input() -> None:
    assert INPUTS.keys() == {field.name for field in fields(EngineReading)} - {"model_name", "engine"} - OPTIONAL
