"""A region with room for few images, and an image larger than the whole of it: answers stay right."""

from __future__ import annotations

from engine_process import EngineProcess, StartEngine, close_all, ecotone
from PIL import Image

REGION = 16 << 10  # bytes; a row of the Qwen model takes 1 KiB
ROUNDS = 2


def rows(path: str) -> int:
    """Of the Qwen model's: one for 8 x 8 pixels."""
    with Image.open(path) as image:
        return image.width * image.height // 64


def answers(engine: EngineProcess, order: list[str]) -> list[list[int]]:
    requests = [{"images": [image], "text": "What is this?"} for image in order]
    return [engine.ask("generate", requests=[request])[0] for request in requests]


def test_answers_with_little_room(start_engine: StartEngine, images: dict[str, list[str]]) -> None:
    plain = start_engine("qwen3_vl")
    cached = start_engine("qwen3_vl", ec=ecotone(memory=REGION))
    for engine in (plain, cached):
        engine.wait_until_started()
    small = [path for path in images["qwen3_vl"] if rows(path) <= 6]
    large = [path for path in images["qwen3_vl"] if rows(path) > 16]
    assert small
    assert large
    order = [*large[:2], *small[:6], *large[:2]] * ROUNDS
    assert answers(cached, order) == answers(plain, order)
    metrics = cached.ask("metrics")
    assert metrics["ecotone:unsaved_total"] >= len(large[:2])
    assert metrics["ecotone:hits_total"] + metrics["ecotone:misses_total"] >= len(order) - 2
    before = cached.encodes()
    again = [small[0], large[0], small[0], large[0]]
    assert answers(cached, again) == answers(plain, again)
    assert cached.encodes() - before <= 3, "a small image still has its place"
    close_all((plain, cached))
