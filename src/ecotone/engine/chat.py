"""Chat messages without their media, and all media in prompt order."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from ecotone.errors import RequestError


def split_messages(
    messages: object, media: Mapping[str, Iterable[Any]], modalities: Collection[str]
) -> tuple[list[dict[str, Any]], dict[str, list[Any]]]:
    """What the chat template gets, and each modality's media: those that parts bring along, the others in turn
    from ``media``, and last what is left of it.

    Args:
        modalities: that the model takes; a part of another one is refused, for the template might pass over it.

    Raises:
        RequestError: no messages, or a part that is none; the message says which.
    """
    if not isinstance(messages, Sequence) or not messages:
        raise RequestError("messages must be a list of at least one message")
    rest = {modality: list(given) for modality, given in media.items()}
    found: dict[str, list[Any]] = {modality: [] for modality in media}
    plain = []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(f"message {number} must have a role")
        content = message.get("content")
        if not isinstance(content, str):
            content = _parts(content, number, rest, found, modalities)
        plain.append({"role": message["role"], "content": content})
    return plain, {modality: found[modality] + rest[modality] for modality in media}


def _parts(
    content: object,
    number: int,
    rest: Mapping[str, list[Any]],
    found: Mapping[str, list[Any]],
    modalities: Collection[str],
) -> list[dict[str, str]]:
    if not isinstance(content, Sequence):
        raise RequestError(f"message {number}: content must be a string or a list of parts")
    parts = []
    for part in content:
        kind = str(part.get("type")) if isinstance(part, Mapping) else ""
        if kind == "text" and isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": part["text"]})
        elif kind in modalities:
            if kind in part:
                found[kind].append(part[kind])
            elif rest[kind]:
                found[kind].append(rest[kind].pop(0))
            parts.append({"type": kind})
        else:
            raise RequestError(
                f"message {number}: a part must be {{'type': 'text', 'text': ...}}, or have the type "
                f"{' or '.join(modalities)}, which this model takes"
            )
    return parts
