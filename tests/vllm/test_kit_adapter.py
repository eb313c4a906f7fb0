"""Connectors written for vLLM, under the conformance kit. No engine of vLLM's is started here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import kit_toys
import pytest
import torch
from typer.testing import CliRunner
from vllm.config import ECTransferConfig, VllmConfig
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
from vllm.distributed.ec_transfer.ec_connector.cpu.common import ECCPUWorkerMetadata
from vllm.distributed.ec_transfer.ec_connector.example_connector import ECExampleConnector

from ecotone.cli.app import app
from ecotone.errors import ConfigError
from ecotone.protocol import CacheLookup, ECItem, ECSchedulerContext, ECWorkerContext, EncoderSpec, Participant
from ecotone.protocol.outputs import ECConnectorOutput
from ecotone.testing import check_connector, check_worker_metadata
from ecotone.vllm.kit import CPU, EXAMPLE, MOONCAKE, VllmConnectorFactory, VllmMetadata, vllm_subject

ENCODER = EncoderSpec(4, 0, "float32")
A, B = ECItem("hash-a", 3), ECItem("hash-b", 2)


def toy(name: str) -> Any:
    return vllm_subject(name, "kit_toys", metadata=(VllmMetadata(kit_toys.ToyReport),))


# -- rules -----------------------------------------------------------------------------------------------------


def test_a_right_connector_keeps_every_rule_that_applies():
    report = check_connector(toy("ToyConnector"), examples=10)
    assert report.ok, str(report)
    assert set(report.names("skipped")) == {
        "failed-loads-are-forgotten",  # vLLM has no way to say so
        "loss-is-a-failed-load",
        "reset-forgets",
        "awake-while-pending",  # its engine waits for the reports of every step
        "found-after-restart",
        "loads-share-memory",
        "metadata-aggregates-all",
    }
    assert report.names("not reached") == ("counters-only-grow",)


DEFECTS = {
    "AnnouncesOrders": ("ready-after-every-report", "encode fails (0)"),
    "LoadsInReverse": ("right-rows", "hit (0)"),
    "LeavesOut": ("ready-is-loaded", "one is held while another is loaded (0)"),
    "LoadsAll": ("cache-only-what-was-ordered", "one is held while another is loaded (0)"),
    "DefersForEver": ("every-request-ends", "hit (0)"),
    "NeverRests": ("rests-when-done", "hit (0)"),
    "RaisesWhenFinished": ("errors-are-reports", "hit (0)"),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_breaks_its_rule(name):
    rule, example = DEFECTS[name]
    report = check_connector(toy(name), only=example)
    assert [violation.rule for violation in report.violations] == [rule], str(report)


def test_the_defects_show_where_a_right_connector_breaks_nothing():
    for _, example in DEFECTS.values():
        report = check_connector(toy("ToyConnector"), only=example)
        assert report.ok, str(report)
        assert report.runs == 1


def test_a_connector_that_vllm_does_not_have():
    with pytest.raises(
        ConfigError, match="vLLM has no EC connector 'Nothing': module 'kit_toys' has no attribute"
    ):
        VllmConnectorFactory("Nothing", "kit_toys").validate("ec_both", {})
    with pytest.raises(ConfigError, match="Unsupported connector type: Nothing"):
        VllmConnectorFactory("Nothing").validate("ec_both", {})


# -- vLLM's guarantees -----------------------------------------------------------------------------------------


@pytest.fixture
def halves():
    factory = VllmConnectorFactory("Tells", "kit_toys")
    common: dict[str, Any] = {"engine_id": "engine", "role": "ec_both", "options": {}, "encoder": ENCODER}
    scheduler = factory.scheduler_half(
        ECSchedulerContext(
            **common, participants=(Participant(0, "host"), Participant(1, "host")), clock=lambda: 0.0
        )
    )
    workers = [
        factory.worker_half(ECWorkerContext(**common, rank=rank, epoch=0, device="cpu", wakeup=lambda: None))
        for rank in (0, 1)
    ]
    return scheduler, workers


def told(half: Any) -> list[tuple[Any, ...]]:
    """What vLLM's connector was called with since this was asked last."""
    connector = half._theirs
    said, connector.told = connector.told, []
    return said


def step(scheduler: Any, workers: Any, encode: dict[str, torch.Tensor] | None = None) -> list[ECConnectorOutput]:
    orders = scheduler.build_connector_meta()
    outputs = []
    for worker in workers:
        cache: dict[str, torch.Tensor] = {}
        worker.bind_connector_metadata(orders)
        worker.start_load_caches(cache)
        worker.wait_for_loads(cache)
        for key, rows in (encode or {}).items():
            cache[key] = rows
            worker.save_caches(cache, key)
        worker.get_finished(frozenset({"gone"}))
        outputs.append(ECConnectorOutput(ec_connector_worker_meta=worker.build_connector_worker_meta()))
        assert worker.get_ec_connector_stats() is None
        worker.clear_connector_metadata()
    return outputs


def test_the_schedulers_side_is_asked_as_vllm_asks(halves):
    scheduler, _ = halves
    assert scheduler.lookup("r", A) is scheduler.lookup("r", A) is CacheLookup.MISS
    assert scheduler.lookup("r", B) is CacheLookup.MISS
    scheduler.update_state_after_alloc("r", B)
    scheduler.request_finished("q")
    scheduler.build_connector_meta()
    assert told(scheduler) == [
        ("available", "r", 0),
        ("has", "hash-a"),
        ("has", "hash-a"),
        ("available", "r", 3),  # the tokens of the items before it
        ("has", "hash-b"),
        ("alloc", "r", 1, 2),
        ("finished", "q", True),
        ("build", {"r": [1]}, {"q"}),
    ]
    scheduler.lookup("r", A)
    scheduler.build_connector_meta()
    assert told(scheduler) == [("available", "r", 0), ("has", "hash-a"), ("build", {}, set())]


def test_a_workers_side_is_driven_as_vllm_drives_it(halves):
    scheduler, workers = halves
    step(scheduler, workers, {A.key: torch.ones(3, 4)})
    assert told(workers[1]) == [
        ("start_save",),
        ("start_load",),
        ("save", A.key),
        ("get_finished", {"gone"}),
        ("stats",),
        ("worker_meta",),
        ("clear",),
    ]


def test_reports_of_a_step_arrive_together_once_and_in_order(halves):
    scheduler, workers = halves
    outputs = []
    for item in (A, B):
        scheduler.lookup("r", item)
        scheduler.update_state_after_alloc("r", item)
        outputs.append(step(scheduler, workers, {item.key: torch.ones(item.num_rows, 4)}))
    told(scheduler)
    (first_0, first_1), (second_0, second_1) = outputs
    for report in (
        second_1,
        second_0,
        first_1,
        first_1,
    ):  # the second step waits for the first, and that for rank 0
        scheduler.update_connector_output(report)
    assert told(scheduler) == []
    assert scheduler.has_pending_work()
    for report in (first_0, first_0, second_1):
        scheduler.update_connector_output(report)
    assert told(scheduler) == [
        ("output", kit_toys.ToyReport({(1, 0, True), (1, 1, True)})),
        ("output", kit_toys.ToyReport({(2, 0, True), (2, 1, True)})),
    ]


def test_a_step_in_which_nothing_was_reported_is_nothing_to_hear(halves):
    scheduler, workers = halves
    for report in step(scheduler, workers):
        scheduler.update_connector_output(report)
    assert [name for name, *_ in told(scheduler)] == ["build"]
    assert not scheduler.has_pending_work()


def test_what_cannot_be_obtained_any_more_is_encoded(halves):
    scheduler, workers = halves
    scheduler._theirs.ensure_cache_available = lambda request, computed: False
    assert scheduler.lookup("r", A) is CacheLookup.PENDING
    scheduler._theirs.gone = {"r"}
    for report in step(scheduler, workers):
        scheduler.update_connector_output(report)
    assert scheduler.lookup("r", A) is CacheLookup.MISS
    assert scheduler.lookup("s", A) is CacheLookup.PENDING


def test_it_is_shut_down_once(halves):
    for half in (halves[0], *halves[1]):
        half.shutdown()
        half.shutdown()
        assert told(half) == [("shutdown",)]


# -- what docs/vllm-connectors.md says --------------------------------------------------------------------------


def check(*arguments: str) -> dict[str, str]:
    """Rule -> status, of a command."""
    result = CliRunner().invoke(app, ["check", *arguments, "--json"])
    plain = json.loads(result.stdout)
    assert result.exit_code == (0 if plain["ok"] else 1)
    return {verdict["rule"]["name"]: verdict["status"] for verdict in plain["verdicts"]}


def test_the_example_connector_without_its_files():
    statuses = check("ecotone.vllm.kit:EXAMPLE", "--only", "the store loses all (0)")
    assert [rule for rule, status in statuses.items() if status == "violated"] == ["ready-is-loaded"]


def test_the_example_connector_otherwise():
    report = check_connector(EXAMPLE, examples=5)
    assert [violation.rule for violation in report.violations] == ["ready-is-loaded"], str(report)
    assert {"right-rows", "saved-is-found", "found-after-restart", "same-tokens"} <= set(report.names("held"))


def test_so_it_is_without_the_kit(tmp_path: Path):
    """The same by hand: the file goes between ``has_cache_item`` and ``start_load_caches``."""
    config = VllmConfig(
        ec_transfer_config=ECTransferConfig(
            ec_connector="ECExampleConnector",
            ec_role="ec_both",
            ec_connector_extra_config={"shared_storage_path": str(tmp_path)},
        )
    )
    at_scheduler = ECExampleConnector(config, ECConnectorRole.SCHEDULER)
    at_worker = ECExampleConnector(config, ECConnectorRole.WORKER)
    at_worker.save_caches({"a": torch.ones(3, 4)}, "a")
    assert at_scheduler.has_cache_item("a")
    request = VllmRequest("a", 3)
    at_scheduler.update_state_after_alloc(request, 0)
    at_worker.bind_connector_metadata(at_scheduler.build_connector_meta(None))
    (tmp_path / "a" / "encoder_cache.safetensors").unlink()
    with pytest.raises(FileNotFoundError):
        at_worker.start_load_caches({})


class VllmRequest:
    def __init__(self, identifier: str, num_rows: int) -> None:
        self.mm_features = [type("Feature", (), {"identifier": identifier})]
        self.get_num_encoder_embeds = lambda index: num_rows


def test_the_cpu_connectors_reports_are_joined_in_place_and_counted():
    statuses = check("ecotone.vllm.kit:CPU")
    assert [rule for rule, status in statuses.items() if status == "violated"] == [
        "metadata-is-pure",
        "metadata-is-idempotent",
    ]
    left, right = ECCPUWorkerMetadata(["a"], [7]), ECCPUWorkerMetadata([], [7])
    assert left.aggregate(right) is left
    assert left.aggregate(right).completed_loads == [7, 7, 7]


def test_the_mooncake_connectors_reports_are_a_join():
    report = check_worker_metadata(MOONCAKE)
    assert report.ok, str(report)
    assert report.names("skipped") == ("metadata-aggregates-all",)


def test_a_report_that_vllm_would_drop():
    """vLLM's aggregator asks for the truth of a report: an empty list-like one is lost on the way."""
    report = check_worker_metadata(VllmMetadata(ListLike))
    assert [violation.rule for violation in report.violations] == ["metadata-counts-when-falsy"]


class ListLike(kit_toys.ToyReport):
    def __len__(self) -> int:
        return len(self.ended)

    def aggregate(self, other: Any) -> ListLike:
        return ListLike(self.ended | other.ended)


def test_what_is_read_the_same_says_the_same():
    literally = check_worker_metadata(VllmMetadata(ECCPUWorkerMetadata))
    assert "metadata-is-commutative" in {violation.rule for violation in literally.violations}
    assert CPU.name == "ECCPUWorkerMetadata"
