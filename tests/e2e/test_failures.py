"""What goes wrong goes wrong alone, says why, and leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from digit_questions import MODEL, ROWS, Counts, Digit, count_up, tokens, total, which
from PIL import Image
from safetensors.torch import load_file, save_file

from ecotone import (
    ConfigError,
    ECConfig,
    EcotoneError,
    Engine,
    InvalidMediaError,
    ItemTooLargeError,
    ModelError,
    PlaceholderError,
    Prompt,
    PromptTooLongError,
    RequestError,
    ResourceError,
    SamplingParams,
    ShutDownError,
    UnsupportedModelError,
)
from ecotone.executor.base import Executor

pytestmark = pytest.mark.e2e

ASK = "USER: <image> What digit is this? ASSISTANT:"


def test_bad_requests_one_by_one_while_others_go_on(cached: Engine, digits: list[Digit], tmp_path: Path) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(digits[0].path.read_bytes()[:200])
    bad: list[tuple[Prompt | str, type[EcotoneError], str]] = [
        (Prompt(ASK, [broken]), InvalidMediaError, "broken.png"),
        (Prompt(ASK, [tmp_path / "missing.png"]), InvalidMediaError, "No such file"),
        (Prompt(ASK, [np.zeros((20_000, 20_000, 3), np.uint8)]), InvalidMediaError, "20000 x 20000"),
        (Prompt(ASK, [Image.new("RGB", (0, 4))]), InvalidMediaError, "0 x 4"),
        (Prompt(ASK, [digits[0].path] * 2), PlaceholderError, "1 <image> placeholders and 2 image inputs"),
        (Prompt(ASK.replace("<image>", ""), [digits[0].path]), PlaceholderError, "0 <image> placeholders"),
        (Prompt("USER: " + "one " * 600), PromptTooLongError, "max_model_len is 512"),
        ("", RequestError, "empty"),
    ]
    expected = tokens(cached.generate([which(digits[1])]))
    with cached.stream(count_up(digits[2]), SamplingParams(max_tokens=60, ignore_eos=True)) as running:
        next(running)
        for prompt, kind, says in bad:
            with pytest.raises(kind, match=says):
                cached.generate(prompt)
            next(running)
            cached.check_integrity()
        outputs = cached.generate([which(digits[1]), *(prompt for prompt, _, _ in bad), which(digits[1])])
    assert [outputs[0].token_ids, outputs[-1].token_ids] == expected * 2
    for output, (_, kind, _) in zip(outputs[1:-1], bad, strict=True):
        assert isinstance(output.error, kind)


def test_an_image_larger_than_the_encoder_budget(make_engine: Callable[..., Engine], digits: list[Digit]) -> None:
    engine = make_engine(encoder_cache_rows=2 * ROWS, encoder_budget_rows=ROWS - 1)
    with pytest.raises(ItemTooLargeError, match=f"{ROWS} encoder rows.* {ROWS - 1}"):
        engine.generate(which(digits[0]))
    assert "seven" in engine.generate("USER: What is three plus four? ASSISTANT:")[0].text


def test_abort_in_the_middle(cached: Engine, digits: list[Digit]) -> None:
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    ids = [cached.add_request(total(digits[i], digits[i + 1]), params) for i in range(4)]
    deltas = cached.step()
    cached.check_integrity()
    assert cached.abort(ids[3])  # it waits: the encoder cache holds two images
    deltas += cached.step()
    assert all(cached.abort(req_id) for req_id in ids[:3])
    cached.check_integrity()
    deltas += cached.step()
    outputs = [delta.output for delta in deltas if delta.output is not None]
    assert sorted(output.request_id for output in outputs) == sorted(ids)
    assert {output.finish_reason for output in outputs} == {"abort"}
    assert not cached.has_unfinished_requests()


def test_an_entry_that_does_not_fit_the_node_is_used_and_not_kept(
    make_engine: Callable[..., Engine], plain: Engine, digits: list[Digit]
) -> None:
    engine = make_engine(ec=ECConfig(options={"memory": "4KiB"}), encoder_cache_rows=2 * ROWS)
    counts = Counts(engine)
    questions = [which(digit) for digit in (*digits[:3], *digits[:3])]
    assert tokens(engine.generate(questions)) == tokens(plain.generate(questions))
    assert counts["saves"] == 0
    assert counts["encodes"] >= 3
    connector = engine.statistics()["connector"]
    assert sum(value for name, value in connector.items() if name.startswith("unsaved.")) == counts["encodes"]


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({"ec": ECConfig(options={"memory": "0GiB"})}, ConfigError, "above 0 bytes"),
        ({"ec": ECConfig(options={"memory": "-1"})}, ConfigError, "not a size in bytes"),
        ({"ec": ECConfig(options={"memory": "900000TiB"})}, (ConfigError, ResourceError), "memory|bytes"),
        ({"ec": ECConfig(options={"memory": "10TiB"})}, (ConfigError, ResourceError), "memory|bytes"),
        ({"ec": ECConfig(options={"evict": "lru"})}, ConfigError, "unknown option 'evict'"),
        ({"ec": ECConfig(connector="Nixl")}, ConfigError, "connector='Nixl'"),
        ({"max_model_len": 4096}, ConfigError, "max_model_len=4096"),
        ({"device": "tpu"}, ConfigError, "device='tpu'"),
        ({"device": "cuda:77"}, ConfigError, "cuda:77"),
        ({"encoder_cache_rows": 0}, ConfigError, "encoder_cache_rows"),
        ({"encoder_cahce_rows": 64}, ConfigError, "unknown option 'encoder_cahce_rows'"),
    ],
)
def test_configurations_that_cannot_work(options: dict[str, object], kind: type[EcotoneError], says: str) -> None:
    before = open_resources()
    with pytest.raises(kind, match=says):
        Engine(MODEL, kv_blocks=16, **options)  # type: ignore[arg-type]
    assert open_resources() == before


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"memory": "64TiB"}, "does not fit"),
        ({"disk": "/proc/ecotone"}, "cannot be made"),
        ({"node": "unix:/nonexistent"}, "nothing is there"),
    ],
)
def test_what_the_machine_does_not_have_is_said_before_a_rank_is_started(
    options: dict[str, object], says: str
) -> None:
    def start(*_: object) -> Executor:
        raise AssertionError("a rank was started")

    with pytest.raises((ConfigError, ResourceError), match=says):
        Engine(MODEL, executor_factory=start, ec=ECConfig(options=options))


def test_model_folders_that_are_none(tmp_path: Path) -> None:
    before = open_resources()
    with pytest.raises(ModelError, match="is not a folder"):
        Engine(tmp_path / "missing")
    with pytest.raises(ModelError, match=r"no config\.json"):
        Engine(tmp_path)
    copy = Path(shutil.copytree(MODEL, tmp_path / "copy"))
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(ModelError, match="copy"):
        Engine(copy)
    config = copy / "config.json"
    config.write_text(config.read_text().replace('"model_type": "llava"', '"model_type": "fuyu"'))
    config.write_text(config.read_text().replace("LlavaForConditionalGeneration", "FuyuForCausalLM"))
    with pytest.raises(UnsupportedModelError):
        Engine(copy)
    assert open_resources() == before


def test_other_weights_never_use_old_encodings(tmp_path: Path) -> None:
    copy = Path(shutil.copytree(MODEL, tmp_path / MODEL.name))
    weights = load_file(copy / "model.safetensors")
    name = next(name for name in weights if name.startswith("multi_modal_projector") and name.endswith("bias"))
    weights[name][0] += 1e-3
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    digests = []
    for folder in (MODEL, copy, MODEL):
        with Engine(folder, kv_blocks=16) as engine:
            digests.append(engine.statistics()["engine"]["namespace"])
    assert digests[0] == digests[2] != digests[1]


def test_nothing_is_held_after_close(digits: list[Digit]) -> None:
    before = open_resources()
    for _ in range(3):
        engine = Engine(MODEL, encoder_cache_rows=2 * ROWS, kv_blocks=64, ec=ECConfig(options={"memory": "1MiB"}))
        engine.generate([which(digit) for digit in (*digits[:4], *digits[:4])])
        stream = engine.stream(count_up(digits[0]))
        next(stream)
        engine.close()
        engine.close()
        with pytest.raises(ShutDownError):
            engine.generate(which(digits[0]))
    assert open_resources() == before


def open_resources() -> tuple[list[str], int]:
    """Threads by name, and how many descriptors and shared mappings this process has open."""
    mappings = Path("/proc/self/maps").read_text().splitlines()
    return (
        sorted(thread.name for thread in threading.enumerate()),
        len(os.listdir("/proc/self/fd")) + sum("memfd:" in line for line in mappings),
    )
