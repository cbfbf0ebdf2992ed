"""The choice between an accelerator and CPU devices for the tests in ``tests/accelerator/``.

``python -m pytest -m accelerator`` runs them alone, on the default device of JAX, with programs as
users have them: optimised, and from no cache. Every other run takes CPU devices as a stand-in, and
so does that one with ``GDA_ACCELERATOR=cpu``.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

Measured = Callable[[str, Any], None]

FOLDER = Path(__file__).parent / "accelerator"

# Settings of tests/conftest.py for programs that only tests of other things compile.
_OF_OTHER_TESTS = (
    *("JAX_DISABLE_MOST_OPTIMIZATIONS", "JAX_COMPILATION_CACHE_DIR"),
    *("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"),
)


def is_stand_in() -> bool:
    """Return True if CPU devices take the place of an accelerator."""
    return os.environ.get("GDA_ACCELERATOR") == "cpu"


def _runs_alone(config: pytest.Config) -> bool:
    return config.getoption("markexpr") == "accelerator"


@pytest.hookimpl(specname="pytest_configure")
def pytest_configure_accelerator(config: pytest.Config) -> None:
    if not _runs_alone(config):
        os.environ["GDA_ACCELERATOR"] = "cpu"
    if is_stand_in():
        return
    for name in _OF_OTHER_TESTS:
        os.environ.pop(name, None)
    jax.config.update("jax_disable_most_optimizations", False)
    jax.config.update("jax_compilation_cache_dir", None)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no other test: a machine with an accelerator may lack their packages."""
    if not _runs_alone(config) or not collection_path.is_relative_to(FOLDER.parent):
        return None
    is_on_the_way = FOLDER.is_relative_to(collection_path)
    return None if is_on_the_way or collection_path.is_relative_to(FOLDER) else True
