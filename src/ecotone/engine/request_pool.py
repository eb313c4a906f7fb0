"""The requests in flight, and all that each of them holds: a place in a queue, KV blocks, encoder references."""

from __future__ import annotations

from collections import Counter, deque

from ecotone.engine.encoder_cache_manager import EncoderCacheManager
from ecotone.engine.kv_cache_manager import KVCacheManager
from ecotone.engine.request import Request, RequestStatus
from ecotone.errors import IntegrityError


class RequestPool:
    """Moves requests between the queues, and takes back what they held when they leave.

    Attributes:
        requests: by id, all that have not ended.
        waiting: WAITING and PREEMPTED ones, the next to run first.
        running: RUNNING ones, in the order in which they came to run.
        kv: who owns which KV block.
        encoder_cache: what the ranks' encoder caches hold.
    """

    def __init__(self, kv: KVCacheManager, encoder_cache: EncoderCacheManager) -> None:
        self.kv = kv
        self.encoder_cache = encoder_cache
        self.requests: dict[str, Request] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.counters: Counter[str] = Counter(preemptions=0)
        self._to_announce: set[str] = set()

    @property
    def has_announcements(self) -> bool:
        """Whether ranks have yet to hear of a request that ended."""
        return bool(self._to_announce)

    def take_announcements(self) -> frozenset[str]:
        """Ids that the ranks forget with this step: finished, aborted or preempted since the last one."""
        ids, self._to_announce = frozenset(self._to_announce), set()
        return ids

    def add(self, request: Request) -> None:
        """A new request, last in line."""
        self.requests[request.req_id] = request
        self.waiting.append(request)

    def start(self, request: Request) -> None:
        """The first in line runs."""
        request.transition(RequestStatus.RUNNING)
        self.waiting.remove(request)
        self.running.append(request)

    def preempt(self, request: Request) -> None:
        """Take everything from a request that runs; it waits at the head, and computes all of it again."""
        request.transition(RequestStatus.PREEMPTED)
        request.num_computed_tokens = 0
        self.running.remove(request)
        self.waiting.appendleft(request)
        self._give_back(request)
        self._to_announce.add(request.req_id)
        self.counters["preemptions"] += 1

    def finish(self, request: Request, status: RequestStatus, error: str) -> None:
        """``request`` ends."""
        ran = request.status is RequestStatus.RUNNING
        request.transition(status)
        request.error = error
        del self.requests[request.req_id]
        if ran:  # the ranks have heard of it, and have not been told to forget it
            self.running.remove(request)
            self._to_announce.add(request.req_id)
        else:
            self.waiting.remove(request)
        self._give_back(request)
        self.counters[f"requests_{status}"] += 1

    def gauges(self) -> dict[str, float]:
        """What there is now, and the counters."""
        return {
            "requests_waiting": len(self.waiting),
            "requests_running": len(self.running),
            "requests_deferred": sum(request.deferred for request in self.requests.values()),
            "kv_blocks_free": self.kv.num_free_blocks,
            "encoder_cache_rows_used": self.encoder_cache.num_used_rows,
            "encoder_cache_rows_available": self.encoder_cache.num_available_rows,
            "encoder_cache_evictions": self.encoder_cache.num_evictions,
            **{f"requests_{status}": 0 for status in RequestStatus if status.is_finished},
            **self.counters,
        }

    def check_integrity(self) -> None:
        """Compare the books with each other.

        Raises:
            IntegrityError: a block, a reference or a request is where it should not be.
        """
        self.kv.check_integrity()
        self.encoder_cache.check_integrity()
        running = {r.req_id for r in self.running}
        waiting = {r.req_id for r in self.waiting}
        idle = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        checks = {
            "a request is in no queue, or in two": len(running) + len(waiting)
            == len(self.running) + len(self.waiting)
            and not running & waiting
            and running | waiting == self.requests.keys(),
            "a request that does not run is among those that run": all(
                r.status is RequestStatus.RUNNING for r in self.running
            ),
            "a request that does not wait is among those that wait": all(r.status in idle for r in self.waiting),
            "blocks of a request that does not run": self.kv.owners() <= running,
            "encoder references of a request that does not run": self.encoder_cache.owners() <= running,
        }
        for message, holds in checks.items():
            if not holds:
                raise IntegrityError(f"scheduler: {message}")

    def _give_back(self, request: Request) -> None:
        self.encoder_cache.free(request)
        self.kv.free(request)
