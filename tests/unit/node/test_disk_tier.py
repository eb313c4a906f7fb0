"""The disk tier over a real directory: what is served is what was written, whatever became of the files."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from disk_bench import LAYOUT, MIB, NS, Bench, content

from ecotone.errors import ConfigError
from ecotone.node import EmbeddedNode, Forget, Layout, Lookup, NoRoom, Pending, Ready, Ticket
from ecotone.node.disk import DiskConfig
from ecotone.node.disk.format import FORMAT, charged, file_bytes
from ecotone.node.disk.jobs import Write
from ecotone.node.disk.store import MAX_QUARANTINED, DiskStore
from ecotone.node.exchange import Absent, Acquire, Commit, ForgetAll, Release
from ecotone.node.tier import pump_until

Start = Callable[..., Bench]
KEYS = [NS.key(f"item {i}") for i in range(12)]
ONE = charged(file_bytes(KEYS[0], LAYOUT))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Lives of a node on one directory, each ended before the next one begins."""
    lives: list[Bench] = []

    def make(**options: object) -> Bench:
        while lives:
            lives.pop().close()
        lives.append(Bench(tmp_path / "disk", **options))  # type: ignore[arg-type]
        return lives[-1]

    yield make
    while lives:
        lives.pop().close()


def test_what_memory_has_no_room_for_comes_back_from_disk(start: Start) -> None:
    bench = start(memory=4 * LAYOUT.nbytes)
    for key in KEYS:
        bench.store(key)
        bench.flush()
    assert bench["writes"] == len(KEYS)
    for key in KEYS:
        assert bench.load(key) == content(key)
    assert bench["reads"] >= len(KEYS) - 4
    assert bench["writes"] == len(KEYS)  # what came from the disk is on the disk
    assert bench["dropped_unwritten"] == 0
    assert bench.index.statistics()["evictions"] > 0


@pytest.mark.parametrize("fsync", ["none", "data"])
def test_a_restart_finds_everything_and_reads_nothing_before_it_is_asked_for(start: Start, fsync: str) -> None:
    first = start(fsync=fsync)
    for key in KEYS:
        first.store(key)
    first.flush()
    second = start()
    assert (second["adopted"], second["reads"], second["gone_through"]) == (len(KEYS), 0, 1)
    assert second["bytes"] == len(KEYS) * ONE
    assert [second.load(key) for key in KEYS] == [content(key) for key in KEYS]
    assert second["reads"] == len(KEYS)
    assert second.load(NS.key("never seen")) is None


def test_an_entry_in_pieces(start: Start) -> None:
    bench, large = start(memory=8 * LAYOUT.nbytes), Layout("bfloat16", (32, 64))
    for key in KEYS[:8]:
        bench.store(key)
    bench.flush()
    for key in KEYS[:8:2]:
        bench.index.apply("client", [Forget(0, key)], 0.0)
    bench.store(KEYS[9], large)
    assert len(bench.index.entries[KEYS[9]].extents) == 4
    bench.flush()
    again = start(memory=8 * LAYOUT.nbytes)
    assert again.load(KEYS[9], large) == content(KEYS[9], large)


def test_a_consumer_is_served_too_and_hears_absent_otherwise(start: Start) -> None:
    first = start()
    first.store(KEYS[0])
    first.flush()
    bench = start(memory=LAYOUT.nbytes)
    (answer,) = bench.apply(Lookup(0, KEYS[0], LAYOUT))
    assert isinstance(answer, Pending)
    bench.until("reads", 1)
    (answer,) = bench.apply(Lookup(0, KEYS[0], LAYOUT))
    assert isinstance(answer, Ready)
    assert bench.apply(Lookup(0, KEYS[1], LAYOUT)) == [Absent(0)]
    bench.apply(Release(0, answer.pin_id))


def test_no_room_for_what_is_on_the_disk(start: Start) -> None:
    first = start()
    first.store(KEYS[0])
    first.flush()
    bench = start(memory=LAYOUT.nbytes)
    bench.store(KEYS[1])
    bench.flush()
    assert isinstance(bench.ask(KEYS[1]), Ready)  # pinned: it stays
    assert bench.apply(Lookup(0, KEYS[0], LAYOUT), Acquire(1, KEYS[0], LAYOUT)) == [Absent(0), NoRoom(1)]
    assert bench["reads"] == 0


def test_another_layout_is_a_miss_and_its_file_goes(start: Start) -> None:
    first = start()
    for key in KEYS[:2]:
        first.store(key)
    first.flush()
    second, other = start(), Layout("bfloat16", (9, 64))
    assert second.load(KEYS[0], other) is None  # found out by reading
    assert second["other_layout"] == 1
    assert second.load(KEYS[1]) == content(KEYS[1])
    assert second.load(KEYS[1], other) is None  # known by now
    second.flush()
    assert not second.path(KEYS[0]).exists()
    assert second["files"] == 0
    second.store(KEYS[0], other)
    second.flush()
    assert start().load(KEYS[0], other) == content(KEYS[0], other)


def _flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def _truncate(path: Path, size: int) -> None:
    os.truncate(path, size)


def _older(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(FORMAT.encode(), b"ecotone-entry-0"))


def _link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "payload": lambda path: _flip(path, -1),
    "first byte of the payload": lambda path: _flip(path, -LAYOUT.nbytes),
    "length field": lambda path: _flip(path, 0),
    "length field, large": lambda path: _flip(path, 7),
    "header": lambda path: _flip(path, 12),
    "digest": lambda path: _flip(path, path.read_bytes().index(b'"digest"') + 12),
    "short by a byte": lambda path: _truncate(path, file_bytes(KEYS[0], LAYOUT) - 1),
    "long by a byte": lambda path: _truncate(path, file_bytes(KEYS[0], LAYOUT) + 1),
    "empty": lambda path: _truncate(path, 0),
    "header only": lambda path: _truncate(path, file_bytes(KEYS[0], LAYOUT) - LAYOUT.nbytes),
    "all zero": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "foreign": lambda path: path.write_bytes(b"#!/bin/sh\n" * 100),
    "older": _older,
    "another entry's": lambda path: shutil.copy(
        path.parents[1] / KEYS[1][33:35] / f"{KEYS[1][33:]}.safetensors", path
    ),
    "link": _link,
    "folder": _folder,
    "pipe": _pipe,
}


@pytest.mark.parametrize("when", ["before the start", "after the start"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_what_does_not_verify_is_put_aside_and_never_served(
    start: Start, damage: str, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = start()
    first.store(KEYS[0])
    first.store(KEYS[1])
    first.flush()
    path = first.path(KEYS[0])
    if when == "before the start":
        first.close()
        DAMAGE[damage](path)
        bench = start()
    else:
        bench = start()
        DAMAGE[damage](path)
    with caplog.at_level(logging.WARNING):
        assert bench.load(KEYS[0]) is None
    assert not os.path.lexists(path)
    bench.until("quarantined", 1)
    assert any((bench.root / "quarantine").iterdir())
    assert bench.load(KEYS[1]) == content(KEYS[1])
    bench.store(KEYS[0])  # the encoder's turn; the place is free again
    bench.flush()
    assert start().load(KEYS[0]) == content(KEYS[0])


def test_one_line_for_each_file_put_aside(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    first = start()
    first.store(KEYS[0])
    first.flush()
    first.close()
    _flip(first.path(KEYS[0]), -1)
    with caplog.at_level(logging.WARNING, "ecotone.node.disk"):
        assert start().load(KEYS[0]) is None
    [line] = [record.getMessage() for record in caplog.records]
    assert KEYS[0][33:] in line
    assert "digest" in line


def test_strangers_among_the_entries_are_put_aside_and_the_rest_of_the_directory_is_left_alone(
    start: Start,
) -> None:
    first = start()
    first.store(KEYS[0])
    first.flush()
    first.close()
    entries = first.root / "entries"
    namespace = entries / NS.digest
    strangers = [
        entries / "notes.txt",
        entries / ("0" * 32),
        namespace / "zz",
        namespace / "00",
        first.path(KEYS[0]).parent / "x\ny.safetensors",
        first.path(KEYS[0]).parent / ("0" * 64 + ".safetensors"),
    ]
    for path in strangers:
        path.write_bytes(b"?" * 1000)
    mine = first.root / "mine.txt"
    mine.write_text("mine")
    outside = first.root.parent / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    (entries / ("1" * 32)).symlink_to(outside)
    bench = start()
    bench.until("quarantined", len(strangers) + 1)
    assert not any(os.path.lexists(path) for path in strangers)
    assert mine.read_text() == "mine"
    assert (outside / "kept").read_text() == "kept"
    assert bench.load(KEYS[0]) == content(KEYS[0])


def test_quarantine_is_bounded(start: Start) -> None:
    first = start()
    first.close()
    folder = first.root / "entries" / NS.digest / "00"
    folder.mkdir(parents=True)
    for i in range(MAX_QUARANTINED + 20):
        (folder / f"{i}").write_bytes(b"?")
    (folder / "tree").mkdir()
    (folder / "tree" / "leaf").write_bytes(b"?")
    start().until("quarantined", MAX_QUARANTINED + 21)
    assert len(list((first.root / "quarantine").iterdir())) == MAX_QUARANTINED
    again = start()
    (folder.parent).mkdir(exist_ok=True)
    (folder.parent / "odd").write_bytes(b"?")
    again = start()
    again.until("quarantined", 1)
    assert len(list((first.root / "quarantine").iterdir())) == MAX_QUARANTINED


def test_half_written_files_are_removed_at_the_start(start: Start) -> None:
    first = start()
    first.close()
    (first.root / "tmp" / "7").write_bytes(b"half")
    start()
    assert not list((first.root / "tmp").iterdir())


# Budgets.


def _physical(root: Path) -> int:
    return sum(
        charged(p.stat().st_size) for name in ("entries", "trash", "tmp") for p in (root / name).rglob("*.*")
    )


def test_the_budget_holds_on_the_disk_and_the_least_recently_used_go(start: Start) -> None:
    bench = start(memory=2 * LAYOUT.nbytes, budget=4 * ONE)
    for key in KEYS[:4]:
        bench.store(key)
        bench.flush()
    assert bench.load(KEYS[0]) == content(KEYS[0])
    bench.store(KEYS[4])
    bench.store(KEYS[5])
    bench.flush()
    assert bench["bytes"] == bench["bytes_budget"] == 4 * ONE
    assert bench["evictions"] == 2
    assert _physical(bench.root) == 4 * ONE
    assert bench.path(KEYS[0]).exists()
    assert not bench.path(KEYS[1]).exists()


def test_a_smaller_budget_after_a_restart(start: Start) -> None:
    first = start()
    for i, key in enumerate(KEYS):
        first.store(key)
        first.flush()
        os.utime(first.path(key), (i, i))
    bench = start(budget=3 * ONE)
    bench.flush()
    assert _physical(bench.root) == 3 * ONE
    assert [bench.load(key) is None for key in KEYS] == [True] * 9 + [False] * 3


def test_an_entry_larger_than_the_budget_is_counted_and_stays_in_memory(start: Start) -> None:
    bench = start(budget=ONE - 1)
    bench.store(KEYS[0])
    bench.flush()
    assert (bench["too_large"], bench["files"]) == (1, 0)
    assert bench.load(KEYS[0]) == content(KEYS[0])


# Forgetting.


def test_what_was_forgotten_is_found_nowhere(start: Start) -> None:
    bench = start(memory=2 * LAYOUT.nbytes)
    for key in KEYS[:4]:
        bench.store(key)
        bench.flush()
    for key in KEYS[:4]:
        bench.forget(key)
    assert [bench.load(key) for key in KEYS[:4]] == [None] * 4
    bench.flush()
    assert _physical(bench.root) == 0
    assert start()["adopted"] == 0


def test_forgotten_while_it_is_read(start: Start) -> None:
    first = start()
    first.store(KEYS[0])
    first.flush()
    bench = start()
    assert isinstance(bench.apply(Acquire(0, KEYS[0], LAYOUT), Forget(1, KEYS[0]))[0], Pending)
    assert isinstance(bench.ask(KEYS[0]), Ticket)
    bench.flush()
    # The file is gone; the read may still be under way.
    assert pump_until(
        bench.tier, lambda _: bench.index.statistics()["bytes_draining"] == 0, bench.lock, time.monotonic, 60
    )
    bench.check()


def test_forgotten_and_stored_anew_at_once(start: Start) -> None:
    bench = start()
    for version in range(5):
        bench.store(KEYS[0], version=version)
        bench.forget(KEYS[0])
    bench.store(KEYS[0], version=9)
    bench.flush()
    assert start().load(KEYS[0]) == content(KEYS[0], version=9)


def test_a_reset_is_for_one_namespace_at_once_and_for_every_later_life(start: Start, tmp_path: Path) -> None:
    other = NS.next_epoch("life")
    bench = start(memory=3 * LAYOUT.nbytes)
    for key in [*KEYS[:4], other.key("x")]:
        bench.store(key)
        bench.flush()
    bench.reset()
    shutil.copytree(
        bench.root / "entries", tmp_path / "crashed" / "entries"
    )  # a crash at this moment leaves this behind
    assert [bench.load(key) for key in KEYS[:4]] == [None] * 4
    assert bench.load(other.key("x")) == content(other.key("x"))
    bench.store(KEYS[0], version=1)
    bench.flush()
    assert _physical(bench.root) == 2 * ONE  # reclaimed
    assert start().load(KEYS[0]) == content(KEYS[0], version=1)
    crashed = Bench(tmp_path / "crashed")
    assert [crashed.load(key) for key in KEYS[:4]] == [None] * 4
    assert crashed.load(other.key("x")) == content(other.key("x"))
    crashed.close()


def test_a_reset_before_everything_was_found(tmp_path: Path) -> None:
    first = Bench(tmp_path)
    for key in KEYS:
        first.store(key)
    first.flush()
    first.close()
    store, tier_files = DiskStore(tmp_path), []
    store.open()
    scan = store.scan()
    store.drop(NS.digest)
    for batch in scan:
        tier_files += batch
    store.close()
    assert tier_files == []
    second = Bench(tmp_path)
    assert [second.load(key) for key in KEYS] == [None] * len(KEYS)
    second.close()


# Trouble.


class Trouble(DiskStore):
    """A directory that fails as told."""

    failing: Exception | None = None

    def _fail(self) -> None:
        if Trouble.failing is not None:
            raise Trouble.failing

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


@pytest.fixture
def trouble(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Trouble]]:
    monkeypatch.setattr("ecotone.node.disk.tier.DiskStore", Trouble)
    monkeypatch.setattr("ecotone.node.disk.ledger.FIRST_RETRY_S", 0.01)
    monkeypatch.setattr("ecotone.node.disk.ledger.LAST_RETRY_S", 0.02)
    yield Trouble
    Trouble.failing = None


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT])
def test_a_failing_disk_leaves_memory_only_and_is_tried_again(
    start: Start, trouble: type[Trouble], number: int, caplog: pytest.LogCaptureFixture
) -> None:
    bench = start(memory=2 * LAYOUT.nbytes)
    bench.store(KEYS[0])
    bench.flush()
    with caplog.at_level(logging.WARNING, "ecotone.node.disk"):
        trouble.failing = OSError(number, os.strerror(number))
        for key in KEYS[1:]:
            bench.store(key)
            assert bench.load(key) == content(key)
        bench.until("write_errors", 1)
        assert bench["failing"] == 1
        assert pump_until(bench.tier, lambda tier: tier.is_flushed, bench.lock, time.monotonic, 60)
        assert bench.load(KEYS[0]) == content(KEYS[0])  # reading still works
        trouble.failing = None
        bench.store(NS.key("later"))
        bench.flush()
    assert bench["failing"] == 0
    assert bench["outages"] == 1
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2, lines
    assert os.strerror(number) in lines[0]
    assert start().load(NS.key("later")) == content(NS.key("later"))


def test_a_reset_during_an_outage_is_made_up_for(start: Start, trouble: type[Trouble]) -> None:
    bench = start(memory=2 * LAYOUT.nbytes)
    bench.store(KEYS[0])
    bench.flush()
    trouble.failing = OSError(errno.EIO, "broken")
    bench.apply(ForgetAll(0, NS.digest))
    assert bench.load(KEYS[0]) is None
    bench.until("outages", 1)
    assert not bench.tier.is_durable(bench.tier.barrier())
    trouble.failing = None
    assert bench.tier.wait_durable(bench.tier.barrier(), 60)
    bench.until("drops_retried", 1)
    assert start()["adopted"] == 0


def test_what_could_not_be_deleted_is_deleted_later(start: Start, trouble: type[Trouble]) -> None:
    bench = start()
    bench.store(KEYS[0])
    bench.flush()
    trouble.failing = OSError(errno.EIO, "broken")
    bench.forget(KEYS[0])
    bench.until("remove_errors", 1)
    assert bench.load(KEYS[0]) is None
    trouble.failing = None
    bench.store(KEYS[1])
    bench.flush()
    assert not bench.path(KEYS[0]).exists()


def test_unreadable_files_are_misses(
    start: Start, trouble: type[Trouble], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = start()
    bench.store(KEYS[0])
    bench.flush()
    bench = start()
    with monkeypatch.context() as patch:

        def broken(*_: object) -> int:
            raise OSError(errno.EIO, "broken")

        patch.setattr("ecotone.node.disk.files.os.preadv", broken)
        assert bench.load(KEYS[0]) is None
    assert bench["read_errors"] == 1


def test_a_fault_of_ours_ends_neither_the_thread_nor_a_step(start: Start, trouble: type[Trouble]) -> None:
    bench = start()
    trouble.failing = ValueError("not an OSError")
    bench.store(KEYS[0])
    bench.until("write_errors", 1)
    trouble.failing = None
    bench.flush()
    assert bench["writes"] == 1


def test_a_directory_that_is_removed_is_made_again(start: Start, trouble: type[Trouble]) -> None:
    bench = start(memory=2 * LAYOUT.nbytes)
    for key in KEYS[:6]:
        bench.store(key)
        bench.flush()
    shutil.rmtree(bench.root)
    assert bench.load(KEYS[0]) is None
    assert bench["missing"] == 1
    bench.store(KEYS[7])
    bench.until("outages", 1)
    bench.flush()
    assert bench["files"] <= 3
    with pytest.raises(ConfigError, match="in use"):
        Bench(bench.root)
    assert start().load(KEYS[7]) == content(KEYS[7])


def test_folders_removed_inside_are_made_again(start: Start) -> None:
    bench = start()
    bench.store(KEYS[0])
    bench.flush()
    for name in ("entries", "tmp"):
        shutil.rmtree(bench.root / name)
    bench.store(KEYS[1])
    bench.flush()
    assert bench["outages"] == 0
    assert start().load(KEYS[1]) == content(KEYS[1])


def test_a_directory_taken_over_by_another_node_is_left_to_it(start: Start, trouble: type[Trouble]) -> None:
    bench = start()
    bench.store(KEYS[0])
    bench.flush()
    bench.root.rename(bench.root.with_name("moved"))
    other = Bench(bench.root)
    other.store(KEYS[1])
    other.flush()
    trouble.failing = OSError(errno.EIO, "broken")
    bench.store(KEYS[2])
    bench.until("outages", 1)
    trouble.failing = None
    time.sleep(0.05)
    bench._pump()
    assert bench["failing"] == 1
    assert not other.path(KEYS[2]).exists()
    assert other.load(KEYS[1]) == content(KEYS[1])
    other.close()


def test_a_directory_that_cannot_be_opened_at_the_start(
    start: Start, trouble: type[Trouble], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = start()
    first.store(KEYS[0])
    first.flush()
    first.close()

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, "read-only")

    with monkeypatch.context() as patch:
        patch.setattr("ecotone.node.disk.store.fcntl.flock", refuse)
        bench = start()
        assert bench["failing"] == 1
        bench.store(KEYS[1])
        assert bench.load(KEYS[0]) is None
    bench.until("adopted", 1)
    bench.flush()
    assert bench.load(KEYS[0]) == content(KEYS[0])
    assert bench["files"] == 2


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="not a directory"):
            Bench(path)


def test_a_directory_that_cannot_be_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"disk='/proc/ecotone' cannot be made: "):
        Bench(Path("/proc/ecotone"))
    monkeypatch.setattr("ecotone.node.disk.store.os.access", lambda *_: False)  # root may write everywhere
    with pytest.raises(ConfigError, match="this process may not write there"):
        Bench(tmp_path / "new")


def test_one_node_at_a_time(start: Start, tmp_path: Path) -> None:
    bench = start()
    with pytest.raises(ConfigError, match=f"in use by another node \\(process {os.getpid()}\\)"):
        Bench(bench.root)
    with pytest.raises(ConfigError, match="in use"):
        EmbeddedNode(MIB, "second", prefault=False, disk=DiskConfig(root=str(bench.root), budget=MIB))
    root = bench.root
    bench.close()
    fd = os.open(root / "lock", os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # free, although the file is there
    os.close(fd)


# The embedded node.


def _take(node: EmbeddedNode, key: str) -> Ready | Ticket:
    exchange = node.connect(f"taker {time.monotonic_ns()}")
    while True:
        exchange.submit([Acquire(0, key, LAYOUT)])
        (answer,) = exchange.poll()
        if not isinstance(answer, Pending):
            break
    assert isinstance(answer, Ready | Ticket)
    if isinstance(answer, Ticket):
        for extent in answer.extents:
            node.region.view(extent, writable=True)[:] = content(key)
        exchange.submit([Commit(1, answer.transfer_id)])
    else:
        assert bytes(node.region.view(answer.extents[0])) == content(key)
    exchange.close()
    return answer


def test_an_embedded_node_writes_everything_out_before_it_ends(tmp_path: Path) -> None:
    disk = DiskConfig(root=str(tmp_path), budget=MIB)
    with EmbeddedNode(MIB, "disk one", prefault=False, disk=disk) as node:
        for key in KEYS:
            assert isinstance(_take(node, key), Ticket)
    node.check_integrity()
    assert node.statistics()["disk_writes"] == len(KEYS)
    with EmbeddedNode(MIB, "disk two", prefault=False, disk=disk) as node:
        for key in KEYS:
            assert isinstance(_take(node, key), Ready)
        exchange = node.connect("resets")
        exchange.submit([ForgetAll(0, NS.digest)])
        assert node.statistics()["disk_drops"] == 1  # durable when it is answered
    with EmbeddedNode(MIB, "disk three", prefault=False, disk=disk) as node:
        assert isinstance(_take(node, KEYS[0]), Ticket)
        assert node.statistics()["disk_adopted"] == 0


def test_closing_in_the_middle_of_a_promotion(start: Start) -> None:
    first = start()
    first.store(KEYS[0])
    first.flush()
    bench = start()
    bench.index.apply("client", [Acquire(0, KEYS[0], LAYOUT)], 0.0)  # not pumped: the disk never hears of it
    bench.close()
    assert bench.index.statistics()["transfers"] == 0
