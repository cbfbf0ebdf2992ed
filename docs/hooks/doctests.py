"""Docstrings as Markdown: an extension of griffe, which reads them for the API pages."""

import re
from typing import Any

import griffe  # pyright: ignore[reportMissingImports]

# The paragraph of a package that guides through its modules.
_GUIDE = re.compile(r"^Read (?:in this order:|``).*?(?:\n\n|\Z)", re.MULTILINE | re.DOTALL)
# Code, or the start of a __name__ outside code, which Markdown would show in bold.
_BARE = re.compile(r"(```.*?```|``.*?``)|__(?=\w+__)", re.DOTALL)


def markdown_of(docstring: str) -> str:
    """Return a docstring with its examples and literal blocks as Markdown has them.

    >>> markdown_of("In a shell::\\n\\n    gda\\n\\n>>> 1 + 1\\n2").splitlines()
    ['In a shell:', '', '    gda', '', '```pycon', '>>> 1 + 1', '2', '```']
    """
    lines: list[str] = []
    docstring = _GUIDE.sub("", docstring)
    margin: str | None = None  # of the example that the line belongs to
    for line in docstring.splitlines():
        if margin is None and (prompt := re.match(r"( *)>>> ", line)):
            margin = prompt[1]
            lines += [f"{margin}```pycon", line]
        elif margin is None:
            lines.append(re.sub(r"^::$", "", re.sub(r"(?<=\w)::$", ":", line)))
        elif line.strip():
            lines.append("" if line.strip() == "<BLANKLINE>" else line)
        else:
            lines += [f"{margin}```", line]
            margin = None
    if margin is not None:
        lines.append(f"{margin}```")
    return "\n".join(lines)


class Doctests(griffe.Extension):
    """Rewrites each docstring when it has been read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            markdown = markdown_of(obj.docstring.value)
            obj.docstring.value = _BARE.sub(lambda bare: bare[1] or r"\_\_", markdown)

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        """Show the signature of ``__new__`` where there is no ``__init__``."""
        if "__new__" in cls.members:
            cls.members.setdefault("__init__", cls.members["__new__"])
