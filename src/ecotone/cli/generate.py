"""``ecotone generate``: one answer, streamed."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import ecotone
from ecotone.cli.console import working
from ecotone.cli.passes import make_prompt


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
    with working(f"loading {config.model}"):
        engine = ecotone.Engine(config)
    with engine, engine.stream(prompt, params) as stream:
        started = False
        for delta in stream:
            text = delta.text if started else delta.text.lstrip()
            started |= bool(text)
            sys.stdout.write(text)
            sys.stdout.flush()
        sys.stdout.write("\n")
