"""The whole protocol in one process and virtual time, and everything that can go wrong: see docs/simulator.md.

``sweep(range(1000))`` runs a thousand seeds, ``replay(seed)`` says what happens in one of them, and
``simulate(plan)`` runs a plan of your own.
"""

from ecotone.testing.sim.plan import EnginePlan, Fault, Plan, RequestPlan, Weather, make_plan
from ecotone.testing.sim.run import Outcome, simulate
from ecotone.testing.sim.shrink import shrink
from ecotone.testing.sim.sweep import Finding, Sweep, replay, sweep
from ecotone.testing.sim.world import ViolationError

__all__ = [
    "EnginePlan",
    "Fault",
    "Finding",
    "Outcome",
    "Plan",
    "RequestPlan",
    "Sweep",
    "ViolationError",
    "Weather",
    "make_plan",
    "replay",
    "shrink",
    "simulate",
    "sweep",
]
