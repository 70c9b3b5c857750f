"""Measure the highest memory of each step of vLLM's runner, by kind of work."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from vllm_headroom_probe.batch import DECODE, ENCODER, NO_STEP, Batch, Step
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

REPEATED_STEPS = 32
"""Of steps that repeat the previous one, and of smaller steps of decode, one in so many is
measured: reading torch's figures three times takes 32 microseconds."""

Call = Callable[..., Any]


class Peak(NamedTuple):
    """The highest transient memory of one half of a step, and that step."""

    transient_bytes: int
    size: int
    """The size on which its memory depends: tokens, rows or pixels."""
    step: Step
    at_seconds: float
    """When the step began, in seconds since the epoch."""


class Memory(NamedTuple):
    """torch's figures of its allocator, in bytes."""

    allocated: int
    peak: int
    """The highest of `allocated` since the last reset."""
    reserved: int
    inactive_split: int


NO_MEMORY = Memory(allocated=0, peak=0, reserved=0, inactive_split=0)


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
        bucket = int(peak.at_seconds // BUCKET_SECONDS)
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
    return {
        "bytes": peak.transient_bytes,
        "size": peak.size,
        **describe_step(peak.step, peak.at_seconds),
    }


def describe_step(step: Step, at_seconds: float) -> dict[str, Any]:
    """Return a step for the file, without figures that are 0."""
    facts = {
        "t": round(at_seconds, 3),
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
        self.step: Step = NO_STEP
        """The newest step that began, or the one that it repeats."""
        self.kind: str | None = None
        """The kind of work that runs now; None between two steps."""
        self._batch = Batch()
        self._tables: dict[str, KindTable] = {}
        self._runner: Any = None
        self._index = 0
        """The index of the device in torch."""
        self._torch_cuda: Any = None
        self._began_at = 0.0
        """When the newest measured step began, in seconds since the epoch."""
        self._resting = NO_MEMORY
        """torch's figures when it began."""
        self._is_sampling_due = False
        """Whether the newest step's second half follows."""
        self._is_measured = False
        """Whether the newest step is measured."""
        self._wrappers: dict[str, Call] = {}
        """The methods that replace the runner's, by name."""
        self._is_over = False
        """Whether the measurement has ended for good."""
        self._stop_reason: str | None = None
        """The error that ended the measurement; None without one."""
        self._limits: dict[str, int | None] = {}
        self._decode_tokens = 0
        """The tokens of the newest measured step of decode."""
        # The cost of the hook.
        self._steps = 0
        self._measured_steps = 0
        self._unmeasured_steps = 0
        """How many steps have passed since the last measured step; they repeat it."""
        self._hook_ns = 0
        """The time of the hook in the steps that are measured, in nanoseconds."""

    def attach(self, worker: object) -> None:
        """Measure the worker's steps from now on.

        Nothing is done before vLLM has its KV cache, because until then vLLM measures the same
        peaks for its own profile. Nothing is done either where torch's figures must not be read, or
        the hook has failed.
        """
        runner = read_own(worker, "model_runner")
        if runner is None or runner is self._runner or self._is_over:
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
        if hasattr(runner, "sample_tokens"):
            self._wrap("sample_tokens", self._begin_sampling, self._end_sampling)
        self._wrap("execute_model", self._begin_forward, self._end_forward)

    def detach(self) -> None:
        """Measure no further step, and restore the runner's own methods."""
        self._is_over = True
        for name, wrapper in self._wrappers.items():
            # Another plugin may have wrapped the wrapper: then it stays, and only passes calls on.
            if vars(self._runner).get(name) is wrapper:
                delattr(self._runner, name)

    def _wrap(self, name: str, begin: Call, end: Call) -> None:
        """Replace a method of the runner by one with a measurement before and after it.

        Whatever the measurement raises, the method runs, and its result and errors are unchanged.
        """
        call = getattr(self._runner, name)
        read_clock_ns = time.perf_counter_ns

        # Most steps are not measured. For them this does little, because after vLLM's own work each
        # line of code has to come from memory again.
        def measure(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401
            if self._is_over:
                return call(*arguments, **options)
            try:
                begin(*arguments, **options)
            except Exception as error:  # noqa: BLE001 - vLLM's step goes on
                self._fail(error)
            result = call(*arguments, **options)
            if self._is_measured:
                start_ns = read_clock_ns()
                try:
                    end()
                except Exception as error:  # noqa: BLE001 - vLLM's step goes on
                    self._fail(error)
                self._hook_ns += read_clock_ns() - start_ns
            self.kind = None
            return result

        self._wrappers[name] = measure
        setattr(self._runner, name, measure)

    def _fail(self, error: Exception) -> None:
        """End the measurement for good."""
        with contextlib.suppress(Exception):
            self._is_measured = False
            self._stop_reason = f"{type(error).__name__}: {error}"[:MAX_REASON_CHARACTERS]
            self.detach()
            logger = logging.getLogger("vllm.headroom_probe")
            logger.warning("headroom probe: peaks are not measured: %s", self._stop_reason)

    def _begin_forward(self, order: Any, *_arguments: Any, **options: Any) -> None:  # noqa: ANN401
        """Follow the scheduler's output, and start to measure the forward pass if that is due.

        Without tokens or images nothing is computed.
        """
        self._is_measured = False
        self._is_sampling_due = False
        # vLLM's second runner profiles itself with this method, and then reads the same peak.
        if options.get("dummy_run"):
            return
        if self._unmeasured_steps < REPEATED_STEPS - 1 and self._batch.is_repeated(order):
            self._unmeasured_steps += 1
            self._is_sampling_due = True
            self.kind = self.step.kind
            return
        start_ns = time.perf_counter_ns()
        step = self._batch.follow(order)
        if not step.total_tokens and not step.images:
            return
        self.step = step
        self.kind = step.kind
        self._is_sampling_due = True
        # Fewer running requests take no more memory than those that were measured.
        is_smaller = step.kind == DECODE and step.total_tokens <= self._decode_tokens
        if is_smaller and self._unmeasured_steps < REPEATED_STEPS - 1:
            self._unmeasured_steps += 1
            return
        if step.kind == DECODE:
            self._decode_tokens = step.total_tokens
        self._began_at = time.time()
        self._steps += 1 + self._unmeasured_steps
        self._unmeasured_steps = 0
        self._is_measured = True
        self._measured_steps += 1
        self._resting = self._read_memory()
        self._torch_cuda.reset_peak_memory_stats(self._index)
        self._hook_ns += time.perf_counter_ns() - start_ns

    def _end_forward(self) -> None:
        size = self.step.pixels if self.step.kind == ENCODER else self.step.total_tokens
        self._add_peak(self.step.kind, size)

    def _begin_sampling(self, *_arguments: Any, **_options: Any) -> None:  # noqa: ANN401
        """Start the second half of a step whose first half was followed."""
        if not self._is_sampling_due:
            self._is_measured = False
            return
        self._is_sampling_due = False
        self.kind = PROMPT_LOGPROBS if self.step.logprobs_requests else SAMPLING
        if self._is_measured:
            self._torch_cuda.reset_peak_memory_stats(self._index)

    def _end_sampling(self) -> None:
        self._is_measured = False
        if self.step.logprobs_requests:
            self._add_peak(PROMPT_LOGPROBS, self.step.logprobs_size)
        else:
            self._add_peak(SAMPLING, self.step.requests + self.step.drafts)

    def _add_peak(self, kind: str, size: int) -> None:
        """Add the peak since the last reset to the table of a kind, whose work has ended."""
        transient_bytes = max(0, self._read_memory().peak - self._resting.allocated)
        table = self._tables.get(kind)
        if table is None:
            table = self._tables[kind] = KindTable()
        table.add(Peak(transient_bytes, size, self.step, self._began_at))

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
        if not self._measured_steps:
            return None
        resting = self._resting
        now_seconds = time.time()
        return {
            "steps": self._steps + self._unmeasured_steps,
            "measured_steps": self._measured_steps,
            "hook_seconds": round(self._hook_ns / 1e9, 6),
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
        if kind is None:
            return None
        return {"work": kind, **describe_step(self.step, time.time())}
