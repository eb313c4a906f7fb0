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
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import torch
from digits_data import Digits, Example, augment, draw_example, load_split, to_picture
from digits_eval import evaluate
from digits_model import ROWS_PER_IMAGE, build_model, build_processor, save
from torch import Tensor
from torch.nn import functional
from transformers.utils import logging as transformers_logging

IMAGES_PER_CLASS = 4


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
