"""What it costs to compute a prompt. Pure."""

ATTENTION_TOKENS = 30_600.0
"""Position at which attending to all earlier tokens costs as much as the rest of the model does for a token.

A token costs 2 * parameters operations, and 4 * width * layers for each token that it attends to: Llama 3 8B
(8.03e9 parameters, width 4096, 32 layers) comes to 2 * 8.03e9 / (4 * 4096 * 32).
"""


def prefill_cost(num_tokens: int, attention_tokens: float = ATTENTION_TOKENS) -> float:
    """Work to compute the first ``num_tokens`` of a prompt, in units of a first token's."""
    return num_tokens * (1.0 + num_tokens / (2.0 * attention_tokens))
