"""Whether a device computes what the CPU computes in float32: a tiny Recycler, its passes, its losses, its decoding.

Sizes are relative errors of a whole tensor, by norm; without its adapter the tiny model is off by 1.4.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers import CompileConfig, LlamaConfig

from benchmarks.arms import random_ids
from benchmarks.loss_memory import FUNCTIONS
from benchmarks.measure import RedCheckError
from unspoken import RecyclerConfig, RecyclerForCausalLM
from unspoken.latent import reference
from unspoken.models.backbone import LogitTransform
from unspoken.models.segments import backward_by_pass

# On a CPU 2e-6 was seen in float32 and 0.03 in bfloat16, which rounds to 0.004 at each of a dozen steps.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
VOCAB_SIZE, TOKENS, PROMPT, NEW_TOKENS = 256, 24, 7, 12
PASSES = (1, 2, 3)


def cases(device: torch.device, backend: str) -> dict[str, Callable[[], str]]:
    """What is checked, by name; each returns how near it came, or raises RedCheckError. `backend` is a compiler's."""
    checks: dict[str, Callable[[], str]] = {}
    for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16 autocast")):
        for k in PASSES:
            checks[f"{name}, k={k}: logits, losses and gradients of CPU fp32"] = partial(_step, device, dtype, k)
        checks[f"{name}: the chunked loss and its gradients of the plain one"] = partial(_chunked, device, dtype)
    for k in PASSES:
        checks[f"fp32, k={k}: gradients of the segmented backward of the whole"] = partial(_segmented, device, k)
    checks[f"fp32: gradients of blocks compiled with {backend} of eager ones"] = partial(_compiled, device, backend)
    for k in (1, 2):
        checks[f"fp32, k={k}: generate, token by token, of the sequential reference"] = partial(_generate, device, k)
    checks["fp32: generate with a static cache of a growing one"] = partial(_static, device, None)
    checks[f"fp32: generate with a static cache compiled with {backend} of a growing one"] = partial(
        _static, device, backend
    )
    return checks


def tiny_recycler(device: torch.device) -> RecyclerForCausalLM:
    """Two layers, drawn wide enough for text that varies; the adapter is awake."""
    torch.manual_seed(0)
    text_config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, initializer_range=0.1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = RecyclerForCausalLM(RecyclerConfig(text_config=text_config))
    nn.init.normal_(model.model.adapter.proj.weight, std=0.1)
    return model.to(device).eval()


def step(model: RecyclerForCausalLM, k: int, dtype: torch.dtype, segmented: bool = False) -> dict[str, Tensor]:
    """Logits, losses and gradients of one batch, on the CPU in float32."""
    ids = random_ids(VOCAB_SIZE, 2, TOKENS).to(model.device)
    with torch.autocast(model.device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
        options = {"segmented": True} if segmented else {}
        output = model(ids, labels=ids, num_passes=k, use_cache=False, **options)
    assert output.loss is not None
    if segmented:
        backward_by_pass(output.loss, output.segments)
    else:
        output.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    found = {"logits": output.logits, "losses": output.pass_losses, "loss": output.loss} | gradients
    return {name: tensor.detach().cpu().float() for name, tensor in found.items()}


def compare(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float) -> str:
    """How near they are in the worst of the tensors.

    Raises:
        RedCheckError: not near enough, or not the same tensors.
    """
    if actual.keys() != expected.keys():
        raise RedCheckError(f"{sorted(actual.keys() ^ expected.keys())} in one alone")
    errors = {name: _error(actual[name], expected[name]) for name in expected}
    worst = max(errors, key=lambda name: errors[name])
    if not errors[worst] <= tolerance:
        raise RedCheckError(f"{worst} is off by {errors[worst]:.2g}, more than {tolerance:g}")
    return f"to {errors[worst]:.1g}"


def _error(actual: Tensor, expected: Tensor) -> float:
    """Relative; not a number counts as infinite, and the zeros of an adapter that one pass does not use as equal."""
    error = (actual - expected).norm() / expected.norm().clamp_min(1e-12)
    return float(torch.nan_to_num(error, nan=torch.inf))


def _step(device: torch.device, dtype: torch.dtype, k: int) -> str:
    expected = step(tiny_recycler(torch.device("cpu")), k, torch.float32)
    return compare(step(tiny_recycler(device), k, dtype), expected, TOLERANCE[dtype])


def _segmented(device: torch.device, k: int) -> str:
    whole, parts = (step(tiny_recycler(device), k, torch.float32, segmented) for segmented in (False, True))
    return compare(parts, whole, TOLERANCE[torch.float32])


def _compiled(device: torch.device, backend: str) -> str:
    expected = step(tiny_recycler(device), 2, torch.float32)
    model = tiny_recycler(device)
    for block in model.model.blocks():
        block.compile(backend=backend)
    return compare(step(model, 2, torch.float32), expected, TOLERANCE[torch.float32])


def _chunked(device: torch.device, dtype: torch.dtype) -> str:
    """More tokens than one chunk holds, at a vocabulary of the usual size."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(2, 800, 32, generator=generator).to(device)
    weight = torch.randn(49152, 32, generator=generator).mul(0.1).to(device)
    targets = torch.randint(0, 49152, (800,), generator=generator).to(device)

    def run(function: Callable[..., Any]) -> dict[str, Tensor]:
        leaves = [*(state.clone().requires_grad_() for state in states), weight.clone().requires_grad_()]
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
            total, losses = function(leaves[:-1], leaves[-1], targets, LogitTransform())
        total.backward()
        return {"losses": losses} | {
            f"gradient {i}": leaf.grad for i, leaf in enumerate(leaves) if leaf.grad is not None
        }

    return compare(run(FUNCTIONS["chunked"]), run(FUNCTIONS["full logits"]), TOLERANCE[dtype])


def _greedy(model: RecyclerForCausalLM, k: int, **options: Any) -> tuple[Tensor, Tensor]:
    """Prompt and new tokens [2, T], and the new ones' logits [2, N, V]."""
    prompt = random_ids(VOCAB_SIZE, 2, PROMPT).to(model.device)
    output: Any = model.generate(  # type: ignore[operator]
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=NEW_TOKENS, num_passes=k,
        return_dict_in_generate=True, output_logits=True, **options,
    )  # fmt: skip
    return output.sequences, torch.stack(output.logits, dim=1)


@torch.no_grad()
def _generate(device: torch.device, k: int) -> str:
    """Logits of `latent/reference.py` for what was generated, whose largest must be the tokens."""
    model = tiny_recycler(device)
    tokens, logits = _greedy(model, k)

    def body(inputs: Tensor) -> Tensor:
        return model.model.backbone(inputs_embeds=inputs, use_cache=False).last_hidden_state

    embeds = model.model.embed(tokens, None)
    hidden = reference.prefill_then_decode(body, model.model.adapter, embeds, PROMPT, k)
    expected = model.lm_head(hidden)[:, PROMPT - 1 : -1]
    if not torch.equal(expected.argmax(-1), tokens[:, PROMPT:]):
        raise RedCheckError("other tokens")
    return compare({"logits": logits}, {"logits": expected}, TOLERANCE[torch.float32])


@torch.no_grad()
def _static(device: torch.device, backend: str | None) -> str:
    options: dict[str, Any] = {"cache_implementation": "static", **compile_options(device, backend)}
    expected, logits = _greedy(tiny_recycler(device), 2)
    num_graphs = counters["stats"]["unique_graphs"]
    tokens, static_logits = _greedy(tiny_recycler(device), 2, **options)
    if not torch.equal(tokens, expected):
        raise RedCheckError("other tokens")
    if (counters["stats"]["unique_graphs"] > num_graphs) != (backend is not None):
        raise RedCheckError("it was not compiled, or it was and should not")
    return compare({"logits": static_logits}, {"logits": logits}, TOLERANCE[torch.float32])


def compile_options(device: torch.device, backend: str | None) -> dict[str, Any]:
    """For `generate` with a static cache, which compiles by itself on a GPU alone; no `backend`: not even there."""
    if backend is None:
        return {"disable_compile": True}
    config = CompileConfig() if backend == "inductor" else CompileConfig(backend=backend, mode="default")
    config._compile_all_devices = device.type == "cpu"  # type: ignore[assignment]
    return {"compile_config": config}
