"""The step protocol: what the scheduler orders, what the ranks report, and how reports are folded and sent."""

from ecotone.protocol.aggregate import (
    ECOutputAggregator,
    KVOutputAggregator,
    OutputAggregator,
    count_down,
    fold_outputs,
)
from ecotone.protocol.arrays import ITEM_SIZES, Array
from ecotone.protocol.connector import (
    AnyConnectorMetadata,
    CacheLookup,
    ECConnectorBase,
    ECConnectorContext,
    ECConnectorFactory,
    ECConnectorMetadata,
    ECItem,
    ECRole,
    ECSchedulerConnector,
    ECSchedulerContext,
    ECWorkerConnector,
    ECWorkerContext,
    EncoderCache,
    EncoderSpec,
    Participant,
)
from ecotone.protocol.frozen import EMPTY_MAP, freeze, frozen_map, set_field
from ecotone.protocol.model import ModelInfo
from ecotone.protocol.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    AnyWorkerMetadata,
    ECConnectorOutput,
    ECConnectorStats,
    ECConnectorWorkerMetadata,
    KVConnectorOutput,
    ModelRunnerOutput,
    RankStats,
    TokenLogprobs,
)
from ecotone.protocol.params import PoolingParams, SamplingParams
from ecotone.protocol.roundtrip import check_round_trip
from ecotone.protocol.step import MultiModalItem, NewRequestData, ScheduledRequest, SchedulerOutput
from ecotone.protocol.wire import MAX_MESSAGE_BYTES, decode, encode, register

__all__ = [
    "EMPTY_MAP",
    "EMPTY_MODEL_RUNNER_OUTPUT",
    "ITEM_SIZES",
    "MAX_MESSAGE_BYTES",
    "AnyConnectorMetadata",
    "AnyWorkerMetadata",
    "Array",
    "CacheLookup",
    "ECConnectorBase",
    "ECConnectorContext",
    "ECConnectorFactory",
    "ECConnectorMetadata",
    "ECConnectorOutput",
    "ECConnectorStats",
    "ECConnectorWorkerMetadata",
    "ECItem",
    "ECOutputAggregator",
    "ECRole",
    "ECSchedulerConnector",
    "ECSchedulerContext",
    "ECWorkerConnector",
    "ECWorkerContext",
    "EncoderCache",
    "EncoderSpec",
    "KVConnectorOutput",
    "KVOutputAggregator",
    "ModelInfo",
    "ModelRunnerOutput",
    "MultiModalItem",
    "NewRequestData",
    "OutputAggregator",
    "Participant",
    "PoolingParams",
    "RankStats",
    "SamplingParams",
    "ScheduledRequest",
    "SchedulerOutput",
    "TokenLogprobs",
    "check_round_trip",
    "count_down",
    "decode",
    "encode",
    "fold_outputs",
    "freeze",
    "frozen_map",
    "register",
    "set_field",
]
