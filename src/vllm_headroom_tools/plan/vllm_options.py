"""The options of vLLM's server: which change nothing here, and what the compound ones mean."""

from argparse import Namespace
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

VLLM_RELEASES: Final = "vLLM 0.19 to 0.33"
"""The releases whose options are in the table."""

TABLE: Final = Path(__file__).with_name("vllm_options.tsv")
"""All options of `vllm serve` in 0.19, 0.24, 0.28 and 0.33: their names, and what they take
(engine/arg_utils.py, entrypoints/openai/cli_args.py, and entrypoints/common/cli_args.py)."""

OPTIMISATION_LEVEL: Final = "-O"
"""The level's short name, which vLLM's parser of command lines adds."""


def list_vllm_options() -> set[str]:
    """Return the names of all options, with --no- before those of switches."""
    names = {OPTIMISATION_LEVEL}
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        row_names, takes = line.split("\t")
        for name in row_names.split(","):
            names.add(name)
            if takes == "flag" and name.startswith("--"):
                names.add(f"--no-{name.removeprefix('--')}")
    return names


DRAFTLESS_METHODS: Final = ("ngram", "suffix", "custom_class")
"""Beginnings of the methods that look drafts up in the text (vLLM 0.33, config/speculative.py)."""


EAGLE: Final = "eagle"
"""The beginning of a method, or a part of a model's name (vLLM 0.33, config/speculative.py)."""


class Speculation(Struct, frozen=True, kw_only=True):
    """How vLLM is to speculate."""

    tokens: int = 0
    # Whether the model's own heads make the drafts (multi-token prediction).
    has_own_heads: bool = False
    # The name of another model that makes them; None where there is none.
    draft_name: str | None = None
    # Whether that is an EAGLE head, which is one layer.
    is_eagle: bool = False


def read_speculation(options: Namespace) -> Speculation:
    """Return how vLLM is to speculate by its options (config/speculative.py, `__post_init__`)."""
    config = _join_speculative_options(options)
    if not config:
        return Speculation()
    tokens = config.get("num_speculative_tokens")
    count = tokens if isinstance(tokens, int) and tokens > 0 else 1
    method = str(config.get("method") or "")
    model = config.get("model")
    # Drafts that are looked up take no memory.
    if method.startswith(DRAFTLESS_METHODS) or model in {"ngram", "[ngram]"}:
        return Speculation(tokens=count)
    # Without a draft model, the model's own heads make the drafts.
    if method == "mtp" or method.endswith("_mtp") or model is None:
        return Speculation(tokens=count, has_own_heads=True)
    name = str(model)
    is_eagle = method.startswith(EAGLE) or EAGLE in name.lower()
    return Speculation(tokens=count, draft_name=name, is_eagle=is_eagle)


def _join_speculative_options(options: Namespace) -> dict[str, Any]:
    """Return the configuration as JSON, completed by single options; empty without any of them."""
    config: dict[str, Any] = dict(options.speculative_config or {})
    single_options = {
        "method": options.spec_method,
        "model": options.spec_model,
        "num_speculative_tokens": options.spec_tokens,
    }
    for field, value in single_options.items():
        # They complete the JSON and do not replace it.
        if value is not None:
            config.setdefault(field, value)
    return config


def has_no_images(limits: dict[str, Any] | None) -> bool:
    """Return whether the limits switch images and videos off, so that no encoder is loaded."""
    if not limits:
        return False
    return "image" in limits and not any(limits.values())
