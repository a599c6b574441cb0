"""Traces made up for tests: chats that go on, branch, end, and share prompts; none of it from the world."""

import numpy as np

from kvstore.replay.trace import BlockNumbers, Trace, TraceRequest

TOKENS_PER_BLOCK = 16


def made_up_trace(num_requests: int, *, seed: int = 0, num_prompts: int = 3, mean_turn_blocks: int = 4) -> Trace:
    """Sessions of a few turns each under one of a few system prompts; one turn in ten edits what came before."""
    rng = np.random.default_rng(seed)
    numbers = BlockNumbers()
    sessions: list[list[object]] = []
    requests = []
    now_s = 1_700_000_000.0
    for index in range(num_requests):
        now_s += float(rng.exponential(2.0))
        if not sessions or rng.random() < 0.3:
            prompt = int(rng.integers(num_prompts))
            sessions.append([("prompt", prompt, depth) for depth in range(prompt + 1)])
        session = sessions[int(len(sessions) * rng.power(4))]
        if rng.random() < 0.1:
            del session[len(session) // 2 :]
        session.extend((index, depth) for depth in range(int(rng.integers(1, 2 * mean_turn_blocks))))
        input_tokens = TOKENS_PER_BLOCK * len(session) - int(rng.integers(TOKENS_PER_BLOCK))
        requests.append(TraceRequest(now_s, input_tokens, int(rng.integers(1, 200)), numbers.chain(session)))
        if rng.random() < 0.1:
            sessions.remove(session)
    return Trace.of("made up", TOKENS_PER_BLOCK, requests)
