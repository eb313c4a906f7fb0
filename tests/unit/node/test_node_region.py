"""The region, with real memory."""

from __future__ import annotations

import gc
import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from ecotone.errors import ConfigError, ContractError, ResourceError, ShutDownError
from ecotone.node import Extent, Region, RegionDescriptor
from ecotone.node import region as region_module

PAGE = mmap.PAGESIZE


@pytest.fixture
def region() -> Iterator[Region]:
    made = Region.create(4 * PAGE, "r", prefault=False)
    yield made
    made.close()


def extent(region: Region, offset: int, length: int) -> Extent:
    own = region.descriptor
    return Extent(own.region_id, own.generation, offset, length)


def mapped_regions() -> int:
    """How many mappings of regions this process has."""
    return Path("/proc/self/maps").read_text().count("/memfd:ecotone-region")


def test_a_new_region_is_zero_and_rounded_up_to_pages() -> None:
    region = Region.create(PAGE + 1, "r")
    assert region.descriptor.size == 2 * PAGE
    assert bytes(region.view(extent(region, 0, 2 * PAGE))) == bytes(2 * PAGE)
    region.close()


def test_views_share_the_memory_and_only_writable_ones_write(region: Region) -> None:
    written, read = region.view(extent(region, 64, 8), writable=True), region.view(extent(region, 64, 8))
    written[:] = b"12345678"
    assert bytes(read) == b"12345678"
    assert read.readonly
    with pytest.raises(TypeError, match="read-only"):
        read[0] = 1


def test_a_view_outlives_the_region_and_then_the_memory_goes() -> None:  # hazard 32
    before = mapped_regions()
    region = Region.create(PAGE, "r")
    view = region.view(extent(region, 0, 16), writable=True)
    array = np.frombuffer(view, np.uint8)
    region.close()
    region.close()
    view[:] = bytes(range(16))
    del view
    assert array.tolist() == list(range(16))
    assert mapped_regions() == before + 1
    del array
    assert mapped_regions() == before


def test_a_closed_region_gives_nothing() -> None:
    region = Region.create(PAGE, "r", prefault=False)
    region.close()
    with pytest.raises(ShutDownError, match="'r' was closed"):
        region.view(extent(region, 0, 1))
    with pytest.raises(ShutDownError, match="'r' was closed"):
        region.open_descriptor(writable=False)


def test_an_extent_of_another_life_or_region_is_refused(region: Region) -> None:  # hazard 32
    good = extent(region, 0, 64)
    for wrong in (
        msgspec.structs.replace(good, region_id="other"),
        msgspec.structs.replace(good, generation=good.generation + 1),
    ):
        with pytest.raises(ContractError, match="is not of region 'r'"):
            region.view(wrong)


def test_generations_of_one_owner_differ() -> None:
    one, two = Region.create(PAGE, "r", prefault=False), Region.create(PAGE, "r", prefault=False)
    assert one.descriptor.generation < two.descriptor.generation
    one.close()
    two.close()


@pytest.mark.parametrize(
    ("offset", "length"), [(-1, 2), (0, 4 * PAGE + 1), (4 * PAGE, 1), (10, -5), (2**62, 2**62)]
)
def test_an_extent_outside_the_region_is_refused(region: Region, offset: int, length: int) -> None:
    with pytest.raises(ContractError, match="is not inside"):
        region.view(extent(region, offset, length))


def test_attached_memory_is_the_same_memory(region: Region) -> None:
    other = Region.attach(region.open_descriptor(writable=True), region.descriptor)
    other.view(extent(region, 100, 3), writable=True)[:] = b"abc"
    assert bytes(region.view(extent(region, 100, 3))) == b"abc"
    region.view(extent(region, 100, 3), writable=True)[:] = b"xyz"
    assert bytes(other.view(extent(region, 100, 3))) == b"xyz"
    other.close()


def test_read_only_memory_is_never_writable(region: Region) -> None:
    fd = region.open_descriptor(writable=False)
    with pytest.raises(PermissionError):
        mmap.mmap(fd, PAGE, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    reader = Region.attach(fd, region.descriptor)
    assert not reader.writable
    with pytest.raises(ContractError, match="attached read-only"):
        reader.view(extent(region, 0, 8), writable=True)
    view = reader.view(extent(region, 0, 8))
    with pytest.raises(TypeError, match="read-only"):
        view[0] = 1
    assert not np.frombuffer(view, np.uint8).flags.writeable
    reader.close()


def test_the_memory_cannot_shrink_under_a_reader(region: Region) -> None:
    fd = region.open_descriptor(writable=True)
    for size in (0, 8 * PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    os.close(fd)


def open_descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_memory_that_is_not_what_was_described_is_refused_and_its_descriptor_closed(
    region: Region, tmp_path: Path
) -> None:
    before = open_descriptors()
    larger = msgspec.structs.replace(region.descriptor, size=8 * PAGE)
    with pytest.raises(ContractError, match=f"has {4 * PAGE} bytes"):
        Region.attach(region.open_descriptor(writable=True), larger)
    unsealed = os.memfd_create("x", os.MFD_CLOEXEC)
    os.ftruncate(unsealed, PAGE)
    with pytest.raises(ContractError, match="could shrink"):
        Region.attach(unsealed, RegionDescriptor("r", 1, PAGE))
    file = tmp_path / "file"
    file.write_bytes(bytes(PAGE))
    with pytest.raises(ContractError, match="could shrink"):
        Region.attach(os.open(file, os.O_RDWR), RegionDescriptor("r", 1, PAGE))
    one, other = socket.socketpair()
    with pytest.raises(ContractError, match="has 0 bytes"):
        Region.attach(os.dup(one.fileno()), RegionDescriptor("r", 1, PAGE))
    one.close()
    other.close()
    assert open_descriptors() == before


def test_memory_that_cannot_be_mapped_is_the_machines_fault(
    region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: object, **_fields: object) -> mmap.mmap:
        raise OSError(12, "no memory for it")

    monkeypatch.setattr(region_module, "_map", fail)
    before = open_descriptors()
    with pytest.raises(ResourceError, match="no memory for it"):
        Region.attach(region.open_descriptor(writable=True), region.descriptor)
    with pytest.raises(ResourceError, match="no memory for it"):
        Region.create(PAGE, "r")
    assert open_descriptors() == before


def test_a_process_without_descriptors_gets_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: object) -> int:
        raise OSError(24, "too many open files")

    region = Region.create(PAGE, "r", prefault=False)
    monkeypatch.setattr(os, "memfd_create", fail)
    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(ResourceError, match="too many open files"):
        Region.create(PAGE, "r")
    with pytest.raises(ResourceError, match=r"cannot be handed out: .* too many open files"):
        region.open_descriptor(writable=True)
    monkeypatch.undo()
    region.close()


@pytest.mark.parametrize("size", [0, -1])
def test_a_size_that_is_not_above_zero_is_refused(size: int) -> None:
    with pytest.raises(ConfigError, match=f"{size} bytes is too small"):
        Region.create(size, "r")


def test_a_region_larger_than_the_machine_is_refused_before_it_is_made() -> None:  # hazard 31
    with pytest.raises(ResourceError, match=r"1125899906842624 bytes .* machine has \d+ .* group allows"):
        Region.create(2**50, "r", prefault=False)  # so that a missing check cannot fill the machine's memory


@pytest.mark.parametrize(
    ("machine", "group", "fits"), [(None, None, True), (8, None, False), (None, 8, False), (10**9, 10**9, True)]
)
def test_the_smaller_of_machine_and_control_group_decides(
    monkeypatch: pytest.MonkeyPatch, machine: int | None, group: int | None, fits: bool
) -> None:
    monkeypatch.setattr(region_module, "available_memory", lambda: machine)
    monkeypatch.setattr(region_module, "cgroup_headroom", lambda: group)
    if fits:
        Region.create(PAGE, "r").close()
    else:
        with pytest.raises(ResourceError, match="does not fit"):
            Region.create(PAGE, "r")


def test_a_killed_owner_leaves_nothing_in_dev_shm() -> None:  # hazard 31
    program = (
        "import os, signal\n"
        "from ecotone.node import EmbeddedNode\n"
        "node = EmbeddedNode(1 << 20, 'killed-owner')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    before = set(os.listdir("/dev/shm"))
    for _ in range(2):  # a restart under the same id works as well
        done = subprocess.run([sys.executable, "-c", program], capture_output=True)
        assert done.returncode == -9, done.stderr
    assert set(os.listdir("/dev/shm")) - before == set()
