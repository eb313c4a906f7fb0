"""The scheduler without a connector: batching, budgets, chunks, preemption."""

from __future__ import annotations

import pytest
from sim_engine import SimEngine, shares
from sim_model import ask, expected_output, limits, make_request

from ecotone.engine.request import RequestStatus

# -- batching ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1, 2, 3, 7, 64])
def test_chunks_change_nothing(budget):
    engine = SimEngine(limits(max_num_batched_tokens=budget))
    engine.finish(ask("a", 1, "y", 2, "w", "y", 3), ask("b", "w", 4), make_request("c", 5))


def test_running_requests_come_first_and_waiting_ones_in_order_of_arrival():
    engine = SimEngine(limits(max_num_batched_tokens=6))
    engine.add(*(make_request(name, 4) for name in "abc"))
    assert shares(engine.step()) == {"a": 4, "b": 2}
    assert shares(engine.step()) == {"a": 1, "b": 2, "c": 3}
    assert shares(engine.step()) == {"a": 1, "b": 1, "c": 1}


def test_a_request_is_announced_once_and_forgotten_once():
    engine = SimEngine(limits(max_num_batched_tokens=3))
    request = ask("a", 1, "x", 2, max_tokens=2)
    engine.add(request)
    orders = []
    while engine.scheduler.has_work():
        orders.append(engine.step())
    assert [[new.req_id for new in order.new_requests] for order in orders] == [["a"], [], [], []]
    assert [order.finished_req_ids for order in orders] == [frozenset()] * 3 + [frozenset({"a"})]
    assert [order.step for order in orders] == [1, 2, 3, 4]
    new = orders[0].new_requests[0]
    assert (new.prompt_token_ids, new.items, new.item_keys) == (
        request.prompt_token_ids,
        request.items,
        request.item_keys,
    )
    assert orders[3].scheduled == ()


def test_no_more_than_max_num_seqs_run():
    engine = SimEngine(limits(max_num_seqs=2))
    requests = [make_request(name, 2, max_tokens=length) for name, length in zip("abc", (2, 4, 2), strict=True)]
    engine.add(*requests)
    assert shares(engine.step()) == {"a": 2, "b": 2}
    engine.step()
    assert shares(engine.step()) == {"b": 1, "c": 2}
    engine.run()
    engine.assert_at_rest()


def test_statistics_count_what_was_done():
    engine = SimEngine(limits(max_num_seqs=1))
    engine.add(ask("a", "x", 1, max_tokens=1), ask("b", "x", 1, max_tokens=1))
    engine.step()
    seen = engine.scheduler.statistics()
    assert (seen["requests_running"], seen["requests_waiting"]) == (0, 1)
    engine.run()
    seen = engine.scheduler.statistics()
    wanted = {"encodes_ordered": 1, "encoder_cache_hits": 1, "loads_ordered": 0, "requests_finished_length": 2}
    assert wanted.items() <= seen.items()
    assert (seen["tokens_scheduled"], seen["steps"], seen["encoder_cache_rows_used"]) == (10, 3, 4)


# -- encoder budget and cache -------------------------------------------------------------------------------------


def test_same_image_in_two_requests_of_one_pass_is_encoded_once():
    engine = SimEngine(limits())
    engine.add(ask("a", "x", 1), ask("b", 2, "x", "x"))
    order = engine.step()
    assert [s.encode for s in order.scheduled] == [(0,), ()]
    assert engine.encoded == ["0:x"]


def test_a_chunk_needs_only_the_items_it_overlaps():
    engine = SimEngine(limits(max_num_batched_tokens=3))
    engine.add(ask("a", 1, "x", 2, "y"))
    assert [s.encode for s in engine.step().scheduled] == [(0,)]  # token 1, two rows of x
    assert [s.encode for s in engine.step().scheduled] == [()]  # two rows of x, token 2
    assert [s.encode for s in engine.step().scheduled] == [(1,)]


def test_encoder_budget_cuts_the_chunk_and_is_shared_by_the_step():
    engine = SimEngine(limits(encoder_budget_rows=9))
    engine.add(ask("a", "x", "w", 1, "y", 2), ask("b", "t", 3), ask("c", 4, 5))
    order = engine.step()
    assert shares(order) == {"a": 8, "b": 3, "c": 2}  # 4 + 3 rows, y waits; 2 more for t
    assert engine.encoded == ["0:x", "0:w", "0:t"]
    engine.finish()


def test_a_full_encoder_cache_cuts_the_chunk():
    engine = SimEngine(limits(encoder_cache_rows=8))
    engine.add(ask("a", "x", "y", 1))
    assert shares(engine.step()) == {"a": 4}
    order = engine.step()
    assert shares(order) == {"a": 6}
    assert order.free_encoder_keys == ("0:x",)


def test_the_same_image_twice_takes_room_once_and_stays_until_its_last_row():
    engine = SimEngine(limits(encoder_cache_rows=9, max_num_batched_tokens=6))
    engine.add(ask("a", "x", "t", "x", "y"))
    engine.step()  # x, t
    order = engine.step()  # x again, two rows of y: 4 + 5 rows
    assert shares(order) == {"a": 6}
    assert order.free_encoder_keys == ("0:t",)
    engine.run()
    assert engine.encoded == ["0:x", "0:t", "0:y"]


def test_nobody_new_is_let_in_while_one_that_runs_waits_for_room_in_the_encoder_cache():
    engine = SimEngine(limits(encoder_cache_rows=8, max_num_batched_tokens=4))
    engine.add(ask("a", "z", "y", 1), ask("b", 2, "x", 3), ask("c", "t", max_tokens=1), ask("d", 7))
    assert shares(engine.step()) == {"a": 4}
    assert shares(engine.step()) == {"a": 2, "b": 1, "c": 1}  # y, x and half of t wait for room, or for tokens
    assert shares(engine.step()) == {"a": 4}
    assert shares(engine.step()) == {"a": 2, "c": 1}  # no room for x beside y and t: d has to wait
    assert shares(engine.step()) == {"a": 1, "b": 3}
    engine.finish()
    assert list(engine.ended)[-1] == "d"


def test_room_that_a_preemption_makes_is_used_in_the_same_pass():
    engine = SimEngine(limits(encoder_cache_rows=8, max_num_batched_tokens=10, block_size=1, kv_blocks=16))
    engine.add(ask("a", 1, 2, 3, 4, 5, "w", "z", 6, max_tokens=1), ask("b", "y", *range(7, 17), max_tokens=1))
    assert shares(engine.step()) == {"a": 8, "b": 2}  # b holds y, cut in two
    order = engine.step()  # a needs the room of y; b needs ten blocks, has to give up its own, and y
    assert order.finished_req_ids == {"b"}
    assert shares(order) == {"a": 7}
    engine.finish()


def test_decoding_takes_no_encoder_references():
    engine = SimEngine(limits())
    engine.add(ask("a", "x", 1, max_tokens=5))
    engine.step()
    assert engine.scheduler.statistics()["encoder_cache_rows_available"] == 32


# -- KV pressure --------------------------------------------------------------------------------------------------


def test_who_runs_last_is_preempted_and_computes_all_of_it_again():
    engine = SimEngine(limits(kv_blocks=4, block_size=2))
    a, b = make_request("a", 3, max_tokens=4), ask("b", "w", max_tokens=4)
    engine.add(a, b)
    assert shares(engine.step()) == {"a": 3, "b": 3}  # two blocks each
    assert shares(engine.step()) == {"a": 1, "b": 1}
    order = engine.step()  # a needs a third block
    assert shares(order) == {"a": 1}
    assert order.finished_req_ids == {"b"}
    assert (b.status, b.num_computed_tokens, b.num_output_tokens) == (RequestStatus.PREEMPTED, 0, 2)
    order = engine.step()
    assert shares(order) == {"a": 1}
    order = engine.step()
    assert shares(order) == {"b": 5}
    assert [new.req_id for new in order.new_requests] == ["b"]
    assert order.scheduled[0].output_token_ids == tuple(engine.outputs["b"][:2])
    engine.finish()
    assert engine.scheduler.statistics()["preemptions"] == 1
    for request in (a, b):
        assert engine.outputs[request.req_id] == expected_output(request, engine.bounds)[0]


def test_preempted_requests_come_back_in_their_old_order_before_new_ones():
    engine = SimEngine(limits(kv_blocks=6, block_size=2))
    engine.add(*(make_request(name, 3, max_tokens=6) for name in "abc"))
    engine.step()
    engine.add(make_request("d", 2))
    engine.step()
    order = engine.step()  # five tokens each do not fit: c goes, then a and b have six blocks
    assert shares(order) == {"a": 1, "b": 1}
    engine.run()
    assert list(engine.ended) == ["a", "b", "c", "d"]


def test_a_preempted_request_gives_back_its_encoder_references():
    engine = SimEngine(limits(kv_blocks=5, block_size=2, max_num_batched_tokens=6, encoder_cache_rows=6))
    a, b = make_request("a", 3, max_tokens=8), ask("b", 1, "z")
    engine.add(a, b)
    engine.step()  # a: 3 tokens; b: 1 + two rows of z
    assert engine.scheduler.statistics()["encoder_cache_rows_available"] == 0
    while b.status is RequestStatus.RUNNING:
        engine.step()
    assert engine.scheduler.statistics()["encoder_cache_rows_available"] == 6
    engine.run()
    assert engine.outputs["b"] == expected_output(b, engine.bounds)[0]


def test_a_request_that_does_not_fit_waits_without_blocks():
    engine = SimEngine(limits(kv_blocks=4, block_size=2))
    engine.add(make_request("a", 5, max_tokens=2), make_request("b", 3), make_request("c", 1))
    assert shares(engine.step()) == {"a": 5}  # b needs two blocks; c does not overtake it
    engine.run()
    assert list(engine.ended) == ["a", "b", "c"]
