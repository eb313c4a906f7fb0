"""What clients and a shared node say to each other.

Each side first sends ``PREAMBLE``: who talks, and in which version. Then frames: four bytes of length, and one
message in the wire codec. A client's first message is ``Hello``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec

from ecotone.errors import DecodeError
from ecotone.node.exchange import AnyAnswer, AnyOp, Settled
from ecotone.node.keys import check_key, check_namespace
from ecotone.node.region import RegionDescriptor
from ecotone.protocol.wire import decode, encode

VERSION = 2
_PREAMBLE = struct.Struct("<8sI")
_MAGIC = b"ECOTONE\0"
PREAMBLE = _PREAMBLE.pack(_MAGIC, VERSION)
PREAMBLE_BYTES = _PREAMBLE.size
_LENGTH_BYTES = 4

MAX_FRAME_BYTES = 2**20
MAX_BATCH_OPS = 1024  # of a full batch, even the longest operations take less than half a frame
MAX_SETTLED = 1024  # in one message; there is one for every operation, so that none waits for ever
MAX_RANKS = 4096

Name = Annotated[str, msgspec.Meta(max_length=200)]
Rank = Annotated[int, msgspec.Meta(ge=0)]
Ranks = Annotated[tuple[Rank, ...], msgspec.Meta(max_length=MAX_RANKS)]


class Message(msgspec.Struct, frozen=True, tag_field="msg", forbid_unknown_fields=True, gc=False):
    """Base of all messages."""


# From clients.


class Hello(Message, frozen=True, tag="hello", gc=False):
    """Who connects.

    Attributes:
        engine_id: the engine the process belongs to; unique per start of an engine.
        part: the engine's ``scheduler`` asks and settles, a ``worker`` maps the region, a ``tool`` looks on.
        access: what of the region a worker is given.
        tenant: whose region.
        rank: of a worker.
        ranks: of a scheduler: all ranks that take part in its transfers.
    """

    engine_id: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    part: Literal["scheduler", "worker", "tool"]
    access: Literal["read", "write"] = "read"
    tenant: Name = ""
    rank: Rank = 0
    ranks: Ranks = ()

    def __post_init__(self) -> None:
        if not self.engine_id.isprintable():
            raise DecodeError(f"engine id {self.engine_id!r} is not printable")


class Keep(Message, frozen=True, tag="keep", gc=False):
    """A scheduler that lost its connection: of all it was given before, it knows these pins and transfers."""

    ids: frozenset[int]


class Leave(Message, frozen=True, tag="leave", gc=False):
    """A scheduler ends its part for good: it will order nothing more. No answer. A connection that ends without it
    may have broken under a scheduler that lives on."""


class Batch(Message, frozen=True, tag="batch", gc=False):
    """A step's operations, in order. Answer: ``Answers``, in the same order."""

    ops: Annotated[tuple[AnyOp, ...], msgspec.Meta(max_length=MAX_BATCH_OPS)]


class Attach(Message, frozen=True, tag="attach", gc=False):
    """A worker wants the region's descriptor. Answer: ``Attached`` with the descriptor, or ``Refusal``."""

    writable: bool


class Fact(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """What a worker saw happen to its part of a transfer. Hearing it twice is hearing it once.

    Attributes:
        claim: the node's number of the ticket or pin.
        rank: who says so.
        of: every rank that has a part in it.
        kind: ``saved``: its rows are in the region. ``failed``: they are not, and it writes no more. ``released``:
            it does not read the entry any more.
    """

    claim: int
    rank: Rank
    of: Ranks
    kind: Literal["saved", "failed", "released"]


class Facts(Message, frozen=True, tag="facts", gc=False):
    """A worker's facts. No answer."""

    facts: Annotated[tuple[Fact, ...], msgspec.Meta(max_length=MAX_BATCH_OPS)]


class Describe(Message, frozen=True, tag="describe", gc=False):
    """A tool asks how the node is. Answer: ``Description``."""


class List(Message, frozen=True, tag="list", gc=False):
    """A tool asks for entries after ``after``, in the order of their keys. Answer: ``Listing``."""

    namespace: str | None = None
    after: str = ""
    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_BATCH_OPS)] = MAX_BATCH_OPS

    def __post_init__(self) -> None:
        if self.namespace is not None:
            check_namespace(self.namespace)


class Verify(Message, frozen=True, tag="verify", gc=False):
    """A tool wants the books checked. Answer: ``Outcome``."""


class Evict(Message, frozen=True, tag="evict", gc=False):
    """A tool wants ``nbytes`` to be free, or one entry gone. Answer: ``Outcome``."""

    nbytes: Annotated[int, msgspec.Meta(ge=0)] = 0
    key: str | None = None

    def __post_init__(self) -> None:
        if self.key is not None:
            check_key(self.key)


class Clear(Message, frozen=True, tag="clear", gc=False):
    """A tool wants a namespace forgotten, or everything, in memory and on the disk behind it. Answer: ``Outcome``,
    as late as that of a ``ForgetAll``."""

    namespace: str | None = None

    def __post_init__(self) -> None:
        if self.namespace is not None:
            check_namespace(self.namespace)


ToolMessage = Describe | List | Verify | Evict | Clear
ClientMessage = Hello | Keep | Leave | Batch | Attach | Facts | Describe | List | Verify | Evict | Clear


# From the node.


class Welcome(Message, frozen=True, tag="welcome", gc=False):
    """The answer to ``Hello``. ``node_id`` is of this life of the node; ``pid`` is its process."""

    node_id: str
    pid: int
    region: RegionDescriptor


class Refusal(Message, frozen=True, tag="refusal", gc=False):
    """The node does not serve this, and hangs up."""

    reason: str


class Answers(Message, frozen=True, tag="answers", gc=False):
    """The answers to one ``Batch``.

    ``settled``: what workers' facts and deaths settled of the engine's tickets and pins since its last ``Answers``
    (``MAX_SETTLED`` of it at most; the rest comes with the next). What a connection that broke had on its way is
    said again: ``Keep`` names what the scheduler still knows of.
    """

    answers: tuple[AnyAnswer, ...]
    settled: Annotated[tuple[Settled, ...], msgspec.Meta(max_length=MAX_SETTLED)] = ()


class Attached(Message, frozen=True, tag="attached", gc=False):
    """The descriptor of ``region`` comes with the first byte of this message."""

    region: RegionDescriptor


class EngineReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One engine: what it did since it connected, and its connections now."""

    engine_id: str
    tenant: str
    connected: bool
    workers: tuple[int, ...]
    counters: dict[str, float]


class Description(Message, frozen=True, tag="description", gc=False):
    """Everything that is counted: of the node, of each tenant, of each engine."""

    version: int
    node: dict[str, float]
    tenants: dict[str, dict[str, float]]
    engines: tuple[EngineReport, ...]


class EntryReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One entry: its size in bytes, hits since it was written, present pins, and its age in seconds."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    state: str
    hits: int
    pins: int
    age_s: float


class Listing(Message, frozen=True, tag="listing", gc=False):
    """Entries, in the order of their keys. ``more`` says whether there are further ones."""

    entries: tuple[EntryReport, ...]
    more: bool


class Outcome(Message, frozen=True, tag="outcome", gc=False):
    """What a tool's command did: to so many entries in memory and their bytes, and to so many files on the disk
    behind it and theirs. ``problem`` is empty when all is well."""

    entries: int = 0
    nbytes: int = 0
    files: int = 0
    file_bytes: int = 0
    problem: str = ""


NodeMessage = Welcome | Refusal | Answers | Attached | Description | Listing | Outcome


def check_preamble(data: bytes) -> int:
    """The version that the other side speaks.

    Raises:
        DecodeError: it does not speak this protocol at all.
    """
    magic, version = _PREAMBLE.unpack(data)
    if magic != _MAGIC:
        raise DecodeError(f"{data[:8]!r} is no Ecotone node or client")
    return int(version)


def framed(message: ClientMessage | NodeMessage) -> bytes:
    """``message`` as a frame.

    Raises:
        RoundTripError: it is larger than a receiver accepts.
    """
    data = encode(message, MAX_FRAME_BYTES)
    return len(data).to_bytes(_LENGTH_BYTES, "little") + data


def client_message(data: bytes) -> ClientMessage:
    """A frame's content, as the node reads it. Raises ``WireError`` (bytes that are no message)."""
    return decode(data, ClientMessage, MAX_FRAME_BYTES)  # type: ignore[no-any-return]


def node_message(data: bytes) -> NodeMessage:
    """A frame's content, as a client reads it. Raises ``WireError`` (bytes that are no message)."""
    return decode(data, NodeMessage, MAX_FRAME_BYTES)  # type: ignore[no-any-return]


class FrameReader:
    """Cuts what arrives into the preamble and frames. Keeps at most one frame's bytes.

    Attributes:
        version: that of the other side, once its preamble was read.
    """

    def __init__(self) -> None:
        self.version: int | None = None
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The frames that ``data`` completes. Who does not take all of them finds the others with the next call.
        None is read after a preamble of another version.

        Raises:
            DecodeError: no preamble, or, after all frames before it, one longer than ``MAX_FRAME_BYTES``.
        """
        self._data += data
        if self.version is None:
            if len(self._data) < PREAMBLE_BYTES:
                return
            self.version = check_preamble(bytes(self._data[:PREAMBLE_BYTES]))
            del self._data[:PREAMBLE_BYTES]
        while self.version == VERSION and len(self._data) >= _LENGTH_BYTES:
            length = int.from_bytes(self._data[:_LENGTH_BYTES], "little")
            if length > MAX_FRAME_BYTES:
                raise DecodeError(f"a frame of {length} bytes; at most {MAX_FRAME_BYTES} are accepted")
            end = _LENGTH_BYTES + length
            if len(self._data) < end:
                return
            frame = bytes(self._data[_LENGTH_BYTES:end])
            del self._data[:end]
            yield frame
