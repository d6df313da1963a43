"""Parts of the view: what is sent, room for the figures, gains, comparison, what can be verified, text to take away."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import ACCURACY, make_snapshot, make_step, make_texts

from medusa_viz.decoding import reweigh
from medusa_viz.decoding.settings import Acceptance, Walls
from medusa_viz.decoding.tree import dense
from medusa_viz.figures import layout, tokens
from medusa_viz.figures.texts import Texts
from medusa_viz.models.text import visible
from medusa_viz.tuning.builders import node_values, sparse
from medusa_viz.ui import view
from medusa_viz.ui.running import DEFAULTS
from medusa_viz.ui.snapshot import ModelStatus, Pinned, Screen, screen_of
from medusa_viz.ui.wording import Wording
from medusa_viz.ui.written import written

T = Texts()
FIRST_LOAD = sparse(ACCURACY, 16, (4, 3, 2, 2))


def unpacked(packed):
    """As the page makes the phases whole again."""
    phases = [packed["tree"]["data"][0]]
    for changes in packed["tree"]["data"][1:]:
        phases.append([{**old, **new} for old, new in zip(phases[-1], changes, strict=True)])
    return phases


@pytest.mark.parametrize("shape", [FIRST_LOAD, dense([]), sparse(ACCURACY, 256)], ids=["16", "plain", "256"])
def test_what_is_sent_makes_the_same_phases(shape):
    made = view.build(make_snapshot([make_step(shape, 3, agree=0.8)]), T)
    sent = view.packed(made)
    assert unpacked(sent) == made["tree"]["data"]
    assert {key: value for key, value in sent.items() if key != "tree"} == {
        key: value for key, value in made.items() if key != "tree"}
    assert sum(map(len, sent["tree"]["data"][2])) < sum(map(len, made["tree"]["data"][2]))


@pytest.mark.parametrize("size", [(480, 300), (694, 488), (1200, 800)])
def test_labels_end_before_the_next_column_whatever_the_room(size):
    texts = {token: "unquestionably" for token in range(200)}
    step = make_step(FIRST_LOAD, 3)
    made = view.build(make_snapshot([step], texts=texts, screen=Screen(tree=size)), T)
    figure, data = made["tree"]["figure"]["layout"], made["tree"]["data"][2]
    left, right = figure["xaxis"]["range"]
    pixels = (size[0] - 2 * layout.SIDE) / (right - left)
    assert pixels == pytest.approx(layout.scale(FIRST_LOAD.height, 5, size).column, rel=0.01)
    labels = next(trace for trace in data if trace["name"] == "labels")
    for x, text in zip(labels["x"], labels["text"], strict=True):
        if text.startswith("unquest") and not text.endswith(" ?"):  # the ghost has a line of its own
            end = x * pixels + tokens.width(text) * labels["textfont"]["size"] * 0.61
            assert end < (int(x) + 1) * pixels - 7 or x > FIRST_LOAD.height


def test_a_screen_is_kept_within_what_can_be_drawn():
    assert screen_of([1, 99999], [470.4, 266], 24) == Screen((120, 4000), (470, 266), 24)
    assert screen_of([694, 488], [470, 266], 999).fold == 64
    assert Screen(tree=(694, 200)).lines < Screen().lines == 44
    with pytest.raises(TypeError):
        screen_of(tree=[694, 488])


def test_a_small_fold_draws_fewer_nodes():
    step = make_step(sparse(ACCURACY, 40), 1)
    drawn = []
    for fold in (64, 24):
        made = view.build(make_snapshot([step], screen=Screen(fold=fold)), T)
        drawn.append(sum(node["x"] is not None for node in made["tree"]["nodes"]))
    assert drawn[0] == 41 and drawn[1] <= 30


def test_gains_are_the_path_products_best_first():
    step = make_step(FIRST_LOAD, 3, agree=0.9)
    gains = view.build(make_snapshot([step]), T)["gains"]
    values = node_values(FIRST_LOAD, ACCURACY)
    assert [row["value"] for row in gains["rows"]] == pytest.approx(sorted(values[1:], reverse=True), rel=1e-4)
    assert all(row["value"] == pytest.approx(values[row["row"]], rel=1e-4) for row in gains["rows"])
    assert f"{sum(values) - 1:.2f} drafts a step" in gains["note"]
    assert gains["note"].endswith(f"accepted {len(step.verdict.accepted) - 1}.")
    assert gains["expected"] in gains["note"].replace(";", ".") and "accepted" not in gains["expected"]
    assert view.build(make_snapshot([make_step(dense([]), 1)]), T)["gains"]["rows"] == []
    assert len(view.build(make_snapshot([make_step(dense([8, 8, 8, 8]), verified=False)]), T)["gains"]["rows"]) == 64


def test_only_paths_that_both_have_can_differ():
    wide = make_step(FIRST_LOAD, 3, agree=0.8)
    small = sparse(ACCURACY, 8, (4, 3, 2, 2))
    pinned = reweigh.subtree(wide, small)[0]
    pinned = replace(pinned, verdict=reweigh.judge(pinned, Acceptance()))
    pin = Pinned(pinned, Walls((4, 3, 2, 2), 8), Acceptance(), here=True)
    made = view.build(make_snapshot([wide], pinned=pin), T)["pin"]
    assert set(made["differs"]) <= {FIRST_LOAD.row_of[path] for path in small.paths}
    strict = reweigh.judge(wide, Acceptance("typical", 2.0, epsilon=0.5, delta=1.0))
    other = view.build(make_snapshot([replace(wide, verdict=strict)], pinned=pin), T)["pin"]
    for row in other["differs"]:
        assert strict.verdict[row] != other["verdicts"][".".join(map(str, FIRST_LOAD.paths[row]))]


def test_what_cannot_be_verified_says_why():
    step = make_step(dense([8, 8, 8, 8]), verified=False)
    run = view.build(make_snapshot([step], max_nodes=256), T)["run"]
    assert "over the limit of 256" in run["verify_blocked"] and not run["can"]["step"]
    assert "over the limit" in view.build(make_snapshot([step], max_nodes=256), T)["headline"]["text"]
    small = make_step(dense([4, 4]), verified=False)
    assert view.build(make_snapshot([small]), T)["run"]["verify_blocked"] == ""
    loading = view.build(make_snapshot([small], model=ModelStatus("loading", "load")), T)["run"]
    assert "not ready" in loading["verify_blocked"]


def test_dots_tell_what_was_committed_and_nothing_that_may_still_be_guessed():
    steps = [make_step(FIRST_LOAD, seed, index=seed, agree=0.9) for seed in range(3)]
    counts = [len(step.verdict.committed) for step in steps]
    dots = lambda **changes: view.build(make_snapshot(steps, **changes), T)["steps"]["committed"]  # noqa: E731
    assert dots(pending=False, finished="end") == counts
    assert dots() == dots(index=0, pending=False) == [*counts[:2], 0]
    assert dots(index=1, pending=False, changed=True) == [counts[0], 0, 0]


@pytest.mark.parametrize(("options", "words"), [
    ({}, ""), (DEFAULTS, ""), ({**DEFAULTS, "model": "vicuna-7b-v1.3", "dtype": "4bit"},
                               "--model vicuna-7b-v1.3 --dtype 4bit"),
    ({**DEFAULTS, "heads": "my heads", "device": "cuda:1", "compile": True},
     "--heads 'my heads' --device cuda:1 --compile")])
def test_the_command_names_the_model_that_runs(options, words):
    snapshot = make_snapshot([make_step(FIRST_LOAD, 1)], options=options)
    run = view.build(snapshot, T)["run"]
    told = run["command"]
    assert told.partition("--tree sparse:16@4,3,2,2")[2].split("--max-new-tokens")[0].strip() == words
    assert not run["command_blocked"]
    assert told.startswith("python -m medusa_viz decode --prompt")


def test_where_there_is_no_command_the_page_says_why(tmp_path):
    snapshot = make_snapshot([make_step(FIRST_LOAD, 1)], locked=True, options={**DEFAULTS, "model": str(tmp_path)})
    run = lambda **changes: view.build(replace(snapshot, **changes), T)["run"]  # noqa: E731
    assert not run()["command"] and "does not tell" in run()["command_blocked"]
    assert str(tmp_path) in run(locked=False)["command"]
    assert "--model a/b" in run(options={**DEFAULTS, "model": "a/b"})["command"]
    own = run(locked=False, own_tree=True)
    assert not own["command"] and "--tree" in own["command_blocked"]
    assert not run(prompt="")["command_blocked"]


@pytest.mark.parametrize(("options", "english", "measured"), [
    ({}, True, True), ({"heads": "mine"}, True, False), ({"model": "smollm2-135m-medusa2"}, True, False),
    ({"model": "vicuna-7b-v1.3"}, False, False), ({"model": "/a/folder"}, False, False)])
def test_what_holds_for_the_default_model_is_told_of_it_alone(options, english, measured):
    beside = view.build(make_snapshot([], on_start={**DEFAULTS, **options}), T)["text"]["beside"]
    assert ("English" in beside["note"], beside["measured"]) == (english, measured)


def test_each_kind_of_fetch_has_its_own_sentence():
    say = lambda phase: view.build(make_snapshot([], model=ModelStatus("loading", phase)), T)["status"]["text"]  # noqa: E731
    assert "only request" in say("fetch") and "hub" in say("hub") and "only request" not in say("hub")


def test_a_recording_of_another_model_offers_no_step():
    snapshot = make_snapshot([make_step(FIRST_LOAD, 1)], recorded=True)
    assert view.build(snapshot, T)["run"]["can"]["step"]
    run = view.build(replace(snapshot, foreign=True), T)["run"]
    assert not run["can"]["step"] and not run["can"]["play"] and "another model" in run["verify_blocked"]


def test_a_finished_run_says_so_on_its_last_step_only():
    steps = [make_step(FIRST_LOAD, seed, index=seed) for seed in range(3)]
    label = lambda index: view.build(make_snapshot(  # noqa: E731
        steps, index=index, pending=False, finished="end"), T)["run"]["step_label"]
    assert [label(index) for index in range(3)] == ["Forward", "Forward", "ended: end token"]


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(exclude_characters="␠␣⏎␍⇥↵", exclude_categories=["C", "Zl", "Zp", "M"])))
def test_plain_text_is_what_the_display_texts_stand_for(text):
    pieces = [text.encode()[at:at + 3] for at in range(0, len(text.encode()), 3)]
    shown = [visible(piece) for piece in pieces if piece]
    if not any("<U+" in label or "◌" in label or "<" in text for label in shown):
        assert tokens.plain_text(shown) == text


def test_a_recording_is_written_from_its_display_texts_and_a_run_by_its_codec():
    line = SimpleNamespace(committed=lambda before: [1, 2, 3], done=lambda: [])
    session = SimpleNamespace(lines={"A": line}, line=line, recorded=True, model=None,
                              wording=Wording({1: "␠two", 2: "<F0 9F>", 3: "<|im_end|>"}, {3: "special"}))
    assert written(session).startswith(" two") and "im_end" not in written(session)
    codec = SimpleNamespace(decode=lambda ids: f"decoded {ids}")
    session.recorded, session.model = False, SimpleNamespace(engine=SimpleNamespace(codec=codec))
    assert written(session) == "decoded [1, 2, 3]"
    session.lines = {}
    assert written(session) == ""


def test_nothing_of_an_empty_page_is_missing():
    made = view.build(make_snapshot([], texts=make_texts()), T)
    assert made["gains"]["rows"] == [] and made["cache"]["kept"] == [] and unpacked(view.packed(made)) == [[]] * 4
