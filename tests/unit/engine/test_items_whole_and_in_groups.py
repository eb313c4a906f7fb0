"""Items whose placeholders have text between them, and items that no chunk may cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_connector import ScriptedConnector
from sim_engine import SimEngine
from sim_model import expected_output, limits, make_request

from ecotone.config import EngineConfig
from ecotone.engine.admission import SchedulerLimits
from ecotone.errors import ContractError, ItemTooLargeError, PlaceholderError
from ecotone.protocol.connector import EncoderSpec
from ecotone.protocol.model import ModelInfo
from ecotone.protocol.step import MultiModalItem

# Rows of each item, in the groups that its placeholders come in: spans of 1 to 7 tokens.
ROWS = {"u": 1, "v": (1, 1), "w": (2, 1, 1), "x": 5, "y": (3, 3)}
PARTS = st.lists(st.one_of(st.sampled_from(sorted(ROWS)), st.integers(10, 14)), min_size=1, max_size=6)


@settings(max_examples=120, deadline=None)
@given(
    prompts=st.lists(PARTS, min_size=1, max_size=4),
    budget=st.integers(1, 12),
    cache_rows=st.integers(6, 14),
    kv_blocks=st.integers(12, 20),
    atomic=st.booleans(),
    pending=st.sets(st.sampled_from(sorted(ROWS))),
    failing=st.lists(st.sets(st.sampled_from(sorted(ROWS))), max_size=4),
    stored=st.sets(st.sampled_from(sorted(ROWS))),
)
def test_any_cut_gives_the_same_text(prompts, budget, cache_rows, kv_blocks, atomic, pending, failing, stored):
    """With small budgets, preemptions, loads that wait and loads that fail. The simulated rank notices a row that
    it needs and nobody ordered, and ``SimEngine`` a chunk that ends within an atomic item."""
    bounds = limits(
        max_num_batched_tokens=budget, encoder_cache_rows=cache_rows, kv_blocks=kv_blocks, atomic_items=atomic
    )
    connector = ScriptedConnector()
    connector.stored, connector.pending = named(stored), named(pending)
    engine = SimEngine(bounds, connector)
    requests = []
    for number, parts in enumerate(prompts):
        request = make_request(f"r{number}", parts, rows=ROWS)
        if atomic and any(item.length > budget for item in request.items):
            with pytest.raises(ItemTooLargeError):
                engine.add(request)
            continue
        engine.add(request)
        requests.append(request)
    for keys in failing:
        engine.step([named(keys)])
        assert_only_cut_items_are_held(engine)
    connector.pending = set()
    engine.run(max_steps=500)
    for request in requests:
        assert (engine.outputs[request.req_id], request.status) == expected_output(request, bounds)
    engine.assert_at_rest()


def named(items: set[str]) -> set[str]:
    return {f"0:{item}" for item in items}


def assert_only_cut_items_are_held(engine: SimEngine) -> None:
    cut = {
        key: item.num_rows
        for request in engine.requests.values()
        for item, key in zip(request.items, request.item_keys, strict=True)
        if item.offset < request.num_computed_tokens < item.end
    }
    free = engine.scheduler.statistics()["encoder_cache_rows_available"]
    assert engine.bounds.encoder_cache_rows - free <= sum(cut.values())


def test_an_item_is_held_until_its_last_group():
    engine = SimEngine(limits(max_num_batched_tokens=3))
    engine.add(make_request("a", [1, "w", 2], rows=ROWS))  # 1 | w w . w . w | 2
    held = []
    for _ in range(3):
        engine.step()
        statistics = engine.scheduler.statistics()
        held.append(engine.bounds.encoder_cache_rows - statistics["encoder_cache_rows_available"])
    assert held == [4, 4, 0]


def test_a_chunk_waits_rather_than_cut():
    engine = SimEngine(limits(max_num_batched_tokens=6, atomic_items=True))
    engine.add(make_request("a", [1, 2, "w", 3], rows=ROWS), make_request("b", ["x", 4], rows=ROWS))
    orders = [engine.step() for _ in range(3)]
    chunks = [{s.req_id: s.num_tokens for s in order.scheduled} for order in orders]
    assert chunks == [{"a": 2}, {"a": 6}, {"a": 1, "b": 5}]
    assert [s.encode for order in orders for s in order.scheduled] == [(), (0,), (), (0,)]


def test_whoever_is_first_goes_on():
    """An item that takes the whole step does not wait for ever behind those that decode."""
    bounds = limits(max_num_batched_tokens=6, atomic_items=True)
    engine = SimEngine(bounds)
    engine.add(*(make_request(name, 2, max_tokens=9) for name in "abc"), make_request("d", ["w"], rows=ROWS))
    engine.run()
    assert len(engine.outputs["d"]) == 4


@pytest.mark.parametrize(("item", "length"), [("w", 6), ("x", 5)])
def test_an_item_longer_than_a_step_is_refused_where_it_must_not_be_cut(item, length):
    request = make_request("a", [1, item, 2], rows=ROWS)
    engine = SimEngine(limits(max_num_batched_tokens=length - 1, atomic_items=True))
    with pytest.raises(ItemTooLargeError, match=f"spans {length} tokens.* max_num_batched_tokens is {length - 1}"):
        engine.add(request)
    SimEngine(limits(max_num_batched_tokens=length, atomic_items=True)).add(request)
    SimEngine(limits(max_num_batched_tokens=1)).add(request)
    encoding = SimEngine(limits(max_num_batched_tokens=1, atomic_items=True), ScriptedConnector("ec_producer"))
    encoding.add(request)  # computes no token


@pytest.mark.parametrize("atomic", [True, False])
def test_the_model_says_whether_items_are_atomic(atomic):
    info = ModelInfo(
        architecture="A",
        encoder=EncoderSpec(8, 0, "float32"),
        vocab_size=9,
        max_model_len=64,
        eos_token_ids=(),
        atomic_items=atomic,
    )
    assert SchedulerLimits.from_config(EngineConfig(model="m"), info).atomic_items is atomic


@pytest.mark.parametrize(("second", "prompt"), [(5, 20), (8, 12)])
def test_spans_must_follow_each_other_within_the_prompt(second, prompt):
    items = tuple(
        MultiModalItem(modality="image", item_id=str(i), offset=offset, num_rows=3, length=5)
        for i, offset in enumerate((2, second))
    )
    plain = make_request("a", prompt)
    request = type(plain)(
        "a", plain.prompt_token_ids, plain.params, items=items, item_keys=("k", "l"), arrival_time=0.0
    )
    with pytest.raises(PlaceholderError, match=f"image 1 claims 5 positions from {second}"):
        SimEngine(limits()).add(request)


def test_length_of_an_item():
    item = MultiModalItem(modality="image", item_id="a", offset=3, num_rows=4)
    assert (item.length, item.end) == (4, 7)
    item = MultiModalItem(modality="image", item_id="a", offset=3, num_rows=4, length=6)
    assert (item.length, item.end) == (6, 9)
    with pytest.raises(ContractError, match="4 encoder rows within 3 tokens"):
        MultiModalItem(modality="image", item_id="a", offset=3, num_rows=4, length=3)
