"""What a rank says about the model it loaded."""

from __future__ import annotations

import msgspec

from ecotone.protocol.connector import EncoderSpec


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Facts the scheduler and the connector need.

    Attributes:
        architecture: the class name in the checkpoint's config.
        encoder: the shape of what the encoder produces.
        vocab_size: tokens the language model knows.
        max_model_len: longest prompt plus output, tokens.
        eos_token_ids: tokens that end a text.
        atomic_items: a chunk of a prompt must not end within an item (its tokens see each other both ways).
    """

    architecture: str
    encoder: EncoderSpec
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    atomic_items: bool = False
