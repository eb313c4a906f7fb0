"""Saves that end when the test says so: what is not written is not served; an idle engine's save still counts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engine_process import EngineProcess, StartEngine, ecotone

LATE = {"ec_connector": "LateConnector", "ec_connector_module_path": "late_connector"}


@pytest.fixture(scope="module")
def engine(start_engine: StartEngine) -> Iterator[EngineProcess]:
    process = start_engine("digits", ec={**ecotone(pending_timeout_s=0.2), **LATE})
    process.wait_until_started()
    yield process
    process.close()


def ask(engine: EngineProcess, image: str) -> list[int]:
    [tokens] = engine.ask("generate", requests=[{"images": [image], "text": "What digit is this?"}])
    return list(tokens)


def test_what_is_not_written_is_not_served(engine: EngineProcess, images: dict[str, list[str]]) -> None:
    first, *others = images["digits"][:4]
    engine.ask("rpc", method="hold_saves")
    answer = ask(engine, first)
    for other in others:  # vLLM's own cache has no room for the first one any more
        ask(engine, other)
    assert engine.encodes() == 4
    assert engine.ask("rpc", method="held_saves") == [4]
    assert ask(engine, first) == answer
    assert engine.encodes() == 5, "it was waited for, then encoded again: served, it would be of garbage"
    assert engine.ask("rpc", method="release_saves") == [4]
    for other in others:
        ask(engine, other)
    assert ask(engine, first) == answer
    assert engine.encodes() == 5


def test_a_save_that_ends_while_the_engine_is_idle(engine: EngineProcess, images: dict[str, list[str]]) -> None:
    late, *others = images["digits"][4:7]
    for other in others:
        ask(engine, other)
    engine.ask("rpc", method="hold_saves")
    answer = ask(engine, late)
    assert engine.ask("rpc", method="release_saves") == [1]  # no step is run for that
    before = engine.encodes()
    for other in others:
        ask(engine, other)
    assert ask(engine, late) == answer
    assert engine.encodes() == before
    metrics = engine.ask("metrics")
    assert metrics["ecotone:saves_in_flight"] == 0
