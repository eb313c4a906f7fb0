"""Prompts become token ids and items; whatever does not fit together is refused, with the numbers."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tiny_processor import build_folder

from ecotone.engine.inputs import InputProcessor, Prompt
from ecotone.errors import InvalidMediaError, PlaceholderError, RequestError

ROWS = 4  # of an 8 x 8 image in patches of 4


def picture(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (8, 8, 3), dtype=np.uint8))


@pytest.fixture(scope="module")
def processor_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_folder(tmp_path_factory.mktemp("processor"))


@pytest.fixture(scope="module")
def inputs(processor_folder: Path) -> InputProcessor:
    return InputProcessor(processor_folder, max_image_pixels=10_000)


def test_text_alone(inputs: InputProcessor) -> None:
    prompt = inputs.process("hello")
    assert inputs.tokenizer.decode(prompt.token_ids) == "hello"
    assert prompt.items == ()


def test_placeholders_are_expanded_where_they_stand(inputs: InputProcessor) -> None:
    prompt = inputs.process(Prompt("ab<image>c<image><image>", [picture(0), picture(1), picture(2)]))
    image_token = inputs.tokenizer.convert_tokens_to_ids("<image>")
    assert [item.offset for item in prompt.items] == [2, 2 + ROWS + 1, 2 + ROWS + 1 + ROWS]
    assert len(prompt.token_ids) == 3 + 3 * ROWS
    for item in prompt.items:
        assert item.num_rows == ROWS
        assert set(prompt.token_ids[item.offset : item.offset + ROWS]) == {image_token}
        assert item.inputs["pixel_values"].shape == (1, 3, 8, 8)


def test_ids_and_pixels_are_those_of_the_joint_processor_call(
    inputs: InputProcessor, processor_folder: Path
) -> None:
    from_hf = inputs._processor(text=["a <image> b<image>"], images=[picture(0), picture(1)], return_tensors="np")
    prompt = inputs.process(Prompt("a <image> b<image>", [picture(0), picture(1)]))
    assert list(prompt.token_ids) == from_hf["input_ids"][0].tolist()
    for index, item in enumerate(prompt.items):
        assert np.array_equal(item.inputs["pixel_values"].to_numpy()[0], from_hf["pixel_values"][index])


def test_the_same_image_has_one_id_and_shares_its_tensors(inputs: InputProcessor) -> None:
    first = inputs.process(Prompt("<image>", [picture(0)])).items[0]
    again = inputs.process(Prompt("xyz <image>", [np.asarray(picture(0))])).items[0]
    other = inputs.process(Prompt("<image>", [picture(1)])).items[0]
    assert first.item_id == again.item_id != other.item_id
    assert first.inputs["pixel_values"] is again.inputs["pixel_values"]
    assert len(first.item_id) == 64


def test_one_changed_pixel_changes_the_id(inputs: InputProcessor) -> None:
    pixels = np.asarray(picture(0)).copy()
    pixels[-1, -1, -1] ^= 255
    before = inputs.process(Prompt("<image>", [picture(0)])).items[0]
    after = inputs.process(Prompt("<image>", [pixels])).items[0]
    assert before.item_id != after.item_id


def test_ids_are_the_same_in_another_process(inputs: InputProcessor, processor_folder: Path) -> None:
    code = (
        "import sys, numpy as np\nfrom pathlib import Path\n"
        "from ecotone.engine.inputs import InputProcessor, Prompt\n"
        "image = np.random.default_rng(5).integers(0, 255, (8, 8, 3), dtype=np.uint8)\n"
        "inputs = InputProcessor(Path(sys.argv[1]), max_image_pixels=100)\n"
        "print(inputs.process(Prompt('<image>', [image])).items[0].item_id)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(processor_folder)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "77"},
    )
    assert run.stdout.strip() == inputs.process(Prompt("<image>", [picture(5)])).items[0].item_id


def test_chat_messages(inputs: InputProcessor) -> None:
    messages = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "one"}]},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": [{"type": "text", "text": "three"}, {"type": "image", "image": picture(1)}]},
    ]
    prompt = inputs.process(Prompt(messages=messages, images=[picture(0)]))
    assert inputs.tokenizer.decode(prompt.token_ids) == (
        f"user: {'<image>' * ROWS}one assistant: two user: three{'<image>' * ROWS} assistant:"
    )
    alone = [inputs.process(Prompt("<image>", [picture(i)])).items[0].item_id for i in (0, 1)]
    assert [item.item_id for item in prompt.items] == alone


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        (Prompt("<image> <image>", [picture(0)]), ("2 <image>", "1 image ")),
        (Prompt("no place", [picture(0)]), ("0 <image>", "1 image ")),
        (Prompt("<image>"), ("1 <image>", "0 image ")),
        (Prompt(messages=[{"role": "user", "content": "hi"}], images=[picture(0)]), ("0 <image>", "1 image ")),
        (Prompt(messages=[{"role": "user", "content": [{"type": "image"}]}]), ("1 <image>", "0 image ")),
        (Prompt(messages=[{"role": "user", "content": "a <image>"}]), ("1 <image>", "0 image ")),
    ],
)
def test_placeholders_and_images_must_be_as_many(
    inputs: InputProcessor, prompt: Prompt, says: tuple[str, ...]
) -> None:
    with pytest.raises(PlaceholderError) as caught:
        inputs.process(prompt)
    assert all(text in str(caught.value) for text in says)


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("", "empty"),
        (" \n", "empty"),
        (Prompt(), "either text or messages"),
        (Prompt("a", messages=[{"role": "user", "content": "b"}]), "either text or messages"),
        (Prompt(7), "must be a string"),
        (None, "a string or a Prompt, not NoneType"),
        ({"text": "a"}, "a string or a Prompt, not dict"),
        (Prompt("\ud800"), "Unicode"),
        (Prompt("<image>", "a.png"), "sequence of images"),
        (Prompt("<image>", picture(0)), "sequence of images"),
        (Prompt(messages=[]), "at least one message"),
        (Prompt(messages="hi"), "message 0"),
        (Prompt(messages=7), "at least one message"),
        (Prompt(messages=[{"content": "x"}]), "message 0 must have a role"),
        (Prompt(messages=[{"role": "user"}]), "message 0: content"),
        (Prompt(messages=[{"role": "user", "content": [{"type": "video"}]}]), "message 0: a part"),
        (Prompt(messages=[{"role": "user", "content": [{"type": "text", "text": 3}]}]), "message 0: a part"),
    ],
)
def test_malformed_prompts(inputs: InputProcessor, prompt: Prompt | str, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        inputs.process(prompt)


def test_a_bad_image_is_named(inputs: InputProcessor) -> None:
    with pytest.raises(InvalidMediaError, match="200 x 100"):
        inputs.process(Prompt("<image>", [Image.new("RGB", (200, 100))]))


def test_a_template_that_fails_is_the_requests_error(
    inputs: InputProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs._processor, "chat_template", "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match="roles must alternate"):
        inputs.process(Prompt(messages=[{"role": "user", "content": "hi"}]))
    monkeypatch.setattr(inputs._processor, "chat_template", None)
    with pytest.raises(RequestError, match="no chat template"):
        inputs.process(Prompt(messages=[{"role": "user", "content": "hi"}]))


def test_threads_get_their_own_prompts(inputs: InputProcessor) -> None:
    expected = {i: inputs.process(Prompt(f"{i} <image>", [picture(i)])) for i in range(4)}
    wrong: list[int] = []

    def work(number: int) -> None:
        prompt = Prompt(f"{number} <image>", [picture(number)])
        if any(inputs.process(prompt) != expected[number] for _ in range(20)):
            wrong.append(number)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
