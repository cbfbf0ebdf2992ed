"""The build fails for a page that would load anything from outside the site."""

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

# A link that one clicks on, and the namespace of an SVG element, load nothing.
_LOADED_BY = {"src", "srcset", "data", "poster", "background"}
_LINKS = {"alternate", "canonical", "next", "prev", "author", "license"}
_HREF_LOADED_BY = {"image", "use", "feimage"}
_OUTSIDE = re.compile(r"(?:https?:)?//[^\s\"')]+", re.IGNORECASE)
_IN_STYLE = re.compile(r"(?:url\(\s*|@import\s+)[\"']?((?:https?:)?//[^\s\"')]+)", re.IGNORECASE)


def fetched_by_html(text: str) -> list[str]:
    """Return the addresses outside the site from which a browser loads something for a page.

    >>> fetched_by_html('<a href="https://x.org">x</a> <img src="https://x.org/i.png">')
    ['https://x.org/i.png']
    """
    reader = _Reader()
    reader.feed(text)
    return reader.found


def fetched_by_css(text: str) -> list[str]:
    """Return the same for a style sheet.

    >>> fetched_by_css('@import "//x.org/f.css"; a { background: url(data:image/png) }')
    ['//x.org/f.css']
    """
    return _IN_STYLE.findall(text)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._is_in_style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._is_in_style = tag == "style"
        values = {name: value or "" for name, value in attrs}
        for name, value in values.items():
            if name == "style":
                self.found += fetched_by_css(value)
            elif name in _LOADED_BY or (name in {"href", "xlink:href"} and _loads(tag, values)):
                self.found += _OUTSIDE.findall(value) if _OUTSIDE.match(value.strip()) else []
        if tag == "pre" and "mermaid" in values.get("class", ""):
            self.found.append("the script of mermaid")  # which the theme fetches

    def handle_data(self, data: str) -> None:
        if self._is_in_style:
            self.found += fetched_by_css(data)

    def handle_endtag(self, tag: str) -> None:
        self._is_in_style = False


def _loads(tag: str, values: dict[str, str]) -> bool:
    if tag == "link":
        return not set(values.get("rel", "").split()) <= _LINKS
    return tag in _HREF_LOADED_BY


def fetched_by_site(folder: Path) -> Iterator[str]:
    """Yield a line for each thing that a page or a style sheet below a folder loads."""
    for suffix, fetched in ((".html", fetched_by_html), (".css", fetched_by_css)):
        for path in sorted(folder.rglob(f"*{suffix}")):
            for address in fetched(path.read_text(encoding="utf-8")):
                yield f"{path.relative_to(folder)} loads {address}"


def on_post_build(config: Any) -> None:
    if found := list(fetched_by_site(Path(config.site_dir))):
        raise RuntimeError("the site must load nothing from elsewhere:\n" + "\n".join(found))
