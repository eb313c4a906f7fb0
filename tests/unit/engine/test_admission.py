"""Requests that could never run are refused when they come, with both sizes in the message."""

from __future__ import annotations

import pytest
from sim_connector import ScriptedConnector
from sim_engine import SimEngine
from sim_model import limits, make_request

from ecotone.config import EngineConfig
from ecotone.engine.admission import SchedulerLimits
from ecotone.engine.request import Request
from ecotone.errors import ConfigError, ItemTooLargeError, PlaceholderError, PromptTooLongError, RequestError
from ecotone.protocol.connector import EncoderSpec
from ecotone.protocol.model import ModelInfo
from ecotone.protocol.params import PoolingParams, SamplingParams
from ecotone.protocol.step import MultiModalItem

MODEL = ModelInfo(
    architecture="Toy", encoder=EncoderSpec(8, 0, "float32"), vocab_size=50, max_model_len=100, eos_token_ids=(7,)
)


def refused(error: type[RequestError], message: str, request: Request, **bounds: int) -> None:
    engine = SimEngine(limits(**bounds))
    with pytest.raises(error, match=message):
        engine.add(request)
    engine.add(make_request("other", 3))
    engine.run()
    engine.assert_at_rest()


def test_item_larger_than_the_encoder_budget():
    refused(
        ItemTooLargeError,
        "'a': image 1 has 9 encoder rows; a step encodes at most 8, and the encoder cache holds 20",
        make_request("a", ["x", "y"], rows={"x": 8, "y": 9}),
        encoder_budget_rows=8,
        encoder_cache_rows=20,
    )


def test_item_larger_than_the_encoder_cache():
    refused(
        ItemTooLargeError,
        "has 9 encoder rows; a step encodes at most 20, and the encoder cache holds 8",
        make_request("a", ["y"], rows={"y": 9}),
        encoder_budget_rows=20,
        encoder_cache_rows=8,
    )


def test_prompt_longer_than_the_model():
    message = "a prompt of 20 tokens needs room for 21; max_model_len is 20 and the KV store holds 256 tokens"
    refused(PromptTooLongError, message, make_request("a", 20), max_model_len=20)


def test_prompt_larger_than_the_kv_store():
    message = "a prompt of 12 tokens needs room for 13; max_model_len is 64 and the KV store holds 12 tokens"
    refused(PromptTooLongError, message, make_request("a", 12), kv_blocks=3)


def test_longest_prompts_that_fit_run():
    for params in (SamplingParams(), PoolingParams()):
        length = 20 - isinstance(params, SamplingParams)
        engine = SimEngine(limits(max_model_len=20, kv_blocks=5))
        engine.add(make_request("a", length, params=params))
        engine.run()
        engine.assert_at_rest()
        assert engine.ended["a"].finish_reason == ("length" if length == 19 else "stop")


def test_an_engine_that_only_encodes_asks_for_no_kv_blocks_but_for_room_in_the_encoder():
    engine = SimEngine(limits(kv_blocks=1, max_model_len=4), ScriptedConnector("ec_producer"))
    engine.add(make_request("a", [*range(30), "x"], rows={"x": 20}))
    engine.run()
    assert engine.encoded == ["0:x"]
    with pytest.raises(ItemTooLargeError):
        engine.add(make_request("b", ["y"], rows={"y": 33}))


def test_empty_prompt():
    refused(RequestError, "the prompt is empty", make_request("a", 0))


def test_id_in_flight():
    engine = SimEngine(limits())
    first = make_request("a", 3)
    engine.add(first)
    with pytest.raises(RequestError, match="'a' is in flight"):
        engine.scheduler.add_request(make_request("a", 3))
    engine.run()
    assert engine.ended["a"].finish_reason == "length"
    engine.add(make_request("a", 3))  # free again
    engine.run()


@pytest.mark.parametrize(
    ("offset", "num_rows", "allowed"),
    [(-1, 2, "from 0 to 6"), (0, 0, "at least 1"), (5, 2, "from 0 to 6"), (3, 4, "from 0 to 6")],
)
def test_items_outside_the_prompt(offset, num_rows, allowed):
    item = MultiModalItem(modality="image", item_id="x", offset=offset, num_rows=num_rows)
    request = Request("a", (1,) * 6, SamplingParams(), items=(item,), item_keys=("k",), arrival_time=0.0)
    refused(PlaceholderError, f"claims {num_rows} positions from {offset}; allowed are .*{allowed}", request)


def test_items_that_overlap_and_items_without_a_key():
    items = tuple(MultiModalItem(modality="image", item_id=i, offset=0, num_rows=2) for i in "xy")
    twice = Request("a", (1,) * 6, SamplingParams(), items=items, item_keys=("k", "l"), arrival_time=0.0)
    refused(PlaceholderError, "image 1 claims 2 positions from 0; allowed are at least 1, from 2 to 6", twice)
    short = Request("a", (1,) * 6, SamplingParams(), items=items, item_keys=("k",), arrival_time=0.0)
    refused(PlaceholderError, "2 items with 1 keys", short)


def test_limits_come_from_the_configuration_and_the_model():
    bounds = SchedulerLimits.from_config(EngineConfig(model="m", encoder_cache_rows=10), MODEL)
    assert bounds.max_model_len == 100
    assert bounds.encoder_budget_rows == bounds.encoder_cache_rows == 10
    config = EngineConfig(model="m", max_model_len=50, encoder_budget_rows=3, block_size=4, kv_blocks=5)
    bounds = SchedulerLimits.from_config(config, MODEL)
    assert (bounds.max_model_len, bounds.encoder_budget_rows) == (50, 3)
    assert (bounds.kv_tokens, bounds.max_request_tokens, bounds.max_item_rows) == (20, 20, 3)


def test_a_length_the_model_does_not_have():
    with pytest.raises(ConfigError, match="max_model_len=101: Toy has positions for 100 tokens"):
        SchedulerLimits.from_config(EngineConfig(model="m", max_model_len=101), MODEL)
