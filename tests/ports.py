"""Servers that tests start. Their port is probed and bound later: where another process takes it in between, they are
started once more at another."""

from __future__ import annotations

import socket
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import gradio as gr
from tiny_page import PATIENCE, until

from medusa_viz.ui import page as pages

TAKEN = ("cannot be served", "Cannot find empty port")  # in the words of app.py, and of gradio some seconds later


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launched(demo: gr.Blocks) -> str:
    """Serve a page of this process, from another thread, since a browser's event loop may run in this one; the
    address."""
    with ThreadPoolExecutor(1) as starter:
        def launch() -> str:
            return starter.submit(pages.launch, demo, "127.0.0.1", free_port(), block=False).result().rstrip("/")

        try:
            return launch()
        except OSError:
            return launch()


@contextmanager
def started(start: Callable[[int, TextIO], subprocess.Popen], log: Path) -> Iterator[tuple[str, int]]:
    """Address and process id of a server that runs while the block does. `start`: begins it at a port, with what it
    prints in an open file, that of `log`."""
    for last in (False, True):
        port = free_port()
        address = f"http://127.0.0.1:{port}"
        with log.open("w") as out:
            process = start(port, out)
        try:
            until(lambda: process.poll() is not None or answer(address, 10), f"the page at {address}")  # noqa: B023
            said = log.read_text()
            if process.poll() is not None and not last and any(words in said for words in TAKEN):
                continue
            assert process.poll() is None, said
            yield address, process.pid
            return
        finally:
            process.terminate()
            process.wait(PATIENCE)
            print(log.read_text()[-2000:])  # shown where the test fails


def answer(address: str, seconds: float = PATIENCE) -> str:
    """What a server answers; empty while none does."""
    try:
        with urllib.request.urlopen(address, timeout=seconds) as found:
            return found.read().decode()
    except OSError:
        return ""
