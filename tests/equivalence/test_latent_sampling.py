"""Sampling and beams over latent steps: rows of a batch that stem from one prompt, and go their own ways."""

import pytest
import torch

from tests.equivalence.test_generate import left_padded
from tests.equivalence.test_latent_decoding import NEW_TOKENS, PROMPTS, SCORE_TOLERANCE, greedy, thinking
from tests.families import REPRESENTATIVE
from tests.oracle import adaptive_oracle, close, drawn


@pytest.mark.parametrize("num_return_sequences", [1, 3])
@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_sampling_with_a_seed(name, num_return_sequences):
    model, prompt = thinking(name), PROMPTS[1]
    torch.manual_seed(3)
    ids = model.generate(
        prompt, do_sample=True, top_k=0, max_new_tokens=NEW_TOKENS, num_return_sequences=num_return_sequences
    )
    logits = torch.cat([adaptive_oracle(model, row[:-1].unsqueeze(0))[0] for row in ids])
    torch.manual_seed(3)
    expected = [drawn(logits[:, t]) for t in range(prompt.shape[1] - 1, ids.shape[1] - 1)]
    assert torch.equal(ids[:, prompt.shape[1] :], torch.cat(expected, dim=1))
    assert len({tuple(row) for row in ids.tolist()}) == num_return_sequences


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_the_score_of_a_beam_is_its_log_probability(name):
    """B18. Beams go on from rows of other depths: slots follow their row, and a deeper row may be gone."""
    model, prompt = thinking(name), PROMPTS[0]
    outputs = greedy(
        model,
        prompt,
        num_beams=4,
        num_return_sequences=3,
        length_penalty=0.0,
        output_scores=True,
        return_dict_in_generate=True,
    )
    length = prompt.shape[1]
    for ids, score in zip(outputs.sequences, outputs.sequences_scores):
        log_probs = adaptive_oracle(model, ids[:-1].unsqueeze(0))[0][0, length - 1 :].log_softmax(-1)
        close(score.double(), log_probs.gather(-1, ids[length:].unsqueeze(-1)).sum(), SCORE_TOLERANCE)
    assert any(len(set(row.tolist())) > 1 for row in outputs.beam_indices[:, :NEW_TOKENS])


@pytest.mark.parametrize("name", ["llama_tied", "gemma3_text"])
def test_beams_of_a_padded_batch(name):
    model = thinking(name)
    options = {"num_beams": 3, "return_dict_in_generate": True, "output_scores": True}
    batch = greedy(model, **left_padded(PROMPTS), **options)
    for row, prompt in enumerate(PROMPTS):
        alone = greedy(model, prompt, **options)
        assert torch.equal(batch.sequences[row, -NEW_TOKENS:], alone.sequences[0, -NEW_TOKENS:])
        close(batch.sequences_scores[row], alone.sequences_scores[0], SCORE_TOLERANCE)
