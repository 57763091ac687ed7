"""Pause tokens at random places of training windows, as in the original recipe.

    the text      a   b   c   d | e   f             a new document starts at e
    with pauses   a   P   b   c   d   P | e   f
    positions     0   1   2   3   4   5   0   1     a pause is a token with a place of its own
    labels      -100 -100 b   c   d -100 -100 f     a pause is nobody's target; the token behind it is predicted from it

The tokenizer gets one more special token, `PAUSE`, so any method trains with it and a prompt may end with some of them
(`unspoken generate --num-pauses`). Held-out text has none.

Source: Think before you speak (arXiv 2310.02226).
"""

import hashlib
from typing import Any

import numpy as np
import torch

from unspoken.data.frozen_random import frozen_random
from unspoken.data.windows import IGNORE_LABEL, Windows

PAUSE = "<pause>"
_STREAM = 2  # tells the generator of a window's pauses from those of orders


class PausedWindows(Windows):
    """The windows of `text`, each with `num_pauses` pauses behind tokens that are drawn for it, maybe one token twice.
    `seed` decides, with the window's number."""

    def __init__(self, text: Windows, num_pauses: int, pause_id: int, seed: int = 0):
        self.text, self.num_pauses, self.pause_id, self.seed = text, num_pauses, pause_id, seed
        self.sequence_length = text.sequence_length + num_pauses

    def __len__(self) -> int:
        return len(self.text)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = {name: values.numpy() for name, values in self.text[index].items()}
        random = frozen_random(self.seed, index % 2**32, _STREAM)
        behind = np.sort(random.randint(self.text.sequence_length, size=self.num_pauses)) + 1
        documents = np.insert(np.cumsum(window["position_ids"] == 0), behind, 0)
        documents = np.maximum.accumulate(documents)
        starts = np.flatnonzero(np.diff(documents, prepend=-1))
        positions = np.arange(self.sequence_length) - np.repeat(starts, np.diff(starts, append=self.sequence_length))
        return {
            "input_ids": torch.from_numpy(np.insert(window["input_ids"], behind, self.pause_id)),
            "position_ids": torch.from_numpy(positions),
            "labels": torch.from_numpy(np.insert(window["labels"], behind, IGNORE_LABEL)),
        }


def with_pause(tokenizer: Any) -> Any:
    """The tokenizer with the pause among its special tokens; changed in place."""
    tokenizer.add_special_tokens({"extra_special_tokens": [PAUSE]}, replace_extra_special_tokens=False)
    return tokenizer


def pause_id(tokenizer: Any) -> int | None:
    """The id of the pause; None for a tokenizer without one."""
    return tokenizer.get_vocab().get(PAUSE)


def text_vocabulary(tokenizer: Any) -> dict[str, int]:
    """The vocabulary but for the pause, which no text is tokenised into."""
    return {token: number for token, number in tokenizer.get_vocab().items() if token != PAUSE}


def paused_fingerprint(fingerprint: str, num_pauses: int) -> str:
    return hashlib.sha256(f"{fingerprint} {num_pauses} pauses".encode()).hexdigest()
