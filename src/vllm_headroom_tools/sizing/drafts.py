"""The memory of speculative decoding, in separate draft models or in heads."""

from math import ceil
from typing import Final

from msgspec.structs import replace

from vllm_headroom_tools.sizing.encoder import UNGIVEN_MLP_WIDTH_RATIO
from vllm_headroom_tools.sizing.footprint import ModelShape, count_layer_bytes

DRAFT_MODEL: Final = "draft_model"
"""vLLM's name for drafting with an independent model."""

HEAD_LAYERS: Final = {"eagle": 1, "eagle3": 1, "dflash": 8, "dspark": 8, "mtp": 1}
"""Our choice: the number of layers assumed for a draft head with an unknown configuration. EAGLE
heads have one layer (models/llama_eagle3.py). The published DFlash and DSpark heads have five to
eight. Gemma 4's assistant ("mtp") has four layers, a quarter as wide as the model's.
"""

CACHELESS_HEADS: Final = frozenset({"mtp"})
"""Gemma 4's assistant reads the model's cache (config/speculative.py, `gemma4_assistant`)."""

TOKEN_MATRICES: Final = {"medusa": 1, "mlp_speculator": 2}
"""The number of matrices per speculated token in Medusa heads and MLP speculator heads. With the
model's inner width, each is as large as the output matrix. The sources are models/medusa.py and
models/mlp_speculator.py.
"""

HEAD_INPUTS: Final = {"eagle": 2, "eagle3": 3, "dflash": 5, "dspark": 5, "mtp": 1}
"""The number of layer outputs that a head projects to its input. Each output is as wide as the
model. The numbers for EAGLE and EAGLE3 follow from their design. The published DFlash heads have
five.
"""


def name_head_method(draft: ModelShape, method: str) -> str:
    """Return the method of a draft.

    If no method is given, it is derived from the draft's class name.
    """
    class_name = (draft.class_name or "").lower()
    if method != DRAFT_MODEL:
        return method
    # Check EAGLE3 first, because its name contains EAGLE.
    for head_method in sorted(HEAD_INPUTS, reverse=True):
        if head_method in class_name:
            return head_method
    return method


def add_assumed_head(shape: ModelShape, method: str, tokens: int) -> ModelShape | None:
    """Return the model's shape with an assumed draft head for a method.

    The head's configuration is unknown, so the largest head of its kind is assumed. The largest
    head consists of:

    - HEAD_LAYERS dense layers with the model's sizes
    - a projection from the outputs of several layers to the head's input
    - an output matrix

    Medusa heads and MLP speculator heads instead consist of matrices for each speculated token.
    Returns None for other methods, or if the sizes that the head needs are unknown.
    """
    hidden_size = shape.hidden_size
    if hidden_size is None or shape.vocabulary is None or shape.compression is not None:
        return None
    output_parameters = hidden_size * shape.vocabulary
    if method in TOKEN_MATRICES:
        token_parameters = hidden_size**2 + TOKEN_MATRICES[method] * output_parameters
        return _add_unquantised(shape, tokens * token_parameters)
    if method not in HEAD_LAYERS:
        return None
    layers = HEAD_LAYERS[method]
    layers_parameters = layers * _count_dense_layer(shape, hidden_size)
    input_parameters = HEAD_INPUTS[method] * hidden_size**2
    shape_with_head = _add_unquantised(
        shape, layers_parameters + input_parameters + output_parameters
    )
    if shape_with_head is None or method in CACHELESS_HEADS:
        return shape_with_head
    return replace(shape_with_head, full_layers=shape.full_layers + layers)


def _count_dense_layer(shape: ModelShape, hidden_size: int) -> int:
    """Return the number of parameters in a dense layer with the model's sizes."""
    heads = (shape.attention_heads or 1) + shape.heads.count
    attention_parameters = 2 * hidden_size * heads * shape.heads.key_size
    if shape.latent_width is not None:
        # The figure is an upper bound, because projections through latents are smaller.
        attention_parameters = 4 * hidden_size**2
    mlp_width = shape.mlp_width or UNGIVEN_MLP_WIDTH_RATIO * hidden_size
    return attention_parameters + 3 * hidden_size * mlp_width


def _add_unquantised(shape: ModelShape, added_parameters: int) -> ModelShape | None:
    """Return the shape with more parameters, or None if the present number is unknown."""
    parameters = shape.parameters
    if parameters is None:
        return None
    return replace(
        shape,
        parameters=replace(
            parameters,
            total=parameters.total + added_parameters,
            unquantised=parameters.unquantised + added_parameters,
        ),
    )


def build_head(draft: ModelShape, method: str, target: ModelShape) -> ModelShape:
    """Return the shape of a draft that is served alongside its model.

    A draft head uses the model's embedding. Only an EAGLE3 head has an output matrix, sometimes for
    a smaller vocabulary. The head projects outputs of the model to its own input
    (models/llama_eagle3.py, models/qwen3_dflash.py). Any other draft is a complete model.
    """
    hidden_size = draft.hidden_size
    if method not in HEAD_INPUTS or hidden_size is None or target.hidden_size is None:
        return draft
    input_parameters = HEAD_INPUTS[method] * target.hidden_size * hidden_size
    vocabulary = 0
    if method == "eagle3":
        # The head layer's queries, keys and values also read the token's embedding.
        heads = (draft.attention_heads or 1) + 2 * draft.heads.count
        input_parameters += hidden_size * heads * draft.heads.key_size
        vocabulary = draft.draft_vocabulary or draft.vocabulary or 0
    head = _add_unquantised(draft, input_parameters) or draft
    # Tied embeddings are a single matrix.
    return replace(head, vocabulary=vocabulary, has_tied_embeddings=True, position_values=0)


def add_draft_cache(shape: ModelShape, draft: ModelShape) -> ModelShape:
    """Return the model's shape with the draft's layers added.

    The draft's cache is added in this way if the model's layers form groups in the cache. The draft
    is treated as additional layers of the model that keep every token. The number of these layers
    is the smallest that holds the draft's bytes.
    """
    own_bytes, _ = count_layer_bytes(shape, kv_dtype="auto", tensor_parallel=1)
    draft_bytes, _ = count_layer_bytes(draft, kv_dtype="auto", tensor_parallel=1)
    draft_layers = draft.full_layers + draft.windowed_layers
    further_layers = draft_layers * max(1, ceil(draft_bytes / own_bytes))
    return replace(shape, full_layers=shape.full_layers + further_layers)
