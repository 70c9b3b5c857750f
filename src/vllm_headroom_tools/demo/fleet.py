"""The series of many simulated engines on one page, each with the labels of its pod, for the boards of a fleet."""

import asyncio
import re
from collections.abc import Coroutine
from functools import partial
from typing import Any, Final

from vllm_headroom.config import Settings
from vllm_headroom.daemon import app
from vllm_headroom.daemon.model_reader import ModelReader
from vllm_headroom.daemon.parts import Parts
from vllm_headroom.expose.answers import Handler, Request, Response
from vllm_headroom.expose.web.door import Door
from vllm_headroom_tools.demo.run import SIMULATED, ScaledClock, build_parts, log
from vllm_headroom_tools.demo.world import TABLE
from vllm_headroom_tools.settings import ModelSettings

SCENARIOS: Final = (
    "leak",
    *(name for name in TABLE if name not in {"leak", "healthy"}),
    *["healthy"] * 11,
)
"""Of the engines; half of them are well."""

TEAMS: Final = 3
SAMPLE_SECONDS: Final = 30.0
"""The least between two samples, so that the fleet takes a fifth of a processor core at 60 times the clock's speed."""

_LABELLED: Final = re.compile(r"^(\w+)\{", re.MULTILINE)
_BARE: Final = re.compile(r"^(\w+) ", re.MULTILINE)
_UUID: Final = re.compile("-0000(-[45]000-8000-)")


class Fleet(app.Daemon):
    """The daemon of the first engine, with the loops of the others beside it and the series of all on /metrics."""

    def __init__(
        self,
        others: list[Parts],
        parts: Parts,
        settings: Settings,
        model: ModelReader,
        *,
        home: str,
        ending: asyncio.Future[int],
    ) -> None:
        super().__init__(parts, settings, model, home=home, ending=ending)
        self._others = [
            app.Daemon(other, settings, model, home=home, ending=ending) for other in others
        ]

    def list_loops(self) -> list[Coroutine[Any, Any, None]]:
        """Return the loops of all daemons."""
        return [
            *super().list_loops(),
            *(loop for each in self._others for loop in each.list_loops()),
        ]

    def build_handler(self, door: Door | None) -> Handler:
        """Return the handler of all requests: the fleet's series, all else of the first engine."""
        first = super().build_handler(door)
        handlers = (first, *(each.build_handler(None) for each in self._others))

        def answer(request: Request) -> Response:
            if request.path != "/metrics":
                return first(request)
            asked = Request(method="GET", path="/metrics", headers={})
            return Response(
                status=200,
                body=join_pages([each(asked).body.decode() for each in handlers]).encode(),
            )

        return answer


def join_pages(pages: list[str]) -> str:
    """Return the pages of the engines as one, with `up` as a Prometheus has it that scrapes each."""
    families: dict[str, list[str]] = {}
    for place, (scenario, page) in enumerate(zip(SCENARIOS, pages, strict=True)):
        pod = f"vllm-{scenario}-{place}"
        labels = f'namespace="team-{place % TEAMS}",pod="{pod}",instance="{pod}:9839"'
        unique = _UUID.sub(
            rf"-{place:04}\1", f"{page}# HELP up Whether it answers.\n# TYPE up gauge\nup 1.0\n"
        )
        for family in unique.split("# HELP ")[1:]:
            explained, kind, series = family.split("\n", 2)
            lines = families.setdefault(f"# HELP {explained}\n{kind}\n", [])
            lines.append(_BARE.sub(rf"\1{{{labels}}} ", _LABELLED.sub(rf"\1{{{labels},", series)))
    return "".join(head + "".join(lines) for head, lines in families.items())


async def run(settings: ModelSettings, *, speed: float, gpus: int) -> int:
    """Run the fleet, each engine on so many GPUs; return the exit status."""
    log.warning(SIMULATED, scenario="fleet", speed=speed)
    clock, least = ScaledClock(speed), max(SAMPLE_SECONDS, settings.sample_interval_seconds)
    settings = settings.model_copy(
        update={"sample_interval_seconds": least, "state_dir": None, "trace_file": None}
    )
    first, *others = (
        build_parts(TABLE[name], clock, speed, gpus, seed) for seed, name in enumerate(SCENARIOS)
    )
    build_fleet = partial(Fleet, others)
    return await app.run(first, settings, settings.model_reader, build_daemon=build_fleet)
