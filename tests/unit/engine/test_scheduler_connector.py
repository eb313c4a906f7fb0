"""The scheduler and an EC connector: loads, PENDING, engines that only encode."""

from __future__ import annotations

from sim_engine import build, shares
from sim_model import ask, make_request

from ecotone.engine.request import RequestStatus
from ecotone.protocol.outputs import ECConnectorOutput, ModelRunnerOutput

# -- ready and missing --------------------------------------------------------------------------------------------


def test_what_is_stored_is_loaded_and_what_is_not_is_encoded_and_saved():
    engine = build(stored="x")
    a = ask("a", "x", 1, "y", "x")
    engine.add(a)
    order = engine.step()
    assert [(s.load, s.encode) for s in order.scheduled] == [((0,), (1,))]
    assert (order.ec_connector_metadata.loads, order.ec_connector_metadata.saves) == (("0:x",), ("0:y",))
    assert (a.num_loaded_items, a.num_encoded_items, a.num_cached_items) == (1, 1, 1)
    engine.run()
    engine.check_texts(a)


def test_same_image_in_two_requests_of_one_pass_is_loaded_once_and_told_once():
    engine = build(stored="x")
    engine.add(ask("a", "x", 1), ask("b", 2, "x", "x"))
    order = engine.step()
    assert [s.load for s in order.scheduled] == [(0,), ()]
    assert order.ec_connector_metadata.loads == ("0:x",)
    assert engine.connector.lookups == [("a", "0:x")]


def test_loads_are_not_counted_against_the_encoder_budget():
    engine = build(stored="xyz", encoder_budget_rows=6)
    engine.add(ask("a", "x", "y", "z", "w", 1))
    order = engine.step()
    assert [(s.load, s.encode) for s in order.scheduled] == [((0, 1, 2), (3,))]


def test_what_the_ranks_hold_is_not_looked_up():
    engine = build()
    engine.add(ask("a", "x", 1, max_tokens=1))
    engine.step()
    engine.connector.lookups.clear()
    b = ask("b", "x", 2)
    engine.add(b)
    engine.run()
    assert engine.connector.lookups == []
    engine.check_texts(b)


def test_only_what_is_about_to_be_scheduled_is_looked_up():
    engine = build(max_num_batched_tokens=5, max_num_seqs=2, max_model_len=16, kv_blocks=4)
    engine.add(ask("a", "x", 1, 2, "y", max_tokens=3), ask("b", "w", 3, max_tokens=3), ask("c", "z", 4))
    engine.step()  # a: x, 1
    assert engine.connector.lookups == [("a", "0:x")]
    engine.step()  # a: 2, four rows of y
    engine.step()  # a: its last row; b: four tokens
    assert engine.connector.lookups == [("a", "0:x"), ("a", "0:y"), ("b", "0:w")]
    engine.connector.lookups.clear()
    engine.step()  # both decode; c has no place
    assert engine.connector.lookups == []


def test_who_finds_no_kv_blocks_is_not_looked_up():
    engine = build(kv_blocks=3)
    engine.add(make_request("a", 8, max_tokens=2), ask("b", "x", 1))
    engine.step()
    assert engine.connector.lookups == []
    engine.run()
    assert engine.connector.lookups == [("b", "0:x")]


def test_what_finds_no_room_in_the_encoder_cache_is_not_looked_up():
    engine = build(encoder_cache_rows=8)
    engine.add(ask("a", "x", "y", 1))
    engine.step()
    assert engine.connector.lookups == [("a", "0:x")]


def test_connector_hears_of_every_end():
    engine = build(max_num_seqs=1)
    engine.add(make_request("a", 2), make_request("b", 2))
    engine.step()
    engine.scheduler.finish_request("b", RequestStatus.FINISHED_ABORTED)
    engine.run()
    assert engine.connector.finished == ["b", "a"]


def test_pending_work_of_the_connector_keeps_the_engine_stepping_and_not_longer():
    engine = build()
    assert not engine.scheduler.has_work()
    engine.connector.pending_work = True
    assert engine.scheduler.has_work()
    assert engine.step().scheduled == ()
    engine.connector.pending_work = False
    assert not engine.scheduler.has_work()


def test_reports_reach_the_connector_on_a_step_without_tokens():
    heard = []
    engine = build()
    engine.connector.update_connector_output = heard.append
    report = ECConnectorOutput(finished_sending=frozenset({"a"}))
    engine.update(engine.schedule(), ModelRunnerOutput(ec_connector_output=report))
    assert heard == [report]


# -- pending ------------------------------------------------------------------------------------------------------


def test_a_pending_item_defers_its_request_and_others_go_on():
    engine = build(patience=2)
    engine.connector.pending = {"0:x"}
    a, b = ask("a", "x", 1), ask("b", "y", 2)
    engine.add(a, b)
    assert shares(engine.step()) == {"b": 6}
    assert a.deferred
    assert engine.scheduler.statistics()["requests_deferred"] == 1
    assert shares(engine.step()) == {"b": 1}
    order = engine.step()  # patience is out: encoded here
    assert [(s.req_id, s.encode) for s in order.scheduled] == [("b", ()), ("a", (0,))]
    engine.run()
    engine.check_texts(a, b)
    assert engine.scheduler.statistics()["deferrals"] == 1


def test_a_chunk_ends_before_a_pending_item():
    engine = build()
    engine.connector.pending = {"0:y"}
    a = ask("a", 1, "x", 2, "y", 3)
    engine.add(a)
    assert shares(engine.step()) == {"a": 6}
    assert engine.step().scheduled == ()
    engine.connector.pending = set()
    engine.connector.stored = {"0:y"}
    order = engine.step()
    assert [(s.num_tokens, s.load) for s in order.scheduled] == [(6, (1,))]
    engine.run()
    engine.check_texts(a)


def test_deferred_requests_keep_their_place_in_line():
    engine = build(max_num_seqs=1)
    engine.connector.pending = {"0:x"}
    engine.add(ask("a", "x", 1), ask("b", "x", 2), make_request("c", 2, max_tokens=3), make_request("d", 2))
    assert shares(engine.step()) == {"c": 2}
    engine.connector.pending = set()
    engine.run()
    assert list(engine.ended) == ["c", "a", "b", "d"]


def test_a_pending_key_is_asked_about_once_per_pass():
    engine = build()
    engine.connector.pending = {"0:x"}
    engine.add(*(ask(name, "x", 1) for name in "abc"))
    engine.step()
    assert engine.connector.lookups == [("a", "0:x")]


def test_a_deferred_request_holds_nothing_but_what_it_has_computed():
    engine = build(encoder_cache_rows=10)
    engine.connector.pending = {"0:y"}
    engine.add(ask("a", "x", "y", 1), ask("b", "y", "z", 2))
    engine.step()
    seen = engine.scheduler.statistics()
    assert seen["encoder_cache_rows_available"] == 10
    assert seen["kv_blocks_free"] == 64 - 1


def test_an_item_cut_in_two_stays_although_one_who_goes_first_wants_its_room():
    engine = build(encoder_cache_rows=8, max_num_batched_tokens=5, patience=1)
    engine.connector.pending = {"0:w"}
    a, b = ask("a", 1, "w", 2), ask("b", 3, "z", 4)
    engine.add(a, b)
    assert shares(engine.step()) == {"a": 1, "b": 4}  # b has three of six rows
    order = engine.step()
    assert shares(order) == {"b": 4}  # w may be encoded now, and finds no room
    assert order.free_encoder_keys == ()
    engine.run()
    assert engine.encoded == ["0:z", "0:w"]
    engine.check_texts(a, b)


# -- engines that only encode -------------------------------------------------------------------------------------


def test_encoding_alone_ends_when_every_item_is_encoded():
    engine = build("ec_producer", encoder_budget_rows=9)
    a = ask("a", "x", 1, "y", "x", "z", 2)
    engine.add(a)
    order = engine.step()
    assert [s.encode for s in order.scheduled] == [(0, 1)]
    assert order.scheduled[0].block_ids == ()
    assert not a.is_finished  # z exceeds what is left of the budget
    engine.step()
    assert engine.ended["a"].finish_reason == "stop"
    assert engine.encoded == ["0:x", "0:y", "0:z"]
    assert engine.connector.stored == {"0:x", "0:y", "0:z"}
    engine.run()
    engine.assert_at_rest()
    assert engine.scheduler.statistics()["tokens_scheduled"] == 0


def test_a_producer_that_finds_everything_stored_does_nothing_and_is_done():
    engine = build("ec_producer", stored="xy")
    a = ask("a", "x", "y", "x", 1)
    engine.add(a, make_request("b", 3))
    order = engine.step()
    assert [(s.encode, s.load) for s in order.scheduled] == [((), ()), ((), ())]
    assert order.ec_connector_metadata is None
    assert {name: delta.finish_reason for name, delta in engine.ended.items()} == {"a": "stop", "b": "stop"}
    assert engine.scheduler.statistics()["items_known_stored"] == 3
    engine.run()
    engine.assert_at_rest()


def test_a_producer_encodes_again_what_its_ranks_hold_but_the_store_lost():
    engine = build("ec_producer")
    engine.add(ask("a", "x"))
    engine.step()
    engine.connector.stored.clear()
    engine.add(ask("b", "x"))
    engine.run()
    assert engine.encoded == ["0:x", "0:x"]
    assert engine.connector.stored == {"0:x"}


def test_a_producer_waits_for_what_another_is_writing():
    engine = build("ec_producer", patience=5)
    engine.connector.pending = {"0:x"}
    a = ask("a", "x", "y")
    engine.add(a)
    assert engine.step().scheduled == ()
    assert not a.is_finished
    engine.connector.pending = set()
    engine.connector.stored = {"0:x"}
    engine.run()
    assert engine.encoded == ["0:y"]
    assert engine.ended["a"].finish_reason == "stop"


def test_a_broken_item_fails_the_producers_request_alone():
    engine = build("ec_producer")
    engine.add(ask("a", "x"), ask("b", "y"))
    engine.step(broken={"0:x"})
    assert engine.ended["a"].finish_reason == "error"
    assert engine.ended["b"].finish_reason == "stop"
    engine.run()
    engine.assert_at_rest()
