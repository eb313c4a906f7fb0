"""One engine's way through the demo's questions, and what it did for them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import ecotone
from ecotone.cli.questions import Question
from ecotone.errors import ResourceError

_MAX_TOKENS = 64


def make_prompt(
    text: str,
    images: Sequence[ecotone.ImageInput],
    videos: Sequence[ecotone.VideoInput] = (),
    audio: Sequence[ecotone.AudioInput] = (),
) -> ecotone.Prompt:
    """A question about media, as the model's chat template puts it: the question comes last."""
    kinds = ["image"] * len(images) + ["video"] * len(videos) + ["audio"] * len(audio)
    content = [{"type": kind} for kind in kinds] + [{"type": "text", "text": text}]
    messages = [{"role": "user", "content": content}]
    return ecotone.Prompt(messages=messages, images=images, videos=videos, audio=audio)


@dataclass(frozen=True)
class RankFigures:
    """What one rank did: items it came to hold encoded, encodings saved to the node and loaded from it, and their
    bytes; and the items its own encoder ran on, fewer where the ranks divide the images."""

    rank: int
    pid: int
    encodes: int
    saves: int
    loads: int
    bytes_saved: int
    bytes_loaded: int
    tower_items: int = 0

    @classmethod
    def of(cls, statistics: Mapping[str, Any]) -> RankFigures:
        """From a rank's entry of ``Engine.statistics()``. A load is a copy, or a view of the node's memory."""
        ec = statistics["connector"]
        return cls(
            rank=int(statistics["rank"]),
            pid=int(statistics["pid"]),
            encodes=int(statistics["encodes"]),
            saves=int(ec.get("saves", 0)),
            loads=int(ec.get("loads", 0) + ec.get("views", 0)),
            bytes_saved=int(ec.get("save_bytes", 0)),
            bytes_loaded=int(ec.get("load_bytes", 0) + ec.get("view_bytes", 0)),
            tower_items=int(statistics["tower_items"]),
        )

    def since(self, before: RankFigures) -> RankFigures:
        """What was done after ``before``."""
        return RankFigures(
            rank=self.rank,
            pid=self.pid,
            encodes=self.encodes - before.encodes,
            saves=self.saves - before.saves,
            loads=self.loads - before.loads,
            bytes_saved=self.bytes_saved - before.bytes_saved,
            bytes_loaded=self.bytes_loaded - before.bytes_loaded,
            tower_items=self.tower_items - before.tower_items,
        )


@dataclass
class Pass:
    """One engine's answers.

    Attributes:
        name: what to call it.
        questions, outputs: parallel.
        seconds: spent on them, saves included.
        ranks: what each rank did for them, warming up excluded.
    """

    name: str
    engine: ecotone.Engine
    questions: list[Question] = field(default_factory=list)
    outputs: list[ecotone.RequestOutput] = field(default_factory=list)
    seconds: float = 0.0
    ranks: list[RankFigures] = field(default_factory=list)
    _before: list[RankFigures] = field(default_factory=list)

    def warm_up(self, prompts: list[ecotone.Prompt]) -> None:
        """Ask ``prompts`` one by one; what is counted starts after that."""
        for prompt in prompts:
            self.engine.generate(prompt, ecotone.SamplingParams(max_tokens=_MAX_TOKENS))
            self._settle()
        self._before = self._read()
        self.ranks = [rank.since(rank) for rank in self._before]

    def ask(self, question: Question) -> None:
        """Ask, and wait until nothing is pending.

        Raises:
            EcotoneError: it could not be answered.
        """
        start = time.monotonic()
        params = ecotone.SamplingParams(max_tokens=_MAX_TOKENS)
        [output] = self.engine.generate(make_prompt(question.text, question.images), params)
        self._settle()
        self.seconds += time.monotonic() - start
        self.questions.append(question)
        self.outputs.append(output)
        self.ranks = [now.since(before) for now, before in zip(self._read(), self._before, strict=True)]

    @property
    def encodes(self) -> int:
        """Items encoded. Every rank has all of them."""
        return max(rank.encodes for rank in self.ranks)

    @property
    def loads(self) -> int:
        """Items loaded. Every rank loads all of them."""
        return max(rank.loads for rank in self.ranks)

    @property
    def saves(self) -> int:
        """Items saved. Every rank saves its share of the rows."""
        return max(rank.saves for rank in self.ranks)

    @property
    def correct(self) -> int:
        """Right answers."""
        return sum(self.is_right(i) for i in range(len(self.outputs)))

    def is_right(self, index: int) -> bool:
        """Whether the answer to question ``index`` is the right one."""
        return self.outputs[index].text.strip() == self.questions[index].answer

    def ttft_ms(self, chosen: list[int]) -> float | None:
        """Median time to the first token over the chosen questions, milliseconds; ``None`` for none."""
        metrics = [self.outputs[i].metrics for i in chosen]
        times = [m.ttft_s * 1000 for m in metrics if m is not None and m.ttft_s is not None]
        return median(times) if times else None

    def _settle(self) -> None:
        if not self.engine.settle():
            raise ResourceError("saves did not come to an end within 10 seconds")

    def _read(self) -> list[RankFigures]:
        return [RankFigures.of(rank) for rank in self.engine.statistics()["ranks"]]
