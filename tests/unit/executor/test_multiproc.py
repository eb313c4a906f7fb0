"""What is particular about ranks in processes: their ends, what they leave, and whose they are."""

import gc
import os
import select
import signal
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import msgspec
import pytest
from executor_kinds import tiny_config

from ecotone.config import ECConfig, EngineConfig
from ecotone.connectors.factory import create_factory
from ecotone.connectors.scheduler import EcotoneSchedulerConnector
from ecotone.errors import ConfigError, ModelError, RankFailedError
from ecotone.executor.multiproc import ProcessTransport
from ecotone.executor.process import rank_environment
from ecotone.node.embedded import EmbeddedNode
from ecotone.protocol.connector import CacheLookup, ECItem, ECSchedulerContext
from ecotone.testing.executors import TINY_RANK
from ecotone.testing.models import PLACEHOLDER, TinyModel, tiny_item
from ecotone.testing.steps import OrderedRequest, Steps, whole_steps

pytestmark = pytest.mark.timeout(300)

STALLED = "special_ranks:StalledFactory"


def own_resources():
    gc.collect()
    return len(os.listdir("/proc/self/fd")), sorted(os.listdir("/dev/shm"))


class Node:
    """A node that outlives executors, and the engines over it, one after the other."""

    def __init__(self, kind):
        self.engine_id = f"executors-{os.getpid()}"
        self.node = EmbeddedNode(1 << 16, self.engine_id, prefault=False)
        self._kind = kind
        self.executor = None

    def start(self, connector, name):
        config = EngineConfig(
            model="tiny",
            device="cpu",
            block_size=4,
            kv_blocks=64,
            tensor_parallel_size=2,
            ec=ECConfig(connector=connector, options={"memory": 1 << 16, "prefault": False}),
        )
        factory = create_factory(config.ec)
        self.executor = self._kind(config, factory, self.engine_id, make_rank=TINY_RANK, shutdown_grace_s=60)
        self.executor.init_ec_output_aggregator()
        self.steps = Steps(whole_steps(self.executor))
        context = ECSchedulerContext(
            engine_id=self.engine_id,
            role="ec_both",
            options=config.ec.options,
            participants=self.executor.participants(),
            encoder=TinyModel().info.encoder,
            clock=lambda: 0.0,
        )
        self.half = EcotoneSchedulerConnector(context, self.node.connect(name), 10.0)

    def ask(self, name):
        """One step of a prompt about ``name``, loaded or encoded as the scheduler half says; what it said."""
        request = OrderedRequest(f"about-{name}", [5, *[PLACEHOLDER] * 3, 6], (tiny_item(name, 1, 3),))
        item = ECItem(f"{0:032x}:{sha256(name.encode()).hexdigest()}", 3)
        request.item_keys = (item.key,)
        request.data = msgspec.structs.replace(request.data, item_keys=request.item_keys)
        said = self.half.lookup(request.data.req_id, item)
        self.half.update_state_after_alloc(request.data.req_id, item)
        orders = {"load": (0,)} if said is CacheLookup.READY else {"encode": (0,)}
        self._take_in(
            self.steps.step((request, request.order(**orders)), metadata=self.half.build_connector_meta())
        )
        return said, request.output_token_ids

    def settle(self):
        while self.half.has_pending_work():
            self.executor.wait_for_progress(60)
            self._take_in(self.steps.step(metadata=self.half.build_connector_meta()))

    def _take_in(self, output):
        if output.ec_connector_output is not None:
            self.half.update_connector_output(output.ec_connector_output)

    def stop(self):
        """The engine's end: ranks first, then what they might have touched."""
        self.executor.shutdown()
        self.half.shutdown()

    def bytes(self):
        figures = self.node.statistics()
        return {state: figures[f"bytes_{state}"] for state in ("writing", "ready", "draining")}


def test_a_rank_killed_in_the_middle_of_a_save_leaves_no_entry_and_no_reservation(multiproc):
    node = Node(multiproc)
    try:
        node.start("EcotoneConnector", "first")
        said, tokens = node.ask("cat")
        assert said is CacheLookup.MISS
        node.settle()
        assert node.bytes()["ready"] > 0
        node.stop()

        before = node.bytes()
        node.start(STALLED, "second")
        assert node.ask("dog")[0] is CacheLookup.MISS
        assert node.bytes()["writing"] > 0  # rank 0 has written its rows; rank 1 is about to, for ever
        os.kill(node.executor.ranks[1].pid, signal.SIGKILL)
        with pytest.raises(RankFailedError, match="rank 1"):
            node.settle()
        assert node.bytes()["writing"] > 0
        node.stop()
        assert node.bytes() == before
        node.node.check_integrity()

        node.start("EcotoneConnector", "third")
        assert node.ask("cat") == (CacheLookup.READY, tokens)
        assert node.ask("dog")[0] is CacheLookup.MISS
        node.settle()
        assert node.bytes()["ready"] == 2 * before["ready"]
        node.stop()
    finally:
        if node.executor is not None:
            node.executor.shutdown()
        node.node.close()


def test_a_rank_that_ends_as_it_begins_ends_the_others(multiproc):
    before = own_resources()
    with pytest.raises(RankFailedError, match=r"rank 1 \(pid \d+\) ended with exit code 7"):
        multiproc(
            tiny_config(2, None), None, "engine", make_rank="special_ranks:ends_at_once", shutdown_grace_s=0.1
        )
    fds, shared = own_resources()
    assert fds <= before[0]  # fewer where idle ranks were used up
    assert shared == before[1]


@pytest.mark.parametrize(
    ("make_rank", "options", "kind", "says"),
    [
        (TINY_RANK, {"model": "none"}, ModelError, "rank [01]: the tiny model is 'tiny'"),
        (TINY_RANK, {"device": "tpu"}, ConfigError, "rank [01]: device='tpu'"),
        ("special_ranks:nothing", {}, ConfigError, "rank [01]: rank factory 'special_ranks:nothing'"),
        ("no_such_module:x", {}, ConfigError, "rank [01]: .*No module named"),
        ("", {}, ConfigError, "rank [01]: rank factory ''"),
    ],
)
def test_what_a_rank_cannot_be_made_of_is_the_error_it_would_be_here(multiproc, make_rank, options, kind, says):
    config = EngineConfig(**{"model": "tiny", "device": "cpu", "tensor_parallel_size": 2, **options})
    with pytest.raises(kind, match=says):
        multiproc(config, None, "engine", make_rank=make_rank)


def test_more_answers_than_a_socket_holds_do_not_stop_the_orders(multiproc):
    """A rank that cannot send does not read either: who orders must go on reading."""
    executor = multiproc(tiny_config(2, None), None, "engine", make_rank="special_ranks:chatty")
    calls = [executor.collective_rpc("statistics", non_block=True) for _ in range(300)]
    assert {len(ranks) for ranks in (call.result() for call in calls)} == {2}
    executor.shutdown()


PARENT = """
import sys
from executor_kinds import tiny_config
from ecotone.executor.multiproc import MultiprocExecutor
from ecotone.protocol.step import SchedulerOutput
from ecotone.testing.connectors import RecordingConnectorFactory, RecordingMetadata
from ecotone.testing.executors import TINY_RANK

config = tiny_config(2, "ec_both", block_in="start_load_caches", on_rank=1)
executor = MultiprocExecutor(config, RecordingConnectorFactory(), "engine", make_rank=TINY_RANK)
executor.execute_model(SchedulerOutput(step=1, ec_connector_metadata=RecordingMetadata()), non_block=True)
executor.wait_for_progress(3600)  # rank 1 is in the middle of the step
print(*(rank.pid for rank in executor.ranks), flush=True)
sys.stdin.read()
"""


def test_ranks_end_with_a_process_that_is_killed():
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    )
    try:
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2
        ends = [os.pidfd_open(pid) for pid in pids]
    finally:
        parent.kill()
        parent.communicate()
    for end in ends:
        gone = select.poll()
        gone.register(end, select.POLLIN)
        assert gone.poll(60_000)
        os.close(end)


def test_a_machine_without_descriptors_says_so_and_nothing_is_left(monkeypatch):
    before = own_resources()
    started = []

    def refuse(*args, **kwargs):
        started.append(args)
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(Exception, match=r"no process for a rank: .*Too many open files"):
        ProcessTransport(2)
    assert len(started) == 1
    assert own_resources() == before


def test_ranks_share_the_cpus_unless_told_otherwise(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [rank_environment(n)["OMP_NUM_THREADS"] for n in (1, 3, 16)] == ["8", "2", "1"]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert "OMP_NUM_THREADS" not in rank_environment(2)
    monkeypatch.setattr(sys, "path", ["", "/a"])
    assert rank_environment(2)["PYTHONPATH"] == f"{os.getcwd()}{os.pathsep}/a"
