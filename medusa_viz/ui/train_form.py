"""The form of the Train page: recipes, models, token files and settings, all taken from what the commands offer."""

from __future__ import annotations

from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from medusa_viz.figures.texts import Texts
from medusa_viz.models.presets import PRESETS, backbone_of, shipped
from medusa_viz.training import shipped as replies
from medusa_viz.training.settings import RECIPES
from medusa_viz.ui.train_plan import data_root, reply_tokens

MAIN = ("passes", "batch", "lr", "heads", "layers", "draft_vocabulary", "heads_passes", "lambda0", "rank")
SMALL = {"distil": 4_000, "settings": {"tokens": 20_000, "passes": 1, "batch": 64, "warmup": 10, "log_every": 2,
                                       "draft_vocabulary": 8_192}}
"""A run of a few minutes on two cores. It shows how training goes, not what trained heads can do."""
WHOLE = {"distil": 60_000, "settings": {}}
MOST_FILES = 50


def form(host: Any, t: Texts) -> dict:
    """Everything that can be chosen, with what stands there at first."""
    own = replies.training_file(running_model(host))
    return {
        "recipes": [{"name": name, "help": t(f"train.recipe.{name}"), "fields": _fields(recipe.defaults)}
                    for name, recipe in RECIPES.items()],
        "models": _models(host, t),
        "data": [*([_shipped(own, t)] if own else []),
                 *({"path": str(path), "label": t("train.file", name=path.name, tokens=tokens), "tokens": tokens}
                   for path, tokens in _files())],
        "chosen": str(own or ""),
        "presets": [{"name": "small", "label": t("train.preset.small"), **SMALL},
                    {"name": "whole", "label": t("train.preset.whole"), **WHOLE}],
    }


def _fields(defaults: object) -> list[dict]:
    """Settings of a recipe, those first that matter most."""
    found = [{"name": one.name, "value": getattr(defaults, one.name), "help": one.metadata["help"],
              "low": one.metadata["low"], "high": one.metadata["high"], "choices": one.metadata["choices"],
              "whole": isinstance(one.default, int), "main": one.name in MAIN} for one in fields(defaults)]
    return sorted(found, key=lambda one: MAIN.index(one["name"]) if one["main"] else len(MAIN))


def running_model(host: Any) -> str:
    """The running model's backbone, without the adapter that its heads may bring."""
    return backbone_of(host.options["model"])


def _models(host: Any, t: Texts) -> list[dict]:
    running = running_model(host)
    others = [preset.name for preset in shipped() if preset.name == preset.weights != running]
    return [{"name": running, "label": t("train.model_running", name=_title(running))},
            *({"name": name, "label": _title(name)} for name in others)]


def _title(name: str) -> str:
    return PRESETS[name].title if name in PRESETS else Path(name).name


def _shipped(path: Path, t: Texts) -> dict:
    """The replies of the running model that ship with the project."""
    tokens, heats = replies.facts(path)
    return {"path": str(path), "label": t("train.shipped", tokens=tokens, heats=" + ".join(heats)), "tokens": tokens}


def _files() -> list[tuple[Path, int]]:
    """Token files in the user's cache that hold something to learn, newest first."""
    found = []
    for path in data_root().glob("*.npz"):
        try:
            changed = path.stat().st_mtime
            found.append((changed, path, _tokens(path, changed)))
        except (OSError, ValueError, KeyError, IndexError, TypeError, EOFError):
            continue  # no token file
    return [(path, tokens) for _, path, tokens in sorted(found, reverse=True) if tokens][:MOST_FILES]


@lru_cache(maxsize=200)
def _tokens(path: Path, changed: float) -> int:
    return reply_tokens(path)
