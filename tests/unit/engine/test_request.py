from __future__ import annotations

import pytest
from sim_model import make_request

from ecotone.engine.request import FINISH_REASONS, TRANSITIONS, RequestStatus
from ecotone.errors import IllegalTransitionError

ALL = list(RequestStatus)
PATHS = {
    RequestStatus.WAITING: (),
    RequestStatus.RUNNING: (RequestStatus.RUNNING,),
    RequestStatus.PREEMPTED: (RequestStatus.RUNNING, RequestStatus.PREEMPTED),
    **{status: (RequestStatus.RUNNING, status) for status in FINISH_REASONS},
}


@pytest.mark.parametrize("origin", ALL)
@pytest.mark.parametrize("target", ALL)
def test_the_table_is_the_law(origin, target):
    request = make_request("a", 3)
    for status in PATHS[origin]:
        request.transition(status)
    assert request.status is origin
    if target in TRANSITIONS[origin]:
        request.transition(target)
        assert request.status is target
    else:
        with pytest.raises(IllegalTransitionError, match=f"'a' cannot go from {origin} to {target}"):
            request.transition(target)
        assert request.status is origin


def test_finished_is_final_and_only_finished_has_a_reason():
    finished = {status for status in ALL if status.is_finished}
    assert finished == FINISH_REASONS.keys() == {s for s in ALL if s.name.startswith("FINISHED")}
    assert all(not TRANSITIONS[status] for status in finished)
    assert TRANSITIONS.keys() == set(ALL)


def test_items_in_a_range_of_positions():
    request = make_request("a", [1, "x", 2, "y"], rows={"x": 3, "y": 2})  # x at 1..3, y at 5..6
    assert list(request.items_in(0, 1)) == []
    assert list(request.items_in(0, 2)) == [0]
    assert list(request.items_in(3, 5)) == [0]
    assert list(request.items_in(3, 6)) == [0, 1]
    assert list(request.items_in(4, 5)) == []
    assert list(request.items_in(7, 9)) == []


def test_lengths_follow_the_output():
    request = make_request("a", 3)
    request.output_token_ids += [8, 9]
    assert (request.num_prompt_tokens, request.num_output_tokens, request.num_tokens) == (3, 2, 5)
