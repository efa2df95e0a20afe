"""Scheduler and engine need Python and nothing else: without any package, and in a browser's Python."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("bare_engine.py")

# What a page does, in Node: Python in WebAssembly, which sees the package's folder.
IN_NODE = """
const [pyodideFolder, packageFolder, program] = process.argv.slice(1);
const { readFileSync } = await import("node:fs");
const { pathToFileURL } = await import("node:url");
const { loadPyodide } = await import(pathToFileURL(`${pyodideFolder}/pyodide.mjs`));
const pyodide = await loadPyodide();
pyodide.setStdout({ batched: (line) => console.log(line) });
pyodide.FS.mkdirTree("/repository/minivllm");
pyodide.mountNodeFS("/repository/minivllm", packageFolder);
pyodide.runPython(`
import sys
sys.dont_write_bytecode = True  # the folder is the real one
sys.path.insert(0, "/repository")
print(sys.platform)
`);
pyodide.runPython(readFileSync(program, "utf8"));
"""

EXPECTED_OUTPUTS = {"a": list(range(11, 18)), "b": list(range(21, 28)), "c": list(range(31, 38))}


def pyodide_folder() -> Path | None:
    """The npm package: in PYODIDE_HOME, or in a node_modules beside the repository's files or above."""
    home = os.environ.get("PYODIDE_HOME")
    places = [Path(home), Path(home, "node_modules", "pyodide")] if home else []
    places += [folder / "node_modules" / "pyodide" for folder in (ROOT, *ROOT.parents)]
    return next((place for place in places if (place / "pyodide.mjs").is_file()), None)


def lines_of(command: list, **options) -> list[str]:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=120, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def run_in_cpython() -> dict:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return json.loads(lines_of([sys.executable, PROGRAM], env=environment)[-1])


def test_three_requests_run_to_the_end_where_no_package_can_be_imported():
    result = run_in_cpython()
    assert result["outputs"] == EXPECTED_OUTPUTS and result["reasons"] == ["length"] * 3
    assert result["hits"] == [0, 4, 4] and result["preempted"] > 0


def test_pyodide_gives_the_same_result():
    node, folder = shutil.which("node"), pyodide_folder()
    if node is None or folder is None:
        missing = "node" if node is None else "the npm package pyodide"
        pytest.skip(f"{missing} is not installed (npm install pyodide, and PYODIDE_HOME, if it is somewhere else)")
    *_, platform, result = lines_of([node, "--input-type=module", "-e", IN_NODE, folder, ROOT / "minivllm", PROGRAM])
    assert platform == "emscripten" and json.loads(result) == run_in_cpython()
