"""The oracle itself, on a backbone that can be worked out by hand."""

import torch

from unspoken.latent.reference import exact_recurrence, parallel_passes, prefill_then_decode

GAIN = 0.5
EMBEDDINGS = torch.tensor([1.0, 10.0, 100.0, 1000.0], dtype=torch.float64).view(1, 4, 1)


def running_sum(inputs: torch.Tensor) -> torch.Tensor:
    """A causal backbone: each state is the sum of all inputs so far."""
    return inputs.cumsum(1)


def adapter(hidden: torch.Tensor) -> torch.Tensor:
    return GAIN * hidden


def values(hidden: torch.Tensor) -> list[float]:
    return hidden.flatten().tolist()


def test_the_recurrence_by_hand():
    """h_t = h_{t-1} + e_t + h_{t-1} / 2: the sum so far, and the state once more by half."""
    assert values(exact_recurrence(running_sum, adapter, EMBEDDINGS)) == [1, 11.5, 117.25, 1175.875]


def test_passes_by_hand():
    first, second = parallel_passes(running_sum, adapter, EMBEDDINGS, 2)
    assert values(first) == [1, 11, 111, 1111]
    # inputs: 1, 10 + 1/2, 100 + 11/2, 1000 + 111/2
    assert values(second) == [1, 11.5, 117, 1172.5]


def test_pass_k_is_exact_at_the_first_k_positions():
    exact = values(exact_recurrence(running_sum, adapter, EMBEDDINGS))
    for k, hidden in enumerate(parallel_passes(running_sum, adapter, EMBEDDINGS, 4), start=1):
        assert values(hidden)[:k] == exact[:k]
        assert k == 4 or values(hidden)[k] != exact[k]


def test_decoding_by_hand():
    """One pass over two tokens, then the recurrence: 111 + 11/2, and 1000 + 116.5/2 more."""
    assert values(prefill_then_decode(running_sum, adapter, EMBEDDINGS, 2, 1)) == [1, 11, 116.5, 1174.75]


def test_decoding_after_a_prompt_of_one_token_is_the_recurrence():
    exact = exact_recurrence(running_sum, adapter, EMBEDDINGS)
    for num_passes in (1, 2):
        assert torch.equal(prefill_then_decode(running_sum, adapter, EMBEDDINGS, 1, num_passes), exact)


def test_a_prefill_of_as_many_passes_as_tokens_is_the_recurrence():
    exact = exact_recurrence(running_sum, adapter, EMBEDDINGS)
    assert torch.equal(prefill_then_decode(running_sum, adapter, EMBEDDINGS, 3, 3), exact)
    assert not torch.equal(prefill_then_decode(running_sum, adapter, EMBEDDINGS, 3, 2), exact)
