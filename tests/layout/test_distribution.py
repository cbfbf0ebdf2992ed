"""The name of the distribution, the commands that install extras, and another project's gda."""

import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import gda
from gda.layout.distribution import DISTRIBUTION, install_command

pytestmark = pytest.mark.no_jax

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


def with_other_project(site: Path, record: str) -> None:
    (site / "gda-0.24.1.dist-info").mkdir()
    (site / "gda-0.24.1.dist-info" / "RECORD").write_text(record)


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


# The other project.


@pytest.mark.parametrize(
    ("is_ours", "code"), [(True, "import gda"), (False, "from gda.cli import main")]
)
def test_mixed_files_of_two_distributions_are_an_error(
    tmp_path: Path, is_ours: bool, code: str
) -> None:
    site = installed(tmp_path)
    with_other_project(site, "gda/__init__.py,sha256=0,0\n")
    if not is_ours:  # which was installed last
        (site / "gda" / "__init__.py").unlink()
        (site / "gda" / "__init__.py").touch()
    last = run_in(site, code).stderr.splitlines()[-1]
    assert last == (
        f"ImportError: {site} has the distributions jax-gda and gda 0.24.1, and each has "
        f"overwritten files of the other in {site / 'gda'}. gda on the package index is another "
        "project: use one environment for each of them. Here, run: pip uninstall gda jax-gda, and "
        "then install jax-gda again"
    )


def test_another_gda_that_installs_other_files_is_no_error(tmp_path: Path) -> None:
    site = installed(tmp_path)
    with_other_project(site, "godot_gda/__init__.py,sha256=0,0\n../../../bin/gda,sha256=0,0\n")
    (site / "gda-notes").mkdir()
    assert run_in(site, "import gda").stderr == ""
