"""Does vLLM's command line contradict itself, and has this version known faults?"""

from collections.abc import Iterator
from typing import Final

from vllm_headroom.model import EngineOptions, Failure
from vllm_headroom_tools.doctor import fixes
from vllm_headroom_tools.doctor.fixes import Check, Status, Survey, put
from vllm_headroom_tools.versions import describe_fault, list_faults, parse_version

NEVER: Final = {
    "disable_prefix_cache": "--no-enable-prefix-caching",
    "disable_prefix_caching": "--no-enable-prefix-caching",
    "enable_memory_budget": "--gpu-memory-utilization",
    "max_num_on_the_fly_batches": "--max-num-seqs",
    "chunked_prefill_max_len": "--max-num-batched-tokens",
    "kv_cache_memory": "--kv-cache-memory-bytes",
}
"""Options that no version of vLLM has, although guides and error texts name them, and what does it."""


def read_options(survey: Survey) -> EngineOptions | None:
    """Return what the command line of the engine that runs here sets."""
    return None if isinstance(survey.processes, Failure) else survey.processes.options


def check_options(survey: Survey) -> Check:
    """Check the command line of the engine that runs here, which is shown without its secrets."""
    options = read_options(survey)
    if options is None:
        return Check(Status.NOT_APPLICABLE, "no command line of a vLLM server is visible here")
    shown = (options.command, *((f"{options.config} may set more, and is not read",) if options.config else ()))
    wrong = tuple(_list_contradictions(options, survey))
    if not wrong:
        return Check(Status.OK, f"vLLM's command line sets {', '.join(options.given) or 'nothing'}", details=shown)
    change = put(fixes.VLLM, "# one of the two options, by the name that vLLM knows")
    return Check(Status.MISSING, "vLLM's command line contradicts itself", details=(*wrong, *shown), fixes=(change,))


def _list_contradictions(options: EngineOptions, survey: Survey) -> Iterator[str]:
    for name in options.given:
        if name in NEVER:
            yield f"no version of vLLM has --{name.replace('_', '-')}: {NEVER[name]} does that"
        if f"no_{name}" in options.given:
            yield f"--{name.replace('_', '-')} and its --no- form are both given: the last one counts"
    if {"kv_cache_memory_bytes", "gpu_memory_utilization"} <= set(options.given):
        yield "--kv-cache-memory-bytes is given, so --gpu-memory-utilization does not size the KV cache"
    page = None if isinstance(survey.page, Failure) else survey.page
    shares = {engine.gpu_memory_utilization_ratio for engine in page.engines} if page else set()
    if options.gpu_memory_utilization is not None and not shares <= {None, options.gpu_memory_utilization}:
        yield f"the page says gpu_memory_utilization={max(filter(None, shares))}, the command line another value"


def check_faults(survey: Survey) -> Check:
    """List the known faults of the engine's version that can occur with its options."""
    version = None if survey.version is None else parse_version(survey.version)
    if version is None:
        return Check(Status.NOT_APPLICABLE, "the version is not known, nor which faults it has")
    given = (read_options(survey) or EngineOptions()).given
    known = tuple(map(describe_fault, list_faults(version, given)))
    text = f"known faults of vLLM {survey.version} with these options: {len(known) or 'none'}"
    return Check(Status.OK, text, details=known)
