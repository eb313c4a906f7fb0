"""An ``ec_producer`` with model runner V2 on a CPU: its worker never makes the runner that has only an encoder."""

from __future__ import annotations

from typing import Any


def _dispatch(module: Any) -> None:
    whole_model = module.CPUModelRunner

    def runner(vllm_config: Any, device: Any) -> Any:
        if not vllm_config.is_mm_encoder_only:
            return whole_model(vllm_config, device)
        # It needs modules that are still being imported when this one has been.
        from vllm.v1.worker.mm_encoder_model_runner import MMEncoderModelRunner  # noqa: PLC0415

        class EncoderRunner(MMEncoderModelRunner):  # type: ignore[misc]
            def warming_up_model(self) -> None:
                """The CPU's worker asks for it; there is nothing to compile."""

        return EncoderRunner(vllm_config, device)

    module.CPUModelRunner = runner


AFTER_IMPORT = {"vllm.v1.worker.cpu.model_runner": _dispatch}
