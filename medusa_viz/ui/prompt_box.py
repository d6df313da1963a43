"""The prompt box: what a run takes as its prompt, and what may be said beside it of the model that Start runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from medusa_viz.figures.texts import Texts
from medusa_viz.models.presets import DEFAULT_PRESET, PRESETS
from medusa_viz.ui.knobs import ActionError

MOST = 20_000
"""Characters of a prompt."""


def encoded(prompt: str, engine: Any) -> Any:
    """The prompt's ids, with `notice`. Raises ActionError where it cannot be run."""
    if not prompt.strip():
        raise ActionError("empty_prompt")
    if len(prompt) > MOST:
        raise ActionError("huge_prompt", characters=f"{len(prompt):,}", most=f"{MOST:,}")
    ids = engine.codec.encode_prompt(prompt)
    if len(ids) >= engine.backbone.context:
        raise ActionError("long_prompt", tokens=f"{len(ids):,}", context=f"{engine.backbone.context:,}")
    return ids


def beside(options: Mapping[str, Any], t: Texts) -> dict:
    """`note` on the default model's language, and `measured`: the examples' figures, which are of the default heads,
    hold for what these options load."""
    preset = PRESETS.get(options["model"])
    english = preset is not None and preset.weights == DEFAULT_PRESET.weights
    return {"note": t("view.english") if english else "",
            "measured": preset is DEFAULT_PRESET and not options["heads"]}
