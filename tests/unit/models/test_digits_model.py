"""The shipped model folder, and the script that makes it."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from model_cases import Family
from PIL import Image
from safetensors import safe_open

PLACES = (
    "language_model.model.",
    "language_model.lm_head.",
    "multi_modal_projector.",
    "vision_tower.vision_model.",
)


@pytest.fixture(scope="session")
def scripts(digits_folder: Path) -> Iterator[Callable[[str], ModuleType]]:
    """The modules beside the training script, which finds them there too."""
    sys.path.insert(0, str(digits_folder.parent))
    yield importlib.import_module
    sys.path.remove(str(digits_folder.parent))


@pytest.fixture(scope="session")
def data(scripts: Callable[[str], ModuleType]) -> ModuleType:
    return scripts("digits_data")


def test_weight_names_and_size(digits_folder: Path) -> None:
    with safe_open(digits_folder / "model.safetensors", framework="pt") as weights:
        names = list(weights.keys())
    assert [name for name in names if not name.startswith(PLACES)] == []
    assert {place for place in PLACES for name in names if name.startswith(place)} == set(PLACES)
    assert sum(file.stat().st_size for file in digits_folder.rglob("*") if file.is_file()) <= 8_000_000


def test_measured_accuracy(digits_folder: Path) -> None:
    """What training measured is good enough, and is what the model card says."""
    accuracy = json.loads((digits_folder / "eval.json").read_bytes())["accuracy"]
    card = (digits_folder / "README.md").read_text()
    assert {"one", "sum", "larger"} <= set(accuracy)
    for name, value in accuracy.items():
        assert value >= 0.95
        assert re.search(rf"^\| `{name}` \|.*\| {100 * value:.1f} % \|$", card, re.MULTILINE), name


def test_images_are_held_out_digits(digits_folder: Path, labels: dict[str, int], data: ModuleType) -> None:
    seed = json.loads((digits_folder / "eval.json").read_bytes())["split"]
    train, held_out = data.load_split(seed)
    known = {np.asarray(data.to_picture(p)).tobytes(): int(y) for p, y in zip(*fields(held_out), strict=True)}
    trained = {np.asarray(data.to_picture(p)).tobytes() for p in train.pixels}
    assert sorted(labels) == sorted(file.name for file in (digits_folder / "images").glob("*.png"))
    assert all(list(labels.values()).count(digit) >= 3 for digit in range(10))
    for name, digit in labels.items():
        pixels = np.asarray(Image.open(digits_folder / "images" / name)).tobytes()
        assert known[pixels] == digit
        assert pixels not in trained


def fields(digits: Any) -> tuple[Any, Any]:
    return digits.pixels, digits.labels


def ask(digits: Family, processor: Any, prompts: list[str], pictures: Sequence[Image.Image]) -> list[str]:
    inputs = processor(text=prompts, images=pictures, return_tensors="pt", padding=True)
    output = digits.reference.generate(**inputs, max_new_tokens=12, do_sample=False)
    return [answer.strip() for answer in processor.batch_decode(output[:, inputs["input_ids"].shape[1] :], True)]


def test_every_image_is_read(
    digits: Family, processor: Any, digits_folder: Path, labels: dict[str, int], data: ModuleType
) -> None:
    prompt = data.make_prompt("What digit is this?", 1)
    pictures = [Image.open(digits_folder / "images" / name) for name in labels]
    answers = ask(digits, processor, [prompt] * len(labels), pictures)
    want = [data.KINDS["one"].answer([digit]) for digit in labels.values()]
    assert np.mean([a == w for a, w in zip(answers, want, strict=True)]) >= 0.95


@pytest.mark.parametrize("kind", ["sum", "larger"])
def test_pairs_of_images(
    kind: str, digits: Family, processor: Any, digits_folder: Path, labels: dict[str, int], data: ModuleType
) -> None:
    names = sorted(labels)
    pairs = [(a, names[(i * 7 + 3) % len(names)]) for i, a in enumerate(names)]
    prompt = data.make_prompt(data.KINDS[kind].questions[0], 2)
    pictures = [Image.open(digits_folder / "images" / name) for pair in pairs for name in pair]
    answers = ask(digits, processor, [prompt] * len(pairs), pictures)
    want = [data.KINDS[kind].answer([labels[name] for name in pair]) for pair in pairs]
    assert np.mean([a == w for a, w in zip(answers, want, strict=True)]) >= 0.95


@pytest.mark.parametrize("count", [0, 1, 2])
def test_chat_template_gives_the_prompts_it_was_trained_on(processor: Any, data: ModuleType, count: int) -> None:
    content = [{"type": "text", "text": "What is this?"}, *[{"type": "image"}] * count]
    chat = [{"role": "user", "content": content}]
    prompt = processor.apply_chat_template(chat, add_generation_prompt=True)
    assert prompt == data.make_prompt("What is this?", count)
    more = [*chat, {"role": "assistant", "content": "A digit."}, {"role": "user", "content": "Really?"}]
    prompt = processor.apply_chat_template(more, add_generation_prompt=True)
    assert prompt.endswith("What is this? ASSISTANT: A digit.</s>USER: Really? ASSISTANT:")


def test_answers(data: ModuleType) -> None:
    answers = {name: kind.answer for name, kind in data.KINDS.items()}
    assert answers["one"]([7]) == "The digit is seven."
    assert answers["sum"]([9, 8]) == "The sum is seventeen."
    assert answers["larger"]([3, 8]) == "The larger digit is eight."
    assert answers["larger"]([4, 4]) == "Both digits are four."
    assert answers["list"]([1, 0, 2]) == "one, zero, two."
    assert answers["count"]([9]).split(", ")[-1] == "seventeen."


def test_the_same_seed_trains_the_same_weights(
    data: ModuleType, scripts: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    """And what is saved loads, with the names of the original checkpoints."""
    training, modelling, evaluation = map(scripts, ("train_digits", "digits_model", "digits_eval"))
    states = []
    for _ in range(2):
        torch.manual_seed(3)
        processor = modelling.build_processor()
        model = modelling.build_model(processor.tokenizer).train()
        trainer = training.Trainer(model, processor.tokenizer, data.load_split(0)[0], 3, 2e-3)
        trainer.warm_up(1, batch_size=8)
        before = model.lm_head.weight.clone()
        trainer.train(2, batch_size=8)
        assert not torch.equal(before, model.lm_head.weight)
        states.append({name: value.clone() for name, value in model.state_dict().items()})
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    modelling.save(model, processor, tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as weights:
        assert all(name.startswith(PLACES) for name in weights.keys())  # noqa: SIM118
    loaded = evaluation.Evaluator(tmp_path).model.state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in states[0].items())
