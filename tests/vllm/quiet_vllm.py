"""Imports vLLM into a process of tests. What vLLM, and torch's compiler with it, warn of on the way is theirs."""

from __future__ import annotations

import warnings
from importlib import import_module

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import_module("vllm.distributed.ec_transfer.ec_connector.base")
