"""Several steps in flight over ranks in processes: they overlap, they stay in order, and a rank's end ends all."""

from __future__ import annotations

import os

import pytest

from ecotone.config import EngineConfig
from ecotone.engine.admission import SchedulerLimits
from ecotone.engine.request import Request
from ecotone.engine.scheduler import Scheduler
from ecotone.errors import RankFailedError
from ecotone.executor.base import Delivers
from ecotone.executor.uniproc import UniprocExecutor
from ecotone.protocol.params import SamplingParams
from ecotone.testing.executors import tiny_rank

NEVER = 0


@pytest.fixture
def make(multiproc, tmp_path):
    made = []

    def build(ends_in=NEVER):
        fifo = tmp_path / "fifo"
        os.mkfifo(fifo)
        config = EngineConfig(model=str(fifo), device="cpu", pipeline_parallel_size=2)
        made.append(multiproc(config, None, str(ends_in), make_rank="pipeline_ranks:played_stage"))
        return made[-1]

    yield build
    for executor in made:
        executor.shutdown()


def scheduler_for(executor):
    limits = SchedulerLimits(
        max_num_batched_tokens=64,
        max_num_seqs=4,
        max_model_len=64,
        block_size=4,
        kv_blocks=16,
        encoder_cache_rows=8,
        encoder_budget_rows=8,
        max_concurrent_steps=executor.max_concurrent_steps,
    )
    scheduler = Scheduler(limits, None, (), lambda: 0.0)
    for name in "ab":
        scheduler.add_request(Request(name, (1, 2, 3), SamplingParams(max_tokens=2), arrival_time=0.0))
    return scheduler


def test_a_stage_begins_the_next_step_while_the_one_behind_is_in_the_last(make):
    executor = make()
    assert executor.max_concurrent_steps == 2
    scheduler = scheduler_for(executor)
    first = scheduler.schedule()
    answers = [(first, executor.submit_step(first))]
    second = scheduler.schedule_ahead()
    answers.append((second, executor.submit_step(second)))
    tokens = []
    while answers:
        order, answer = answers.pop(0)
        tokens += [(d.req_id, d.new_token_ids) for d in scheduler.update_from_output(order, answer.result())]
        ahead = scheduler.schedule_ahead()
        if ahead is not None and ahead.scheduled:
            answers.append((ahead, executor.submit_step(ahead)))
    assert tokens == [("a", (100,)), ("b", (200,)), ("a", (300,)), ("b", (400,))]


def test_a_rank_that_ends_fails_every_step_that_it_has_not_answered(make):
    executor = make(ends_in=2)
    scheduler = scheduler_for(executor)
    answers = [executor.submit_step(scheduler.schedule()), executor.submit_step(scheduler.schedule_ahead())]
    assert answers[0].result().sampled_token_ids == ((100,),)
    with pytest.raises(RankFailedError, match=r"rank 1 \(pid \d+\) ended with exit code 9"):
        answers[1].result()


def test_a_rank_that_ends_fails_all_steps_in_flight(make):
    executor = make(ends_in=1)
    scheduler = scheduler_for(executor)
    answers = [executor.submit_step(scheduler.schedule()), executor.submit_step(scheduler.schedule_ahead())]
    for answer in answers:
        with pytest.raises(RankFailedError, match=r"rank 1 \(pid \d+\) ended with exit code 9"):
            answer.result()


def test_one_rank_has_one_step_at_a_time():
    executor = UniprocExecutor(EngineConfig(model="tiny", device="cpu"), None, "engine", make_rank=tiny_rank)
    assert executor.max_concurrent_steps == 1
    executor.shutdown()


def test_no_more_steps_than_the_executor_delivers(make, multiproc, monkeypatch):
    monkeypatch.setattr(multiproc, "delivers", Delivers(all_ranks=True, steps_in_flight=1))
    assert make().max_concurrent_steps == 1
