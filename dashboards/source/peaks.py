"""The row of the engine's dashboard on the peaks of its steps: by the kind of work, and which requests still fit."""

from __future__ import annotations

from typing import Final

from dashboards.source.colours import BAD, NEUTRAL, PEAK_COLOUR, WORKS
from dashboards.source.dashboard import Row
from dashboards.source.grafana import Json, coloured, query, steps
from dashboards.source.panels import NOTHING, stat, timeseries
from dashboards.source.series import BY_GPU, GPU

ROOM: Final = f"headroom_engine_peak_room_bytes{{{GPU}}}"
TURN_ON: Final = "Needs the probe, with HEADROOM_PROBE_PEAKS=on in vLLM's environment; empty without it."
EMPTY: Final = "needs the probe with HEADROOM_PROBE_PEAKS=on"
WORK_COLOURS: Final = [coloured(work, colour) for work, colour in WORKS]


def peaks_of_steps() -> Row:
    """Return the peaks by the kind of work, in a closed row: they have to be turned on."""
    return Row(title="Peaks of steps (with the probe's peaks)", collapsed=True, panels=[_peaks(), _ratios(), _safe()])


def _peaks() -> Json:
    tightest = f"bottomk(1, min_over_time({ROOM}[$__range] @ end()))"
    return timeseries(
        "Peak of a step, by the kind of work",
        "The highest memory of torch above its level at rest in the steps of the last minute, on the GPU with the "
        "least room. Dashed: the room for a step, which is what is free on the GPU and what torch holds unused. "
        + TURN_ON,
        [
            query(f"max by (work) (headroom_engine_peak_bytes{{{GPU}}} and on ({BY_GPU}) {tightest})", "{{work}}"),
            query(f"max({ROOM} and on ({BY_GPU}) {tightest})", "room"),
        ],
        unit="bytes",
        width=10,
        min=0,
        noValue=EMPTY,
        overrides=[
            *WORK_COLOURS,
            coloured("room", PEAK_COLOUR, custom__lineStyle={"fill": "dash", "dash": [8, 6]}),
        ],
    )


def _ratios() -> Json:
    return timeseries(
        "Peak of a step over its room",
        "Of each kind of work, on the GPU where the ratio is highest. Above 1, the dashed line, the step that caused "
        "the peak does not fit any more. " + TURN_ON,
        [query(f"max by (work) (headroom_engine_peak_ratio{{{GPU}}})", "{{work}}")],
        unit="percentunit",
        width=8,
        noValue=EMPTY,
        thresholds=steps((None, NEUTRAL), (1, BAD)),
        custom={"thresholdsStyle": {"mode": "dashed"}, "axisSoftMin": 0, "axisSoftMax": 1},
        overrides=WORK_COLOURS,
    )


def _safe() -> Json:
    return stat(
        "Largest request that fits",
        "The largest single request of its kind that fits beside what runs now, on the GPU with the least room for "
        "it. A kind that was seen too seldom is not shown. " + TURN_ON,
        [
            query(f"min(headroom_engine_safe_prompt_tokens{{{GPU}}})", "prompt tokens"),
            query(f"min(headroom_engine_safe_prompt_logprobs_tokens{{{GPU}}})", "tokens with prompt logprobs"),
            query(f"min(headroom_engine_safe_image_pixels{{{GPU}}})", "image pixels"),
        ],
        unit="locale",
        width=6,
        height=8,
        decimals=0,
        named=True,
        text={"titleSize": 14, "valueSize": 30},
        noValue=NOTHING,
    )
