import torch

from ecotone.testing.models import PLACEHOLDER, TinyModel, tiny_item
from ecotone.testing.steps import OrderedRequest
from ecotone.worker.request_state import RequestState

P = PLACEHOLDER


class BothWays(TinyModel):
    """Its images see themselves in both directions."""

    def block_groups(self, prompt_token_ids):
        return torch.tensor([0 if token == P else -1 for token in prompt_token_ids])


def make_state(model=None):
    request = OrderedRequest("a", [5, P, P, 8, P, 6], (tiny_item("cat", 1, 2), tiny_item("dog", 4, 1)))
    request.output_token_ids = [40, 41, 42]
    return request, RequestState(request.data, model or TinyModel())


def chunk(request, start, num_tokens, **options):
    request.num_computed_tokens = start
    return request.order(num_tokens, **options)


def test_tokens_and_positions_run_on_into_the_output():
    request, state = make_state()
    whole = chunk(request, 0, 9)
    assert state.token_ids(whole) == (5, P, P, 8, P, 6, 40, 41, 42)
    assert state.positions(whole).tolist() == [[0, 1, 1, 2, 3, 4, 5, 6, 7]]
    for start in range(9):
        for num_tokens in range(1, 10 - start):
            part = chunk(request, start, num_tokens)
            end = start + num_tokens
            assert state.token_ids(part) == state.token_ids(whole)[start:end]
            assert torch.equal(state.positions(part), state.positions(whole)[:, start:end])


def test_rows_are_those_of_the_chunk():
    request, state = make_state()
    first, last, where = state.rows(0, chunk(request, 2, 3))
    assert (first, last, where.tolist()) == (1, 2, [0])
    first, last, where = state.rows(1, chunk(request, 2, 3))
    assert (first, last, where.tolist()) == (0, 1, [2])
    first, last, where = state.rows(0, chunk(request, 3, 6))
    assert (first == last, where.tolist()) == (True, [])


def test_an_item_is_needed_for_its_rows_or_when_it_is_encoded_ahead():
    request, state = make_state()
    assert state.needs(chunk(request, 0, 3)) == [0]
    assert state.needs(chunk(request, 0, 3, encode=(1,))) == [0, 1]
    assert state.needs(chunk(request, 5, 1)) == []


def test_groups_cover_all_that_is_stored_after_the_chunk():
    request, causal = make_state()
    _, both_ways = make_state(BothWays())
    assert causal.block_groups(chunk(request, 0, 9)) is None
    assert both_ways.block_groups(chunk(request, 4, 5)).tolist() == [-1, 0, 0, -1, 0, -1, -1, -1, -1]
    assert len(both_ways.block_groups(chunk(request, 0, 3))) >= 3
