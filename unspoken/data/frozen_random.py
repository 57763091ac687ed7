"""What is drawn the same under every version of numpy and of Python: orders, and shares by a hash."""

import hashlib

import numpy as np

from unspoken.errors import UsageError

MAX_SEED = 2**32 - 1


def check_seed(seed: int) -> None:
    if not 0 <= seed <= MAX_SEED:
        raise UsageError(f"seed is {seed}; it must lie in 0 .. {MAX_SEED}")


def frozen_random(*numbers: int) -> np.random.RandomState:
    """The generator of these numbers, each in 0 .. MAX_SEED.

    RandomState's streams are frozen, unlike those of newer generators: a run can be resumed under another numpy.
    """
    return np.random.RandomState(np.array(numbers, dtype=np.uint32))


def hash_share(data: bytes) -> float:
    """A number in [0, 1) for each `data`, the same everywhere: for who falls on which side, or what a step does."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") / 2**64
