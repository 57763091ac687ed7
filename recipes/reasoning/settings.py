"""What the two studies ask and how much they do: the small model from scratch, and SmolLM2-135M."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Arm:
    """A model of the comparison. sft: overrides of its recipe. continued: it begins with that kind of continued
    pretraining. asks: no model of its own, but that arm's, asked with `asked_passes` over prompts. cost: of its
    training steps, in those of the plain model."""

    name: str
    recipe: str = ""
    sft: tuple[str, ...] = ()
    continued: str = ""
    asks: str = ""
    asked_passes: int | None = None
    is_rewarded: bool = False
    cost: float = 1.0
    note: str = ""


@dataclass(frozen=True)
class Size:
    """How much is done. Seconds are the processor's, of a plain model's command."""

    arms: tuple[Arm, ...]
    specs: tuple[str, ...]
    format: str
    num_train: int
    num_val: int
    reward: str
    max_new_tokens: int
    rl_recipe: str
    instruction: str = ""
    text: str = ""
    ct: tuple[str, ...] = ()
    sft: tuple[str, ...] = ()
    rl: tuple[str, ...] = ()
    ct_seconds: float = 0.0
    sft_seconds: float = 0.0
    rl_seconds: float = 0.0
    eval_seconds: float = 20.0


SMALL = Size(
    arms=(
        Arm("plain", "recipes/sft/small_plain.yaml", is_rewarded=True),
        Arm("plain-2x", "recipes/sft/small_plain.yaml", ("--train.max_steps", "800"), cost=2, is_rewarded=True,
            note="twice the steps: the compute of recycling"),
        Arm("recycler", "recipes/sft/small_recycler.yaml", cost=2, is_rewarded=True),
        Arm("recycler-asked-k1", asks="recycler", asked_passes=1,
            note="recycler, trained with two prefill passes and asked with one"),
        Arm("recycler-k1", "recipes/sft/small_recycler.yaml", ("--model.num_prefill_passes", "1"), cost=2,
            note="nothing is recycled into prompts"),
        Arm("adaptive", "recipes/sft/small_adaptive.yaml", cost=2, is_rewarded=True, note="up to three latent steps"),
    ),
    specs=tuple(f"terms-{n:02}=written_sum:min_terms={n},max_terms={n}" for n in (4, 6, 8, 10)),
    format="plain",
    num_train=5000,
    num_val=200,
    reward="last_number",
    max_new_tokens=96,
    rl_recipe="recipes/rl/small.yaml",
    sft_seconds=130,
    rl_seconds=450,
)  # fmt: skip
SMOLLM2 = Size(
    arms=(
        Arm("plain", "recipes/sft/smollm2_plain.yaml", continued="plain", is_rewarded=True),
        Arm("plain-2x", "recipes/sft/smollm2_plain.yaml", ("--train.num_epochs", "2"), continued="plain", cost=2,
            note="two epochs: the compute of recycling"),
        Arm("recycler", "recipes/sft/smollm2_recycler.yaml", continued="recycler", cost=2, is_rewarded=True,
            note="introduced at continued pretraining"),
        Arm("recycler-asked-k1", asks="recycler", asked_passes=1,
            note="recycler, trained with two prefill passes and asked with one"),
        Arm("recycler-k1", "recipes/sft/smollm2_recycler.yaml", ("--model.num_prefill_passes", "1"),
            continued="recycler", cost=2, note="nothing is recycled into prompts"),
        Arm("recycler-sft", "recipes/sft/smollm2_recycler.yaml", continued="plain", cost=2, is_rewarded=True,
            note="introduced here"),
        Arm("recycler-sft-k1", "recipes/sft/smollm2_recycler.yaml", ("--model.num_prefill_passes", "1"),
            continued="plain", cost=2, note="introduced here, nothing recycled into prompts"),
    ),
    specs=(
        "sum-2=chain_sum:min_terms=2,max_terms=2,min_digits=1,max_digits=2",
        "sum-3=chain_sum:min_terms=3,max_terms=3,min_digits=1,max_digits=1",
        "legs=leg_counting:min_animals=1,max_animals=2,max_instances=5",
        "family=family_relationships",
        "spell=spell_backward:min_word_len=3,max_word_len=4",
        "knights=knights_knaves:n_people=2",
    ),
    format="chat",
    num_train=300,
    num_val=60,
    reward="reasoning_gym",
    max_new_tokens=24,
    rl_recipe="recipes/rl/smollm2.yaml",
    instruction="Answer only.",
    text="core",
    ct=("--train.total_tokens", "16384", "--train.eval_every", "0"),
    ct_seconds=120,
    sft_seconds=700,
    rl_seconds=1500,
    eval_seconds=120,
)  # fmt: skip
STUDIES = {"small": SMALL, "smollm2": SMOLLM2}
QUICK = {
    "small": replace(
        SMALL,
        num_train=40,
        num_val=4,
        max_new_tokens=8,
        sft=("--train.max_steps", "4", "--train.eval_every", "0"),
        rl=("--train.num_rollouts", "1", "--rollout.max_new_tokens", "8", "--train.eval_problems", "4"),
        sft_seconds=5,
        rl_seconds=8,
        eval_seconds=5,
    ),
    "smollm2": replace(
        SMOLLM2,
        arms=SMOLLM2.arms[2:4],
        specs=SMOLLM2.specs[:1],
        num_train=8,
        num_val=2,
        text="stdlib",
        ct=("--train.total_tokens", "512", "--train.batch_size", "2", "--train.eval_every", "0"),
        sft=("--train.eval_every", "0",),
        rl=("--train.num_rollouts", "1", "--rollout.num_prompts", "1", "--train.eval_every", "0"),
        ct_seconds=20,
        sft_seconds=10,
        rl_seconds=20,
        eval_seconds=10,
    ),
}  # fmt: skip
