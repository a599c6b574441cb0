"""Tiered KV cache store: keeps an LLM's KV blocks in GPU memory, host RAM, NVMe and Redis."""

__version__ = "0.1.0"
