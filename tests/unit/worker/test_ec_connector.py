"""The hook runs once per step, in order, and lets go of the step's orders whatever happens."""

import weakref

import numpy as np
import pytest
import torch

from ecotone.errors import ContractError, RoundTripError
from ecotone.protocol.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ECConnectorWorkerMetadata
from ecotone.protocol.step import SchedulerOutput
from ecotone.testing.connectors import RecordingMetadata, ScriptedError
from ecotone.testing.models import PLACEHOLDER, tiny_item
from ecotone.testing.steps import OrderedRequest
from ecotone.worker.ec_connector import NO_OP_EC_CONNECTOR, ActiveECConnector

P = PLACEHOLDER
BEGIN = ["bind_connector_metadata"]
REPORT = ["get_finished", "build_connector_worker_meta"]
END = ["get_ec_connector_stats", "clear_connector_metadata"]
HOOKS = (
    "bind_connector_metadata",
    "start_load_caches",
    "save_caches",
    "wait_for_loads",
    "get_finished",
    "build_connector_worker_meta",
    "get_ec_connector_stats",
)


def request_for(item_id="cat", req_id="a", **options):
    return OrderedRequest(req_id, [5, P, P, P, 6], (tiny_item(item_id, 1, 3),), **options)


def saved(rank, item_id="cat"):
    """A request whose item was encoded, saved, and dropped from the encoder cache."""
    request = request_for(item_id, "first")
    rank.steps.step((request, request.order(encode=(0,))), metadata=RecordingMetadata(saves=(f"ns:{item_id}",)))
    rank.steps.step(finished=["first"], free=[f"ns:{item_id}"])
    return request.output_token_ids


def calls(rank):
    """Every hook call so far, in order."""
    rank.connector.build_connector_worker_meta()
    return rank.connector.built[0].aggregate_all(rank.connector.built).hooks(0)[:-1]


def test_the_hooks_of_a_step_in_order(make_rank):
    rank = make_rank()
    a, b = request_for("cat", "a"), request_for("dog", "b", block_ids=range(20, 30))
    metadata = RecordingMetadata(loads=("ns:dog",), saves=("ns:cat",))
    rank.connector.stored["ns:dog"] = torch.zeros(3, 24)
    rank.steps.step((a, a.order(encode=(0,))), (b, b.order(load=(0,))), metadata=metadata, finished=["z"])
    assert calls(rank) == [
        "bind_connector_metadata",
        "start_load_caches:ns:dog",
        "save_caches:ns:cat",
        "wait_for_loads",
        "get_finished:z",
        *REPORT[1:],
        *END,
    ]


@pytest.mark.parametrize("role", ["ec_producer", "ec_both", "ec_consumer"])
def test_every_producer_saves_and_a_consumer_does_not(make_rank, role):
    rank, request = make_rank(role), request_for()
    rank.steps.step((request, request.order(encode=(0,))), metadata=RecordingMetadata(saves=("ns:cat",)))
    assert ("save_caches:ns:cat" in calls(rank)) == (role != "ec_consumer")


@pytest.mark.parametrize("role", ["ec_producer", "ec_both", "ec_consumer"])
def test_only_a_pure_producer_stops_after_the_encoder(make_rank, role):
    rank, request = make_rank(role), request_for()
    output = rank.steps.step((request, request.order(encode=(0,))), metadata=RecordingMetadata())
    assert output.req_ids == ("a",)
    assert (output.sampled_token_ids == ((),)) == (role == "ec_producer")
    assert (rank.runner.statistics()["kv_cache_bytes"] == 0) == (role == "ec_producer")
    assert set(rank.cache) == {"ns:cat"}


def test_a_step_without_orders_still_reports(make_rank):
    rank, request = make_rank(), request_for()
    output = rank.steps.step((request, request.order(encode=(0,))))
    assert output.ec_connector_output.ec_connector_worker_meta is rank.connector.built[-1]
    assert calls(rank) == [*REPORT, "get_ec_connector_stats"]


def test_what_was_loaded_is_used(make_rank):
    rank = make_rank()
    tokens = saved(rank)
    request = request_for()
    output = rank.steps.step((request, request.order(load=(0,))), metadata=RecordingMetadata(loads=("ns:cat",)))
    assert output.ec_connector_output.failed_loads == frozenset()
    assert request.output_token_ids == tokens
    assert rank.model.encoded == ["cat"]


@pytest.mark.parametrize("fate", ["missing", "short", "wrong_dtype"])
def test_a_load_that_is_not_what_was_ordered_is_dropped_and_listed(make_rank, fate):
    rank = make_rank(load_fates={"ns:cat": fate})
    tokens = saved(rank)
    request = request_for()
    metadata = RecordingMetadata(loads=("ns:cat",))
    output = rank.steps.step((request, request.order(load=(0,))), metadata=metadata, discard=True)
    assert output.ec_connector_output.failed_loads == {"ns:cat"}
    assert output.req_ids == ("a",)
    assert len(output.sampled_token_ids[0]) == 1
    assert dict(rank.cache) == {}
    assert rank.runner.statistics()["failed_loads"] == 1
    # The step's result was discarded; the next one encodes, and nothing of the failure is left.
    rank.steps.step((request, request.order(encode=(0,))), metadata=RecordingMetadata())
    assert request.output_token_ids == tokens


def test_a_failed_load_does_not_change_the_others(make_rank):
    rank = make_rank(load_fates={"ns:cat": "missing"})
    tokens = saved(rank, "dog")
    a, b = request_for("cat", "a"), request_for("dog", "b", block_ids=range(20, 30))
    metadata = RecordingMetadata(loads=("ns:cat", "ns:dog"))
    output = rank.steps.step((a, a.order(load=(0,))), (b, b.order(load=(0,))), metadata=metadata)
    assert output.ec_connector_output.failed_loads == {"ns:cat"}
    assert b.output_token_ids == tokens


def test_missing_rows_are_zeros(make_rank):
    """Ranks must not part ways, so every rank computes the same with what is not there."""
    rank = make_rank(load_fates={"ns:cat": "missing"})
    saved(rank)
    request = request_for()
    output = rank.steps.step((request, request.order(load=(0,))), metadata=RecordingMetadata(loads=("ns:cat",)))
    zeros = make_rank(None)
    zeros.cache["ns:cat"] = torch.zeros(3, 24)
    again = request_for()
    assert zeros.steps.step((again, again.order())).sampled_token_ids == output.sampled_token_ids


def test_nothing_scheduled_runs_the_hook(make_rank):
    rank = make_rank(report_finished=True)
    output = rank.steps.step(metadata=RecordingMetadata(), finished=["z"])
    assert output.req_ids == ()
    assert output.ec_connector_output.finished_sending == {"z"}
    assert output.ec_connector_output.finished_recving == {"z"}
    assert output.ec_connector_output.ec_connector_worker_meta is rank.connector.built[-1]
    assert calls(rank) == [*BEGIN, "start_load_caches", "wait_for_loads", "get_finished:z", *REPORT[1:], *END]


def test_nothing_left_after_the_encoder_goes_on_with_the_hook_that_has_begun(make_rank):
    rank = make_rank(load_fates={"ns:cat": "missing"})
    bad = tiny_item("bad", 0, 2, pixels=torch.full((2, 4), torch.inf))
    request = OrderedRequest("a", [P, P, 5, P, P, P], (bad, tiny_item("cat", 3, 3)))
    output = rank.steps.step(
        (request, request.order(encode=(0,), load=(1,))), metadata=RecordingMetadata(loads=("ns:cat",))
    )
    assert output.request_errors == {"a": "item 0: its pixels are not finite"}
    assert output.req_ids == ()
    assert output.ec_connector_output.failed_loads == {"ns:cat"}
    assert rank.runner.statistics()["failed_loads"] == 1
    assert output.ec_connector_output.ec_connector_worker_meta is rank.connector.built[-1]
    assert calls(rank) == [*BEGIN, "start_load_caches:ns:cat", "wait_for_loads", *REPORT, *END]


@pytest.mark.parametrize(
    ("hook", "tokens"),
    [(hook, tokens) for hook in HOOKS for tokens in (True, False) if tokens or hook != "save_caches"],
)
def test_the_orders_are_cleared_when_a_hook_raises(make_rank, hook, tokens):
    rank, request = make_rank(raise_in=hook), request_for()
    orders = [(request, request.order(encode=(0,)))] if tokens else []
    with pytest.raises(ScriptedError, match=hook):
        rank.steps.step(*orders, metadata=RecordingMetadata(saves=("ns:cat",)))
    assert rank.connector.bound is None
    with pytest.raises(ContractError, match="no step to finish"):
        rank.runner.sample_tokens()


def test_the_orders_are_cleared_when_the_model_raises(make_rank, monkeypatch):
    rank, request = make_rank(), request_for()

    def out_of_memory(*_, **__):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(rank.model, "forward", out_of_memory)
        with pytest.raises(RuntimeError, match="out of memory"):
            rank.steps.step((request, request.order(encode=(0,))), metadata=RecordingMetadata())
    assert rank.connector.bound is None
    rank.steps.step(metadata=RecordingMetadata())
    assert rank.connector.bound is None


def test_a_report_with_nothing_in_it_is_none(make_rank):
    rank, request = make_rank(silent=True), request_for()
    output = rank.steps.step((request, request.order(encode=(0,))), metadata=RecordingMetadata())
    assert output.ec_connector_output is None
    assert rank.steps.step(metadata=RecordingMetadata()) is EMPTY_MODEL_RUNNER_OUTPUT


def test_the_shared_empty_output_stays_empty(make_rank):
    rank = make_rank(report_finished=True)
    rank.steps.step(metadata=RecordingMetadata(), finished=["z"])
    assert EMPTY_MODEL_RUNNER_OUTPUT.ec_connector_output is None
    assert rank.steps.step().ec_connector_output.finished_sending == frozenset()


def test_a_falsy_report_counts(make_rank):
    rank = make_rank()
    meta = rank.steps.step().ec_connector_output.ec_connector_worker_meta
    assert meta is rank.connector.built[-1]
    assert not meta


class Undeclared(ECConnectorWorkerMetadata, frozen=True):
    def aggregate(self, other):
        return self


class Untyped(ECConnectorWorkerMetadata, frozen=True):
    anything: object = None

    def aggregate(self, other):
        return self


def test_a_report_of_another_type_than_declared_is_refused(make_rank, monkeypatch):
    rank = make_rank()
    monkeypatch.setattr(rank.connector, "build_connector_worker_meta", Undeclared)
    with pytest.raises(ContractError, match="reported a Undeclared; its worker_metadata_type is RecordedCalls"):
        rank.steps.step()


def test_a_report_of_a_connector_that_declares_none_is_refused(make_rank, monkeypatch):
    rank = make_rank()
    monkeypatch.setattr(type(rank.connector), "worker_metadata_type", None)
    with pytest.raises(ContractError, match="its worker_metadata_type is None"):
        rank.steps.step()


def test_a_connector_whose_reports_cannot_travel_is_refused(make_rank, monkeypatch):
    rank = make_rank()
    monkeypatch.setattr(type(rank.connector), "worker_metadata_type", Untyped)
    with pytest.raises(RoundTripError, match="anything"):
        ActiveECConnector(rank.connector, rank.cache)


def test_a_connector_that_never_reports_declares_no_type(make_rank, monkeypatch):
    rank = make_rank(silent=True)
    monkeypatch.setattr(type(rank.connector), "worker_metadata_type", None)
    hook = ActiveECConnector(rank.connector, rank.cache)
    assert hook.no_forward(SchedulerOutput(step=1)) is EMPTY_MODEL_RUNNER_OUTPUT


def test_no_op(make_rank):
    rank, request = make_rank(None), request_for()
    output = rank.steps.step((request, request.order(encode=(0,))), metadata=RecordingMetadata())
    assert output.ec_connector_output is None
    assert len(request.output_token_ids) == 1
    assert rank.steps.step(metadata=RecordingMetadata()) is EMPTY_MODEL_RUNNER_OUTPUT
    assert NO_OP_EC_CONNECTOR.no_forward(SchedulerOutput(step=1)) is EMPTY_MODEL_RUNNER_OUTPUT
    NO_OP_EC_CONNECTOR.shutdown()


def test_no_op_reports_what_failed_to_encode(make_rank):
    rank = make_rank(None)
    item = tiny_item("bad", 0, 2, pixels=torch.full((2, 4), torch.nan))
    request = OrderedRequest("a", [P, P, 5], (item,))
    output = rank.steps.step((request, request.order(encode=(0,))))
    assert output.request_errors.keys() == {"a"}
    assert output.ec_connector_output is None


def test_the_step_keeps_no_loaded_rows_alive(make_rank):
    """The rows may be a view of the node's memory, whose pin falls when nobody can read them any more."""
    rank, request = make_rank(), request_for()
    memory = np.zeros((3, 24), dtype=np.float32)
    is_alive = weakref.ref(memory)
    rank.connector.stored["ns:cat"] = torch.from_numpy(memory)
    del memory
    order = SchedulerOutput(
        step=1,
        new_requests=(request.data,),
        scheduled=(request.order(load=(0,)),),
        ec_connector_metadata=RecordingMetadata(loads=("ns:cat",)),
    )
    assert rank.runner.execute_model(order) is None
    rank.connector.stored.clear()
    assert is_alive() is not None
    rank.runner.reset_encoder_cache()
    assert is_alive() is None
    assert len(rank.runner.sample_tokens().sampled_token_ids[0]) == 1
