"""Observation's fast ways: a row at a time or many at once, numpy or torch, the numbers are the same."""

import pytest
import torch

from medusa_viz.decoding import observe
from medusa_viz.decoding.decoder import best_tokens
from medusa_viz.decoding.records import TEMPERATURES

GRID = torch.tensor(TEMPERATURES, dtype=torch.float64)


class Elsewhere(torch.Tensor):
    """A tensor that says it lies on another device, for the ways that the CPU does not take."""

    device = torch.device("meta")


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
