"""Two steps in flight: what each of them may have, and that nothing goes astray between order and result."""

from __future__ import annotations

import pytest
from sim_engine import SimEngine, build, shares
from sim_model import ask, keys_of, limits, make_request

from ecotone.engine.request import RequestStatus
from ecotone.errors import ContractError


def two(**bounds: int) -> SimEngine:
    return SimEngine(limits(max_concurrent_steps=2, **bounds))


def test_requests_are_shared_out_among_the_steps():
    engine = two()
    engine.add(*(make_request(name, 3) for name in "abcde"))
    assert list(shares(engine.submit())) == ["a", "b", "c"]
    assert list(shares(engine.submit())) == ["d", "e"]
    assert engine.submit() is None  # as many as may be
    engine.take_in()
    assert list(shares(engine.submit())) == ["a", "b", "c"]
    assert engine.scheduler.statistics()["steps_ahead"] == 2
    assert engine.scheduler.statistics()["steps_in_flight"] == 2


def test_one_request_is_in_one_step_at_a_time_and_no_empty_one_goes_with_it():
    engine = two()
    a = make_request("a", 3)
    engine.add(a)
    for _ in range(a.params.max_tokens):
        assert list(shares(engine.submit())) == ["a"]
        assert engine.submit() is None
        engine.take_in()
    assert engine.submit().finished_req_ids == {"a"}
    assert engine.submit() is None
    engine.take_in()
    engine.check_texts(a)
    assert engine.scheduler.statistics()["steps_ahead"] == 0


def test_who_comes_while_a_step_is_in_flight_is_served_at_once():
    engine = two()
    a, b = make_request("a", 3), make_request("b", [30, 31])
    engine.add(a)
    engine.submit()
    engine.add(b)
    assert list(shares(engine.submit())) == ["b"]
    engine.run()
    engine.check_texts(a, b)


def test_what_a_step_in_flight_encodes_is_not_encoded_twice():
    engine = two()
    a, b = ask("a", "x", 1), ask("b", "x", 2)
    engine.add(a, b)
    engine.submit()
    assert engine.submit() is None
    engine.take_in()
    order = engine.submit()
    assert engine.submit() is not None
    assert [(s.req_id, s.encode) for s in order.scheduled] == [("a", ())]
    engine.run()
    engine.check_texts(a, b)
    assert engine.encoded == ["0:x"]


def test_nobody_builds_on_an_encoding_that_fails():
    engine = two()
    a, b, c = ask("a", "x", 1), ask("b", "x", 2), ask("c", "y", 3)
    engine.add(a, b, c)
    assert list(shares(engine.submit())) == ["a", "b"]  # b shares what a's step orders
    assert list(shares(engine.submit())) == ["c"]
    d = ask("d", "x", 4)
    engine.add(d)
    engine.execute_next(broken={"0:x"})
    engine.take_in()
    assert engine.ended["a"].error == "item 0 is broken"
    engine.run()
    engine.check_texts(b, c, d)
    assert engine.encoded == ["0:x", "0:y", "0:x"]


def test_nobody_builds_on_a_load_that_fails():
    engine = build(stored="xy", max_concurrent_steps=2)
    a, b, c = ask("a", "x", 1), ask("b", "y", 2), ask("c", "x", 3)
    engine.add(a, b)
    engine.submit()
    engine.add(c)
    assert list(shares(engine.submit())) == ["b"]  # and not c
    engine.execute_next([{"0:x"}])
    engine.take_in()
    assert a.num_computed_tokens == 0
    engine.run()
    engine.check_texts(a, b, c)
    assert engine.scheduler.statistics()["rollbacks"] == 1


def test_an_aborted_request_gives_up_at_once_what_its_step_still_uses():
    """Ranks act in order: they are through with the first step before they begin the second."""
    engine = two(kv_blocks=2, max_model_len=8)
    a, b = make_request("a", 5), make_request("b", 5, max_tokens=1)
    engine.add(a)
    first = engine.submit()
    engine.add(b)
    assert engine.submit() is None  # no room
    assert engine.scheduler.finish_request("a", RequestStatus.FINISHED_ABORTED)
    second = engine.submit()
    assert set(first.scheduled[0].block_ids) & set(second.scheduled[0].block_ids)
    assert second.finished_req_ids == {"a"}
    assert engine.take_in() == []
    engine.run()
    engine.check_texts(b)


def test_the_room_of_an_aborted_encoding_goes_to_the_next_step():
    engine = two(encoder_cache_rows=6, encoder_budget_rows=6)
    a, b = ask("a", "z", 1), ask("b", "y", 2)
    engine.add(a)
    engine.submit()
    engine.scheduler.finish_request("a", RequestStatus.FINISHED_ABORTED)
    engine.add(b)
    assert engine.submit().free_encoder_keys == ("0:z",)
    engine.run()
    engine.check_texts(b)


def test_a_result_is_not_that_of_another_request_of_the_same_id():
    engine = two()
    a, b = make_request("a", 3), make_request("b", 3)
    engine.add(a, b)
    engine.submit()
    engine.submit()
    engine.scheduler.finish_request("a", RequestStatus.FINISHED_ABORTED)
    engine.execute_next()
    engine.execute_next()
    again = make_request("a", [99, 98])
    engine.add(again)
    engine.scheduler.finish_request("b", RequestStatus.FINISHED_ABORTED)
    assert engine.take_in() == []
    assert list(shares(engine.submit())) == ["a"]
    assert engine.take_in() == []  # b's
    engine.run()
    engine.check_texts(again)


def test_the_old_result_comes_when_the_new_request_runs_already():
    engine = two()
    engine.add(make_request("a", 3))
    engine.submit()
    engine.scheduler.finish_request("a", RequestStatus.FINISHED_ABORTED)
    again = make_request("a", [99, 98])
    engine.add(again)
    order = engine.submit()
    assert (list(shares(order)), order.finished_req_ids) == (["a"], {"a"})
    assert engine.take_in() == []
    assert again.in_flight
    assert engine.submit() is None
    engine.run()
    engine.check_texts(again)


def test_nobody_in_flight_is_preempted_and_nobody_else_goes_ahead():
    engine = two(kv_blocks=4, block_size=2, max_model_len=8)
    a, b = make_request("a", 4, max_tokens=3), make_request("b", 3, max_tokens=3)
    engine.add(a, b)
    assert list(shares(engine.submit())) == ["a"]
    assert list(shares(engine.submit())) == ["b"]
    engine.take_in()
    c = make_request("c", 2, max_tokens=1)
    engine.add(c)
    assert engine.submit() is None  # a needs a block of b's, and c must not have what is left
    assert b.status is RequestStatus.RUNNING
    engine.take_in()
    assert list(shares(engine.submit())) == ["a"]
    assert b.status is RequestStatus.PREEMPTED
    engine.run()
    engine.check_texts(a, b, c)


def test_results_are_taken_in_in_order():
    engine = two()
    a, b = make_request("a", 3), make_request("b", 3)
    engine.add(a, b)
    first, second = engine.submit(), engine.submit()
    engine.execute_next()
    engine.execute_next()
    with pytest.raises(ContractError, match="a result of step 2, where that of step 1 is due"):
        engine.scheduler.update_from_output(second, engine.executed[1])
    engine.take_in()
    with pytest.raises(ContractError, match="a result of step 1, where that of step 2 is due"):
        engine.scheduler.update_from_output(first, engine.executed[0])
    engine.run()
    engine.check_texts(a, b)


def test_a_reset_meets_two_steps():
    engine = build(stored="x", max_concurrent_steps=2)
    a, b = ask("a", "x", 1), ask("b", "y", 2)
    engine.add(a, b)
    engine.submit()
    engine.submit()
    engine.execute_next([{"0:x"}])
    engine.scheduler.reset_encoder_cache(lambda request: keys_of(request.items, epoch=1))
    engine.take_in()
    assert engine.submit().free_encoder_keys == ("0:x", "0:y")
    engine.run()
    engine.check_texts(a, b)


def test_work_is_left_while_a_step_is_in_flight():
    engine = two()
    engine.add(make_request("a", 3))
    engine.submit()
    engine.scheduler.finish_request("a", RequestStatus.FINISHED_ABORTED)
    assert not engine.scheduler.has_unfinished()
    assert engine.submit() is None  # that a ended can wait
    engine.take_in()
    assert engine.scheduler.has_work()
    engine.run()
    engine.assert_at_rest()
