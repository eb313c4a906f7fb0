"""What a connector says it can do, so that it is held to that and to no more."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import msgspec

from ecotone.protocol.connector import ECConnectorFactory, ECRole
from ecotone.testing.kit.plan import Faults
from ecotone.testing.kit.uses import MetadataUse

_SCRATCH = "{scratch}"


class Capabilities(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Honest differences between connectors. A rule that needs what is missing is reported as skipped, by name.

    Attributes:
        roles: roles that it serves.
        max_ranks: ranks that may take part in an engine of it.
        stores: what it saves can be found again. (A connector may do nothing and still be correct.)
        reports_decide: the scheduler half learns that a save is complete from the worker halves' reports, every
            rank's. ``False`` where it may know from elsewhere (a server that the ranks tell themselves).
        reports_may_be_lost: a rank's report may never come, and its engine rests while one is on its way.
            ``False`` where the engine waits for the reports of every step.
        hears_failed_loads: its engine can do without a load that came to nothing, and tells the scheduler half.
            ``False`` where READY is a promise: then no load is made to fail, and all must succeed.
        reset: it can forget a namespace.
        durable: what was stored outlives the engine, and is found by the next one with the same options.
        zero_copy: loads are views of the store, not copies.
        background: it works on threads or in processes of its own, so that a transfer may take real time.
        patience_s: the longest real time that a transfer of a few kilobytes may take there.
        answers_within_s: the longest real time that the scheduler half may wait for an answer from elsewhere. For
            so long an idle engine's clock goes as slowly as a real one; then it leaps, so that what waits for a
            time to be over gets it.
    """

    roles: tuple[ECRole, ...] = ("ec_both", "ec_producer", "ec_consumer")
    max_ranks: Annotated[int, msgspec.Meta(ge=1)] = 8
    stores: bool = True
    reports_decide: bool = True
    reports_may_be_lost: bool = True
    hears_failed_loads: bool = True
    reset: bool = True
    durable: bool = False
    zero_copy: bool = False
    background: bool = False
    patience_s: float = 10.0
    answers_within_s: float = 0.0


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """A connector, and what the kit must know to check it.

    Attributes:
        factory: builds its halves.
        capabilities: what it can do.
        options: as configured. In texts, ``{scratch}`` is replaced by a new empty directory for each run.
        lose: takes everything out of the store behind the connector's back, given that directory.
        beside: what runs beside its engines (a server), given that directory; entered before the first of them
            starts, left after the last one ended.
        metadata: what its worker halves report, where the type that they declare only carries it; ``None`` where
            that type is checked itself.
        name: of reports.
    """

    factory: ECConnectorFactory
    capabilities: Capabilities = Capabilities()
    options: dict[str, Any] = {}
    lose: Callable[[Path], None] | None = None
    beside: Callable[[Path], AbstractContextManager[object]] = nullcontext
    metadata: tuple[MetadataUse, ...] | None = None
    name: str = ""

    def options_in(self, scratch: Path) -> dict[str, Any]:
        """``options`` of a run whose directory is ``scratch``."""
        return {
            key: value.replace(_SCRATCH, os.fspath(scratch)) if isinstance(value, str) else value
            for key, value in self.options.items()
        }

    @property
    def faults(self) -> Faults:
        """What may befall its engines."""
        can = self.capabilities
        return Faults(
            reset=can.reset,
            lose_stored=self.lose is not None,
            lose_reports=can.reports_may_be_lost,
            fail_loads=can.hears_failed_loads,
        )

    def missing(self) -> dict[str, str]:
        """Capability -> why rules that need it are skipped."""
        can = self.capabilities
        flags = {name: getattr(can, name) for name in _FLAGS}
        flags["can_lose"] = self.lose is not None and can.hears_failed_loads
        flags["stores"] = can.stores and "ec_both" in can.roles
        missing = {name: f"without {name}" for name, there in flags.items() if not there}
        if not (can.reports_decide and can.reports_may_be_lost):
            missing["rests_on_its_own"] = missing.get("reports_decide", "without reports_may_be_lost")
        if can.hears_failed_loads:
            missing["must_load"] = "with hears_failed_loads"
        return missing


_FLAGS = ("reports_decide", "hears_failed_loads", "reset", "durable", "zero_copy")
