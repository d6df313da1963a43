"""One visitor's session: branches of steps, the knobs, and what each action does to them. No torch here.

Everything that only reweighs or narrows a verified tree is answered from its record; what needs the model is a job
on the worker. A failed action leaves the session as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from time import perf_counter
from typing import Any

from medusa_viz.decoding import reweigh
from medusa_viz.decoding.records import Session
from medusa_viz.decoding.settings import Limits
from medusa_viz.decoding.tree import TreeShape
from medusa_viz.tuning.builders import assumed_accuracy
from medusa_viz.tuning.specs import Facts
from medusa_viz.ui import model_menu, presets, prompt_box
from medusa_viz.ui.greedy_watch import GreedyWatch
from medusa_viz.ui.knobs import ActionError, Knobs, started_on, tree_of
from medusa_viz.ui.lines import Entry, Line, Pin, forked, looked_at, recorded_line
from medusa_viz.ui.news import News
from medusa_viz.ui.running import Model, Seat, newest_seat
from medusa_viz.ui.snapshot import Screen, screen_of
from medusa_viz.ui.wording import Wording

SLOW_MS = 1000.0  # a forward estimated above this is drawn unverified first
PASSIVE = ("poll", "hello", "screen")  # actions of the page itself, not of the person


class ExplorerSession:
    """State of one page. `host` is shared by all: it has the model that the next Start runs on."""

    def __init__(self, host: Any, token: str, opening: Session | None = None) -> None:
        self.host, self.token, self.opening = host, token, opening
        self.knobs = Knobs()
        self.prompt, self.prompt_ids = "", []
        self.lines: dict[str, Line] = {}
        self.branch, self.index = "", 0
        self.draft: Entry | None = None  # a committed step under other knobs, not yet branched off
        self.notice: tuple[str, dict] | str = ""
        self.knobs_since = 0
        self.seat: Seat | None = None  # at the model that this session runs on, taken by Start
        self.recorded = False
        self.wording = Wording()
        self.pin: Pin | None = None
        self.opened: frozenset[tuple[int, ...]] = frozenset()  # paths whose children are drawn in spite of the fold
        self.screen = Screen()
        self.watch = GreedyWatch()
        self.news = News()
        if opening is not None:
            self._show_recording(opening)

    @property
    def model(self) -> Model | None:
        """The model that this session runs on, or will."""
        return self.seat.model if self.seat else self.host.model

    @property
    def foreign(self) -> bool:
        """A recording is shown, and what runs is not what it was made with: the two may not even share their tokens."""
        own = self.opening and (self.opening.model, self.opening.heads)
        return self.recorded and self.model is not None and self.model.names != own

    @property
    def line(self) -> Line:
        return self.lines[self.branch]

    @property
    def entry(self) -> Entry:
        return self.draft or self.line.entries[self.index]

    @property
    def pending(self) -> bool:
        return not self.line.finished and self.index == len(self.line.entries) - 1

    # ---- actions ---------------------------------------------------------------------------------------------

    def act(self, action: str, payload: dict) -> None:
        """Do one action. Raises ActionError or ValueError with nothing changed."""
        method = getattr(self, f"do_{action}", None)
        if method is None:
            raise ActionError("unknown_action", name=action[:40])
        if action not in PASSIVE:
            self.notice = ""
            self.news.read()
        method(**payload)

    def do_hello(self) -> None:
        """Show what there is."""

    def do_poll(self) -> None:
        """Show what is new. The page stands still meanwhile."""
        if self.lines and not self.recorded:
            self.watch.again(self.seat, self.prompt_ids, self.line)
        self.watch.rest(self.seat)

    def do_use(self, model: str = "", heads: str = "", dtype: str = "") -> None:
        """Load another model or other heads behind the running one, for every Start after that."""
        self.news = News()
        self.host.use(self.token, **model_menu.choice(self.host, model, heads, dtype))

    def do_start(self, prompt: str) -> None:
        """Prefill a prompt and show its first step."""
        seat = newest_seat(self.host.model, self.seat, self.token)
        engine, most = seat.model.engine, self.host.max_nodes(seat.model)
        ids = prompt_box.encoded(prompt, engine)
        self.watch.give_way()
        old = self.seat, self.prompt_ids, self.recorded, self.knobs, self.wording
        position = seat.open(ids, self.knobs.acceptance)
        knobs, note = started_on(self.knobs, engine, self.seat and self.seat.model.engine, most)
        self.seat, self.prompt_ids, self.recorded, self.knobs, self.wording = seat, list(ids), False, knobs, Wording()
        try:
            entry = self._look(position, 0, "A", self.knobs)
        except BaseException:
            self.seat, self.prompt_ids, self.recorded, self.knobs, self.wording = old
            raise
        self.lines, self.prompt, self.notice = {"A": Line("A", [entry])}, prompt, ids.notice or note
        if not engine.accuracy:
            self.notice = ("no_accuracy", {})
        self.branch, self.index, self.draft, self.knobs_since, self.pin = "A", 0, None, 0, None
        self.watch.forget()

    def do_reset(self) -> None:
        """Back to the first step of this prompt, all branches forgotten."""
        if self.recorded:
            self._show_recording(self.opening)
        elif self.prompt:
            self.do_start(self.prompt)

    def do_step(self) -> None:
        """Commit the pending step and show the next; on a past step go forward, or branch if a knob was moved."""
        self.needs_steps()
        if not self.pending and self.draft is None:
            if self.index + 1 >= len(self.line.entries):
                raise ActionError("ended")
            return self.do_goto(self.index + 1)
        self._engine()
        if self.entry.step.verdict is None:
            self._replace(self._verified(self.entry))
        self._commit(forked(self.lines, self.line, self.index, self.draft) if self.draft else self.line)

    def do_back(self) -> None:
        self.do_goto(max(self.index - 1, 0))

    def do_forward(self) -> None:
        self.needs_steps()
        self.do_goto(min(self.index + 1, len(self.line.entries) - 1))

    def do_goto(self, index: int) -> None:
        """Show a step of this branch; the knobs become those it was shown with."""
        self.needs_steps()
        if isinstance(index, bool) or not isinstance(index, int):
            raise ActionError("odd_payload", name="goto")
        if not 0 <= index < len(self.line.entries):
            raise ActionError("no_step", index=str(index)[:20], branch=self.branch)
        self.index, self.draft = index, None
        self.knobs = self.entry.knobs

    def do_branch(self, name: str) -> None:
        """Switch to another branch, at its end."""
        if name not in self.lines:
            raise ActionError("no_branch", name=str(name)[:20])
        self.branch = name
        self.do_goto(len(self.line.entries) - 1)

    def do_knob(self, **changes: Any) -> None:
        """Move knobs and recompute the shown step by the cheapest means that gives the true answer."""
        knobs, notice = self.knobs.changed(changes, self._heads())
        self.notice = (notice, {}) if notice else ""
        self._turn(knobs)

    def do_tree(self, paths: list | None = None, dynamic: int | None = None) -> None:
        """Draft an explicit tree until its knobs are moved, or one of up to `dynamic` nodes, rebuilt at each step."""
        if (paths is None) == (dynamic is None):
            raise ActionError("odd_payload", name="tree")
        if dynamic is None:
            knobs, self.notice = self.knobs.with_tree(paths, self._table())
        else:
            knobs, self.notice = self.knobs.with_dynamic(dynamic, self._facts())
        self._turn(knobs)

    def do_preset(self, name: str) -> None:
        """Set walls and size as a preset does."""
        self._turn(self.knobs.within(presets.walls(name, self._heads())))

    def do_screen(self, **screen: Any) -> None:
        """Draw for the room that the page has."""
        self.screen = screen_of(**screen)

    def do_open(self, path: str) -> None:
        """Draw a node's children although the tree is folded."""
        self.needs_steps()
        self.opened = self.entry.opened(path, self.opened)

    def do_fold(self) -> None:
        """Fold what was opened."""
        self.opened = frozenset()

    def do_verify(self) -> None:
        """Run the model on a tree that was only drawn."""
        self.needs_steps()
        self._engine()
        self._replace(self._verified(self.entry))

    def do_pin(self) -> None:
        """Freeze the step on screen as A."""
        self.needs_steps()
        self.pin = Pin(self.prefix(), self.entry.step, self.knobs)

    def do_unpin(self) -> None:
        self.pin = None

    def do_check(self, on: bool) -> None:
        """Switch the comparison with plain greedy on or off."""
        self.watch.on = bool(on)
        if self.lines and not self.recorded:
            self.watch.queue(self.seat, self.prompt_ids, self.line)

    # ---- the shown step under other knobs --------------------------------------------------------------------

    def _turn(self, knobs: Knobs) -> None:
        begun = perf_counter()
        if self.lines:
            self._replace(self._recomputed(self.entry, knobs, begun))
        if knobs != self.knobs:
            self.knobs, self.knobs_since = knobs, self.index

    def _recomputed(self, entry: Entry, knobs: Knobs, begun: float) -> Entry:
        """The entry under other knobs, answered from its record where that holds the answer."""
        entry, shape = self._reshaped(entry, knobs)
        narrowed = entry.narrowed(shape, knobs)
        if narrowed is None:
            return self._widened(entry, shape, knobs)
        how = "logits" if shape.fingerprint == entry.step.shape.fingerprint else "subtree"
        return self._judged(narrowed).answered(how, begun)

    def _reshaped(self, entry: Entry, knobs: Knobs) -> tuple[Entry, TreeShape]:
        """The shape that other knobs ask for at a step. Where it follows from what the heads say there, they are asked
        again; not those of another model than a recording's, whose tree stays."""
        if knobs.drafts_as(entry.knobs):
            return entry, entry.step.shape
        room = self._room(entry.step.prefix_length)
        tree = tree_of(knobs, self._table(), room, self._facts)
        if not knobs.dynamic:
            return entry, tree
        if self.foreign:
            self.notice = ("other_model", {})
            return entry, entry.verified.shape
        entry = replace(entry, position=entry.position or self._position(entry))
        return entry, self._work(lambda run: run.shape(entry.position, tree, room))

    def _widened(self, entry: Entry, shape: TreeShape, knobs: Knobs) -> Entry:
        """A tree with new nodes: verified now if that is quick, else drawn and left to be verified."""
        estimate = self.model.latency.of(shape.nodes + 1) if self.model else None
        drawn = entry.drawn(shape, knobs, estimate)
        if self.model is None or self.recorded:
            self.notice = ("recording_only", {})
            return drawn
        nodes = knobs.walls.size if knobs.dynamic else shape.nodes
        if estimate is None or estimate > SLOW_MS or nodes > self.max_nodes:
            return drawn
        return self._verified(drawn)

    def _verified(self, entry: Entry) -> Entry:
        position = entry.position or self._position(entry)
        return self._look(position, entry.step.index, entry.step.branch, entry.knobs, entry.step.shape)

    def _judged(self, entry: Entry) -> Entry:
        """Apply the acceptance rule. Rejection draws from whole distributions, so it asks the model's side."""
        settings, walk = entry.knobs.acceptance, None
        if settings.rule == "rejection":
            self._engine()
            if entry.look is None:
                raise ActionError("rejection_recorded")
            walk, look = self._work(lambda run: run.walk(entry.look, entry.step.shape, entry.rows, settings))
            entry = replace(entry, look=look)
        ends = frozenset() if self.foreign or self.model is None else self.model.engine.backbone.end_ids
        verdict = reweigh.judge(entry.step, settings, ends, walk)
        if verdict.finish is None and len(verdict.committed) > self._room(entry.step.prefix_length):
            limit = Limits().max_new_tokens - (entry.step.prefix_length - len(self.prompt_ids))
            verdict = replace(verdict, finish="length" if len(verdict.committed) >= limit else "context")
        return replace(entry, step=replace(entry.step, verdict=verdict))

    def _room(self, prefix_length: int) -> int:
        """How many tokens may follow a root at the end of the prefix."""
        room = Limits().max_new_tokens - (prefix_length - len(self.prompt_ids)) - 1
        if not self.foreign and self.model is not None:
            room = min(room, self.model.engine.backbone.context - prefix_length - 1)
        return max(room, 0)

    # ---- the model's side ------------------------------------------------------------------------------------

    @property
    def max_nodes(self) -> int:
        """Nodes up to which a tree is verified here."""
        return self.host.max_nodes(self.model)

    def _engine(self) -> Any:
        if self.model is None:
            raise ActionError("not_ready")
        if self.foreign:
            raise ActionError("other_model")
        return self.model.engine

    def _work(self, job: Callable[[Any], Any]) -> Any:
        self.watch.give_way()
        return self.seat.work(job)

    def _position(self, entry: Entry) -> Any:
        """The model's position at a recorded step, made by prefilling what came before it."""
        self.seat = self.seat or newest_seat(self.host.model, None, self.token)
        self.watch.give_way()
        position = self.seat.open([*self.prompt_ids, *self.line.committed(entry.step.index)], entry.knobs.acceptance)
        return replace(position, root=entry.step.drafts.token[0], root_p=entry.step.drafts.head_p[0])

    def _look(self, position: Any, index: int, branch: str, knobs: Knobs, shape: TreeShape | None = None) -> Entry:
        """Verify a tree at a position and judge it. One that is rebuilt at each step is made here, so that this counts
        as its time; others may have been drawn before."""
        begun, room = perf_counter(), self._room(len(position.ids))
        tree = tree_of(knobs, self._table(), room, self._facts) if shape is None or knobs.dynamic else shape
        if tree.nodes > self.max_nodes:
            raise ActionError("over_limit", nodes=f"{tree.nodes:,}", limit=f"{self.max_nodes:,}")
        self.watch.give_way()
        entry = looked_at(index, branch, self.seat.look(position, tree, knobs.acceptance, room), knobs)
        self.wording.learn(self._engine().codec, position.ids, entry.step)
        return self._judged(entry).answered("forward", begun)

    def _commit(self, line: Line) -> None:
        """Commit the line's last entry and look at the step behind it."""
        entry = line.entries[-1]
        if entry.look is None:  # recorded: what the heads draft here and now is what can be committed
            entry = self._verified(entry)
        verdict = entry.step.verdict
        rows = [int(entry.rows[row]) for row in verdict.accepted[: len(verdict.committed)]]
        position, ms = self._work(lambda run: run.advance(entry.look, rows, verdict.committed, verdict.next_root))
        recorded, self.recorded = self.recorded, False
        try:
            following = [] if verdict.finish else [
                self._look(position, entry.step.index + 1, line.name, entry.knobs)]
        except BaseException:
            self.recorded = recorded
            raise
        timings = replace(entry.step.timings, commit=ms)
        line.entries[-1:] = [replace(entry, step=replace(entry.step, timings=timings)), *following]
        line.finished = verdict.finish
        self.lines[line.name] = line
        self.branch, self.index, self.draft = line.name, len(line.entries) - 1, None
        self.watch.stepped()
        self.watch.queue(self.seat, self.prompt_ids, line)

    # ---- small parts -----------------------------------------------------------------------------------------

    def _replace(self, entry: Entry) -> None:
        """Put the shown entry back: the pending one in its place, a committed one as a draft beside it."""
        if self.pending:
            self.line.entries[self.index] = entry
        else:
            self.draft = None if entry.knobs == self.line.entries[self.index].knobs else entry

    def prefix(self) -> tuple[int, ...]:
        """The tokens before the shown step."""
        return (*self.prompt_ids, *self.line.committed(self.index))

    def needs_steps(self) -> None:
        """Raise where there is no run yet."""
        if not self.lines:
            raise ActionError("no_run")

    def _heads(self) -> int:
        if self.recorded:
            return len(self.line.entries[0].step.drafts.heads)
        return self.model.engine.drafter.heads if self.model else len(self.knobs.walls.top_s)

    def _facts(self) -> Facts:
        """What builders may draw on."""
        if self.model is None:
            raise ActionError("not_ready")
        return self.model.facts(self.token)

    def _table(self) -> list[list[float]]:
        """The accuracies in force; heads that bring none are assumed to be common ones."""
        return self.accuracy or assumed_accuracy(self._heads())

    @property
    def accuracy(self) -> list[list[float]]:
        """How often each rank of each head is right."""
        if self.model is not None and not self.recorded:
            return self.model.engine.accuracy
        return self.opening.accuracy if self.opening else []

    def _show_recording(self, recording: Session) -> None:
        self.prompt, self.prompt_ids = recording.prompt, list(recording.prompt_ids)
        self.wording = Wording(dict(recording.texts), dict(recording.kinds))
        self.lines = {branch.name: recorded_line(branch) for branch in recording.branches}
        self.branch, self.recorded = recording.branches[0].name, True
        self.do_goto(len(self.line.entries) - 1)
