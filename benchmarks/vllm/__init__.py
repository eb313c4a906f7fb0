"""Ecotone inside the real vLLM, against vLLM without an EC connector and with ``ECExampleConnector``.

``python -m benchmarks.vllm`` runs it, in an environment that has vLLM: ``make bench-vllm``.

    names.py        what is compared
    engines.py      the three engines: started, asked, weighed
    hooks.py        how long a connector's hooks take, measured inside vLLM's processes
    example.py, ours.py   the connectors under that clock, as vLLM's processes import them
    questions.py    images and mixes of them, the same for every engine
    answers.py      first tokens, mixes, text alone and memory, engine by engine in turns
    alone.py        saves and loads without an engine; eccpu.py drives vLLM's ``ECCPUConnector`` for it
    report.py       the tables, and whether the goals are met
"""

from __future__ import annotations

import os

# vLLM reads these when it is imported, in this process and in those it starts: so before any module here does.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
for _name, _value in _ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)
