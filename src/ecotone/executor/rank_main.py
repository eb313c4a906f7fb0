"""A rank's process: ``python -m ecotone.executor.rank_main CONTROL_FD WAKEUP_FD``.

It lives as long as the other end of the control socket. When that closes it gives up what it holds and ends, also
in the middle of a step, or of its own start: a thread that only waits for the hang-up ends it by force if it does
not end by itself.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
from importlib import import_module

from ecotone.executor.channel import Channel

# What is left of a step, and closing, may take this long once nobody listens any more.
LAST_WORDS_S = 5.0


def main(control_fd: int, wakeup_fd: int) -> None:
    """Serve one rank until the executor hangs up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the executor decides
    connection = socket.socket(fileno=control_fd)
    ended = threading.Event()
    threading.Thread(target=_end_with, args=(connection, ended), name="ecotone-lifeline", daemon=True).start()
    # Imported only now: torch comes with it, and takes seconds (minutes where many ranks start at once) in which
    # the executor may be gone already.
    rank_serve = import_module("ecotone.executor.rank_serve")
    try:
        rank_serve.serve(Channel(connection), wakeup_fd)
    finally:
        ended.set()
        connection.close()


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
