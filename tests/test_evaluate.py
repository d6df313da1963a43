"""Scores of heads on held-out replies, and replay."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch

from medusa_viz.decoding.tree import from_paths
from medusa_viz.models.heads import Drafter, MedusaHeads
from medusa_viz.models.presets import heads_folder, shipped
from medusa_viz.training import evaluate, hidden, objectives
from medusa_viz.tuning import accuracy, builders
from medusa_viz.tuning.replay import NOT_RANKED, RankTable, replay, subset
from tests.tiny_training import VOCAB, WIDTH, random_replies, replies_of, tiny_backbone


def test_ranks_and_accuracy_equal_a_plain_count(tmp_path):
    torch.manual_seed(0)
    backbone, replies = tiny_backbone(), random_replies()
    draft_ids = torch.arange(0, VOCAB, 2)
    module = MedusaHeads(3, WIDTH, draft_ids=draft_ids)
    torch.nn.init.normal_(module.weight)
    states = hidden.hidden_states(backbone, replies, tmp_path, torch.float32)
    rows = objectives.output_rows(backbone.lm_head, draft_ids, torch.float32)
    table = evaluate.rank_table(module, rows, states, replies)
    drafter, row, counts = Drafter(module, backbone.lm_head), 0, np.zeros((3, 10))
    for i in range(len(replies)):
        ids = replies.sequence(i)
        for t in range(replies.reply_start[i] - 1, len(ids) - 1):
            best = drafter.top(torch.tensor(states[replies.offsets[i] + t][None]).float(), 64).ids
            for k in range(1, 4):
                target = ids[t + k + 1] if t + k + 1 < len(ids) else -1
                rank = best[k - 1].tolist().index(target) if target in best[k - 1] else NOT_RANKED
                assert table.ranks[row, k - 1] == rank
                if rank < 10:
                    counts[k - 1, rank] += 1
            row += 1
    assert row == len(table.ranks)
    measured = evaluate.accuracy(table)
    reply_tokens = (np.diff(replies.offsets) - replies.reply_start).sum()
    assert measured.positions == tuple(reply_tokens - k * len(replies) for k in (1, 2, 3))
    assert np.allclose(measured.share * np.array(measured.positions)[:, None], counts)


def brute_force_steps(paths: set, ranks: np.ndarray, length: int) -> tuple[int, list[int]]:
    """Steps of one reply, decoded one by one: the longest path of the tree that equals the true ranks."""
    at, accepted = 0, []
    while at < length:
        best = max([0] + [len(p) for p in paths if len(p) < length - at and tuple(ranks[at, : len(p)]) == p])
        accepted.append(best)
        at += best + 1
    return len(accepted), accepted


@pytest.mark.parametrize("seed", range(20))
def test_replay_equals_a_brute_force_simulation(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 25, 8)
    ranks = rng.choice([0, 0, 0, 1, 2, 3, NOT_RANKED], (lengths.sum(), 4)).astype(np.uint8)
    shape = from_paths([tuple(rng.integers(0, 4, rng.integers(1, 5)).tolist()) for _ in range(12)])
    found = replay(shape, RankTable(ranks, lengths))
    steps, accepted, first = 0, [], 0
    for n in lengths:
        more, taken = brute_force_steps(set(shape.paths[1:]), ranks[first : first + n], n)
        steps, accepted, first = steps + more, accepted + taken, first + n
    assert (found.steps, found.tokens) == (steps, lengths.sum())
    assert found.accepted == tuple(np.bincount(accepted, minlength=shape.height + 1))
    assert found.tokens_per_step == lengths.sum() / steps


def test_replay_of_the_bare_root_takes_a_step_per_token_and_of_nothing_none():
    table = RankTable(np.zeros((7, 2), np.uint8), np.array([7]))
    assert replay(from_paths([]), table).tokens_per_step == 1
    assert replay(from_paths([(0, 0)]), table).accepted == (1, 0, 2)
    assert replay(from_paths([(0,)]), RankTable(np.zeros((0, 2), np.uint8), np.array([], int))).tokens_per_step == 0


def test_scores_are_given_per_source_and_for_greedy_replies_alone(tmp_path):
    backbone, replies = tiny_backbone(), random_replies()
    states = hidden.hidden_states(backbone, replies, tmp_path, torch.float32)
    rows = objectives.output_rows(backbone.lm_head, None, torch.float32)
    table = evaluate.rank_table(MedusaHeads(2, WIDTH), rows, states, replies)
    scores, greedy = evaluate.evaluate(table, replies), replies.temperature == 0
    assert set(scores) == {"all", "self-synthesised", "written prompts", "all, greedy", "self-synthesised, greedy",
                           "written prompts, greedy"}
    assert scores["all"].tokens_per_step == {} and scores["all, greedy"].tokens_per_step["63"] >= 1
    assert scores["all"].replies == 12 and scores["all, greedy"].replies == 8
    known = accuracy.cross_replay(subset(table, greedy), np.arange(8) % 2 == 1, evaluate.REPLAYED_NODES)
    assert list(scores["all, greedy"].tokens_per_step.values()) == [one.tokens_per_step for one in known]
    shipped = evaluate.table_to_ship({name: score.accuracy for name, score in scores.items()})
    mean = np.mean([scores["self-synthesised, greedy"].accuracy, scores["written prompts, greedy"].accuracy], axis=0)
    assert np.allclose(shipped, mean) and builders.sparse(shipped, 7).nodes == 7


def test_a_tree_is_never_judged_on_replies_that_it_was_built_from():
    """Replies to two prompts: rank 1 is right all along in one, rank 2 in the other."""
    replies = replies_of([[0] * 12, [1] * 12, [0] * 12, [1] * 12], temperature=[0, 0, 0.7, 0])
    ranks = np.repeat([[1, 1], [2, 2], [0, 0], [2, 2]], 10, axis=0).astype(np.uint8)
    scores = evaluate.evaluate(RankTable(ranks, np.full(4, 10)), replies)
    assert scores["all, greedy"].tokens_per_step["3"] == 1, "a tree of its own replies holds (1) and (2)"
    assert scores["all, greedy"].replies == 3 and scores["all"].tokens_per_step == {}
    alone = evaluate.evaluate(RankTable(ranks[:10], np.array([10])), replies.select(np.arange(4) == 0))
    assert alone["all, greedy"].tokens_per_step == {}, "of one prompt nothing is known"
    sampled = evaluate.evaluate(RankTable(ranks[20:30], np.array([10])), replies.select(np.arange(4) == 2))
    assert set(sampled) == {"all", "self-synthesised"} and sampled["all"].accuracy[0][0] == 1


@pytest.mark.parametrize("preset", shipped(), ids=lambda preset: preset.name)
def test_shipped_heads_promise_no_figure_of_trees_that_were_built_from_the_judged_replies(preset):
    card = (heads_folder(preset) / "README.md").read_text()
    trained = json.loads((heads_folder(preset) / "config.json").read_text())["trained"]
    _, _, flattered = card.partition("which stems from these same replies")
    table = flattered.partition("\n## ")[0]
    assert not any(f"{rate:.3f}" in table for rate in trained.get("tokens_per_step", {}).values())


@pytest.mark.parametrize("preset", shipped(), ids=lambda preset: preset.name)
def test_the_figures_of_shipped_heads_are_those_in_their_card(preset):
    """Top-1 and tokens per step of the config stand in the card's section on the project's held-out prompts."""
    card = (heads_folder(preset) / "README.md").read_text()
    trained = json.loads((heads_folder(preset) / "config.json").read_text())["trained"]
    section = card.partition("\n## On the project's own held-out prompts\n")[2].partition("\n## ")[0]
    lines = [[re.sub(r" \[.*?\]", "", cell).strip() for cell in line.strip("|").split("|")]
             for line in section.splitlines() if line.startswith("|")]
    top1 = [f"{share:.3f}" for share in trained["held_out_top1"]]
    rates = {nodes: f"{rate:.3f}" for nodes, rate in trained["tokens_per_step"].items()}
    if preset.weights == preset.name:  # a table of top-1 per head, and one of rates by nodes
        assert next(line for line in lines if line[0] == "top-1")[1:] == top1
        nodes, row = (next(line for line in lines if line[0] == name) for name in ("nodes", "replayed tokens per step"))
    else:  # one table, whose last line is of the adapted backbone's own replies
        row = lines[-1]
        assert row[1] == "the adapted backbone itself" and row[2] == " ".join(top1)
        nodes = [cell.removesuffix(" node") for cell in lines[0]]
    in_card = dict(zip(nodes, row))
    assert len(top1) == 4 and "15" in rates and {n: in_card.get(n) for n in rates} == rates


def test_same_choice_counts_the_reply_tokens_whose_first_choice_stayed():
    backbone, replies = tiny_backbone(), random_replies(seed=3)
    before = hidden.hidden_states_now(backbone, replies, torch.float32)
    now = before.copy()
    moved = replies.before_reply[::3]
    now[moved] *= -1  # the reverse of every logit: another first choice
    rows = objectives.output_rows(backbone.lm_head, None, torch.float32)
    assert evaluate.same_choice(before, before, replies, rows) == 1
    assert evaluate.same_choice(before, now, replies, rows) == pytest.approx(1 - len(moved) / len(replies.before_reply))
    now = -before  # where nothing is left, prompts and ends of texts must not count as kept
    assert evaluate.same_choice(before, now, replies, rows) == 0
