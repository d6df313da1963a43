"""The trees that the Medusa repository ships, by name."""

from __future__ import annotations

import json
from functools import cache

from medusa_viz.decoding.tree import TreeShape, from_paths
from medusa_viz.models.presets import REPOSITORY

FILE = REPOSITORY / "assets" / "trees" / "published.json"


@cache
def published() -> dict[str, TreeShape]:
    """Shape by name, in the order of their file."""
    return {name: from_paths(paths) for name, paths in json.loads(FILE.read_text("utf-8"))["trees"].items()}
