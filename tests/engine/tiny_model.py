"""Write a two-layer Llama configuration and a word tokenizer: enough for vLLM to serve with random weights."""

import sys

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

folder = sys.argv[1]
vocabulary = {"<s>": 0, "</s>": 1, "<unk>": 2}
for number in range(300, 1300):
    vocabulary[f"w{number}"] = len(vocabulary)
tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
).save_pretrained(folder)
LlamaConfig(
    architectures=["LlamaForCausalLM"],
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=1024,
    max_position_embeddings=4096,
    dtype="bfloat16",
    bos_token_id=0,
    eos_token_id=1,
).save_pretrained(folder)
