"""How requests end, by themselves, from outside and by failing, and what a reset of the encoder cache does."""

from __future__ import annotations

import pytest
from sim_engine import SimEngine
from sim_model import EOS, ROWS, ask, expected_output, keys_of, limits, make_request, next_token, prompt_values

from ecotone.engine.request import RequestStatus
from ecotone.errors import ContractError, IllegalTransitionError, IntegrityError
from ecotone.protocol.arrays import Array
from ecotone.protocol.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ECConnectorOutput, ModelRunnerOutput, TokenLogprobs
from ecotone.protocol.params import PoolingParams

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
    engine.finish(ask("a", "x", 1))
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
