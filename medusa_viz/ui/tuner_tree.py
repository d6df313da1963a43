"""The tree on the desk as the page draws it: the same figure as the Explorer's, with ranks for tokens and gains for
probabilities. What is not in it but could be, is drawn as slots."""

from __future__ import annotations

import heapq

from medusa_viz.decoding.tree import Path, TreeShape, dense, from_paths
from medusa_viz.figures import numbers, tree
from medusa_viz.figures.fold import FOLD_ABOVE, fold
from medusa_viz.figures.layout import HEADERS, LEAST_LINE, arrange
from medusa_viz.figures.texts import Texts
from medusa_viz.tuning import edits
from medusa_viz.tuning.builders import expected_tokens_per_step, growth, node_values
from medusa_viz.tuning.frontier import Cut, cut, frontier
from medusa_viz.ui.tuner_desk import Desk

PLANNED, SLOT = "planned", "slot"
CUT_WIDTH, CUT_HEADS = 8, 4  # of the tree that a budget cuts from: 4,680 nodes
DRAWN_SLOTS, LEAST_SLOTS = 32, 6  # nodes and slots drawn together, and slots at least


def draw(desk: Desk, t: Texts) -> dict:
    """Everything about the drawn tree."""
    shape = desk.chosen.shape
    if shape is None:
        return {"figure": None, "nodes": [], "told": {}, "count": desk.chosen.option.nodes, "grown": 0, "growth": "",
                "folded": 0, "editable": False}
    return _Drawn(desk, shape, t).view()


def whole_tree(heads: int, ranks: int) -> TreeShape:
    """What budgets cut from."""
    return dense([min(CUT_WIDTH, ranks)] * min(CUT_HEADS, heads))


def cuts(desk: Desk, count: int) -> Cut:
    study = desk.study
    return cut(desk.chosen.shape, whole_tree(study.heads, study.ranks), study.facts.rates, desk.step_ms, count)


class _Drawn:
    def __init__(self, desk: Desk, shape: TreeShape, t: Texts) -> None:
        self.desk, self.own, self.t = desk, shape, t
        self.rates = desk.study.facts.rates
        self.order = growth(shape, self.rates) if self.rates else [(path, 0.0) for path in shape.paths[1:]]
        grown = desk.grown
        self.grown = shape.nodes if grown is None else min(grown, shape.nodes)
        extra = self._slots()
        self.shape = from_paths([*shape.paths[1:], *extra]) if extra else shape
        self.values = node_values(self.shape, self.rates)
        present = {path for path, _ in self.order[: self.grown]}
        self.verdicts = ["root", *(PLANNED if path in present else SLOT for path in self.shape.paths[1:])]
        lines = max(8, (desk.room[1] - HEADERS) // LEAST_LINE)
        keep = [self.shape.row_of[path] for path in extra]
        keep += [row for row, parent in enumerate(self.shape.parent.tolist())
                 if row and self.shape.paths[parent] in desk.opened]
        weight = self.values if self.rates else [-row for row in range(self.shape.nodes + 1)]
        crowded = self.shape.leaves > lines  # so labels would overlap although the nodes are few
        self.folded = fold(self.shape, weight, keep, min(FOLD_ABOVE, self.shape.nodes - crowded), lines)
        self.layout = arrange(self.shape, self.folded, None, desk.room)

    def view(self) -> dict:
        shape, layout, drawn = self.shape, self.layout, self.folded.visible
        small = {row: self._small(row) for row in drawn}
        root = self.t("view.root")
        labels = [root if len(root) <= layout.scale.room(0) else "·", *map(self._label, shape.paths[1:])]
        drawing = tree.TreeDrawing(layout, labels, shape.depth.tolist(), self.verdicts, frozenset(),
                                   self.folded.hidden, (small, small), shape.depth_counts)
        nodes = [{"row": row, "path": _dotted(shape.paths[row]), "parent": int(shape.parent[row]),
                  "depth": int(shape.depth[row]), "rank": int(shape.rank[row]), "text": labels[row],
                  "verdict": self.verdicts[row], "own": row > 0 and shape.paths[row] in self.own.row_of,
                  "x": layout.x.get(row), "y": layout.y.get(row), "p": None} for row in drawn]
        return {"figure": {"data": tree.phases(drawing, self.t)[tree.VERIFY - 1],
                           "layout": tree.figure(drawing, self.t)},
                "nodes": nodes, "told": {str(row): self._told(row) for row in drawn}, "count": self.own.nodes,
                "grown": self.grown, "growth": self._growth(), "folded": self.folded.total, "editable": True}

    def _label(self, path: Path) -> str:
        """A node is called by its rank, a place for one with a plus before it."""
        return f"{'' if path in self.own.row_of else '+'}{path[-1]}"

    def _slots(self) -> list[Path]:
        """Places that are drawn although no node is there: where one could be added, or what the budget cut."""
        room = max(LEAST_SLOTS, DRAWN_SLOTS - self.own.nodes)
        extra: list[Path] = []
        if self.desk.cutting and self.rates:
            extra = [candidate.path for candidate in cuts(self.desk, room).best]
        if self.desk.editing:
            study = self.desk.study
            free = edits.slots(self.own, study.heads, study.ranks)
            extra += heapq.nsmallest(room, free, key=lambda path: (-self._value(path), len(path), path))
        return extra

    def _value(self, path: Path) -> float:
        value = 1.0
        for k, rank in enumerate(path):
            row = self.rates[k] if k < len(self.rates) else ()
            value *= row[rank] if rank < len(row) else 0.0
        return value

    def _small(self, row: int) -> str:
        return "" if not row or not self.rates else f"+{numbers.probability(self.values[row])}"

    def _told(self, row: int) -> str:
        """One sentence on a node or slot."""
        path = self.shape.paths[row]
        if not path:
            return self.t("tuner.told_root")
        key = "tuner.told_node" if path in self.own.row_of else "tuner.told_slot"
        below = sum(other[: len(path)] == path for other in self.own.paths) - 1 if path in self.own.row_of else 0
        told = self.t(key, k=len(path), rank=str(path[-1]), path=_named(path), below=below,
                      gain=numbers.exact(self.values[row]) if self.rates else numbers.NONE)
        return told + (self.t(f"{key}_edit") if self.desk.editing else "")

    def _growth(self) -> str:
        """What the node grown last added."""
        if not self.own.nodes:
            return self.t("tuner.grown_none")
        if not self.rates:
            return self.t("tuner.grown_unknown", n=self.grown, total=self.own.nodes)
        if not self.grown:
            return self.t("tuner.grown_root", total=self.own.nodes)
        path, gain = self.order[self.grown - 1]
        so_far = 1 + sum(value for _, value in self.order[: self.grown])
        return self.t("tuner.grown", n=self.grown, total=self.own.nodes, path=_named(path), gain=numbers.exact(gain),
                      expected=f"{so_far:.3f}")


def following(desk: Desk, t: Texts) -> dict:
    """The next nodes of a bigger budget, and what this one cuts, each with gain and milliseconds."""
    shape, rates = desk.chosen.shape, desk.study.facts.rates
    if shape is None or not rates:
        return {"note": t("tuner.next_none" if rates else "tuner.next_no_rates"), "next": [], "cut": "", "best": []}
    away = cuts(desk, 5)
    following = frontier(shape, rates, desk.step_ms)
    best = [] if [one.path for one in following] == [one.path for one in away.best] else away.best
    total = expected_tokens_per_step(shape, rates)
    price = "" if away.milliseconds is None else t("tuner.cut_price", ms=_ms(away.milliseconds))
    line = t("tuner.cut", whole=whole_tree(desk.study.heads, desk.study.ranks).nodes, nodes=away.nodes,
             gain=numbers.exact(away.gain), total=f"{total + away.gain:.2f}", price=price)
    line += t("tuner.cut_best" if best else "tuner.cut_same")
    return {"note": t("tuner.next_note"), "next": [_candidate(one) for one in following],
            "cut": line if away.nodes else t("tuner.cut_nothing"), "best": [_candidate(one) for one in best]}


def _candidate(one: object) -> dict:
    return {"path": _dotted(one.path), "name": _named(one.path), "gain": f"+{numbers.exact(one.gain)}",
            "bar": float(f"{one.gain:.5g}"), "ms": _ms(one.milliseconds)}


def _ms(value: float | None) -> str:
    return numbers.NONE if value is None else f"+{value:.2f} ms" if abs(value) < 9.95 else f"+{value:,.0f} ms"


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))


def _named(path: Path) -> str:
    return f"({', '.join(map(str, path))})"
