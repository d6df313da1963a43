"""Trees rebuilt at each step: greedy text stays plain greedy's, and the heads' own probabilities are put right."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from made_replies import greedy_replies
from tiny import VOCAB, backbone, oracle_drafter, plain_greedy, prompt, random_drafter

from medusa_viz.decoding import decoder
from medusa_viz.decoding.decoder import decode
from medusa_viz.decoding.settings import Acceptance
from medusa_viz.decoding.tree import TreeError
from medusa_viz.models.heads import Drafter, MedusaHeads
from medusa_viz.tuning import ranking
from medusa_viz.tuning.bench import own_decoder
from medusa_viz.tuning.builders import sparse
from medusa_viz.tuning.dynamic import DynamicTrees, dynamic
from medusa_viz.tuning.jobs import finish
from medusa_viz.tuning.replay import replay_each

GREEDY = Acceptance()


@pytest.fixture(scope="module")
def exact():
    return backbone(dtype=torch.float64)


@pytest.mark.parametrize("trees", [dynamic(3, 1), dynamic(3, 6), dynamic(3, 25, (4, 2, 3)), dynamic(3, 9, (2, 0, 3)),
                                   dynamic(3, 40, None, (0.3, 1.0, 3.0))])
def test_greedy_text_is_plain_greedys(exact, trees):
    for seed in range(2):
        ids = prompt(seed)
        text = plain_greedy(exact, ids, 30)
        for drafter in (random_drafter(exact, 3, seed), oracle_drafter(exact, ids, text)):
            steps = list(decode(exact, drafter, ids, trees, GREEDY, 30, ()))
            assert [token for step in steps for token in step.tokens] == text
            assert all(step.nodes <= trees.nodes for step in steps)
            assert steps[-1].finish == "length"


def test_every_step_has_the_tree_of_its_own_probabilities(exact):
    ids, heat = prompt(5), (0.5, 1.0, 2.0)
    drafter, trees = random_drafter(exact, 3, 1), dynamic(3, 7, None, heat)
    state = decoder.start(exact, ids, GREEDY)
    shapes = set()
    for _ in range(12):
        logits = drafter.logits(state.hidden)[:, 0].double()
        p = (logits / torch.tensor(heat)[:, None]).softmax(-1).sort(descending=True).values[:, :10]
        shape = decoder.step_shape(drafter, state.hidden, trees)
        assert shape.fingerprint == sparse(p.tolist(), 7).fingerprint
        step, candidates = decoder.propose_anew(exact, drafter, state, trees, 3)
        assert step.shape.fingerprint == shape.fingerprint
        usual = decoder.propose(drafter, state, decoder.plan(shape, exact, drafter))
        assert candidates.tokens.tolist() == usual.tokens.tolist()
        forward = decoder.verify(exact, state, step, candidates)
        decoder.commit(state, forward, decoder.accept(forward, state, step, candidates, GREEDY))
        shapes.add(shape.fingerprint)
    assert len(shapes) > 1


def test_the_last_steps_are_cut_to_the_token(exact):
    ids = prompt(2)
    text = plain_greedy(exact, ids, 20)
    drafter = oracle_drafter(exact, ids, plain_greedy(exact, ids, 40))
    for limit in range(1, 9):
        steps = list(decode(exact, drafter, ids, dynamic(3, 12), GREEDY, limit, ()))
        assert [token for step in steps for token in step.tokens] == text[:limit]


def test_a_tree_that_the_heads_cannot_fill_is_refused_before_the_prompt(exact, monkeypatch):
    monkeypatch.setattr(decoder, "start", lambda *_, **__: pytest.fail("the prompt was run"))
    for trees, said in ((dynamic(4, 5), "depth 4"), (DynamicTrees(5, (1.0,) * 3, (VOCAB + 1,) * 3), "draft"),
                        (DynamicTrees(99_999, (1.0,) * 3, (10,) * 3), "at most")):
        with pytest.raises(TreeError, match=said):
            next(decode(exact, random_drafter(exact, 3), prompt(1), trees, GREEDY, 9, ()))
    with pytest.raises(TreeError, match="0 heads"):
        next(decode(exact, None, prompt(1), dynamic(2, 5), GREEDY, 9, ()))


def test_typical_and_sampled_text_run_too(exact):
    for settings in (Acceptance("typical", 0.7), Acceptance("rejection", 0.9, top_p=0.9)):
        steps = list(decode(exact, random_drafter(exact, 3), prompt(3), dynamic(3, 9), settings, 12, ()))
        assert sum(len(step.tokens) for step in steps) == 12


def test_the_benchmark_takes_it(exact):
    run = own_decoder(exact, random_drafter(exact, 3), dynamic(3, 9))(prompt(1), 10)
    assert run.ids == plain_greedy(exact, prompt(1), 10) and sum(run.committed) == 10


# -------------------------------------------------------------------------------------------- probabilities and replay


def test_replaying_without_the_model_takes_the_steps_that_decoding_takes(exact):
    drafter, texts = random_drafter(exact, 3, 2), [(prompt(seed), plain_greedy(exact, prompt(seed), 30))
                                                   for seed in range(5)]
    heat = (0.7, 1.0, 1.3)
    ranked = finish(ranking.ranking(exact, drafter, greedy_replies(texts), heat))
    for trees in (dynamic(3, 4, None, heat), dynamic(3, 20, (5, 4, 3), heat)):
        found, steps = replay_each(trees.replayed(ranked.p.astype(float)), ranked.table, 3)
        decoded = [len(list(decode(exact, drafter, ids, trees, GREEDY, 30, ()))) for ids, _ in texts]
        assert steps.tolist() == decoded and found.steps == sum(decoded)
        assert found.tokens == found.steps + sum(m * count for m, count in enumerate(found.accepted))


def test_kept_probabilities_are_the_heads_own(exact):
    drafter, texts = random_drafter(exact, 2, 4), [(prompt(1), plain_greedy(exact, prompt(1), 12))]
    heat = (0.5, 2.0)
    p = finish(ranking.ranking(exact, drafter, greedy_replies(texts), heat)).p
    state = decoder.start(exact, texts[0][0], GREEDY)
    for k in range(2):
        own = (drafter.logits(state.hidden)[k, 0] / heat[k]).softmax(-1).sort(descending=True).values[:10]
        assert p[0, k] == pytest.approx(own.numpy(), rel=2e-3)
    assert finish(ranking.ranking(exact, drafter, greedy_replies(texts))).p is None


@pytest.mark.parametrize("scale", [0.7, 1.0, 1.4])
def test_the_fitted_temperature_undoes_a_scaling(scale):
    """Replies drawn from a head's own softmax; the head whose logits were scaled gets the scale as temperature."""
    of = backbone()
    generator = torch.Generator().manual_seed(0)
    output = torch.randn(1, VOCAB, of.hidden_size, generator=generator) * 0.25
    drafter = Drafter(MedusaHeads(1, of.hidden_size, output=output), of.lm_head)
    rng, texts = np.random.default_rng(0), []
    for seed in range(60):  # token t + 2 is drawn from the head at t: so write two tokens, then follow the head
        ids, text = prompt(seed), [1]
        for _ in range(14):
            hidden = next(ranking.forced_states(of, [torch.tensor([*ids, *text][:-1] or ids)]))[-1:]
            p = drafter.logits(hidden)[0, 0].softmax(-1).double().numpy()
            text.append(int(rng.choice(VOCAB, p=p / p.sum())))
        texts.append((ids, text))
    scaled = Drafter(MedusaHeads(1, of.hidden_size, output=output * scale), of.lm_head)
    fitted, = finish(ranking.fitting_temperatures(of, scaled, greedy_replies(texts)))
    assert fitted == pytest.approx(scale, rel=0.12)


def test_temperatures_are_fitted_on_the_chosen_replies_alone(exact, monkeypatch):
    drafter = random_drafter(exact, 2)
    texts = [(prompt(seed), plain_greedy(exact, prompt(seed), 9)) for seed in range(6)]
    seen, real = [], ranking._forced

    def watched(backbone, drafter, replies, batch, *rest):
        seen.extend(int(i) for i in batch)
        return real(backbone, drafter, replies, batch, *rest)

    monkeypatch.setattr(ranking, "_forced", watched)
    finish(ranking.fitting_temperatures(exact, drafter, greedy_replies(texts), np.array([1, 3, 4, 5]), positions=20))
    assert set(seen) == {1, 3, 4}  # 27 positions suffice
