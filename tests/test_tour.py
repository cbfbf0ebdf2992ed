"""The tour as a program and as a notebook with the same cells.

After a change of the program, run ``python tests/test_tour.py`` to write the notebook again.
"""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from running import fresh_python

ROOT = Path(__file__).parents[1]
PROGRAM, NOTEBOOK = ROOT / "examples" / "spmd_tour.py", ROOT / "docs" / "spmd_tour.ipynb"
MARKDOWN, CODE = "# %% [markdown]\n", "# %%\n"

Cell = dict[str, Any]

# A group, because several tests look at one run of the notebook.
pytestmark = [pytest.mark.docs, pytest.mark.xdist_group("tour")]


def cells_of(program: str) -> list[tuple[str, str]]:
    """Return kind and text of each cell; what is above the first is for the program only."""
    marks = [*re.finditer(r"^# %%.*\n", program, re.MULTILINE)]
    ends = [mark.start() for mark in marks[1:]] + [len(program)]
    cells = []
    for mark, end in zip(marks, ends, strict=True):
        text = program[mark.end() : end].strip("\n")
        assert mark.group() in (MARKDOWN, CODE), mark.group()
        if mark.group() == MARKDOWN:
            assert all(line == "#" or line.startswith("# ") for line in text.splitlines()), text
            cells.append(("markdown", "\n".join(line[2:] for line in text.splitlines())))
        else:
            cells.append(("code", text))
    return cells


def notebook_of(program: str) -> dict[str, Any]:
    """Return the notebook of a program in cells, as JSON has it: nbformat 4.5, without outputs."""
    cells: list[Cell] = []
    for number, (kind, text) in enumerate(cells_of(program)):
        cell: Cell = {"cell_type": kind, "id": f"cell-{number:02}", "metadata": {}}
        if kind == "code":
            cell |= {"execution_count": None, "outputs": []}
        cells.append(cell | {"source": text.splitlines(keepends=True)})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def test_the_notebook_has_the_cells_of_the_program() -> None:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    expected = notebook_of(PROGRAM.read_text(encoding="utf-8"))
    assert notebook == expected, "write it again with: python tests/test_tour.py"


def test_it_runs_as_a_program() -> None:
    done = fresh_python("-W", "error", PROGRAM, COLUMNS="80")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> list[Cell]:
    """The cells after a real kernel has run them."""
    import nbformat
    from nbclient import NotebookClient

    folder = tmp_path_factory.mktemp("jupyter")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    ours = ("XLA_FLAGS", "FORCE_COLOR")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    for name in ("JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        environment[name] = str(folder / name.lower())
    client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}})
    client.execute(env=environment)  # raises where a cell does
    return notebook.cells


def test_it_runs_as_a_notebook(executed: list[Cell]) -> None:
    code = [cell for cell in executed if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)]
    for cell in code:
        for output in cell["outputs"]:
            assert output["output_type"] != "error"
            assert output.get("name") != "stderr", output["text"]
        drawn = [o for o in cell["outputs"] if o["output_type"] == "display_data"]
        assert len(drawn) == cell["source"].count("gda.show("), cell["source"]


if __name__ == "__main__":
    written = notebook_of(PROGRAM.read_text(encoding="utf-8"))
    text = json.dumps(written, indent=1, ensure_ascii=False, sort_keys=True)
    NOTEBOOK.write_text(text + "\n", encoding="utf-8")
