"""Made-up traces unlike the ones that people have published: whoever is tuned to those does badly on these.

Each is a stream of what one kind of user asks for, drawn from a seed. Nothing in a policy may be fitted to them either.
"""

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from kvstore.replay.trace import BlockNumbers, Trace, TraceRequest

TOKENS_PER_BLOCK = 256

Stream = Iterator[TraceRequest]


class Blocks:
    """Numbers blocks in the order in which they are made."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def new(self, count: int) -> tuple[int, ...]:
        """So many blocks that nobody had before."""
        return tuple(itertools.islice(self._numbers, count))


def retrieval(rng: np.random.Generator, blocks: Blocks, *, num_documents: int = 3000, every_s: float = 1.0) -> Stream:
    """A question about one document after a system prompt; documents are drawn by popularity, no session goes on."""
    system = blocks.new(4)
    popularity = 1.0 / np.arange(1, num_documents + 1)
    popularity /= popularity.sum()
    documents: dict[int, tuple[int, ...]] = {}
    now_s = 0.0
    while True:
        now_s += rng.exponential(every_s)
        document = int(rng.choice(num_documents, p=popularity))
        if document not in documents:
            documents[document] = blocks.new(int(rng.integers(2, 24)))
        yield request(rng, now_s, system + documents[document] + blocks.new(int(rng.integers(1, 5))), 200)


def chats(
    rng: np.random.Generator,
    blocks: Blocks,
    *,
    every_s: float = 4.0,
    think_s: float = 60.0,
    goes_on: float = 0.7,
    num_apps: int = 5,
    growth_blocks: int = 4,
) -> Stream:
    """Sessions that grow by turns, each with the system prompt of one of some applications."""
    apps = [blocks.new(int(rng.integers(2, 12))) for _ in range(num_apps)]
    order = itertools.count()
    arrivals: list[tuple[float, int, tuple[int, ...]]] = [(0.0, next(order), ())]
    while True:
        now_s, _, chain = heapq.heappop(arrivals)
        if not chain:  # a new session, and the one after it
            heapq.heappush(arrivals, (now_s + rng.exponential(every_s), next(order), ()))
            chain = apps[int(rng.integers(num_apps))]
        chain += blocks.new(1 + int(rng.geometric(1 / growth_blocks)))
        yield request(rng, now_s, chain, 100 * growth_blocks)
        if rng.random() < goes_on:
            heapq.heappush(arrivals, (now_s + 1.0 + think_s * rng.lognormal(0.0, 1.0) / 1.65, next(order), chain))


def agents(rng: np.random.Generator, blocks: Blocks) -> Stream:
    """Loops of tool calls, seconds apart and dozens long, that often wait minutes for a person in between."""
    return chats(rng, blocks, every_s=20.0, think_s=6.0, goes_on=0.96, num_apps=3, growth_blocks=3)


def scan(rng: np.random.Generator, blocks: Blocks, *, every_s: float = 2.0) -> Stream:
    """A batch of documents, each asked about once under one instruction."""
    instruction, now_s = blocks.new(2), 0.0
    while True:
        now_s += rng.exponential(every_s)
        yield request(rng, now_s, instruction + blocks.new(int(rng.integers(10, 40))), 50)


def evaluation(rng: np.random.Generator, blocks: Blocks) -> Stream:
    """The same questions from first to last, again and again."""
    shots = blocks.new(12)
    questions = [shots + blocks.new(int(rng.integers(1, 6))) for _ in range(1200)]
    for number in itertools.count():
        yield request(rng, 0.5 * number, questions[number % len(questions)], 20)


def drift(rng: np.random.Generator, blocks: Blocks) -> Stream:
    """Retrieval from documents that are news for a while: every quarter of an hour others are popular."""
    numbers, now_s = itertools.count(), 0.0
    documents: dict[int, tuple[int, ...]] = {}
    system = blocks.new(3)
    for number in numbers:
        now_s += rng.exponential(1.0)
        document = int(now_s / 9) + int(rng.zipf(1.3))
        if document not in documents:
            documents[document] = blocks.new(int(rng.integers(2, 16)))
        yield request(rng, now_s, system + documents[document] + blocks.new(1 + number % 2), 200)


def request(rng: np.random.Generator, now_s: float, chain: tuple[int, ...], mean_output_tokens: int) -> TraceRequest:
    """The last block is partial."""
    input_tokens = len(chain) * TOKENS_PER_BLOCK - int(rng.integers(TOKENS_PER_BLOCK))
    return TraceRequest(now_s, input_tokens, 1 + int(rng.exponential(mean_output_tokens)), chain)


def merged(*streams: Stream) -> Stream:
    """In order of time, each in a namespace of its own."""
    return heapq.merge(*map(_named, itertools.count(), streams), key=lambda one: one.now_s)


def _named(number: int, stream: Stream) -> Stream:
    return (replace(one, namespace=bytes([number])) for one in stream)


def made_traces(num_requests: int = 4000) -> Iterator[Trace]:
    """All of them."""
    for number, (name, make) in enumerate(_MAKERS.items()):
        stream = make(np.random.default_rng(number), Blocks())
        numbers = BlockNumbers()
        requests = [replace(one, chain=numbers.chain(one.chain)) for one in itertools.islice(stream, num_requests)]
        yield Trace.of(f"made: {name}", TOKENS_PER_BLOCK, requests)


def _tenants(rng: np.random.Generator, blocks: Blocks) -> Stream:
    return merged(
        chats(rng, blocks), retrieval(rng, blocks, every_s=2.0), scan(rng, blocks, every_s=6.0), agents(rng, blocks)
    )


def _scanned(rng: np.random.Generator, blocks: Blocks) -> Stream:
    return merged(chats(rng, blocks, think_s=90.0), scan(rng, blocks, every_s=1.5))


def _untimed(rng: np.random.Generator, blocks: Blocks) -> Stream:
    return (replace(one, now_s=0.0) for one in merged(chats(rng, blocks), retrieval(rng, blocks, every_s=2.0)))


_MAKERS = {
    "retrieval": retrieval,
    "agent loops": agents,
    "tenants": _tenants,
    "scanned": _scanned,
    "evaluation": evaluation,
    "drift": drift,
    "untimed": _untimed,
}
