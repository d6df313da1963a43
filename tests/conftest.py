"""Fixtures that several test files share."""

import pytest


def pytest_configure(config):
    config.addinivalue_line("markers", "model: needs the default model (fetched and converted on first use)")


@pytest.fixture(scope="session")
def model_folder():
    """Folder of the converted default model; tests that need it are skipped where it cannot be had."""
    from medusa_viz.models.fetch import ModelUnavailable, ensure_model

    try:
        return ensure_model()
    except ModelUnavailable as fault:
        pytest.skip(str(fault))
