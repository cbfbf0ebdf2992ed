"""A drawing of a saved trace: its tracks by time, and the live bytes.

As a program it writes ``docs/pictures/step.svg``, of the first program of ``docs/rehearsing.md``.
"""

import html
import json
import math
import re
import tempfile
from pathlib import Path
from typing import Any

from page_blocks import blocks_of

from gda.layout.text import format_bytes

DOCS = Path(__file__).parents[1] / "docs"
PICTURE = DOCS / "pictures" / "step.svg"
LEFT, WIDTH, ROW, COUNTER = 92, 640, 30, 56
GLYPH = 6  # about the width of a character
COLORS = ("#77aadd", "#eedd88", "#44bb99", "#ffaabb", "#ee9977", "#99ddff")
HEAD = """\
<svg xmlns="http://www.w3.org/2000/svg" class="gda-svg" role="img" aria-label="{label}" \
width="{width}" height="{height}" viewBox="0 0 {width} {height}" fill="currentColor" \
font-family="system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif" \
font-size="11" style="max-width:100%;height:auto">\
<style>svg.gda-svg:root{{color-scheme:light dark;color:CanvasText}}</style>"""


def trace_of_the_page() -> dict[str, Any]:
    """Return the trace of the program ``fits.py`` of the page."""
    page = (DOCS / "rehearsing.md").read_text(encoding="utf-8")
    (program,) = [text for _, text, _ in blocks_of(page) if text.startswith("# fits.py\n")]
    names: dict[str, Any] = {}
    exec(compile(program.replace("print(", "plan = ("), "fits.py", "exec"), names)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.json"
        names["plan"].save_trace(path)
        return json.loads(path.read_text(encoding="utf-8"))


def drawing(trace: dict[str, Any]) -> str:
    """Return a trace as an SVG: a row for each track, and the temporaries that are live."""
    events = trace["traceEvents"]
    tracks = {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
    slices = [each for each in events if each["ph"] == "X"]
    end = max(each["ts"] + each["dur"] for each in slices)
    bottom = (len(tracks) + 1) * ROW + COUNTER
    estimate = trace["otherData"]["estimate"]
    label = f"A step of {estimate}: {', '.join(tracks.values())} and live bytes, by time"
    lines = [HEAD.format(label=html.escape(label), width=LEFT + WIDTH + 8, height=bottom + 22)]

    def at(time: float) -> float:
        return round(LEFT + time / end * WIDTH, 2)

    def text(x: float, y: float, words: str, more: str = "") -> str:
        return f'<text x="{x}" y="{y}"{more}>{html.escape(words)}</text>'

    for row, (tid, track) in enumerate(tracks.items()):
        top = row * ROW + 4
        lines.append(text(LEFT - 8, top + 15, track, ' text-anchor="end"'))
        for each in (each for each in slices if each["tid"] == tid):
            x, width = at(each["ts"]), round(each["dur"] / end * WIDTH, 2)
            about = f"{each['name']}, {each['args']['operation']}: {each['args']['takes']}"
            lines.append(
                f'<rect x="{x}" y="{top}" width="{max(width, 0.6)}" height="{ROW - 8}" '
                f'fill="{COLORS[row % len(COLORS)]}" stroke="currentColor" stroke-opacity=".4" '
                f'stroke-width=".5"><title>{html.escape(about)}</title></rect>'
            )
            name = each["name"]  # such as all-reduce fits.py:11, or the first or last part of it
            for words in (name, name.split()[0], f":{name.rpartition(':')[2]}"):
                if width > GLYPH * len(words):
                    middle = ' text-anchor="middle" fill="#000" pointer-events="none"'
                    lines.append(text(round(x + width / 2, 2), top + 15, words, middle))
                    break
    # The counter keeps its value until the next one.
    live = [(each["ts"], each["args"]["temporaries"]) for each in events if each["ph"] == "C"]
    most = max(nbytes for _, nbytes in live)
    base, path = bottom - ROW + 4, ""
    for (_, nbytes), (until, _) in zip(live, [*live[1:], (end, 0)], strict=True):
        path += f"V{round(base - nbytes / most * (COUNTER - 14), 2)}H{at(until)}"
    lines.append(f'<path d="M{LEFT},{base}{path}V{base}Z" fill="#cc99dd"/>')
    lines.append(text(LEFT - 8, base - 14, "live bytes", ' text-anchor="end"'))
    (peak,) = [each["ts"] for each in events if each["name"] == "peak of temporaries"]
    lines.append(text(at(peak), base - COUNTER + 10, f"temporaries, at most {format_bytes(most)}"))
    scale = 10 ** math.floor(math.log10(end))
    step = scale / (1 if end >= 4 * scale else 2 if end >= 2 * scale else 5)
    for tick in range(math.floor(end / step) + 1):
        x = at(tick * step)
        lines.append(f'<path d="M{x},{base}v5" stroke="currentColor" stroke-opacity=".55"/>')
        lines.append(text(x, base + 18, f"{tick * step / 1000:g} ms", ' text-anchor="middle"'))
    return "\n".join([*lines, "</svg>"]) + "\n"


def words_of(svg: str) -> list[str]:
    """Return the texts of a drawing, in their order."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


if __name__ == "__main__":
    PICTURE.write_text(drawing(trace_of_the_page()), encoding="utf-8")
