"""The model card says of the data what their files say, and no more."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from medusa_viz.models import checkpoints
from medusa_viz.training import data, recipe
from tests.tiny_training import SETTINGS, VOCAB, job_in, random_replies

SHORT = replace(SETTINGS, passes=1)
OWN = ("self-distillation", "Split by prompt", "no prompt is on both sides", "is the output of tiny")


def card_of(folder, replies, settings=SHORT) -> str:
    job = job_in(folder, replies, settings)
    recipe.run(job)
    return (job.out / "README.md").read_text()


def test_replies_that_the_backbone_wrote_are_called_its_own_and_their_temperatures_stand_as_they_are(tmp_path):
    heats = np.array([0, 0.25, 0.2, 0.7] * 3, np.float16).astype(np.float32)  # as a token file gives them
    split = np.arange(12) >= 8
    own = replace(random_replies(), self_written=True, temperature=heats, split=split.astype(np.uint8))
    card = card_of(tmp_path, own)
    assert all(said in card for said in OWN)
    assert "0 = greedy: 0.0 (2 replies), 0.2 (2 replies), 0.25 (2 replies), 0.7 (2 replies)." in card
    assert "greedy replies were used" not in card
    greedy = card_of(tmp_path / "greedy", own, replace(SHORT, replies="greedy"))
    assert "= greedy: 0.0 (2 replies)." in greedy
    assert "Of the training part only the greedy replies were used." in greedy


def test_text_from_elsewhere_is_not_called_the_backbone_s_own(tmp_path):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "given.npz", ids=rng.integers(0, VOCAB, 240), offsets=np.arange(9) * 30,
             split=np.arange(8) % 4 == 0)
    card = card_of(tmp_path, data.load([tmp_path / "given.npz"]))
    assert not any(said in card for said in OWN)
    assert "who wrote it is not known" in card and "do not say where all prompts end" in card
    assert "from this text; the licences of both apply" in card


@pytest.mark.parametrize(("shared", "said"), [(0, "Split by prompt."), (2, "Prompts on both sides of the split: 2.")])
def test_prompts_on_both_sides_are_counted(tmp_path, shared, said):
    replies = random_replies()
    held_out, training = np.flatnonzero(replies.split), np.flatnonzero(replies.split == 0)
    for one, other in list(zip(held_out, training))[:shared]:
        replies.sequence(one)[:6] = replies.sequence(other)[:6]
    card = card_of(tmp_path, replies)
    assert said in card and ("no prompt is on both sides" in card) == (shared == 0)


def test_nothing_is_said_of_held_out_replies_where_there_are_none(tmp_path):
    replies = random_replies()
    card = card_of(tmp_path, replace(replies, split=np.zeros_like(replies.split)))
    assert "Nothing is held out." in card and "The held-out replies" not in card


def test_a_token_file_says_that_a_model_wrote_it_only_with_kinds_and_temperatures(tmp_path):
    arrays = {"ids": np.arange(6), "offsets": [0, 6], "reply_start": [2], "temperature": [0.0], "kind": [0],
              "kinds": ["x"]}
    np.savez(tmp_path / "own.npz", **arrays)
    own = data.load([tmp_path / "own.npz"])
    np.savez(tmp_path / "other.npz", **{name: arrays[name] for name in ("ids", "offsets", "reply_start")})
    both = data.load([tmp_path / "own.npz", tmp_path / "other.npz"])
    assert own.self_written and own.select(np.array([True])).self_written and not both.self_written


def test_heads_of_an_early_end_have_a_card_too(tmp_path):
    job = job_in(tmp_path, stopped=lambda: True)
    with pytest.raises(recipe.TrainingError):
        recipe.run(job)
    assert (job.out / "README.md").is_file() and checkpoints.load(job.out).config.trained["stopped_at_step"] == 1
