import os
from functools import partial

import pytest
import torch

from ecotone.config import ECConfig, EngineConfig
from ecotone.errors import ConfigError, ContractError, ModelError, RoundTripError
from ecotone.protocol.outputs import ECConnectorWorkerMetadata
from ecotone.protocol.params import PoolingParams
from ecotone.testing.connectors import RecordingConnectorFactory, RecordingMetadata
from ecotone.testing.models import PLACEHOLDER, load_tiny_model, tiny_item
from ecotone.testing.steps import OrderedRequest, Steps, whole_steps
from ecotone.worker.ranks import RankSpec
from ecotone.worker.worker import Worker, name_device

P = PLACEHOLDER


def make_worker(factory=None, *, wakeup=lambda: None, rank=0, load=load_tiny_model, **config):
    config = EngineConfig(**{"model": "tiny", "device": "cpu", "block_size": 4, "kv_blocks": 64, **config})
    return Worker(config, factory, "engine-1", RankSpec(rank=rank), 2, wakeup, load=load)


def test_methods_are_called_by_name():
    worker = make_worker()
    assert worker.call("model_info").architecture == "TinyModel"
    assert worker.call("statistics")["pid"] == os.getpid()
    with pytest.raises(ContractError, match="no method '__init__'; it has model_info, execute_model"):
        worker.call("__init__")
    worker.call("shutdown")


def test_generation_needs_a_second_call_and_pooling_does_not():
    request = OrderedRequest("a", [5, 6])
    worker = make_worker()
    steps = Steps(whole_steps(worker))
    assert len(steps.step((request, request.order())).sampled_token_ids[0]) == 1
    worker = make_worker(task="embed")
    request = OrderedRequest("a", [5, 6], params=PoolingParams())
    output = Steps(partial(worker.call, "execute_model")).step((request, request.order()))
    assert output.pooler_output[0].shape == (8,)


def test_the_connector_half_knows_where_it_is():
    factory, woken = RecordingConnectorFactory(), []
    ec = ECConfig(role="ec_producer", options={"silent": True})
    worker = make_worker(factory, rank=3, ec=ec, wakeup=lambda: woken.append(1))
    context = factory.workers[0].context
    assert (context.engine_id, context.role, context.options) == ("engine-1", "ec_producer", {"silent": True})
    assert (context.rank, context.epoch, context.device) == (3, 2, "cpu")
    assert context.encoder == worker.model_info().encoder
    context.wakeup()
    assert woken == [1]
    assert worker.takes_part


def test_without_a_configured_connector_none_is_built():
    factory = RecordingConnectorFactory()
    assert not make_worker(factory).takes_part
    assert factory.workers == []


def test_a_configured_connector_without_a_factory_is_refused():
    with pytest.raises(ConfigError, match="'Other' is configured"):
        make_worker(None, ec=ECConfig(connector="Other"))


def test_reset_drops_the_encodings_and_shutdown_closes_the_connector():
    factory = RecordingConnectorFactory()
    worker = make_worker(factory, ec=ECConfig())
    steps = Steps(whole_steps(worker))
    request = OrderedRequest("a", [P, P], (tiny_item("cat", 0, 2),))
    steps.step((request, request.order(encode=(0,))), metadata=RecordingMetadata())
    assert worker.statistics()["encoder_cache_rows"] == 2
    worker.call("reset_encoder_cache")
    assert worker.statistics()["encoder_cache_rows"] == 0
    steps.step(metadata=RecordingMetadata())
    worker.call("shutdown")
    worker.call("shutdown")
    assert factory.workers[0].shutdowns == 2


def test_the_encodings_go_before_the_connector(monkeypatch):
    """They may be views of memory that the connector unmaps."""
    factory, held = RecordingConnectorFactory(), []
    worker = make_worker(factory, ec=ECConfig())
    request = OrderedRequest("a", [P, P], (tiny_item("cat", 0, 2),))
    Steps(whole_steps(worker)).step((request, request.order(encode=(0,))))
    monkeypatch.setattr(
        factory.workers[0], "shutdown", lambda: held.append(worker.statistics()["encoder_cache_entries"])
    )
    worker.shutdown()
    assert held == [0]


class Unsendable(ECConnectorWorkerMetadata, frozen=True):
    anything: object = None

    def aggregate(self, other):
        return self


def test_a_half_that_is_refused_is_closed(monkeypatch):
    factory = RecordingConnectorFactory()
    build = factory.worker_half

    def unsendable(context):
        half = build(context)
        half.worker_metadata_type = Unsendable
        return half

    monkeypatch.setattr(factory, "worker_half", unsendable)
    with pytest.raises(RoundTripError):
        make_worker(factory, ec=ECConfig())
    assert factory.workers[0].shutdowns == 1


def test_the_model_is_loaded_before_the_connector():
    factory = RecordingConnectorFactory()
    with pytest.raises(ModelError):
        make_worker(factory, model="none", ec=ECConfig())
    assert factory.workers == []


def test_what_the_loader_is_asked_for():
    asked = []

    def load(path, **options):
        asked.append((path, options))
        return load_tiny_model(path, **{**options, "dtype": None})

    make_worker(load=load, dtype="bfloat16", max_model_len=99)
    make_worker(load=load)
    cpu = torch.device("cpu")
    assert asked == [
        ("tiny", {"device": cpu, "dtype": torch.bfloat16, "max_model_len": 99}),
        ("tiny", {"device": cpu, "dtype": None, "max_model_len": None}),
    ]


@pytest.mark.parametrize(
    ("device", "rank", "count", "named"),
    [
        ("auto", 1, 0, "cpu"),
        ("auto", 1, 4, "cuda:1"),
        ("cuda", 3, 4, "cuda:3"),
        ("cuda:2", 0, 4, "cuda:2"),
        ("cpu", 2, 4, "cpu"),
        ("cpu:0", 0, 0, "cpu"),
    ],
)
def test_each_rank_names_its_device(monkeypatch, device, rank, count, named):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert str(name_device(device, rank)) == named


@pytest.mark.parametrize(
    ("device", "rank", "says"),
    [
        ("cuda", 4, "there is no cuda:4; 4 CUDA devices found"),
        ("cuda:9", 0, "there is no cuda:9"),
        ("gpu", 0, "use auto, cpu, cuda or cuda:<index>"),
        ("meta", 0, "device='meta' is not supported"),
    ],
)
def test_a_device_that_is_not_there_is_refused(monkeypatch, device, rank, says):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(ConfigError, match=says):
        name_device(device, rank)
