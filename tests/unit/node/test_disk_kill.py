"""A process that stores, forgets and resets is killed at any moment; what the next one serves is right."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from disk_bench import LAYOUT, NS, Bench, content

KILLS = 60
_OTHER = NS.next_epoch("life")
KEYS = [NS.key(f"item {i}") for i in range(24)] + [_OTHER.key(f"item {i}") for i in range(8)]
BUDGET = 12 * 8192

# Says on its standard output what it is about to do and, of a reset, that it was confirmed.
_CHILD = """
import random, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from disk_bench import NS, Bench
from test_disk_kill import BUDGET, KEYS, _OTHER
from ecotone.node import Ready

draw = random.Random(sys.argv[3])
bench = Bench(Path(sys.argv[2]), memory=8192, budget=BUDGET)
version = 1000 * int(sys.argv[3])
print("ready", flush=True)
while True:
    version += 1
    key = draw.choice(KEYS)
    if draw.random() < 0.02:
        namespace = draw.choice([NS, _OTHER])
        bench.reset(namespace)
        print("reset", namespace.digest, version, flush=True)
    elif draw.random() < 0.1:
        bench.forget(key)
    elif bench.load(key) is None:
        print("store", key, version, flush=True)
        bench.store(key, version=version)
"""


def _start(root: Path, seed: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _CHILD, str(Path(__file__).parent), str(root), str(seed)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_sixty_kills(tmp_path: Path) -> None:
    draw = random.Random(7)
    # Children start while others run: imports are most of their time.
    roots = [tmp_path / str(i) for i in range(4)]
    stored: dict[Path, dict[str, set[int]]] = {root: {key: set() for key in KEYS} for root in roots}
    served = 0
    for first in range(0, KILLS, len(roots)):
        children = [(root, _start(root, first + i + 1)) for i, root in enumerate(roots)]
        for root, child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            time.sleep(draw.uniform(0, 0.05))  # the moment of the kill; nothing is waited for
            child.send_signal(signal.SIGKILL)
            said, _ = child.communicate()
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
                assert other == [] or not line.endswith("\n"), line


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
