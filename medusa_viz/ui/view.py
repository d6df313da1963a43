"""The view: everything visible on the Explorer as one plain dict, built from a snapshot.

The page draws nothing that is not in here, and nothing in here needs the model: a recorded session and a live one
look alike. One section per panel; every text comes from the text table, every number through figures/numbers.py.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from itertools import pairwise

import numpy as np

from medusa_viz.decoding.records import TEMPERATURES, UNVERIFIED, Step, TopTokens
from medusa_viz.decoding.reweigh import grid_column
from medusa_viz.decoding.tree import Path
from medusa_viz.figures import mask, numbers, tokens, tree
from medusa_viz.figures.fold import fold
from medusa_viz.figures.layout import GHOST, arrange
from medusa_viz.figures.texts import Texts
from medusa_viz.ui import compare, gains, knob_view, merits, provenance, status
from medusa_viz.ui.sentences import Narrator
from medusa_viz.ui.snapshot import Snapshot

SENTENCES_UP_TO = 1100
"""Nodes up to which every row has its sentence; of larger trees, which are never verified, only the drawn rows."""


def build(snapshot: Snapshot, t: Texts, opened: Collection[Path] = ()) -> dict:
    """The view of a snapshot in one language. `opened` are paths whose children are drawn in spite of the fold."""
    step = snapshot.steps[snapshot.index] if snapshot.steps else None
    return {
        "lang": t.lang,
        "status": status.status(snapshot, t),
        "run": status.run(snapshot, step, t),
        "steps": status.steps(snapshot),
        "text": status.text(snapshot, step, t),
        "phases": status.phases(snapshot, step, t),
        "equality": status.equality(snapshot, t),
        "merits": merits.merits(snapshot, t),
        "knobs": knob_view.knobs(snapshot, step, t),
        "provenance": provenance.provenance(snapshot.heads, t),
        "pin": compare.comparison(snapshot, t),
        **(_ShownStep(snapshot, step, t, opened).sections() if step else _nothing(t)),
    }


def _nothing(t: Texts) -> dict:
    """Sections of a page that has no step yet: a lone root without a place keeps selections simple."""
    root = {"row": 0, "path": "", "parent": -1, "depth": 0, "rank": -1, "text": "", "kind": "text",
            "verdict": UNVERIFIED, "x": None, "y": None, "p": None}
    blank = {"xaxis": {"visible": False}, "yaxis": {"visible": False}, "paper_bgcolor": "rgba(0,0,0,0)",
             "plot_bgcolor": "rgba(0,0,0,0)"}
    return {
        "headline": {"text": t("view.headline.none"), "hint": ""},
        "tree": {"figure": {"layout": blank}, "data": [[], [], [], []], "nodes": [root], "ghost": None, "folded": 0},
        "mask": {"figure": {"layout": blank, "data": []}, "kind": "glyph", "key": ""},
        "cache": {"prefix": 0, "rows": 0, "kept": [], "keep": 0, "drop": 0, "text": ""},
        "heads": {"head": []}, "verdict": {"rows": {}}, "rows": {}, "gains": {"expected": "", "note": "", "rows": []},
    }


def packed(built: dict) -> dict:
    """The view as it is sent: of the tree's later phases only what differs from the phase before."""
    phases = built["tree"]["data"]
    changes = [[{name: value for name, value in new.items() if old[name] != value}
                for old, new in zip(before, after, strict=True)] for before, after in pairwise(phases)]
    return {**built, "tree": {**built["tree"], "data": [phases[0], *changes]}}


class _ShownStep:
    """The sections that show one step."""

    def __init__(self, snapshot: Snapshot, step: Step, t: Texts, opened: Collection[Path]) -> None:
        self.snapshot, self.step, self.t = snapshot, step, t
        self.tell = Narrator(step, snapshot.texts, snapshot.walls.top_s, t)
        self.verdict, self.shape, self.drafts = step.verdict, step.shape, step.drafts
        self.rows = range(self.shape.nodes + 1)
        self.texts = [self.tell.name(token) for token in self.drafts.token]
        self.verdicts = self.verdict.verdict if self.verdict else [UNVERIFIED] * len(self.rows)
        accepted = self.verdict.accepted if self.verdict else []
        self.kept = frozenset(accepted[: len(self.verdict.committed)] if self.verdict else ())
        self.ghost = self.tell.ghost()
        screen = snapshot.screen
        self.folded = fold(self.shape, self.drafts.path_p, self._always_drawn(accepted, opened), screen.fold,
                           screen.lines)
        self.layout = arrange(self.shape, self.folded, accepted[-1] if self.ghost else None, screen.tree)

    def sections(self) -> dict:
        """Everything that shows this step."""
        return {"headline": self._headline(), "tree": self._tree(), "mask": self._mask(), "cache": self._cache(),
                "heads": self._heads(), "verdict": self._verdict_panel(), "rows": self._sentences(),
                "gains": gains.gains(self.step, self.snapshot.accuracy, self.t)}

    def _always_drawn(self, accepted: list[int], opened: Collection[Path]) -> list[int]:
        """Rows that no fold hides: the accepted path, what was drafted where it stopped, and opened families."""
        parents = {self.shape.row_of[path] for path in opened if path in self.shape.row_of} | set(accepted[-1:])
        return [*accepted, *np.flatnonzero(np.isin(self.shape.parent, list(parents))).tolist()]

    def _headline(self) -> dict:
        key = "view.headline.hint" if self.verdict else "view.headline.unverified_hint"
        text = self.tell.headline()
        if status.too_large(self.snapshot, self.step):
            text = f"{text} {status.blocked(self.snapshot, self.step, self.t)}"
        return {"text": text, "hint": self.t(key, paths=self.shape.leaves) if self.shape.nodes else ""}

    # ---- tree ----------------------------------------------------------------------------------------------------

    def _tree(self) -> dict:
        drawn, before_and_after = self.folded.visible, (False, True)
        drawing = tree.TreeDrawing(
            layout=self.layout, texts=self.texts, depths=self.shape.depth.tolist(), verdicts=self.verdicts,
            kept=self.kept, folded=self.folded.hidden,
            small=tuple({row: self._small(row, verified) for row in drawn} for verified in before_and_after),
            ghost=self.ghost, counts=self.shape.depth_counts,
        )
        return {"figure": {"layout": tree.figure(drawing, self.t)}, "data": tree.phases(drawing, self.t),
                "nodes": self._nodes(), "ghost": self._ghost(), "folded": self.folded.total}

    def _small(self, row: int, verified: bool) -> str:
        """The probability under a label: the backbone's once it has looked, the head's before."""
        if row == 0 or (verified and self.verdict):
            return self.t("fig.p", p=numbers.probability(self._p(row)))
        return self.t("fig.p_head", p=numbers.probability(self.drafts.head_p[row]))

    def _p(self, row: int) -> float | None:
        """The backbone's probability of a row's token."""
        if row == 0:
            return self.drafts.head_p[0]
        return self.verdict.p[row] if self.verdict else None

    def _nodes(self) -> list[dict]:
        x, y = self.layout.x, self.layout.y
        kinds = self.snapshot.kinds
        columns = zip(self.shape.paths, self.drafts.parent, self.shape.depth.tolist(), self.drafts.rank,
                      self.drafts.token, self.texts, self.verdicts, strict=True)
        return [{"row": row, "path": ".".join(map(str, path)), "parent": parent, "depth": depth, "rank": rank,
                 "text": tokens.visible(text), "kind": kinds.get(token, "text"), "verdict": verdict,
                 "x": x.get(row), "y": y.get(row), "p": _rounded(self._p(row))}
                for row, (path, parent, depth, rank, token, text, verdict) in enumerate(columns)]

    def _ghost(self) -> dict | None:
        if self.ghost is None:
            return None
        text, reason = self.ghost
        return {"x": self.layout.x[GHOST], "y": self.layout.y[GHOST], "text": tokens.visible(text), "reason": reason}

    # ---- mask and cache --------------------------------------------------------------------------------------------

    def _mask(self) -> dict:
        bands = [self.t("view.root"), *(self.t("view.head", k=k) for k in range(1, self.shape.height + 1))]
        prefix = self.step.prefix_length
        room = self.snapshot.screen.mask
        drawing = mask.MaskDrawing(self.shape, self.texts, prefix, self.kept, bands, room)
        drawn = self.shape.fingerprint, *self.drafts.token, prefix, self.kept, room
        return {
            "figure": mask.figure(drawing, self.t), "kind": mask.kind(len(self.rows)),
            "key": str(hash(drawn)),
        }

    def _cache(self) -> dict:
        keep, rows = len(self.kept), len(self.rows)
        drop = rows - keep if self.verdict else 0
        key = "view.cache.text" if self.verdict else "view.cache.unverified"
        return {"prefix": self.step.prefix_length, "keep": keep, "drop": drop,
                "text": self.t(key, keep=keep, drop=drop, rows=rows),
                "rows": rows, "kept": sorted(self.kept)}

    # ---- tables ------------------------------------------------------------------------------------------------------

    def _heads(self) -> dict:
        used = set(zip(self.shape.depth[1:].tolist(), self.shape.rank[1:].tolist(), strict=True))
        return {"head": [{
            "k": k, "title": self.t("view.head_title", k=k, next=k + 1),
            "tokens": [{"text": tokens.visible(self.tell.name(token)), "p": _rounded(p), "used": (k, rank) in used}
                       for rank, (token, p) in enumerate(zip(top.ids, top.p, strict=True))],
        } for k, top in enumerate(self.drafts.heads, start=1)]}

    def _verdict_panel(self) -> dict:
        """Per parent, what the backbone thought of the tokens after it."""
        if self.verdict is None:
            return {"rows": {}}
        children: dict[int, list[int]] = {}
        for row in self.rows[1:]:
            children.setdefault(self.drafts.parent[row], []).append(row)
        return {"rows": {str(parent): self._family(parent, rows) for parent, rows in children.items()}}

    def _family(self, parent: int, children: list[int]) -> dict:
        """The backbone's ten likeliest tokens after a row, and the drafted ones that are not among them."""
        top = self.step.verification.top[parent]
        drafted = {self.drafts.token[row]: row for row in children}
        listed = [self._candidate(token, self._tempered(parent, top, place), drafted.pop(token, None))
                  for place, token in enumerate(top.ids)]
        listed += [self._candidate(token, self.verdict.p[row], row)
                   for token, row in drafted.items()]
        threshold = self.verdict.threshold[children[0]]
        return {"title": self.t("view.after", token=self.tell.quoted(parent)), "terms": self.tell.terms(parent),
                "threshold": threshold or None, "tokens": listed}

    def _tempered(self, parent: int, top: TopTokens, place: int) -> float:
        """A recorded probability at the temperature of the rule in force."""
        settings, p = self.verdict.settings, top.p[place]
        if settings.rule == "greedy" or p <= 0:
            return p
        lse, column = self.step.verification.lse[parent], grid_column(settings.temperature)
        logit = math.log(p) + lse[TEMPERATURES.index(1.0)]
        return min(1.0, math.exp(logit / TEMPERATURES[column] - lse[column]))

    def _candidate(self, token: int, p: float, row: int | None) -> dict:
        return {"text": tokens.visible(self.tell.name(token)), "p": _rounded(p), "p_text": numbers.probability(p),
                "drafted_row": row, "verdict": None if row is None else self.verdicts[row]}

    def _sentences(self) -> dict:
        rows = self.rows if self.shape.nodes <= SENTENCES_UP_TO else self.folded.visible
        return {str(row): {"name": self.tell.quoted(row), "place": self.tell.place(row),
                           "sentence": self.tell.sentence(row), "judged": self.tell.judged(row),
                           "drafted": self.tell.drafted(row)} for row in rows}


def _rounded(p: float | None) -> float | None:
    """Five significant digits, as in records: more would only make the page's load larger."""
    return None if p is None else float(f"{p:.5g}")
