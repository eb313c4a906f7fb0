"""The encoder on several ranks: who encodes what follows from the orders, and whatever happens on one rank, all of
them come out with the same."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from threaded_ranks import Meeting, ThreadedRanks
from torch import Tensor

from ecotone.errors import ContractError
from ecotone.protocol.connector import ECWorkerContext, EncoderSpec
from ecotone.protocol.params import SamplingParams
from ecotone.protocol.step import MultiModalItem
from ecotone.testing.connectors import RecordingMetadata, RecordingOptions, RecordingWorkerConnector
from ecotone.testing.models import HIDDEN, LEVELS, TinyModel, tiny_item
from ecotone.testing.steps import OrderedRequest, Steps
from ecotone.testing.tiny_configs import architectures
from ecotone.testing.tiny_processors import processors
from ecotone.worker.ec_connector import ActiveECConnector
from ecotone.worker.encoder_cache import RankEncoderCache
from ecotone.worker.models import EncodeFailure
from ecotone.worker.parallel.encoder import DividedEncoder, Encode, ReplicatedEncoder, Tower, divide
from ecotone.worker.parallel.pipeline import ONLY_STAGE

SPEC = EncoderSpec(HIDDEN, LEVELS, "float32")
CPU = torch.device("cpu")
ITEMS = [tiny_item(f"item {n}", 0, rows) for n, rows in enumerate((3, 7, 1, 4, 4))]
MODES = ("weights", "data")


def encode_together(
    mode: str, towers: Sequence[Encode], items: Sequence[MultiModalItem] = ITEMS, spec: EncoderSpec = SPEC
) -> tuple[list[list[Tensor | EncodeFailure]], list[list[str]]]:
    """What every rank has after one call on all of them, and what they did together."""
    groups = Meeting(len(towers)).groups()
    encoders: list[Encode] = [ReplicatedEncoder(t, g) for t, g in zip(towers, groups, strict=True)]
    if mode == "data":
        encoders = [DividedEncoder(t, g, spec, CPU) for t, g in zip(towers, groups, strict=True)]
    with ThreadPoolExecutor(len(towers)) as threads:
        results = list(threads.map(lambda encoder: encoder(items), encoders))
    return results, [group.calls for group in groups]


def reasons(results: Sequence[Tensor | EncodeFailure]) -> dict[int, str]:
    return {i: r.reason for i, r in enumerate(results) if isinstance(r, EncodeFailure)}


@given(counts=st.lists(st.integers(1, 100), max_size=20), ranks=st.integers(1, 8))
def test_every_item_is_somebodys_and_nobody_has_much_more(counts: list[int], ranks: int) -> None:
    items = [tiny_item(f"item {n}", 0, rows) for n, rows in enumerate(counts)]
    shares = divide(items, ranks)
    assert shares == divide(items, ranks)
    assert sorted(index for share in shares for index in share) == list(range(len(counts)))
    loads = [sum(counts[index] for index in share) for share in shares]
    assert max(loads) - min(loads) <= max(counts, default=0)


def test_single_items_are_not_always_the_same_ranks() -> None:
    shares = [divide([tiny_item(f"item {n}", 0, 4)], 2) for n in range(64)]
    assert 16 < sum(first == [0] for first, _ in shares) < 48


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_every_rank_has_the_rows_of_all_items(mode: str, ranks: int) -> None:
    towers = [Tower(TinyModel().encode) for _ in range(ranks)]
    want = TinyModel().encode(ITEMS)
    results, calls = encode_together(mode, towers)
    for rows in results:
        assert all(torch.equal(a, b) for a, b in zip(rows, want, strict=True))
        # In storage of their own: a cache entry must not keep what was gathered with it.
        assert all(r.untyped_storage().nbytes() == r.nbytes for r in rows)
    assert all(made == calls[0] for made in calls)
    items = [tower.statistics()["tower_items"] for tower in towers]
    rows = [tower.statistics()["tower_rows"] for tower in towers]
    if mode == "weights":
        assert items == [5] * ranks
        assert calls[0] == ["exchange"]
    else:
        assert sum(items) == 5
        assert sum(rows) == 19
        assert max(rows) <= 7 + 19 / ranks


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rows_of_other_dtypes_are_the_same_to_the_bit(mode: str, dtype: str) -> None:
    def tower(items: Sequence[MultiModalItem]) -> list[Tensor | EncodeFailure]:
        return [rows.to(getattr(torch, dtype)) for rows in TinyModel().encode(items)]

    spec = EncoderSpec(HIDDEN, LEVELS, dtype)
    results, _ = encode_together(mode, [tower, tower], spec=spec)
    for rows in results:
        assert all(torch.equal(a, b) for a, b in zip(rows, tower(ITEMS), strict=True))


class FailsOn:
    """A tower that fails on some items: with a reason, or by raising anything at all."""

    def __init__(self, ids: Sequence[str], error: Exception | None = None) -> None:
        self.ids, self.error = ids, error

    def __call__(self, items: Sequence[MultiModalItem]) -> list[Tensor | EncodeFailure]:
        if self.error is not None and any(item.item_id in self.ids for item in items):
            raise self.error
        rows = TinyModel().encode(items)
        return [EncodeFailure("no luck") if i.item_id in self.ids else r for i, r in zip(items, rows, strict=True)]


@settings(max_examples=40, deadline=None)
@given(
    mode=st.sampled_from(MODES),
    failing=st.lists(st.sets(st.sampled_from([i.item_id for i in ITEMS])), min_size=2, max_size=4),
)
def test_all_ranks_hear_of_every_failure(mode: str, failing: list[set[str]]) -> None:
    results, calls = encode_together(mode, [FailsOn(sorted(ids)) for ids in failing])
    want = TinyModel().encode(ITEMS)
    for rows in results:
        assert reasons(rows) == reasons(results[0])
        for got, right in zip(rows, want, strict=True):
            assert isinstance(got, EncodeFailure) or torch.equal(got, right)
    failed = {ITEMS[index].item_id for index in reasons(results[0])}
    if mode == "weights":
        assert failed == set().union(*failing)
    assert failed <= set().union(*failing)
    assert all(made == calls[0] for made in calls)


@pytest.mark.parametrize("mode", MODES)
def test_an_error_of_any_kind_on_one_rank_is_a_failure_on_all(mode: str) -> None:
    shares = divide(ITEMS, 2)
    rank = 0 if 1 in shares[0] else 1
    towers: list[Encode] = [TinyModel().encode, TinyModel().encode]
    towers[rank] = FailsOn(["item 1"], AttributeError("out of luck"))
    results, _ = encode_together(mode, towers)
    assert reasons(results[0]) == reasons(results[1])
    assert reasons(results[0])[1] == f"on rank {rank}: the encoder failed: AttributeError: out of luck"
    assert sorted(reasons(results[0])) == (sorted(shares[rank]) if mode == "data" else [0, 1, 2, 3, 4])


def test_a_long_reason_is_cut() -> None:
    results, _ = encode_together("weights", [FailsOn(["item 0"], ValueError("x" * 9999)), TinyModel().encode])
    assert len(results[1][0].reason) < 600


# -- in whole steps of a model ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Any:
    tokenizer = processors()["llava"].save(tmp_path_factory.mktemp("llava"))
    torch.manual_seed(3)
    return architectures()["llava"].build(tokenizer)


def ask(model: Any, req_id: str, seed: int, first_block: int) -> OrderedRequest:
    from family_cases import media, prompt  # noqa: PLC0415 - found by the conftest

    case = prompt("llava", model.config, [2, *media("llava", model.config, seed), 3], seed)
    params = SamplingParams(temperature=0, ignore_eos=True)
    blocks = range(first_block, first_block + 16)
    return OrderedRequest(req_id, case.ids, case.items, params=params, block_ids=blocks)


def first_tokens(model: Any) -> dict[str, list[int]]:
    """What requests a and b say first, on one rank."""
    ranks = ThreadedRanks(model, 1, 1)
    a, b = ask(model, "a", 1, 0), ask(model, "b", 2, 16)
    steps = Steps(ranks.run)
    steps.step((a, a.order(encode=(0, 1))), (b, b.order(encode=(0, 1))))
    steps.step((a, a.order()), (b, b.order()))
    ranks.close()
    return {"a": a.output_token_ids, "b": b.output_token_ids}


FORMS = [(2, 1, "weights"), (2, 1, "data"), (1, 2, "weights"), (2, 2, "data")]


@pytest.mark.parametrize(("tp", "pp", "mode"), FORMS)
def test_a_failure_on_one_rank_ends_its_request_alone(llava: Any, tp: int, pp: int, mode: str) -> None:
    a, b = ask(llava, "a", 1, 0), ask(llava, "b", 2, 16)
    broken = {a.data.items[0].item_id}

    def encode_here(rank: int, adapter: Any) -> Encode:
        def tower(items: Sequence[MultiModalItem]) -> list[Tensor | EncodeFailure]:
            rows = adapter.encode(items)
            # In "data" mode it is not known who has the item; in "weights" mode only the last rank fails.
            fails = mode == "data" or rank == tp - 1
            return [
                EncodeFailure("scratched") if fails and item.item_id in broken else r
                for item, r in zip(items, rows, strict=True)
            ]

        return tower

    ranks = ThreadedRanks(llava, tp, pp, mode=mode, encode_here=encode_here)
    steps = Steps(ranks.run)
    output = steps.step((a, a.order(encode=(0, 1))), (b, b.order(encode=(0, 1))))
    assert list(output.request_errors) == ["a"]
    assert "item 0: " in output.request_errors["a"]
    assert "scratched" in output.request_errors["a"]
    assert b.output_token_ids == first_tokens(llava)["b"][:1]
    # A step in which nobody is left computes nothing, and all ranks know.
    c = ask(llava, "c", 1, 32)
    output = steps.step((c, c.order(encode=(0,))), finished=["a"])
    assert list(output.request_errors) == ["c"]
    broken.clear()
    output = steps.step((b, b.order()), (c, c.order(encode=(0, 1))), discard=True)
    assert not output.request_errors
    b.take(b.order(), output)
    assert b.output_token_ids == first_tokens(llava)["b"]
    assert output.sampled_token_ids[1] == (first_tokens(llava)["a"][0],)
    ranks.close()


@pytest.mark.parametrize("mode", MODES)
def test_what_a_rank_holds_already_changes_nothing(llava: Any, mode: str) -> None:
    """One rank has old rows under a key that the step orders to encode: it encodes with the others, who would
    otherwise wait for it, and the rows are the new ones."""
    ranks = ThreadedRanks(llava, 2, 1, mode=mode)
    a, b = ask(llava, "a", 1, 0), ask(llava, "b", 2, 16)
    stale = torch.full((a.data.items[0].num_rows, llava.config.text_config.hidden_size), 9.0)
    ranks.caches[1][a.item_keys[0]] = stale
    ranks.caches[0][b.item_keys[1]] = stale.clone()
    steps = Steps(ranks.run)
    steps.step((a, a.order(encode=(0, 1))), (b, b.order(encode=(0, 1))))
    assert {"a": a.output_token_ids[0], "b": b.output_token_ids[0]} == {
        name: tokens[0] for name, tokens in first_tokens(llava).items()
    }
    assert ranks.groups[0].calls == ranks.groups[1].calls
    ranks.close()


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (2, 2)])
@pytest.mark.parametrize("fate", ["missing", "short", "wrong_dtype"])
def test_a_load_that_fails_on_one_rank_is_known_to_all(llava: Any, tp: int, pp: int, fate: str) -> None:
    """The ranks go through the step together; its result is discarded, and the next one encodes everywhere."""
    a = ask(llava, "a", 1, 0)

    def hook(rank: int, cache: RankEncoderCache) -> ActiveECConnector:
        context = ECWorkerContext(
            engine_id="engine",
            role="ec_both",
            options={},
            rank=rank,
            epoch=1,
            encoder=cache.encoder,
            device="cpu",
            wakeup=lambda: None,
        )
        options = RecordingOptions(load_fates={a.item_keys[0]: fate} if rank == 1 else {})
        connector = RecordingWorkerConnector(context, options)
        rows = [r for r in llava_rows(llava, a) if isinstance(r, Tensor)]
        connector.stored.update(zip(a.item_keys, rows, strict=True))
        return ActiveECConnector(connector, cache)

    ranks = ThreadedRanks(llava, tp, pp, hook=hook)
    steps = Steps(ranks.run)
    order = a.order(load=(0, 1))
    output = steps.step((a, order), metadata=RecordingMetadata(loads=a.item_keys), discard=True)
    assert output.ec_connector_output is not None
    assert output.ec_connector_output.failed_loads == {a.item_keys[0]}
    assert not output.request_errors
    steps.step((a, a.order(encode=(0,))))
    steps.step((a, a.order()))
    assert a.output_token_ids == first_tokens(llava)["a"]
    ranks.close()


def llava_rows(model: Any, request: OrderedRequest) -> list[Tensor | EncodeFailure]:
    ranks = ThreadedRanks(model, 1, 1)
    ranks.close()
    return ranks.models[0].encode(request.data.items)


def test_a_stage_alone_has_nobody_to_talk_to() -> None:
    assert ONLY_STAGE.relay_errors({"a": "b"}) == {"a": "b"}
    with pytest.raises(ContractError, match="3 hidden states are awaited"):
        ONLY_STAGE.receive(3)
    with pytest.raises(ContractError, match="2 hidden states are for the stage behind"):
        ONLY_STAGE.send(torch.zeros(2, 4))


@pytest.mark.parametrize("mode", MODES)
def test_ranks_that_only_encode(llava: Any, mode: str) -> None:
    """Every rank saves what all of them encoded, and none computes a token."""
    made: list[RecordingWorkerConnector] = []

    def hook(rank: int, cache: RankEncoderCache) -> ActiveECConnector:
        context = ECWorkerContext(
            engine_id="engine",
            role="ec_producer",
            options={},
            rank=rank,
            epoch=1,
            encoder=cache.encoder,
            device="cpu",
            wakeup=lambda: None,
        )
        made.append(RecordingWorkerConnector(context, RecordingOptions()))
        return ActiveECConnector(made[-1], cache)

    a = ask(llava, "a", 1, 0)
    ranks = ThreadedRanks(llava, 2, 1, mode=mode, hook=hook)
    order = a.order(encode=(0, 1))
    Steps(ranks.run).step((a, order), metadata=RecordingMetadata(saves=a.item_keys), discard=True)
    ranks.close()
    want = [rows for rows in llava_rows(llava, a) if isinstance(rows, Tensor)]
    for half in made:
        assert list(half.stored) == list(a.item_keys)
        for rows, right in zip(half.stored.values(), want, strict=True):
            assert (rows - right).abs().max() < 1e-5
    assert all(runner.statistics()["tokens"] == 0 for runner in ranks.runners)
