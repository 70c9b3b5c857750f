"""Settings on the page that are words: the dtype of the KV cache."""

from __future__ import annotations

import pytest

from vllm_headroom.model import EnginePage
from vllm_headroom.parse.engines import parse_engines

RUNNING = 'vllm:num_requests_running{model_name="m",engine="0"} 1\n'


def dtype(*labels: str) -> str | None:
    info = "".join(f'vllm:cache_config_info{{block_size="16",{label}}} 1\n' for label in labels)
    page = parse_engines(RUNNING + info)
    assert isinstance(page, EnginePage)
    assert ("kv_cache_dtype", page.engines[0].kv_cache_dtype is not None) in page.inputs
    return page.engines[0].kv_cache_dtype


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (('cache_dtype="auto"',), "auto"),
        (('cache_dtype="fp8_e5m2",engine="0"',), "fp8_e5m2"),
        (('cache_dtype="fp8",kv_cache_dtype_skip_layers="[]"',), "fp8"),
        (('cache_dtype="fp8",kv_cache_dtype_skip_layers="[\'0\']"',), None),
        (('cache_dtype="fp8"', 'cache_dtype="auto"'), None),
        (('cache_dtype=""',), None),
        (('is_attention_free="False"',), None),
        ((), None),
    ],
)
def test_a_word_is_known_when_it_is_said_of_all_of_the_engine(labels: tuple[str, ...], expected: str | None) -> None:
    assert dtype(*labels) == expected
