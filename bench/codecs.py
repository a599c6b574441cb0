"""What each codec makes of real KV: a GGUF checkpoint's, over the text of a file. Prints the table of docs/codecs.md.

    python -m bench.codecs DIRECTORY FILE.gguf TEXT

Needs torch, transformers and accelerate, which the project itself does not.
"""

import sys
import time
from pathlib import Path
from statistics import median

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvstore.codecs.registry import CODECS, CODECS_BY_ID, NONE, encode
from kvstore.layout import Layout

NUM_TOKENS = 2048
TOKENS_PER_BLOCK = (16, 96)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
COMPUTE = {"bfloat16": torch.bfloat16, "float16": torch.float32, "float32": torch.float32}


def compute_kv(directory: str, gguf: str, text: str, dtype: torch.dtype) -> torch.Tensor:
    """[layer][plane][token][head][dim] of the text's first tokens."""
    tokenizer = AutoTokenizer.from_pretrained(directory, gguf_file=gguf)
    model = AutoModelForCausalLM.from_pretrained(directory, gguf_file=gguf, dtype=dtype)
    tokens = tokenizer(text, return_tensors="pt").input_ids[:, :NUM_TOKENS]
    with torch.no_grad():
        layers = model(tokens, use_cache=True).past_key_values.layers
    planes = [torch.stack([layer.keys[0], layer.values[0]]) for layer in layers]
    return torch.stack(planes).permute(0, 1, 3, 2, 4).contiguous()


def measure(kv: torch.Tensor, dtype: str, tokens_per_block: int) -> None:
    num_layers, _, num_tokens, num_heads, dim = kv.shape
    layout = Layout(dtype, num_layers, num_heads, (dim, dim), tokens_per_block)
    starts = range(0, num_tokens - tokens_per_block + 1, tokens_per_block)
    parts = [kv[:, :, start : start + tokens_per_block].contiguous() for start in starts]
    blocks = [part.view(torch.uint8).numpy().reshape(-1).data for part in parts]
    out = np.empty(layout.block_bytes, np.uint8)
    for codec in CODECS.values():
        if codec is NONE:
            continue
        encode_s, decode_s, stored_bytes = [], [], 0
        for block in blocks:
            began_s = time.perf_counter()
            codec_id, stored = encode(codec, block, layout)
            encode_s.append(time.perf_counter() - began_s)
            began_s = time.perf_counter()
            is_whole = CODECS_BY_ID[codec_id].decode(memoryview(stored), out.data, layout)
            decode_s.append(time.perf_counter() - began_s)
            if not is_whole or bytes(out) != bytes(block):
                raise SystemExit(f"{codec.name} lost bytes")
            stored_bytes += len(stored)
        ratio = layout.block_bytes * len(blocks) / stored_bytes
        speeds = [layout.block_bytes / median(times) / 1e9 for times in (encode_s, decode_s)]
        print(
            f"| {dtype} | {layout.block_bytes >> 10} KiB | {codec.name} "
            f"| {ratio:.2f} | {speeds[0]:.1f} | {speeds[1]:.1f} |"
        )


def main(directory: str, gguf: str, text_file: str) -> None:
    torch.set_num_threads(1)
    text = Path(text_file).read_text()
    print("| dtype | block | codec | ratio | encode GB/s | decode GB/s |\n|---|---|---|---|---|---|")
    for dtype, torch_dtype in DTYPES.items():
        kv = compute_kv(directory, gguf, text, COMPUTE[dtype]).to(torch_dtype)
        for tokens_per_block in TOKENS_PER_BLOCK:
            measure(kv, dtype, tokens_per_block)


if __name__ == "__main__":
    main(*sys.argv[1:])
