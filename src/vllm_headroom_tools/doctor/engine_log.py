"""The check of the engine's own log."""

from typing import Final

from vllm_headroom.model import Failure, LogReading
from vllm_headroom_tools.doctor.fixes import POD, Check, Status, fix_setting, put

FROM_LOG: Final = ("headroom_engine_startup_bytes", "headroom_engine_refused_bytes")
"""The series that can only be derived from the engine's log."""

NO_LOG: Final = (
    "HEADROOM_ENGINE_LOG is not set: the sizes of a start and the causes of exits that only the"
    " engine's own log has are not known"
)

READ_LOG: Final = (
    put(
        POD,
        "the component engine-log, or sidecar.engineLog: true of the chart, with",
        "  - {name: HEADROOM_ENGINE_LOG, value: kubernetes}",
    ),
    put("in the sidecar's compose service", "volumes: [vllm-logs:/var/log/vllm:ro]"),
    fix_setting("HEADROOM_ENGINE_LOG=/var/log/vllm/*.log", "or HEADROOM_ENGINE_LOG=journal:UNIT"),
)


def check_log(reading: LogReading | Failure | None) -> Check:
    """Check whether the configured log can be read and is from an engine.

    The check is NOT_APPLICABLE if no log is configured.
    """
    if reading is None:
        return Check(Status.NOT_APPLICABLE, NO_LOG)
    if isinstance(reading, Failure):
        return Check(Status.MISSING, reading.message, absent=FROM_LOG, fixes=READ_LOG)
    start = reading.start
    if start is None:
        text = "it can be read, and has no line of an engine yet: check that it is the engine's"
        return Check(Status.UNKNOWN, text, absent=FROM_LOG)
    version = "" if start.version is None else f" {start.version}"
    model = "" if start.model is None else f" of {start.model}"
    state = "serves" if start.has_served else f"is in the phase {start.phase}"
    return Check(Status.OK, f"a start of {start.engine}{version}{model}, which {state}")
