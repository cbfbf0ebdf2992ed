import pytest


@pytest.fixture
def of_the_folder():
    return "conftest.py"
