"""A whole EC connector, to start from: encodings as files in a directory, one for each rank.

It passes the conformance kit; docs/conformance.md walks through it. Configure it as
``ECConfig(connector="file_connector:FileConnectorFactory", options={"directory": "/somewhere"})``.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from ecotone import protocol as ec
from ecotone.config import parse_config
from ecotone.testing import Subject


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    directory: str


@ec.register
class Orders(ec.ECConnectorMetadata, frozen=True, forbid_unknown_fields=True):
    loads: tuple[str, ...] = ()  # keys
    saves: tuple[tuple[str, int], ...] = ()  # keys, each with the number of the save


@ec.register
class Ended(ec.ECConnectorWorkerMetadata, frozen=True, forbid_unknown_fields=True):
    saves: frozenset[tuple[int, int, bool]] = frozenset()  # number of the save, rank, whether the file is there

    def aggregate(self, other):
        return Ended(self.saves | other.saves)  # the union of facts: no count, no order


class FileScheduler(ec.ECSchedulerConnector):
    def __init__(self, context):
        super().__init__(context)
        self._ranks = frozenset(participant.rank for participant in context.participants)
        self._stored = set()  # keys that every rank has a file of
        self._saving = {}  # number of the save -> key
        self._missing = {}  # number of the save -> ranks that have yet to report it
        self._number = 0
        self._loads, self._saves = [], []

    def lookup(self, req_id, item):
        # What is being saved is a MISS: to encode it again costs no wait.
        return ec.CacheLookup.READY if item.key in self._stored else ec.CacheLookup.MISS

    def update_state_after_alloc(self, req_id, item):
        if item.key in self._stored:
            self._loads += [item.key] * self.is_consumer
        elif self.is_producer and item.key not in self._saving.values():
            self._number += 1
            self._saving[self._number], self._missing[self._number] = item.key, set(self._ranks)
            self._saves.append((item.key, self._number))

    def build_connector_meta(self):
        loads, self._loads = self._loads, []
        saves, self._saves = self._saves, []
        return Orders(tuple(loads), tuple(saves)) if loads or saves else None

    def update_connector_output(self, output):
        self._stored -= output.failed_loads
        report = output.ec_connector_worker_meta
        for number, rank, there in sorted(report.saves) if report is not None else ():
            missing = self._missing.get(number, set())
            missing.discard(rank)
            # One rank without the file is enough to end it; what is said of saves that are over is old news.
            if number in self._saving and (not there or not missing):
                key = self._saving.pop(number)
                del self._missing[number]
                self._stored |= {key} if there else set()

    def has_pending_work(self):
        return bool(self._saving)

    def reset_cache(self, namespace):
        self._stored = {key for key in self._stored if not key.startswith(namespace)}
        for number in [number for number, key in self._saving.items() if key.startswith(namespace)]:
            del self._saving[number], self._missing[number]


class FileWorker(ec.ECWorkerConnector):
    worker_metadata_type = Ended

    def __init__(self, context, directory):
        super().__init__(context)
        self._rank = context.rank
        self._directory = directory
        self._orders = Orders()
        self._saves = {}  # key -> number of a save that was ordered in this step and has not happened
        self._ended = set()

    def bind_connector_metadata(self, metadata):
        self._orders, self._saves = metadata, dict(metadata.saves)

    def clear_connector_metadata(self):
        self._orders = Orders()

    def start_load_caches(self, encoder_cache):
        pass  # files are read when they are needed

    def wait_for_loads(self, encoder_cache):
        for key in self._orders.loads:
            try:
                encoder_cache[key] = load_file(self._path(key))["rows"]
            except (OSError, SafetensorError, KeyError):
                continue  # gone or damaged: a key that is left out is a failed load

    def save_caches(self, encoder_cache, key):
        number = self._saves.pop(key, None)
        if number is None:
            return
        beside = self._path(key).with_suffix(f".{os.getpid()}.tmp")
        try:
            save_file({"rows": encoder_cache[key].contiguous()}, beside)
            beside.rename(self._path(key))  # nobody ever reads half a file
            self._ended.add((number, self._rank, True))
        except OSError:
            beside.unlink(missing_ok=True)
            self._ended.add((number, self._rank, False))

    def build_connector_worker_meta(self):
        # What was ordered and came to nothing (its encode failed) has ended too.
        ended = self._ended | {(number, self._rank, False) for number in self._saves.values()}
        self._ended, self._saves = set(), {}
        return Ended(frozenset(ended)) if ended else None

    def _path(self, key):
        return self._directory / f"{key.replace(':', '-')}.{self._rank}.safetensors"


class FileConnectorFactory(ec.ECConnectorFactory):
    def validate(self, role, options):
        parse_config(Options, dict(options), "options of FileConnector")

    def scheduler_half(self, context):
        return FileScheduler(context)

    def worker_half(self, context):
        directory = Path(parse_config(Options, dict(context.options), "options of FileConnector").directory)
        directory.mkdir(parents=True, exist_ok=True)
        return FileWorker(context, directory)


def lose(directory):
    for number, file in enumerate(sorted(directory.glob("*.safetensors"))):
        file.write_bytes(b"damaged") if number % 2 else file.unlink()


subject = Subject(
    factory=FileConnectorFactory(), options={"directory": "{scratch}"}, lose=lose, name="FileConnector"
)
