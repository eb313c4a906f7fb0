"""An engine, or one of its ranks, is killed: nothing of Ecotone's is left, and the next one starts and is warm."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from engine_process import EngineProcess, StartEngine, ecotone
from leftovers import files, open_sockets, socket_names

IMAGES = range(6)
TWO_RANKS = {"tensor_parallel_size": 2}
WRITTEN_S = 60.0


class Lives:
    """Engines of one configuration, one after the other, with a disk that stays."""

    def __init__(self, start_engine: StartEngine, images: list[str], folder: Path) -> None:
        self._start_engine = start_engine
        self._images = images
        self._temporary = folder / "temporary"
        self._temporary.mkdir()
        self.disk = folder / "disk"
        self.ec = ecotone(disk=str(self.disk))
        self.files_before = files(self._temporary)

    def start(self, **options: Any) -> EngineProcess:
        env = {"TMPDIR": str(self._temporary), **options.pop("env", {})}
        # The shipped model's tower has three heads: two ranks cannot share them.
        engine = self._start_engine("qwen3_vl", ec=self.ec, env=env, **options)
        engine.wait_until_started()
        return engine

    def answers(self, engine: EngineProcess) -> list[list[int]]:
        """About each image, one after the other."""
        requests = [{"images": [self._images[number]], "text": "What is this?"} for number in IMAGES]
        return [engine.ask("generate", requests=[request])[0] for request in requests]

    def wait_until_written(self) -> None:
        """Until the disk has a file of each image; the thread that writes them tells nobody."""
        deadline = time.monotonic() + WRITTEN_S
        while len(list(self.disk.rglob("*.safetensors"))) < len(IMAGES):
            assert time.monotonic() < deadline, list(self.disk.rglob("*"))
            time.sleep(0.02)

    def check_nothing_is_left(self, engine: EngineProcess, sockets: set[str]) -> None:
        engine.wait_until_gone()
        assert not sockets & set(socket_names().values())
        assert files(self._temporary) <= self.files_before


@pytest.fixture
def lives(start_engine: StartEngine, images: dict[str, list[str]], tmp_path: Path) -> Lives:
    return Lives(start_engine, images["qwen3_vl"], tmp_path)


def test_kill_and_start_again(lives: Lives) -> None:
    # One test, as each engine begins with what the one before it has left.
    engine = lives.start()
    answers = lives.answers(engine)
    assert engine.encodes() == len(IMAGES)
    lives.wait_until_written()
    sockets = open_sockets(engine)
    assert sockets, "an engine with the connector holds its node's sockets"
    [core] = engine.named("VLLM::EngineCore")
    core.kill()
    assert core.wait(10)
    with pytest.raises((RuntimeError, ConnectionError)):
        lives.answers(engine)
    engine.end_input()
    lives.check_nothing_is_left(engine, sockets)

    engine = lives.start(**TWO_RANKS)
    assert lives.answers(engine) == answers
    assert engine.encodes() == 0, "what the killed engine stored is on the disk"
    sockets = open_sockets(engine)
    workers = engine.named("VLLM::Worker")
    assert len(workers) == 2
    workers[1].kill()
    assert workers[1].wait(10)
    with pytest.raises((RuntimeError, ConnectionError)):
        lives.answers(engine)
    engine.end_input()
    lives.check_nothing_is_left(engine, sockets)

    engine = lives.start(**TWO_RANKS)
    sockets = open_sockets(engine)
    engine.ask("reset_encoder_cache")
    assert lives.answers(engine) == answers
    assert engine.encodes() == len(IMAGES), "each rank encodes every image once"
    assert lives.answers(engine) == answers
    assert engine.encodes() == len(IMAGES)
    engine.close()
    lives.check_nothing_is_left(engine, sockets)
