"""The Ray this process uses: one that runs already, or a local one that lasts as long as somebody needs it."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

from ecotone.errors import ResourceError

# Read when Ray is imported: without it a Ray that is started here listens on every address of the machine. So
# whoever needs Ray takes it from here.
if "RAY_ADDRESS" not in os.environ:
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")

import ray
import ray.util.placement_group
import ray.util.scheduling_strategies

__all__ = ["Cluster", "enter_cluster", "leave_cluster", "ray"]

logger = logging.getLogger(__name__)

_lock = threading.Lock()
_users = 0
_own: Cluster | None = None


@dataclass(frozen=True)
class Cluster:
    """``cpus_per_rank``: what a rank asks of Ray's books. ``folder``: of a local Ray, removed when it ends."""

    cpus_per_rank: float
    folder: str | None


def enter_cluster() -> Cluster:
    """Use Ray, and start it where there is none: on the loopback interface, without dashboard and usage reports.

    Raises:
        ResourceError: it cannot be started, or reached.
    """
    global _users, _own
    with _lock:
        if not ray.is_initialized():
            _own = _start()
        _users += 1
        return Cluster(1, None) if _own is None else _own


def leave_cluster() -> None:
    """Undo ``enter_cluster``; the last one to leave ends a Ray that was started here."""
    global _users, _own
    with _lock:
        _users -= 1
        if _users == 0 and _own is not None:
            own, _own = _own, None
            _end(own)


def reap_folders(parent: Path) -> None:
    """Remove what Rays left whose processes were killed: folders named after a process that is no more."""
    for folder in parent.glob("ecotone-ray-*-*"):
        pid = folder.name.split("-")[2]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(folder, ignore_errors=True)


def _start() -> Cluster:
    if "RAY_ADDRESS" in os.environ:
        _init(address=os.environ["RAY_ADDRESS"])
        return Cluster(1, None)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    reap_folders(Path(tempfile.gettempdir()))
    folder = tempfile.mkdtemp(prefix=f"ecotone-ray-{os.getpid()}-")
    try:
        _init(
            num_cpus=os.cpu_count(),
            include_dashboard=False,
            object_store_memory=80 * 2**20,  # the least it takes: what Ecotone sends does not lie there
            _node_ip_address="127.0.0.1",
            _temp_dir=folder,
            # Ray makes workers nicer than everybody else on the machine, as for batch jobs: any other work there
            # would starve a rank.
            _system_config={"worker_niceness": 0},
        )
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    address = ray.util.get_node_ip_address()
    if address != "127.0.0.1":
        logger.warning("Ray was imported before Ecotone could keep it to this machine: it listens on %s", address)
    # The machine is all ranks': how many there are is for the operator to say.
    return Cluster(0.01, folder)


def _init(**options: object) -> None:
    try:
        ray.init(log_to_driver=False, logging_level="ERROR", **options)
    except Exception as error:  # a rim: Ray raises what its parts raise
        raise ResourceError(f"Ray cannot be used: {' '.join(str(error).split())}") from error


def _end(cluster: Cluster) -> None:
    ray.shutdown()
    if cluster.folder is not None:
        shutil.rmtree(cluster.folder, ignore_errors=True)
