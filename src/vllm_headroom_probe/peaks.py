"""Measure the peak memory of each step of vLLM's runner, by kind of work."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from vllm_headroom_probe.batch import ENCODER, NO_STEP, Batch, Step
from vllm_headroom_probe.engine import read_own, to_integer
from vllm_headroom_probe.gpu import can_read_torch, find_cuda

PROMPT_LOGPROBS = "prompt_logprobs"
SAMPLING = "sampling"

BUCKET_SECONDS = 5
RECENT_BUCKETS = 12
"""The number of newest buckets whose highest peak is kept. Twelve buckets cover the last minute."""

MAX_SIZE_CLASSES = 20
"""The number of size classes per kind of work that are written to the file. These are the largest
ones. Each time the size doubles, there are two more classes.
"""

MAX_REASON_CHARACTERS = 200
"""The number of characters of an error's text that are written to the file."""

REPEATED_STEPS = 32
"""Of the steps that repeat the previous step, one in this many is measured."""

MIN_INTERVAL_NS = 100_000_000
"""The minimum time between two measured steps. A step that is larger than those measured so far is
always measured. Measuring a step takes 0.15 milliseconds. It reads torch's figures three times, and
its code must be fetched from memory. The hook therefore takes at most 0.15 % of the time.
"""

Call = Callable[..., Any]


class Peak(NamedTuple):
    """The highest transient memory during half a step, with facts about the step."""

    transient_bytes: int
    size: int
    """The size that the memory depends on: tokens, rows or pixels."""
    step: Step
    at_seconds: float
    """When the step began, in seconds since the epoch."""


class Memory(NamedTuple):
    """torch's allocator figures, in bytes."""

    allocated: int
    peak: int
    """The highest value of `allocated` since the last reset."""
    reserved: int
    inactive_split: int


NO_MEMORY = Memory(allocated=0, peak=0, reserved=0, inactive_split=0)


class KindTable:
    """A bounded number of peaks for one kind of work."""

    def __init__(self) -> None:
        self.steps = 0
        self.highest: Peak | None = None
        self.recent: dict[int, Peak] = {}
        """The highest peak in each time bucket, by the bucket's number."""
        self.by_class: dict[int, tuple[Peak, int]] = {}
        """The highest peak in each size class, and the number of steps in the class."""

    def add(self, peak: Peak) -> None:
        """Count a step."""
        self.steps += 1
        if self.highest is None or peak.transient_bytes > self.highest.transient_bytes:
            self.highest = peak
        bucket = int(peak.at_seconds // BUCKET_SECONDS)
        bucket_peak = self.recent.get(bucket)
        if bucket_peak is None:
            # A new dictionary is created. The probe's thread may be reading the old one.
            self.recent = {
                number: highest
                for number, highest in self.recent.items()
                if number > bucket - RECENT_BUCKETS
            }
            self.recent[bucket] = peak
        elif peak.transient_bytes > bucket_peak.transient_bytes:
            self.recent[bucket] = peak
        # Squaring the size doubles its binary digits. Therefore, there are two classes per doubling
        # of the size.
        size_class = (peak.size * peak.size).bit_length()
        highest, count = self.by_class.get(size_class, (peak, 0))
        if peak.transient_bytes > highest.transient_bytes:
            highest = peak
        self.by_class[size_class] = (highest, count + 1)

    def describe(self, now_seconds: float) -> dict[str, Any]:
        """Return the table for the file.

        `recent` is absent if no step ran in the last minute.
        """
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
    """Return a step for the file, without values that are 0."""
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
    """The peaks of this process's worker.

    They are measured by wrapping the two methods that run a step.
    """

    def __init__(self) -> None:
        self.step: Step = NO_STEP
        """The newest step. If it repeats an earlier step, this is the earlier step."""
        self.kind: str | None = None
        """The kind of work that is running now; None between two steps."""
        self._forward_kind: str | None = None
        """The kind of work in the first half of the newest step. The value is None if nothing is
        computed.
        """
        self._sampling_kind: str | None = None
        """The kind of work in the second half of the newest step."""
        self._batch = Batch()
        self._tables: dict[str, KindTable] = {}
        self._runner: Any = None
        self._index = 0
        """The index of the device in torch."""
        self._torch_cuda: Any = None
        self._began_at = 0.0
        """When the newest measured step began, in seconds since the epoch."""
        self._resting = NO_MEMORY
        """torch's figures when that step began."""
        self._is_measured = False
        """Whether the newest step is being measured."""
        self._wrappers: dict[str, Call] = {}
        """The methods that replace the runner's, by name."""
        self._is_over = False
        """Whether the measurement has ended for good."""
        self._stop_reason: str | None = None
        """The error that ended the measurement, or None if there was none."""
        self._limits: dict[str, int | None] = {}
        self._largest_tokens: dict[str, int] = {}
        """The highest number of tokens in a measured step, by kind of work."""
        self._largest_rows = 0
        """The highest number of rows sampled by a measured step."""
        self._measured_at_ns = 0
        """When the last measured step began, on the monotonic clock."""
        # The step with which the next step is compared. The step is kept as plain numbers, because
        # each lookup of an attribute costs time.
        self._repeatable_tokens: int | None = None
        """The number of tokens in the newest step, or None if it is not repeatable."""
        self._repeatable_requests = 0
        # The cost of the hook.
        self._steps = 0
        self._measured_steps = 0
        self._repeated_steps = 0
        """How many steps have repeated the last step that was followed."""
        self._hook_ns = 0
        """The hook's time in measured steps, in nanoseconds."""

    def attach(self, worker: object) -> None:
        """Measure the worker's steps from now on.

        Does nothing until vLLM has allocated its KV cache. Before the allocation, vLLM measures the
        same peaks for its own profiling. Also does nothing if torch's figures must not be read or
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
            self._replace("sample_tokens", self._wrap_sampling(runner.sample_tokens))
        self._replace("execute_model", self._wrap_forward(runner.execute_model))

    def detach(self) -> None:
        """Stop measuring steps, and restore the runner's own methods."""
        self._is_over = True
        for name, wrapper in self._wrappers.items():
            # If another plugin has wrapped this wrapper, this wrapper stays and only passes on
            # calls.
            if vars(self._runner).get(name) is wrapper:
                delattr(self._runner, name)
        self._forget_step()

    def _replace(self, name: str, wrapper: Call) -> None:
        """Replace a method of the runner."""
        self._wrappers[name] = wrapper
        setattr(self._runner, name, wrapper)

    # If the measurement raises an error, the wrapped methods still run. The results and errors of
    # the wrapped methods are unchanged. Most steps repeat the previous one and are not measured. In
    # a step that is not measured, the wrappers run as little code as possible. After vLLM's own
    # work, the wrappers' code is no longer in the CPU's caches.

    def _wrap_forward(self, call: Call) -> Call:
        """Return a wrapper that runs and measures a step's first half."""

        def execute_model(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401
            self._is_measured = False
            try:
                order = arguments[0]
                is_repeated = (
                    order.total_num_scheduled_tokens == self._repeatable_tokens
                    and len(order.num_scheduled_tokens) == self._repeatable_requests
                    and not order.scheduled_new_reqs
                    and not order.finished_req_ids
                    and not order.scheduled_encoder_inputs
                    and not getattr(order.scheduled_cached_reqs, "resumed_req_ids", ())
                )
                if is_repeated and self._repeated_steps < REPEATED_STEPS - 1:
                    self._repeated_steps += 1
                else:
                    self._begin_forward(*arguments, **options)
            except Exception as error:  # noqa: BLE001 - vLLM's step goes on
                self._fail(error)
            self.kind = self._forward_kind
            result = call(*arguments, **options)
            if self._is_measured:
                self._run(self._end_forward)
            self.kind = None
            return result

        return execute_model

    def _wrap_sampling(self, call: Call) -> Call:
        """Return a wrapper that runs and measures a step's second half."""

        def sample_tokens(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401
            self.kind = self._sampling_kind
            if self._is_measured:
                self._run(self._begin_sampling)
            result = call(*arguments, **options)
            if self._is_measured:
                self._run(self._end_sampling)
            self.kind = None
            return result

        return sample_tokens

    def _fail(self, error: Exception) -> None:
        """End the measurement for good."""
        with contextlib.suppress(Exception):
            self._is_measured = False
            self._stop_reason = f"{type(error).__name__}: {error}"[:MAX_REASON_CHARACTERS]
            self.detach()
            logger = logging.getLogger("vllm.headroom_probe")
            logger.warning("headroom probe: peaks are not measured: %s", self._stop_reason)

    def _begin_forward(self, order: Any, *_arguments: Any, **options: Any) -> None:  # noqa: ANN401
        """Follow the scheduler's output, and start measuring the forward pass if the step is due.

        If there are no tokens and no images, nothing is computed.
        """
        if self._is_over:
            return
        # vLLM's second runner calls this method to profile itself. During profiling, vLLM reads the
        # same peak from torch, so the peak must not be reset.
        if options.get("dummy_run"):
            self._forget_step()
            return
        start_ns = time.perf_counter_ns()
        self._steps += self._repeated_steps
        self._repeated_steps = 0
        step = self._batch.follow(order)
        if not step.total_tokens and not step.images:
            self._forget_step()
            return
        self._steps += 1
        self.step = step
        self._repeatable_tokens = step.total_tokens if step.is_repeatable else None
        self._repeatable_requests = step.requests
        self._forward_kind = step.kind
        self._sampling_kind = PROMPT_LOGPROBS if step.logprobs_requests else SAMPLING
        if not self._is_due(step, start_ns):
            return
        self._began_at = time.time()
        self._is_measured = True
        self._measured_steps += 1
        self._measured_at_ns = start_ns
        self._resting = self._read_memory()
        self._torch_cuda.reset_peak_memory_stats(self._index)
        self._hook_ns += time.perf_counter_ns() - start_ns

    def _is_due(self, step: Step, now_ns: int) -> bool:
        """Return whether to measure a step; if so, record its size."""
        rows = step.requests + step.drafts
        largest_tokens = self._largest_tokens.get(step.kind, 0)
        is_larger = step.total_tokens > largest_tokens or rows > self._largest_rows
        # The memory of these steps does not depend on tokens alone.
        is_special = step.logprobs_requests or step.images or step.adapters
        if not is_larger and not is_special and now_ns - self._measured_at_ns < MIN_INTERVAL_NS:
            return False
        self._largest_tokens[step.kind] = max(largest_tokens, step.total_tokens)
        self._largest_rows = max(self._largest_rows, rows)
        return True

    def _forget_step(self) -> None:
        """Record that no measured step is running."""
        self.step = NO_STEP
        self._repeatable_tokens = None
        self._forward_kind = None
        self._sampling_kind = None

    def _end_forward(self) -> None:
        size = self.step.pixels if self.step.kind == ENCODER else self.step.total_tokens
        self._add_peak(self.step.kind, size)

    def _begin_sampling(self) -> None:
        self._torch_cuda.reset_peak_memory_stats(self._index)

    def _end_sampling(self) -> None:
        self._is_measured = False
        if self.step.logprobs_requests:
            self._add_peak(PROMPT_LOGPROBS, self.step.logprobs_size)
        else:
            self._add_peak(SAMPLING, self.step.requests + self.step.drafts)

    def _run(self, part: Callable[[], None]) -> None:
        """Run a part of the measurement and count its time.

        An error ends the measurement.
        """
        start_ns = time.perf_counter_ns()
        try:
            part()
        except Exception as error:  # noqa: BLE001 - vLLM's step goes on
            self._fail(error)
        self._hook_ns += time.perf_counter_ns() - start_ns

    def _add_peak(self, kind: str, size: int) -> None:
        """Add the peak since the last reset to the table for this kind of work."""
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
        """Return the peaks for the probe's file, or None if no step has been measured."""
        if not self._measured_steps:
            return None
        resting = self._resting
        now_seconds = time.time()
        return {
            "steps": self._steps + self._repeated_steps,
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
        """Return the current step and its kind, or None if no step is running."""
        kind = self.kind
        if kind is None:
            return None
        return {"work": kind, **describe_step(self.step, time.time())}
