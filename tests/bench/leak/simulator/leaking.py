"""The scenarios in which something leaks."""

from __future__ import annotations

from functools import partial

from simulator.benign import adapters, chores, encoder, first_uses, graphs, images, requests
from simulator.host import LosesByRequest, LosesByTime, LosesLumps
from simulator.leaks import AtWaking, ByRequest, ByTime, Fragments, Lumps, Sometimes
from simulator.recipe import MakeLeak, Recipe

POST_MORTEM = 12_800.0
"""Bytes per request: 12.8 MB per thousand."""


def by_request(
    low: float = POST_MORTEM, high: float = POST_MORTEM, *, outside: bool = False, onset: float = 0
) -> MakeLeak:
    return lambda rng, allocator, card: ByRequest(
        allocator, card, rng.uniform(low, high), onset * rng.uniform(2400, 3600), outside=outside
    )


def fragments(low: float, high: float) -> MakeLeak:
    return lambda rng, allocator, card: Fragments(allocator, card, rng.uniform(low, high))


def by_time(low: float, high: float, *, onset: float = 0) -> MakeLeak:
    return lambda rng, allocator, card: ByTime(allocator, card, rng.uniform(low, high), onset * rng.uniform(2400, 3600))


def sometimes(size: float, one_in: float) -> MakeLeak:
    return lambda rng, allocator, card: Sometimes(rng, allocator, card, size, 1 / one_in)


def lumps(size: float, minutes: float, *, regular: bool, pieces: int = 1) -> MakeLeak:
    return lambda rng, allocator, card: Lumps(rng, allocator, card, size, minutes * 60, regular=regular, pieces=pieces)


def at_waking(low: float, high: float) -> MakeLeak:
    return lambda rng, allocator, card: AtWaking(allocator, card, rng.uniform(low, high))


TEN = (10.0, 10.0)
usual = (first_uses(5, 25), graphs)

PLAIN = {
    "small_tensors": Recipe(group="plain", leak=by_request(), rps=TEN, parts=usual),
    "slow_tensors": Recipe(group="plain", leak=by_request(1_000, 3_000), rps=TEN, parts=usual),
    "timer": Recipe(group="plain", leak=by_time(50e3, 500e3), parts=usual),
    "outside_torch": Recipe(group="plain", leak=by_request(outside=True), rps=TEN, parts=usual),
    "expandable": Recipe(group="plain", leak=by_request(), rps=TEN, expandable=True, parts=usual),
    "daily_load": Recipe(group="plain", leak=by_request(8_000, 20_000), load="daily", parts=usual),
    "bursts": Recipe(group="plain", leak=by_request(8_000, 20_000), load="bursts", parts=usual),
    "pauses": Recipe(group="plain", leak=by_request(8_000, 20_000), load="pauses", parts=usual),
    "late": Recipe(group="plain", leak=by_request(onset=12), rps=TEN, parts=usual),
    "beneath_images": Recipe(group="plain", leak=by_request(), rps=TEN, parts=(*usual, images(0.2))),
    "beneath_load": Recipe(group="plain", leak=by_request(), load="daily", rps=TEN, parts=(*usual, requests(4))),
    "beneath_teeth": Recipe(
        group="plain", leak=by_request(), rps=TEN, parts=(*usual, chores(0.4, 600, gives_back=True))
    ),
    "missed": Recipe(group="plain", leak=by_request(), rps=TEN, missed=0.3, parts=usual),
    "each_second": Recipe(group="plain", leak=by_request(), rps=TEN, hours=6, interval=1, parts=usual),
    "each_minute": Recipe(group="plain", leak=by_request(), rps=TEN, hours=48, interval=60, parts=usual),
    "a_week": Recipe(group="plain", leak=by_request(1_000, 3_000), load="office", hours=168, interval=300, parts=usual),
    "small_card": Recipe(
        group="plain",
        leak=by_request(2_000, 8_000),
        card_gib=22,
        room_gib=(1.2, 2.2),
        activations=(100, 500),
        parts=usual,
    ),
    "restarts": Recipe(group="plain", leak=by_request(), rps=TEN, restarts=3, parts=usual),
}
LARGE_STEPS = {
    "adapters_60mb": Recipe(group="large steps", leak=lumps(60e6, 30, regular=False, pieces=8), parts=usual),
    "every_40_min": Recipe(group="large steps", leak=lumps(256e6, 40, regular=True), parts=usual),
    "every_2_hours": Recipe(group="large steps", leak=lumps(1e9, 120, regular=True), parts=usual),
    "one_in_200": Recipe(group="large steps", leak=sometimes(2.6e6, 200), rps=(1, 4), parts=usual),
    "connector": Recipe(group="large steps", leak=lumps(128e6, 25, regular=False), load="daily", parts=usual),
    "at_waking": Recipe(group="large steps", leak=at_waking(150e6, 300e6), sleep=(2400, 300), parts=usual),
    "captured_again": Recipe(group="large steps", leak=lumps(180e6, 90, regular=True, pieces=6), hours=36, parts=usual),
    "host_lumps": Recipe(group="host", host=LosesLumps, rps=(5, 20)),
}
RESET = {
    "learning": Recipe(group="reset", leak=by_request(), rps=TEN, load="rollouts", sleep=(360, 120), parts=usual),
    "hourly_sleep": Recipe(group="reset", leak=by_request(), rps=TEN, sleep=(3000, 600), parts=usual),
    "job_beside": Recipe(group="reset", leak=by_request(), rps=TEN, neighbour="job", attributed=False, parts=usual),
    "tools_beside": Recipe(group="reset", leak=by_request(), rps=TEN, neighbour="tools", attributed=False, parts=usual),
    "two_servers": Recipe(group="reset", leak=by_request(), rps=TEN, counter="two", parts=usual),
    "counter_resets": Recipe(group="reset", leak=by_request(), rps=TEN, counter="reset", parts=usual),
    "unnamed_life": Recipe(group="reset", leak=by_request(), rps=TEN, counter="unnamed", parts=usual),
    "sibling_leaks": Recipe(group="sibling", neighbour="leaking sibling", attributed=False, parts=usual),
}
BLIND = {
    "uncounted": Recipe(group="no counter", leak=by_request(), rps=TEN, counter="none", parts=usual),
    "uncounted_daily": Recipe(group="no counter", leak=by_request(), load="daily", counter="none", parts=usual),
    "uncounted_images": Recipe(
        group="no counter", leak=by_time(100e3, 400e3), counter="none", parts=(*usual, encoder(0.2, 400))
    ),
    "full_cache": Recipe(
        group="to the end", leak=by_request(20_000, 40_000), room_gib=(3, 5), parts=(*usual, encoder(0.3, 800))
    ),
    "full_chores": Recipe(
        group="to the end", leak=by_request(20_000, 40_000), room_gib=(3, 5), parts=(*usual, chores(1.5, 900))
    ),
    "full_adapters": Recipe(
        group="to the end", leak=by_time(200e3, 400e3), room_gib=(3, 5), parts=(*usual, adapters(6, 60, 12))
    ),
}
FAST = {
    "fast": Recipe(group="fast", leak=by_time(8e6, 12e6, onset=5), hours=6, parts=usual),
    "fast_each_second": Recipe(group="fast", leak=by_time(8e6, 12e6, onset=3), hours=4, interval=1, parts=usual),
    "fast_host": Recipe(group="fast", host=partial(LosesByTime, low=83e6, high=420e6, latest=3), hours=4),
    "fast_mmap": Recipe(group="fast", host=partial(LosesByTime, low=6e6, high=7e6, latest=3), hours=6),
}
HOST = {
    "host_requests": Recipe(group="host", host=LosesByRequest, rps=TEN),
    "host_daily": Recipe(group="host", host=partial(LosesByRequest, low=4e3, high=13e3), load="daily"),
    "host_timer": Recipe(group="host", host=LosesByTime),
}
FRAGMENTS = {
    "fragments": Recipe(group="fragments", leak=fragments(POST_MORTEM, POST_MORTEM), rps=TEN, parts=usual),
    "fragments_daily": Recipe(group="fragments", leak=fragments(8_000, 30_000), load="daily", parts=usual),
}
LEAKING = PLAIN | LARGE_STEPS | RESET | BLIND | FAST | HOST | FRAGMENTS
