"""Fields that hold any concrete type of an abstract base.

msgspec decodes a field by its annotation. Annotated with the base struct, a field would be decoded *as* the base,
and what the concrete type adds would be lost without a word. So such a field is annotated, at run time, with a
stand-in that is no struct: msgspec then asks the codec (``wire``), which reads the type's tag. Type checkers see
the base itself::

    if TYPE_CHECKING:
        AnyShape = Shape
    else:
        AnyShape = polymorphic(Shape)

    class Message(msgspec.Struct, frozen=True):
        shape: AnyShape | None = None
"""

from __future__ import annotations

from abc import ABC, ABCMeta

import msgspec


class MetadataMeta(msgspec.StructMeta, ABCMeta):
    """Of structs that travel with their type's tag. Makes abstract methods hold on structs."""


class Polymorphic(ABC):
    """Of the stand-ins. Never instantiated."""


def polymorphic(base: type[msgspec.Struct]) -> type[Polymorphic]:
    """The stand-in for ``base`` in annotations. Instances and subclasses of ``base`` count as its own."""

    class StandIn(Polymorphic):
        __doc__ = f"Any concrete ``{base.__name__}``."

    StandIn.__name__ = StandIn.__qualname__ = f"Any{base.__name__}"
    StandIn.register(base)
    return StandIn


def is_stand_in(hint: object) -> bool:
    """Whether an annotation is a stand-in itself (to which concrete types are only virtual subclasses)."""
    return isinstance(hint, type) and Polymorphic in hint.__mro__
