"""Train the model that the repository ships: a small LLaVA that reads handwritten digits.

    python models/train_digits.py --out models/digits-llava

A CLIP tower and a Llama, about 1.3 million parameters, learn to answer questions about scikit-learn's bundled
handwritten digits (1,797 real 8x8 images; nothing is downloaded). The result is a standard Hugging Face folder
with the weight names of the original LLaVA checkpoints, which vLLM's loader takes too, plus ``eval.json``
(accuracy on digits that were held out) and ``images/`` (some of those digits, with ``labels.json``).

Two things make so small a model learn in minutes: weights drawn at 1/sqrt(fan_in) instead of the library's 0.02,
which is far too timid at this width, and position embeddings loud enough to be heard beside the patches.

Runs of the same seed, split, thread count and library versions give the same weights (deterministic algorithms
are demanded of torch; another thread count sums in another order).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional
from transformers import (
    AutoProcessor,
    CLIPImageProcessor,
    CLIPVisionConfig,
    GenerationConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

IMAGE_SIZE, PATCH_SIZE = 56, 14
ROWS_PER_IMAGE = (IMAGE_SIZE // PATCH_SIZE) ** 2
HELD_OUT = 360
IMAGES_PER_CLASS = 4
WORDS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen",
)  # fmt: skip
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


# --------------------------------------------------------------------------------------------------- questions


@dataclass(frozen=True)
class Kind:
    """One kind of question.

    Attributes:
        weight: how often it is asked in training.
        images: fewest and most images.
        questions: wordings; the first is the one that is evaluated.
        answer: from the digits in the images to the text.
    """

    weight: float
    images: tuple[int, int]
    questions: tuple[str, ...]
    answer: Callable[[Sequence[int]], str]


def larger(digits: Sequence[int]) -> str:
    if digits[0] == digits[1]:
        return f"Both digits are {WORDS[digits[0]]}."
    return f"The larger digit is {WORDS[max(digits)]}."


KINDS = {
    "one": Kind(
        4,
        (1, 1),
        ("What digit is this?", "Which digit is this?", "Which digit is shown?", "Read the digit."),
        lambda digits: f"The digit is {WORDS[digits[0]]}.",
    ),
    "sum": Kind(
        3, (2, 2), ("What is the sum of the digits?",), lambda digits: f"The sum is {WORDS[sum(digits)]}."
    ),
    "larger": Kind(4, (2, 2), ("Which digit is larger?",), larger),
    "list": Kind(1.5, (1, 4), ("List the digits.",), lambda digits: ", ".join(WORDS[d] for d in digits) + "."),
    "count": Kind(
        0.7,
        (1, 1),
        ("Count up from this digit.",),
        lambda digits: ", ".join(WORDS[digits[0] : digits[0] + 9]) + ".",
    ),
}
TEXT_WEIGHT = 0.8  # "What is three plus four?", without an image


@dataclass(frozen=True)
class Example:
    """A prompt (one ``<image>`` for each image), its answer, and which images of the data set it shows."""

    prompt: str
    answer: str
    images: tuple[int, ...]


def make_prompt(question: str, num_images: int, separator: str = " ") -> str:
    return f"USER: {'<image>' * num_images}{separator if num_images else ''}{question} ASSISTANT:"


def text_example(a: int, b: int) -> Example:
    return Example(make_prompt(f"What is {WORDS[a]} plus {WORDS[b]}?", 0), f"The sum is {WORDS[a + b]}.", ())


def draw_example(rng: random.Random, by_digit: Sequence[Sequence[int]]) -> Example:
    """A training example. Digits are drawn before images, so that every digit and every pair is equally likely."""
    names = [*KINDS, "text"]
    name = rng.choices(names, [kind.weight for kind in KINDS.values()] + [TEXT_WEIGHT])[0]
    if name == "text":
        return text_example(rng.randrange(10), rng.randrange(10))
    kind = KINDS[name]
    digits = [rng.randrange(10) for _ in range(rng.randint(*kind.images))]
    prompt = make_prompt(rng.choice(kind.questions), len(digits), rng.choice((" ", "\n")))
    return Example(prompt, kind.answer(digits), tuple(rng.choice(by_digit[d]) for d in digits))


# -------------------------------------------------------------------------------------------------------- data


@dataclass(frozen=True)
class Digits:
    """Handwritten digits: ``pixels`` float32 [N, 8, 8] in 0..1 (1 is ink), ``labels`` int64 [N]."""

    pixels: NDArray[np.float32]
    labels: NDArray[np.int64]


def load_split(seed: int) -> tuple[Digits, Digits]:
    """Training digits and the ``HELD_OUT`` digits that training never sees, stratified by class."""
    pixels, labels = load_digits(return_X_y=True)
    pixels = (pixels.reshape(-1, 8, 8) / 16.0).astype(np.float32)
    train_x, test_x, train_y, test_y = train_test_split(
        pixels, labels, test_size=HELD_OUT, stratify=labels, random_state=seed
    )
    return Digits(train_x, train_y), Digits(test_x, test_y)


def to_picture(pixels: NDArray[np.float32], size: int = IMAGE_SIZE) -> Image.Image:
    """One digit as a grey picture of ``size`` x ``size``, as a user would send it."""
    picture = Image.fromarray((pixels * 255).round().astype(np.uint8))
    return picture.resize((size, size), Image.Resampling.BICUBIC)


def augment(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """[B, 8, 8] in 0..1 -> pixel values [B, 3, 56, 56], each turned, shifted, scaled, faded and made noisy."""

    def uniform(low: float, high: float) -> Tensor:
        return torch.rand(len(pixels), generator=generator) * (high - low) + low

    x = functional.interpolate(
        pixels[:, None], size=(IMAGE_SIZE, IMAGE_SIZE), mode="bicubic", align_corners=False
    ).clamp(0, 1)
    angle, scale = uniform(-0.22, 0.22), uniform(0.85, 1.15)
    rows = (
        torch.stack([scale * angle.cos(), -scale * angle.sin(), uniform(-0.16, 0.16)], 1),
        torch.stack([scale * angle.sin(), scale * angle.cos(), uniform(-0.16, 0.16)], 1),
    )
    grid = functional.affine_grid(torch.stack(rows, 1), list(x.shape), align_corners=False)
    x = functional.grid_sample(x, grid, align_corners=False)
    x = x * uniform(0.7, 1.1)[:, None, None, None] + torch.randn(x.shape, generator=generator) * 0.04
    return ((x.clamp(0, 1) - 0.5) / 0.5).expand(-1, 3, -1, -1)


# ------------------------------------------------------------------------------------------------------- model


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


# ---------------------------------------------------------------------------------------------------- training


class Trainer:
    """AdamW on the answers' tokens, helped by a digit classifier on the image rows that is thrown away later."""

    def __init__(self, model: Any, tokenizer: Any, digits: Digits, seed: int, learning_rate: float) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.pixels, self.labels = torch.from_numpy(digits.pixels), torch.from_numpy(digits.labels)
        self.by_digit = [np.flatnonzero(digits.labels == d).tolist() for d in range(10)]
        self.rng, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.classifier = torch.nn.Linear(model.config.text_config.hidden_size, 10)
        self.parameters = [*model.parameters(), *self.classifier.parameters()]
        self.learning_rate = learning_rate
        self.optimizer = torch.optim.AdamW(self.parameters, lr=learning_rate, weight_decay=0.05, betas=(0.9, 0.98))

    def look(self, images: Tensor) -> tuple[list[Tensor], Tensor]:
        """Rows of each image, and the loss of telling the digits by their mean row."""
        rows = list(
            self.model.model.get_image_features(augment(self.pixels[images], self.generator)).pooler_output
        )
        scores = self.classifier(torch.stack(rows).mean(1))
        return rows, functional.cross_entropy(scores, self.labels[images])

    def update(self, loss: Tensor, fraction: float) -> None:
        """One optimiser step at ``fraction`` of the learning rate."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate * fraction
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def warm_up(self, steps: int, batch_size: int = 96) -> None:
        """The eye first learns the ten shapes: cheap, as no text is read."""
        for step in range(steps):
            images = torch.randint(len(self.pixels), (batch_size,), generator=self.generator)
            _, loss = self.look(images)
            self.update(loss, min(1.0, (step + 1) / 50))
            report("eye", step, steps, f"classifier loss {loss.item():.3f}")

    def train(self, steps: int, batch_size: int = 64) -> None:
        """Everything together: short linear warm-up, then half a cosine down to 2%."""
        for step in range(steps):
            examples = [draw_example(self.rng, self.by_digit) for _ in range(batch_size)]
            examples.sort(key=lambda e: len(e.images))
            rows, eye_loss = self.look(torch.tensor([i for e in examples for i in e.images]))
            loss, count = torch.zeros(()), 0
            for start in range(0, batch_size, batch_size // 2):  # short and long prompts apart: less padding
                part = examples[start : start + batch_size // 2]
                taken = sum(len(e.images) for e in part)
                part_loss, tokens = self.read(part, rows[:taken])
                loss, count, rows = loss + part_loss, count + tokens, rows[taken:]
            fraction = max(0.02, 0.5 * (1 + math.cos(math.pi * step / steps)))
            self.update(loss / count + 0.3 * eye_loss, min(1.0, (step + 1) / max(1, steps // 20)) * fraction)
            report(
                "all", step, steps, f"answer loss {loss.item() / count:.4f}, classifier loss {eye_loss.item():.3f}"
            )

    def read(self, examples: Sequence[Example], rows: Sequence[Tensor]) -> tuple[Tensor, int]:
        """Summed cross entropy of the answers' tokens, and how many tokens that are."""
        ids, mask, labels = self.tokenize(examples)
        embeds = self.model.get_input_embeddings()(ids)
        if rows:
            places = (ids == self.model.config.image_token_id)[..., None]
            embeds = embeds.masked_scatter(places, torch.cat(list(rows)))
        hidden = self.model.model.language_model(
            inputs_embeds=embeds, attention_mask=mask, use_cache=False
        ).last_hidden_state
        keep = labels[:, 1:] != -100
        logits = self.model.lm_head(hidden[:, :-1][keep])
        return functional.cross_entropy(logits, labels[:, 1:][keep], reduction="sum"), int(keep.sum())

    def tokenize(self, examples: Sequence[Example]) -> tuple[Tensor, Tensor, Tensor]:
        """Right-padded ids, attention mask and labels (-100 outside the answers), each [B, L]."""
        image_token = self.model.config.image_token_id
        pairs = []
        for example in examples:
            prompt: list[int] = []
            for token in self.tokenizer(example.prompt)["input_ids"]:
                prompt += [token] * (ROWS_PER_IMAGE if token == image_token else 1)
            pairs.append((prompt, self.tokenizer(f" {example.answer}</s>")["input_ids"]))
        length = max(len(prompt) + len(answer) for prompt, answer in pairs)
        ids = torch.full((len(pairs), length), self.tokenizer.pad_token_id)
        labels, mask = torch.full_like(ids, -100), torch.zeros_like(ids)
        for i, (prompt, answer) in enumerate(pairs):
            end = len(prompt) + len(answer)
            ids[i, :end] = torch.tensor(prompt + answer)
            labels[i, len(prompt) : end] = torch.tensor(answer)
            mask[i, :end] = 1
        return ids, mask, labels


STARTED = time.monotonic()


def report(phase: str, step: int, steps: int, text: str) -> None:
    if (step + 1) % 25 == 0 or step + 1 == steps:
        print(f"{time.monotonic() - STARTED:5.0f} s  {phase} {step + 1:4d}/{steps}  {text}", flush=True)


# -------------------------------------------------------------------------------------------------- checkpoint


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


def save_images(digits: Digits, out: Path) -> None:
    """The first held-out digits of each class, whether the model reads them right or not."""
    out.mkdir(parents=True, exist_ok=True)
    labels = {}
    for digit in range(10):
        for k, index in enumerate(np.flatnonzero(digits.labels == digit)[:IMAGES_PER_CLASS]):
            name = f"digit{digit}_{k}.png"
            to_picture(digits.pixels[index]).save(out / name, optimize=True)
            labels[name] = digit
    (out / "labels.json").write_text(json.dumps(labels, indent=1) + "\n")


# -------------------------------------------------------------------------------------------------- evaluation


class Evaluator:
    """Asks the saved folder through its processor and ``generate()``: what a user of the checkpoint gets."""

    def __init__(self, folder: Path) -> None:
        self.model = LlavaForConditionalGeneration.from_pretrained(folder).eval()
        self.processor = AutoProcessor.from_pretrained(folder)

    @torch.inference_mode()
    def ask(
        self, prompts: Sequence[str], images: Sequence[Sequence[Image.Image]], batch_size: int = 60
    ) -> list[str]:
        """Greedy answers."""
        answers: list[str] = []
        for start in range(0, len(prompts), batch_size):
            pictures = [picture for group in images[start : start + batch_size] for picture in group]
            inputs = self.processor(
                text=list(prompts[start : start + batch_size]),
                images=pictures or None,
                return_tensors="pt",
                padding=True,
            )
            output = self.model.generate(**inputs, max_new_tokens=40, do_sample=False)
            new = output[:, inputs["input_ids"].shape[1] :]
            answers += [text.strip() for text in self.processor.batch_decode(new, skip_special_tokens=True)]
        return answers

    def accuracy(self, examples: Sequence[Example], pictures: Sequence[Image.Image]) -> float:
        """The share of answers that are right to the letter."""
        answers = self.ask([e.prompt for e in examples], [[pictures[i] for i in e.images] for e in examples])
        right = sum(answer == e.answer for answer, e in zip(answers, examples, strict=True))
        return round(right / len(examples), 4)


def evaluate(folder: Path, digits: Digits) -> dict[str, float]:
    """Accuracy by kind of question: every held-out digit alone, and as many random pairs and quadruples."""
    evaluator, rng = Evaluator(folder), random.Random(1)
    pictures = [to_picture(p) for p in digits.pixels]

    def examples(name: str) -> list[Example]:
        kind = KINDS[name]
        size = kind.images[1]
        groups = [
            (i,) if size == 1 else tuple(rng.randrange(len(pictures)) for _ in range(size))
            for i in range(len(pictures))
        ]
        prompt = make_prompt(kind.questions[0], size)
        return [Example(prompt, kind.answer([int(digits.labels[i]) for i in group]), group) for group in groups]

    result = {}
    for name in KINDS:
        result[name] = evaluator.accuracy(examples(name), pictures)
        print(f"{time.monotonic() - STARTED:5.0f} s  held out: {name} {result[name]:.4f}", flush=True)
    result["one_8x8_input"] = evaluator.accuracy(examples("one"), [to_picture(p, 8) for p in digits.pixels])
    result["text"] = evaluator.accuracy([text_example(a, b) for a in range(10) for b in range(10)], pictures)
    return result


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the digit-reading LLaVA that the repository ships.")
    parser.add_argument("--out", type=Path, default=Path("models/digits-llava"), help="folder to write")
    parser.add_argument("--steps", type=int, default=550, help="training steps after the tower's warm-up")
    parser.add_argument("--warm-up", type=int, default=300, help="steps in which the tower alone learns")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the augmentation and the examples")
    parser.add_argument("--split", type=int, default=0, help="seed of the split into training and held-out digits")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--eval-only", action="store_true", help="evaluate the folder as it is; write nothing")
    return parser.parse_args()


def main() -> None:
    """Train, save, evaluate through the saved folder, and write the figures."""
    args = parse_arguments()
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(args.seed)
    training, held_out = load_split(args.split)
    if args.eval_only:
        print(json.dumps(evaluate(args.out, held_out), indent=1))
        return
    processor = build_processor()
    model = build_model(processor.tokenizer).train()
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters:,} parameters; {len(training.labels)} training, {len(held_out.labels)} held-out digits")
    wall, cpu = time.monotonic(), time.process_time()
    trainer = Trainer(model, processor.tokenizer, training, args.seed, args.learning_rate)
    trainer.warm_up(args.warm_up)
    trainer.train(args.steps)
    facts = {
        "parameters": parameters,
        "seed": args.seed,
        "split": args.split,
        "warm_up_steps": args.warm_up,
        "steps": args.steps,
        "threads": args.threads,
        "train_seconds": round(time.monotonic() - wall),
        "train_cpu_seconds": round(time.process_time() - cpu),
        "torch": torch.__version__,
        "held_out_digits": len(held_out.labels),
    }
    save(model.eval(), processor, args.out)
    save_images(held_out, args.out / "images")
    result = {**facts, "accuracy": evaluate(args.out, held_out)}
    (args.out / "eval.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
