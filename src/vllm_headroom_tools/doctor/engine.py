"""Checks of the engine's page, its options, and the probe in its processes."""

import json
import shlex
import time
from collections.abc import Collection, Iterator
from typing import Final

from vllm_headroom import catalog
from vllm_headroom.derive.discrepancy import derive_discrepancy
from vllm_headroom.derive.kv_cache import derive_kv_cache
from vllm_headroom.derive.pages import list_named
from vllm_headroom.derive.probe_files import classify_probe
from vllm_headroom.model import (
    INPUTS,
    EngineOptions,
    EnginePage,
    Failure,
    Gpu,
    GpuMemory,
    GpuReading,
    Metric,
    ProbedProcess,
    Snapshot,
    TokenBytes,
)
from vllm_headroom.parse.engines import explain_empty_page, find_profile
from vllm_headroom.parse.profiles.vllm import VLLM
from vllm_headroom.scrape.http.reader import find_port
from vllm_headroom.units import GIB
from vllm_headroom.vocabulary import Attribution, Reason
from vllm_headroom_tools.doctor import fixes
from vllm_headroom_tools.doctor.fixes import Check, Fix, Status, Survey, fix_setting, put
from vllm_headroom_tools.look import LOOK_SECONDS
from vllm_headroom_tools.versions import describe_fault, list_faults, parse_version

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
    "headroom_engine_unused_bytes",
    "headroom_memory_*_bytes",
    "headroom_memory_discrepancy_ratio",
    "headroom_memory_per_*",
    "headroom_sample_skew_seconds",
)
"""The series that the daemon cannot export without the engine's page; `*` matches any text."""

WITHOUT_AN_ANSWER: Final = (
    *WITHOUT_THE_PAGE,
    "headroom_leak_bound_bytes",
    "headroom_leak_bytes_*",
    "headroom_leaked_bytes",
    "headroom_time_to_oom_*",
)
"""The series that are absent if the engine does not respond. Some need its page. The leak series
appear only after it has served requests.
"""

SET_ENGINE_URL: Final = fix_setting(
    "HEADROOM_ENGINE_URL=http://HOST:PORT/metrics",
    "# HOST is 127.0.0.1 in the same pod, PORT is vLLM's --port, or 8000",
    "# trtllm-serve has its page at /prometheus/metrics",
)


def check_engine(survey: Survey) -> Check:
    """Check whether the page can be read and has an engine.

    The check reports the engine's version and models.
    """
    page = survey.page
    if isinstance(page, Failure):
        return _check_unreadable(survey, page)
    if page.engines:
        return Check(Status.OK, f"{survey.url} answers: {_describe_engines(survey, page)}")
    # The server responds but is of an unknown kind. The address is most likely wrong.
    details: tuple[str, ...] = ()
    ways: tuple[Fix, ...] = (_fix_address(survey),)
    # The page of this vLLM engine has none of vLLM's series, so the series have been turned off.
    if survey.version is not None:
        details = (f"the server calls itself version {survey.version}",)
        ways = (put(f"{fixes.VLLM}, to take out", "--disable-log-stats"), *ways)
    return Check(
        Status.MISSING,
        f"{survey.url} answers, but {explain_empty_page(page)}",
        details=details,
        absent=WITHOUT_THE_PAGE,
        fixes=ways,
    )


def _describe_engines(survey: Survey, page: EnginePage) -> str:
    """Describe a page's engines: their kind, version, models and number."""
    version = "version not reported"
    if survey.version:
        version = f"version {survey.version}"
    serving = "no model named before its first request"
    models = sorted({engine.model_name for engine in list_named(page)})
    if models:
        serving = f"model {', '.join(models)}"
    engines = f", {len(page.engines)} engines" if len(page.engines) > 1 else ""
    return f"{page.profile}, {version}, {serving}{engines}"


def _check_unreadable(survey: Survey, failure: Failure) -> Check:
    """Return the result for a page that cannot be read.

    The result is MISSING, or UNKNOWN after a timeout if the daemon would wait longer.
    """
    ways = fixes.find_engine_fixes(failure.reason, _fix_address(survey))
    hints: list[str] = []
    status = Status.MISSING
    daemon_waits_seconds = survey.daemon_waits_seconds
    # The doctor waits only briefly. A page that is too slow for the doctor may still be fast enough
    # for the daemon.
    if failure.reason is Reason.TIMEOUT and daemon_waits_seconds > LOOK_SECONDS:
        status = Status.UNKNOWN
        hints.append(
            f"the daemon waits {daemon_waits_seconds:g} s, this command {LOOK_SECONDS:g} s"
        )
    is_elsewhere = survey.served_port not in {None, find_port(survey.url)}
    has_processes = not isinstance(survey.processes, Failure) and bool(survey.processes.engine)
    if is_elsewhere:
        hints.append(f"an engine that runs here serves port {survey.served_port}")
    elif failure.reason is Reason.UNREACHABLE and has_processes:
        hints.append(
            "its processes run here: while an engine loads its model, which can take minutes, it"
            " does not listen"
        )
        ways = (put("by waiting for this in vLLM's log", "Application startup complete."), *ways)
    return Check(
        status,
        failure.message,
        details=tuple(hints),
        absent=WITHOUT_AN_ANSWER,
        fixes=ways,
    )


def _fix_address(survey: Survey) -> Fix:
    """Return the fix that sets the page's address.

    If an engine runs here on another port, the fix names that port.
    """
    if survey.served_port in {None, find_port(survey.url)}:
        return SET_ENGINE_URL
    return fix_setting(f"HEADROOM_ENGINE_URL={survey.url.copy_with(port=survey.served_port)}")


NO_PAGE: Final = "needs the engine's page, see engine"
WITHOUT_A_REPORT: Final = (
    catalog.MEMORY_REPORTED.name,
    catalog.MEMORY_DISCREPANCY.name,
    catalog.MEMORY_DISCREPANCY_RATIO.name,
    catalog.ENGINE_UNUSED.name,
)
# A fictitious GPU with 1 GiB, for which the engine's budget is derived.
A_GPU: Final = Gpu(
    reading=GpuReading(
        index=0,
        uuid="",
        name="",
        memory=GpuMemory(total_bytes=GIB, used_bytes=0, free_bytes=GIB, reserved_bytes=0),
    ),
    attribution=Attribution.ASSUMED,
)
WITHOUT_BYTES: Final = (
    catalog.ENGINE_KV_CAPACITY_BYTES.name,
    catalog.ENGINE_KV_BYTES_PER_REQUEST.name,
)
SET_KV_BYTES: Final = (
    fix_setting(
        "HEADROOM_MODEL_CONFIG=/models/MODEL/config.json"
        "  # of the model that is served, where it can be read"
    ),
    fix_setting(
        "HEADROOM_KV_BYTES_PER_TOKEN=131072",
        "# 2 x layers x KV heads x head size x bytes of a value: yours are in the model's"
        " config.json",
        "# 131072 is Llama 3.1 8B in 16 bits: 2 x 32 x 8 x 128 x 2",
    ),
)


def _list_series() -> dict[str, tuple[Metric, ...]]:
    """Return the series that depend on each input of the page.

    Inputs that no series needs are omitted.
    """
    series: dict[str, tuple[Metric, ...]] = {}
    for field, engine_input in INPUTS.items():
        metrics = tuple(
            # A series depends on the input that it exports. The series also depends on the facts
            # from which it is computed.
            metric
            for metric in catalog.METRICS
            if field in metric.needs or metric.name == engine_input.metric
        )
        if metrics:
            series[engine_input.name] = metrics
    return series


SERIES: Final = _list_series()
"""The series that depend on each input. Inputs that no series needs have no entry. Neither have the
inputs with the engine's own memory figures. The check `reported_memory` covers them.
"""


def check_engine_inputs(survey: Survey) -> Check:
    """Check which inputs are missing on the page, and which series are therefore absent.

    The check is UNKNOWN if there is no page. The check is OK if no series needs the missing inputs,
    or if this kind of engine never exports these inputs. If inputs are missing before the first
    request, the check is UNKNOWN.
    """
    page = survey.page
    if isinstance(page, Failure) or not page.engines:
        return Check(Status.UNKNOWN, NO_PAGE)
    profile = find_profile(page.profile)
    missing = [name for name, is_offered in page.inputs if not is_offered]
    offered = f"{len(page.inputs) - len(missing)} of {len(page.inputs)} inputs offered"
    details = []
    # A missing input on which no series depends is not a problem.
    unused = [name for name in missing if name not in SERIES]
    if unused:
        details.append(f"not exported, and no metric depends on it: {', '.join(unused)}")
    for name, reason in profile.absent:
        if name in SERIES:
            details.append(f"{profile.product} does not export {name}: {reason}")
    never_exported = dict(profile.absent)
    # If this kind of engine lacks an input, a newer version does not help.
    wanted = [name for name in missing if name in SERIES and name not in never_exported]
    if not wanted:
        return Check(Status.OK, offered, details=tuple(details))
    text = f"{offered}, not {', '.join(wanted)}"
    # Some inputs appear only after the first request. Before that request, they are not known to be
    # missing.
    if any(engine.prompt_tokens_total for engine in page.engines):
        status = Status.MISSING
        fix = put("in vLLM's image", "# 0.11.1 or newer, which offers all of them")
        if profile.name != VLLM.name:
            newer = "# a newer version, where it has one that offers them"
            fix = put(f"in {profile.product}'s image", newer)
    else:
        status = Status.UNKNOWN
        text += "; no request has been served yet, and some appear with the first"
        fix = _fix_by_request(survey, page)
    return Check(
        status,
        text,
        details=tuple(details),
        absent=list_lost_series(wanted, page),
        fixes=(fix,),
    )


def _fix_by_request(survey: Survey, page: EnginePage) -> Fix:
    """Return the fix that sends a first request to the engine."""
    model = page.engines[0].model_name or "MODEL"
    body = json.dumps({"model": model, "prompt": "Hi", "max_tokens": 1})
    url = shlex.quote(str(survey.url.join("v1/completions")))
    header = "-H 'Content-Type: application/json'"
    return put("with a first request", f"curl {url} {header} -d {shlex.quote(body)}")


def check_reported_memory(survey: Survey, configured_bytes: int | None) -> Check:
    """Check whether the engine's memory has a budget, and report the budget's source.

    The check runs the daemon's derivation on a fictitious GPU. It is UNKNOWN if there is no page.
    """
    page = survey.page
    if isinstance(page, Failure) or not page.engines:
        return Check(Status.UNKNOWN, NO_PAGE)
    snapshot = Snapshot(
        time_seconds=0, monotonic_seconds=0, engines=page, gpus=(A_GPU,), processes=()
    )
    for sample in derive_discrepancy(snapshot, configured_bytes=configured_bytes):
        reported_gib = sample.value / GIB
        texts_by_source = {
            "metric": f"the engine reports {reported_gib:.1f} GiB on each GPU",
            # The fictitious GPU has 1 GiB, so the budget in GiB equals the share.
            "budget": (
                f"the engine's budget is {reported_gib:.0%} of each GPU (gpu_memory_utilization)"
            ),
            "configured": f"HEADROOM_REPORTED_BYTES is {reported_gib:.1f} GiB on each GPU",
        }
        source = sample.labels[-1]
        return Check(Status.OK, texts_by_source[source])
    product = find_profile(page.profile).product
    problem = f"{product} does not report one gpu_memory_utilization"
    way = fix_setting("HEADROOM_REPORTED_BYTES=72GiB  # what it should hold of each GPU")
    ways: tuple[Fix, ...] = (way,)
    # With this option, vLLM ignores gpu_memory_utilization, so there is no budget.
    if any(engine.kv_cache_memory_bytes is not None for engine in page.engines):
        problem = f"{product}'s KV cache was given its size, as by --kv-cache-memory-bytes"
        ways = (way, put(f"{fixes.VLLM}, to take out", "--kv-cache-memory-bytes"))
    return Check(
        Status.MISSING,
        f"{problem}, so there is no budget to compare its memory with",
        absent=WITHOUT_A_REPORT,
        fixes=ways,
    )


def list_lost_series(inputs: Collection[str], page: EnginePage) -> tuple[str, ...]:
    """Return the names of series that are absent without these inputs.

    The names are in the order of the daemon's page.
    """
    lost: set[Metric] = set()
    for name in inputs:
        lost.update(SERIES[name])
    # If the page reports the hit rate itself, the two counters are not needed.
    if ("prefix_cache_hit_rate", True) in page.inputs:
        lost.discard(catalog.ENGINE_PREFIX_HIT_RATIO)
    return tuple(metric.name for metric in catalog.METRICS if metric in lost)


def check_kv_bytes(
    survey: Survey, bytes_per_token: float | None, configured: TokenBytes | None
) -> Check:
    """Check whether the KV cache size in bytes is known.

    The daemon computes the size from the configured bytes per token. Without this setting, the
    daemon uses the configured model. If neither works and no model is configured, the check is
    NOT_APPLICABLE. The check is not MISSING, because the size is optional. The check is UNKNOWN if
    there is no page.
    """
    if bytes_per_token is not None:
        return Check(Status.OK, f"{bytes_per_token:g} bytes per token are set")
    status = Status.MISSING if configured else Status.NOT_APPLICABLE
    model = configured or survey.token_bytes
    if model is None:
        text = (
            "HEADROOM_MODEL_CONFIG is not set and the model's folder not visible: the KV cache is"
            " reported in tokens"
        )
        return Check(status, text, absent=WITHOUT_BYTES, fixes=SET_KV_BYTES)
    if isinstance(survey.page, Failure) or not survey.page.engines:
        return Check(Status.UNKNOWN, NO_PAGE)
    # The derivation needs only the page and the GPUs; the times do not matter.
    gpus = survey.readings if isinstance(survey.readings, Failure) else survey.gpus
    snapshot = Snapshot(
        time_seconds=0, monotonic_seconds=0, engines=survey.page, gpus=gpus, processes=()
    )
    source = "the configuration of the model that vLLM loads"
    if configured:
        source = "HEADROOM_MODEL_CONFIG"
    samples = derive_kv_cache(snapshot, bytes_per_token=None, model=model)
    if any(sample.metric == catalog.ENGINE_KV_CAPACITY_BYTES for sample in samples):
        return Check(Status.OK, f"{source} gives the bytes per token")
    reason = "its dtype or its GPUs are unknown, or its layers keep a window or a state"
    text = f"{source} does not give the bytes of this engine's KV cache: {reason}"
    return Check(status, text, absent=WITHOUT_BYTES, fixes=SET_KV_BYTES)


FROM_PROBE: Final = (
    "headroom_engine_memory_bytes",
    "headroom_allocator_*",
    "headroom_leak_location",
)
NO_PROBE_DIR: Final = "HEADROOM_PROBE_DIR is not set: what only vLLM's processes know is not read"
NO_GPU: Final = (
    "torch's allocator reports nothing: vLLM has no GPU, has not used it yet, or may sleep"
)

NO_PEAKS: Final = (
    "peaks of its steps: none measured so far; HEADROOM_PROBE_PEAKS=on in vLLM's environment turns"
    " it on"
)
NO_HISTORY: Final = (
    "history of torch's allocations: not kept; HEADROOM_PROBE_SNAPSHOT=FOLDER in vLLM's environment"
    " turns it on"
)

INSTALL_PROBE: Final = (
    put(
        f"{fixes.POD}, after the container that runs vllm-headroom probe install (all in the"
        " component probe)",
        "containers:",
        "- name: vllm",
        "  env:",
        "  - {name: PYTHONPATH, value: /opt/headroom-probe}",
        "  - {name: HEADROOM_PROBE_DIR, value: /run/headroom-probe}",
        "  volumeMounts:",
        "  - {name: headroom-probe, mountPath: /opt/headroom-probe, readOnly: true}",
        "  - {name: headroom-probe-files, mountPath: /run/headroom-probe}",
    ),
    put(
        f"in vLLM's compose service (deploy/compose), and the folder {fixes.COMPOSE} too",
        "environment: {PYTHONPATH: /opt/headroom-probe, HEADROOM_PROBE_DIR: /run/headroom-probe}",
    ),
    put("where vLLM's environment has VLLM_PLUGINS", "VLLM_PLUGINS=...,headroom_probe"),
)
RESTART: Final = (
    put("by a restart of vLLM, once the error in its log is fixed", "headroom probe: ..."),
)


def check_probe(files: tuple[ProbedProcess, ...] | Failure | None, survey: Survey) -> Check:
    """Check that vLLM has loaded the probe and all its processes write files.

    The check is NOT_APPLICABLE if no probe folder is configured.
    """
    processes = () if isinstance(survey.processes, Failure) else survey.processes.engine
    probe = classify_probe(files, processes, time.time())
    if probe is None:
        return Check(Status.NOT_APPLICABLE, NO_PROBE_DIR)
    if isinstance(probe, Failure):
        return Check(Status.MISSING, probe.message, absent=FROM_PROBE, fixes=INSTALL_PROBE)
    # A file is from an earlier run if all present processes are younger.
    run_start_seconds = min((process.started_at_seconds for process in probe.present), default=0.0)
    stopped = [
        process
        for process in probe.others
        if process.stopped and process.started_at_seconds >= run_start_seconds
    ]
    details = [f"{_name_process(process)} has stopped: {process.stopped}" for process in stopped]
    # A stopped probe is already installed, but starts again only when vLLM restarts.
    ways = RESTART if probe.silent or stopped else INSTALL_PROBE
    if probe.present:
        text = _describe_present(probe.present)
        # Some processes write. The check still fails if even one process's probe is stopped or
        # silent.
        details += [f"{_name_process(process)} writes no longer" for process in probe.silent]
        if not details:
            return Check(Status.OK, text, details=_describe_measurements(probe.present))
        text += ", but not all"
    elif probe.silent:
        text = (
            "vLLM's processes have loaded it, and none writes any more: they are stopped or stuck"
        )
    else:
        text = (
            "none of vLLM's processes writes now: it is down, still starting, or was started"
            " without the probe"
        )
    return Check(Status.MISSING, text, details=tuple(details), absent=FROM_PROBE, fixes=ways)


def _describe_present(processes: Collection[ProbedProcess]) -> str:
    """Describe the processes in which the probe is active, and their vLLM version."""
    roles = fixes.count_roles(process.role for process in processes)
    versions = sorted({process.vllm_version for process in processes if process.vllm_version})
    text = f"it answers in {roles}"
    if versions:
        text += f" of vLLM {', '.join(versions)}"
    return text


def _describe_measurements(processes: Collection[ProbedProcess]) -> tuple[str, ...]:
    """Describe the probe's optional measurements, and how to turn them on."""
    workers = [process for process in processes if process.devices]
    if not workers:
        return (NO_GPU,)
    stopped_peaks = [
        f"{_name_process(worker)} no longer measures the peaks of its steps: {worker.peaks.stopped}"
        for worker in workers
        if worker.peaks is not None and worker.peaks.stopped is not None
    ]
    peaks_text = NO_PEAKS
    if any(worker.peaks is not None for worker in workers):
        peaks_text = "peaks of its steps: measured"
    history_text = NO_HISTORY
    if any(worker.history is not None for worker in workers):
        history_text = "history of torch's allocations: kept, for snapshots"
    return (*(stopped_peaks or (peaks_text,)), history_text)


def _name_process(process: ProbedProcess) -> str:
    return f"{process.role} (pid {process.pid} of its container)"


OPTIONS_NEVER_KNOWN: Final = {
    "disable_prefix_cache": "--no-enable-prefix-caching",
    "disable_prefix_caching": "--no-enable-prefix-caching",
    "enable_memory_budget": "--gpu-memory-utilization",
    "max_num_on_the_fly_batches": "--max-num-seqs",
    "chunked_prefill_max_len": "--max-num-batched-tokens",
    "kv_cache_memory": "--kv-cache-memory-bytes",
}
"""Options in guides and error messages that no version of vLLM has. Each is listed with the option
that has the intended effect.
"""


def find_visible_options(survey: Survey) -> EngineOptions | None:
    """Return the options of the local engine's command line, or None if not visible."""
    return None if isinstance(survey.processes, Failure) else survey.processes.options


def check_options(survey: Survey) -> Check:
    """Check the command line of the local engine for contradictions.

    The check's text shows the command line with secrets removed. The check is NOT_APPLICABLE if no
    command line is visible.
    """
    options = find_visible_options(survey)
    if options is None:
        return Check(Status.NOT_APPLICABLE, "no command line of a vLLM server is visible here")
    details: tuple[str, ...] = (options.command,)
    if options.config:
        details = (*details, f"{options.config} may set more, and is not read")
    contradictions = tuple(_list_contradictions(options, survey))
    if not contradictions:
        return Check(
            Status.OK,
            f"vLLM's command line sets {', '.join(options.option_names) or 'nothing'}",
            details=details,
        )
    change = put(fixes.VLLM, "# one of the two options, by the name that vLLM knows")
    return Check(
        Status.MISSING,
        "vLLM's command line contradicts itself",
        details=contradictions + details,
        fixes=(change,),
    )


def _list_contradictions(options: EngineOptions, survey: Survey) -> Iterator[str]:
    """Describe each option that is unknown, overridden, or different from the page."""
    for name in options.option_names:
        option = f"--{name.replace('_', '-')}"
        if name in OPTIONS_NEVER_KNOWN:
            yield f"no version of vLLM has {option}: {OPTIONS_NEVER_KNOWN[name]} does that"
        if f"no_{name}" in options.option_names:
            yield f"{option} and its --no- form are both given: the last one counts"
    if {"kv_cache_memory_bytes", "gpu_memory_utilization"} <= set(options.option_names):
        yield (
            "--kv-cache-memory-bytes is given, so --gpu-memory-utilization does not size the KV"
            " cache"
        )
    if options.gpu_memory_utilization is None or isinstance(survey.page, Failure):
        return
    # The page shows the value in effect. A value that differs from the command line may come from a
    # configuration file.
    page_ratios = {engine.gpu_memory_utilization_ratio for engine in survey.page.engines}
    if not page_ratios <= {None, options.gpu_memory_utilization}:
        ratio = max(filter(None, page_ratios))
        yield (f"the page says gpu_memory_utilization={ratio}, the command line another value")


def check_faults(survey: Survey) -> Check:
    """List the known faults in the engine's version that can occur with its options.

    The check is always OK, because the doctor cannot fix a known fault. It is NOT_APPLICABLE if the
    version is unknown.
    """
    version = None if survey.version is None else parse_version(survey.version)
    if version is None:
        return Check(Status.NOT_APPLICABLE, "the version is not known, nor which faults it has")
    options = find_visible_options(survey) or EngineOptions()
    faults = tuple(describe_fault(fault) for fault in list_faults(version, options.option_names))
    text = f"known faults of vLLM {survey.version} with these options: {len(faults) or 'none'}"
    return Check(Status.OK, text, details=faults)
