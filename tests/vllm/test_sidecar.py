"""Two engines that share a sidecar, and one that sees it stop, hang and come back."""

import signal
import time
from pathlib import Path

import pytest

from kvstore.testing.sidecar import Sidecar
from tests.vllm.engine import EngineProcess, engine
from tests.vllm.prompts import CROWD, NUM_TOKENS, PAGE_TOKENS, PROMPT

pytestmark = pytest.mark.engine

WHOLE_BLOCKS = 10 * PAGE_TOKENS
PATIENCE_S = 20.0


def served_again(process: EngineProcess, prompt: list[int], tokens: list[int]) -> bool:
    """Ask until the store serves the prompt; every answer must be right."""
    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s:
        process.reset(False)
        answer = process.generate([prompt], NUM_TOKENS)[0]
        assert answer["tokens"] == tokens
        if answer["cached"]:
            return True
        time.sleep(0.2)
    return False


def test_a_second_engine_loads_what_the_first_computed(
    model: Path, expected: dict[str, list[list[int]]], tmp_path: Path
) -> None:
    (tokens,) = expected["one"]
    with Sidecar(MEMORY_CAPACITY="64MiB") as sidecar:
        store = {"sidecar": True, "server": {"socket": str(sidecar.socket)}}
        with engine(model, tmp_path / "1.log", store=store) as first:
            answer = first.generate([PROMPT], NUM_TOKENS)[0]
            assert (answer["tokens"], answer["cached"]) == (tokens, 0)
            # As a server that does nothing but prefill would: the other one decodes.
            assert first.generate([CROWD[3]], 1)[0]["tokens"] == expected["crowd"][3][:1]
        with engine(model, tmp_path / "2.log", store=store, processes=True) as second:
            answer = second.generate([CROWD[3]], NUM_TOKENS)[0]
            assert answer["tokens"] == expected["crowd"][3]
            assert answer["cached"] == (len(CROWD[3]) - 1) // PAGE_TOKENS * PAGE_TOKENS
            second.reset(False)
            answer = second.generate([PROMPT], NUM_TOKENS)[0]
            assert (answer["tokens"], answer["cached"]) == (tokens, WHOLE_BLOCKS)
            assert second.numbers()["external_prefix_cache_hits"] >= WHOLE_BLOCKS
            assert "tokens the store gave" in (tmp_path / "2.log").read_text()

            sidecar.send(signal.SIGSTOP)
            second.reset(False)
            answers = second.generate(CROWD, NUM_TOKENS)
            assert [answer["tokens"] for answer in answers] == expected["crowd"], "while it hangs"
            sidecar.send(signal.SIGCONT)
            assert served_again(second, CROWD[-1], expected["crowd"][-1]), "after it hung"

            sidecar.kill()
            second.reset(False)
            answers = second.generate(CROWD, NUM_TOKENS)
            assert [answer["tokens"] for answer in answers] == expected["crowd"], "while it is gone"
            sidecar.restart()
            sidecar.wait_ready()
            assert served_again(second, PROMPT, tokens), "after it came back, empty"
