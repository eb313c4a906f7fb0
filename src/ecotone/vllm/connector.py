"""The connector as vLLM builds it: one class with a role, of which each process uses one side.

vLLM builds a connector twice from the same configuration: in the scheduler's process and in each worker's. What
belongs to one role is in a class of its own (``SchedulerSide``, ``WorkerSide``); this one only translates.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorRole
from vllm.distributed.ec_transfer.ec_connector.utils import PlaceholderMetadataResolver
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.v1.request import RequestStatus

from ecotone.connectors.factory import EcotoneConnectorFactory
from ecotone.errors import ContractError
from ecotone.node.keys import Namespace
from ecotone.protocol.connector import ECSchedulerContext, ECWorkerContext, Participant
from ecotone.vllm.identity import encoder_spec, encoder_widths, namespace
from ecotone.vllm.messages import VllmStepMetadata, VllmWorkerMetadata
from ecotone.vllm.metrics import EcotonePromMetrics, EcotoneStats, StatsSource
from ecotone.vllm.options import parse_vllm_options
from ecotone.vllm.reset import hear_resets
from ecotone.vllm.scheduler import SchedulerSide, media_test
from ecotone.vllm.support import check_supported, check_version
from ecotone.vllm.worker import EncoderOutputs, WorkerSide

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ECConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


class EcotoneConnector(ECConnectorBase):
    """See the module. Its options are ``VllmOptions``, from ``ec_connector_extra_config``.

    What vLLM asks and does badly with is not used: a request that ended is never kept, nothing depends on
    ``shutdown``, and the engine is never kept awake. Each worker tells the node itself what became of its copies,
    since not every runner of vLLM carries its reports to the scheduler, and an idle scheduler hears nothing.

    Raises:
        ConfigError: options, a release of vLLM or a combination that cannot work.
        ResourceError: the machine does not have the memory.
    """

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config=vllm_config, role=role)
        _log_beside_vllm()
        check_version(vllm.__version__)
        transfer = vllm_config.ec_transfer_config
        options, for_connector = parse_vllm_options(transfer.ec_connector_extra_config)
        check_supported(vllm_config, options)
        self._factory = EcotoneConnectorFactory(hosted=True)
        self._factory.validate(transfer.ec_role, for_connector)
        # An operator may give an engine the id of another one, or of its last start: to a node they would be one
        # engine. vLLM makes the instance's id anew with each start. Data-parallel engines share both.
        place = vllm_config.parallel_config.data_parallel_index
        self._engine_id = f"{transfer.engine_id}.{vllm_config.instance_id}.{place}"
        self._widths = encoder_widths(vllm_config, options)
        self._encoder = encoder_spec(vllm_config, self._widths)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role is ECConnectorRole.WORKER:
            # The scheduler's connector is made when the model has been loaded; what it will need is missed now.
            self._factory.check_machine(transfer.ec_role, for_connector)
            self._worker = self._make_worker(vllm_config, for_connector)
        else:
            names = namespace(vllm_config, options, self._encoder, vllm.__version__)
            self._scheduler = self._make_scheduler(vllm_config, for_connector, names)
            hear_resets(vllm_config.scheduler_config.get_scheduler_cls(), _reset_of)
            where = options.node if options.node_path is not None else f"{options.memory} in this process"
            logger.info(
                "%s, engine %s: namespace %s, node: %s, disk: %s",
                transfer.ec_role,
                self._engine_id,
                names.digest,
                where,
                options.disk,
            )
        self._stats = StatsSource()
        self._news = False  # whether statistics may have changed since vLLM asked

    def _make_scheduler(self, vllm_config: VllmConfig, options: dict[str, Any], names: Namespace) -> SchedulerSide:
        # Only the first stage of a pipeline has the encoder; its ranks are numbered within it.
        ranks = range(vllm_config.parallel_config.tensor_parallel_size)
        context = ECSchedulerContext(
            engine_id=self._engine_id,
            role=vllm_config.ec_transfer_config.ec_role,
            options=options,
            participants=tuple(Participant(rank, socket.gethostname()) for rank in ranks),
            encoder=self._encoder,
            clock=time.monotonic,
        )
        half = self._factory.scheduler_half(context)
        reach = vllm_config.scheduler_config.max_num_batched_tokens + vllm_config.num_speculative_tokens + 1
        brings_media = media_test(PlaceholderMetadataResolver(vllm_config.model_config).fields_for)
        return SchedulerSide(half, names, self._widths, reach, brings_media)

    def _make_worker(self, vllm_config: VllmConfig, options: dict[str, Any]) -> WorkerSide:
        if not get_pp_group().is_first_rank:
            return WorkerSide(None)
        kind = vllm_config.device_config.device_type
        context = ECWorkerContext(
            engine_id=self._engine_id,
            role=vllm_config.ec_transfer_config.ec_role,
            options=options,
            rank=get_tp_group().rank_in_group,
            epoch=0,  # vLLM never starts a worker again
            encoder=self._encoder,
            device=kind if kind == "cpu" else f"{kind}:{torch.accelerator.current_device_index()}",
            wakeup=_nothing_to_wake,
        )
        return WorkerSide(self._factory.worker_half(context))

    @property
    def _at_scheduler(self) -> SchedulerSide:
        if self._scheduler is None:
            raise ContractError("a scheduler's hook was called on a worker's connector")
        return self._scheduler

    @property
    def _at_worker(self) -> WorkerSide:
        if self._worker is None:
            raise ContractError("a worker's hook was called on a scheduler's connector")
        return self._worker

    def shutdown(self) -> None:
        """Give everything back. Idempotent."""
        for side in (self._scheduler, self._worker):
            if side is not None:
                side.shutdown()

    # -- a worker's ---------------------------------------------------------------------------------------------

    def bind_connector_metadata(self, connector_metadata: VllmStepMetadata) -> None:
        """The orders of the step that begins."""
        self._at_worker.bind(connector_metadata)

    def clear_connector_metadata(self) -> None:
        """The step ended."""
        self._at_worker.clear()

    def start_load_caches(self, encoder_cache: EncoderOutputs, **_: Any) -> None:
        """Load what was ordered; when it returns, the compute that follows may read it."""
        self._at_worker.load(encoder_cache)

    def save_caches(self, encoder_cache: EncoderOutputs, mm_hash: str, **_: Any) -> None:
        """``encoder_cache[mm_hash]`` was just encoded: start its save, if one was ordered."""
        self._at_worker.save(encoder_cache, mm_hash)

    def build_connector_worker_meta(self) -> VllmWorkerMetadata | None:
        """What happened on this rank since the last step."""
        return self._at_worker.report()

    # -- the scheduler's ----------------------------------------------------------------------------------------

    def has_cache_item(self, identifier: str) -> bool:
        """Whether the item is loaded rather than encoded, if it is scheduled in this pass."""
        return self._at_scheduler.has_item(identifier)

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        """False while an item that ``request`` comes to next is being written elsewhere."""
        is_running = request.status is RequestStatus.RUNNING
        return self._at_scheduler.ensure_available(request, num_computed_tokens, is_running=is_running)

    def take_unavailable_requests(self) -> set[str]:
        """Requests that named an item without bringing it, and it is not stored: vLLM fails these."""
        return self._at_scheduler.take_unavailable()

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        """Item ``index`` of ``request`` is loaded or encoded in this step."""
        self._news = True
        self._at_scheduler.allocated(request.mm_features[index].identifier)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> VllmStepMetadata:
        """End the pass: its orders."""
        return self._at_scheduler.build_orders(scheduler_output.free_encoder_mm_hashes)

    def update_connector_output(self, connector_output: ECConnectorOutput) -> None:
        """What the ranks reported, folded. Executors that do not fold send an empty one for each step."""
        metadata = connector_output.ec_connector_worker_meta
        if metadata is not None:
            self._news = True
            self._at_scheduler.take_in(metadata)

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """Never keeps the request: vLLM would not let go of its KV blocks any more."""
        self._at_scheduler.request_finished(request.request_id)
        return False, None

    def reset_cache(self) -> None:
        """The weights changed: nothing stored before is found again."""
        self._at_scheduler.reset()

    # -- statistics ---------------------------------------------------------------------------------------------

    def get_ec_connector_stats(self) -> EcotoneStats | None:
        """What changed since the last call, from the scheduler. Workers' counters come to it in their reports."""
        if self._scheduler is None or not self._news:
            return None
        self._news = False
        return self._stats.changes(self._scheduler.statistics())

    @classmethod
    def build_ec_connector_stats(cls, data: dict[str, Any] | None = None) -> EcotoneStats:
        """See vLLM's contract."""
        return EcotoneStats(data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> EcotonePromMetrics:
        """See vLLM's contract."""
        return EcotonePromMetrics(*args)


def _log_beside_vllm() -> None:
    """Let Ecotone's log lines look like vLLM's, and go where those go, unless somebody configured them."""
    own, theirs = logging.getLogger("ecotone"), logging.getLogger("vllm")
    if not own.hasHandlers():
        own.setLevel(theirs.level)
        for handler in theirs.handlers:
            own.addHandler(handler)


def _reset_of(scheduler: Any) -> Callable[[], None] | None:
    connector = scheduler.get_ec_connector()
    return connector.reset_cache if isinstance(connector, EcotoneConnector) else None


def _nothing_to_wake() -> None:
    """vLLM cannot be woken for a report: the node is told by the rank itself."""
