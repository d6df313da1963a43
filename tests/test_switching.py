"""Another model or other heads while the page runs: what began on the old ones ends on them, then they go."""

import gc
import json
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
from fake_hub import serve
from tiny_page import PATIENCE, saved_heads, saved_model, until

from medusa_viz.models import memory
from medusa_viz.ui import host as hosts
from medusa_viz.ui import running


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    facts = {"recipe": "medusa1", "init": "first stretch", "data": "<b>mine</b>.npz", "tokens": 1234,
             "date": "2026-01-02", "tokens_per_step": {"15": 1.5}, "held_out_top1": [0.31, 0.2, 0.1, 0.05]}
    return SimpleNamespace(model=saved_model(root / "model"), other=saved_model(root / "other"),
                           heads=saved_heads(root / "heads"), more=saved_heads(root / "more", 4, 1, facts),
                           foreign=saved_heads(root / "foreign", width=8))


@pytest.fixture
def page(folders):
    sessions = hosts.Sessions({"model": str(folders.model), "heads": str(folders.heads), "device": "cpu"})
    sessions._opening = None
    sessions.host.load()
    assert sessions.host.status.state == "ready", sessions.host.status.detail
    yield SimpleNamespace(
        sessions=sessions, host=sessions.host,
        act=lambda action, token="one", **payload: json.loads(sessions.act(token, action, payload)))
    sessions.shutdown()


def switched(page, **options):
    page.host.use(**options)
    until(lambda: page.host.status.coming is None and page.host.status.state == "ready", "the switch")


def test_other_heads_share_the_backbone_and_a_run_ends_on_those_it_began_with(page, folders):
    old = page.host.model
    page.act("start", prompt="abc")
    page.act("step")
    switched(page, heads=str(folders.more))
    new = page.host.model
    assert new is not old and new.engine.backbone is old.engine.backbone and new.worker is old.worker
    view = page.act("step")
    assert view["knobs"]["heads"] == 3 and "Start uses them" in view["status"]["text"]
    assert view["provenance"]["line"] == "There is no record of their training."
    late = page.act("start", "late", prompt="abc")
    assert late["knobs"]["heads"] == 4 and late["status"]["text"] == "ready"
    view = page.act("start", prompt="abc")
    assert view["knobs"]["heads"] == 4 and len(view["heads"]["head"]) == 4
    assert view["provenance"]["line"] == "Trained by medusa1 · 2026-01-02"
    told = {row["label"]: row["value"] for row in view["provenance"]["rows"]}
    assert told["data"] == "<b>mine</b>.npz · 1,234 reply tokens" and told["began from"] == "first stretch"
    assert told["runs on"].startswith("CPU, ") and told["runs on"].endswith("· fp32 (fp32 is exact and fastest on cpu)")
    assert told["linears"] == new.engine.backbone.linears and told["step"] == new.engine.backbone.step
    assert told["file"] == "medusa layout, 8 tensors used, 0 unused, 0 missing"
    assert told["draft from"] == "shared output matrix (the backbone's LM head), all 260 rows"  # field case A13
    assert told["note"] == "the heads were trained on tiny, and may draft worse on model"
    assert told["held-out top-1"] == "0.310 · 0.200 · 0.100 · 0.050" and told["tokens per step"].startswith("1.50")


def test_notices_of_loading_are_shown_to_whom_the_server_belongs(page):
    page.act("start", prompt="abc")
    page.host.model.engine.loaded.report.notices[:] = ["the table /srv/<b>x lies beside the heads"]

    def notes():
        rows = page.act("poll")["provenance"]["rows"]
        return [row["value"] for row in rows if row["label"] == "note"]

    assert notes() == ["the table /srv/<b>x lies beside the heads"]
    page.host.locked = True
    assert notes() == [], "visitors are told no files of the server"


def test_an_old_model_goes_when_its_last_run_ends(page, folders, monkeypatch):
    given, real = [], memory.give_back
    monkeypatch.setattr(memory, "give_back", lambda: given.append(real()))
    page.act("start", prompt="abc")
    page.act("start", "two", prompt="abc")
    gone, thread = weakref.ref(page.host.model.engine.backbone), page.host.model.worker._thread
    switched(page, model=str(folders.other))
    assert page.act("step")["steps"]["index"] == 1
    page.act("start", prompt="abc")
    gc.collect()
    assert gone() is not None, "a run of another visitor still needs it"
    page.sessions.close("two")
    # A check of the last step may run on its worker until then.
    until(lambda: gc.collect() is not None and gone() is None, "the end of the old model")
    thread.join(PATIENCE)
    assert not thread.is_alive(), "its worker ended with it"
    until(lambda: given, "its memory")
    assert page.act("step")["steps"]["index"] == 1


@pytest.mark.parametrize("options", [{"heads": "/nowhere/<b>"}, {"model": "/nowhere"}, {"heads": "foreign"}])
def test_what_cannot_be_loaded_leaves_the_running_model(page, folders, options):
    old = page.host.model
    page.act("start", prompt="abc")
    page.host.use(**{name: str(getattr(folders, value, value)) for name, value in options.items()})
    until(lambda: page.host.status.fault, "the sentence")
    assert page.host.model is old and page.host.options["heads"] == str(folders.heads)
    view = page.act("step")
    assert view["status"]["notice"].endswith("The running model stays in use.") and view["steps"]["index"] == 1
    assert view["run"]["can"]["step"] and not view["status"]["loading"]
    switched(page, heads=str(folders.more))
    assert not page.act("poll")["status"]["notice"]


def test_one_model_is_loaded_at_a_time_and_the_page_shows_it(page, folders, monkeypatch):
    go, real = threading.Event(), running.load

    def slow(options, report, beside):
        report("convert", 0.5, "half")
        go.wait(PATIENCE)
        return real(options, report, beside)

    monkeypatch.setattr(running, "load", slow)
    page.act("start", prompt="abc")
    page.host.use(heads=str(folders.more))
    with pytest.raises(hosts.ActionError):
        page.host.use(heads=str(folders.more))
    until(lambda: page.host.status.coming.fraction, "the first word of it")
    view = page.act("step")
    assert view["status"]["state"] == "ready" and view["status"]["loading"] and view["status"]["fraction"] == 0.5
    assert "stays in use" in view["status"]["text"]
    go.set()
    until(lambda: page.host.status.coming is None, "the switch")


def with_adapter(folder, base):
    """Heads with a LoRA adapter that changes what the backbone says."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    saved_heads(folder)
    tuned = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=2, target_modules="all-linear"))
    for name, parameter in tuned.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    tuned.save_pretrained(folder)
    return folder


def test_an_adapter_is_never_left_out_nor_kept_wherever_its_heads_lie(page, folders, tmp_path, monkeypatch):
    adapted = with_adapter(tmp_path / "adapted", folders.model)
    plain = page.host.model.engine.backbone
    ids = torch.tensor([[1, 2, 3]])
    with serve(monkeypatch, tmp_path, {"a/adapted": adapted, "a/plain": folders.more}) as sent:
        switched(page, heads="a/adapted")
        tuned = page.host.model.engine.backbone
        assert {"adapter_config.json", "adapter_model.safetensors"} <= set(sent)
        assert tuned is not plain and page.host.model.title.startswith("model + adapter")
        assert not torch.allclose(tuned.model(ids).logits, plain.model(ids).logits, atol=1e-3)
        switched(page, heads="a/plain")
    back = page.host.model.engine.backbone
    assert back is not tuned and torch.equal(back.model(ids).logits, plain.model(ids).logits)
    switched(page, heads=str(folders.heads))
    assert page.host.model.engine.backbone is back


def test_a_server_without_a_model_takes_the_first_that_loads(folders):
    sessions = hosts.Sessions({"model": "/nowhere", "heads": str(folders.heads), "device": "cpu"})
    sessions.host.load()
    assert sessions.host.status.state == "error"
    sessions.host.use(model=str(folders.model))
    until(lambda: sessions.host.status.state == "ready", "the model")
    sessions.shutdown()
