"""``EcotoneConnector`` under the clock, by the name that vLLM's processes import it."""

from __future__ import annotations

from benchmarks.vllm.hooks import timed
from ecotone.vllm.connector import EcotoneConnector

TimedEcotoneConnector = timed(EcotoneConnector)
