"""A run of the tests marked ``no_jax`` without JAX."""

import os
import re
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent

# Without the conftest.py of all tests, which imports JAX, and without a browser.
PROGRAM = """
import sys
sys.modules["jax"] = sys.modules["jaxlib"] = None
import pytest
from hypothesis import settings
settings.register_profile("few", max_examples=3, deadline=None)
settings.load_profile("few")
options = ["-q", "-p", "no:cacheprovider", "-W", "ignore:Module already imported"]
sys.exit(pytest.main([*options, "--confcutdir", *sys.argv[1:]]))
"""


def test_modules_marked_no_jax_import_none(tmp_path: Path) -> None:
    mark = re.compile(r"^pytestmark = pytest\.mark\.no_jax$", re.MULTILINE)
    files = sorted(str(f) for f in TESTS.rglob("test_*.py") if mark.search(f.read_text()))
    assert len(files) > 8
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(TESTS / "cli"), *files],
        cwd=TESTS.parent,
        env={**os.environ, "PATH": str(tmp_path), "GDA_BROWSER": "", "GDA_SEED": "0"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stdout[-5000:] + ran.stderr
