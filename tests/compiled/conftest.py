"""What the optimising compiler does is the subject of these tests."""

import pytest


@pytest.fixture(autouse=True)
def _optimized(optimizing_compiler: None) -> None:
    pass
