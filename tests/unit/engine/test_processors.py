"""Processors of tiny checkpoints: put together from parts where that is needed, and refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.utils import is_torchvision_available

from ecotone.engine import processors
from ecotone.engine.inputs import InputProcessor, Prompt
from ecotone.engine.processors import load_processor, load_row_token_ids, placeholders
from ecotone.errors import InvalidMediaError, ModelError, PlaceholderError, RequestError, UnsupportedModelError
from ecotone.testing.tiny_models import make_tiny_model

RATE = 16_000
IMAGE = Image.new("RGB", (20, 20), (9, 99, 199))


def clip(seconds: float) -> tuple[np.ndarray[Any, Any], int]:
    return np.sin(np.arange(int(seconds * RATE)) / 30).astype(np.float32), RATE


Folder = Callable[[str], Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    root = tmp_path_factory.mktemp("processors")

    def get(family: str) -> Path:
        return root / family if (root / family).exists() else make_tiny_model(family, root / family)

    return get


@pytest.fixture
def copy(folder: Folder, tmp_path: Path) -> Folder:
    return lambda family: Path(shutil.copytree(folder(family), tmp_path / family))


def edit(file: Path, **changes: object) -> None:
    """Set fields of a JSON file; ``None`` takes one away."""
    content = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


def inputs(path: Path, **options: Any) -> InputProcessor:
    return InputProcessor(path, **{"max_image_pixels": 10_000, **options})


@pytest.mark.skipif(is_torchvision_available(), reason="with torchvision there is nothing missing")
def test_without_torchvision_images_are_all_that_is_seen(folder: Folder) -> None:
    processor = load_processor(folder("qwen2_vl"))
    assert type(processor).__name__ == "Qwen2VLProcessor"
    assert processor.video_processor is None
    assert placeholders(processor) == {"image": "<|image_pad|>", "video": "<|video_pad|>"}
    with pytest.raises(InvalidMediaError, match="videos need torchvision"):
        inputs(folder("qwen2_vl")).process(Prompt("<|video_pad|>", videos=[[IMAGE]]))


def test_the_class_is_found_where_checkpoints_name_it(copy: Folder) -> None:
    path = copy("qwen2_vl")
    edit(path / "processor_config.json", processor_class=None)
    assert type(load_processor(path)).__name__ == "Qwen2VLProcessor"  # from preprocessor_config.json
    for name in ("preprocessor_config.json", "video_preprocessor_config.json", "tokenizer_config.json"):
        edit(path / name, processor_class=None)
    assert type(load_processor(path)).__name__ == "Qwen2VLProcessor"  # from the model's type
    edit(path / "processor_config.json", processor_class="NoSuchProcessor")
    with pytest.raises((ModelError, UnsupportedModelError)):
        load_processor(path)


def test_voxtral_with_the_tokenizer_of_mistral_common_is_refused(copy: Folder) -> None:
    path = copy("voxtral")
    (path / "tokenizer.json").rename(path / "tekken.json")
    with pytest.raises(UnsupportedModelError, match="mistral-common"):
        load_processor(path)


def test_voxtral_takes_a_long_clip_window_by_window(folder: Folder) -> None:
    voxtral = inputs(folder("voxtral"))
    text = "[BEGIN_AUDIO][AUDIO]"
    rows = [voxtral.process(Prompt(text, audio=[clip(seconds)])).items[0].num_rows for seconds in (0.2, 1.0, 1.1)]
    assert rows == [10, 10, 20]  # a window is a second
    with pytest.raises(InvalidMediaError, match="to 3 seconds"):
        inputs(folder("voxtral"), max_audio_seconds=3).process(Prompt(text, audio=[clip(3.1)]))
    chat = voxtral.process(Prompt(messages=[{"role": "user", "content": [{"type": "audio", "audio": clip(0.2)}]}]))
    assert chat.items[0].num_rows == 10


def test_a_clip_is_never_cut_off_silently(folder: Folder) -> None:
    audio = inputs(folder("qwen2_audio"))
    assert (audio.sampling_rate, audio.max_audio_seconds) == (RATE, 1)
    audio.process(Prompt("<|AUDIO|>", audio=[clip(1.0)]))
    with pytest.raises(InvalidMediaError, match=r"1\.01 seconds; from one sample to 1 seconds"):
        audio.process(Prompt("<|AUDIO|>", audio=[clip(1.01)]))


def test_a_modality_the_model_has_not(folder: Folder) -> None:
    audio = inputs(folder("qwen2_audio"))
    assert tuple(audio.placeholders) == ("audio",)
    with pytest.raises(RequestError, match="takes no image, only audio"):
        audio.process(Prompt("<|AUDIO|>", images=[IMAGE], audio=[clip(0.5)]))
    with pytest.raises(RequestError, match="or have the type audio, which this model"):
        audio.process(Prompt(messages=[{"role": "user", "content": [{"type": "image", "image": IMAGE}]}]))
    with pytest.raises(PlaceholderError, match=r"2 <\|AUDIO\|> placeholders and 1 audio inputs"):
        audio.process(Prompt("<|AUDIO|> <|AUDIO|>", audio=[clip(0.5)]))
    with pytest.raises(RequestError, match="audio must be a sequence of audio"):
        audio.process(Prompt("<|AUDIO|>", audio=b"RIFF"))
    with pytest.raises(RequestError, match="videos must be a sequence of videos"):
        audio.process(Prompt("a", videos="a.gif"))


def test_a_clip_too_short_for_a_row_is_refused(folder: Folder) -> None:
    with pytest.raises(InvalidMediaError, match="clip of"):
        inputs(folder("qwen2_audio")).process(Prompt("<|AUDIO|>", audio=[clip(0.0001)]))


def test_a_beginning_that_the_template_wrote_is_not_written_again(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Tokenizer:
        bos_token = "<bos>"

        def __call__(self, text: str, *, add_special_tokens: bool, verbose: bool) -> dict[str, list[int]]:
            return {"input_ids": [1, 2] if add_special_tokens else [2]}

    llava = inputs(folder("llava"))
    monkeypatch.setattr(llava, "tokenizer", Tokenizer())
    assert llava.process("hello").token_ids == (1, 2)
    assert llava.process("<bos>hello").token_ids == (2,)


def test_rows_are_counted_by_the_models_own_token(folder: Folder) -> None:
    """Gemma's processor means the token before the rows."""
    gemma = inputs(folder("gemma3"))
    assert load_processor(folder("gemma3")).image_token_id not in load_row_token_ids(folder("gemma3"))
    [item] = gemma.process(Prompt("<start_of_image>", images=[IMAGE])).items
    assert item.num_rows == item.length == 16
    with pytest.raises(PlaceholderError, match="17 placeholder tokens and its media have 16"):
        gemma.process(Prompt("<start_of_image><image_soft_token>", images=[IMAGE]))


def test_configurations_without_placeholders(copy: Folder) -> None:
    path = copy("llava")
    (path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UnsupportedModelError, match="names no placeholder token"):
        load_row_token_ids(path)
    (path / "config.json").write_text('{"model_type": "unheard of"}')
    with pytest.raises(ModelError, match="configuration cannot be loaded"):
        load_row_token_ids(path)


def test_a_processor_that_makes_no_row_is_refused(folder: Folder) -> None:
    llava = inputs(folder("llava"))
    llava._items._row_token_ids = [0]
    with pytest.raises(InvalidMediaError, match="makes nothing of it"):
        llava.process(Prompt("<image>", images=[IMAGE]))


def test_torchvision_is_looked_for() -> None:
    assert processors.has_torchvision() is is_torchvision_available()
