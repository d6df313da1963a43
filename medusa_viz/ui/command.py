"""The step on screen as a command line: what the page runs, anybody can run."""

from __future__ import annotations

import shlex

from medusa_viz.decoding.settings import Acceptance, Limits
from medusa_viz.ui.snapshot import Snapshot


def command(snapshot: Snapshot) -> str:
    """`python -m medusa_viz decode …` with the prompt and the knobs of the step on screen; settings at their
    defaults are left out. An own tree has no short name, hence no command."""
    if not snapshot.prompt or snapshot.own_tree:
        return ""
    walls, settings, default = snapshot.walls, snapshot.acceptance, Acceptance()
    tree = f"sparse:{walls.size}@{','.join(map(str, walls.top_s))}"
    words = ["python", "-m", "medusa_viz", "decode", "--prompt", snapshot.prompt, "--tree", tree]
    for name, option in (("mode", "--accept"), ("temperature", "--temperature"), ("epsilon", "--epsilon"),
                         ("delta", "--delta"), ("top_p", "--top-p"), ("seed", "--seed")):
        value = getattr(settings, name)
        if value != getattr(default, name):
            words += [option, f"{value:g}" if isinstance(value, float) else str(value)]
    return shlex.join([*words, "--max-new-tokens", str(Limits().max_new_tokens)])
