"""The decoder: any tree and any heads give plain greedy's text, limits are exact, sampling ignores the tree."""

import random

import pytest
import torch
from tiny import (
    KINDS,
    MC_SIM_7B_63,
    VOCAB,
    backbone,
    mixed_ranks,
    oracle_drafter,
    plain_greedy,
    plain_logits,
    prompt,
    random_drafter,
    random_shape,
)

from medusa_viz.decoding import decoder
from medusa_viz.decoding.check import equals_greedy
from medusa_viz.decoding.decoder import PLAIN, decode
from medusa_viz.decoding.metrics import Metrics, measure
from medusa_viz.decoding.settings import ACCEPTANCE_MODES, Acceptance
from medusa_viz.decoding.tree import MAX_NODES, TreeError, dense, from_paths, parse_paths
from medusa_viz.models.cache import TreeCache
from medusa_viz.tuning.builders import sparse

GREEDY = Acceptance()
NONE = ()  # no end ids


def run(of, drafter, ids, shape, tokens, settings=GREEDY, end_ids=NONE):
    """All steps, and the tokens they committed."""
    steps = list(decode(of, drafter, ids, shape, settings, tokens, end_ids))
    return steps, [token for step in steps for token in step.tokens]


@pytest.fixture(scope="module")
def exact():
    """Double precision: a backbone, a prompt, its greedy text, and heads that often know it."""
    of, ids = backbone(dtype=torch.float64), prompt(0)
    text = plain_greedy(of, ids, 60)
    return of, ids, text, oracle_drafter(of, ids, text, heads=4, rank=mixed_ranks(0))


# -------------------------------------------------------------------------------------------------- equals plain greedy


def random_steps(of, drafter, ids, text, rng, widths, heads):
    """One run with a new random tree at every step; the lengths of the accepted paths, root included."""
    state, written, lengths = decoder.start(of, ids, GREEDY), [], []
    while len(written) < len(text) - heads - 1:
        shape = random_shape(rng, heads, widths, paths=8)
        plan = decoder.plan(shape, of, drafter)
        candidates = decoder.propose(drafter, state, plan)
        forward = decoder.verify(of, state, plan, candidates)
        accepted = decoder.accept(forward, state, plan, candidates, GREEDY)
        decoder.commit(state, forward, accepted)
        written += accepted.tokens
        lengths.append(len(accepted.tokens))
        assert state.cache.length == len(ids) + len(written)
    assert written == text[: len(written)]
    return lengths


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma3_text", "gpt2"])
def test_thousands_of_random_trees_write_what_plain_greedy_writes(kind):
    of, ids, rng, lengths = backbone(kind, dtype=torch.float64), prompt(0), random.Random(kind), []
    text = plain_greedy(of, ids, 60)
    drafters = [random_drafter(of, heads=4, own=True), *(
        oracle_drafter(of, ids, text, heads=4, rank=mixed_ranks(seed)) for seed in range(4))]
    for _ in range(5):
        for drafter in drafters:
            lengths += random_steps(of, drafter, ids, text, rng, widths=3, heads=4)
    assert len(lengths) > 750  # one tree each; the four architectures make thousands
    assert {1, 2, 3, 4, 5} == set(lengths)  # all depths were reached, so long paths were really committed


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_architecture_writes_its_own_greedy_text(kind):
    has_experts = kind in ("mixtral", "gpt_oss", "deepseek_v3")  # whose kernels know no double precision
    of, ids = backbone(kind, dtype=torch.float32 if has_experts else torch.float64), prompt(1)
    text = plain_greedy(of, ids, 40)
    drafter = oracle_drafter(of, ids, text, heads=3, rank=mixed_ranks(1))
    steps, tokens = run(of, drafter, ids, dense([3, 2, 2]), 36)
    assert tokens == text[:36]
    assert len(steps) < 25


@pytest.mark.parametrize("heads", ["random", "shared", "draft vocabulary", "oracle"])
@pytest.mark.parametrize("shape", [PLAIN, dense([1] * 4), dense([3, 2, 2, 1]), dense([5]), from_paths(MC_SIM_7B_63),
                                   sparse([[0.6, 0.2, 0.1], [0.4, 0.2], [0.3, 0.1], [0.2]], 16),
                                   from_paths([[7, 0], [2, 9, 1]])],
                         ids=["plain", "chain", "dense", "wide", "published", "sparse", "odd ranks"])
def test_any_heads_and_any_shape(exact, heads, shape):
    of, ids, text, oracle = exact
    drafter = {"random": random_drafter(of, 4, own=True), "shared": random_drafter(of, 4), "oracle": oracle,
               "draft vocabulary": random_drafter(of, 4, draft_ids=sorted({*text[:30:2], *range(12)}))}[heads]
    steps, tokens = run(of, drafter, ids, shape, 40)
    assert tokens == text[:40] and steps[-1].finish == "length"
    assert equals_greedy(of, ids, tokens) is None
    if shape is PLAIN:
        assert all(len(step.tokens) == 1 and step.nodes == 0 for step in steps)
        assert run(of, None, ids, PLAIN, 40)[1] == tokens
    if heads == "oracle" and shape.height == 4 and shape.widths[0] >= 3:
        assert len(steps) < 26
    for step in steps[:-1]:
        assert 1 <= len(step.tokens) <= shape.height + 1 and step.finish is None


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_single_precision_too(kind, attention):
    of, ids = backbone(kind, attention=attention), prompt(2)
    text = plain_greedy(of, ids, 50)
    for seed in range(3):
        drafter = oracle_drafter(of, ids, text, heads=3, rank=mixed_ranks(seed))
        assert run(of, drafter, ids, dense([3, 2, 2]), 46)[1] == text[:46]


def test_perfect_heads_commit_a_whole_chain_at_each_step():
    of, ids = backbone(dtype=torch.float64), prompt(3)
    text = plain_greedy(of, ids, 40)
    steps, tokens = run(of, oracle_drafter(of, ids, text, heads=4), ids, dense([1] * 4), 36)
    assert tokens == text[:36]
    assert [len(step.tokens) for step in steps] == [5, 5, 5, 5, 5, 5, 5, 1]
    assert [step.nodes for step in steps] == [4] * 7 + [0]  # one token was left: no forward for it
    assert sum(len(step.tokens) for step in steps) / len(steps) == 4.5  # tokens per step; the prefill is none


def test_steps_count_as_field_case_a09_does():
    """Steps that commit [3, 1, 2, 4] with three heads: tokens per step 2.5, drafts 1.5, by depth 3/4, 2/4, 1/4."""
    of, ids = backbone(dtype=torch.float64), prompt(3)
    text = plain_greedy(of, ids, 40)
    wrong_from = {0: 3, 3: 1, 4: 2, 6: 9}  # place of the root -> depth from which the heads are wrong
    drafter = oracle_drafter(of, ids, text, rank=lambda place, k: 5 if k >= wrong_from.get(place, 1) else 0)
    steps = list(decode(of, drafter, ids, dense([1, 1, 1]), GREEDY, 30, NONE))[:4]
    committed = [len(step.tokens) for step in steps]
    assert committed == [3, 1, 2, 4]
    assert measure(committed, heads=3) == Metrics(4, 10, 2.5, 1.5, [3 / 4, 2 / 4, 1 / 4])


def test_metrics_of_short_and_empty_runs(exact):
    of, ids, _, drafter = exact
    assert measure([], heads=2) == Metrics(0, 0, 0.0, 0.0, [0.0, 0.0])
    assert measure([1, 1], heads=2) == Metrics(2, 2, 1.0, 0.0, [0.0, 0.0])
    for limit in range(1, 20):  # the last step, cut by the limit, counts what was kept
        steps, _ = run(of, drafter, ids, dense([3, 2, 2, 1]), limit)
        metrics = measure([len(step.tokens) for step in steps], heads=4)
        assert metrics.tokens == limit and all(0 <= rate <= 1 for rate in metrics.accepted_per_depth)
        assert metrics.tokens_per_step == pytest.approx(1 + sum(metrics.accepted_per_depth))
        assert metrics.accepted_per_depth == sorted(metrics.accepted_per_depth, reverse=True)


def test_the_order_in_which_a_tree_is_written_changes_nothing(exact):
    of, ids, text, drafter = exact
    texts = ["[[0,1],[0],[1],[0,0]]", "[[0],[1],[0,0],[0,1]]", "[[0,1],[1],[0,0]]"]  # field case A04
    runs = [run(of, drafter, ids, parse_paths(tree)[0], 30) for tree in texts]
    assert all([step.tokens for step in steps] == [step.tokens for step in runs[0][0]] for steps, _ in runs)
    assert runs[0][1] == text[:30]


def test_a_node_holds_its_heads_token_of_its_rank(exact):
    of, ids, _, _ = exact
    drafter = random_drafter(of, heads=2, own=True)
    state = decoder.start(of, ids, GREEDY)
    best = drafter.logits(state.hidden)[:, 0].argsort(-1, descending=True)
    shape, _ = parse_paths("[[0],[12],[0,0]]")  # field case A02
    tokens = decoder.propose(drafter, state, decoder.plan(shape, of, drafter)).tokens.tolist()
    assert tokens == [state.root, int(best[0, 0]), int(best[0, 12]), int(best[1, 0])]
    rng = random.Random(0)
    for _ in range(50):
        shape = random_shape(rng, heads=2, width=20)
        got = decoder.propose(drafter, state, decoder.plan(shape, of, drafter), width=10)
        assert got.tokens.tolist()[1:] == [int(best[len(path) - 1, path[-1]]) for path in shape.paths[1:]]


def test_trees_that_the_heads_cannot_fill_are_refused_before_any_forward(exact):
    of, ids, _, _ = exact
    three, few = random_drafter(of, heads=3), random_drafter(of, heads=3, draft_ids=[1, 2, 3])
    of_forward, of.model.forward = of.model.forward, lambda **_: 1 / 0
    try:
        for drafter, shape, words in ((three, from_paths(MC_SIM_7B_63), "depth 4.* 3 heads"),  # field case A01
                                      (three, dense([1] * 4), "depth 4.* 3 heads"), (None, dense([1]), "0 heads"),
                                      (three, from_paths([[VOCAB]]), f"rank {VOCAB}.* {VOCAB} tokens"),
                                      (few, from_paths([[0, 3]]), "rank 3.* 3 tokens"),
                                      (three, dense([150, 150]), f"{MAX_NODES:,}")):
            with pytest.raises(TreeError, match=words):
                decoder.plan(shape, of, drafter)
        with pytest.raises(TreeError):
            next(decode(of, three, ids, dense([1] * 4), GREEDY, 1))
    finally:
        of.model.forward = of_forward
    assert run(of, three, ids, from_paths(MC_SIM_7B_63).trimmed(3), 5)[1]


# ---------------------------------------------------------------------------------------------------------------- ends


@pytest.fixture
def caches(monkeypatch):
    """Every cache that a backbone hands out."""
    made = []
    new_cache = decoder.Backbone.new_cache
    monkeypatch.setattr(decoder.Backbone, "new_cache",
                        lambda self, rows: made.append(new_cache(self, rows)) or made[-1])
    return made


@pytest.mark.parametrize("where", range(5))
@pytest.mark.parametrize("ends", ["one id", "list", "config", "generation config"])
def test_an_end_token_inside_an_accepted_block(caches, where, ends):
    """Field case A07: the block [a, b, END, c, d] is accepted; c and d are neither shown, counted, nor kept."""
    of, ids = backbone(dtype=torch.float64), prompt(1)
    text = plain_greedy(of, ids, 12)
    assert len(set(text[:5])) == 5
    end, other = text[where], next(token for token in range(VOCAB) if token not in text)
    of.config.eos_token_id = end if ends == "config" else other
    of.model.generation_config.eos_token_id = {"config": None, "generation config": end}.get(ends, other)
    given = {"one id": {end}, "list": [other, end]}.get(ends)
    drafter = oracle_drafter(of, ids, text, heads=4)
    steps = list(decode(of, drafter, ids, dense([1] * 4), GREEDY, 30, given))
    assert [step.tokens for step in steps] == [text[: where + 1]]
    assert steps[0].finish == "end"
    if where:
        assert caches[-1].length == len(ids) + where + 1
    plain = list(decode(of, None, ids, PLAIN, GREEDY, 30, given))
    assert [token for step in plain for token in step.tokens] == text[: where + 1] and plain[-1].finish == "end"


def test_without_an_end_id_it_runs_to_the_limit(exact):
    of, ids, text, drafter = exact
    assert of.end_ids == frozenset()
    steps = list(decode(of, drafter, ids, dense([2, 2]), GREEDY, 30))
    assert [token for step in steps for token in step.tokens] == text[:30] and steps[-1].finish == "length"


@pytest.mark.parametrize("seed", range(3))
def test_end_tokens_stop_where_plain_greedy_stops(exact, seed):
    of, ids, text, drafter = exact
    rng = random.Random(seed)
    for _ in range(25):
        ends = set(rng.sample(sorted(set(text)) + list(range(VOCAB)), 2))
        right = next((text[: i + 1] for i, token in enumerate(text[:30]) if token in ends), text[:30])
        steps, tokens = run(of, drafter, ids, random_shape(rng, 4, 3), 30, end_ids=ends)
        assert tokens == right
        assert steps[-1].finish == ("end" if right[-1] in ends else "length")


@pytest.mark.parametrize("shape", [PLAIN, dense([1] * 4), dense([3, 2, 2, 1])], ids=["plain", "chain", "dense"])
def test_every_limit_is_met_to_the_token(exact, caches, shape):
    of, ids, text, drafter = exact
    for limit in range(1, 24):
        steps, tokens = run(of, drafter, ids, shape, limit)
        assert tokens == text[:limit]
        assert [step.finish for step in steps] == [None] * (len(steps) - 1) + ["length"]
        assert caches[-1].length <= len(ids) + limit
    assert run(of, drafter, ids, shape, 0) == ([], [])


@pytest.mark.parametrize("kind, name", [("llama", "max_position_embeddings"), ("gpt2", "n_positions")])
@pytest.mark.parametrize("room", [0, 1, 2, 3, 6, 9])
def test_the_context_is_filled_to_the_last_token_and_never_passed(kind, name, room):
    # GPT-2 looks its positions up in a table, so one position too many raises.
    long, ids = backbone(kind, dtype=torch.float64), prompt(5)
    text = plain_greedy(long, ids, 24)
    drafter = oracle_drafter(long, ids, text, heads=4, rank=mixed_ranks(2))
    short = backbone(kind, dtype=torch.float64, **{name: len(ids) + room})
    missing, unexpected = short.model.load_state_dict(
        {key: value[: len(ids) + room] if "wpe" in key else value for key, value in long.model.state_dict().items()})
    assert not missing and not unexpected and short.context == len(ids) + room
    for shape in (PLAIN, dense([3, 2, 2, 1])):
        steps, tokens = run(short, drafter, ids, shape, 1000)
        assert tokens == text[:room]
        assert not steps or steps[-1].finish == "context"
        if room:
            assert run(short, drafter, ids, shape, room)[0][-1].finish == "length"  # both at once: the asked-for limit


def test_no_forward_is_run_for_a_token_that_needs_none(exact, monkeypatch):
    of, ids, text, drafter = exact
    rows = []
    real = decoder.Backbone.verify
    monkeypatch.setattr(decoder.Backbone, "verify", lambda self, tokens, *rest: rows.append(len(tokens)) or real(
        self, tokens, *rest))
    run(of, drafter, ids, dense([2, 2, 2]), 1)
    assert rows == []
    run(of, drafter, ids, dense([2, 2, 2]), 30, end_ids={text[0]})
    assert rows == []
    run(of, drafter, ids, dense([2, 2, 2]), 2)
    assert rows == [3]  # the second token is the last, so only depth 1 was drafted


def test_runs_share_nothing(exact):
    of, ids, text, drafter = exact
    one = decode(of, drafter, ids, dense([2, 2]), GREEDY, 20, NONE)
    other_text = plain_greedy(of, prompt(8), 20)
    other = decode(of, None, prompt(8), PLAIN, GREEDY, 20, NONE)
    got, others = [], []
    for step in one:
        got += step.tokens
        others += next(other).tokens if len(others) < 20 else []
    assert got == text[:20] and others == other_text[: len(others)]


def test_timings_are_measured_for_every_part(exact):
    of, ids, _, drafter = exact
    steps, _ = run(of, drafter, ids, dense([2, 2]), 10)
    for step in steps:
        parts = [step.timings.propose, step.timings.verify, step.timings.accept, step.timings.commit]
        assert all(part is not None and part >= 0 for part in parts) or step.nodes == 0
        assert step.timings.total == pytest.approx(sum(part or 0 for part in parts))


# ------------------------------------------------------------------------------------------------------------- sampling


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_sampled_text_depends_on_the_seed_and_not_on_the_tree(exact, top_p):
    of, ids, _, oracle = exact
    rng, texts, accepted = random.Random(0), set(), 0
    for seed in range(12):
        settings = Acceptance("rejection", 0.8, top_p=top_p, seed=seed)
        plain = run(of, None, ids, PLAIN, 24, settings)[1]
        for drafter in (random_drafter(of, 4), oracle):
            steps, tokens = run(of, drafter, ids, random_shape(rng, 4, 4, paths=20), 24, settings)
            assert tokens == plain
            accepted += len(tokens) - len(steps)
        assert run(of, None, ids, PLAIN, 24, settings)[1] == plain
        texts.add(tuple(plain))
    assert len(texts) == 12 and accepted > 20


@pytest.mark.parametrize("mode", ACCEPTANCE_MODES)
def test_a_cold_run_is_greedy_in_every_mode(exact, mode):
    of, ids, text, drafter = exact
    assert run(of, drafter, ids, dense([3, 2, 2]), 30, Acceptance(mode, 0.0, seed=5))[1] == text[:30]


def test_typical_acceptance_commits_only_tokens_that_pass(exact):
    """Every committed token passes its test at its prefix or is the argmax: judged by plain forwards."""
    of, ids, _, drafter = exact
    settings, departed = Acceptance("typical", 1.5, epsilon=0.05, delta=0.8), 0
    steps, tokens = run(of, drafter, ids, dense([4, 3, 2]), 40, settings)
    after = plain_logits(of, [*ids, *tokens])[len(ids) - 1 :]
    place = 0
    for step in steps:
        assert step.tokens[0] == int(after[place].argmax())  # the root
        for token in step.tokens[1:]:
            place += 1
            p = (after[place] / 1.5).softmax(-1)
            entropy = torch.special.entr(p).sum()
            assert p[token] > min(0.05, 0.8 * float((-entropy).exp()))
            departed += token != int(after[place].argmax())
        place += 1
    assert len(steps) < 38 and departed > 3


def test_a_cache_is_never_left_on_the_model(exact):
    of, ids, _, drafter = exact
    run(of, drafter, ids, dense([2, 2]), 10)
    for module in of.model.modules():
        assert not any(isinstance(value, TreeCache) for value in vars(module).values())
