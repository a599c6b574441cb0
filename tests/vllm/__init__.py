"""Tests with the real vLLM, in its own environment: make test-vllm."""
