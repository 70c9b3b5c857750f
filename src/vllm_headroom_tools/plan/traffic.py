"""The traffic of an engine, from a trace or a sidecar's last day."""

from argparse import Namespace
from collections.abc import Iterator
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from vllm_headroom.derive.kv_cache import count_tokens_per_request
from vllm_headroom.derive.pages import list_named
from vllm_headroom.derive.series import label_engine
from vllm_headroom.expose.view import CURVE_STEP_SECONDS
from vllm_headroom.model import EngineReading, Gpu, Snapshot
from vllm_headroom.units import RefusedError, format_duration
from vllm_headroom_tools.bad_input import BadInput
from vllm_headroom_tools.full_cache import (
    FULL_RATIO,
    HURTING_PREEMPTIONS,
    LASTING_SECONDS,
    WAITING_REQUESTS,
    CollapseHistory,
    StepCounts,
)
from vllm_headroom_tools.history import LONGEST_INTERVAL_SECONDS, RESIZED_RATIO, Histogram, Rise
from vllm_headroom_tools.plan.engine_log import CARD_NAMES, MODEL_NAMES
from vllm_headroom_tools.sizing.cards import CardCount, find_card_by_size, parse_gpus_by_name
from vllm_headroom_tools.sizing.footprint import KV_DTYPES, PACKED_KV_DTYPES
from vllm_headroom_tools.trace import STDIN, read_trace


class Traffic(Struct, frozen=True, kw_only=True):
    """The peaks of one engine's traffic; unknown figures are None.

    With several data-parallel ranks, the figures are those of the busiest rank.
    """

    # The trace's file, or the sidecar.
    source: str
    seconds: float
    highest_running: float
    # The largest share of the KV cache in use, and the size of the cache.
    highest_used_ratio: float
    capacity_tokens: float | None = None
    # How long the cache was full.
    full_seconds: float = 0.0
    # How long requests queued. The next two fields are only set if requests queued for long: the
    # median number of waiting requests, and the traffic without queueing.
    queued_seconds: float = 0.0
    queued_waiting: float | None = None
    queued_requests: float | None = None
    queued_tokens: float | None = None
    # Whether preemptions in a full cache did harm.
    has_hurt: bool = False
    # The least memory that was ever free on a GPU.
    least_free_bytes: float | None = None
    # Whether any prompt hit the prefix cache.
    has_prefix_hits: bool = False

    # The engine's settings, if the source shows them.
    model_name: str | None = None
    ranks: int = 1
    gpus: int = 0
    gpu_name: str = ""
    gpu_total_bytes: int | None = None
    gpu_memory_utilization: float | None = None
    kv_cache_memory_bytes: float | None = None
    kv_cache_dtype: str | None = None
    max_num_seqs: float | None = None

    @property
    def needed_tokens(self) -> float | None:
        """Return the largest number of tokens in use, including tokens for queued requests.

        Returns None if the size of the KV cache is unknown.
        """
        if self.capacity_tokens is None:
            return None
        used_tokens = self.highest_used_ratio * self.capacity_tokens
        return max(used_tokens, self.queued_tokens or 0.0)

    @property
    def needed_requests(self) -> float:
        """Return the largest number of concurrent requests, as if queued requests were running."""
        return max(self.highest_running, self.queued_requests or 0.0)

    @property
    def has_capped_queue(self) -> bool:
        """Return whether requests queued even though the cache was rarely full."""
        return self.queued_waiting is not None and self.full_seconds < self.queued_seconds / 2

    @property
    def span(self) -> str:
        """Return the length of the history as text."""
        return format_duration(self.seconds)


class RankHistory:
    """Collects the traffic of one data-parallel rank."""

    def __init__(self) -> None:
        self.capacity_tokens: float | None = None
        self.highest_running = 0.0
        self.highest_used_ratio = 0.0
        self.prefix_hits = Rise()
        self.full_seconds = 0.0
        self.queued_seconds = 0.0
        self.queued_waiting = Histogram()
        self.queued_requests = Histogram()
        self.queued_tokens = Histogram()
        self._preemptions = Rise()
        self._finished = Rise()
        # Counts taken while the cache was full.
        self._full_preemptions = 0.0
        self._full_finished = 0.0
        self._was_full = False
        self._collapses = CollapseHistory()
        self._seconds = 0.0
        self._started_at_seconds: float | None = None

    @property
    def has_hurt(self) -> bool:
        """Return whether preemptions in a full cache did harm, as `advise` defines it."""
        thrash = self._collapses.worst
        if thrash is not None and thrash.returned >= HURTING_PREEMPTIONS * thrash.finished:
            return True
        if self.full_seconds < LASTING_SECONDS or not self._full_preemptions:
            return False
        return self._full_preemptions >= HURTING_PREEMPTIONS * self._full_finished

    def has_other_size(self, reading: EngineReading) -> bool:
        """Return whether the KV cache's size has changed, or False if either size is unknown."""
        if self.capacity_tokens is None or reading.kv_capacity_tokens is None:
            return False
        difference_tokens = abs(reading.kv_capacity_tokens - self.capacity_tokens)
        return difference_tokens > RESIZED_RATIO * self.capacity_tokens

    def step(self, reading: EngineReading, seconds: float) -> None:
        """Add a sample that was taken `seconds` after the previous one."""
        self._seconds += seconds
        counts = StepCounts(
            seconds=seconds,
            finished=self._finished.step(reading.finished_total),
            preemptions=self._preemptions.step(reading.preemptions_total),
        )
        has_restarted = reading.started_at_seconds != self._started_at_seconds
        self._started_at_seconds = reading.started_at_seconds
        self._collapses.step(reading, counts, self._seconds, has_restarted=has_restarted)
        self.prefix_hits.step(reading.prefix_hits_total)
        if reading.kv_capacity_tokens is not None:
            self.capacity_tokens = reading.kv_capacity_tokens
        used_ratio = reading.kv_used_ratio or 0.0
        self.highest_running = max(self.highest_running, reading.running or 0.0)
        self.highest_used_ratio = max(self.highest_used_ratio, used_ratio)
        is_full = used_ratio > FULL_RATIO
        # Counters cover the time since the previous sample. So the first sample after a full cache
        # still includes time with a full cache.
        if is_full or self._was_full:
            self._full_preemptions += counts.preemptions
            self._full_finished += counts.finished
        self._was_full = is_full
        if is_full:
            self.full_seconds += seconds
        if (reading.waiting or 0.0) >= WAITING_REQUESTS:
            self._step_queue(reading, seconds)

    def _step_queue(self, reading: EngineReading, seconds: float) -> None:
        """Add a sample in which many requests are waiting."""
        self.queued_seconds += seconds
        self.queued_waiting.add(reading.waiting)
        requests = (reading.running or 0.0) + (reading.waiting or 0.0)
        self.queued_requests.add(requests)
        request_tokens = count_tokens_per_request(reading)
        if request_tokens is not None:
            self.queued_tokens.add(requests * request_tokens)


class TraceTraffic:
    """Collects the traffic in a trace since the KV cache last changed size."""

    def __init__(self) -> None:
        self._ranks: dict[tuple[str, str], RankHistory] = {}
        self._readings: tuple[EngineReading, ...] = ()
        self._gpus: tuple[Gpu, ...] = ()
        self._least_free_bytes: float | None = None
        self._begin_seconds: float | None = None
        self._newest_seconds = 0.0

    def step(self, snapshot: Snapshot) -> None:
        """Add a sample."""
        readings = tuple(
            reading for reading in list_named(snapshot.page) if reading.awake is not False
        )
        seconds = min(
            max(0.0, snapshot.time_seconds - self._newest_seconds), LONGEST_INTERVAL_SECONDS
        )
        self._newest_seconds = snapshot.time_seconds
        if not readings:
            return
        # Usage shares are not comparable if the cache sizes differ.
        if self._begin_seconds is None or self._have_other_sizes(readings):
            self._begin_seconds = snapshot.time_seconds
            self._ranks = {}
            self._gpus = ()
            self._least_free_bytes = None
            seconds = 0.0
        self._readings = readings
        for reading in readings:
            self._ranks.setdefault(label_engine(reading), RankHistory()).step(reading, seconds)
        # A sample may lack a GPU that did not respond.
        if len(snapshot.owned_gpus) >= len(self._gpus):
            self._gpus = snapshot.owned_gpus
        for gpu in snapshot.owned_gpus:
            self._step_gpu(gpu)

    def _have_other_sizes(self, readings: tuple[EngineReading, ...]) -> bool:
        """Return whether the size of any rank's KV cache has changed."""
        for reading in readings:
            rank = self._ranks.get(label_engine(reading))
            if rank is not None and rank.has_other_size(reading):
                return True
        return False

    def _step_gpu(self, gpu: Gpu) -> None:
        """Update the least free memory with a GPU's latest peak."""
        memory = gpu.reading.memory
        if memory is None:
            return
        peak_bytes = max(memory.used_bytes, gpu.reading.used_peak_bytes or 0)
        free_bytes = max(0.0, float(memory.usable_bytes - peak_bytes))
        if self._least_free_bytes is not None:
            free_bytes = min(free_bytes, self._least_free_bytes)
        self._least_free_bytes = free_bytes

    def build(self, source: str) -> Traffic:
        """Return the traffic from all samples.

        Raises BadInput if no sample has a running request.
        """
        ranks = list(self._ranks.values())
        if not ranks or self._begin_seconds is None:
            raise BadInput(f"{source}: the engine's own page was not read in it")
        busiest = max(ranks, key=lambda rank: (rank.highest_used_ratio, rank.highest_running))
        longest_queue = max(ranks, key=lambda rank: rank.queued_seconds)
        reading = self._readings[0]
        totals_bytes = [
            gpu.reading.memory.total_bytes for gpu in self._gpus if gpu.reading.memory is not None
        ]
        traffic = Traffic(
            source=source,
            seconds=max(0.0, self._newest_seconds - self._begin_seconds),
            highest_running=max(rank.highest_running for rank in ranks),
            highest_used_ratio=busiest.highest_used_ratio,
            capacity_tokens=busiest.capacity_tokens,
            full_seconds=max(rank.full_seconds for rank in ranks),
            queued_seconds=longest_queue.queued_seconds,
            has_hurt=any(rank.has_hurt for rank in ranks),
            least_free_bytes=self._least_free_bytes,
            has_prefix_hits=any(rank.prefix_hits.total for rank in ranks),
            model_name=reading.model_name,
            ranks=len(ranks),
            gpus=len(self._gpus),
            gpu_total_bytes=min(totals_bytes, default=None),
            gpu_memory_utilization=reading.gpu_memory_utilization_ratio,
            kv_cache_memory_bytes=reading.kv_cache_memory_bytes,
            kv_cache_dtype=reading.kv_cache_dtype,
            max_num_seqs=reading.max_num_seqs,
        )
        _check_traffic(traffic)
        if traffic.queued_seconds < LASTING_SECONDS:
            # A short queue is only a burst, for which a median means little.
            return traffic
        return replace(
            traffic,
            queued_waiting=longest_queue.queued_waiting.quantile(0.5),
            queued_requests=longest_queue.queued_requests.quantile(0.5),
            queued_tokens=longest_queue.queued_tokens.quantile(0.5),
        )


def _check_traffic(traffic: Traffic) -> None:
    """Raise BadInput if there is no traffic, or if its memory usage is unknown."""
    if not traffic.highest_running:
        raise BadInput(f"{traffic.source}: no request ran in it, so that no size can be judged")
    if not traffic.highest_used_ratio:
        raise BadInput(f"{traffic.source}: it does not show how much of the KV cache was in use")


def read_trace_traffic(trace: str) -> Traffic:
    """Return the traffic in a trace.

    Raises BadInput if the trace is unreadable or has no traffic.
    """
    history = TraceTraffic()
    for snapshot in read_trace(trace):
        history.step(snapshot)
    return history.build(STDIN if trace == "-" else trace)


def read_document_traffic(document: dict[str, Any], source: str) -> Traffic:
    """Return the last day's traffic from a sidecar's document.

    Raises BadInput if the document contains no traffic or has an unexpected structure.
    """
    try:
        return _read_document(document, source)
    except (AttributeError, LookupError, TypeError, ValueError):
        # Imported here because importing the HTTP client takes a while. --help does not need it.
        from vllm_headroom_tools.sidecar import NO_DOCUMENT  # noqa: PLC0415

        raise BadInput(NO_DOCUMENT) from None


def _read_document(document: dict[str, Any], source: str) -> Traffic:
    """Return the traffic in a sidecar's document; raise BadInput if the document has none."""
    history = document["history"]
    if "kv_cache_used_ratio" not in history:
        raise BadInput(
            f"{source}: this sidecar is older and keeps no history of the KV cache; take --trace"
        )
    running_requests = list(_list_values(history["running"]))
    used_ratios = list(_list_values(history["kv_cache_used_ratio"]))
    free_bytes: list[float] = []
    for curves in history["gpus"]:
        free_bytes += _list_values(curves["free_at_peak_bytes"] or curves["free_bytes"])
    engines = document["engines"]
    if not engines:
        raise BadInput(f"{source}: the sidecar does not see the engine now")
    engine = engines[0]
    gpus = [gpu for gpu in document["gpus"] if (gpu["info"] or {}).get("attribution")]
    totals_bytes = [gpu["memory_total_bytes"] for gpu in gpus if gpu["memory_total_bytes"]]
    # The curve is the sum over all ranks. vLLM distributes requests evenly among them.
    rank_requests = max(running_requests, default=0.0) / len(engines)
    full_minutes = sum(ratio > FULL_RATIO for ratio in used_ratios)
    traffic = Traffic(
        source=source,
        seconds=float(len(used_ratios) * CURVE_STEP_SECONDS),
        highest_running=rank_requests,
        highest_used_ratio=max(used_ratios, default=0.0),
        capacity_tokens=engine["kv_cache_capacity_tokens"],
        full_seconds=float(full_minutes * CURVE_STEP_SECONDS),
        least_free_bytes=min(free_bytes, default=None),
        has_prefix_hits=any(rank["prefix_cache_hits_total"] for rank in engines),
        model_name=engine["model_name"],
        ranks=len(engines),
        gpus=len(gpus),
        gpu_name=gpus[0]["info"]["name"] if gpus else "",
        gpu_total_bytes=min(map(int, totals_bytes), default=None),
        gpu_memory_utilization=_read_utilization(gpus),
    )
    _check_traffic(traffic)
    return traffic


def _list_values(curve: list[list[float | None]]) -> Iterator[float]:
    """Yield the known values of a curve."""
    for _, value in curve:
        if value is not None:
            yield float(value)


def _read_utilization(gpus: list[dict[str, Any]]) -> float | None:
    """Return vLLM's memory budget as a share of a GPU's memory.

    Returns None if the budget is unknown.
    """
    for gpu in gpus:
        budget_bytes = (gpu["memory_reported_bytes"] or {}).get("budget")
        if budget_bytes and gpu["memory_total_bytes"]:
            return round(float(budget_bytes / gpu["memory_total_bytes"]), 4)
    return None


SPREAD_NAMES: Final = frozenset(
    {"tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"}
)
"""Options that spread the model across GPUs."""


def apply_traffic_options(options: Namespace, traffic: Traffic) -> Namespace:
    """Return the options, with the engine's values for those that were not typed.

    If a whole command line follows `--`, its missing options use vLLM's defaults.
    """
    applied = Namespace(**vars(options))
    # Typed options take precedence, because the question may be about another card or model.
    typed_names = options.typed_names
    if not typed_names & MODEL_NAMES:
        applied.model = traffic.model_name
    if not typed_names & CARD_NAMES and traffic.gpu_total_bytes is not None:
        applied.gpu_memory_bytes = traffic.gpu_total_bytes
        applied.gpu = _choose_card(traffic)
    if not typed_names & SPREAD_NAMES and not options.has_line and traffic.gpus:
        # The engine's GPUs are divided evenly among its data-parallel ranks.
        applied.data_parallel_size = traffic.ranks
        applied.tensor_parallel_size = max(1, traffic.gpus // traffic.ranks)
    settings: dict[str, Any] = {
        "gpu_memory_utilization": traffic.gpu_memory_utilization,
        "kv_cache_memory_bytes": int(traffic.kv_cache_memory_bytes or 0),
        "max_num_seqs": int(traffic.max_num_seqs or 0),
    }
    if traffic.kv_cache_dtype in (*KV_DTYPES, *PACKED_KV_DTYPES):
        settings["kv_cache_dtype"] = traffic.kv_cache_dtype
    for name, value in settings.items():
        # 0 means that the engine does not report the setting.
        if name not in typed_names and value:
            setattr(applied, name, value)
    return applied


def _choose_card(traffic: Traffic) -> CardCount | None:
    """Return the engine's card, found by name or size.

    Returns None if the card is unknown.
    """
    try:
        return parse_gpus_by_name(traffic.gpu_name)
    except RefusedError:
        card = find_card_by_size(traffic.gpu_total_bytes or 0)
        return None if card is None else CardCount(card=card, count=None)
