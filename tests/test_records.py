"""Records: JSON keeps what it says, refuses what it cannot read, and stays small."""

import copy
import json
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import backbone, prompt, random_drafter, random_shape

from medusa_viz.decoding import acceptance, observe, records
from medusa_viz.decoding.decoder import Candidates
from medusa_viz.decoding.live import LiveRun
from medusa_viz.decoding.records import Branch, RecordError, Session, Step, Timings, Verdict
from medusa_viz.decoding.settings import Acceptance
from medusa_viz.decoding.tree import from_paths
from medusa_viz.models.backbone import Forward
from medusa_viz.models.heads import DraftTokens
from medusa_viz.tuning.builders import sparse

ACCURACY = [[0.5, 0.15, 0.1, 0.05, 0.03, 0.02, 0.02, 0.01, 0.01, 0.01]] * 4


def verdict_of(step):
    rows = step.drafts.parent
    own = np.array([True] + [rank == 0 for rank in step.verification.rank[1:]])
    accepted = acceptance.longest_path(step.shape, acceptance.passed(step.shape, own))
    words = acceptance.verdicts(step.shape, own, accepted, len(accepted))
    return Verdict(Acceptance("typical", 0.7), [1 / 3] * len(rows), [1.2345678] * len(rows), [0.09] * len(rows), words,
                   accepted, [step.drafts.token[row] for row in accepted], 5, "end")


@pytest.fixture(scope="module")
def session():
    """Three steps on a tiny model: verified and judged, verified only, drawn only; two branches; odd texts."""
    from types import SimpleNamespace

    of = backbone()
    run, rng = LiveRun(SimpleNamespace(backbone=of, drafter=random_drafter(of, 3))), random.Random(0)
    position = run.open(prompt(0), Acceptance())
    look = run.look(position, random_shape(rng, paths=9), Acceptance())
    seen = Step(0, "A", 6, look.drafts, look.verification, None, look.timings)
    judged = replace(seen, verdict=verdict_of(seen), timings=replace(seen.timings, commit=1.25), reused="logits")
    bare = run.look(position, from_paths([]), Acceptance())
    steps = [judged, replace(seen, index=1), Step(2, "A", 9, look.drafts, None, None, Timings(), estimate_ms=1500.0),
             Step(3, "A", 9, bare.drafts, bare.verification, None, bare.timings)]
    texts = dict(enumerate(["<b>", "\u2028", "é", "日本", "\x00", '"\\', "</script>", "🙂", ""]))
    return Session("model", "heads", "CPU", "fp32", "a <prompt>\n\"q\"", prompt(0), ACCURACY, texts, {4: "bytes"},
                   [Branch("A", None, 0, steps), Branch("B", "A", 1, [judged])])


def same(one, other, name=""):
    """Equal up to the rounding of floats that the format promises."""
    if isinstance(one, float):
        exact = {"logit": 5.1e-5, "lse": 5.1e-5, "mean_logit": 5.1e-5}.get(name, 1e-300)
        assert one == pytest.approx(other, abs=exact, rel=0 if name in ("logit", "lse", "mean_logit") else 5.1e-5)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            same(one[key], other[key], name)
    elif isinstance(one, list):
        assert len(one) == len(other)
        for left, right in zip(one, other):
            same(left, right, name)
    elif hasattr(one, "__dataclass_fields__"):
        assert type(one) is type(other)
        for field in one.__dataclass_fields__:
            same(getattr(one, field), getattr(other, field), field)
    else:
        assert one == other and type(one) is type(other)


def test_a_round_trip_keeps_everything_to_the_promised_digits(session):
    text = records.to_json(session)
    again = records.from_json(text)
    same(session, again)
    assert records.from_json(records.to_json(again)) == again and records.to_json(again) == text
    assert [step.shape.fingerprint for step in again.branches[0].steps] == [
        step.shape.fingerprint for step in session.branches[0].steps]
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_a_record_knows_its_shape_and_rows(session):
    judged, _, drawn, bare = session.branches[0].steps
    shape = judged.shape
    assert shape.paths == from_paths(shape.paths[1:]).paths
    assert shape.depth.tolist() == [len(path) for path in shape.paths]
    assert judged.cache_rows == shape.nodes + 1 and judged.kept_rows == len(judged.verdict.committed)
    assert drawn.kept_rows == 0 and bare.shape.nodes == 0 and bare.verification.lse == {}
    assert judged.timings.total == pytest.approx(sum(filter(None, (judged.timings.propose, judged.timings.verify,
                                                                   judged.timings.accept, 1.25))))
    assert Timings().total == 0 and Timings(verify=2.0).total == 2


def test_numbers_that_json_lacks_are_never_written(session):
    broken = replace(session, accuracy=[[float("nan")]])
    with pytest.raises(ValueError):
        records.to_json(broken)


# -------------------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize("version, words", [(records.FORMAT_VERSION + 1, "newer version .format 2"), (99, "newer"),
                                            ("x", "newer"), (None, "newer"), (1.5, "newer")])
def test_a_newer_version_is_refused_in_one_line(session, version, words):
    data = json.loads(records.to_json(session))
    data |= {"version": version, "branches": "a shape unknown today"}
    with pytest.raises(RecordError, match=words) as error:
        records.from_json(json.dumps(data))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", '"x"', "{}", "[" * 100_000, '{"versio": 1}', "\x00",
                                  "NaN", "9" * 5000])
def test_what_is_no_session_is_refused(text):
    with pytest.raises(RecordError, match="not a Medusa-Viz session"):
        records.from_json(text)


def places(value, path=()):
    """Every place in nested JSON."""
    yield path
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(item, (*path, key))


def test_a_damaged_session_is_refused_and_never_half_read(session):
    """Parts lost or replaced at random: refused in one sentence, or still a session whose trees can be derived."""
    whole = json.loads(records.to_json(session))
    everywhere, rng, refused = [path for path in places(whole) if path], random.Random(0), 0
    for _ in range(1500):
        data = copy.deepcopy(whole)
        path = rng.choice(everywhere)
        holder = data
        for key in path[:-1]:
            holder = holder[key]
        if rng.random() < 0.4:
            del holder[path[-1]]
        else:
            holder[path[-1]] = rng.choice([None, "x", -1, 3, 10**9, 10**30, 0.5, [], {}, [1], {"1": 2}, True])
        try:
            read = records.from_json(json.dumps(data))
        except RecordError as error:
            assert "\n" not in str(error) and str(error).endswith(".")
            refused += 1
            continue
        for branch in read.branches:
            for step in branch.steps:
                assert step.shape.mask.sum() == (step.shape.depth + 1).sum()
                assert len(step.shape.paths) == len(step.drafts.token)
    assert refused > 500


@pytest.mark.parametrize("change", [
    lambda step: step["drafts"]["rank"].pop(), lambda step: step["verification"]["logit"].append(0.0),
    lambda step: step["verdict"]["verdict"].pop(), lambda step: step["drafts"]["parent"].__setitem__(1, 1),
    lambda step: step["drafts"]["parent"].__setitem__(1, -1), lambda step: step["drafts"]["parent"].__setitem__(0, 0),
    lambda step: step["verdict"]["accepted"].append(999), lambda step: step["verification"]["top"].pop("0"),
    lambda step: step["verification"]["lse"]["0"].pop(), lambda step: step["verdict"]["settings"].update(mode="beam"),
    lambda step: step["drafts"].update(parent=[], rank=[], token=[], head_p=[], path_p=[]),
    lambda step: step.update(unheard_of=1), lambda step: step["drafts"]["heads"][0]["p"].pop(),
    lambda step: step["drafts"]["token"].__setitem__(0, 1.5), lambda step: step["drafts"]["parent"].reverse(),
])
def test_columns_that_do_not_fit_together_are_refused(session, change):
    data = json.loads(records.to_json(session))
    change(data["branches"][0]["steps"][0])
    with pytest.raises(RecordError, match="damaged"):
        records.from_json(json.dumps(data))


# ----------------------------------------------------------------------------------------------------------------- size


def test_forty_steps_of_63_nodes_stay_small():
    """Under 1.2 MB with a vocabulary of 49,152: random logits, whose digits do not compress better than real ones."""
    shape, generator = sparse(ACCURACY, 63), torch.Generator().manual_seed(0)
    steps, texts = [], {token: f" token {token % 10}" for token in range(30_000, 33_000)}  # real steps repeat theirs
    for index in range(40):
        top = DraftTokens(torch.randint(0, 1_000, (4, 10), generator=generator), torch.rand(4, 10, generator=generator))
        tokens = torch.randint(0, 1_000, (64,), generator=generator)
        # A thousand likely tokens stand for the vocabulary; their ids have as many digits.
        forward = Forward(torch.zeros(64, 1), 6 * torch.randn(64, 1_000, generator=generator) - 10)
        head_logits = torch.randn(4, 1_000, generator=generator)
        candidates = Candidates(tokens, top)
        step = Step(index, "A", 200 + index, observe.drafts(shape, candidates, 0.123456789),
                    observe.verification(shape, candidates, forward, head_logits, torch.arange(1_000)), None,
                    Timings(*[1.23456789] * 4))
        top = {row: replace(tops, ids=[30_000 + token for token in tops.ids])
               for row, tops in step.verification.top.items()}
        steps.append(replace(step, verdict=verdict_of(step), verification=replace(step.verification, top=top)))
    session = Session("m", "h", "CPU", "fp32", "prompt", [1] * 200, ACCURACY, texts, {}, [Branch("A", None, 0, steps)])
    size = len(records.to_json(session).encode())
    assert 0.9e6 < size < 1.2e6, f"{size:,} bytes"
