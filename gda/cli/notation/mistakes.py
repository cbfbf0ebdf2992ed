"""The mistakes in texts that people write, and their places in the text."""

from __future__ import annotations

from gda.layout.text import printable


class MisreadError(ValueError):
    """A text that cannot be read: ``message`` has the reason, ``position`` the character."""

    def __init__(self, message: str, text: str, position: int) -> None:
        super().__init__(f"{text!r} cannot be read: {message}")
        self.message = message
        self.text = text
        self.position = position

    def lines(self, name: str) -> list[str]:
        """Return lines about the option ``name``: the reason, the text and a caret below it."""
        before = printable(self.text[: self.position])
        text = f"  {before}{printable(self.text[self.position :])}"
        return [f"{name}: {self.message}", text, f"  {' ' * len(before)}^"]


class MistakesError(ValueError):
    """Mistakes, in ``lines`` for a terminal."""

    def __init__(self, *lines: str) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines
