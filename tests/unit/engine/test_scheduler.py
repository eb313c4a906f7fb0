"""The scheduler without a connector: batching, budgets, chunks, preemption, stop rules, errors."""

from __future__ import annotations

import pytest
from sim_engine import SimEngine, expected_output, limits, make_request


def finish(engine: SimEngine, *requests) -> None:
    engine.add(*requests)
    engine.run()
    for request in requests:
        assert (engine.outputs[request.req_id], request.status) == expected_output(request, engine.bounds)
    engine.assert_at_rest()


def test_a_text_is_generated():
    finish(SimEngine(limits()), make_request("a", 5))


@pytest.mark.parametrize("budget", [1, 2, 3, 7])
def test_chunks_change_nothing(budget):
    rows = {"x": 5, "y": 3}
    engine = SimEngine(limits(max_num_batched_tokens=budget))
    finish(
        engine,
        make_request("a", [1, "x", 2, "y", "x", 3], rows=rows),
        make_request("b", ["y", 4], rows=rows),
    )
