"""The distribution that brings gda, and the commands that install its extras.

Its name is not that of the package: on the package index, ``gda`` is another project. In one
environment each of the two overwrites files of the other, so importing this module fails there.
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


def check_files(package: str) -> None:
    """Raise ``ImportError`` if another distribution has files in the folder of a package."""
    folder, name = os.path.split(package)
    try:
        # The import has just listed this folder. With 400 packages it takes 0.1 ms.
        others = [each for each in os.listdir(folder) if each.startswith(f"{name}-")]
    except OSError:  # such as a zip file
        return
    for other in others:
        try:
            with open(os.path.join(folder, other, "RECORD"), encoding="utf-8") as record:
                is_mixed = any(line.startswith(f"{name}/") for line in record)
        except OSError:
            continue
        if is_mixed:
            number = other.removeprefix(f"{name}-").removesuffix(".dist-info")
            raise ImportError(
                f"{folder} has the distributions {DISTRIBUTION} and {name} {number}, and each has "
                f"overwritten files of the other in {package}. {name} on the package index is "
                f"another project: use one environment for each of them. Here, run: pip uninstall "
                f"{name} {DISTRIBUTION}, and then install {DISTRIBUTION} again",
                name=name,
            )


check_files(_PACKAGE)
