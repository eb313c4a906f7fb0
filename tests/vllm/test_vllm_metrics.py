"""The connector's metrics in vLLM's registry. No engine is started here."""

from __future__ import annotations

from types import SimpleNamespace

import quiet_vllm  # noqa: F401 - before vLLM
from prometheus_client import REGISTRY, Counter, Gauge, Histogram

from ecotone.vllm.metrics import EcotonePromMetrics, exported

LABELS = {"model_name": "m", "engine": "0"}


def make() -> EcotonePromMetrics:
    kinds = {kind: kind for kind in (Counter, Gauge, Histogram)}
    return EcotonePromMetrics(
        SimpleNamespace(ec_transfer_config=None), kinds, list(LABELS), {0: [*LABELS.values()]}
    )


def test_a_second_engine_of_a_process_has_metrics_of_its_own():
    make().observe({"hits": 3.0, "ranks.views": 2.0, "pins_held": 1.0})
    assert REGISTRY.get_sample_value("ecotone:hits_total", LABELS) == 3.0
    make().observe({"hits": 1.0})
    assert REGISTRY.get_sample_value("ecotone:hits_total", LABELS) == 1.0
    assert REGISTRY.get_sample_value("ecotone:views_total", LABELS) == 0.0
    assert REGISTRY.get_sample_value("ecotone:pins_held", LABELS) == 0.0


def test_what_could_not_be_stored_or_loaded_is_counted_whatever_the_reason():
    statistics = {"unsaved.no_room": 1.0, "unsaved.waited": 2.0, "ranks.save_failed.layout": 4.0}
    counted = exported(
        {**statistics, "ranks.save_failed.copy": 1.0, "ranks.load_failed.region": 3.0, "told.abort": 9}
    )
    assert counted["unsaved"] == 3.0
    assert counted["save_failures"] == 5.0
    assert counted["load_failures"] == 3.0
