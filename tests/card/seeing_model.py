"""Write a small Qwen2-VL, a word tokenizer and its processor; run by the Python that vLLM is installed in."""

import sys

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2VLConfig, Qwen2VLImageProcessor, Qwen2VLProcessor
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

SPECIAL = {
    "pad": "<|endoftext|>",
    "eos": "<|im_end|>",
    "vision_bos": "<|vision_start|>",
    "vision_eos": "<|vision_end|>",
    "image": "<|image_pad|>",
    "video": "<|video_pad|>",
}
TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if 'image_url' in part or part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in part %} {{ part['text'] }} {% endif %}{% endfor %}{% endfor %}"
)

folder = sys.argv[1]
vocabulary = {"<unk>": 0} | {f"w{number}": number - 299 for number in range(300, 1300)}
words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
words.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL.values()])
ids = {name: words.token_to_id(text) for name, text in SPECIAL.items()}
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=words,
    unk_token="<unk>",
    eos_token=SPECIAL["eos"],
    pad_token=SPECIAL["pad"],
    extra_special_tokens={f"{name}_token": SPECIAL[name] for name in ("image", "video", "vision_bos", "vision_eos")},
)
tokenizer.chat_template = TEMPLATE
Qwen2VLProcessor(
    image_processor=Qwen2VLImageProcessor(),
    tokenizer=tokenizer,
    video_processor=Qwen2VLVideoProcessor(),
    chat_template=TEMPLATE,
).save_pretrained(folder)
rotation = {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1000000.0}
text = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 32_000,
    "max_position_embeddings": 32_768,
    "rope_parameters": rotation,
    "bos_token_id": ids["pad"],
    "eos_token_id": ids["eos"],
}
vision = {
    "depth": 4,
    "embed_dim": 640,
    "hidden_size": 1024,
    "num_heads": 8,
    "mlp_ratio": 4,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
}
config = Qwen2VLConfig(
    text_config=text,
    vision_config=vision,
    image_token_id=ids["image"],
    video_token_id=ids["video"],
    vision_start_token_id=ids["vision_bos"],
    vision_end_token_id=ids["vision_eos"],
)
config.architectures = ["Qwen2VLForConditionalGeneration"]
config.dtype = "bfloat16"
config.save_pretrained(folder)
