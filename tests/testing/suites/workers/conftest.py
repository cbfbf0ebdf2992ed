import atexit
import os


@atexit.register
def tell():
    state = "set" if "GDA_UPDATE_GOLDEN" in os.environ else "restored"
    print(f"\nGDA_UPDATE_GOLDEN is {state}")
