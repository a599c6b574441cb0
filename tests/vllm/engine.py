"""A process with one vLLM engine that does what a test says, one line at a time.

python -m tests.vllm.engine ARGUMENTS     the engine's arguments as JSON; then a JSON list a line in, a JSON value out
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.vllm.prompts import PAGE_TOKENS

ROOT = Path(__file__).parents[2]

START_S = 300.0
TRANSFER = {
    "kv_connector": "KVStoreConnector",
    "kv_connector_module_path": "connectors.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
NUMBERS = (
    "external_prefix_cache_queries",
    "external_prefix_cache_hits",
    "prefix_cache_hits",
    "kvstore_loaded_tokens",
    "num_preemptions",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
)


def offloading(*tiers: dict[str, Any], cpu_bytes: int = 16 << 20) -> dict[str, Any]:
    """Settings of vLLM's own connector, with its CPU tier above ``tiers``; see ``tests.vllm.cpu_offload``."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "CPUSpec",
            "spec_module_path": "tests.vllm.cpu_offload",
            "cpu_bytes_to_use": cpu_bytes,
            "secondary_tiers": list(tiers),
        },
    }


class Engine:
    """What can be said to it."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm import LLM  # noqa: PLC0415 - takes ten seconds, and is not there where the tests are checked

        self._llm = LLM(
            skip_tokenizer_init=True,
            disable_log_stats=False,
            enforce_eager=True,
            seed=0,
            **arguments,
        )

    def generate(self, prompts: list[list[int]], max_tokens: int, **sampling: Any) -> list[dict[str, Any]]:
        """Answer the prompts together, greedily: their tokens, and how many of the prompt were cached."""
        from vllm import SamplingParams  # noqa: PLC0415 - see above

        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, **sampling)
        outputs = self._llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        self._settle()
        return [{"tokens": list(output.outputs[0].token_ids), "cached": output.num_cached_tokens} for output in outputs]

    def _settle(self) -> None:
        """What an engine process does by itself: step on until what was stored is stored."""
        core = getattr(self._llm.llm_engine.engine_core, "engine_core", None)
        while core is not None and core.scheduler.has_requests():
            core.step_fn()

    def scribble(self) -> None:
        """Overwrite the store's RAM. Only for an engine in one process, with a store of its own."""
        connector = self._llm.llm_engine.engine_core.engine_core.scheduler.connector
        arena = connector._scheduler.store.arena
        arena.view(0, arena.capacity_bytes)[:] = b"\x3c" * arena.capacity_bytes

    def held(self) -> dict[str, int]:
        """What the scheduler half and vLLM's pool hold for requests. Only for an engine in one process."""
        scheduler = self._llm.llm_engine.engine_core.engine_core.scheduler
        half, pool = scheduler.connector._scheduler, scheduler.kv_cache_manager.block_pool
        return {
            "requests": len(half._requests) + half.planner.num_requests,
            "copies": len(half._loads) + len(half._stores),
            "pages": sum(page.ref_cnt for page in pool.blocks if not page.is_null),
            "pins": sum(p.num_pinned for level in half.store.slot_levels for _, p in level.pools()),
        }

    def numbers(self) -> dict[str, float]:
        """Counters of vLLM, summed over engines; of ours, by tier."""
        totals: dict[str, float] = {}
        for metric in self._llm.get_metrics():
            name = metric.name.removeprefix("vllm:")
            if name in NUMBERS:
                name = "/".join([name, *([metric.labels["tier"]] if "tier" in metric.labels else [])])
                totals[name] = totals.get(name, 0) + metric.value
        return totals

    def reset(self, connector: bool) -> bool:
        """Forget the prefixes in vLLM's own pages, and the store's if asked for."""
        return bool(self._llm.reset_prefix_cache(reset_connector=connector))

    def sleep(self) -> None:
        """Give memory back, as far as a CPU's engine does, and wake up."""
        self._llm.sleep(level=1)
        self._llm.wake_up()


class EngineProcess:
    """The same, from outside."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.say([name, *arguments])

    def say(self, words: list[Any]) -> Any:
        """Send a line and take the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()
        return self.hear()

    def hear(self) -> Any:
        """The next answer; vLLM's own lines go to the log."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("ANSWER "):
                return json.loads(line.removeprefix("ANSWER "))
        raise AssertionError(f"the engine ended with {self.process.wait()}")


def _environment(threads: str, *, processes: bool) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "2",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": threads,
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(processes)),
    }


@contextmanager
def engine(
    model: Path,
    log: Path,
    *,
    store: dict[str, Any] | None = None,
    processes: bool = False,
    core: int | None = None,
    **more: Any,
) -> Iterator[EngineProcess]:
    """An engine for ``model``; with a connector for ``store``, which may be empty, or without any for None.

    ``processes``: in three of them, as it is deployed, which takes a minute to start; or all in one. ``core``: the one
    that computes; None: all.
    """
    arguments: dict[str, Any] = {
        "model": str(model),
        "dtype": "float32",
        "block_size": PAGE_TOKENS,
        "max_model_len": 2048,
        "kv_cache_memory_bytes": 64 << 20,
        **more,
    }
    if store is not None:
        arguments["kv_transfer_config"] = {**TRANSFER, "kv_connector_extra_config": store}
    threads = "nobind" if "tensor_parallel_size" in more else "auto" if core is None else str(core)
    with log.open("a") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.vllm.engine", json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=out,
            text=True,
            cwd=ROOT,
            env=_environment(threads, processes=processes),
        )
        overdue = threading.Timer(START_S, process.kill)
        overdue.start()
        try:
            started = EngineProcess(process)
            try:
                started.hear()
            except AssertionError as error:
                raise AssertionError(f"{error}: {log.read_text()[-3000:]}") from None
            overdue.cancel()
            yield started
        finally:
            overdue.cancel()
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def main() -> None:
    """Serve the test."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed is log
    served = Engine(json.loads(sys.argv[1]))
    print('ANSWER "ready"', file=out, flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print("ANSWER " + json.dumps(getattr(served, name)(*arguments)), file=out, flush=True)
    served._llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
