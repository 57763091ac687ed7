"""Reading models from disk: any plain checkpoint (safetensors, GGUF, the embedded default), or a latent one."""

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from unspoken.config import LatentConfig
from unspoken.data import smollm2
from unspoken.data.cache import cache_folder, whole_folder
from unspoken.data.pretrained import check_there, reading
from unspoken.errors import UnspokenError, UsageError
from unspoken.models.backbone import family_of
from unspoken.models.latent_lm import LatentForCausalLM

EMBEDDED = "smollm2"
SMOLLM2_FORMAT = 1  # raise when what `_embedded_model` writes changes
SMOLLM2_RMS_NORM_EPS = 1e-5  # the GGUF file rounds it


def load_source(model: str | Path, dtype: str = "auto") -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Load a checkpoint with its head, and its tokenizer if it has one.

    model: `smollm2` (embedded), a folder, a .gguf file, or a hub name that transformers can resolve; a latent model's
    folder loads as such. dtype: "auto" keeps the checkpoint's.

    Raises:
        UnsupportedBackboneError: the family is not supported, found before any weight is read.
        UsageError: nothing there.
        UnspokenError: what is there cannot be loaded.
    """
    check_model(model)
    if str(model) == EMBEDDED:
        return _embedded_model(dtype), smollm2.load_tokenizer()
    path = Path(model)
    with reading("model", model):
        if path.suffix == ".gguf":
            return _load(path.parent, dtype, gguf_file=path.name)
        return _load(path if path.is_dir() else str(model), dtype)


def check_model(model: str | Path) -> None:
    """Whether there is something that `load_source` may load; nothing is read. Raises as `check_there` does."""
    path = Path(model)
    if path.suffix == ".gguf" and not path.is_file():
        raise UsageError(f"no such file: {path}")
    if path.suffix == ".gguf" or str(model) == EMBEDDED:
        return
    check_there(model, "model")
    if path.is_dir() and not (path / "config.json").is_file():
        found = sorted(file.name for file in path.glob("*.gguf"))
        hint = f"; it holds {found[0]}: name that file" if found else ""
        raise UsageError(f"{path} has no config.json, so it is not a model folder{hint}")


def load_model(
    path: str | Path, device: str = "auto", dtype: str = "auto"
) -> tuple[LatentForCausalLM, PreTrainedTokenizerBase | None]:
    """Load a latent model for use: in evaluation mode, on `device` ("auto": cuda if there is one).

    Raises:
        UsageError: the folder holds a plain model; the message says how to convert it.
    """
    model, tokenizer = load_source(path, dtype)
    if not isinstance(model, LatentForCausalLM):
        raise UsageError(
            f"{path} is a plain {model.config.model_type} model; make it a latent one first: "
            f"unspoken convert --model {path} --out DIR"
        )
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return model.to(torch.device(device)).eval(), tokenizer  # type: ignore[arg-type]
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device {device}: {error}") from error


def forget_file(config: Any) -> None:
    """Take the traces of the file format that it was read from out of a configuration."""
    for trace in ("quantization_config", "_model_name_or_path"):
        if hasattr(config, trace):
            delattr(config, trace)
    config._name_or_path = ""


def _load(path: Path | str, dtype: str, **files: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    config = AutoConfig.from_pretrained(path, **files)
    family_of(config.text_config if isinstance(config, LatentConfig) else config)
    loaded: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, output_loading_info=True, **files)
    model, info = loaded
    if missing := [*info["missing_keys"], *info["mismatched_keys"]]:
        raise UnspokenError(
            f"{path} lacks {len(missing)} of the model's weights, or has them in another shape: {missing[0]}, ... "
            "It is incomplete, or belongs to another architecture."
        )
    return model, _tokenizer(path, **files)


def _tokenizer(path: Path | str, **files: str) -> PreTrainedTokenizerBase | None:
    has_one = not Path(path).is_dir() or files or (Path(path) / "tokenizer_config.json").is_file()
    return AutoTokenizer.from_pretrained(path, **files) if has_one else None


def _embedded_model(dtype: str) -> PreTrainedModel:
    """SmolLM2-135M from its package. Dequantising takes half a minute, so the result is cached as safetensors."""
    source = smollm2.gguf_path()
    folder = cache_folder() / f"model-smollm2-{smollm2.head_hash(source)}-{SMOLLM2_FORMAT}"
    if not folder.is_dir():
        level = logging.get_verbosity()
        logging.set_verbosity_error()
        model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype="float32")
        logging.set_verbosity(level)
        config = copy.deepcopy(model.config)
        forget_file(config)
        config.rms_norm_eps = SMOLLM2_RMS_NORM_EPS
        plain = AutoModelForCausalLM.from_config(config)
        plain.load_state_dict(model.state_dict())
        plain.generation_config = model.generation_config
        with whole_folder(folder) as made:
            plain.save_pretrained(made)
    with reading("model", folder, "delete that folder"):
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
