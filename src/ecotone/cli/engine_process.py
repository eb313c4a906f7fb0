"""An engine in a process of its own (``engine_main``), asked over pipes: one JSON line in, one out."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import IO, cast

import msgspec

from ecotone.cli.passes import RankFigures
from ecotone.config import EngineConfig
from ecotone.errors import RankFailedError, ResourceError


class Asked(msgspec.Struct, frozen=True):
    """A question about images (paths)."""

    text: str
    images: tuple[str, ...]


class Answered(msgspec.Struct, frozen=True):
    """The answer, and what the engine's ranks have done since they began. ``error`` is empty if there is none."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    ttft_s: float | None = None
    ranks: tuple[RankFigures, ...] = ()
    node: dict[str, float] = {}
    error: str = ""


class EngineProcess:
    """The asking end. Construction only starts it: ``wait`` returns when it is ready.

    Args:
        config: of the engine.
    """

    def __init__(self, config: EngineConfig) -> None:
        command = [sys.executable, "-m", "ecotone.cli.engine_main", msgspec.json.encode(config).decode()]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
        )

        self._questions = cast(IO[bytes], self._process.stdin)
        self._answers = cast(IO[bytes], self._process.stdout)

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def wait(self) -> Answered:
        """The next answer, or the first line, which says that it is ready.

        Raises:
            RankFailedError: the process ended.
            ResourceError: the engine answered with an error.
        """
        line = self._answers.readline()
        if not line:
            raise RankFailedError(f"engine process {self.pid} ended with {self._process.wait()}", 0)
        answer = msgspec.json.decode(line, type=Answered)
        if answer.error:
            raise ResourceError(f"engine process {self.pid}: {answer.error}")
        return answer

    def ask(self, text: str, images: Sequence[str]) -> None:
        """Send a question; ``wait`` gets the answer."""
        self._questions.write(msgspec.json.encode(Asked(text, tuple(images))) + b"\n")
        self._questions.flush()

    def kill(self) -> None:
        """End it at once, as a crash would."""
        self._process.send_signal(signal.SIGKILL)
        self.close()

    def close(self) -> None:
        """End it in order. Idempotent."""
        self._questions.close()
        self._answers.close()
        self._process.wait()
