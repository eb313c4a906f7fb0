"""``ecotone cache`` on a directory."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from ecotone.cli import main
from ecotone.node import Layout, Namespace
from ecotone.node.disk.folder import tenant_folder
from ecotone.node.disk.jobs import Write
from ecotone.node.disk.store import DiskStore

NS = Namespace(model="m", revision="r", dtype="uint8", width=64, processor="p")
KEYS = [NS.key(str(i)) for i in range(3)]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    store = DiskStore(tmp_path / "disk")
    store.open()
    for key in KEYS:
        store.write(Write(key, Layout("uint8", (64,)), [memoryview(bytes(64))]))
    store.close()
    return tmp_path / "disk"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["ecotone", "cache", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out + captured.err


def keys(capsys: pytest.CaptureFixture[str], root: Path) -> list[str]:
    code, said = run(capsys, "ls", str(root), "--json")
    assert code == 0, said
    return sorted(entry["key"] for entry in json.loads(said))


def test_looking(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = run(capsys, "stat", str(root), "--json")
    assert code == 0
    assert json.loads(said)["namespaces"][NS.digest]["entries"] == 3
    assert NS.digest[:8] in run(capsys, "stat", str(root))[1]
    assert KEYS[0] in run(capsys, "ls", str(root))[1]
    assert keys(capsys, root) == sorted(KEYS)
    assert "3 entries verified" in run(capsys, "verify", str(root))[1]


def test_damage_is_named(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = next((root / "entries").rglob(f"{KEYS[1][33:]}*"))
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    code, said = run(capsys, "verify", str(root))
    assert code != 0
    assert KEYS[1][33:] in said.replace("\n", "")


def test_taking_out(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "1 entry evicted" in run(capsys, "evict", str(root), "--key", KEYS[0])[1]
    assert keys(capsys, root) == sorted(KEYS[1:])
    assert "1 entry evicted" in run(capsys, "evict", str(root), "--free", "1KiB")[1]
    assert "1 entry forgotten" in run(capsys, "clear", str(root), "--namespace", NS.digest)[1]
    assert keys(capsys, root) == []


def test_a_shared_nodes_directory_has_a_folder_for_each_tenant(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node = tmp_path / "node"
    node.mkdir()
    root.rename(tenant_folder(node, "blue"))
    assert "3 entries verified" in run(capsys, "verify", str(node), "--tenant", "blue")[1]
    assert "not the directory of a disk cache" in run(capsys, "ls", str(node))[1].replace("\n", "")
    code, said = run(capsys, "ls", str(node), "--tenant", "red")
    assert code != 0
    assert "tenant 'red' has no folder in" in said


def test_what_a_node_uses_is_asked_at_its_socket(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = DiskStore(root)
    store.open()
    code, said = run(capsys, "stat", str(root))
    store.close()
    assert code != 0
    assert "what a running node has is asked at its socket" in said


def test_an_entry_that_is_not_there(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = run(capsys, "evict", str(root), "--key", NS.key("none"))
    assert code != 0
    assert f"there is no entry {NS.key('none')}" in said
    assert "is not a cache key" in run(capsys, "evict", str(root), "--key", "none")[1]
    assert keys(capsys, root) == sorted(KEYS)


def test_what_is_no_such_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = run(capsys, "stat", str(tmp_path))
    assert code != 0
    assert "not the directory of a disk cache" in said.replace("\n", "")
