"""The site for language models: ``llms.txt`` lists the pages, ``llms-full.txt`` holds them all.

The Markdown of each page lies beside the page, and ``llms.txt`` links to it.
"""

import inspect
import re
import typing
from collections.abc import Iterator
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

from doctests import markdown_of
from gallery import as_text, with_pictures
from mkdocs.structure.files import File  # pyright: ignore[reportMissingImports]

import gda

_DIRECTIVE = re.compile(r"^::: (\S+)$(?:\n    .*)*", re.MULTILINE)


def plain(markdown: str) -> str:
    """Return a page with its pictures as text and its names with their docstrings."""
    return _DIRECTIVE.sub(lambda name: reference(name[1]), with_pictures(markdown, as_text))


def reference(name: str) -> str:
    """Return what the site says of a public name, and below it of the members of a class.

    >>> print(reference("gda.Move").partition("\\n\\n")[0])
    ## gda.Move
    """
    found = attrgetter(name.partition(".")[2])(gda)
    parts = [f"## {name}", *_of(found, name)]
    if inspect.isclass(found):
        for base in reversed(found.__mro__):
            if base.__module__.startswith("gda"):
                for member, value in vars(base).items():
                    doc = "" if member.startswith("_") else _docstring(value)
                    # Methods of jax.Array have its documentation.
                    if doc and "of the ``jax.Array`` inside" not in doc:
                        parts += [f"### {name}.{member}", *_of(value, f"{name}.{member}")]
    return "\n\n".join(parts)


def _of(value: Any, name: str) -> Iterator[str]:
    value = getattr(value, "__func__", value)  # of a classmethod or staticmethod
    if not isinstance(value, ModuleType | property | cached_property):
        if inspect.isclass(value):
            function = value.__new__ if "__new__" in vars(value) else value.__init__
        else:
            function = inspect.unwrap(value)
        overloads = typing.get_overloads(function) if inspect.isfunction(function) else []
        signatures = [_signature(one, name) for one in overloads or [value]]
        yield "\n".join(["```python", *signatures, "```"])
    yield markdown_of(_docstring(value))


def _signature(function: Any, name: str) -> str:
    try:
        signature = re.sub(r"^\((self|cls)(, |(?=\)))", "(", str(inspect.signature(function)))
    except (TypeError, ValueError):  # a type alias, or an exception as Python has it
        return name
    quoted = r"ForwardRef\('([^']*)'\)|(?<=: )'([^']*)'|(?<=-> )'([^']*)'"
    return name + re.sub(quoted, r"\1\2\3", signature)


def _docstring(value: Any) -> str:
    return inspect.getdoc(value.func if isinstance(value, cached_property) else value) or ""


def summary(markdown: str) -> str:
    """Return the first sentence below the heading of a page.

    >>> summary("# Storing\\n\\nArrays are written\\nby blocks. Each once.\\n")
    'Arrays are written by blocks.'
    """
    text = re.sub(r"^```.*?^```$|^(#|    |:::).*?$", "", markdown, flags=re.MULTILINE | re.DOTALL)
    first = next((part for part in re.split(r"\n\s*\n", text) if part.strip()), "")
    return re.split(r"(?<=\.)\s", " ".join(first.split()))[0]


class _Site:
    """The pages of the build that is under way."""

    nav: Any
    markdown: dict[str, str]


def index(config: Any) -> str:
    """Return the list of the pages, each with its first sentence."""
    parts = [f"# {config.site_name}", f"> {config.site_description}"]
    parts += ["All of these pages in one file: [llms-full.txt](llms-full.txt)"]
    for item in _Site.nav:
        lines = []
        for page in item.children if item.is_section else [item]:
            path = page.file.src_uri
            lines.append(f"- [{page.title}]({path}): {summary(_Site.markdown[path])}")
        parts += [f"## {item.title}", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def on_files(files: Any, config: Any) -> None:
    for name in ("llms.txt", "llms-full.txt"):  # so that pages can link to them
        files.append(File.generated(config, name, content=""))


def on_nav(nav: Any, **_: Any) -> None:
    _Site.nav, _Site.markdown = nav, {}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> None:
    _Site.markdown[page.file.src_uri] = plain(markdown)


def on_post_build(config: Any) -> None:
    folder = Path(config.site_dir)
    for path, markdown in _Site.markdown.items():
        (folder / path).write_text(markdown, encoding="utf-8")
    (folder / "llms.txt").write_text(index(config), encoding="utf-8")
    pages = [_Site.markdown[page.file.src_uri] for page in _Site.nav.pages]
    (folder / "llms-full.txt").write_text("\n\n".join(pages), encoding="utf-8")
