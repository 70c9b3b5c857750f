"""The series of many simulated engines on one page.

Each series has the labels of its engine's pod.
"""

import asyncio
import re
from collections.abc import Coroutine
from functools import partial
from itertools import chain
from typing import Any, Final

from msgspec.structs import replace

from vllm_headroom.config import Settings
from vllm_headroom.daemon import app
from vllm_headroom.daemon.model_reader import ModelReader
from vllm_headroom.daemon.parts import Parts
from vllm_headroom.expose.answers import Handler, Request, Response
from vllm_headroom.expose.node import (
    EngineView,
    NodeView,
    respond_node_page,
    respond_node_snapshot,
)
from vllm_headroom.expose.web.door import Door
from vllm_headroom.model import EngineName
from vllm_headroom_tools.demo.run import SIMULATED, ScaledClock, build_parts, log
from vllm_headroom_tools.demo.world import TABLE
from vllm_headroom_tools.settings import ModelSettings

FLEET_SCENARIOS: Final = (
    "leak",
    *(name for name in TABLE if name not in {"leak", "healthy"}),
    *["healthy"] * 11,
)
"""The scenario of each engine; half of the engines are healthy."""

TEAM_COUNT: Final = 3
"""Our choice: the number of namespaces among which the engines are distributed."""

MIN_SAMPLE_INTERVAL_SECONDS: Final = 30.0
"""At this interval, the fleet uses a fifth of a CPU core. This holds at 60 times real time."""

_NAME_WITH_LABELS: Final = re.compile(r"^(\w+)\{", re.MULTILINE)
_NAME_WITHOUT_LABELS: Final = re.compile(r"^(\w+) ", re.MULTILINE)
_UUID_PART: Final = re.compile("-0000(-[45]000-8000-)")


class Fleet(app.Daemon):
    """The first engine's daemon.

    The first daemon also runs the other daemons and serves all their series.
    """

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
            *chain.from_iterable(other.list_loops() for other in self._others),
        ]

    def build_handler(self, door: Door | None) -> Handler:
        """Return the handler for all requests.

        The path `/metrics` serves the series of all engines. The paths `/` and `/snapshot.json`
        respond as on a sidecar for several engines. A request for any other path gets the response
        of the first engine's daemon.
        """
        first_handler = super().build_handler(door)
        handlers = (first_handler, *(other.build_handler(None) for other in self._others))
        page_request = Request(method="GET", path="/metrics", headers={})

        def answer(request: Request) -> Response:
            """Return a page for the whole fleet.

            For other paths, the first engine's page is returned.
            """
            if request.method not in {"GET", "HEAD"}:
                return first_handler(request)
            if request.path == "/":
                return respond_node_page(self._build_fleet_view(), request)
            if request.path == "/snapshot.json":
                return respond_node_snapshot(self._build_fleet_view(), request)
            if request.path != "/metrics":
                return first_handler(request)
            pages = [handler(page_request).body.decode() for handler in handlers]
            return Response(status=200, body=join_pages(pages).encode())

        return answer

    def _build_fleet_view(self) -> NodeView:
        """Return the data for the page and for /snapshot.json, with engines named after pods."""
        engines = []
        for place, daemon in enumerate((self, *self._others)):
            name = name_fleet_engine(place)
            view = replace(daemon._build_view(), host=name.text)  # noqa: SLF001 - of our own class
            engines.append(EngineView(name=name, view=view))
        latest = self._watch.latest
        return NodeView(
            version=app.read_version(),
            host=HOST,
            interval_seconds=self._interval_seconds,
            engines=tuple(engines),
            own_sidecar=(),
            unreadable=(),
            seconds=None if latest is None else latest.snapshot.time_seconds,
            stall_reason=self._monitor.find_stall(),
        )


HOST: Final = "the simulated fleet"
"""The name that the page shows for the engines' machine."""


def name_fleet_engine(place: int) -> EngineName:
    """Return the name of the engine at this index in FLEET_SCENARIOS."""
    namespace = f"team-{place % TEAM_COUNT}"
    return EngineName(namespace=namespace, pod=f"vllm-{FLEET_SCENARIOS[place]}-{place}")


UP_SERIES: Final = "# HELP up Whether it answers.\n# TYPE up gauge\nup 1.0\n"
"""The series that Prometheus itself adds for each target that it scrapes."""


def join_pages(pages: list[str]) -> str:
    """Return one page with the series of all engines, as Prometheus would store them.

    Each series gets the labels of its engine's pod. A series `up` is added for each engine.
    """
    families: dict[str, list[str]] = {}
    for place, page in enumerate(pages):
        name = name_fleet_engine(place)
        labels = f'namespace="{name.namespace}",pod="{name.pod}",instance="{name.pod}:9839"'
        # All simulations use the same UUIDs, and equal UUIDs would look like shared GPUs.
        unique_page = _UUID_PART.sub(rf"-{place:04}\1", page + UP_SERIES)
        for family in unique_page.split("# HELP ")[1:]:
            # A family may appear only once per page. All engines' series go under one header.
            help_line, type_line, series = family.split("\n", 2)
            series = _NAME_WITH_LABELS.sub(rf"\1{{{labels},", series)
            series = _NAME_WITHOUT_LABELS.sub(rf"\1{{{labels}}} ", series)
            head = f"# HELP {help_line}\n{type_line}\n"
            families.setdefault(head, []).append(series)
    return "".join(head + "".join(series) for head, series in families.items())


async def run(settings: ModelSettings, *, speed: float, gpus: int) -> int:
    """Run the fleet until a signal arrives, and return the exit status.

    Each engine has `gpus` GPUs.
    """
    log.warning(SIMULATED, scenario="fleet", speed=speed)
    clock = ScaledClock(speed)
    interval_seconds = max(MIN_SAMPLE_INTERVAL_SECONDS, settings.sample_interval_seconds)
    settings = settings.model_copy(
        update={
            "sample_interval_seconds": interval_seconds,
            # A state folder or a trace file can hold the data of only one engine.
            "state_dir": None,
            "trace_file": None,
        }
    )
    parts = [
        build_parts(TABLE[name], clock, speed, gpus, seed)
        for seed, name in enumerate(FLEET_SCENARIOS)
    ]
    first = parts[0]
    others = parts[1:]
    build_fleet = partial(Fleet, others)
    return await app.run(first, settings, settings.model_reader, build_daemon=build_fleet)
