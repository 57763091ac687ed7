"""Who may attend to whom on the grid of positions and latent steps.

    entry (t, k)    what token t's k-th run of the backbone wrote: keys and values at step k
    query (t, k)    reads entry (u, j)   if  u <= t  and  j <= k

          k=3 |  .  .  .          (t=2, k=2) reads all that is marked x: no token after it, no step above its own,
          k=2 |  x  x  x          also where an earlier token has gone deeper.
          k=1 |  x  x  x  .
              +------------ t     So all tokens of a step run in parallel, and a step never waits for a deeper one.

Several steps of a token share its position. Packed documents do not see each other at any step; a sliding window
counts tokens, whatever the number of entries between them.

Source: Adaptive latent CoT section 3.2.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS


@dataclass
class Entries:
    """Places on the grid, [B, N] each: column in the sequence, latent step (0: an entry that nobody reads, a pad or a
    gap), document (None: one a row)."""

    times: Tensor
    steps: Tensor
    documents: Tensor | None = None

    def __len__(self) -> int:
        return self.times.shape[1]

    def rows(self, rows: Tensor | None) -> "Entries":
        """Some of the rows; all for None."""
        if rows is None:
            return self
        return Entries(self.times[rows], self.steps[rows], None if self.documents is None else self.documents[rows])


def joined(parts: list[Entries]) -> Entries:
    """One after the other."""
    documents = [part.documents for part in parts]
    return Entries(
        torch.cat([part.times for part in parts], dim=1),
        torch.cat([part.steps for part in parts], dim=1),
        None if None in documents else torch.cat(documents, dim=1),  # type: ignore[arg-type]
    )


def visible(entries: Entries, num_queries: int, step: int, window: int | None = None, lowest: int = 1) -> Tensor:
    """bool [B, Q, N]: what the last Q entries, which are of `step`, read of all N: steps from the `lowest` to theirs.

    An entry always reads itself, so that no query is without a key: not a pad either, nor the filling of a short row.
    """
    queries = slice(len(entries) - num_queries, None)
    times = entries.times[:, queries].unsqueeze(-1)
    is_in_reach = (entries.steps >= lowest) & (entries.steps <= step)
    seen = (entries.times.unsqueeze(1) <= times) & is_in_reach.unsqueeze(1)
    if window is not None:
        seen &= entries.times.unsqueeze(1) > times - window
    if entries.documents is not None:
        seen &= entries.documents.unsqueeze(1) == entries.documents[:, queries].unsqueeze(-1)
    # A query that is no entry reads itself alone: what lies in the row is not there for it.
    seen &= (entries.steps[:, queries] > 0).unsqueeze(-1)
    itself = torch.eye(num_queries, dtype=torch.bool, device=times.device)
    seen[:, :, queries] |= itself
    return seen


def visible_first_steps(entries: Entries, queries: Entries, window: int | None = None) -> Tensor:
    """bool [B, Q, N]: what queries of later steps read where they read keys of first steps alone, their own too.

    entries: those of all first steps, one a column.
    """
    seen = visible(joined([entries, queries]), len(queries), 1, window)[:, :, : len(entries)]
    return seen | (entries.times.unsqueeze(1) == queries.times.unsqueeze(-1))  # what fills a short row reads that alone


def mask_function(text_config: PreTrainedConfig) -> Callable:
    """What makes masks for the backbone's attention.

    Raises:
        ValueError: the attention implementation takes no mask of its own (flash attention).
    """
    implementation = text_config._attn_implementation or "eager"
    if "flash" in implementation or implementation not in ALL_MASK_ATTENTION_FUNCTIONS:
        raise ValueError(
            f"attention {implementation!r} cannot keep runs of a token apart, which needs a mask of its own; use "
            'attn_implementation="sdpa"'
        )
    return ALL_MASK_ATTENTION_FUNCTIONS[implementation]


def grid_masks(
    text_config: PreTrainedConfig, entries: Entries, num_queries: int, step: int, dtype: torch.dtype
) -> Tensor | dict[str, Tensor]:
    """`visible` in the form that the backbone's attention takes."""
    return attention_masks(text_config, lambda window: visible(entries, num_queries, step, window), dtype)


def attention_masks(
    text_config: PreTrainedConfig, seen_within: Callable[[int | None], Tensor], dtype: torch.dtype
) -> Tensor | dict[str, Tensor]:
    """What queries see, bool [B, Q, N] for a window, as the backbone's attention takes it: one mask, or one for each
    type of its layers."""
    make = mask_function(text_config)

    def mask(window: int | None) -> Tensor:
        seen = seen_within(window)
        return make(
            batch_size=len(seen),
            q_length=seen.shape[1],
            kv_length=seen.shape[2],
            mask_function=lambda batch, head, query, key: seen[batch, query, key],
            allow_is_causal_skip=False,
            dtype=dtype,
            device=seen.device,
        )

    window = getattr(text_config, "sliding_window", None)
    if (types := getattr(text_config, "layer_types", None)) is None:
        return mask(window)
    return {kind: mask(window if kind == "sliding_attention" else None) for kind in set(types)}
