"""Peaks by the kind of work, around a runner with the two methods of vLLM's and a counted allocator."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, Final

import pytest

from vllm_headroom_probe import batch
from vllm_headroom_probe import peaks as module
from vllm_headroom_probe.batch import Batch
from vllm_headroom_probe.folder import MAX_DOCUMENT_BYTES
from vllm_headroom_probe.peaks import KindTable, Peaks

MIB: Final = 1 << 20
LEVEL: Final = 10 * MIB


class Allocator:
    """torch.cuda, as far as peaks need it."""

    def __init__(self) -> None:
        self.allocated = self.peak = LEVEL

    def take(self, transient: int) -> None:
        self.peak = max(self.peak, self.allocated + transient)

    def memory_stats_as_nested_dict(self, _index: int) -> dict[str, Any]:
        def figure(current: int, peak: int = 0) -> dict[str, dict[str, int]]:
            return {"all": {"current": current, "peak": peak}}

        return {
            "allocated_bytes": figure(self.allocated, self.peak),
            "reserved_bytes": figure(20 * MIB),
            "inactive_split_bytes": figure(MIB),
        }

    def reset_peak_memory_stats(self, _index: int) -> None:
        self.peak = self.allocated


class Runner:
    """vLLM's runner: a forward pass takes 1 MiB a token, the second half 2 MiB a token with prompt logprobs."""

    def __init__(self, allocator: Allocator) -> None:
        self.kv_caches = [object()]
        self.allocator = allocator
        self.answers: list[object] = []
        self.order: Any = None

    def execute_model(self, order: Any, *_more: Any, dummy_run: bool = False) -> object:
        self.order = order
        self.allocator.take((1 + dummy_run) * MIB * order.total_num_scheduled_tokens)
        self.answers.append(object())
        return self.answers[-1]

    def sample_tokens(self, _grammar: object) -> object:
        self.allocator.take(2 * MIB * self.order.total_num_scheduled_tokens)
        return self.answers[-1]


def ask(name: str, tokens: int, **facts: Any) -> Any:
    """A new request of so many prompt tokens."""
    logprobs = SimpleNamespace(prompt_logprobs=facts.pop("prompt_logprobs", None))
    request_fields = {"num_computed_tokens": 0, "mm_features": [], "lora_request": None} | facts
    return SimpleNamespace(req_id=name, prompt_token_ids=[1] * tokens, sampling_params=logprobs, **request_fields)


def order(tokens: dict[str, int], *new: Any, **facts: Any) -> Any:
    """An order of vLLM's scheduler."""
    nothing: dict[str, Any] = {
        "scheduled_spec_decode_tokens": {},
        "scheduled_encoder_inputs": {},
        "finished_req_ids": set(),
        "scheduled_cached_reqs": SimpleNamespace(resumed_req_ids=set()),
    }
    return SimpleNamespace(
        num_scheduled_tokens=tokens,
        total_num_scheduled_tokens=sum(tokens.values()),
        scheduled_new_reqs=list(new),
        **nothing | facts,
    )


class Clock:
    """The module `time` for peaks: by the monotonic clock a second passes between two readings."""

    def __init__(self) -> None:
        self.now = 1_760_000_000.0
        self.monotonic_ns = 10**12
        self.tick_ns = 10**9

    def time(self) -> float:
        return self.now

    def perf_counter_ns(self) -> int:
        self.monotonic_ns += self.tick_ns
        return self.monotonic_ns


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake_clock = Clock()
    monkeypatch.setattr(module, "time", fake_clock)
    return fake_clock


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    fake_allocator = Allocator()
    monkeypatch.setattr(module, "find_cuda", lambda: fake_allocator)
    return fake_allocator


@pytest.fixture
def runner(allocator: Allocator) -> Runner:
    return Runner(allocator)


@pytest.fixture
def peaks(runner: Runner) -> Peaks:
    new_peaks = Peaks()
    new_peaks.attach(worker_of(runner))
    return new_peaks


def worker_of(runner: Runner) -> Any:
    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=4096),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=2048, max_num_seqs=16),
    )
    return SimpleNamespace(model_runner=runner, device=SimpleNamespace(type="cuda", index=0), vllm_config=config)


def step(runner: Runner, an_order: Any) -> None:
    assert runner.execute_model(an_order) is runner.answers[-1]
    assert runner.sample_tokens(None) is runner.answers[-1]


def sizes(peaks: Peaks) -> dict[str, list[list[int]]]:
    document = peaks.describe()
    assert document is not None
    return {kind: table["sizes"] for kind, table in document["kinds"].items()}


def test_each_half_of_a_step_has_its_own_kind_and_peak(peaks: Peaks, runner: Runner) -> None:
    step(runner, order({"a": 8}, ask("a", 12)))
    step(runner, order({"a": 4}))
    step(runner, order({"a": 1}))

    assert sizes(peaks) == {
        "prefill": [[4, 4 * MIB, 1], [8, 8 * MIB, 1]],
        "sampling": [[1, 16 * MIB, 3]],
        "decode": [[1, MIB, 1]],
    }


def test_prompt_logprobs_are_of_the_largest_request_and_what_the_next_one_finds_held(
    peaks: Peaks, runner: Runner
) -> None:
    new = ask("a", 6, prompt_logprobs=0), ask("b", 9, prompt_logprobs=5), ask("c", 50)
    step(runner, order({"a": 6, "b": 9, "c": 50}, *new))

    document = peaks.describe()
    assert document is not None
    highest = document["kinds"]["prompt_logprobs"]["highest"]
    assert (highest["size"], highest["bytes"]) == (9 + round(0.4 * 6), 2 * 65 * MIB)
    assert highest["logprobs_tokens"] == 9
    assert (highest["logprobs_requests"], highest["prompt_tokens"], highest["requests"]) == (2, 65, 3)


def image(shape: tuple[int, ...], *, grid: bool = False) -> Any:
    data = {"pixel_values": SimpleNamespace(data=SimpleNamespace(shape=shape))}
    return SimpleNamespace(data=data | ({"image_grid_thw": None} if grid else {}))


@pytest.mark.parametrize(
    ("feature", "pixels"),
    [
        (image((3, 336, 224)), 336 * 224),
        (image((2, 3, 10, 10)), 200),
        (image((64, 1176), grid=True), 64 * 14 * 14),
        (image((64, 768), grid=True), 64 * 16 * 16),
        (SimpleNamespace(data=None), 0),
    ],
)
def test_the_pixels_of_an_image(peaks: Peaks, runner: Runner, feature: Any, pixels: int) -> None:
    new = ask("a", 30, mm_features=[image((3, 1, 1)), feature])
    step(runner, order({"a": 30}, new, scheduled_encoder_inputs={"a": [1]}))

    assert sizes(peaks)["encoder"] == [[pixels, 30 * MIB, 1]]


def test_an_adapter_is_loaded_once_and_drafts_are_rows(peaks: Peaks, runner: Runner) -> None:
    adapter = SimpleNamespace(lora_int_id=7)
    step(runner, order({"a": 3}, ask("a", 3, lora_request=adapter)))
    step(runner, order({"b": 5}, ask("b", 5, lora_request=adapter), finished_req_ids={"a"}))
    step(runner, order({"b": 4}, scheduled_spec_decode_tokens={"b": [1, 2, 3]}))

    assert sizes(peaks)["adapter"] == [[3, 3 * MIB, 1]]
    assert sizes(peaks)["prefill"] == [[5, 5 * MIB, 1]]
    assert sizes(peaks)["sampling"][-1][0] == 4


def test_a_preempted_request_is_a_prompt_again(peaks: Peaks, runner: Runner) -> None:
    step(runner, order({"a": 3}, ask("a", 3)))
    resumed = SimpleNamespace(resumed_req_ids={"a"})
    step(runner, order({"a": 9}, scheduled_cached_reqs=resumed))
    step(runner, order({"a": 1}))

    assert sizes(peaks)["prefill"] == [[3, 3 * MIB, 1], [9, 9 * MIB, 1]]
    assert sizes(peaks)["decode"] == [[1, MIB, 1]]


def test_requests_that_ran_before_are_of_no_known_kind(peaks: Peaks, runner: Runner) -> None:
    step(runner, order({"old": 700, "a": 3}, ask("a", 3)))
    step(runner, order({"a": 1}, finished_req_ids={"old"}))

    assert set(sizes(peaks)) == {"other", "sampling", "decode"}


def test_of_repeated_steps_one_in_32_is_measured(peaks: Peaks, runner: Runner, allocator: Allocator) -> None:
    step(runner, order({"a": 3}, ask("a", 3)))
    for _ in range(34):
        step(runner, order({"a": 1}))

    assert sizes(peaks)["decode"] == [[1, MIB, 2]]
    document = peaks.describe()
    assert document is not None
    assert (document["steps"], document["measured_steps"]) == (35, 3)

    vars(allocator)["memory_stats_as_nested_dict"] = pytest.fail
    step(runner, order({"a": 1}))


def test_a_step_that_is_not_measured_is_named_in_its_halves(peaks: Peaks, runner: Runner, allocator: Allocator) -> None:
    step(runner, order({"a": 3}, ask("a", 3)))
    step(runner, order({"a": 1}))
    current: list[dict[str, Any] | None] = []
    vars(allocator)["take"] = lambda _: current.append(peaks.describe_current())
    step(runner, order({"a": 1}))

    assert [(named["work"], named["tokens"]) for named in current if named] == [("decode", 1), ("sampling", 1)]
    assert peaks.describe_current() is None


@pytest.mark.parametrize(
    ("orders", "measured_steps"),
    [
        ([order({"a": 8}, ask("a", 8)), order({"b": 8}, ask("b", 8)), order({"c": 7}, ask("c", 7))], 1),
        ([order({"a": 8}, ask("a", 8)), order({"b": 9}, ask("b", 9))], 2),
        ([order({"a": 8}, ask("a", 8)), order({"b": 3, "c": 3}, ask("b", 3), ask("c", 3))], 2),
        ([order({"a": 8}, ask("a", 8)), order({"b": 2}, ask("b", 2, prompt_logprobs=1))], 2),
        ([order({"a": 8}, ask("a", 8)), order({"a": 1})], 2),
    ],
    ids=["no larger", "more tokens", "more rows", "prompt logprobs", "another kind"],
)
def test_soon_after_a_measured_step_only_what_may_be_higher_is_measured(
    peaks: Peaks, runner: Runner, clock: Clock, orders: list[Any], measured_steps: int
) -> None:
    clock.tick_ns = 1
    for an_order in orders:
        step(runner, an_order)

    document = peaks.describe()
    assert document is not None
    assert (document["steps"], document["measured_steps"]) == (len(orders), measured_steps)


def test_an_empty_order_is_no_step(peaks: Peaks, runner: Runner) -> None:
    step(runner, order({}, finished_req_ids={"a"}))

    assert peaks.describe() is None


def test_vllms_own_profile_reads_its_own_peak(peaks: Peaks, runner: Runner, allocator: Allocator) -> None:
    allocator.take(500 * MIB)
    runner.execute_model(order({"a": 8}, ask("a", 8)), dummy_run=True)
    runner.sample_tokens(None)

    assert allocator.peak == LEVEL + 500 * MIB
    assert peaks.describe() is None


@pytest.mark.parametrize("hinder", ["kv_caches", "sleep", "device"])
def test_nothing_is_wrapped_where_peaks_must_not_be_read(runner: Runner, hinder: str) -> None:
    worker = worker_of(runner)
    if hinder == "kv_caches":
        runner.kv_caches = []
    elif hinder == "sleep":
        worker.vllm_config.model_config.enable_sleep_mode = True
    else:
        worker.device.index = None
    Peaks().attach(worker)

    assert "execute_model" not in vars(runner)


def break_order(_runner: Runner, _allocator: Allocator, an_order: Any) -> None:
    del an_order.num_scheduled_tokens


def break_allocator(_runner: Runner, allocator: Allocator, _order: Any) -> None:
    vars(allocator)["memory_stats_as_nested_dict"] = lambda _: {}


@pytest.mark.parametrize("break_it", [break_order, break_allocator])
def test_an_error_of_the_measurement_ends_it_and_not_the_step(
    peaks: Peaks, runner: Runner, allocator: Allocator, break_it: Callable[[Runner, Allocator, Any], None]
) -> None:
    step(runner, order({"a": 8}, ask("a", 12)))
    spoiled = order({"a": 4})
    break_it(runner, allocator, spoiled)
    step(runner, spoiled)

    assert "execute_model" not in vars(runner)
    assert "sample_tokens" not in vars(runner)
    document = peaks.describe()
    assert document is not None
    assert "Error" in document["stopped"]


def list_functions() -> list[tuple[Any, str]]:
    """Every function of the measurement that runs within vLLM's step, and where it is."""
    functions: list[tuple[Any, str]] = []
    for place in (Batch, KindTable, Peaks, batch, module):
        for name, member in vars(place).items():
            if (
                inspect.isfunction(member)
                and name not in OUTSIDE
                and member.__module__ in {module.__name__, batch.__name__}
            ):
                functions.append((place, name))
    return functions


OUTSIDE: Final = {
    "attach",
    "_replace",
    "_wrap_forward",
    "_wrap_sampling",
    "_fail",
    "_run",
    "describe",
    "describe_current",
    "describe_peak",
    "describe_step",
}
"""Functions that the probe's thread calls, which catches everything, and the one that catches here."""


@pytest.mark.parametrize(("place", "name"), list_functions(), ids=lambda value: getattr(value, "__name__", value))
def test_whatever_raises_in_the_measurement_the_step_goes_on(
    runner: Runner, allocator: Allocator, monkeypatch: pytest.MonkeyPatch, place: Any, name: str
) -> None:
    calls: list[str] = []

    def spoil(*_: object, **__: object) -> None:
        calls.append(name)
        raise ValueError

    new_peaks = Peaks()
    if name != "__init__":
        monkeypatch.setattr(place, name, spoil)
    with suppress(ValueError):  # the probe's thread catches it
        new_peaks.attach(worker_of(runner))
    monkeypatch.setattr(place, name, spoil)
    image_request = ask("a", 8, mm_features=[image((3, 1, 1))])
    step(runner, order({"a": 8}, image_request, scheduled_encoder_inputs={"a": [0]}))
    for _ in range(3):
        step(runner, order({"a": 1}))
    step(runner, order({"a": 9}, scheduled_cached_reqs=SimpleNamespace(resumed_req_ids={"a"})))
    step(runner, order({}))

    if calls:
        assert vars(runner).keys() == vars(Runner(allocator)).keys()
        document = new_peaks.describe()
        assert document is None or "ValueError" in document["stopped"]
    else:
        assert place in {Batch, Peaks}
        assert name in {"__init__", "detach"}


def test_a_plugin_that_wrapped_the_wrapper_keeps_its_own(peaks: Peaks, runner: Runner) -> None:
    measured = runner.execute_model
    calls: list[object] = []

    def other(*arguments: Any) -> object:
        calls.append(arguments)
        return measured(*arguments)

    vars(runner)["execute_model"] = other
    step(runner, order({"a": 8}, ask("a", 8)))
    peaks.detach()
    step(runner, order({"a": 1}))

    assert len(calls) == 2
    assert "sample_tokens" not in vars(runner)
    assert set(sizes(peaks)) == {"prefill", "sampling"}


def test_an_error_of_vllm_reaches_vllm_and_names_its_step(peaks: Peaks, runner: Runner) -> None:
    new = ask("a", 8, prompt_logprobs=1)
    assert peaks.describe_current() is None
    runner.execute_model(order({"a": 8}, new))
    runner.order = None

    with pytest.raises(AttributeError):
        runner.sample_tokens(None)

    current = peaks.describe_current()
    assert current is not None
    assert (current["work"], current["logprobs_tokens"], current["requests"]) == ("prompt_logprobs", 8, 1)


def test_only_the_last_minute_is_recent_and_the_file_is_bounded(peaks: Peaks, runner: Runner, clock: Clock) -> None:
    for number in range(40):
        name = str(number)
        tokens = int(1.4**number)
        scheduled = {name: tokens}
        extra = {"scheduled_encoder_inputs": {name: []}, "finished_req_ids": {str(number - 1)}}
        step(runner, order(scheduled, ask(name, 1), **extra))
        clock.now += 10
    clock.now += 45
    document = peaks.describe()
    assert document is not None
    recent = document["kinds"]["prefill"]["recent"]
    assert recent["size"] == document["kinds"]["prefill"]["highest"]["size"]

    clock.now += 60
    document = peaks.describe()
    assert document is not None
    assert "recent" not in document["kinds"]["prefill"]
    kinds = dict.fromkeys(("decode", "other", "adapter", "encoder"), document["kinds"]["prefill"])
    assert len(json.dumps({**document["kinds"], **kinds})) < MAX_DOCUMENT_BYTES / 2
