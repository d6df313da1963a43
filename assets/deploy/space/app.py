"""The page on a Hugging Face Space: `python app.py` on every interface, with the model locked and the options of
MEDUSA_VIZ_OPTIONS. On ZeroGPU its steps run on the machine's CPU, and `decode` has the card for one whole reply.

Why not each step: a call of a decorated function waits for a card, runs in a process forked for it, whose cache goes
whenever ZeroGPU ends it, and costs its visitor quota and one of a limited number of runs (zero/wrappers.py and
zero/client.py of spaces 0.51.3), while the default model steps in tens of milliseconds on a CPU. And the token by
which ZeroGPU knows a visitor's account comes along with Gradio's queue alone, which the page's own calls do without.
Without any decorated function spaces does not report that the Space has started (zero/__init__.py), which stops it.
"""

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[3])

from app import main, parse  # noqa: E402
from medusa_viz import cli  # noqa: E402
from medusa_viz.decoding.settings import Acceptance, Limits  # noqa: E402
from medusa_viz.models.memory import spoken  # noqa: E402
from medusa_viz.tuning import specs  # noqa: E402

ARGUMENTS = ["--host", "0.0.0.0", "--lock-model", *shlex.split(os.environ.get("MEDUSA_VIZ_OPTIONS", ""))]
FAULTS = ValueError, RuntimeError, OSError


def decode_on_card(host) -> Sequence[Callable]:
    """What a Space on ZeroGPU, and no other, offers to Gradio's clients beside the page."""
    if not os.environ.get("SPACES_ZERO_GPU"):
        return []
    import gradio as gr
    import spaces

    lent = spaces.GPU(whole_reply)

    def decode(prompt: str, tree: str = "", accept: str = "greedy", temperature: float = 0.0,
               max_new_tokens: int = 256) -> dict:
        """Text and metrics of one reply, written on the card: what `python -m medusa_viz decode --json` writes."""
        try:
            if not (isinstance(prompt, str) and isinstance(tree, str)):
                raise ValueError("prompt and tree must be texts.")
            settings, limits = Acceptance(accept, temperature), Limits(max_new_tokens)
            cli.check_prompt(prompt)
            if tree:
                specs.parse(tree)  # so that it names no file of the server
            if host.status.state == "loading":  # nobody's quota should pass with a download
                raise ValueError("The model is not ready yet.")
            found = lent(prompt, tree, settings, limits)
            if isinstance(found, str):
                raise ValueError(found)
            return found
        except FAULTS as error:  # of other errors than its own Gradio tells people nothing
            raise gr.Error(str(error), print_exception=False) from error

    return [decode]


def whole_reply(prompt: str, tree: str, settings: Acceptance, limits: Limits) -> dict | str:
    """In the process that has the card: the reply, or one sentence. Both are pickled on their way; after an error
    ZeroGPU would begin the next call in a new process."""
    try:
        return cli.reply(engine_here(), prompt, tree, settings, limits)
    except FAULTS as error:
        return str(spoken(error))


@cache
def engine_here():
    """The model on the card, for as long as ZeroGPU keeps this process."""
    return cli.load_engine(parse(ARGUMENTS))


if __name__ == "__main__":
    main(ARGUMENTS, functions=decode_on_card)
