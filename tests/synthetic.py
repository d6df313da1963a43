"""Steps made from random logits, for tests only: consistent as if a model had spoken, but no model is loaded."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from medusa_viz.decoding import reweigh
from medusa_viz.decoding.acceptance import Walk
from medusa_viz.decoding.records import TEMPERATURES, Drafts, Step, Timings, TopTokens, Verification
from medusa_viz.decoding.settings import Acceptance, Walls
from medusa_viz.decoding.tree import TreeShape
from medusa_viz.ui.snapshot import BranchTab, ModelStatus, Snapshot

ACCURACY = [[0.5, 0.15, 0.08, 0.05, 0.04, 0.03, 0.02, 0.02, 0.01, 0.01],
            [0.3, 0.12, 0.07, 0.05, 0.04, 0.03, 0.02, 0.02, 0.01, 0.01],
            [0.2, 0.09, 0.06, 0.04, 0.03, 0.03, 0.02, 0.02, 0.01, 0.01],
            [0.15, 0.07, 0.05, 0.04, 0.03, 0.02, 0.02, 0.01, 0.01, 0.01]]
WORDS = """the cat sat on mat and then he a of to was in it with for that his her they from she but not all were
when there said about would could into little very house river window morning something beautiful""".split()  # noqa: SIM905


def softmax(logits: np.ndarray) -> np.ndarray:
    weight = np.exp(logits - logits.max(-1, keepdims=True))
    return weight / weight.sum(-1, keepdims=True)


def make_logits(shape: TreeShape, seed: int, vocab: int = 200, heads: int = 4, agree: float = 0.5
                ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Head logits [K, V], tokens [n+1] and backbone logits [n+1, V]. With chance `agree` the backbone's argmax after
    an inner row is one of its children's tokens."""
    rng = np.random.default_rng(seed)
    head_logits = rng.normal(0, 3, (max(heads, shape.height), vocab))
    order = np.argsort(-head_logits, axis=1)
    tokens = np.zeros(shape.nodes + 1, np.int64)
    tokens[0] = rng.integers(vocab)
    tokens[1:] = order[shape.depth[1:] - 1, shape.rank[1:]]
    logits = rng.normal(0, 2.5, (shape.nodes + 1, vocab))
    for row in np.flatnonzero(shape.is_parent):
        children = np.flatnonzero(shape.parent == row)
        if rng.random() < agree:
            logits[row, tokens[rng.choice(children)]] = logits[row].max() + rng.exponential(1.0)
    return head_logits, tokens, logits


def make_step(shape: TreeShape, seed: int = 0, settings: Acceptance | None = None, *, vocab: int = 200, heads: int = 4,
              agree: float = 0.5, index: int = 0, prefix: int = 214, end_ids: tuple[int, ...] = (),
              verified: bool = True) -> Step:
    """A step over random logits, judged by `settings` (greedy by default)."""
    head_logits, tokens, logits = make_logits(shape, seed, vocab, heads, agree)
    step = Step(index, "A", prefix, _drafts(shape, head_logits, tokens, logits), None, None,
                Timings(7.1, 71.4, 0.9, 0.8), answer_ms=80.2, estimate_ms=None if verified else 15_200.0)
    if not verified:
        return step
    step = replace(step, verification=_verification(shape, head_logits, tokens, logits))
    settings = settings or Acceptance()
    walk = make_walk(shape, tokens, logits, seed, settings) if settings.rule == "rejection" else None
    return replace(step, verdict=reweigh.judge(step, settings, end_ids, walk))


def make_walk(shape: TreeShape, tokens: np.ndarray, logits: np.ndarray, seed: int, settings: Acceptance) -> Walk:
    """Draws the next token at each row until it was not drafted."""
    rng, rows = np.random.default_rng(seed + 1), [0]
    while True:
        drawn = int(rng.choice(logits.shape[1], p=softmax(logits[rows[-1]] / settings.temperature)))
        child = np.flatnonzero((shape.parent == rows[-1]) & (tokens == drawn))
        if not len(child):
            return Walk(rows, drawn)
        rows.append(int(child[0]))


def make_texts(vocab: int = 200) -> dict[int, str]:
    """Display texts, some of them equal."""
    return {token: ("␠" if token % 3 else "") + WORDS[token % len(WORDS)] for token in range(vocab)}


def make_snapshot(steps: list[Step], **changes) -> Snapshot:
    """A live session that shows its last step, pending."""
    snapshot = Snapshot(
        model=ModelStatus("ready", title="SmolLM2-135M-Instruct · CPU · fp32"), recorded=False, title="test",
        prompt="The cat sat on", prompt_ids=[1, 2, 3], accuracy=ACCURACY, texts=make_texts(),
        kinds={}, steps=steps, index=max(0, len(steps) - 1), pending=bool(steps), changed=False, finished=None,
        walls=Walls((4, 3, 2, 2), 16),
        acceptance=steps[-1].verdict.settings if steps and steps[-1].verdict else Acceptance(),
        delta_locked=True, branch="A", branches=[BranchTab("A", len(steps), 0)], plain_ms=62.0)
    return replace(snapshot, **changes)


def _drafts(shape: TreeShape, head_logits: np.ndarray, tokens: np.ndarray, logits: np.ndarray) -> Drafts:
    p = softmax(head_logits)
    head_p = np.concatenate([[0.6], p[shape.depth[1:] - 1, tokens[1:]]])
    path_p = np.ones(shape.nodes + 1)
    for row in range(1, shape.nodes + 1):
        path_p[row] = path_p[shape.parent[row]] * head_p[row]
    return Drafts(shape.parent.tolist(), shape.rank.tolist(), tokens.tolist(), head_p.tolist(), path_p.tolist(),
                  [_top(row) for row in p])


def _verification(shape: TreeShape, head_logits: np.ndarray, tokens: np.ndarray, logits: np.ndarray) -> Verification:
    own = logits[shape.parent[1:], tokens[1:]]
    ranks = (logits[shape.parent[1:]] > own[:, None]).sum(1)
    parents = np.flatnonzero(shape.is_parent).tolist()
    tables = {row: _temperature_tables(logits[row]) for row in parents}
    return Verification([0.0, *own.tolist()], [0, *ranks.tolist()],
                        {row: _top(p) for row, p in enumerate(softmax(logits))},
                        {row: lse for row, (lse, _) in tables.items()},
                        {row: mean for row, (_, mean) in tables.items()},
                        {row: _next_rank(head_logits, int(depth), int(logits[row].argmax()))
                         for row, depth in enumerate(shape.depth)})


def _next_rank(head_logits: np.ndarray, depth: int, wanted: int) -> int:
    if depth >= len(head_logits):
        return -1
    return int((head_logits[depth] > head_logits[depth, wanted]).sum())


def _temperature_tables(logits: np.ndarray) -> tuple[list[float], list[float]]:
    lse = [float(np.log(np.exp((logits - logits.max()) / t).sum()) + logits.max() / t) for t in TEMPERATURES]
    return lse, [float((softmax(logits / t) * logits).sum()) for t in TEMPERATURES]


def _top(p: np.ndarray) -> TopTokens:
    ids = np.argsort(-p)[:10]
    return TopTokens(ids.tolist(), p[ids].tolist())
