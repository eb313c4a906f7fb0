"""A whole EC connector, to start from: encodings as files in a directory, one for each rank.

It passes the conformance kit; docs/conformance.md walks through it. Configure it as
``ECConfig(connector="file_connector:FileConnectorFactory", options={"directory": "/somewhere"})``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ecotone.config import parse_config
from ecotone.errors import ContractError
from ecotone.protocol import (
    CacheLookup,
    ECConnectorFactory,
    ECConnectorMetadata,
    ECConnectorOutput,
    ECConnectorWorkerMetadata,
    ECItem,
    ECRole,
    ECSchedulerConnector,
    ECSchedulerContext,
    ECWorkerConnector,
    ECWorkerContext,
    EncoderCache,
    register,
)
from ecotone.testing import Capabilities, Subject


class FileOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``directory``: where the files are."""

    directory: str


@register
class Orders(ECConnectorMetadata, frozen=True, forbid_unknown_fields=True):
    """Keys to load, and keys to save with the number of the save."""

    loads: tuple[str, ...] = ()
    saves: tuple[tuple[str, int], ...] = ()


@register
class Ended(ECConnectorWorkerMetadata, frozen=True, forbid_unknown_fields=True):
    """Facts (number of a save, rank, whether the file is there). A set of facts is a join: no count, no order."""

    saves: frozenset[tuple[int, int, bool]] = frozenset()

    def aggregate(self, other: Self) -> Self:
        """The union."""
        return msgspec.structs.replace(self, saves=self.saves | other.saves)


class FileScheduler(ECSchedulerConnector):
    """Knows which keys every rank has a file of."""

    def __init__(self, context: ECSchedulerContext) -> None:
        super().__init__(context)
        self._ranks = frozenset(participant.rank for participant in context.participants)
        self._stored: set[str] = set()
        self._saving: dict[int, str] = {}  # number of the save -> key
        self._missing: dict[int, set[int]] = {}  # number of the save -> ranks that have yet to report it
        self._loads: list[str] = []
        self._saves: list[tuple[str, int]] = []
        self._number = 0

    def lookup(self, req_id: str, item: ECItem) -> CacheLookup:  # noqa: ARG002
        """READY is what all ranks stored. What is being saved is a MISS: to encode it again costs no wait."""
        return CacheLookup.READY if item.key in self._stored else CacheLookup.MISS

    def update_state_after_alloc(self, req_id: str, item: ECItem) -> None:  # noqa: ARG002
        """Order the load, or the save of what this step encodes."""
        if item.key in self._stored:
            self._loads += [item.key] * self.is_consumer
        elif self.is_producer and item.key not in self._saving.values():
            self._number += 1
            self._saving[self._number], self._missing[self._number] = item.key, set(self._ranks)
            self._saves.append((item.key, self._number))

    def build_connector_meta(self) -> Orders | None:
        """The orders of this step."""
        orders = Orders(tuple(self._loads), tuple(self._saves))
        self._loads, self._saves = [], []
        return orders if orders.loads or orders.saves else None

    def update_connector_output(self, output: ECConnectorOutput) -> None:
        """A save is complete when each rank said so. Facts about saves that are over are old news."""
        self._stored -= output.failed_loads
        report = output.ec_connector_worker_meta
        for number, rank, there in sorted(report.saves) if isinstance(report, Ended) else ():
            missing = self._missing.get(number, set())
            missing.discard(rank)
            if number in self._saving and (not there or not missing):
                key = self._saving.pop(number)
                self._missing.pop(number)
                self._stored |= {key} if there else set()

    def has_pending_work(self) -> bool:
        """Steps are needed until every rank has reported."""
        return bool(self._saving)

    def reset_cache(self, namespace: str) -> None:
        """Forget the namespace, and saves of it that are under way."""
        self._stored = {key for key in self._stored if not key.startswith(namespace)}
        for number in [n for n, key in self._saving.items() if key.startswith(namespace)]:
            del self._saving[number], self._missing[number]


class FileWorker(ECWorkerConnector):
    """Writes and reads this rank's files."""

    worker_metadata_type = Ended

    def __init__(self, context: ECWorkerContext, directory: Path) -> None:
        super().__init__(context)
        self._rank = context.rank
        self._directory = directory
        self._orders = Orders()
        self._saves: dict[str, int] = {}
        self._ended: set[tuple[int, int, bool]] = set()

    def bind_connector_metadata(self, metadata: ECConnectorMetadata) -> None:
        """The step's orders."""
        if not isinstance(metadata, Orders):
            raise ContractError(f"orders of type {type(metadata).__name__} are not this connector's")
        self._orders, self._saves = metadata, dict(metadata.saves)

    def clear_connector_metadata(self) -> None:
        """The step is over."""
        self._orders = Orders()

    def start_load_caches(self, encoder_cache: EncoderCache) -> None:
        """Nothing to start: files are read when they are needed."""

    def wait_for_loads(self, encoder_cache: EncoderCache) -> None:
        """Read the files. One that is gone or damaged leaves its key out: that is a failed load."""
        for key in self._orders.loads:
            try:
                encoder_cache[key] = load_file(self._path(key))["rows"]
            except (OSError, SafetensorError, KeyError):
                continue

    def save_caches(self, encoder_cache: EncoderCache, key: str) -> None:
        """Write beside and rename: nobody ever reads half a file."""
        number = self._saves.pop(key, None)
        if number is None:
            return
        beside = self._path(key).with_suffix(f".{os.getpid()}.tmp")
        try:
            save_file({"rows": encoder_cache[key].contiguous()}, beside)
            beside.rename(self._path(key))
        except OSError:
            beside.unlink(missing_ok=True)
            self._ended.add((number, self._rank, False))
        else:
            self._ended.add((number, self._rank, True))

    def build_connector_worker_meta(self) -> Ended | None:
        """What ended. A save that was ordered and came to nothing (its encode failed) has ended too."""
        self._ended |= {(number, self._rank, False) for number in self._saves.values()}
        self._saves = {}
        ended, self._ended = self._ended, set()
        return Ended(frozenset(ended)) if ended else None

    def _path(self, key: str) -> Path:
        return self._directory / f"{key.replace(':', '-')}.{self._rank}.safetensors"


class FileConnectorFactory(ECConnectorFactory):
    """Builds both halves."""

    def validate(self, role: ECRole, options: Mapping[str, Any]) -> None:  # noqa: ARG002
        """Refuse what is no option, or none at all."""
        parse_config(FileOptions, dict(options), "options of FileConnector")

    def scheduler_half(self, context: ECSchedulerContext) -> FileScheduler:
        """See the contract."""
        return FileScheduler(context)

    def worker_half(self, context: ECWorkerContext) -> FileWorker:
        """See the contract."""
        directory = Path(parse_config(FileOptions, context.options, "options of FileConnector").directory)
        directory.mkdir(parents=True, exist_ok=True)
        return FileWorker(context, directory)


def lose_files(directory: Path) -> None:
    """What befalls files: some are gone, some are damaged."""
    for number, file in enumerate(sorted(directory.glob("*.safetensors"))):
        if number % 2:
            file.write_bytes(b"damaged")
        else:
            file.unlink()


subject = Subject(
    factory=FileConnectorFactory(),
    capabilities=Capabilities(),
    options={"directory": "{scratch}"},
    lose=lose_files,
    name="FileConnector",
)
