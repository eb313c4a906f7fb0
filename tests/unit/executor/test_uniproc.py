"""What is particular about a rank in the caller's own process."""

import socket
import threading
from functools import partial

import pytest

from ecotone.config import ECConfig, EngineConfig
from ecotone.errors import ConfigError, ModelError
from ecotone.executor.uniproc import UniprocExecutor
from ecotone.protocol.connector import Participant
from ecotone.protocol.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ECConnectorOutput, ModelRunnerOutput
from ecotone.protocol.step import SchedulerOutput
from ecotone.testing.connectors import RecordingConnectorFactory
from ecotone.testing.executors import RankOverTheWire
from ecotone.testing.models import load_tiny_model
from ecotone.worker.worker import Worker

MAKE_RANK = partial(Worker, load=load_tiny_model)


def make_executor(factory, *, model="tiny", options=None, make_rank=MAKE_RANK):
    ec = ECConfig(options=options or {})
    return UniprocExecutor(
        EngineConfig(model=model, device="cpu", ec=ec), factory, "engine-7", make_rank=make_rank
    )


def test_the_rank_is_number_0_on_this_host():
    factory = RecordingConnectorFactory()
    assert make_executor(factory).participants() == (Participant(0, socket.gethostname()),)
    context = factory.workers[0].context
    assert (context.engine_id, context.rank, context.epoch) == ("engine-7", 0, 0)


def test_a_report_outside_a_step_wakes_who_waits():
    factory = RecordingConnectorFactory()
    executor = make_executor(factory)
    factory.workers[0].context.wakeup()
    executor.wait_for_progress(3600)  # signalled before

    awake = threading.Event()

    def wait():
        executor.wait_for_progress(3600)
        awake.set()

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    factory.workers[0].context.wakeup()
    assert awake.wait(60)
    waiter.join()


def test_a_signal_ends_one_wait(monkeypatch):
    waits = []

    class Event(threading.Event):
        def wait(self, timeout=None):
            waits.append(self.is_set())
            return self.is_set()

    monkeypatch.setattr(threading, "Event", Event)
    factory = RecordingConnectorFactory()
    executor = make_executor(factory)
    factory.workers[0].context.wakeup()
    executor.wait_for_progress(1)
    executor.wait_for_progress(1)
    assert waits == [True, False]


def test_a_wait_ends_with_its_time():
    make_executor(RecordingConnectorFactory()).wait_for_progress(0)


def test_a_shutdown_wakes_who_waits_and_closes_the_connector():
    factory = RecordingConnectorFactory()
    executor = make_executor(factory)
    waiter = threading.Thread(target=executor.wait_for_progress, args=(3600,), daemon=True)
    waiter.start()
    executor.shutdown()
    waiter.join(60)
    assert not waiter.is_alive()
    executor.shutdown()
    assert factory.workers[0].shutdowns == 1


def test_a_configuration_that_cannot_work_starts_nothing():
    started = []
    with pytest.raises(ConfigError, match="unknown option 'sillent'"):
        make_executor(
            RecordingConnectorFactory(), options={"sillent": True}, make_rank=lambda *_: started.append(1)
        )
    assert started == []


def test_a_rank_that_cannot_start_leaves_nothing():
    factory = RecordingConnectorFactory()
    with pytest.raises(ModelError):
        make_executor(factory, model="none")
    assert factory.workers == []


class Scripted:
    """A rank that answers with what it is given."""

    takes_part = True

    def __init__(self, output):
        self.output = output

    def call(self, method, *args):
        return self.output


@pytest.mark.parametrize("method", ["execute_model", "sample_tokens"])
def test_reports_are_folded_once_that_was_asked_for(method):
    """An output whose report is empty shows the difference: a fold makes it none."""
    output = ModelRunnerOutput(ec_connector_output=ECConnectorOutput())
    executor = make_executor(RecordingConnectorFactory(), make_rank=lambda *_: Scripted(output))
    arguments = (SchedulerOutput(step=1),) if method == "execute_model" else ()
    assert getattr(executor, method)(*arguments) is output
    executor.init_ec_output_aggregator()
    assert getattr(executor, method)(*arguments).ec_connector_output is None
    executor.init_kv_output_aggregator(1)
    assert getattr(executor, method)(*arguments) == EMPTY_MODEL_RUNNER_OUTPUT


def test_a_step_that_goes_on_is_none():
    executor = make_executor(RecordingConnectorFactory(), make_rank=lambda *_: Scripted(None))
    executor.init_ec_output_aggregator()
    assert executor.execute_model(SchedulerOutput(step=1)) is None


def test_over_the_wire_nothing_arrives_as_the_same_object():
    output = ModelRunnerOutput(req_ids=("a",))
    received = RankOverTheWire(Scripted(output)).call("sample_tokens")
    assert received == output
    assert received is not output
