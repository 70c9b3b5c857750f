"""Serve a tiny model of random weights with llama.cpp's own server; run by a Python with xllamacpp and gguf.

usage: llama_cpp.py PORT FOLDER
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import gguf
import numpy as np
import xllamacpp

LAYERS, WIDTH, HEADS, KV_HEADS, INNER, LENGTH = 2, 64, 4, 2, 128, 2048
LETTERS = [chr(number) for number in range(ord(" "), ord("~") + 1)]
SPECIAL = ("<unk>", "<s>", "</s>")
BYTES = [f"<0x{number:02X}>" for number in range(256)]


def write_model(path: Path) -> None:
    """Write a two-layer Llama whose tokens are letters."""
    tokens = (*SPECIAL, *BYTES, *LETTERS)
    kinds = [2, 3, 3, *([6] * len(BYTES)), *([1] * len(LETTERS))]  # unknown, control, byte, normal
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(LENGTH)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types(kinds)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    random = np.random.default_rng(0)
    for name, shape in shapes(len(tokens)).items():
        values = np.ones(shape) if "norm" in name else random.normal(0, 0.05, shape)
        writer.add_tensor(name, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def shapes(vocabulary: int) -> dict[str, tuple[int, ...]]:
    """Return the tensors' sizes by their names in GGUF."""
    keys = WIDTH // HEADS * KV_HEADS
    tensor_shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (vocabulary, WIDTH),
        "output_norm.weight": (WIDTH,),
        "output.weight": (vocabulary, WIDTH),
    }
    layer = {
        "attn_norm": (WIDTH,),
        "attn_q": (WIDTH, WIDTH),
        "attn_k": (keys, WIDTH),
        "attn_v": (keys, WIDTH),
        "attn_output": (WIDTH, WIDTH),
        "ffn_norm": (WIDTH,),
        "ffn_gate": (INNER, WIDTH),
        "ffn_up": (INNER, WIDTH),
        "ffn_down": (WIDTH, INNER),
    }
    for number in range(LAYERS):
        tensor_shapes |= {f"blk.{number}.{name}.weight": shape for name, shape in layer.items()}
    return tensor_shapes


def serve(port: int, model: Path) -> xllamacpp.Server:
    """Start the server, with --metrics."""
    params = xllamacpp.CommonParams()
    params.model.path = str(model)
    params.n_ctx = LENGTH
    params.n_parallel = 2
    params.cpuparams.n_threads = 1
    params.hostnames = ["127.0.0.1"]
    params.port = port
    params.endpoint_metrics = True
    params.warmup = False
    return xllamacpp.Server(params)


place = Path(sys.argv[2]) / "tiny.gguf"
write_model(place)
server = serve(int(sys.argv[1]), place)
signal.sigwait({signal.SIGTERM})
