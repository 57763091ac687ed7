"""Pretrained checkpoint -> latent model, and back. Weights are moved, never copied or changed."""

import argparse
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from unspoken.config import LatentConfig
from unspoken.data.cache import check_folder, whole_folder
from unspoken.errors import UnspokenError, UsageError, nearest
from unspoken.models.adaptive import AdaptiveLatentForCausalLM
from unspoken.models.adaptive_recycler import AdaptiveRecyclerForCausalLM
from unspoken.models.backbone import family_of
from unspoken.models.latent_lm import LatentForCausalLM
from unspoken.models.load import forget_file, load_source
from unspoken.models.recycler import RecyclerForCausalLM
from unspoken.models.vanilla import VanillaForCausalLM

NOT_A_MODEL = ("manifest.json", "checkpoint.json", "resolved.yaml", "checkpoints")  # of data and runs
METHODS: dict[str, type[LatentForCausalLM]] = {
    "recycler": RecyclerForCausalLM,
    "adaptive": AdaptiveLatentForCausalLM,
    "adaptive_recycler": AdaptiveRecyclerForCausalLM,
    "vanilla": VanillaForCausalLM,
}


def convert(model: str | Path | PreTrainedModel, method: str = "recycler", **config_fields: Any) -> LatentForCausalLM:
    """Make a pretrained model a latent one that computes, for now, exactly the same logits.

    model: a loaded causal LM, or what `load_source` reads; its body and head move into the result, which may not be
    used beside it. A latent model (a plain one trained here, say) may be given too: its body goes on. config_fields:
    fields of the method's configuration (`num_train_passes`, ...).

    Raises:
        UsageError: unknown method, or the model has that method already.
        UnsupportedBackboneError: the model's family is not supported.
    """
    if method not in METHODS:
        raise UsageError(f"unknown method {method!r}; methods: {', '.join(METHODS)}")
    latent_class = METHODS[method]
    _refuse_unknown(config_fields, latent_class)
    if not isinstance(model, PreTrainedModel | str | Path):
        raise UsageError(f"convert() takes a causal LM or where to find one, not a {type(model).__name__}")
    source = model if isinstance(model, PreTrainedModel) else load_source(model)[0]
    if isinstance(source, latent_class):
        raise UsageError(f"the model is a {method} model already")
    if isinstance(source, LatentForCausalLM):
        body, text_config = source.model.backbone, source.config.text_config
        config_fields.setdefault("embedding_scale", source.config.embedding_scale)
    else:
        body, text_config = source.base_model, source.config
    family_of(text_config)
    head = source.get_output_embeddings()
    if head is None:
        raise UsageError(f"{type(source).__name__} has no language-model head; load it with AutoModelForCausalLM")
    forget_file(text_config)  # in place: the body reads the same object
    config = latent_class.config_class(text_config=text_config, dtype=source.dtype, **config_fields)
    text_config.tie_word_embeddings = config.tie_word_embeddings
    config.text_config = text_config  # the body's own object, not the copy that a new configuration makes
    _agree_on_tying(config, body.get_input_embeddings(), head)
    with torch.device("meta"):
        latent = latent_class(config)
    latent.model.backbone = body
    latent.lm_head = head
    _materialise(latent, like=head.weight)
    latent.generation_config = source.generation_config
    return latent.train(source.training)


def export_backbone(latent: LatentForCausalLM) -> PreTrainedModel:
    """The plain transformers model inside a latent one: what the latent model computes without recycling.

    Weights are shared with the latent model, unless it has an `embedding_scale`: that is multiplied into a copy's
    embedding, which then no longer equals the head, so a tied model comes out untied.
    """
    config = copy.deepcopy(latent.config.text_config)
    scale = latent.config.embedding_scale
    body, head = latent.model.backbone, latent.lm_head
    if scale != 1.0:
        body = copy.deepcopy(body)
        embedding = body.get_input_embeddings()
        embedding.weight = nn.Parameter(embedding.weight.detach() * scale)
    config.tie_word_embeddings = latent.config.tie_word_embeddings and scale == 1.0
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config, dtype=latent.dtype)
    setattr(plain, plain.base_model_prefix, body)
    plain.set_output_embeddings(head)
    plain.generation_config = latent.generation_config
    return plain


def main(args: argparse.Namespace) -> int:
    """`unspoken convert`."""
    out, given = Path(args.out), Path(args.model)
    if given.exists() and given.resolve().is_relative_to(out.resolve()):
        raise UsageError(f"--out: {out} is where --model {given} is, which would be lost; give another folder")
    check_place(out, args.overwrite)
    source, tokenizer = load_source(args.model, args.dtype)
    if args.export_backbone:
        if not isinstance(source, LatentForCausalLM):
            raise UsageError(f"--export-backbone: {args.model} is a plain {source.config.model_type} model already")
        model: PreTrainedModel = export_backbone(source)
        kind = f"plain {model.config.model_type} model"
    else:
        fields = {name: getattr(args, name) for name in ("num_train_passes", "num_prefill_passes")}
        fields = {name: value for name, value in fields.items() if value is not None}
        if args.method != "recycler" and fields:
            raise UsageError(f"--{min(fields).replace('_', '-')} is for --method recycler")
        expected = _probe(source)
        try:
            model = convert(source, args.method, **fields)
        except ValueError as error:
            raise UsageError(str(error)) from error
        kind = f"{args.method} model"
        if not torch.equal(_probe(model), expected):
            raise UnspokenError("the converted model's logits differ from the source's; nothing was written")
    save(model, tokenizer, out, overwrite=args.overwrite)
    size = sum(p.numel() for p in model.parameters())
    print(f"{out}: {kind}, {size:,} parameters, {str(model.dtype).removeprefix('torch.')}")
    if not args.export_backbone:
        print("logits equal the source's bit for bit")
    return 0


def check_place(out: Path, overwrite: bool) -> None:
    """Where a model folder may be written: nothing is replaced but a model folder, and that only on request.

    Raises:
        UsageError: something is there that stays, or nothing can be written.
    """
    check_folder("--out", out.absolute().parent)
    if not out.exists() and not out.is_symlink():
        return
    if not overwrite:
        raise UsageError(f"--out: {out} exists; give another folder, or --overwrite")
    is_model = out.is_dir() and (out / "config.json").is_file()
    if not out.is_dir() or (any(out.iterdir()) and not is_model) or any((out / name).exists() for name in NOT_A_MODEL):
        raise UsageError(f"--out: {out} is no model folder, so --overwrite does not replace it; give another folder")
    if out.resolve() in (Path.cwd(), *Path.cwd().parents):
        raise UsageError(f"--out: {out} is the working directory; give another folder")


def save(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, out: str | Path, overwrite: bool = False
) -> None:
    """Write a model folder, whole or not at all: safetensors, configuration, tokenizer and a card.

    Raises:
        UnspokenError: the place cannot be written.
    """
    try:
        with whole_folder(Path(out), replace=overwrite) as made:
            model.save_pretrained(made)
            if tokenizer is not None:
                tokenizer.save_pretrained(made)
            if isinstance(model.config, LatentConfig):
                (made / "README.md").write_text(_card(model.config))
    except (OSError, SafetensorError) as error:
        raise UnspokenError(f"cannot write the model folder {out}: {error}") from error


def _refuse_unknown(config_fields: dict[str, Any], latent_class: type[LatentForCausalLM]) -> None:
    fields = set(latent_class.config_class.__dataclass_fields__) - set(PreTrainedConfig.__dataclass_fields__)
    for name in config_fields:
        if name not in fields - {"text_config"}:
            valid = sorted(fields - {"text_config"})
            raise UsageError(f"{name!r} is no field of this method{nearest(name, valid)}; fields: {', '.join(valid)}")


def _agree_on_tying(config: LatentConfig, embedding: Any, head: Any) -> None:
    """The weights must be what the configuration says: one tensor where tied, two where not."""
    is_shared = head.weight is embedding.weight
    if is_shared and not config.tie_word_embeddings:
        head.weight = nn.Parameter(head.weight.detach().clone())
    if not is_shared and config.tie_word_embeddings:
        if not torch.equal(head.weight, embedding.weight):
            raise UsageError("tie_word_embeddings is true, but the model's head differs from its embedding")
        head.weight = embedding.weight


@torch.no_grad()
def _probe(model: PreTrainedModel) -> torch.Tensor:
    ids = torch.arange(1, 17, device=model.device).unsqueeze(0) % model.config.get_text_config().vocab_size
    was_training = model.training
    logits = model.eval()(ids, use_cache=False).logits
    model.train(was_training)
    return logits


def _materialise(latent: LatentForCausalLM, like: torch.Tensor) -> None:
    """Give the modules that the source does not have (the adapter) memory and their initial values."""
    for name, module in latent.model.named_children():
        if name != "backbone":
            module.to_empty(device=like.device).to(like.dtype)
            module.apply(_reset(latent))


def _reset(latent: LatentForCausalLM) -> Callable[[nn.Module], None]:
    def reset(module: nn.Module) -> None:
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()  # type: ignore[operator]
        latent.model._init_weights(module)

    return reset


def _card(config: LatentConfig) -> str:
    backbone = config.text_config.model_type
    return f"""---
library_name: unspoken
pipeline_tag: text-generation
---
A `{config.model_type}` model over a {backbone} backbone, made with Unspoken. transformers knows it after one import:

```python
import unspoken  # registers the latent models
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(".")
tokenizer = AutoTokenizer.from_pretrained(".")
```
"""
