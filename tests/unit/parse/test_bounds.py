"""What a page may cost: each bound holds just as it says, and is far from any real page."""

from __future__ import annotations

import pytest

from tests.contract.data_parallel import data_parallel_page
from vllm_headroom.model import EnginePage, Failure
from vllm_headroom.parse.engines import MOST_PAGE_ENGINES, MOST_SHARED_READINGS, parse_engines
from vllm_headroom.parse.exposition import LONGEST_LINE, MOST_CHARACTERS, MOST_LABELS, MOST_SAMPLES
from vllm_headroom.vocabulary import Reason

RUNNING = "vllm:num_requests_running"


def models(number: int) -> str:
    return "".join(f'{RUNNING}{{model_name="m{index}",engine="0"}} 1\n' for index in range(number))


def line(length: int) -> str:
    bare = f'{RUNNING}{{model_name=""}} 1'
    return bare.replace('""', f'"{"m" * (length - len(bare))}"') + "\n"


def labels(number: int) -> str:
    return RUNNING + "{" + ",".join(f'l{index}="v"' for index in range(number)) + "} 1\n"


def shared(number: int) -> str:
    settings = "".join(f'vllm:cache_config_info{{engine="0",n="{index}"}} 1\n' for index in range(number // 10))
    return models(10) + settings


WITHIN_AND_BEYOND = {
    "engines": (models(MOST_PAGE_ENGINES), models(MOST_PAGE_ENGINES + 1)),
    "characters of a line": (line(LONGEST_LINE), line(LONGEST_LINE + 1)),
    "labels of a line": (labels(MOST_LABELS), labels(MOST_LABELS + 1)),
    "series": (f"{RUNNING} 1\n" * MOST_SAMPLES, f"{RUNNING} 1\n" * (MOST_SAMPLES + 1)),
    "characters": (line(8192) * (MOST_CHARACTERS // 8192), line(8192) * (MOST_CHARACTERS // 8192 + 1)),
    "shared series": (shared(MOST_SHARED_READINGS), shared(MOST_SHARED_READINGS + 10)),
}


@pytest.mark.parametrize(("allowed_page", "beyond"), WITHIN_AND_BEYOND.values(), ids=WITHIN_AND_BEYOND)
def test_a_page_beyond_a_bound_is_a_failure_of_its_own_kind(allowed_page: str, beyond: str) -> None:
    assert isinstance(parse_engines(allowed_page), EnginePage)

    refused = parse_engines(beyond)

    assert isinstance(refused, Failure)
    assert refused.reason is Reason.OUT_OF_BOUNDS
    assert "one vLLM server's own /metrics" in refused.message
    assert len(refused.message) < 500


def test_64_data_parallel_engines_are_far_within_the_bounds() -> None:
    page = parse_engines(data_parallel_page(64))

    assert isinstance(page, EnginePage)
    assert len(page.engines) == 64
