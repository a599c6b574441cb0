"""Checkpoints for vLLM on a CPU, in float32: the tokens of a batch and of a single request are the same then."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from connectors.torch_engine.weights import open_checkpoint

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


WINDOW_TOKENS = 80
"""Neither whole pages nor a page less one token."""
HYBRID = TINY | {
    "num_hidden_layers": 5,
    "sliding_window": WINDOW_TOKENS,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention"],
}
"""Of vLLM's groups one has the two full layers, one two of the others, and one the last: it has smaller blocks."""


def tiny_hybrid(directory: Path) -> Path:
    """The same with sliding windows in most of its layers, as Gemma 3 and gpt-oss have them."""
    return tiny_llama(directory, config=HYBRID)


def tiny_llama(directory: Path, *, seed: int = 0, config: dict[str, object] = TINY) -> Path:
    """A generated Llama, whose attention is sharp enough that its answer depends on the whole prompt."""
    hidden, inner, vocab, num_layers = (
        config[name] for name in ("hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers")
    )
    assert isinstance(num_layers, int)
    assert isinstance(hidden, int)
    assert isinstance(inner, int)
    assert isinstance(vocab, int)
    q, kv = 4 * 32, 2 * 32
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).mul(2.0 / shape[-1] ** 0.5)

    tensors = {"model.embed_tokens.weight": random(vocab, hidden), "lm_head.weight": random(vocab, hidden)}
    tensors["model.norm.weight"] = torch.ones(hidden)
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}."
        for name, shape in {
            "self_attn.q_proj": (q, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, q),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }.items():
            tensors[f"{prefix}{name}.weight"] = random(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = torch.ones(hidden)
    return _save(directory, config, tensors)


def from_gguf(directory: Path, gguf: Path) -> Path:
    """A GGUF file's model as float32 safetensors."""
    with open_checkpoint(gguf) as checkpoint:
        config = checkpoint.config
        raw = TINY | {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "max_position_embeddings": config.max_positions,
            "rms_norm_eps": config.rms_eps,
            "rope_theta": config.rope_theta,
            "tie_word_embeddings": config.tied_embeddings,
            "eos_token_id": config.eos_ids[0],
        }
        tensors = {name: checkpoint.read(name).float().contiguous() for name in sorted(checkpoint.names)}
    return _save(directory, raw, tensors)


def _save(directory: Path, config: dict[str, object], tensors: dict[str, torch.Tensor]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory
