"""Pipeline stages on a CPU in eager mode: a later stage's buffer is made in the warm-up, which is left out."""

from __future__ import annotations

from typing import Any


def _make_buffer(module: Any) -> None:
    runner = module.GPUModelRunner
    receive = runner.sync_and_gather_intermediate_tensors

    def sync_and_gather_intermediate_tensors(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.intermediate_tensors is None:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
        return receive(self, *args, **kwargs)

    runner.sync_and_gather_intermediate_tensors = sync_and_gather_intermediate_tensors


AFTER_IMPORT = {"vllm.v1.worker.gpu_model_runner": _make_buffer}
