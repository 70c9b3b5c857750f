"""The size of a model, as a frozen value whose names end in their unit."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What a model's configuration says of its size; None where it does not.

    `full_layers` keep keys and values of every token, `windowed_layers` only of the last `window_tokens`, and
    `stateful_layers` keep `state_bytes` of each sequence instead. `latent_width` is what multi-head latent attention
    keeps per token and layer. `mlp_width` is how many values a token takes in the widest MLP, all its experts together.
    `stored_bytes` is a parameter of the checkpoint, `dtype_bytes` one that is served without quantisation,
    `kv_dtype_bytes` a value in the KV cache when vLLM is told no dtype for it. `layer_parameters` are those that
    `weight_bytes_per_parameter` is said of; `other_parts` are no language model's, such as an image encoder.
    """

    layers: int
    full_layers: int
    windowed_layers: int = 0
    window_tokens: int | None = None
    stateful_layers: int = 0
    state_bytes: int | None = None
    attention_heads: int | None = None
    kv_heads: int
    head_size: int
    value_head_size: int
    latent_width: int | None = None
    hidden_size: int | None = None
    vocabulary: int | None = None
    mlp_width: int | None = None
    experts_per_token: int = 1
    tied_embeddings: bool = False
    layer_parameters: int | None = None
    other_parts: bool = False
    max_model_len: int | None = None
    dtype_bytes: float = 2.0
    stored_bytes: float = 2.0
    kv_dtype_bytes: float = 2.0
    weight_bytes_per_parameter: float = 2.0
    quantisation: str | None = None

    @property
    def kv_layers(self) -> int:
        """The layers that keep keys and values."""
        return self.full_layers + self.windowed_layers

    @property
    def keeps_every_token(self) -> bool:
        """Whether all that the cache holds of a sequence grows with each token, so that bytes per token say it all."""
        return self.windowed_layers == 0 and self.stateful_layers == 0
