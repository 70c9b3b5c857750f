"""What does the engine's page offer, and what has to be set beside it?"""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection
from typing import Final

from vllm_headroom import catalog
from vllm_headroom.commands.doctor.fixes import VLLM, Check, Fix, Status, setting
from vllm_headroom.commands.doctor.look import Sight
from vllm_headroom.derive.discrepancy import discrepancy
from vllm_headroom.derive.kv_cache import kv_cache
from vllm_headroom.model import INPUTS, EnginePage, Failure, Gpu, GpuMemory, GpuReading, Snapshot
from vllm_headroom.parse.page import profile_of
from vllm_headroom.parse.profile import Profile
from vllm_headroom.parse.profiles.vllm import VLLM as VLLM_ENGINE
from vllm_headroom.sizing.footprint import token_bytes
from vllm_headroom.sizing.shape import ModelShape
from vllm_headroom.units import GIB
from vllm_headroom.vocabulary import Attribution

NO_PAGE: Final = "needs the engine's page, see engine"
WITHOUT_A_REPORT: Final = tuple(
    metric.name for metric in (catalog.MEMORY_REPORTED, catalog.MEMORY_DISCREPANCY, catalog.MEMORY_DISCREPANCY_RATIO)
)
A_GPU: Final = Gpu(
    reading=GpuReading(
        index=0,
        uuid="",
        name="",
        memory=GpuMemory(total_bytes=GIB, used_bytes=0, free_bytes=GIB, reserved_bytes=0),
    ),
    attribution=Attribution.ASSUMED,
)
NEWER: Final = Fix(where="in vLLM's image", lines=("# 0.11.1 or newer, which offers all of them",))
TAKE_OUT: Final = Fix(where=f"{VLLM}, to take out", lines=("--kv-cache-memory-bytes",))


WITHOUT_BYTES: Final = (catalog.ENGINE_KV_CAPACITY_BYTES.name, catalog.ENGINE_KV_BYTES_PER_REQUEST.name)
TELL_KV_BYTES: Final = (
    setting("HEADROOM_MODEL_CONFIG=/models/MODEL/config.json  # of the model that is served, where it can be read"),
    setting(
        "HEADROOM_KV_BYTES_PER_TOKEN=131072",
        "# 2 x layers x KV heads x head size x bytes of a value: yours are in the model's config.json",
        "# 131072 is Llama 3.1 8B in 16 bits: 2 x 32 x 8 x 128 x 2",
    ),
)
SERIES: Final = {
    each.name: made
    for field, each in INPUTS.items()
    if (made := tuple(m for m in catalog.METRICS if field in m.needs or m.name == each.metric))
}
"""What is made of each input, and absent without it. Of the inputs that are not here, each has others that stand in for
it, and what the engine reports of its memory is looked at by itself."""


def engine_inputs(sight: Sight) -> Check:
    """Tell which inputs the page does not offer, and which series are absent for it."""
    page = sight.page
    if isinstance(page, Failure) or not page.engines:
        return Check(Status.UNKNOWN, NO_PAGE)
    offered = f"{sum(found for _, found in page.inputs)} of {len(page.inputs)} inputs offered"
    wanted = needed(page)
    profile = profile_of(page.profile)
    spare = ", ".join(name for name, found in page.inputs if not found and name not in SERIES)
    details = (
        *((f"not offered, and no series is absent for it: {spare}",) if spare else ()),
        *(f"{profile.product} does not tell {name}: {why}" for name, why in profile.absent if name in SERIES),
    )
    if not wanted:
        return Check(Status.OK, offered, details=details)
    has_served = any(engine.prompt_tokens_total for engine in page.engines)
    later = "" if has_served else "; no request has been served yet, and some come with the first"
    return Check(
        Status.MISSING if has_served else Status.UNKNOWN,
        f"{offered}, not {', '.join(wanted)}{later}",
        details=details,
        absent=lost(wanted, page),
        fixes=(_newer(profile) if has_served else _first_request(sight, page),),
    )


def _newer(profile: Profile) -> Fix:
    if profile.name == VLLM_ENGINE.name:
        return NEWER
    return Fix(where=f"in {profile.product}'s image", lines=("# a newer version, where it has one that offers them",))


def reported_memory(sight: Sight, configured_bytes: int | None) -> Check:
    """Tell what there is to compare the engine's memory with: ask the derivation, for a GPU of one's own making."""
    page = sight.page
    if isinstance(page, Failure) or not page.engines:
        return Check(Status.UNKNOWN, NO_PAGE)
    snapshot = Snapshot(time_seconds=0, monotonic_seconds=0, engines=page, gpus=(A_GPU,), processes=())
    for sample in discrepancy(snapshot, configured_bytes=configured_bytes):
        return Check(Status.OK, _report(sample.labels[-1], sample.value))
    is_given = any(engine.kv_cache_memory_bytes is not None for engine in page.engines)
    product = profile_of(page.profile).product
    given = f"{product}'s KV cache was given its size, as by --kv-cache-memory-bytes"
    untold = f"{product} does not tell one gpu_memory_utilization"
    return Check(
        Status.MISSING,
        f"{given if is_given else untold}, so that there is no budget to compare what it holds with",
        absent=WITHOUT_A_REPORT,
        fixes=(
            setting("HEADROOM_REPORTED_BYTES=72GiB  # what it should hold of each GPU"),
            *((TAKE_OUT,) if is_given else ()),
        ),
    )


def _first_request(sight: Sight, page: EnginePage) -> Fix:
    body = json.dumps({"model": page.engines[0].model_name or "MODEL", "prompt": "Hi", "max_tokens": 1})
    url = shlex.quote(str(sight.url.join("v1/completions")))
    return Fix(
        where="with a first request",
        lines=(f"curl {url} -H 'Content-Type: application/json' -d {shlex.quote(body)}",),
    )


def _report(basis: str, value: float) -> str:
    told = {
        "metric": f"the engine reports {value / GIB:.1f} GiB on each GPU",
        "budget": f"the engine's budget is {value / GIB:.0%} of each GPU (gpu_memory_utilization)",
        "configured": f"HEADROOM_REPORTED_BYTES is {value / GIB:.1f} GiB on each GPU",
    }
    return told[basis]


def needed(page: EnginePage) -> tuple[str, ...]:
    """Return the inputs that the page does not offer, engines of its kind do, and something is made of."""
    never = dict(profile_of(page.profile).absent)
    return tuple(name for name, found in page.inputs if not found and name in SERIES and name not in never)


def lost(inputs: Collection[str], page: EnginePage) -> tuple[str, ...]:
    """Return the series that are absent without these inputs, in the order of the daemon's page."""
    without = {metric for name in inputs for metric in SERIES[name]}
    if ("prefix_cache_hit_rate", True) in page.inputs:
        without.discard(catalog.ENGINE_PREFIX_HIT_RATIO)
    return tuple(metric.name for metric in catalog.METRICS if metric in without)


def kv_bytes(sight: Sight, bytes_per_token: float | None, model: ModelShape | None) -> Check:
    """Tell whether the KV cache can be known in bytes: with a model, ask the derivation; it works without them."""
    if bytes_per_token is not None:
        return Check(Status.OK, f"{bytes_per_token:g} bytes per token are set")
    if model is None:
        text = "HEADROOM_MODEL_CONFIG is not set: the KV cache is told in tokens, not in bytes"
        return Check(Status.NOT_APPLICABLE, text, absent=WITHOUT_BYTES, fixes=TELL_KV_BYTES)
    if isinstance(sight.page, Failure) or not sight.page.engines:
        return Check(Status.UNKNOWN, NO_PAGE)
    gpus = sight.readings if isinstance(sight.readings, Failure) else sight.gpus
    snapshot = Snapshot(time_seconds=0, monotonic_seconds=0, engines=sight.page, gpus=gpus, processes=())
    told = {sample.metric for sample in kv_cache(snapshot, bytes_per_token=None, model=token_bytes(model))}
    if catalog.ENGINE_KV_CAPACITY_BYTES in told:
        return Check(Status.OK, "HEADROOM_MODEL_CONFIG tells the bytes per token")
    text = (
        "HEADROOM_MODEL_CONFIG does not tell the bytes of this engine's KV cache: its dtype or its GPUs are unknown,"
        " or its layers keep a window or a state"
    )
    return Check(Status.MISSING, text, absent=WITHOUT_BYTES, fixes=TELL_KV_BYTES)
