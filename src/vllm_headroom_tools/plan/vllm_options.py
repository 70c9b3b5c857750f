"""The meaning of the compound options of vLLM's server."""

import re
from argparse import Namespace
from typing import Any, Final

from msgspec import Struct

from vllm_headroom_tools.sizing.drafts import DRAFT_MODEL

LOOKED_UP: Final = ("ngram", "ngram_gpu", "suffix", "custom_class")
"""Methods that look drafts up in the text or run a user's code; their memory is not known in
advance (vLLM 0.33, config/speculative.py).
"""

OWN_HEADS: Final = "mtp"
"""The method for which additional layers of the model itself make the drafts (multi-token
prediction).
"""

OWN_CHECKPOINT: Final = (OWN_HEADS, "dspark")
"""Methods whose layers may be in the model's own checkpoint."""

NAMED_METHODS: Final = (
    ("eagle-", "eagle"),
    ("eagle3", "eagle3"),
    ("dflash", "dflash"),
    ("dspark", "dspark"),
    ("medusa", "medusa"),
    ("accelerator", "mlp_speculator"),
    ("eagle", "eagle"),
)
"""Parts of a draft's name, and the method that vLLM chooses for such a name if no method is given;
the first part found counts. vLLM 0.33 has the first four (config/speculative.py, `__post_init__`).
vLLM recognises the last three by the draft's configuration.
"""

HIDDEN_STATES: Final = "extract_hidden_states"
"""The method that keeps hidden states in the cache; its own configuration names the layers."""

ASSISTANT: Final = "-assistant"
"""The suffix of the names of Gemma 4's drafts, which read the model's cache and keep none."""

USER_CODE: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", re.ASCII)
"""A class of a user's code (vLLM 0.33, `_is_custom_proposer_path`)."""


class Speculation(Struct, frozen=True, kw_only=True):
    """The speculation that vLLM is to use."""

    tokens: int = 0
    # The method by vLLM's name; None without speculation.
    method: str | None = None
    # The name of another model that makes the drafts; None if there is none.
    draft_name: str | None = None

    @property
    def has_own_heads(self) -> bool:
        """Return whether the model's own checkpoint has the layers that make the drafts."""
        return self.draft_name is None and self.method in OWN_CHECKPOINT

    @property
    def needs_draft(self) -> bool:
        """Return whether vLLM refuses the method because no draft is named."""
        has_no_draft = self.method is not None and self.draft_name is None
        return has_no_draft and self.method not in {*LOOKED_UP, *OWN_CHECKPOINT}


def read_speculation(options: Namespace) -> Speculation:
    """Return the speculation that these options choose (config/speculative.py, `__post_init__`)."""
    config = _join_speculative_options(options)
    if not config:
        return Speculation()
    tokens = config.get("num_speculative_tokens")
    count = tokens if isinstance(tokens, int) and tokens > 0 else 1
    model = config.get("model")
    name = None if model is None else str(model)
    method = _name_method(str(config.get("method") or ""), name)
    if method in LOOKED_UP:
        name = None
    elif method == HIDDEN_STATES:
        name = HIDDEN_STATES
    # The model's own name may be given for its own heads, as in Ernie's recipes.
    is_assistant = name is not None and name.endswith(ASSISTANT)
    if method == OWN_HEADS and not is_assistant:
        name = None
    return Speculation(tokens=count, method=method, draft_name=name)


def _name_method(given_method: str, draft_name: str | None) -> str:
    """Return vLLM's name of the method that these options choose."""
    method = given_method.strip("[]").lower()
    if method.endswith("_mtp"):
        return OWN_HEADS
    if draft_name in {"ngram", "[ngram]"}:
        return "ngram"
    if method not in {"", DRAFT_MODEL}:
        return method
    # Without a draft model, the model's own heads make the drafts.
    if draft_name is None:
        return OWN_HEADS
    lower_name = draft_name.lower()
    for part, named_method in NAMED_METHODS:
        if part in lower_name:
            return named_method
    if lower_name.endswith(ASSISTANT):
        return OWN_HEADS
    if not method and USER_CODE.fullmatch(draft_name):
        return "custom_class"
    return DRAFT_MODEL


def _join_speculative_options(options: Namespace) -> dict[str, Any]:
    """Return the configuration as JSON, with the values of single options; empty without either."""
    config: dict[str, Any] = dict(options.speculative_config or {})
    single_options = {
        "method": options.spec_method,
        "model": options.spec_model,
        "num_speculative_tokens": options.spec_tokens,
    }
    for field, value in single_options.items():
        # The options complete the JSON and do not replace it.
        if value is not None:
            config.setdefault(field, value)
    return config


def has_no_images(limits: dict[str, Any] | None) -> bool:
    """Return whether the limits switch images and videos off, so that no encoder is loaded."""
    if not limits:
        return False
    return "image" in limits and not any(limits.values())
