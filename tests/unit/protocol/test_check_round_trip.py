"""Types that would not come back are refused by their annotations, and those that are accepted do come back."""

import enum
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Annotated, Any, Generic, Literal, NamedTuple, NewType, TypeVar, final

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecotone.errors import RoundTripError
from ecotone.protocol import (
    AnyWorkerMetadata,
    ECConnectorOutput,
    ECConnectorWorkerMetadata,
    ModelInfo,
    ModelRunnerOutput,
    SchedulerOutput,
    check_round_trip,
    decode,
    encode,
)

T = TypeVar("T")
Key = NewType("Key", str)


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Bits(enum.Flag):
    A = 1
    B = 2


class Mixed(enum.Enum):
    A = 1
    B = "b"


class Closed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    x: int = 0


@final
class Final(msgspec.Struct, frozen=True):
    x: int = 0


class Open(msgspec.Struct, frozen=True):
    x: int = 0


class Base(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    x: int = 0


class Derived(Base, frozen=True):
    y: int = 0


class Attributes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    x: int = 0


class Mutable(msgspec.Struct, forbid_unknown_fields=True):
    x: int = 0


class ByIdentity(msgspec.Struct, frozen=True, eq=False, forbid_unknown_fields=True):
    x: int = 0


class WithMap(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    x: Mapping[str, int] = {}


class Tree(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    children: frozenset["Tree"] = frozenset()
    more: tuple["Tree", ...] = ()


class Left(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    x: int = 0


class Right(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    x: int = 0


class Box(msgspec.Struct, Generic[T], frozen=True, forbid_unknown_fields=True):
    x: T


class Pair(NamedTuple):
    x: int
    y: int


@dataclass(frozen=True)
class Data:
    x: int = 0


class Custom:
    pass


def holder(hint: Any) -> Any:
    return msgspec.defstruct("Holder", [("field", hint)], frozen=True, forbid_unknown_fields=True)


REFUSED: list[tuple[Any, str]] = [
    (Any, "says nothing about the type"),
    (object, "says nothing about the type"),
    (T, "says nothing about the type"),
    (Custom, "Custom is not known to come back"),
    (Data, "Data is not known"),
    (Pair, "Pair is not known"),
    (Callable[[], int], "does not say which container"),
    (bytearray, "bytearray is not known"),
    (memoryview, "memoryview is not known"),
    (datetime, "datetime is not known"),
    (Decimal, "Decimal is not known"),
    (complex, "complex is not known"),
    (msgspec.Raw, "Raw is not known"),
    (msgspec.msgpack.Ext, "Ext is not known"),
    (int | msgspec.UnsetType, "UnsetType is not known"),
    (tuple, "says nothing about what it holds"),
    (dict, "says nothing about what it holds"),
    (Mapping, "says nothing about what it holds"),
    (tuple[Any, ...], r"field\[...\]: .*says nothing"),
    (Sequence[int], "does not say which container"),
    (Iterable[int], "does not say which container"),
    (AbstractSet[int], "does not say which container"),
    (MutableMapping[str, int], "does not say which container"),
    (Mapping[float, int], r"field\[key\]: a float"),
    (Mapping[str, object], r"field\[value\]"),
    (Mapping[Open, int], "forbid_unknown_fields"),
    (Mapping[AnyWorkerMetadata, int], "polymorphic type"),
    (frozenset[float], "a float as member"),
    (frozenset[list[int]], r"list\[int\], which cannot be hashed"),
    (frozenset[frozenset[dict[str, int]]], "which cannot be hashed"),
    (frozenset[tuple[int, set[int]]], "which cannot be hashed"),
    (frozenset[WithMap], r"field\[...\].x: .*which cannot be hashed"),
    (tuple[WithMap | frozenset[WithMap], ...], "array-like|cannot be hashed"),
    (frozenset[Mutable], "declare it frozen"),
    (frozenset[ByIdentity], "declare it frozen, with eq"),
    (Open, "may be subclassed"),
    (tuple[Open, ...], "may be subclassed"),
    (Base, "has subclasses .Derived."),
    (Base | None, "has subclasses"),
    (ECConnectorWorkerMetadata, "has subclasses"),
    (Attributes, "dict=True"),
    (Box[int], "is not known to come back"),
    (Closed | Final, "must be tagged"),
    (tuple[int, ...] | list[int], "array-like"),
    (str | bytes, "str-like"),
    (dict[str, int] | Closed, "dict-like"),
    (Mixed, "all str or all int"),
    (Bits, "a flag enum"),
    (Literal[b"x"], "Literal"),
]


@pytest.mark.parametrize(("hint", "reason"), REFUSED, ids=[str(hint) for hint, _ in REFUSED])
def test_refused(hint: Any, reason: str) -> None:
    with pytest.raises(RoundTripError, match=reason) as caught:
        check_round_trip(holder(hint))
    assert str(caught.value).startswith("Holder.field")


def test_the_path_to_the_field_is_named() -> None:
    deep = msgspec.defstruct("Deep", [("a", tuple[holder(Mapping[str, object]), ...])])
    with pytest.raises(RoundTripError, match=r"^Deep\.a\[\.\.\.\]\.field\[value\]: object says nothing"):
        check_round_trip(deep)


def test_an_abstract_type_is_refused() -> None:
    with pytest.raises(RoundTripError, match="ECConnectorWorkerMetadata is abstract"):
        check_round_trip(ECConnectorWorkerMetadata)


class Dangling(msgspec.Struct):
    x: "Nowhere"  # noqa: F821


def test_an_annotation_of_nothing_is_refused() -> None:
    with pytest.raises(RoundTripError, match="Dangling: an annotation cannot be evaluated"):
        check_round_trip(Dangling)


def test_the_root_is_known_exactly_and_may_have_subclasses() -> None:
    for kind in (Base, Derived, Open, Mutable):
        check_round_trip(kind)
        assert decode(encode(kind(3)), kind) == kind(3)


@pytest.mark.parametrize("kind", [SchedulerOutput, ModelRunnerOutput, ECConnectorOutput, ModelInfo])
def test_the_protocols_own_messages_are_accepted(kind: Any) -> None:
    check_round_trip(kind)


def test_recursive_types_are_accepted() -> None:
    tree = Tree(frozenset({Tree(), Tree(more=(Tree(),))}), (Tree(),))
    assert decode(encode(tree), Tree) == tree


# --- every accepted type comes back: types are drawn, then values of them

int64 = st.integers(-(2**63), 2**64 - 1)
HASHABLE: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (int, int64),
    (bool, st.booleans()),
    (str, st.text(max_size=3)),
    (bytes, st.binary(max_size=3)),
    (None, st.none()),
    (Color, st.sampled_from(Color)),
    (Level, st.sampled_from(Level)),
    (Literal["a", "b"], st.sampled_from(["a", "b"])),
    (Key, st.text(max_size=3)),
    (Annotated[int, msgspec.Meta(ge=0)], st.integers(0, 9)),
    (int | str, int64 | st.text(max_size=3)),
    (Closed, int64.map(Closed)),
    (Final | None, st.none() | int64.map(Final)),
    (Left | Right, int64.map(Left) | int64.map(Right)),
    (tuple[()], st.just(())),
]
PLAIN: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (float, st.floats(allow_nan=False)),
    (int | float, int64 | st.floats(allow_nan=False)),
    (Mutable, int64.map(Mutable)),
    (WithMap, st.dictionaries(st.text(max_size=2), int64, max_size=2).map(WithMap)),
]


def wrapped(inner: list[tuple[Any, st.SearchStrategy[Any]]], hashable: bool) -> list[Any]:
    made: list[Any] = []
    for hint, values in inner:
        made.append((tuple[hint, ...], st.lists(values, max_size=3).map(tuple)))
        made.append((tuple[hint, int], st.tuples(values, int64)))
        if hashable:
            made.append((frozenset[hint], st.frozensets(values, max_size=3)))
    return made


hashable_types = HASHABLE + wrapped(HASHABLE, hashable=True)
plain_types = [
    *hashable_types,
    *PLAIN,
    *wrapped(PLAIN, hashable=False),
    *((list[hint], st.lists(values, max_size=3)) for hint, values in PLAIN + HASHABLE),
    *((set[hint], st.sets(values, max_size=3)) for hint, values in HASHABLE),
    *((Mapping[hint, float], st.dictionaries(values, st.floats(allow_nan=False), max_size=3))
      for hint, values in hashable_types),
    *((dict[str, hint], st.dictionaries(st.text(max_size=2), values, max_size=3)) for hint, values in HASHABLE),
]  # fmt: skip
plain_types = [(holder(hint), values) for hint, values in plain_types]


@given(st.data())
def test_what_is_accepted_comes_back(data: st.DataObject) -> None:
    kind, values = data.draw(st.sampled_from(plain_types))
    check_round_trip(kind)
    value = data.draw(values)
    back = decode(encode(kind(value)), kind).field
    assert back == value
    assert type(back) is type(value)
