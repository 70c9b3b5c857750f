from __future__ import annotations

from vllm_headroom_tools.demo.scenario import chance
from vllm_headroom_tools.demo.world import MOST_RUNNING, PROMPT_TOKENS, Demand, Traffic

FLOOD = 60
TRICKLE = 5


def test_no_request_is_lost_or_served_twice_through_queue_and_preemption() -> None:
    traffic = Traffic(chance(1, "traffic"))
    arrived = finished = 0
    for second in range(4_000):
        arriving = FLOOD if second % 500 < 60 else TRICKLE
        arrived += arriving
        finished += traffic.step(arriving)

        assert finished == traffic.finished_total
        assert arrived == traffic.running + traffic.waiting + finished

    assert traffic.preemptions_total > 0
    assert traffic.waiting == 0
    assert traffic.prompt_tokens_total == arrived * PROMPT_TOKENS


def test_a_flood_fills_the_batch_and_the_cache_and_no_more() -> None:
    traffic = Traffic(chance(2, "traffic"))
    running, kv_used = set(), set()
    for _ in range(600):
        traffic.step(FLOOD)
        running.add(traffic.running)
        kv_used.add(traffic.kv_used_ratio)

    assert max(running) == MOST_RUNNING
    assert 0.99 < max(kv_used) <= 1.0
    assert traffic.waiting > 10_000


def test_an_idle_engine_holds_nothing() -> None:
    traffic = Traffic(chance(3, "traffic"))
    traffic.step(40)
    for _ in range(200):
        traffic.step(0)

    assert (traffic.running, traffic.waiting, traffic.kv_used_ratio) == (0, 0, 0.0)
    assert traffic.finished_total == 40


def test_demand_has_a_mild_daily_wave() -> None:
    demand = Demand(chance(4, "demand"))
    hours = [sum(demand.step(hour * 3_600 + second, 1.0) for second in range(3_600)) / 3_600 for hour in range(24)]

    assert 1.2 < max(hours) / min(hours) < 2.2
    assert sum(hours[:7]) > sum(hours[12:19])
