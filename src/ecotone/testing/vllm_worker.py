"""What can be added to vLLM's workers from outside: a count of encoder runs.

``worker_extension_cls="ecotone.testing.vllm_worker.EncodeCounter"``, then ``collective_rpc("count_encodes")``.
"""

from __future__ import annotations

from typing import Any


class EncodeCounter:
    """Mixed into vLLM's worker class by vLLM itself."""

    def count_encodes(self) -> None:
        """Count from now on: what the engine encoded while it started (dummies) is left out."""
        model: Any = self.model_runner.get_model()  # type: ignore[attr-defined]
        encode = model.embed_multimodal
        self.encoded_items = 0

        def counted(**inputs: Any) -> Any:
            outputs = encode(**inputs)
            self.encoded_items += len(outputs)
            return outputs

        model.embed_multimodal = counted

    def encodes(self) -> int:
        """Items (not calls) that this rank has encoded since ``count_encodes``."""
        return self.encoded_items
