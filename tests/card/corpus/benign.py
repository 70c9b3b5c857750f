"""Days without a leak."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Final

from tests.card.corpus.day import Beside, Day
from tests.card.corpus.parts import Adapters, Buffers, FirstSizes, FirstUses, Images, OneOffs, Workspace

EXPANDABLE: Final = "expandable_segments:True"
USES: Final = partial(FirstUses, count=14)
TENSORS: Final = partial(FirstUses, count=14, outside=0.0)
IMAGES: Final = partial(Images, share=0.15, mib=24, sigma=0.7, cache_mib=800)
MIXED: Final = partial(Buffers, mib=6, sigma=1.0, most=120)

LENGTHS: Final = Day(origin="mixed lengths", group="serving", parts=(USES,))
SIZES: Final = Day(
    origin="batch sizes first seen late",
    group="serving",
    load="rising",
    parts=(USES, partial(FirstSizes, mib=18, apart=8)),
)
LORA: Final = Day(
    origin="adapters", group="adapters and images", parts=(USES, partial(Adapters, per_hour=12, mib=160, slots=8))
)
PICTURES: Final = Day(origin="images", group="adapters and images", parts=(USES, IMAGES), rps=3)
SLEEP: Final = Day(origin="sleep", group="sleep and restart", parts=(USES,), sleep=(1.5, 0.25))
RESTART: Final = Day(origin="restart", group="sleep and restart", parts=(USES, IMAGES))
NEIGHBOUR: Final = Day(
    origin="second process", group="neighbour", parts=(USES,), neighbour=Beside(kind="steady", gib=4), room_mib=3072
)
FRAGMENTS: Final = Day(origin="fragmentation", group="fragmentation", parts=(USES, MIXED, IMAGES), room_mib=8192)
COLLECTED: Final = Day(
    origin="garbage collection threshold",
    group="fragmentation",
    parts=(USES, MIXED, IMAGES),
    allocator="garbage_collection_threshold:0.9",
    limited=True,
)
FULL: Final = Day(origin="full card", group="full card", parts=(TENSORS, IMAGES), room_mib=1500)
RISING: Final = Day(
    origin="load that grows all day", group="serving", load="rising", hours=12, interval=10, parts=(USES,)
)
NIGHTS: Final = Day(origin="idle nights", group="serving", load="nights", hours=12, interval=10, parts=(USES, IMAGES))
LARGE: Final = Day(
    origin="large one-off allocations",
    group="serving",
    parts=(USES, partial(OneOffs, per_hour=1.5, low_mib=100, high_mib=1500)),
)

BENIGN: Final[dict[str, Day]] = {
    "lengths": LENGTHS,
    "lengths-long-tail": replace(LENGTHS, prompt=(250, 1.7), batch_tokens=16_384, room_mib=2048),
    "lengths-grow": replace(LENGTHS, lengthens=4.0, hours=10, room_mib=3000),
    "lengths-low-rate": replace(LENGTHS, rps=0.4, hours=12, interval=10),
    "lengths-24gib": replace(LENGTHS, card_gib=24, model="3b", room_mib=500, batch_tokens=2048),
    "lengths-bursts": replace(
        LENGTHS, load="bursts", rps=4, room_mib=12_288, parts=(USES, partial(Workspace, bytes_per_token=40_000))
    ),
    "lengths-day": replace(LENGTHS, load="daily", hours=24, interval=30, card_gib=40, model="14b", room_mib=1500),
    "lengths-32b": replace(LENGTHS, model="32b", rps=2, room_mib=1024, batch_tokens=4096),
    "sizes": SIZES,
    "sizes-bursts": replace(SIZES, load="bursts", rps=3, parts=(USES, partial(FirstSizes, mib=30, apart=16))),
    "sizes-doubled": replace(SIZES, load="doubled", hours=8, parts=(USES, partial(FirstSizes, mib=12, apart=4))),
    "sizes-day": replace(SIZES, load="daily", hours=24, interval=30, room_mib=6144),
    "lora": LORA,
    "lora-many-slots": replace(
        LORA, hours=8, parts=(USES, partial(Adapters, per_hour=10, mib=90, slots=48)), room_mib=8192, ambiguous=True
    ),
    "lora-small": replace(
        LORA, card_gib=24, room_mib=1600, parts=(USES, partial(Adapters, per_hour=40, mib=60, slots=16))
    ),
    "lora-expandable": replace(LORA, allocator=EXPANDABLE, load="bursts", rps=3),
    "images": PICTURES,
    "images-large": replace(
        PICTURES, parts=(USES, partial(Images, share=0.03, mib=90, sigma=0.9, cache_mib=400)), room_mib=10_240
    ),
    "images-cache-fills": replace(
        PICTURES, parts=(USES, partial(Images, share=0.1, mib=12, sigma=0.5, cache_mib=3000)), ambiguous=True
    ),
    "images-expandable": replace(PICTURES, allocator=EXPANDABLE, load="pauses"),
    "sleep": SLEEP,
    "sleep-short": replace(SLEEP, sleep=(0.75, 0.1), parts=(USES, IMAGES), load="bursts", rps=3),
    "sleep-expandable": replace(SLEEP, allocator=EXPANDABLE, sleep=(2.0, 0.5), hours=8, parts=(USES, MIXED)),
    "sleep-long": replace(SLEEP, sleep=(5.0, 3.0), hours=24, interval=30, load="daily"),
    "restart": replace(RESTART, restarts=(3.0,)),
    "restart-twice": replace(RESTART, restarts=(1.5, 4.0), load="bursts", rps=3, parts=(USES, MIXED)),
    "restart-often": replace(RESTART, restarts=(1.0, 1.25, 3.0, 5.0, 8.0), hours=12, interval=10),
    "neighbour-steady": NEIGHBOUR,
    "neighbour-fills": replace(NEIGHBOUR, neighbour=Beside(kind="filling", gib=6, minutes=150, comes=1)),
    "neighbour-sawtooth": replace(
        NEIGHBOUR, neighbour=Beside(kind="sawtooth", gib=5, minutes=35), parts=(USES, IMAGES)
    ),
    "neighbour-guest": replace(
        NEIGHBOUR, neighbour=Beside(kind="sawtooth", gib=3, minutes=10, comes=2, goes=4), load="bursts", rps=3
    ),
    "neighbour-late": replace(
        NEIGHBOUR, neighbour=Beside(kind="steady", gib=8, comes=3), card_gib=40, hours=8, load="daily", room_mib=700
    ),
    "fragments": FRAGMENTS,
    "fragments-expandable": replace(FRAGMENTS, allocator=EXPANDABLE),
    "fragments-bursts": replace(FRAGMENTS, load="bursts", rps=4, room_mib=20_480, parts=(USES, MIXED)),
    "fragments-split-limit": replace(
        FRAGMENTS, allocator="max_split_size_mb:64", room_mib=12_288, parts=(TENSORS, MIXED, IMAGES)
    ),
    "fragments-day": replace(FRAGMENTS, load="daily", hours=24, interval=30, rps=3),
    "collected": COLLECTED,
    "collected-early": replace(
        COLLECTED, allocator="garbage_collection_threshold:0.6", load="bursts", rps=4, card_gib=40, room_mib=3000
    ),
    "full": FULL,
    "full-mixed": replace(FULL, parts=(TENSORS, MIXED, IMAGES), room_mib=2500, load="bursts", rps=3),
    "full-24gib": replace(
        FULL, card_gib=24, room_mib=1300, parts=(USES, IMAGES), rps=2, batch_tokens=4096, hours=12, interval=10
    ),
    "full-expandable": replace(FULL, allocator=EXPANDABLE, parts=(TENSORS, MIXED, IMAGES), room_mib=950),
    "full-adapters": replace(
        FULL,
        parts=(TENSORS, partial(Adapters, per_hour=20, mib=120, slots=8), IMAGES),
        room_mib=1850,
        load="daily",
        hours=12,
        interval=10,
    ),
    "full-sizes": replace(
        FULL, parts=(TENSORS, MIXED, partial(FirstSizes, mib=14, apart=4)), room_mib=900, load="rising", hours=8
    ),
    "full-almost": replace(LENGTHS, origin="full card", group="full card", room_mib=200, card_gib=40, hours=8),
    "rising": RISING,
    "rising-images": replace(RISING, rps=3, parts=(USES, IMAGES), hours=8, interval=5),
    "rising-mixed": replace(RISING, rps=3, parts=(USES, MIXED), allocator=EXPANDABLE),
    "nights": NIGHTS,
    "nights-adapters": replace(NIGHTS, parts=(USES, partial(Adapters, per_hour=6, mib=120, slots=6)), card_gib=40),
    "pauses": replace(NIGHTS, load="pauses", hours=6, interval=5, parts=(USES, MIXED)),
    "large": LARGE,
    "large-rare": replace(
        LARGE, hours=12, interval=10, parts=(USES, partial(OneOffs, per_hour=0.4, low_mib=300, high_mib=3500))
    ),
    "large-pieces": replace(
        LARGE, parts=(USES, IMAGES, partial(OneOffs, per_hour=6, low_mib=50, high_mib=700)), load="bursts", rps=3
    ),
}
