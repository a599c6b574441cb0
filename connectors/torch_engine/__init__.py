"""The reference engine: a small, exact LLM engine in PyTorch whose KV pages are the top tier of the store."""
