"""The scheduler without a connector: batching, budgets, chunks, preemption, stop rules, errors."""

from __future__ import annotations

import pytest
from sim_engine import EOS, SimEngine, expected_output, keys_of, limits, make_request, next_token, prompt_values

from ecotone.engine.request import Request, RequestStatus
from ecotone.errors import ContractError, IllegalTransitionError, IntegrityError
from ecotone.protocol.arrays import Array
from ecotone.protocol.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ECConnectorOutput, ModelRunnerOutput, TokenLogprobs
from ecotone.protocol.params import PoolingParams
from ecotone.protocol.step import SchedulerOutput

ROWS = {"t": 2, "w": 3, "x": 4, "y": 5, "z": 6}


def finish(engine: SimEngine, *requests: Request) -> None:
    engine.add(*requests)
    engine.run()
    for request in requests:
        assert (engine.outputs[request.req_id], request.status) == expected_output(request, engine.bounds)
    engine.assert_at_rest()


def shares(order: SchedulerOutput) -> dict[str, int]:
    return {s.req_id: s.num_tokens for s in order.scheduled}


def ask(name: str, *parts: int | str, **sampling: object) -> Request:
    return make_request(name, parts, rows=ROWS, **sampling)


# -- batching ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1, 2, 3, 7, 64])
def test_chunks_change_nothing(budget):
    engine = SimEngine(limits(max_num_batched_tokens=budget))
    finish(engine, ask("a", 1, "y", 2, "w", "y", 3), ask("b", "w", 4), make_request("c", 5))


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
    finish(engine)


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
    engine.add(ask("a", "z", "y", 1), ask("b", 2, "x", 3), ask("c", "t", 4, 5, 6), ask("d", 7))
    assert shares(engine.step()) == {"a": 4}
    assert shares(engine.step()) == {"a": 2, "b": 1, "c": 1}  # y, x and half of t wait for room, or for tokens
    assert shares(engine.step()) == {"a": 4}
    assert shares(engine.step()) == {"a": 2, "c": 2}  # no room for x beside y and t
    assert shares(engine.step()) == {"a": 1, "b": 3}
    finish(engine)
    assert list(engine.ended)[-1] == "d"


def test_room_that_a_preemption_makes_is_used_in_the_same_pass():
    engine = SimEngine(limits(encoder_cache_rows=8, max_num_batched_tokens=10, block_size=1, kv_blocks=16))
    engine.add(ask("a", 1, 2, 3, 4, 5, "w", "z", 6, max_tokens=1), ask("b", "y", *range(7, 17), max_tokens=1))
    assert shares(engine.step()) == {"a": 8, "b": 2}  # b holds y, cut in two
    order = engine.step()  # a needs the room of y; b needs ten blocks, has to give up its own, and y
    assert order.finished_req_ids == {"b"}
    assert shares(order) == {"a": 7}
    finish(engine)


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
    finish(engine)
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


# -- ends ---------------------------------------------------------------------------------------------------------


def prompt_whose_first_token_is(token: int) -> list[int]:
    return next([n] for n in range(100, 10_000) if next_token([n]) == token)


def test_end_of_sequence():
    engine = SimEngine(limits())
    prompt = prompt_whose_first_token_is(EOS)
    engine.add(
        make_request("a", prompt, ignore_eos=False),
        make_request("b", prompt, ignore_eos=True, max_tokens=2),
    )
    engine.run()
    assert engine.outputs["a"] == [EOS]
    assert (engine.ended["a"].finish_reason, engine.ended["a"].stop_reason) == ("stop", None)
    assert len(engine.outputs["b"]) == 2
    assert engine.ended["b"].finish_reason == "length"


def test_stop_token():
    engine = SimEngine(limits())
    engine.add(make_request("a", prompt_whose_first_token_is(11), stop_token_ids=(3, 11)))
    engine.run()
    assert engine.outputs["a"] == [11]
    assert (engine.ended["a"].finish_reason, engine.ended["a"].stop_reason) == ("stop", 11)


def test_nothing_ends_a_text_before_min_tokens():
    engine = SimEngine(limits())
    engine.add(
        make_request("a", prompt_whose_first_token_is(11), stop_token_ids=(11,), min_tokens=2, max_tokens=2)
    )
    engine.run()
    assert len(engine.outputs["a"]) == 2
    assert engine.ended["a"].finish_reason == "length"


def test_max_tokens():
    engine = SimEngine(limits())
    engine.add(make_request("a", 3, max_tokens=3))
    engine.run()
    assert len(engine.outputs["a"]) == 3
    assert engine.ended["a"].finish_reason == "length"


@pytest.mark.parametrize("bounds", [{"max_model_len": 8}, {"kv_blocks": 2, "block_size": 4}])
def test_model_length_and_kv_store_end_a_text(bounds):
    engine = SimEngine(limits(**bounds))
    engine.add(make_request("a", 3, max_tokens=50))
    engine.run()
    assert len(engine.outputs["a"]) == 5
    assert engine.ended["a"].finish_reason == "length"
    engine.assert_at_rest()


def test_pooling_ends_with_the_prompt():
    engine = SimEngine(limits(max_num_batched_tokens=3))
    request = make_request("a", [1, "x", 2], rows=ROWS, params=PoolingParams())
    engine.add(request)
    engine.run()
    assert engine.ended["a"].finish_reason == "stop"
    assert engine.ended["a"].pooled.to_numpy() == next_token(prompt_values(request))
    assert engine.outputs["a"] == []
    assert request.first_token_time is None


def test_first_token_is_stamped_once():
    engine = SimEngine(limits(max_num_batched_tokens=2))
    request = make_request("a", 3, max_tokens=3)
    engine.add(request)
    for engine.time in (1.0, 2.0, 3.0, 4.0):
        engine.step()
    assert (request.arrival_time, request.first_token_time) == (0.0, 2.0)


def test_logprobs_reach_the_delta():
    engine = SimEngine(limits())
    engine.add(make_request("a", 3))
    order = engine.schedule()
    entry = TokenLogprobs(-0.5, Array("int64", (0,), b""), Array("float32", (0,), b""))
    output = ModelRunnerOutput(req_ids=("a",), sampled_token_ids=((5,),), logprobs=((entry,),))
    assert engine.update(order, output)[0].logprobs == (entry,)


# -- ended from outside -------------------------------------------------------------------------------------------


def test_aborted_while_waiting_is_never_announced():
    engine = SimEngine(limits(max_num_seqs=1))
    engine.add(make_request("a", 3), make_request("b", 3))
    engine.step()
    assert engine.scheduler.finish_request("b", RequestStatus.FINISHED_ABORTED)
    engine.run()
    engine.assert_at_rest()
    assert engine.scheduler.statistics()["requests_finished_aborted"] == 1


def test_aborted_while_its_step_runs():
    engine = SimEngine(limits())
    a, b = ask("a", "x", 1), ask("b", "x", 2)
    engine.add(a, b)
    order = engine.schedule()
    output = engine.execute(order)
    assert engine.scheduler.finish_request("a", RequestStatus.FINISHED_ABORTED)
    assert [delta.req_id for delta in engine.update(order, output)] == ["b"]
    assert engine.step().finished_req_ids == {"a"}
    engine.run()
    engine.assert_at_rest()


def test_a_new_request_of_the_same_id_does_not_get_the_old_ones_tokens():
    engine = SimEngine(limits())
    engine.add(make_request("a", 3))
    order = engine.schedule()
    output = engine.execute(order)
    engine.scheduler.finish_request("a", RequestStatus.FINISHED_ABORTED)
    again = make_request("a", [99, 98])
    engine.add(again)
    assert engine.update(order, output) == []
    assert engine.step().finished_req_ids == {"a"}
    engine.run()
    assert engine.outputs["a"] == expected_output(again, engine.bounds)[0]


def test_finishing_twice_or_somebody_unknown_changes_nothing():
    engine = SimEngine(limits())
    engine.add(make_request("a", 3))
    engine.step()
    assert engine.scheduler.finish_request("a", RequestStatus.FINISHED_STOPPED)
    assert not engine.scheduler.finish_request("a", RequestStatus.FINISHED_STOPPED)
    assert not engine.scheduler.finish_request("nobody", RequestStatus.FINISHED_ABORTED)
    engine.run()
    engine.assert_at_rest()


def test_finishing_as_something_unfinished_is_refused():
    engine = SimEngine(limits())
    engine.add(make_request("a", 3))
    with pytest.raises(IllegalTransitionError, match="cannot finish as preempted"):
        engine.scheduler.finish_request("a", RequestStatus.PREEMPTED)


def test_an_idle_scheduler_has_work_until_the_ranks_have_heard_the_last():
    engine = SimEngine(limits())
    assert not engine.scheduler.has_work()
    engine.add(make_request("a", 3, max_tokens=1))
    engine.step()
    assert not engine.scheduler.has_unfinished()
    assert engine.scheduler.has_work()
    assert engine.step().finished_req_ids == {"a"}
    assert not engine.scheduler.has_work()


# -- failures of one request --------------------------------------------------------------------------------------


def test_a_broken_item_ends_its_request_alone():
    engine = SimEngine(limits())
    a, b = ask("a", "x", 1), ask("b", "y", 2)
    engine.add(a, b)
    engine.step(broken={"0:x"})
    assert engine.ended["a"].finish_reason == "error"
    assert engine.ended["a"].error == a.error == "item 0 is broken"
    engine.run()
    assert engine.outputs["b"] == expected_output(b, engine.bounds)[0]
    engine.assert_at_rest()


def test_who_shares_a_broken_item_tries_it_again_itself():
    engine = SimEngine(limits())
    a, b = ask("a", "x", 1), ask("b", "x", 2)
    engine.add(a, b)
    engine.step(broken={"0:x"})  # ordered for a; b had rows of it in this step
    assert a.is_finished
    assert (b.num_computed_tokens, b.num_output_tokens) == (0, 0)
    order = engine.step()
    assert [s.encode for s in order.scheduled] == [(0,)]
    engine.run()
    assert engine.outputs["b"] == expected_output(b, engine.bounds)[0]
    assert engine.scheduler.statistics()["rollbacks"] == 1


def test_a_broken_item_of_a_request_aborted_meanwhile_is_not_taken_for_held():
    engine = SimEngine(limits())
    engine.add(ask("a", "x", 1), ask("b", "x", 2))
    order = engine.schedule()
    output = engine.execute(order, broken={"0:x"})
    engine.scheduler.finish_request("a", RequestStatus.FINISHED_ABORTED)
    engine.update(order, output)
    assert [s.encode for s in engine.step().scheduled] == [(0,)]


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (EMPTY_MODEL_RUNNER_OUTPUT, "ordered request 'a', and its output does not have it"),
        (ModelRunnerOutput(req_ids=("a",), sampled_token_ids=((),)), "sampled 0 tokens in a step that samples 1"),
        (ModelRunnerOutput(req_ids=("a",), sampled_token_ids=((1, 2),)), "sampled 2 tokens"),
        (ModelRunnerOutput(req_ids=("a", "a"), sampled_token_ids=((1,), (2,))), "names a request twice"),
        (
            ModelRunnerOutput(
                req_ids=("a",), sampled_token_ids=((1,),), pooler_output=(Array("float32", (0,), b""),)
            ),
            "pooled vector unasked for",
        ),
    ],
)
def test_an_output_of_another_step_changes_nothing(output, message):
    engine = SimEngine(limits())
    request = make_request("a", 3)
    engine.add(request)
    order = engine.schedule()
    with pytest.raises(ContractError, match=message):
        engine.scheduler.update_from_output(order, output)
    assert (request.num_computed_tokens, request.num_output_tokens) == (0, 0)
    engine.update(order, engine.execute(order))
    engine.run()
    assert engine.outputs["a"] == expected_output(request, engine.bounds)[0]


def test_a_pooled_vector_that_is_missing():
    engine = SimEngine(limits())
    engine.add(make_request("a", 3, params=PoolingParams()))
    order = engine.schedule()
    with pytest.raises(ContractError, match="pooled vector missing"):
        engine.scheduler.update_from_output(order, ModelRunnerOutput(req_ids=("a",)))


def test_a_failed_load_is_taken_at_its_word_even_without_a_connector():
    engine = SimEngine(limits())
    a = ask("a", "x", 1)
    engine.add(a)
    order = engine.schedule()
    output = engine.execute(order)
    report = ECConnectorOutput(failed_loads=frozenset({"0:x"}))
    engine.update(order, ModelRunnerOutput.with_ec_conn_output(output, report))
    assert a.num_computed_tokens == 0
    assert [s.encode for s in engine.step().scheduled] == [(0,)]


def test_a_request_in_the_wrong_queue_is_found():
    engine = SimEngine(limits())
    request = make_request("a", 3)
    engine.add(request)
    engine.step()
    engine.scheduler.check_integrity()
    request.status = RequestStatus.WAITING
    with pytest.raises(IntegrityError, match="a request that does not run is among those that run"):
        engine.scheduler.check_integrity()


# -- reset --------------------------------------------------------------------------------------------------------


def test_reset_gives_new_keys_and_tells_the_ranks():
    engine = SimEngine(limits(max_num_batched_tokens=5))
    a, b = ask("a", 1, "z"), ask("b", "x", 1)
    engine.add(a, b)
    engine.step()  # four rows of z
    engine.scheduler.reset_encoder_cache(lambda request: keys_of(request.items, epoch=1))
    order = engine.step()
    assert order.free_encoder_keys == ("0:z",)
    assert [(s.req_id, s.encode, s.item_keys) for s in order.scheduled] == [
        ("a", (0,), ("1:z",)),
        ("b", (0,), ("1:x",)),
    ]
    engine.run()
    for request in (a, b):
        assert engine.outputs[request.req_id] == expected_output(request, engine.bounds)[0]
    engine.assert_at_rest()


def test_reset_of_an_idle_engine_still_reaches_the_ranks():
    engine = SimEngine(limits())
    finish(engine, ask("a", "x", 1))
    engine.scheduler.reset_encoder_cache(lambda request: ())
    assert engine.scheduler.has_work()
    assert engine.step().free_encoder_keys == ("0:x",)
    assert engine.ranks[0].cache == {}
    assert not engine.scheduler.has_work()


def test_reset_with_the_wrong_number_of_keys_changes_nothing():
    engine = SimEngine(limits())
    request = ask("a", "x", 1)
    engine.add(request)
    with pytest.raises(ContractError, match="0 keys for 1 items"):
        engine.scheduler.reset_encoder_cache(lambda request: ())
    assert request.item_keys == ("0:x",)
