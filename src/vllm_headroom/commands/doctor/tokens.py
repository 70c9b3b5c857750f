"""Can the KV cache be known in bytes?"""

from __future__ import annotations

from typing import Final

from vllm_headroom import catalog
from vllm_headroom.commands.doctor.finding import Finding, Name, State
from vllm_headroom.commands.doctor.fixes import setting
from vllm_headroom.commands.doctor.look import Sight
from vllm_headroom.commands.doctor.offers import NO_PAGE
from vllm_headroom.derive.kv_cache import kv_cache
from vllm_headroom.model import Failure, Snapshot
from vllm_headroom.sizing.footprint import token_bytes
from vllm_headroom.sizing.shape import ModelShape

WITHOUT_BYTES: Final = (catalog.ENGINE_KV_CAPACITY_BYTES.name, catalog.ENGINE_KV_BYTES_PER_REQUEST.name)
FIXES: Final = (
    setting("HEADROOM_MODEL_CONFIG=/models/MODEL/config.json  # of the model that is served, where it can be read"),
    setting(
        "HEADROOM_KV_BYTES_PER_TOKEN=131072",
        "# 2 x layers x KV heads x head size x bytes of a value: yours are in the model's config.json",
        "# 131072 is Llama 3.1 8B in 16 bits: 2 x 32 x 8 x 128 x 2",
    ),
)


def kv_bytes(sight: Sight, bytes_per_token: float | None, model: ModelShape | None) -> Finding:
    """Tell whether the KV cache can be known in bytes: with a model, ask the derivation."""
    if bytes_per_token is not None:
        return Finding(name=Name.KV_BYTES, state=State.OK, text=f"{bytes_per_token:g} bytes per token are set")
    if model is None:
        return _missing("vLLM tells its KV cache in tokens, and how many bytes a token takes is not set")
    if isinstance(sight.page, Failure) or not sight.page.engines:
        return Finding(name=Name.KV_BYTES, state=State.UNKNOWN, text=NO_PAGE)
    gpus = sight.readings if isinstance(sight.readings, Failure) else sight.gpus
    snapshot = Snapshot(time_seconds=0, monotonic_seconds=0, engines=sight.page, gpus=gpus, processes=())
    told = {sample.metric for sample in kv_cache(snapshot, bytes_per_token=None, model=token_bytes(model))}
    if catalog.ENGINE_KV_CAPACITY_BYTES in told:
        return Finding(name=Name.KV_BYTES, state=State.OK, text="HEADROOM_MODEL_CONFIG tells the bytes per token")
    return _missing(
        "HEADROOM_MODEL_CONFIG does not tell the bytes of this engine's KV cache: its dtype or its GPUs are unknown,"
        " or its layers keep a window or a state"
    )


def _missing(text: str) -> Finding:
    return Finding(name=Name.KV_BYTES, state=State.MISSING, text=text, absent=WITHOUT_BYTES, fixes=FIXES)
