"""These tests are about the optimising compiler."""

import pytest


@pytest.fixture(autouse=True)
def _optimized(optimizing_compiler: None) -> None:
    pass
