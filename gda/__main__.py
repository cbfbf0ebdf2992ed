"""``python -m gda`` is the command ``gda``."""

import sys

from gda.cli import main

if __name__ == "__main__":
    sys.exit(main())
