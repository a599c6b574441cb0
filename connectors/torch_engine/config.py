"""What a model is shaped like, and what an engine may use."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvstore.errors import ConfigError
from kvstore.layout import Layout

ARCHITECTURES = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The geometry of a Llama- or Qwen-family decoder.

    ``rope_factors`` divides the rotary frequencies, one factor per pair of dimensions; empty means none.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    rope_theta: float
    max_positions: int
    tied_embeddings: bool
    eos_ids: tuple[int, ...]
    rope_factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise ConfigError(
                f"model architecture {self.architecture!r} is not supported; use one of {', '.join(ARCHITECTURES)}"
            )

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    def layout(self, dtype: str, tokens_per_block: int) -> Layout:
        """The bytes of one block of this model's KV."""
        return Layout(dtype, self.num_layers, self.num_kv_heads, (self.head_dim, self.head_dim), tokens_per_block)

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> "ModelConfig":
        """Read a ``config.json`` of transformers, of version 4 (``rope_theta``) or 5 (``rope_parameters``)."""
        if raw.get("use_sliding_window"):
            raise ConfigError("the model uses sliding-window attention, which this engine does not have")
        head_dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
        rope = {"rope_theta": raw.get("rope_theta", 10_000.0)}
        rope |= raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        eos = raw.get("eos_token_id")
        return cls(
            architecture=raw["model_type"],
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_layers=raw["num_hidden_layers"],
            num_heads=raw["num_attention_heads"],
            num_kv_heads=raw.get("num_key_value_heads") or raw["num_attention_heads"],
            head_dim=head_dim,
            rms_eps=raw["rms_norm_eps"],
            rope_theta=rope["rope_theta"],
            max_positions=raw["max_position_embeddings"],
            tied_embeddings=raw.get("tie_word_embeddings", False),
            eos_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
            rope_factors=_rope_factors(rope, head_dim),
        )

    @classmethod
    def from_gguf(cls, fields: Mapping[str, Any], rope_factors: tuple[float, ...], *, tied: bool) -> "ModelConfig":
        """Read the metadata of a GGUF file; ``rope_factors`` and ``tied`` show in its tensors."""
        arch = fields["general.architecture"]

        def get(name: str, default: Any = None) -> Any:
            return fields.get(f"{arch}.{name}", default)

        if get("rope.scaling.type", "none") != "none":
            raise ConfigError(f"rope scaling {get('rope.scaling.type')!r} is not supported in GGUF files")
        heads = get("attention.head_count")
        return cls(
            architecture=arch,
            vocab_size=len(fields["tokenizer.ggml.tokens"]),
            hidden_size=get("embedding_length"),
            intermediate_size=get("feed_forward_length"),
            num_layers=get("block_count"),
            num_heads=heads,
            num_kv_heads=get("attention.head_count_kv", heads),
            head_dim=get("attention.key_length", get("embedding_length") // heads),
            rms_eps=get("attention.layer_norm_rms_epsilon"),
            rope_theta=get("rope.freq_base", 10_000.0),
            max_positions=get("context_length"),
            tied_embeddings=tied,
            eos_ids=(fields["tokenizer.ggml.eos_token_id"],),
            rope_factors=rope_factors,
        )


def _rope_factors(rope: Mapping[str, Any], head_dim: int) -> tuple[float, ...]:
    """How much slower each pair of dimensions rotates; the formula of Llama 3.1 for ``llama3``."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return ()
    if kind == "linear":
        return (float(rope["factor"]),) * (head_dim // 2)
    if kind != "llama3":
        raise ConfigError(f"rope scaling {kind!r} is not supported; use default, linear or llama3")
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    factors = []
    for pair in range(head_dim // 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (2 * pair / head_dim)
        kept = (rope["original_max_position_embeddings"] / wavelength - low) / (high - low)
        kept = min(max(kept, 0.0), 1.0)
        factors.append(1 / ((1 - kept) / factor + kept))
    return tuple(factors)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What one engine may use. A page holds one block."""

    num_pages: int = 1024
    tokens_per_block: int = 16
    max_running: int = 16
    """Requests that compute in the same step."""
    max_step_tokens: int = 512
    """Tokens of one step, over all requests: longer prompts are computed in chunks."""
    prefetch_timeout_s: float = 2.0
    """How long a request waits for the store to bring its prefix into RAM before it computes."""
    quantisation: str = ""
    """What blocks are quantised to on their way to the store, a name in ``kvstore.layout.QUANTISED``; empty: not."""

    def __post_init__(self) -> None:
        for name in ("num_pages", "tokens_per_block", "max_running"):
            if getattr(self, name) < 1:
                raise ConfigError(f"engine {name} is {getattr(self, name)}; it must be at least 1")
        if self.max_step_tokens <= self.max_running:
            raise ConfigError(
                f"engine max_step_tokens is {self.max_step_tokens}; it must exceed max_running, {self.max_running},"
                " so that prompts advance while every other request decodes"
            )
