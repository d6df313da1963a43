"""Medusa-Viz: `python app.py` opens the page at once; the model loads behind it."""

from __future__ import annotations

import argparse
import atexit
import os
import socket
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from medusa_viz.cli import Parser, UsageError, add_model_options, add_settings, settings_from
from medusa_viz.decoding.settings import ServerLimits, SettingsError

if TYPE_CHECKING:
    from medusa_viz.ui.host import Host


def main(arguments: list[str] | None = None, *, block: bool = True,
         functions: Callable[[Host], Sequence[Callable]] = lambda host: ()) -> str:
    """Serve the page until it is interrupted; with `block=False`, as in a notebook, return its address at once.
    `functions` makes what Gradio's clients can call beside it."""
    options = parse(arguments)
    check_address(options.host, options.port)
    quiet_network()
    from medusa_viz.ui import page
    from medusa_viz.ui.host import Sessions

    chosen = {name: getattr(options, name) for name in ("model", "heads", "device", "dtype", "compile")}
    sessions = Sessions(chosen, locked=options.lock_model, limits=options.limits)
    demo = page.build(sessions, functions=functions(sessions.host))
    print(f"Medusa-Viz: http://{options.host}:{options.port}", flush=True)
    sessions.load_in_background()
    if not block:
        atexit.register(sessions.shutdown)
        return page.launch(demo, options.host, options.port, block=False)
    try:
        return page.launch(demo, options.host, options.port)
    finally:
        sessions.shutdown()


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options, with `limits` among them; ends with one sentence where one cannot be taken."""
    parser = Parser(prog="app.py", description="An interactive visual explorer for Medusa decoding.")
    add_model_options(parser)
    parser.add_argument("--lock-model", action="store_true", help="for public demos: visitors cannot switch model or "
                        "heads, start training, or name files of the server")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 for all")
    parser.add_argument("--port", type=int, default=7860, help="port to listen on")
    add_settings(parser, ServerLimits)
    try:
        options = parser.parse_args(arguments)
        options.limits = settings_from(options, ServerLimits)
    except (UsageError, SettingsError) as error:
        sys.exit(str(error))
    return options


def check_address(host: str, port: int) -> None:
    """End with one sentence, before anything loads, where the page cannot be served."""
    try:
        with socket.create_server((host, port)):
            pass
    except OverflowError:
        sys.exit(f"Port {port} is none; choose one from 1 to 65535 with --port.")
    except OSError as error:
        reason = str(error.strerror or error).partition(" (while")[0]
        sys.exit(f"The page cannot be served at {host}:{port} ({reason}); choose another --port or --host.")


def quiet_network() -> None:
    """Before anything imports gradio or a hub client: no request leaves the machine that nobody asked for."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    os.environ["GRADIO_ANALYTICS_CACHE_FREQUENCY"] = "1000"
    os.environ["GRADIO_ANALYTICS_MAX_EVENTS"] = "200"
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    if "HF_HUB_OFFLINE" not in os.environ:  # a repository that a person names is asked for all the same
        os.environ |= {"HF_HUB_OFFLINE": "1", "MEDUSA_VIZ_HUB": "named"}


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
