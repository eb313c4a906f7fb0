"""The engines that are compared: each one an ``LLM`` with processes of its own, all alive, one asked at a time."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import psutil
from vllm import LLM, SamplingParams
from vllm.config import ECTransferConfig

from benchmarks.llava import make_llava, rows_of
from benchmarks.vllm.hooks import FILE_VARIABLE, HookTimes
from benchmarks.vllm.names import ECOTONE, EXAMPLE, NONE
from benchmarks.vllm.questions import SIDE, about
from ecotone.testing.vllm_checkpoint import copy_for_vllm

LANGUAGE_MODEL = {
    "hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 1024,
}  # fmt: skip
ENCODER_LAYERS = 9
# vLLM's own encoder cache has as many rows as a step has tokens: one image, and never two.
_STEP_TOKENS = rows_of(SIDE) + 64
_QUIET_S = 0.1


class Answers:
    """What came of one call of ``generate``."""

    def __init__(self, tokens: list[tuple[int, ...]], seconds: float, encodes: int) -> None:
        self.tokens, self.seconds, self.encodes = tokens, seconds, encodes


class Engine:
    """vLLM with one connector, or with none. ``close`` ends its processes."""

    def __init__(self, name: str, model: Path, folder: Path) -> None:
        self.name = name
        self.store = folder / "store"
        self.store.mkdir(parents=True)
        self.hooks = HookTimes(folder / "hooks")
        os.environ[FILE_VARIABLE] = str(folder / "hooks")
        before = set(psutil.Process().children(recursive=True))
        start = perf_counter()
        self._llm = LLM(
            str(model),
            dtype="float32",
            max_model_len=1024,
            max_num_batched_tokens=_STEP_TOKENS,
            max_num_seqs=8,
            limit_mm_per_prompt={"image": 1},
            enforce_eager=True,
            enable_prefix_caching=False,  # it would spare a repeated question its image altogether
            seed=0,
            worker_extension_cls="ecotone.testing.vllm_worker.EncodeCounter",
            ec_transfer_config=self._transfer_config(),
        )
        self.start_s = perf_counter() - start
        after = set(psutil.Process().children(recursive=True))
        self._processes = [process for process in after - before if "VLLM::" in " ".join(process.cmdline())]
        self._llm.collective_rpc("count_encodes")

    def ask(self, questions: Sequence[Any], max_tokens: int = 1) -> Answers:
        """All ``questions`` at once; answers are as long as they may be."""
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        before = self._encodes()
        start = perf_counter()
        outputs = self._llm.generate(list(questions), sampling, use_tqdm=False)
        seconds = perf_counter() - start
        return Answers([tuple(o.outputs[0].token_ids) for o in outputs], seconds, self._encodes() - before)

    def warm(self, images: Sequence[int]) -> None:
        """Ask about ``images`` until the connector, where there is one, spares the engine every encode.

        Raises:
            RuntimeError: it never does.
        """
        for _ in range(20):
            encodes = sum(self.ask([about(number)]).encodes for number in images)
            if encodes == 0 or self.name == NONE:
                return
        raise RuntimeError(f"{self.name}: images asked about again and again are encoded each time")

    def rest(self) -> None:
        """Return when the engine's processes compute nothing: after work they spin for a second."""
        while True:
            before = self._cpu_s()
            time.sleep(_QUIET_S)
            if self._cpu_s() == before:
                return

    def memory(self) -> dict[str, float]:
        """MiB: of the engine's processes, what they have mapped (``rss``) and their share of it (``pss``), and
        the files that the connector wrote."""
        full = [process.memory_full_info() for process in self._processes]
        files = sum(file.stat().st_blocks * 512 for file in self.store.rglob("*") if file.is_file())
        return {
            "rss_mib": round(sum(info.rss for info in full) / 2**20, 1),
            "pss_mib": round(sum(info.pss for info in full) / 2**20, 1),
            "files_mib": round(files / 2**20, 1),
        }

    def close(self) -> None:
        """End the engine and its processes."""
        self._llm.llm_engine.engine_core.shutdown()
        psutil.wait_procs(self._processes, timeout=30)

    def _encodes(self) -> int:
        return int(self._llm.collective_rpc("encodes")[0])

    def _cpu_s(self) -> float:
        return sum(sum(process.cpu_times()[:2]) for process in self._processes)

    def _transfer_config(self) -> Any:
        if self.name == NONE:
            return None
        return ECTransferConfig(ec_role="ec_both", **_CONNECTORS[self.name](self.store))


_CONNECTORS: Mapping[str, Any] = {
    EXAMPLE: lambda store: {
        "ec_connector": "TimedECExampleConnector",
        "ec_connector_module_path": "benchmarks.vllm.example",
        "ec_connector_extra_config": {"shared_storage_path": str(store)},
    },
    ECOTONE: lambda _: {
        "ec_connector": "TimedEcotoneConnector",
        "ec_connector_module_path": "benchmarks.vllm.ours",
        "ec_connector_extra_config": {"memory": "256MiB"},
    },
}


def make_model(folder: Path) -> Path:
    """The model that all of them serve, in ``folder``."""
    return copy_for_vllm(make_llava(folder / "saved", SIDE, ENCODER_LAYERS, **LANGUAGE_MODEL), folder / "model")


def say(text: str) -> None:
    """Progress, on stderr."""
    print(text, file=sys.stderr, flush=True)
