"""The bridge to lm-eval: its Hugging Face model, at a depth that is asked for and told.

    lm_eval --model unspoken --model_args pretrained=DIR,num_passes=exact        (after `import unspoken`)

lm-eval scores text in one forward, and reads a prompt into a cache before it generates. For a model whose decoding is a
recurrence these are two depths by default, the training passes and the prefill passes; here `num_passes` decides both:

    num_passes    a text that is scored        a prompt, then what is generated
    k             k parallel passes            k parallel passes, then the recurrence
    "exact"       the recurrence               the recurrence

lm-eval pads scored text on the right and gives no mask. The models are causal, so no real token sees a pad.
"""

import inspect
from pathlib import Path
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from transformers import PreTrainedModel

from unspoken.errors import UnspokenError, UsageError, nearest
from unspoken.eval.settings import EXACT, decoding_depth, parallel_depth, settings_of
from unspoken.models.knobs import LatentKnobs
from unspoken.models.latent_lm import LatentForCausalLM, without_peft
from unspoken.models.recycler import RecyclerForCausalLM

# Of `from_pretrained`, beside what HFLM names itself. Anything else it would take for a field of the configuration.
LOADING = ("attn_implementation", "device_map")


class UnspokenLM(HFLM):
    """A latent model, as lm-eval asks it. Registered in lm-eval as `unspoken`.

    pretrained: a folder or hub name, or the model itself.
    num_passes: k or "exact", see above; by default the model's `num_prefill_passes`. A model without a recurrence has
        one pass, which is exact.
    max_latent_steps, exit_threshold, exit_at_step: instead of the configuration's, see `AdaptiveLatentConfig`.
    options: HFLM's own (`tokenizer`, `dtype`, `device`, `batch_size`, `max_length`, `peft`, ...). Log-probabilities are
        computed in float32 unless `softmax_dtype` says otherwise.

    Raises UsageError for an unknown argument, and for one that the model cannot follow.
    """

    def __init__(
        self,
        pretrained: str | PreTrainedModel,
        num_passes: int | str | None = None,
        max_latent_steps: int | None = None,
        exit_threshold: float | None = None,
        exit_at_step: int | None = None,
        **options: Any,
    ):
        knobs = LatentKnobs(exit_threshold, max_latent_steps, exit_at_step)
        _check_options(options)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        super().__init__(pretrained, **{"device": device, "backend": "causal", "softmax_dtype": "float32", **options})
        self.latent_model = _latent_model(self.model, pretrained)
        if self.tokenizer.eos_token_id is None and self.tokenizer.bos_token_id is None:
            raise UsageError(
                "the tokenizer has neither an end nor a start token, of which lm-eval needs one: set `eos_token` in "
                "its tokenizer_config.json"
            )
        (setting,) = settings_of(self.latent_model, [knobs])
        self.knobs = setting.knobs
        self.num_cut = 0  # texts so far that lost their beginning, to fit into the context
        self.num_passes = _num_passes(self.latent_model, num_passes)
        self.call_options = setting.options | ({} if self.num_passes is None else {"num_passes": self.num_passes})

    @property
    def scoring_depth(self) -> str:
        """As what the log-likelihood of a text is computed."""
        return parallel_depth(self.latent_model, self.num_passes)

    @property
    def generating_depth(self) -> str:
        """As what a prompt is read, and what follows it."""
        return decoding_depth(self.latent_model, self.num_passes)

    def depths(self) -> dict[str, Any]:
        """Everything about how deep the model thinks here, for a report."""
        return {
            "num_passes": self.num_passes,
            "scoring": self.scoring_depth,
            "generating": self.generating_depth,
            "knobs": None if self.knobs is None else vars(self.knobs),
        }

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes into its results. A local folder is not looked up on the hub."""
        if isinstance(self.pretrained, str) and not Path(self.pretrained).exists():
            info = super().get_model_info()
        else:
            info = {"model_num_parameters": self.latent_model.num_parameters(), "model_dtype": self.latent_model.dtype}
        return info | {"unspoken": self.depths()}

    def _loglikelihood_tokens(self, requests: list, disable_tqdm: bool = False, override_bs: int | None = None) -> list:
        longest = max((len(continuation) for _, _, continuation in requests), default=0)
        if longest > self.max_length:
            raise UnspokenError(
                f"an answer to be scored has {longest} tokens, more than the model's context of {self.max_length}"
            )
        lengths = [len(context) + len(continuation) for _, context, continuation in requests]
        self.num_cut += sum(length > self.max_length + 1 for length in lengths)
        return super()._loglikelihood_tokens(requests, disable_tqdm, override_bs)

    def tok_batch_encode(
        self,
        strings: list[str],
        padding_side: str = "left",
        left_truncate_len: int | None = None,
        truncation: bool = False,
    ) -> tuple[Tensor, Tensor]:
        ids, mask = super().tok_batch_encode(strings, padding_side, None, truncation)
        if left_truncate_len:
            self.num_cut += int((mask.sum(-1) > left_truncate_len).sum())
            ids, mask = ids[:, -left_truncate_len:], mask[:, -left_truncate_len:]
        return ids, mask

    def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        with torch.no_grad(), self._autocast():
            return self.model(inps, use_cache=False, **self.call_options).logits

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **generation_kwargs: Any) -> Tensor:
        return super()._model_generate(context, max_length, stop, **self.call_options, **generation_kwargs)

    def _autocast(self) -> torch.autocast:
        dtype = self.mixed_precision_dtype
        return torch.autocast(device_type=self.device.type, dtype=dtype, enabled=dtype is not None)  # type: ignore[arg-type]


def _check_options(options: dict[str, Any]) -> None:
    own, theirs = (inspect.signature(init).parameters for init in (UnspokenLM.__init__, HFLM.__init__))
    valid = sorted({*own, *theirs, *LOADING} - {"self", "options", "kwargs"})
    for name in options:
        if name not in valid:
            raise UsageError(
                f"lm-eval's model `unspoken` takes no argument {name!r}{nearest(name, valid)}; those of its own are "
                "num_passes, max_latent_steps, exit_threshold and exit_at_step"
            )
    if options.get("trust_remote_code"):
        raise UsageError("trust_remote_code: no code of a checkpoint is run; leave it out")
    if options.get("backend", "causal") not in ("causal", "default"):
        raise UsageError(f"backend={options['backend']}: the models are causal; leave it out")


def _latent_model(model: Any, source: Any) -> LatentForCausalLM:
    latent = without_peft(model)
    if not isinstance(latent, LatentForCausalLM):
        where = source if isinstance(source, str) else "the model"
        raise UsageError(
            f"{where} is a plain {latent.config.model_type} model: evaluate it with lm-eval's own `--model hf`, or "
            "make it a latent one with `unspoken convert`"
        )
    return latent


def _num_passes(model: LatentForCausalLM, given: int | str | None) -> int | str | None:
    """The passes of a call; None for a model that knows only one. Raises UsageError for what the model cannot do."""
    is_count = isinstance(given, int) and not isinstance(given, bool) and given >= 1
    if given is not None and given != EXACT and not is_count:
        raise UsageError(f"num_passes is {given!r}; it must be a whole number of at least 1, or {EXACT!r}")
    if isinstance(model, RecyclerForCausalLM):
        return model.num_prefill_passes if given is None else given
    if given not in (None, 1, EXACT):
        raise UsageError(f"num_passes {given}: a model of type {model.config.model_type} has one pass")
    if not model.decodes_by_recurrence:
        return None
    return EXACT if given == EXACT else 1
