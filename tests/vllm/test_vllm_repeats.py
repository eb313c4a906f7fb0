"""Images that come again: encoded once, and answered as without Ecotone.

vLLM's own encoder cache holds two images of the shipped model, so that what is asked for again after others is not
in it any more. An engine without Ecotone, given the same requests, says what the answers are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from engine_process import EngineProcess, StartEngine, close_all, ecotone

Request = dict[str, Any]
MODELS = ("digits", "qwen3_vl")


class Pair:
    """The same questions to two engines."""

    def __init__(self, plain: EngineProcess, cached: EngineProcess, images: list[str]) -> None:
        self.plain, self.cached = plain, cached
        self._images = images

    def about(self, *numbers: int, text: str = "What digit is this?") -> Request:
        """A request with these images."""
        return {"images": [self._images[number] for number in numbers], "text": text}

    def same_answers(self, *batches: list[Request]) -> tuple[int, int]:
        """Ask both, batch after batch. Returns how many items each of them encoded: without, with Ecotone."""
        before = self.plain.encodes(), self.cached.encodes()
        for batch in batches:
            self.plain.send("generate", requests=batch)
            self.cached.send("generate", requests=batch)
            expected, found = self.plain.answer(), self.cached.answer()
            assert found == expected, batch
        return self.plain.encodes() - before[0], self.cached.encodes() - before[1]


@pytest.fixture(scope="module", params=MODELS)
def pair(
    request: pytest.FixtureRequest, start_engine: StartEngine, images: dict[str, list[str]]
) -> Iterator[Pair]:
    engines = start_engine(request.param), start_engine(request.param, ec=ecotone())
    for engine in engines:
        engine.wait_until_started()
    yield Pair(*engines, images[request.param])
    close_all(engines)


def test_an_image_is_encoded_once(pair: Pair) -> None:
    order = (0, 0, 1, 2, 0, 3, 1, 2, 3, 0)
    plain, cached = pair.same_answers(*([pair.about(number)] for number in order))
    assert cached == 4
    assert plain > 4, "vLLM's own cache held them all: nothing was shown"


def test_requests_beside_each_other_share_one_encode(pair: Pair) -> None:
    first = [pair.about(number) for number in (4, 5, 4, 6)]
    again = [pair.about(number) for number in (5, 6, 7, 4, 7, 5)]
    assert pair.same_answers(first, again)[1] == 4


def test_several_images_in_one_request(pair: Pair) -> None:
    what = "What is the sum of the digits?"
    requests = [pair.about(8, 9, text=what), pair.about(9, 8, text=what), pair.about(10, 11, text=what)]
    again = pair.about(8, 11, text=what)
    assert pair.same_answers(*([request] for request in requests), [again])[1] == 4


def test_an_image_twice_in_one_request(pair: Pair) -> None:
    twice, others = pair.about(12, 12), [pair.about(13), pair.about(14)]
    assert pair.same_answers([twice], others, [twice])[1] == 3


@pytest.mark.parametrize("pair", ["qwen3_vl"], indirect=True)  # a LLaVA request cannot tell a size alone
def test_an_image_that_is_left_out_is_loaded_or_fails_its_request_alone(pair: Pair) -> None:
    def named(number: int, **how: Any) -> Request:
        return {**pair.about(number), "uuids": [f"number {number}"], **how}

    before = pair.cached.encodes()
    told = pair.cached.ask("generate", requests=[named(15)])
    pair.cached.ask("generate", requests=[named(16), named(17), named(18)])  # 15 is vLLM's no more
    answers = pair.cached.ask("generate", requests=[named(15, bare=True), named(19, bare=True), named(16)])
    assert answers[0] == told[0]
    assert answers[1] == [], "an answer without its image"
    assert answers[2] != []
    assert pair.cached.encodes() - before == 4
    assert pair.same_answers([pair.about(20)])[1] == 1  # and the engine goes on


def test_without_images_nothing_is_encoded(pair: Pair) -> None:
    texts = [pair.about(text=text) for text in ("What is three plus four?", "Hello", "What digit is this?")]
    assert pair.same_answers(texts, texts[:1]) == (0, 0)


def test_after_a_weight_update_nothing_old_is_served(pair: Pair) -> None:
    batches = [[pair.about(number)] for number in (15, 16, 17, 15)]
    assert pair.same_answers(*batches)[1] == 3
    before = [pair.cached.ask("generate", requests=batch) for batch in batches]
    for engine in (pair.plain, pair.cached):
        assert min(engine.ask("rpc", method="negate_encoder")) > 0
        engine.ask("reset_encoder_cache")
    assert pair.same_answers(*batches)[1] == 3
    after = [pair.cached.ask("generate", requests=batch) for batch in batches]
    assert after != before, "the update changed no answer: nothing was shown"
    for engine in (pair.plain, pair.cached):
        engine.ask("rpc", method="negate_encoder")
        engine.ask("reset_encoder_cache")
    assert pair.same_answers(*batches)[1] == 3


def test_what_was_done_is_counted(pair: Pair) -> None:
    before = pair.cached.ask("metrics")
    order = (18, 19, 20, 18, 19)
    pair.same_answers(*([pair.about(number)] for number in order))
    after = pair.cached.ask("metrics")
    change = {name: after[name] - before[name] for name in after if name.startswith("ecotone:")}
    assert change["ecotone:misses_total"] == 3
    assert change["ecotone:hits_total"] == 2
    assert change["ecotone:saves_total"] == 3
    assert change["ecotone:views_total"] == 2
    assert not any(name.startswith("ecotone:") for name in pair.plain.ask("metrics"))
