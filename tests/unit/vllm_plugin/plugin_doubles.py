"""vLLM's requests and configuration by their shape: what the plug-in reads of them, and nothing else."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeVar

from ecotone.vllm.scheduler import media_test

T = TypeVar("T")

BRINGS_MEDIA = media_test(lambda modality: {"grid"} if modality == "image" else set())


def sent(message: T) -> T:
    """``message`` after the way between vLLM's processes."""
    return pickle.loads(pickle.dumps(message))  # noqa: S301 - the test's own


@dataclass(frozen=True)
class Place:
    offset: int
    length: int
    embeds: int | None = None

    def get_num_embeds(self) -> int:
        return self.length if self.embeds is None else self.embeds


@dataclass(frozen=True)
class Feature:
    identifier: str
    mm_position: Place
    modality: str = "image"
    data: dict[str, Any] | None = None


@dataclass(frozen=True)
class Request:
    request_id: str
    mm_features: list[Feature] = field(default_factory=list)


def request(req_id: str, *identifiers: str, rows: int = 4, gap: int = 2) -> Request:
    """One that shows these images one after the other, each ``rows`` tokens wide, with text between them."""
    places = (Place(gap + i * (rows + gap), rows) for i in range(len(identifiers)))
    return Request(req_id, [Feature(name, place) for name, place in zip(identifiers, places, strict=True)])


def vllm_config(**changes: Any) -> SimpleNamespace:
    """A configuration that the plug-in accepts, with ``changes`` by dotted name (``model_config__dtype=...``)."""
    config = SimpleNamespace(
        ec_transfer_config=SimpleNamespace(
            ec_role="ec_both", engine_id="engine", ec_connector_extra_config={}, mm_encoder_output_widths={}
        ),
        model_config=SimpleNamespace(
            model="org/model",
            revision=None,
            architecture="LlavaForConditionalGeneration",
            model_weights="",
            dtype="torch.bfloat16",
            quantization=None,
            hf_overrides={},
            hf_config=SimpleNamespace(vision_config=SimpleNamespace()),
            multimodal_config=SimpleNamespace(mm_processor_kwargs=None),
            is_encoder_decoder=False,
            get_inputs_embeds_size=lambda: 128,
        ),
        load_config=SimpleNamespace(load_format="auto"),
        lora_config=None,
        parallel_config=SimpleNamespace(
            prefill_context_parallel_size=1,
            distributed_executor_backend="mp",
            nnodes_within_dp=1,
            placement_group=None,
        ),
    )
    for name, value in changes.items():
        *path, last = name.split("__")
        part = config
        for step in path:
            part = getattr(part, step)
        setattr(part, last, value)
    return config
