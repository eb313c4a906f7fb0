"""``ecotone demo --engines N``: several engines, each a process, and one node that they share.

The questions go to the engines in turn. When every image was seen, one engine is killed in the middle of a
question, and the others answer that one and the rest. An engine without a cache, in this
process, is asked the same.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

import ecotone
from ecotone.cli.console import out, working
from ecotone.cli.demo import check_sizes, rows_per_image
from ecotone.cli.engine_process import Answered, EngineProcess
from ecotone.cli.passes import RankFigures, make_prompt
from ecotone.cli.questions import Question, load_digits, plan_questions
from ecotone.config import ECConfig, EngineConfig
from ecotone.errors import ResourceError
from ecotone.node.server.tool import NodeTool

_MEMORY = "64MiB"
_KV_BLOCKS = 256
_MAX_TOKENS = 64
_START_TIMEOUT_S = 60.0


@dataclass
class Member:
    """One engine: its process, and what it did."""

    name: str
    process: EngineProcess
    requests: int = 0
    correct: int = 0
    killed: bool = False
    ranks: tuple[RankFigures, ...] = ()

    def took(self, question: Question, answer: Answered) -> None:
        """It answered."""
        self.requests += 1
        self.correct += answer.text.strip() == question.answer
        self.ranks = answer.ranks

    @property
    def encodes(self) -> int:
        """Items it encoded, until it last answered. Every rank has all of them."""
        return max((rank.encodes for rank in self.ranks), default=0)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        figures = {name: max((getattr(r, name) for r in self.ranks), default=0) for name in ("saves", "loads")}
        return {
            "name": self.name,
            "pid": self.process.pid,
            "killed": self.killed,
            "requests": self.requests,
            "correct": self.correct,
            "encodes": self.encodes,
            **figures,
            "ranks": [asdict(rank) for rank in self.ranks],
        }


@dataclass
class FleetResult:
    """What came of it."""

    model: Path
    num_images: int
    members: list[Member]
    answers: list[Answered] = field(default_factory=list)
    reference: list[tuple[int, ...]] = field(default_factory=list)
    node: dict[str, float] = field(default_factory=dict)

    @property
    def identical(self) -> bool:
        """Whether every answer has the tokens that an engine without a cache gives."""
        return [answer.token_ids for answer in self.answers] == self.reference

    @property
    def encodes(self) -> int:
        """Over all engines."""
        return sum(member.encodes for member in self.members)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "model": str(self.model),
            "requests": len(self.answers),
            "images": self.num_images,
            "encodes": self.encodes,
            "correct": sum(member.correct for member in self.members),
            "identical_to_uncached": self.identical,
            "engines": [member.as_dict() for member in self.members],
            "node": self.node,
        }


def run(model: Path, num_images: int, cache_images: int, num_engines: int) -> FleetResult:
    """Ask everything.

    Raises:
        ConfigError: so many encodings fit into an engine's own encoder cache that it would never need another.
        ModelError: no such model, or no labelled images in its folder.
        ResourceError: a process did not start.
    """
    check_sizes(num_images, cache_images)
    questions = plan_questions(load_digits(model, num_images))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with ExitStack() as stack:
        with working(f"starting a node and {num_engines} engines"):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ecotone-")))
            socket = folder / "node.sock"
            _start_node(stack, socket)
            config = EngineConfig(
                model=str(model), encoder_cache_rows=cache_images * rows_per_image(model), kv_blocks=_KV_BLOCKS
            )
            shared = ECConfig(options={"node": f"unix:{socket}"})
            members = [_start(stack, f"engine {n}", config, shared) for n in range(num_engines)]
            plain = stack.enter_context(ecotone.Engine(config))
            for member in members:
                member.ranks = member.process.wait().ranks
        result = FleetResult(model, num_images, members)
        with working("asking"):
            _ask(result, questions)
            params = ecotone.SamplingParams(max_tokens=_MAX_TOKENS)
            for question in questions:
                [output] = plain.generate([make_prompt(question.text, question.images)], params)
                result.reference.append(output.token_ids)
        with NodeTool(socket) as node:
            result.node = node.describe().tenants[""]
        return result


def print_report(result: FleetResult) -> None:
    """Print everything that was found out."""
    table = Table("", "pid", "requests", "right", "encoder runs", "saves", "loads")
    table.title = f"{len(result.members)} engines on one node: {result.num_images} images"
    table.title_justify = "left"
    for member in result.members:
        figures = member.as_dict()
        name = f"{member.name}, killed" if member.killed else member.name
        columns = ("pid", "requests", "correct", "encodes", "saves", "loads")
        table.add_row(name, *(str(figures[column]) for column in columns))
    out.print(table)
    same = "[green]token-identical[/]" if result.identical else "[bold red]NOT THE SAME[/]"
    out.print(f"{result.num_images} images, {result.encodes} encoder runs over all engines.")
    out.print(f"{len(result.answers)} answers, {same} with those of an engine without a cache.")


def _ask(result: FleetResult, questions: list[Question]) -> None:
    seen_all = next((n for n, question in enumerate(questions) if question.is_repeat), 0)
    killed_at = (seen_all + len(questions)) // 2
    alive = list(result.members)
    for number, question in enumerate(questions):
        images = [str(image) for image in question.images]
        if number == killed_at and len(alive) > 1:
            victim = alive.pop(0)
            victim.process.ask(question.text, images)
            victim.process.kill()
            victim.killed = True
        member = alive[number % len(alive)]
        member.process.ask(question.text, images)
        answer = member.process.wait()
        member.took(question, answer)
        result.answers.append(answer)


def _start(stack: ExitStack, name: str, config: EngineConfig, ec: ECConfig) -> Member:
    process = EngineProcess(msgspec.structs.replace(config, ec=ec))
    stack.callback(process.close)
    return Member(name, process)


def _start_node(stack: ExitStack, socket: Path) -> None:
    command = [sys.executable, "-m", "ecotone", "node", "--socket", str(socket), "--memory", _MEMORY]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    stack.callback(process.wait)
    stack.callback(process.terminate)
    deadline = time.monotonic() + _START_TIMEOUT_S
    while True:
        try:
            NodeTool(socket).close()
            return
        except ResourceError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise
            time.sleep(0.02)
