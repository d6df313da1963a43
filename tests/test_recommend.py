"""The recommendation, the survey behind it, trees measured for real, and the threshold study."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_latency import curve_of
from test_specs import ALL, table
from tiny import backbone, oracle_drafter, plain_greedy, prompt

from medusa_viz.decoding.settings import Acceptance
from medusa_viz.decoding.tree import dense
from medusa_viz.models import checkpoints
from medusa_viz.models.presets import DEFAULT_PRESET, heads_folder
from medusa_viz.tuning import measure_trees, thresholds
from medusa_viz.tuning.accuracy import Calibration, shares
from medusa_viz.tuning.bench import BenchError
from medusa_viz.tuning.builders import expected_tokens_per_step, sparse
from medusa_viz.tuning.calibration import known_of
from medusa_viz.tuning.dynamic import dynamic
from medusa_viz.tuning.jobs import Cancelled, Progress, finish
from medusa_viz.tuning.joint import joint
from medusa_viz.tuning.published_trees import published
from medusa_viz.tuning.recommend import COMPARED, Option, Survey, publishing, recommend, repriced, scattering
from medusa_viz.tuning.replay import replay, subset
from medusa_viz.tuning.specs import Facts, build

A11 = ((8, 1.9, 11.0), (16, 2.1, 13.0), (32, 2.25, 22.0), (64, 2.35, 40.0))


def known(seed=0) -> Calibration:
    ranks = table(seed)
    p = np.random.default_rng(0).dirichlet(np.ones(12), (len(ranks.ranks), 4))[..., :10]
    return Calibration(ranks, np.arange(40) // 2, np.arange(40) % 4 < 2, (1.0,) * 4,
                       -np.sort(-p).astype(np.float16))


def options(changed_first=None):
    return [Option(f"sparse:{nodes}", nodes, dense([nodes]), tokens, None, changed_first if changed_first and nodes == 8
                   else ms) for nodes, tokens, ms in A11]


def test_the_fastest_tree_is_not_the_largest():
    """Field case A11."""
    found = recommend(options(), 10.0)
    assert [option.tokens_per_second for option in options()] == pytest.approx([172.7, 161.5, 102.3, 58.8], abs=0.06)
    assert found.plain_tokens_per_second == 100 and found.best.nodes == 8 and not found.plain_is_faster
    assert found.gain == pytest.approx(1.727, abs=1e-3)


def test_plain_decoding_is_advised_where_it_is_faster():
    slow = [option for option in options(25.0) if option.nodes in (8, 64)]
    assert [option.tokens_per_second for option in slow] == pytest.approx([76.0, 58.75])
    found = recommend(slow, 10.0)
    assert found.plain_is_faster and found.best is None and found.gain == 1.0
    assert recommend([], 10.0).plain_is_faster
    assert recommend([Option("sparse:3", 3, dense([3]), 1.5)], 10.0).plain_is_faster  # no step time, no claim


def test_what_no_prediction_tells_apart_goes_to_one_tree_for_all_steps():
    rebuilt = Option("dynamic:8", 8, dynamic(3, 8), None, SimpleNamespace(tokens_per_step=1.909), 11.0)
    assert recommend([rebuilt, *options()], 10.0).best.spec == "sparse:8"
    ahead = Option("dynamic:8", 8, dynamic(3, 8), None, SimpleNamespace(tokens_per_step=2.0), 11.0)
    assert recommend([ahead, *options()], 10.0).best.spec == "dynamic:8"


def test_the_survey_judges_each_tree_on_text_it_was_not_built_from():
    what, curve = known(), curve_of(lambda rows: 10 + rows)
    facts = Facts(4, (), what.table, None, what.temperatures)
    survey = Survey(facts, what, curve)
    found = {option.spec: option for option in finish(survey.running(budgets=(3, 9)))}
    assert list(found) == [f"{name}:{n}" for name in COMPARED for n in (3, 9)]
    for name, grow in (("sparse", lambda guide, n: sparse(shares(guide), n)),
                       ("joint", lambda guide, n: joint(guide, shares(guide), n))):
        for n in (3, 9):
            one, other = (subset(what.table, what.fold == half) for half in (False, True))
            steps = replay(grow(one, n), other).steps + replay(grow(other, n), one).steps
            option = found[f"{name}:{n}"]
            assert option.replayed.tokens_per_step == pytest.approx(what.table.lengths.sum() / steps)
            assert option.replayed.low < option.replayed.tokens_per_step < option.replayed.high
            assert option.tokens_per_second == pytest.approx(
                1e3 * option.replayed.tokens_per_step / option.milliseconds)
            assert option.tree.fingerprint == grow(what.table, n).fingerprint  # the tree itself knows all of it
            assert option.expected == pytest.approx(expected_tokens_per_step(option.tree, facts.rates))
    assert found["dynamic:9"].expected is None and found["dynamic:9"].replayed.tokens_per_step > 1
    assert found["dynamic:9"].milliseconds - found["sparse:9"].milliseconds == pytest.approx(1.0)


def test_the_survey_takes_what_it_is_given():
    facts = Facts(4, ALL.accuracy)
    bare = finish(Survey(facts).running(budgets=(3,)))  # joint lacks a rank table
    assert [option.spec for option in bare] == ["sparse:3", "best-dense:3", "sequoia:3", "dynamic:3"]
    assert all(option.replayed is None and option.milliseconds is None for option in bare)
    unsure = Calibration(known().table, known().prompts, known().fold)
    assert Survey(Facts(4, (), unsure.table), unsure).of_budget("dynamic", 5).replayed is None
    edited = build("published:mc_sim_7b_63", facts)
    own = Survey(facts, known()).of_tree("published:mc_sim_7b_63", edited)
    assert own.replayed.tokens_per_step == pytest.approx(replay(edited.shape, known().table).tokens_per_step)
    one_half = Calibration(known().table, known().prompts, np.zeros(40, bool))
    alone = Survey(Facts(4, (), one_half.table), one_half).of_budget("sparse", 9).replayed
    assert alone.tokens_per_step == pytest.approx(
        replay(sparse(shares(one_half.table), 9), one_half.table).tokens_per_step)


def test_the_survey_has_sequoia_at_the_size_that_step_times_favour():
    what, curve = known(), curve_of(lambda rows: 10 + 0.4 * rows)
    for batch in (1, 2):
        survey = Survey(Facts(4, (), what.table), what, curve, batch)
        wanted = build("sequoia", Facts(4, (), what.table, lambda n, batch=batch: curve.step_ms(n, batch))).shape
        found = {option.spec: option for option in finish(survey.running(("sequoia",), (63,)))}
        assert list(found) == [f"sequoia:{survey.favoured}", "sequoia:63"] and survey.favoured == wanted.nodes
        assert found[f"sequoia:{wanted.nodes}"].expected == pytest.approx(
            expected_tokens_per_step(wanted, shares(what.table)))
    assert Survey(Facts(4, (), what.table), what).favoured == 0  # no step times


def test_published_trees_and_the_largest_sequoia_under_the_default_heads():
    loaded = checkpoints.load(heads_folder(DEFAULT_PRESET))
    ranked = known_of(loaded.source, loaded.module)
    survey = Survey(Facts(loaded.module.heads, (), ranked.table), ranked)
    found = finish(publishing(survey))
    assert [option.spec for option in found] == [f"published:{name}" for name in published()]
    best = survey.of_budget("sparse", 63)
    for option in found:
        assert option.nodes == 63 and not option.notes
        assert 1.5 < option.replayed.tokens_per_step < best.replayed.high and option.expected <= best.expected
    whole, sparsest = survey.of_budget("sequoia", 4680), survey.of_budget("sparse", 4680)
    assert whole.nodes == sparsest.nodes == 4680 and whole.expected == pytest.approx(sparsest.expected)


def test_a_larger_batch_wants_a_smaller_tree():
    what = known()
    curve = curve_of(lambda rows: 10 + 0.05 * rows + 0.4 * max(rows - 32, 0), (1, 4, 16, 32, 64, 256, 512))
    trees = finish(Survey(Facts(4, (), what.table), what, curve).running(("sparse",), (1, 3, 7, 15, 31, 63)))
    sizes = []
    for batch in (1, 4, 8, 32):
        found = recommend(repriced(trees, curve, batch), curve.step_ms(0, batch))
        sizes.append(found.best.nodes if found.best else 0)
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[-1]


def test_the_scatter_has_random_and_chosen_trees_of_every_size():
    found = finish(scattering(Survey(ALL, known()), (4, 16), draws=3))
    assert {name: len(points) for name, points in found.items()} == {"random-dense": 6, "random-sparse": 6,
                                                                     "best-dense": 2, "sparse": 2}
    for place, n in enumerate((4, 16)):
        drawn = [point.replayed.tokens_per_step for point in found["random-sparse"][3 * place : 3 * place + 3]]
        assert max(drawn) < found["sparse"][place].replayed.tokens_per_step, n


# ----------------------------------------------------------------------------------------------------------- measuring


@pytest.fixture(scope="module")
def engine():
    of = backbone(dtype=torch.float64)
    return SimpleNamespace(backbone=of, title="tiny",
                           drafter=oracle_drafter(of, prompt(0), plain_greedy(of, prompt(0), 40)))


def test_trees_are_measured_beside_plain_decoding(engine):
    heard, prompts = [], [prompt(0), prompt(1)]
    found = finish(measure_trees.measuring(engine, {"chain": dense([1, 1, 1]), "dynamic:4": dynamic(3, 4)}, prompts, 13,
                                           rounds=2), heard.append)
    plain, chain, rebuilt = found
    assert [run.name for run in found] == ["plain", "chain", "dynamic:4"] and plain.tokens_per_step == 1.0
    assert chain.tokens_per_step > 1.5 and rebuilt.tokens_per_step > 1.5 and (chain.nodes, rebuilt.nodes) == (3, 4)
    for run in found:
        assert run.equals_greedy is True and run.tokens == 26
        assert run.slowest <= run.fastest and run.tokens_per_second > 0 and run.ms_per_step > 0
        assert run.prompts == run.asked == 2
    assert heard[-1].done == heard[-1].total == 15 and len(heard) > 60  # three warm-ups, then a part for each step


def test_measuring_that_stops_leaves_the_prompts_that_all_trees_decoded(engine):
    prompts = [prompt(0), prompt(1), prompt(2)]
    left: dict[int, list] = {}
    for now in parts(measure_trees.measuring(engine, {"chain": dense([1, 1]), "fan": dense([3])}, prompts, 9)):
        left.setdefault(now.done, []).append(now.so_far)
    assert not any(so_far for done in range(6) for so_far in left[done]), "one prompt, but not with every tree"
    for done, so_far in ((7, left[7][-1]), (8, left[8][0]), (10, left[10][-1])):
        covered = (done - 3) // 3
        assert [run.name for run in so_far] == ["plain", "chain", "fan"]
        assert {(run.prompts, run.asked) for run in so_far} == {(covered, 3)}, "the same prompts for each"
        assert {run.tokens for run in so_far} == {9 * covered} and all(run.equals_greedy is True for run in so_far)
    assert so_far[1].tokens_per_step > so_far[0].tokens_per_step == 1.0


def test_a_second_round_that_stops_leaves_the_first(engine):
    heard = parts(measure_trees.measuring(engine, {}, [prompt(0), prompt(1)], 9, rounds=2))
    so_far = next(now.so_far for now in heard if now.done == 4)
    assert [(run.prompts, run.tokens) for run in so_far] == [(2, 18)] and so_far[0].slowest <= so_far[0].fastest


def parts(job) -> list[Progress]:
    """All that a job tells on its way."""
    heard: list[Progress] = []
    finish(job, heard.append)
    return heard


def test_other_acceptance_is_measured_and_not_held_against_greedy(engine):
    found = finish(measure_trees.measuring(engine, {"chain": dense([1, 1])}, [prompt(0)], 9,
                                           settings=Acceptance("typical", 0.7)))
    assert all(run.equals_greedy is None for run in found) and found[0].tokens == 9


def test_measuring_stops_between_two_steps_and_refuses_what_leaves_no_room(engine):
    steps = []
    with pytest.raises(Cancelled):
        finish(measure_trees.measuring(engine, {}, [prompt(0)], 30), steps.append, lambda: len(steps) == 5)
    assert len(steps) == 5
    for prompts, tokens in (([prompt(0)], 1), ([], 9)):
        with pytest.raises(BenchError, match="Two new tokens"):
            finish(measure_trees.measuring(engine, {}, prompts, tokens))


def test_a_predictions_error_is_in_percent_of_what_was_measured():
    assert measure_trees.error_percent(1.1, 1.0) == pytest.approx(10)
    assert measure_trees.error_percent(None, 1.0) is None and measure_trees.error_percent(1.0, 0.0) is None


# ------------------------------------------------------------------------------------------------------ threshold study


def test_the_study_has_a_point_for_each_setting_and_marks_to_read_them_by(engine):
    heard = []
    job = thresholds.studying(engine, dense([3, 2]), [prompt(0), prompt(1)], (0.01, 0.09, 0.25), (0.4, 0.7), 12)
    found = finish(job, heard.append)
    points = list(found.points)
    assert found.asked == len(points) == 8 and heard[0].so_far is None
    assert [now.so_far.points for now in heard if now.done == 6][-1] == found.points[:3]
    assert heard[-1].so_far == found
    assert [(point.kind, point.temperature) for point in points[:4]] == [("greedy", 0.7), ("sampling", 0.7),
                                                                         ("greedy", 0.4), ("sampling", 0.4)]
    typical = points[4:]
    assert [(point.temperature, point.epsilon) for point in typical] == [(0.7, 0.01), (0.7, 0.09), (0.7, 0.25),
                                                                         (0.4, 0.09)]
    assert all(point.delta == pytest.approx(math.sqrt(point.epsilon)) for point in typical)
    assert all(point.tokens_per_step == 1 and point.epsilon is None for point in points[:4])
    assert all(point.tokens == 24 for point in points) and heard[-1].done == heard[-1].total == 16
    rates = [point.tokens_per_step for point in typical[:3]]
    assert rates == sorted(rates, reverse=True)  # a higher threshold accepts less
    assert points[0].proxy.surprise < points[1].proxy.surprise  # greedy text plays safer than drawn text
    assert points[0].proxy.distinct_3 == points[2].proxy.distinct_3  # the same text, judged at another T


def test_the_proxys_parts(engine):
    of, ids, text = engine.backbone, prompt(4), [3, 1, 4, 1, 5, 9, 2, 6]
    logits = of.model(input_ids=torch.tensor([[*ids, *text]]), use_cache=False).logits[0, len(ids) - 1 : -1]
    log_p = (logits / 0.6).log_softmax(-1)
    right = -log_p[torch.arange(8), text] + (log_p.exp() * log_p).sum(-1)
    assert thresholds.surprise(of, ids, text, 0.6) == pytest.approx(float(right.sum()), rel=1e-5)
    looping = finish(thresholds.judging(of, [ids, ids], [[1, 2, 3] * 4, [4, 5]], 0.7))
    assert looping.distinct_3 == pytest.approx(3 / 10) and looping.repeated_4 == pytest.approx(6 / 9)
    assert finish(thresholds.judging(of, [ids], [[7]], 0.7)).repeated_4 == 0.0
    drawn = [int(torch.multinomial(log_p.exp()[0].float(), 1, generator=torch.Generator().manual_seed(seed)))
             for seed in range(400)]
    mean = np.mean([float(-log_p[0, token] + (log_p[0].exp() * log_p[0]).sum()) for token in drawn])
    assert abs(mean) < 0.2  # about 0 for tokens drawn from the very distribution
