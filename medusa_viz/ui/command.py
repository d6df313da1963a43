"""The step on screen as a command line: what the page runs, anybody can run."""

from __future__ import annotations

import shlex
from pathlib import Path

from medusa_viz.decoding.settings import MAX_RANKS, Acceptance, Limits
from medusa_viz.figures.texts import Texts
from medusa_viz.ui.running import DEFAULTS
from medusa_viz.ui.snapshot import Snapshot


def command(snapshot: Snapshot) -> str:
    """`python -m medusa_viz decode …` with the prompt, the model and the knobs of the step on screen; what stands at
    its default is left out. Empty where there is none."""
    if not snapshot.prompt or _reason(snapshot):
        return ""
    walls, settings, default = snapshot.walls, snapshot.acceptance, Acceptance()
    tree = f"{'dynamic' if snapshot.dynamic else 'sparse'}:{walls.size}"
    if not snapshot.dynamic or set(walls.top_s) != {MAX_RANKS}:  # dynamic trees have these walls by themselves
        tree += f"@{','.join(map(str, walls.top_s))}"
    words = ["python", "-m", "medusa_viz", "decode", "--prompt", snapshot.prompt, "--tree", tree]
    for name, option in (("mode", "--accept"), ("temperature", "--temperature"), ("epsilon", "--epsilon"),
                         ("delta", "--delta"), ("top_p", "--top-p"), ("seed", "--seed")):
        value = getattr(settings, name)
        if value != getattr(default, name):
            words += [option, f"{value:g}" if isinstance(value, float) else str(value)]
    return shlex.join([*words, *_model(snapshot), "--max-new-tokens", str(Limits().max_new_tokens)])


def blocked(snapshot: Snapshot, t: Texts) -> str:
    """Why there is no command although there is a prompt."""
    reason = _reason(snapshot) if snapshot.prompt else ""
    return t(f"view.command.{reason}") if reason else ""


def _reason(snapshot: Snapshot) -> str:
    if snapshot.own_tree:
        return "own_tree"
    named = (snapshot.options.get(name) for name in ("model", "heads"))
    return "locked" if snapshot.locked and any(name and Path(name).exists() for name in named) else ""


def _model(snapshot: Snapshot) -> list[str]:
    words = []
    for name, value in snapshot.options.items():
        if value != DEFAULTS[name]:
            words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return words
