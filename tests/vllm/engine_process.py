"""Processes of the real vLLM, as the tests hold them: started, asked, killed, and gone at the end."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
# An engine starts within a minute on two idle cores.
START_S, ANSWER_S, END_S = 600.0, 180.0, 120.0
DEFAULTS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "enforce_eager": True,
    "enable_prefix_caching": False,  # a prompt that repeats must need its images again
    "max_num_batched_tokens": 40,  # is also the size of vLLM's encoder cache, in rows
    "max_num_seqs": 4,
    "kv_cache_memory_bytes": 64 << 20,
    "limit_mm_per_prompt": {"image": 4, "video": 0},
    "worker_extension_cls": "bed_worker.BedWorker",
}


def environment(**changes: str) -> dict[str, str]:
    """Of every vLLM process of the tests."""
    return {
        **os.environ,
        "PYTHONPATH": str(HERE),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "TORCHDYNAMO_DISABLE": "1",  # two ranks otherwise compile for 20 s in their first step
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # engines beside each other would all have the first core
        **changes,
    }


class Member(NamedTuple):
    """A process of a session. ``born`` is in clock ticks since the machine started."""

    pid: int
    session: int
    born: int
    title: str

    def kill(self) -> None:
        """SIGKILL."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout_s: float) -> bool:
        """Whether it ends in time."""
        try:
            fd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        try:
            return bool(select.select([fd], [], [], max(0.0, timeout_s))[0])
        finally:
            os.close(fd)


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _member(pid: int) -> Member | None:
    """``None``: it has ended."""
    try:
        # After the name, which is in brackets and may contain anything: state, parent, group, session, ...
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        title = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else Member(pid, int(fields[3]), int(fields[19]), title.strip())


class ProcessTree:
    """A command in a session of its own, whose output goes to a file, and all that descends from it."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path, **pipes: Any) -> None:
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command, env=dict(env), cwd=log.parent, stderr=output, start_new_session=True, **pipes
            )

    def members(self) -> list[Member]:
        """Every process of the session that is alive, in order of birth."""
        found = [member for member in map(_member, _pids()) if member is not None]
        return sorted((m for m in found if m.session == self.process.pid), key=lambda member: member.born)

    def named(self, part: str) -> list[Member]:
        """The members whose command line contains ``part``, e.g. ``VLLM::EngineCore`` or ``VLLM::Worker``."""
        return [member for member in self.members() if part in member.title]

    def wait_until_gone(self, timeout_s: float = END_S) -> None:
        """Until the command has ended and nothing of its session is left.

        Raises:
            TimeoutError: naming who is left.
        """
        deadline = time.monotonic() + timeout_s
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{self.describe()} does not end\n{self.tail()}") from None
        for member in self.members():
            if not member.wait(deadline - time.monotonic()):
                raise TimeoutError(f"left of {self.describe()}: {member.title}")

    def kill(self) -> None:
        """SIGKILL to whatever is left of the session."""
        left = self.members()
        for member in left:
            member.kill()
        self.process.wait(END_S)
        for member in left:
            member.wait(END_S)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()

    def describe(self) -> str:
        return f"process {self.process.pid}, log {self.log}"

    def tail(self, lines: int = 60) -> str:
        """The end of what it printed."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


class StartError(Exception):
    """The engine ended, or said an error, instead of starting. The text is the whole log."""


class EngineProcess(ProcessTree):
    """``engine_main.py``: an ``LLM`` with ``DEFAULTS`` and ``options``.

    Raises:
        StartError: it did not start.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        *,
        ec: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        spec = {**DEFAULTS, "disable_log_stats": False, **options, "model": str(model)}
        if ec is not None:
            spec["ec_transfer_config"] = dict(ec)
        command = [sys.executable, str(HERE / "engine_main.py"), json.dumps(spec)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        super().__init__(command, environment(**(env or {})), log, **pipes)
        self._rest = b""

    def wait_until_started(self) -> None:
        """See ``StartError``."""
        try:
            self._answer(START_S)
        except ConnectionError:
            self.process.wait(END_S)
            raise StartError(self.log.read_text(errors="replace")) from None

    def ask(self, call: str, **args: Any) -> Any:
        """The result of a command.

        Raises:
            RuntimeError: what the engine raised.
            ConnectionError: the process has ended.
            TimeoutError: no answer.
        """
        self.send(call, **args)
        return self.answer()

    def send(self, call: str, **args: Any) -> None:
        """Ask without waiting for the answer."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"call": call, "args": args}).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise ConnectionError(f"{self.describe()} has ended\n{self.tail()}") from None

    def answer(self) -> Any:
        """The answer to the oldest question that has none."""
        answer = self._answer(ANSWER_S)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["ok"]

    def encodes(self) -> int:
        """Items encoded since the start. Every rank encodes every item."""
        counts = set(self.ask("rpc", method="encodes"))
        assert len(counts) == 1, counts
        return int(counts.pop())

    def end_input(self) -> None:
        """Tell it to end."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()

    def close(self) -> None:
        """Ask it to end, and see to it that all of it has."""
        self.end_input()
        self.wait_until_gone()

    def _answer(self, timeout_s: float) -> Any:
        return json.loads(self._line(timeout_s))

    def _line(self, timeout_s: float) -> bytes:
        assert self.process.stdout is not None
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            if not select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError(f"no answer within {timeout_s} s from {self.describe()}\n{self.tail()}")
            more = os.read(self.process.stdout.fileno(), 1 << 16)
            if not more:
                raise ConnectionError(f"{self.describe()} has ended\n{self.tail()}")
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        return line


def close_all(engines: Iterable[EngineProcess]) -> None:
    """Close them beside each other: an interpreter that has imported so much takes its time to end."""
    for engine in engines:
        engine.end_input()
    for engine in engines:
        engine.close()


StartEngine = Callable[..., EngineProcess]


def ecotone(role: str = "ec_both", **options: Any) -> dict[str, Any]:
    """An ``--ec-transfer-config`` with the connector and its ``options``."""
    return {
        "ec_connector": "EcotoneConnector",
        "ec_role": role,
        "engine_id": f"test-{uuid.uuid4()}",
        "ec_connector_extra_config": {"memory": "16MiB", **options} if "node" not in options else options,
    }
