"""Why an architecture is not served: what it would need, as far as its class and its config tell."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any

import transformers

from ecotone.worker.models.families import SUPPORTED_ARCHITECTURES

_LAYER_TYPES = ("full_attention", "sliding_attention")
# Field of a language model's configuration -> what it means when it is set.
_OBSTACLES = {
    "cross_attention_layers": "attends to the encoder's output in layers of its own, and takes no rows",
    "attn_logit_softcapping": "soft-caps attention scores, which packed attention does not",
    "use_bidirectional_attention": "lets text see the text after it, which is not there yet",
    "num_kv_shared_layers": "has layers that share keys and values, which the paged KV cache does not",
    "hidden_size_per_layer_input": "takes an input for each token in every layer, and an encoder row has none",
}
_VARYING_ROPE = ("dynamic", "longrope")


def refusal(architecture: str, config: Mapping[str, Any]) -> str:
    """One sentence on ``architecture``: that it is not supported, what is missing, and what is supported."""
    supported = ", ".join(SUPPORTED_ARCHITECTURES)
    return f"{architecture} is not supported: {what_is_missing(architecture, config)}; supported: {supported}"


def what_is_missing(architecture: str, config: Mapping[str, Any]) -> str:
    """The first thing that stands in the way of ``architecture``. ``config``: its ``config.json``."""
    kind = getattr(transformers, architecture, None)
    if kind is None:
        return f"transformers {transformers.__version__} has no such class"
    methods = [f"get_{modality}_features" for modality in ("image", "video", "audio")]
    if not any(hasattr(kind, name) for name in methods):
        return f"it has no encoder that can be called by itself (none of {', '.join(methods)})"
    if "batch_num_images" in _parameters(kind, "get_image_features"):
        return "its encoding of an image depends on how many other images the prompt has, so none can be kept"
    text = config.get("text_config")
    found = obstacle(text if isinstance(text, Mapping) else config)
    return found or "nothing is known to be, but nobody has tested it; docs/models.md says how to add a family"


def _parameters(kind: type, method: str) -> Collection[str]:
    function = getattr(kind, method, None)
    return () if function is None else inspect.signature(function).parameters.keys()


def obstacle(text: Mapping[str, Any]) -> str | None:
    """What about a language model cannot be served, whatever it is part of; ``None``: nothing that is known.

    Each of these would not fail but give wrong answers: packed attention and the paged KV cache are all that a
    step keeps, and requests of any lengths share it.
    """
    for name, reason in _OBSTACLES.items():
        if text.get(name):
            return f"its language model {reason}"
    layers = text.get("layer_types") or ()
    other = sorted({str(layer) for layer in layers} - set(_LAYER_TYPES))
    if other:
        return f"its language model has layers of {', '.join(other)}, which the paged KV cache does not hold"
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    parts = [part for part in (rope, *rope.values()) if isinstance(part, Mapping)]
    for kind in (part.get("rope_type", part.get("type")) for part in parts):
        if kind in _VARYING_ROPE:
            return f"its language model has {kind} rotary positions, which depend on the longest request of a step"
    return None
