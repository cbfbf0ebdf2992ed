"""The test suite on the versions of JAX and Python that gda supports: `nox`."""

import os
import shutil
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2025.5"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.sessions = ["tests"]

# Tests start hundreds of processes; without bytecode each would compile all of JAX again.
os.environ.setdefault("UV_COMPILE_BYTECODE", "1")
_FEW_PROCESSES = {"UV_COMPILE_BYTECODE": "0"}

# pyenv's stand-ins on the PATH refuse versions that are installed but not switched on.
_PYENV = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
for _bin in _PYENV.glob("versions/3.*/bin"):
    os.environ["PATH"] = f"{_bin}{os.pathsep}{os.environ['PATH']}"


@nox.session
@nox.parametrize(
    ("python", "jax"),
    [
        nox.param("3.11", "==0.8.0", id="oldest"),
        nox.param("3.11", "==0.10.2", id="py311"),
        nox.param("3.12", "==0.11.2", id="py312"),
        nox.param("3.13", ">=0.12.0", id="newest"),
    ],
)
def tests(session: nox.Session, jax: str) -> None:
    """Run the suite; arguments after `--` go to pytest."""
    session.install("-e", ".[test]", f"jax{jax}", f"jaxlib{jax}")
    session.run("python", "-c", "import jax, sys; print('JAX', jax.__version__, sys.version)")
    session.run("python", "-m", "pytest", "-n", "2", *session.posargs)


@nox.session(python="3.13")
def topology(session: nox.Session) -> None:
    """Run the tests that compile for TPUs and GPUs; they need the compilers, and no device."""
    session.install("-e", ".[test,rehearse,rehearse-gpu]", "jax>=0.12.0", env=_FEW_PROCESSES)
    cpu = {"JAX_PLATFORMS": "cpu"}  # with libtpu, JAX would look for a TPU in every process
    session.run("python", "-m", "pytest", "-n", "2", "-m", "topology", *session.posargs, env=cpu)


@nox.session(python="3.11")
def torture(session: nox.Session) -> None:
    """Make the trials by the hundred, of which the suite has a sample; record their figures."""
    session.install("-e", ".[test]")
    trials = ["-m", "torture or hypothesis", "--hypothesis-profile", "torture"]
    trials += ["-o", "faulthandler_timeout=600"]  # hundreds of trials take minutes
    page = "--figures=docs/reliability.md"
    session.run("python", "-m", "pytest", "-n", "2", *trials, page, *session.posargs)


@nox.session(python="3.13")
def mutants(session: nox.Session) -> None:
    """Change gda in 200 ways, one at a time, and run the tests that should see it; see the file."""
    session.install("-e", ".[test]")
    session.run("python", "tests/mutants.py", *session.posargs)


@nox.session(python="3.11")
def lint(session: nox.Session) -> None:
    """Check rules, format, layers, and the workflows in .github."""
    session.install("-e", ".[dev]", env=_FEW_PROCESSES)
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("lint-imports", "--no-cache")
    schemas = {"github-workflows": "workflows/*", "github-issue-forms": "ISSUE_TEMPLATE/[!c]*"}
    for schema, pattern in schemas.items():
        files = sorted(map(str, Path(".github").glob(pattern)))
        session.run("check-jsonschema", "--builtin-schema", f"vendor.{schema}", *files)
    session.run("zizmor", "--offline", "--no-progress", "--quiet", ".github")


@nox.session(python="3.11")
def pages(session: nox.Session) -> None:
    """Run the tests of pages, examples and benchmarks; they look at pages in Chromium."""
    session.install("-e", ".[test]")
    session.run("python", "-m", "pytest", "-n", "2", "-m", "docs", *session.posargs)


@nox.session(python="3.11")
def accelerator(session: nox.Session) -> None:
    """Run the tests and benchmarks for an accelerator on CPU devices."""
    session.install("-e", ".[test]")
    folder = session.create_tmp()
    command = ["benchmarks/accelerator.sh", folder, "--quick"]
    session.run(*command, external=True, env={"GDA_ACCELERATOR": "cpu", "PYTHON": "python"})


@nox.session(python="3.11")
def types(session: nox.Session) -> None:
    """Check the types, with all packages that gda and its tools import."""
    session.install("-e", ".[all]", env=_FEW_PROCESSES)
    session.run("pyright", *session.posargs)


@nox.session(python="3.11")
def docs(session: nox.Session) -> None:
    """Build the documentation into build/site; any warning is an error."""
    # The configuration of pytest names pytest-xdist.
    session.install("-e", ".[docs]", "pytest-xdist", env=_FEW_PROCESSES)
    session.run("python", "-m", "pytest", "-q", "-m", "docs", "tests/test_site.py")
    session.run("mkdocs", "build", *session.posargs, env={"NO_MKDOCS_2_WARNING": "1"})


_DIST = Path("dist")


@nox.session(python="3.11")
@nox.parametrize("extra", ["", "all"], ids=["none", "all"])
def package(session: nox.Session, extra: str) -> None:
    """Build wheel and sdist into dist/; install one without extras, one with all; try both."""
    if not extra or not _DIST.exists():
        shutil.rmtree(_DIST, ignore_errors=True)
        build = [sys.executable, "-m", "uv", "build", "--quiet", "--out-dir", str(_DIST)]
        session.run(*build, external=True)
    # By its name, as a user would: the folder stands for the index.
    options = ["--find-links", str(_DIST), *([] if extra else ["--no-binary", "jax-gda"])]
    wanted = f"jax-gda[{extra}]" if extra else "jax-gda"
    session.install(*options, wanted, env=_FEW_PROCESSES)
    session.run("python", "-I", "tests/smoke.py", extra)


@nox.session(python="3.11")
def sbom(session: nox.Session) -> None:
    """Write sbom.json: every package that the wheel in dist/ needs today, in CycloneDX."""
    session.install("--find-links", str(_DIST), "jax-gda[all]", env=_FEW_PROCESSES)
    tool = [sys.executable, "-m", "uv", "tool", "run", "--from", "cyclonedx-bom>=7", "cyclonedx-py"]
    where = [f"{session.bin}/python", "--pyproject", "pyproject.toml", "-o", "sbom.json"]
    session.run(*tool, "environment", "--output-reproducible", *where, external=True)
