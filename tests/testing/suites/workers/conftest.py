import atexit
import os


def pytest_addoption(parser):
    parser.addoption("--update-golden", help="of the suite's own golden files")


@atexit.register
def tell():
    state = "set" if "GDA_UPDATE_GOLDEN" in os.environ else "restored"
    print(f"\nGDA_UPDATE_GOLDEN is {state}")
