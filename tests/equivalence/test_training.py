"""Classes of training runs that must agree: accumulated or not, checkpointed or not, compiled or not, in bfloat16."""

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from tests.families import ALL, MOE, PAD, REPRESENTATIVE, random_ids, tiny_model
from tests.oracle import close
from unspoken import RecyclerForCausalLM

LENGTHS = (11, 3, 7, 2, 9, 5, 8, 6)
# Sums over rows in another order, through float32 norms.
GRADIENT_TOLERANCE = 1e-6


def batch_of_rows(lengths=LENGTHS) -> dict[str, Tensor]:
    """Right-padded rows of unequal length, pads not among the labels."""
    longest = max(lengths)
    ids, mask = torch.full((len(lengths), longest), PAD), torch.zeros(len(lengths), longest, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, :length], mask[row, :length] = random_ids(1, length, seed=row), 1
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def gradients(model: RecyclerForCausalLM) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = GRADIENT_TOLERANCE) -> None:
    assert actual.keys() == expected.keys()
    assert "model.adapter.proj.weight" in expected
    for name, gradient in expected.items():
        close(actual[name], gradient, tolerance)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_one_batch_or_many_small_ones(name, rows):
    """B42: a loss that ignores the step's target count is inflated by the number of accumulation steps."""
    model, batch = tiny_model(name).train(), batch_of_rows()
    num_targets = (batch["labels"][:, 1:] != -100).sum()
    whole = model(**batch).loss
    whole.backward()
    expected, total = gradients(model), 0.0
    for start in range(0, len(LENGTHS), rows):
        part = {key: value[start : start + rows] for key, value in batch.items()}
        loss = model(**part, num_items_in_batch=num_targets).loss
        loss.backward()
        total += loss.item()
    assert total == pytest.approx(whole.item(), rel=GRADIENT_TOLERANCE)
    assert_same(gradients(model), expected)


@pytest.mark.parametrize("name", ALL)
def test_gradient_checkpointing_changes_nothing(name):
    """B50: checkpointing dropped gradients, or switched things off. Non-reentrant, as passes share their layers."""
    model, batch = tiny_model(name).train(), batch_of_rows((7, 4))
    outputs = model(**batch, num_passes=3)
    outputs.loss.backward()
    expected = gradients(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    runs = []
    model.model.backbone.layers[0].mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    again = model(**batch, num_passes=3)
    assert len(runs) == 3
    again.loss.backward()
    assert len(runs) == 6  # the layers did run again
    assert torch.equal(again.loss, outputs.loss)
    assert expected["model.adapter.proj.weight"].any()
    assert_same(gradients(model), expected, tolerance=0.0)
    assert model.config.text_config.use_cache  # B52


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_generation_from_a_model_that_checkpoints(name):
    """B51: rollouts within training ran without a cache. In training mode too, where layers drop it for a gradient."""
    model, prompt = tiny_model(name), random_ids(1, 7)
    expected = model.generate(prompt, max_new_tokens=5, do_sample=False)
    model.gradient_checkpointing_enable()
    for training in (True, False):
        ids = model.train(training).generate(prompt, max_new_tokens=5, do_sample=False)
        assert torch.equal(ids, expected)


@pytest.mark.parametrize("options", [{"num_passes": "exact"}, {"use_cache": True}, {"cache": "given"}])
def test_a_cache_that_checkpointing_would_drop_is_refused(options):
    """Layers that checkpoint drop the cache with a warning: the exact recurrence then attended to nothing before, and
    gave another loss."""
    model, ids = tiny_model("llama").train(), random_ids(2, 7)
    if "cache" in options:
        options = {"cache": DynamicCache(config=model.config)}
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="gradient checkpointing drops the cache"):
        model(ids, labels=ids, **options)
    model.gradient_checkpointing_disable()
    assert model(ids, labels=ids, **options).loss > 0


def test_bfloat16_autocast_trains_in_float32():
    model, batch = tiny_model("llama_tied", torch.float32).train(), batch_of_rows((7, 4))
    expected = model(**batch).loss
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**batch).loss
    assert loss.dtype == torch.float32
    close(loss, expected, tolerance=0.02)  # eight bits a product
    loss.backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    assert model.model.adapter.proj.weight.grad.any()


@pytest.mark.parametrize("name", MOE)
def test_router_gradients_come_from_the_balancing_loss_too(name):
    """B41: a fused path dropped the auxiliary loss. Total = passes' losses + coefficient * auxiliary."""
    model, batch = tiny_model(name).train(), batch_of_rows((7, 7))
    outputs = model(**batch, output_router_logits=True)
    coefficient = model.config.text_config.router_aux_loss_coef
    torch.testing.assert_close(outputs.loss, outputs.pass_losses.sum() + coefficient * outputs.aux_loss)
    outputs.loss.backward()
    with_balance = gradients(model)
    model(**batch).loss.backward()
    without = gradients(model)
    router = next(n for n in without if n.endswith(("gate.weight", "router.weight")))
    assert not torch.allclose(with_balance[router], without[router])


def test_a_prompt_is_not_recycled_into_when_training_for_one_pass_prefill():
    """Gradients of the prompt's recycled input are exactly those of none."""
    model, ids = tiny_model("llama").train(), random_ids(2, 7)
    prompt_mask = (torch.arange(7) < 4).expand(2, -1)
    labels = ids.masked_fill(torch.arange(7) >= 4, -100)  # targets within the prompt alone
    losses = model(ids, labels=labels, prompt_mask=prompt_mask, num_passes=2)
    assert losses.pass_losses[0] == losses.pass_losses[1]
    losses.loss.backward()
    assert not model.model.adapter.proj.weight.grad.any()


def test_the_adapter_learns_from_zero():
    """A zero-initialised adapter must get a gradient at once, and a few steps must use it."""
    model = RecyclerForCausalLM(tiny_model("llama").config).train()
    assert not model.model.adapter.proj.weight.any()
    optimizer, ids = torch.optim.AdamW(model.parameters(), lr=0.01), random_ids(4, 11)
    losses = []
    for _ in range(12):
        outputs = model(ids, labels=ids, num_passes=2)
        optimizer.zero_grad()
        outputs.loss.backward()
        optimizer.step()
        losses.append(outputs.pass_losses)
    assert model.model.adapter.proj.weight.abs().max() > 0.01
    assert losses[-1][1] < losses[0][1] - 0.5
    assert losses[0][0] == losses[0][1] != losses[-1][1] != losses[-1][0]


@pytest.mark.parametrize(
    ("packed", "backend"),
    [
        pytest.param(False, "eager", id="rows"),
        pytest.param(True, "aot_eager", id="packed", marks=pytest.mark.slow),
    ],
)
def test_a_compiled_step_equals_an_eager_one(num_graphs, packed, backend):
    """B25: one whole graph for each number of passes. Here forward (and backward, with "aot_eager") are traced, and run
    as they are; the slow test below generates code from them."""
    model = tiny_model("llama_tied", torch.float32).train()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for num_passes in (1, 2):
        for seed in range(2):
            ids = random_ids(2, 9, seed=seed)
            batch = {"input_ids": ids, "labels": ids}
            if packed:
                starts = torch.tensor([[0, 4], [0, 2 + seed]])  # data, not shape
                positions = torch.arange(9) - (torch.arange(9) >= starts[:, 1:]) * starts[:, 1:]
                batch["position_ids"] = positions
            expected = model(**batch, num_passes=num_passes).loss
            expected.backward()
            wanted = gradients(model)
            loss = compiled(**batch, num_passes=num_passes).loss
            loss.backward()
            close(loss, expected, 1e-5)
            assert_same(gradients(model), wanted, 1e-5)
    assert num_graphs() == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama_tied", "gemma3_text"])
def test_a_step_compiled_to_code_equals_an_eager_one(num_graphs, name):
    model = tiny_model(name, torch.float32).train()
    compiled = torch.compile(model)
    ids = random_ids(2, 9)
    for num_passes in (1, 2):
        expected = model(ids, labels=ids, num_passes=num_passes).loss
        expected.backward()
        wanted = gradients(model)
        loss = compiled(ids, labels=ids, num_passes=num_passes).loss
        loss.backward()
        close(loss, expected, 1e-5)
        assert_same(gradients(model), wanted, 1e-4)
