"""What a connector need not say for itself: roles, and the defaults of a half that does not use the channel."""

import pytest

from ecotone.protocol import (
    CacheLookup,
    ECConnectorFactory,
    ECConnectorMetadata,
    ECConnectorOutput,
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

SPEC = EncoderSpec(hidden_size=8, levels=2, dtype="float32")


class QuietScheduler(ECSchedulerConnector):
    def lookup(self, req_id: str, item: ECItem) -> CacheLookup:
        return CacheLookup.MISS

    def update_state_after_alloc(self, req_id: str, item: ECItem) -> None: ...

    def build_connector_meta(self) -> ECConnectorMetadata | None:
        return None


class QuietWorker(ECWorkerConnector):
    def bind_connector_metadata(self, metadata: ECConnectorMetadata) -> None: ...
    def clear_connector_metadata(self) -> None: ...
    def start_load_caches(self, encoder_cache: EncoderCache) -> None: ...
    def wait_for_loads(self, encoder_cache: EncoderCache) -> None: ...
    def save_caches(self, encoder_cache: EncoderCache, key: str) -> None: ...


def scheduler_half(role: ECRole = "ec_both") -> QuietScheduler:
    return QuietScheduler(
        ECSchedulerContext(
            engine_id="e",
            role=role,
            options={},
            participants=(Participant(0, "host"),),
            encoder=SPEC,
            clock=lambda: 0.0,
        )
    )


def worker_half() -> QuietWorker:
    return QuietWorker(
        ECWorkerContext(
            engine_id="e",
            role="ec_both",
            options={},
            rank=0,
            epoch=1,
            encoder=SPEC,
            device="cpu",
            wakeup=lambda: None,
        )
    )


@pytest.mark.parametrize(
    ("role", "producer", "consumer", "encode_only"),
    [("ec_producer", True, False, True), ("ec_consumer", False, True, False), ("ec_both", True, True, False)],
)
def test_roles(role: ECRole, producer: bool, consumer: bool, encode_only: bool) -> None:
    half = scheduler_half(role)
    assert (half.is_producer, half.is_consumer, half.is_encode_only) == (producer, consumer, encode_only)


def test_a_worker_half_that_does_not_use_the_channel_reports_nothing() -> None:
    half = worker_half()
    sent, received = half.get_finished(frozenset({"r"}))
    report = ECConnectorOutput(
        finished_sending=sent,
        finished_recving=received,
        ec_connector_worker_meta=half.build_connector_worker_meta(),
        ec_connector_stats=half.get_ec_connector_stats(),
    )
    assert report.is_empty()
    assert half.worker_metadata_type is None
    half.shutdown()


def test_a_scheduler_half_that_does_not_use_the_channel_lets_the_engine_rest() -> None:
    half = scheduler_half()
    half.update_connector_output(ECConnectorOutput(failed_loads={"k"}))
    half.request_finished("r")
    half.reset_cache("namespace")
    half.check_integrity()
    assert not half.has_pending_work()
    assert half.statistics() == half.rank_statistics() == {}
    half.shutdown()


@pytest.mark.parametrize("contract", [ECSchedulerConnector, ECWorkerConnector, ECConnectorFactory])
def test_contracts_are_abstract(contract: type) -> None:
    with pytest.raises(TypeError, match="abstract"):
        contract()


def test_a_row_holds_its_levels_side_by_side() -> None:
    assert SPEC.width == 24
