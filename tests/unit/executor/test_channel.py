"""Messages over a socket: boundaries kept, large ones in shared memory, hostile ones refused."""

import fcntl
import gc
import os
import socket

import pytest

from ecotone.errors import DecodeError
from ecotone.executor.channel import INLINE_BYTES, Channel, Packet, channel_pair, packed, read_memory, write_memory


@pytest.fixture
def ends():
    own, other = channel_pair()
    far = Channel(other)
    yield own, far, other
    own.close()
    far.close()


def send(channel, message):
    with packed(message) as packet:
        channel.send(packet)


def fill(channel):
    while True:
        send(channel, bytes(INLINE_BYTES))


def open_descriptors():
    gc.collect()  # what other tests left to the collector must not be closed between two counts
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("size", [1, INLINE_BYTES, INLINE_BYTES + 1, 3_000_000])
def test_messages_arrive_whole_and_apart(ends, size):
    own, far, _ = ends
    messages = [b"a" * size, b"b", b"c" * size]
    before = open_descriptors()
    for message in messages:
        send(own, message)
    assert [bytes(far.receive()) for _ in messages] == messages
    gc.collect()
    assert open_descriptors() == before


def test_a_large_message_lies_in_memory_once_for_all_receivers():
    pairs = [channel_pair() for _ in range(3)]
    with packed(b"x" * (INLINE_BYTES + 1)) as packet:
        inode = os.fstat(packet.fd).st_ino
        for own, _ in pairs:
            own.send(packet)
    for own, other in pairs:
        _, [fd], _, _ = socket.recv_fds(other, 100, 1)
        assert os.fstat(fd).st_ino == inode
        os.close(fd)
        own.close()
        other.close()


def test_a_large_message_is_read_in_place_and_cannot_be_changed(ends):
    own, far, _ = ends
    send(own, bytes(INLINE_BYTES + 1))
    message = far.receive()
    assert message.readonly
    fd = write_memory(bytes(INLINE_BYTES + 1))
    with pytest.raises(PermissionError):
        os.write(fd, b"x")
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 1)
    os.close(fd)


def test_the_end_of_the_other_side_is_an_end_and_not_an_error(ends):
    own, far, _ = ends
    send(own, b"last")
    own.close()
    own.close()
    assert far.receive() == b"last"
    assert far.receive() is None
    with pytest.raises(ConnectionError):
        send(far, b"too late")


def test_an_end_with_unread_messages_is_an_end_too(ends):
    own, far, _ = ends
    send(far, b"never read")
    far.close()
    send_failed = own.receive()
    assert send_failed in (b"never read", None)
    assert own.receive() is None


def test_an_executors_end_does_not_block(ends):
    own, _, _ = ends
    with pytest.raises(BlockingIOError):
        own.receive()
    with pytest.raises(BlockingIOError):
        fill(own)


def test_a_packet_that_is_too_long_is_refused(ends):
    own, far, _ = ends
    own.send(Packet(bytes(INLINE_BYTES + 1), None))
    with pytest.raises(DecodeError, match=f"more than {INLINE_BYTES} bytes"):
        far.receive()


@pytest.mark.parametrize("claimed", [0, 1, INLINE_BYTES, INLINE_BYTES + 2, 2**63])
def test_memory_of_another_size_than_claimed_is_refused(ends, claimed):
    own, far, _ = ends
    fd = write_memory(bytes(INLINE_BYTES + 1))
    own.send(Packet(claimed.to_bytes(8, "little"), fd))
    os.close(fd)
    before = open_descriptors()
    with pytest.raises(DecodeError, match="a descriptor of"):
        far.receive()
    assert open_descriptors() == before


def test_memory_that_could_change_is_refused():
    size = INLINE_BYTES + 1
    fd = os.memfd_create("open", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    with pytest.raises(DecodeError, match="could change"):
        read_memory(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    with pytest.raises(DecodeError, match="could change"):
        read_memory(fd, size)
    os.close(fd)


def test_a_file_is_not_such_memory(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(INLINE_BYTES + 1))
    with path.open("rb") as file, pytest.raises(DecodeError, match="could change"):
        read_memory(file.fileno(), INLINE_BYTES + 1)
