import os

import pytest


@pytest.hookimpl(trylast=True)
def pytest_unconfigure():
    state = "set" if "GDA_UPDATE_GOLDEN" in os.environ else "restored"
    print(f"\nGDA_UPDATE_GOLDEN is {state}")
