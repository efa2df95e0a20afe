"""Build the site: `python -m tools.site build [--out FOLDER]`.

Everything is built afresh, warnings are errors, and afterwards every page of `_toc.yml` must be there. (A second,
incremental Sphinx run would stay silent about a page that warned in the first.)
"""

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
# What the script `jupyter-book` does, after `tools` made its imports four seconds faster
JUPYTER_BOOK = "import tools; from jupyter_book.cli.main import main; main()"


def toc_pages(toc: Path = ROOT / "_toc.yml") -> list[str]:
    """The pages of the table of contents, root first, as paths without suffix."""
    content = yaml.safe_load(toc.read_text(encoding="utf-8"))

    def files(node: object) -> list[str]:
        if isinstance(node, list):
            return [page for child in node for page in files(child)]
        if isinstance(node, dict):
            own = [node["file"]] if "file" in node else []
            return own + files([value for value in node.values() if isinstance(value, list)])
        return []

    return [content["root"], *files(content)]


def missing_pages(html: Path) -> list[str]:
    """The pages of the table of contents that `html` lacks."""
    return [page for page in toc_pages() if not (html / f"{page}.html").is_file()]


class SiteError(Exception):
    """The site could not be built; the message is the log."""


def build(out: Path = ROOT) -> Path:
    """Build the site into `out`/_build/html and return that folder; SiteError with the log if anything is wrong."""
    html = out / "_build" / "html"
    shutil.rmtree(out / "_build", ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-c", JUPYTER_BOOK, "build", str(ROOT), "--path-output", str(out)]
    command += ["--all", "--warningiserror", "--keep-going", "--quiet"]
    run = subprocess.run(command, cwd=ROOT, text=True, capture_output=True)
    if run.returncode:
        raise SiteError(f"{run.stdout}\n{run.stderr}\nThe site was not built; the warnings above count as errors.")
    if missing := missing_pages(html):
        raise SiteError(f"The site lacks pages of _toc.yml: {', '.join(missing)}")
    return html


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["build"])
    parser.add_argument("--out", type=Path, default=ROOT, help="the folder that gets _build/html")
    arguments = parser.parse_args()
    start = time.perf_counter()
    try:
        html = build(arguments.out.resolve())
    except SiteError as error:
        sys.exit(str(error))
    seconds = time.perf_counter() - start
    print(f"· site: all {len(toc_pages())} pages of _toc.yml built in {seconds:.0f} s")
    print(f"Open {html / 'index.html'}\n  or run: python3 -m http.server -d {html} and open http://localhost:8000")


if __name__ == "__main__":
    main()
