"""Checkpoints: safetensors directories, GGUF files, a generated tiny model; all under transformers' tensor names."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import torch
from safetensors import safe_open
from torch import Tensor

from connectors.torch_engine.config import ModelConfig
from connectors.torch_engine.tokenizer import ChatTokenizer, byte_level, from_directory, from_gguf
from kvstore.errors import ConfigError

_GGUF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"


@dataclass
class Checkpoint:
    """A model's geometry, its tensors and its tokenizer, each read when it is taken."""

    config: ModelConfig
    names: frozenset[str]
    read: Callable[[str], Tensor]
    tokenizer: Callable[[], ChatTokenizer | None]
    taken: set[str] = field(default_factory=set)

    def take(self, name: str) -> Tensor:
        """Read a tensor that must be there."""
        if name not in self.names:
            raise ConfigError(
                f"the checkpoint has no tensor {name}; it is not a whole {self.config.architecture} model"
            )
        self.taken.add(name)
        return self.read(name)

    def take_optional(self, name: str) -> Tensor | None:
        """Read a tensor that only some models have."""
        return self.take(name) if name in self.names else None

    def require_all_taken(self) -> None:
        """A tensor that nobody took is a part of the model that would be missing from its answers."""
        left = sorted(name for name in self.names - self.taken if not name.endswith("rotary_emb.inv_freq"))
        if left:
            raise ConfigError(f"the engine does not know what to do with {len(left)} tensors, such as {left[0]}")


@contextmanager
def open_checkpoint(path: Path) -> Iterator[Checkpoint]:
    """A GGUF file or a directory with ``config.json`` and safetensors; tensors can be taken inside the context."""
    if path.is_file():
        yield _open_gguf(path)
        return
    if not (path / "config.json").is_file():
        raise ConfigError(f"{path} is neither a GGUF file nor a directory with a config.json")
    with ExitStack() as files:
        shards = [files.enter_context(safe_open(shard, "pt")) for shard in sorted(path.glob("*.safetensors"))]
        shard_of = {name: shard for shard in shards for name in shard.keys()}  # noqa: SIM118 - not a dict
        config = ModelConfig.from_hf(json.loads((path / "config.json").read_text()))
        names = frozenset(shard_of) - ({"lm_head.weight"} if config.tied_embeddings else set())
        yield Checkpoint(config, names, lambda name: shard_of[name].get_tensor(name), lambda: from_directory(path))


def _open_gguf(path: Path) -> Checkpoint:
    reader = gguf.GGUFReader(path)
    raw = {tensor.name: tensor for tensor in reader.tensors}

    def load(name: str) -> Tensor:
        tensor = raw[name]
        return torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())

    factors = tuple(load(_ROPE_FACTORS).tolist()) if _ROPE_FACTORS in raw else ()
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = ModelConfig.from_gguf(fields, factors, tied="output.weight" not in raw)
    source = {_hf_name(name): name for name in raw if name != _ROPE_FACTORS}

    def read(name: str) -> Tensor:
        tensor = load(source[name])
        if config.architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            return _halves(tensor, config.head_dim)
        return tensor

    return Checkpoint(config, frozenset(source), read, lambda: from_gguf(fields))


def _hf_name(name: str) -> str:
    """``blk.3.attn_q.weight`` to ``model.layers.3.self_attn.q_proj.weight``; unknown names stay as they are."""
    *prefix, stem, kind = name.split(".")
    stem = _GGUF_NAMES.get(stem, stem)
    return ".".join((["model", "layers", prefix[1]] if prefix else []) + [stem, kind])


def _halves(weight: Tensor, head_dim: int) -> Tensor:
    """Undo the order of llama.cpp, which rotates neighbours (2i, 2i+1), to that of transformers (i, i + dim/2)."""
    rows, columns = weight.shape
    return weight.view(rows // head_dim, head_dim // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


TINY = ModelConfig(
    architecture="llama",
    vocab_size=259,
    hidden_size=64,
    intermediate_size=128,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_eps=1e-5,
    rope_theta=10_000.0,
    max_positions=32_768,
    tied_embeddings=False,
    eos_ids=(258,),
)


def tiny_checkpoint(seed: int, config: ModelConfig = TINY) -> Checkpoint:
    """A model with random weights: the same for the same seed, and of no use but to compare tokens."""
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = {
        "input_layernorm.weight": (config.hidden_size,),
        "self_attn.q_proj.weight": (q, config.hidden_size),
        "self_attn.k_proj.weight": (kv, config.hidden_size),
        "self_attn.v_proj.weight": (kv, config.hidden_size),
        "self_attn.o_proj.weight": (config.hidden_size, q),
        "post_attention_layernorm.weight": (config.hidden_size,),
        "mlp.gate_proj.weight": (config.intermediate_size, config.hidden_size),
        "mlp.up_proj.weight": (config.intermediate_size, config.hidden_size),
        "mlp.down_proj.weight": (config.hidden_size, config.intermediate_size),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "model.norm.weight": (config.hidden_size,),
        "lm_head.weight": (config.vocab_size, config.hidden_size),
    }
    for index in range(config.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    generator = torch.Generator().manual_seed(seed)
    # Spread wide enough that attention is sharp and the answer depends on the whole prompt.
    tensors = {
        name: torch.ones(shape)
        if len(shape) == 1
        else torch.randn(shape, generator=generator) * (2.0 / shape[1] ** 0.5)
        for name, shape in shapes.items()
    }
    return Checkpoint(config, frozenset(tensors), lambda name: tensors[name], byte_level)
