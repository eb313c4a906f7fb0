"""What vLLM's CPU wheel runs only under ``patches``: other runners, executors and its own command."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from asker import Asker
from engine_process import HERE, EngineProcess, StartEngine, ecotone
from node_process import NodeProcess
from server_process import ServerProcess

pytestmark = pytest.mark.patched
ORDER = (0, 1, 2, 0, 1, 2)


def patched(*names: str, **env: str) -> dict[str, str]:
    """The environment that applies these patches."""
    return {
        "PYTHONPATH": f"{HERE}{os.pathsep}{HERE / 'patches'}",
        "ECOTONE_TEST_PATCHES": ",".join(names),
        **env,
    }


CASES: dict[str, dict[str, Any]] = {
    "V2 runner": {"env": patched("v2_runner")},
    "V2 runner, two ranks": {"model": "qwen3_vl", "env": patched("v2_runner"), "tensor_parallel_size": 2},
    "two stages": {"env": patched("pipeline"), "pipeline_parallel_size": 2},
    "Ray": {
        "env": patched("ray_on_cpu", VLLM_USE_RAY_V2_EXECUTOR_BACKEND="1"),
        "distributed_executor_backend": "ray",
    },
    "Ray, legacy": {
        "env": patched("ray_on_cpu", VLLM_USE_RAY_V2_EXECUTOR_BACKEND="0"),
        "distributed_executor_backend": "ray",
    },
}


@pytest.fixture
def ray_folder() -> Iterator[str]:
    """Of a short name: the paths of Ray's sockets begin with it."""
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("case", CASES)
def test_an_image_is_encoded_once(
    case: str, start_engine: StartEngine, images: dict[str, list[str]], ray_folder: str
) -> None:
    options = {"model": "digits", **CASES[case]}
    env = {**options.pop("env"), "ECOTONE_TEST_RAY": ray_folder}
    engine = start_engine(ec=ecotone(), env=env, **options)
    engine.wait_until_started()
    pictures = images[options["model"]]
    answers = [answer(engine, pictures[number]) for number in ORDER]
    assert answers[:3] == answers[3:]
    assert len(set(answers)) == 3
    # A later stage of a pipeline encodes nothing.
    assert max(engine.ask("rpc", method="encodes")) == 3
    engine.close()


def answer(engine: EngineProcess, image: str) -> str:
    return str(engine.ask("chat", images=[image], text="What digit is this?"))


def test_a_producer_on_the_v2_runner(
    start_engine: StartEngine, images: dict[str, list[str]], tmp_path: Path
) -> None:
    node = NodeProcess(tmp_path)
    try:
        config = ecotone("ec_producer", node=node.option)
        engine = start_engine("digits", ec=config, env=patched("v2_runner", "encoder_only"))
        engine.wait_until_started()
        for number in ORDER:
            engine.ask("generate", requests=[{"images": [images["digits"][number]], "text": "?"}])
        assert engine.encodes() == 3
        assert node.of_tenant("entries") == node.of_tenant("commits") == 3
        engine.close()
        node.check_integrity()
        node.close()
    finally:
        node.kill()


def test_the_vllm_command(models: dict[str, Path], images: dict[str, list[str]], tmp_path: Path) -> None:
    command: Sequence[str] = (str(Path(sys.executable).with_name("vllm")), "serve")
    server = ServerProcess(
        models["digits"], tmp_path / "log.txt", ec=ecotone(), env=patched("vllm_command"), command=command
    )
    try:
        server.wait_until_started()
        server.rpc("count_encodes")
        asker = Asker(server, images["digits"])
        assert asker.ask(*ORDER) == asker.right(*ORDER)
        assert server.encodes() == 3
        server.close()
    finally:
        server.kill()
