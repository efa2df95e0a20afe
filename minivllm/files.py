"""Files of other people: read within limits, and quoted in messages so that a terminal shows what is there."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MAX_CONFIG_BYTES = 10 * 10**6  # configs and chat templates have a few KB
MAX_TABLE_BYTES = 100 * 10**6  # tokenizer.json and the index of shards; the largest vocabularies in use take 35 MB
MAX_MESSAGE_CHARS = 4000

_WAY_OUT = "Correct it, or get it again"


def printable(text: object) -> str:
    """`text` on one line, with everything escaped that has no shape of its own: control characters, which a terminal
    obeys, marks that reverse the reading direction, and lone surrogates, which cannot be printed."""
    text = str(text)
    if len(text) > MAX_MESSAGE_CHARS:
        text = f"{text[:MAX_MESSAGE_CHARS]}..."
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


@contextlib.contextmanager
def printable_errors() -> Iterator[None]:
    """A ValueError out of this block has a message that is safe to print; also a decorator."""
    try:
        yield
    except ValueError as error:
        if (message := printable(error)) == str(error):
            raise
        raise ValueError(message) from None


def is_file(path: Path) -> bool:
    """Whether there is a regular file: no device or pipe, which could be read without end. False where one cannot look
    (no permission, or a name that no file can have)."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def read_bytes(path: Path, limit: int) -> bytes:
    """A whole file of at most `limit` bytes. Raises ValueError, with the path, if it cannot be read or is larger."""
    if not is_file(path):
        why = "is not a regular file" if os.path.exists(path) else "cannot be read: No such file or directory"
        raise ValueError(f"{path} {why}")
    try:
        with path.open("rb") as file:
            # Not by its stated size, which is 0 for what /proc shows, and may change.
            data = file.read(limit + 1)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None
    if len(data) > limit:
        raise ValueError(f"{path} is larger than {limit // 10**6} MB, the most that is read of such a file. {_WAY_OUT}")
    return data


def read_text(path: Path, limit: int = MAX_CONFIG_BYTES) -> str:
    """A UTF-8 file. Raises ValueError, with the path, if it cannot be read as one."""
    try:
        return read_bytes(path, limit).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} cannot be read as UTF-8 text: {error}. Save it as UTF-8, or get it again") from None


def read_json(path: Path, limit: int = MAX_CONFIG_BYTES) -> dict[str, Any] | None:
    """The object in a JSON file, or None if there is no such file. Raises ValueError if it holds anything else."""
    if not is_file(path):
        return None
    text = read_text(path, limit)
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}. {_WAY_OUT}") from None
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply to be read. {_WAY_OUT}") from None
    except ValueError:  # Python's own limit on the digits of an int
        raise ValueError(f"{path} holds a number of more than 4,300 digits. {_WAY_OUT}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a JSON {type(value).__name__}, not an object. {_WAY_OUT}")
    return value
