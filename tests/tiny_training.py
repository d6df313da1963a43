"""What the tests of training share: made-up replies, a tiny backbone, states that name their token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from medusa_viz.models import device
from medusa_viz.models.backbone import Backbone
from medusa_viz.models.heads import MedusaHeads
from medusa_viz.training import data, objectives, recipe
from medusa_viz.training.heads_task import HeadsTask, Material
from medusa_viz.training.settings import TrainSettings
from medusa_viz.training.trainer import Trainer

VOCAB, WIDTH, HEADS = 48, 16, 4
CPU = torch.device("cpu")


def replies_of(sequences, reply_start=2, split=None, temperature=None, kind=None) -> data.Replies:
    n = len(sequences)
    lengths = [len(ids) for ids in sequences]
    return data.Replies("made up", np.concatenate([np.asarray(ids, np.int32) for ids in sequences]),
                        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
                        np.full(n, reply_start, np.int32),
                        np.zeros(n, np.float32) if temperature is None else np.asarray(temperature, np.float32),
                        np.zeros(n, np.uint8) if kind is None else np.asarray(kind, np.uint8),
                        (data.SELF_SYNTHESISED, "writing"),
                        np.zeros(n, np.uint8) if split is None else np.asarray(split, np.uint8))


def random_replies(n=12, length=30, seed=0) -> data.Replies:
    rng = np.random.default_rng(seed)
    return replies_of(rng.integers(0, VOCAB, (n, length)), 6, split=np.arange(n) % 4 == 0, kind=np.arange(n) % 2,
                      temperature=0.7 * (np.arange(n) % 3 == 1))


def tiny_backbone(seed=0) -> Backbone:
    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=2,
                         num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=256)
    return Backbone(LlamaForCausalLM(config), device.choose("cpu", "fp32"), "tiny")


def stub_material(sequence, draft_ids=None, heads=HEADS) -> tuple[Material, torch.nn.Linear]:
    """Hidden states that name the last token (one row of an orthogonal basis each), and an LM head that reads them."""
    torch.manual_seed(0)
    basis = torch.linalg.qr(torch.randn(VOCAB, VOCAB))[0]
    lm_head = torch.nn.Linear(VOCAB, VOCAB, bias=False)
    lm_head.weight.data = basis.clone()
    replies = replies_of([sequence])
    labels = data.make_labels(replies, heads, draft_ids, VOCAB)
    states = (4 * basis)[torch.from_numpy(replies.ids).long()].half().numpy()
    rows = objectives.output_rows(lm_head, draft_ids, torch.float32)
    return Material(states, labels, rows, draft_ids, None, "stub"), lm_head


SETTINGS = TrainSettings(layers=1, distill=0.0, batch=64, passes=3, warmup=2, lr=3e-3, log_every=1, checkpoint_every=2)


def job_in(folder: Path, replies=None, settings=SETTINGS, backbone=None, name="medusa1", **others) -> recipe.Job:
    return recipe.Job(name, backbone or tiny_backbone(), "tiny", replies or random_replies(), [0, 1],
                      replace(settings, draft_vocabulary=40), folder / "out", folder / "cache", **others)


def heads_trainer(material: Material, settings: TrainSettings, folder: Path) -> Trainer:
    """A Medusa-1 run over stored states; its heads are `.task.module`."""
    module = MedusaHeads(settings.heads, material.hidden.shape[1], settings.layers, material.draft_ids)
    return Trainer(HeadsTask(material, settings, module), settings, folder, CPU)


def trained(material: Material, settings: TrainSettings, folder: Path) -> MedusaHeads:
    run = heads_trainer(material, settings, folder)
    run.run()
    return run.task.module
