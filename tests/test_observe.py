"""Observation's fast ways: a row at a time or many at once, numpy or torch, the numbers are the same."""

import pytest
import torch

from medusa_viz.decoding import observe
from medusa_viz.decoding.decoder import Candidates, best_tokens
from medusa_viz.decoding.records import TEMPERATURES
from medusa_viz.decoding.tree import dense
from medusa_viz.models.heads import DraftTokens

GRID = torch.tensor(TEMPERATURES, dtype=torch.float64)


class Elsewhere(torch.Tensor):
    """A tensor that says it lies on another device, for the ways that the CPU does not take."""

    device = torch.device("meta")


class NoDoubles(torch.Tensor):
    """A tensor on a device that has no float64, as Apple's have none."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        made = super().__torch_function__(function, types, args, kwargs or {})
        if function is torch.Tensor.cpu:
            return made.as_subclass(torch.Tensor)
        assert not isinstance(made, cls) or made.dtype != torch.float64, "there is no float64 on this device"
        return made


def test_float64_is_asked_of_the_cpu_alone():
    logits = 6 * torch.randn(3, 97)
    for rows in (logits, logits[:0]):
        for seen, right in zip(*(observe.temperature_tables(one) for one in (rows.as_subclass(NoDoubles), rows))):
            assert torch.equal(seen, right) and seen.dtype == torch.float64
    shape = dense([2])
    ids, p = torch.tensor([[4, 5]]), torch.tensor([[0.5, 0.25]])
    drafts = observe.drafts(shape, Candidates(torch.tensor([1, 4, 5]), DraftTokens(ids, p.as_subclass(NoDoubles))), 1.0)
    assert drafts.head_p == [1, 0.5, 0.25]


@pytest.mark.parametrize("block", [1, 60, 1 << 20])
@pytest.mark.parametrize("rows", [1, 5])
def test_temperature_tables_do_not_depend_on_the_block(block, rows, monkeypatch):
    monkeypatch.setattr(observe, "_BLOCK_CPU", block)
    logits = 6 * torch.randn(rows, 97) + 40
    lse, mean = observe.temperature_tables(logits)
    scaled = logits.double()[:, None] / GRID[:, None]
    assert (lse - scaled.logsumexp(-1)).abs().max() < 1e-4 and lse.shape == (rows, len(TEMPERATURES))
    assert (mean - (scaled.softmax(-1) * logits.double()[:, None]).sum(-1)).abs().max() < 1e-4


def test_counts_above_a_bound():
    logits, rows = torch.randn(4, 50), torch.tensor([0, 3, 3, 1])
    bounds = torch.tensor([0.0, float(logits[3, 7]), -9.0, 9.0])
    right = [int((logits[row] > bound).sum()) for row, bound in zip(rows.tolist(), bounds.tolist(), strict=True)]
    for table in (logits, logits.as_subclass(Elsewhere)):
        assert observe._count_above(table, rows, bounds).tolist() == right
        assert observe._count_above(table, rows[:0], bounds[:0]).tolist() == []


def test_best_tokens_are_the_first_of_equals():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0], [-5.0, -4.0, -3.0, -2.0]])
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        assert best_tokens(logits.to(dtype)).tolist() == [1, 0, 3]
