"""The size of a model, as a frozen value whose names end in their unit."""

from __future__ import annotations

from typing import Self

from msgspec import Struct
from msgspec.structs import replace

from vllm_headroom.sizing.encoder import Encoder
from vllm_headroom.sizing.heads import KvHeads
from vllm_headroom.sizing.parameters import LayerParameters


class ModelShape(Struct, frozen=True, kw_only=True):
    """What a model's configuration says of its size; None where it does not.

    `full_layers` keep keys and values of every token, `windowed_layers` only of the last `window_tokens` (`chunked`:
    since the last multiple of them), and `stateful_layers` keep `state_bytes` of each sequence instead,
    `state_checkpoints` times more than others. `windowed_heads` are those of a layer with a window, where they differ
    from a full one's `heads`. `latent_width` is what multi-head latent
    attention keeps per token and layer. `mlp_width` is how many values a token takes in the widest MLP, all its experts
    together. `stored_bytes` is a parameter of the checkpoint, `dtype_bytes` one that is served without quantisation,
    `kv_dtype_bytes` a value in the KV cache when vLLM is told no dtype for it. `weight_bytes_per_parameter` is said of
    all of `parameters` but the plain ones. `tied_embeddings` also says that there is no output to have weights.
    `encoder` reads images or sound. `unknown_type` names a type of model that nobody has checked to be understood here.
    """

    layers: int
    full_layers: int
    windowed_layers: int = 0
    window_tokens: int | None = None
    chunked: bool = False
    windowed_heads: KvHeads | None = None
    stateful_layers: int = 0
    state_bytes: int | None = None
    state_checkpoints: int = 0
    attention_heads: int | None = None
    heads: KvHeads
    latent_width: int | None = None
    hidden_size: int | None = None
    vocabulary: int | None = None
    mlp_width: int | None = None
    experts_per_token: int = 1
    tied_embeddings: bool = False
    parameters: LayerParameters | None = None
    encoder: Encoder | None = None
    max_model_len: int | None = None
    dtype_bytes: float = 2.0
    stored_bytes: float = 2.0
    kv_dtype_bytes: float = 2.0
    weight_bytes_per_parameter: float | None = 2.0
    quantisation: str | None = None
    unknown_type: str | None = None

    @property
    def kv_layers(self) -> int:
        """The layers that keep keys and values."""
        return self.full_layers + self.windowed_layers

    @property
    def keeps_every_token(self) -> bool:
        """Whether all that the cache holds of a sequence grows with each token, so that bytes per token say it all."""
        return self.full_layers > 0 and self.windowed_layers == 0 and self.stateful_layers == 0

    @property
    def embeddings(self) -> int | None:
        """The parameters of the embedding and of the output; None where they are not told."""
        if self.vocabulary is None or self.hidden_size is None:
            return None
        return self.vocabulary * self.hidden_size * (1 if self.tied_embeddings else 2)

    def quantised(self, method: str, bytes_per_parameter: float) -> Self:
        """Return the shape with this quantisation of all its layers."""
        return replace(
            self,
            quantisation=method,
            weight_bytes_per_parameter=bytes_per_parameter,
            parameters=self.parameters and replace(self.parameters, plain=0),
        )
