"""The files of a checkpoint's folder: which of them hold the weights.

Standard library only. The planner counts their bytes for whichever server is to load them, so it knows .bin files too,
which this engine does not open (they are Python pickles).
"""

from __future__ import annotations

from pathlib import Path

from minivllm.files import MAX_TABLE_BYTES, is_file, read_json

MIN_WEIGHTS = 10_000  # bytes of the smallest thing that can be a model's weights
MAX_SHARDS = 10_000

WHOLE_FILES = ("model.safetensors", "pytorch_model.bin")  # in the order in which they are looked for


def shards(index_file: Path) -> list[Path] | None:
    """The files that an index names; None if there is no such index. ValueError if they are not there."""
    index = read_json(index_file, MAX_TABLE_BYTES)
    if index is None:
        return None
    weight_map = index.get("weight_map")
    names = sorted({str(file) for file in weight_map.values()}) if isinstance(weight_map, dict) else []
    if len(names) > MAX_SHARDS:
        raise ValueError(f"{index_file} names {len(names):,} files, the most is {MAX_SHARDS:,}. Get it again")
    folder = index_file.parent
    missing = [name for name in names if Path(name).name != name or not is_file(folder / name)]
    if missing or not names:
        found = ", ".join(name[:100] for name in missing[:5]) or f"none at all ('weight_map' is {weight_map!r:.100})"
        raise ValueError(
            f"{index_file} names files that are not beside it: {found}; expected 'weight_map': {{tensor: file}} "
            "with files of this folder. Download the missing files, or correct the index"
        )
    return [folder / name for name in names]


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights: one, or the shards that an index names. Safetensors before .bin.

    Raises ValueError if there are none, or if the index names files that are not there.
    """
    for whole in WHOLE_FILES:
        if is_file(folder / whole):
            return [folder / whole]
        found = shards(folder / f"{whole}.index.json")
        if found is not None:
            return found
    raise ValueError(
        f"{folder} has no weights: expected model.safetensors or pytorch_model.bin, or shards with their index "
        "(model.safetensors.index.json)"
    )


def checkpoint_bytes(path: str | Path) -> int | None:
    """Size of the weights in a checkpoint's folder, or beside its config.json: what a model of mixed precision takes.

    Beside `weight_files`, all parts of a split file without an index, or the only GGUF. None if they are not all there,
    or if it is unclear which of several files are the model's.
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
