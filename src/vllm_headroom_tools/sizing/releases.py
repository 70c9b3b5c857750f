"""The differences between vLLM releases in how they divide a GPU's memory."""

import re
from collections.abc import Mapping
from typing import Final

from msgspec import Struct
from msgspec.structs import replace


class Release(Struct, frozen=True, kw_only=True):
    """A vLLM release and the rules that apply on startup."""

    # The version without the patch level, such as 0.33.
    version: str
    # The default of --gpu-memory-utilization.
    utilization: float
    # Whether the estimate of CUDA graphs is subtracted from the KV cache.
    has_graphs_in_budget: bool
    # Whether capturing graphs fails if more sequences are allowed than there are state blocks.
    has_state_check: bool
    # Whether a block as large as a state must fit in a batch.
    has_aligned_block_check: bool
    # Whether prefix caching is enabled by default for state-space models.
    has_prefix_states: bool
    # Whether Mamba-2 keeps the state at the end of the prompt.
    has_state_checkpoints: bool
    # Whether vLLM's error message contains the misspelling "the models's max seq len".
    has_misspelt_refusal: bool
    # Whether YaRN multiplies the original length instead of leaving the model's length unchanged.
    has_multiplied_yarn: bool
    # Whether cards with 160 GiB or more have special defaults.
    has_largest_defaults: bool
    # The model classes that the second model runner serves by default.
    second_runner_classes: frozenset[str]
    # Whether the second runner serves these classes only without quantisation and experts.
    has_plain_second_runner: bool
    # Whether the second runner also serves all other models without experts and states. Whether it
    # serves every model.
    has_dense_second_runner: bool
    has_only_second_runner: bool
    # The supported speculation methods, and the methods that require the first model runner.
    speculation_methods: frozenset[str]
    first_runner_methods: frozenset[str]
    # Whether the second runner estimates its CUDA graphs. In earlier releases, the second runner's
    # budget does not include graphs.
    has_second_runner_graphs: bool
    # Whether the second runner profiles the image encoder.
    has_second_runner_encoder: bool
    # Whether vLLM computes the KV cache's size from the memory consumed during the start. The
    # consumed memory includes unused memory that torch keeps.
    counts_consumed_memory: bool
    # Whether the second runner's profile includes the 32-bit logits.
    has_wide_profile: bool


OLDEST_MINOR: Final = 19
NEWEST_MINOR: Final = 33
"""The minor versions of the oldest and the newest known release."""

UTILIZATION_SINCE: Final = 20
"""The default is 0.92 instead of 0.9 (config/cache.py, `gpu_memory_utilization`)."""

GRAPHS_SINCE: Final = 20
"""envs.py, `VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS`: on in 0.20.0, off in 0.19.0."""

STATE_CHECK_SINCE: Final = 20
"""config/compilation.py: 0.20.0 contains "exceeds available Mamba cache blocks", but 0.19.0
captures smaller graphs instead (`adjust_cudagraph_sizes_for_mamba_cache`).
"""

ALIGNED_BLOCK_CHECK_UNTIL: Final = 26
"""config/vllm.py, `validate_block_size`: "In Mamba cache align mode, block_size" is present in
0.26.0. In 0.27.0, it is missing.
"""

PREFIX_STATES_SINCE: Final = 28
"""engine/arg_utils.py, `default_prefix_caching`: no "not model_config.is_hybrid" in 0.28.0."""

STATE_CHECKPOINTS_SINCE: Final = 29
"""v1/kv_cache_interface.py: `num_prefill_checkpoint_blocks` is present in 0.29.0, but not in
0.28.0.
"""

MISSPELT_UNTIL: Final = 21
"""v1/core/kv_cache_utils.py: "model's" since 0.22.0."""

MULTIPLIED_YARN_UNTIL: Final = 29
"""config/model.py, `_get_and_verify_max_len`: "original_max_position_embeddings" is used for "yarn"
in 0.29.0, but not in 0.30.0.
"""

LARGEST_DEFAULTS_SINCE: Final = 28
"""engine/arg_utils.py, `get_batch_defaults`: "device_memory >= 160 * GiB_bytes" is present in
0.28.0, but not in 0.27.0.
"""

SECOND_RUNNER_CLASSES: Final = {
    22: frozenset({"Qwen3ForCausalLM"}),
    23: frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM"}),
    24: frozenset(
        {
            "DeepseekV2ForCausalLM",
            "GraniteMoeForCausalLM",
            "LlamaForCausalLM",
            "MistralForCausalLM",
            "Qwen2MoeForCausalLM",
            "Qwen3ForCausalLM",
        }
    ),
    25: frozenset({"DeepseekV2ForCausalLM", "GraniteMoeForCausalLM", "Qwen2MoeForCausalLM"}),
    26: frozenset(
        {
            "DeepseekV2ForCausalLM",
            "GraniteMoeForCausalLM",
            "InklingForCausalLM",
            "InklingForConditionalGeneration",
            "LongcatFlashNgramForCausalLM",
            "Qwen2MoeForCausalLM",
        }
    ),
    27: frozenset({"KimiK3ForConditionalGeneration"}),
    28: frozenset({"DeepseekV4ForCausalLM"}),
}
"""config/vllm.py, `DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES`. 0.27 and 0.28 extend the previous
release's list. Since 0.29, there is no such list.
"""

ADDING_CLASSES_SINCE: Final = 27

PLAIN_SECOND_RUNNER_UNTIL: Final = 23
"""config/vllm.py, `_is_default_v2_model_runner_model`: "not model_config.is_moe and not
model_config.is_quantized" is present in 0.23.0, but not in 0.24.0.
"""

DENSE_SECOND_RUNNER_SINCE: Final = 25
"""config/vllm.py: 0.25.0 contains "or not model_config.is_moe", without "is_hybrid"."""

ONLY_SECOND_RUNNER_SINCE: Final = 29
"""config/vllm.py, `use_v2_model_runner`: since 0.29.0, the second runner serves every model whose
features it supports.
"""

NGRAM_METHODS: Final = frozenset({"ngram", "ngram_gpu"})
SEPARATE_HEADS: Final = frozenset({"medusa", "mlp_speculator"})
OWN_CODE: Final = frozenset({"suffix", "custom_class"})
OLD_FIRST_RUNNER_METHODS: Final = NGRAM_METHODS | SEPARATE_HEADS | OWN_CODE | {"draft_model"}
FIRST_RUNNER_METHODS: Final = {
    31: OLD_FIRST_RUNNER_METHODS - {"draft_model"},
    32: SEPARATE_HEADS | OWN_CODE,
    33: OWN_CODE,
}
"""config/vllm.py, `_get_v2_model_runner_unsupported_features`: "speculative method". Up to 0.30,
OLD_FIRST_RUNNER_METHODS applies.
"""

METHODS: Final = NGRAM_METHODS | {
    "draft_model",
    "eagle",
    "eagle3",
    "extract_hidden_states",
    "mtp",
    "suffix",
}
METHODS_SINCE: Final = {"dflash": 20, "custom_class": 22, "dspark": 25}
SEPARATE_HEADS_UNTIL: Final = 32
"""config/speculative.py, `SpeculativeMethod`: "medusa" and "mlp_speculator" are present in 0.32.0,
but not in 0.33.0.
"""

SECOND_RUNNER_GRAPHS_SINCE: Final = 29
"""v1/worker/gpu/model_runner.py, `profile_cudagraph_memory`: "return 0" up to 0.28.0."""

SECOND_RUNNER_ENCODER_SINCE: Final = 27
"""v1/worker/gpu/model_runner.py, `profile_run`: "profile_encoder_cache" since 0.27.0."""

CONSUMED_MEMORY_SINCE: Final = 27
"""utils/mem_utils.py, `memory_profiling`: "total_consumed" is present in 0.27.0, but not in 0.26.0.
"""

WIDE_PROFILE_SINCE: Final = 33
"""v1/worker/gpu/model_runner.py, `_dummy_sampler_run`: there is a second pass in 0.33.0, but not in
0.32.0.
"""

VERSION_PATTERN: Final = re.compile(r"v?0\.(\d{1,3})(?:\.\S*)?", re.ASCII)


def _list_second_runner_classes(minor: int) -> frozenset[str]:
    """Return the model classes that a release serves with the second runner by default."""
    classes = SECOND_RUNNER_CLASSES.get(minor, frozenset())
    if minor in SECOND_RUNNER_CLASSES and minor >= ADDING_CLASSES_SINCE:
        classes |= _list_second_runner_classes(minor - 1)
    return classes


def _list_speculation_methods(minor: int) -> frozenset[str]:
    """Return vLLM's names for the speculation methods that a release supports."""
    methods = METHODS | {name for name, since in METHODS_SINCE.items() if minor >= since}
    return methods | SEPARATE_HEADS if minor <= SEPARATE_HEADS_UNTIL else methods


def _build_release(minor: int) -> Release:
    """Return the rules of a vLLM release, derived from the releases that changed them."""
    return Release(
        version=f"0.{minor}",
        utilization=0.92 if minor >= UTILIZATION_SINCE else 0.9,
        has_graphs_in_budget=minor >= GRAPHS_SINCE,
        has_state_check=minor >= STATE_CHECK_SINCE,
        has_aligned_block_check=minor <= ALIGNED_BLOCK_CHECK_UNTIL,
        has_prefix_states=minor >= PREFIX_STATES_SINCE,
        has_state_checkpoints=minor >= STATE_CHECKPOINTS_SINCE,
        has_misspelt_refusal=minor <= MISSPELT_UNTIL,
        has_multiplied_yarn=minor <= MULTIPLIED_YARN_UNTIL,
        has_largest_defaults=minor >= LARGEST_DEFAULTS_SINCE,
        second_runner_classes=_list_second_runner_classes(minor),
        has_plain_second_runner=minor <= PLAIN_SECOND_RUNNER_UNTIL,
        has_dense_second_runner=minor >= DENSE_SECOND_RUNNER_SINCE,
        has_only_second_runner=minor >= ONLY_SECOND_RUNNER_SINCE,
        speculation_methods=_list_speculation_methods(minor),
        first_runner_methods=FIRST_RUNNER_METHODS.get(minor, OLD_FIRST_RUNNER_METHODS),
        has_second_runner_graphs=minor >= SECOND_RUNNER_GRAPHS_SINCE,
        has_second_runner_encoder=minor >= SECOND_RUNNER_ENCODER_SINCE,
        counts_consumed_memory=minor >= CONSUMED_MEMORY_SINCE,
        has_wide_profile=minor >= WIDE_PROFILE_SINCE,
    )


NEWEST_RELEASE: Final = _build_release(NEWEST_MINOR)


def parse_release(text: str) -> Release:
    """Return the release for a version such as 0.24 or v0.24.0.

    Raises ValueError if the text is not a version, or if the release is unknown.
    """
    match = VERSION_PATTERN.fullmatch(text.strip())
    if match is None:
        raise ValueError
    minor = int(match[1])
    if not OLDEST_MINOR <= minor <= NEWEST_MINOR:
        raise ValueError
    return _build_release(minor)


def apply_environment(release: Release, environment: Mapping[str, bool]) -> Release:
    """Return the rules for a start with these vLLM environment variables (envs.py)."""
    counts_graphs = environment.get("VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS")
    if counts_graphs is not None:
        release = replace(release, has_graphs_in_budget=counts_graphs)
    uses_second_runner = environment.get("VLLM_USE_V2_MODEL_RUNNER")
    if uses_second_runner is None:
        return release
    return replace(
        release,
        second_runner_classes=frozenset(),
        has_dense_second_runner=False,
        has_only_second_runner=uses_second_runner,
    )
