"""Is the engine's page there?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from vllm_headroom.commands.doctor.fixes import VLLM, Check, Fix, Status, engine_fixes, setting
from vllm_headroom.commands.doctor.look import Sight
from vllm_headroom.daemon.look import PATIENCE_SECONDS
from vllm_headroom.derive.page_facts import named
from vllm_headroom.model import EnginePage, Failure
from vllm_headroom.parse.page import nothing_found
from vllm_headroom.scrape.http.reader import port_of
from vllm_headroom.vocabulary import Reason

WITHOUT_THE_PAGE: Final = (
    "headroom_engine_info",
    "headroom_engine_awake",
    "headroom_engine_requests_*",
    "headroom_engine_p*",
    "headroom_engine_generation_tokens_total",
    "headroom_engine_kv_cache_*",
    "headroom_engine_additional_requests",
    "headroom_input_available",
    "headroom_leak_bytes_per_request",
    "headroom_load_stable",
    "headroom_memory_*",
    "headroom_sample_skew_seconds",
)
WITHOUT_AN_ANSWER: Final = (
    *WITHOUT_THE_PAGE,
    "headroom_leak_bytes_*",
    "headroom_leaked_bytes",
    "headroom_time_to_oom_*",
)
"""Nothing is said of leaks before the engine was seen to have served."""

SOMEWHERE: Final = setting(
    "HEADROOM_ENGINE_URL=http://HOST:PORT/metrics",
    "# HOST is 127.0.0.1 in the same pod, PORT is vLLM's --port, or 8000",
    "# trtllm-serve has its page at /prometheus/metrics",
)

WAIT: Final = Fix(where="by waiting for this in vLLM's log", lines=("Application startup complete.",))


def engine(sight: Sight) -> Check:
    """Tell whether the page can be read and is an engine's, and of which version."""
    if isinstance(sight.page, Failure):
        return _unreadable(sight, sight.page)
    if sight.page.engines:
        return Check(Status.OK, _answering(sight, sight.page))
    fixes = [_elsewhere(sight)]
    if sight.version is not None:
        fixes.insert(0, Fix(where=f"{VLLM}, to take out", lines=("--disable-log-stats",)))
    return Check(
        Status.MISSING,
        f"{sight.url} answers, but {nothing_found(sight.page)}",
        details=() if sight.version is None else (f"the server calls itself version {sight.version}",),
        absent=WITHOUT_THE_PAGE,
        fixes=tuple(fixes),
    )


def _answering(sight: Sight, page: EnginePage) -> str:
    what = f"version {sight.version}" if sight.version else "a version that it does not tell"
    models = sorted({engine.model_name for engine in named(page)})
    serving = f"model {', '.join(models)}" if models else "no model named before its first request"
    engines = f", {len(page.engines)} engines" if len(page.engines) > 1 else ""
    return f"{sight.url} answers: {page.profile}, {what}, {serving}{engines}"


def _unreadable(sight: Sight, failure: Failure) -> Check:
    gave_up = failure.reason is Reason.TIMEOUT and sight.daemon_waits_seconds > PATIENCE_SECONDS
    return Check(
        Status.UNKNOWN if gave_up else Status.MISSING,
        failure.message,
        details=tuple(_hints(sight, gave_up=gave_up)),
        absent=WITHOUT_AN_ANSWER,
        fixes=(*((WAIT,) if _is_loading(sight) else ()), *engine_fixes(failure.reason, _elsewhere(sight))),
    )


def _hints(sight: Sight, *, gave_up: bool) -> Iterator[str]:
    if gave_up:
        yield f"the daemon waits {sight.daemon_waits_seconds:g} s, this command {PATIENCE_SECONDS:g} s"
    if _is_loading(sight):
        yield "its processes run here: while an engine loads its model, which can take minutes, it does not listen"
    elif sight.served_port not in {None, port_of(sight.url)}:
        yield f"an engine that runs here serves port {sight.served_port}"


def _is_loading(sight: Sight) -> bool:
    """Tell whether nothing listens yet, and a vLLM that runs here may do so later."""
    if isinstance(sight.processes, Failure) or not sight.processes.engine or not isinstance(sight.page, Failure):
        return False
    return sight.page.reason is Reason.UNREACHABLE and sight.served_port in {None, port_of(sight.url)}


def _elsewhere(sight: Sight) -> Fix:
    """Return how to look for the page elsewhere: at the port of the engine that runs here, where that is another."""
    if sight.served_port in {None, port_of(sight.url)}:
        return SOMEWHERE
    return setting(f"HEADROOM_ENGINE_URL={sight.url.copy_with(port=sight.served_port)}")
