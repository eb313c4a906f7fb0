"""Every family through the whole engine, on tiny random checkpoints: the prompt is that of the family's own
processor, the tokens are those of transformers' own model, with the cache and without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers.utils import is_torchvision_available

from ecotone import ECConfig, Engine, InputProcessor, PoolingParams, Prompt, RequestError, SamplingParams, Video
from ecotone.engine.video import load_video
from ecotone.errors import ModelError
from ecotone.protocol.step import MultiModalItem
from ecotone.testing.tiny_models import make_tiny_model, tiny_families, tiny_media_text

NEEDS_TORCHVISION = ("mistral3",)  # transformers' processor of this family does not load without it
FAMILIES = [f for f in tiny_families() if is_torchvision_available() or f not in NEEDS_TORCHVISION]
NESTED = ("gemma3", "idefics3", "smolvlm")  # the joint call takes a list of images for each prompt
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)
RATE = 16_000


def picture(seed: int, width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


def tone(seed: int, seconds: float) -> tuple[np.ndarray[Any, Any], int]:
    wave = np.sin(np.arange(int(seconds * RATE)) / (20 + 7 * seed)) + 0.1 * np.random.default_rng(seed).random()
    return wave.astype(np.float32), RATE


# Two of different sizes; the third is for other requests.
IMAGES = [picture(0, 30, 18), picture(1, 21, 40), picture(2, 24, 24)]
CLIPS = [tone(0, 0.5), tone(1, 0.9), tone(2, 0.7)]

Folder = Callable[[str], Path]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    root = tmp_path_factory.mktemp("models")

    def get(family: str) -> Path:
        path = root / family
        return path if path.exists() else make_tiny_model(family, path)

    return get


def modality(family: str) -> str:
    return "image" if "image" in tiny_media_text(family) else "audio"


def prompt(family: str, *which: int) -> Prompt:
    """Text around media."""
    place = tiny_media_text(family)[modality(family)]
    text = "ab" + "".join(f" {place} c{number}" for number in which)
    if modality(family) == "image":
        return Prompt(text, images=[IMAGES[number] for number in which])
    return Prompt(text, audio=[CLIPS[number] for number in which])


def chat(family: str, *which: int) -> Prompt:
    parts = [{"type": modality(family)} for _ in which]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "what?"}]}]
    plain = prompt(family, *which)
    return Prompt(messages=messages, images=plain.images, audio=plain.audio)


def joint_call(inputs: InputProcessor, family: str, asked: Prompt) -> dict[str, torch.Tensor]:
    """What the family's processor makes of all of it at once."""
    if asked.audio:
        clips = {"audio": [samples for samples, _ in asked.audio], "sampling_rate": RATE}
        return dict(inputs._processor(text=[asked.text], return_tensors="pt", **clips))
    images = [list(asked.images)] if family in NESTED else list(asked.images)
    return dict(inputs._processor(text=[asked.text], images=images, return_tensors="pt"))


def tensors_of(items: tuple[MultiModalItem, ...]) -> dict[str, torch.Tensor]:
    return {
        name: torch.cat([torch.from_numpy(item.inputs[name].to_numpy().copy()) for item in items])
        for name in items[0].inputs
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_the_prompt_is_that_of_the_familys_processor(folder: Folder, family: str) -> None:
    inputs = InputProcessor(folder(family), max_image_pixels=10_000)
    asked = prompt(family, 0, 1)
    processed = inputs.process(asked)
    assert [item.modality for item in processed.items] == [modality(family)] * 2
    assert len({item.item_id for item in processed.items}) == 2
    assert [item.item_id for item in inputs.process(chat(family, 1, 0)).items] == [
        item.item_id for item in reversed(processed.items)
    ]
    if family == "voxtral":  # its processor has no call for text with clips
        text = inputs.tokenizer.decode(processed.token_ids)
        assert text == asked.text.replace("[AUDIO]", "[AUDIO]" * 10)
        return
    joint = joint_call(inputs, family, asked)
    assert list(processed.token_ids) == joint["input_ids"][0].tolist()
    if family not in ("idefics3", "smolvlm", "mistral3"):  # these pad the smaller of several images
        for name, tensor in tensors_of(processed.items).items():
            assert torch.equal(tensor, joint[name]), name


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_transformers_with_and_without_the_cache(folder: Folder, family: str) -> None:
    path = folder(family)
    asked = [prompt(family, 0, 1), prompt(family, 2, 0), chat(family, 1), Prompt("only text")]
    with Engine(path, kv_blocks=128) as plain:
        expected = [output.token_ids for output in plain.generate(asked, GREEDY)]
    assert len(set(expected)) == len(expected)
    assert expected[0] == reference(path, family, asked[0])

    rows = max(item.num_rows for item in InputProcessor(path, max_image_pixels=10_000).process(asked[1]).items)
    options: dict[str, Any] = {"encoder_cache_rows": 2 * rows, "max_num_batched_tokens": 64, "kv_blocks": 128}
    with Engine(path, ec=ECConfig(options={"memory": "4MiB"}), **options) as engine:
        for _ in range(2):  # the encoder cache holds two of the three media: what comes back is loaded
            for one, tokens in zip(asked, expected, strict=True):
                [output] = engine.generate(one, GREEDY)
                assert output.token_ids == tokens
                assert engine.settle()
        statistics = engine.statistics()
        engine.check_integrity()
    assert statistics["ranks"][0]["encodes"] == 3
    assert statistics["scheduler"]["loads_ordered"] >= 2


def reference(path: Path, family: str, asked: Prompt) -> tuple[int, ...]:
    """Greedy tokens of transformers' own model."""
    inputs = InputProcessor(path, max_image_pixels=10_000)
    if family != "voxtral":
        return generated(path, joint_call(inputs, family, asked))
    processed = inputs.process(asked)
    return generated(path, {"input_ids": torch.tensor([processed.token_ids]), **tensors_of(processed.items)})


def generated(path: Path, arguments: dict[str, torch.Tensor]) -> tuple[int, ...]:
    config = transformers.AutoConfig.from_pretrained(path)
    model = getattr(transformers, config.architectures[0]).from_pretrained(path).eval()
    with torch.no_grad():
        tokens = model.generate(**arguments, max_new_tokens=8, min_new_tokens=8, do_sample=False, pad_token_id=0)
    return tuple(tokens[0, arguments["input_ids"].shape[1] :].tolist())


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "qwen2_audio"])
@pytest.mark.parametrize("pooling", ["last", "mean", "token"])
def test_embeddings_are_transformers_hidden_states(folder: Folder, family: str, pooling: str) -> None:
    path = folder(family)
    asked = prompt(family, 0, 1)
    params = PoolingParams(pooling=pooling, normalize=pooling != "token")
    with Engine(path, task="embed", max_num_batched_tokens=48, kv_blocks=64) as engine:
        whole, other = engine.embed([asked, prompt(family, 2)], params)
    inputs = InputProcessor(path, max_image_pixels=10_000)
    config = transformers.AutoConfig.from_pretrained(path)
    model = getattr(transformers, config.architectures[0]).from_pretrained(path).eval()
    with torch.no_grad():
        hidden = model(**joint_call(inputs, family, asked), output_hidden_states=True).hidden_states[-1][0]
    want = {"last": hidden[-1], "mean": hidden.mean(dim=0), "token": hidden}[pooling]
    if params.normalize:
        want = want / want.norm()
    assert whole.embedding is not None
    assert other.embedding is not None
    np.testing.assert_allclose(whole.embedding, want.numpy(), atol=2e-5)
    assert np.abs(whole.embedding[..., -1] - other.embedding[..., -1:]).max() > 1e-3


def test_several_outputs_share_the_encodings(folder: Folder) -> None:
    params = SamplingParams(n=3, temperature=1.5, seed=4, max_tokens=6, ignore_eos=True)
    with Engine(folder("qwen2_vl"), kv_blocks=128) as engine:
        [output] = engine.generate(prompt("qwen2_vl", 0, 1), params)
        [alone] = engine.generate(prompt("qwen2_vl", 0, 1), SamplingParams(**{**as_dict(params), "n": 1}))
        assert engine.statistics()["ranks"][0]["encodes"] == 2
    assert output.token_ids == alone.token_ids
    assert len({sample.token_ids for sample in output.samples}) == 3


def as_dict(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in params.__struct_fields__}


def test_penalties_and_early_stops_reach_the_sampler(folder: Folder) -> None:
    with Engine(folder("llava"), kv_blocks=64) as engine:
        asked = prompt("llava", 0)
        [free] = engine.generate(asked, SamplingParams(max_tokens=30, ignore_eos=True))
        assert len(set(free.token_ids)) < 30
        [varied] = engine.generate(
            asked, SamplingParams(max_tokens=30, ignore_eos=True, presence_penalty=2.0, repetition_penalty=100.0)
        )
        assert len(set(varied.token_ids)) == 30
        first = free.token_ids[0]
        [stopped] = engine.generate(asked, SamplingParams(stop_token_ids=(first,)))
        assert (stopped.token_ids, stopped.finish_reason, stopped.stop_reason) == ((first,), "stop", first)
        [later] = engine.generate(asked, SamplingParams(stop_token_ids=(first,), min_tokens=5, max_tokens=9))
        assert first not in later.token_ids[:5]
        assert len(later.token_ids) >= 5


@pytest.mark.skipif(is_torchvision_available(), reason="with torchvision there is nothing missing")
@pytest.mark.parametrize("family", [f for f in FAMILIES if "video" in tiny_media_text(f)])
def test_a_video_without_torchvision_is_refused_by_name(folder: Folder, family: str) -> None:
    inputs = InputProcessor(folder(family), max_image_pixels=10_000)
    asked = Prompt(tiny_media_text(family)["video"], videos=[Video([IMAGES[2], IMAGES[2]])])
    with pytest.raises(RequestError, match="torchvision"):
        inputs.process(asked)


@pytest.mark.skipif(not is_torchvision_available(), reason="video processors need torchvision")
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl"])
def test_videos_and_images_in_one_prompt(folder: Folder, family: str) -> None:
    media = tiny_media_text(family)
    frames = [picture(seed, 24, 24) for seed in range(4)]
    text = f"a {media['image']} b {media['video']} c {media['image']}"
    inputs = InputProcessor(folder(family), max_image_pixels=10_000)
    asked = Prompt(text, images=IMAGES[:2], videos=[Video(frames, fps=2.0)])
    processed = inputs.process(asked)
    assert [item.modality for item in processed.items] == ["image", "video", "image"]
    fewer = inputs.process(Prompt(text, images=IMAGES[:2], videos=[Video(frames[::2], fps=1.0)]))
    assert [a.item_id == b.item_id for a, b in zip(processed.items, fewer.items, strict=True)] == [
        True,
        False,
        True,
    ]
    medium = load_video(Video(frames, fps=2.0), max_pixels=10_000, max_frames=9)
    joint = dict(inputs._processor(text=[text], images=IMAGES[:2], return_tensors="pt", **medium.arguments))
    assert list(processed.token_ids) == joint["input_ids"][0].tolist()
    with Engine(folder(family), kv_blocks=128, ec=ECConfig(options={"memory": "4MiB"})) as engine:
        [output] = engine.generate(asked, GREEDY)
        [again] = engine.generate(asked, GREEDY)
    assert output.token_ids == again.token_ids == generated(folder(family), joint)


@pytest.mark.skipif(not is_torchvision_available(), reason="video processors need torchvision")
def test_a_video_whose_frames_have_text_between_them(folder: Folder) -> None:
    path, video = folder("smolvlm"), Video([picture(seed, 24, 24) for seed in range(4)])
    inputs = InputProcessor(path, max_image_pixels=10_000)
    asked = Prompt("a <video> b", videos=[video])
    medium = load_video(video, max_pixels=10_000, max_frames=9)
    joint = dict(inputs._processor(text=[asked.text], return_tensors="pt", **medium.arguments))
    [item] = inputs.process(asked).items
    assert (item.num_rows, item.length > 2 * item.num_rows) == (16, True)
    with Engine(path, max_num_batched_tokens=30, kv_blocks=64) as engine:
        [output] = engine.generate(asked, GREEDY)
    assert output.token_ids == generated(path, joint)


@pytest.mark.parametrize("family", NEEDS_TORCHVISION if not is_torchvision_available() else ())
def test_a_processor_that_needs_torchvision_says_so(folder: Folder, family: str) -> None:
    with pytest.raises(ModelError, match="Torchvision"):
        InputProcessor(folder(family), max_image_pixels=10_000)
