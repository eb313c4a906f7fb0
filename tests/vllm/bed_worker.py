"""What the tests add to vLLM's workers (``worker_extension_cls``), asked by ``collective_rpc``."""

from __future__ import annotations

from typing import Any

import torch
from late_saves import GATE

from ecotone.testing.vllm_worker import EncodeCounter

_ENCODER_PARTS = ("vision_tower.", "multi_modal_projector.", "visual.")


class BedWorker(EncodeCounter):
    """Mixed into vLLM's worker class by vLLM itself."""

    def negate_encoder(self) -> int:
        """A weight update: the encoder's matrices change their sign. Twice is as before. Returns how many did."""
        model: Any = self.model_runner.get_model()  # type: ignore[attr-defined]
        changed = 0
        with torch.inference_mode():
            for name, parameter in model.named_parameters():
                if parameter.ndim == 2 and name.startswith(_ENCODER_PARTS):
                    parameter.neg_()
                    changed += 1
        return changed

    def hold_saves(self) -> None:
        """From now on saves do not begin (of a ``LateConnector``)."""
        GATE.hold()

    def held_saves(self) -> int:
        """How many saves wait to begin."""
        return GATE.held()

    def release_saves(self) -> int:
        """Let them begin, and wait until they have ended. Returns how many did."""
        return GATE.release()
