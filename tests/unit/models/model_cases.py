"""A tiny LLaVA over two language models, and the least of an engine that drives an adapter in steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MistralConfig,
)

from ecotone.protocol.arrays import Array
from ecotone.protocol.step import MultiModalItem
from ecotone.worker.attention import AttentionPlan, Segment
from ecotone.worker.kv_cache import PagedKVCache
from ecotone.worker.models import ModelAdapter

VOCAB, IMAGE = 100, 97
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


MODELS: dict[str, Callable[[], Any]] = {
    "llava": llava,
    "llava_sliding_window": llava_sliding_window,
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


def image_request(seed: int = 0) -> Request:
    """Two images with text around them, as the processor would prepare them."""
    generator = torch.Generator().manual_seed(seed)
    pixels = [torch.randn(1, 3, 28, 28, generator=generator) for _ in range(2)]
    ids, items = text(6, seed), []
    for index, pixel_values in enumerate(pixels):
        inputs = {"pixel_values": Array.from_numpy(pixel_values.numpy())}
        items.append(
            MultiModalItem(
                modality="image", item_id=f"{seed}-{index}", offset=len(ids), num_rows=16, inputs=inputs
            )
        )
        ids += [IMAGE] * 16 + text(7 + index, seed + index + 1)
    return Request(ids, items, reference_inputs={"pixel_values": torch.cat(pixels)})


def reference_logits(model: Any, request: Request) -> Tensor:
    """What transformers itself answers: logits [L, vocab] of all tokens known."""
    ids = torch.tensor(request.ids)[None]
    with torch.no_grad():
        logits: Tensor = model(
            input_ids=ids, attention_mask=torch.ones_like(ids), **request.reference_inputs
        ).logits[0]
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
) -> list[Tensor]:
    """One step over the next n tokens of each request: logits [n, vocab] of each."""
    embeds, positions, masks, segments = [], [], [], []
    for request, count in work:
        start, end = request.computed, request.computed + count
        ids = torch.tensor(request.ids)
        mask = adapter.placeholder_mask(ids)
        mask[len(request.prompt) :] = False
        embedded = adapter.embed_tokens(ids)
        rows = torch.cat(request.rows) if request.rows else embedded.new_empty(0, adapter.info.encoder.width)
        embedded[mask] = rows
        embeds.append(embedded[start:end])
        positions.append(change_positions(positions_of(adapter, request))[:, start:end])
        masks.append(mask[start:end])
        segments.append(Segment(request.blocks, start, count))
        request.computed = end
    hidden = adapter.forward(
        torch.cat(embeds),
        torch.cat(positions, dim=1),
        AttentionPlan.build(segments, kv.block_size, adapter.device),
        kv,
        rows_mask=torch.cat(masks),
    )
    return list(torch.split(adapter.logits(hidden), [count for _, count in work]))


def prefill(
    adapter: ModelAdapter, kv: PagedKVCache, request: Request, chunk: int | None = None, **options: Any
) -> Tensor:
    """Logits [L, vocab] of the whole prompt, in chunks."""
    logits = []
    while request.computed < len(request.ids):
        end = min(len(request.ids), request.computed + (chunk or len(request.ids)))
        logits += run_step(adapter, kv, [(request, end - request.computed)], **options)
    return torch.cat(logits)


def new_kv(adapter: ModelAdapter, num_blocks: int = 32) -> PagedKVCache:
    return PagedKVCache(adapter.num_layers, num_blocks, BLOCK_SIZE)


def difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())
