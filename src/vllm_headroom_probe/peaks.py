"""Measure the highest memory of each step of vLLM's runner, by kind of work."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from vllm_headroom_probe.batch import ENCODER, Batch, Step
from vllm_headroom_probe.engine import read_own, to_integer
from vllm_headroom_probe.gpu import can_read_torch, find_cuda

PROMPT_LOGPROBS = "prompt_logprobs"
SAMPLING = "sampling"

BUCKET_SECONDS = 5
RECENT_BUCKETS = 12
"""The highest peak of each of the newest twelve buckets is kept: that is the last minute."""

MAX_SIZE_CLASSES = 20
"""How many of the largest size classes of a kind the file has; there are two per doubling."""

MAX_REASON_CHARACTERS = 200
"""How many characters of an error the file has."""

REPEATED_STEPS = 16
"""Of steps that repeat the previous one, every sixteenth is measured, because reading torch's
figures three times takes 30 to 100 microseconds.
"""

Call = Callable[..., Any]


class Peak(NamedTuple):
    """The highest transient memory of one half of a step, and that step."""

    transient_bytes: int
    size: int
    """The size on which its memory depends: tokens, rows or pixels."""
    step: Step


class Memory(NamedTuple):
    """torch's figures of its allocator, in bytes."""

    allocated: int
    peak: int
    """The highest of `allocated` since the last reset."""
    reserved: int
    inactive_split: int


class KindTable:
    """The peaks of one kind of work; bounded."""

    def __init__(self) -> None:
        self.steps = 0
        self.highest: Peak | None = None
        self.recent: dict[int, Peak] = {}
        """The highest peak of each bucket of time, by the bucket's number."""
        self.by_class: dict[int, tuple[Peak, int]] = {}
        """The highest peak of each size class, and how many steps the class has had."""

    def add(self, peak: Peak) -> None:
        """Count a step."""
        self.steps += 1
        if self.highest is None or peak.transient_bytes > self.highest.transient_bytes:
            self.highest = peak
        bucket = int(peak.step.at_seconds // BUCKET_SECONDS)
        bucket_peak = self.recent.get(bucket)
        if bucket_peak is None:
            # A new dictionary, because the probe's thread may read it at the same time.
            self.recent = {
                number: highest
                for number, highest in self.recent.items()
                if number > bucket - RECENT_BUCKETS
            }
            self.recent[bucket] = peak
        elif peak.transient_bytes > bucket_peak.transient_bytes:
            self.recent[bucket] = peak
        # The square has twice as many binary digits, which gives two classes per doubling.
        size_class = (peak.size * peak.size).bit_length()
        highest, count = self.by_class.get(size_class, (peak, 0))
        if peak.transient_bytes > highest.transient_bytes:
            highest = peak
        self.by_class[size_class] = (highest, count + 1)

    def describe(self, now_seconds: float) -> dict[str, Any]:
        """Return the table for the file; `recent` is absent without a step in the last minute."""
        oldest_bucket = int(now_seconds // BUCKET_SECONDS) - RECENT_BUCKETS
        recent = [peak for bucket, peak in list(self.recent.items()) if bucket > oldest_bucket]
        classes = sorted(self.by_class.items())[-MAX_SIZE_CLASSES:]
        document: dict[str, Any] = {
            "steps": self.steps,
            "sizes": [[peak.size, peak.transient_bytes, count] for _, (peak, count) in classes],
        }
        if self.highest is not None:
            document["highest"] = describe_peak(self.highest)
        if recent:
            document["recent"] = describe_peak(max(recent, key=lambda peak: peak.transient_bytes))
        return document


def describe_peak(peak: Peak) -> dict[str, Any]:
    """Return a peak for the file."""
    return {"bytes": peak.transient_bytes, "size": peak.size, **describe_step(peak.step)}


def describe_step(step: Step) -> dict[str, Any]:
    """Return a step for the file, without figures that are 0."""
    facts = {
        "t": round(step.at_seconds, 3),
        "requests": step.requests,
        "tokens": step.total_tokens,
        "prompt_tokens": step.prompt_tokens,
        "logprobs_requests": step.logprobs_requests,
        "logprobs_tokens": step.logprobs_tokens,
        "images": step.images,
        "pixels": step.pixels,
        "adapters": step.adapters,
        "drafts": step.drafts,
    }
    return {name: fact for name, fact in facts.items() if fact}


class Peaks:
    """The peaks of this process's worker, measured around the runner's two methods per step."""

    def __init__(self) -> None:
        self.step: Step | None = None
        """The newest step that began; None before the first."""
        self.kind: str | None = None
        """The kind of work that runs now; None between two steps."""
        self._batch = Batch()
        self._tables: dict[str, KindTable] = {}
        self._runner: Any = None
        self._index = 0
        """The index of the device in torch."""
        self._torch_cuda: Any = None
        self._resting: Memory | None = None
        """torch's figures when the newest measured step began."""
        self._is_sampling_due = False
        """Whether the newest step's second half follows."""
        self._is_measured = False
        """Whether the newest step is measured."""
        self._stop_reason: str | None = None
        """The error that ended the measurement; None while it goes on."""
        self._limits: dict[str, int | None] = {}
        # The cost of the hook.
        self._steps = 0
        self._unmeasured_steps = 0
        """How many steps have passed since the last measured step; they repeat it."""
        self._hook_seconds = 0.0
        """The CPU time of the hook itself, over all steps. Wall-clock time would include other work
        of the machine.
        """
        self._step_seconds = 0.0
        """The CPU time of the runner's methods in the same thread."""

    def attach(self, worker: object) -> None:
        """Measure the worker's steps from now on.

        Nothing is done before vLLM has its KV cache, because until then vLLM measures the same
        peaks for its own profile. Nothing is done either where torch's figures must not be read, or
        the hook has failed.
        """
        runner = read_own(worker, "model_runner")
        if runner is None or runner is self._runner or self._stop_reason is not None:
            return
        index = to_integer(getattr(read_own(worker, "device"), "index", None))
        self._torch_cuda = find_cuda()
        is_profiled = bool(read_own(runner, "kv_caches"))
        if self._torch_cuda is None or index is None or not is_profiled:
            return
        if not can_read_torch(worker):
            return
        config = read_own(worker, "vllm_config")
        self._index = index
        self._runner = runner
        self._limits = {
            "batch_tokens": to_integer(read_own(config, "scheduler_config.max_num_batched_tokens")),
            "requests": to_integer(read_own(config, "scheduler_config.max_num_seqs")),
            "model_tokens": to_integer(read_own(config, "model_config.max_model_len")),
        }
        sample = getattr(runner, "sample_tokens", None)
        if sample is not None:
            runner.sample_tokens = self._wrap(sample, self._begin_sampling, self._end_sampling)
        runner.execute_model = self._wrap(
            runner.execute_model, self._begin_forward, self._end_forward
        )

    def detach(self) -> None:
        """Restore the runner's own methods."""
        for name in ("execute_model", "sample_tokens"):
            vars(self._runner).pop(name, None)

    def _wrap(self, call: Call, begin: Call, end: Call) -> Call:
        """Return a method of the runner with a measurement before and after it.

        Whatever the measurement raises, the method runs, and its result and errors are unchanged.
        """

        def measure(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401
            start_seconds = time.thread_time()
            with contextlib.suppress(Exception):
                self._guard(lambda: begin(*arguments, **options))
            begun_seconds = time.thread_time()
            result = call(*arguments, **options)
            end_seconds = time.thread_time()
            with contextlib.suppress(Exception):
                self._guard(end)
                self._step_seconds += end_seconds - begun_seconds
                self._hook_seconds += begun_seconds - start_seconds
                self._hook_seconds += time.thread_time() - end_seconds
            return result

        return measure

    def _guard(self, measure: Call) -> None:
        """Call a part of the measurement; at any error, end it for good."""
        try:
            measure()
        except Exception as error:  # noqa: BLE001 - vLLM's step goes on
            self.kind = None
            self._stop_reason = f"{type(error).__name__}: {error}"[:MAX_REASON_CHARACTERS]
            self.detach()
            logger = logging.getLogger("vllm.headroom_probe")
            logger.warning("headroom probe: peaks are not measured: %s", self._stop_reason)

    def _begin_forward(self, order: Any, *_arguments: Any, **options: Any) -> None:  # noqa: ANN401
        """Follow the scheduler's output, and start to measure the forward pass if that is due.

        Without tokens or images nothing is computed.
        """
        self.kind = None
        self._is_sampling_due = False
        # vLLM's second runner profiles itself with this method, and then reads the same peak.
        if options.get("dummy_run"):
            return
        step = self._batch.follow(order, time.time())
        if not step.total_tokens and not step.images:
            return
        self.step = step
        self.kind = step.kind
        self._steps += 1
        self._is_measured = self._is_measurement_due(step)
        if self._is_measured:
            self._resting = self._read_memory()
            self._torch_cuda.reset_peak_memory_stats(self._index)

    def _is_measurement_due(self, step: Step) -> bool:
        """Return whether a step is to be measured; count steps that are not."""
        if step.is_repeated and self._unmeasured_steps < REPEATED_STEPS - 1:
            self._unmeasured_steps += 1
            return False
        self._unmeasured_steps = 0
        return True

    def _end_forward(self) -> None:
        if self.step is None or self.kind is None:
            return
        size = self.step.pixels if self.kind == ENCODER else self.step.total_tokens
        self._is_sampling_due = True
        self._add_peak(self.step, self.kind, size)

    def _begin_sampling(self, *_arguments: Any, **_options: Any) -> None:  # noqa: ANN401
        """Start the second half of a step whose first half was followed."""
        if self.step is None or not self._is_sampling_due:
            return
        self._is_sampling_due = False
        self.kind = PROMPT_LOGPROBS if self.step.logprobs_requests else SAMPLING
        if self._is_measured:
            self._torch_cuda.reset_peak_memory_stats(self._index)

    def _end_sampling(self) -> None:
        if self.step is None or self.kind is None:
            return
        size = self.step.logprobs_tokens
        if self.kind == SAMPLING:
            size = self.step.requests + self.step.drafts
        self._add_peak(self.step, self.kind, size)

    def _add_peak(self, step: Step, kind: str, size: int) -> None:
        """Add the peak since the last reset to the table of a kind, whose work has ended."""
        self.kind = None
        if not self._is_measured or self._resting is None:
            return
        transient_bytes = max(0, self._read_memory().peak - self._resting.allocated)
        self._tables.setdefault(kind, KindTable()).add(Peak(transient_bytes, size, step))

    def _read_memory(self) -> Memory:
        """Return torch's figures, which come from the allocator and never from the card."""
        figures = self._torch_cuda.memory_stats_as_nested_dict(self._index)
        allocated = figures["allocated_bytes"]["all"]
        return Memory(
            allocated=allocated["current"],
            peak=allocated["peak"],
            reserved=figures["reserved_bytes"]["all"]["current"],
            inactive_split=figures["inactive_split_bytes"]["all"]["current"],
        )

    def describe(self) -> dict[str, Any] | None:
        """Return the peaks for the probe's file; None while no step was measured."""
        resting = self._resting
        if resting is None:
            return None
        now_seconds = time.time()
        return {
            "steps": self._steps,
            "hook_seconds": round(self._hook_seconds, 6),
            "step_seconds": round(self._step_seconds, 6),
            "stopped": self._stop_reason,
            "limits": self._limits,
            "resting": {
                "allocated": resting.allocated,
                "reserved": resting.reserved,
                "inactive_split": resting.inactive_split,
            },
            "kinds": {
                kind: table.describe(now_seconds) for kind, table in list(self._tables.items())
            },
        }

    def describe_current(self) -> dict[str, Any] | None:
        """Return the step that runs now and its kind; None between two steps."""
        kind = self.kind
        step = self.step
        if kind is None or step is None:
            return None
        return {"work": kind, **describe_step(step)}
