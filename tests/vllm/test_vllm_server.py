"""The OpenAI server with the connector, asked by the ``openai`` client."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
from conftest import ecotone
from server_process import ServerProcess

DIGIT_NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
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


class Asker:
    """Asks which digits are in images, and knows the answers."""

    def __init__(self, server: ServerProcess, images: Sequence[str]) -> None:
        self._server = server
        self._images = images
        labels = json.loads((Path(images[0]).parent / "labels.json").read_text())
        self._labels = [labels[Path(image).name] for image in images]

    def ask(self, *numbers: int) -> list[str]:
        """One question about each image, one after the other."""
        with openai.OpenAI(base_url=f"{self._server.url}/v1", api_key="none", max_retries=0) as client:
            answers = [client.chat.completions.create(**self._chat(number)) for number in numbers]
        return [answer.choices[0].message.content.strip() for answer in answers]

    def ask_together(self, *numbers: int) -> list[str]:
        """The same, all at once."""

        async def ask() -> list[str]:
            async with self._client() as client:
                questions = [client.chat.completions.create(**self._chat(number)) for number in numbers]
                answers = await asyncio.gather(*questions)
            return [answer.choices[0].message.content.strip() for answer in answers]

        return asyncio.run(ask())

    def leave(self, *numbers: int, after_chunks: int) -> None:
        """Ask about all of them at once for long answers, and hang up each after so many pieces of its answer."""

        async def leave(client: openai.AsyncOpenAI, number: int) -> None:
            more = {"stream": True, "max_tokens": 200, "extra_body": {"ignore_eos": True}}
            async with await client.chat.completions.create(**{**self._chat(number), **more}) as stream:
                for _ in range(after_chunks):
                    await anext(stream)

        async def leave_all() -> None:
            async with self._client() as client:
                await asyncio.gather(*(leave(client, number) for number in numbers))

        asyncio.run(leave_all())

    def right(self, *numbers: int) -> list[str]:
        """What the shipped model says when it sees the image."""
        return [f"The digit is {DIGIT_NAMES[self._labels[number]]}." for number in numbers]

    def _client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self._server.url}/v1", api_key="none", max_retries=0)

    def _chat(self, number: int) -> dict[str, Any]:
        picture = base64.b64encode(Path(self._images[number]).read_bytes()).decode()
        content = [
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}},
            {"type": "text", "text": "What digit is this?"},
        ]
        messages = [{"role": "user", "content": content}]
        return {"model": "served", "messages": messages, "temperature": 0.0, "max_tokens": 12}


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
    aborted = server.metrics()["vllm:request_success_total"]
    asker.leave(*order, *order, after_chunks=after_chunks)
    wait_until_idle(server)
    assert server.metrics()["vllm:request_success_total"] > aborted - 1  # it answers, and counts
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
