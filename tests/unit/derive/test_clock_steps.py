"""The machine's clock may be set by years, either way: time on the page follows it, arithmetic does not."""

from __future__ import annotations

from msgspec.structs import replace

from tests.samples import engine, gpu, page, snapshot
from vllm_headroom.derive.tick import answer, build_derivations

YEAR = 365.25 * 86400


def test_no_derivation_raises_when_the_clock_steps_by_years() -> None:
    for derivation in build_derivations(kv_bytes_per_token=512.0):
        state = derivation.initial
        for step, years in enumerate((0, 60, -60, 9000, 0, -1, 1e6)):
            reading = engine(running=20.0, finished_total=float(step), started_at_seconds=1_760_000_000.0)
            sample = snapshot(at=5.0 * step, engines=page(reading), gpus=(gpu(used=step),), processes=())
            state, _ = answer(derivation, state, replace(sample, time_seconds=sample.time_seconds + years * YEAR))
