"""Chooses the page's example prompts by measured acceptance and records the opening session.

python assets/prompts/make_examples.py

Writes examples.json (each prompt with its tokens per step: greedy, sparse:16, 64 tokens) and
../sessions/opening.json (a real session that stands at a step which commits at least four tokens).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from medusa_viz.decoding import engine as engines  # noqa: E402
from medusa_viz.decoding import records  # noqa: E402
from medusa_viz.decoding.decoder import decode  # noqa: E402
from medusa_viz.decoding.settings import Acceptance  # noqa: E402
from medusa_viz.tuning.calibration import facts_of  # noqa: E402
from medusa_viz.tuning.specs import build  # noqa: E402
from medusa_viz.ui.host import Sessions  # noqa: E402

TREE, TOKENS = "sparse:16", 64
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
}


def main() -> None:
    engines.quiet_transformers()
    engine = engines.load(engines.EngineOptions())
    measured = sorted(((measure(engine, prompt), kind, prompt) for kind, prompt in CANDIDATES.items()), reverse=True)
    for value, kind, prompt in measured:
        print(f"{value:.2f}  {kind:12} {prompt}")
    chosen = measured[:SHOWN] + measured[-1:]
    examples = [{"kind": kind, "prompt": prompt, "tokens_per_step": round(value, 2)} for value, kind, prompt in chosen]
    (HERE / "examples.json").write_text(json.dumps(examples, indent=1) + "\n")
    record_opening([prompt for _, kind, prompt in measured if kind not in ("list", "coding")])  # words read best


def measure(engine: engines.Engine, prompt: str) -> float:
    """Tokens per step of a greedy run."""
    shape = build(TREE, facts_of(engine)).tree
    ids = engine.codec.encode_prompt(prompt)
    steps = list(decode(engine.backbone, engine.drafter, ids, shape, Acceptance(), TOKENS))
    return sum(len(step.tokens) for step in steps) / len(steps)


def record_opening(prompts: list[str]) -> None:
    """Run prompts as a visitor would, until a step commits enough; stop there and save the session."""
    sessions = Sessions({})
    sessions.host.load()
    try:
        _record(sessions, prompts)
    finally:
        sessions.host.close()


def _record(sessions: Sessions, prompts: list[str]) -> None:
    for token, prompt in enumerate(prompts):
        sessions.act(str(token), "start", {"prompt": prompt})
        session = sessions.session(str(token))
        for index in range(OPENING_STEPS):
            committed = len(session.entry.step.verdict.committed)
            if index >= 3 and committed >= OPENING_TOKENS and not session.line.finished:
                (HERE.parent / "sessions" / "opening.json").write_text(records.to_json(session.record()))
                print(f"opening: {prompt!r}, step {index}, commits {committed} tokens")
                return
            sessions.act(str(token), "step", {})
    raise SystemExit("no prompt led to a step that commits enough tokens")


if __name__ == "__main__":
    main()
