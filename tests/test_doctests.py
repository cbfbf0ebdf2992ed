"""A run of the examples in docstrings."""

import doctest
import importlib
import inspect
import pkgutil
import re
from functools import cached_property
from pathlib import Path

import pytest

import gda


def has_examples(module: str) -> bool:
    """Return whether there are any in the file of a module, which is not imported for that."""
    path = Path(gda.__path__[0]).parent / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ">>> " in file.read_text(encoding="utf-8")


MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(gda.__path__, "gda.")
    if module.name != "gda.testing.strategies"  # in test_strategies.py, by searches that repeat
    and has_examples(module.name)
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_the_docstrings_hold(name: str) -> None:
    module = importlib.import_module(name)
    text = inspect.getsource(module)
    found = doctest.DocTestFinder(recurse=False).find(module)
    # Name by name: the finder itself leaves out what is known by a public module, and in Python
    # 3.11 cached properties.
    for defined, value in vars(module).items():
        if re.search(rf"^(class|def) {defined}\b", text, re.MULTILINE):
            cached = [of.func for of in vars(value).values() if isinstance(of, cached_property)]
            for each in (value, *cached):
                found += doctest.DocTestFinder().find(each, each.__qualname__, module)
    tests = {test.name: test for test in found}.values()
    assert sum(len(test.examples) for test in tests) == text.count(">>> ")
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for test in tests:
        runner.run(test)
    assert runner.summarize().failed == 0
