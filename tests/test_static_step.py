"""What makes a static step fast on CUDA, tried on the CPU: captures, compiled kernels, one synchronisation, events."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny import backbone, mixed_ranks, oracle_drafter, plain_greedy, prompt, random_drafter, random_shape
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from medusa_viz.decoding import acceptance, clock, decoder, on_device
from medusa_viz.decoding.decoder import PLAIN, decode
from medusa_viz.decoding.settings import Acceptance
from medusa_viz.decoding.tree import dense, from_paths
from medusa_viz.models import slab, static
from medusa_viz.models.static import StaticStep, fitting, says_the_same

GREEDY = Acceptance()
TYPICAL = Acceptance("typical", 1.2, epsilon=0.1, delta=0.6)


class Traced:
    """Stands in for a CUDA graph: the step runs once under a tracer, and a replay runs what was recorded. As in a
    graph, whatever Python knew at that time is baked in, and only what lies in buffers can change."""

    made = 0

    def __init__(self, step):
        self.recorded = make_fx(step)()
        Traced.made += 1

    def replay(self):
        return tuple(part.clone() for part in self.recorded())


@pytest.fixture
def small_blocks(monkeypatch):
    """Slabs as small as the tiny models' texts, so that they grow and are reused."""
    monkeypatch.setattr(slab, "BLOCK", 8)
    monkeypatch.setattr(static, "ROOM", 0)
    monkeypatch.setattr(Traced, "made", 0)


def written(of, drafter, ids, shape, tokens, settings=GREEDY):
    return [token for step in decode(of, drafter, ids, shape, settings, tokens, ()) for token in step.tokens]


# ---------------------------------------------------------------------------------------------------------- captures


@pytest.mark.parametrize("kind", ["mistral", "gemma3_text", "gpt2"])
def test_a_captured_step_depends_on_its_buffers_alone(kind, small_blocks):
    of, ids = backbone(kind, dtype=torch.float64), prompt(0)
    text = plain_greedy(of, ids, 50)
    drafter = oracle_drafter(of, ids, text, heads=4, rank=mixed_ranks(3))
    of.static = StaticStep(of, Traced)
    for shape in (dense([1] * 3), dense([2, 1])):
        assert written(of, drafter, ids, shape, 40) == text[:40]
    made = Traced.made
    assert 2 <= made <= 4 and written(of, drafter, ids, dense([2, 1]), 40) == text[:40]
    assert Traced.made == made  # the slab came back with its graphs
    assert of.static.words == "static buffers, CUDA graphs of plain kernels"


def test_growth_captures_anew(small_blocks):
    of, ids = backbone(dtype=torch.float64), prompt(1)
    text = plain_greedy(of, ids, 20)
    of.static = StaticStep(of, Traced)
    state, seen = decoder.start(of, ids, GREEDY), []
    for place in range(20):
        plan = decoder.plan(PLAIN, of, None)
        candidates = decoder.propose(None, state, plan)
        forward = decoder.verify(of, state, plan, candidates)
        accepted = decoder.accept(forward, state, plan, candidates, GREEDY)
        decoder.commit(state, forward, accepted)
        assert accepted.tokens == [text[place]]
        seen.append((state.cache.capacity, Traced.made))
    assert sorted(set(seen)) == [(8, 1), (16, 2), (32, 3)]


def test_results_outlive_the_next_replay(small_blocks):
    """Live runs read logits after other sessions have stepped."""
    of, rng = backbone(), random.Random(0)
    of.static, shape = StaticStep(of, Traced), dense([2, 1])
    plan = decoder.plan(shape, of, random_drafter(of))
    caches = [of.new_cache(20) for _ in range(2)]
    for seed, cache in enumerate(caches):
        of.prefill(prompt(seed), cache)
    tokens = [torch.tensor([rng.randrange(50) for _ in range(5)]) for _ in caches]
    first = of.verify(tokens[0], plan.depth, plan.block, caches[0])
    kept = first.logits.clone(), first.hidden.clone()
    for cache in caches:
        of.verify(tokens[1], plan.depth, plan.block, cache)
    assert torch.equal(first.logits, kept[0]) and torch.equal(first.hidden, kept[1])


@pytest.mark.parametrize("fault", ["compiler", "capture", "both", "late"])
def test_whatever_fails_the_run_goes_on_and_says_so(fault, small_blocks):
    of, ids = backbone(dtype=torch.float64), prompt(0)
    text, made = plain_greedy(of, ids, 40), []

    def failing(*_):
        raise RuntimeError("no room for kernels\nwith many details")

    def capture(step):
        made.append(step)
        if fault in ("capture", "both") or (fault == "late" and len(made) == 2):
            raise ValueError("cannot capture")
        return Traced(step)

    of.static = StaticStep(of, capture, lambda step: failing if fault in ("compiler", "both") else step)
    assert written(of, random_drafter(of, 3), ids, dense([2, 1]), 20) == text[:20]
    plain = "static buffers, CUDA graphs of plain kernels"
    assert of.static.words == {
        "compiler": f"{plain} (RuntimeError: no room for kernels)",
        "capture": "static buffers without CUDA graphs (ValueError: cannot capture)",
        "both": "static buffers without CUDA graphs (ValueError: cannot capture)",
        "late": f"{plain} (ValueError: cannot capture)"}[fault]
    assert written(of, None, ids, PLAIN, 20) == text[:20]


def test_torch_compile_takes_the_step_whole_and_once_for_all_sizes(small_blocks):
    of, ids, graphs = backbone(dtype=torch.float64, num_hidden_layers=1), prompt(0), []
    text = plain_greedy(of, ids, 60)

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    of.static = StaticStep(of, Traced, lambda step: torch.compile(step, backend=backend, fullgraph=True, dynamic=True))
    of.static._capture = lambda step: SimpleNamespace(replay=step)
    drafter = oracle_drafter(of, ids, text, heads=4, rank=mixed_ranks(0))
    for shape in (dense([2, 2, 1]), PLAIN, dense([4, 3])):
        assert written(of, drafter, ids, shape, 24) == text[:24]
    assert not of.static.faults
    assert 1 <= len(graphs) <= 3  # several rows, and one


# ------------------------------------------------------------------------------------------------------ what is chosen


def test_a_cpu_stays_eager_and_says_that_compiling_changes_nothing():
    of = backbone()
    assert fitting(of, False, 1e-3) == (None, "eager")
    assert fitting(of, True, 1e-3) == (None, "eager (--compile is for CUDA cards and changes nothing on cpu)")
    of.speed_up(compiled=True)
    assert of.static is None and of.step.startswith("eager (--compile")
    assert type(of.new_cache(4)) is decoder.TreeCache


def test_a_step_that_says_something_else_is_not_used():
    of = backbone("mistral")
    step = StaticStep(of)
    assert says_the_same(step, of, 1e-5)
    step._window = 2
    assert not says_the_same(step, of, 1e-3)


# -------------------------------------------------------------------------------------------------- one synchronisation


class Asking(TorchFunctionMode):
    """Counts what makes the host wait on a CUDA device: numbers read, and numbers sent as a new tensor."""

    READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "nonzero", "is_nonzero",
             "equal", "masked_select", "unique", "tensor", "as_tensor", "from_numpy")

    def __init__(self):
        super().__init__()
        self.asked = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if name in self.READS:
            self.asked.append(name)
        keys = args[1] if name in ("__getitem__", "__setitem__") else ()
        for key in keys if isinstance(keys, tuple) else (keys,):
            if isinstance(key, torch.Tensor) and (key.dtype == torch.bool or key.dim() == 0):
                self.asked.append(f"{name} by {key.dtype}")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("settings", [GREEDY, TYPICAL], ids=lambda one: one.rule)
@pytest.mark.parametrize("shape", [PLAIN, dense([3, 2, 2, 1]), from_paths([[1, 0], [0, 2, 1]])], ids=lambda s: s.nodes)
def test_a_step_asks_the_device_once(settings, shape):
    of, ids = backbone(dtype=torch.float64), prompt(0)
    drafter = oracle_drafter(of, ids, plain_greedy(of, ids, 50), heads=4, rank=mixed_ranks(0))
    of.static = StaticStep(of)
    steps, lengths = decode(of, drafter, ids, shape, settings, 40, ()), []
    next(steps)  # makes the plan, its tables and the slab's inputs
    for _ in range(6):
        with Asking() as mode:
            lengths.append(len(next(steps).tokens))
        assert mode.asked == ["tolist"]
    assert max(lengths) > 1 or not shape.nodes
    of.static = None
    with Asking() as mode:  # the count sees what the eager step does
        steps = decode(of, drafter, ids, dense([3, 2]), settings, 20, ())
        next(steps), next(steps)
    assert len(mode.asked) > 4


def test_rejection_asks_once_per_accepted_token():
    of, ids = backbone(), prompt(0)
    of.static = StaticStep(of)
    steps = decode(of, random_drafter(of), ids, dense([2]), Acceptance("rejection", 0.8), 10, ())
    next(steps)
    with Asking() as mode:
        next(steps)
    assert len(mode.asked) > 1


@pytest.mark.parametrize("seed", range(3))
def test_acceptance_on_the_device_is_the_hosts(seed):
    rng, generator, deep = random.Random(seed), torch.Generator().manual_seed(seed), 0
    for _ in range(300):
        shape = random_shape(rng, heads=5, width=3, paths=rng.randint(0, 14))
        tree, rows = on_device.tables(shape, torch.device("cpu")), shape.nodes + 1
        assert [path[: depth + 1] for path, depth in zip(tree.paths.tolist(), shape.depth)] == [
            shape.path_to(row) for row in range(rows)]
        tokens = torch.randint(0, 4, (rows,), generator=generator)
        for row in range(1, rows):  # siblings differ, as a head's ranks do
            tokens[row] = 4 * shape.depth[row] + shape.rank[row]
        wanted = 4 * (torch.as_tensor(shape.depth).long() + 1) + torch.randint(0, 2, (rows,), generator=generator)
        right = acceptance.longest_path(shape, acceptance.passed(
            shape, acceptance.greedy_tests(shape, tokens.numpy(), wanted.numpy())))
        last = on_device.longest_path(tree, on_device.greedy_tests(tree, tokens, wanted))
        got = on_device.fetch(tree, last, tokens, wanted)
        assert got[:3] == (right, tokens[right].tolist(), int(wanted[right[-1]]))
        assert got[3][: len(right)].tolist() == right
        p, entropy = (torch.rand(rows, generator=generator) for _ in range(2))
        p[0], entropy[0] = 1, 0
        own = acceptance.typical_tests(p.numpy(), entropy.numpy(), 0.4, 0.9)
        assert np.array_equal(on_device.typical_tests(p, entropy, 0.4, 0.9).numpy()[1:], own[1:])
        log_p = np.log(p.numpy())
        right = acceptance.longest_path(shape, acceptance.passed(shape, own), log_p)
        last = on_device.longest_path(tree, torch.from_numpy(own), torch.from_numpy(log_p))
        assert on_device.fetch(tree, last, tokens, wanted)[0] == right
        deep += len(right) > 3
    assert deep > 20


class Event:
    """A CUDA event whose time is its number; reading one that has not passed raises, as torch does."""

    made = 0
    passed = 3

    def __init__(self, enable_timing):
        Event.made += 1
        self.number = Event.made

    def record(self, stream):
        assert stream == "stream"

    def elapsed_time(self, other):
        assert max(self.number, other.number) <= Event.passed
        return 10.0 * (other.number - self.number)


def test_on_cuda_the_clock_reads_events_that_have_passed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "stream")
    monkeypatch.setattr(torch.cuda, "Event", Event)
    times = iter([0.0, 0.001, 0.002, 0.025, 0.026] * 2)
    monkeypatch.setattr(clock, "perf_counter", lambda: next(times))
    watch = clock.Clock(torch.device("cuda"))
    for Event.made in (0, 0):
        for _ in range(5):
            watch.mark()
        timings = watch.timings()
        assert (timings.propose, timings.verify) == (10, 10)  # by the events
        assert timings.accept == pytest.approx(5) and timings.commit == pytest.approx(1)
        assert timings.total == pytest.approx(26)
