"""The distribution that brings gda, and the commands that install its extras.

Its name is not that of the package: on the package index, ``gda`` is another project.
"""

import contextlib
import os
from collections.abc import Iterator

DISTRIBUTION = "jax-gda"

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def install_command(extra: str) -> str:
    """Return the command that installs an extra: ``pip install 'jax-gda[checkpoint]'``.

    In a checkout, installed or not, it names the folder.
    """
    folder = os.path.dirname(_PACKAGE)
    try:
        with open(os.path.join(folder, "pyproject.toml"), encoding="utf-8") as project:
            is_checkout = f'name = "{DISTRIBUTION}"' in project.read()
    except OSError:
        is_checkout = False
    if not is_checkout:
        return f"pip install '{DISTRIBUTION}[{extra}]'"
    import shlex  # here, because importing gda must stay quick

    return f"pip install -e {shlex.quote(f'{folder}[{extra}]')}"


@contextlib.contextmanager
def of_extra(need: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{need}: {install_command('checkpoint')}", name=error.name) from error
