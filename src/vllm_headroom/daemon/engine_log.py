"""Follow the engine's log: fetch and read new lines, and remember how each run ended."""

from functools import partial
from typing import Final

from vllm_headroom.clock import Clock
from vllm_headroom.daemon.pod_api import ACCOUNT, open_pod_api
from vllm_headroom.model import Failure, LogEnding, LogReading
from vllm_headroom.model.start import EngineStart
from vllm_headroom.parse.log.lines import LineSplitter
from vllm_headroom.parse.log.reader import LogReader
from vllm_headroom.scrape.log.batch import LogBatch, LogSource
from vllm_headroom.scrape.log.files import LogFiles
from vllm_headroom.scrape.log.journal import Journal
from vllm_headroom.scrape.log.kubernetes import PodLog
from vllm_headroom.vocabulary import LogEventKind, Reason, Source
from vllm_headroom.worker import Worker

KUBERNETES: Final = "kubernetes"
"""The HEADROOM_ENGINE_LOG value that selects the container's log from the API server."""

JOURNAL: Final = "journal:"
"""The prefix of a HEADROOM_ENGINE_LOG value that names a systemd unit."""

MOST_ENDINGS: Final = 4
"""The number of starts whose endings are kept. An exit is matched with a start that ended within
two minutes of it.
"""

ENDING_KINDS: Final = (
    LogEventKind.FAILURE,
    LogEventKind.STOP,
    LogEventKind.LOAD,
    LogEventKind.SERVING,
)
"""The events that determine how a start ended, or show that it survived a failure."""

READ_LOG_SECONDS: Final = 2.0
"""The time limit for reading a batch of lines. A batch of 2 MiB takes 0.07 s. If it contains only
failures, it takes 1 s.
"""

SLOW: Final = Failure(
    source=Source.LOG,
    reason=Reason.OUT_OF_BOUNDS,
    message=(
        f"the engine's log was not understood within {READ_LOG_SECONDS:g} s (HEADROOM_ENGINE_LOG)"
    ),
)

REQUEST_SECONDS: Final = 10.0
"""The time limit for a request to the API server."""


class EngineLogFollower:
    """Reads the engine's log as it grows, on a daemon thread."""

    def __init__(self, source: LogSource, clock: Clock) -> None:
        self._source = source
        self._clock = clock
        self._reader = LogReader()
        self._splitter = LineSplitter()
        self._endings: dict[int, LogEnding] = {}
        """How the newest starts ended, keyed by the start's number."""
        self._newest_seconds: float | None = None
        self._worker = Worker[LogReading]("engine log")

    async def read(self, timeout_seconds: float) -> LogReading | Failure:
        """Return what the log shows so far.

        Returns a Failure if the log cannot be read.
        """
        # No batch is fetched while another is being read. The new batch would be lost.
        if self._worker.is_busy:
            return SLOW
        batch = await self._source.fetch(timeout_seconds)
        if isinstance(batch, Failure):
            return batch
        try:
            read = partial(self._read_batch, batch, self._clock.time())
            return await self._worker.call(read, READ_LOG_SECONDS)
        except TimeoutError:
            return SLOW

    def _read_batch(self, batch: LogBatch, now_seconds: float) -> LogReading:
        """Read the lines of a batch; runs on the thread."""
        if batch.is_broken:
            self._splitter = LineSplitter()
        if batch.content and not batch.is_old:
            self._newest_seconds = now_seconds
        read_seconds = None if batch.is_old else now_seconds
        touched_seconds: dict[int, float | None] = {}
        for line in self._splitter.split(batch.content):
            for event in self._reader.feed(line):
                if event.kind not in ENDING_KINDS:
                    continue
                # A line without a timestamp gets the time at which it was read. For an old file,
                # this time is meaningless.
                seconds = read_seconds if event.time.seconds is None else event.time.seconds
                # A line that reports the engine's request load does not end the start. Such a line
                # may show that the engine has survived a failure.
                number = self._reader.start_count
                if event.kind is not LogEventKind.LOAD:
                    touched_seconds[number] = seconds
                elif number in self._endings:
                    touched_seconds.setdefault(number, self._endings[number].seconds)
        for number, seconds in touched_seconds.items():
            self._update_ending(number, seconds)
        return LogReading(
            start=self._reader.start,
            endings=tuple(self._endings.values()),
            newest_seconds=self._newest_seconds,
        )

    def _update_ending(self, number: int, seconds: float | None) -> None:
        """Store how a start ended, if it has ended."""
        self._endings.pop(number, None)
        start = self._find_start(number)
        ending = None if start is None else _describe_ending(start, seconds)
        if ending is not None:
            self._endings[number] = ending
        while len(self._endings) > MOST_ENDINGS:
            del self._endings[next(iter(self._endings))]

    def _find_start(self, number: int) -> EngineStart | None:
        """Return a start by its number, or None if the reader no longer keeps it."""
        later_starts = self._reader.start_count - number
        if later_starts == 0:
            return self._reader.start
        if later_starts > len(self._reader.finished):
            return None
        return self._reader.finished[-later_starts]


def _describe_ending(start: EngineStart, seconds: float | None) -> LogEnding | None:
    """Return how a start ended.

    Returns None if the start is in progress or survived its failures.
    """
    failure = start.root_failure
    if failure is None and not start.is_stopped:
        return None
    return LogEnding(failure=failure, is_stopped=start.is_stopped, seconds=seconds)


class Unreadable:
    """A placeholder for a log that cannot be read from here, for a permanent reason."""

    def __init__(self, problem: str) -> None:
        message = f"the engine's log: {problem} (HEADROOM_ENGINE_LOG)"
        self._failure = Failure(source=Source.LOG, reason=Reason.UNAVAILABLE, message=message)

    async def fetch(self, timeout_seconds: float) -> LogBatch | Failure:  # noqa: ARG002 - LogSource
        """Return the failure."""
        return self._failure


def build_log_source(place: str, container: str) -> LogSource:
    """Return the log source selected by a HEADROOM_ENGINE_LOG value."""
    if place == KUBERNETES:
        return build_pod_log(container)
    if place.startswith(JOURNAL):
        return Journal(place.removeprefix(JOURNAL))
    return LogFiles(place)


def build_pod_log(container: str) -> LogSource:
    """Return the log source for a container in this pod."""
    pod_api = open_pod_api(ACCOUNT, REQUEST_SECONDS)
    if pod_api is None:
        return Unreadable(
            f"no pod with POD_NAME and a service account in {ACCOUNT}, which the component"
            " engine-log provides"
        )
    return PodLog(
        pod_api.reader, namespace=pod_api.namespace, pod=pod_api.name, container=container
    )
