"""One vLLM engine in a process of its own, told what to do by JSON lines on stdin; an answer line each on stdout.

``python engine_main.py '{"model": ..., ...}'`` with the arguments of ``vllm.LLM``. The first line on stdout is
``{"ok": ...}`` when the engine has started. Then, per line on stdin, ``{"call": NAME, "args": {...}}`` is
answered by ``{"ok": result}`` or ``{"error": text}``. It ends with its stdin.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from typing import Any

from PIL import Image
from prometheus_client import REGISTRY
from transformers import AutoProcessor
from vllm import LLM, SamplingParams
from vllm.config import ECTransferConfig

IMAGE_TEXT = {"llava": "<image>", "qwen3_vl": "<|vision_start|><|image_pad|><|vision_end|>"}


LATE_S = 40.0


class Driver:
    """The commands. Each public method is one."""

    def __init__(self, options: dict[str, Any]) -> None:
        ec = options.pop("ec_transfer_config", None)
        self._engine = LLM(**options, ec_transfer_config=None if ec is None else ECTransferConfig(**ec))
        self._family = self._engine.llm_engine.model_config.hf_config.model_type
        self._engine.collective_rpc("count_encodes")

    def generate(self, requests: list[dict[str, Any]], max_tokens: int = 12) -> list[list[int]]:
        """Token ids of each request; ``{"images": [paths], "text": question}``. With ``"uuids"`` the images go by
        these names, and with ``"bare"`` the request tells their sizes and leaves them out. No tokens when it
        fails."""
        prompts = [self._prompt(**request) for request in requests]
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0)
        outputs = self._engine.generate(prompts, sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def chat(self, images: list[str], text: str, max_tokens: int = 12) -> str:
        """The text that a chat completion of the same messages must have."""
        content = [{"type": "image_pil", "image_pil": Image.open(path)} for path in images]
        messages: Any = [{"role": "user", "content": [*content, {"type": "text", "text": text}]}]
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0)
        return str(self._engine.chat(messages, sampling, use_tqdm=False)[0].outputs[0].text)

    def rpc(self, method: str, args: list[Any] | None = None) -> list[Any]:
        """What each worker's method answers."""
        return list(self._engine.collective_rpc(method, args=tuple(args or ())))

    def reset_encoder_cache(self) -> None:
        self._engine.llm_engine.reset_encoder_cache()

    def metrics(self) -> dict[str, float]:
        """What ``/metrics`` of a server would show: values by name, summed over their labels."""
        found: dict[str, float] = {}
        for family in REGISTRY.collect():
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
        return found

    def _prompt(
        self, images: list[str], text: str, uuids: list[str] | None = None, bare: bool = False
    ) -> dict[str, Any]:
        prompt: dict[str, Any] = {"prompt": f"USER: {IMAGE_TEXT[self._family] * len(images)} {text} ASSISTANT:"}
        if images:
            opened = [Image.open(path).convert("RGB") for path in images]
            prompt["multi_modal_data"] = {"image": self._sizes(opened) if bare else opened}
        if uuids is not None:
            prompt["multi_modal_uuids"] = {"image": uuids}
        return prompt

    def _sizes(self, images: list[Image.Image]) -> dict[str, Any]:
        """What a request tells of images that it leaves out."""
        processor = AutoProcessor.from_pretrained(self._engine.llm_engine.model_config.model)
        return {"image_grid_thw": processor.image_processor(images=images, return_tensors="pt")["image_grid_thw"]}


def main() -> None:
    """Start, then answer until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM and its workers print to stdout
    driver = Driver(json.loads(sys.argv[1]))
    print(json.dumps({"ok": os.getpid()}), file=answers)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer: dict[str, Any] = {"ok": getattr(driver, command["call"])(**command["args"])}
        except Exception as error:  # whatever it is, the test wants to see it, and may go on
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)
    faulthandler.dump_traceback_later(LATE_S)  # where it hangs, should it not end


if __name__ == "__main__":
    main()
