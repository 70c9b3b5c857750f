"""The row of the engine's dashboard that shows the leak detector at work."""

from __future__ import annotations

from dashboards.source.colours import NEUTRAL, RUNNING_COLOUR
from dashboards.source.dashboard import Row
from dashboards.source.grafana import MINUTE, Json, coloured, on_the_right, override, query
from dashboards.source.panels import stat, state_timeline, timeseries
from dashboards.source.series import BY_GPU, BY_TARGET, GPU, RUNNING, STATE_VALUES, TARGET, leak_state, of_gpus


def is_it_leaking() -> Row:
    """Return the detector's view over time."""
    return Row(title="Is it leaking?", panels=[_states(), _growth(), _rate(), _leaked()])


def _states() -> Json:
    return state_timeline(
        "Leak state over time",
        "Each GPU's state as the detector saw it; nothing is drawn where nothing was known.",
        [of_gpus(leak_state("headroom_leak_state", GPU, "gpu, uuid"))],
        [STATE_VALUES],
        height=6,
    )


def _growth() -> Json:
    serves = f'headroom_engine_state{{{TARGET},state="serving"}} == 1'
    held = f'(headroom_gpu_memory_held_bytes{{{GPU},holder="engine"}} and on ({BY_TARGET}) {serves})'
    return timeseries(
        "Growth of the engine's memory, with load",
        "What the engine holds above the lowest value in the time range while it served: each run begins near zero, "
        "and nothing is drawn while it loads or sleeps. Growth without more running requests is the picture of a leak.",
        [of_gpus(f"{held} - min_over_time({held}[$__range:1m] @ end())"), RUNNING],
        unit="bytes",
        width=11,
        overrides=[on_the_right("running requests", RUNNING_COLOUR)],
        custom={"axisSoftMin": 0, "axisSoftMax": 2**30},
    )


def _rate() -> Json:
    rate = "headroom_leak_bytes_per_second"
    fastest = f"and on ({BY_GPU}) topk(1, max_over_time({rate}{{{GPU}}}[$__range] @ end()))"
    return timeseries(
        "Leak rate, with the 95 % interval of the fastest",
        "Growth that load does not explain, drawn only while a GPU is growing or leaking.",
        [
            of_gpus(f"{rate}{{{GPU}}}"),
            query(f"max({rate}_upper{{{GPU}}} {fastest})", "at most"),
            query(f"max({rate}_lower{{{GPU}}} {fastest})", "at least"),
        ],
        unit="binBps",
        width=8,
        noValue="none known",
        custom={"axisSoftMin": 0},
        overrides=[
            coloured("at most", NEUTRAL, custom__lineWidth=0, custom__fillBelowTo="at least", custom__fillOpacity=15),
            coloured("at least", NEUTRAL, custom__lineWidth=0),
        ],
    )


def _leaked() -> Json:
    state = f'headroom_leak_state{{{GPU},state="leaking"}}'
    since = " or ".join(
        f"{bound}_over_time(timestamp({state} == {value})[$__range:1m])" for bound, value in (("max", 0), ("min", 1))
    )
    return stat(
        "Leaked",
        "Of the GPU that leaks most: growth since it began, per thousand finished requests, and since when the alarm "
        "has been on: the left edge of the time shown where it was on before.",
        [
            query(f"max(headroom_leaked_bytes{{{GPU}}})", "so far"),
            query(f"1000 * max(headroom_leak_bytes_per_request{{{GPU}}})", "per 1,000 requests"),
            query(f"1000 * min(({since}) and {state} == 1)", "leaking since"),
        ],
        unit="bytes",
        width=5,
        height=8,
        noValue="none known",
        text={"titleSize": 14, "valueSize": 28},
        overrides=[override("leaking since", unit=MINUTE)],
    )
