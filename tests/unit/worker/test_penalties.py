"""Penalties against a reference that goes token by token, and the tokens that must not come yet."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ecotone.protocol.params import SamplingParams
from ecotone.worker.penalties import SampleRequest, adjust
from ecotone.worker.sampler import sample

VOCAB = 10
EOS = (7, 3)


def reference(logits, params, prompt, output):
    out = list(logits)
    counts = Counter(output)
    for token in range(VOCAB):
        if token in counts or token in prompt:
            out[token] *= 1 / params.repetition_penalty if out[token] > 0 else params.repetition_penalty
        if counts[token]:
            out[token] -= params.presence_penalty + counts[token] * params.frequency_penalty
        early = len(output) < params.min_tokens
        if early and (token in params.stop_token_ids or (token in EOS and not params.ignore_eos)):
            out[token] = -math.inf
    return out


token_ids = st.lists(st.integers(0, VOCAB + 2), max_size=12)  # some lie outside the vocabulary
penalized = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.5, 20.0]),
    presence_penalty=st.sampled_from([0.0, 0.7, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.4, -1.0]),
    min_tokens=st.integers(0, 10),
    ignore_eos=st.booleans(),
    stop_token_ids=st.lists(st.integers(0, VOCAB + 2), max_size=3).map(tuple),
)
rows = st.tuples(st.lists(st.integers(-40, 40).map(lambda n: n / 8), min_size=VOCAB, max_size=VOCAB), penalized)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(rows, token_ids, token_ids), min_size=1, max_size=4))
def test_each_row_is_that_of_the_reference(batch):
    logits = torch.tensor([row for (row, _), _, _ in batch])
    before = logits.clone()
    requests = [SampleRequest(params, 0, output, prompt) for (_, params), prompt, output in batch]
    adjusted = adjust(logits, requests, EOS)
    want = [reference(row, params, prompt, output) for (row, params), prompt, output in batch]
    np.testing.assert_allclose(adjusted.numpy(), np.array(want), rtol=1e-5, atol=1e-6)
    assert torch.equal(logits, before)


def test_nothing_asked_costs_nothing():
    logits = torch.randn(2, VOCAB)
    requests = [
        SampleRequest(SamplingParams(min_tokens=2), 0, (1, 2), (5,)),
        SampleRequest(SamplingParams(), 0, ()),
    ]
    assert adjust(logits, requests, EOS) is logits


@pytest.mark.parametrize(
    ("params", "text"),
    [
        (SamplingParams(), [4, 4, 4, 4]),
        (SamplingParams(presence_penalty=1.5), [4, 6, 4, 4]),
        (SamplingParams(frequency_penalty=1.1), [4, 6, 4, 6]),
        (SamplingParams(repetition_penalty=3.0), [6, 4, 4, 4]),  # 4 is in the prompt
        (SamplingParams(min_tokens=3, stop_token_ids=(4,)), [6, 6, 6, 4]),
    ],
)
def test_a_text_as_it_grows(params, text):
    logits = torch.tensor([[0.0, -1.0, 1.0, -1.0, 4.0, -2.0, 3.0, -1.0, -1.0, -1.0]])
    output = []
    for _ in text:
        request = SampleRequest(params, 0, tuple(output), np.array([4, 9]))
        (token,) = sample(adjust(logits, [request], EOS), [request])
        output.append(token.token_id)
    assert output == text


def test_penalties_change_what_is_drawn_and_logged():
    params = SamplingParams(temperature=2.0, frequency_penalty=2.0, logprobs=2)
    request = SampleRequest(params, 1, (0, 0), ())
    logits = torch.tensor([[5.0, 1.0, 0.0]])
    (token,) = sample(adjust(logits, [request], ()), [request])
    want = torch.tensor([1.0, 1.0, 0.0]).div(2.0).log_softmax(dim=0)
    assert token.logprobs.sampled == pytest.approx(want[token.token_id].item())
    assert token.logprobs.top_logprobs.to_numpy().tolist() == pytest.approx(want[:2].tolist())
