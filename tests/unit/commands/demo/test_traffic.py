from __future__ import annotations

from vllm_headroom_tools.demo.world import MAX_RUNNING, PROMPT_TOKENS, TABLE, SimulatedRun, World

FLOOD = 60
TRICKLE = 5


def test_no_request_is_lost_or_served_twice_through_queue_and_preemption() -> None:
    traffic = SimulatedRun(1, 0, started_seconds=0.0, serving_seconds=0.0)
    arrived = 0
    for second in range(4_000):
        arriving = FLOOD if second % 500 < 60 else TRICKLE
        arrived += arriving
        traffic.step(arriving)
        finished = traffic.finished_total

        assert arrived == traffic.running + traffic.waiting + finished

    assert traffic.preemptions_total > 0
    assert traffic.waiting == 0
    assert traffic.prompt_tokens_total == arrived * PROMPT_TOKENS


def test_a_flood_fills_the_batch_and_the_cache_and_no_more() -> None:
    traffic = SimulatedRun(2, 0, started_seconds=0.0, serving_seconds=0.0)
    running, kv_used = set(), set()
    for _ in range(600):
        traffic.step(FLOOD)
        running.add(traffic.running)
        kv_used.add(traffic.kv_used_ratio)

    assert max(running) == MAX_RUNNING
    assert 0.99 < max(kv_used) <= 1.0
    assert traffic.waiting > 10_000


def test_an_idle_engine_holds_nothing() -> None:
    traffic = SimulatedRun(3, 0, started_seconds=0.0, serving_seconds=0.0)
    traffic.step(40)
    for _ in range(200):
        traffic.step(0)

    assert (traffic.running, traffic.waiting, traffic.kv_used_ratio) == (0, 0, 0.0)
    assert traffic.finished_total == 40


def test_demand_has_a_mild_daily_wave() -> None:
    world, hours = World(TABLE["healthy"], 4), []
    for hour in range(1, 25):
        before = world.engine.finished_total
        world.advance(hour * 3_600)
        hours.append((world.engine.finished_total - before) / 3_600)

    assert 1.2 < max(hours) / min(hours) < 2.2
    assert sum(hours[:7]) > sum(hours[12:19])
