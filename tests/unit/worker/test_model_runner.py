"""Steps as ordered: whatever the chunks, batches and repetitions, the tokens are those of the closed form."""

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ecotone.errors import ContractError
from ecotone.protocol.params import PoolingParams, SamplingParams
from ecotone.protocol.step import SchedulerOutput
from ecotone.testing.connectors import RecordingMetadata
from ecotone.testing.models import PIXELS, PLACEHOLDER, TinyModel, tiny_item
from ecotone.testing.steps import OrderedRequest
from ecotone.worker.penalties import SampleRequest, adjust
from ecotone.worker.sampler import sample

P = PLACEHOLDER


def two_images(req_id="a", **options):
    """12 tokens; the second image's rows are split in two by a text token."""
    items = (tiny_item("cat", 2, 4), tiny_item("dog", 7, 3, length=4))
    return OrderedRequest(req_id, [5, 9, P, P, P, P, 8, P, 11, P, P, 3], items, **options)


def greedy(request, num_tokens):
    """The tokens that the model's closed form gives."""
    model, tokens = TinyModel(), []
    for _ in range(num_tokens):
        hidden = model.reference(request.data.prompt_token_ids, request.data.items, tokens)
        tokens.append(int(model.logits(hidden[-1:]).argmax()))
    return tokens


def generate(rank, request, num_tokens, chunk=None, encode=(0, 1)):
    """Encode with the first step, prefill in chunks, then decode."""
    while len(request.output_token_ids) < num_tokens:
        left = request.num_known_tokens - request.num_computed_tokens
        first = request.num_computed_tokens == 0
        rank.steps.step((request, request.order(min(chunk or left, left), encode=encode if first else ())))
    return request.output_token_ids


def test_the_tokens_are_those_of_the_closed_form(make_rank):
    assert generate(make_rank(), two_images(), 5) == greedy(two_images(), 5)


def test_the_closed_form_depends_on_every_image():
    other = OrderedRequest(
        "a", two_images().data.prompt_token_ids, (tiny_item("cat", 2, 4), tiny_item("cow", 7, 3, length=4))
    )
    assert greedy(two_images(), 3) != greedy(other, 3)


@pytest.mark.parametrize("chunk", range(1, 12))
def test_chunks_that_cut_an_item_take_its_rows_of_the_chunk(make_rank, chunk):
    assert generate(make_rank(), two_images(), 4, chunk) == greedy(two_images(), 4)


def test_a_preempted_request_computes_its_output_again_in_any_chunks(make_rank):
    rank, request = make_rank(), two_images()
    generate(rank, request, 4)
    request.num_computed_tokens = 0
    rank.steps.step(finished=["a"])
    assert generate(rank, request, 7, chunk=5) == greedy(two_images(), 7)


def test_requests_in_one_batch_do_not_meet(make_rank):
    rank = make_rank()
    a = two_images("a", block_ids=[7, 3, 9, 4, 5])
    b = OrderedRequest("b", [P, P, P, P, 30, 31], (tiny_item("cat", 0, 4),), block_ids=[0, 1, 2])
    c = OrderedRequest("c", [40, 41, 42], block_ids=[11, 12])
    rank.steps.step((a, a.order(5, encode=(0,))), (b, b.order()))
    rank.steps.step((b, b.order()), (a, a.order(encode=(1,))), (c, c.order()))
    for _ in range(2):
        output = rank.steps.step(*((r, r.order()) for r in (c, a, b)))
        assert output.req_ids == ("c", "a", "b")
    assert a.output_token_ids == greedy(a, 3)
    assert b.output_token_ids == greedy(b, 4)
    assert c.output_token_ids == greedy(c, 3)


def test_no_token_is_sampled_before_all_known_ones_are_computed(make_rank):
    rank, request = make_rank(), two_images()
    output = rank.steps.step((request, request.order(11, encode=(0, 1))))
    assert output.sampled_token_ids == ((),)
    assert output.logprobs == ((),)
    assert output.pooler_output == (None,)


def test_a_step_that_is_ordered_again_gives_the_same_token(make_rank):
    rank, request = make_rank(), two_images(params=SamplingParams(temperature=1.5, top_p=0.9), seed=5)
    rank.steps.step((request, request.order(6, encode=(0, 1))))
    for _ in range(3):
        first = rank.steps.step((request, request.order()), discard=True)
        second = rank.steps.step((request, request.order()), discard=True)
        assert first.sampled_token_ids == second.sampled_token_ids
        rank.steps.step((request, request.order()))


def test_a_drawn_token_depends_on_seed_and_position_and_on_no_batch(make_rank):
    params = SamplingParams(temperature=1.5, top_k=20)
    rank, others = make_rank(), [OrderedRequest(str(i), [40 + i], block_ids=[30 + i]) for i in range(3)]
    request = two_images(params=params, seed=2**40 + 1)
    while len(request.output_token_ids) < 6:
        encode = () if request.output_token_ids else (0, 1)
        batch = others[: len(request.output_token_ids) % 4]
        rank.steps.step(*((r, r.order()) for r in batch), (request, request.order(encode=encode)))
    model, want = TinyModel(), []
    for _ in range(6):
        hidden = model.reference(request.data.prompt_token_ids, request.data.items, want)[-1:]
        (token,) = sample(model.logits(hidden), [SampleRequest(params, 2**40 + 1, tuple(want))])
        want.append(token.token_id)
    assert request.output_token_ids == want
    assert want != greedy(request, 6)


def test_the_same_key_twice_in_a_step_is_encoded_once(make_rank):
    rank = make_rank()
    a = OrderedRequest("a", [P, P, 5, P, P], (tiny_item("cat", 0, 2), tiny_item("cat", 3, 2)), block_ids=range(5))
    b = OrderedRequest("b", [4, P, P], (tiny_item("cat", 1, 2),), block_ids=range(5, 9))
    rank.steps.step(
        (a, a.order(encode=(0, 1))), (b, b.order(encode=(0,))), metadata=RecordingMetadata(saves=("ns:cat",))
    )
    assert rank.model.encoded == ["cat"]
    assert [c for c in rank.connector.built[-1].hooks(0) if "save" in c] == ["save_caches:ns:cat"]
    assert (a.output_token_ids, b.output_token_ids) == (greedy(a, 1), greedy(b, 1))


def test_keys_are_dropped_before_the_step_encodes(make_rank):
    rank, request = make_rank(), two_images()
    rank.steps.step((request, request.order(7, encode=(0, 1))))
    assert set(rank.cache) == {"ns:cat", "ns:dog"}
    rank.steps.step((request, request.order(encode=(1,))), free=["ns:cat", "ns:dog", "ns:unknown"])
    assert set(rank.cache) == {"ns:dog"}
    assert request.output_token_ids == greedy(request, 1)


def test_keys_may_change_between_steps(make_rank):
    """The weights were updated while the request was halfway."""
    rank, request = make_rank(), two_images()
    rank.steps.step((request, request.order(3, encode=(0,))))
    rank.runner.reset_encoder_cache()
    request.item_keys = ("new:cat", "new:dog")
    rank.steps.step((request, request.order(encode=(0, 1))))
    assert set(rank.cache) == {"new:cat", "new:dog"}
    assert request.output_token_ids == greedy(request, 1)


def test_penalties_count_the_prompt_and_early_ends_are_not_sampled(make_rank):
    """40 of the 64 tokens are in the prompt."""
    params, prompt = SamplingParams(repetition_penalty=3.0, presence_penalty=0.5, min_tokens=4), [*range(2, 42)]
    request = OrderedRequest("a", prompt, params=params)
    tokens, without_prompt = [], []
    for output, seen in ((tokens, prompt), (without_prompt, ())):
        for _ in range(5):
            model = TinyModel()
            logits = model.logits(model.reference(prompt, (), output)[-1:])
            logits = adjust(logits, [SampleRequest(params, 0, output, seen)], model.info.eos_token_ids)
            output.append(int(logits.argmax()))
    assert generate(make_rank(), request, 5, encode=()) == tokens != without_prompt


def broken(offset, num_rows):
    return tiny_item("broken", offset, num_rows, pixels=torch.full((num_rows, PIXELS), torch.nan))


def test_an_item_that_cannot_be_encoded_fails_its_requests_alone(make_rank):
    rank = make_rank(role=None)
    good = two_images("good")
    bad = OrderedRequest("bad", [P, P, 5], (broken(0, 2),), block_ids=[20])
    shares = OrderedRequest("shares", [6, P, P], (broken(1, 2),), block_ids=[21])
    later = OrderedRequest("later", [6, 7, P, P], (broken(2, 2),), block_ids=[22])
    output = rank.steps.step(
        (bad, bad.order(encode=(0,))),
        (good, good.order(encode=(0, 1))),
        (shares, shares.order()),
        (later, later.order(2)),
    )
    assert output.request_errors == {
        "bad": "item 0: its pixels are not finite",
        "shares": "item 0: its pixels are not finite",
    }
    assert output.req_ids == ("good", "later")
    assert good.output_token_ids == greedy(good, 1)
    assert "ns:broken" not in rank.cache
    assert rank.runner.statistics()["encode_failures"] == 1


def test_an_encoding_of_the_wrong_shape_is_not_cached(make_rank):
    rank = make_rank()
    item = tiny_item("odd", 0, 3, pixels=torch.zeros(2, PIXELS))
    request = OrderedRequest("a", [P, P, P], (item,))
    rank.cache["ns:odd"] = torch.zeros(3, 24)
    output = rank.steps.step((request, request.order(encode=(0,))))
    assert "shape [2, 24] instead of [3, 24]" in output.request_errors["a"]
    assert "ns:odd" not in rank.cache


def test_a_hit_with_the_wrong_rows_is_dropped_and_reported(make_rank):
    rank, request = make_rank(), two_images()
    rank.cache["ns:cat"] = torch.zeros(3, 24)
    output = rank.steps.step((request, request.order(encode=(1,))), discard=True)
    assert output.ec_connector_output.failed_loads == {"ns:cat"}
    assert "ns:cat" not in rank.cache
    rank.steps.step((request, request.order(encode=(0,))))
    assert request.output_token_ids == greedy(request, 1)


def test_without_a_connector_a_missing_encoding_is_a_broken_contract(make_rank):
    request = two_images()
    with pytest.raises(ContractError, match="ns:cat"):
        make_rank(role=None).steps.step((request, request.order(encode=(1,))))


def test_logits_that_are_no_distribution_fail_the_request_alone(make_rank, monkeypatch):
    rank = make_rank()
    a, b = OrderedRequest("a", [5, 6], block_ids=[0]), OrderedRequest("b", [7, 8], block_ids=[1])
    logits = rank.model.logits

    def poisoned(hidden):
        out = logits(hidden)
        out[0, 3] = torch.nan
        return out

    monkeypatch.setattr(rank.model, "logits", poisoned)
    output = rank.steps.step((a, a.order()), (b, b.order()))
    assert output.request_errors == {"a": "no token can follow: its logits are not finite, or none is allowed"}
    assert (output.req_ids, b.output_token_ids) == (("b",), greedy(b, 1))


def test_logprobs_come_for_who_asked(make_rank):
    rank = make_rank()
    a = OrderedRequest("a", [5, 6], params=SamplingParams(logprobs=2), block_ids=[0])
    b = OrderedRequest("b", [7, 8], block_ids=[1])
    output = rank.steps.step((b, b.order()), (a, a.order()))
    (none, (entry,)) = output.logprobs
    assert none == ()
    assert entry.top_ids.to_numpy()[0] == a.output_token_ids[0]
    assert entry.sampled == pytest.approx(float(entry.top_logprobs.to_numpy()[0]))


@settings(max_examples=30, deadline=None)
@given(data=st.data(), pooling=st.sampled_from(["last", "mean"]), normalize=st.booleans())
def test_pooling_over_chunks_that_are_repeated(data, pooling, normalize, make_rank):
    rank = make_rank(pooling=True)
    request = two_images(params=PoolingParams(pooling=pooling, normalize=normalize))
    encode = (0, 1)
    while request.pooled is None:
        left = request.num_known_tokens - request.num_computed_tokens
        if data.draw(st.booleans(), "discard first"):
            rank.steps.step((request, request.order(data.draw(st.integers(1, left)), encode)), discard=True)
        rank.steps.step((request, request.order(data.draw(st.integers(1, left)), encode)))
        encode = ()
    hidden = TinyModel().reference(request.data.prompt_token_ids, request.data.items)
    want = hidden[-1] if pooling == "last" else hidden.mean(dim=0)
    want = want / want.norm() if normalize else want
    assert request.pooled == pytest.approx(want.tolist(), abs=1e-5)


def test_requests_with_the_other_task_are_refused(make_rank):
    rank, request = make_rank(), two_images(params=PoolingParams())
    with pytest.raises(ContractError, match="PoolingParams"):
        rank.steps.step((request, request.order(encode=(0, 1))))


@pytest.mark.parametrize("finish", ["sample_tokens", "pool"])
def test_a_step_is_finished_exactly_once(make_rank, finish):
    rank = make_rank(pooling=finish == "pool")
    request = two_images(params=PoolingParams() if finish == "pool" else SamplingParams())
    order = SchedulerOutput(step=1, new_requests=(request.data,), scheduled=(request.order(encode=(0, 1)),))
    with pytest.raises(ContractError, match="no step to finish"):
        getattr(rank.runner, finish)()
    assert rank.runner.execute_model(order) is None
    with pytest.raises(ContractError, match="before the last step's"):
        rank.runner.execute_model(order)
    assert getattr(rank.runner, finish)().req_ids == ("a",)
    with pytest.raises(ContractError, match="no step to finish"):
        getattr(rank.runner, finish)()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_known_tokens": 13}, "num_known_tokens"),
        ({"num_tokens": 0}, "num_tokens"),
        ({"num_tokens": 13}, "num_tokens"),
        ({"item_keys": ("one",)}, "item_keys"),
        ({"encode": (2,)}, "encode"),
        ({"load": (-1,)}, "load"),
        ({"block_ids": (1,)}, "blocks"),
        ({"req_id": "stranger"}, "stranger"),
    ],
)
def test_orders_that_do_not_fit_the_request_are_refused(make_rank, change, says):
    request = two_images()
    scheduled = msgspec.structs.replace(request.order(encode=(0, 1)), **change)
    with pytest.raises(ContractError, match=says):
        make_rank().run(SchedulerOutput(step=1, new_requests=(request.data,), scheduled=(scheduled,)))


@pytest.mark.parametrize(
    ("prompt", "length", "found"),
    [([5, P, P], 3, 2), ([5, P, 8, P, P], 3, 2), ([5, P, P, P, P], 4, 4), ([5, P, P, 8, P, P], 5, 4)],
)
def test_an_item_with_other_placeholders_than_rows_is_refused(make_rank, prompt, length, found):
    request = OrderedRequest("a", prompt, (tiny_item("cat", 1, 3, length=length),))
    with pytest.raises(ContractError, match=f"3 encoder rows and {found} placeholders within {length} tokens"):
        make_rank().steps.step((request, request.order()))


def test_generated_placeholder_ids_are_ordinary_tokens(make_rank):
    rank, request = make_rank(), OrderedRequest("a", [5, 6])
    rank.steps.step((request, request.order()))
    request.output_token_ids = [P]
    rank.steps.step((request, request.order()))
    assert request.output_token_ids[1:] == [
        int(rank.model.logits(rank.model.reference([5, 6], (), [P])[-1:]).argmax())
    ]


def test_statistics_count_what_ran(make_rank):
    rank, request = make_rank(), two_images()
    generate(rank, request, 2)
    assert rank.runner.statistics() == {
        "steps": 2,
        "tokens": 13,
        "encodes": 2,
        "encoded_rows": 7,
        "encode_failures": 0,
        "failed_loads": 0,
        "encoder_cache_entries": 2,
        "encoder_cache_rows": 7,
        "encoder_cache_bytes": 7 * 24 * 4,
        "requests": 1,
        "kv_cache_bytes": 2 * 64 * 4 * 8 * 4,
    }
    rank.steps.step(finished=["a"])
    assert rank.runner.statistics()["requests"] == 0
