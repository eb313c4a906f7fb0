"""What the sides say survives vLLM's pickle, and its joins are joins."""

from __future__ import annotations

import pickle

from hypothesis import given
from hypothesis import strategies as st
from plugin_doubles import sent

from ecotone.connectors.messages import EcotoneStepMetadata, EcotoneWorkerMetadata, Order, Report, ReportKind
from ecotone.node.exchange import Extent, Layout
from ecotone.protocol.outputs import ECConnectorOutput, ECConnectorStats, RankStats
from ecotone.vllm.messages import NO_ORDERS, VllmStepMetadata, VllmWorkerMetadata

small = st.integers(0, 3)
reports = st.frozensets(st.builds(Report, small, small, small, st.sampled_from(list(ReportKind))), max_size=4)
stats = st.builds(
    lambda counters: ECConnectorStats(tuple(RankStats(rank, 0, {"saves": n}) for rank, n in counters.items())),
    st.dictionaries(small, st.integers(0, 9), max_size=3),
)
metadata = st.builds(
    lambda meta, stats: VllmWorkerMetadata(
        ECConnectorOutput(ec_connector_worker_meta=meta, ec_connector_stats=stats)
    ),
    st.none() | reports.map(EcotoneWorkerMetadata),
    st.none() | stats,
)


@given(metadata)
def test_a_report_survives_pickle(one):
    assert sent(one) == one


@given(metadata, metadata, metadata)
def test_a_join_is_one(a, b, c):
    before = pickle.dumps(a), pickle.dumps(b)
    assert a.aggregate(b) == b.aggregate(a)
    assert a.aggregate(b).aggregate(c) == a.aggregate(b.aggregate(c))
    assert a.aggregate(a) == a
    assert (pickle.dumps(a), pickle.dumps(b)) == before


def test_orders_survive_pickle():
    order = Order("k", 1, Layout("float32", (2, 3)), (Extent("r", 1, 0, 24),), 7)
    one = VllmStepMetadata(EcotoneStepMetadata((0,), (order,)), {"k": "identifier"}, "host")
    assert sent(one) == one
    assert VllmStepMetadata() == NO_ORDERS
    assert sent(VllmStepMetadata()) == NO_ORDERS
