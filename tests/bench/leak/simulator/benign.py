"""The scenarios in which nothing leaks, for each kind of leak those that look like it for a while."""

from __future__ import annotations

from random import Random

from simulator.allocator import Allocator
from simulator.card import MIB, Card
from simulator.host import Caches, Fill, Fragmented, Heap
from simulator.parts import Adapters, Chores, Encoder, FirstUses, Graphs, Requests
from simulator.recipe import MakePart, Recipe


def first_uses(lowest_count: int, highest_count: int) -> MakePart:
    return lambda rng, allocator, card: FirstUses(rng, allocator, card, rng.randint(lowest_count, highest_count))


def graphs(rng: Random, allocator: Allocator, card: Card) -> Graphs:
    return Graphs(rng, card)


def images(share: float) -> MakePart:
    return encoder(share, 200)


def encoder(share: float, cache_mib: float) -> MakePart:
    return lambda rng, allocator, card: Encoder(rng, allocator, share * rng.uniform(0.5, 1), cache_mib * MIB)


def adapters(per_hour: float, size_mib: float, slots: int) -> MakePart:
    return lambda rng, allocator, card: Adapters(
        rng, allocator, per_hour * rng.uniform(0.5, 1.5), size_mib * rng.uniform(0.5, 1.5) * MIB, slots
    )


def chores(every_hours: float, size_mib: float, *, gives_back: bool = False) -> MakePart:
    return lambda rng, allocator, card: Chores(
        rng, allocator, every_hours * 3600 * rng.uniform(0.5, 1.5), size_mib * MIB, gives_back=gives_back
    )


def requests(each_mib: float) -> MakePart:
    return lambda rng, allocator, card: Requests(rng, allocator, each_mib * rng.uniform(0.5, 1.5) * MIB)


usual = (first_uses(5, 25), graphs)
many = (first_uses(25, 60), graphs)

SERVING = {
    "quiet": Recipe(group="serving", parts=(first_uses(3, 6),)),
    "long_prompts": Recipe(group="serving", activations=(1500, 3000), parts=usual),
    "many_first_uses": Recipe(group="serving", parts=many),
    "daily": Recipe(group="serving", load="daily", parts=usual),
    "office": Recipe(group="serving", load="office", hours=48, interval=15, parts=many),
    "bursty": Recipe(group="serving", load="bursts", parts=usual),
    "idle_hours": Recipe(group="serving", load="pauses", parts=usual),
    "more_load": Recipe(group="serving", load="steps", parts=(*usual, requests(2))),
    "drifting_prompts": Recipe(group="serving", drift=0.6, parts=usual),
    "follows_load": Recipe(group="serving", load="daily", parts=(*usual, requests(4))),
    "expandable": Recipe(group="serving", expandable=True, load="daily", parts=(*usual, encoder(0.1, 300))),
    "image_cache": Recipe(group="serving", parts=(*usual, encoder(0.2, 300))),
    "rare_images": Recipe(group="serving", parts=(*usual, encoder(0.002, 300))),
    "missed": Recipe(group="serving", missed=0.3, load="daily", parts=many),
    "each_second": Recipe(group="serving", hours=6, interval=1, parts=usual),
    "each_minute": Recipe(group="serving", hours=48, interval=60, parts=many),
    "a_week": Recipe(group="serving", hours=168, interval=300, load="office", parts=(*usual, encoder(0.05, 300))),
    "small_card": Recipe(group="serving", card_gib=22, room_gib=(1.2, 2.2), activations=(100, 600), parts=usual),
    "restarted": Recipe(group="serving", restarts=4, parts=usual),
    "little_room": Recipe(group="serving", room_gib=(1.6, 2.4), activations=(200, 800), parts=usual),
}
LARGE_STEPS = {
    "adapter_slots": Recipe(group="large steps", parts=(*usual, adapters(1.5, 60, 8))),
    "adapters_swapped": Recipe(group="large steps", parts=(*usual, adapters(6, 60, 6))),
    "chores": Recipe(group="large steps", parts=(*usual, chores(1, 1000))),
    "chores_given_back": Recipe(group="large steps", parts=(*usual, chores(0.7, 1000, gives_back=True))),
    "long_and_rare": Recipe(group="large steps", rps=(0.2, 1), activations=(1500, 3000), parts=usual),
    "slow_cache": Recipe(group="large steps", ambiguous=True, parts=(*usual, encoder(0.004, 1500))),
}
RESET = {
    "learning": Recipe(group="reset", load="rollouts", sleep=(360, 120), parts=usual),
    "hourly_sleep": Recipe(group="reset", sleep=(3000, 600), load="daily", parts=usual),
    "job_beside": Recipe(group="reset", neighbour="job", attributed=False, parts=usual),
    "newcomer": Recipe(group="reset", neighbour="newcomer", attributed=False, room_gib=(6, 8), parts=usual),
    "tools_beside": Recipe(group="reset", neighbour="tools", attributed=False, parts=usual),
    "sibling": Recipe(group="sibling", neighbour="sibling", attributed=False, load="daily", parts=usual),
    "sibling_leaks": Recipe(group="sibling", neighbour="leaking sibling", parts=usual),
    "two_servers": Recipe(group="reset", counter="two", load="daily", parts=usual),
    "counter_resets": Recipe(group="reset", counter="reset", parts=many),
    "unnamed_life": Recipe(group="reset", counter="unnamed", restarts=2, parts=usual),
}
BLIND = {
    "uncounted": Recipe(group="no counter", counter="none", parts=many),
    "uncounted_daily": Recipe(group="no counter", counter="none", load="daily", activations=(1000, 2500), parts=usual),
    "uncounted_images": Recipe(group="no counter", counter="none", load="office", parts=(*usual, encoder(0.1, 300))),
    "uncounted_adapters": Recipe(group="no counter", counter="none", parts=(*usual, adapters(1.5, 60, 8))),
    "uncounted_sleep": Recipe(group="no counter", counter="none", sleep=(3000, 600), parts=usual),
}
FAST = {
    "sudden_load": Recipe(group="fast", load="steps", rps=(5, 15), parts=(*usual, requests(8))),
    "burst_of_images": Recipe(group="fast", load="bursts", room_gib=(4, 6), parts=(*usual, encoder(0.3, 800))),
    "waking_often": Recipe(group="fast", sleep=(1200, 60), room_gib=(3, 4), parts=(*usual, requests(4))),
}
HOST = {
    "host": Recipe(group="host", host=Heap, load="daily"),
    "host_caches": Recipe(group="host", ambiguous=True, host=Caches),
    "host_fill": Recipe(group="host", ambiguous=True, host=Fill),
    "host_fragmented": Recipe(group="host", host=Fragmented, load="daily", hours=72),
    "host_bursty": Recipe(group="host", host=Fragmented, load="bursts"),
    "host_a_week": Recipe(group="host", host=Fragmented, load="office", hours=168, interval=300),
}
BENIGN = SERVING | LARGE_STEPS | RESET | BLIND | FAST | HOST
