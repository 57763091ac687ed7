"""TRL's SFT trainer with our loss, for scripts that are written for TRL.

TRL calls the base model and the head by itself, so that its loss is the last pass's alone. `LatentSFTTrainer` is TRL's
in everything but the loss, which is the model's own: every pass's, with a router's and a penalty's where there is one,
on the tokens that TRL's data preparation says are learned. A model with one prefill pass gets its prompts told.
`unspoken sft` is the same without TRL.
"""

from typing import Any

import torch
from torch import Tensor
from trl import SFTTrainer

from unspoken.models.latent_lm import LatentForCausalLM, without_peft
from unspoken.models.loss import IGNORE_INDEX


class LatentSFTTrainer(SFTTrainer):
    """As `trl.SFTTrainer`, with the passes' losses in the log (`loss_pass_1`, ...).

    Raises:
        TypeError: the model is no latent one.
        ValueError: a loss that is not the model's (`loss_type`, label smoothing, `compute_loss_func`).
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        given: Any = self.args
        latent: Any = without_peft(self.accelerator.unwrap_model(self.model))
        if not isinstance(latent, LatentForCausalLM):
            raise TypeError(f"LatentSFTTrainer trains latent models, not a {type(latent).__name__}: use trl.SFTTrainer")
        if given.loss_type != "nll" or given.label_smoothing_factor or self.compute_loss_func is not None:
            raise ValueError(
                "LatentSFTTrainer has the model's own loss: leave out loss_type, label_smoothing_factor and "
                "compute_loss_func, or use trl.SFTTrainer"
            )
        self.hides_prompts = getattr(latent.config, "num_prefill_passes", None) == 1

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The model's loss, over the targets of the whole optimizer step and of all processes."""
        inputs = {**inputs, "use_cache": False}
        if self.hides_prompts:
            inputs["prompt_mask"] = inputs["labels"] == IGNORE_INDEX
        outputs = model(**inputs, num_items_in_batch=num_items_in_batch, skip_logits=not return_outputs)
        loss = outputs.loss
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            loss = loss * self.accelerator.num_processes  # DDP averages what is divided by all targets
        self._note(inputs, outputs.pass_losses, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    @torch.no_grad()
    def _note(self, inputs: dict[str, Any], pass_losses: Tensor, num_items_in_batch: Tensor | int | None) -> None:
        """Each pass's mean loss over this batch's own targets, and the tokens that were read."""
        model: Any = self.model
        mode = "train" if model.training else "eval"
        if num_items_in_batch is not None:
            own = (inputs["labels"][:, 1:] != IGNORE_INDEX).sum().clamp(min=1)
            pass_losses = pass_losses * num_items_in_batch / own
        for number, loss in enumerate(self.accelerator.gather_for_metrics(pass_losses[None]).mean(0).tolist(), start=1):
            self._metrics[mode][f"loss_pass_{number}"].append(loss)
        if mode == "train":
            mask = inputs.get("attention_mask")
            count = inputs["input_ids"].numel() if mask is None else int(mask.sum())
            counted = torch.tensor(count, device=inputs["input_ids"].device)
            self._total_train_tokens += int(self.accelerator.gather_for_metrics(counted).sum())
        self._metrics[mode]["num_tokens"] = [self._total_train_tokens]
