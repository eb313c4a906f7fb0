"""A prompt as a caller writes it becomes token ids and items."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ecotone.engine.audio import AudioInput, load_audio
from ecotone.engine.chat import split_messages
from ecotone.engine.checkpoint import check_model_folder
from ecotone.engine.items import Item, ItemProcessor
from ecotone.engine.media import ImageInput, load_image
from ecotone.engine.medium import Medium, image_medium
from ecotone.engine.processors import MODALITIES, load_processor, load_row_token_ids, placeholders
from ecotone.engine.video import VideoInput, load_video
from ecotone.errors import InvalidMediaError, PlaceholderError, RequestError
from ecotone.protocol.step import MultiModalItem


@dataclass(frozen=True)
class Prompt:
    """What is asked.

    Attributes:
        text: the prompt, with the model's placeholder (``<image>`` for LLaVA) where each medium belongs.
        images, videos, audio: of each as many as it has placeholders, in order; see ``ImageInput``,
            ``VideoInput`` and ``AudioInput``.
        messages: instead of ``text``: a chat, which the model's chat template turns into text. ``content`` is
            a string or a list of parts ``{"type": "text", "text": ...}``, ``{"type": "image"}``,
            ``{"type": "video"}`` and ``{"type": "audio"}``. A part may bring its medium
            (``{"type": "image", "image": ...}``); the others take theirs from the fields above, in turn.
    """

    text: str | None = None
    images: Sequence[ImageInput] = ()
    messages: Sequence[Mapping[str, Any]] | None = None
    videos: Sequence[VideoInput] = ()
    audio: Sequence[AudioInput] = ()

    @property
    def media(self) -> dict[str, Sequence[Any]]:
        """By modality."""
        return {"image": self.images, "video": self.videos, "audio": self.audio}


class ProcessedPrompt(msgspec.Struct, frozen=True):
    """Token ids with one placeholder per encoder row, and the items in prompt order."""

    token_ids: tuple[int, ...]
    items: tuple[MultiModalItem, ...]


class InputProcessor:
    """Tokenizes prompts and preprocesses media for one model. Thread-safe: one prompt at a time."""

    def __init__(
        self, model: Path, *, max_image_pixels: int, max_video_frames: int = 256, max_audio_seconds: float = 600
    ) -> None:
        """Load the folder's processor.

        Args:
            max_image_pixels: of an image, or a frame of a video.

        Raises:
            ModelError: there is no such folder, or its processor cannot be loaded, or takes no media.
        """
        folder = check_model_folder(str(model), weights=False)
        self._processor = load_processor(folder)
        self._row_token_ids = sorted(load_row_token_ids(folder))
        self._items = ItemProcessor(self._processor, self._row_token_ids)
        self._tokens = placeholders(self._processor)
        self._max_audio_seconds = max_audio_seconds
        self._loaders: dict[str, Callable[[Any], Medium]] = {
            "image": lambda source: image_medium(load_image(source, max_pixels=max_image_pixels)),
            "video": partial(load_video, max_pixels=max_image_pixels, max_frames=max_video_frames),
            "audio": self._load_audio,
        }
        self._lock = threading.Lock()
        self.tokenizer = self._processor.tokenizer

    @property
    def options(self) -> str:
        """Digest of the processor's options; part of every cache key."""
        return self._items.options

    @property
    def placeholders(self) -> Mapping[str, str]:
        """Modality -> what stands for one item of it in a prompt."""
        return self._tokens

    @property
    def sampling_rate(self) -> int | None:
        """Of the clips that the model takes, Hz; ``None`` where it takes none."""
        return None if "audio" not in self._tokens else int(self._processor.feature_extractor.sampling_rate)

    @property
    def max_audio_seconds(self) -> float:
        """Of the longest clip."""
        # What is longer than its window, an extractor cuts off silently. Voxtral's takes windows in a row.
        window = getattr(getattr(self._processor, "feature_extractor", None), "chunk_length", None)
        if window is None or getattr(self._processor, "takes_windows", False):
            return self._max_audio_seconds
        return float(min(self._max_audio_seconds, window))

    def process(self, prompt: object) -> ProcessedPrompt:
        """Token ids and items of ``prompt``, a ``Prompt`` or a string.

        Raises:
            RequestError: an empty or malformed prompt.
            InvalidMediaError: a medium that cannot be used.
            PlaceholderError: more or fewer media than placeholders.
        """
        if isinstance(prompt, str):
            prompt = Prompt(prompt)
        if not isinstance(prompt, Prompt):
            raise RequestError(f"a prompt is a string or a Prompt, not {type(prompt).__name__}")
        with self._lock:
            text, media = self._render(prompt)
            pieces, kinds = self._split(text, media)
            sources = {modality: iter(media[modality]) for modality in media}
            items = [self._items.process(self._load(kind, next(sources[kind]))) for kind in kinds]
            return self._tokenize(pieces, items)

    def _render(self, prompt: Prompt) -> tuple[str, dict[str, list[Any]]]:
        for modality, given in prompt.media.items():
            if isinstance(given, (str, bytes)) or not isinstance(given, Sequence):
                field = "audio" if modality == "audio" else f"{modality}s"
                raise RequestError(f"{field} must be a sequence of {field}, not {type(given).__name__}")
        if (prompt.text is None) == (prompt.messages is None):
            raise RequestError("a prompt has either text or messages")
        if prompt.messages is None:
            text, media = prompt.text, {modality: list(given) for modality, given in prompt.media.items()}
        else:
            messages, media = split_messages(prompt.messages, prompt.media, self._tokens)
            text = self._apply_template(messages)
        if not isinstance(text, str):
            raise RequestError(f"the prompt must be a string, not {type(text).__name__}")
        if not text.strip():
            raise RequestError("the prompt is empty")
        return text, media

    def _apply_template(self, messages: list[dict[str, Any]]) -> str:
        if self._processor.chat_template is None:
            raise RequestError("the model has no chat template; give the prompt as text")
        try:
            return str(self._processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        # A rim: a template is the model's own program.
        except Exception as error:
            raise RequestError(f"the model's chat template refuses these messages: {error}") from error

    def _split(self, text: str, media: Mapping[str, Sequence[Any]]) -> tuple[list[str], list[str]]:
        """The text around the placeholders, and the modality of each placeholder in between."""
        for modality in MODALITIES:
            self._check_count(text, modality, len(media[modality]))
        pattern = "|".join(f"(?P<{modality}>{re.escape(token)})" for modality, token in self._tokens.items())
        matches = list(re.finditer(pattern, text))
        edges = [0, *(edge for match in matches for edge in match.span()), len(text)]
        pieces = [text[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True)]
        return pieces, [str(match.lastgroup) for match in matches]

    def _check_count(self, text: str, modality: str, given: int) -> None:
        if modality not in self._tokens:
            if given:
                raise RequestError(f"the model takes no {modality}, only {', '.join(self._tokens)}")
            return
        token = self._tokens[modality]
        if (wanted := text.count(token)) != given:
            raise PlaceholderError(
                f"the prompt has {wanted} {token} placeholders and {given} {modality} inputs; it takes as many"
            )

    def _load(self, modality: str, source: Any) -> Medium:
        if modality == "video" and getattr(self._processor, "video_processor", None) is None:
            raise InvalidMediaError(
                "this model's videos need torchvision, in the build that goes with the installed torch; "
                "without it, give the frames as images"
            )
        return self._loaders[modality](source)

    def _load_audio(self, source: Any) -> Medium:
        rate = int(self._processor.feature_extractor.sampling_rate)
        return load_audio(source, sampling_rate=rate, max_seconds=self.max_audio_seconds)

    def _tokenize(self, pieces: Sequence[str], items: Sequence[Item]) -> ProcessedPrompt:
        # Tokenized once and whole: text at the seams may merge into one token.
        text = pieces[0] + "".join(i.replacement + piece for i, piece in zip(items, pieces[1:], strict=True))
        bos = self.tokenizer.bos_token
        try:
            token_ids = self.tokenizer(
                text,
                # A chat template may have written the beginning itself.
                add_special_tokens=bos is None or not text.startswith(bos),
                verbose=False,
            )["input_ids"]
        except (TypeError, UnicodeError) as error:
            raise RequestError(f"the prompt is not valid Unicode text: {error}") from None
        return ProcessedPrompt(tuple(token_ids), self._place(token_ids, [item.item for item in items]))

    def _place(self, token_ids: Sequence[int], items: Sequence[MultiModalItem]) -> tuple[MultiModalItem, ...]:
        """The items at their offsets among ``token_ids``."""
        positions = np.flatnonzero(np.isin(np.asarray(token_ids), self._row_token_ids))
        if (rows := sum(item.num_rows for item in items)) != len(positions):
            raise PlaceholderError(
                f"the prompt has {len(positions)} placeholder tokens and its media have {rows} encoder rows"
            )
        placed, start = [], 0
        for item in items:
            first, last = int(positions[start]), int(positions[start + item.num_rows - 1])
            placed.append(msgspec.structs.replace(item, offset=first, length=last - first + 1))
            start += item.num_rows
        return tuple(placed)
