"""The arguments and configuration that an engine logs, without secrets."""

import re
from collections.abc import Iterator
from typing import Final

from vllm_headroom.model.start import Scalar

MOST_ARGUMENTS: Final = 400
"""vLLM 0.33 has 250 options."""

LONGEST_NAME: Final = 200
"""The maximum length of a text that is kept: a model's name or path."""

SECRET_NAME: Final = re.compile(
    r"(?:^|_)(?:key|keys|token|secret|secrets|password|passwd|auth|authorization|credential"
    r"|credentials|header|headers|cookie|cert|ca_certs)(?:_|$)"
)
"""Names of arguments whose value is never kept. The plural "tokens" is allowed, because it denotes
a count.
"""

TEXT_NAMES: Final = frozenset(
    {
        "model",
        "model_tag",
        "model_path",
        "tokenizer",
        "served_model_name",
        "dtype",
        "quantization",
        "kv_cache_dtype",
        "load_format",
        "distributed_executor_backend",
        "attention_backend",
        "device",
        "device_config",
        "runner",
        "task",
        "mamba_ssm_cache_dtype",
        "mamba_cache_mode",
        "cpu_offload_gb",
        "kv_offloading_backend",
        "all2all_backend",
        "optimization_level",
    }
)
"""The arguments whose text is kept. Other texts may be prompts, templates, or paths that contain
secrets.
"""

MODEL_NAMES: Final = frozenset(
    {"model", "model_tag", "model_path", "tokenizer", "served_model_name"}
)
"""The arguments whose text is the name or path of a model."""

PLAIN_TEXT: Final = re.compile(r"[\w./:+-]{1,200}")
"""Matches a model's name. The pattern excludes the characters of JSON and of URLs with passwords.
"""

PLAIN_WORD: Final = re.compile(r"[\w.+-]{1,40}")
"""The text of any other argument, such as torch.bfloat16."""

LIKE_A_SECRET: Final = re.compile(
    r"(?<![A-Za-z0-9])(?:(?:sk|pk|rk|api|key|token|secret|nvapi|glpat|xox[a-z]|pypi)[-_]|hf_|npm_"
    r"|gh[a-z]_|github_pat_|dckr_pat_|AKIA|ASIA|AIza|ya29|eyJ)[\w-]{8,}|://[^/]*@"
)
"""Matches the beginning of a common access token, and a password in a URL."""

NUMBER: Final = re.compile(r"-?\d{1,18}(?:\.\d{1,18})?(?:e-?\d{1,3})?")


def read_arguments(text: str) -> dict[str, Scalar]:
    """Return the arguments in a mapping, a list or a call.

    A mapping is `{'name': value, …}`, a list is `name=value, …`. Only numbers, truth values, None
    and the texts of known arguments are kept. A list is kept only if its argument is known and it
    has one text. Other nested values are omitted.
    """
    arguments: dict[str, Scalar] = {}
    for item in split_items(text):
        name, separator, value = _split_item(item)
        if not separator or not re.fullmatch(r"[A-Za-z_]\w{0,80}", name):
            continue
        # An argument whose name suggests a secret is dropped along with its value.
        if SECRET_NAME.search(name) or len(arguments) >= MOST_ARGUMENTS:
            continue
        _keep(arguments, name, value)
    return arguments


def split_items(text: str) -> Iterator[str]:
    """Yield the items separated by commas at the outermost level."""
    text = text.strip()
    # The text before the bracket of a call or mapping is not an item.
    opening = re.match(r"(?:[A-Za-z_]\w*)?[({]", text)
    begin = opening.end() if opening is not None else 0
    depth = 0
    quote = ""
    is_escaped = False
    item_begin = begin
    for position in range(begin, len(text)):
        character = text[position]
        # Commas inside quotes or brackets do not separate items.
        if is_escaped:
            is_escaped = False
        elif quote:
            is_escaped = character == "\\"
            if character == quote:
                quote = ""
        elif character in "'\"":
            quote = character
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
            if depth < 0:
                yield text[item_begin:position]
                return
        elif character == "," and depth == 0:
            yield text[item_begin:position]
            item_begin = position + 1
    if not quote and depth == 0:  # an item cut off at the end of the line is omitted
        yield text[item_begin:]


def _split_item(item: str) -> tuple[str, str, str]:
    """Return the name, the separator and the value of an item."""
    item = item.strip()
    if item[:1] in {"'", '"'}:
        name, separator, value = item[1:].partition(f"{item[0]}:")
    else:
        name, separator, value = item.partition("=")
    return name, separator, value.strip()


def _keep(arguments: dict[str, Scalar], name: str, value: str) -> None:
    """Add a value if it may be kept."""
    if value in {"True", "False"}:
        arguments[name] = value == "True"
        return
    if value == "None":
        arguments[name] = None
        return
    if NUMBER.fullmatch(value):
        arguments[name] = float(value) if "." in value or "e" in value else int(value)
        return
    if value.startswith("[") and value.endswith("]"):
        # vLLM may log a single value as a list with one item.
        value = value[1:-1].strip()
    if name not in TEXT_NAMES:
        return
    text = value.strip("'\"")
    plain = PLAIN_TEXT if name in MODEL_NAMES else PLAIN_WORD
    if plain.fullmatch(text) and not LIKE_A_SECRET.search(text):
        arguments[name] = text[:LONGEST_NAME]
