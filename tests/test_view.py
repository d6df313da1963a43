"""The view: complete for any session, sentences by verdict, merits by their definitions."""

from dataclasses import replace

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import ACCURACY, make_snapshot, make_step, make_texts

from medusa_viz.decoding import records, reweigh
from medusa_viz.decoding.records import Timings, TopTokens
from medusa_viz.decoding.settings import Acceptance, Walls
from medusa_viz.decoding.tree import dense, from_paths
from medusa_viz.figures.texts import Texts, table
from medusa_viz.tuning.builders import sparse
from medusa_viz.ui import presets, view
from medusa_viz.ui.sentences import Narrator
from medusa_viz.ui.snapshot import Equality, ModelStatus

T = Texts()
FIRST_LOAD = sparse(ACCURACY, 16, (4, 3, 2, 2))
trees = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4), max_size=40).map(from_paths)
rules = st.one_of(st.just(Acceptance()),
                  st.builds(Acceptance, st.sampled_from(["typical", "rejection"]),
                            st.sampled_from([0.1, 0.7, 1.0, 2.0]), st.sampled_from([0.01, 0.09, 0.5]),
                            st.sampled_from([0.1, 0.3, 1.0])))


def merit(made, key):
    return next(tile for tile in made["merits"] if tile["key"] == key)


def committing(counts, **changes):
    """A run whose steps commit that many tokens each, by chains that pass so far."""
    steps = []
    for index, count in enumerate(counts):
        step = make_step(dense([1] * 3), index, index=index, heads=3)
        rank = [0, *[0] * (count - 1), *[5] * (4 - count)]
        step = replace(step, verification=replace(step.verification, rank=rank))
        steps.append(replace(step, verdict=reweigh.judge(step, Acceptance())))
    return make_snapshot(steps, pending=False, accuracy=ACCURACY[:3], **changes)


@settings(max_examples=50, deadline=None)
@given(trees, rules, st.integers(0, 500), st.floats(0, 1))
def test_a_view_is_complete_for_any_tree_and_rule(shape, acceptance, seed, agree):
    step = make_step(shape, seed, acceptance, agree=agree)
    made = view.build(make_snapshot([step]), T)
    orjson.dumps(made, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY)
    n = shape.nodes
    assert [node["row"] for node in made["tree"]["nodes"]] == list(range(n + 1))
    assert set(made["rows"]) == set(map(str, range(n + 1)))
    assert all(entry["sentence"] and "{" not in entry["sentence"] for entry in made["rows"].values())
    assert [node["verdict"] for node in made["tree"]["nodes"]] == step.verdict.verdict
    assert set(made["verdict"]["rows"]) == {str(parent) for parent in set(shape.parent[1:].tolist())}
    for parent, panel in made["verdict"]["rows"].items():
        drafted = {entry["drafted_row"] for entry in panel["tokens"]} - {None}
        assert drafted == {row for row in range(1, n + 1) if shape.parent[row] == int(parent)}
    keep = len(step.verdict.committed)
    assert (made["cache"]["keep"], made["cache"]["drop"]) == (keep, n + 1 - keep)
    assert made["text"]["pending"][0]["path"] == "" and len(made["text"]["pending"]) == keep
    assert made["tree"]["ghost"]["reason"] and "{" not in made["tree"]["ghost"]["reason"]
    assert made["headline"]["text"].endswith(".")


def test_headline_counts_what_one_pass_did():
    steps = (make_step(FIRST_LOAD, seed, agree=0.9) for seed in range(50))
    step = next(step for step in steps if len(step.verdict.committed) == 4)
    made = view.build(make_snapshot([step]), T)
    assert made["headline"]["text"] == ("One forward pass checked 17 tokens on 10 paths; 3 were accepted, so 4 tokens "
                                        "are committed (plain decoding: 1).")
    assert made["headline"]["hint"] == "One by one, these paths would take 10 passes."
    assert made["run"]["step_label"] == "Step: commit 4 tokens"
    assert [chip["src"] for chip in made["text"]["pending"]] == [0, 1, 2, 3]


def test_unverified_step_has_tree_mask_and_counts_but_no_verdicts():
    step = make_step(dense([8, 8, 8, 8]), verified=False)
    made = view.build(make_snapshot([step], walls=Walls((8, 8, 8, 8), 4680)), T)
    assert made["run"]["verify"] == "Verify 4,680 nodes (about 15 s here)"
    assert made["headline"]["text"].startswith("Drawn, not verified: 4,680 drafted tokens on 4,096 paths.")
    assert len(made["tree"]["nodes"]) == made["cache"]["rows"] == 4681 and made["verdict"]["rows"] == {}
    assert {node["verdict"] for node in made["tree"]["nodes"]} == {records.UNVERIFIED}
    assert made["tree"]["ghost"] is None and made["text"]["pending"] == [] and made["knobs"]["badge"]["kind"] == ""
    assert made["knobs"]["readout"] == ("8·8·8·8 → 4,680 possible nodes (8+64+512+4,096), 4,096 paths; "
                                        "using 4,680 (8/64/512/4,096)")


@pytest.mark.parametrize("state, recorded", [("loading", False), ("ready", False), ("error", False)])
def test_a_page_without_a_step_says_what_to_do(state, recorded):
    made = view.build(make_snapshot([], model=ModelStatus(state, "fetch", 0.4, "No space left on the disk."),
                                    recorded=recorded, accuracy=[]), T)
    assert "press Start" in made["headline"]["text"] and made["steps"] == {"index": 0, "count": 0, "committed": []}
    assert [node["path"] for node in made["tree"]["nodes"]] == [""]
    assert made["run"]["can"] == {"start": state == "ready", "step": False, "back": False, "forward": False,
                                  "play": False, "reset": False}
    assert merit(made, "tokens_per_step")["value"] == "–"
    if state == "error":
        assert made["status"]["text"] == "No space left on the disk."


def test_status_line_says_what_is_going_on():
    say = lambda *status: view.build(make_snapshot([], model=ModelStatus(*status)), T)["status"]["text"]  # noqa: E731
    assert say("loading", "fetch", 0.0, "Fetching it").endswith("leaves this machine)…")
    assert say("loading", "fetch", 0.4, "39 of 98 MB").endswith("… 39 of 98 MB")
    assert say("ready") == "ready" and say("error", "", None, "Disk full.") == "Disk full."


# ---- sentences -----------------------------------------------------------------------------------------------------


def narrated(parent_p, tokens, ranks, acceptance):
    """Sentences of a one-level tree whose parent has the probabilities `parent_p` over ids 0.."""
    step = make_step(dense([3]), 0, acceptance)
    verdict = replace(step.verdict, p=[0.6, *[parent_p[token] for token in tokens]])
    drafts = replace(step.drafts, token=[9, *tokens])
    seen = replace(step.verification, rank=[0, *ranks],
                   top={**step.verification.top, 0: TopTokens(list(range(len(parent_p))), parent_p)})
    texts = dict(enumerate(["␠the", "␠a", "␠cat", "dog"])) | {9: "␠of"}
    return Narrator(replace(step, drafts=drafts, verification=seen, verdict=verdict), texts, (3, 2), T)


def verdict_of(tell, kinds, accepted, **changes):
    verdict = replace(tell.step.verdict, verdict=kinds, accepted=accepted, **changes)
    return replace(tell, step=replace(tell.step, verdict=verdict))


def test_greedy_sentences():
    tell = narrated([0.61, 0.2, 0.1, 0.052], [0, 3, 1], [0, 3, 1], Acceptance())
    tell = verdict_of(tell, ["accepted", "accepted", "rejected", "rejected"], [0, 1])
    assert tell.sentence(0) == "the backbone's own next token, always accepted"
    assert tell.sentence(1) == "the backbone's first choice too (0.610)"
    assert tell.sentence(2) == "the backbone prefers ' the' (0.610); this is its no. 4 (0.052)"


def test_typical_sentences():
    tell = narrated([0.183, 0.052, 0.0903, 0.00002], [0, 1, 2], [0, 2, 1], Acceptance("typical", 1.0))
    tell = verdict_of(tell, ["accepted", "accepted", "rejected", "shorter"], [0, 1], threshold=[0, 0.09, 0.09, 0.09])
    assert tell.sentence(1) == "0.183 > 0.090"
    assert tell.sentence(2) == "0.052, not above 0.090; the backbone's no. 3 here"
    assert tell.sentence(3) == "as long, less likely (log p −2.4 against −1.7)"


def test_behind_names_the_rejected_ancestor():
    shape = dense([1, 1, 1])
    step = make_step(shape, 0, Acceptance("typical", 1.0))
    verdict = replace(step.verdict, verdict=["accepted", "rejected", "behind", "behind"], accepted=[0],
                      p=[0.6, 0.01, 0.31, 0.42], threshold=[0, 0.09, 0.09, 0.09])
    tell = Narrator(replace(step, verdict=verdict), {step.drafts.token[1]: "␠of"}, (1, 1, 1), T)
    assert tell.sentence(2) == "would pass (0.310 > 0.090), but its parent ' of' was rejected"
    assert tell.sentence(3) == "would pass (0.420 > 0.090), but its ancestor ' of' was rejected"


def test_a_shorter_path_says_by_how_much():
    shape = from_paths([[0, 0, 0], [1, 0]])
    step = make_step(shape, 0, Acceptance("typical", 1.0))
    kinds = ["accepted"] * (shape.nodes + 1)
    for path in [(1,), (1, 0)]:
        kinds[shape.row_of[path]] = "shorter"
    verdict = replace(step.verdict, verdict=kinds, accepted=shape.path_to(shape.row_of[(0, 0, 0)]))
    tell = Narrator(replace(step, verdict=verdict), make_texts(), (2, 1, 1), T)
    assert tell.sentence(shape.row_of[(1,)]) == "passes, but another path is longer (3 against 2)"


def test_walk_sentences():
    step = make_step(dense([3, 2]), 3, Acceptance("rejection", 1.0))
    tell = Narrator(step, make_texts(), (3, 2), T)
    told = {step.verdict.verdict[row]: tell.sentence(row) for row in range(1, 10)}
    assert "draws had already left" in told[records.UNSEEN] and told[records.REJECTED].startswith("the draw gave '")


@pytest.mark.parametrize("rank, top_s, why", [
    (5, (3, 3), "outside s₂ = 3"), (1, (3, 3), "inside s₂ = 3, but cut by the tree size"),
    (0, (3, 0), "the tree ended here (s₂ = 0)")])
def test_why_the_path_stopped(rank, top_s, why):
    shape = from_paths([[0], [1], [0, 0]] if top_s[1] else [[0], [1]])
    step = make_step(shape, 0)
    heads = [step.drafts.heads[0], *[TopTokens([100 + i for i in range(10)], [0.05] * 10)] * 3]
    verdict = replace(step.verdict, accepted=[0, 1], next_root=100 + rank, finish=None)
    step = replace(step, drafts=replace(step.drafts, heads=heads), verdict=verdict)
    tell = Narrator(step, {100 + rank: "␠cat"}, top_s, T)
    text, reason = tell.ghost()
    assert text == "␠cat" and reason.startswith("the backbone wanted ' cat'") and reason.endswith(why)
    if top_s[1]:
        assert f"head 2 had it as no. {rank + 1}" in reason


def test_why_the_path_stopped_at_the_edges():
    full = make_step(dense([1] * 4), 0)
    full = replace(full, verdict=replace(full.verdict, accepted=[0, 1, 2, 3, 4], finish=None))
    assert Narrator(full, {}, (1,) * 4, T).ghost()[1].endswith("; there are only 4 heads")
    plain = make_step(dense([]), 0)
    assert Narrator(plain, {}, (1,), T).ghost()[1].endswith("; nothing is drafted in plain decoding")
    unknown = make_step(dense([1]), 0, agree=0.0)
    unknown = replace(unknown, verdict=replace(unknown.verdict, accepted=[0], next_root=-7))
    assert "not in the draft vocabulary" in Narrator(unknown, {}, (1,), T).ghost()[1]
    assert Narrator(replace(unknown, verdict=replace(unknown.verdict, finish="end")), {}, (1,), T).ghost() is None


def test_terms_show_the_rule_with_its_numbers():
    step = make_step(dense([2]), 0, Acceptance("typical", 1.0, 0.09, 0.3))
    verdict = replace(step.verdict, entropy=[0, 1.156, 1.156], threshold=[0, 0.09, 0.09])
    tell = Narrator(replace(step, verdict=verdict), {}, (2,), T)
    assert tell.terms(0) == "min(ε 0.090, δ·e^−H 0.3·e^−1.156 = 0.094) = 0.090"


def test_panel_probabilities_are_those_of_the_rule():
    for acceptance in (Acceptance(), Acceptance("typical", 0.5)):
        step = make_step(dense([4, 2]), 2, acceptance)
        panel = view.build(make_snapshot([step]), T)["verdict"]["rows"]["0"]
        for entry in panel["tokens"]:
            if entry["drafted_row"] is not None:
                assert entry["p"] == pytest.approx(step.verdict.p[entry["drafted_row"]], rel=1e-3)


# ---- merits, knobs, state ------------------------------------------------------------------------------------------


def test_merits_follow_their_definitions():
    """Field case A09: steps that commit 3, 1, 2, 4 tokens with 3 heads; the prefill is no step."""
    made = view.build(committing([3, 1, 2, 4]), T)
    assert merit(made, "tokens_per_step")["value"] == "2.5" and merit(made, "accepted_per_step")["value"] == "1.5"
    assert merit(made, "tokens_per_step")["note"] == "n = 4"
    assert [bar["value"] for bar in merit(made, "depth")["bars"]] == [0.75, 0.5, 0.25]
    assert merit(made, "latency")["value"] == "80 ms"
    assert [bar["text"] for bar in merit(made, "latency")["bars"]] == ["7.1 ms", "71 ms", "0.9 ms", "0.8 ms"]
    assert merit(made, "overhead")["value"] == f"{80.2 / 62:.2f}"
    assert merit(made, "speedup")["value"] == f"{2.5 / (80.2 / 62):.1f}"
    assert all(tile["hint"] for tile in made["merits"])


def test_merits_leave_out_what_is_not_committed():
    snapshot = committing([3, 1, 2, 4])
    assert merit(view.build(replace(snapshot, pending=True), T), "tokens_per_step")["value"] == "2.0"
    assert merit(view.build(replace(snapshot, changed=True), T), "tokens_per_step")["value"] == "2.0"
    back = view.build(replace(snapshot, index=1), T)
    assert merit(back, "tokens_per_step")["value"] == "2.0" and merit(back, "tokens_per_step")["note"] == "n = 2"
    since = view.build(replace(snapshot, knobs_since=2), T)
    assert merit(since, "tokens_per_step")["value"] == "3.0"
    assert merit(since, "tokens_per_step")["note"] == "n = 2 · run 2.5 (n = 4)"


def test_merits_show_the_run_until_a_step_is_committed_under_the_new_knobs():
    moved = replace(committing([3, 1, 2, 4]), knobs_since=4)
    whole, made = view.build(committing([3, 1, 2, 4]), T), view.build(moved, T)
    for key in ("tokens_per_step", "accepted_per_step", "latency", "overhead", "speedup"):
        assert merit(made, key)["value"] == merit(whole, key)["value"] != "–"
    assert merit(made, "depth")["bars"] == merit(whole, "depth")["bars"] != []
    for key in ("tokens_per_step", "accepted_per_step", "depth", "latency", "overhead", "speedup"):
        assert merit(made, key)["label"] == f"{merit(whole, key)['label']}, run"
        assert merit(made, key)["note"] == "since the knobs moved: –" and "n = 4" in merit(made, key)["hint"]
    assert merit(made, "expected") == merit(whole, "expected")


def test_the_phase_bar_says_on_how_many_nodes_verify_was_measured():
    snapshot = make_snapshot([make_step(dense([2]), 0)])
    assert [phase["note"] for phase in view.build(snapshot, T)["phases"]] == ["", "", "", ""]
    wider = view.build(replace(snapshot, verified_nodes=16), T)["phases"]
    assert [phase["note"] for phase in wider] == ["", "16 nodes", "", ""]
    assert "Measured on 16 nodes" in wider[1]["hint"]


def test_ratios_get_their_second_decimal_at_ten_steps_and_need_a_plain_step():
    made = view.build(committing([3, 1, 2, 4] * 3, plain_ms=None), T)
    assert merit(made, "tokens_per_step")["value"] == "2.50"
    assert merit(made, "overhead")["value"] == "–" and merit(made, "overhead")["note"] == "no plain step measured"
    slow = committing([1], plain_ms=10.0)
    slow = replace(slow, steps=[replace(slow.steps[0], timings=Timings())])
    assert merit(view.build(slow, T), "latency")["value"] == "–"


def test_expected_tokens_per_step_come_from_the_accuracy_table():
    made = view.build(make_snapshot([make_step(dense([2]), 0)]), T)
    assert merit(made, "expected")["value"] == "1.65" and merit(made, "expected")["note"] == "2 nodes"


@pytest.mark.parametrize("walls, shape, readout", [
    (Walls((4, 3, 2, 2), 16), FIRST_LOAD, "4·3·2·2 → 88 possible nodes (4+12+24+48), 48 paths; using 16 (4/9/3)"),
    (Walls((2, 3), 16), dense([2, 3]), "2·3 → 8 possible nodes (2+6), 6 paths; size 16, all 8 used"),
    (Walls((0, 3), 16), dense([]), "0·3 → nothing is drafted: plain decoding"),
    (Walls((2, 3), 0), dense([]), "2·3 → 8 possible nodes (2+6), 6 paths; using 0: plain decoding")])
def test_readout(walls, shape, readout):
    made = view.build(make_snapshot([make_step(shape, 0)], walls=walls), T)
    assert made["knobs"]["readout"] == readout


@pytest.mark.parametrize("acceptance, disabled", [
    (Acceptance(), {"epsilon", "delta", "top_p"}), (Acceptance("typical", 0.7), {"top_p"}),
    (Acceptance("rejection", 0.7), {"epsilon", "delta"}), (Acceptance("typical", 0.0), {"epsilon", "delta", "top_p"})])
def test_knobs_without_effect_say_why(acceptance, disabled):
    made = view.build(make_snapshot([make_step(dense([2]), 0, acceptance)], acceptance=acceptance), T)
    assert set(made["knobs"]["disabled"]) == disabled and all(made["knobs"]["disabled"].values())
    assert made["knobs"]["bounds"]["temperature"] == [0.0, 2.0, 0.1] and made["knobs"]["mode"] == acceptance.rule


@pytest.mark.parametrize("reused, text", [("forward", "new forward 84 ms"), ("logits", "reused logits 4.2 ms"),
                                          ("subtree", "reused sub-tree 6.0 ms")])
def test_badge_says_how_the_change_was_answered(reused, text):
    ms = {"forward": 84.4, "logits": 4.2, "subtree": 6.0}[reused]
    step = replace(make_step(dense([2]), 0), reused=reused, answer_ms=ms)
    assert view.build(make_snapshot([step]), T)["knobs"]["badge"] == {"kind": reused, "text": text}


def test_presets_fit_any_number_of_heads():
    assert presets.walls("paper", 4) == Walls((2, 3, 0, 0), 8) and presets.walls("full", 4).size == 4680
    assert presets.walls("chain", 3) == Walls((1, 1, 1), 3) and presets.walls("sparse64", 2).top_s == (10, 10)
    for name in presets.PRESETS:
        assert [len(presets.walls(name, heads).top_s) for heads in (1, 3, 5)] == [1, 3, 5]
    made = view.build(make_snapshot([make_step(dense([2]), 0)]), T)
    assert [preset["name"] for preset in made["knobs"]["presets"]] == list(presets.PRESETS)


def test_what_can_be_done_where():
    snapshot = make_snapshot([make_step(dense([2]), seed, index=seed) for seed in range(3)])
    can = lambda **changes: view.build(replace(snapshot, **changes), T)["run"]  # noqa: E731
    tip = can()
    assert tip["can"] == {"start": True, "step": True, "back": True, "forward": False, "play": True, "reset": True}
    past = can(index=0, pending=False)
    assert past["step_label"] == "Forward" and past["can"]["step"] and not past["can"]["back"]
    branch = can(index=0, pending=False, changed=True)
    assert branch["step_label"] == "Branch here" and branch["can"]["step"]
    ended = can(pending=False, finished="end")
    assert not ended["can"]["step"] and ended["finished_text"] == "ended: end token"
    assert can(index=1, pending=False, finished="end")["finished_text"] == ""
    recorded = can(recorded=True, model=ModelStatus("loading", "load"))
    assert not recorded["can"]["step"] and recorded["banner"] == "A recorded step; the model is loading"
    assert can(recorded=True, index=1, pending=False, model=ModelStatus("loading", "load"))["can"]["step"]


@pytest.mark.parametrize("equality, text", [
    (Equality(True, "equal"), "yes, token for token"),
    (Equality(False, "tie", 11, 4e-4), "tie at token 12: the top two are 4.0e-04 apart, which is rounding"),
    (Equality(None, "not_expected"), "not expected: this acceptance changes the text")])
def test_equality_in_words(equality, text):
    assert view.build(make_snapshot([make_step(dense([2]), 0)], equality=equality), T)["equality"]["text"] == text


def test_a_recording_does_not_wait_for_a_comparison():
    made = view.build(make_snapshot([make_step(dense([2]), 0)], recorded=True), T)
    assert made["equality"] == {"state": "off", "on": True, "plain_due": False, "text": "not compared"}


def test_chips_know_where_each_token_came_from():
    snapshot = committing([3, 1, 2])
    made = view.build(replace(snapshot, kinds={1: "special"}), T)
    chips = made["text"]["chips"]
    assert [chip["src"] for chip in chips] == [None] * 3 + [0, 1, 2] + [0] and chips[0]["k"] == "special"
    assert [chip["step"] for chip in chips] == [-1] * 3 + [0, 0, 0] + [1]
    assert all(chip["t"].strip() for chip in chips)


def test_texts_fill_slots_in_one_pass_and_fall_back_to_english():
    assert T("view.step.commit", n=1) == "Step: commit 1 token"
    assert T("view.step.commit", n=4) == "Step: commit 4 tokens"
    assert T("view.after", token="'{k}'") == "after '{k}'"
    assert Texts("xx").lang == "en" and Texts("en")("view.root") == "root"
    with pytest.raises(KeyError):
        T("view.no_such_key")
    assert all(isinstance(text, str) and text for texts in table().values() for text in texts.values())
