"""How a weight update is heard of."""

from __future__ import annotations

import pytest

from ecotone.errors import ConfigError
from ecotone.vllm.reset import hear_resets


def scheduler_classes():
    class Scheduler:
        def __init__(self) -> None:
            self.heard: list[str] = []

        def reset_encoder_cache(self) -> None:
            self.heard.append("own")

    class AsyncScheduler(Scheduler):
        pass

    return Scheduler, AsyncScheduler


def connector_of(scheduler):
    return lambda: scheduler.heard.append("connector")


@pytest.mark.parametrize("order", [(0,), (1,), (0, 1), (1, 0), (0, 0), (1, 1, 0)])
def test_the_connector_hears_once_after_the_scheduler(order):
    classes = scheduler_classes()
    for which in order:
        hear_resets(classes[which], connector_of)
    scheduler = classes[order[0]]()
    scheduler.reset_encoder_cache()
    assert scheduler.heard == ["own", "connector"]


def test_a_scheduler_with_another_connector_goes_on_as_before():
    kind, _ = scheduler_classes()
    hear_resets(kind, lambda _: None)
    scheduler = kind()
    scheduler.reset_encoder_cache()
    assert scheduler.heard == ["own"]


def test_a_scheduler_that_cannot_be_heard_is_refused():
    class Other:
        def reset_encoder_cache(self, kind: str) -> None: ...

    class Without:
        pass

    for kind in (Other, Without):
        with pytest.raises(ConfigError, match=f"{kind.__name__} has no method reset_encoder_cache"):
            hear_resets(kind, connector_of)
