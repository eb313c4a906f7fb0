"""What one rank holds of the encoder's output."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ecotone.protocol.connector import EncoderSpec


class RankEncoderCache(dict[str, Tensor]):
    """key -> rows ``[num_rows, width]`` of the encoder's dtype, on the rank's device.

    A plain mapping for who fills it (the encoder, a connector's loads); who reads asks ``rows``, which never
    hands out anything of the wrong shape. The scheduler decides what is in it and for how long.
    """

    def __init__(self, encoder: EncoderSpec, device: torch.device) -> None:
        super().__init__()
        self.encoder = encoder
        self.device = device

    def mismatch(self, rows: Tensor, num_rows: int) -> str | None:
        """What is wrong with ``rows`` as the encoding of an item of ``num_rows`` rows; ``None`` when it fits."""
        want = (num_rows, self.encoder.width)
        if tuple(rows.shape) != want:
            return f"shape {list(rows.shape)} instead of {list(want)}"
        dtype = str(rows.dtype).removeprefix("torch.")
        if dtype != self.encoder.dtype:
            return f"dtype {dtype} instead of {self.encoder.dtype}"
        if rows.device != self.device:
            return f"device {rows.device} instead of {self.device}"
        return None

    def rows(self, key: str, num_rows: int) -> Tensor | None:
        """The encoding under ``key``; ``None`` when it is absent or not that of an item of ``num_rows`` rows."""
        rows = self.get(key)
        return None if rows is None or self.mismatch(rows, num_rows) is not None else rows

    def drop(self, keys: Iterable[str]) -> None:
        """Forget ``keys``; those that are not there are none of our business."""
        for key in keys:
            self.pop(key, None)

    def statistics(self) -> dict[str, float]:
        """Gauges: entries, their rows and their bytes."""
        return {
            "encoder_cache_entries": len(self),
            "encoder_cache_rows": sum(len(rows) for rows in self.values()),
            "encoder_cache_bytes": sum(rows.nbytes for rows in self.values()),
        }
