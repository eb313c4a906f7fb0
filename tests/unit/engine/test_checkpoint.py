"""Model folders and preprocessed items: recognised, told apart, and bounded in memory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tiny_processor import IMAGE_TOKEN_ID, build_folder, build_processor

from ecotone.engine.checkpoint import check_model_folder
from ecotone.engine.items import ItemProcessor
from ecotone.engine.medium import image_medium
from ecotone.engine.processors import load_processor
from ecotone.errors import InvalidMediaError, ModelError, UnsupportedModelError
from ecotone.node import identity
from ecotone.node.identity import runtime, weights_digest

ROW_TOKEN_IDS = [IMAGE_TOKEN_ID]


@pytest.fixture(scope="module")
def processor_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_folder(tmp_path_factory.mktemp("processor"))


@pytest.fixture
def folder(processor_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(processor_folder, tmp_path / "copy"))


def test_folders_that_are_no_checkpoint(folder: Path, tmp_path: Path) -> None:
    assert check_model_folder(str(folder)) == folder
    with pytest.raises(ModelError, match="'no/where' is not a folder"):
        check_model_folder("no/where")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="no weights"):
        check_model_folder(str(folder))
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"no config\.json"):
        check_model_folder(str(folder))


def test_digest_follows_the_bytes_and_not_the_place(processor_folder: Path, folder: Path) -> None:
    digest = weights_digest(processor_folder)
    assert weights_digest(folder) == digest
    (folder / "README.md").write_text("about")
    assert weights_digest(folder) == digest
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    changed = weights_digest(folder)
    assert changed != digest
    (folder / "config.json").write_text("{}")
    assert weights_digest(folder) not in (changed, digest)


def test_digest_sees_which_file_holds_what(folder: Path) -> None:
    (folder / "a.safetensors").write_bytes(b"x")
    (folder / "b.safetensors").write_bytes(b"y")
    digest = weights_digest(folder)
    (folder / "a.safetensors").write_bytes(b"y")
    (folder / "b.safetensors").write_bytes(b"x")
    assert weights_digest(folder) != digest


@pytest.mark.parametrize("broken", ["tokenizer.json", "processor_config.json"])
def test_a_broken_processor_is_the_models_fault(folder: Path, broken: str) -> None:
    (folder / broken).write_text("{")
    with pytest.raises(ModelError, match="processor cannot be loaded"):
        load_processor(folder)


def test_a_processor_without_images_is_unsupported(folder: Path) -> None:
    (folder / "processor_config.json").unlink()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    options = json.loads((folder / "tokenizer_config.json").read_text())
    del options["processor_class"]
    (folder / "tokenizer_config.json").write_text(json.dumps(options))
    with pytest.raises(UnsupportedModelError, match="takes no media"):
        load_processor(folder)


def test_other_options_make_another_item_of_the_same_image() -> None:
    image = image_medium(Image.fromarray(np.full((8, 8, 3), 128, np.uint8)))
    plain, again = ItemProcessor(build_processor(), ROW_TOKEN_IDS), ItemProcessor(build_processor(), ROW_TOKEN_IDS)
    # The pixels of a uniform image come out the same, whichever way it was resized.
    other = ItemProcessor(build_processor(resample=0), ROW_TOKEN_IDS)
    assert plain.options == again.options != other.options
    assert plain.process(image).item.item_id == again.process(image).item.item_id
    assert plain.process(image).item.inputs == other.process(image).item.inputs
    assert plain.process(image).item.item_id != other.process(image).item.item_id


def test_remembered_items_are_bounded_in_bytes() -> None:
    images = [image_medium(Image.fromarray(np.full((8, 8, 3), value, np.uint8))) for value in range(4)]
    one = 3 * 8 * 8 * 4
    items = ItemProcessor(build_processor(), ROW_TOKEN_IDS, cache_bytes=2 * one)
    first = items.process(images[0])
    assert first.nbytes == one
    assert items.process(images[1]) is items.process(images[1])
    assert items.process(images[0]) is first
    items.process(images[2])  # drops 1, the least recently used
    assert items.process(images[0]) is first
    dropped = items.process(images[1])
    assert items.process(images[1]) is dropped
    assert items.process(images[2]) is items.process(images[2])


def test_an_item_larger_than_the_cache_is_still_processed() -> None:
    items = ItemProcessor(build_processor(), ROW_TOKEN_IDS, cache_bytes=1)
    images = [image_medium(Image.fromarray(np.full((8, 8, 3), value, np.uint8))) for value in range(2)]
    ids = [items.process(image).item.item_id for image in images]
    assert len(set(ids)) == 2


def test_what_the_models_processor_refuses_is_bad_media() -> None:
    processor = build_processor()
    processor.image_processor.size = {"height": -1, "width": 8}
    with pytest.raises(InvalidMediaError, match="8 x 8 pixels: the model's processor"):
        ItemProcessor(processor, ROW_TOKEN_IDS).process(image_medium(Image.new("RGB", (8, 8))))


def test_a_folder_built_twice_has_one_digest(processor_folder: Path, tmp_path: Path) -> None:
    assert weights_digest(build_folder(tmp_path / "again")) == weights_digest(processor_folder)


def test_an_upgrade_is_another_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    before = runtime()
    assert "transformers 5." in before
    monkeypatch.setattr(identity, "version", lambda name: "99.0" if name == "transformers" else "1")
    assert runtime() == "torch 1, transformers 99.0" != before
