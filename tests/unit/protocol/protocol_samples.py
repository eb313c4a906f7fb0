"""Sample metadata types, and strategies for every message of the protocol."""

from collections.abc import Mapping
from math import prod
from typing import Any, Self

from hypothesis import strategies as st

from ecotone.protocol import (
    ITEM_SIZES,
    Array,
    ECConnectorMetadata,
    ECConnectorOutput,
    ECConnectorStats,
    ECConnectorWorkerMetadata,
    EncoderSpec,
    KVConnectorOutput,
    ModelInfo,
    ModelRunnerOutput,
    MultiModalItem,
    NewRequestData,
    PoolingParams,
    RankStats,
    SamplingParams,
    ScheduledRequest,
    SchedulerOutput,
    TokenLogprobs,
    frozen_map,
    register,
    set_field,
)


@register
class Facts(ECConnectorWorkerMetadata, frozen=True):
    """A set of (rank, transfer id), joined by union pair by pair."""

    done: frozenset[tuple[int, int]] = frozenset()

    def aggregate(self, other: Self) -> Self:
        return type(self)(self.done | other.done)


@register
class FastFacts(Facts, frozen=True):
    """The same, with a fold of its own."""

    @classmethod
    def aggregate_all(cls, metas: Any, /) -> Self:
        return cls(frozenset().union(*(meta.done for meta in metas)))


@register
class Falsy(Facts, frozen=True, forbid_unknown_fields=True):
    """A report that is false in a boolean context."""

    def __len__(self) -> int:
        return 0


class Marks(ECConnectorWorkerMetadata, frozen=True):
    """The highest mark by name: another join, with a map."""

    marks: Mapping[str, int] = {}

    def __post_init__(self) -> None:
        set_field(self, "marks", frozen_map(self.marks))

    def aggregate(self, other: Self) -> Self:
        names = self.marks.keys() | other.marks.keys()
        low = -(2**63)
        return Marks({name: max(self.marks.get(name, low), other.marks.get(name, low)) for name in names})


register(Marks, "marks")


@register
class Orders(ECConnectorMetadata, frozen=True):
    loads: tuple[tuple[str, int], ...] = ()


ids = st.text(max_size=6)
id_sets = st.frozensets(ids, max_size=4)
small = st.integers(0, 5)
int64 = st.integers(-(2**63), 2**64 - 1)
tokens = st.lists(st.integers(0, 2**31 - 1), max_size=4).map(tuple)
natural = st.integers(0, 2**40)
positive = st.integers(1, 2**40)


@st.composite
def arrays(draw: st.DrawFn) -> Array:
    dtype = draw(st.sampled_from(sorted(ITEM_SIZES)))
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    size = prod(shape) * ITEM_SIZES[dtype]
    data = draw(st.binary(min_size=size, max_size=size))
    return Array(dtype, shape, bytes(byte & 1 for byte in data) if dtype == "bool" else data)


facts = st.frozensets(st.tuples(small, small), max_size=6)
metas = st.one_of(
    facts.map(Facts), facts.map(FastFacts), facts.map(Falsy), st.dictionaries(ids, int64, max_size=3).map(Marks)
)
orders = st.lists(st.tuples(ids, int64), max_size=3).map(lambda loads: Orders(tuple(loads)))
counters = st.dictionaries(
    st.sampled_from(["saves", "loads", "seconds"]),
    st.one_of(st.integers(0, 2**53), st.floats(0, 2**53)),
)
rank_stats = st.builds(RankStats, rank=small, epoch=st.integers(0, 2), counters=counters)
stats = st.lists(rank_stats, max_size=5).map(lambda entries: ECConnectorStats(tuple(entries)))


def ec_outputs(meta: st.SearchStrategy[Any] = metas) -> st.SearchStrategy[ECConnectorOutput]:
    return st.builds(
        ECConnectorOutput,
        finished_sending=id_sets,
        finished_recving=id_sets,
        failed_loads=id_sets,
        ec_connector_worker_meta=st.none() | meta,
        ec_connector_stats=st.none() | stats,
    )


kv_outputs = st.builds(
    KVConnectorOutput,
    finished_sending=id_sets,
    finished_recving=id_sets,
    invalid_block_ids=st.frozensets(natural, max_size=3),
    expected_finished_count=small,
)
logprobs = st.builds(TokenLogprobs, sampled=st.floats(allow_nan=False), top_ids=arrays(), top_logprobs=arrays())


@st.composite
def runner_outputs(draw: st.DrawFn, meta: st.SearchStrategy[Any] = metas) -> ModelRunnerOutput:
    req_ids = tuple(draw(st.lists(ids, max_size=3)))

    def parallel(entries: st.SearchStrategy[Any]) -> tuple[Any, ...]:
        return tuple(draw(st.just([]) | st.lists(entries, min_size=len(req_ids), max_size=len(req_ids))))

    return ModelRunnerOutput(
        req_ids=req_ids,
        sampled_token_ids=parallel(tokens),
        logprobs=parallel(st.lists(logprobs, max_size=2).map(tuple)),
        pooler_output=parallel(st.none() | arrays()),
        request_errors=draw(st.dictionaries(ids, ids, max_size=2)),
        kv_connector_output=draw(st.none() | kv_outputs),
        ec_connector_output=draw(st.none() | ec_outputs(meta)),
    )


sampling_params = st.builds(
    SamplingParams,
    n=st.integers(1, 128),
    max_tokens=st.integers(100, 2**31 - 1),
    min_tokens=st.integers(0, 100),
    temperature=st.floats(0, 100),
    top_k=st.integers(0, 2**31 - 1),
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0.01, 100),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    seed=st.none() | st.integers(0, 2**63 - 1),
    stop=st.lists(st.text(min_size=1, max_size=4), max_size=3).map(tuple),
    stop_token_ids=tokens,
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 64),
)
pooling_params = st.builds(
    PoolingParams, pooling=st.sampled_from(["last", "mean", "token"]), normalize=st.booleans()
)
items = st.builds(
    MultiModalItem,
    modality=st.sampled_from(["image", "video", "audio"]),
    item_id=ids,
    offset=natural,
    num_rows=positive,
    inputs=st.dictionaries(ids, arrays(), max_size=2),
)


@st.composite
def new_requests(draw: st.DrawFn) -> NewRequestData:
    found = tuple(draw(st.lists(items, max_size=2)))
    return NewRequestData(
        req_id=draw(ids),
        prompt_token_ids=draw(tokens),
        items=found,
        item_keys=tuple(draw(ids) for _ in found),
        params=draw(sampling_params | pooling_params),
        seed=draw(st.integers(0, 2**63 - 1)),
    )


indices = st.lists(natural, max_size=3).map(tuple)
scheduled_requests = st.builds(
    ScheduledRequest,
    req_id=ids,
    num_computed_tokens=natural,
    num_tokens=positive,
    num_known_tokens=positive,
    output_token_ids=tokens,
    block_ids=indices,
    item_keys=st.lists(ids, max_size=2).map(tuple),
    encode=indices,
    load=indices,
)
scheduler_outputs = st.builds(
    SchedulerOutput,
    step=positive,
    new_requests=st.lists(new_requests(), max_size=2).map(tuple),
    scheduled=st.lists(scheduled_requests, max_size=2).map(tuple),
    finished_req_ids=id_sets,
    free_encoder_keys=st.lists(ids, max_size=2).map(tuple),
    ec_connector_metadata=st.none() | orders,
)
model_infos = st.builds(
    ModelInfo,
    architecture=ids,
    encoder=st.builds(
        EncoderSpec, hidden_size=positive, levels=natural, dtype=st.sampled_from(sorted(ITEM_SIZES))
    ),
    vocab_size=positive,
    max_model_len=positive,
    eos_token_ids=tokens,
)
