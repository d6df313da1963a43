"""Why another model could not be loaded: told to a page until its person acts again."""

from __future__ import annotations

from dataclasses import replace

from medusa_viz.ui.snapshot import ModelStatus


class News:
    """What one page was told of the model."""

    def __init__(self) -> None:
        self._told = self._known = ""

    def read(self) -> None:
        """The person goes on, and has seen what the page shows."""
        self._known = self._told

    def of(self, status: ModelStatus) -> ModelStatus:
        """The status as this page shows it."""
        self._told = status.fault
        return replace(status, fault="") if status.fault == self._known else status
