"""Where the files are that are no code: the catalogues of models and devices, and the embedded model.

An installed package has them inside it; in a checkout, also one that is installed with `pip install -e`, they are the
repository's data/, beside the package. Standard library only.
"""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).parent
IS_INSTALLED = (_PACKAGE / "data").is_dir()  # from a wheel; in a checkout the package has no such folder

DATA = (_PACKAGE if IS_INSTALLED else _PACKAGE.parent) / "data"
TINY = DATA / "tiny"

# What the files come with, and what to do where one is missing or damaged: for messages.
COMES_WITH = "this package" if IS_INSTALLED else "a checkout of this repository"
RESTORE = (
    "pip install --force-reinstall --no-deps inside-llm-inference"
    if IS_INSTALLED
    else "git restore data (without git: download the repository again)"
)

# What to do where a package is missing that all of the book needs.
INSTALL = (
    "pip install 'inside-llm-inference[book]'"
    if IS_INSTALLED
    else "make setup, or .venv/bin/python -m pip install -r requirements.txt"
)


def repository_file(name: str) -> Path | None:
    """A file at the top of the checkout; None if it is not there, or the package was installed without it."""
    path = _PACKAGE.parent / name
    return path if not IS_INSTALLED and path.is_file() else None
