"""What a look shows: every number against a slow one, read off plain forwards of the model."""

import math
import random

import numpy as np
import pytest
import torch
from tiny import VOCAB, backbone, engine, greedy_step, plain_greedy, plain_logits, prompt, random_drafter, random_shape

from medusa_viz.decoding import observe
from medusa_viz.decoding.live import LiveRun
from medusa_viz.decoding.records import TEMPERATURES
from medusa_viz.decoding.settings import Acceptance
from medusa_viz.decoding.tree import dense

GREEDY = Acceptance()
DRAFT_IDS = [0, 2, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53]


@pytest.mark.parametrize("draft_ids", [None, DRAFT_IDS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_number_of_a_look(draft_ids, dtype):
    of = backbone(dtype=dtype)
    drafter = random_drafter(of, heads=3, own=True, draft_ids=draft_ids)
    run, ids, rng = LiveRun(engine(of, drafter)), prompt(4), random.Random(0)
    position = run.open(ids, GREEDY)
    shape = random_shape(rng, heads=3, width=4, paths=14)
    look = run.look(position, shape, GREEDY)
    vocabulary = draft_ids or list(range(VOCAB))
    head_p = drafter.logits(position.hidden)[:, 0].double().softmax(-1)
    order = [sorted(range(len(vocabulary)), key=lambda row: -float(p[row])) for p in head_p]
    drafts, seen = look.drafts, look.verification
    assert (drafts.parent, drafts.rank) == (shape.parent.tolist(), shape.rank.tolist())
    for k, top in enumerate(drafts.heads):
        assert top.ids == [vocabulary[row] for row in order[k][:10]]
        assert top.p == pytest.approx([float(head_p[k, row]) for row in order[k][:10]], rel=1e-4)
    assert len(drafts.heads) == 3 and drafts.head_p[0] == position.root_p and drafts.path_p[0] == 1
    for row, path in enumerate(shape.paths):
        tokens = [*ids, *(drafts.token[r] for r in shape.path_to(row))]
        logits = plain_logits(of, tokens)[-1].double()  # after this row
        parent_logits = plain_logits(of, tokens[:-1])[-1].double()
        if row:
            assert drafts.token[row] == vocabulary[order[len(path) - 1][path[-1]]]
            own_p = float(head_p[len(path) - 1, order[len(path) - 1][path[-1]]])
            assert drafts.head_p[row] == pytest.approx(own_p, rel=1e-4)
            product = math.prod(drafts.head_p[r] for r in shape.path_to(row)[1:])
            assert drafts.path_p[row] == pytest.approx(product, rel=1e-9)
            own = parent_logits[drafts.token[row]]
            assert seen.logit[row] == pytest.approx(float(own), abs=1e-4)
            assert seen.rank[row] == int((parent_logits > own).sum())
        best = logits.topk(10)
        assert seen.top[row].ids == best.indices.tolist()
        assert seen.top[row].p == pytest.approx(logits.softmax(-1)[best.indices].tolist(), rel=1e-3)
        if shape.is_parent[row]:
            for place, temperature in enumerate(TEMPERATURES):
                p = (logits / temperature).softmax(-1)
                lse = float((logits / temperature).logsumexp(-1))
                assert seen.lse[row][place] == pytest.approx(lse, rel=1e-5, abs=1e-3)
                assert seen.mean_logit[row][place] == pytest.approx(float((p * logits).sum()), abs=1e-3)
                child = int(np.flatnonzero(shape.parent == row)[0])
                if child:  # what pages derive from them: p and H, as softmax gives them
                    log_p = seen.logit[child] / temperature - seen.lse[row][place]
                    assert math.exp(log_p) == pytest.approx(float(p[drafts.token[child]]), abs=1e-4)
                    entropy = seen.lse[row][place] - seen.mean_logit[row][place] / temperature
                    assert entropy == pytest.approx(float(torch.special.entr(p).sum()), abs=2e-3)
        wanted = int(logits.argmax())
        if len(path) < 3 and wanted in vocabulary:
            assert seen.next_rank[row] == order[len(path)].index(vocabulary.index(wanted))
        else:
            assert seen.next_rank[row] == -1
    assert seen.lse.keys() == seen.mean_logit.keys() == {int(row) for row in np.flatnonzero(shape.is_parent)}
    assert seen.top.keys() == seen.next_rank.keys() == set(range(shape.nodes + 1))
    if draft_ids:
        assert -1 in [rank for row, rank in seen.next_rank.items() if shape.depth[row] < 3]
    timings = [look.timings.propose, look.timings.verify, look.timings.accept]
    assert all(part > 0 for part in timings) and look.timings.commit is None


def test_numbers_of_large_logits_stay_finite():
    lse, mean = observe.temperature_tables(torch.tensor([[1e4, -1e4, 0.0], [0.0, 0.0, 0.0], [300.0, 299.0, -300.0]]))
    assert lse.isfinite().all() and mean.isfinite().all()
    assert lse[0].tolist() == pytest.approx([1e4 / t for t in TEMPERATURES])
    assert lse[1].tolist() == pytest.approx([math.log(3)] * len(TEMPERATURES))
    assert observe.temperature_tables(torch.zeros(0, 5))[0].shape == (0, len(TEMPERATURES))


def test_ties_are_broken_as_greedy_decoding_breaks_them():
    """Two tokens that always have equal logits, as half precision often makes them: the first is the argmax."""
    of = backbone(seed=0)
    of.lm_head.weight[:] = torch.randn(VOCAB, of.hidden_size)[torch.arange(VOCAB) // 8 * 8]  # eight of each
    run, shape = LiveRun(engine(of, random_drafter(of, heads=2))), dense([10, 2])
    position, text, tied = run.open(prompt(0), GREEDY), plain_greedy(of, prompt(0), 20), 0
    for _ in range(8):
        look, _, after = greedy_step(run, position, shape)
        for row in range(shape.nodes + 1):
            ids = look.verification.top[row].ids
            logits = plain_logits(of, [*position.ids, *(look.drafts.token[r] for r in shape.path_to(row))])[-1]
            assert ids[0] % 8 == 0 and len(set(ids)) == 10
            assert float(logits[ids[0]]) >= float(logits.max()) - 1e-5
            tied += row > 0 and look.verification.rank[row] == 1
        for row in np.flatnonzero(np.array(look.verification.rank[1:]) == 0) + 1:
            assert look.drafts.token[row] == look.verification.top[int(shape.parent[row])].ids[0]
        position = after
    assert list(position.ids[6:]) == text[: len(position.ids) - 6] and tied > 5


def test_a_vocabulary_smaller_than_what_is_shown():
    of = backbone(vocab_size=7)
    run = LiveRun(engine(of, random_drafter(of, heads=2, draft_ids=[0, 1, 2])))
    look = run.look(run.open([1, 2, 3], GREEDY), dense([3, 2]), GREEDY)
    assert len(look.verification.top[0].ids) == 7 and len(look.drafts.heads[0].ids) == 3
