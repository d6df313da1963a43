"""The Tuner page from the server's side: visitors, trees, exchange, and the tree in the Explorer's session."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from tiny_page import until
from tiny_tuner import QUICK_ROWS, done, fact, first, part, saved, serving, surveyed

from medusa_viz.decoding import decoder
from medusa_viz.tuning import formats, latency, specs, thresholds
from medusa_viz.tuning.dynamic import dynamic
from medusa_viz.tuning.published_trees import published
from medusa_viz.ui import host as hosts
from medusa_viz.ui import tuner_charts, tuner_plan


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("tuner"))


@pytest.fixture
def page(folders, tmp_path, monkeypatch):
    yield from serving(folders, tmp_path, monkeypatch)


# ---- sources and jobs ---------------------------------------------------------------------------------------------


def test_without_measurements_the_page_says_where_numbers_come_from(page):
    view = page.act("hello")
    assert view["sources"]["rates_kind"] == "config" and "not calibrated" in view["sources"]["rates"]
    assert view["advice"]["state"] == "time" and fact(view, "second") == "–" and fact(view, "replayed") == "–"
    assert part(view, "heat")["points"] == 30 and part(view, "latency")["points"] == 0
    joint = next(kind for kind in view["controls"]["kinds"] if kind["name"] == "joint")
    assert "calibrate" in joint["lacking"]
    assert "at temperature" not in view["advice"]["text"] and "about" in view["sources"]["time"]
    cut = part(view, "following")["cut"]
    assert "worth" in cut and " for " not in cut and "–" not in cut, "without step times nothing has a price"


def test_calibrate_time_and_measure_lead_to_a_recommendation(page):
    view = done(page, "calibrate")
    assert view["sources"]["rates_kind"] == "known" and "4 greedy replies" in view["sources"]["rates"]
    assert fact(view, "replayed") != "–", "the tree on the desk is judged anew"
    view = done(page, "time")
    assert view["sources"]["times_kind"] == "measured" and part(view, "latency")["points"]
    view = surveyed(page)
    assert view["advice"]["state"] in ("tree", "plain") and part(view, "scatter")["points"]
    drawn = {key["label"] for key in part(view, "steps")["legend"]}
    assert drawn >= {"sparse", "best-dense", "joint", "sequoia", "dynamic"}
    assert all(batch["text"] for batch in view["controls"]["batches"])
    page.act("choose", kind="sparse", budget=3)
    view = done(page, "measure", extent="quick")
    rows = part(page.act("hello"), "measured")["rows"]
    assert rows[0]["name"] == "plain" and rows[0]["rate"] == "1.000"
    row = next(row for row in rows if row["name"] == "sparse:3")
    assert row["equal"]["state"] in ("yes", "tie") and row["expected"].endswith("%") and row["predicted"].endswith("%")
    assert fact(page.act("hello"), "measured").startswith(row["rate"])
    view = done(page, "measure", extent="quick", sampled=True)
    tempered = next(row for row in part(view, "measured")["rows"] if row["name"] == "sparse:3 · T 0.7")
    assert tempered["expected"] == tempered["replayed"] == tempered["predicted"] == "–", "nothing predicts it"


def test_what_was_measured_is_there_for_the_next_server(page, folders):
    done(page, "calibrate")
    done(page, "time")
    again = hosts.Sessions({"model": str(folders.model), "heads": str(folders.heads), "device": "cpu"})
    again.host.load()
    other = SimpleNamespace(act=lambda action, token: json.loads(again.pages.act(token, "tuner", action, {})))
    view = first(other, lambda view: view["ready"])
    assert view["sources"]["rates_kind"] == "known" and view["sources"]["times_kind"] == "measured"
    again.shutdown()


def test_thresholds_are_measured_against_a_proxy(page):
    view = done(page, "thresholds", extent="quick")
    shown = json.loads(part(view, "thresholds")["figure"])
    assert {trace["name"] for trace in shown["data"]} == {"ε at T 0.7", "T at ε 0.09", "plain greedy", "plain sampling"}
    assert "proxy" in part(view, "thresholds")["caption"]
    view = page.act("show", proxy="distinct_3")
    assert "distinct" in json.loads(part(view, "thresholds")["figure"])["layout"]["yaxis"]["title"]["text"]


def test_the_study_of_the_page_names_the_settings_that_stay_as_they_are():
    assert tuner_charts.SWEPT_TEMPERATURE == thresholds.TEMPERATURE == tuner_plan.TEMPERED
    assert tuner_charts.SWEPT_EPSILON == thresholds.EPSILON


# ---- visitors and heads -------------------------------------------------------------------------------------------


def test_two_visitors_have_desks_of_their_own(page):
    page.act("choose", "one", kind="chain", budget=2)
    page.act("price", "one", batch=8)
    page.act("load_curve", "one", text=latency.to_json(curve()))
    other = page.act("hello", "two")
    assert other["chosen"]["title"] == "sparse:16" and other["controls"]["batch"] == 1
    assert not other["sources"]["loaded"]
    one = page.act("hello", "one")
    assert one["chosen"]["title"] == "chain:2" and one["controls"]["batch"] == 8


def curve():
    spread = [latency.Spread(10.0 + row, 9.0, 40.0) for row in QUICK_ROWS]
    small = [latency.Spread(0.1, 0.1, 0.1)] * len(QUICK_ROWS)
    return latency.Latency({"device": "<b>H200</b>", "date": "2026-11-29"}, QUICK_ROWS, [latency.Curve(64, spread)],
                           small[0], small[0], small, small)


def test_a_recorded_curve_prices_trees_and_says_so(page):
    surveyed(page)
    view = page.act("load_curve", text=latency.to_json(curve()), name="h200.json")
    assert view["sources"]["times"] == "<b>H200</b>, recorded on 2026-11-29" and view["sources"]["elsewhere"]
    assert view["sources"]["times_kind"] == "recorded" and not view["sources"]["own"]
    assert "<b>" not in json.dumps(json.loads(part(view, "latency")["figure"])), "a device's name is no markup"
    assert view["advice"]["state"] == "tree" and "H200" in view["advice"]["text"]
    assert not page.act("price", elsewhere=False)["sources"]["elsewhere"]
    for name, called in (("x  y.json ", "The file x y.json"), ("", "The pasted text"), (" ", "The pasted text"),
                         (None, "The pasted text")):
        view = page.act("load_curve", text='{"medusa_viz_latency": 1}', name=name)
        assert view["notice"] == f"{called} is no latency curve that `tune` wrote."
    assert "cannot take" in page.act("load_curve", text=7)["notice"]


def test_other_heads_clear_the_desk(page, folders):
    page.act("choose", kind="chain", budget=3)
    page.host.use(heads=str(folders.more))
    until(lambda: page.host.status.coming is None and page.host.status.state == "ready", "the switch")
    until(lambda: page.act("poll")["ready"], "the new study")
    assert part(page.act("hello"), "heat")["points"] == 40
    assert page.act("hello")["chosen"]["title"] == "sparse:16"


def test_heads_without_accuracies_are_calibrated_first(page, folders, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in folders.heads.iterdir():
        (bare / file.name).write_bytes(file.read_bytes())
    config = json.loads((bare / "config.json").read_text())
    (bare / "config.json").write_text(json.dumps({name: [] if name == "accuracy" else v for name, v in config.items()}))
    page.host.use(heads=str(bare))
    until(lambda: page.host.status.coming is None and page.host.status.state == "ready", "the switch")
    until(lambda: page.act("poll")["ready"], "the new study")
    view = page.act("hello")
    assert view["advice"]["state"] == "calibrate" and view["chosen"]["title"] == "chain:3"
    assert part(view, "heat")["points"] == 0 and "Calibrate" in part(view, "following")["note"]
    assert part(page.act("show", editing=True, cutting=True, grown=1), "tree")["count"] == 3
    assert "needs the heads' accuracies" in page.act("choose", kind="sparse", budget=4)["notice"]
    view = done(page, "calibrate")
    assert view["chosen"]["title"] == "sparse:16" and part(view, "heat")["points"] == 30


# ---- trees --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [0, 1, 63, 4680])
def test_every_builder_draws_what_it_builds(page, budget):
    done(page, "calibrate")
    for kind in (*specs.BUILDERS, "chain"):
        view = page.act("choose", kind=kind, budget=budget)
        assert not view["notice"] and view["chosen"]["nodes"] <= budget
        assert view["controls"]["detents"][-1] == 4680
        tree = part(view, "tree")
        if kind == "dynamic" and budget:
            assert view["chosen"]["nodes"] == budget and tree["figure"] is None
            continue
        assert tree["count"] == view["chosen"]["nodes"]
        assert len([node for node in tree["nodes"] if node["own"]]) + tree["folded"] == tree["count"]


@pytest.mark.parametrize(("payload", "word"), [
    ({"kind": "sparse", "budget": -1}, "0 to 4,680"), ({"kind": "sparse", "budget": "7"}, "0 to 4,680"),
    ({"kind": "sparse", "budget": True}, "0 to 4,680"), ({"kind": "<b>", "budget": 3}, "“<b>”"),
    ({"kind": "published", "name": "x"}, "no published tree"), ({"kind": "sequoia", "budget": 4681}, "0 to 4,680"),
    ({"kind": "joint", "budget": 3}, "calibrate"), ({"kind": 3}, "cannot take"),
])
def test_what_cannot_be_chosen_is_a_sentence_and_changes_nothing(page, payload, word):
    view = page.act("choose", **payload)
    assert word in view["notice"] and view["chosen"]["title"] == "sparse:16"


@pytest.mark.parametrize("kind", ["sparse", "dynamic"])
def test_a_tree_that_is_too_large_to_verify_is_not_decoded_with(page, kind):
    page.act("choose", kind=kind, budget=300)
    for job in ("measure", "thresholds"):
        view = page.act(job, extent="quick")
        assert "over the limit of 256 verified nodes" in view["notice"] and view["job"] is None


def test_step_times_name_sequoias_size(page):
    assert page.act("choose", kind="sparse", budget=8)["controls"]["sized"] is None
    sized = page.act("choose", kind="sequoia", budget=40)["controls"]["sized"]
    assert sized["nodes"] is None and "Measure step times" in sized["text"]
    surveyed(page)
    flat = replace(curve(), curves=[latency.Curve(64, [latency.Spread(10 + row / 9, 9.0, 40.0) for row in QUICK_ROWS])])
    for batch in (1, 4):
        page.act("load_curve", text=latency.to_json(flat))
        view = page.act("price", batch=batch)
        sized = view["controls"]["sized"]
        facts = page.sessions.pages["tuner"]._desks["one"].study.facts
        wanted = specs.build("sequoia", replace(facts, step_ms=lambda n, batch=batch: flat.step_ms(n, batch))).shape
        assert sized["nodes"] == wanted.nodes > 0
        assert f"favour {wanted.nodes} node" in sized["text"] and f"to depth {wanted.height}" in sized["text"]
        line = next(trace for trace in json.loads(part(view, "steps")["figure"])["data"] if trace["name"] == "sequoia")
        assert wanted.nodes in line["x"] and line["x"] == sorted(set(line["x"]))
        view = page.act("choose", kind="sequoia", budget=sized["nodes"])
        assert view["chosen"]["fingerprint"] == wanted.fingerprint
    steep = replace(curve(), curves=[latency.Curve(64, [latency.Spread(10.0 * row, 9.0, 400.0) for row in QUICK_ROWS])])
    sized = page.act("load_curve", text=latency.to_json(steep))["controls"]["sized"]
    assert sized["nodes"] is None and "plain decoding is expected to be as fast" in sized["text"]


def test_the_chart_of_tokens_per_step_holds_the_published_trees(page):
    def points():
        view = surveyed(page)
        figure = json.loads(part(view, "steps")["figure"])
        return next((t for t in figure["data"] if t["name"] == "published"), None), figure, view

    shown, figure, view = points()
    assert len(shown["x"]) == len(shown["y"]) == 9 and max(shown["x"]) <= 63 and shown["y"] == sorted(shown["y"])[::-1]
    assert shown["mode"] == "markers" and not any(t["name"] == "published" for t in json.loads(
        part(view, "speed")["figure"])["data"])
    hover = next(text for text in shown["hovertext"] if "mc_sim_7b_63" in text)
    assert "61 nodes" in hover and "2 nodes below depth 3 are left out" in hover
    label = figure["layout"]["annotations"][-1]["text"].split("<br>")
    named = " · ".join(label[1:]).split(" · ")
    assert named == [text.split(":")[1] for text in shown["hovertext"]] and set(named) == set(published())
    before = shown["y"]
    done(page, "calibrate")
    shown, _, _ = points()
    assert shown["y"] != before and "replayed" in shown["hovertext"][0], "a calibration judges them anew"


def test_published_trees_are_trimmed_with_a_note(page):
    view = page.act("choose", kind="published", name="mc_sim_7b_63")
    assert view["chosen"]["nodes"] == 61 and "2 nodes below depth 3" in view["chosen"]["notes"][0]
    assert len(view["controls"]["published"]) == len(published()) == 9


def test_a_tree_with_more_leaves_than_lines_is_folded_until_there_is_room(page):
    page.act("choose", kind="published", name="mc_sim_7b_63")
    tree = part(page.act("room", width=620, height=330), "tree")
    assert tree["folded"] > 0 and len(tree["nodes"]) + tree["folded"] == tree["count"] + 1
    at = sorted(node["y"] for node in tree["nodes"] if node["depth"] == 3)
    assert (330 - 60) / max(node["y"] for node in tree["nodes"]) > 8, "a label is 9 px high"
    assert len(set(at)) == len(at) and part(page.act("room", width=620, height=700), "tree")["folded"] == 0


def test_a_dynamic_tree_says_what_it_cannot(page):
    view = page.act("choose", kind="dynamic", budget=7)
    assert part(view, "tree")["figure"] is None and view["chosen"]["dynamic"]
    assert "another one" in page.act("prune", path="0")["notice"]
    assert not part(page.act("hello"), "exchange")["possible"]


def test_prune_add_undo_redo(page):
    view = page.act("choose", kind="sparse", budget=8)
    before = view["chosen"]["fingerprint"]
    view = page.act("prune", path="0")
    assert view["chosen"]["title"].startswith("own tree") and view["chosen"]["nodes"] < 8
    pruned = view["chosen"]["fingerprint"]
    view = page.act("add", path="0.2.1")
    assert view["chosen"]["nodes"] == sum(node["own"] for node in part(view, "tree")["nodes"])
    assert {"0", "0.2", "0.2.1"} <= {node["path"] for node in part(view, "tree")["nodes"]}
    assert page.act("undo")["chosen"]["fingerprint"] == pruned
    view = page.act("undo")
    assert view["chosen"]["fingerprint"] == before and view["chosen"]["title"] == "sparse:8"
    assert page.act("redo")["chosen"]["fingerprint"] == pruned
    for action, payload, word in (("prune", {"path": ""}, "root"), ("prune", {"path": "9.9"}, "no node"),
                                  ("add", {"path": "0.0.0.0"}, "no such node"), ("add", {"path": "x"}, "no such node"),
                                  ("add", {"path": "99"}, "no such node"), ("add", {"path": 0}, "no such node"),
                                  ("prune", {"path": "0." * 9999}, "no such node")):
        assert word in page.act(action, **payload)["notice"], payload
    page.act("undo")
    page.act("undo")
    assert "nothing to undo" in [page.act("undo")["notice"] for _ in range(3)][-1]


def test_slots_cuts_and_growth_are_drawn_without_changing_the_tree(page):
    page.act("choose", kind="sparse", budget=5)
    plain = part(page.act("hello"), "tree")
    assert {node["verdict"] for node in plain["nodes"]} == {"root", "planned"}
    for setting in ({"editing": True}, {"cutting": True, "editing": False}):
        tree = part(page.act("show", **setting), "tree")
        assert tree["count"] == 5 and sum(node["own"] for node in tree["nodes"]) == 5
        assert any(not node["own"] and node["verdict"] == "slot" for node in tree["nodes"])
    page.act("show", cutting=False)
    grown = [part(page.act("show", grown=n), "tree") for n in range(6)]
    assert [sum(node["verdict"] == "planned" for node in tree["nodes"]) for tree in grown] == [0, 1, 2, 3, 4, 5]
    assert all([node["x"] for node in tree["nodes"]] == [node["x"] for node in plain["nodes"]] for tree in grown)
    view = page.act("hello")
    assert len(part(view, "following")["next"]) == 5


def test_depth_bars_sum_to_the_accepted_length(page):
    done(page, "calibrate")
    view = page.act("choose", kind="joint", budget=6)
    bars = json.loads(part(view, "reached")["figure"])["data"]
    assert [bar["name"] for bar in bars] == ["expected", "replayed"]
    rate = float(part(view, "reached")["caption"].split("1 + E[L] = ")[1].split(",")[0])
    assert sum(bars[1]["y"]) + 1 == pytest.approx(rate, abs=2e-3)
    assert sum(bars[0]["y"]) + 1 == pytest.approx(float(fact(view, "expected")), abs=2e-3)
    caption = part(page.act("choose", kind="chain", budget=1), "reached")["caption"]
    assert caption.split(";")[0].count("=") == 1, "a sum of one term is that term"


# ---- exchange -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(formats.FORMATS))
def test_what_is_exported_can_be_imported(page, name):
    page.act("choose", kind="chain", budget=3)
    view = page.act("show", format=name)
    shown = part(view, "exchange")
    assert shown["possible"] and shown["text"]
    page.act("choose", kind="sparse", budget=2)
    view = page.act("import", text=shown["text"])
    assert not view["notice"] and view["chosen"]["nodes"] == 3 and view["chosen"]["notes"][0].startswith("Read as")


@pytest.mark.parametrize("text", ["__import__('os').system('touch x')", "<img src=x onerror=alert(1)>", "",
                                  "[[0],[-1]]", "{" * 5000, "[[0, 99]]", "9" * 5000, {"tree": []}, [[0]], None])
def test_hostile_text_is_refused_in_one_sentence(page, text):
    view = page.act("import", text=text)
    assert view["notice"] and view["chosen"]["title"] == "sparse:16"


# ---- in the Explorer ----------------------------------------------------------------------------------------------


def test_an_explicit_tree_decodes_as_greedy_does(page):
    page.act("import", text="[[0],[2],[0,1],[2,0],[0,1,3]]")
    given = page.act("use")["give"]["tree"]
    assert page.act("hello")["give"] is None, "given once"
    page.explorer("hello")
    view = page.explorer("tree", **given)
    assert not view["status"]["notice"]
    view = page.explorer("start", prompt="abc")
    assert view["knobs"]["readout"].startswith("own tree of 5 nodes (2/2/1)") and view["knobs"]["size"] == 5
    assert len(view["tree"]["nodes"]) == 6 and view["run"]["command"] == ""
    for _ in range(3):
        view = page.explorer("step")
    until(lambda: page.explorer("poll")["equality"]["state"] in ("equal", "tie"), "the comparison with plain greedy")
    assert page.explorer("knob", temperature=0.7)["knobs"]["readout"].startswith("own tree"), "reweighing keeps it"
    view = page.explorer("knob", size=4)
    assert "own tree" not in view["knobs"]["readout"] and view["knobs"]["top_s"] == [3, 2, 4]
    view = page.explorer("back")
    assert view["knobs"]["readout"].startswith("own tree"), "a step comes back with its own tree"


def test_a_dynamic_tree_is_rebuilt_there_by_the_temperatures_that_calibrating_fitted(page):
    """Before, the heads' probabilities are taken as they are, and the page says so."""
    page.act("choose", kind="dynamic", budget=6)
    given = page.act("use")["give"]["tree"]
    assert given == {"dynamic": 6}
    page.explorer("hello")
    assert "no temperatures were fitted" in page.explorer("tree", **given)["status"]["notice"]
    done(page, "calibrate")
    assert not page.explorer("tree", **given)["status"]["notice"]
    fitted = page.sessions.pages["tuner"]._desks["one"].study.facts.temperatures
    trees = dynamic(3, 6, None, fitted)
    page.explorer("start", prompt="abc")
    for _ in range(3):
        view = page.explorer("step")
        entry = page.sessions.session("one").entry
        right = decoder.step_shape(page.host.model.engine.drafter, entry.position.hidden, trees)
        assert entry.step.shape.fingerprint == right.fingerprint and len(view["tree"]["nodes"]) == 7
    until(lambda: page.explorer("poll")["equality"]["state"] in ("equal", "tie"), "the comparison with plain greedy")


def test_a_tree_that_walls_and_size_give_is_theirs(page):
    page.explorer("start", prompt="abc")
    view = page.explorer("tree", paths=[[0], [1], [0, 0], [0, 1], [1, 0], [1, 1]])
    assert "own tree" not in view["knobs"]["readout"] and view["knobs"]["top_s"] == [2, 2, 0]
    view = page.explorer("tree", paths=[[0, 0, 0, 0]])
    assert "below depth 3" in view["status"]["notice"] and len(view["tree"]["nodes"]) == 4


@pytest.mark.parametrize(("paths", "word"), [
    ([[11]], "10 best tokens"), ([["x"]], "whole numbers"), (3, "cannot take"), ([["x"]] * 5000, "4,680 nodes"),
    ([[n, n] for n in range(4000)], "4,680 nodes"), ([["x"] * 1000], "deeper than 64")])
def test_odd_trees_leave_the_explorer_as_it_was(page, paths, word):
    page.explorer("start", prompt="abc")
    view = page.explorer("tree", paths=paths)
    assert word in view["status"]["notice"] and view["knobs"]["top_s"] == [4, 3, 2]
