"""The shape of a model, read from the configuration in its weights folder."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from vllm_headroom.text_file import read_file
from vllm_headroom_tools.sizing.compressed import has_compressed_cache, read_compressed_cache
from vllm_headroom_tools.sizing.config_fields import (
    ATTENTION_HEADS,
    EXPERT_INPUTS,
    HIDDEN_SIZE,
    KV_SHARING_LAYERS,
    MAMBA_2_HEADS,
    MODEL_LENGTH,
    SIZE_LIMIT,
    Config,
    read_integer,
    read_mapping,
)
from vllm_headroom_tools.sizing.encoder import Encoder, parse_encoder
from vllm_headroom_tools.sizing.footprint import ModelShape
from vllm_headroom_tools.sizing.layers import (
    FULL_KINDS,
    OVERRIDES,
    STATEFUL_KINDS,
    WINDOWED_KINDS,
    count_state_bytes,
    find_full_layer_override,
    list_layer_kinds,
    read_kv_heads,
    read_window_tokens,
)
from vllm_headroom_tools.sizing.parameters import (
    count_layer_parameters,
    count_side_values,
    read_expert_width,
    read_widest_mlp,
)
from vllm_headroom_tools.sizing.positions import count_position_values
from vllm_headroom_tools.sizing.quantisation import (
    read_head_bytes,
    read_kv_dtype_bytes,
    read_stored_bytes,
    read_weight_bytes,
)
from vllm_headroom_tools.sizing.sparse import read_sparse_index

CHECKED_MODEL_TYPES: Final = frozenset(
    {
        "arcee",
        "bert",
        "cohere",
        "cohere2",
        "deepseek_v2",
        "deepseek_v3",
        "ernie4_5",
        "ernie4_5_moe",
        "exaone4",
        "exaone_moe",
        "falcon",
        "falcon_h1",
        "gemma",
        "gemma2",
        "gemma3_text",
        "gemma3n_text",
        "gemma4_text",
        "glm",
        "glm4",
        "glm4_moe",
        "glm4_moe_lite",
        "gpt2",
        "gpt_bigcode",
        "gpt_neox",
        "gpt_oss",
        "gptj",
        "granite",
        "granitemoe",
        "helium",
        "jamba",
        "kimi_k2",
        "laguna",
        "llama",
        "llama4_text",
        "mimo_v2_flash",
        "minimax_m2",
        "ministral3",
        "mistral",
        "mixtral",
        "modernbert",
        "nemotron_h",
        "olmo",
        "olmo2",
        "olmo3",
        "olmoe",
        "opt",
        "persimmon",
        "phi",
        "phi3",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_moe",
        "qwen3_next",
        "qwen3_vl_moe_text",
        "qwen3_vl_text",
        "roberta",
        "seed_oss",
        "smollm3",
        "stablelm",
        "starcoder2",
        "xlm-roberta",
    }
)
"""Values of `model_type` whose KV cache is counted as in vLLM. The tests include a recording of a
model of each type.
"""

CLASS_DEFAULTS: Final[Mapping[str, Config]] = {
    "gemma2": {"sliding_window_pattern": 2},
    "gemma3_text": {
        "rope_local_base_freq": 10_000,
        "sliding_window_pattern": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
    },
    "cohere2": {"sliding_window_pattern": 4},
    "llama4_text": {"sliding_window_pattern": 4},
    "qwen3_next": {"full_attention_interval": 4},
}
"""Fields that published configurations omit, by `model_type`. The transformers class has defaults
for these fields.
"""

TIED_MODEL_TYPES: Final = frozenset(
    {
        "bloom",
        "cohere",
        "cohere2",
        "falcon",
        "gemma",
        "gemma2",
        "gpt2",
        "gpt_bigcode",
        "mpt",
        "opt",
    }
)
"""Model types that use the embedding as the output matrix unless the configuration says otherwise.
"""

TIED_PREFIXES: Final = ("gemma3", "gemma4")
"""Prefixes of more model types that use the embedding as the output matrix by default."""

ENCODER_ONLY_MODEL_TYPES: Final = frozenset(
    {
        "bert",
        "camembert",
        "distilbert",
        "ernie",
        "gte",
        "modernbert",
        "new",
        "nomic_bert",
        "roberta",
        "xlm-roberta",
    }
)
"""Model types that process a whole text in one pass. Therefore, they keep no keys and values (vLLM,
`EncoderOnlyAttentionSpec`).
"""

HEADLESS_CLASSES: Final = (
    "Model",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForEmbedding",
)
"""Name suffixes of classes that compute embeddings, classes or rewards. For these classes, vLLM
does not load the output matrix for tokens.
"""

GENERATING_CLASSES: Final = frozenset({"GPT2LMHeadModel", "ChatGLMModel", "LlavaLlamaModel"})
"""Classes that generate tokens even though their names end like those in HEADLESS_CLASSES."""

TEXT_PARTS: Final = (
    "text_config",
    "llm_config",
    "language_config",
    "thinker_config",
    "transformer_layer_config",
)
"""The parts of a configuration that describe the language model. They occur in multimodal models,
and in draft heads in the speculators library's format. A `thinker_config` contains one of these
parts.
"""

SPECULATIVE_LAYERS: Final = ("num_nextn_predict_layers", "mtp_num_hidden_layers")

LAYER_COUNT: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")

UNKNOWN_CACHE: Final = "what its attention keeps in the cache is not known here"

SOURCE_MODEL_TYPES: Final = frozenset(
    {
        "deepseek_ref",
        "deepseek_v32",
        "deepseek_v4",
        "glm_moe_dsa",
        "kimi_linear",
        "mimo",
        "minimax_m3",
        "minimax_m3_vl",
        "nemotron-nas",
        "step3p5",
        "step3p7",
    }
)
"""Values of `model_type` whose cache is counted according to the source code of vLLM 0.33. The
counts have not been compared with vLLM's results. vLLM needs a GPU to build these models.
"""

SERVED_BYTES: Final = 2.0
"""The bytes per unquantised parameter. vLLM serves 32-bit models with 16 bits per parameter
(config/model.py, `_resolve_auto_dtype`).
"""

YARN: Final = "yarn"

UNSCALED_ROTARIES: Final = frozenset(
    {"su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling", "mrope"}
)
"""Kinds of rotary embedding whose `factor` the model's length already includes (vLLM 0.32,
`_get_and_verify_max_len`).
"""

NAME_LIMIT: Final = 40
"""Our choice: the maximum number of characters that are shown of an unknown model type."""


def parse_model_config(
    text: str, overrides: Config | None = None, defaults: Config | None = None
) -> ModelShape | str:
    """Return the shape described by a config.json, or the problem as a sentence.

    The file uses the field names of Hugging Face transformers. For a multimodal model, the language
    part and the encoders are read. `overrides` replaces fields in the file, and `defaults` provides
    fields that it lacks.
    """
    try:
        root = json.loads(text)
    except (ValueError, RecursionError) as error:
        return f"it is not JSON: {error}"
    if not isinstance(root, dict):
        return "it is not a model's configuration, which is a JSON object"
    try:
        config = _merge_parts(root, overrides or {}, defaults or {})
        # Reject overrides other than those of the full-attention layers' heads. The figure would be
        # too low, and `plan` could say that a model fits when it does not.
        if config.get(OVERRIDES) and find_full_layer_override(config) is None:
            return f"{UNKNOWN_CACHE}: it has {OVERRIDES}"
        is_compressed = has_compressed_cache(config)
        if config.get("compress_ratios") and not is_compressed:
            return f"{UNKNOWN_CACHE}: it has compress_ratios"
        if config.get("index_head_dim") and not (config.get("kv_lora_rank") or is_compressed):
            return f"{UNKNOWN_CACHE}: it has index_head_dim"
        encoder = parse_encoder({**(defaults or {}), **root})
        # If the configuration has parts, use the class of the whole model.
        return _build_shape({**config, "architectures": root.get("architectures")}, encoder)
    except RecursionError:
        # Since Python 3.12, the json module accepts very deep nesting. Recursive Python functions
        # fail on it.
        return "it is not a model's configuration: it is nested too deeply"
    except ValueError as error:
        return f"it is not a model's configuration that is understood here: {error}"


def _merge_parts(root: Config, overrides: Config, defaults: Config) -> Config:
    """Return all fields of the language model in one mapping.

    From highest to lowest, the precedence is:

    - `overrides`
    - the language part
    - the defaults of its class
    - the root
    - `defaults`

    Null fields do not override anything.
    """
    language = _find_language_part(root)
    class_defaults = CLASS_DEFAULTS.get(str(language.get("model_type")), {})
    config = dict(defaults)
    for part in (root, class_defaults, language, overrides):
        config |= {name: value for name, value in part.items() if value is not None}
    return config


def _find_language_part(config: Config) -> Config:
    """Return the innermost language model part, or the whole configuration if it has no parts."""
    part = read_mapping(config, *TEXT_PARTS)
    return _find_language_part(part) if part else config


class LayerCounts(Struct, frozen=True, kw_only=True):
    """How many layers of each kind have a separate cache."""

    full: int
    windowed: int
    stateful: int


def _build_shape(config: Config, encoder: Encoder | None) -> ModelShape:
    """Return the shape of a model with these fields.

    Raises ValueError if a required size is missing or invalid. Also raises ValueError if the layers
    are not supported.
    """
    model_type = config.get("model_type")
    # Encoder-decoder models only keep a cache in the decoder.
    layer_count = read_integer(config, "decoder_layers")
    if layer_count is None:
        layer_count = read_integer(config, *LAYER_COUNT)
    if layer_count is None:
        listed_kinds = config.get("layers_block_type")
        layer_count = len(listed_kinds) if isinstance(listed_kinds, list) else 0
    if not layer_count:
        raise ValueError(f"{LAYER_COUNT[0]} is missing")
    kinds = list_layer_kinds(config, layer_count)
    counts = _count_layers(config, kinds)
    heads, windowed_heads = read_kv_heads(config)
    weight_bytes, quantisation = read_weight_bytes(config, SERVED_BYTES)
    mlp_width = None
    experts_per_token = 1
    widest_mlp = read_widest_mlp(config)
    if widest_mlp is not None:
        mlp_width = widest_mlp.width
        experts_per_token = widest_mlp.experts_per_token
    latent_width = _read_latent_width(config)
    compression = read_compressed_cache(config, layer_count)
    # A compressed cache's latents replace those of other kinds of attention.
    if compression is not None:
        latent_width = compression.head_size
    state_checkpoints = 0
    if counts.stateful:
        state_checkpoints = _count_state_checkpoints(config)
    parameters = count_layer_parameters(config, kinds, heads, windowed_heads or heads)
    # If matrices are quantised in different ways, use the average.
    if parameters is not None and parameters.mixed_bytes is not None:
        weight_bytes = parameters.mixed_bytes
    is_encoder_only = _reads_text_at_once(config)
    max_model_len = _read_max_model_len(config)

    full_layers = counts.full
    windowed_layers = counts.windowed
    window_tokens = None
    index = None
    if compression is None:
        index = read_sparse_index(config, layer_count)
    else:
        full_layers = compression.fine_layers + compression.coarse_layers
    # All tokens attend to each other at once, so no keys and values are kept.
    if is_encoder_only:
        full_layers = 0
        windowed_layers = 0
    elif windowed_layers:
        window_tokens = read_window_tokens(config)
    return ModelShape(
        layers=layer_count,
        full_layers=full_layers,
        windowed_layers=windowed_layers,
        window_tokens=window_tokens,
        has_chunks=counts.windowed > 0 and _is_chunked(config, kinds),
        windowed_heads=windowed_heads,
        stateful_layers=counts.stateful,
        state_bytes=count_state_bytes(config) if counts.stateful else None,
        state_checkpoints=state_checkpoints,
        attention_heads=read_integer(config, *ATTENTION_HEADS),
        heads=heads,
        latent_width=latent_width,
        hidden_size=read_integer(config, *HIDDEN_SIZE),
        vocabulary=read_integer(config, "vocab_size", "padded_vocab_size"),
        side_values=count_side_values(config, layer_count),
        mlp_width=mlp_width,
        experts_per_token=experts_per_token,
        draft_vocabulary=read_integer(config, "draft_vocab_size"),
        class_name=_read_class_name(config),
        is_pooling=_is_pooling(config),
        has_tied_embeddings=_has_no_output_matrix(config),
        parameters=parameters,
        expert_inputs=read_integer(config, *EXPERT_INPUTS, *HIDDEN_SIZE),
        expert_width=read_expert_width(config),
        compression=compression,
        index=index,
        position_values=count_position_values(
            config, heads.key_size, (windowed_heads or heads).key_size
        ),
        head_bytes=read_head_bytes(config),
        encoder=encoder,
        max_model_len=max_model_len,
        yarn_length=_read_yarn_length(config),
        speculative_layers=read_integer(config, *SPECULATIVE_LAYERS) or 1,
        stored_bytes=read_stored_bytes(config),
        kv_dtype_bytes=read_kv_dtype_bytes(config, SERVED_BYTES),
        weight_bytes_per_parameter=weight_bytes,
        quantisation=quantisation,
        unknown_type=_name_unknown_type(model_type),
    )


def _count_layers(config: Config, kinds: Sequence[str]) -> LayerCounts:
    """Return how many layers of each kind have a cache.

    Raises ValueError if no layer keeps keys and values.
    """
    sharing_layers = read_integer(config, *KV_SHARING_LAYERS) or 0
    # In Gemma 3n, the last layers share the cache of earlier layers.
    own_kinds = kinds[: len(kinds) - sharing_layers]
    counts = LayerCounts(
        full=_count_members(own_kinds, FULL_KINDS),
        windowed=_count_members(own_kinds, WINDOWED_KINDS),
        stateful=_count_members(own_kinds, STATEFUL_KINDS),
    )
    if counts.full + counts.windowed == 0:
        raise ValueError("none of its layers has a KV cache")
    return counts


def _count_members(kinds: Sequence[str], group: frozenset[str]) -> int:
    return sum(1 for kind in kinds if kind in group)


def _is_chunked(config: Config, kinds: Sequence[str]) -> bool:
    """Return whether windows begin at multiples of their length, as in Llama 4."""
    return "chunked_attention" in kinds or read_integer(config, "sliding_window") is None


def _count_state_checkpoints(config: Config) -> int:
    """Return how many additional states a state-space layer keeps.

    Mamba-2 keeps one additional state, from the end of the prompt; other kinds keep none.
    """
    return 1 if read_integer(config, *MAMBA_2_HEADS) else 0


def _read_latent_width(config: Config) -> int | None:
    """Return latent attention's values per token, for the latent and a rotary key.

    Returns None for a model without latent attention.
    """
    latent_width = read_integer(config, "kv_lora_rank")
    if latent_width is None:
        return None
    return latent_width + (read_integer(config, "qk_rope_head_dim") or 0)


def _reads_text_at_once(config: Config) -> bool:
    """Return whether tokens also attend to later tokens, which makes caching impossible."""
    if config.get("is_causal") is False or config.get("use_bidirectional_attention") is True:
        return True
    return str(config.get("model_type")) in ENCODER_ONLY_MODEL_TYPES


def _read_class_name(config: Config) -> str | None:
    """Return the first class in the list, the one that vLLM loads.

    Returns None if there is no class.
    """
    classes = config.get("architectures")
    return str(classes[0]) if isinstance(classes, list) and classes else None


def _is_pooling(config: Config) -> bool:
    """Return whether the model computes embeddings, classes or rewards instead of tokens."""
    if _reads_text_at_once(config) or config.get(POOLING_FILE):
        return True
    class_name = _read_class_name(config) or ""
    return class_name.endswith(HEADLESS_CLASSES) and class_name not in GENERATING_CLASSES


def _has_no_output_matrix(config: Config) -> bool:
    """Return whether there is no separate output matrix.

    The embedding may be used as the output matrix. Other models compute embeddings or classes
    instead of tokens.
    """
    if _is_pooling(config):
        return True
    model_type = str(config.get("model_type"))
    is_usually_tied = model_type in TIED_MODEL_TYPES or model_type.startswith(TIED_PREFIXES)
    return bool(config.get("tie_word_embeddings", is_usually_tied))


def _read_max_model_len(config: Config) -> int | None:
    """Return the longest sequence, in tokens, that vLLM accepts by default, or None if unknown.

    The result is the model's length times the factor of its rotary embedding. If the length already
    includes the factor, the result is the length itself.
    """
    length = read_integer(config, *MODEL_LENGTH)
    scaling = read_mapping(config, "rope_scaling", "rope_parameters")
    factor = scaling.get("factor")
    rotary = str(scaling.get("rope_type") or scaling.get("type"))
    # vLLM ignores a factor that is not a reasonable number.
    if length is None or not isinstance(factor, int | float) or not 1 <= factor <= SIZE_LIMIT:
        return length
    if rotary in UNSCALED_ROTARIES or "gemma3" in str(config.get("model_type")):
        return length
    return int(length * factor)


def _read_yarn_length(config: Config) -> int | None:
    """Return the original length times YaRN's factor, or None for other rotary embeddings."""
    scaling = read_mapping(config, "rope_scaling", "rope_parameters")
    if YARN not in {scaling.get("rope_type"), scaling.get("type")}:
        return None
    original_length = read_integer(scaling, "original_max_position_embeddings")
    factor = scaling.get("factor")
    if original_length is None or not isinstance(factor, int | float):
        return None
    return int(original_length * factor) if 1 <= factor <= SIZE_LIMIT else None


def _name_unknown_type(model_type: object) -> str | None:
    """Return the model type if its cache has not been checked against vLLM's.

    Returns None if the type has been checked, or if no type is given.
    """
    if model_type is None or str(model_type) in CHECKED_MODEL_TYPES | SOURCE_MODEL_TYPES:
        return None
    return str(model_type)[:NAME_LIMIT]


CONFIG_FILE: Final = "config.json"

POOLING_FILE: Final = "modules.json"
"""A file next to config.json that marks an embedding model (sentence-transformers). vLLM serves
such a model without an output matrix for tokens.
"""

CONFIG_LIMIT_BYTES: Final = 2**23
"""The maximum number of bytes read from a config.json or another small file nearby. A real
config.json has a few kB. It has up to 4 MB if it lists each layer's quantisation.
"""

CONFIG_LIMIT_VALUES: Final = 200_000
"""Our choice: the maximum number of values in such a file. A parsed value takes about 150 bytes, so
the sidecar stays within its container's memory. The list for a large model has 50,000 values.
"""

INDEX_LIMIT_BYTES: Final = 2**27
"""The maximum size of a checkpoint index that is read. The index has a line of 100 bytes for each
weight matrix. With 60 layers of 384 experts each, this is 10 MB.
"""

CHECKPOINT_LIMIT_BYTES: Final = 2**53
"""Our choice: an index that claims more bytes than this is not trusted."""


def read_model(path: Path, overrides: Mapping[str, Any] | None = None) -> ModelShape | str:
    """Return the shape of the model whose config.json or folder is given.

    If the file cannot be read or understood, returns a sentence that explains the problem.
    `overrides` replaces fields in the file.
    """
    is_folder = _is_folder(path)
    try:
        file = path / CONFIG_FILE if is_folder else path
        # Some editors write a byte order mark at the start of the file.
        text = read_file(file, CONFIG_LIMIT_BYTES).decode("utf-8-sig")
    except OSError as error:
        subject = f"its {CONFIG_FILE}" if is_folder else "it"
        return (
            f"{subject} cannot be read: {error.strerror};"
            " it takes a config.json or its folder, and downloads none"
        )
    except UnicodeDecodeError:
        return "it is not JSON: it is no text in UTF-8"
    if has_many_values(text):
        return f"it has more than {CONFIG_LIMIT_VALUES} values, and is no model's configuration"
    return parse_model_config(text, overrides, _read_files_beside(file.parent))


def has_config_file(folder: str) -> bool:
    """Return whether a folder exists and has a config.json."""
    return _is_folder(Path(folder)) and Path(folder, CONFIG_FILE).is_file()


def _is_folder(path: Path) -> bool:
    """Return whether a folder with this name exists.

    Returns False if the name is too long.
    """
    try:
        return path.is_dir()
    except OSError:  # before Python 3.14
        return False


def has_many_values(text: str) -> bool:
    """Return whether a JSON text has more than CONFIG_LIMIT_VALUES values, without parsing it.

    Counts all separators and brackets, including those within strings.
    """
    return sum(text.count(mark) for mark in ",[{") > CONFIG_LIMIT_VALUES


def _read_files_beside(folder: Path) -> Config:
    """Return the fields that other files in the model's folder provide."""
    fields: dict[str, Any] = {
        "preprocessor": _read_small_json(folder / "preprocessor_config.json"),
        POOLING_FILE: (folder / POOLING_FILE).is_file(),
    }
    quantisation = _read_small_json(folder / "hf_quant_config.json").get("quantization")
    if isinstance(quantisation, dict):
        # ModelOpt up to 0.29 writes this file. Later versions write the same content to config.json
        # under this name.
        fields["quantization_config"] = {"quant_method": "modelopt", **quantisation}
    return fields


def _read_small_json(file: Path) -> Config:
    """Return the JSON object in a file next to config.json, as `_read_json` does.

    A file that exceeds the limits for a config.json is not parsed.
    """
    try:
        text = read_file(file, CONFIG_LIMIT_BYTES).decode()
    except (OSError, UnicodeDecodeError):
        return {}
    return {} if has_many_values(text) else _parse_object(text)


def _read_json(file: Path) -> Config:
    """Return the JSON object in a file.

    Returns an empty object if the file cannot be read or has no JSON object. A file above the limit
    is truncated and therefore not valid JSON.
    """
    try:
        content = read_file(file, INDEX_LIMIT_BYTES)
    except OSError:
        return {}
    return _parse_object(content)


def _parse_object(text: str | bytes) -> Config:
    """Return the JSON object in a text, or an empty object for any other text."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def count_checkpoint_bytes(folder: Path) -> int | None:
    """Return the size of the weights in a folder.

    Returns None if no file in it shows the size. The index contains the size
    (`metadata.total_size`) even if the files themselves are missing. Without an index, the result
    is the total size of the files. The total size includes headers of a few kB.
    """
    metadata = _read_json(folder / "model.safetensors.index.json").get("metadata")
    total_bytes = metadata.get("total_size") if isinstance(metadata, dict) else None
    if isinstance(total_bytes, int | float) and 0 < total_bytes < CHECKPOINT_LIMIT_BYTES:
        return int(total_bytes)
    # Other files, such as consolidated ones, repeat the same weights, so they are not counted.
    files = list(folder.glob("model*.safetensors")) or list(folder.glob("*.safetensors"))
    try:
        return sum(file.stat().st_size for file in files) or None
    except OSError:
        return None
