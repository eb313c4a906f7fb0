"""Answers are right, the same with and without the cache, and each image is encoded once."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
from digit_questions import ROWS, WORDS, Counts, Digit, count_up, tokens, total, which
from PIL import Image

from ecotone import ECConfig, Engine, PoolingParams, Prompt, SamplingParams

pytestmark = pytest.mark.e2e


def test_answers_are_right(cached: Engine, digits: list[Digit]) -> None:
    outputs = cached.generate([which(digit) for digit in digits])
    right = sum(o.text == f" The digit is {WORDS[d.label]}." for o, d in zip(outputs, digits, strict=True))
    assert right >= 0.95 * len(digits)


def test_each_image_is_encoded_once_and_the_answers_are_the_same(
    cached: Engine, plain: Engine, digits: list[Digit]
) -> None:
    chosen = digits[:8]
    questions = [
        *(which(digit) for digit in chosen),
        *(total(chosen[i], chosen[(i + 3) % 8]) for i in range(8)),
        *(count_up(digit) for digit in chosen),
    ]
    with_cache, without = Counts(cached), Counts(plain)
    params = SamplingParams(max_tokens=40)
    answers = [cached.generate([question], params) for question in questions]
    assert [tokens(a) for a in answers] == [tokens(plain.generate([question], params)) for question in questions]
    assert with_cache["encodes"] == with_cache["saves"] == len(chosen)
    assert with_cache["loads"] > len(chosen)
    assert without["encodes"] > 2 * len(chosen)
    assert without["loads"] == without["saves"] == 0


def test_all_at_once_gives_what_one_by_one_gives(cached: Engine, plain: Engine, digits: list[Digit]) -> None:
    questions = [*(which(d) for d in digits[:6]), *(total(digits[i], digits[5 - i]) for i in range(6))]
    counts = Counts(cached)
    together = tokens(cached.generate(questions))
    assert together == [tokens(plain.generate([question]))[0] for question in questions]
    assert counts["encodes"] == 6


def test_the_same_image_twice_in_one_prompt(cached: Engine, digits: list[Digit]) -> None:
    counts = Counts(cached)
    [output] = cached.generate([total(digits[4], digits[4])])
    assert output.text == f" The sum is {WORDS[2 * digits[4].label]}."
    assert counts["encodes"] == 1


def test_metrics_say_where_the_encoding_came_from(cached: Engine, digits: list[Digit]) -> None:
    seen = []
    for digit in (digits[0], digits[0], digits[1], digits[2], digits[3], digits[0]):
        [output] = cached.generate([which(digit)])
        assert output.metrics is not None
        seen.append((output.metrics.num_encoded, output.metrics.num_loaded, output.metrics.num_cached))
        assert cached.settle()
    assert seen == [(1, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 0), (1, 0, 0), (0, 1, 0)]


def test_pixels_decide_and_not_the_file(cached: Engine, digits: list[Digit]) -> None:
    counts = Counts(cached)
    with Image.open(digits[7].path) as image:
        pixels = np.asarray(image.convert("RGB"))
    texts = [
        cached.generate([Prompt("USER: <image> What digit is this? ASSISTANT:", [source])])[0].text
        for source in (digits[7].path, digits[7].path.read_bytes(), pixels)
    ]
    assert len(set(texts)) == 1
    assert counts["encodes"] == 1


def test_text_alone(cached: Engine) -> None:
    [output] = cached.generate(["USER: What is three plus four? ASSISTANT:"])
    assert "seven" in output.text


def test_chat_messages(cached: Engine, digits: list[Digit]) -> None:
    content = [{"type": "image", "image": digits[5].path}, {"type": "text", "text": "What digit is this?"}]
    [output] = cached.generate([Prompt(messages=[{"role": "user", "content": content}])])
    assert output.text == f" The digit is {WORDS[digits[5].label]}."


def test_reset_encodes_again(cached: Engine, digits: list[Digit]) -> None:
    counts = Counts(cached)
    first = tokens(cached.generate([which(digits[0])]))
    cached.reset_encoder_cache()
    assert tokens(cached.generate([which(digits[0])])) == first
    assert counts["encodes"] == 2
    assert counts["loads"] == 0


def test_reset_while_a_request_runs(cached: Engine, digits: list[Digit]) -> None:
    expected = tokens(cached.generate([count_up(digits[3])]))
    with cached.stream(count_up(digits[3])) as stream:
        first = next(stream)
        cached.reset_encoder_cache()
        rest = list(stream)
    assert [*first.token_ids, *(t for delta in rest for t in delta.token_ids)] == list(expected[0])


def test_a_seed_gives_the_same_tokens_whatever_else_runs(cached: Engine, digits: list[Digit]) -> None:
    params = SamplingParams(max_tokens=12, temperature=3.0, seed=11, ignore_eos=True)
    alone = tokens(cached.generate([which(digits[0])], params))
    crowd = cached.generate([which(d) for d in digits[:6]], [params, *[SamplingParams(temperature=2.0)] * 5])
    assert [crowd[0].token_ids] == alone
    other = tokens(cached.generate([which(digits[0])], SamplingParams(max_tokens=12, temperature=3.0, seed=12)))
    assert other != alone


def test_stop_strings_and_logprobs(cached: Engine, digits: list[Digit]) -> None:
    params = SamplingParams(max_tokens=40, stop=("git is",), logprobs=3)
    [output] = cached.generate([which(digits[0])], params)
    assert (output.text, output.stop_reason) == (" The di", "git is")
    assert len(output.logprobs) == len(output.token_ids)
    for token_id, entry in zip(output.token_ids, output.logprobs, strict=True):
        assert entry.top_ids.to_numpy()[0] == token_id  # greedy
        assert entry.sampled == pytest.approx(float(entry.top_logprobs.to_numpy()[0]), abs=1e-5)


def test_threads(cached: Engine, plain: Engine, digits: list[Digit]) -> None:
    questions = [[which(digits[(n + i) % 6]) for i in range(4)] for n in range(4)]
    expected = [tokens(plain.generate(batch)) for batch in questions]
    counts = Counts(cached)
    found: dict[int, object] = {}

    def work(number: int) -> None:
        found[number] = tokens(cached.generate(questions[number]))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[n] for n in range(4)] == expected
    assert counts["encodes"] == 6


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 7},  # chunks cut through images
        {"kv_blocks": 6, "max_num_seqs": 8},  # requests are preempted
        {"encoder_cache_rows": ROWS},  # one image at a time
        {"max_num_batched_tokens": 9, "encoder_cache_rows": 2 * ROWS, "encoder_budget_rows": ROWS},
        {"ec": ECConfig(options={"memory": "24KiB"})},  # two encodings in the node
        {"ec": ECConfig(options={"memory": "1MiB", "load": "copy"}), "encoder_cache_rows": 2 * ROWS},
        {"ec": ECConfig(role="ec_consumer", options={"memory": "1MiB"})},
    ],
    ids=["chunked", "preempted", "one-image", "tight", "small-node", "copied", "consumer"],
)
def test_any_limit_gives_the_same_answers(
    make_engine: Callable[..., Engine], plain: Engine, digits: list[Digit], options: dict[str, object]
) -> None:
    questions = [
        *(count_up(digit) for digit in digits[:4]),
        *(total(digits[i], digits[i + 1]) for i in range(4) if options.get("encoder_cache_rows") != ROWS),
        *(which(digit) for digit in digits[:4]),
    ]
    params = SamplingParams(max_tokens=30)
    expected = tokens(plain.generate(questions, params))
    engine = make_engine(**options)
    counts = Counts(engine)
    assert tokens(engine.generate(questions, params)) == expected
    assert tokens(engine.generate(questions[::-1], params)) == expected[::-1]
    assert (counts["preemptions"] > 0) == ("kv_blocks" in options)
    if engine.config.ec is not None and engine.config.ec.role == "ec_consumer":
        assert counts["saves"] == 0


def test_an_engine_that_only_encodes_stores_every_image_once(
    make_engine: Callable[..., Engine], digits: list[Digit]
) -> None:
    engine = make_engine(ec=ECConfig(role="ec_producer", options={"memory": "1MiB"}))
    counts = Counts(engine)
    for _ in range(2):
        outputs = engine.generate([total(digits[0], digits[1]), which(digits[2])])
        assert [(o.finish_reason, o.token_ids) for o in outputs] == [("stop", ())] * 2
    assert counts["encodes"] == counts["saves"] == 3


def test_embeddings(make_engine: Callable[..., Engine], digits: list[Digit]) -> None:
    options = {"task": "embed", "encoder_cache_rows": 2 * ROWS}
    engine, reference = make_engine(**options), make_engine(**options, ec=None)
    prompts = [which(digit) for digit in digits[:5]]
    counts = Counts(engine)
    for pooling in ("last", "mean"):
        params = PoolingParams(pooling=pooling)  # type: ignore[arg-type]
        vectors = [o.embedding for o in engine.embed(prompts, params)]
        expected = [o.embedding for o in reference.embed(prompts, params)]
        for vector, other in zip(vectors, expected, strict=True):
            assert vector is not None
            assert other is not None
            assert np.linalg.norm(vector) == pytest.approx(1.0, abs=1e-5)
            assert np.allclose(vector, other, atol=1e-5)
        assert vectors[0] is not None
        assert vectors[1] is not None
        assert np.abs(vectors[0] - vectors[1]).max() > 1e-3
    assert counts["encodes"] == 5
    assert counts["loads"] >= 3
