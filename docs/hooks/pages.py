"""Pages as the site shows them; in the repository they are Markdown that any viewer shows."""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File  # pyright: ignore[reportMissingImports]

ROOT = Path(__file__).parents[2]
_README = "<!-- README.md, from its heading to its first section -->"
_LINK_UPWARD = re.compile(r"(?<=\]\()(?:\.\./)+[^)#\s]+")
_EXAMPLES = re.compile(r"^```python\n(?=>>> )(.*?)^```$", re.MULTILINE | re.DOTALL)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Return a page with its examples as sessions, and with links to copies of other files.

    A file of the repository outside docs/ that a page links to becomes part of the site.
    """
    folder = os.path.dirname(page.file.src_uri)

    def to_copy(link: re.Match[str]) -> str:
        target = os.path.normpath(os.path.join("docs", folder, link[0]))
        if target.startswith("docs/") or not (ROOT / target).is_file():
            return link[0]  # within the site, or wrong, which the strict build refuses
        if files.get_file_from_path(target) is None:
            files.append(File.generated(config, target, abs_src_path=str(ROOT / target)))
        return os.path.relpath(target, folder)

    markdown = markdown.replace(_README, _opening())
    markdown = _EXAMPLES.sub(lambda block: f"```pycon\n{block[1]}```", markdown)
    markdown = re.sub(r"^ *<BLANKLINE>$", "", markdown, flags=re.MULTILINE)
    return _LINK_UPWARD.sub(to_copy, markdown)


def _opening() -> str:
    readme = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## ")[0].rstrip()
    readme = readme.removeprefix("# gda\n\n")
    return re.sub(r"(?<=\]\()(?![a-z]+:|#)", "../", readme).replace("](../docs/", "](")
