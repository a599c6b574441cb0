"""A Llama- or Qwen-family decoder: weights in, logits out."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own idiom
from torch import Tensor

from connectors.torch_engine.attention import Batch, attend
from connectors.torch_engine.config import ModelConfig
from connectors.torch_engine.weights import Checkpoint

SWAPPED_ROWS = 8
"""Up to so many rows a float32 product on a CPU is faster with its operands swapped."""


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one decoder layer; projections that read the same input are one matrix."""

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_norm: Tensor | None  # [heads + kv_heads, dim]
    out: Tensor
    out_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class Model:
    """The decoder, on one device and in one dtype."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, max_positions: int) -> None:
        """Take every tensor of ``checkpoint``. Raises ``ConfigError`` for a model that is not the one it says."""
        self.config = checkpoint.config
        self.dtype = dtype
        self.max_positions = max_positions
        self.device = device

        def take(name: str) -> Tensor:
            return checkpoint.take(name).to(device, dtype)

        self._embedding = take("model.embed_tokens.weight")
        self._layers = [
            _take_layer(checkpoint, f"model.layers.{index}.", dtype, device) for index in range(self.config.num_layers)
        ]
        self._norm = take("model.norm.weight")
        self._head = self._embedding if self.config.tied_embeddings else take("lm_head.weight")
        self._cos, self._sin = _rotations(self.config, max_positions, dtype, device)
        checkpoint.require_all_taken()

    def new_kv(self, num_pages: int, tokens_per_page: int) -> Tensor:
        """KV of ``num_pages`` pages, ``[pages, layers, 2, tokens, kv_heads, dim]``."""
        c = self.config
        shape = (num_pages, c.num_layers, 2, tokens_per_page, c.num_kv_heads, c.head_dim)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def forward(self, tokens: Tensor, batch: Batch, kv: Tensor, wait_layer: Callable[[int], None]) -> Tensor:
        """Write the KV of ``tokens`` into ``kv`` and return their last hidden states, ``[rows, hidden]``.

        ``wait_layer(i)`` is called before layer ``i`` reads KV that may still be on its way.
        """
        x = F.embedding(tokens, self._embedding)
        cos, sin = self._cos[batch.positions], self._sin[batch.positions]
        for index, layer in enumerate(self._layers):
            qkv = self._project(x, layer, cos, sin)
            wait_layer(index)
            x += _linear(self._attend(qkv, kv[:, index], batch), layer.out, layer.out_bias)
            gate, up = _linear(self._normalise(x, layer.mlp_norm), layer.gate_up).chunk(2, dim=1)
            x += _linear(F.silu(gate).mul_(up), layer.down)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of every next token, ``[rows, vocabulary]``."""
        return _linear(self._normalise(hidden, self._norm), self._head)

    def _normalise(self, x: Tensor, weight: Tensor | None) -> Tensor:
        # Not F.rms_norm: on CPU it takes ten times as long for a chunk of a prompt.
        wide = x.float()
        scale = wide.square().mean(dim=-1, keepdim=True).add_(self.config.rms_eps).rsqrt_()
        normal = (wide * scale).to(x.dtype)
        return normal if weight is None else normal.mul_(weight)

    def _project(self, x: Tensor, layer: Layer, cos: Tensor, sin: Tensor) -> Tensor:
        """Queries, keys and values of all rows, rotated: ``[rows, heads + 2 * kv_heads, dim]``."""
        c = self.config
        qkv = _linear(self._normalise(x, layer.attention_norm), layer.qkv, layer.qkv_bias)
        qkv = qkv.view(len(x), -1, c.head_dim)
        qk = qkv[:, : c.num_heads + c.num_kv_heads]
        source = qk if layer.qk_norm is None else self._normalise(qk, None).mul_(layer.qk_norm)
        torch.addcmul(source * cos, source.roll(c.head_dim // 2, -1), sin, out=qk)
        return qkv

    def _attend(self, qkv: Tensor, kv_layer: Tensor, batch: Batch) -> Tensor:
        c = self.config
        query = qkv[:, : c.num_heads]
        kv_rows = qkv[:, c.num_heads :].view(len(qkv), 2, c.num_kv_heads, c.head_dim)
        kv_layer[batch.pages, :, batch.offsets] = kv_rows
        outs = [attend(query[g.rows], kv_rows[g.rows], kv_layer, g, batch.gathered) for g in batch.groups]
        return outs[0] if len(outs) == 1 else torch.cat(outs)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x`` [rows, in] times ``weight`` [out, in] transposed, plus ``bias``."""
    rows = len(x)
    if rows > SWAPPED_ROWS or x.dtype != torch.float32 or x.device.type != "cpu":
        return F.linear(x, weight, bias)
    # For few rows MKL reads the weights at a third of what memory gives, but not when they are the left operand of two
    # columns or more.
    columns = x.repeat(2, 1) if rows == 1 else x
    out = torch.mm(weight, columns.t()).t()[:rows].contiguous()
    return out if bias is None else out.add_(bias)


def _take_layer(checkpoint: Checkpoint, prefix: str, dtype: torch.dtype, device: torch.device) -> Layer:
    def take(*names: str) -> Tensor:
        return torch.cat([checkpoint.take(prefix + name) for name in names]).to(device, dtype)

    def take_optional(*names: str) -> Tensor | None:
        return take(*names) if prefix + names[0] in checkpoint.names else None

    c = checkpoint.config
    q_norm = take_optional("self_attn.q_norm.weight")
    k_norm = take_optional("self_attn.k_norm.weight")
    qk_norm = None
    if q_norm is not None and k_norm is not None:
        qk_norm = torch.cat([q_norm.expand(c.num_heads, -1), k_norm.expand(c.num_kv_heads, -1)])
    projections = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    return Layer(
        attention_norm=take("input_layernorm.weight"),
        qkv=take(*(f"{name}.weight" for name in projections)),
        qkv_bias=take_optional(*(f"{name}.bias" for name in projections)),
        qk_norm=qk_norm,
        out=take("self_attn.o_proj.weight"),
        out_bias=take_optional("self_attn.o_proj.bias"),
        mlp_norm=take("post_attention_layernorm.weight"),
        gate_up=take("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        down=take("mlp.down_proj.weight"),
    )


def _rotations(
    config: ModelConfig, num_positions: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosine and signed sine of every position, ``[positions, 1, dim]``: x * cos + roll(x, dim / 2) * sin rotates."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    if config.rope_factors:
        frequencies /= torch.tensor(config.rope_factors)
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], -1).to(device, dtype), torch.cat([-sin, sin], -1).to(device, dtype)
