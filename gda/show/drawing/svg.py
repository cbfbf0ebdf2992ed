"""An array as a box divided into blocks, as SVG.

One dimension is a strip, two are a rectangle, more are boxes (``boxes.py``).
"""

from __future__ import annotations

from collections.abc import Iterator

from gda.layout.text import counted, format_numbers
from gda.show.drawing.boxes import draw_boxes
from gda.show.drawing.faces import INK, SHARED, Face
from gda.show.drawing.picture import Picture
from gda.show.drawing.sheet import TIMES, escape, number, text_width
from gda.show.drawing.sides import sides_of
from gda.show.subject import Subject
from gda.show.words import facts, where_held

_SCALAR = 64
_STRIP = (440, 52)
_WIDEST, _HIGHEST = 400, 300
_LEGEND_WIDTH = 420
_FONT_SIZES = (12, 10)


def svg_of(subject: Subject) -> str:
    """Return the drawing of a subject: an SVG element, self-contained, without scripts.

    A colour is a process, grey is several. Hovering over a block shows its index, its devices with
    their replica ids, its processes and its bytes. Text has the colour of the text around it. More
    than about 512 blocks, and those too small to be seen, are drawn as cells that stand for
    several, and the drawing says so.
    """
    picture = Picture(subject)
    if len(subject.shape) > 2:
        draw_boxes(picture)
    else:
        _draw_rectangle(picture)
    _label_blocks(picture)
    _draw_legend(picture)
    _write_notes(picture)
    words = "; ".join(f"{key} {value}" for key, value in facts(subject))
    dtype = "" if subject.dtype is None else f" {subject.dtype}"
    return picture.sheet.document(f"{subject.kind} {subject.shape}{dtype}; {words}")


def _draw_rectangle(picture: Picture) -> None:
    subject, parts = picture.subject, picture.subject.grid.parts
    rank = len(parts)
    if rank == 0:
        width, height = _SCALAR, _SCALAR
    elif rank == 1:
        (across,), height = sides_of(subject, (0,), _STRIP[0]), _STRIP[1]
        width = across.length
        picture.measure_below(0, height, across)
    else:
        is_wide = subject.shape[1] > subject.shape[0]
        down, across = sides_of(subject, (0, 1), _WIDEST if is_wide else _HIGHEST)
        width, height = across.length, down.length
        picture.is_to_scale = down.is_true and across.is_true
        picture.measure_left(0, 0, down)
        picture.measure_below(0, height, across)
    blocks = picture.blocks.reshape(-1, parts[-1] if parts else 1)
    picture.place(Face(picture.paint, blocks, width, height), 0, 0)


# Labels of blocks.


def _label_blocks(picture: Picture) -> None:
    """Write device numbers into the blocks, in the fullest form for which all have room."""
    if any(face.is_folded for face, _, _ in picture.faces):
        return
    face, _, _ = picture.faces[0]
    width = face.width / face.blocks.shape[1] - 6
    height = face.height / face.blocks.shape[0] - 4
    if min(width, height) < _FONT_SIZES[-1] / 2:
        return
    for labels in _label_forms(picture):
        for size in _FONT_SIZES:
            widest = max(text_width(line, size) for lines in labels.values() for line in lines)
            highest = max(map(len, labels.values())) * 1.25 * size
            if widest <= width and highest <= height:
                for face, x, y in picture.faces:
                    _write_labels(picture, face, x, y, labels, size)
                return


def _label_forms(picture: Picture) -> Iterator[dict[int, list[str]]]:
    """Yield the lines of each block's label, the fullest first."""
    subject = picture.subject
    blocks = [block for face, _, _ in picture.faces for block in face.blocks.ravel().tolist()]
    labels = {block: format_numbers(subject.numbers(subject.holders[block])) for block in blocks}
    replicas = subject.grid.num_replicas
    if replicas > 1:
        times = f"{TIMES}{replicas}"
        yield {block: [label, times] for block, label in labels.items()}
        yield {block: [times] for block in labels}
        return
    if subject.device_ids is not None:
        yield {block: [f"{subject.device_kind} {label}"] for block, label in labels.items()}
    yield {block: [label] for block, label in labels.items()}


def _write_labels(
    picture: Picture, face: Face, x: float, y: float, labels: dict[int, list[str]], size: float
) -> None:
    xs, ys = face.edges()
    parts = [
        f'<g class="gda-labels" fill="{INK}" font-size="{size}" text-anchor="middle" '
        f'pointer-events="none" transform="translate({number(x)} {number(y)})">'
    ]
    for i, row in enumerate(face.blocks.tolist()):
        for j, block in enumerate(row):
            lines = labels[block]
            middle = (ys[i] + ys[i + 1]) / 2 + 0.36 * size - 0.62 * size * (len(lines) - 1)
            for place, line in enumerate(lines):
                at = number(middle + 1.24 * size * place)
                faint = ' fill-opacity=".85"' if place else ""
                across = number((xs[j] + xs[j + 1]) / 2)
                parts.append(f'<text x="{across}" y="{at}"{faint}>{escape(line)}</text>')
    picture.sheet.add("".join([*parts, "</g>"]))


# Below the drawing.


def _draw_legend(picture: Picture) -> None:
    paint, sheet = picture.paint, picture.sheet
    if len(paint.numbers) == 1:
        return
    y = sheet.bottom + 26
    sheet.text(0, y, "", detail="process", size=11)
    x = text_width("process", 11) + 8
    left = x
    for process, color in zip(paint.numbers, paint.colors, strict=False):
        name = str(process)
        width = 16 + text_width(name, 11) + 12
        if x + width > _LEGEND_WIDTH and x > left:
            x, y = left, y + 18
        sheet.add(
            f'<rect class="gda-key" x="{number(x)}" y="{number(y - 9.5)}" width="11" height="11" '
            f'rx="2" fill="{color}" stroke="{INK}" stroke-opacity=".4"/>'
        )
        sheet.text(x + 16, y, name, size=11)
        x += width
    if len(paint.numbers) > len(paint.colors):  # the next one has the first colour again
        sheet.text(x, y, "", detail=f"… {len(paint.numbers):,} processes", size=11)


def _write_notes(picture: Picture) -> None:
    """Write the number of blocks, and notes about the limits of the drawing."""
    grid, sheet = picture.subject.grid, picture.sheet
    where = "" if grid.num_replicas == 1 else f", {where_held(picture.subject)}"
    shape = f" of {grid.shard_shape}" if grid.shard_shape else ""
    y = sheet.bottom + 22
    sheet.text(0, y, "", detail=f"{counted(grid.num_shards, 'block')}{shape}{where}", size=11)
    for note in _notes(picture):
        y += 16
        sheet.text(0, y, "", detail=note, size=11)


def _notes(picture: Picture) -> Iterator[str]:
    face, _, _ = picture.faces[0]
    if 0 in picture.subject.shape:
        yield "no elements"
    if picture.subject.has_padding:
        yield "with padding"
    if face.is_folded:
        yield f"each cell stands for {face.rows[1]} {TIMES} {face.columns[1]} of them"
    if not picture.is_to_scale:
        yield "sides not to scale"
    if any(f'fill="{SHARED}"' in part for part in picture.sheet.parts):
        yield "grey: held by several processes"
