"""One run of an engine: it loads, profiles itself, takes its KV cache, serves and sleeps, on torch's allocator."""

from __future__ import annotations

from random import Random
from typing import Any, Final

import numpy as np

from tests.card.corpus import memory
from tests.card.corpus.day import MODELS, Day
from tests.card.corpus.memory import GIB, MIB, take
from tests.card.corpus.traffic import HOUR, Requests, Tick

LOADING_SECONDS: Final = 60.0
CONTEXT_BYTES: Final = 500 * MIB
"""What the card counts for the context of the other process."""

PLAYED_LAYERS: Final = 2
"""Of a forward pass: the others take and free the same blocks."""

SEEN_IN_STEP: Final = 0.4
"""How often the probe reads while a step runs."""

Page = dict[str, Any]


class Engine:
    """An engine that began at `began_seconds`; `run` counts from 0."""

    def __init__(self, day: Day, seed: int, run: int, began_seconds: float) -> None:
        self._day, self._model, self._began = day, MODELS[day.model], began_seconds
        self._rng = Random(seed + run)  # noqa: S311 - no secret
        self._draw, same_day = np.random.default_rng([seed, run]), np.random.default_rng(seed)
        if day.allocator:
            memory.set_allocator(day.allocator)
        if day.limited:
            memory.limit_to(0.97)
        self._weights: list[Any] = []
        self._cache: list[Any] = []
        self._profile()
        self._requests = Requests(self._draw, same_day, day.shape, self._cache_bytes // self._model.token_bytes)
        self._parts = [make(self._rng) for make in day.parts]
        self._leak = None if day.leak is None else day.leak(self._rng)
        self._serves = self._asleep = False
        self._finished = self._prompt_tokens = self._output_tokens = 0
        self.inside = memory.read_inside()

    @property
    def lost(self) -> int:
        """The bytes that leaked in this run."""
        return 0 if self._leak is None else self._leak.lost

    def step(self, seconds: float, length: float) -> Page | None:
        """Serve for some seconds; None while it loads. Raises torch's OutOfMemoryError."""
        if not self._serves:
            self._load((seconds - self._began) / LOADING_SECONDS)
            return None
        self._follow_sleep(seconds)
        if self._asleep:
            self.inside = memory.read_inside()
            return self._page(0, 0, 0.0)
        tick = self._requests.step(seconds, length)
        self._serve(tick)
        self._finished += tick.done
        self._prompt_tokens += tick.prompt_tokens
        self._output_tokens += tick.output_tokens
        return self._page(tick.running, tick.waiting, tick.held_tokens)

    def _profile(self) -> None:
        """Measure the peak of the largest batch, as vLLM does before it sizes the KV cache."""
        free_bytes, _ = memory.read_free()
        self._forward(self._day.batch_tokens, self._day.max_seqs)
        peak = memory.read_peak()
        memory.release_cache()
        neighbour_plan = self._day.neighbour
        neighbour_bytes = (
            0 if neighbour_plan is None or neighbour_plan.comes == 0 else int(neighbour_plan.gib * GIB) + CONTEXT_BYTES
        )
        if neighbour_plan is not None and neighbour_plan.comes == 0 and neighbour_plan.kind != "steady":
            neighbour_bytes = int(neighbour_plan.gib * GIB)
        weights = sum(self._model.layer_bytes) * self._model.layers + 4 * self._model.vocabulary * self._model.hidden
        self._cache_bytes = free_bytes - weights - peak - neighbour_bytes - self._day.room_mib * MIB
        if self._cache_bytes < GIB:
            raise ValueError(f"no room for a KV cache: {self._cache_bytes / GIB:.1f} GiB")

    def _load(self, share: float) -> None:
        layers, model = self._model.layers, self._model
        while len(self._weights) < min(layers, int(share * layers) + 1):
            self._weights.append([take(layer) for layer in model.layer_bytes])
        if share >= 1:
            self._weights.append([take(2 * model.vocabulary * model.hidden) for _ in range(2)])
            self._take_cache()
            self._forward(self._day.max_seqs, self._day.max_seqs)
            self._serves = True
        self.inside = memory.read_inside()

    def _take_cache(self) -> None:
        self._cache = [take(self._cache_bytes / self._model.layers) for _ in range(self._model.layers)]

    def _follow_sleep(self, seconds: float) -> None:
        if self._day.sleep is None:
            return
        awake, asleep = (hours * HOUR for hours in self._day.sleep)
        is_due = (seconds - self._began) % (awake + asleep) >= awake
        if is_due and not self._asleep:
            self._requests.drop()
            self._weights, self._cache = [], []
            memory.release_cache()
        elif self._asleep and not is_due:
            self._weights = [
                [take(size_bytes) for size_bytes in self._model.layer_bytes] for _ in range(self._model.layers)
            ]
            self._weights.append([take(2 * self._model.vocabulary * self._model.hidden) for _ in range(2)])
            self._take_cache()
        self._asleep = is_due

    def _serve(self, tick: Tick) -> None:
        is_seen_in_step = self._rng.random() < SEEN_IN_STEP
        for number, (tokens, sampled) in enumerate(tick.batches, start=1):
            self._forward(tokens, sampled, is_seen=is_seen_in_step and number == len(tick.batches))
        for part in self._parts:
            part.step(tick)
        if self._leak is not None:
            self._leak.step(tick)
        if not (is_seen_in_step and tick.batches):
            self.inside = memory.read_inside()

    def _forward(self, tokens: int, sampled: int, *, is_seen: bool = False) -> None:
        """Take and free what a step does: layers, then the logits of the sampled tokens."""
        model = self._model
        row = 2 * tokens * model.hidden
        inputs = [take(8 * tokens), take(4 * tokens), take(64 * sampled)]
        hidden, residual = take(row), take(row)
        for _ in range(PLAYED_LAYERS):
            qkv = take(row + 4 * tokens * model.kv_width)
            attended = take(row)
            del qkv
            projected = take(row)
            del attended
            gates = take(4 * tokens * model.inner)
            gated = take(2 * tokens * model.inner)
            del gates
            hidden = take(row)
            del gated, projected
        if is_seen:
            self.inside = memory.read_inside()
        last_hidden = take(2 * sampled * model.hidden)
        logits = take(2 * sampled * model.vocabulary)
        scores = take(4 * sampled * model.vocabulary)
        del logits
        probabilities, order = take(4 * sampled * model.vocabulary), take(8 * sampled * model.vocabulary)
        del inputs, hidden, residual, last_hidden, scores, probabilities, order

    def _page(self, running: int, waiting: int, held_tokens: float) -> Page:
        capacity = self._cache_bytes // self._model.token_bytes // 16 * 16
        return {
            "running": running,
            "waiting": waiting,
            "kv_used_ratio": round(held_tokens / capacity, 3),
            "kv_capacity_tokens": capacity,
            "finished_total": self._finished,
            "prompt_tokens_total": self._prompt_tokens,
            "generation_tokens_total": self._output_tokens,
            "awake": not self._asleep,
        }
