"""Places of files, named by a path or a URL, and the packages that reach them."""

from __future__ import annotations

import contextlib
import os
import re
import urllib.parse
from collections.abc import Iterator
from typing import Any

from gda.layout.distribution import install_command

# A single letter before the colon is not a scheme in use, but may be part of a name.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(/{1,2})")


def directory_named(path: str) -> str | None:
    """Return the directory that a path or a URL of scheme ``file`` names; None for another URL."""
    match = _URL.match(path)
    if match is None:
        return os.path.expanduser(path)
    if match[1].lower() != "file":
        return None
    url = urllib.parse.urlsplit(path)
    if url.netloc not in ("", "localhost"):
        raise ValueError(f"{path!r} is a file of the host {url.netloc!r}; write file:///path")
    return urllib.parse.unquote(url.path)


def url_named(path: str) -> str:
    """Return the URL of a store, with a slash at its end; ``ValueError`` if it has one slash."""
    match = _URL.match(path)
    assert match is not None
    scheme = match[1].lower()
    if match[2] != "//":
        raise ValueError(f"{path!r} looks like a URL with one slash; write {scheme}://...")
    rest = path[match.end() :].removesuffix("/")
    return f"{scheme}://{rest}/"


def require_tensorstore(what: str) -> Any:
    """Return TensorStore; ``ImportError`` says that something needs it."""
    with of_extra(f"{what} needs TensorStore"):
        import tensorstore
    return tensorstore


@contextlib.contextmanager
def of_extra(need: str) -> Iterator[None]:
    """Say in an ``ImportError`` which extra to install."""
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{need}: {install_command('checkpoint')}", name=error.name) from error
