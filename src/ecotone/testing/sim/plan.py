"""What happens in one simulation, decided before it runs: so that it can be printed, replayed and cut down."""

from __future__ import annotations

from random import Random
from typing import Literal

import msgspec

from ecotone.engine.admission import SchedulerLimits
from ecotone.protocol.connector import ECRole

FaultKind = Literal[
    "abort", "reset", "kill_rank", "kill_engine", "restart_node", "stall_node", "drop_link", "drop_caches"
]
CACHE_LINE = 64
"""Bytes: what the allocator rounds to."""
_BLOCK = 4096  # bytes: what the disk rounds to


class EnginePlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine: ranks that take part in transfers, and perhaps one that does not."""

    role: ECRole = "ec_both"
    ranks: int = 1
    bystander: bool = False
    views: bool = True
    pending_timeout_s: float | None = 1.0
    answer_polls: int = 0
    limits: SchedulerLimits


class RequestPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request: ``parts`` of its prompt are text tokens (0 and above) and items (``-1 - number``)."""

    name: str
    at: float
    engine: int
    parts: tuple[int, ...]
    max_tokens: int = 1


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something goes wrong, or is done to the engine, at a time."""

    kind: FaultKind
    at: float
    engine: int = 0
    rank: int = 0
    request: str = ""
    seconds: float = 0.0


class Weather(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long things take at most, in virtual seconds, and how often they go wrong."""

    copy_s: float = 0.002
    copies_lost: float = 0.0
    net_s: float = 0.0005
    step_s: float = 0.002
    reports_late: float = 0.0
    reports_repeated: float = 0.0
    disk_s: float = 0.002
    disk_lost: float = 0.0


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One simulation.

    Attributes:
        seed: of the delays and of what fails.
        shared: one node serves all engines; otherwise each has one of its own.
        capacity: bytes of a node's region.
        items: rows of each item.
        broken: items that no encoder can encode.
        policy: who goes first when memory is short.
        disk: bytes that files behind a shared node's memory may take; 0 is no disk.
    """

    seed: int
    shared: bool = False
    capacity: int = 16 * CACHE_LINE
    policy: str = "lru"
    disk: int = 0
    items: tuple[int, ...] = ()
    broken: tuple[int, ...] = ()
    engines: tuple[EnginePlan, ...] = ()
    requests: tuple[RequestPlan, ...] = ()
    faults: tuple[Fault, ...] = ()
    weather: Weather = Weather()

    @property
    def last_event_s(self) -> float:
        """When nothing new happens any more."""
        ends = [request.at for request in self.requests] + [fault.at + fault.seconds for fault in self.faults]
        return max(ends, default=0.0)


def make_plan(seed: int) -> Plan:
    """The plan of ``seed``."""
    random = Random(seed)
    shared = random.random() < 0.65
    items = tuple(random.choice((1, 1, 2, 2, 3, 4, 6)) for _ in range(random.choice((1, 3, 5, 6))))
    # Streams of their own: what else a seed means does not depend on them.
    steps, disk = Random(f"{seed}/steps"), Random(f"{seed}/disk")
    disk_bytes = _BLOCK * disk.choice((0, 0, 1, 3, 8)) if shared else 0
    engines = tuple(
        _engine(random, shared, steps.choice((1, 1, 2, 3))) for _ in range(random.randint(1, 3) if shared else 1)
    )
    span = random.choice((0.05, 0.5, 3.0))
    requests = tuple(
        RequestPlan(
            name=f"r{number}",
            at=round(random.uniform(0, span), 4),
            engine=random.randrange(len(engines)),
            parts=tuple(
                -1 - random.randrange(len(items)) if random.random() < 0.7 else random.randint(2, 9)
                for _ in range(random.choice((1, 2, 2, 3, 4)))
            ),
            max_tokens=random.randint(1, 4),
        )
        for number in range(random.randint(3, 14))
    )
    capacity = random.choice((1, 2, 4, 6, 8, 12, 16))
    if disk_bytes:
        capacity = disk.choice((1, 2, 3))  # little, so that entries have to go to the disk and come back
    return Plan(
        seed=seed,
        shared=shared,
        capacity=CACHE_LINE * capacity,
        policy=random.choice(("lru", "gdsf")),
        disk=disk_bytes,
        items=items,
        broken=tuple(i for i in range(len(items)) if random.random() < 0.03),
        engines=engines,
        requests=requests,
        faults=tuple(
            _fault(random, shared, engines, requests, span) for _ in range(random.choice((0, 1, 2, 3, 5)))
        ),
        weather=_weather(random, disk),
    )


def _engine(random: Random, shared: bool, max_concurrent_steps: int) -> EnginePlan:
    return EnginePlan(
        role=random.choice(("ec_both", "ec_both", "ec_both", "ec_producer", "ec_consumer")),
        ranks=random.choice((1, 1, 2, 3)),
        bystander=random.random() < 0.2,
        views=random.random() < 0.6,
        pending_timeout_s=random.choice((0.0, 0.0, 0.1, 1.0, 3.0, None)),
        answer_polls=0 if shared else random.choice((0, 1, 3, 6)),
        limits=SchedulerLimits(
            max_num_batched_tokens=random.choice((3, 8, 32)),
            max_num_seqs=random.randint(1, 4),
            max_model_len=40,
            block_size=random.choice((2, 4, 4)),
            kv_blocks=random.choice((7, 8, 10, 20)),
            encoder_cache_rows=random.choice((6, 6, 6, 6, 12)),
            encoder_budget_rows=random.choice((6, 8, 14)),
            max_concurrent_steps=max_concurrent_steps,
        ),
    )


def _weather(random: Random, disk: Random) -> Weather:
    return Weather(
        copy_s=random.choice((0.0005, 0.02, 0.5)),
        copies_lost=random.choice((0.0, 0.0, 0.1, 0.4)),
        net_s=random.choice((0.0, 0.0005, 0.03)),
        step_s=random.choice((0.0005, 0.01, 0.1)),
        reports_late=random.choice((0.0, 0.0, 0.3, 0.8)),
        reports_repeated=random.choice((0.0, 0.0, 0.3)),
        disk_s=disk.choice((0.0005, 0.02, 0.5)),
        disk_lost=disk.choice((0.0, 0.1, 0.4)),
    )


def _fault(
    random: Random, shared: bool, engines: tuple[EnginePlan, ...], requests: tuple[RequestPlan, ...], span: float
) -> Fault:
    kinds: list[FaultKind] = ["abort", "abort", "reset", "kill_rank", "kill_engine"]
    kinds += ["drop_caches"] * 3
    if shared:
        kinds += ["restart_node", "stall_node", "drop_link", "drop_link"]
    engine = random.randrange(len(engines))
    return Fault(
        kind=random.choice(kinds),
        at=round(random.uniform(0, span * 1.5), 4),
        engine=engine,
        rank=random.randrange(engines[engine].ranks),
        request=random.choice(requests).name,
        seconds=random.choice((0.0, 0.01, 0.3, 3.0)),
    )
