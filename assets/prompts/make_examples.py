"""Chooses the page's example prompts by measured acceptance and records the opening session.

python assets/prompts/make_examples.py

Writes examples.json (each prompt with its tokens per step: greedy, sparse:16, 64 tokens; `loses` where that is less
than the overhead of such a step, measured by turns with plain ones) and ../sessions/opening.json (a real session that
stands at a step which commits at least four words).
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from medusa_viz.decoding import engine as engines  # noqa: E402
from medusa_viz.decoding.decoder import PLAIN, Tree, decode  # noqa: E402
from medusa_viz.decoding.settings import Acceptance  # noqa: E402
from medusa_viz.tuning.specs import Facts, build  # noqa: E402
from medusa_viz.ui.host import OPENING, Sessions  # noqa: E402

TREE, TOKENS, PLAIN_TOKENS = "sparse:16", 64, 16
SHOWN = 6  # the best prompt of different kinds, and the worst of all
OPENING_STEPS = 14
OPENING_TOKENS = 4  # what the step on screen commits, at least
CANDIDATES = {
    "writing": "Write a short email to a friend about a trip to the mountains.",
    "roleplay": "You are a pirate captain. Welcome a new sailor aboard.",
    "reasoning": "Why do we see lightning before we hear thunder?",
    "maths": "What is the sum of 12 and 30? Explain your steps.",
    "coding": "Write a Python function that adds two numbers.",
    "extraction": "List the days of the week, one per line.",
    "science": "Explain how a rainbow forms.",
    "humanities": "Who was Leonardo da Vinci?",
    "list": "Write the numbers from 1 to 20 in words.",
    "steps": "Give me a recipe for pancakes with numbered steps.",
    "short": "What is the capital of France?",
    "poem": "Write a four line poem about the sea.",
    "advice": "Give me five tips for learning a new language.",
    "benefits": "What are the benefits of regular exercise?",
    "translation": "Translate this into German: I would like a cup of coffee and a newspaper.",
}


@dataclass(frozen=True)
class Measured:
    """A prompt decoded with the tree and plainly: tokens per step, and the milliseconds of every step."""

    rate: float
    kind: str
    prompt: str
    tree_ms: list[float]
    plain_ms: list[float]


def main() -> None:
    engines.quiet_transformers()
    engine = engines.load(engines.EngineOptions())
    measured = [measure(engine, kind, prompt) for kind, prompt in CANDIDATES.items()]
    examples = chosen(measured)
    (HERE / "examples.json").write_text(json.dumps(examples, indent=1) + "\n")
    best = sorted(measured, key=lambda one: -one.rate)
    record_opening([one.prompt for one in best])


def chosen(measured: list[Measured]) -> list[dict]:
    """The best prompts and the worst; a prompt loses where its steps commit less than they cost in plain steps."""
    overhead = median(ms for one in measured for ms in one.tree_ms) / median(
        ms for one in measured for ms in one.plain_ms)
    ordered = sorted(measured, key=lambda one: -one.rate)
    for one in ordered:
        print(f"{one.rate:.2f}  {one.kind:12} {one.prompt}")
    print(f"overhead {overhead:.2f}")
    return [{"kind": one.kind, "prompt": one.prompt, "tokens_per_step": round(one.rate, 2),
             **({"loses": True, "overhead": round(overhead, 2)} if one.rate < overhead else {})}
            for one in ordered[:SHOWN] + ordered[-1:]]


def measure(engine: engines.Engine, kind: str, prompt: str) -> Measured:
    """Decode a prompt greedily, with the page's own tree and plainly."""
    shape = build(TREE, Facts(engine.drafter.heads, engine.accuracy)).tree
    ids = engine.codec.encode_prompt(prompt)

    def run(drafter: object, tree: Tree, tokens: int) -> list:
        return list(decode(engine.backbone, drafter, ids, tree, Acceptance(), tokens))

    steps, plain = run(engine.drafter, shape, TOKENS), run(None, PLAIN, PLAIN_TOKENS)
    return Measured(sum(len(step.tokens) for step in steps) / len(steps), kind, prompt,
                    *([step.timings.total for step in some[1:]] for some in (steps, plain)))


def record_opening(prompts: list[str]) -> None:
    """Run prompts as a visitor would, until a step commits enough; stop there and save the session."""
    sessions = Sessions({})
    sessions.host.load()
    try:
        OPENING.write_text(recorded(sessions, prompts))
    finally:
        sessions.host.close()


def recorded(sessions: Sessions, prompts: list[str]) -> str:
    """The first session of these prompts that stands at a good step, as JSON."""
    for token, prompt in enumerate(prompts):
        sessions.act(str(token), "start", {"prompt": prompt})
        session = sessions.session(str(token))
        for index in range(OPENING_STEPS):
            committed = session.entry.step.verdict.committed
            words = sum(is_word(session.model.engine.codec.token_text(token)) for token in committed)
            if index >= 3 and words >= OPENING_TOKENS and words == len(committed) and not session.line.finished:
                print(f"opening: {prompt!r}, step {index}, commits {words} words")
                return sessions.record(str(token))
            sessions.act(str(token), "step", {})
    raise SystemExit("no prompt led to a step that commits enough words")


def is_word(text: str) -> bool:
    """Line ends and signs say little to somebody who sees a tree for the first time."""
    return any(char.isalpha() for char in text)


if __name__ == "__main__":
    main()
