"""Acceptance: the field cases' numbers, slow references on random trees, and draws from the right distribution."""

import math
import random

import numpy as np
import pytest
import torch
from tiny import VOCAB, backbone, plain_greedy, prompt, random_drafter, random_shape

from medusa_viz.decoding import acceptance, decoder, records
from medusa_viz.decoding.settings import ACCEPTANCE_MODES, Acceptance, SettingsError
from medusa_viz.decoding.tree import dense, from_paths
from medusa_viz.models.backbone import Forward
from medusa_viz.models.cache import TreeCache

A08 = [.60, .20, .10, .06, .04]


def entropy(p):
    return -sum(x * math.log(x) for x in p if x)


def step_of(shape, tokens, logits, settings, length=0):
    """One `accept` on made-up logits, and what it needs."""
    cache = TreeCache(0, 0)
    cache.length = length
    candidates = decoder.Candidates(torch.as_tensor(tokens), None)
    forward = Forward(torch.zeros(len(tokens), 1), torch.as_tensor(np.asarray(logits), dtype=torch.float32))
    plan = decoder.Plan(shape, torch.zeros(0), torch.zeros(0), torch.zeros(0), 0)
    state = decoder.DecodingState(cache, torch.zeros(1, 1), int(tokens[0]))
    return decoder.accept(forward, state, plan, candidates, settings)


def random_case(rng, vocab=12):
    """A tree whose siblings hold different tokens, and logits that accept a fair share of them."""
    shape = random_shape(rng, heads=4, width=3, paths=8)
    tokens, logits = [rng.randrange(vocab)], [[rng.gauss(0, 1.5) for _ in range(vocab)] for _ in range(shape.nodes + 1)]
    taken = {}
    for row in range(1, shape.nodes + 1):
        parent = int(shape.parent[row])
        token = rng.choice([t for t in range(vocab) if t not in taken.setdefault(parent, set())])
        taken[parent].add(token)
        tokens.append(token)
        if rng.random() < 0.4:
            logits[parent][token] += 3
    return shape, tokens, logits


def slow_softmax(row, temperature):
    weights = [math.exp((z - max(row)) / temperature) for z in row]
    return [w / sum(weights) for w in weights]


def slow_longest(shape, accepts, score):
    """Longest path all of whose nodes are accepted; ties by the larger score, then the smaller path."""
    paths = [path for path in shape.paths if all(accepts(path[:n]) for n in range(1, len(path) + 1))]
    deepest = max(map(len, paths))
    return min((path for path in paths if len(path) == deepest), key=lambda path: (-score(path), path))


# ------------------------------------------------------------------------------------------------ field case A08


@pytest.mark.parametrize("p, threshold, accepted", [
    (A08, 0.0900, {0, 1, 2}),
    ([1 / 8] * 8, 0.0375, set(range(8))),
    ([.97, .02, .01], 0.0900, {0}),
])
def test_typical_acceptance_of_field_case_a08(p, threshold, accepted):
    shape = dense([len(p)])
    h = entropy(p)
    assert acceptance.typical_threshold(np.array([h]), 0.09, 0.3)[0] == pytest.approx(threshold, abs=5e-5)
    settings = Acceptance("typical", temperature=1.0)
    logits = np.log([p] * (len(p) + 1))
    got_p, got_h = decoder.tempered(torch.tensor(logits), shape, torch.tensor([0, *range(len(p))]), 1.0)
    assert got_p[1:].tolist() == pytest.approx(p, abs=1e-6)
    assert got_h[1:].tolist() == pytest.approx([h] * len(p), abs=1e-6)
    own = acceptance.typical_tests(got_p.numpy(), got_h.numpy(), settings.epsilon, settings.delta)
    assert set(np.flatnonzero(own)) == {0} | {1 + token for token in accepted}


def test_nats_and_the_order_of_parameters_matter():
    h = entropy(A08)
    assert h == pytest.approx(1.1562, abs=5e-5) and math.exp(-h) == pytest.approx(0.31468, abs=5e-6)
    p = np.array([1.0, *A08])
    swapped = acceptance.typical_tests(p, np.full(6, h), 0.3, 0.09)
    in_bits = acceptance.typical_tests(p, np.full(6, h / math.log(2)), 0.09, 0.3)
    assert swapped.sum() == 6 and in_bits.sum() == 5  # what those faults would give; right is 4 with the root
    assert acceptance.typical_threshold(h, 0.3, 0.09) == pytest.approx(0.02832, abs=5e-6)
    assert acceptance.typical_threshold(h / math.log(2), 0.09, 0.3) == pytest.approx(0.05658, abs=5e-6)
    assert (Acceptance().epsilon, Acceptance().delta) == (0.09, 0.3)


def test_a_decoding_step_passes_the_parameters_in_the_right_order():
    # p(rank 3) = .06 lies between the right threshold .09 and the swapped one .0283: only a swap accepts it.
    shape, logits = from_paths([[3]]), np.log([A08] * 2)
    assert step_of(shape, [0, 3], logits, Acceptance("typical", 1.0)).rows == [0]
    assert step_of(shape, [0, 3], logits, Acceptance("typical", 1.0, epsilon=0.3, delta=0.09)).rows == [0, 1]


def test_a_tests_own_bound_is_not_enough():
    own = acceptance.typical_tests(np.array([1, 0.09]), np.array([0, 0.0]), 0.09, 1.0)
    assert own.tolist() == [True, False]  # p > threshold, strictly


# ---------------------------------------------------------------------------------------------- slow references


@pytest.mark.parametrize("seed", range(8))
def test_greedy_equals_a_slow_reference(seed):
    rng = random.Random(seed)
    for _ in range(60):
        shape, tokens, logits = random_case(rng)
        wanted = [max(range(len(row)), key=row.__getitem__) for row in logits]
        got = step_of(shape, tokens, logits, Acceptance())
        token = dict(zip(shape.paths, tokens))

        def accepts(path, shape=shape, token=token, wanted=wanted):
            return token[path] == wanted[shape.row_of[path[:-1]]]

        path = slow_longest(shape, accepts, lambda path: 0)
        assert got.rows == shape.path_to(shape.row_of[path])
        assert got.tokens == [tokens[row] for row in got.rows]
        assert got.next_root == wanted[got.rows[-1]]


@pytest.mark.parametrize("seed", range(8))
def test_typical_equals_a_slow_reference(seed):
    rng, ties = random.Random(seed), 0
    for _ in range(60):
        shape, tokens, logits = random_case(rng)
        settings = Acceptance("typical", rng.choice([0.3, 0.7, 1.0, 2.0]), rng.choice([0.05, 0.09, 0.3]),
                              rng.choice([0.1, 0.3, 1.0]))
        soft = [slow_softmax(row, settings.temperature) for row in logits]
        token = dict(zip(shape.paths, tokens))

        def p(path, soft=soft, token=token, shape=shape):
            return soft[shape.row_of[path[:-1]]][token[path]]

        def accepts(path, soft=soft, p=p, shape=shape, settings=settings):
            h = entropy(soft[shape.row_of[path[:-1]]])
            return p(path) > min(settings.epsilon, settings.delta * math.exp(-h))

        def score(path, p=p):
            return sum(math.log(p(path[:n])) for n in range(1, len(path) + 1))

        path = slow_longest(shape, accepts, score)
        got = step_of(shape, tokens, logits, settings)
        assert got.rows == shape.path_to(shape.row_of[path])
        assert got.next_root == max(range(len(logits[0])), key=logits[got.rows[-1]].__getitem__)
        own = [True] + [accepts(path) for path in shape.paths[1:]]
        ties += sum(len(path) == shape.depth[got.rows[-1]] for path, ok in
                    zip(shape.paths, acceptance.passed(shape, np.array(own))) if ok) > 1
    assert ties > 1  # the tie rule was put to the test


@pytest.mark.parametrize("seed", range(4))
def test_a_sampling_walk_equals_drawing_token_by_token(seed):
    rng = random.Random(seed)
    for _ in range(60):
        shape, tokens, logits = random_case(rng)
        settings = Acceptance("rejection", rng.choice([0.5, 1.0, 2.0]), top_p=rng.choice([1.0, 0.7]),
                              seed=rng.randrange(99))
        rows, row = [0], 0
        while row is not None:
            drawn = decoder.next_token(torch.tensor(logits[rows[-1]]), settings, 7 + len(rows))
            row = next((child for child in range(1, shape.nodes + 1)
                        if shape.parent[child] == rows[-1] and tokens[child] == drawn), None)
            rows += [] if row is None else [row]
        got = step_of(shape, tokens, logits, settings, length=7)
        assert (got.rows, got.next_root) == (rows, drawn)


@pytest.mark.parametrize("seed", range(3))
def test_verdicts_say_what_happened_to_every_row(seed):
    rng, seen_words = random.Random(seed), set()
    for _ in range(80):
        shape, _, _ = random_case(rng)
        own = np.array([True] + [rng.random() < 0.6 for _ in range(shape.nodes)])
        has_passed = acceptance.passed(shape, own)
        accepted = acceptance.longest_path(shape, has_passed)
        kept = rng.randint(1, len(accepted))
        words = acceptance.verdicts(shape, own, accepted, kept)
        for row, path in enumerate(shape.paths):
            ancestors = all(own[shape.row_of[path[:n]]] for n in range(len(path)))
            if row in accepted:
                expected = records.ACCEPTED if accepted.index(row) < kept else records.CUT
            elif own[row]:
                expected = records.SHORTER if ancestors else records.BEHIND
            else:
                expected = records.REJECTED
            assert words[row] == expected
            assert has_passed[row] == (ancestors and own[row])
        seen_words |= set(words)
    assert seen_words == {records.ACCEPTED, records.CUT, records.SHORTER, records.BEHIND, records.REJECTED}


def test_a_walk_marks_what_it_looked_at():
    shape = from_paths([[0, 0], [0, 1], [1, 0]])  # rows: root, 0, 1, 00, 01, 10
    walk = acceptance.Walk([0, 1, 4], 9)
    assert walk.seen(shape).tolist() == [True, True, True, True, True, False]
    assert walk.tests(shape).tolist() == [True, True, False, False, True, False]
    words = acceptance.verdicts(shape, walk.tests(shape), walk.rows, 3, walk.seen(shape))
    assert words == ["accepted", "accepted", "rejected", "rejected", "accepted", "unseen"]


def test_ends_are_cut_at_the_first():
    assert acceptance.cut_at_end([5, 6, 2, 7, 2], {2}) == [5, 6, 2]
    assert acceptance.cut_at_end([2], {2}) == [2]
    assert acceptance.cut_at_end((5, 7, 6), [7, 2]) == [5, 7]
    assert acceptance.cut_at_end([5, 6], ()) == [5, 6]


# --------------------------------------------------------------------------------------------- every combination


@pytest.fixture(scope="module")
def small():
    of = backbone(seed=4)
    return of, random_drafter(of), plain_greedy(of, prompt(4), 8)


@pytest.mark.parametrize("mode", ACCEPTANCE_MODES)
@pytest.mark.parametrize("temperature", [0, 1e-6, 0.7, 2])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_every_mode_runs_and_cold_ones_are_greedy(small, mode, temperature, top_p):
    of, drafter, greedy = small
    settings = Acceptance(mode, temperature, top_p=top_p)
    steps = list(decoder.decode(of, drafter, prompt(4), dense([2, 2, 1]), settings, 8))
    tokens = [token for step in steps for token in step.tokens]
    assert len(tokens) == 8 and all(0 <= token < VOCAB for token in tokens)
    if temperature < 0.01 or mode == "greedy":
        assert tokens == greedy


@pytest.mark.parametrize("temperature", [1e-6, 0.1, 0.7, 2])
@pytest.mark.parametrize("spread", [0, 1, 50, 1e4])
def test_no_number_is_nan_or_infinite(temperature, spread):
    shape, generator = dense([3, 3]), torch.Generator().manual_seed(0)
    logits = spread * torch.randn(shape.nodes + 1, 50, generator=generator)
    p, h = decoder.tempered(logits, shape, torch.arange(shape.nodes + 1), temperature)
    assert p.isfinite().all() and h.isfinite().all() and (p >= 0).all() and (p <= 1 + 1e-6).all()
    assert (h >= 0).all() and (h <= math.log(50) + 1e-5).all()
    for top_p in (1.0, 0.5):
        kept = decoder.truncated(logits[0], Acceptance("rejection", temperature, top_p=top_p))
        assert kept.isfinite().all() and kept.sum() >= min(top_p, 1 - 1e-6)
    for mode in ACCEPTANCE_MODES:
        got = step_of(shape, list(range(shape.nodes + 1)), logits, Acceptance(mode, temperature))
        assert got.rows[0] == 0 and 0 <= got.next_root < 50


def test_a_token_that_the_model_rules_out_counts_nothing():
    logits = torch.tensor([[1.0, 2.0, -math.inf, 0.5]] * 2)
    p, h = decoder.tempered(logits, dense([1]), torch.tensor([0, 2]), 0.7)
    assert p[1] == 0 and float(h[1]) == pytest.approx(entropy(slow_softmax([1.0, 2.0, 0.5], 0.7)), abs=1e-6)


@pytest.mark.parametrize("field, value", [("mode", "beam"), ("temperature", -0.1), ("temperature", 2.1), ("epsilon", 0),
                                          ("delta", float("nan")), ("top_p", 0), ("top_p", float("inf")), ("seed", -1),
                                          ("seed", 0.5), ("temperature", "1"), ("temperature", True), ("seed", 10**400),
                                          ("temperature", None)])
def test_settings_out_of_bounds_are_refused_by_name(field, value):
    with pytest.raises(SettingsError, match=field):
        Acceptance(**{field: value})


# -------------------------------------------------------------------------------------------------- distributions


def chi_square(counts, p):
    """Statistic and degrees of freedom; cells of fewer than 5 expected draws are put together."""
    n = counts.sum()
    small = p * n < 5
    counts = np.append(counts[~small], counts[small].sum())
    expected = np.append(p[~small], p[small].sum()) * n
    if expected[-1] < 5:
        assert counts[-1] <= 25
        counts, expected = counts[:-1], expected[:-1]
    return ((counts - expected) ** 2 / expected).sum(), len(counts) - 1


def assert_drawn_from(counts, p):
    statistic, freedom = chi_square(np.asarray(counts, float), np.asarray(p, float))
    # Wilson-Hilferty: a right sampler passes 3.5 deviations 4,999 times of 5,000, and the seeds are fixed.
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    assert z < 3.5, f"chi-square {statistic:.1f} at {freedom} degrees of freedom"


@pytest.mark.parametrize("temperature, top_p", [(1.0, 1.0), (0.6, 1.0), (1.5, 0.8)])
def test_draws_follow_the_tempered_and_truncated_softmax(temperature, top_p):
    logits = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -3.0])
    p = slow_softmax(logits.tolist(), temperature)
    order, held = sorted(range(8), key=lambda token: -p[token]), 0.0
    nucleus = []
    for token in order:  # the smallest set that holds top_p
        nucleus.append(token)
        held += p[token]
        if held >= top_p:
            break
    expected = [p[token] / sum(p[t] for t in nucleus) if token in nucleus else 0 for token in range(8)]
    counts = np.zeros(8)
    for seed in range(6000):
        counts[decoder.next_token(logits, Acceptance("rejection", temperature, top_p=top_p, seed=seed), seed % 7)] += 1
    assert_drawn_from(counts, expected)
    assert counts[[token for token in range(8) if token not in nucleus]].sum() == 0


@pytest.mark.parametrize("top_p", [1.0, 0.75])
def test_rejection_preserves_the_distribution_of_texts(top_p):
    """Joint distribution of the first three tokens, over many seeds, against the exact one by the chain rule."""
    vocab, ids, temperature = 4, [1, 3, 2], 1.3
    of = backbone(vocab_size=vocab, num_hidden_layers=1, seed=1, spread=0.25)
    drafter = random_drafter(of, heads=2)
    exact = np.zeros((vocab, vocab, vocab))
    settings = Acceptance("rejection", temperature, top_p=top_p)

    def following(text):
        p = decoder.truncated(of.prefill([*ids, *text], of.new_cache(8)).logits[0], settings)
        return (p / p.sum()).tolist()

    for a, pa in enumerate(following([])):
        for b, pb in enumerate(following([a])):
            for c, pc in enumerate(following([a, b])):
                exact[a, b, c] = pa * pb * pc
    counts, committed = np.zeros_like(exact), 0
    for seed in range(900):
        drawn = Acceptance("rejection", temperature, top_p=top_p, seed=seed)
        steps = list(decoder.decode(of, drafter, ids, dense([2, 2]), drawn, 3))
        committed += len(steps)
        counts[tuple(token for step in steps for token in step.tokens)] += 1
    assert_drawn_from(counts.ravel(), exact.ravel())
    assert committed < 900 * 3  # drafts were accepted
