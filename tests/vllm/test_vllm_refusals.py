"""What is refused when an engine starts, by the connector as the real vLLM makes it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engine_process import HERE, StartEngine, StartError, ecotone, environment

FROM_MODULE = {"ec_connector_module_path": "ecotone.vllm"}
CASES: dict[str, dict[str, Any]] = {
    "by its name": {"transfer": ecotone()},
    "from its module": {"transfer": {**ecotone(), **FROM_MODULE}},
    "an option that is none": {"transfer": ecotone(memori="1GiB")},
    "a producer alone": {"transfer": ecotone("ec_producer")},
    "a consumer alone": {"transfer": ecotone("ec_consumer")},
    "no node there": {"transfer": ecotone("ec_consumer", node="unix:/nonexistent/node.sock")},
    "an old vLLM": {"transfer": ecotone(), "version": "0.31.2"},
    "a new vLLM": {"transfer": ecotone(), "version": "0.33.0"},
    "an engine id in use": {"transfer": ecotone(), "twice": True},
}
EXPECTED = {
    "by its name": "EcotoneConnector$",
    "from its module": "EcotoneConnector$",
    "an option that is none": "ConfigError: .*unknown option 'memori'; known are .*disk.*memory.*revision",
    "a producer alone": "ConfigError: ec_role='ec_producer' over an embedded node",
    "a consumer alone": "ConfigError: ec_role='ec_consumer' over an embedded node",
    "no node there": r"ConfigError: .*/nonexistent/node\.sock",
    "an old vLLM": "ConfigError: vLLM 0.31.2: .*supports",
    "a new vLLM": "ConfigError: vLLM 0.33.0: .*supports",
    "an engine id in use": "ConfigError: .*test-",
}


@pytest.fixture(scope="module")
def outcomes(models: dict[str, Path]) -> dict[str, str]:
    """Of all cases, from one process that imports vLLM."""
    done = subprocess.run(
        [sys.executable, str(HERE / "connector_main.py"), str(models["digits"])],
        input=json.dumps(CASES),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("case", CASES)
def test_it_starts_or_says_why_not(outcomes: dict[str, str], case: str) -> None:
    assert re.match(EXPECTED[case], outcomes[case]), outcomes[case]


def test_an_engine_with_an_unknown_option_does_not_start(start_engine: StartEngine) -> None:
    engine = start_engine("digits", ec=ecotone(memori="1GiB"))
    with pytest.raises(StartError) as refused:
        engine.wait_until_started()
    assert "unknown option 'memori'; known are" in str(refused.value)
    assert "pending_timeout_s" in str(refused.value)
    engine.wait_until_gone()
