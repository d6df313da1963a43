"""Fixtures that several test files share."""

import pytest
from hypothesis import HealthCheck, settings

from medusa_viz.ui import session

# On shared cores a slow example is no failure.
settings.register_profile("house", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("house")
session.SLOW_MS = 20_000.0  # nor is a tiny tree, whose forward stalled there, one that people are asked about first


@pytest.fixture(scope="session")
def model_folder():
    """Folder of the converted default model. Where it cannot be had, the tests that need it fail and say why."""
    from medusa_viz.models.fetch import ensure_model

    return ensure_model()


@pytest.fixture
def one_precision(monkeypatch):
    """Runs time which precision is the faster one; where two are compared they must not differ in it."""
    import torch

    from medusa_viz.training import recipe

    monkeypatch.setattr(recipe, "fast_dtype", lambda device: (torch.bfloat16, "the test says so"))
