"""Which types survive the wire: decided by walking a type's annotations, before the first message is sent.

The accepted types are a closed list. Everything else is refused, with the field and what to write instead.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Iterator, Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

import msgspec

from ecotone.errors import RoundTripError
from ecotone.protocol.polymorphic import is_stand_in

_SCALARS = frozenset({NoneType, bool, int, str, bytes})
_MAPS = (dict, Mapping)
_CONTAINERS = (tuple, list, set, frozenset, *_MAPS)

Seen: TypeAlias = set[tuple[type[msgspec.Struct], bool]]


def check_round_trip(kind: Any) -> None:
    """Refuse ``kind`` (a struct type, or a container or union of such) unless its values survive the wire.

    What types cannot say stays with the values: an integer outside 64 bits is refused when it is encoded; a float
    field takes integers, exactly up to 2**53, and gives floats; a mapping comes back as a dictionary (equal, and
    frozen again where the struct's ``__post_init__`` does so).

    Raises:
        RoundTripError: naming the field.
    """
    if is_struct(kind):
        _check_struct(kind, kind.__name__, False, set())
    else:
        _check(kind, type_name(kind), False, set())


def is_struct(hint: Any) -> bool:
    """Whether ``hint`` is a struct type itself."""
    return isinstance(hint, type) and issubclass(hint, msgspec.Struct)


@cache
def field_hints(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """The annotations of the struct's fields, evaluated.

    Raises:
        RoundTripError: one names something that does not exist at run time.
    """
    try:
        hints = get_type_hints(kind)
    except NameError as error:
        raise RoundTripError(f"{kind.__name__}: an annotation cannot be evaluated: {error}") from error
    return {name: hints[name] for name in kind.__struct_fields__}


def classes_in(hint: Any) -> Iterator[type]:
    """Every class an annotation mentions, containers and unions opened."""
    arguments = [argument for argument in get_args(hint) if argument is not Ellipsis]
    if not arguments and isinstance(hint, type):
        yield hint
    for argument in arguments:
        yield from classes_in(argument)


def _check(hint: Any, where: str, hashed: bool, seen: Seen) -> None:
    """``hashed``: values are members of a set or keys of a map, in whole or in part."""
    hint = _bare(hint)
    origin = get_origin(hint)
    if hint is None or hint in _SCALARS:
        return
    if hint is float:
        _refuse_if(hashed, where, "a float as member of a set or key of a map; integers beyond 2**53 would merge")
    elif origin in (Union, UnionType):
        _let_msgspec_decide(hint, where)
        for arm in get_args(hint):
            _check(arm, where, hashed, seen)
    elif origin is Literal:
        _let_msgspec_decide(hint, where)
    elif origin in _CONTAINERS and (get_args(hint) or hint == tuple[()]):
        _check_container(hint, where, hashed, seen)
    elif is_struct(hint):
        _check_field_struct(hint, where, hashed, seen)
    elif isinstance(hint, type) and issubclass(hint, enum.Enum):
        _refuse_if(issubclass(hint, enum.Flag), where, "a flag enum; write an int, or a set of an enum")
        _let_msgspec_decide(hint, where)
    elif is_stand_in(hint):
        _refuse_if(hashed, where, "a polymorphic type as member of a set or key of a map")
    else:
        raise RoundTripError(f"{where}: {type_name(hint)} {_why_not(hint)}")


def _check_container(hint: Any, where: str, hashed: bool, seen: Seen) -> None:
    origin, arguments = get_origin(hint), get_args(hint)
    _refuse_if(hashed and origin not in (tuple, frozenset), where, f"{type_name(hint)}, which cannot be hashed")
    if origin in _MAPS:
        _check(arguments[0], f"{where}[key]", True, seen)
        _check(arguments[1], f"{where}[value]", False, seen)
        return
    for argument in arguments:
        if argument is not Ellipsis:
            _check(argument, f"{where}[...]", hashed or origin in (set, frozenset), seen)


def _check_field_struct(kind: type[msgspec.Struct], where: str, hashed: bool, seen: Seen) -> None:
    """A struct decoded by annotation, not by tag: no value of another type may hide behind it."""
    name, config = kind.__name__, kind.__struct_config__
    subclasses = kind.__subclasses__()
    if subclasses:
        raise RoundTripError(
            f"{where}: {name} has subclasses ({subclasses[0].__name__}); one would come back as the base, without "
            "its own fields. Write a tagged union of the concrete types"
        )
    if not config.forbid_unknown_fields and not getattr(kind, "__final__", False):
        raise RoundTripError(
            f"{where}: {name} may be subclassed, and a subclass's fields would be lost silently; declare it with "
            "forbid_unknown_fields=True, or @final"
        )
    if hashed and not (config.frozen and config.eq):
        raise RoundTripError(f"{where}: {name} is a member of a set or key of a map; declare it frozen, with eq")
    _check_struct(kind, where, hashed, seen)


def _check_struct(kind: type[msgspec.Struct], where: str, hashed: bool, seen: Seen) -> None:
    if (kind, hashed) in seen:
        return
    seen.add((kind, hashed))
    _refuse_if(inspect.isabstract(kind), where, f"{kind.__name__} is abstract; a concrete type is needed")
    _refuse_if(kind.__struct_config__.dict, where, f"{kind.__name__} has dict=True; such attributes do not travel")
    for field, hint in field_hints(kind).items():
        _check(hint, f"{where}.{field}", hashed, seen)
    _let_msgspec_decide(kind, where)


def _bare(hint: Any) -> Any:
    """``hint`` without constraints and without new names for it."""
    while get_origin(hint) is Annotated or hasattr(hint, "__supertype__"):
        hint = get_args(hint)[0] if get_origin(hint) is Annotated else hint.__supertype__
    return hint


def _let_msgspec_decide(hint: Any, where: str) -> None:
    try:
        msgspec.msgpack.Decoder(hint)
    except TypeError as error:
        raise RoundTripError(f"{where}: {error}") from error


def type_name(hint: Any) -> str:
    """How messages name the type."""
    return hint.__name__ if isinstance(hint, type) else str(hint)


def _refuse_if(refused: bool, where: str, what: str) -> None:
    if refused:
        raise RoundTripError(f"{where}: {what}")


def _why_not(hint: Any) -> str:
    if hint in (Any, object) or type(hint).__name__ == "TypeVar":
        return "says nothing about the type; write the concrete one"
    if (get_origin(hint) or hint) in _CONTAINERS:
        return "says nothing about what it holds; write its item types"
    if getattr(get_origin(hint) or hint, "__module__", "") == "collections.abc":
        return "does not say which container: it would come back as another one; write tuple or frozenset"
    return "is not known to come back as it was; use scalars, enums, tuples, frozensets, mappings, structs"
