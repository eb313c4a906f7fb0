"""A process that stores, forgets and resets is killed at any moment; what the next one serves is right."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from disk_bench import LAYOUT, NS, Bench, content

KILLS = 60
_OTHER = NS.next_epoch("life")
KEYS = [NS.key(f"item {i}") for i in range(24)] + [_OTHER.key(f"item {i}") for i in range(8)]
BUDGET = 12 * 8192

# Forks one child per line on its standard input, so that modules are imported once, and kills it on the next one.
# A child says in a file what it is about to do and, of a reset, that it was confirmed.
_STABLE = """
import os, random, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from disk_bench import NS, Bench
from test_disk_kill import BUDGET, KEYS, _OTHER

def live(root, said, seed):
    def say(*words):
        os.write(said, (" ".join(map(str, words)) + "\\n").encode())

    draw = random.Random(seed)
    bench = Bench(Path(root), memory=8192, budget=BUDGET)
    version = 1000 * int(seed)
    say("ready")
    while True:
        version += 1
        key = draw.choice(KEYS)
        if draw.random() < 0.02:
            namespace = draw.choice([NS, _OTHER])
            bench.reset(namespace)
            say("reset", namespace.digest, version)
        elif draw.random() < 0.1:
            bench.forget(key)
        elif bench.load(key) is None:
            say("store", key, version)
            bench.store(key, version=version)

for line in sys.stdin:
    root, log, seed = line.split()
    said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    pid = os.fork()
    if not pid:
        try:
            live(root, said, seed)
        finally:
            os._exit(1)
    os.close(said)
    print("born", flush=True)
    sys.stdin.readline()
    os.kill(pid, signal.SIGKILL)
    print(os.waitpid(pid, 0)[1], flush=True)
"""


class Stable:
    """Has one child at a time."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", _STABLE, str(Path(__file__).parent)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def _order(self, line: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline()

    def live(self, root: Path, log: Path, seed: int, seconds: float) -> str:
        """What a child said until it was killed, so many seconds after it had begun."""
        assert self._order(f"{root} {log} {seed}") == "born\n"
        deadline = time.monotonic() + 60
        while not log.read_bytes():
            assert time.monotonic() < deadline
            time.sleep(0.001)
        time.sleep(seconds)  # the moment of the kill; nothing is waited for
        assert self._order("kill") == f"{signal.SIGKILL.value}\n"
        return log.read_text()

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture
def stable() -> Iterator[Stable]:
    made = Stable()
    yield made
    made.close()


def test_sixty_kills(tmp_path: Path, stable: Stable) -> None:
    draw = random.Random(7)
    roots = [tmp_path / str(i) for i in range(4)]
    stored: dict[Path, dict[str, set[int]]] = {root: {key: set() for key in KEYS} for root in roots}
    served = 0
    for kill in range(KILLS):
        root = roots[kill % len(roots)]
        said = stable.live(root, tmp_path / f"said-{kill}", kill + 1, draw.uniform(0, 0.05))
        _take_in(said, stored[root])
        served += _check(root, stored[root])
    assert served > KILLS  # there was something to serve


def _take_in(said: str, stored: dict[str, set[int]]) -> None:
    for line in said.splitlines(keepends=True):
        match line.split() if line.endswith("\n") else []:
            case ["store", key, version]:
                stored[key].add(int(version))
            case ["reset", namespace, _]:
                for key in stored:
                    if key.startswith(namespace):
                        stored[key].clear()
            case other:
                assert other in ([], ["ready"]) or not line.endswith("\n"), line


def _check(root: Path, stored: dict[str, set[int]]) -> int:
    """Serve everything that is there; how much it was."""
    bench = Bench(root, memory=64 * LAYOUT.nbytes, budget=BUDGET)
    served = 0
    for key in KEYS:
        data = bench.load(key)
        if data is not None:
            served += 1
            assert data in [content(key, version=version) for version in stored[key]], "other bytes were served"
    assert bench["quarantined"] == 0  # a process that dies leaves no half files among the entries
    bench.flush()
    assert bench["bytes"] <= BUDGET
    bench.close()
    return served
