"""A rank's process: ``python -m ecotone.executor.rank_main CONTROL_FD WAKEUP_FD``.

It lives as long as the other end of the control socket. When that closes it gives up what it holds and ends, also
in the middle of a step: a thread that only waits for the hang-up ends it by force if it does not end by itself.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
from contextlib import suppress

from ecotone.executor.channel import Channel, packed
from ecotone.executor.messages import ServedRank

# What is left of a step, and closing, may take this long once nobody listens any more.
LAST_WORDS_S = 5.0


def main(control_fd: int, wakeup_fd: int) -> None:
    """Serve one rank until the executor hangs up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the executor decides
    connection = socket.socket(fileno=control_fd)
    ended = threading.Event()
    threading.Thread(target=_end_with, args=(connection, ended), name="ecotone-lifeline", daemon=True).start()
    rank = ServedRank(lambda: _signal(wakeup_fd))
    try:
        _serve(Channel(connection), rank)
    finally:
        rank.close()
        ended.set()
        connection.close()


def _serve(channel: Channel, rank: ServedRank) -> None:
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


def _end_with(connection: socket.socket, ended: threading.Event) -> None:
    hang_up = select.poll()
    hang_up.register(connection.fileno(), 0)  # nothing but that it hung up
    hang_up.poll()
    if not ended.wait(LAST_WORDS_S):
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
    # Everything is closed. Taking the interpreter down with torch in it takes a second, for which somebody waits.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
