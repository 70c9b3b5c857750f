"""The interpretation of the vLLM server's compound options."""

import re
from argparse import Namespace
from typing import Any, Final

from msgspec import Struct

from vllm_headroom_tools.sizing.drafts import DRAFT_MODEL

UNPREDICTABLE_METHODS: Final = ("ngram", "ngram_gpu", "suffix", "custom_class")
"""Methods that look drafts up in the text or run user code. Their memory cannot be known in advance
(vLLM 0.33, config/speculative.py).
"""

OWN_HEADS: Final = "mtp"
"""The method in which additional layers of the model generate the drafts (multi-token prediction).
"""

OWN_CHECKPOINT: Final = (OWN_HEADS, "dspark")
"""Methods whose layers may be part of the model's own checkpoint."""

NAMED_METHODS: Final = (
    ("eagle-", "eagle"),
    ("eagle3", "eagle3"),
    ("dflash", "dflash"),
    ("dspark", "dspark"),
    ("medusa", "medusa"),
    ("accelerator", "mlp_speculator"),
    ("eagle", "eagle"),
)
"""Substrings of draft names, each with a method. If no method is given, vLLM chooses the method of
the first substring that matches. The first four come from vLLM 0.33 (config/speculative.py,
`__post_init__`). For the last three, vLLM looks at the draft's configuration.
"""

HIDDEN_STATES: Final = "extract_hidden_states"
"""The method that stores the hidden states of configured layers in the cache."""

ASSISTANT: Final = "-assistant"
"""The name suffix of Gemma 4's drafts. They read the model's cache instead of having one."""

USER_CODE: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", re.ASCII)
"""The path of a user-defined class (vLLM 0.33, `_is_custom_proposer_path`)."""


class Speculation(Struct, frozen=True, kw_only=True):
    """The speculative decoding that vLLM will use."""

    tokens: int = 0
    # The name of the method in vLLM, or None if speculation is not used.
    method: str | None = None
    # The name of the model that generates the drafts. None if there is no separate model.
    draft_name: str | None = None

    @property
    def has_own_heads(self) -> bool:
        """Return whether the layers that generate the drafts are in the model's own checkpoint."""
        return self.draft_name is None and self.method in OWN_CHECKPOINT

    @property
    def needs_draft(self) -> bool:
        """Return whether vLLM rejects the method because no draft is named."""
        has_no_draft = self.method is not None and self.draft_name is None
        return has_no_draft and self.method not in {*UNPREDICTABLE_METHODS, *OWN_CHECKPOINT}


def read_speculation(options: Namespace) -> Speculation:
    """Return the speculation selected by these options (config/speculative.py, `__post_init__`)."""
    config = _join_speculative_options(options)
    if not config:
        return Speculation()
    tokens = config.get("num_speculative_tokens")
    count = tokens if isinstance(tokens, int) and tokens > 0 else 1
    model = config.get("model")
    name = None if model is None else str(model)
    method = _name_method(str(config.get("method") or ""), name)
    if method in UNPREDICTABLE_METHODS:
        name = None
    elif method == HIDDEN_STATES:
        name = HIDDEN_STATES
    # The options may name the model itself as the draft, as in Ernie's recipes. In that case, the
    # model's own heads generate the drafts.
    is_assistant = name is not None and name.endswith(ASSISTANT)
    if method == OWN_HEADS and not is_assistant:
        name = None
    return Speculation(tokens=count, method=method, draft_name=name)


def _name_method(given_method: str, draft_name: str | None) -> str:
    """Return vLLM's name for the method selected by these options."""
    method = given_method.strip("[]").lower()
    if method.endswith("_mtp"):
        return OWN_HEADS
    if draft_name in {"ngram", "[ngram]"}:
        return "ngram"
    if method not in {"", DRAFT_MODEL}:
        return method
    # Without a draft model, the model's own heads generate the drafts.
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
    """Return the JSON configuration, merged with the single options that are given."""
    config: dict[str, Any] = dict(options.speculative_config or {})
    single_options = {
        "method": options.spec_method,
        "model": options.spec_model,
        "num_speculative_tokens": options.spec_tokens,
    }
    for field, value in single_options.items():
        # The single options supplement the JSON rather than replacing it.
        if value is not None:
            config.setdefault(field, value)
    return config


def has_no_images(limits: dict[str, Any] | None) -> bool:
    """Return whether the limits disable images and videos, so that no encoder is loaded."""
    if not limits:
        return False
    return "image" in limits and not any(limits.values())
