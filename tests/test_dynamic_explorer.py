"""Trees that are rebuilt at each step in the Explorer: those that decoding rebuilds, under every action of the page."""

import json
from dataclasses import replace

import pytest
import torch
from tiny import VOCAB, backbone, engine, prompt, random_drafter
from tiny_session import ACCURACY, committed, serving

from medusa_viz.decoding import decoder, records
from medusa_viz.decoding.live import LiveRun
from medusa_viz.decoding.settings import Acceptance, Limits, ServerLimits, Walls
from medusa_viz.tuning.builders import sparse
from medusa_viz.tuning.dynamic import dynamic
from medusa_viz.tuning.specs import Facts, build

HEAT = (3.0, 1.0, 6.0, 2.0)  # temperatures that a rank table might hold


@pytest.fixture
def page():
    """Heads that are sure of more than one token at times, so that trees differ, with fitted temperatures."""
    for page in serving():
        running = page.sessions.host.model.engine
        running.drafter = random_drafter(running.backbone, heads=4, seed=3)
        page.sessions.host.model._facts = running, Facts(4, ACCURACY, temperatures=HEAT, choices=VOCAB)
        yield page


class Noted:
    """Trees of a spec, with the shapes that were made."""

    def __init__(self, spec, facts):
        self.trees, self.shapes = build(spec, facts).tree, []
        self.nodes, self.height, self.width = self.trees.nodes, self.trees.height, self.trees.width

    def shape(self, top):
        self.shapes.append(self.trees.shape(top))
        return self.shapes[-1]


def decoded(page, spec, settings=Acceptance()):  # noqa: B008
    """Tokens and shape of each step of `decode --tree SPEC`, for the prompt on the page; on the worker, as all is."""
    model, session = page.sessions.host.model, page.of()
    ids, noted = session.prompt_ids, Noted(spec, model.facts("one"))
    steps = model.worker.submit("test", lambda: list(decoder.decode(
        model.engine.backbone, model.engine.drafter, ids, noted, settings, Limits().max_new_tokens))).result()
    room, shapes = model.engine.backbone.context - len(ids), []
    for step, shape in zip(steps, noted.shapes, strict=False):  # the last token of a text takes no forward pass
        shapes.append(shape.trimmed(min(shape.height, room - 1)).fingerprint)
        room -= len(step.tokens)
    return [step.tokens for step in steps], shapes


def run(page):
    """Step to the end; tokens and shape of each step."""
    while page.act("step")["run"]["finished"] is None:
        pass
    steps = page.of().line.done()
    return [step.verdict.committed for step in steps], [step.shape.fingerprint for step in steps]


def shapes_here(page, nodes, top_s=None):
    """The tree at the step on screen, from the calibrated probabilities of the heads, the slow way."""
    model, entry = page.sessions.host.model, page.of().entry
    logits = model.engine.drafter.logits(entry.position.hidden)[:, 0].double()
    p = [(row / heat).softmax(-1).sort(descending=True).values[:10].tolist()
         for row, heat in zip(logits, HEAT, strict=True)]
    return sparse(p, nodes, top_s).fingerprint


@pytest.mark.parametrize(("knobs", "spec", "differ"), [
    ({}, "dynamic:7", 6), ({"top_s": [2, 10, 1, 3]}, "dynamic:7@2,10,1,3", 6), ({"size": 30}, "dynamic:30", 6),
    ({"top_s": [3, 0, 4, 4]}, "dynamic:7@3,0,4,4", 1), ({"mode": "typical", "temperature": 1.0}, "dynamic:7", 6),
    ({"mode": "rejection", "temperature": 0.9, "top_p": 0.9}, "dynamic:7", 6)])
def test_every_step_drafts_what_decoding_drafts(page, knobs, spec, differ):
    page.act("hello")
    assert not page.act("tree", dynamic=7)["status"]["notice"]
    page.act("knob", **knobs)
    page.act("start", prompt="abcdef")
    steps, shapes = run(page)
    rightly, right = decoded(page, spec, page.of().knobs.acceptance)
    assert steps == rightly
    assert shapes[: len(right)] == right and len(right) >= len(shapes) - 1
    assert len(set(shapes)) >= differ, "another tree at another step"
    if page.of().knobs.acceptance.rule == "greedy":
        assert committed(page.of())[: len(page.text)] == page.text


def test_walls_and_size_keep_it_rebuilt_and_a_smaller_one_asks_the_heads_alone(page, monkeypatch):
    page.act("start", prompt="abcdef")
    page.act("tree", dynamic=12)
    assert page.of().entry.step.shape.fingerprint == shapes_here(page, 12)
    assert page.of().knobs.walls == Walls((10, 10, 10, 10), 12)
    verify, asked = page.sessions.host.model.engine.backbone.verify, []
    monkeypatch.setattr(page.sessions.host.model.engine.backbone, "verify", lambda *a: asked.append(1) or verify(*a))
    view = page.act("knob", size=5)
    assert view["knobs"]["badge"]["kind"] == "subtree"
    assert page.of().entry.step.shape.fingerprint == shapes_here(page, 5)
    assert page.act("knob", size=12)["knobs"]["badge"]["kind"] == "subtree" and not asked
    submit, jobs = page.sessions.host.model.worker.submit, []
    monkeypatch.setattr(page.sessions.host.model.worker, "submit", lambda *job: jobs.append(job) or submit(*job))
    view = page.act("knob", temperature=0.7)
    assert view["knobs"]["badge"]["kind"] == "logits" and not jobs, "reweighing asks nobody"
    assert page.of().entry.step.shape.fingerprint == shapes_here(page, 12)
    page.act("knob", temperature=0)
    view = page.act("knob", top_s=[2, 2, 10, 10])
    assert page.of().entry.step.shape.fingerprint == shapes_here(page, 12, (2, 2, 10, 10))
    assert "rebuilt" in view["knobs"]["tree"] and page.of().knobs.dynamic
    assert [len(top.ids) for top in page.of().entry.step.drafts.heads] == [10] * 4, "a record holds ten of each head"
    page.act("step")
    assert page.of().entry.step.shape.fingerprint == shapes_here(page, 12, (2, 2, 10, 10))
    assert page.act("knob", size=20)["knobs"]["badge"]["kind"] == "forward"
    assert page.of().entry.step.shape.fingerprint == shapes_here(page, 20, (2, 2, 10, 10))


@pytest.mark.parametrize(("action", "payload"), [("preset", {"name": "paper"}), ("tree", {"paths": [[0], [3]]})])
def test_another_tree_leaves_it(page, action, payload):
    page.act("start", prompt="abcdef")
    page.act("tree", dynamic=8)
    view = page.act(action, **payload)
    assert not page.of().knobs.dynamic
    assert view["knobs"]["tree"] == "Candidate tree" and "dynamic" not in view["knobs"]["readout"]
    right = page.of().entry.step.shape.fingerprint
    page.act("step")
    assert page.of().entry.step.shape.fingerprint == right
    view = page.act("back")
    assert not page.of().knobs.dynamic and page.of().entry.step.shape.fingerprint == right


def test_going_back_and_branching_keeps_each_steps_own_tree(page):
    page.act("start", prompt="abcdef")
    page.act("tree", dynamic=9)
    for _ in range(4):
        page.act("step")
    before = [entry.step.shape.fingerprint for entry in page.of().line.entries]
    page.act("knob", size=3)
    page.act("goto", index=1)
    assert page.of().knobs == replace(page.of().knobs, walls=Walls((10,) * 4, 9), dynamic=True)
    assert page.act("knob", size=4)["run"]["changed"]
    assert page.of().entry.step.shape.fingerprint == shapes_here(page, 4)
    view = page.act("step")
    assert view["run"]["branch"] == "B" and page.of().entry.step.shape.fingerprint == shapes_here(page, 4)
    for _ in range(3):
        page.act("step")
    tokens = committed(page.of())
    assert tokens == page.text[: len(tokens)]
    page.act("branch", name="A")
    assert [entry.step.shape.fingerprint for entry in page.of().line.entries][:4] == before[:4]


def test_its_making_counts_as_proposing(page, monkeypatch):
    """What the page measures of a step is what decoding pays."""
    page.act("start", prompt="abcdef")
    page.act("tree", dynamic=6)
    made, anew = [], decoder.propose_anew
    monkeypatch.setattr(decoder, "propose_anew", lambda *a: made.append(1) or anew(*a))
    page.act("step")
    page.act("knob", size=40)
    assert len(made) == 2


def test_a_look_is_no_deeper_than_there_is_room():
    of = backbone(dtype=torch.float64)
    run, trees = LiveRun(engine(of, random_drafter(of, heads=4))), dynamic(4, 20, None, (0.3,) * 4)
    position = run.open(prompt(1), Acceptance())
    whole = run.shape(position, trees, 9)
    for room in (0, 1, 2, 9):
        look = run.look(position, trees, Acceptance(), room)
        assert look.shape.height == min(room, whole.height) and whole.height > 2
        assert look.shape.fingerprint == run.shape(position, trees, room).fingerprint


def test_size_0_is_plain_decoding(page):
    page.act("start", prompt="abcdef")
    page.act("tree", dynamic=7)
    view = page.act("knob", size=0)
    assert len(view["tree"]["nodes"]) == 1 and "dynamic" not in view["knobs"]["readout"]
    assert len(page.act("step")["tree"]["nodes"]) == 1
    assert len(page.act("knob", size=7)["tree"]["nodes"]) == 8 and page.of().knobs.dynamic


def test_a_recording_shows_each_steps_tree_and_goes_on(page):
    page.act("start", prompt="abcdef")
    page.act("tree", dynamic=9)
    for _ in range(3):
        page.act("step")
    before = [entry.step.shape.fingerprint for entry in page.of().line.entries]
    text = page.sessions.record("one")
    page.sessions._opening = records.from_json(text)
    assert records.to_json(page.sessions._opening) == text
    page.act("hello", "late")
    late = page.of("late")
    for index, fingerprint in enumerate(before):
        page.act("goto", "late", index=index)
        assert page.act("knob", "late", temperature=1.0)["knobs"]["badge"]["kind"] == "logits"
        assert late.entry.step.shape.fingerprint == fingerprint, "judged anew, it is the tree that was run"
        page.act("knob", "late", temperature=0)
    view = page.act("tree", "late", dynamic=4)
    assert view["run"]["recorded"] and view["knobs"]["badge"]["kind"] == "subtree"
    assert [late.entry.step.shape.fingerprint, late.knobs.dynamic] == [shapes_here_of(page, late, 4), True]
    for _ in range(3):
        view = page.act("step", "late")
    assert not view["run"]["recorded"] and late.entry.step.shape.fingerprint == shapes_here_of(page, late, 4)
    tokens = committed(late)
    assert tokens == page.text[: len(tokens)]


def shapes_here_of(page, session, nodes):
    held, page.of = page.of, lambda token="one": session
    try:
        return shapes_here(page, nodes)
    finally:
        page.of = held


def test_the_recording_of_another_model_keeps_its_tree_until_start(page):
    page.act("start", prompt="abcdef")
    page.act("step")
    recording = records.from_json(page.sessions.record("one"))
    page.sessions._opening = replace(recording, model="another", prompt_ids=[9999] * 6)
    page.act("hello", "late")
    late, before = page.of("late"), page.of("late").entry.step.shape.fingerprint
    page.act("preset", "late", name="chain")
    view = page.act("tree", "late", dynamic=6)
    assert "press Start" in view["status"]["notice"] and late.entry.step.shape.fingerprint == before
    assert "rebuilt" not in view["knobs"]["tree"] and view["knobs"]["size"] == 6
    view = page.act("start", "late", prompt="abcdef")
    assert "rebuilt" in view["knobs"]["tree"]
    assert late.entry.step.shape.fingerprint == shapes_here_of(page, late, 6)


def test_without_fitted_temperatures_it_says_so_and_without_a_model_it_waits(page):
    model = page.sessions.host.model
    model._facts = None  # read anew: no rank table lies beside these heads
    page.act("hello")
    assert "no temperatures were fitted" in page.act("tree", dynamic=6)["status"]["notice"]
    page.act("start", prompt="abcdef")
    p = page.of().entry.step.drafts.heads
    assert page.of().entry.step.shape.fingerprint == sparse([top.p for top in p], 6).fingerprint
    page.sessions.host.model = None
    page.act("hello", "late")
    assert "not ready" in page.act("tree", "late", dynamic=6)["status"]["notice"]


@pytest.mark.parametrize("size", ["x", -1, 10**9, 2.5, True, [3]])
def test_odd_sizes_leave_the_page_as_it_was(page, size):
    good = page.act("start", prompt="abcdef")
    view = page.act("tree", dynamic=size)
    assert view["status"]["notice"] and view["knobs"] == {**good["knobs"], "badge": view["knobs"]["badge"]}
    assert json.dumps(view["tree"]["nodes"]) == json.dumps(good["tree"]["nodes"])


def test_the_page_tells_that_it_is_rebuilt(page):
    page.act("start", prompt="abcdef")
    page.act("tree", dynamic=7)
    page.act("pin")
    view = page.act("knob", top_s=[3, 3, 3, 3])
    assert view["knobs"]["tree"] == "Tree, rebuilt each step"
    assert "dynamic 3·3·3·3: up to 7 nodes, here 7 (" in view["knobs"]["readout"]
    assert "dynamic, 10·10·10·10" in view["pin"]["label"]
    rows = {row["key"]: row for row in view["pin"]["rows"]}
    assert not any(char.isdigit() for side in "ab" for char in rows["expected"][side])
    assert not any(char.isdigit() for tile in view["merits"] if tile["key"] == "expected" for char in tile["value"])
    assert "--tree dynamic:7@3,3,3,3 " in view["run"]["command"]
    assert "--tree dynamic:7 " in page.act("knob", top_s=[10] * 4)["run"]["command"]
    page.act("preset", name="paper")
    rows = {row["key"]: row for row in page.act("hello")["pin"]["rows"]}
    assert [any(char.isdigit() for char in rows["expected"][side]) for side in "ab"] == [False, True]


@pytest.mark.parametrize(("action", "payload"), [
    ("tree", {"dynamic": 20}), ("knob", {"top_s": [10, 10, 0, 0], "size": 20})])
def test_no_step_verifies_more_than_the_limit(page, action, payload):
    page.sessions.host.limits = ServerLimits(max_nodes=8)
    page.act("hello")
    page.act("knob", size=8)
    page.act("start", prompt="abcdef")
    assert not page.act(action, **payload)["run"]["can"]["step"], "it stays a drawing"
    assert "over the limit of 8" in page.act("step")["status"]["notice"]
    assert page.of().entry.verified.shape.nodes <= 8
    view = page.act("start", prompt="abcdef")
    assert "the tree was cut to its best 8" in view["status"]["notice"]
    assert page.of().entry.verified.shape.nodes <= 8 and page.of().knobs.dynamic == (action == "tree")
    assert view["run"]["can"]["step"]


def test_a_tree_is_of_one_kind(page):
    page.act("start", prompt="abcdef")
    for payload in ({}, {"dynamic": 6, "paths": [[0]]}):
        assert page.act("tree", **payload)["status"]["notice"]
    assert not page.of().knobs.dynamic
