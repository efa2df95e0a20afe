"""Every notebook: in the committed form, without traces of a machine, and reproducible within its time."""

import re

import nbformat
import pytest

from tools import notebooks
from tools.notebooks import ROOT, nbval, normalise, read, text

CELL_SECONDS, CHAPTER_SECONDS = 5, 45  # on two quiet cores
BUSY = 4  # cells are timed by the clock, while other programs run

CHAPTERS = notebooks.chapters()
EXECUTED = CHAPTERS + notebooks.solutions()
ALL = EXECUTED + sorted((ROOT / "exercises").glob("*.ipynb"))

MACHINE = re.compile(r"/(home|root|tmp|Users|opt|work|mnt|var)/|[A-Z]:\\\\|site-packages|\.venv/lib")
TIME_STAMP = re.compile(r"\b20\d\d-\d\d-\d\d[T ]\d\d:\d\d|\b\d\d:\d\d:\d\d\b")
MARKDOWN_IMAGE = re.compile(r"!\[(.*?)\]\(")
HTML_IMAGE = re.compile(r"<img\b[^>]*>", re.I)


def each(paths):
    return pytest.mark.parametrize("path", paths, ids=[str(p.relative_to(ROOT)) for p in paths])


def output_texts(cell):
    """All text of a cell's outputs, with what it is."""
    for output in cell.get("outputs", []):
        yield output.output_type, output.get("text", "")
        for kind, data in output.get("data", {}).items():
            if not kind.startswith("image/p"):
                yield kind, data if isinstance(data, str) else str(data)


def trace_problems(notebook):
    """Machine paths, time stamps, errors, warnings and widgets in a notebook."""
    problems = []
    for cell in notebook.cells:
        if MACHINE.search(cell.source):
            problems.append(f"cell {cell.id}: a path of some machine in the source")
        for kind, content in output_texts(cell):
            if MACHINE.search(content):
                problems.append(f"cell {cell.id}: a path of some machine in the output")
            if TIME_STAMP.search(content):
                problems.append(f"cell {cell.id}: a time stamp in the output")
            if kind == notebooks.WIDGET:
                problems.append(f"cell {cell.id}: a stored widget")
            if kind == "text/markdown" and "$" in content:
                problems.append(f"cell {cell.id}: formulas in a markdown output stay raw on the site")
        for output in cell.get("outputs", []):
            if output.output_type == "error":
                problems.append(f"cell {cell.id}: an error")
            if output.get("name") == "stderr":
                problems.append(f"cell {cell.id}: a warning on stderr")
    return problems


def alt_text_problems(notebook):
    """Images without a description."""
    problems = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            for kind in output.get("data", {}):
                stored = output.get("metadata", {}).get(kind, {}).get("alt")
                if kind in ("image/png", "image/jpeg") and not (
                    stored or cell.metadata.get("mystnb", {}).get("image", {}).get("alt")
                ):
                    problems.append(f'cell {cell.id}: display(figure, metadata={{"image/png": {{"alt": ...}}}})')
                if kind == "image/svg+xml":
                    problems.append(f"cell {cell.id}: show SVG as HTML, so that it takes the theme's colours")
        sources = [cell.source] if cell.cell_type == "markdown" else []
        for content in sources + [c for kind, c in output_texts(cell) if kind in ("text/html", "text/markdown")]:
            for alt in MARKDOWN_IMAGE.findall(content):
                if not alt.strip():
                    problems.append(f"cell {cell.id}: ![](...) without a description")
            for tag in HTML_IMAGE.findall(content):
                if not re.search(r"\balt=[\"'][^\"']", tag):
                    problems.append(f"cell {cell.id}: <img> without alt")
            for tag in re.findall(r"<svg\b[^>]*>", content):
                if "aria-label" not in tag and "aria-hidden" not in tag:
                    problems.append(f"cell {cell.id}: <svg> without aria-label")
    return problems


@each(ALL)
def test_notebook_is_in_the_committed_form(path):
    """One kernel, no metadata of a machine or an editor, no widgets, valid, ids in place."""
    notebook = read(path)
    nbformat.validate(notebook)
    assert path.read_text(encoding="utf-8") == text(normalise(notebook)), "run make notebooks"
    ids = [cell.id for cell in notebook.cells]
    assert len(set(ids)) == len(ids)


@each(ALL)
def test_notebook_has_no_trace_of_a_machine(path):
    assert trace_problems(read(path)) == []


@each(ALL)
def test_images_are_described(path):
    assert alt_text_problems(read(path)) == []


@each(EXECUTED)
def test_outputs_are_those_of_one_run_from_top_to_bottom(path):
    code = [cell for cell in read(path).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), "run make notebooks"
    assert any(cell.outputs for cell in code)


@each(CHAPTERS)
def test_chapter_reproduces_within_its_time(path, report, cpu_seconds):
    """Strict nbval: outputs are compared, but for cells tagged nbval-ignore-output."""
    results = nbval([path], strict=True)
    ids = {cell.id for cell in read(path).cells if cell.cell_type == "code"}
    seconds = cpu_seconds()
    green = sum(not r.failure for r in results)
    took = f"{seconds:.0f} s of CPU (limit {CHAPTER_SECONDS})"
    report(f"chapter {path.stem}", f"{green}/{len(ids)} cells reproduce, {took}")
    assert {r.cell for r in results} == ids
    failures = [f"cell {r.cell}:\n{r.failure}" for r in results if r.failure]
    assert not failures, "\n".join(failures)
    slow = {r.cell: round(r.seconds, 1) for r in results[1:] if r.seconds > BUSY * CELL_SECONDS}
    assert not slow, f"cells over {CELL_SECONDS} s: {slow}"
    assert seconds < CHAPTER_SECONDS


def test_cells_that_ignore_their_output_are_followed_by_an_assert():
    """What depends on the machine is shown, and what must hold of it is checked in the next code cell."""
    problems = []
    for path in CHAPTERS:
        code = [cell for cell in read(path).cells if cell.cell_type == "code"]
        for cell, following in zip(code, [*code[1:], None], strict=True):
            free = "nbval-ignore-output" in cell.metadata.get("tags", [])
            shows = WIDGET_NOTE in str(cell.outputs)
            if shows and not free:
                problems.append(f"{path.name}, cell {cell.id}: a widget needs the tag nbval-ignore-output")
            if free and not shows and (following is None or "assert" not in cell.source + following.source):
                problems.append(f"{path.name}, cell {cell.id}: no assert follows")
    assert problems == []


WIDGET_NOTE = notebooks.WIDGET_NOTE.strip("*")


def notebook_of(*cells):
    new = nbformat.v4.new_notebook(metadata=notebooks.METADATA)
    for number, cell in enumerate(cells):
        cell.id = f"c{number}"
        new.cells.append(cell)
    return normalise(new)


def test_traces_are_seen():
    def output(content, **keywords):
        return nbformat.v4.new_code_cell("", outputs=[nbformat.v4.new_output("stream", text=content, **keywords)])

    bad = [
        output("/home/me/book"),
        output("done at 2026-01-02 10:11:12"),
        output("UserWarning", name="stderr"),
        nbformat.v4.new_code_cell("", outputs=[nbformat.v4.new_output("error", ename="E", evalue="", traceback=[])]),
        nbformat.v4.new_markdown_cell("see `/root/book`"),
    ]
    problems = trace_problems(notebook_of(*bad))
    assert [p.split(":")[0] for p in problems] == [f"cell c{n}" for n in range(5)]
    assert trace_problems(notebook_of(output("19 blocks"))) == []


def test_missing_descriptions_are_seen():
    def shown(data, metadata=None):
        return nbformat.v4.new_code_cell(
            "", outputs=[nbformat.v4.new_output("display_data", data=data, metadata=metadata or {})]
        )

    bad = [
        shown({"image/png": "AAAA"}),
        shown({"text/html": "<svg viewBox='0 0 1 1'></svg>"}),
        shown({"image/svg+xml": "<svg/>"}),
        nbformat.v4.new_markdown_cell("![](a.png)"),
        nbformat.v4.new_markdown_cell('<img src="a.png">'),
    ]
    assert [p.split(":")[0] for p in alt_text_problems(notebook_of(*bad))] == [f"cell c{n}" for n in range(5)]
    good = [
        shown({"image/png": "AAAA"}, {"image/png": {"alt": "waste falls"}}),
        shown({"text/html": "<svg aria-label='blocks'></svg>"}),
        nbformat.v4.new_markdown_cell("![waste falls](a.png)"),
    ]
    assert alt_text_problems(notebook_of(*good)) == []


def test_executing_stores_the_same_file_twice_and_no_widget(tmp_path):
    code = nbformat.v4.new_code_cell
    notebook = notebook_of(
        code("from ipywidgets import IntSlider, interact\n\ninteract(lambda n: print(n * 2), n=IntSlider(3, 0, 9));"),
        code("print('a')\nprint('b')\n6 * 7"),
    )
    path = tmp_path / "widget.ipynb"
    path.write_text(text(notebook), encoding="utf-8")
    notebooks.execute(path)
    first = path.read_text(encoding="utf-8")
    notebooks.execute(path)
    assert path.read_text(encoding="utf-8") == first
    assert "jupyter.widget" not in first and WIDGET_NOTE in first
    assert text(normalise(read(path))) == first
    stored = read(path).cells[1].outputs
    assert [o.output_type for o in stored] == ["stream", "execute_result"] and stored[0].text == "a\nb\n"


def test_nbval_sees_an_output_that_does_not_reproduce(tmp_path):
    notebook = notebook_of(nbformat.v4.new_code_cell("6 * 7"), nbformat.v4.new_code_cell("'text'"))
    path = tmp_path / "notebook.ipynb"
    path.write_text(text(notebook), encoding="utf-8")
    notebooks.execute(path)
    path.write_text(path.read_text(encoding="utf-8").replace('"42"', '"41"'), encoding="utf-8")
    results = nbval([path], strict=True)
    assert [bool(r.failure) for r in results] == [True, False]
    assert results[0].cell == "c0" and results[0].notebook == str(path)
