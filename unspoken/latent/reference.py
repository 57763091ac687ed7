"""Slow, sequential, obviously right: the oracle each fast path is tested against.

A backbone here is a plain function `inputs [B, t, d] -> top hidden states [B, t, d]` over a prefix, causal, without
a cache and without padding. Batches with pads or packed documents are compared by running each document alone.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from unspoken.latent.recycle import GatedAdapter

Backbone = Callable[[Tensor], Tensor]
Adapter = Callable[[Tensor], Tensor]
GridBackbone = Callable[[Tensor, Tensor, Tensor], Tensor]  # inputs [1, N, d], times [N], visible [N, N] -> [1, N, d]
Gate = Callable[[Tensor, int], Tensor]  # z^(k) [1, 1, d], k -> the probability of going on, a scalar


def entering(adapter: Any, embedding: Tensor, state: Tensor) -> Tensor:
    """A token's input: its embedding and A(h), or FBT's product of the two. [B, t, d]"""
    return adapter(state, embedding) if isinstance(adapter, GatedAdapter) else embedding + adapter(state)


def exact_recurrence(backbone: Backbone, adapter: Adapter, embeddings: Tensor) -> Tensor:
    """Recycler's true recurrence, one position at a time: h_t = T(Emb(x_t) + A(h_{t-1})), h before the first = none.

    embeddings [B, T, d] -> hidden states [B, T, d]. Source: Recycler Eq. 3.
    """
    inputs = embeddings[:, :1]
    hidden = [backbone(inputs)[:, -1:]]
    for t in range(1, embeddings.shape[1]):
        inputs = torch.cat([inputs, entering(adapter, embeddings[:, t : t + 1], hidden[-1])], dim=1)
        hidden.append(backbone(inputs)[:, -1:])
    return torch.cat(hidden, dim=1)


def parallel_passes(backbone: Backbone, adapter: Adapter, embeddings: Tensor, num_passes: int) -> list[Tensor]:
    """The k-pass approximation: pass i adds A of pass i-1's state of the position before.

    embeddings [B, T, d] -> k hidden states [B, T, d]. Pass k is exact at the first k positions. Source: Recycler Eq. 4.
    """
    passes = [backbone(embeddings)]
    for _ in range(num_passes - 1):
        inputs = [embeddings[:, :1]]
        for t in range(1, embeddings.shape[1]):
            inputs.append(entering(adapter, embeddings[:, t : t + 1], passes[-1][:, t - 1 : t]))
        passes.append(backbone(torch.cat(inputs, dim=1)))
    return passes


def prefill_then_decode(
    backbone: Backbone, adapter: Adapter, embeddings: Tensor, prompt_length: int, num_prefill_passes: int
) -> Tensor:
    """What decoding computes: k passes over the prompt, then the recurrence, without any cache.

    The prompt's inputs are those of its last pass, so later positions attend to what that pass made of them.
    embeddings [B, T, d] -> hidden states [B, T, d]. Source: Recycler section 2.2.3.
    """
    inputs = embeddings[:, :prompt_length]
    hidden = backbone(inputs)
    for _ in range(num_prefill_passes - 1):
        first = embeddings[:, :1]
        rest = entering(adapter, embeddings[:, 1:prompt_length], hidden[:, :-1])
        inputs = torch.cat([first, rest], dim=1)
        hidden = backbone(inputs)
    for t in range(prompt_length, embeddings.shape[1]):
        inputs = torch.cat([inputs, entering(adapter, embeddings[:, t : t + 1], hidden[:, -1:])], dim=1)
        hidden = torch.cat([hidden, backbone(inputs)[:, -1:]], dim=1)
    return hidden


@dataclass
class Grid:
    """Every entry so far, in the order in which decoding makes them: token by token, step by step."""

    inputs: list[Tensor] = field(default_factory=list)  # [1, 1, d]
    times: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)

    def visible(self) -> Tensor:
        """bool [N, N]: (t, k) reads (u, j) if u <= t and j <= k."""
        size = len(self.times)
        return torch.tensor(
            [
                [self.times[j] <= self.times[i] and self.steps[j] <= self.steps[i] for j in range(size)]
                for i in range(size)
            ]
        )

    def run(self, backbone: GridBackbone, entry: Tensor, time: int, step: int) -> Tensor:
        """Add an entry; the state that the backbone makes of it, everything run anew: [1, 1, d]."""
        self.inputs.append(entry)
        self.times.append(time)
        self.steps.append(step)
        return backbone(torch.cat(self.inputs, dim=1), torch.tensor(self.times), self.visible())[:, -1:]


def one_token(
    grid: Grid,
    backbone: GridBackbone,
    gate: Gate,
    entry: Tensor,
    time: int,
    max_latent_steps: int,
    threshold: float,
) -> tuple[list[Tensor], list[Tensor]]:
    """All steps of the next token, whose input is `entry` [1, 1, d]: their states [1, 1, d], and their weights."""
    states: list[Tensor] = []
    weights: list[Tensor] = []
    reach = entry.new_ones(())
    for step in range(1, max_latent_steps + 2):
        states.append(grid.run(backbone, entry, time, step))
        next_reach = reach * gate(states[-1], step) if step <= max_latent_steps else reach * 0.0
        if step > max_latent_steps or next_reach < threshold:
            weights.append(reach)
            break
        weights.append(reach - next_reach)
        reach, entry = next_reach, states[-1]
    return states, weights


def mixed(states: list[Tensor], weights: list[Tensor]) -> Tensor:
    """z_final [1, 1, d]."""
    return torch.stack([w * z for w, z in zip(weights, states, strict=True)]).sum(0)


def latent_steps(
    backbone: GridBackbone,
    gate: Gate,
    embeddings: Tensor,
    max_latent_steps: int,
    threshold: float,
    adapter: Adapter | None = None,
) -> tuple[Tensor, list[list[Tensor]], list[list[Tensor]]]:
    """Adaptive latent CoT as decoding runs it: one token, one step at a time, everything run anew for each.

    embeddings [1, T, d] -> (z_final [1, T, d]; for each token the states [1, 1, d] of the steps that it took; and their
    weights). With an `adapter`, the z_final of the token before is recycled into each token's input. Source: Adaptive
    latent CoT sections 3.2 to 3.5; Recycler Eq. 3.
    """
    grid = Grid()
    finals: list[Tensor] = []
    all_states: list[list[Tensor]] = []
    all_weights: list[list[Tensor]] = []
    for t in range(embeddings.shape[1]):
        entry = embeddings[:, t : t + 1]
        if adapter is not None and t > 0:
            entry = entering(adapter, entry, finals[-1])
        states, weights = one_token(grid, backbone, gate, entry, t, max_latent_steps, threshold)
        finals.append(mixed(states, weights))
        all_states.append(states)
        all_weights.append(weights)
    return torch.cat(finals, dim=1), all_states, all_weights


def looped(
    stack: Backbone,
    norm: Callable[[Tensor], Tensor],
    embeddings: Tensor,
    num_loops: int,
    norm_between_loops: bool = False,
    inject_input: bool = False,
) -> Tensor:
    """The whole stack (without its final norm) several times over. embeddings [B, T, d] -> states [B, T, d]."""
    hidden = embeddings
    for loop in range(num_loops):
        inputs = hidden + embeddings if inject_input and loop > 0 else hidden
        hidden = stack(inputs)
        if norm_between_loops:
            hidden = norm(hidden)
    return hidden if norm_between_loops else norm(hidden)


def pondering(
    backbone: Backbone,
    predict: Callable[[Tensor], Tensor],
    table: Tensor,
    embeddings: Tensor,
    num_ponder_steps: int,
    accumulate: bool = False,
) -> Tensor:
    """PonderLM: the mean of `table` [V, d] under the prediction [B, T, V] of each run is added to the next one's input.

    embeddings [B, T, d] -> states of the last run [B, T, d]. Source: PonderLM (arXiv 2505.20674).
    """
    inputs = embeddings
    for _ in range(num_ponder_steps):
        probabilities = predict(backbone(inputs)).softmax(-1)
        mean = torch.stack([p @ table for p in probabilities.flatten(0, 1)]).view_as(embeddings)
        inputs = (inputs if accumulate else embeddings) + mean
    return backbone(inputs)


def paused(backbone: GridBackbone, embeddings: Tensor, pause: Tensor, num_pauses: int) -> Tensor:
    """Slots with the input `pause` [d] after every token, at its position; each slot sees all before it.

    embeddings [1, T, d] -> states of each token's last slot [1, T, d].
    """
    return interleaved(backbone, [embeddings, *[pause.expand_as(embeddings)] * num_pauses])[-1]


def interleaved(backbone: GridBackbone, stages: list[Tensor]) -> list[Tensor]:
    """The states of several slots a token, [1, T, d] for each stage, in one causal sequence: x_1 z_1 x_2 z_2 ..."""
    inputs, times = [], []
    for t in range(stages[0].shape[1]):
        inputs += [stage[0, t] for stage in stages]
        times += [t] * len(stages)
    visible = torch.ones(len(times), len(times), dtype=torch.bool).tril()
    states = backbone(torch.stack(inputs)[None], torch.tensor(times), visible)
    return [states[:, i :: len(stages)] for i in range(len(stages))]


def refined_thoughts(
    backbone: GridBackbone, embeddings: Tensor, num_thoughts: int, num_refinements: int
) -> tuple[Tensor, list[Tensor]]:
    """PonderLM-2's forward over many tokens. embeddings [1, T, d] -> states of the last slots, and what entered each.

    Source: PonderLM-2 (arXiv 2509.23184).
    """
    stages = [embeddings]
    for _ in range(num_thoughts):
        stages.append(interleaved(backbone, stages)[-1])
    for _ in range(num_refinements):
        stages = [embeddings, *interleaved(backbone, stages)[:-1]]
    return interleaved(backbone, stages)[-1], stages


def thoughts(
    backbone: GridBackbone, embeddings: Tensor, num_thoughts: int, prompt: list[Tensor] | None = None
) -> Tensor:
    """PonderLM-2 as decoding runs it: each slot after all slots before it. [1, T, d] -> states of the last slots.

    prompt: what entered the slots of the first tokens, for each stage [1, P, d]; they are left as they are.
    """
    num_slots = 1 + num_thoughts
    num_read = 0 if prompt is None else prompt[0].shape[1]
    inputs = [stage[0, t] for t in range(num_read) for stage in prompt or ()]
    times = [t for t in range(num_read) for _ in range(num_slots)]
    for t in range(num_read, embeddings.shape[1]):
        entering = embeddings[0, t]
        for _ in range(num_slots):
            inputs.append(entering)
            times.append(t)
            visible = torch.ones(len(times), len(times), dtype=torch.bool).tril()
            states = backbone(torch.stack(inputs)[None], torch.tensor(times), visible)
            entering = states[0, -1]
    return states[:, num_thoughts::num_slots]


def exits(states: list[Tensor], gates: list[Tensor]) -> list[Tensor]:
    """The probability of exiting after each loop. states: N of [B, T, d]; gates: N - 1 of [B, T]. Source: Ouro."""
    left = torch.ones_like(states[0][..., 0])
    found = []
    for gate in gates:
        found.append(left * gate)
        left = left - found[-1]
    return [*found, left]


def recursions(
    first: Backbone,
    middle: GridBackbone,
    last: Backbone,
    embeddings: Tensor,
    num_recursions: int,
    choose: Callable[[Tensor], tuple[int, Tensor]] | None = None,
    gate: Callable[[Tensor, int], Tensor] | None = None,
    scale: float = 1.0,
    shares_keys: bool = False,
) -> tuple[Tensor, list[int]]:
    """Mixture-of-Recursions as decoding runs it: one token, one recursion at a time, everything run anew for each.

    embeddings [1, T, d] -> (states [1, T, d], each token's depth). Token choice: `choose`, what enters the middle
    [1, 1, d] -> the depth and the output's weight. Expert choice, not by capacity: `gate`, a state and a recursion ->
    g, which takes the token where it is above a half (recursion 1 takes all) and weighs its output, times `scale`.
    """
    entering, leaving, depths = first(embeddings), [], []
    inputs: list[Tensor] = []
    places: list[tuple[int, int]] = []  # token and recursion

    def run(state: Tensor, time: int, recursion: int) -> Tensor:
        inputs.append(state)
        places.append((time, recursion))
        visible = [[u <= t and j == (1 if shares_keys else r) for u, j in places] for t, r in places]
        times = torch.tensor([t for t, _ in places])
        return middle(torch.cat(inputs, dim=1), times, torch.tensor(visible))[:, -1:]

    for time in range(embeddings.shape[1]):
        before = state = entering[:, time : time + 1]
        if choose is not None:
            depth, weight = choose(before)
            for recursion in range(1, depth + 1):
                state = run(state, time, recursion)
            state = before + weight * state
        else:
            assert gate is not None
            depth = 0
            while depth < num_recursions and ((opening := gate(state, depth + 1)) > 0.5 or depth == 0):
                depth += 1
                state = state + scale * opening * run(state, time, depth)
        leaving.append(state)
        depths.append(depth)
    return last(torch.cat(leaving, dim=1)), depths
