"""Fixtures that several test files share."""

import pytest


@pytest.fixture(scope="session")
def model_folder():
    """Folder of the converted default model. Where it cannot be had, the tests that need it fail and say why."""
    from medusa_viz.models.fetch import ensure_model

    return ensure_model()
