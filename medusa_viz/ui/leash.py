"""Runs one command of `python -m medusa_viz` on a leash: `python -m medusa_viz.ui.leash train …`.

Whoever started it holds the other end of its standard input. When that end is let go, even by a server that was
killed, the command is stopped as by Ctrl-C, and ended soon after if it does not stop. It gives way to other work.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

PATIENCE = 20.0  # seconds that a stopped command has to save what it has
NICE = 10


def main(arguments: list[str]) -> int:
    """The command's exit status; 130 if it was stopped."""
    # A server started in the background of a script ignores SIGINT, and its children would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if hasattr(os, "nice"):
            os.nice(NICE)
        threading.Thread(target=_watch, args=(sys.stdin.fileno(),), daemon=True).start()
        from medusa_viz import cli

        return cli.main(arguments)
    except KeyboardInterrupt:
        return 130


def _watch(leash: int) -> None:
    """Each line on standard input stops the command; so does its end, which leaves it little time."""
    while os.read(leash, 1024):
        os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(PATIENCE)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
