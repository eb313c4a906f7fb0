"""Handing a region over: real sockets, and a real second process."""

from __future__ import annotations

import gc
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import msgspec
import pytest

from ecotone.errors import ConfigError, ContractError, ResourceError, ShutDownError
from ecotone.node import Extent, Region, RegionDescriptor, RegionServer, attach_region
from ecotone.node.attach import region_address

SIZE = 1 << 16


@pytest.fixture
def region() -> Iterator[Region]:
    made = Region.create(SIZE, "engine-a", prefault=False)
    yield made
    made.close()


@pytest.fixture
def server(region: Region) -> Iterator[RegionServer]:
    made = RegionServer("engine-a", region)
    yield made
    made.close()


def whole(region: Region) -> Extent:
    own = region.descriptor
    return Extent(own.region_id, own.generation, 0, own.size)


RANK = """
import sys
from ecotone.node import Extent, attach_region
region = attach_region("engine-a", 30.0)
own = region.descriptor
view = region.view(Extent(own.region_id, own.generation, 0, 16), writable=True)
assert bytes(view[:5]) == b"hello", bytes(view)
view[8:] = b"from you"
"""


def test_another_process_reads_and_writes_the_same_bytes(region: Region, server: RegionServer) -> None:
    view = region.view(whole(region), writable=True)
    view[:5] = b"hello"
    subprocess.run([sys.executable, "-c", RANK], check=True, timeout=60)
    assert bytes(view[:16]) == b"hello\0\0\0from you"


def test_a_rank_may_ask_before_the_owner_is_there(region: Region) -> None:
    rank = subprocess.Popen([sys.executable, "-c", RANK])
    view = region.view(whole(region), writable=True)
    view[:5] = b"hello"
    server = RegionServer("engine-a", region)
    assert rank.wait(60) == 0
    server.close()
    assert bytes(view[8:16]) == b"from you"


def test_many_attach_at_once_and_each_gets_it(region: Region, server: RegionServer) -> None:
    found: list[Region] = []

    def attach() -> None:
        found.append(attach_region("engine-a", 30.0))

    threads = [threading.Thread(target=attach) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [r.descriptor for r in found] == [region.descriptor] * 20
    for attached in found:
        attached.close()


def test_a_reader_gets_a_read_only_descriptor(region: Region, server: RegionServer) -> None:
    reader = attach_region("engine-a", 30.0, writable=False, prefault=False)
    assert not reader.writable
    with pytest.raises(ContractError, match="read-only"):
        reader.view(whole(region), writable=True)
    reader.close()


def test_what_was_attached_outlives_server_and_owner(region: Region, server: RegionServer) -> None:
    attached = attach_region("engine-a", 30.0)
    server.close()
    region.close()
    view = attached.view(whole(region), writable=True)
    view[:2] = b"ok"
    assert bytes(attached.view(whole(region))[:2]) == b"ok"
    attached.close()


def test_a_wrong_name_is_given_up_in_time(server: RegionServer) -> None:
    with pytest.raises(ResourceError, match=r"no engine 'engine-b' .* in 0.05 s"):
        attach_region("engine-b", 0.05)


def test_a_name_is_data_of_any_length() -> None:
    for name in ("../x", "\0", "x" * 10_000, "\ud800", ""):
        assert len(region_address(name, writable=True)) < 107
    assert region_address("a", writable=True) != region_address("a", writable=False)


def test_two_owners_of_one_name_are_refused(region: Region, server: RegionServer) -> None:
    with pytest.raises(ConfigError, match="'engine-a' is taken"):
        RegionServer("engine-a", region)
    attach_region("engine-a", 30.0).close()  # the first one goes on


def test_the_name_is_free_after_closing(region: Region, server: RegionServer) -> None:
    server.close()
    server.close()
    RegionServer("engine-a", region).close()


def test_another_user_is_refused_and_told_why(region: Region) -> None:
    server = RegionServer("engine-a", region, uid=os.geteuid() + 1)
    with pytest.raises(ConfigError, match=f"not user {os.geteuid()}"):
        attach_region("engine-a", 30.0)
    server.close()


def test_a_region_of_another_user_is_not_taken(server: RegionServer) -> None:
    with pytest.raises(ConfigError, match=f"belongs to user {os.geteuid()}"):
        attach_region("engine-a", 30.0, uid=os.geteuid() + 1)


def test_clients_that_hang_up_do_not_end_the_server(server: RegionServer) -> None:
    for _ in range(5):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.connect(region_address("engine-a", writable=True))
    attach_region("engine-a", 30.0).close()


def test_the_memory_stays_while_the_server_is_open(region: Region, server: RegionServer) -> None:
    region.view(whole(region), writable=True)[:4] = b"stay"
    region.close()
    attached = attach_region("engine-a", 30.0)
    assert bytes(attached.view(whole(region))[:4]) == b"stay"
    attached.close()


def test_a_closed_region_is_not_served(region: Region) -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    region.close()
    with pytest.raises(ShutDownError, match="was closed"):
        RegionServer("engine-a", region)
    assert len(os.listdir("/proc/self/fd")) == before - 2  # the region's own and its mapping's


def test_a_process_out_of_descriptors_answers_when_it_has_some_again(server: RegionServer) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        lowest_free = os.dup(connection.fileno())
        os.close(lowest_free)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
        try:
            connection.connect(region_address("engine-a", writable=True))
            connection.settimeout(0.01)
            with pytest.raises(TimeoutError):
                connection.recv(1)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        connection.settimeout(30.0)
        data, fds, _, _ = socket.recv_fds(connection, 4096, 1)
    assert msgspec.msgpack.decode(data, type=RegionDescriptor).size == SIZE
    for fd in fds:
        os.close(fd)


class Impostor:
    """Owns the name and answers with whatever it was given, once per connection."""

    def __init__(self, answer: Callable[[socket.socket], object]) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(region_address("engine-a", writable=True))
        self._listener.listen()
        self._answer = answer
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        with connection:
            self._answer(connection)

    def close(self) -> None:
        self._thread.join()
        self._listener.close()


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"\xff garbage", "answered b'.xff garbage'"),
        (msgspec.msgpack.encode(RegionDescriptor("r", 1, SIZE)), "sent no descriptor"),
        (msgspec.msgpack.encode({"type": "region", "region_id": "r", "generation": 1}), "answered"),
    ],
)
def test_an_answer_that_is_not_a_region_is_refused(answer: bytes, error: str) -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    impostor = Impostor(lambda connection: connection.send(answer))
    with pytest.raises(ContractError, match=error):
        attach_region("engine-a", 30.0)
    impostor.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_owner_that_ends_without_answering_is_asked_again_until_the_time_is_over() -> None:
    impostor = Impostor(lambda connection: None)
    with pytest.raises(ResourceError, match="handed out"):
        attach_region("engine-a", 0.05)
    impostor.close()


def test_descriptors_that_come_with_garbage_are_closed(region: Region) -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    answers = [b"\xff", msgspec.msgpack.encode({"type": "refusal", "reason": "no"})]
    for answer, error in zip(answers, (ContractError, ConfigError), strict=True):
        fd = region.open_descriptor(writable=True)
        impostor = Impostor(lambda connection, a=answer, f=fd: socket.send_fds(connection, [a], [f]))
        with pytest.raises(error):
            attach_region("engine-a", 30.0)
        impostor.close()
        os.close(fd)
    assert len(os.listdir("/proc/self/fd")) == before
