"""The shipped Medusa-2 preset: adapter and heads load together, and decode what the adapted backbone writes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from medusa_viz.decoding import engine as engines
from medusa_viz.decoding.check import equals_greedy
from medusa_viz.decoding.decoder import decode
from medusa_viz.decoding.settings import Acceptance
from medusa_viz.models import backbone as backbones
from medusa_viz.models import device
from medusa_viz.models.presets import MEDUSA2, REPOSITORY, heads_folder
from medusa_viz.training import data
from medusa_viz.tuning.builders import sparse
from medusa_viz.tuning.ranking import ranking

pytestmark = pytest.mark.model
PROMPTS = ("Why is the sky blue?", "Give me five tips for learning a new language.")


@pytest.fixture(scope="module")
def engine(model_folder):
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield engines.load(engines.EngineOptions(MEDUSA2.name, device="cpu"))
    torch.set_num_threads(threads)


def test_the_preset_says_what_it_is_and_drafts_well(engine):
    trained = engine.loaded.config.trained
    assert engine.loaded.adapter == heads_folder(MEDUSA2) and "adapter" in engine.title
    assert trained["recipe"] == "medusa2" and trained["perplexity"]["after"] > 1
    tokens = steps = 0
    for text in PROMPTS:
        ids = engine.codec.encode_prompt(text)
        run = list(decode(engine.backbone, engine.drafter, ids, sparse(engine.accuracy, 15), Acceptance(), 48))
        found = [token for step in run for token in step.tokens]
        difference = equals_greedy(engine.backbone, ids, found)
        assert difference is None or difference.tie
        tokens, steps = tokens + len(found), steps + len(run)
    assert tokens / steps > 1.3


def test_the_backbone_stays_near_the_original_on_its_held_out_replies(engine, model_folder):
    replies = data.load([REPOSITORY / "assets" / "prompts" / "replies-smollm2-135m.npz"])
    chosen = np.zeros(len(replies), bool)
    chosen[np.flatnonzero(replies.split == data.HELD_OUT)[::8]] = True
    some = replies.select(chosen)
    original = backbones.load(model_folder, device.choose("cpu", "fp32"), "original")
    before, after = (_perplexity(backbone, engine, some) for backbone in (original, engine.backbone))
    assert 1 < before < after < 1.06 * before  # 1.03 over all 64 replies; eight of them scatter


def _perplexity(backbone, engine, replies) -> float:
    job = ranking(backbone, engine.drafter, replies)
    while True:
        try:
            next(job)
        except StopIteration as done:
            return done.value.perplexity
