"""The files of a checkpoint's folder: which of them hold the weights, and JSON of a size that can be meant.

Standard library only: the planner counts the bytes of the files that the engine loads.
"""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from minivllm.units import MB

MAX_CONFIG = 10 * MB  # of a config.json; the largest are some tens of kB
MAX_JSON = 100 * MB  # of any other; DeepSeek-V3's index of tensors has 9 MB
MIN_WEIGHTS = 10_000  # bytes of the smallest thing that can be a model's weights

WHOLE_FILES = ("model.safetensors", "pytorch_model.bin")  # in the order in which they are looked for


def read_text(path: Path, most: int = MAX_JSON) -> str:
    """The text of a regular file of at most `most` bytes.

    Raises OSError if it cannot be opened, and ValueError if it is a device or a pipe, which may never end, is larger,
    or is not UTF-8.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError(f"{path} is not a regular file")
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"{path} has more than {most // MB} MB, which no such file has")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from None


def read_json(path: Path, most: int = MAX_JSON) -> dict[str, Any] | None:
    """The object in a JSON file, or None if there is no such file. Raises ValueError if it holds anything else."""
    if not path.is_file():
        return None
    try:
        value = json.loads(read_text(path, most))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}. Correct it, or get it again") from None
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply to be read. Correct it, or get it again") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a JSON {type(value).__name__}, not an object. Correct it, or get it again")
    return value


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights: one, or the shards that an index names. Safetensors before .bin.

    Raises ValueError if there are none, or if the index names files that are not there.
    """
    for whole in WHOLE_FILES:
        if (folder / whole).is_file():
            return [folder / whole]
        index_file = folder / f"{whole}.index.json"
        index = read_json(index_file)
        if index is None:
            continue
        weight_map = index.get("weight_map")
        names = sorted({str(file) for file in weight_map.values()}) if isinstance(weight_map, dict) else []
        missing = [name for name in names if Path(name).name != name or not (folder / name).is_file()]
        if missing or not names:
            found = ", ".join(missing[:5]) or f"none at all ('weight_map' is {weight_map!r:.100})"
            raise ValueError(
                f"{index_file} names files that are not beside it: {found}; expected 'weight_map': {{tensor: file}} "
                "with files of this folder. Download the missing files, or correct the index"
            )
        return [folder / name for name in names]
    raise ValueError(
        f"{folder} has no weights: expected model.safetensors or pytorch_model.bin, or shards with their index "
        "(model.safetensors.index.json)"
    )


def checkpoint_bytes(path: str | Path) -> int | None:
    """Size of the weights in a checkpoint's folder, or beside its config.json: what a model of mixed precision takes.

    Beside what the engine loads, all parts of a split file without an index, or the only GGUF. None if they are not all
    there, or if it is unclear which of several files are the model's.
    """
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    try:
        named = [name for whole in WHOLE_FILES for name in (whole, f"{whole}.index.json")]
        has_named = any((folder / name).is_file() for name in named)
        files = weight_files(folder) if has_named else _split_file(folder) or _only_gguf(folder)
        sizes = [file.stat().st_size for file in files]
    except (OSError, ValueError):
        return None
    # Below this they are what Git LFS and its like leave in a file's place.
    return sum(sizes) if sum(sizes) >= MIN_WEIGHTS else None


def _split_file(folder: Path) -> list[Path]:
    """model-00001-of-00003.safetensors and so on, if all are there."""
    parts = list(folder.glob("model-*-of-*.safetensors"))
    is_complete = {part.stem.rpartition("-")[2] for part in parts} == {f"{len(parts):05}"}
    if parts and not is_complete:
        raise ValueError(f"{folder} holds {len(parts)} parts of a split file, which are not all, or more than all")
    return parts


def _only_gguf(folder: Path) -> list[Path]:
    ggufs = [file for file in folder.glob("*.gguf") if "-of-" not in file.name and not file.name.startswith("mmproj")]
    return ggufs if len(ggufs) == 1 else []
