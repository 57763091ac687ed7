"""Pretrained checkpoint -> latent model, and back. Weights are moved, never copied or changed."""

import argparse
import copy
import dataclasses
import math
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
from unspoken.models.adaptive import AdaptiveHead, AdaptiveLatentForCausalLM
from unspoken.models.adaptive_recycler import AdaptiveRecyclerForCausalLM
from unspoken.models.backbone import family_of
from unspoken.models.drift import drift
from unspoken.models.knobs import closed_gate, option, takes_latent_steps
from unspoken.models.latent_lm import LatentForCausalLM
from unspoken.models.load import forget_file, load_source
from unspoken.models.looped import LoopedForCausalLM
from unspoken.models.pause import PauseForCausalLM
from unspoken.models.ponder import PonderForCausalLM
from unspoken.models.ponder2 import Ponder2ForCausalLM
from unspoken.models.recursions import RecursionsForCausalLM
from unspoken.models.recycler import RecyclerForCausalLM
from unspoken.models.vanilla import VanillaForCausalLM

NOT_A_MODEL = ("manifest.json", "checkpoint.json", "resolved.yaml", "checkpoints")  # of data and runs
METHODS: dict[str, type[LatentForCausalLM]] = {
    "recycler": RecyclerForCausalLM,
    "adaptive": AdaptiveLatentForCausalLM,
    "adaptive_recycler": AdaptiveRecyclerForCausalLM,
    "looped": LoopedForCausalLM,
    "pause": PauseForCausalLM,
    "ponder": PonderForCausalLM,
    "ponder2": Ponder2ForCausalLM,
    "mor": RecursionsForCausalLM,
    "vanilla": VanillaForCausalLM,
}
FIELDS = ("num_train_passes", "num_prefill_passes", "router_bias", "exit_threshold", "max_latent_steps")  # options
ROUTER_BIAS = -4.0  # a gate of 0.018, a little above the cut: each token takes one latent step, which weighs that much
# What both may have, and the fields that say its kind.
CARRIED = {"adapter": ("adapter_norm", "feedback"), "router": ("router",)}


def convert(model: str | Path | PreTrainedModel, method: str = "recycler", **config_fields: Any) -> LatentForCausalLM:
    """Make a pretrained model a latent one that computes, for now, the same logits.

    With latent steps it computes exactly the same where a call has `max_latent_steps=0`; as it is, its router is blind
    and nearly closed (`ROUTER_BIAS`), and its logits are as near as `models/drift.py` says.

    model: a loaded causal LM, or what `load_source` reads; its body and head move into the result, which may not be
    used beside it. A latent model (a plain one trained here, say) may be given too: its body goes on, and what else
    both have. config_fields: fields of the method's configuration (`num_train_passes`, ...).

    Raises:
        UsageError: unknown method, the model has that method already, or no token would ever take a latent step.
        UnsupportedBackboneError: the model's family is not supported.
    """
    if method not in METHODS:
        raise UsageError(f"unknown method {method!r}; methods: {', '.join(METHODS)}")
    latent_class = METHODS[method]
    _refuse_unknown(config_fields, latent_class)
    if not isinstance(model, PreTrainedModel | str | Path):
        raise UsageError(f"convert() takes a causal LM or where to find one, not a {type(model).__name__}")
    source = model if isinstance(model, PreTrainedModel) else load_source(model)[0]
    if type(source) is latent_class:
        raise UsageError(f"the model is of method {method} already")
    if takes_latent_steps(source) and "router_bias" in config_fields:
        raise UsageError("router_bias is for a new router; the model has one already")
    if isinstance(source, LatentForCausalLM):
        body, text_config = source.model.backbone, source.config.text_config
        shared = _fields(latent_class) & _fields(type(source))
        config_fields = {**{name: getattr(source.config, name) for name in shared}, **config_fields}
    else:
        body, text_config = source.base_model, source.config
    family_of(text_config)
    if config_fields.get("feedback") == "gated" and not isinstance(source, RecyclerForCausalLM):
        raise UsageError("feedback 'gated' takes the embeddings' place: no model computes what it did; train a new one")
    head = source.get_output_embeddings()
    if head is None:
        raise UsageError(f"{type(source).__name__} has no language-model head; load it with AutoModelForCausalLM")
    if issubclass(latent_class, AdaptiveHead):
        config_fields.setdefault("router_bias", ROUTER_BIAS)
    config = latent_class.config_class(text_config=text_config, dtype=source.dtype, **config_fields)
    if not takes_latent_steps(source):
        _refuse_closed_router(config)
    forget_file(text_config)  # in place: the body reads the same object
    text_config.tie_word_embeddings = config.tie_word_embeddings
    config.text_config = text_config  # the body's own object, not the copy that a new configuration makes
    _agree_on_tying(config, body.get_input_embeddings(), head)
    with torch.device("meta"):
        latent = latent_class(config)
    latent.model.backbone = body
    latent.lm_head = head
    _materialise(latent, like=head.weight)
    if isinstance(source, LatentForCausalLM):
        _carry_over(source, latent)
    latent.generation_config = source.generation_config
    return latent.train(source.training)


def export_backbone(latent: LatentForCausalLM) -> PreTrainedModel:
    """The plain transformers model inside a latent one: what it computes without recycling and latent steps.

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
    findings: list[str] = []
    if args.export_backbone:
        if not isinstance(source, LatentForCausalLM):
            raise UsageError(f"--export-backbone: {args.model} is a plain {source.config.model_type} model already")
        model: PreTrainedModel = export_backbone(source)
        kind = f"plain {model.config.model_type} model"
    else:
        model, findings = _converted(source, args)
        kind = f"{args.method} model"
    save(model, tokenizer, out, overwrite=args.overwrite)
    size = sum(p.numel() for p in model.parameters())
    print(f"{out}: {kind}, {size:,} parameters, {str(model.dtype).removeprefix('torch.')}")
    for finding in findings:
        print(finding)
    return 0


def _converted(source: PreTrainedModel, args: argparse.Namespace) -> tuple[LatentForCausalLM, list[str]]:
    """The new model, as the options say, and how near it is to its source.

    Raises:
        UnspokenError: it is not as near as it must be.
    """
    fields = {name: value for name in FIELDS if (value := getattr(args, name)) is not None}
    for name in fields:
        if name not in _fields(METHODS[args.method]):
            valid = [method for method, latent_class in METHODS.items() if name in _fields(latent_class)]
            raise UsageError(f"{option(name)} is for --method {' and '.join(valid)}")
    gains_steps = issubclass(METHODS[args.method], AdaptiveHead) and not takes_latent_steps(source)
    one_pass = {"num_passes": 1} if isinstance(source, LatentForCausalLM) else {}
    expected, expected_once = _probe(source), _probe(source, **one_pass)
    try:
        model = convert(source, args.method, **fields)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if not torch.equal(_probe(model, **{"max_latent_steps": 0} if gains_steps else {}), expected):
        hint = ""
        if takes_latent_steps(source):
            given = ", ".join([f"--method {args.method}", *map(option, fields)])
            hint = f". The source takes latent steps, and {given} changes them; --export-backbone leaves them out"
        raise UnspokenError(f"the converted model's logits differ from the source's; nothing was written{hint}")
    if not gains_steps:
        return model, ["logits equal the source's bit for bit"]
    found = drift(model.eval(), _probe_ids(model), expected_once)
    if not found.holds:
        raise UnspokenError(
            f"the converted model's latent steps change its logits by more than they may ({found}); nothing was written"
        )
    return model, [
        "without latent steps, logits equal the source's bit for bit",
        f"with them ({found.latent_length:.2f} a token), logits differ by at most {found}",
    ]


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
    valid = sorted(_fields(latent_class))
    for name in config_fields:
        if name not in valid:
            raise UsageError(f"{name!r} is no field of this method{nearest(name, valid)}; fields: {', '.join(valid)}")


def _fields(latent_class: type[LatentForCausalLM]) -> set[str]:
    """The fields of a method's own configuration."""
    inherited = {field.name for field in dataclasses.fields(PreTrainedConfig)} | {"text_config"}
    return {field.name for field in dataclasses.fields(latent_class.config_class)} - inherited


def _refuse_closed_router(config: Any) -> None:
    """One that lets no token go on would never learn to."""
    bias = torch.tensor(getattr(config, "router_bias", 0.0), dtype=config.dtype or torch.float32).item()
    if (gate := closed_gate(config, bias)) is not None:
        threshold = config.exit_threshold
        above = f"; give a router_bias above {math.log(threshold / (1 - threshold)):.3g}" if threshold < 1 else ""
        raise UsageError(
            f"router_bias {config.router_bias} makes every gate {gate:.2g}, below exit_threshold {threshold}: no token "
            f"would take a latent step, and the router could not learn to let one{above}"
        )


def _carry_over(source: LatentForCausalLM, latent: LatentForCausalLM) -> None:
    """Adapter and router of a latent source go on where the new model has them too.

    Raises:
        UsageError: they are of another kind or size there, and would be lost.
    """
    for name, fields in CARRIED.items():
        if not all(hasattr(model.model, name) and hasattr(model.config, fields[0]) for model in (source, latent)):
            continue
        old, new = getattr(source.model, name), getattr(latent.model, name)
        shapes, new_shapes = ([p.shape for p in module.parameters()] for module in (old, new))
        other = [field for field in fields if getattr(source.config, field) != getattr(latent.config, field)]
        if other or shapes != new_shapes:
            kind = (other or fields)[0]
            raise UsageError(
                f"the model's {name} ({getattr(source.config, kind)!r}) does not fit what was asked for and would be "
                f"lost; leave {kind} and max_latent_steps as they are, or begin from its backbone (export_backbone)"
            )
        setattr(latent.model, name, old)


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
def _probe(model: PreTrainedModel, **options: Any) -> torch.Tensor:
    was_training = model.training
    logits = model.eval()(_probe_ids(model), use_cache=False, **options).logits
    model.train(was_training)
    return logits


def _probe_ids(model: PreTrainedModel) -> torch.Tensor:
    return torch.arange(1, 17, device=model.device).unsqueeze(0) % model.config.get_text_config().vocab_size


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
