"""A sentence on the page begins to warn where its alert does."""

from __future__ import annotations

import re
from typing import Final

import pytest

from tests.assets import alerts
from vllm_headroom.derive.attribution import NEIGHBOUR_BYTES
from vllm_headroom.derive.life.states import CRASH_LOOP_SECONDS
from vllm_headroom.derive.verdicts import (
    CRASH_LOOP_EXITS,
    GPU_ALERTS,
    HOST_ALERTS,
    LOW_BYTES,
    LOW_FREE_SHARE,
    LOW_HOST_BYTES,
    LOW_HOST_SHARE,
    STRANDED_RATIO,
)
from vllm_headroom.units import DAY_SECONDS, HOUR_SECONDS
from vllm_headroom_tools.advise.facts import PEAK_BYTES
from vllm_headroom_tools.advise.rules.capacity import PAYING_RATIO, PREFIX_TOKENS_PER_SECOND
from vllm_headroom_tools.advise.rules.leaks import LOST_RATIO, LOST_RISES
from vllm_headroom_tools.advise.verdict import STALE_PAGE_SECONDS
from vllm_headroom_tools.full_cache import WAITING_REQUESTS
from vllm_headroom_tools.replay.command import MIN_STRANDED_RATIO

RULES: Final = {rule.name: rule.expr for rule in alerts.rules() if rule.is_alert}

SAME: Final = (
    (NEIGHBOUR_BYTES, 2**30, "HeadroomNeighbourGrowing", "> 2^30"),
    (LOW_BYTES, 512 * 2**20, "HeadroomGpuMemoryLow", "< 512 * 2^20"),
    (LOW_FREE_SHARE, 0.5, "HeadroomGpuMemoryLow", ">= 0.5 *"),
    (LOW_HOST_BYTES, 4 * 2**30, "HeadroomHostMemoryLow", "< 4 * 2^30"),
    (1 - LOW_HOST_SHARE, 0.95, "HeadroomHostMemoryLow", "> 0.95 *"),
    (LOW_FREE_SHARE, 0.5, "HeadroomHostMemoryLow", ">= 0.5 *"),
    (PEAK_BYTES, 256 * 2**20, "HeadroomGpuMemoryPeak", "< 256 * 2^20"),
    (LOST_RATIO, 0.01, "HeadroomKvBlocksLeak", "> 0.01"),
    (LOST_RISES, 3, "HeadroomKvBlocksLeak", ">= 3"),
    (WAITING_REQUESTS, 10, "HeadroomQueueBacklog", "> 10"),
    (PAYING_RATIO, 0.3, "HeadroomPrefixCacheNotPaying", "< 0.3"),
    (PREFIX_TOKENS_PER_SECOND, 100, "HeadroomPrefixCacheNotPaying", "> 100"),
    (STALE_PAGE_SECONDS, 120, "HeadroomSampleStale", "> 120"),
    (STRANDED_RATIO, 0.05, "HeadroomKvCacheStranded", "> 0.05"),
    (MIN_STRANDED_RATIO, 0.01, "HeadroomKvBlocksLeak", "> 0.01"),
    # an increase is extrapolated to what lies before the first and after the last scrape: half an end less is requested
    (CRASH_LOOP_EXITS, 3, "HeadroomEngineCrashLoop", "> 2.5"),
    (CRASH_LOOP_SECONDS, 90 * 60, "HeadroomEngineCrashLoop", "[90m]"),
    *(
        (HOUR_SECONDS, 3600, alert, "< 3600")
        for alert_names in (GPU_ALERTS, HOST_ALERTS)
        for alert in (alert_names.hour, alert_names.day)
    ),
    *((DAY_SECONDS, 86_400, alert_names.day, "< 86400") for alert_names in (GPU_ALERTS, HOST_ALERTS)),
)


def test_a_sentence_warns_where_its_alert_does(subtests: pytest.Subtests) -> None:
    for sentence_value, value, alert, written in SAME:
        with subtests.test(alert):
            assert sentence_value == value
            assert re.search(rf"{re.escape(written)}(?![\w.])", RULES[alert])
