"""The name of the distribution, the commands that install extras."""

import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import gda
from gda.layout.distribution import DISTRIBUTION, install_command

ROOT = Path(gda.__file__).parents[1]


def installed(folder: Path) -> Path:
    """Return a folder in which pip has installed gda, as far as the import can see."""
    site = folder / "site-packages"
    (site / "jax_gda-1.0.dist-info").mkdir(parents=True)
    (site / "jax_gda-1.0.dist-info" / "RECORD").write_text("gda/__init__.py,,\n")
    (site / "gda").mkdir()
    for path in (ROOT / "gda").iterdir():
        (site / "gda" / path.name).symlink_to(path)
    return site


def run_in(site: Path, code: str) -> subprocess.CompletedProcess[str]:
    program = f"import sys; sys.path.append(sys.argv[1]); {code}"
    command = [sys.executable, "-I", "-S", "-c", program, site]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


# The commands.


def test_a_checkout_installs_itself_with_the_extra() -> None:
    assert install_command("checkpoint") == f"pip install -e '{ROOT}[checkpoint]'"


def test_an_installed_gda_names_the_distribution(tmp_path: Path) -> None:
    site = installed(tmp_path)
    # Some wheels leave a file of this name behind.
    (site / "pyproject.toml").write_text('name = "other"')
    code = "from gda.layout.distribution import install_command as f; print(f('checkpoint'))"
    done = run_in(site, code)
    assert (done.stdout, done.stderr) == ("pip install 'jax-gda[checkpoint]'\n", "")


def test_only_one_module_writes_the_command() -> None:
    modules = (ROOT / "gda").rglob("*.py")
    found = [path.name for path in modules if "pip install" in path.read_text()]
    assert found == ["distribution.py"]


# The version.


def test_the_version_is_that_of_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gda.__version__ == importlib.metadata.version("jax-gda")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"of {name}")
    assert gda.__version__ == f"of {DISTRIBUTION}"
