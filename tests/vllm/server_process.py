"""vLLM's OpenAI server, as the tests hold it."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine_process import ANSWER_S, DEFAULTS, START_S, ProcessTree, StartError, environment

_MODULE = ("-m", "vllm.entrypoints.openai.api_server", "--model")


class ServerProcess(ProcessTree):
    """``python -m vllm.entrypoints.openai.api_server`` on a port of its own, with its routes for development.

    Args:
        command: what takes the place of ``-m vllm.entrypoints.openai.api_server --model`` after the interpreter.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        *,
        ec: Mapping[str, Any],
        env: Mapping[str, str] | None = None,
        command: Sequence[str] = _MODULE,
    ) -> None:
        self.url = f"http://127.0.0.1:{_free_port()}"
        arguments = [sys.executable, *command, str(model), *_flags(DEFAULTS)]
        arguments += ["--ec-transfer-config", json.dumps(ec), "--served-model-name", "served"]
        arguments += ["--host", "127.0.0.1", "--port", self.url.rpartition(":")[2]]
        env = environment(VLLM_SERVER_DEV_MODE="1", **(env or {}))
        super().__init__(arguments, env, log, stdout=subprocess.DEVNULL)

    def wait_until_started(self) -> None:
        """Until it answers.

        Raises:
            StartError: it ended instead.
        """
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise StartError(self.log.read_text(errors="replace"))
            try:
                self.get("/health")
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.2)  # nobody tells when a port begins to answer
            else:
                return
        raise TimeoutError(f"{self.describe()} does not answer\n{self.tail()}")

    def get(self, path: str) -> str:
        """The body."""
        with urllib.request.urlopen(self.url + path, timeout=ANSWER_S) as answer:
            return str(answer.read().decode())

    def post(self, path: str, content: Any = None) -> str:
        """The body of the answer to ``content`` as JSON."""
        body, headers = json.dumps(content).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, body, headers)
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            return str(answer.read().decode())

    def rpc(self, method: str) -> list[Any]:
        """What each worker's method answers."""
        return list(json.loads(self.post("/collective_rpc", {"method": method}))["results"])

    def encodes(self) -> int:
        """Items encoded since ``count_encodes``, of one rank."""
        return int(self.rpc("encodes")[0])

    def metrics(self) -> dict[str, float]:
        """``/metrics``: values by name, summed over their labels."""
        found: dict[str, float] = {}
        for line in self.get("/metrics").splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                name = name.partition("{")[0]
                found[name] = found.get(name, 0.0) + float(value)
        return found

    def close(self) -> None:
        """SIGINT, as ctrl-c sends it; then nothing of it may be left."""
        self.process.send_signal(signal.SIGINT)
        self.wait_until_gone()


def _flags(options: Mapping[str, Any]) -> list[str]:
    """The arguments of ``LLM`` as those of the server."""
    flags: list[str] = []
    for name, value in options.items():
        dashed = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{dashed}" if value else f"--no-{dashed}")
        else:
            flags += [f"--{dashed}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return flags


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
