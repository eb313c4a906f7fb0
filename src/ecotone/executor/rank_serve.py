"""What a rank's process does between its first message and its last."""

from __future__ import annotations

import os
from contextlib import suppress

from ecotone.executor.channel import Channel, packed
from ecotone.executor.messages import ServedRank


def serve(channel: Channel, wakeup_fd: int) -> None:
    """Answer the executor until it hangs up; then give up what the rank holds.

    Args:
        channel: the connection to the executor.
        wakeup_fd: an eventfd to add to when there is something to report outside a step.
    """
    rank = ServedRank(lambda: _signal(wakeup_fd))
    try:
        _answer(channel, rank)
    finally:
        rank.close()


def _answer(channel: Channel, rank: ServedRank) -> None:
    while (message := channel.receive()) is not None:
        reply = rank.answer(message)
        message = None  # large ones are memory of the sender's
        if reply is not None:
            try:
                with packed(reply) as packet:
                    channel.send(packet)
            except ConnectionError:
                return


def _signal(wakeup_fd: int) -> None:
    # One counter for all ranks and for any number of signals: it cannot fill up, and whoever signals never waits.
    with suppress(BlockingIOError):
        os.eventfd_write(wakeup_fd, 1)
