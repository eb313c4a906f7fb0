"""How the connector hears that the model's weights changed.

vLLM's ``reset_encoder_cache`` empties the scheduler's own encoder cache and those of the workers, and tells no EC
connector. What reaches the scheduler's process is one method, ``Scheduler.reset_encoder_cache``; it is wrapped, on
the class that this engine uses, when the connector is made. See docs/decisions/0029-weight-updates-in-vllm.md.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from functools import wraps
from typing import Any, cast

from ecotone.errors import ConfigError

logger = logging.getLogger(__name__)

_METHOD = "reset_encoder_cache"
_WRAPPED = "__ecotone_hears_resets__"


def hear_resets(scheduler_class: type[Any], connector_of: Callable[[Any], Callable[[], None] | None]) -> None:
    """Call the connector's reset with every ``reset_encoder_cache`` of schedulers of this class. Idempotent.

    Args:
        scheduler_class: the class that vLLM's engine makes its scheduler of.
        connector_of: for a scheduler, what to call; ``None`` where its connector is another one.

    Raises:
        ConfigError: the class has no such method, or one of another signature: then weight updates could not be
            heard of, and old encodings would be served after one.
    """
    method = getattr(scheduler_class, _METHOD, None)
    if method is None or list(inspect.signature(method).parameters) != ["self"]:
        raise ConfigError(
            f"{scheduler_class.__module__}.{scheduler_class.__qualname__} has no method {_METHOD}(self): Ecotone "
            "could not hear of weight updates, and would serve encodings of the old weights"
        )
    if hasattr(method, _WRAPPED):
        return
    original = cast(Callable[[Any], None], method)

    @wraps(original)
    def reset_encoder_cache(self: Any) -> None:
        original(self)
        reset = connector_of(self)
        if reset is not None:
            reset()

    setattr(reset_encoder_cache, _WRAPPED, True)
    setattr(scheduler_class, _METHOD, reset_encoder_cache)
