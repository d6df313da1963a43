"""Fixtures that several test files share."""

import pytest
from hypothesis import settings

settings.register_profile("house", deadline=None)  # on shared cores a slow example is no failure
settings.load_profile("house")


@pytest.fixture(scope="session")
def model_folder():
    """Folder of the converted default model. Where it cannot be had, the tests that need it fail and say why."""
    from medusa_viz.models.fetch import ensure_model

    return ensure_model()
