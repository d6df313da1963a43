"""Captured static steps, tried on the CPU: what a capture may hold, when it happens, what may fail."""

import random
import threading
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from tiny import (
    backbone,
    engine,
    greedy_step,
    mixed_ranks,
    oracle_drafter,
    plain_greedy,
    prompt,
    random_drafter,
)
from torch.fx.experimental.proxy_tensor import make_fx

from medusa_viz.decoding import check, clock, decoder, live
from medusa_viz.decoding.decoder import PLAIN, decode
from medusa_viz.decoding.settings import Acceptance
from medusa_viz.decoding.tree import dense
from medusa_viz.models import device, memory, slab, static
from medusa_viz.models.static import CudaGraphs, StaticStep, fused

GREEDY = Acceptance()


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


@pytest.mark.parametrize("masked", [False, True])
def test_a_full_card_gives_nothing_up(masked, small_blocks, monkeypatch):
    """The step fails, its graphs make room, and the next one captures again."""
    of, ids, full, gone = backbone(dtype=torch.float64), prompt(0), [], []
    monkeypatch.setattr(memory, "give_back", lambda: gone.append(1))

    def capture(step):
        if not full:
            return Traced(step)
        try:
            raise full.pop()
        finally:
            if masked:  # as the end of a capture that broke off
                raise RuntimeError("the capture is invalid")

    of.static = StaticStep(of, capture, lambda step: step)
    state = decoder.start(of, ids, GREEDY)
    plain, tree = (decoder.plan(shape, of, random_drafter(of, 3)) for shape in (PLAIN, dense([2, 1])))

    def run(plan):
        return of.verify(torch.arange(plan.shape.nodes + 1), plan.depth, plan.block, state.cache).logits

    before = run(plain)
    full.append(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(RuntimeError) as fault:
        run(tree)
    assert memory.ran_out(fault.value) and gone and not state.cache.slab.graphs and not of.static.faults
    run(tree)
    assert torch.equal(run(plain), before) and len(state.cache.slab.graphs) == 2
    assert of.static.words == "static buffers, CUDA graphs of compiled kernels"


def test_no_step_that_is_timed_captures(small_blocks, monkeypatch):
    of, ids, seen = backbone(dtype=torch.float64), prompt(0), []
    text = plain_greedy(of, ids, 60)
    drafter = oracle_drafter(of, ids, text, heads=4, rank=mixed_ranks(3))
    of.static = StaticStep(of, Traced)

    class Watch(clock.Clock):
        def mark(self):
            seen.append(Traced.made)
            super().mark()

    for module in (decoder, check, live):
        monkeypatch.setattr(module, "Clock", Watch)
    assert written(of, drafter, ids, dense([2, 1, 1]), 40) == text[:40]
    run = live.LiveRun(engine(of, drafter))
    position = run.open(ids, GREEDY)
    for size in (1, 2, 4, 7):
        look, _, position = greedy_step(run, position, dense([size]))
        assert look.timings.commit is None and look.timings.total > 0
    assert list(position.ids[len(ids) :]) == text[: len(position.ids) - len(ids)]
    run.check_greedy(ids, position.ids[len(ids) :])
    assert run.plain_step() > 0
    at, made = 0, Traced.made
    for marks in (5,) * ((len(seen) - 21) // 5) + (4,) * 4 + (5,):
        assert len(set(seen[at : at + marks])) == 1, (at, seen)
        at += marks
    assert at == len(seen) and made == seen[-1] > 4


def test_every_model_is_compiled_however_many_came_before(monkeypatch):
    """torch compiles a function a few times only, and all models share the code of their step."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))

    class Model:
        def __init__(self, layers):
            self.layers = [torch.sin] * layers

        def run(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    torch.compiler.reset()
    for layers in range(1, torch._dynamo.config.recompile_limit + 3):
        model, x = Model(layers), torch.ones(3)
        assert torch.equal(fused(model.run)(x), model.run(x))


# --------------------------------------------------------------------------------------------------------- torch.cuda


class FakeCuda:
    """What `CudaGraphs` asks of torch.cuda, and what it did there: (what, stream) in turn."""

    def __init__(self, monkeypatch):
        self.did, self.streams, self.meanwhile = [], 0, []
        for name in ("device", "current_stream", "set_stream", "Stream", "CUDAGraph", "graph", "stream"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

    def device(self, device):
        return nullcontext()

    def current_stream(self, device=None):
        return SimpleNamespace(wait_stream=lambda other: None, synchronize=lambda: self.did.append(("wait", device)))

    def set_stream(self, stream):
        pass

    def Stream(self):
        self.streams += 1
        return SimpleNamespace(wait_stream=lambda other: None, number=self.streams)

    def CUDAGraph(self):
        return SimpleNamespace(pool=lambda: "pool", replay=lambda: None)

    @contextmanager
    def graph(self, graph, pool, stream, capture_error_mode):
        assert memory.capturing.locked() and capture_error_mode == "thread_local"
        self.did.append(("capture", stream.number, pool))
        yield

    @contextmanager
    def stream(self, stream):
        assert memory.capturing.locked()
        self.did.append(("warm up", stream.number))
        yield


def test_captures_come_one_at_a_time_on_one_stream(monkeypatch):
    cuda, inside, most = FakeCuda(monkeypatch), [], []

    def step():
        inside.append(1)
        most.append(len(inside))
        threading.Event().wait(0.01)
        inside.pop()
        return torch.ones(1), torch.ones(1)

    graphs = [CudaGraphs(torch.device("cpu")) for _ in range(2)]
    threads = [threading.Thread(target=lambda one=one: [one(step), one(step)]) for one in graphs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * (static.WARM_UPS + 1) * 4 and cuda.streams == 2 and not memory.capturing.locked()
    assert [one[1:] for one in cuda.did if one[0] == "capture"].count((1, "pool")) == 2


def test_waiting_for_a_card_is_waiting_for_ones_own_stream(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: pytest.fail("forbidden while another thread captures"))
    device.settle(torch.device("cuda"))
    device.settle(torch.device("cpu"))
    assert cuda.did == [("wait", torch.device("cuda"))]
