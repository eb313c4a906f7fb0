"""How often the digit-reading model is right about digits it has never seen."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import torch
from digits_data import KINDS, Digits, Example, make_prompt, text_example, to_picture
from PIL import Image
from transformers import AutoProcessor, LlavaForConditionalGeneration


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
        print(f"held out: {name} {result[name]:.4f}", flush=True)
    result["one_8x8_input"] = evaluator.accuracy(examples("one"), [to_picture(p, 8) for p in digits.pixels])
    result["text"] = evaluator.accuracy([text_example(a, b) for a in range(10) for b in range(10)], pictures)
    return result
