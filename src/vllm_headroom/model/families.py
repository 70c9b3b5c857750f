"""Families of models with a special KV cache, recognized by their names."""

import re
from typing import Final

GROUPED_MODELS: Final = re.compile(
    r"gemma-?[234](?!\d*b)|gpt-oss|llama-?4(?!\d|-?bit)|command-(?:r7b|a)|cohere2|exaone-?4|olmo-?3"
    r"|mimo-v2|laguna|qwen-?3(?:[._-]next|[._][5-9](?!b))|nemotron-?(?:h\b|nano-9b|nano-12b|3)"
    r"|granite-?4|jamba|falcon-?h1|bamba|zamba|plamo-?[23]|minimax-(?:text|m1)|lfm2"
    r"|kimi-(?:linear|k3)|deepseek-v4|step-3\.\d|phi-?4-mini-flash|ministral-8b|phi-?3-small",
    re.IGNORECASE,
)
"""Families of models with several kinds of layers (sliding-window, state-space and full-attention).
Each kind forms a group, and the groups share the blocks. Blocks times tokens per block is therefore
2 to 7 times the capacity. Source: vLLM 0.19, v1/core/kv_cache_utils.py, `_report_kv_cache_config`.
Since vLLM 0.24, the page shows the capacity itself.
"""
