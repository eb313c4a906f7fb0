"""``ecotone generate``: one answer, streamed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import ecotone
from ecotone.cli.console import err, working
from ecotone.cli.passes import make_prompt

_MEMORY = "256MiB"


def cache_options(memory: str | None, disk: Path | None, node: Path | None) -> dict[str, Any]:
    """The connector's options; of a node of one's own where none is named."""
    options: dict[str, Any] = {}
    if node is not None:
        options["node"] = f"unix:{node}"
    if memory is not None or node is None:
        options["memory"] = memory or _MEMORY
    if disk is not None:
        options["disk"] = str(disk)
    return options


def run(
    config: ecotone.EngineConfig,
    question: str,
    params: ecotone.SamplingParams,
    images: Sequence[str],
    videos: Sequence[str],
    clips: Sequence[str],
    *,
    raw: bool,
) -> None:
    """Answer ``question`` about ``images``, ``videos`` and ``clips`` (all files or data: URLs) on stdout.

    Raises:
        EcotoneError: it cannot be answered.
    """
    if raw:
        prompt = ecotone.Prompt(question, images, videos=videos, audio=clips)
    else:
        prompt = make_prompt(question, images, videos, clips)
    _check(config, prompt)
    with working(f"loading {config.model}"):
        engine = ecotone.Engine(config)
    with engine:
        metrics = _answer(engine, prompt, params)
        if config.ec is not None:
            engine.settle()  # what is not saved by the end is lost
    if metrics is not None and (images or videos or clips):
        err.print(_said(metrics), style="dim", highlight=False)


def _check(config: ecotone.EngineConfig, prompt: ecotone.Prompt) -> None:
    """Let what is wrong with the prompt be said before a large model is loaded for it."""
    inputs = import_module("ecotone.engine.inputs")  # it needs transformers, and the other commands do not
    inputs.InputProcessor(
        Path(config.model),
        max_image_pixels=config.max_image_pixels,
        max_video_frames=config.max_video_frames,
        max_audio_seconds=config.max_audio_seconds,
    ).process(prompt)


def _answer(
    engine: ecotone.Engine, prompt: ecotone.Prompt, params: ecotone.SamplingParams
) -> ecotone.RequestMetrics | None:
    metrics, started = None, False
    with engine.stream(prompt, params) as stream:
        for delta in stream:
            text = delta.text if started else delta.text.lstrip()
            started |= bool(text)
            sys.stdout.write(text)
            sys.stdout.flush()
            metrics = delta.output.metrics if delta.output is not None else metrics
    sys.stdout.write("\n")
    return metrics


def _said(metrics: ecotone.RequestMetrics) -> str:
    said = f"{metrics.num_encoded} encoded, {metrics.num_loaded} loaded"
    if metrics.num_cached:
        said += f", {metrics.num_cached} held already"
    return said if metrics.ttft_s is None else f"{said}; first token after {metrics.ttft_s * 1000:.0f} ms"
