"""A client of vLLM's OpenAI server that knows the answers."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai
from server_process import ServerProcess

DIGIT_NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
LONG_ANSWER = 200  # tokens


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
            more = {"stream": True, "max_tokens": LONG_ANSWER, "extra_body": {"ignore_eos": True}}
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
