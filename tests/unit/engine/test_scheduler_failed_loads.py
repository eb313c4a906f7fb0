"""A load that fails undoes the step for those who needed it, and for nobody else."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from sim_engine import build, shares
from sim_model import ask, keys_of

from ecotone.engine.request import RequestStatus
from ecotone.protocol.outputs import ECConnectorOutput, ModelRunnerOutput


@pytest.mark.parametrize("failing", [[{"0:x"}, set()], [set(), {"0:x"}], [{"0:x"}, {"0:x"}]])
def test_a_failed_load_undoes_the_step_for_all_who_needed_it_and_for_nobody_else(failing):
    engine = build(stored="x", num_ranks=2)
    a, b, c = ask("a", "x", 1), ask("b", 2, "x"), ask("c", "y", 3)
    engine.add(a, b, c)
    engine.step(failing)
    assert [r.num_computed_tokens for r in (a, b, c)] == [0, 0, 6]
    assert (a.output_token_ids, b.output_token_ids, len(c.output_token_ids)) == ([], [], 1)
    assert not a.is_finished
    order = engine.step()
    assert [(s.req_id, s.num_computed_tokens, s.load, s.encode) for s in order.scheduled] == [
        ("a", 0, (), (0,)),
        ("b", 0, (), ()),
        ("c", 6, (), ()),
    ]
    assert order.new_requests == ()  # the ranks know them
    engine.run()
    engine.check_texts(a, b, c)
    seen = engine.scheduler.statistics()
    assert (seen["rollbacks"], seen["fallbacks_load_failed"]) == (2, 1)


def test_a_request_whose_rows_of_the_failed_item_come_later_keeps_its_result():
    engine = build(stored="x", max_num_batched_tokens=8)
    a, b = ask("a", "x", 1), ask("b", 2, 3, 4, "x")
    engine.add(a, b)
    assert shares(engine.step([{"0:x"}])) == {"a": 5, "b": 3}
    assert (a.num_computed_tokens, b.num_computed_tokens) == (0, 3)
    engine.run()
    engine.check_texts(a, b)


def test_a_failed_load_keeps_what_was_computed_in_earlier_steps():
    engine = build(stored="y", max_num_batched_tokens=6)
    a = ask("a", "x", 1, 2, "y", 3)
    engine.add(a)
    engine.step()
    assert a.num_computed_tokens == 6
    engine.step([{"0:y"}])
    assert a.num_computed_tokens == 6
    engine.run()
    engine.check_texts(a)
    assert engine.encoded == ["0:x", "0:y"]


def test_a_failed_load_gives_back_what_was_taken_ahead():
    engine = build(stored="xy", encoder_cache_rows=9)
    engine.add(ask("a", "x", "y", 1))
    engine.step([{"0:x"}])
    assert engine.scheduler.statistics()["encoder_cache_rows_available"] == 9
    order = engine.step()
    assert [(s.load, s.encode) for s in order.scheduled] == [((), (0,))]  # y is still held


def test_an_error_on_rows_that_were_not_there_is_not_taken_at_its_word():
    engine = build(stored="x")
    a = ask("a", "x", 1)
    engine.add(a)
    order = engine.schedule()
    engine.execute(order, [{"0:x"}])
    output = ModelRunnerOutput(
        request_errors={"a": "its logits are not finite"},
        ec_connector_output=ECConnectorOutput(failed_loads=frozenset({"0:x"})),
    )
    assert engine.update(order, output) == []
    engine.run()
    engine.check_texts(a)


def test_a_store_that_never_delivers_is_given_up():
    engine = build(stored="x")
    engine.connector.forgets = False
    a = ask("a", "x", 1)
    engine.add(a)
    for _ in range(2):
        assert [s.load for s in engine.step([{"0:x"}]).scheduled] == [(0,)]
    order = engine.step([{"0:x"}])
    assert [(s.load, s.encode) for s in order.scheduled] == [((), (0,))]
    assert order.ec_connector_metadata is None  # the connector was not asked, and is not told
    engine.run()
    engine.check_texts(a)
    assert engine.scheduler.statistics()["fallbacks_load_given_up"] == 1


def test_a_load_that_fails_for_a_request_aborted_meanwhile_is_not_taken_for_held():
    engine = build(stored="x")
    a, b = ask("a", "x", 1), ask("b", "x", 2)
    engine.add(a)
    order = engine.schedule()
    output = engine.execute(order, [{"0:x"}])
    engine.scheduler.finish_request("a", RequestStatus.FINISHED_ABORTED)
    assert engine.update(order, output) == []
    engine.add(b)
    engine.run()
    engine.check_texts(b)


def test_a_load_that_fails_after_a_reset_undoes_the_step_by_the_keys_it_was_ordered_with():
    engine = build(stored="x")
    a = ask("a", "x", 1)
    engine.add(a)
    order = engine.schedule()
    output = engine.execute(order, [{"0:x"}])
    engine.scheduler.reset_encoder_cache(lambda request: keys_of(request.items, epoch=1))
    engine.update(order, output)
    assert a.num_computed_tokens == 0
    engine.run()
    engine.check_texts(a)


def test_an_encoding_that_a_connector_takes_away_again_and_again_ends_the_request_alone():
    engine = build()
    a, b = ask("a", "x", 1), ask("b", 2, 3)
    engine.add(a, b)
    lost = ModelRunnerOutput(ec_connector_output=ECConnectorOutput(failed_loads=frozenset({"0:x"})))
    for _ in range(3):
        assert not a.is_finished
        order = engine.schedule()
        assert [s.encode for s in order.scheduled if s.req_id == "a"] == [(0,)]
        output = engine.execute(order)
        deltas = engine.update(order, replace(output, ec_connector_output=lost.ec_connector_output))
    assert [(d.req_id, d.finished) for d in deltas if d.finished][:1] == [("a", RequestStatus.FINISHED_ERROR)]
    assert "0:x" in a.error
    engine.run()
    engine.check_texts(b)
