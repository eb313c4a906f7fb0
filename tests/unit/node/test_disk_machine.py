"""Index, ledger and directory together, driven by Hypothesis without a thread: jobs are done when the machine says
so, the disk fails when it says so, and the node ends at any point, with its queue undone and a file half written.

Nothing is served but what was committed last and not forgotten; a reset that was confirmed holds for every later
life; budgets hold, in the books and on the disk; the books add up.
"""

from __future__ import annotations

import errno
import shutil
import tempfile
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from disk_bench import content
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ecotone.node import (
    Abort,
    Acquire,
    AnyAnswer,
    AnyOp,
    Commit,
    Forget,
    ForgetAll,
    Index,
    Layout,
    Namespace,
    Ready,
    Region,
    Release,
    Ticket,
    make_policy,
)
from ecotone.node.disk.format import charged, file_bytes, relative_path
from ecotone.node.disk.jobs import Job, Quarantined, Result, Write
from ecotone.node.disk.store import DiskStore
from ecotone.node.disk.tier import DiskTier
from ecotone.node.disk.worker import DiskWorker

ONE = Namespace(model="m", revision="r", dtype="uint8", width=64, processor="p")
NAMESPACES = (ONE, ONE.next_epoch("life"))
KEYS = [namespace.key(item) for namespace in NAMESPACES for item in "abcd"]
LAYOUTS = {key: Layout("uint8", (1 + i % 3, 64)) for i, key in enumerate(KEYS)}
OTHER = Layout("uint8", (4, 64))
MEMORY = 5 * 64
BUDGET = 4 * 4096

keys = st.sampled_from(KEYS)


class Store(DiskStore):
    """A directory that fails as told: ``failing`` for everything, ``crash_after`` writes half a file and ends."""

    failing = False

    def _fail(self) -> None:
        if self.failing:
            raise OSError(errno.EIO, "broken")

    def write(self, job: Write) -> None:
        self._fail()
        super().write(job)

    def remove(self, key: str) -> None:
        self._fail()
        super().remove(key)

    def drop(self, namespace: str) -> None:
        self._fail()
        super().drop(namespace)

    def reopen(self) -> bool:
        self._fail()
        return super().reopen()

    def reclaim(self, steps: int) -> bool:
        self._fail()
        return super().reclaim(steps)


class ScriptedIO:
    """``TierIO`` without a thread: ``step`` does one job, or a little of what is done at leisure."""

    def __init__(self, worker: DiskWorker) -> None:
        self.worker = worker
        self.jobs: deque[Job] = deque()
        self.done: list[Result] = []

    def submit(self, job: Job) -> None:
        self.jobs.append(job)

    def step(self) -> None:
        result = self.worker.do(self.jobs.popleft()) if self.jobs else self.worker.at_leisure()
        self.done += [result] if result is not None else []
        self.done += [Quarantined(n)] if (n := self.worker.quarantined()) else []

    @property
    def is_idle(self) -> bool:
        return not self.jobs and self.worker.is_idle and not self.done

    def results(self) -> Sequence[Result]:
        results, self.done = self.done, []
        return results

    def wait(self, timeout_s: float) -> None:
        raise NotImplementedError

    def call_after(self, seconds: float) -> None:
        pass

    def close(self) -> None:
        self.worker.store.close()


class DiskMachine(RuleBasedStateMachine):
    @initialize(policy=st.sampled_from(["lru", "gdsf"]))
    def begin(self, policy: str) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="ecotone-machine-"))
        self.policy = policy
        self.now = 0.0
        self.version = 0
        # What may be served: key -> versions. In this life the latest commit alone; after a crash, what was
        # forgotten one by one may have come back (not what was reset, once that was confirmed).
        self.latest: dict[str, int] = {}
        self.possible: dict[str, set[int]] = {key: set() for key in KEYS}
        self.unconfirmed: dict[int, tuple[str, int]] = {}
        self.void = dict.fromkeys(KEYS, 0)  # the last version that a confirmed reset made void, for ever
        self.held: list[AnyAnswer] = []
        self.start()

    def start(self) -> None:
        store = Store(self.root)
        store.open()
        self.region = Region.create(MEMORY, "machine", prefault=False)
        own = self.region.descriptor
        self.index = Index(MEMORY, own.region_id, own.generation, make_policy(self.policy))
        self.io = ScriptedIO(DiskWorker(store, opened=True))
        self.tier = DiskTier(self.index, self.region, BUDGET, self.io, lambda: self.now)
        self.index.tier = self.tier

    # What clients do.

    @rule(key=keys, settle=st.sampled_from(["commit", "commit", "commit", "abort"]))
    def store(self, key: str, settle: str) -> None:
        answer = self.apply(Acquire(0, key, LAYOUTS[key]))
        if isinstance(answer, Ready):
            self.check_bytes(key, answer)
            self.apply(Release(0, answer.pin_id))
        elif isinstance(answer, Ticket):
            self.version += 1
            self.write(answer, content(key, LAYOUTS[key], self.version))
            if settle == "abort":
                self.apply(Abort(0, answer.transfer_id))
                return
            self.latest[key] = self.version
            self.possible[key] = {self.version}
            self.apply(Commit(0, answer.transfer_id))

    @rule(key=keys)
    def ask_for_another_layout(self, key: str) -> None:
        answer = self.apply(Acquire(0, key, OTHER))
        assert not isinstance(answer, Ready)
        if isinstance(answer, Ticket):
            self.apply(Abort(0, answer.transfer_id))
            self.forgotten(key)

    @rule(key=keys)
    def hold(self, key: str) -> None:
        answer = self.apply(Acquire(0, key, LAYOUTS[key]))
        if isinstance(answer, Ready):
            self.check_bytes(key, answer)
            self.held.append(answer)
        elif isinstance(answer, Ticket):
            self.apply(Abort(0, answer.transfer_id))

    @rule()
    def let_go(self) -> None:
        for answer in self.held:
            assert isinstance(answer, Ready)
            self.apply(Release(0, answer.pin_id))
        self.held.clear()

    @rule(key=keys)
    def forget(self, key: str) -> None:
        self.apply(Forget(0, key))
        self.forgotten(key)

    @rule(namespace=st.sampled_from(NAMESPACES))
    def reset(self, namespace: Namespace) -> None:
        self.apply(ForgetAll(0, namespace.digest))
        for key in KEYS:
            if key.startswith(namespace.digest):
                self.forgotten(key)
        self.unconfirmed[self.tier.barrier()] = namespace.digest, self.version

    @rule(nbytes=st.integers(1, MEMORY))
    def memory_is_needed(self, nbytes: int) -> None:
        self.index.evict(nbytes)

    # What the disk does.

    @rule(jobs=st.integers(1, 6))
    def disk_works(self, jobs: int) -> None:
        for _ in range(jobs):
            self.io.step()
            self.pump()

    @rule(jobs=st.integers(1, 6))
    def disk_works_unnoticed(self, jobs: int) -> None:
        for _ in range(jobs):
            self.io.step()

    @rule()
    def disk_settles(self) -> None:
        for _ in range(500):
            self.io.step()
            self.pump()
            self.now += 1.0
            failing = self.io.worker.store.failing  # type: ignore[attr-defined]
            if self.io.is_idle and (self.tier.ledger.is_settled or failing):
                break
        else:
            raise AssertionError("the disk never rests")

    @rule(failing=st.booleans())
    def disk_fails(self, failing: bool) -> None:
        self.io.worker.store.failing = failing  # type: ignore[attr-defined]

    @rule(seconds=st.sampled_from([0.5, 5.0, 100.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.pump()

    @rule(key=keys, where=st.sampled_from(["payload", "header", "end"]))
    def a_file_is_damaged(self, key: str, where: str) -> None:
        path = self.root / "entries" / relative_path(key)
        if path.exists():
            data = bytearray(path.read_bytes())
            data[{"payload": -1, "header": 20, "end": -2}[where]] ^= 1
            path.write_bytes(data[:-1] if where == "end" else data)

    @rule()
    def the_directory_is_removed(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)

    # Ends.

    @rule(rest=st.integers(0, 4), half=st.booleans())
    def crash(self, rest: int, half: bool) -> None:
        """The process is gone, some jobs later; with it, everything that was not done."""
        for _ in range(rest):
            self.io.step()
        self.confirm()
        self.io.close()
        if half and (self.root / "tmp").exists():
            (self.root / "tmp" / "99").write_bytes(b"half")
        for key in KEYS:
            # Forgotten, and not deleted in time; what was not written is lost.
            self.possible[key] |= {v for v in self.disk_versions(key) if v > self.void[key]}
        self.latest.clear()
        self.held.clear()
        self.unconfirmed.clear()
        self.restart()

    @rule()
    @precondition(lambda self: not self.io.worker.store.failing)
    def close(self) -> None:
        """An orderly end: what is READY is written, what was forgotten is gone."""
        self.let_go()
        self.disk_settles()
        self.confirm()
        assert not self.unconfirmed
        self.io.close()
        self.tier.let_go(self.now)
        self.check_books()
        self.restart()

    def restart(self) -> None:
        self.region.close()
        self.start()

    # The model.

    def apply(self, op: AnyOp) -> AnyAnswer:
        (answer,) = self.index.apply("client", [op], self.now)
        self.pump()
        return answer

    def pump(self) -> None:
        self.tier.pump(self.now)
        self.confirm()

    def confirm(self) -> None:
        for barrier, (namespace, version) in list(self.unconfirmed.items()):
            if self.tier.is_durable(barrier):
                del self.unconfirmed[barrier]
                self.void.update((key, version) for key in KEYS if key.startswith(namespace))

    def forgotten(self, key: str) -> None:
        self.latest.pop(key, None)
        self.possible[key] = set()

    def write(self, ticket: Ticket, data: bytes) -> None:
        for extent in ticket.extents:
            self.region.view(extent, writable=True)[:], data = data[: extent.length], data[extent.length :]

    def check_bytes(self, key: str, ready: Ready) -> None:
        data = b"".join(bytes(self.region.view(extent)) for extent in ready.extents)
        versions = {self.latest[key]} if key in self.latest else self.possible[key]
        assert all(version > self.void[key] for version in versions)
        assert data in [content(key, LAYOUTS[key], version) for version in versions], "other bytes were served"

    def disk_versions(self, key: str) -> list[int]:
        """The versions of an entry whose bytes are in its file."""
        path = self.root / "entries" / relative_path(key)
        if not path.exists():
            return []
        data = path.read_bytes()[-LAYOUTS[key].nbytes :]
        return [v for v in range(1, self.version + 1) if content(key, LAYOUTS[key], v) == data]

    # What must always hold.

    @invariant()
    def check_books(self) -> None:
        if not hasattr(self, "index"):
            return
        self.index.check_integrity()
        self.tier.check_integrity()
        physical = sum(
            charged(path.stat().st_size)
            for folder in ("entries", "trash", "tmp")
            for path in (self.root / folder).rglob("*")
            if path.is_file()
        )
        assert physical <= BUDGET

    def teardown(self) -> None:
        if hasattr(self, "root"):
            self.io.close()
            self.region.close()
            shutil.rmtree(self.root, ignore_errors=True)


def test_the_sizes_make_for_evictions() -> None:
    assert all(charged(file_bytes(key, LAYOUTS[key])) == 4096 for key in KEYS)
    assert sum(layout.nbytes for layout in LAYOUTS.values()) > MEMORY
    assert len(KEYS) * 4096 > BUDGET


TestDiskMachine = DiskMachine.TestCase
TestDiskMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
