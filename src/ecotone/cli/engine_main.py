"""What an engine process runs: ``python -m ecotone.cli.engine_main CONFIG``, an ``EngineConfig`` as JSON.

It says that it is ready, answers one question a line, and ends when its standard input does.
"""

from __future__ import annotations

import sys
from typing import BinaryIO

import msgspec

import ecotone
from ecotone.cli.engine_process import Answered, Asked
from ecotone.cli.passes import RankFigures, make_prompt
from ecotone.config import EngineConfig
from ecotone.errors import EcotoneError

_MAX_TOKENS = 64


def _serve(config: EngineConfig, questions: BinaryIO, answers: BinaryIO) -> None:
    def say(answer: Answered) -> None:
        answers.write(msgspec.json.encode(answer) + b"\n")
        answers.flush()

    try:
        engine = ecotone.Engine(config)
    except EcotoneError as error:
        say(Answered(error=str(error)))
        return
    with engine:
        say(_answer(engine, None))
        for line in questions:
            asked = msgspec.json.decode(line, type=Asked)
            params = ecotone.SamplingParams(max_tokens=_MAX_TOKENS)
            try:
                [output] = engine.generate([make_prompt(asked.text, asked.images)], params)
            except EcotoneError as error:
                say(Answered(error=str(error)))
                continue
            engine.settle()
            say(_answer(engine, output))


def _answer(engine: ecotone.Engine, output: ecotone.RequestOutput | None) -> Answered:
    statistics = engine.statistics()
    ranks = tuple(RankFigures.of(rank) for rank in statistics["ranks"])
    if output is None:
        return Answered(ranks=ranks, node=statistics["node"])
    return Answered(
        text=output.text,
        token_ids=output.token_ids,
        ttft_s=None if output.metrics is None else output.metrics.ttft_s,
        ranks=ranks,
        node=statistics["node"],
        error="" if output.error is None else str(output.error),
    )


if __name__ == "__main__":
    _serve(msgspec.json.decode(sys.argv[1], type=EngineConfig), sys.stdin.buffer, sys.stdout.buffer)
