"""Distributions against a plain reference, and draws that depend on the request alone."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ecotone.protocol.params import SamplingParams
from ecotone.worker.penalties import SampleRequest
from ecotone.worker.sampler import sample, uniform, usable

VOCAB = 12


def reference(logits, params):
    """Probabilities of the next token: temperature, then min-p, then top-k, then top-p of what is left."""
    scaled = np.asarray(logits, dtype=np.float64) / params.temperature
    scaled[np.exp(scaled - scaled.max()) < params.min_p] = -np.inf
    order = np.argsort(-scaled, kind="stable")
    if params.top_k:
        order = order[: params.top_k]
    probs = np.exp(scaled[order] - scaled[order].max())
    probs /= probs.sum()
    keep = int(np.searchsorted(np.cumsum(probs), params.top_p - 1e-12)) + 1
    out = np.zeros(len(scaled))
    out[order[:keep]] = probs[:keep] / probs[:keep].sum()
    return out


def fits(counts, expected):
    """Pearson's chi-square, at about four standard deviations of its own distribution."""
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = len(counts) - 1
    return statistic <= freedom + 4 * (2 * freedom) ** 0.5


def draws(logits, params, count, seed=11):
    """Tokens of one request at ``count`` positions, as one batch."""
    requests = [SampleRequest(params, seed, range(n)) for n in range(count)]
    rows = torch.tensor(logits, dtype=torch.float32).expand(count, -1)
    return [token.token_id for token in sample(rows, requests)]


LOGITS = [0.3, 2.0, -1.0, 1.5, 0.0, 1.1, -3.0, 0.9, 2.2, -0.4, 0.2, 1.0]
SETTINGS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.5),
    SamplingParams(temperature=2.5),
    SamplingParams(temperature=1.0, top_k=4),
    SamplingParams(temperature=1.0, top_k=50),
    SamplingParams(temperature=1.0, top_p=0.6),
    SamplingParams(temperature=1.7, top_k=7, top_p=0.8),
    SamplingParams(temperature=1.0, top_k=3, top_p=0.999),
    SamplingParams(temperature=1.0, min_p=0.3),
    SamplingParams(temperature=2.0, min_p=0.4, top_k=6, top_p=0.8),
]


@pytest.mark.parametrize("params", SETTINGS, ids=str)
def test_draws_follow_the_reference_distribution(params):
    probs = reference(LOGITS, params)
    counts = np.bincount(draws(LOGITS, params, 6000), minlength=VOCAB)
    assert counts[probs == 0].sum() == 0
    kept = probs > 0
    assert fits(counts[kept], probs[kept] * counts.sum())


def test_the_fit_tells_distributions_apart():
    counts = np.bincount(draws(LOGITS, SETTINGS[0], 6000), minlength=VOCAB)
    assert not fits(counts, reference(LOGITS, SamplingParams(temperature=1.15)) * counts.sum())


@settings(max_examples=200, deadline=None)
@given(
    logits=st.lists(st.integers(-64, 64).map(lambda n: n / 8), min_size=1, max_size=20),
    temperature=st.floats(0.05, 10),
    top_k=st.integers(0, 25),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
    seed=st.integers(0, 2**63 - 1),
    position=st.integers(0, 10_000),
)
def test_each_draw_inverts_the_reference_distribution(logits, temperature, top_k, top_p, min_p, seed, position):
    """Exact, token by token: the random number falls into the token's own stretch of the cumulative sum."""
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    (token,) = sample(torch.tensor([logits]), [SampleRequest(params, seed, range(position))])
    probs = reference(logits, params)
    cut = top_k > 0 or top_p < 1
    order = np.argsort(-np.asarray(logits, dtype=np.float64), kind="stable") if cut else np.arange(len(logits))
    upper = np.cumsum(probs[order])[list(order).index(token.token_id)]
    number = uniform(seed, position)
    before = SamplingParams(temperature=temperature, top_k=top_k, min_p=min_p)
    edges = np.cumsum(reference(logits, before)[order])
    ratios = np.exp((np.asarray(logits) - max(logits)) / temperature)
    # On the edge of top-p, or of min-p, both answers are right.
    if np.abs(edges - top_p).min() > 1e-9 and np.abs(ratios - min_p).min() > 1e-9:
        assert probs[token.token_id] > 0
        assert upper - probs[token.token_id] - 1e-9 <= number <= upper + 1e-9


def test_temperature_0_takes_the_best():
    assert draws(LOGITS, SamplingParams(temperature=0.0), 50) == [8] * 50


@pytest.mark.parametrize("temperature", [1e-6, 1e-40, 1e-300])
def test_a_tiny_temperature_takes_the_best(temperature):
    assert draws(LOGITS, SamplingParams(temperature=temperature), 50) == [8] * 50


def test_equal_logits_share_alike():
    counts = np.bincount(draws([1.0] * 8, SamplingParams(temperature=0.7), 4000), minlength=8)
    assert fits(counts, np.full(8, 500))


def test_top_k_keeps_the_first_k_of_equal_logits():
    assert set(draws([1.0] * 8, SamplingParams(temperature=1.0, top_k=3), 300)) == {0, 1, 2}
    assert set(draws([1.0] * 5000, SamplingParams(temperature=1.0, top_k=3), 60)) == {0, 1, 2}


def test_top_p_keeps_no_more_than_reaches_it():
    assert set(draws([1.0, 1.0], SamplingParams(temperature=1.0, top_p=0.5), 100)) == {0}
    assert set(draws([1.0, 1.0], SamplingParams(temperature=1.0, top_p=0.5000001), 100)) == {0, 1}


@pytest.mark.parametrize("params", [SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_k=3)])
@pytest.mark.parametrize("logits", [[0.0, 0.0], [0.0, 0.7, 1.3], [0.3, 0.1, -9.0]])
def test_the_outermost_random_numbers_draw_tokens_that_are_allowed(monkeypatch, params, logits):
    inf = float("inf")
    logits = [-inf, *logits, -inf]
    cut = params.top_k > 0
    by_number = sorted(range(len(logits)), key=lambda i: -logits[i] if cut else i)
    allowed = [i for i in by_number if logits[i] > -inf]
    for number, token in ((0.0, allowed[0]), (1 - 2**-53, allowed[-1])):
        monkeypatch.setattr("ecotone.worker.sampler.uniform", lambda *_, number=number: number)
        assert draws(logits, params, 1) == [token]


def test_a_tiny_top_p_keeps_the_best():
    assert draws(LOGITS, SamplingParams(temperature=1.0, top_p=1e-9), 50) == [8] * 50


def test_forbidden_tokens_are_never_drawn():
    logits = [0.0, float("-inf"), 0.0, float("-inf")]
    for params in (SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_p=0.99)):
        assert set(draws(logits, params, 500)) == {0, 2}


def test_a_request_draws_the_same_in_every_batch():
    rows = torch.randn(40, VOCAB, generator=torch.Generator().manual_seed(1))
    requests = [SampleRequest(SETTINGS[i % len(SETTINGS)], i * 7, range(i)) for i in range(40)]
    together = [token.token_id for token in sample(rows, requests)]
    alone = [sample(rows[i : i + 1], requests[i : i + 1])[0].token_id for i in range(40)]
    reverse = [token.token_id for token in sample(rows.flip(0), requests[::-1])][::-1]
    assert together == alone == reverse


def test_seeds_and_positions_have_their_own_random_numbers():
    numbers = [uniform(seed, position) for seed in (0, 1, 2**63 - 1, -5) for position in range(500)]
    assert len(set(numbers)) == 2000
    assert fits(np.histogram(numbers, bins=20, range=(0, 1))[0], np.full(20, 100))
    assert uniform(3, 9) == uniform(3, 9)


def test_neighbouring_positions_are_independent():
    pairs = np.array([(uniform(4, n), uniform(4, n + 1)) for n in range(2000)])
    assert abs(np.corrcoef(pairs.T)[0, 1]) < 0.08


def test_logprobs_are_those_before_the_cut():
    rows = torch.tensor([LOGITS, LOGITS, LOGITS])
    requests = [
        SampleRequest(SamplingParams(temperature=2.0, top_k=1, logprobs=3), 0, ()),
        SampleRequest(SamplingParams(), 0, ()),
        SampleRequest(SamplingParams(logprobs=0), 0, ()),
    ]
    cut, none, greedy = sample(rows, requests)
    assert none.logprobs is None
    want = np.log(reference(LOGITS, SamplingParams(temperature=2.0)))
    assert cut.token_id == 8
    assert cut.logprobs.sampled == pytest.approx(want[8])
    assert cut.logprobs.top_ids.to_numpy().tolist() == [8, 1, 3]
    assert cut.logprobs.top_ids.dtype == "int64"
    assert cut.logprobs.top_logprobs.dtype == "float32"
    assert cut.logprobs.top_logprobs.to_numpy().tolist() == pytest.approx(want[[8, 1, 3]].tolist())
    assert greedy.logprobs.sampled == pytest.approx(np.log(reference(LOGITS, SamplingParams(temperature=1.0))[8]))
    assert greedy.logprobs.top_ids.shape == greedy.logprobs.top_logprobs.shape == (0,)


def test_more_logprobs_than_tokens_gives_all():
    (token,) = sample(torch.tensor([[0.0, 1.0]]), [SampleRequest(SamplingParams(logprobs=9), 0, ())])
    assert token.logprobs.top_ids.to_numpy().tolist() == [1, 0]


def test_rows_that_are_no_distribution_are_told_apart():
    inf = float("inf")
    rows = torch.tensor([[0.0, 1.0], [float("nan"), 1.0], [inf, 0.0], [-inf, -inf], [-inf, 0.0]])
    assert usable(rows) == [True, False, False, False, True]
