"""The digit-reading model before it has learned anything: a CLIP tower, a Llama, a tokenizer, a chat template."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import torch
from digits_data import IMAGE_SIZE, WORDS, draw_example
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    GenerationConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

PATCH_SIZE = 14
ROWS_PER_IMAGE = (IMAGE_SIZE // PATCH_SIZE) ** 2
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ {'system': '', 'user': 'USER: ', 'assistant': 'ASSISTANT: '}[message['role']] }}
{%- if message['content'] is string -%}
{{ message['content'] }}
{%- else -%}
{%- for part in message['content'] if part['type'] == 'image' -%}<image>{{ ' ' if loop.last }}{%- endfor -%}
{%- for part in message['content'] if part['type'] == 'text' -%}{{ part['text'] }}{%- endfor -%}
{%- endif -%}
{{ '</s>' if message['role'] == 'assistant' else ' ' }}
{%- endfor -%}
{%- if add_generation_prompt -%}ASSISTANT:{%- endif -%}"""


def build_processor() -> Any:
    """A byte-level BPE tokenizer trained on the questions and answers, and CLIP's image processor."""
    rng = random.Random(0)
    examples = [draw_example(rng, [[0]] * 10) for _ in range(4000)]
    corpus = [re.sub("<image>", "", e.prompt) + " " + e.answer for e in examples] + [" ".join(WORDS)] * 50
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=480,
        special_tokens=["<unk>", "<s>", "</s>", "<pad>", "<image>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return LlavaProcessor(
        image_processor=CLIPImageProcessor(
            size={"shortest_edge": IMAGE_SIZE},
            crop_size={"height": IMAGE_SIZE, "width": IMAGE_SIZE},
            image_mean=[0.5] * 3,
            image_std=[0.5] * 3,
        ),
        tokenizer=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            unk_token="<unk>",
            bos_token="<s>",
            eos_token="</s>",
            pad_token="<pad>",
            extra_special_tokens={"image_token": "<image>"},
            padding_side="left",
            model_max_length=512,
        ),
        patch_size=PATCH_SIZE,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
        chat_template=CHAT_TEMPLATE,
    )


def build_model(tokenizer: Any) -> Any:
    """An untrained model, initialised so that it learns quickly."""
    vision = CLIPVisionConfig(
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=3,
        image_size=IMAGE_SIZE,
        patch_size=PATCH_SIZE,
    )
    text = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=ROWS_PER_IMAGE,
    )
    model = LlavaForConditionalGeneration(config)
    for name, parameter in model.named_parameters():
        if "position_embedding" in name:
            torch.nn.init.normal_(parameter, std=0.5)
        elif parameter.ndim >= 2 and "embed_tokens" not in name:
            torch.nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
    return model


def save(model: Any, processor: Any, out: Path) -> None:
    """A folder that transformers and vLLM both load.

    transformers writes the tower's weights without the ``vision_model.`` of the original LLaVA checkpoints (and
    reads both); vLLM's loader wants it, so it is put back.
    """
    tokenizer = processor.tokenizer
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
    )
    model.save_pretrained(out)
    processor.save_pretrained(out)
    path = out / "model.safetensors"
    tower = re.compile(r"^vision_tower\.(?!vision_model\.)")
    weights = {tower.sub("vision_tower.vision_model.", name): value for name, value in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(0o644)
