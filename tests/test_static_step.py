"""What makes a static step fast on CUDA, tried on the CPU: one synchronisation, events, and what is chosen."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny import backbone, mixed_ranks, oracle_drafter, plain_greedy, prompt, random_drafter, random_shape
from torch.overrides import TorchFunctionMode

from medusa_viz.decoding import acceptance, clock, decoder, on_device
from medusa_viz.decoding.decoder import PLAIN, decode
from medusa_viz.decoding.settings import Acceptance
from medusa_viz.decoding.tree import dense, from_paths
from medusa_viz.models.device import Placement
from medusa_viz.models.static import StaticStep, fitting, says_the_same

GREEDY = Acceptance()
TYPICAL = Acceptance("typical", 1.2, epsilon=0.1, delta=0.6)


# ------------------------------------------------------------------------------------------------------ what is chosen


def test_8_bit_linears_stay_eager_since_each_asks_the_host():
    card = torch.device("cuda")
    quantised = SimpleNamespace(device=card, placement=Placement(card, torch.float16, "", "8bit"))
    assert fitting(quantised, True, 1e-3) == (None, "eager (8-bit linears ask the host)")


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
    Event.made, times = 0, iter([0.0, 0.001, 0.002, 0.025])
    for _ in range(4):  # a look commits nothing
        watch.mark()
    timings = watch.timings()
    assert timings.commit is None and timings.total == pytest.approx(25)
