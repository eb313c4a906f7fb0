"""The deltas of one request, one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

from ecotone.engine.outputs import StreamDelta


class Stream(Iterator[StreamDelta]):
    """Iterates over the deltas; the last one of each output carries it. Ending it early aborts the request.

    Args:
        request_id: whose deltas they are.
        fetch: waits for the next delta.
        abort: ends the request.
        abandon: as ``abort``, at the next opportunity and without waiting for anything.
        num_outputs: how many outputs the request has.
    """

    def __init__(
        self,
        request_id: str,
        fetch: Callable[[], StreamDelta],
        abort: Callable[[str], object],
        abandon: Callable[[str], None],
        num_outputs: int = 1,
    ) -> None:
        self.request_id = request_id
        self._fetch = fetch
        self._abort = abort
        self._abandon = abandon
        self._running = num_outputs

    def __next__(self) -> StreamDelta:
        """The next delta.

        Raises:
            RequestFailedError: the request could not be finished. Other outputs of it end, too.
        """
        if not self._running:
            raise StopIteration
        delta = self._fetch()
        if delta.output is not None:
            self._running -= 1
            if delta.output.error is not None:
                self.close()
                raise delta.output.error
        return delta

    def close(self) -> None:
        """Abort the request if it still runs. Idempotent."""
        if self._running:
            self._running = 0
            self._abort(self.request_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # The collector may run this anywhere, also where this very thread holds the engine's lock.
        if self._running:
            self._abandon(self.request_id)
