"""Chats as people export them, ShareGPT's or OpenAI's: an array of them, or one after another. Pure.

A chat has ``conversations`` of ``from`` and ``value``, or ``messages`` of ``role`` and ``content``. Every answer is a
request: all that was said before it is its prompt. Without a tokenizer four bytes of UTF-8 count as a token, which is
near what byte-pair encodings make of English and code. Such files know no times: conversations begin at random, one a
second, and a person takes a minute on average to read and reply.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import xxhash

from kvstore.replay.json_stream import JsonStreamError, read_objects
from kvstore.replay.trace import BlockNumbers, TraceRequest

TOKENS_PER_BLOCK = 16
TOKEN_BYTES = 4

START_INTERVAL_S = 1.0
REPLY_S = 60.0
DECODE_TOKENS_PER_S = 50.0

MADE_UP_TIMES = "times are made up: a conversation begins each second, a person replies after a minute"
ESTIMATED_TOKENS = "tokens are estimated: four bytes of text each"

Encode = Callable[[str], bytes]
"""Text to ``TOKEN_BYTES`` for each token."""

_ANSWERERS = {"gpt", "assistant", "model", "chatgpt", "bard", "bing"}


def estimate(text: str) -> bytes:
    """The text itself, padded to whole tokens."""
    encoded = text.encode(errors="replace")
    return encoded + bytes(-len(encoded) % TOKEN_BYTES)


def read_chats(
    pieces: Iterable[str], tokens_per_block: int, encode: Encode, report: Callable[[int, str], None]
) -> Iterator[TraceRequest]:
    """The requests of all chats in order of time; what is no chat is reported by the line it begins on."""
    rng = np.random.default_rng(0)
    numbers = BlockNumbers()
    waiting: list[tuple[float, int, TraceRequest]] = []  # a request by its time; the count keeps equals in order
    now_s = 0.0
    num_requests = 0
    for said in _chats(pieces, encode, report):
        now_s += float(rng.exponential(START_INTERVAL_S))
        while waiting and waiting[0][0] <= now_s:
            yield heapq.heappop(waiting)[2]
        at_s, prompt = now_s, b""
        for is_answer, tokens in said:
            if is_answer and prompt:
                output_tokens = len(tokens) // TOKEN_BYTES
                request = _request(at_s, prompt, output_tokens, tokens_per_block, numbers)
                heapq.heappush(waiting, (at_s, num_requests, request))
                num_requests += 1
                at_s += output_tokens / DECODE_TOKENS_PER_S + float(rng.exponential(REPLY_S))
            prompt += tokens
    while waiting:
        yield heapq.heappop(waiting)[2]


def _request(
    at_s: float, prompt: bytes, output_tokens: int, tokens_per_block: int, numbers: BlockNumbers
) -> TraceRequest:
    block_bytes = tokens_per_block * TOKEN_BYTES
    hashes = (
        xxhash.xxh3_64_intdigest(prompt[begin : begin + block_bytes]) for begin in range(0, len(prompt), block_bytes)
    )
    return TraceRequest(at_s, len(prompt) // TOKEN_BYTES, output_tokens, numbers.chain(hashes))


def _chats(
    pieces: Iterable[str], encode: Encode, report: Callable[[int, str], None]
) -> Iterator[list[tuple[bool, bytes]]]:
    """Who said what, encoded: (whether it is an answer, tokens)."""
    try:
        for line, value in read_objects(pieces):
            try:
                said = [_message(message) for message in _messages(value)]
            except (KeyError, TypeError, ValueError) as error:
                report(line, f"no chat: {error}")
                continue
            yield [(role in _ANSWERERS, encode(f"<|{role}|>{text}\n")) for role, text in said]
    except JsonStreamError as error:
        report(error.line, f"{error}; nothing after it can be read")


def _messages(value: Any) -> list[Any]:
    if isinstance(value, dict):
        for key in ("conversations", "conversation", "messages"):
            if isinstance(value.get(key), list):
                return list(value[key])
    raise ValueError("neither conversations nor messages in it")


def _message(value: Any) -> tuple[str, str]:
    if not isinstance(value, dict):
        raise TypeError("a message that is no object")
    role = value.get("from", value.get("role"))
    text = value.get("value", value.get("content"))
    if isinstance(text, list):
        text = "".join(str(part.get("text", "")) for part in text if isinstance(part, dict))
    if not isinstance(role, str) or not isinstance(text, str | None):
        raise TypeError("a message without role or text")
    return role, text or ""
