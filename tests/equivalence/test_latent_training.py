"""The loss and its gradients equal the oracle's and finite differences; runs that must agree do."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.equivalence.test_latent_decoding import thinking
from tests.equivalence.test_training import LENGTHS, batch_of_rows
from tests.families import REPRESENTATIVE, random_ids
from tests.oracle import close, embed, grid_body
from unspoken import AdaptiveLatentForCausalLM
from unspoken.latent import reference
from unspoken.models import adaptive
from unspoken.models import loss as loss_module
from unspoken.models.loss import shift_labels

KINDS = ["linear", "mlp", "multi_linear", "multi_mlp"]
FORMS = ["A", "B", "C", "D"]
GRADIENT_TOLERANCE = 1e-6  # sums in another order, through float32 norms
# A penalty that weighs: p_target of a random model is small, and to the tenth power nothing.
LOUD = {"adaptive_loss_weight": 5.0, "adaptive_loss_exponent": 0.3, "step_loss_weight": 0.2}


def gradients(model) -> dict[str, Tensor]:
    """Of every parameter: one that has none is a fault."""
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    assert all(g.isfinite().all() for g in found.values())
    return found


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = GRADIENT_TOLERANCE) -> None:
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        close(actual[name], gradient, tolerance)


def oracle_loss(model: AdaptiveLatentForCausalLM, ids: Tensor) -> Tensor:
    """The loss of one row, token by token and step by step; every formula written out."""
    config = model.config
    finals, states, weights = reference.latent_steps(
        grid_body(model),
        lambda state, step: torch.sigmoid(model.model.router(state, step)).squeeze(),
        embed(model, ids),
        config.max_latent_steps,
        config.exit_threshold,
    )

    def log_probs(state: Tensor) -> Tensor:
        return model.transform(model.lm_head(state)).log_softmax(-1).squeeze()

    total = torch.zeros((), dtype=torch.float64)
    for t, target in enumerate(ids[0, 1:].tolist()):
        total = total - log_probs(finals[:, t])[target]
        reach = torch.ones((), dtype=torch.float64)
        for k, (state, weight) in enumerate(zip(states[t], weights[t]), start=1):
            total = total - config.step_loss_weight / (config.max_latent_steps + 1) * log_probs(state)[target]
            goes_on = k < len(states[t])
            if not (goes_on or (config.penalize_cuts and k <= config.max_latent_steps)):
                break
            gate = (
                1 - weight / reach if goes_on else torch.sigmoid(model.model.router(state, k)).squeeze()
            )  # weight = reach (1 - gate)
            price = log_probs(state)[target].exp().detach() ** config.adaptive_loss_exponent
            price = (
                price
                * {
                    "A": gate,
                    "B": reach * gate,
                    "C": reach * gate / config.max_latent_steps,
                    "D": -reach.detach() * torch.log(1 - gate.clamp(max=1 - 1e-6)),  # finite for a certain gate
                }[config.adaptive_loss]
            )
            total = total + config.adaptive_loss_weight * price
            reach = reach * gate
    return total / (ids.shape[1] - 1)


@pytest.mark.parametrize(
    ("name", "kind", "form", "penalize_cuts"),
    [
        *((name, "linear", "B", False) for name in REPRESENTATIVE),
        *(("gpt_neox", "multi_mlp", form, False) for form in FORMS),
        *(("gpt_neox", "linear", form, True) for form in FORMS),
    ],
)
def test_loss_and_gradients_equal_the_oracle_s(name, kind, form, penalize_cuts):
    fields = {"router": kind, "adaptive_loss": form, "penalize_cuts": penalize_cuts, "max_latent_steps": 2}
    fields |= {"router_bias": 1.5, **LOUD}
    model, ids = thinking(name, **fields).train(), random_ids(1, 9, seed=3)
    expected = oracle_loss(model, ids)
    expected.backward()
    wanted = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    outputs = model(ids, labels=ids)
    outputs.loss.backward()
    assert 0 < outputs.latents.lengths.float().mean() < 2
    assert outputs.latents.penalty > 0.02 * outputs.pass_losses[0], "the penalty would not be missed"
    close(outputs.loss, expected, 1e-6)
    assert wanted["model.router.gates.0.weight" if kind == "linear" else "model.router.gates.0.0.weight"].any()
    assert_same(gradients(model), wanted)


class Held:
    """What the loss detaches, which a finite difference must hold still: `target_probabilities`, and in form D the
    reach. The first forward's are remembered, and given again when `again` was called."""

    def __init__(self, monkeypatch):
        self.kept: list[Tensor] = []
        self.given: Iterator[Tensor] | None = None
        probabilities, penalty = adaptive.target_probabilities, adaptive.adaptive_penalty
        monkeypatch.setattr(adaptive, "target_probabilities", lambda *args: self._held(lambda: probabilities(*args)))
        monkeypatch.setattr(
            adaptive,
            "adaptive_penalty",
            lambda form, reach, *args: penalty(form, self._held(lambda: reach) if form == "D" else reach, *args),
        )

    def again(self) -> None:
        self.given = iter(self.kept)

    def _held(self, make: Callable[[], Tensor]) -> Tensor:
        if self.given is not None:
            return next(self.given)
        self.kept.append(make())
        return self.kept[-1]


def slope(loss: Callable[[], Tensor], parameters: list[Tensor], direction: list[Tensor], size: float = 1e-5) -> float:
    """The loss's derivative along a direction, from both sides."""
    values = []
    with torch.no_grad():
        for sign in (1, -1):
            for p, d in zip(parameters, direction):
                p.add_(d, alpha=sign * size)
            values.append(loss().item())
            for p, d in zip(parameters, direction):
                p.sub_(d, alpha=sign * size)
    return (values[0] - values[1]) / (2 * size)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_the_router_are_finite_differences(kind, form, monkeypatch):
    """GPT-NeoX, whose norms are float64 here. Cuts are far from where the differences are taken."""
    fields = {"router": kind, "adaptive_loss": form, "penalize_cuts": kind == "mlp", **LOUD}
    model, batch = thinking("gpt_neox", **fields).train(), batch_of_rows((7, 4))
    held = Held(monkeypatch)
    outputs = model(**batch)
    outputs.loss.backward()
    for step in outputs.latents.steps[:-1]:
        assert ((step.reach * step.gate - model.config.exit_threshold).abs() > 1e-4).all()

    def loss() -> Tensor:
        held.again()
        again = model(**batch)
        assert torch.equal(again.latents.lengths, outputs.latents.lengths)
        return again.loss

    router = list(model.model.router.parameters())
    for parameters in ([p] for p in router):
        direction = [torch.randn_like(p) for p in parameters]
        expected = sum((p.grad * d).sum().item() for p, d in zip(parameters, direction))
        assert slope(loss, parameters, direction) == pytest.approx(expected, rel=1e-4, abs=1e-9)
    assert max(p.grad.abs().max() for p in router) > 1e-2
    everything = list(model.parameters())
    direction = [torch.randn_like(p) for p in everything]
    expected = sum((p.grad * d).sum().item() for p, d in zip(everything, direction))
    assert slope(loss, everything, direction, 1e-6) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("kind", [*KINDS, "none"])
@pytest.mark.parametrize("name", ["llama_tied", "qwen3_moe"])
def test_every_parameter_has_a_gradient_at_every_depth(name, kind):
    """Or a process whose tokens exit early would wait for ever, or skip the router's step, beside one whose do not."""
    model, ids = thinking(name, router=kind).train(), random_ids(2, 5)
    knobs = [{"max_latent_steps": k} for k in range(4)] + [{"exit_at_step": k} for k in (1, 2)]
    for options in [*knobs, {"exit_threshold": 1.0}, {"exit_threshold": 0.0}]:
        model(ids, labels=ids, **options).loss.backward()
        gradients(model)


@pytest.mark.parametrize("kind", ["linear", "multi_mlp"])
@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_a_batch_where_nobody_goes_on(name, kind):
    """All cut at step 1 by a bias: the plain model's loss and gradients, and none for the router, rather than NaN."""
    model, batch = thinking(name, router=kind).train(), batch_of_rows((7, 4))
    for gate in model.model.router.modules():
        if isinstance(gate, adaptive.Router) or not hasattr(gate, "start"):
            continue
        gate.bias.data.fill_(-60.0)
    outputs = model(**batch)
    outputs.loss.backward()
    found = gradients(model)
    plain = model(**batch, max_latent_steps=0)
    plain.loss.backward()
    assert not outputs.latents.lengths.any()
    close(outputs.loss, plain.loss, 1e-12)
    assert_same(found, gradients(model))
    assert not any(g.any() for n, g in found.items() if "router" in n)


def test_a_gate_that_is_cut_is_pushed_down_where_cuts_are_penalized():
    """The switch's only effect, here alone: with all tokens cut, no other gradient reaches a gate."""
    ids = random_ids(2, 5)
    for penalize_cuts in (False, True):
        model = thinking("llama", exit_threshold=1.0, penalize_cuts=penalize_cuts, **LOUD).train()
        model(ids, labels=ids).loss.backward()
        bias = model.model.router.gates[0].bias.grad
        assert (bias > 0).all() if penalize_cuts else not bias.any()


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_a_step_that_only_another_process_takes(name):
    """All processes gather a step's weights, or none. Here nobody's tokens go on, and the step runs: same loss, same
    gradients, nothing of it in the balancing loss."""
    text = {"output_router_logits": True} if name == "qwen3_moe" else {}
    model, ids = thinking(name, exit_threshold=1.0, text=text).train(), random_ids(2, 5)
    results, backwards = [], []
    model.model.backbone.norm.register_full_backward_hook(lambda *_: backwards.append(1))
    for anywhere in (bool, lambda _: True):
        model.model.goes_on_anywhere = anywhere
        outputs = model(ids, labels=ids)
        outputs.loss.backward()
        results.append((outputs, gradients(model)))
    (alone, expected), (together, found) = results
    assert (len(alone.latents.taken), len(together.latents.taken)) == (1, 4)
    assert len(backwards) == 1 + 4, "a run without a backward pass would leave another process waiting"
    close(together.loss, alone.loss, 1e-12)
    assert_same(found, expected)
    assert not together.latents.lengths.any()
    with torch.no_grad():  # and in decoding
        assert torch.equal(model.eval()(ids).logits, alone.logits if alone.logits is not None else model(ids).logits)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", ["llama_tied", "gpt_neox"])
def test_one_batch_or_many_small_ones(name, rows):
    """B42, the penalty and the steps' own losses too."""
    model, batch = thinking(name, **LOUD).train(), batch_of_rows()
    num_targets = (batch["labels"][:, 1:] != -100).sum()
    whole = model(**batch)
    whole.loss.backward()
    expected, total, penalty = gradients(model), 0.0, 0.0
    for start in range(0, len(LENGTHS), rows):
        part = {key: value[start : start + rows] for key, value in batch.items()}
        outputs = model(**part, num_items_in_batch=num_targets)
        outputs.loss.backward()
        total += outputs.loss.item()
        penalty += outputs.latents.penalty.item()
    assert total == pytest.approx(whole.loss.item(), rel=GRADIENT_TOLERANCE)
    assert penalty == pytest.approx(whole.latents.penalty.item(), rel=1e-4)
    assert_same(gradients(model), expected)


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_training_mode_changes_no_number(name):
    """Without a gradient rows that exit are left out; with one they stay. The numbers are the same."""
    model, batch = thinking(name, **LOUD), batch_of_rows((7, 4, 2))
    training = model.train()(**batch, skip_logits=False)
    with torch.no_grad():
        evaluating = model.eval()(**batch)
    close(evaluating.loss, training.loss)
    close(evaluating.logits, training.logits)
    assert torch.equal(evaluating.latents.lengths, training.latents.lengths)
    close(evaluating.latents.penalty, training.latents.penalty)


def test_logits_of_a_few_who_go_on_at_a_time(monkeypatch):
    """p_target is asked of tokens that go on and have a target, without a gradient, some of them at once; the logits
    of two steps never lie side by side."""
    model, batch, asked = thinking("llama", **(LOUD | {"step_loss_weight": 0.0})).train(), batch_of_rows((9, 9, 5)), []
    expected = model(**batch).loss
    monkeypatch.setattr(loss_module, "CHUNK_LOGITS", 4 * 64)
    model.lm_head.register_forward_pre_hook(lambda _, args: asked.append((len(args[0]), torch.is_grad_enabled())))
    outputs = model(**batch)
    targets = shift_labels(batch["labels"]).flatten()
    going = [int((step.goes_on & (targets[step.token] != -100)).sum()) for step in outputs.latents.steps]
    assert sum(count for count, _ in asked) == sum(going) > 20
    assert max(count for count, _ in asked) <= 4
    assert not any(with_gradient for _, with_gradient in asked)
    assert outputs.logits is None
    close(outputs.loss, expected, 1e-12)


def test_targets_that_are_none_have_no_price():
    """Of a batch whose labels are all -100 the gradient is zero, not NaN, as a part of a larger one."""
    model, ids = thinking("llama", **LOUD).train(), random_ids(2, 5)
    outputs = model(ids, labels=torch.full_like(ids, -100), num_items_in_batch=7)
    outputs.loss.backward()
    assert outputs.loss == 0
    assert not any(g.any() for g in gradients(model).values())
    labels = ids.clone()
    labels[:, 3:] = -100  # the same targets, of the first tokens alone
    outputs, cut = model(ids, labels=labels), model(ids[:, :3], labels=ids[:, :3])
    close(outputs.loss, cut.loss)
    close(outputs.latents.penalty, cut.latents.penalty)


def test_bfloat16_autocast_trains_in_float32():
    """Everybody takes all steps: a gate near the threshold may fall on either side in eight bits."""
    model, batch = thinking("llama_tied", torch.float32, exit_threshold=0.0).train(), batch_of_rows((7, 4))
    expected = model(**batch).loss
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(**batch)
    assert outputs.loss.dtype == torch.float32
    assert outputs.latents.steps[0].gate.dtype == torch.float32
    close(outputs.loss, expected, tolerance=0.02)
    outputs.loss.backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    assert gradients(model)["model.router.gates.0.weight"].any()


def test_a_model_of_bfloat16_trains():
    model, batch = thinking("llama_tied", torch.bfloat16).train(), batch_of_rows((7, 4))
    outputs = model(**batch)
    outputs.loss.backward()
    assert outputs.loss.dtype == torch.float32
    close(outputs.loss, thinking("llama_tied").train()(**batch).loss.float(), tolerance=0.05)
    assert gradients(model)["model.router.gates.0.weight"].any()


def test_a_cache_in_training_has_gradients_too():
    """Two forwards over one cache equal one: keys of the first receive what the second sends back."""
    model, ids = thinking("llama").train(), random_ids(2, 7)
    one = model(ids, skip_logits=False).logits
    one.square().sum().backward()
    expected = gradients(model)
    first = model(ids[:, :4], use_cache=True)
    second = model(ids[:, 4:], cache=first.cache)
    logits = torch.cat([first.logits, second.logits], dim=1)
    close(logits, one)
    logits.square().sum().backward()
    assert_same(gradients(model), expected, 1e-5)


def test_hidden_states_end_in_the_mixture():
    model, ids = thinking("llama"), random_ids(2, 5)
    outputs = model(ids, output_hidden_states=True)
    plain = model(ids, output_hidden_states=True, max_latent_steps=0)
    assert len(outputs.hidden_states) == len(plain.hidden_states) == 3
    for a, b in zip(outputs.hidden_states[:-1], plain.hidden_states):
        close(a, b, 1e-12)
    assert torch.equal(outputs.hidden_states[-1], model.model(ids).last_hidden_state)
    close(model.transform(model.lm_head(outputs.hidden_states[-1])), outputs.logits, 1e-12)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_experts_are_balanced_in_each_run_over_its_tokens(name):
    """By hand, run by run, without pads and fillers; their mean."""
    model = thinking(name, torch.float32, text={"output_router_logits": True}).train()
    batch = batch_of_rows((7, 4, 2))
    outputs = model(**batch)
    layers, runs = model.config.num_hidden_layers, len(outputs.latents.taken)
    assert runs > 2
    assert len(outputs.router_logits) == runs * layers
    assert not outputs.latents.taken[1].all()
    losses = []
    for run, taken in enumerate(outputs.latents.taken):
        logits = torch.cat([layer[taken.flatten()] for layer in outputs.router_logits[run * layers :][:layers]])
        probabilities = logits.float().softmax(-1)
        chosen = F.one_hot(probabilities.topk(2, dim=-1).indices, 4).float()
        losses.append(4 * (chosen.sum(1).mean(0) * probabilities.mean(0)).sum())
    expected = torch.stack(losses).mean()
    torch.testing.assert_close(outputs.aux_loss, expected, rtol=1e-5, atol=0)
    coefficient = model.config.text_config.router_aux_loss_coef
    total = outputs.pass_losses.sum() + outputs.latents.penalty + coefficient * expected
    torch.testing.assert_close(outputs.loss, total, rtol=1e-5, atol=0)
