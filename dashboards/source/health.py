"""The rows of the engine's dashboard on what it stands on: the host's memory, the GPU, the sidecar itself."""

from __future__ import annotations

from dashboards.source.colours import BAD, ENGINE_COLOUR, GOOD, NEUTRAL, OTHER_COLOUR, ROLES, RUNNING_COLOUR, WARNING
from dashboards.source.dashboard import Row
from dashboards.source.grafana import Json, coloured, on_the_right, query, steps, values
from dashboards.source.panels import MEAN_AND_HIGHEST, stat, state_timeline, table, timeseries
from dashboards.source.series import GPU, RUNNING, STATE_VALUES, TARGET, leak_state, of_gpus

ROLE_LINES = [coloured(role, colour) for role, colour in ROLES]
RESIDENT = query(f"sum by (process) (headroom_host_memory_bytes{{{TARGET}}})", "{{process}}")


def host_memory() -> Row:
    """Return the resident memory of the engine's processes."""
    return Row(
        title="Host memory",
        collapsed=True,
        panels=[
            timeseries(
                "Resident memory by process role, with load",
                "What the engine's processes hold of the host's memory. Leaks happen here too.",
                [RESIDENT, RUNNING],
                unit="bytes",
                overrides=[*ROLE_LINES, on_the_right("running requests", RUNNING_COLOUR)],
            ),
            timeseries(
                "Host memory against its limit",
                "The container's memory that the kernel cannot reclaim, with /dev/shm, and the limit where it kills.",
                [
                    query(f"headroom_host_memory_used_bytes{{{TARGET}}}", "in use"),
                    query(f"headroom_host_memory_limit_bytes{{{TARGET}}}", "limit"),
                    query(f"headroom_host_shm_used_bytes{{{TARGET}}}", "of it shared"),
                    query(f"headroom_host_shm_limit_bytes{{{TARGET}}}", "at most shared"),
                    query(f"increase(headroom_host_oom_kills_total{{{TARGET}}}[$__rate_interval])", "kills"),
                ],
                unit="bytes",
                noValue="not known",
                overrides=[
                    coloured("limit", BAD),
                    coloured("in use", ENGINE_COLOUR),
                    coloured("of it shared", NEUTRAL),
                    on_the_right("kills", BAD),
                ],
            ),
            timeseries(
                "Time until the kernel kills",
                "Drawn only while a role grows or leaks and the limit is known; the lower line is the lower bound.",
                [
                    query(f"headroom_host_time_to_oom_seconds{{{TARGET}}}", "about"),
                    query(f"headroom_host_time_to_oom_seconds_lower{{{TARGET}}}", "at the earliest"),
                ],
                unit="s",
                noValue="none in sight, or no limit known",
                overrides=[coloured("about", WARNING), coloured("at the earliest", NEUTRAL, custom__lineWidth=1)],
            ),
            timeseries(
                "Host leak rate",
                "Growth that load does not explain, drawn only while a role is growing or leaking.",
                [query(f"headroom_host_leak_bytes_per_second{{{TARGET}}}", "{{process}}")],
                unit="binBps",
                noValue="none known",
                overrides=ROLE_LINES,
            ),
            state_timeline(
                "Host leak state over time",
                "Each role's state as the detector saw it.",
                [query(leak_state("headroom_host_leak_state", TARGET, "process"), "{{process}}")],
                [STATE_VALUES],
                height=6,
            ),
        ],
    )


def gpu_health() -> Row:
    """Return the hardware's own troubles."""
    return Row(title="GPU health", collapsed=True, panels=[*_physics(), *_troubles(), _asleep()])


def _asleep() -> Json:
    return timeseries(
        "Kept by an engine that sleeps",
        "What the engine holds of each GPU asleep, until the next sleep: more at each sleep is a leak.",
        [of_gpus(f"headroom_sleep_residue_bytes{{{GPU}}}")],
        unit="bytes",
        width=8,
        noValue="has not slept",
    )


def _physics() -> list[Json]:
    return [
        timeseries(
            "Utilization, with load",
            "The share of time in which the GPU ran something, by its driver.",
            [of_gpus(f"headroom_gpu_utilization_ratio{{{GPU}}}"), RUNNING],
            unit="percentunit",
            figures=MEAN_AND_HIGHEST,
            width=8,
            custom={"axisSoftMin": 0, "axisSoftMax": 1},
            overrides=[on_the_right("running requests", RUNNING_COLOUR)],
        ),
        timeseries(
            "Temperature",
            "The GPU's core; above 87 °C, the dashed line, it begins to slow down.",
            [of_gpus(f"headroom_gpu_temperature_celsius{{{GPU}}}")],
            unit="celsius",
            figures=MEAN_AND_HIGHEST,
            width=8,
            thresholds=steps((None, NEUTRAL), (87, BAD)),
            custom={"thresholdsStyle": {"mode": "dashed"}, "axisSoftMin": 20, "axisSoftMax": 95},
        ),
        timeseries(
            "Power",
            "What the GPU draws.",
            [of_gpus(f"headroom_gpu_power_watts{{{GPU}}}")],
            unit="watt",
            figures=MEAN_AND_HIGHEST,
            width=8,
            min=0,
        ),
    ]


def _troubles() -> list[Json]:
    return [
        state_timeline(
            "GPUs that answer",
            "Whether each GPU can be read; a lost one stays red until it is reset.",
            [of_gpus(f"max by (instance, gpu, uuid) (headroom_gpu_up{{{GPU}}})")],
            [values((0, "lost", BAD), (1, "answers", GOOD))],
            width=8,
            height=8,
        ),
        stat(
            "XID errors since the sidecar started",
            "Errors the driver reported, by number; 48, 62, 64, 74, 79, 95, 119 and 120 are fatal.",
            [of_gpus(f"sum by (gpu, uuid, xid) (headroom_gpu_xid_errors_total{{{GPU}}})", "GPU {{gpu}} XID {{xid}}")],
            unit="short",
            width=8,
            height=8,
            noValue="none known",
            thresholds=steps((None, NEUTRAL), (1, BAD)),
        ),
    ]


def sidecar() -> Row:
    """Return whether what is above can be trusted."""
    return Row(title="Can I trust this page? The sidecar itself", collapsed=True, panels=[*_readings(), *_itself()])


def _readings() -> list[Json]:
    failures = f"headroom_source_failures_total{{{TARGET}}}"
    return [
        state_timeline(
            "Sources",
            "Whether the last reading of vLLM's page, of the GPU driver and of /proc succeeded.",
            [
                query(f"max by (instance, source) (headroom_source_up{{{TARGET}}})", "{{source}}"),
            ],
            [values((0, "fails", BAD), (1, "answers", GOOD))],
            width=12,
            height=6,
        ),
        timeseries(
            "Failed readings per second",
            "By source and reason.",
            [query(f"sum by (source, reason) (rate({failures}[$__rate_interval])) > 0", "{{source}} {{reason}}")],
            unit="short",
            height=6,
            bars=True,
            min=0,
            noValue="none",
            color={"mode": "shades", "fixedColor": BAD},
        ),
    ]


def _itself() -> list[Json]:
    return [
        timeseries(
            "Age of the sample and duration of readings",
            "How old the newest sample was at each scrape, and how long each source took to answer.",
            [
                query(f"max(headroom_sample_age_seconds{{{TARGET}}})", "age of the sample"),
                query(f"max by (source) (headroom_source_read_seconds{{{TARGET}}})", "reading {{source}}"),
            ],
            unit="s",
            min=0,
            overrides=[
                coloured("age of the sample", NEUTRAL),
                coloured("reading engine", ENGINE_COLOUR),
                coloured("reading nvml", "#009e73"),
                coloured("reading process", OTHER_COLOUR),
                coloured("reading probe", "#f0e442"),
            ],
        ),
        timeseries(
            "Memory of the sidecar",
            "Resident memory of vllm-headroom itself.",
            [query(f"process_resident_memory_bytes{{{TARGET}}}", "{{instance}}")],
            unit="bytes",
            width=6,
            min=0,
        ),
        table(
            "Inputs the engine does not offer",
            "What the engine's page does not have; what is derived from it is absent. Another version may have it.",
            [query(f"max by (input) (headroom_input_available{{{TARGET}}}) == 0")],
            [{"id": "organize", "options": {"excludeByName": {"Time": True, "Value": True}}}],
            width=6,
            noValue="none known",
        ),
    ]
