"""Loads a `transformers` causal language model from a folder, a hub name or a GGUF file.

Invariants:
- the result is a plain module with the configured dtype and device, in evaluation mode and without traces of
  quantisation, so that `from_pretrained` can load what `save_pretrained` writes;
- no code from a model repository is ever run: `trust_remote_code` is off and can't be switched on.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from dora_rl.core.config import Config
from dora_rl.core.errors import ModelError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Device = Literal["cpu", "cuda", "mps"]
Dtype = Literal["float32", "bfloat16", "float16"]


class ModelConfig(Config):
    """Which model, and where and in which precision it runs."""

    path: str
    """A folder with safetensors, a name on the hub, or a `.gguf` file."""
    device: Device = "cpu"
    """The device that holds the weights."""
    dtype: Dtype = "float32"
    """Precision of the weights and of the computation."""


class LoadedModel(NamedTuple):
    """A model and its tokenizer, which is None if the model works on bare token ids."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None


def torch_dtype(name: Dtype) -> torch.dtype:
    """The torch dtype of a setting."""
    import torch

    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def load(config: ModelConfig) -> LoadedModel:
    """The model and its tokenizer (None if the folder has no tokenizer)."""
    from transformers import AutoModelForCausalLM

    check_device(config.device)
    where = _source(config.path)
    model: Any  # the annotations of transformers are wrong for `to` and `eval`
    try:
        model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch_dtype(config.dtype), trust_remote_code=False)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ModelError(f"cannot load the model '{config.path}': {_first_line(error)}") from error
    if "gguf_file" in where:
        _forget_quantisation(model)
    model.to(config.device)
    model.eval()
    return LoadedModel(model, load_tokenizer(config))


def linear_modules(config: ModelConfig) -> tuple[str, ...]:
    """The last name components of all linear layers except the output embeddings; no weights are read for this."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    make: Any = AutoModelForCausalLM  # untyped
    with torch.device("meta"):
        settings = AutoConfig.from_pretrained(**_source(config.path), trust_remote_code=False)
        model = make.from_config(settings, trust_remote_code=False)
    head = model.get_output_embeddings()
    linear = [name for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear) and layer is not head]
    return tuple(sorted({name.rpartition(".")[2] for name in linear}))


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase | None:
    """The tokenizer that is stored with the weights, if there is one."""
    from transformers import AutoTokenizer

    folder = Path(config.path)
    if folder.is_dir() and not any(folder.glob("tokenizer*")):
        return None
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            **_source(config.path), trust_remote_code=False
        )
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"cannot load the tokenizer of '{config.path}': {_first_line(error)}") from error
    return tokenizer


def check_device(device: Device) -> None:
    """Refuse a device that this machine or this torch does not have."""
    import torch

    present = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not present[device]:
        have = ", ".join(name for name, there in present.items() if there)
        raise ModelError(f"device '{device}' is not available here; set device to one of: {have}")


def _source(path: str) -> dict[str, Any]:
    """The arguments that tell `from_pretrained` where the model is."""
    if path.endswith(".gguf"):
        file = Path(path)
        if not file.is_file():
            raise ModelError(f"there is no GGUF file '{path}'")
        return {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    looks_local = path.startswith((".", "/", "~")) or Path(path).exists()
    if looks_local and not (Path(path).expanduser() / "config.json").is_file():
        raise ModelError(f"'{path}' is not a model folder: there is no config.json in it")
    return {"pretrained_model_name_or_path": str(Path(path).expanduser()) if looks_local else path}


def _forget_quantisation(model: Any) -> None:
    """Remove the attributes that mark a GGUF model as quantised: its weights are dequantised on loading, and with these
    attributes it could not be saved."""
    for owner in (model, model.config):
        for name in ("hf_quantizer", "is_quantized", "quantization_method", "quantization_config"):
            if name in vars(owner):
                delattr(owner, name)


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
