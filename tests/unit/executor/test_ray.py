"""What is particular about Ray: one reply, large messages past its object store, and its own end."""

import gc
import os
import subprocess

import pytest
from executor_kinds import tiny_config

from ecotone.errors import LostReportsError, ResourceError
from ecotone.executor.channel import INLINE_BYTES
from ecotone.protocol.step import SchedulerOutput
from ecotone.testing.executors import TINY_RANK
from ecotone.testing.rank_pool import pooled

ray = pytest.importorskip("ecotone.executor.ray_cluster", exc_type=ImportError).ray

pytestmark = pytest.mark.timeout(300)


def test_the_single_reply_executor_runs_steps_and_notices_what_other_ranks_raise(ray_v2, ray_pool):
    from ecotone.executor.ray import RayExecutor  # noqa: PLC0415 - an optional extra

    kind = pooled(RayExecutor, ray_pool)
    executor = kind(tiny_config(2, None), None, "engine", make_rank=TINY_RANK)
    output = executor.execute_model(SchedulerOutput(step=1, finished_req_ids={"z"}))
    assert output.kv_connector_output.finished_sending == {"z"}
    assert [rank["rank"] for rank in executor.collective_rpc("statistics")] == [0, 1]
    with pytest.raises(LostReportsError):
        executor.init_kv_output_aggregator(2)
    executor.shutdown()


def test_large_messages_do_not_pass_through_the_object_store(ray_v2, monkeypatch):
    executor = ray_v2(tiny_config(2, None), None, "engine", make_rank="special_ranks:chatty")
    letters = []
    real = ray.get

    def get(refs, **options):
        value = real(refs, **options)
        letters.append(value)
        return value

    monkeypatch.setattr(ray, "get", get)
    gc.collect()
    lent = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        first, second = executor.collective_rpc("statistics")
        assert first == second
        assert len(first) == 1700
    replies = [letter for letter in letters if isinstance(letter, tuple)]
    assert len(replies) == 6  # each is (pid, descriptor, size) of the rank's own memory
    assert {pid for pid, _, _ in replies} == {rank.pid for rank in executor.ranks}
    assert {size > INLINE_BYTES for _, _, size in replies} == {True}
    assert len(os.listdir("/proc/self/fd")) == lent
    ranks = {rank.pid: len(os.listdir(f"/proc/{rank.pid}/fd")) for rank in executor.ranks}
    for _ in range(5):
        executor.collective_rpc("statistics")
    assert {rank.pid: len(os.listdir(f"/proc/{rank.pid}/fd")) for rank in executor.ranks} == ranks
    executor.shutdown()


def test_the_cluster_is_local_and_listens_on_the_loopback_interface_alone(ray_v2):
    executor = ray_v2(tiny_config(2, None), None, "engine", make_rank="special_ranks:chatty")
    assert {node["NodeManagerAddress"] for node in ray.nodes()} == {"127.0.0.1"}
    executor.shutdown()


def test_ranks_have_the_priority_of_their_engine(ray_v2):
    executor = ray_v2(tiny_config(2, None), None, "engine", make_rank=TINY_RANK)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert [os.getpriority(os.PRIO_PROCESS, rank.pid) for rank in executor.ranks] == [own, own]
    executor.shutdown()


def test_folders_of_processes_that_are_no_more_are_removed(tmp_path):
    from ecotone.executor.ray_cluster import reap_folders  # noqa: PLC0415 - an optional extra

    ended = subprocess.Popen(["true"])
    ended.wait()
    names = [f"ecotone-ray-{ended.pid}-a", f"ecotone-ray-{os.getpid()}-b", "ecotone-ray-x-c", "other"]
    for name in names:
        (tmp_path / name / "logs").mkdir(parents=True)
    reap_folders(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[1:])


def test_ranks_that_no_machine_has_room_for_are_refused(ray_v2, monkeypatch):
    from ecotone.executor import ray as module  # noqa: PLC0415 - an optional extra

    executor = ray_v2(tiny_config(2, None), None, "engine", make_rank="special_ranks:chatty")  # Ray runs
    monkeypatch.setattr(module, "PLACEMENT_TIMEOUT_S", 0.5)
    with pytest.raises(ResourceError, match=r"no machine with room for 2 ranks of .*GPU"):
        module.RayTransport(2, "cuda")
    assert ray.is_initialized()  # for the one that uses it
    executor.shutdown()
