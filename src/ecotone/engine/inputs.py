"""A prompt as a caller writes it becomes token ids and items."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ecotone.engine.checkpoint import check_model_folder, load_processor
from ecotone.engine.items import Item, ItemProcessor
from ecotone.engine.media import ImageInput, load_image
from ecotone.errors import PlaceholderError, RequestError, UnsupportedModelError
from ecotone.protocol.step import MultiModalItem


@dataclass(frozen=True)
class Prompt:
    """What is asked.

    Attributes:
        text: the prompt, with the model's image placeholder (``<image>`` for LLaVA) where each image belongs.
        images: as many images as placeholders, in order; see ``ImageInput``.
        messages: instead of ``text``: a chat, which the model's chat template turns into text. ``content`` is
            a string or a list of parts ``{"type": "text", "text": ...}`` and ``{"type": "image"}``. An image part
            may bring its image (``{"type": "image", "image": ...}``); the others take theirs from ``images``.
    """

    text: str | None = None
    images: Sequence[ImageInput] = ()
    messages: Sequence[Mapping[str, Any]] | None = None


class ProcessedPrompt(msgspec.Struct, frozen=True):
    """Token ids with one placeholder per encoder row, and the items in prompt order."""

    token_ids: tuple[int, ...]
    items: tuple[MultiModalItem, ...]


class InputProcessor:
    """Tokenizes prompts and preprocesses images for one model. Thread-safe: one prompt at a time."""

    def __init__(self, model: Path, *, max_image_pixels: int) -> None:
        """Load the folder's processor.

        Raises:
            ModelError: there is no such folder, or its processor cannot be loaded, or takes no images.
        """
        self._processor = load_processor(check_model_folder(str(model)))
        self._items = ItemProcessor(self._processor)
        self._max_image_pixels = max_image_pixels
        self._lock = threading.Lock()
        self.tokenizer = self._processor.tokenizer

    @property
    def options(self) -> str:
        """Digest of the processor's options; part of every cache key."""
        return self._items.options

    def process(self, prompt: Prompt | str) -> ProcessedPrompt:
        """Token ids and items of ``prompt``.

        Raises:
            RequestError: an empty or malformed prompt.
            InvalidMediaError: an image that cannot be used.
            PlaceholderError: more or fewer images than placeholders.
        """
        if isinstance(prompt, str):
            prompt = Prompt(prompt)
        with self._lock:
            text, images = self._render(prompt)
            token = self._processor.image_token
            if (wanted := text.count(token)) != len(images):
                raise PlaceholderError(
                    f"the prompt has {wanted} {token} placeholders and {len(images)} images; there must be as many"
                )
            items = [self._items.process(load_image(i, max_pixels=self._max_image_pixels)) for i in images]
            return self._tokenize(text, items)

    def _render(self, prompt: Prompt) -> tuple[str, list[ImageInput]]:
        if isinstance(prompt.images, (str, bytes)) or not isinstance(prompt.images, Sequence):
            raise RequestError(f"images must be a sequence of images, not {type(prompt.images).__name__}")
        if (prompt.text is None) == (prompt.messages is None):
            raise RequestError("a prompt has either text or messages")
        if prompt.messages is None:
            text, images = prompt.text, list(prompt.images)
        else:
            messages, images = _chat(prompt.messages, prompt.images)
            text = self._apply_template(messages)
        if not isinstance(text, str):
            raise RequestError(f"the prompt must be a string, not {type(text).__name__}")
        if not text.strip():
            raise RequestError("the prompt is empty")
        return text, images

    def _apply_template(self, messages: list[dict[str, Any]]) -> str:
        if self._processor.chat_template is None:
            raise RequestError("the model has no chat template; give the prompt as text")
        try:
            return str(self._processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        # A rim: a template is the model's own program.
        except Exception as error:
            raise RequestError(f"the model's chat template refuses these messages: {error}") from error

    def _tokenize(self, text: str, items: list[Item]) -> ProcessedPrompt:
        token = self._processor.image_token
        pieces = text.split(token)
        # Tokenized once and whole: text at the seams may merge into one token.
        full = pieces[0] + "".join(item.replacement + piece for item, piece in zip(items, pieces[1:], strict=True))
        try:
            token_ids = self.tokenizer(full, verbose=False)["input_ids"]
        except (TypeError, UnicodeError) as error:
            raise RequestError(f"the prompt is not valid Unicode text: {error}") from None
        return ProcessedPrompt(tuple(token_ids), self._place(token_ids, items))

    def _place(self, token_ids: list[int], items: list[Item]) -> tuple[MultiModalItem, ...]:
        """The items at their offsets among ``token_ids``."""
        positions = np.flatnonzero(np.asarray(token_ids) == self._processor.image_token_id)
        if (rows := sum(item.item.num_rows for item in items)) != len(positions):
            raise PlaceholderError(
                f"the prompt has {len(positions)} placeholder tokens and its images have {rows} encoder rows"
            )
        placed, start = [], 0
        for item in (item.item for item in items):
            span = positions[start : start + item.num_rows]
            if span[-1] - span[0] != item.num_rows - 1:
                raise UnsupportedModelError("an image's placeholders are not consecutive in this model's prompts")
            placed.append(msgspec.structs.replace(item, offset=int(span[0])))
            start += item.num_rows
        return tuple(placed)


def _chat(messages: object, images: Sequence[ImageInput]) -> tuple[list[dict[str, Any]], list[ImageInput]]:
    """The messages without their images, and all images in prompt order."""
    if not isinstance(messages, Sequence) or not messages:
        raise RequestError("messages must be a list of at least one message")
    rest = list(images)
    found: list[ImageInput] = []
    plain = []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(f"message {number} must have a role")
        content = message.get("content")
        if not isinstance(content, str):
            content = _parts(content, number, rest, found)
        plain.append({"role": message["role"], "content": content})
    return plain, found + rest


def _parts(content: object, number: int, rest: list[ImageInput], found: list[ImageInput]) -> list[dict[str, str]]:
    if not isinstance(content, Sequence):
        raise RequestError(f"message {number}: content must be a string or a list of parts")
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": part["text"]})
        elif kind == "image":
            if "image" in part:
                found.append(part["image"])
            elif rest:
                found.append(rest.pop(0))
            parts.append({"type": "image"})
        else:
            raise RequestError(
                f"message {number}: a part must be {{'type': 'text', 'text': ...}} or {{'type': 'image'}}"
            )
    return parts
