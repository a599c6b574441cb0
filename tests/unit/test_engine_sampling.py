"""Tokens are drawn from the distribution that was asked for, and again the same for the same seed."""

from collections import Counter

import pytest
import torch

from connectors.torch_engine.sampling import SamplingParams, sample
from kvstore.errors import ConfigError

PROBABILITIES = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05])
LOGITS = PROBABILITIES.log()


def draws(params: SamplingParams, count: int = 4000) -> Counter[int]:
    rows = LOGITS.expand(count, -1)
    generator = torch.Generator().manual_seed(params.seed)
    return Counter(sample(rows, [params] * count, [generator] * count))


def test_temperature_zero_takes_the_likeliest() -> None:
    assert draws(SamplingParams()) == {0: 4000}


def test_samples_follow_the_distribution() -> None:
    counts = draws(SamplingParams(temperature=1.0))
    for token, probability in enumerate(PROBABILITIES.tolist()):
        assert counts[token] / 4000 == pytest.approx(probability, abs=0.03)


def test_a_low_temperature_sharpens() -> None:
    counts = draws(SamplingParams(temperature=0.5))
    assert counts[0] / 4000 == pytest.approx(0.4**2 / float((PROBABILITIES**2).sum()), abs=0.03)


def test_top_k_and_top_p_cut_the_tail() -> None:
    assert set(draws(SamplingParams(temperature=1.0, top_k=2))) == {0, 1}
    assert set(draws(SamplingParams(temperature=1.0, top_p=0.6))) == {0, 1}
    assert set(draws(SamplingParams(temperature=1.0, top_p=0.71))) == {0, 1, 2}
    assert set(draws(SamplingParams(temperature=1.0, top_p=0.01))) == {0}


def test_a_row_draws_the_same_whoever_is_beside_it() -> None:
    params = SamplingParams(temperature=1.0, seed=7)

    def stream(beside: list[SamplingParams]) -> list[int]:
        generators = [torch.Generator().manual_seed(p.seed) for p in (*beside, params)]
        rows = LOGITS.expand(len(generators), -1)
        return [sample(rows, [*beside, params], generators)[-1] for _ in range(50)]

    alone = stream([])
    assert stream([SamplingParams(), SamplingParams(temperature=2.0, seed=1)]) == alone
    assert len(set(alone)) > 1


@pytest.mark.parametrize(
    "nonsense", [{"max_tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.5}, {"top_k": -1}]
)
def test_nonsense_is_refused(nonsense: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        SamplingParams(**nonsense)  # type: ignore[arg-type] # one parameter at a time, of either type
