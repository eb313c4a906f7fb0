"""The encoder step: into the cache goes only what was checked."""

from __future__ import annotations

from collections.abc import Mapping

from ecotone.protocol.step import MultiModalItem
from ecotone.worker.encoder_cache import RankEncoderCache
from ecotone.worker.models.encode import EncodeFailure
from ecotone.worker.parallel.encoder import Encode


def encode_items(encode: Encode, cache: RankEncoderCache, jobs: Mapping[str, MultiModalItem]) -> dict[str, str]:
    """Encode ``jobs``, key -> item, into ``cache``; returns key -> reason of those that failed. They are encoded
    whether the cache has them or not: the other ranks do so too, and wait for this one."""
    if not jobs:
        return {}
    failures: dict[str, str] = {}
    for (key, item), rows in zip(jobs.items(), encode(list(jobs.values())), strict=True):
        if isinstance(rows, EncodeFailure):
            failures[key] = rows.reason
            continue
        mismatch = cache.mismatch(rows, item.num_rows)
        if mismatch is None:
            cache[key] = rows
        else:
            failures[key] = f"the encoder produced rows of {mismatch}"
    # A stale value must not outlive the failure of its successor.
    cache.drop(failures)
    return failures
