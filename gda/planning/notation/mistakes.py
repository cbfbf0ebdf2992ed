"""The mistakes in texts that people write, and their places in the text."""

from __future__ import annotations

from gda.layout.text import printable

_SHOWN = 72  # characters of a text that fit beside its caret


class MisreadError(ValueError):
    """A text that cannot be read: ``message`` has the reason, ``position`` the character."""

    def __init__(self, message: str, text: str, position: int) -> None:
        where = f" at {text[position:][:20]!r}" if text[position:].strip() else ""
        quoted = text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
        super().__init__(f"{quoted!r} cannot be read{where}: {message}")
        self.message = message
        self.text = text
        self.position = position

    def lines(self, name: str) -> list[str]:
        """Return lines about the option ``name``: the reason, the text and a caret below it."""
        before, after = printable(self.text[: self.position]), printable(self.text[self.position :])
        if len(before) > _SHOWN // 2:
            before = f"…{before[1 - _SHOWN // 2 :]}"
        if len(after) > _SHOWN - len(before):
            after = f"{after[: _SHOWN - 1 - len(before)]}…"
        return [f"{name}: {self.message}", f"  {before}{after}", f"  {' ' * len(before)}^"]


class MistakesError(ValueError):
    """Mistakes, in ``lines`` for a terminal."""

    def __init__(self, *lines: str) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines
