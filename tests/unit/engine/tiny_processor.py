"""A processor folder made on the spot: byte-level words, 2 x 2 patches on 8 x 8 images, no weights to speak of."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import CLIPImageProcessor, LlavaConfig, LlavaProcessor, PreTrainedTokenizerFast

IMAGE_TOKEN_ID = 256
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for c in m['content'] %}{% if c['type'] == 'image' %}<image>{% else %}{{ c['text'] }}{% endif %}"
    "{% endfor %}{% endif %} {% endfor %}assistant:"
)


def build_processor(template: str | None = TEMPLATE, **image_options: object) -> LlavaProcessor:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<image>", special=True), AddedToken("</s>", special=True)])
    size = {"height": 8, "width": 8}
    options = {"size": size, "crop_size": size, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, **image_options}
    return LlavaProcessor(
        image_processor=CLIPImageProcessor(**options),
        tokenizer=PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>"),
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=template,
    )


def build_folder(path: Path, template: str | None = TEMPLATE, **image_options: object) -> Path:
    build_processor(template, **image_options).save_pretrained(path)
    LlavaConfig(image_token_index=IMAGE_TOKEN_ID).save_pretrained(path)
    save_file({"w": np.arange(8, dtype=np.float32)}, path / "model.safetensors")
    return path
