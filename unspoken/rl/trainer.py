"""TRL's GRPO trainer for latent models: one depth for old and new policy, and a gap to the rollout that is seen.

    rollout     generate(): the prompt by `num_prefill_passes`, then the recurrence, in batches over a cache
    scoring     the policy's log-probabilities, new and old, by one forward of k passes ("exact": the recurrence)
    gap         how far scoring is from what sampled, at every batch of rollouts: `rl/gap.py`

TRL takes the old policy's log-probabilities for the new one's where no step lies between them: the ratio is then 1 by
construction, and a gap invisible. Here it is measured, and has a limit. GSPO is
`GRPOConfig(importance_sampling_level="sequence", loss_type="grpo", beta=0.0, epsilon=3e-4, epsilon_high=4e-4)`.

Source: Recycler section 3.2.3, Eq. 5-7; GSPO (arXiv 2507.18071).
"""

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

from unspoken.decode.generate import latent_lengths
from unspoken.errors import UnspokenError
from unspoken.models.latent_lm import LatentForCausalLM, without_peft
from unspoken.models.recycler import RecyclerForCausalLM
from unspoken.rl.gap import RolloutGap, flipped_tokens, truncated_weights


class LatentGRPOTrainer(GRPOTrainer):
    """As `trl.GRPOTrainer`, with `gap/...` and `rollout/tokens_per_second` in the log.

    reference: what the KL term pulls back to (`beta`), by default the model as it is given.
    num_scoring_passes: k, by default the model's `num_train_passes`; or "exact", what the rollout computed: its prefill
        passes over the prompt, then the recurrence over the completion, token by token. For audits.
    num_prefill_passes: of a rollout's prompt; by default the model's. With 1, no state is recycled into the prompt when
        k passes score it.
    gap_limit: of the mean |d_t| in nats; above it, `on_gap`: "stop" ends the run, "correct" weighs each completion by
        its ratio, at most `correction_limit` and at least the inverse.

    Groups of equal reward (`frac_reward_zero_std`) have no advantage in TRL. Here neither have groups in which every
    completion was cut off (`groups/all_truncated`, a share of all groups), nor completions that end before their first
    token (`completions/empty_ratio`): they tell nothing of an answer.

    Rollouts know no dropout. Scoring does, as training does: what it does to the ratio is in the gap
    (`GRPOConfig(disable_dropout=True)` leaves it out).

    Raises:
        TypeError: the model is no latent one.
        ValueError: settings under which the rollout would sample from another distribution than the one that is scored
            (top_p, top_k, min_p, repetition_penalty), vLLM, passes that the model has not, or one that decodes
            otherwise than it is scored (a looped model's exit quantile below 1, recursions by expert choice).
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        *others: Any,
        reference: Any = None,
        num_scoring_passes: int | str | None = None,
        num_prefill_passes: int | None = None,
        gap_limit: float | None = None,
        on_gap: Literal["stop", "correct"] = "stop",
        correction_limit: float = 2.0,
        **kwargs: Any,
    ):
        is_peft = kwargs.get("peft_config") is not None or without_peft(model) is not model
        beta = 0.0 if args is None or is_peft else args.beta
        if args is not None and beta:
            args.beta = 0.0  # TRL would load a reference by its name, and fails with classes that are not transformers'
            reference = copy.deepcopy(model) if reference is None else reference
        super().__init__(model, reward_funcs, args, *others, **kwargs)
        # TRL would balance what all passes and latent steps send to experts as if it were one pass.
        self.has_experts, self.aux_loss_enabled = self.aux_loss_enabled, False
        if beta:
            self._refer_to(reference.eval(), beta)
        latent: Any = without_peft(self.accelerator.unwrap_model(self.model))
        if not isinstance(latent, LatentForCausalLM):
            raise TypeError(
                f"LatentGRPOTrainer trains latent models, not a {type(latent).__name__}: use trl.GRPOTrainer"
            )
        _check_sampling(self.args)
        check_policy(latent.config)
        if on_gap not in ("stop", "correct"):
            raise ValueError(f"on_gap must be 'stop' or 'correct', got {on_gap!r}")
        self.gap_limit, self.on_gap, self.correction_limit = gap_limit, on_gap, correction_limit
        self.scoring: int | str | None = None
        self.rollout_options: dict[str, Any] = {}
        if isinstance(latent, RecyclerForCausalLM):
            config: Any = latent.config
            self.scoring = num_scoring_passes or config.num_train_passes
            self.rollout_options["num_passes"] = num_prefill_passes or config.num_prefill_passes
        elif num_scoring_passes not in (None, 1, "exact") or num_prefill_passes not in (None, 1):
            raise ValueError(f"a {latent.config.model_type} model has one pass")
        # PonderLM-2 draws its depth in training; old and new policy need the same one.
        self.refinements: int | None = getattr(latent.config, "num_refinements", None)
        if self.refinements is not None and num_scoring_passes == "exact":
            raise ValueError("num_scoring_passes='exact': PonderLM-2's thoughts are scored by their refinements")
        self.last_gap: RolloutGap | None = None
        self.sampled_lengths: Tensor | None = None  # latent steps of each token, in the rollout and in its scoring
        self.scored_lengths: Tensor | None = None

    def _refer_to(self, reference: Any, beta: float) -> None:
        given: Any = self.args
        given.beta = self.beta = beta
        add_fused_lm_head(
            reference,
            temperature=self.temperature,
            cast_lm_head_to_fp32=given.cast_lm_head_to_fp32,
            outputs=("log_probs", "entropy"),
        )
        self.ref_model = self.accelerator.prepare_model(reference, evaluation_mode=True)

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> tuple[list[list[int]], list[list[float]]]:
        """TRL's rollout, with the log-probability of each token that was sampled."""
        model: Any = self.accelerator.unwrap_model(self.model)
        began = time.perf_counter()
        options = (self.temperature, self.rollout_options, self.accelerator.autocast)
        with _recorded(model, *options) as recorder, latent_lengths(without_peft(model)) as lengths:
            completion_ids, _ = super()._generate_single_turn(*args, **kwargs)
        mode = "train" if model.training else "eval"
        num_tokens = sum(map(len, completion_ids))
        self._metrics[mode]["rollout/tokens_per_second"].append(num_tokens / max(1e-9, time.perf_counter() - began))
        self.sampled_lengths = torch.cat(lengths, dim=1) if lengths else None
        return completion_ids, recorder.log_probabilities([len(ids) for ids in completion_ids])

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **_images: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """By the scoring passes: log-probabilities and entropies [B, completion], and no loss of experts."""
        with latent_lengths(without_peft(self.accelerator.unwrap_model(model))) as lengths:
            logps, entropies = self._score(model, input_ids, attention_mask, logits_to_keep, batch_size)
        if self.scored_lengths is None:  # else the reference's, which may be this model with its LoRA switched off
            self.scored_lengths = torch.cat(lengths) if lengths else None
        return logps, entropies if compute_entropy else None, None

    def _score(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, batch_size: int | None
    ) -> tuple[Tensor, Tensor]:
        logps, entropies = [], []
        size = batch_size or len(input_ids)
        for ids, mask in zip(input_ids.split(size), attention_mask.split(size), strict=True):
            inputs = {"input_ids": ids, "attention_mask": mask, **self._depth(ids, logits_to_keep)}
            inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)  # as generate() counts them
            if self.has_experts:
                inputs["output_router_logits"] = False
            labels = ids.masked_fill(mask == 0, -100)
            labels[:, :-logits_to_keep] = -100
            with self.accelerator.autocast():
                output = model(**inputs, labels=labels, fused_lm_head=True)
            logps.append(output.log_probs[:, -logits_to_keep:])
            entropies.append(output.entropy[:, -logits_to_keep:])
        return torch.cat(logps), torch.cat(entropies)

    def _depth(self, ids: Tensor, num_completion: int) -> dict[str, Any]:
        """Arguments of a scoring forward over prompts and completions [B, T], the last tokens."""
        if self.scoring is None:
            return {} if self.refinements is None else {"num_refinements": self.refinements}
        if self.scoring == "exact":
            return {**self.rollout_options, "num_recurrent": num_completion}
        depth: dict[str, Any] = {"num_passes": self.scoring}
        if self.rollout_options["num_passes"] == 1:
            is_prompt = torch.arange(ids.shape[1], device=ids.device) < ids.shape[1] - num_completion
            depth["prompt_mask"] = is_prompt.expand_as(ids)
        return depth

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's, and the gap of these rollouts.

        Raises:
            UnspokenError: it is above the limit, and is to end the run.
        """
        self.scored_lengths = None
        batch = super()._generate_and_score_completions(inputs)
        scored = batch.get("old_per_token_logps")
        if scored is None:
            self.scored_lengths = None
            scored = self._scored(batch)
        sampled, mask = batch["sampling_per_token_logps"], batch["completion_mask"]
        values = [scored, sampled, mask]
        if self.sampled_lengths is not None and self.scored_lengths is not None:
            read = torch.cat([batch["prompt_mask"], mask], dim=1)
            values.append(flipped_tokens(self.sampled_lengths, self.scored_lengths, read, mask.shape[1]))
        gathered = [self.accelerator.gather(self._padded(one)) for one in values]
        self.last_gap = RolloutGap.of(*gathered)
        model: Any = self.model
        mode = "train" if model.training else "eval"
        self._silence_unanswered(batch, mode)
        for name, value in self.last_gap.row().items():
            self._metrics[mode][f"gap/{name}"].append(value)
        if self.gap_limit is not None and self.last_gap.mean_abs > self.gap_limit:
            if self.on_gap == "stop":
                raise UnspokenError(
                    f"the gap between rollouts and scoring is {self.last_gap.mean_abs:.4f} nats a token, above its "
                    f"limit of {self.gap_limit}: score with more passes (or exact), or correct for it"
                )
            batch["advantages"] = batch["advantages"] * truncated_weights(scored, sampled, mask, self.correction_limit)
        self._log_advantages(batch)
        return batch

    def _log_advantages(self, batch: dict[str, Any]) -> None:
        """As they are trained on, for TRL's table of samples."""
        advantages = self.accelerator.gather(batch["advantages"]).tolist()
        logged: Any = self._logs["advantages"]
        for place, advantage in enumerate(advantages, start=len(logged) - len(advantages)):
            logged[place] = advantage

    def _silence_unanswered(self, batch: dict[str, Any], mode: str) -> None:
        """Count what holds no answer, and take its advantage away."""
        ends = torch.tensor(self.eos_token_ids, device=batch["completion_ids"].device)
        is_end = torch.isin(batch["completion_ids"], ends)
        is_empty = is_end[:, 0]
        is_cut = ~(is_end & batch["completion_mask"].bool()).any(-1)
        size = self.num_generations if mode == "train" else self.num_generations_eval
        is_lost = self.accelerator.gather(is_cut).view(-1, size).all(-1)
        own = self.accelerator.process_index * len(is_cut)
        lost_rows = is_lost.repeat_interleave(size)[own : own + len(is_cut)]
        batch["advantages"] = batch["advantages"].masked_fill(is_empty | lost_rows, 0.0)
        self._metrics[mode]["groups/all_truncated"].append(float(is_lost.double().mean()))
        is_empty = self.accelerator.gather(is_empty)
        self._metrics[mode]["completions/empty_ratio"].append(float(is_empty.double().mean()))

    @torch.no_grad()
    def _scored(self, batch: dict[str, Any]) -> Tensor:
        """The rollouts' log-probabilities by the policy that sampled them, [B, completion]."""
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        rows = self.args.per_device_train_batch_size
        count = batch["completion_ids"].shape[1]
        return self._get_per_token_logps_and_entropies(self.model, ids, mask, count, rows)[0]

    def _padded(self, values: Tensor) -> Tensor:
        """As wide in every process: completions of other processes may be longer."""
        return self.accelerator.pad_across_processes(values, dim=1)


class _Recorder(LogitsProcessor):
    """Takes down with what log-probability each token was sampled. Comes last among the processors that change logits,
    and before temperature, which it applies itself."""

    def __init__(self, temperature: float):
        self.temperature = temperature
        self.next: Tensor | None = None  # [B, V], of the token that is sampled now
        self.found: list[Tensor] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self.take(input_ids[:, -1])
        self.next = (scores.float() / self.temperature).log_softmax(-1)
        return scores

    def take(self, tokens: Tensor) -> None:
        if self.next is not None:
            self.found.append(self.next.gather(1, tokens.unsqueeze(-1)).squeeze(-1))
        self.next = None

    def log_probabilities(self, lengths: list[int]) -> list[list[float]]:
        """Of each row's first tokens, so many."""
        rows = torch.stack(self.found, dim=1).tolist()
        return [row[:length] for row, length in zip(rows, lengths, strict=True)]


@contextmanager
def _recorded(
    model: Any, temperature: float, options: dict[str, Any], precision: Callable[[], AbstractContextManager]
) -> Iterator[_Recorder]:
    """Meanwhile the model's generate() has these options, in the precision of training and the mode of evaluation, and
    is taken down. What its own settings would do to the distribution (penalties, cut-offs) is left out: it would not be
    scored."""
    recorder, original = _Recorder(temperature), model.generate

    def generate(*args: Any, **kwargs: Any) -> Tensor:
        with precision():
            sequences = original(*args, **kwargs, **options, logits_processor=LogitsProcessorList([recorder]))
        recorder.take(sequences[:, -1])
        return sequences

    own, was_training, model.generate = model.generation_config, model.training, generate
    model.generation_config = GenerationConfig(eos_token_id=own.eos_token_id, pad_token_id=own.pad_token_id)
    model.eval()
    try:
        yield recorder
    finally:
        model.train(was_training)
        model.generation_config = own
        del model.generate


def check_policy(config: Any) -> None:
    """Raise ValueError for a model that decodes otherwise than it is scored in training."""
    if (quantile := getattr(config, "exit_quantile", 1)) != 1:
        raise ValueError(f"exit_quantile={quantile}: a policy is scored behind its last loop; set it to 1 to train")
    if getattr(config, "recursion_router", None) == "expert_choice":
        raise ValueError(
            "recursion_router='expert_choice': in training whom an expert takes depends on tokens to come, so a policy "
            "cannot be scored as it decodes; token_choice can"
        )


def _check_sampling(args: Any) -> None:
    neutral = {"top_p": (None, 1.0), "top_k": (None, 0), "min_p": (None, 0.0), "repetition_penalty": (None, 1.0)}
    for name, values in neutral.items():
        if (value := getattr(args, name, None)) not in values:
            raise ValueError(
                f"{name}={value}: the rollout would sample from another distribution than the one that is scored; "
                "leave it out (temperature is scored as it is sampled)"
            )
    if args.generation_kwargs:
        names = ", ".join(args.generation_kwargs)
        raise ValueError(f"generation_kwargs ({names}): what they do to the rollout is not scored; leave them out")
    if args.use_vllm:
        raise ValueError("use_vllm: latent models are not served by vLLM here; rollouts are generate()'s")
