"""Tiny random models of several families, and the least of an engine that drives an adapter in steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import (
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MistralConfig,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from ecotone.protocol.arrays import Array
from ecotone.protocol.step import MultiModalItem
from ecotone.worker.attention import AttentionPlan, Segment
from ecotone.worker.kv_cache import PagedKVCache
from ecotone.worker.models import ModelAdapter

VOCAB, IMAGE, VIDEO, VISION_START, VISION_END = 100, 97, 98, 94, 95
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
}
BLOCK_SIZE = 8


def widened(model: Any, seed: int = 1) -> Any:
    """Weights at 1/sqrt(fan_in): with the library's 0.02, wrong encoder rows would hardly move the logits."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 or "class_embedding" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
    return model.eval()


def llava(text: Any = None) -> Any:
    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=28,
        patch_size=7,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text or LlamaConfig(**TEXT, bos_token_id=1, eos_token_id=2, pad_token_id=3),
        image_token_index=IMAGE,
        image_seq_length=16,
    )
    return widened(LlavaForConditionalGeneration(config))


def llava_sliding_window() -> Any:
    return llava(MistralConfig(**TEXT, sliding_window=11))


def _qwen_text(**rope: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2], **rope}
    return {**TEXT, "rope_parameters": rope}


QWEN_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}


def qwen2_vl() -> Any:
    vision = {
        "depth": 2,
        "embed_dim": 32,
        "hidden_size": 32,
        "num_heads": 4,
        "mlp_ratio": 2,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    config = Qwen2VLConfig(text_config=_qwen_text(), vision_config=vision, **QWEN_IDS)
    return widened(Qwen2VLForConditionalGeneration(config))


def qwen3_vl() -> Any:
    vision = {
        "depth": 3,
        "hidden_size": 32,
        "out_hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 4,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    }
    text = _qwen_text(mrope_interleaved=True)
    return widened(
        Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision, **QWEN_IDS))
    )


def gemma3() -> Any:
    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    text = {**TEXT, "sliding_window": 12, "layer_types": layers, "query_pre_attn_scalar": 8}
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 56,
        "patch_size": 14,
    }
    config = Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=IMAGE,
        boi_token_index=VISION_START,
        eoi_token_index=VISION_END,
    )
    return widened(Gemma3ForConditionalGeneration(config))


MODELS: dict[str, Callable[[], Any]] = {
    "llava": llava,
    "llava_sliding_window": llava_sliding_window,
    "qwen2_vl": qwen2_vl,
    "qwen3_vl": qwen3_vl,
    "gemma3": gemma3,
}


@dataclass
class Family:
    """A model twice: as transformers runs it, and behind an adapter."""

    reference: Any
    adapter: ModelAdapter

    @classmethod
    def make(cls, name: str) -> Family:
        model = MODELS[name]()
        return cls(copy.deepcopy(model), ModelAdapter(model, max_model_len=512))


@dataclass
class Request:
    """One sequence: what is known of it, and how far it is computed."""

    ids: list[int]
    items: list[MultiModalItem] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)
    blocks: Sequence[int] = ()
    reference_inputs: dict[str, Tensor] = field(default_factory=dict)
    computed: int = 0

    def __post_init__(self) -> None:
        self.prompt = list(self.ids)


def text(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, 90, (length,), generator=generator).tolist()


def image_request(model_type: str, seed: int = 0) -> Request:
    """Two images with text around them, as the family's processor would prepare them."""
    generator = torch.Generator().manual_seed(seed)
    grids: list[list[int]] = []
    if model_type == "llava":
        counts, pixels = [16, 16], [torch.randn(1, 3, 28, 28, generator=generator) for _ in range(2)]
    elif model_type == "gemma3":
        counts, pixels = [4, 4], [torch.randn(1, 3, 56, 56, generator=generator) for _ in range(2)]
    else:
        grids = [[1, 4, 6], [1, 6, 4]]
        counts = [6, 6]
        pixels = [torch.randn(24, 3 * 2 * 14 * 14, generator=generator) for _ in grids]
    ids, items = text(5, seed), []
    for index, (count, pixel_values) in enumerate(zip(counts, pixels, strict=True)):
        ids.append(VISION_START)
        inputs = {"pixel_values": Array.from_numpy(pixel_values.numpy())}
        if grids:
            inputs["image_grid_thw"] = Array.from_numpy(torch.tensor([grids[index]]).numpy())
        items.append(
            MultiModalItem(
                modality="image", item_id=f"{seed}-{index}", offset=len(ids), num_rows=count, inputs=inputs
            )
        )
        ids += [IMAGE] * count + [VISION_END, *text(6 + index, seed + index + 1)]
    reference = {"pixel_values": torch.cat(pixels)}
    if grids:
        reference["image_grid_thw"] = torch.tensor(grids)
    return Request(ids, items, reference_inputs=reference)


def reference_logits(model: Any, request: Request) -> Tensor:
    """What transformers itself answers: logits [L, vocab] of all tokens known."""
    ids = torch.tensor(request.ids)[None]
    extra = dict(request.reference_inputs)
    types = (ids == IMAGE).long()
    if model.config.model_type == "gemma3":
        extra["token_type_ids"] = types
    elif extra and model.config.model_type.startswith("qwen"):
        extra["mm_token_type_ids"] = types
    with torch.no_grad():
        logits: Tensor = model(input_ids=ids, attention_mask=torch.ones_like(ids), **extra).logits[0]
    return logits


def encode_one_by_one(adapter: ModelAdapter, request: Request) -> list[Tensor]:
    return [adapter.encode([item])[0] for item in request.items]  # type: ignore[misc]


def positions_of(adapter: ModelAdapter, request: Request) -> Tensor:
    """[R, L] of all tokens known, those generated included."""
    positions, delta = adapter.positions(request.prompt, request.items)
    generated = torch.arange(len(request.prompt), len(request.ids)) + delta
    return torch.cat([positions, generated.expand(len(positions), -1)], dim=1)


def run_step(
    adapter: ModelAdapter,
    kv: PagedKVCache,
    work: Sequence[tuple[Request, int]],
    change_positions: Callable[[Tensor], Tensor] = lambda positions: positions,
    levels: bool = True,
) -> list[Tensor]:
    """One step over the next n tokens of each request: logits [n, vocab] of each."""
    embeds, positions, masks, extras, segments = [], [], [], [], []
    for request, count in work:
        start, end = request.computed, request.computed + count
        ids = torch.tensor(request.ids)
        mask = adapter.placeholder_mask(ids)
        mask[len(request.prompt) :] = False
        embedded = adapter.embed_tokens(ids)
        rows = torch.cat(request.rows) if request.rows else embedded.new_empty(0, adapter.info.encoder.width)
        embedded[mask] = rows[:, : adapter.hidden_size]
        before, inside = int(mask[:start].sum()), int(mask[start:end].sum())
        embeds.append(embedded[start:end])
        positions.append(change_positions(positions_of(adapter, request))[:, start:end])
        masks.append(mask[start:end])
        extras.append(rows[before : before + inside, adapter.hidden_size :])
        groups = adapter.block_groups(request.ids)
        segments.append(Segment(request.blocks, start, count, None if groups is None else groups[:end]))
        request.computed = end
    hidden = adapter.forward(
        torch.cat(embeds),
        torch.cat(positions, dim=1),
        AttentionPlan.build(segments, kv.block_size, adapter.device),
        kv,
        rows_mask=torch.cat(masks),
        extra=torch.cat(extras) if levels and adapter.info.encoder.levels else None,
    )
    return list(torch.split(adapter.logits(hidden), [count for _, count in work]))


def prefill(
    adapter: ModelAdapter, kv: PagedKVCache, request: Request, chunk: int | None = None, **options: Any
) -> Tensor:
    """Logits [L, vocab] of the whole prompt, in chunks that never end inside items seen both ways."""
    groups = adapter.block_groups(request.ids)
    logits = []
    while request.computed < len(request.ids):
        end = min(len(request.ids), request.computed + (chunk or len(request.ids)))
        while groups is not None and end < len(groups) and groups[end] >= 0 and groups[end] == groups[end - 1]:
            end += 1
        logits += run_step(adapter, kv, [(request, end - request.computed)], **options)
    return torch.cat(logits)


def new_kv(adapter: ModelAdapter, num_blocks: int = 32) -> PagedKVCache:
    return PagedKVCache(adapter.num_layers, num_blocks, BLOCK_SIZE)


def difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())
