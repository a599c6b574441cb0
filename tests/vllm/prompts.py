"""What the engines are asked."""

PAGE_TOKENS = 32
NUM_TOKENS = PAGE_TOKENS + 8
PROMPT = [(7 * index + index * index) % 500 + 3 for index in range(10 * PAGE_TOKENS + 5)]
CROWD = [
    [(index * index + 3 * index) % 490 + 3 for index in range(4 * PAGE_TOKENS)]
    + [(number * index + 5 * index) % 480 + 7 for index in range(40 + 11 * number)]
    for number in range(24)
]
"""Requests that share a beginning of four pages, and end in different lengths."""
