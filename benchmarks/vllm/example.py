"""``ECExampleConnector`` under the clock, by the name that vLLM's processes import it."""

from __future__ import annotations

from vllm.distributed.ec_transfer.ec_connector.example_connector import ECExampleConnector

from benchmarks.vllm.hooks import timed

TimedECExampleConnector = timed(ECExampleConnector)
