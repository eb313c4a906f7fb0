"""Encoder rows computed apart and put in place give the logits of the plain forward, however the step is cut."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from model_cases import (
    IMAGE,
    TEXT,
    Family,
    Request,
    difference,
    encode_one_by_one,
    image_request,
    llava,
    new_kv,
    prefill,
    reference_logits,
    run_step,
    text,
)
from PIL import Image

from ecotone.errors import UnsupportedModelError
from ecotone.protocol.arrays import Array
from ecotone.protocol.step import MultiModalItem
from ecotone.worker.models import ModelAdapter

# Rounding, where a matmul has another number of rows than in the reference. Wrong rows or positions move logits
# by more than MOVED.
ROUNDING = 1e-5
MOVED = 0.1


def prepared(family: Family, seed: int = 0, blocks: Any = range(16)) -> Request:
    request = image_request(seed)
    request.rows = encode_one_by_one(family.adapter, request)
    request.blocks = list(blocks)
    return request


def digits_request(family: Family, processor: Any, folder: Path, names: list[str], question: str) -> Request:
    pictures = [Image.open(folder / "images" / name) for name in names]
    prompt = f"USER: {'<image>' * len(names)} {question} ASSISTANT:"
    inputs = processor(text=[prompt], images=pictures, return_tensors="pt")
    ids = inputs["input_ids"][0].tolist()
    first = ids.index(family.reference.config.image_token_id)
    items = [
        MultiModalItem(
            modality="image",
            item_id=name,
            offset=first + 16 * i,
            num_rows=16,
            inputs={"pixel_values": Array.from_numpy(inputs["pixel_values"][i : i + 1].numpy())},
        )
        for i, name in enumerate(names)
    ]
    return Request(ids, items, blocks=range(16), reference_inputs={"pixel_values": inputs["pixel_values"]})


@pytest.fixture
def sum_request(digits: Family, processor: Any, digits_folder: Path) -> Request:
    return digits_request(
        digits, processor, digits_folder, ["digit3_0.png", "digit4_0.png"], "What is the sum of the digits?"
    )


def test_shipped_model_same_batch_is_exact(digits: Family, sum_request: Request) -> None:
    sum_request.rows = digits.adapter.encode(sum_request.items)  # type: ignore[assignment]
    got = prefill(digits.adapter, new_kv(digits.adapter), sum_request)
    assert difference(got, reference_logits(digits.reference, sum_request)) == 0


@pytest.mark.parametrize("chunk", [None, 1, 7, 20])
def test_shipped_model_in_chunks(digits: Family, sum_request: Request, chunk: int | None) -> None:
    sum_request.rows = encode_one_by_one(digits.adapter, sum_request)
    got = prefill(digits.adapter, new_kv(digits.adapter), sum_request, chunk)
    want = reference_logits(digits.reference, sum_request)
    assert difference(got, want) <= ROUNDING
    assert torch.equal(got.argmax(-1), want.argmax(-1))


def test_shipped_model_answers_from_the_images(digits: Family, processor: Any, digits_folder: Path) -> None:
    """A wrong encoding changes the answer: what makes the shipped model worth testing with."""
    answers = []
    for swap in (False, True):
        request = digits_request(digits, processor, digits_folder, ["digit7_0.png"], "What digit is this?")
        other = digits_request(digits, processor, digits_folder, ["digit2_0.png"], "What digit is this?")
        request.rows = encode_one_by_one(digits.adapter, other if swap else request)
        kv = new_kv(digits.adapter)
        last = prefill(digits.adapter, kv, request, chunk=9)[-1]
        while int(last.argmax()) not in digits.adapter.info.eos_token_ids:
            request.ids.append(int(last.argmax()))
            last = run_step(digits.adapter, kv, [(request, 1)])[0][-1]
        answers.append(processor.tokenizer.decode(request.ids[len(request.prompt) :]).strip())
    assert answers == ["The digit is seven.", "The digit is two."]


def test_same_batch_is_exact(family: Family) -> None:
    request = prepared(family)
    request.rows = family.adapter.encode(request.items)  # type: ignore[assignment]
    got = prefill(family.adapter, new_kv(family.adapter), request)
    assert difference(got, reference_logits(family.reference, request)) == 0


@pytest.mark.parametrize("chunk", [None, 1, 7])
def test_rows_of_single_items_in_chunks(family: Family, chunk: int | None) -> None:
    request = prepared(family)
    got = prefill(family.adapter, new_kv(family.adapter), request, chunk)
    assert difference(got, reference_logits(family.reference, request)) <= ROUNDING


def test_three_requests_in_one_step(family: Family) -> None:
    """Chunks of images, text alone and decoding beside each other, each joining at another time, in blocks that
    lie scattered."""
    adapter, kv = family.adapter, new_kv(family.adapter, 64)
    requests = [
        prepared(family, 0, range(40, 0, -2)),
        prepared(family, 10, range(1, 41, 2)),
        Request(text(23, 5), blocks=[63, 50, 61, 44, 59, 42]),
    ]
    got: list[list[torch.Tensor]] = [[], [], []]
    for step in range(60):
        work = []
        for index, request in enumerate(requests):
            left = len(request.prompt) - request.computed
            if step < index or len(request.ids) >= len(request.prompt) + 6:
                continue
            if left <= 0:
                request.ids.append(int(got[index][-1][-1].argmax()))
            work.append((index, min(left, 9 + index) if left > 0 else 1))
        if not work:
            break
        logits = run_step(adapter, kv, [(requests[index], count) for index, count in work])
        for (index, _), part in zip(work, logits, strict=True):
            got[index].append(part)
    for request, parts in zip(requests, got, strict=True):
        assert len(request.ids) == len(request.prompt) + 6
        want = reference_logits(family.reference, request)
        assert difference(torch.cat(parts), want) <= ROUNDING


def test_blocks_are_used_again(tiny: Family) -> None:
    """What an earlier request left in a block is never seen."""
    kv = new_kv(tiny.adapter, 8)
    for seed in (1, 2, 3):
        request = prepared(tiny, seed, [6, 1, 4, 0, 7, 3, 2, 5])
        got = prefill(tiny.adapter, kv, request, chunk=10 + seed)
        assert difference(got, reference_logits(tiny.reference, request)) <= ROUNDING


def test_mixed_up_blocks_are_noticed(tiny: Family) -> None:
    """The test of the tests above: two requests in the same blocks do spoil each other."""
    kv = new_kv(tiny.adapter)
    first, second = prepared(tiny, 1), prepared(tiny, 2)
    run_step(tiny.adapter, kv, [(first, 20)])
    run_step(tiny.adapter, kv, [(second, 20)])
    got = run_step(tiny.adapter, kv, [(first, 10)])[0]
    assert difference(got, reference_logits(tiny.reference, first)[20:30]) > MOVED


def shifted(request: Request) -> None:
    request.rows[0] = request.rows[0].roll(1, 0)


def zeroed(request: Request) -> None:
    request.rows[1] = torch.zeros_like(request.rows[1])


def swapped(request: Request) -> None:
    request.rows.reverse()


@pytest.mark.parametrize("mutate", [shifted, zeroed, swapped])
def test_wrong_rows_are_noticed(family: Family, mutate: Any) -> None:
    request = prepared(family)
    mutate(request)
    got = prefill(family.adapter, new_kv(family.adapter), request, chunk=8)
    assert difference(got, reference_logits(family.reference, request)) > MOVED


@pytest.mark.parametrize("mutate", [shifted, zeroed, swapped])
def test_wrong_rows_are_noticed_by_the_shipped_model(digits: Family, sum_request: Request, mutate: Any) -> None:
    sum_request.rows = encode_one_by_one(digits.adapter, sum_request)
    mutate(sum_request)
    got = prefill(digits.adapter, new_kv(digits.adapter), sum_request)
    assert difference(got, reference_logits(digits.reference, sum_request)) > MOVED


def test_wrong_positions_are_noticed(family: Family) -> None:
    request = prepared(family)
    got = prefill(family.adapter, new_kv(family.adapter), request, change_positions=lambda p: p * 2)
    assert difference(got, reference_logits(family.reference, request)) > MOVED


def test_positions_are_those_of_the_tokens(tiny: Family) -> None:
    positions, delta = tiny.adapter.positions(text(9, 0), [])
    assert positions.tolist() == [list(range(9))]
    assert delta == 0


def test_placeholders_outside_the_table(tiny: Family) -> None:
    adapter = tiny.adapter
    ids = torch.tensor([7, IMAGE, 8])
    assert adapter.placeholder_mask(ids).tolist() == [False, True, False]
    table = tiny.reference.get_input_embeddings().weight
    assert torch.equal(adapter.embed_tokens(ids), table[ids])  # one that was generated is a token like any other
    model = Family.make("llava").reference
    model.config.image_token_id = 10_000
    wide = ModelAdapter(model, max_model_len=512)
    assert torch.equal(wide.embed_tokens(torch.tensor([10_000, 7]))[1], table[7])
    with pytest.raises(IndexError):
        wide.embed_tokens(torch.tensor([10_001]))


def test_no_graph_is_recorded(tiny: Family) -> None:
    request = prepared(tiny)
    logits = prefill(tiny.adapter, new_kv(tiny.adapter), request)
    assert not logits.requires_grad
    assert not any(rows.requires_grad or rows.is_inference() for rows in request.rows)


def test_logits_are_float32_and_capped() -> None:
    model = Family.make("llava").reference.to(torch.bfloat16)
    adapter = ModelAdapter(model, max_model_len=512)
    hidden = torch.randn(3, 32, dtype=torch.bfloat16)
    assert adapter.logits(hidden).dtype == torch.float32
    assert adapter.logits(hidden[:0]).shape == (0, adapter.info.vocab_size)
    model.config.text_config.final_logit_softcapping = 0.5
    capped = ModelAdapter(model, max_model_len=512).logits(hidden)
    assert capped.abs().max() <= 0.5
    assert torch.equal(capped, torch.tanh(adapter.logits(hidden) / 0.5) * 0.5)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"attn_logit_softcapping": 30.0}, "soft-caps attention scores"),
        ({"use_bidirectional_attention": True}, "lets text see the text after it"),
        ({"num_kv_shared_layers": 1}, "share keys and values"),
        ({"hidden_size_per_layer_input": 8}, "takes an input for each token in every layer"),
        ({"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "layers of linear_attention"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic rotary positions"),
        ({"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}, "longrope rotary positions"),
    ],
)
def test_a_language_model_that_would_be_wrong_is_refused(change: dict[str, Any], reason: str) -> None:
    model = Family.make("llava").reference
    for name, value in change.items():
        setattr(model.config.text_config, name, value)
    with pytest.raises(UnsupportedModelError, match=f"LlavaForConditionalGeneration with LlamaModel: .*{reason}"):
        ModelAdapter(model, max_model_len=512)


TEXT_NO_WIDTH = {name: value for name, value in TEXT.items() if name != "head_dim"}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("GemmaConfig", TEXT),
        ("Phi3Config", {**TEXT_NO_WIDTH, "pad_token_id": 0}),
        ("Qwen3Config", TEXT),
        ("Qwen3MoeConfig", {**TEXT, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
        ("CohereConfig", TEXT_NO_WIDTH),
        ("GraniteConfig", {**TEXT_NO_WIDTH, "embedding_multiplier": 3.0, "residual_multiplier": 0.5}),
        ("SmolLM3Config", {**TEXT_NO_WIDTH, "pad_token_id": 0}),
        (
            "DeepseekV3Config",  # keys and values of different widths
            {
                **TEXT_NO_WIDTH,
                "num_hidden_layers": 2,
                "num_key_value_heads": 4,
                "n_routed_experts": 4,
                "n_group": 2,
                "topk_group": 1,
                "num_experts_per_tok": 2,
                **LATENT,
                "moe_intermediate_size": 16,
                "first_k_dense_replace": 1,
            },
        ),
    ],
)
def test_other_language_models_inside_a_family(kind: str, options: dict[str, Any]) -> None:
    model = llava(getattr(transformers, kind)(**options))
    family = Family(copy.deepcopy(model), ModelAdapter(model, max_model_len=512))
    request = prepared(family)
    got = prefill(family.adapter, new_kv(family.adapter), request, chunk=7)
    assert difference(got, reference_logits(family.reference, request)) <= ROUNDING


def test_attention_sinks_are_refused() -> None:
    options = {**TEXT, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 11}
    model = llava(transformers.GptOssConfig(**options))
    with pytest.raises(UnsupportedModelError, match="GptOssModel: its language model has attention sinks"):
        ModelAdapter(model, max_model_len=512)


def test_attention_that_does_not_go_through_the_interface_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers only warns when a model ignores the attention that is set."""
    model = Family.make("llava").reference
    monkeypatch.setattr(model, "set_attn_implementation", lambda _: None)
    with pytest.raises(UnsupportedModelError, match="LlamaModel cannot be replaced"):
        ModelAdapter(model, max_model_len=512)


def test_two_engines_in_two_threads() -> None:
    """Each thread's step sees its own plan and cache, also of one and the same adapter."""
    family = Family.make("llava")
    want = [reference_logits(family.reference, prepared(family, seed)) for seed in (1, 2)]
    together = threading.Barrier(2)
    differences: list[float] = []

    def drive(index: int) -> None:
        for _ in range(5):
            request, kv = prepared(family, index + 1), new_kv(family.adapter)
            together.wait()
            got = prefill(family.adapter, kv, request, chunk=6)
            differences.append(difference(got, want[index]))

    threads = [threading.Thread(target=drive, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(differences) == 10
    assert max(differences) <= ROUNDING
