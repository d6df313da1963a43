"""Where a run is, in a file beside its log, for whoever watches from outside."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

PROGRESS_NAME = "progress.json"
EVERY = 0.5  # seconds between writes


class ProgressFile:
    """Replaces `progress.json` by {phase, done, total, seconds} at most twice a second, and at the end of a phase."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / PROGRESS_NAME
        self._begun = time.monotonic()
        self._next = 0.0

    def __call__(self, phase: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now < self._next and done < total:
            return
        self._next = now + EVERY
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps({"phase": phase, "done": done, "total": total,
                                    "seconds": round(now - self._begun, 1)}))
        os.replace(part, self.path)
