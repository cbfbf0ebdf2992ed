import os

import pytest

found = os.environ["JAX_PLATFORMS"]


@pytest.fixture
def platforms():
    return found
