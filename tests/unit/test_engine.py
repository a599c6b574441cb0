"""The engine without a store: tokens do not depend on chunks, company, preemption or what its pages held before."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from connectors.torch_engine.config import EngineConfig
from connectors.torch_engine.engine import Engine
from connectors.torch_engine.opening import open_engine
from connectors.torch_engine.request import EngineRequest, FinishReason
from connectors.torch_engine.sampling import SamplingParams
from kvstore.errors import ConfigError, TokenError
from kvstore.pool import SlotState

LENGTHS = (5, 40, 100, 16, 17, 150)
ANSWER = SamplingParams(max_tokens=30, stop_ids=())


def prompts_of(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (length,), generator=generator).tolist() for length in lengths]


PROMPTS = prompts_of(LENGTHS)


def tiny(num_pages: int = 64, max_running: int = 16, max_step_tokens: int = 512) -> Engine:
    config = EngineConfig(num_pages=num_pages, max_running=max_running, max_step_tokens=max_step_tokens)
    return open_engine(None, config)[0]


def require_nothing_leaked(engine: Engine) -> None:
    pool = engine.cache.pool
    pool.check()
    assert (pool.num_pinned, pool.num_held, pool.num(SlotState.FILLING)) == (0, 0, 0)
    assert pool.num(SlotState.FREE) + pool.num(SlotState.READY) == pool.num_slots


def drain(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
        engine.cache.pool.check()
    require_nothing_leaked(engine)


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """Each prompt's answer from an engine of its own, whole prompt in one step."""
    return [tiny().generate([prompt], ANSWER)[0] for prompt in PROMPTS]


def test_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        eos_token_id=None,
    )
    peer = transformers.Qwen3ForCausalLM(config)
    for parameter in peer.parameters():
        parameter.data.normal_(0, 0.3)
    peer.save_pretrained(tmp_path)
    engine, tokenizer = open_engine(tmp_path, EngineConfig(num_pages=64, max_step_tokens=64))
    assert tokenizer is None
    for prompt, answer in zip(PROMPTS, engine.generate(PROMPTS, ANSWER), strict=True):
        expected = peer.generate(torch.tensor([prompt]), max_new_tokens=30, do_sample=False, pad_token_id=0)
        assert answer == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize(("num_pages", "max_step_tokens"), [(64, 512), (64, 20), (20, 512), (12, 50)], ids=str)
def test_tokens_do_not_depend_on_company_chunks_or_preemption(
    num_pages: int, max_step_tokens: int, alone: list[list[int]]
) -> None:
    engine = tiny(num_pages=num_pages, max_step_tokens=max_step_tokens)
    requests = [engine.submit(prompt, ANSWER) for prompt in PROMPTS]
    drain(engine)
    assert [request.output for request in requests] == alone
    preempted = sum(request.metrics.num_preemptions for request in requests)
    assert (preempted > 0) == (num_pages < 64)
    assert not any(request.metrics.tokens_from_tier for request in requests), "its own KV is not a hit"


def test_a_prefix_in_the_pages_is_shared_and_changes_nothing(alone: list[list[int]]) -> None:
    engine = tiny()
    assert engine.generate(PROMPTS, ANSWER) == alone
    again = [engine.submit(prompt, ANSWER) for prompt in PROMPTS]
    drain(engine)
    assert [request.output for request in again] == alone
    # Whole blocks, and at least one token is left to compute: 16 of 17 tokens, none of 16.
    assert [request.metrics.tokens_from_tier.get("hbm", 0) for request in again] == [0, 32, 96, 0, 16, 144]


def test_two_who_run_share_the_pages_of_their_prefix() -> None:
    engine = tiny()
    prompt = prompts_of([64], seed=5)[0]
    first = engine.submit([*prompt, 1], ANSWER)
    engine.step()
    second = engine.submit([*prompt, 2], ANSWER)
    engine.step()
    assert first.pages[:4] == second.pages[:4]
    assert first.pages[4] != second.pages[4]
    drain(engine)


def test_two_who_compute_the_same_block_keep_one_of_it() -> None:
    engine = tiny()
    prompt = prompts_of([40], seed=6)[0]
    twins = [engine.submit(prompt, ANSWER) for _ in range(2)]
    engine.step()
    assert twins[0].pages[:2] == twins[1].pages[:2]
    drain(engine)
    assert twins[0].output == twins[1].output


def test_pages_full_of_nan_reach_no_answer(alone: list[list[int]]) -> None:
    """What a previous owner left behind is masked, but 0 times NaN is NaN."""
    engine = tiny()
    engine.cache.kv.fill_(torch.nan)
    requests = [engine.submit(prompt, ANSWER) for prompt in PROMPTS]
    drain(engine)
    assert [request.output for request in requests] == alone


def test_sampling_depends_on_the_seed_and_on_nothing_else() -> None:
    params = SamplingParams(max_tokens=20, temperature=0.9, top_p=0.95, seed=3, stop_ids=())
    otherwise = SamplingParams(max_tokens=20, temperature=0.9, top_p=0.95, seed=4, stop_ids=())
    expected = tiny().generate([PROMPTS[1]], params)[0]
    crowded = tiny(num_pages=14, max_step_tokens=40)
    others = [crowded.submit(prompt, SamplingParams(max_tokens=40, temperature=1.0)) for prompt in PROMPTS]
    request = crowded.submit(PROMPTS[1], params)
    drain(crowded)
    assert sum(other.metrics.num_preemptions for other in others) + request.metrics.num_preemptions > 0
    assert request.output == expected
    assert tiny().generate([PROMPTS[1]], otherwise)[0] != expected


def test_an_answer_ends_with_a_stop_token_or_its_length(alone: list[list[int]]) -> None:
    engine = tiny()
    stop = alone[2][4]
    first = alone[2].index(stop)
    request = engine.submit(PROMPTS[2], SamplingParams(max_tokens=30, stop_ids=(stop,)))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert [output.token for output in outputs] == alone[2][: first + 1]
    assert [output.finish_reason for output in outputs] == [None] * first + [FinishReason.STOP]
    assert request.finish_reason is FinishReason.STOP
    request = engine.submit(PROMPTS[2], SamplingParams(max_tokens=1, stop_ids=()))
    drain(engine)
    assert (request.output, request.finish_reason) == (alone[2][:1], FinishReason.LENGTH)


def abort_when(engine: Engine, request: EngineRequest, num_steps: int) -> None:
    for _ in range(num_steps):
        engine.step()
    engine.abort(request.request_id)
    engine.abort(request.request_id)  # too late is no error
    outputs = engine.step()
    assert [output.finish_reason for output in outputs if output.request_id == request.request_id] == [
        FinishReason.ABORTED
    ]


@pytest.mark.parametrize("num_steps", [0, 1, 5, 9], ids=["waiting", "in its prompt", "late in its prompt", "decoding"])
def test_a_request_can_be_aborted_in_any_state(num_steps: int, alone: list[list[int]]) -> None:
    engine = tiny(max_step_tokens=20)
    victim = engine.submit(PROMPTS[5], ANSWER)
    other = engine.submit(PROMPTS[1], ANSWER)
    abort_when(engine, victim, num_steps)
    drain(engine)
    assert other.output == alone[1]
    assert victim.output == alone[5][: len(victim.output)]


def test_a_preempted_request_can_be_aborted(alone: list[list[int]]) -> None:
    engine = tiny(num_pages=12)
    requests = [engine.submit(prompt, ANSWER) for prompt in PROMPTS]
    while not any(request.metrics.num_preemptions for request in requests):
        engine.step()
    (victim,) = (request for request in requests if request.metrics.num_preemptions)
    abort_when(engine, victim, 0)
    drain(engine)
    assert all(
        request.output == expected for request, expected in zip(requests, alone, strict=True) if request is not victim
    )


def test_pages_that_are_too_few_are_all_given_back() -> None:
    engine = tiny(num_pages=4)
    request = engine.submit([1] * 20, ANSWER)
    engine.step()
    assert not engine.cache.grow(request, 100)
    assert engine.cache.pool.num(SlotState.FREE) == 2
    drain(engine)


def test_metrics_say_how_long_the_first_token_took() -> None:
    engine = tiny()
    request = engine.submit(PROMPTS[2], ANSWER)
    engine.step()
    drain(engine)
    assert request.metrics.ttft_s is not None
    assert request.metrics.finished_s is not None
    assert 0 < request.metrics.ttft_s < request.metrics.finished_s - request.metrics.arrived_s


@pytest.mark.parametrize("prompt", [[], [-1], [259]])
def test_a_prompt_the_model_cannot_read_is_refused(prompt: list[int]) -> None:
    engine = tiny()
    with pytest.raises(TokenError):
        engine.submit(prompt)
    assert not engine.has_work


def test_what_can_never_run_is_refused_at_once() -> None:
    engine = tiny(num_pages=4)
    with pytest.raises(ConfigError, match="num_pages"):
        engine.submit([1] * 60, SamplingParams(max_tokens=5))
    engine.submit([1] * 60, SamplingParams(max_tokens=4), request_id="a")
    with pytest.raises(ConfigError, match="'a' is running"):
        engine.submit([1], SamplingParams(max_tokens=4), request_id="a")
    drain(engine)


@pytest.mark.parametrize(
    "nonsense",
    [{"num_pages": 0}, {"tokens_per_block": 0}, {"max_running": 0}, {"max_running": 8, "max_step_tokens": 8}],
)
def test_a_config_that_cannot_work_is_refused(nonsense: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        EngineConfig(**nonsense)
