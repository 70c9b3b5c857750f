"""How much a layer that keeps a state keeps of each sequence."""

from __future__ import annotations

from typing import Final

from vllm_headroom.sizing.fields import Config, needed, whole

INPUT_BYTES: Final = 2
STATE_BYTES: Final = 4
"""Of a value in a state of 32 bits: Nemotron-H's, unless it says otherwise (model_executor/models/config.py)."""


def state_bytes(config: Config) -> int | None:
    """Return the bytes of one sequence in one layer; None for a kind that is not known here.

    A state and the last inputs of a convolution (vLLM 0.32, model_executor/layers/mamba/mamba_utils.py,
    `MambaStateShapeCalculator`): the gated delta net of Qwen3-Next, Mamba-2 by its two namings, Mamba-1 of Jamba.
    """
    if "linear_num_value_heads" in config:
        keys = needed(config, "linear_num_key_heads") * needed(config, "linear_key_head_dim")
        heads, size = needed(config, "linear_num_value_heads"), needed(config, "linear_value_head_dim")
        inputs, state = 2 * keys + heads * size, heads * size * needed(config, "linear_key_head_dim")
        return _bytes(config, state, inputs, whole(config, "linear_conv_kernel_dim"))
    heads_found = whole(config, "mamba_n_heads", "mamba_num_heads")
    if heads_found is not None:
        width = heads_found * needed(config, "mamba_d_head", "mamba_head_dim")
        size = needed(config, "mamba_d_state", "ssm_state_size")
        inputs = width + 2 * (whole(config, "mamba_n_groups", "n_groups") or 1) * size
        return _bytes(config, width * size, inputs, whole(config, "mamba_d_conv", "conv_kernel"))
    if "mamba_expand" in config:
        width = needed(config, "mamba_expand") * needed(config, "hidden_size")
        return _bytes(config, width * needed(config, "mamba_d_state"), width, whole(config, "mamba_d_conv"))
    return None


def _bytes(config: Config, state: int, inputs: int, kernel: int | None) -> int:
    said = config.get("mamba_ssm_cache_dtype")
    in_full = said == "float32" or (said is None and config.get("model_type") == "nemotron_h")
    return state * (STATE_BYTES if in_full else INPUT_BYTES) + inputs * ((kernel or 1) - 1) * INPUT_BYTES
