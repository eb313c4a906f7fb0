"""A connector of vLLM's kind behind Ecotone's contracts, driven as vLLM 0.32.0 drives it.

What vLLM guarantees to a connector holds here too:

* on the scheduler's side ``ensure_cache_available`` comes first, once for a request and a pass, then
  ``has_cache_item``, then ``update_state_after_alloc`` for what is loaded or encoded in the step, then one
  ``build_connector_meta``, whether the step computes anything or not;
* on a worker ``bind_connector_metadata``, ``start_save_caches`` (producers), ``start_load_caches`` (consumers),
  ``save_caches`` for each item encoded (producers), ``get_finished``, ``get_ec_connector_stats``,
  ``build_connector_worker_meta``, ``clear_connector_metadata``: the order of its V2 runner;
* orders and reports are pickled between the two sides; the reports of a step arrive once, when all ranks' are
  there, in the order of the steps, folded by vLLM's aggregator in the order of the ranks.

A rank's report that the kit lets come late therefore makes the whole step's late, as a slow rank does.

What a connector may not rely on here: parallel groups (ranks are objects in one process), a model configuration,
more of ``SchedulerOutput`` than the scheduled requests, their encoder inputs and the finished requests, more of a
request than its features, and ``update_state_after_free``, which is never called, as when each request ends before
the tokens of its items are computed.
"""

from __future__ import annotations

import pickle
from typing import Any, Self, cast

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase as VllmConnector
from vllm.distributed.ec_transfer.ec_connector.utils import ECOutputAggregator
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ECConnectorOutput as VllmOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from ecotone.errors import ContractError
from ecotone.protocol import (
    CacheLookup,
    ECConnectorMetadata,
    ECConnectorOutput,
    ECConnectorWorkerMetadata,
    ECItem,
    ECSchedulerConnector,
    ECSchedulerContext,
    ECWorkerConnector,
    ECWorkerContext,
    EncoderCache,
    register,
)


@register
class VllmOrders(ECConnectorMetadata, frozen=True, forbid_unknown_fields=True):
    """The number of the step, and the connector's metadata, pickled."""

    step: int
    pickled: bytes


@register
class VllmReports(ECConnectorWorkerMetadata, frozen=True, forbid_unknown_fields=True):
    """(step, rank, that rank's ``ECConnectorOutput``, pickled): facts, of which vLLM's fold is made later."""

    outputs: frozenset[tuple[int, int, bytes]] = frozenset()

    def aggregate(self, other: Self) -> Self:
        """The union."""
        return type(self)(self.outputs | other.outputs)

    def __str__(self) -> str:
        metas = (
            (step, rank, pickle.loads(pickled).ec_connector_worker_meta)  # noqa: S301 - what our workers pickled
            for step, rank, pickled in sorted(self.outputs)
        )
        return ", ".join(f"rank {rank} of step {step}: {meta}" for step, rank, meta in metas)


class VllmSchedulerHalf(ECSchedulerConnector):
    """A connector's scheduler side.

    Args:
        theirs: the connector, built in vLLM's role SCHEDULER.
    """

    def __init__(self, context: ECSchedulerContext, theirs: VllmConnector) -> None:
        super().__init__(context)
        self._theirs = theirs
        self._num_ranks = len(context.participants)
        self._requests: dict[str, Request] = {}
        self._step = 0
        self._in_flight: dict[int, dict[int, bytes]] = {}  # step -> rank -> its output, pickled
        self._unavailable: set[str] = set()
        self._finished: set[str] = set()
        # Of this pass:
        self._available: dict[tuple[str, int], bool] = {}
        self._stored: dict[str, bool] = {}
        self._scheduled: dict[str, list[int]] = {}
        self._closed = False

    def lookup(self, req_id: str, item: ECItem) -> CacheLookup:
        """PENDING is what ``ensure_cache_available`` defers. An item that the connector can no longer obtain, for
        which vLLM fails the request, is encoded here."""
        request, index = self._place(req_id, item)
        if req_id not in self._unavailable:
            if (req_id, index) not in self._available:
                computed = request.mm_features[index].mm_position.offset
                available = self._theirs.ensure_cache_available(request, computed)
                self._available[req_id, index] = bool(available)
            if not self._available[req_id, index]:
                return CacheLookup.PENDING
        self._stored[item.key] = bool(self._theirs.has_cache_item(item.key))
        return CacheLookup.READY if self._stored[item.key] else CacheLookup.MISS

    def update_state_after_alloc(self, req_id: str, item: ECItem) -> None:
        """The same, with vLLM's request."""
        request, index = self._place(req_id, item)
        self._theirs.update_state_after_alloc(request, index)
        scheduled = self._scheduled.setdefault(req_id, [])
        if not self._stored.get(item.key):
            scheduled.append(index)

    def build_connector_meta(self) -> VllmOrders:
        """Orders of every step: vLLM's workers are told of each."""
        output = SchedulerOutput.make_empty()
        output.scheduled_encoder_inputs = {name: items for name, items in self._scheduled.items() if items}
        output.num_scheduled_tokens = dict.fromkeys(self._scheduled, 1)
        output.total_num_scheduled_tokens = len(self._scheduled)
        output.finished_req_ids = self._finished
        metadata = self._theirs.build_connector_meta(output)
        self._finished, self._available, self._stored, self._scheduled = set(), {}, {}, {}
        self._step += 1
        self._in_flight[self._step] = {}
        return VllmOrders(self._step, pickle.dumps(metadata))

    def update_connector_output(self, output: ECConnectorOutput) -> None:
        """Hand over the steps of which all ranks have reported, none before those that came before it."""
        report = output.ec_connector_worker_meta
        for step, rank, pickled in report.outputs if isinstance(report, VllmReports) else ():
            if step in self._in_flight:
                self._in_flight[step][rank] = pickled
        for step in sorted(self._in_flight):
            if len(self._in_flight[step]) < self._num_ranks:
                break
            self._hand_over(self._in_flight.pop(step))

    def request_finished(self, req_id: str) -> None:
        """Said to be stopped, however it ended."""
        request = self._requests.pop(req_id, None) or _request(req_id)
        request.status = RequestStatus.FINISHED_STOPPED
        self._theirs.request_finished(request)
        self._finished.add(req_id)
        self._unavailable.discard(req_id)

    def has_pending_work(self) -> bool:
        """vLLM's engine also goes on while the output of a step is outstanding."""
        return bool(self._in_flight) or bool(self._theirs.has_pending_push_work())

    def shutdown(self) -> None:
        """Once, as vLLM does."""
        if not self._closed:
            self._closed = True
            self._theirs.shutdown()

    def _hand_over(self, by_rank: dict[int, bytes]) -> None:
        self._unavailable |= self._theirs.take_unavailable_requests()
        outputs = [
            ModelRunnerOutput.with_ec_conn_output_only(pickle.loads(pickled))  # noqa: S301 - what our workers pickled
            for _, pickled in sorted(by_rank.items())
        ]
        folded = ECOutputAggregator().aggregate(outputs)
        if folded is not None and folded.ec_connector_output is not None:
            self._theirs.update_connector_output(folded.ec_connector_output)

    def _place(self, req_id: str, item: ECItem) -> tuple[Request, int]:
        """vLLM's request, and where in it the item is. Items become known one by one, each behind those before."""
        request = self._requests.get(req_id)
        if request is None:
            request = self._requests[req_id] = _request(req_id)
        features = request.mm_features
        for index, feature in enumerate(features):
            if feature.identifier == item.key:
                return request, index
        offset = sum(feature.mm_position.length for feature in features)
        position = PlaceholderRange(offset=offset, length=item.num_rows)
        features.append(
            MultiModalFeatureSpec(data=None, modality="image", identifier=item.key, mm_position=position)
        )
        return request, len(features) - 1


def _request(req_id: str) -> Request:
    return Request(
        request_id=req_id,
        prompt_token_ids=[0],
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        mm_features=[],
    )


class VllmWorkerHalf(ECWorkerConnector):
    """A connector's worker side.

    Args:
        theirs: the connector, built in vLLM's role WORKER.
    """

    worker_metadata_type = VllmReports

    def __init__(self, context: ECWorkerContext, theirs: VllmConnector) -> None:
        super().__init__(context)
        self._rank = context.rank
        self._theirs = theirs
        self._step = 0
        self._finished: set[str] = set()
        self._closed = False

    def bind_connector_metadata(self, metadata: ECConnectorMetadata) -> None:
        """See the contract."""
        if not isinstance(metadata, VllmOrders):
            raise ContractError(f"orders of type {type(metadata).__name__} are not this connector's")
        self._step = metadata.step
        self._theirs.bind_connector_metadata(pickle.loads(metadata.pickled))  # noqa: S301 - our own half's

    def clear_connector_metadata(self) -> None:
        """See the contract."""
        self._theirs.clear_connector_metadata()

    def start_load_caches(self, encoder_cache: EncoderCache) -> None:
        """See the contract."""
        rows = cast("dict[str, Any]", encoder_cache)  # a mapping with all that a dict of vLLM's is asked for
        if self._theirs.is_producer:
            self._theirs.start_save_caches(encoder_cache=rows)
        if self._theirs.is_consumer:
            self._theirs.start_load_caches(rows)

    def wait_for_loads(self, encoder_cache: EncoderCache) -> None:
        """Nothing to wait for: ``start_load_caches`` leaves the rows in the encoder cache."""

    def save_caches(self, encoder_cache: EncoderCache, key: str) -> None:
        """See the contract."""
        self._theirs.save_caches(encoder_cache=cast("dict[str, Any]", encoder_cache), mm_hash=key)

    def get_finished(self, finished_req_ids: frozenset[str]) -> tuple[frozenset[str], frozenset[str]]:
        """What vLLM's side answers is part of the report."""
        self._finished = set(finished_req_ids)
        return frozenset(), frozenset()

    def build_connector_worker_meta(self) -> VllmReports:
        """What vLLM's runner collects at the end of a step."""
        output = VllmOutput()
        output.finished_sending, output.finished_recving = self._theirs.get_finished(self._finished)
        output.ec_connector_stats = self._theirs.get_ec_connector_stats()
        output.ec_connector_worker_meta = self._theirs.build_connector_worker_meta()
        return VllmReports(frozenset({(self._step, self._rank, pickle.dumps(output))}))

    def shutdown(self) -> None:
        """Once, as vLLM does."""
        if not self._closed:
            self._closed = True
            self._theirs.shutdown()
