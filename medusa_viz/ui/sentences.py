"""Sentences: what happened to each node and why, in words, from a step's record."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from medusa_viz.decoding import records
from medusa_viz.decoding.records import Step
from medusa_viz.figures import numbers, tokens
from medusa_viz.figures.texts import Texts


@dataclass(frozen=True)
class Narrator:
    """Tells one step. `texts` are display texts by token id; `top_s` the walls in force, one per head."""

    step: Step
    texts: dict[int, str]
    top_s: tuple[int, ...]
    t: Texts

    def name(self, token: int) -> str:
        """A token's text; an id without one is shown as its number."""
        return self.texts.get(token) or f"#{token}"

    def quoted(self, row: int) -> str:
        """The row's token in quotation marks."""
        return tokens.quoted(self.name(self.step.drafts.token[row]))

    @property
    def rule(self) -> str:
        return self.step.verdict.settings.rule

    # ---- one row -----------------------------------------------------------------------------------------------

    def sentence(self, row: int) -> str:
        """Why the row has its verdict."""
        if row == 0:
            return self.t("view.row.root")
        drafts, verdict = self.step.drafts, self.step.verdict
        if verdict is None:
            return self.t("view.row.unverified", k=int(self.step.shape.depth[row]), no=drafts.rank[row] + 1,
                          p=numbers.probability(drafts.head_p[row]))
        kind = verdict.verdict[row]
        if kind == records.BEHIND:
            return self._behind(row)
        if kind == records.SHORTER:
            return self._shorter(row)
        if kind == records.CUT:
            return self.t(f"view.row.cut.{verdict.finish or 'end'}")
        if kind == records.UNSEEN:
            return self.t("view.row.unseen")
        return self.t(f"view.row.{self.rule}.{kind}", **self._facts(row))

    def _facts(self, row: int) -> dict[str, object]:
        """Everything the sentence of an accepted or rejected row may mention."""
        seen, verdict = self.step.verification, self.step.verdict
        parent = self.step.drafts.parent[row]
        top = seen.top[parent]
        drawn = next((child for child in verdict.accepted if child and self.step.drafts.parent[child] == parent), None)
        p, bound = numbers.probability(verdict.p[row]), numbers.probability(verdict.threshold[row])
        if verdict.p[row] > verdict.threshold[row] > 0:
            p, bound = numbers.compared(verdict.p[row], verdict.threshold[row])
        return {
            "p": p, "bound": bound, "no": seen.rank[row] + 1,
            "best": tokens.quoted(self.name(top.ids[0])), "best_p": numbers.probability(top.p[0]),
            "drawn": tokens.quoted(self.name(self.step.drafts.token[drawn] if drawn else verdict.next_root)),
        }

    def _behind(self, row: int) -> str:
        parent = self.step.drafts.parent[row]
        while self.step.verdict.verdict[parent] != records.REJECTED:
            parent = self.step.drafts.parent[parent]
        where = "parent" if parent == self.step.drafts.parent[row] else "ancestor"
        return self.t(f"view.row.{self.rule}.behind", blocker=self.quoted(parent), where=self.t(f"view.row.{where}"),
                      **self._facts(row))

    def _shorter(self, row: int) -> str:
        """A longer path won, or one as long and likelier."""
        length, log_p = self._best_below[row]
        best_length, best_log_p = self._best_below[self.step.verdict.accepted[-1]]
        if length == best_length:
            own, best = numbers.compared(log_p, best_log_p, decimals=1)
            return self.t("view.row.tie", log_p=own, best=best)
        return self.t("view.row.shorter", length=length, best=best_length)

    @cached_property
    def _best_below(self) -> list[tuple[int, float]]:
        """Per row, length and log p of the longest passed path through it; as in acceptance.longest_path."""
        verdict, parent = self.step.verdict, self.step.drafts.parent
        passed = [kind in (records.ACCEPTED, records.SHORTER, records.CUT) for kind in verdict.verdict]
        own = [(0, 0.0)]
        for row in range(1, len(parent)):
            depth, log_p = own[parent[row]]
            own.append((depth + 1, log_p + math.log(max(verdict.p[row], 1e-300))))
        for row in range(len(parent) - 1, 0, -1):
            if passed[row]:
                own[parent[row]] = max(own[parent[row]], own[row])
        return own

    # ---- hover texts ---------------------------------------------------------------------------------------------

    def place(self, row: int) -> str:
        """Token, head and rank."""
        if row == 0:
            return self.t("view.place.root", token=self.quoted(0))
        return self.t("view.place.node", token=self.quoted(row), k=int(self.step.shape.depth[row]),
                      no=self.step.drafts.rank[row] + 1)

    def drafted(self, row: int) -> str:
        """The head's own probabilities."""
        drafts = self.step.drafts
        if row == 0:
            return self.t("view.hover.root", p=numbers.exact(drafts.head_p[0]))
        return self.t("view.hover.head", p=numbers.exact(drafts.head_p[row]), path=numbers.exact(drafts.path_p[row]))

    def judged(self, row: int) -> str:
        """The backbone's probability and rank of the row's token; empty before it was asked."""
        if row == 0 or self.step.verdict is None:
            return ""
        return self.t("view.hover.backbone", p=numbers.exact(self.step.verdict.p[row]),
                      no=self.step.verification.rank[row] + 1)

    # ---- where and why the path stopped ---------------------------------------------------------------------------

    def ghost(self) -> tuple[str, str] | None:
        """Text of the next root, and why no drafted node was it; None before verification or when the run ends."""
        verdict = self.step.verdict
        if verdict is None or verdict.finish:
            return None
        return self.name(verdict.next_root), self._stop_reason()

    def _stop_reason(self) -> str:
        verdict, shape = self.step.verdict, self.step.shape
        token = tokens.quoted(self.name(verdict.next_root))
        last = verdict.accepted[-1]
        k = int(shape.depth[last]) + 1
        wanted = self.t("view.stop.drew" if self.rule == "rejection" else "view.stop.wanted", token=token)
        if not shape.nodes:
            return wanted + self.t("view.stop.plain")
        if k > len(self.step.drafts.heads):
            return wanted + self.t("view.stop.no_head", heads=k - 1)
        wall = self._wall(k)
        rank = self._head_rank(last, k)
        if wall == 0:
            return wanted + self.t("view.stop.ended", s=f"s{numbers.subscript(k)}")
        if rank is None:
            return wanted + self.t("view.stop.unknown", k=k)
        return wanted + self.t("view.stop.outside" if rank >= wall else "view.stop.size", k=k, no=rank + 1,
                               s=f"s{numbers.subscript(k)}", wall=wall)

    def _wall(self, k: int) -> int:
        """Top-s of head k; of a tree made by other walls, its own width there."""
        shape = self.step.shape
        widths = (*shape.widths, *(0 for _ in self.step.drafts.heads))
        walls = (*self.top_s, *(0 for _ in widths))
        fits = all(width <= wall for width, wall in zip(widths, walls, strict=False))
        return walls[k - 1] if fits else widths[k - 1]

    def _head_rank(self, row: int, k: int) -> int | None:
        """0-based rank of the next root in head k, where it is known."""
        top, token = self.step.drafts.heads[k - 1], self.step.verdict.next_root
        if token in top.ids:
            return top.ids.index(token)
        is_best = self.step.verification.top[row].ids[0] == token
        rank = self.step.verification.next_rank.get(row, -1)
        return rank if is_best and rank >= 0 else None

    # ---- the panel of one parent ------------------------------------------------------------------------------------

    def terms(self, row: int) -> str:
        """The rule in force after the row, with its numbers. `row` has children."""
        settings = self.step.verdict.settings
        if self.rule == "greedy":
            return self.t("view.terms.greedy")
        if self.rule == "rejection":
            return self.t("view.terms.rejection", temperature=f"{settings.temperature:g}", top_p=f"{settings.top_p:g}")
        child = self.step.drafts.parent.index(row)
        entropy = self.step.verdict.entropy[child]
        return self.t("view.terms.typical", epsilon=f"{settings.epsilon:.3f}", delta=f"{settings.delta:g}",
                      entropy=f"{entropy:.3f}", product=f"{settings.delta * math.exp(-entropy):.3f}",
                      bound=f"{self.step.verdict.threshold[child]:.3f}")

    # ---- the step as a whole ----------------------------------------------------------------------------------------

    def headline(self) -> str:
        """One sentence for the whole step."""
        shape, verdict = self.step.shape, self.step.verdict
        if verdict is None:
            return self.t("view.headline.unverified", nodes=shape.nodes, paths=shape.leaves)
        if not shape.nodes:
            return self.t("view.headline.plain")
        accepted, committed = len(verdict.accepted) - 1, len(verdict.committed)
        key = "view.headline.whole" if committed == accepted + 1 else f"view.headline.cut.{verdict.finish or 'end'}"
        return self.t(key, rows=shape.nodes + 1, paths=shape.leaves, accepted=accepted, committed=committed)
