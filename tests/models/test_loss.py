"""The chunked loss against the plain one, outputs and gradients, and how passes and batches are added up."""

import pytest
import torch
import torch.nn.functional as F

from tests.families import random_ids, tiny_model
from unspoken.models import loss as loss_module
from unspoken.models.backbone import LogitTransform
from unspoken.models.loss import IGNORE_INDEX, chunked_cross_entropy, plain_cross_entropy, shift_labels

VOCAB, WIDTH = 13, 5
TRANSFORMS = {
    "none": LogitTransform(),
    "multiplied": LogitTransform(multiplier=0.25),
    "divided": LogitTransform(divisor=3.0),
    "capped": LogitTransform(cap=1.5),
    "all": LogitTransform(multiplier=2.0, divisor=3.0, cap=1.5),
}
BFLOAT16_TOLERANCE = 2e-2  # gradients pass through bfloat16 logits of eight bits in both, in another order


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """At most four tokens a chunk, three rows a block: several of both, and not all full."""
    monkeypatch.setattr(loss_module, "CHUNK_LOGITS", 4 * VOCAB)
    monkeypatch.setattr(loss_module, "CPU_BLOCK", 3 * VOCAB)


def problem(num_passes: int, dtype=torch.float64) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    passes = [(2 * torch.randn(2, 7, WIDTH, dtype=dtype)).requires_grad_() for _ in range(num_passes)]
    weight = torch.randn(VOCAB, WIDTH, dtype=dtype).requires_grad_()
    targets = torch.randint(0, VOCAB, (2, 7))
    targets[0, 2:5] = IGNORE_INDEX
    targets[:, -1] = IGNORE_INDEX
    return passes, weight, targets


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("num_passes", [1, 2, 3])
def test_chunked_equals_plain(num_passes, transform):
    passes, weight, targets = problem(num_passes)
    expected = plain_cross_entropy(passes, weight, targets, transform)
    total, losses = chunked_cross_entropy(passes, weight, targets, transform)
    torch.testing.assert_close(losses, expected.detach())
    torch.testing.assert_close(total, expected.sum())
    assert not losses.requires_grad
    wanted = torch.autograd.grad(3.5 * expected.sum(), [*passes, weight])
    actual = torch.autograd.grad(3.5 * total, [*passes, weight])
    for a, w in zip(actual, wanted):
        torch.testing.assert_close(a, w)
        assert w.abs().max() > 0


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_passes_may_weigh_differently(reduction):
    """The last weight stands for all passes that follow; `mean` divides by the weights' sum."""
    model, ids = tiny_model("llama", pass_loss_reduction=reduction, pass_loss_weights=[0.25, 2.0]), random_ids(2, 7)
    outputs = model(ids, labels=ids, num_passes=3)
    losses = torch.stack(by_hand(model, ids, ids, 3))
    weights = torch.tensor([0.25, 2.0, 2.0]) / (4.25 if reduction == "mean" else 1.0)
    torch.testing.assert_close(outputs.pass_losses, losses.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(outputs.loss, (losses * weights).sum(), rtol=1e-6, atol=0)
    parameters = list(model.parameters())
    actual, expected = (torch.autograd.grad(loss, parameters) for loss in (outputs.loss, (losses * weights).sum()))
    for a, e in zip(actual, expected):
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-7)


def test_plain_is_cross_entropy_by_hand():
    passes, weight, targets = problem(1)
    logits = F.linear(passes[0], weight)
    terms = [
        -logits[b, t].log_softmax(-1)[targets[b, t]]
        for b in range(2)
        for t in range(7)
        if targets[b, t] != IGNORE_INDEX
    ]
    assert len(terms) == 9
    torch.testing.assert_close(plain_cross_entropy(passes, weight, targets, LogitTransform())[0], sum(terms))


def test_no_chunk_is_larger_than_asked(monkeypatch):
    """B53: the point of it all. No logits of more tokens than a chunk's are ever made."""
    seen = []
    mm = torch.mm

    def spy(left, right, out):
        if out.shape[1] == VOCAB:
            seen.append(out.shape[0])
        return mm(left, right, out=out)

    monkeypatch.setattr(loss_module.torch, "mm", spy)
    passes, weight, targets = problem(2)
    chunked_cross_entropy(passes, weight, targets, LogitTransform())
    assert seen == [3, 4, 3, 4, 4]  # nine targets a pass, 18 in all; positions without one skip the head


@pytest.mark.parametrize("frozen", ["head", "body"])
def test_what_is_frozen_gets_no_gradient(frozen):
    passes, weight, targets = problem(2)
    transform = TRANSFORMS["all"]
    expected = plain_cross_entropy(passes, weight, targets, transform).sum()
    leaves = passes if frozen == "head" else [weight]
    wanted = torch.autograd.grad(expected, leaves)
    if frozen == "head":
        weight = weight.detach()
    else:
        passes = [h.detach() for h in passes]
    total, _ = chunked_cross_entropy(passes, weight, targets, transform)
    for a, w in zip(torch.autograd.grad(total, leaves), wanted):
        torch.testing.assert_close(a, w)


def test_no_gradients_wanted():
    passes, weight, targets = problem(2)
    with torch.no_grad():
        total, losses = chunked_cross_entropy(passes, weight, targets, LogitTransform())
    assert not total.requires_grad
    torch.testing.assert_close(losses, plain_cross_entropy(passes, weight, targets, LogitTransform()).detach())


def test_no_targets_at_all():
    """B56: zero, with gradients of zero, and neither NaN nor an error."""
    passes, weight, targets = problem(2)
    total, losses = chunked_cross_entropy(passes, weight, targets.fill_(IGNORE_INDEX), LogitTransform())
    assert total.item() == 0
    assert losses.tolist() == [0, 0]
    for gradient in torch.autograd.grad(total, [*passes, weight]):
        assert not gradient.any()


def test_bfloat16_autocast_equals_the_plain_loss_under_autocast():
    passes, weight, targets = problem(2, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        expected = plain_cross_entropy(passes, weight, targets, TRANSFORMS["capped"])
        total, losses = chunked_cross_entropy(passes, weight, targets, TRANSFORMS["capped"])
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses, expected.detach(), rtol=BFLOAT16_TOLERANCE, atol=0)
    wanted = torch.autograd.grad(expected.sum(), [*passes, weight])
    for a, w in zip(torch.autograd.grad(total, [*passes, weight]), wanted):
        assert a.dtype == w.dtype == torch.float32
        torch.testing.assert_close(a, w, rtol=BFLOAT16_TOLERANCE, atol=BFLOAT16_TOLERANCE)


def test_a_bfloat16_head_sums_its_gradient_in_float32():
    """Thousands of small chunk gradients added up in eight bits stop growing."""
    hidden = torch.ones(1, 4096, WIDTH, dtype=torch.bfloat16)
    weight = torch.zeros(VOCAB, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    total, _ = chunked_cross_entropy([hidden], weight, torch.zeros(1, 4096, dtype=torch.long), LogitTransform())
    (gradient,) = torch.autograd.grad(total, weight)
    exact = 4096 * (1 / VOCAB - 1)
    torch.testing.assert_close(gradient[0].float(), torch.full((WIDTH,), exact), rtol=BFLOAT16_TOLERANCE, atol=0)


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_autocast_makes_the_weights_gradient_no_worse(transform):
    """The plain loss rounds it to bfloat16 under autocast; summed in float32, it is at least as near the exact one."""
    passes, weight, targets = problem(2, torch.float32)
    exact = torch.autograd.grad(plain_cross_entropy(passes, weight, targets, transform).sum(), weight)[0]
    with torch.autocast("cpu", torch.bfloat16):
        expected = plain_cross_entropy(passes, weight, targets, transform).sum()
        total, _ = chunked_cross_entropy(passes, weight, targets, transform)
    ours, theirs = (torch.autograd.grad(loss, weight)[0] for loss in (total, expected))
    assert (ours - exact).norm() <= 1.1 * (theirs - exact).norm()


def test_a_confident_token_keeps_its_gradient():
    """In bfloat16 p - 1 is 0 where p rounds to 1; the target's gradient is -(1 - p), however small."""
    hidden = torch.tensor([[[8.0]]], dtype=torch.bfloat16, requires_grad=True)
    weight = torch.tensor([[1.0], [0.0]], dtype=torch.bfloat16)
    chunked_cross_entropy([hidden], weight, torch.tensor([[0]]), LogitTransform())[0].backward()
    assert hidden.grad.item() == pytest.approx(-torch.sigmoid(torch.tensor(-8.0)).item(), rel=BFLOAT16_TOLERANCE)


def test_a_kept_graph_gives_the_same_gradients_again():
    """A graph that is not kept scales its gradients where they lie; a kept one must not."""
    passes, weight, targets = problem(2)
    total, _ = chunked_cross_entropy(passes, weight, targets, LogitTransform())
    first, second = (torch.autograd.grad(3.5 * total, [*passes, weight], retain_graph=True) for _ in range(2))
    last = torch.autograd.grad(3.5 * total, [*passes, weight])
    for a, b, c in zip(first, second, last):
        assert torch.equal(a, b) and torch.equal(a, c) and a.any()


def test_a_compiled_graph_keeps_positions_without_a_target_and_counts_none():
    passes, weight, targets = problem(2)
    compiled = torch.compile(chunked_cross_entropy, backend="aot_eager", fullgraph=True)
    total, losses = compiled(passes, weight, targets, TRANSFORMS["all"])
    expected = plain_cross_entropy(passes, weight, targets, TRANSFORMS["all"])
    torch.testing.assert_close(losses, expected.detach())
    wanted = torch.autograd.grad(3.5 * expected.sum(), [*passes, weight])
    for a, w in zip(torch.autograd.grad(3.5 * total, [*passes, weight]), wanted):
        torch.testing.assert_close(a, w)


def test_the_operator_keeps_its_promises_to_the_compiler():
    passes, weight, targets = problem(2)
    hidden = torch.stack(passes).flatten(1, 2).detach().requires_grad_()
    arguments = (hidden, weight, targets.flatten(), [1.0, 0.5], 1.0, 2.0, 3.0, True, True)
    torch.library.opcheck(loss_module._chunked_cross_entropy, arguments, test_utils=["test_schema", "test_faketensor"])


def test_labels_are_shifted_by_one():
    assert shift_labels(torch.tensor([[5, 6, 7], [8, -100, 9]])).tolist() == [[6, 7, -100], [-100, 9, -100]]


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_the_gradient_through_the_transform(transform):
    raw = torch.randn(4, VOCAB, dtype=torch.float64, requires_grad=True)
    logits = transform(raw)
    upstream = torch.randn_like(logits)
    (expected,) = torch.autograd.grad(logits, raw, upstream)
    torch.testing.assert_close(transform.input_gradient(logits, upstream), expected)


def by_hand(model, ids, labels, num_passes) -> list[torch.Tensor]:
    """Each pass's mean next-token loss from its states."""
    states = model.model(ids, use_cache=False, num_passes=num_passes).pass_hidden_states
    losses = []
    for hidden in states:
        logits = model.transform(model.lm_head(hidden))[:, :-1]
        losses.append(F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()))
    return losses


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("name", ["llama_tied", "gemma2", "granite", "cohere"])
def test_the_loss_is_over_all_passes(name, reduction):
    model, ids = tiny_model(name, pass_loss_reduction=reduction), random_ids(2, 7)
    labels = ids.clone()
    labels[0, :3] = -100
    outputs = model(ids, labels=labels, num_passes=3)
    losses = torch.stack(by_hand(model, ids, labels, 3))
    torch.testing.assert_close(outputs.pass_losses, losses.detach(), rtol=1e-6, atol=0)
    total = losses.sum() if reduction == "sum" else losses.mean()
    torch.testing.assert_close(outputs.loss, total, rtol=1e-6, atol=0)
    parameters = list(model.parameters())
    actual, expected = (torch.autograd.grad(loss, parameters) for loss in (outputs.loss, total))
    for a, e in zip(actual, expected):
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-7)


def test_a_batch_of_labels_that_are_all_ignored():
    """B56: the loss of a batch without targets, normalised by the whole step's count, is zero and not NaN."""
    model, ids = tiny_model("llama"), random_ids(2, 7)
    loss = model(ids, labels=torch.full_like(ids, -100), num_items_in_batch=9).loss
    loss.backward()
    assert loss.item() == 0
    assert not model.lm_head.weight.grad.any()


@pytest.mark.parametrize("count", [torch.tensor(12), 12])
def test_the_loss_is_divided_by_the_whole_batch_s_targets(count):
    model, ids = tiny_model("llama"), random_ids(2, 7)
    own = model(ids, labels=ids)
    divided = model(ids, labels=ids, num_items_in_batch=count)
    torch.testing.assert_close(divided.loss * 12, own.loss * 2 * 6)
    torch.testing.assert_close(divided.pass_losses * 12, own.pass_losses * 2 * 6)
