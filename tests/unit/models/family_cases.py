"""Per family, what its processor would make of two or three items of different sizes, with random contents."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ecotone.protocol.arrays import Array
from ecotone.protocol.step import MultiModalItem
from ecotone.worker.models.families import CONCAT_AXIS

TILE = (3, 16, 16)
# Beyond these ids lie the special tokens of every tiny tokenizer.
TEXT_IDS = (30, 250)


@dataclass(frozen=True)
class Medium:
    """An item before it has a place: its part of the prompt, from its first placeholder to its last."""

    modality: str
    span: list[int]
    placeholder: int
    inputs: Mapping[str, Tensor]
    around: tuple[list[int], list[int]] = ([], [])

    def at(self, offset: int, item_id: str) -> MultiModalItem:
        return MultiModalItem(
            modality=self.modality,
            item_id=item_id,
            offset=offset,
            num_rows=self.span.count(self.placeholder),
            length=len(self.span),
            inputs={name: Array.from_numpy(tensor.numpy()) for name, tensor in self.inputs.items()},
        )


@dataclass(frozen=True)
class CasePrompt:
    """A prompt, its items, and what transformers' own forward wants beside the token ids."""

    ids: list[int]
    items: tuple[MultiModalItem, ...] = ()
    reference_inputs: Mapping[str, Tensor] = field(default_factory=dict)


class Draw:
    """Random numbers, the same for the same seed."""

    def __init__(self, config: Any, seed: int) -> None:
        self.config = config
        self._generator = torch.Generator().manual_seed(seed)

    def floats(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator)

    def text(self, length: int) -> list[int]:
        return torch.randint(*TEXT_IDS, (length,), generator=self._generator).tolist()


def media(family: str, config: Any, seed: int = 0) -> list[Medium]:
    """Two or three items of ``family``, of the same kinds and sizes for every seed."""
    return _MEDIA[family](Draw(config, seed))


def prompt(model_type: str, config: Any, parts: Sequence[Medium | int], seed: int) -> CasePrompt:
    """``parts`` one after the other: items, and so many tokens of text. Item ids follow from the inputs."""
    draw = Draw(config, 1000 + seed)
    ids: list[int] = []
    items: list[MultiModalItem] = []
    for part in parts:
        if isinstance(part, int):
            ids += draw.text(part)
            continue
        before, after = part.around
        ids += before
        content = b"".join(tensor.numpy().tobytes() for tensor in part.inputs.values())
        items.append(part.at(len(ids), hashlib.sha256(content).hexdigest()))
        ids += [*part.span, *after]
    chosen = [part for part in parts if isinstance(part, Medium)]
    return CasePrompt(ids, tuple(items), _joined(model_type, chosen))


def reference_logits(model: Any, prompt_: CasePrompt, output: Sequence[int] = ()) -> Tensor:
    """What transformers itself answers: logits ``[L, vocab]`` of the prompt and ``output`` after it."""
    ids = torch.tensor([*prompt_.ids, *output])[None]
    extra = dict(prompt_.reference_inputs)
    types = torch.zeros_like(ids)
    known = types[:, : len(prompt_.ids)]  # a placeholder that was generated is text
    for code, name in ((1, "image_token_id"), (2, "video_token_id")):
        token = getattr(model.config, name, None)
        known[ids[:, : len(prompt_.ids)] == (-1 if token is None else token)] = code
    if model.config.model_type == "gemma3":
        extra["token_type_ids"] = types
    elif extra and model.config.model_type.startswith("qwen") and model.config.model_type != "qwen2_audio":
        extra["mm_token_type_ids"] = types
    with torch.no_grad():
        logits: Tensor = model(input_ids=ids, attention_mask=torch.ones_like(ids), **extra).logits[0]
    return logits


def _joined(model_type: str, chosen: Sequence[Medium]) -> dict[str, Tensor]:
    """The inputs of all items of a prompt in one call, as a processor returns them."""
    values: dict[str, list[Tensor]] = {}
    for medium in chosen:
        for name, tensor in medium.inputs.items():
            values.setdefault(name, []).append(tensor)
    if model_type == "mistral3":
        values["pixel_values"] = [_padded(tensor, 48) for tensor in values.get("pixel_values", ())]
    return {name: torch.cat(v, CONCAT_AXIS.get(model_type, 0)) for name, v in values.items() if v}


def _padded(pixels: Tensor, side: int) -> Tensor:
    return torch.nn.functional.pad(pixels, (0, side - pixels.shape[3], 0, side - pixels.shape[2]))


def _whole(pixels: tuple[int, ...], rows: int) -> Callable[[Draw], list[Medium]]:
    """Images of one size, with their placeholders in a row."""

    def make(draw: Draw) -> list[Medium]:
        token = draw.config.image_token_id
        return [Medium("image", [token] * rows, token, {"pixel_values": draw.floats(*pixels)}) for _ in range(2)]

    return make


def _qwen(draw: Draw) -> list[Medium]:
    """Two images and a video. Qwen3-VL writes the time of each frame before it; Qwen2.5-VL is told the seconds."""
    config = draw.config
    start, end = [config.vision_start_token_id], [config.vision_end_token_id]
    image, video = config.image_token_id, config.video_token_id
    made = []
    for grid in ([1, 4, 6], [1, 6, 8]):
        pixels = draw.floats(grid[1] * grid[2], 96)
        inputs = {"pixel_values": pixels, "image_grid_thw": torch.tensor([grid])}
        made.append(Medium("image", [image] * (grid[1] * grid[2] // 4), image, inputs, (start, end)))
    inputs = {"pixel_values_videos": draw.floats(48, 96), "video_grid_thw": torch.tensor([[3, 4, 4]])}
    frame, between = [video] * 4, []
    if config.model_type == "qwen3_vl":
        between = [*end, *draw.text(5), *start]
    if config.model_type == "qwen2_5_vl":
        inputs["second_per_grid_ts"] = torch.tensor([0.5])
    span = [*frame, *between, *frame, *between, *frame]
    made.insert(1, Medium("video", span, video, inputs, (start, end)))
    return made


def _tiles(draw: Draw) -> list[Medium]:
    """An image of 5 tiles, one of 1; for SmolVLM a video of 2 frames. Text between the tiles."""
    token = draw.config.image_token_id

    def make(modality: str, count: int) -> Medium:
        span = [token] * 4
        for _ in range(count - 1):
            span += [*draw.text(3), *[token] * 4]
        mask = torch.ones(1, count, *TILE[1:], dtype=torch.int64)
        mask[:, -1, 12:] = 0  # the last tile is padded below
        inputs = {"pixel_values": draw.floats(1, count, *TILE), "pixel_attention_mask": mask}
        return Medium(modality, span, token, inputs)

    made = [make("image", 5), make("image", 1)]
    return [*made, make("video", 2)] if draw.config.model_type == "smolvlm" else made


def _crops(between: int) -> Callable[[Draw], list[Medium]]:
    """An image of 3 tiles and one of 1, with ``between`` tokens of text between tiles; for InternVL a video."""

    def make(draw: Draw) -> list[Medium]:
        token = draw.config.image_token_id
        made = []
        kinds = [("image", 3, between), ("image", 1, 0)]
        if draw.config.model_type == "internvl":
            kinds.insert(1, ("video", 2, 6))
        for modality, count, gap in kinds:
            span = [token] * 4
            for _ in range(count - 1):
                span += [*draw.text(gap), *[token] * 4]
            made.append(Medium(modality, span, token, {"pixel_values": draw.floats(count, *TILE)}))
        return made

    return make


def _pixtral(draw: Draw) -> list[Medium]:
    """Images of patches in lines, with a token at the end of each line."""
    token, made = draw.config.image_token_id, []
    for height, width in ((32, 48), (24, 16)):
        lines, columns = height // 8, width // 8
        span = [*([*[token] * columns, *draw.text(1)] * lines)][:-1]
        inputs = {"pixel_values": draw.floats(1, 3, height, width), "image_sizes": torch.tensor([[height, width]])}
        made.append(Medium("image", span, token, inputs))
    return made


def _llava_next(draw: Draw) -> list[Medium]:
    """Two tiles side by side, or one above the other, and the whole; a row more at the end of each line."""
    token, made = draw.config.image_token_id, []
    for height, width in ((16, 32), (32, 16)):
        rows = (height // 4) * (width // 4 + 1) + 16
        inputs = {"pixel_values": draw.floats(1, 3, *TILE), "image_sizes": torch.tensor([[height, width]])}
        made.append(Medium("image", [token] * rows, token, inputs))
    return made


def _qwen2_audio(draw: Draw) -> list[Medium]:
    token, made = draw.config.audio_token_id, []
    for frames in (80, 50):
        mask = (torch.arange(80) < frames).long()[None]
        rows = ((frames - 1) // 2 + 1 - 2) // 2 + 1
        inputs = {"input_features": draw.floats(1, 16, 80), "feature_attention_mask": mask}
        made.append(Medium("audio", [token] * rows, token, inputs))
    return made


def _voxtral(draw: Draw) -> list[Medium]:
    token = draw.config.audio_token_id
    return [
        Medium("audio", [token] * 10 * chunks, token, {"input_features": draw.floats(chunks, 16, 80)})
        for chunks in (2, 1)
    ]


_MEDIA: dict[str, Callable[[Draw], list[Medium]]] = {
    "llava": _whole((1, *TILE), 16),
    "llava_next": _llava_next,
    "qwen2_vl": _qwen,
    "qwen2_5_vl": _qwen,
    "qwen3_vl": _qwen,
    "gemma3": _whole((1, 3, 32, 32), 16),
    "smolvlm": _tiles,
    "idefics3": _tiles,
    "internvl": _crops(0),
    "qwen2_audio": _qwen2_audio,
    "voxtral": _voxtral,
    "aya_vision": _crops(2),
    "mistral3": _pixtral,
}
