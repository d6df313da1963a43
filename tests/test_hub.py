"""The hub: only what is named comes over, and whatever goes wrong is one sentence. huggingface_hub runs for real,
against a hub of our own."""

import errno
import gc
import json

import httpx2
import pytest
import torch
from fake_hub import point_to, serve
from huggingface_hub import HfApi, errors
from safetensors.torch import save_file

from medusa_viz.models import checkpoints, hub
from medusa_viz.models.checkpoints import HeadsConfig
from medusa_viz.models.heads import HeadsError, MedusaHeads
from medusa_viz.models.hub import HubError


@pytest.fixture
def heads(tmp_path):
    checkpoints.save(tmp_path / "heads", MedusaHeads(2, 8), HeadsConfig(medusa_num_heads=2))
    return tmp_path / "heads"


@pytest.fixture
def sharded(tmp_path):
    """A full model in two shards, heads in the second one alone, beside files that nobody needs."""
    folder = tmp_path / "sharded"
    folder.mkdir()
    parts = {"model-1.safetensors": {"model.embed_tokens.weight": torch.ones(16, 8)},
             "model-2.safetensors": {f"medusa_head.0.0.linear.{part}": torch.ones(8, 8)[0 if part == "bias" else ...]
                                     .clone() for part in ("weight", "bias")}}
    for name, tensors in parts.items():
        save_file(tensors, folder / name)
    index = {key: name for name, tensors in parts.items() for key in tensors}
    (folder / hub.INDICES[0]).write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text('{"model_type": "llama", "hidden_size": 8, "vocab_size": 16}')
    (folder / "photo.png").write_bytes(bytes(9))
    return folder


def refusal(call, *arguments, kind=HubError):
    with pytest.raises(kind) as error:
        call(*arguments)
    message = str(error.value)
    assert "\n" not in message and message.endswith(".") and len(message) < 300
    return message


# ---------------------------------------------------------------------------------------------------------- what comes


def test_heads_come_by_their_id_and_stay_without_a_network(tmp_path, heads, monkeypatch):
    with serve(monkeypatch, tmp_path, {"a/heads": heads}) as sent:
        loaded = checkpoints.load("a/heads", 8, 16)
        assert loaded.module.heads == 2 and loaded.source == "a/heads"
        assert sorted(sent) == [checkpoints.CONFIG_NAME, checkpoints.WEIGHTS_NAME]
    point_to(monkeypatch, tmp_path, "http://127.0.0.1:9")  # nothing listens there
    assert checkpoints.load("a/heads", 8, 16).module.heads == 2


def test_safetensors_are_fetched_and_a_pickle_beside_them_is_not(tmp_path, heads, monkeypatch):
    torch.save({}, heads / checkpoints.PICKLE_NAME)
    with serve(monkeypatch, tmp_path, {"a/heads": heads}) as sent:
        checkpoints.load("a/heads", 8, 16)
    assert checkpoints.PICKLE_NAME not in sent


def test_only_the_shards_with_heads_are_fetched_for_them(tmp_path, sharded, monkeypatch):
    reports = []
    with serve(monkeypatch, tmp_path, {"a/model": sharded}) as sent:
        loaded = checkpoints.load("a/model", 8, 16, report=lambda *call: reports.append(call))
        assert sorted(sent) == ["config.json", "model-2.safetensors", hub.INDICES[0]]
        hub.weights("a/model", hub.small_files("a/model"), lambda *call: reports.append(call))
        assert "model-1.safetensors" in sent and "photo.png" not in sent
    assert loaded.module.heads == 1
    assert reports and all(phase == "hub" and 0 <= share <= 1 and "a/model" in text for phase, share, text in reports)


def test_a_fetch_that_ended_reports_nothing_more(tmp_path, heads, monkeypatch):
    reports = []
    gc.disable()
    try:
        with serve(monkeypatch, tmp_path, {"a/heads": heads}):
            hub.fetch("a/heads", ["*"], lambda *call: reports.append(call))
        at_end = len(reports)
        gc.collect()  # closes the bars that huggingface_hub left open
    finally:
        gc.enable()
    assert 0 < at_end == len(reports), "the page would show a download that never ends, and refuse every other model"


def test_a_model_without_heads_is_refused_by_its_header(tmp_path, monkeypatch):
    folder = tmp_path / "plain"
    folder.mkdir()
    save_file({"model.embed_tokens.weight": torch.ones(4, 4)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    with serve(monkeypatch, tmp_path, {"a/plain": folder}) as sent:
        assert "no Medusa heads at a/plain" in refusal(checkpoints.load, "a/plain", 8, 16, kind=HeadsError)
    assert sent == ["config.json"]


def test_a_repository_without_a_model_is_refused(tmp_path, heads, monkeypatch):
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "model.gguf").write_bytes(b"GGUF")
    with serve(monkeypatch, tmp_path, {"a/gguf": tmp_path / "gguf", "a/heads": heads}):
        assert "GGUF" in refusal(hub.small_files, "a/gguf")
        assert "no weights" in refusal(hub.weights, "a/heads", hub.small_files("a/heads"))


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": "../b"}}', "{}"])
def test_a_broken_index_is_one_sentence(tmp_path, text):
    (tmp_path / hub.INDICES[0]).write_text(text)
    assert hub.INDICES[0] in refusal(hub.shards_of, tmp_path)


def test_what_reads_as_an_id():
    assert hub.is_id("owner/name-1.0") and not hub.is_id("folder") and not hub.is_id("/a/b") and not hub.is_id("a/b/c")


# ----------------------------------------------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize(("answer", "said"), [
    (401, "not on the hub, or it is private"), (403, "whom its owner admitted"), (500, "HTTP status 500"),
    (0, "was interrupted")])
def test_what_the_hub_refuses_is_one_sentence(tmp_path, heads, monkeypatch, answer, said):
    monkeypatch.setattr("time.sleep", lambda _: None)  # huggingface_hub waits between its tries
    with serve(monkeypatch, tmp_path, {"a/b": answer, "a/heads": heads}):
        message = refusal(hub.fetch, "a/b", ["*"])
        assert said in message and "a/b" in message
        assert refusal(checkpoints.load, "a/b", 8, 16, kind=HeadsError) == message


def test_no_network(tmp_path, monkeypatch):
    point_to(monkeypatch, tmp_path, "http://127.0.0.1:9")
    monkeypatch.setattr("time.sleep", lambda _: None)
    assert "cannot be reached" in refusal(hub.fetch, "a/b", ["*"])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in refusal(hub.fetch, "a/c", ["*"])


def test_the_page_asks_for_what_a_person_named_and_for_nothing_else(tmp_path, heads, monkeypatch):
    with serve(monkeypatch, tmp_path, {"a/heads": heads}):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        monkeypatch.setenv("MEDUSA_VIZ_HUB", "named")
        assert checkpoints.load("a/heads", 8, 16).module.heads == 2
        with pytest.raises(errors.OfflineModeIsEnabled):
            HfApi().model_info("a/heads")


def test_a_full_disk_names_the_folder(tmp_path, heads, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with serve(monkeypatch, tmp_path, {"a/heads": heads}):
        monkeypatch.setattr("huggingface_hub.file_download.http_get", full)
        assert str(tmp_path / "hub-cache") in refusal(hub.fetch, "a/heads", ["*"])


def _http(kind, status=403):
    request = httpx2.Request("GET", "https://hub/a/b")
    return kind("many\nlines", response=httpx2.Response(status, request=request))


@pytest.mark.parametrize(("error", "said"), [
    (_http(errors.DisabledRepoError), "disabled"), (_http(errors.GatedRepoError), "hf auth login"),
    (_http(errors.RepositoryNotFoundError), "private"), (_http(errors.HfHubHTTPError, 429), "429"),
    (errors.HFValidationError("x"), "owner/name"), (errors.LocalEntryNotFoundError("no\nfile"), "no"),
    (_http(errors.RemoteEntryNotFoundError, 404), "lacks a file"), (httpx2.ReadTimeout("slow"), "start again"),
    (OSError("Consistency check failed: file should be"), "start again"), (OSError("odd\nthing"), "(odd)"),
    (ConnectionResetError("peer"), "interrupted"), (OSError(errno.ENOSPC, "full"), "does not fit")])
def test_every_kind_of_fault_is_one_sentence(error, said, monkeypatch):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(hub, "snapshot_download", fail)
    assert said in refusal(hub.fetch, "a/b", ["*"])
