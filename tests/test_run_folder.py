"""What the folders that `train` is given rule out: one sentence, before any model is loaded."""

import pytest
import torch
from tiny_page import WIDTH, saved_heads, saved_model, token_file

from medusa_viz import cli
from medusa_viz.models import device
from medusa_viz.models.adapter import ADAPTER_WEIGHTS, Adapter
from medusa_viz.models.backbone import load
from medusa_viz.training.run_folder import LOG_NAME, TrainingError, check_folder, checkpoint_of
from medusa_viz.training.settings import settings_for

ALONE, JOINT, DIRECT = (settings_for(recipe, {}) for recipe in ("medusa1", "medusa2", "direct"))


def begun(folder, *stages):
    """A folder with the log of a run and checkpoints of its stages, 1 and 2, made with these settings."""
    folder.mkdir()
    (folder / LOG_NAME).write_text("")
    for stage, settings in enumerate(stages, start=1):
        if settings:
            torch.save({"settings": settings.decisive}, checkpoint_of(folder, stage))
    return folder


@pytest.mark.parametrize(("stages", "settings"), [
    ((ALONE,), ALONE), ((JOINT.first_stage,), JOINT), ((JOINT.first_stage, JOINT), JOINT), ((None, DIRECT), DIRECT),
    ((), ALONE)])  # without a checkpoint it begins again
def test_a_run_goes_on_with_its_own_settings(tmp_path, stages, settings):
    check_folder(begun(tmp_path / "run", *stages), settings, resume=True)


@pytest.mark.parametrize(("stages", "settings", "changed"), [
    ((ALONE,), settings_for("medusa1", {"passes": 9, "seed": 1}), "passes, seed"), ((ALONE,), JOINT, "recipe"),
    ((JOINT.first_stage,), settings_for("medusa2", {"rank": 4}), "rank"), ((None, DIRECT), ALONE, "recipe"),
    ((JOINT.first_stage, JOINT), settings_for("medusa2", {"passes": 3}), "passes"),
    ((JOINT.first_stage,), ALONE, "recipe")])
def test_a_run_of_other_settings_is_refused(tmp_path, stages, settings, changed):
    with pytest.raises(TrainingError, match=rf"other settings \({changed}\)"):
        check_folder(begun(tmp_path / "run", *stages), settings, resume=True)


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Runs `train`, which must end before it loads a model."""
    words = ["train", "--model", saved_model(tmp_path / "base"), "--data", token_file(tmp_path / "data.npz"), "--out",
             tmp_path / "out", "--device", "cpu"]
    backbone = load(tmp_path / "base", device.choose("cpu", "fp32"), packed=False)
    adapted = saved_heads(tmp_path / "adapted")
    Adapter(backbone.model, 2, 4, "tiny").save(adapted)
    monkeypatch.setattr("medusa_viz.models.backbone.load", lambda *_, **__: pytest.fail("loaded"))
    return lambda *more: cli.main([str(word) for word in (*words, *more)])


def refused(capsys) -> str:
    error = capsys.readouterr().err.strip()
    assert error.startswith("python -m medusa_viz train: ") and "\n" not in error
    return error


def test_what_is_wrong_in_the_folder_is_said_before_a_model_loads(train, tmp_path, capsys):
    assert train("--resume") == 2
    assert "holds no run to go on with" in refused(capsys)
    folder = begun(tmp_path / "out", ALONE)
    assert train() == 2
    assert "add --resume" in refused(capsys)
    assert train("--resume", "--lr", "0.5") == 2
    assert "other settings (lr)" in refused(capsys)
    checkpoint_of(folder, 1).write_bytes(b"no checkpoint")
    assert train("--resume") == 2
    assert "cannot be read" in refused(capsys)


def test_heads_to_start_from_are_read_before_a_model_loads(train, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    for folder, said in ((tmp_path / "empty", "no Medusa heads"), (tmp_path / "none", "no Medusa heads"),
                         (saved_heads(tmp_path / "narrow", width=WIDTH // 2), "this backbone needs")):
        assert train("--init", folder) == 2
        assert said in refused(capsys)


def test_an_adapter_to_start_from_is_read_before_a_model_loads(train, tmp_path, capsys):
    init = ["--init", tmp_path / "adapted"]
    for words in (["--recipe", "medusa2", "--rank", "2"], []):  # it fits, and the heads alone need none
        with pytest.raises(pytest.fail.Exception, match="loaded"):
            train(*init, *words)
    capsys.readouterr()
    assert train(*init, "--recipe", "medusa2", "--rank", "3") == 2
    assert "name the rank that it was trained with" in refused(capsys)
    (tmp_path / "adapted" / ADAPTER_WEIGHTS).write_bytes(b"no tensors")
    assert train(*init, "--recipe", "direct") == 2
    assert "adapter in" in (error := refused(capsys)) and "cannot be read" in error
