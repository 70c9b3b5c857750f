"""Days with a leak."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Final

from tests.card.corpus.benign import EXPANDABLE, IMAGES, MIXED, USES
from tests.card.corpus.day import Beside, Day
from tests.card.corpus.leaks import ByTime, Doubling, OutsideTorch, PerAbort, PerImage, PerRequest, Pinned, Steps
from tests.card.corpus.parts import Adapters, FirstSizes, OneOffs

EVEN: Final = Day(origin="per request", group="even", parts=(USES,), leak=partial(PerRequest, kb=12.8), hours=8)
TIMED: Final = replace(EVEN, origin="by time", leak=partial(ByTime, mb_per_hour=250, every_seconds=60))
STEPS: Final = Day(
    origin="large steps", group="large steps", parts=(USES,), hours=12, interval=10, room_mib=8192,
    leak=partial(Steps, per_hour=1.2, mb=(200, 600)),
)  # fmt: skip
FAST: Final = Day(origin="fast", group="fast", parts=(USES, IMAGES), hours=3, leak=partial(PerRequest, kb=400), rps=4)
NOISE: Final = Day(
    origin="in fragmentation noise", group="in noise", parts=(USES, MIXED, IMAGES), hours=8, room_mib=6144,
    leak=partial(PerRequest, kb=12.8),
)  # fmt: skip
BESIDE: Final = Day(
    origin="with a neighbour", group="in noise", parts=(USES,), hours=8, leak=partial(PerRequest, kb=12.8),
    neighbour=Beside(kind="sawtooth", gib=4, minutes=40),
)  # fmt: skip

LEAKING: Final[dict[str, Day]] = {
    "request": EVEN,
    "request-large": replace(
        EVEN, leak=partial(PerRequest, kb=51.2), room_mib=12_288, load="daily", hours=12, interval=10
    ),
    "request-slow": replace(EVEN, leak=partial(PerRequest, kb=12.8), rps=1, hours=24, interval=30, room_mib=1024),
    "request-some": replace(EVEN, leak=partial(PerRequest, kb=2000, share=0.01), load="bursts", rps=4, card_gib=24),
    "request-late": replace(EVEN, leak=partial(PerRequest, kb=25, onset_hours=4.0), hours=10, room_mib=6144),
    "request-expandable": replace(EVEN, origin="expandable segments", allocator=EXPANDABLE, rps=4),
    "request-sleep": replace(EVEN, origin="over sleeps", sleep=(1.5, 0.25), leak=partial(PerRequest, kb=25.6)),
    "request-restart": replace(
        EVEN, origin="over restarts", restarts=(4.0,), hours=9, leak=partial(PerRequest, kb=25.6)
    ),
    "time": TIMED,
    "time-slow": replace(TIMED, leak=partial(ByTime, mb_per_hour=30, every_seconds=20), hours=24, interval=30, rps=1.5),
    "time-expandable": replace(
        TIMED,
        origin="expandable segments",
        allocator=EXPANDABLE,
        leak=partial(ByTime, mb_per_hour=120, every_seconds=30),
        load="pauses",
    ),
    "abort": replace(EVEN, origin="per abort", leak=partial(PerAbort, kb=400), abort_ratio=0.04, load="bursts", rps=4),
    "image": replace(EVEN, origin="per image", parts=(USES, IMAGES), leak=partial(PerImage, share=0.003, mb=8)),
    "image-large": replace(
        STEPS, origin="per image", parts=(USES, IMAGES), leak=partial(PerImage, share=0.0002, mb=60), rps=4, hours=10
    ),
    "adapter": replace(
        STEPS,
        origin="per adapter",
        parts=(USES, partial(Adapters, per_hour=12, mib=120, slots=6)),
        leak=partial(Steps, per_hour=4, mb=(60, 70), pieces=28),
    ),
    "adapter-rare": replace(
        STEPS,
        origin="per adapter",
        leak=partial(Steps, per_hour=1.5, mb=(150, 300), pieces=28),
        card_gib=24,
        model="3b",
        room_mib=3000,
    ),
    "steps": STEPS,
    "steps-large": replace(
        STEPS, leak=partial(Steps, per_hour=0.6, mb=(900, 1100)), room_mib=16_384, load="daily", hours=24, interval=30
    ),
    "steps-small": replace(STEPS, leak=partial(Steps, per_hour=6, mb=(40, 80)), parts=(USES, IMAGES)),
    "steps-expandable": replace(
        STEPS, allocator=EXPANDABLE, leak=partial(Steps, per_hour=1.5, mb=(100, 500)), load="nights"
    ),
    "doubling": replace(
        STEPS, origin="buffer that doubles", leak=partial(Doubling, first_mb=64, kb_per_request=25), room_mib=10_240
    ),
    "doubling-fast": replace(
        STEPS,
        origin="buffer that doubles",
        leak=partial(Doubling, first_mb=16, kb_per_request=120),
        hours=8,
        interval=5,
    ),
    "fast": replace(FAST, room_mib=4096),
    "fast-minutes": replace(
        FAST, leak=partial(PerRequest, kb=4000, onset_hours=1.5), room_mib=6144, interval=1, hours=2.5
    ),
    "fast-images": replace(FAST, leak=partial(PerImage, share=0.2, mb=10), room_mib=16_384),
    "to-the-end": replace(EVEN, origin="to out-of-memory", leak=partial(PerRequest, kb=40), room_mib=2500),
    "to-the-end-steps": replace(
        STEPS, origin="to out-of-memory", leak=partial(Steps, per_hour=2, mb=(150, 350)), room_mib=3000
    ),
    "to-the-end-mixed": replace(NOISE, origin="to out-of-memory", leak=partial(PerRequest, kb=60), room_mib=4500),
    "noise": NOISE,
    "noise-expandable": replace(NOISE, allocator=EXPANDABLE, leak=partial(PerRequest, kb=25.6)),
    "noise-one-offs": replace(
        NOISE,
        parts=(USES, partial(OneOffs, per_hour=1.5, low_mib=100, high_mib=1200), partial(FirstSizes, mib=16, apart=8)),
        leak=partial(PerRequest, kb=20),
        load="rising",
    ),
    "pinned": replace(
        NOISE, origin="pinned fragments", leak=partial(Pinned, share=0.002, mib=1.5), parts=(USES, IMAGES)
    ),
    "neighbour": BESIDE,
    "neighbour-fills": replace(
        BESIDE, neighbour=Beside(kind="filling", gib=5, minutes=200, comes=1), leak=partial(PerRequest, kb=30)
    ),
    "outside-torch": replace(EVEN, origin="outside torch", leak=partial(OutsideTorch, share=0.004, mib=2)),
    "full": replace(
        EVEN,
        origin="full card that flushes",
        parts=(USES, IMAGES),
        room_mib=1600,
        leak=partial(PerRequest, kb=6.4),
        rps=4,
    ),
}
