from itertools import pairwise

import pytest
import torch

from ecotone.errors import ContractError
from ecotone.protocol.params import PoolingParams
from ecotone.worker.pooling import Pooler

HIDDEN = torch.randn(9, 6, generator=torch.Generator().manual_seed(0))
MEAN = PoolingParams(pooling="mean", normalize=False)
RAW = {"last": HIDDEN[-1], "mean": HIDDEN.mean(dim=0), "token": HIDDEN}


def run(pooler, params, *cuts):
    """Chunks between ``cuts``; the last one ends the prompt."""
    edges = (0, *cuts, len(HIDDEN))
    for start, end in pairwise(edges):
        vector = pooler.pool("a", params, start, HIDDEN[start:end], last_chunk=end == len(HIDDEN))
        assert (vector is None) == (end < len(HIDDEN))
    return vector


@pytest.mark.parametrize("cuts", [(), (1,), (4, 5), (2, 4, 6, 8)])
@pytest.mark.parametrize("pooling", RAW)
def test_chunks_make_no_difference(pooling, cuts):
    vector = run(Pooler(), PoolingParams(pooling=pooling, normalize=False), *cuts)
    assert vector.dtype == torch.float32
    torch.testing.assert_close(vector, RAW[pooling])


@pytest.mark.parametrize("pooling", RAW)
def test_normalised_vectors_have_length_1(pooling):
    vector = run(Pooler(), PoolingParams(pooling=pooling), 5)
    torch.testing.assert_close(vector, RAW[pooling] / RAW[pooling].norm(dim=-1, keepdim=True))


def test_a_chunk_of_tokens_that_is_ordered_again_counts_once():
    pooler, params = Pooler(), PoolingParams(pooling="token", normalize=False)
    pooler.pool("a", params, 0, HIDDEN[:4], last_chunk=False)
    pooler.pool("a", params, 4, torch.full((3, 6), 99.0), last_chunk=False)  # discarded
    pooler.pool("a", params, 4, HIDDEN[4:6], last_chunk=False)
    pooler.pool("a", params, 6, torch.full((3, 6), 99.0), last_chunk=True)  # discarded
    torch.testing.assert_close(pooler.pool("a", params, 6, HIDDEN[6:], last_chunk=True), HIDDEN)


def test_a_vector_of_zeros_stays_one():
    assert Pooler().pool("a", PoolingParams(), 0, torch.zeros(2, 3), last_chunk=True).tolist() == [0, 0, 0]


def test_half_precision_is_summed_in_full():
    hidden = torch.full((4096, 1), 1.0, dtype=torch.bfloat16)
    assert Pooler().pool("a", MEAN, 0, hidden, last_chunk=True).item() == 1.0


def test_a_chunk_that_is_ordered_again_counts_once():
    pooler = Pooler()
    pooler.pool("a", MEAN, 0, HIDDEN[:4], last_chunk=False)
    pooler.pool("a", MEAN, 4, torch.full((3, 6), 99.0), last_chunk=False)  # discarded
    pooler.pool("a", MEAN, 4, HIDDEN[4:6], last_chunk=False)
    pooler.pool("a", MEAN, 6, torch.full((3, 6), 99.0), last_chunk=True)  # discarded
    vector = pooler.pool("a", MEAN, 6, HIDDEN[6:], last_chunk=True)
    torch.testing.assert_close(vector, HIDDEN.mean(dim=0))


def test_a_request_starts_anew_from_token_0():
    pooler = Pooler()
    pooler.pool("a", MEAN, 0, torch.full((4, 6), 99.0), last_chunk=False)
    torch.testing.assert_close(run(pooler, MEAN, 3), HIDDEN.mean(dim=0))


def test_requests_do_not_meet():
    pooler = Pooler()
    pooler.pool("b", MEAN, 0, HIDDEN[:4] * 7, last_chunk=False)
    torch.testing.assert_close(run(pooler, MEAN, 4), HIDDEN.mean(dim=0))


def test_a_gap_is_a_broken_contract():
    pooler = Pooler()
    pooler.pool("a", MEAN, 0, HIDDEN[:4], last_chunk=False)
    with pytest.raises(ContractError, match="request a: a chunk starts at token 5"):
        pooler.pool("a", MEAN, 5, HIDDEN[5:], last_chunk=True)
    pooler.forget("a")
    with pytest.raises(ContractError, match="token 4"):
        pooler.pool("a", MEAN, 4, HIDDEN[4:], last_chunk=True)
