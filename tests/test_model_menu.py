"""The model menu: what it lists and why, what a choice loads, and what a server that keeps its model refuses."""

import gc
import json
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
from fake_hub import serve
from tiny_page import saved_heads, saved_model, token_file, until

from medusa_viz.decoding.settings import ServerLimits, Walls
from medusa_viz.models import memory, presets, sources
from medusa_viz.models.published import PUBLISHED
from medusa_viz.tuning.published_trees import published
from medusa_viz.ui import host as hosts

VICUNA = PUBLISHED["vicuna-7b-v1.3"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    folders = SimpleNamespace(model=saved_model(root / "model"), other=saved_model(root / "other"),
                              heads=saved_heads(root / "heads"), more=saved_heads(root / "more", 4, 1))
    tokenizer = folders.other / "tokenizer.json"  # the same letters under other numbers
    data = json.loads(tokenizer.read_text())
    data["model"]["vocab"] = {letter: 255 - number for letter, number in data["model"]["vocab"].items()}
    tokenizer.write_text(json.dumps(data))
    return folders


def serving(folders, monkeypatch, locked=False, free=7e9):
    monkeypatch.setattr(memory, "free", lambda device: int(free))
    options = {"model": str(folders.model), "heads": str(folders.heads), "device": "cpu"}
    sessions = hosts.Sessions(options, locked=locked)
    sessions._opening = None
    sessions.host.load()
    for token in ("one", "two"):
        sessions.act(token, "hello", {})  # as every page does first
    return SimpleNamespace(
        sessions=sessions, host=sessions.host, menu=lambda: json.loads(sessions.models("one")),
        act=lambda action, token="one", **payload: json.loads(sessions.act(token, action, payload)))


@pytest.fixture
def page(folders, monkeypatch):
    page = serving(folders, monkeypatch)
    yield page
    page.sessions.shutdown()


def used(page, **choice):
    view = page.act("use", **choice)
    assert not view["status"]["notice"], view["status"]["notice"]
    until(lambda: page.host.status.coming is None and page.host.status.state == "ready", "the switch")
    assert not page.host.status.fault, page.host.status.fault


# -------------------------------------------------------------------------------------------------------- what it lists


def test_the_menu_lists_what_fits_and_why_others_do_not(page, folders):
    menu = page.menu()
    assert (menu["locked"], menu["busy"], menu["free"]) == (False, False, "7.0 GB of memory are free")
    own, *shipped = menu["local"]
    assert own["title"] == "model with heads" and own["running"]
    assert own["choice"] == {"model": str(folders.model), "heads": str(folders.heads)}
    assert "smollm2-135m" in [one["choice"]["model"] for one in shipped]
    assert not any(one["running"] for one in shipped)
    by_title = {one["title"]: one for one in menu["published"]}
    fits = [one["fits"] for one in menu["published"]]
    assert fits == sorted(fits, reverse=True) and True in fits and False in fits
    assert by_title["TinyLlama 1.1B Chat"]["note"] == "Needs 5.3 GB in fp32. Licence: Apache-2.0."
    assert by_title["Vicuna 7B v1.3"]["note"] == ("Does not fit here: it needs 32.1 GB in fp32, 16.0 GB in bf16. "
                                                  "Licence: non-commercial (LLaMA).")
    used(page, heads=str(folders.more))
    assert not any(one["running"] for one in page.menu()["local"])
    used(page, **own["choice"])
    assert page.menu()["local"][0]["running"]


def test_details_of_a_model_say_where_it_comes_from_and_what_it_needs(page):
    menu = page.menu()
    by_title = {one["title"]: {row["label"]: row["value"] for row in one["facts"]}
                for one in menu["local"] + menu["published"]}
    assert by_title["model with heads"] == {}, "nobody listed what the server was started with"
    assert by_title["SmolLM2-135M-Instruct"]["tree"] == "sparse:16"
    assert by_title["Vicuna 7B v1.3"] == {
        "model": "lmsys/vicuna-7b-v1.3",
        "heads": "FasterDecoding/medusa-vicuna-7b-v1.3: 5 heads with an output matrix each",
        "chat template": "the tokenizer's own; where it brings none, vicuna's, which comes with Medusa-Viz",
        "tree": "published:vicuna_7b_stage1", "licence": "non-commercial (LLaMA)", "fits here": "no",
        "memory": "32.1 GB in fp32, 16.0 GB in bf16 or fp16; on CUDA cards only: 9.6 GB in 8bit, 6.4 GB in 4bit"}
    assert by_title["TinyLlama 1.1B Chat"]["fits here"] == "in fp32, bf16"


def test_presets_are_listed_once_their_heads_are_here(page, monkeypatch, tmp_path):
    monkeypatch.setattr(presets, "REPOSITORY", tmp_path)
    (tmp_path / "assets" / "heads" / "smollm2-135m-medusa2").mkdir(parents=True)
    listed = [one["choice"]["model"] for one in page.menu()["local"][1:]]
    assert listed == ["smollm2-135m-medusa2"]
    assert page.menu()["local"][1]["title"] == "SmolLM2-135M-Instruct, trained with its heads (Medusa-2)"


# --------------------------------------------------------------------------------------------------- what a choice does


@pytest.mark.parametrize(("choice", "said"), [
    ({}, "Name a model or heads first."), ({"model": "  "}, "Name a model"), ({"model": "x", "dtype": "fp8"}, "“fp8”"),
    ({"model": 7}, "cannot take"), ({"model": "x" * 501}, "cannot take"),
    ({"model": "vicuna-33b-v1.3"}, "does not fit")])
def test_a_choice_that_makes_no_sense_is_one_sentence_and_loads_nothing(page, choice, said):
    old = page.host.model
    view = page.act("use", **choice)
    assert said in view["status"]["notice"] and "\n" not in view["status"]["notice"]
    assert page.host.model is old and not view["status"]["loading"]


def test_heads_alone_keep_model_and_dtype(page, folders):
    page.host.options = {**page.host.options, "dtype": "fp32"}
    page.host.model.options = page.host.options
    backbone = page.host.model.engine.backbone
    used(page, heads=str(folders.more))
    assert page.host.model.engine.backbone is backbone and page.host.options["dtype"] == "fp32"
    used(page, model=str(folders.model), heads=str(folders.more))
    assert page.host.options["dtype"] == "auto", "as the server was started"


def test_a_fault_is_told_until_the_next_action_and_again_when_it_comes_again(page):
    for _ in range(2):
        page.act("use", model="/nowhere")
        until(lambda: page.host.status.fault, "the sentence")
        assert "no folder here" in page.act("poll")["status"]["notice"]
        assert "stays in use" in page.act("poll")["status"]["notice"]
    page.act("start", prompt="abc")
    assert "stays in use" not in page.act("poll")["status"]["notice"]


def test_heads_whose_model_nobody_knows_are_kept_until_it_is_named(page, folders, tmp_path):  # field case A17
    lone = saved_heads(tmp_path / "lone", width=8)
    config = json.loads((lone / "config.json").read_text())
    (lone / "config.json").write_text(json.dumps(config | {"base_model_name_or_path": "N/A"}))
    old = page.host.model
    page.act("use", heads=str(lone))
    until(lambda: page.host.status.fault, "the sentence")
    notice = page.act("poll")["status"]["notice"]
    assert notice.startswith("Name the model of these heads too, under “model”, where they are kept: ")
    assert "[8, 8]" in notice and "[64, 64]" in notice and notice.endswith("The running model stays in use.")
    assert page.host.model is old and page.menu()["astray"] == {"heads": str(lone), "model": ""}
    other = page.act("poll", "two")["status"]["notice"]
    assert other.startswith("The heads tensor") and "stays in use" in other
    assert json.loads(page.sessions.models("two"))["astray"] is None, "what one person typed is no other's"
    page.act("step")  # the sentence was read; the heads still wait
    assert page.menu()["astray"]["heads"] == str(lone)
    page.act("use", model="/nowhere")
    until(lambda: page.host.status.fault, "another sentence")
    assert page.menu()["astray"] is None
    page.act("use", heads=str(saved_heads(tmp_path / "named", width=8)))
    until(lambda: page.host.status.astray, "the heads")
    assert page.menu()["astray"]["model"] == "tiny", "their config names it"
    used(page, heads=str(folders.more))
    assert page.menu()["astray"] is None


def test_a_server_started_with_heads_of_another_model_asks_for_theirs(folders, monkeypatch, tmp_path):
    lone = saved_heads(tmp_path / "lone", width=8)
    for locked in (False, True):
        sessions = hosts.Sessions({"model": str(folders.model), "heads": str(lone), "device": "cpu"}, locked=locked)
        sessions.host.load()
        menu = json.loads(sessions.models("one"))
        assert sessions.host.status.state == "error"
        assert menu["astray"] == (None if locked else {"heads": str(lone), "model": "tiny"})


def test_a_published_model_brings_template_and_tree_and_the_old_one_is_released(page, folders, tmp_path, monkeypatch):
    page.act("start", prompt="abc")
    page.act("knob", size=5)
    gone = weakref.ref(page.host.model.engine.backbone)
    preset = replace(VICUNA, backbone="a/base", heads="a/heads", sizes=replace(VICUNA.sizes, layers=1))
    for names in (sources.PUBLISHED, PUBLISHED):
        monkeypatch.setitem(names, preset.name, preset)
    with serve(monkeypatch, tmp_path, {"a/base": folders.other, "a/heads": folders.heads}):
        used(page, model=preset.name)
    assert page.host.options["dtype"] == "fp32", "the first that fits"
    assert next(one for one in page.menu()["published"] if one["title"] == preset.title)["running"]
    view = page.act("step")
    assert view["status"]["text"] == "Vicuna 7B v1.3 · CPU, " + view["status"]["text"].partition("CPU, ")[2]
    assert view["status"]["text"].endswith("is ready: Start uses it") and view["status"]["title"].startswith("model ·")
    view = page.act("start", prompt="abc")
    session = page.sessions.session("one")
    tree = published()["vicuna_7b_stage1"].trimmed(3)
    assert session.entry.step.shape.fingerprint == tree.fingerprint and "3 heads" in view["status"]["notice"]
    assert "USER: abc ASSISTANT:" in session.model.engine.codec.decode(session.prompt_ids)
    shown = "".join(chip["t"] for chip in view["text"]["chips"])
    assert "abc" in shown and "ASSISTANT:" in shown, "texts are the new tokenizer's"
    until(lambda: gc.collect() is not None and gone() is None, "the end of the old model")
    used(page, model=str(folders.model), heads=str(folders.more))
    page.act("start", prompt="abc")
    assert session.knobs.own is None and session.knobs.walls == Walls()


# ------------------------------------------------------------------------------------------------------ a locked server


def test_a_locked_server_keeps_model_and_files_to_itself(folders, monkeypatch, tmp_path):
    monkeypatch.setenv("MEDUSA_VIZ_CACHE", str(tmp_path))
    data = token_file(tmp_path / "data" / "some.npz")
    own = saved_heads(tmp_path / "runs" / "own")
    (own / "run.json").write_text(json.dumps({"state": "broken", "sentence": f"{data} is no token file."}))
    page = serving(folders, monkeypatch, locked=True)
    try:
        assert "keeps its model" in page.act("use", model="smollm2-135m")["status"]["notice"]
        menu = page.menu()
        assert menu["locked"] and str(folders.model.parent) not in json.dumps(menu)
        train = {"recipe": "medusa1", "model": str(folders.model), "settings": {}, "data": str(data)}
        asked = {"start": train, "resume": {"run": "own"}, "open_path": {"path": str(folders.heads)},
                 "open": {"run": "own"}, "use": {"run": "own"}, "stop": {"run": "own"}}
        for action, payload in asked.items():
            view = json.loads(page.sessions.pages.act("one", "train", action, payload))
            assert "no training for visitors" in view["notice"] and view["locked"] and view["form"] is None
            assert view["runs"] == [] and view["run"] is None and str(tmp_path) not in json.dumps(view)
        assert page.act("start", prompt="abc")["steps"]["count"] == 1
    finally:
        page.sessions.shutdown()


def test_the_servers_options_reach_host_and_engine(monkeypatch):
    import app
    from medusa_viz.ui import running

    options = app.parse(["--compile", "--lock-model", "--max-sessions", "3", "--max-nodes", "9"])
    assert options.limits == ServerLimits(3, 9) and app.parse([]).limits == ServerLimits(16, 0)
    assert options.lock_model and options.compile and not app.parse([]).lock_model
    asked = []
    monkeypatch.setattr(running, "load", lambda options, report, beside: asked.append(options) or 1 / 0)
    host = hosts.Host({"compile": True})
    assert host.max_nodes(None) == 256
    host.load()
    assert asked[0]["compile"] is True and host.status.state == "error"


@pytest.mark.parametrize(("limits", "most"), [(None, 256), (ServerLimits(max_nodes=9), 9)])
def test_the_most_nodes_of_a_step_are_a_setting(folders, limits, most):
    sessions = hosts.Sessions({"model": str(folders.model), "heads": str(folders.heads), "device": "cpu"},
                              limits=limits)
    sessions._opening = None
    sessions.host.load()
    try:
        def act(action, **payload):
            return json.loads(sessions.act("one", action, payload))

        act("hello")
        view = act("start", prompt="abc")
        assert view["run"]["can"]["step"]
        assert sessions.session("one").knobs.walls.size == min(16, most), "the first Start is no refusal"
        act("knob", top_s=[10, 10, 10], size=most)
        view = act("start", prompt="abc")
        assert not view["run"]["verify_blocked"] and view["run"]["can"]["step"]
        view = act("knob", size=most + 1)
        assert f"{most + 1:,}" in view["run"]["verify_blocked"] and f"{most:,}" in view["run"]["verify_blocked"]
        assert not view["run"]["can"]["step"]
    finally:
        sessions.shutdown()
