import pytest


@pytest.mark.processes(2, devices=2)
def test_fixture_of_the_folder(of_the_folder):
    assert of_the_folder == "conftest.py"
