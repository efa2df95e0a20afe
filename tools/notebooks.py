"""Execute notebooks in place, and check them with nbval.

    python -m tools.notebooks [NOTEBOOK ...]     default: every chapter and every exercise solution

Stored notebooks are deterministic: no time stamps, no version of the machine's Python, and no widgets. (A widget in
a stored notebook is dead outside Jupyter, and its random ids change with every run. What is stored is a line that
says so; the static figure before it carries the point.)
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parent.parent
CELL_TIMEOUT = 60  # seconds
WIDGET = "application/vnd.jupyter.widget-view+json"
WIDGET_NOTE = "*Interactive: run this cell in Jupyter (`make lab`).*"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
ANSI = re.compile(r"\x1b\[[0-9;]*m")


def chapters() -> list[Path]:
    """The chapters' notebooks."""
    return sorted((ROOT / "chapters").glob("*.ipynb"))


def solutions() -> list[Path]:
    """The exercises' source notebooks."""
    return sorted((ROOT / "exercises" / "solutions").glob("*.ipynb"))


def read(path: Path) -> NotebookNode:
    """The notebook at `path`."""
    return nbformat.read(path, as_version=4)


def text(notebook: NotebookNode) -> str:
    """The file content of a notebook, in the one form that is committed."""
    return nbformat.writes(notebook, indent=1, ensure_ascii=False).rstrip("\n") + "\n"


def normalise(notebook: NotebookNode) -> NotebookNode:
    """Take out, in place, what differs between two runs or two machines without meaning anything."""
    notebook.metadata = NotebookNode(METADATA)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for cell in notebook.cells:
        cell.metadata = NotebookNode({k: v for k, v in cell.metadata.items() if k in ("tags", "mystnb", "jupyter")})
        for output in cell.get("outputs", []):
            if WIDGET in output.get("data", {}):
                output.data = NotebookNode({"text/markdown": WIDGET_NOTE, "text/plain": WIDGET_NOTE.strip("*")})
    return notebook


def execute(path: Path) -> float:
    """Run the notebook in its own folder and store it with its outputs; returns the seconds it took."""
    notebook, start = read(path), time.perf_counter()
    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
        extra_arguments=["--IPKernelApp.log_level=40"],  # errors only
        record_timing=False,
        coalesce_streams=True,
    )
    client.execute()
    path.write_text(text(normalise(notebook)), encoding="utf-8")
    return time.perf_counter() - start


@dataclass(frozen=True)
class CellResult:
    """What nbval said about one code cell."""

    notebook: str  # path
    cell: str  # id
    seconds: float
    failure: str  # nbval's report without colours; empty if the cell passed

    @property
    def traceback(self) -> str:
        """What the learner would see under the failing cell."""
        return self.failure.partition("Traceback:")[2].strip()


def nbval(notebooks: Sequence[Path], strict: bool = False) -> list[CellResult]:
    """Run notebooks one after the other under nbval, each with a fresh kernel in its own folder.

    `strict` also compares the outputs with the stored ones (but for cells tagged nbval-ignore-output).
    Raises RuntimeError if nbval itself could not run.
    """
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch, "pytest.ini").write_text("[pytest]\n")
        report = Path(scratch, "report.xml")
        command = [sys.executable, "-m", "pytest", "-c", f"{scratch}/pytest.ini", "--rootdir", scratch, "--noconftest"]
        command += ["-q", "--color=no", "-p", "no:cacheprovider", "-p", "tools.nbval_cells", "-p", "nbval.plugin"]
        command += ["--nbval" if strict else "--nbval-lax", "--nbval-current-env"]
        command += [f"--nbval-cell-timeout={CELL_TIMEOUT}", f"--junitxml={report}", *map(str, notebooks)]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
        environment |= {"PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        run = subprocess.run(command, env=environment, capture_output=True, text=True)
        if run.returncode not in (0, 1) or not report.exists():
            raise RuntimeError(f"nbval did not run:\n{run.stdout}\n{run.stderr}")
        return [_result(case) for case in ET.parse(report).iter("testcase")]


def _result(case: ET.Element) -> CellResult:
    """One <testcase> of the JUnit report."""
    about = {p.get("name"): p.get("value") for p in case.iter("property")}
    failures = [*case.iter("failure"), *case.iter("error")]
    failure = "\n".join(ANSI.sub("", f.text or f.get("message", "failed")) for f in failures)
    # JUnit escapes control characters as #x1B
    failure = re.sub(r"#x1B\[[0-9;]*m", "", failure)
    return CellResult(about["notebook"], about["cell"], float(case.get("time", 0)), failure)


def main() -> None:
    """Execute the named notebooks, two at a time."""
    parser = argparse.ArgumentParser(prog="python -m tools.notebooks", description=main.__doc__)
    parser.add_argument("notebook", nargs="*", type=Path, help="default: every chapter and solution")
    paths = [path.resolve() for path in parser.parse_args().notebook] or chapters() + solutions()
    for path in paths:
        if not path.is_file():
            parser.error(f"there is no notebook {path}")

    def run(path: Path) -> str:
        name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
        try:
            return f"✓ {name}: {execute(path):.0f} s"
        except (CellExecutionError, CellTimeoutError) as error:
            return f"✗ {name}: left as it was\n{ANSI.sub('', str(error))}"

    with ThreadPoolExecutor(2) as pool:
        lines = []
        for line in pool.map(run, paths):
            print(line, flush=True)
            lines.append(line)
    sys.exit(any(line.startswith("✗") for line in lines))


if __name__ == "__main__":
    main()
