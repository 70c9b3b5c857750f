"""The table of one engine's GPUs: how each is, and when it will be out of memory."""

from __future__ import annotations

from dashboards.source.colours import STATES, state_words
from dashboards.source.grafana import MINUTE, Json, override, values
from dashboards.source.panels import table
from dashboards.source.ranking import number, organized
from dashboards.source.series import FREE, FREE_FLOOR, GPU, lowest_free, of_gpus


def each_gpu() -> Json:
    """Return a line for each GPU, the least free first."""
    columns = {
        "free": f"{FREE}{{{GPU}}}",
        "lowest": lowest_free(GPU),
        "out of memory": f"1000 * (time() + headroom_time_to_oom_seconds{{{GPU}}})",
        "at the earliest": f"1000 * (time() + headroom_time_to_oom_seconds_lower{{{GPU}}})",
    }
    names = {f"Value #{letter}": name for letter, name in zip("BCDE", columns, strict=True)}
    states = [(state, state_words(state), colour) for state, colour in STATES]
    when = {"unit": MINUTE, "custom__width": 120}
    return table(
        "Each GPU, and when it will be full",
        "The state of each GPU, its free memory, the lowest free memory in the time range, and while it grows or leaks "
        "when it will be out of memory: by the forecast, and at the earliest. Only the probe inside vLLM shows where "
        "it leaks.",
        [
            of_gpus(f"max by (gpu, uuid, state) (headroom_leak_state{{{GPU}}} == 1)"),
            *(of_gpus(f"max by (gpu, uuid) ({expr})") for expr in columns.values()),
            of_gpus(f"max by (gpu, uuid, location) (headroom_leak_location{{{GPU}}} == 1)"),
        ],
        [
            {"id": "merge", "options": {}},
            {"id": "sortBy", "options": {"fields": {}, "sort": [{"field": "Value #B"}]}},
            organized(
                ("gpu", "state", "location", *names),
                ("uuid", "Value #A", "Value #F"),
                {"gpu": "GPU", "location": "where", **names},
            ),
        ],
        width=11,
        height=5,
        noValue="no GPU of the engine is seen",
        overrides=[
            override("GPU", custom__width=112),
            override(
                "state",
                custom__width=100,
                noValue="unknown",
                mappings=[values(*states)],
                custom__cellOptions={"type": "color-text"},
            ),
            number("free", "bytes", 70, FREE_FLOOR, noValue="unknown"),
            number("lowest", "bytes", 70, FREE_FLOOR, noValue="unknown"),
            override("out of memory", **when),
            override("at the earliest", **when),
        ],
    )
