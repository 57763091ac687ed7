"""From a recipe to its model and data, and the checks that both fit before a step is spent on them."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerBase
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from unspoken.config import AdaptiveLatentConfig, RecyclerConfig, scaled_init
from unspoken.data.chat_windows import ChatWindows
from unspoken.data.conversations import read_examples, split
from unspoken.data.mixing import mix, mixture_fingerprint
from unspoken.data.packing import PackedDataset
from unspoken.data.pauses import PausedWindows, pause_id, paused_fingerprint, text_vocabulary, with_pause
from unspoken.data.task_windows import HELD_OUT, TaskWindows, task_of, task_tokenizer
from unspoken.data.tasks import Task, parse_task
from unspoken.data.tokenizer import document_end_id, load_existing, tokenizer_fingerprint
from unspoken.data.tokens import TokenShards, check_embedding_rows, check_same_tokenizer
from unspoken.data.windows import Windows
from unspoken.errors import UnspokenError, UsageError, nearest
from unspoken.latent.halting import RouterOutput
from unspoken.models.backbone import FAMILIES
from unspoken.models.convert import METHODS, convert
from unspoken.models.knobs import closed_gate, takes_latent_steps
from unspoken.models.latent_lm import LatentForCausalLM
from unspoken.models.load import load_source
from unspoken.train.recipe import METHOD_FIELDS, ConversationsSection, ModelSection, Recipe, SourceSection

# Said once, when an adapter or a gate is made.
OF_NEW_PARTS = ("adapter_norm", "feedback", "router", "router_bias", "exit_gate")
UNDECLARED = ("head_dim",)  # read by the layers of families whose configuration does not name it (qwen3_moe)
GENERATION = "generation_config.json"  # in a checkpoint
HELD_OUT_SEED = 0  # not the run's: two arms of a comparison are measured on the same windows


@dataclass(frozen=True)
class Data:
    """What a run reads: `train` in the order that the seed gives, `held_out` the same for every seed (None: no
    evaluation). `fingerprint` changes with all of it but the order; `name` is for messages."""

    train: Windows
    held_out: Windows | None
    tokenizer: PreTrainedTokenizerBase
    fingerprint: str
    name: str


def open_data(recipe: Recipe) -> Data:
    """The windows that the recipe's `data` section describes.

    Raises:
        UsageError: sources that do not go together, windows too short for a task.
        UnspokenError: a folder that is missing or damaged, or too small for one window.
    """
    if recipe.data.task is not None:
        return _task(recipe, parse_task(recipe.data.task))
    if recipe.data.conversations is not None:
        return _conversations(recipe, recipe.data.conversations)
    try:
        return _texts(recipe, recipe.data.text_sources)
    except UsageError as error:
        raise UsageError(f"data.{'path' if recipe.data.path else 'sources'}: {error}") from error


def _task(recipe: Recipe, task: Task) -> Data:
    length = recipe.data.sequence_length
    try:
        train = TaskWindows(task, length, recipe.run.seed)
    except UsageError as error:
        raise UsageError(f"data.{error}") from error
    held_out = TaskWindows(task, length, HELD_OUT_SEED, HELD_OUT) if recipe.train.eval_every else None
    return Data(train, held_out, task_tokenizer(task), task.fingerprint(), f"data.task: {task.name}")


def _conversations(recipe: Recipe, section: ConversationsSection) -> Data:
    """Rows to answer, in the model's own tokenizer."""
    name = section.tokenizer or recipe.model.from_pretrained
    if name is None:
        raise UsageError("data.conversations.tokenizer: a new model needs one; give a folder or `smollm2`")
    tokenizer, length = load_existing(name), recipe.data.sequence_length
    examples = read_examples(section.files, tokenizer, length, section.on_bad_line)
    if section.validation_files:
        held_out = read_examples(section.validation_files, tokenizer, length, section.on_bad_line)
    else:
        examples, held_out = split(examples, section.validation_fraction)
    for note in [*examples.notes(), *(f"held out: {note}" for note in held_out.notes())]:
        print(f"note: {note}")
    if not examples.rows:
        raise UsageError("data.conversations.validation_fraction: all rows are held out")
    if recipe.train.eval_every and not held_out.rows:
        raise UsageError(
            "data.conversations: no row is held out, so there is nothing to evaluate on; raise validation_fraction, "
            "give validation_files, or set train.eval_every: 0"
        )
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else document_end_id(tokenizer)
    train = ChatWindows(examples.rows, length, pad, recipe.run.seed)
    validation = ChatWindows(held_out.rows, length, pad, shuffle=False) if recipe.train.eval_every else None
    fingerprint = mixture_fingerprint([examples.fingerprint, held_out.fingerprint], [1, length])
    return Data(train, validation, tokenizer, fingerprint, f"data.conversations: {section.files[0]}")


def _texts(recipe: Recipe, sources: list[SourceSection]) -> Data:
    weights = [source.weight for source in sources]
    shards = [TokenShards.open(source.path, "train", verify=True) for source in sources]
    check_same_tokenizer(shards)
    length, seed = recipe.data.sequence_length, recipe.run.seed
    num_pauses = round(recipe.data.pause_fraction * length)
    train = mix([PackedDataset(source, length - num_pauses, seed) for source in shards], weights, seed)
    held_out = None
    if recipe.train.eval_every:
        validation = [TokenShards.open(source.path, "val") for source in sources]
        parts = [PackedDataset(source, length, HELD_OUT_SEED) for source in validation]
        held_out = mix(parts, weights, shuffle=False)
    fingerprint = mixture_fingerprint([source.fingerprint for source in shards], weights)
    tokenizer = shards[0].load_tokenizer()
    if num_pauses:
        number = pause_id(with_pause(tokenizer))
        assert number is not None
        train, fingerprint = PausedWindows(train, num_pauses, number, seed), paused_fingerprint(fingerprint, num_pauses)
    return Data(train, held_out, tokenizer, fingerprint, f"data.path: {sources[0].path}")


def build_model(recipe: Recipe, data: Data) -> LatentForCausalLM:
    """The model on the CPU in float32, in training mode. A new one is drawn from torch's generator.

    Raises:
        UsageError: a key that the backbone's configuration does not have, a vocabulary or length that does not fit.
    """
    section = recipe.model
    if section.from_pretrained is None:
        model = _new(section, data)
    else:
        model = pretrained_model(section, data.tokenizer, data.name)
    config: Any = model.config
    if recipe.train.third_pass_fraction and not isinstance(config, RecyclerConfig):
        raise UsageError("train.third_pass_fraction: the plain model has one pass")
    if recipe.train.segmented_backward and isinstance(config, AdaptiveLatentConfig):
        raise UsageError("train.segmented_backward: a graph with latent steps is not cut between passes")
    if takes_latent_steps(model) and not recipe.train.no_cut_fraction:
        _refuse_closed_router(model)
    check_embedding_rows(len(data.tokenizer), len(embedding_weight(model)))
    longest = getattr(config.text_config, "max_position_embeddings", None)
    if longest is not None and recipe.data.sequence_length > longest:
        raise UsageError(
            f"data.sequence_length: {recipe.data.sequence_length} is more than the backbone's "
            f"max_position_embeddings, {longest}"
        )
    return model.train()


def end_answers(model: LatentForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    """Have generated text end with the tokenizer's end token, which answers are taught to end with, beside where it
    ended before: a pretrained model may have been told of another token."""
    config, end = model.generation_config, tokenizer.eos_token_id
    if config is None or end is None:
        return
    known = [config.eos_token_id] if isinstance(config.eos_token_id, int) else list(config.eos_token_id or [])
    ends = [end, *(token for token in known if token != end)]
    config.eos_token_id = end if len(ends) == 1 else ends


def show_prompts(data: Data, config: Any) -> None:
    """Have windows of rows to answer say what was asked, where the model recycles nothing into a prompt."""
    is_asked = isinstance(config, RecyclerConfig) and config.num_prefill_passes == 1
    for windows in (data.train, data.held_out):
        if isinstance(windows, ChatWindows):
            windows.has_prompt_mask = is_asked


def _refuse_closed_router(model: Any) -> None:
    """A router that tells no tokens apart yet and lets none of them go on.

    Raises:
        UsageError: naming the threshold.
    """
    output = next((module for module in model.model.router.modules() if isinstance(module, RouterOutput)), None)
    if output is None or output.weight.any():
        return
    if (gate := closed_gate(model.config, output.bias.item())) is not None:
        raise UsageError(
            f"model.exit_threshold: {model.config.exit_threshold} cuts every token, as the new router's gates are all "
            f"{gate:.2g}; lower it, raise model.router_bias, or let nobody be cut at first (train.no_cut_fraction)"
        )


def embedding_weight(model: LatentForCausalLM) -> torch.Tensor:
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor)
    return weight


def max_passes(config: Any) -> int:
    """The most passes that a step, or the evaluation, runs: one more than usual for a Recycler."""
    return config.num_train_passes + 1 if isinstance(config, RecyclerConfig) else 1


def num_passes(config: Any) -> int:
    return config.num_train_passes if isinstance(config, RecyclerConfig) else 1


def compute_parameters(model: LatentForCausalLM) -> int:
    """The N of 6 N FLOPs a token and pass: all parameters but a lookup table that is not the head too."""
    total = sum(p.numel() for p in model.parameters())
    if model.config.tie_word_embeddings:
        return total
    return total - embedding_weight(model).numel()


def _method_fields(section: ModelSection) -> dict[str, Any]:
    """The method's fields that the recipe gives."""
    return {field: value for field in METHOD_FIELDS if (value := getattr(section, field)) is not None}


def _new(section: ModelSection, data: Data) -> LatentForCausalLM:
    fields = dict(section.backbone or {})
    model_type = fields.pop("model_type")
    if model_type not in FAMILIES:
        raise UsageError(
            f"model.backbone.model_type: unknown family {model_type!r}{nearest(model_type, list(FAMILIES))}"
        )
    config_class: Any = CONFIG_MAPPING[model_type]
    known = [*config_class.__dataclass_fields__, *config_class.attribute_map, *UNDECLARED]
    for key in fields:
        if key not in known:  # transformers would keep it as an attribute that nothing reads
            raise UsageError(f"model.backbone.{key}: {model_type} has no such key{nearest(key, known)}")
    tokenizer = data.tokenizer
    latent = _method_fields(section)
    if section.init == "scaled":
        hidden_size = fields.get("hidden_size", config_class().hidden_size)
        if not isinstance(hidden_size, int) or hidden_size < 1:
            raise UsageError(f"model.backbone.hidden_size: a whole number is expected, got {hidden_size!r}")
        scales = scaled_init(hidden_size)
        fields.setdefault("initializer_range", scales["initializer_range"])
        latent["embedding_scale"] = scales["embedding_scale"]
    fields.setdefault("vocab_size", len(tokenizer))
    fields.setdefault("bos_token_id", tokenizer.bos_token_id)
    fields.setdefault("eos_token_id", document_end_id(tokenizer))
    fields.setdefault("pad_token_id", tokenizer.pad_token_id)
    if FAMILIES[model_type].experts is not None:  # transformers trains routers without it unless told otherwise
        fields.setdefault("output_router_logits", True)
    model_class = METHODS[section.method or ""]
    try:
        return model_class(model_class.config_class(text_config=config_class(**fields), **latent))
    except UnspokenError:
        raise
    except (TypeError, ValueError, StrictDataclassError) as error:
        raise UsageError(f"model.backbone: {str(error).strip().splitlines()[-1].strip()}") from error


def pretrained_model(section: ModelSection, tokenizer: PreTrainedTokenizerBase, data_name: str) -> LatentForCausalLM:
    """The model of `from_pretrained`, made a latent one if `method` says which, in float32 on the CPU. `tokenizer` is
    the data's; it learns the pause that the model knows.

    Raises:
        UsageError: a plain model without a method, fields that are not its method's, another tokenizer.
    """
    name = section.from_pretrained or ""
    source, own = load_source(name, "float32")
    if own is not None:
        _check_tokenizer(own, tokenizer, data_name, name)
    if own is not None and pause_id(own) is not None:
        with_pause(tokenizer)  # what the model knows it keeps
    if pause_id(tokenizer) is not None and len(tokenizer) > len(source.get_input_embeddings().weight):  # type: ignore[arg-type]
        source.resize_token_embeddings(len(tokenizer))
    if section.method is not None and type(source) is not METHODS[section.method]:
        return convert(source, section.method, **_method_fields(section))
    if not isinstance(source, LatentForCausalLM):
        raise UsageError(
            f"model.from_pretrained: {name} is a plain {source.config.model_type} model; say what to make of it with "
            f"`method: recycler` or `method: vanilla`"
        )
    shapes = {key: weight.shape for key, weight in source.state_dict().items()}
    for field, value in _method_fields(section).items():
        if not hasattr(source.config, field):
            raise UsageError(f"model.{field}: a {source.config.model_type} model has no such field")
        if field in OF_NEW_PARTS and value != getattr(source.config, field):
            raise UsageError(
                f"model.{field}: {name} has its part already, made with {getattr(source.config, field)!r}; leave it out"
            )
        setattr(source.config, field, value)
    config: Any = copy.deepcopy(source.config)
    try:
        config.check_fields()
    except ValueError as error:
        raise UsageError(f"model: {error}") from error
    with torch.device("meta"):
        wanted = {key: weight.shape for key, weight in type(source)(config).state_dict().items()}
    if wanted != shapes:
        given = ", ".join(f"model.{field}" for field in _method_fields(section))
        raise UsageError(f"{given}: {name} has other weights than such a model; leave out what says how it is built")
    return source


def _check_tokenizer(own: Any, tokenizer: PreTrainedTokenizerBase, data_name: str, name: str) -> None:
    if text_vocabulary(own) != text_vocabulary(tokenizer):
        help = "train a new model on it" if task_of(tokenizer) else f"prepare it again with `--tokenizer {name}`"
        raise UsageError(f"{data_name} has another tokenizer than {name}, so its ids mean other tokens; {help}")
    if tokenizer_fingerprint(own) != tokenizer_fingerprint(tokenizer):
        print(f"note: {data_name} has {name}'s vocabulary but other tokenizer settings")


def pick_device(name: str) -> torch.device:
    """`auto` is cuda if there is one.

    Raises:
        UsageError: no such device here.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"run.device: {name!r}: {str(error).splitlines()[0]}") from error
    return device


def model_like(checkpoint: Path) -> LatentForCausalLM:
    """A model as the checkpoint's configuration says, on the CPU in float32, for its weights to be read into."""
    config = AutoConfig.from_pretrained(checkpoint)
    for latent_class in METHODS.values():
        if type(config) is latent_class.config_class:
            model = latent_class(config).train()
            if (checkpoint / GENERATION).is_file():  # not in those of earlier versions
                model.generation_config = GenerationConfig.from_pretrained(checkpoint)
            return model
    raise UnspokenError(f"{checkpoint} holds a {config.model_type} model, not one trained here")
