"""The OpenAI server with the connector, asked by the ``openai`` client."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from asker import LONG_ANSWER, Asker
from engine_process import ecotone
from server_process import ServerProcess

SETTLE_S = 60.0


@pytest.fixture(scope="module")
def server(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("server") / "log.txt"
    process = ServerProcess(models["digits"], log, ec=ecotone())
    try:
        process.wait_until_started()
        process.rpc("count_encodes")
        yield process
        process.close()
    finally:
        process.kill()


@pytest.fixture
def asker(server: ServerProcess, images: dict[str, list[str]]) -> Asker:
    return Asker(server, images["digits"])


def test_chat_with_images_that_come_again(server: ServerProcess, asker: Asker) -> None:
    before = server.encodes()
    order = (0, 1, 2, 3, 0, 1, 2, 3, 3, 0)
    assert asker.ask(*order) == asker.right(*order)
    assert server.encodes() - before == 4


def test_concurrent_requests(server: ServerProcess, asker: Asker) -> None:
    before = server.encodes()
    order = (4, 5, 6, 7, 8, 9) * 4
    assert asker.ask_together(*order) == asker.right(*order)
    assert server.encodes() - before == 6


@pytest.mark.parametrize("after_chunks", [0, 3])
def test_clients_that_hang_up(server: ServerProcess, asker: Asker, after_chunks: int) -> None:
    first = 10 if after_chunks else 16
    order = tuple(range(first, first + 6))
    before = server.metrics()["vllm:generation_tokens_total"]
    asker.leave(*order, *order, after_chunks=after_chunks)
    wait_until_idle(server)
    generated = server.metrics()["vllm:generation_tokens_total"] - before
    assert generated < LONG_ANSWER * len(order), "they were answered to the end: nothing was aborted"
    assert asker.ask_together(*order, *order) == asker.right(*order, *order)
    before = server.encodes()
    assert asker.ask(*order) == asker.right(*order)
    assert server.encodes() == before, "somebody's hanging up left an image without an encoding"
    after = server.metrics()
    assert after["ecotone:saves_in_flight"] == 0


def test_what_was_done_is_in_metrics(server: ServerProcess, asker: Asker) -> None:
    before = server.metrics()
    asker.ask(22, 23, 24, 22)
    after = server.metrics()
    assert after["ecotone:misses_total"] - before["ecotone:misses_total"] == 3
    assert after["ecotone:hits_total"] - before["ecotone:hits_total"] == 1
    for name in ("ecotone:saves_total", "ecotone:save_bytes_total", "ecotone:views_total"):
        assert after[name] > 0


def test_the_route_for_weight_updates(server: ServerProcess, asker: Asker) -> None:
    order = (25, 26, 27, 25)
    assert asker.ask(*order) == asker.right(*order)
    before = server.encodes()
    server.post("/reset_encoder_cache")
    assert asker.ask(*order) == asker.right(*order)
    assert server.encodes() - before == 3


def wait_until_idle(server: ServerProcess) -> None:
    """Until no request is left in the engine; its own counters are all that tells."""
    deadline = time.monotonic() + SETTLE_S
    while time.monotonic() < deadline:
        metrics = server.metrics()
        if metrics["vllm:num_requests_running"] + metrics["vllm:num_requests_waiting"] == 0:
            return
        time.sleep(0.05)
    raise TimeoutError(f"requests are left: {metrics}")
