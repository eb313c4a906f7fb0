"""A directory without a node: looked into, verified, shrunk, cleared."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from disk_bench import LAYOUT, NS, Bench, content

from ecotone.errors import ConfigError, DecodeError
from ecotone.node.disk.folder import open_folder
from ecotone.node.disk.format import charged, file_bytes

OTHER = NS.next_epoch("life")
KEYS = [NS.key(f"item {i}") for i in range(5)] + [OTHER.key("x")]
SIZE = file_bytes(KEYS[0], LAYOUT)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    bench = Bench(tmp_path / "disk")
    for age, key in enumerate(KEYS):
        bench.store(key)
        bench.flush()
        os.utime(bench.path(key), (age, age))
    bench.close()
    return tmp_path / "disk"


def _keys(root: Path) -> list[str]:
    bench = Bench(root)
    found = [key for key in KEYS if bench.load(key) == content(key)]
    bench.close()
    return found


def test_entries_are_listed_by_age_and_namespace(root: Path) -> None:
    with open_folder(root) as folder:
        assert [entry.key for entry in folder.entries()] == KEYS
        assert {entry.nbytes for entry in folder.entries()} == {SIZE}
        assert [entry.key for entry in folder.entries(OTHER.digest)] == KEYS[5:]
        with pytest.raises(DecodeError):
            folder.entries("../")


def test_verify_names_what_is_wrong_and_leaves_it(root: Path) -> None:
    for key, damage in zip(KEYS, ("flip", "cut", "header", "swap"), strict=False):
        path = next((root / "entries").rglob(f"{key[33:]}.*"))
        data = bytearray(path.read_bytes())
        if damage == "swap":
            data = bytearray(next((root / "entries").rglob(f"{KEYS[4][33:]}.*")).read_bytes())
        elif damage == "cut":
            del data[-1]
        else:
            data[-1 if damage == "flip" else 9] ^= 1
        path.write_bytes(data)
    with open_folder(root) as folder:
        problems = {entry.key: entry.problem for entry in folder.verify()}
    assert [bool(problems[key]) for key in KEYS] == [True] * 4 + [False] * 2
    assert "digest" in problems[KEYS[0]]
    assert _keys(root) == KEYS[4:]


def test_entries_are_removed(root: Path) -> None:
    with open_folder(root) as folder:
        folder.remove([KEYS[0], NS.key("none")])
    assert _keys(root) == KEYS[1:]


def test_the_oldest_go_first(root: Path) -> None:
    with open_folder(root) as folder:
        assert folder.give_back(0) == []
        assert [entry.key for entry in folder.give_back(2 * charged(SIZE))] == KEYS[:2]
    assert _keys(root) == KEYS[2:]


def test_a_namespace_or_everything_is_cleared(root: Path) -> None:
    with open_folder(root) as folder:
        assert [entry.key for entry in folder.clear(NS.digest)] == KEYS[:5]
    assert _keys(root) == KEYS[5:]
    with open_folder(root) as folder:
        assert len(folder.clear()) == 1
        assert not list((root / "trash").iterdir())
    assert _keys(root) == []


def test_only_a_directory_that_is_one_and_is_free(root: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not the directory"), open_folder(tmp_path):
        pass
    assert not (tmp_path / "lock").exists()
    bench = Bench(root)
    with pytest.raises(ConfigError, match="in use"), open_folder(root):
        pass
    bench.close()
