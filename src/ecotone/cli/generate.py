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
    images: Sequence[str],
    params: ecotone.SamplingParams,
    *,
    raw: bool,
) -> None:
    """Answer ``question`` about ``images`` on stdout.

    Raises:
        EcotoneError: it cannot be answered.
    """
    prompt = ecotone.Prompt(question, images) if raw else make_prompt(question, images)
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
