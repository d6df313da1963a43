"""Calibration: ranks against a plain sort, accuracies over each head's own positions, intervals, files, the command."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny import VOCAB, backbone, plain_greedy, prompt, random_drafter

from medusa_viz.cli import main
from medusa_viz.models import beside
from medusa_viz.models.heads import Drafter, MedusaHeads
from medusa_viz.training import data as token_files
from medusa_viz.training import own_text
from medusa_viz.training.data import Replies
from medusa_viz.tuning import accuracy, ranking
from medusa_viz.tuning.builders import sparse
from medusa_viz.tuning.calibration import greedy_training, prompt_of
from medusa_viz.tuning.jobs import finish
from medusa_viz.tuning.replay import NOT_RANKED, RankTable, replay, scorable, steps_per_reply, subset


def random_replies(lengths=(30, 9, 17, 4, 25), starts=(6, 3, 1, 3, 0), seed=0, split=None) -> Replies:
    rng = np.random.default_rng(seed)
    n = len(lengths)
    return Replies("made up", rng.integers(0, VOCAB, sum(lengths)).astype(np.int32),
                   np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64), np.array(starts, np.int32),
                   np.zeros(n, np.float32), np.zeros(n, np.uint8), ("x",),
                   np.zeros(n, np.uint8) if split is None else np.array(split, np.uint8))


def random_table(seed=0, replies=12, heads=4) -> RankTable:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 30, replies)
    ranks = rng.choice([0, 0, 1, 2, 3, 9, 40, NOT_RANKED], (lengths.sum(), heads)).astype(np.uint8)
    return RankTable(np.where(scorable_one_by_one(lengths, heads), ranks, NOT_RANKED).astype(np.uint8), lengths)


def scorable_one_by_one(lengths, heads) -> np.ndarray:
    rows = [[i + k < n for k in range(1, heads + 1)] for n in lengths for i in range(n)]
    return np.array(rows, bool).reshape(-1, heads)


# -------------------------------------------------------------------------------------------------------------- ranks


def plain_ranks(of, drafter, replies) -> list[list[int]]:
    """One text and one position at a time, by sorting."""
    table = []
    for i in range(len(replies)):
        ids = replies.sequence(i)
        captured = []
        handle = of.lm_head.register_forward_pre_hook(lambda _, inputs, kept=captured: kept.append(inputs[0]))
        with torch.no_grad():
            of.model(input_ids=torch.from_numpy(ids).long()[None], use_cache=False)
        handle.remove()
        for t in range(max(replies.reply_start[i], 1) - 1, len(ids) - 1):
            logits = drafter.logits(captured[0][0, t][None])[:, 0]
            table.append([])
            for k in range(1, drafter.heads + 1):
                best = logits[k - 1].argsort(descending=True, stable=True)  # equal logits: the lower id first
                if drafter.draft_ids is not None:
                    best = drafter.draft_ids[best]
                at = t + k + 1
                place = best.tolist().index(ids[at]) if at < len(ids) and ids[at] in best else NOT_RANKED
                table[-1].append(place if place < ranking.KEPT_RANKS else NOT_RANKED)
    return table


@pytest.mark.parametrize("draft", [None, list(range(0, VOCAB, 2))])
@pytest.mark.parametrize("own", [False, True])
def test_ranks_equal_a_plain_sort(draft, own, monkeypatch):
    monkeypatch.setattr(ranking, "BATCH_TOKENS", 60)
    monkeypatch.setattr(ranking, "CHUNK", 7)
    monkeypatch.setattr(ranking, "KEPT_RANKS", 20)
    of = backbone()
    drafter, replies, heard = random_drafter(of, 4, own=own, draft_ids=draft), random_replies(), []
    table = finish(ranking.ranking(of, drafter, replies), lambda p: heard.append((p.done, p.total))).table
    assert table.ranks.tolist() == plain_ranks(of, drafter, replies)
    assert table.lengths.tolist() == [24, 6, 16, 1, 24] and heard[-1] == (71, 71) and len(heard) > 1
    assert (table.ranks == NOT_RANKED).any() and (table.ranks < 20).any()


def test_equal_logits_rank_by_the_lower_id():
    of = backbone()
    output = torch.randn(2, VOCAB, of.hidden_size, generator=torch.Generator().manual_seed(0))
    output[:, [3, 9, 40]] = 0  # three tokens whose logits are 0 in any order of summation
    drafter, replies = Drafter(MedusaHeads(2, of.hidden_size, output=output), of.lm_head), random_replies()
    replies.ids[::2] = np.array([3, 40, 9])[np.arange(len(replies.ids[::2])) % 3]
    table = ranking.rank_replies(of, drafter, replies)
    assert table.ranks.tolist() == plain_ranks(of, drafter, replies)


def test_what_a_head_ranks_first_on_greedy_text_is_what_a_step_accepts():
    """Ranks of the text that plain decoding writes give the very steps that Medusa takes."""
    from medusa_viz.decoding.decoder import decode
    from medusa_viz.decoding.settings import Acceptance

    of = backbone()
    drafter, shape = random_drafter(of, 3), sparse([[0.5, 0.3, 0.2]] * 3, 30)
    ids = prompt(4)
    text = plain_greedy(of, ids, 40)
    steps = list(decode(of, drafter, ids, shape, Acceptance(), 40, ()))
    replies = Replies("greedy", np.array([*ids, *text], np.int32), np.array([0, len(ids) + 40]), np.array([len(ids)]),
                      np.zeros(1), np.zeros(1, np.uint8), ("x",), np.zeros(1, np.uint8))
    table = ranking.rank_replies(of, drafter, replies)
    assert replay(shape, table).steps == len(steps) < 40


# ----------------------------------------------------------------------------------------------------------- accuracy


def test_every_head_counts_over_its_own_positions():
    table = random_table()
    measured = accuracy.accuracy(table)
    own = scorable_one_by_one(table.lengths, 4)
    assert np.array_equal(scorable(table), own)
    assert measured.positions == tuple(own.sum(0))
    assert measured.positions == tuple(int(np.maximum(table.lengths - k, 0).sum()) for k in (1, 2, 3, 4))
    for k in range(4):
        for i in range(10):
            assert measured.share[k, i] == pytest.approx((table.ranks[own[:, k], k] == i).mean())
    assert measured.top(2) == pytest.approx(measured.share[:, 0] + measured.share[:, 1])
    assert (measured.low <= measured.share).all() and (measured.share <= measured.high).all()


def test_intervals_are_of_whole_prompts():
    """Replies to one prompt that are all alike tell no more than one of them: the interval does not shrink."""
    lengths = np.full(20, 30)
    right = np.repeat(np.arange(20) % 2 == 0, 30)
    table = RankTable(np.where(right, 0, 5)[:, None].repeat(2, 1).astype(np.uint8), lengths)
    once = accuracy.accuracy(table)
    four = accuracy.accuracy(RankTable(np.tile(table.ranks, (4, 1)), np.tile(lengths, 4)), np.tile(np.arange(20), 4))
    assert four.share == pytest.approx(once.share) and four.low == pytest.approx(once.low)
    assert four.high == pytest.approx(once.high)
    assert once.low[0, 0] == pytest.approx(0.5 - 1.96 * 0.5 / 20**0.5, abs=0.06)
    as_if_single = accuracy.accuracy(RankTable(np.tile(table.ranks, (4, 1)), np.tile(lengths, 4)))
    assert as_if_single.high[0, 0] - as_if_single.low[0, 0] < 0.7 * (once.high[0, 0] - once.low[0, 0])


def test_the_interval_holds_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    inside = 0
    for seed in range(100):
        p = rng.beta(3, 7, 40)
        hits = rng.binomial(25, p)
        ranks = np.concatenate([np.r_[np.zeros(h), np.full(25 - h, 7), NOT_RANKED] for h in hits]).astype(np.uint8)
        measured = accuracy.accuracy(RankTable(ranks[:, None], np.full(40, 26)), seed=seed)
        inside += measured.low[0, 0] <= 0.3 <= measured.high[0, 0]
    assert 85 <= inside <= 100


def test_one_prompt_or_none_tells_nothing_about_others():
    table = RankTable(np.array([[0], [1], [NOT_RANKED]], np.uint8), np.array([3]))
    measured = accuracy.accuracy(table)
    assert measured.positions == (2,) and measured.share[0, :2].tolist() == [0.5, 0.5]
    assert (measured.low == 0).all() and (measured.high == 1).all()
    nothing = accuracy.accuracy(RankTable(np.zeros((0, 3), np.uint8), np.zeros(0, int)))
    assert nothing.positions == (0, 0, 0) and not nothing.share.any()


# ------------------------------------------------------------------------------------------------------------- replay


@pytest.mark.parametrize("seed", range(10))
def test_steps_per_reply_add_up_to_the_replay(seed):
    table = random_table(seed)
    shape = sparse([[0.5, 0.2, 0.1, 0.05]] * 4, 3 * seed)
    steps = steps_per_reply(shape, table)
    assert steps.sum() == replay(shape, table).steps
    for i in range(len(table.lengths)):
        single = subset(table, np.arange(len(table.lengths)) == i)
        assert steps[i] == replay(shape, single).steps


def test_each_half_is_replayed_with_the_tree_of_the_other():
    table = random_table(3, 30)
    fold = np.arange(30) % 3 == 0
    rate, = accuracy.cross_replay(table, fold, [7])
    steps = 0
    for half in (False, True):
        guide = accuracy.accuracy(subset(table, fold != half)).share.tolist()
        steps += replay(sparse(guide, 7), subset(table, fold == half)).steps
    assert rate.tokens_per_step == pytest.approx(table.lengths.sum() / steps)
    assert rate.low < rate.tokens_per_step < rate.high


# -------------------------------------------------------------------------------------------------- files and command


def test_a_rank_table_reads_back_and_others_are_refused(tmp_path):
    table, path = random_table(), tmp_path / "ranks.npz"
    prompts = np.arange(12) // 2
    p = np.random.default_rng(0).random((*table.ranks.shape, 10)).astype(np.float16)
    known = accuracy.Calibration(table, prompts, prompts % 3 == 0, (0.9, 1.0, 1.1, 1.2), p, {"heads": "h"})
    accuracy.save(path, known, accuracy.accuracy(table, prompts))
    again = accuracy.load(path)
    assert np.array_equal(again.table.ranks, table.ranks) and np.array_equal(again.table.lengths, table.lengths)
    assert np.array_equal(again.prompts, prompts) and np.array_equal(again.fold, known.fold)
    assert again.temperatures == known.temperatures and np.array_equal(again.p, p) and again.about == known.about
    for fault in ({"p": p[1:]}, {"temperatures": np.ones(3)}):
        np.savez(path, **{"ranks": table.ranks, "lengths": table.lengths, "prompt": prompts, **fault})
        with pytest.raises(ValueError, match="probabilities do not fit"):
            accuracy.load(path)
    np.savez(path, ranks=table.ranks, lengths=table.lengths[:-1], prompt=prompts)
    with pytest.raises(ValueError, match="do not fit"):
        accuracy.load(path)
    path.write_bytes(b"no zip")
    with pytest.raises(ValueError, match="no rank table"):
        accuracy.load(path)


@pytest.fixture
def command(monkeypatch, tmp_path):
    """Runs `calibrate` with a tiny model; its replies file holds the given replies."""
    of = backbone()
    codec = SimpleNamespace(encode_prompt=lambda text: [1, 2, *(byte % VOCAB for byte in text.encode())])
    engine = SimpleNamespace(backbone=of, drafter=random_drafter(of, 3), title="tiny", codec=codec,
                             loaded=SimpleNamespace(source="/somewhere/heads", adapter=None))
    monkeypatch.setattr("medusa_viz.cli.load_engine", lambda options: engine)

    def run(*words):
        return main(["calibrate", "--model", "tiny", "--out", str(tmp_path / "ranks.npz"), *map(str, words)])

    return SimpleNamespace(run=run, engine=engine, out=tmp_path / "ranks.npz")


def save_replies(path, replies: Replies) -> None:
    np.savez(path, ids=replies.ids, offsets=replies.offsets, reply_start=replies.reply_start, split=replies.split,
             kind=replies.kind, kinds=np.array(replies.kinds), temperature=replies.temperature)


def test_the_command_ranks_replies_and_says_what_it_found(command, tmp_path, capsys):
    replies = random_replies((30, 9, 17, 22, 25), (6, 3, 2, 3, 4), split=[0, 1, 1, 0, 1])
    save_replies(tmp_path / "r.npz", replies)
    assert command.run("--replies", tmp_path / "r.npz", "--split", "all") == 0
    known = accuracy.load(command.out)
    table, prompts = known.table, known.prompts
    whole = ranking.rank_replies(command.engine.backbone, command.engine.drafter, replies)
    assert np.array_equal(table.ranks, whole.ranks) and prompts.tolist() == [0, 1, 2, 3, 4]
    about = json.loads(str(np.load(command.out)["about"]))
    assert about["heads"] == "heads" and about["replayed"][0]["nodes"] == 1
    assert known.p.shape == (*table.ranks.shape, 10) and len(known.temperatures) == 3
    shown = capsys.readouterr().out
    assert "bootstrap" in shown and "tokens per step" in shown and f"{table.lengths.sum() - 5:,}" in shown
    texts = [replies.sequence(i)[start:].tolist() for i, start in enumerate(replies.reply_start)]
    fours = [[tuple(text[at : at + 4]) for at in range(len(text) - 3)] for text in texts]
    assert f"their 4-grams {1 - sum(map(len, map(set, fours))) / sum(map(len, fours)):.1%} repeated" in shown
    assert command.run("--replies", tmp_path / "r.npz", "--split", "held_out") == 0
    assert np.array_equal(accuracy.load(command.out).table.ranks, subset(table, replies.split == 1).ranks)


def test_by_itself_the_command_ranks_greedy_replies_of_the_training_split(command, tmp_path, capsys):
    replies = random_replies((30, 9, 17, 22, 25), (6, 3, 2, 3, 4), split=[0, 1, 0, 0, 1])
    replies.temperature[2:] = 0.7  # sampled text cannot be replayed
    save_replies(tmp_path / "r.npz", replies)
    assert command.run("--replies", tmp_path / "r.npz") == 0
    assert accuracy.load(command.out).table.lengths.tolist() == [24]
    assert command.run("--replies", tmp_path / "r.npz", "--split", "held_out") == 0
    assert accuracy.load(command.out).table.lengths.tolist() == [6]
    replies.temperature[:] = 1
    save_replies(tmp_path / "r.npz", replies)
    capsys.readouterr()
    for words, said in (((), "r.npz holds no greedy reply of the split train, and only"),
                        (("--split", "all"), "r.npz holds no greedy reply, and only greedy text can be replayed.")):
        assert command.run("--replies", tmp_path / "r.npz", *words) == 2
        assert said in capsys.readouterr().err


def test_replies_of_the_original_backbone_are_noted_as_such(command, tmp_path, capsys, monkeypatch):
    save_replies(tmp_path / "r.npz", random_replies())
    monkeypatch.setattr(own_text, "shipped_file", lambda model: tmp_path / "r.npz")
    assert command.run() == 0
    assert "own_text" not in accuracy.load(command.out).about and "adapter" not in capsys.readouterr().err
    command.engine.loaded.adapter = tmp_path
    assert command.run() == 0
    assert accuracy.load(command.out).about["own_text"] is False
    assert "original backbone's, which the adapter of these heads changes" in capsys.readouterr().err
    assert command.run("--replies", tmp_path / "r.npz") == 0
    assert "own_text" not in accuracy.load(command.out).about


def test_the_command_writes_replies_to_prompts_first(command, tmp_path):
    of = command.engine.backbone
    listed = tmp_path / "p.txt"
    listed.write_text("one\ntwo words\nthree\n")
    assert command.run("--prompts", listed, "--max-new-tokens", 12) == 0
    table = accuracy.load(command.out).table
    texts = [plain_greedy(of, command.engine.codec.encode_prompt(line), 12) for line in listed.read_text().splitlines()]
    assert table.lengths.tolist() == [len(text) for text in texts]


def test_the_command_refuses_what_it_cannot_measure(command, tmp_path, capsys):
    save_replies(tmp_path / "r.npz", random_replies())
    foreign = random_replies()
    foreign.ids[3] = VOCAB
    save_replies(tmp_path / "foreign.npz", foreign)
    for words, message in (((), "No replies of tiny ship"), (("--replies", tmp_path / "none.npz"), "is no token file"),
                           (("--replies", tmp_path / "r.npz", "--split", "held_out"), "no greedy reply of the split"),
                           (("--replies", tmp_path / "foreign.npz"), "another model's")):
        assert command.run(*words) == 2
        error = capsys.readouterr().err.strip()
        assert message in error and len(error.splitlines()) == 1
    assert not command.out.exists()


def test_the_command_reads_its_files_before_it_loads_a_model(command, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("medusa_viz.cli.load_engine", lambda options: pytest.fail("loaded"))
    save_replies(tmp_path / "r.npz", random_replies())
    for words, message in ((("--replies", tmp_path / "none.npz"), "is no token file"), ((), "No replies of tiny ship"),
                           (("--replies", tmp_path / "r.npz", "--split", "held_out"), "no greedy reply of the split"),
                           (("--prompts", tmp_path / "none.txt"), "cannot be read"),
                           (("--max-new-tokens", "0"), "--max-new-tokens: 0 is no whole number of 1 or more")):
        assert command.run(*words) == 2
        error = capsys.readouterr().err.strip()
        assert message in error and len(error.splitlines()) == 1


def test_trees_are_chosen_by_greedy_replies_of_the_training_split_alone():
    replies = random_replies(split=[0, 1, 0, 1, 0])
    replies.temperature[2] = 0.7
    kept = greedy_training(replies)
    assert [kept.sequence(i).tolist() for i in range(len(kept))] == [replies.sequence(i).tolist() for i in (0, 4)]
    assert len(greedy_training(random_replies(split=[1] * 5))) == 5  # a file without a training split
    replies.temperature[:] = [0.7, 0, 0.7, 0, 0.7]
    with pytest.raises(ValueError, match="made up holds no greedy reply of the training split, and only"):
        greedy_training(replies)
    replies.temperature[:] = 1
    replies.split[:] = 1
    with pytest.raises(ValueError, match="made up holds no greedy reply, and only"):
        greedy_training(replies)


def test_replies_behind_equal_prompts_share_a_number():
    replies = random_replies((5, 5, 5, 5), (3, 3, 3, 2))
    replies.ids[5:8] = replies.ids[10:13]
    assert prompt_of(replies).tolist() == [0, 1, 1, 2]


@pytest.mark.parametrize("place", range(0, 1000, 37))
def test_a_table_with_a_damaged_byte_is_read_or_told_in_one_sentence(tmp_path, place):
    """As a disk or a broken download leaves it: anywhere in the file."""
    path = tmp_path / "ranks.npz"
    np.savez_compressed(path, ranks=np.zeros((40, 2), np.uint8), lengths=np.array([40]), prompt=np.array([0]),
                        about=np.array("{}"), accuracy=np.full((2, 10), 0.1))
    data = bytearray(path.read_bytes())
    data[place * len(data) // 1000] ^= 0xFF
    path.write_bytes(bytes(data))
    for read in (accuracy.load, beside.accuracies, lambda file: token_files.load([file])):
        try:
            read(path)
        except ValueError as error:
            assert str(error).endswith(".") and "\n" not in str(error)
