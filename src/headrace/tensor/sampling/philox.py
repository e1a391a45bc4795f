"""Counter-based random numbers: a pure function of (seed, sequence index, position, purpose), so never of the batch or of history.

Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), vectorised. The key is the 64-bit seed; the counter
is (position, sequence index, purpose, 0). A replayed, preempted, re-batched or speculated sequence draws what the unbroken run drew.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_ROUNDS = 10


class Purpose(IntEnum):
    """What a number is for. Different purposes at one position are independent."""

    SAMPLE = 0
    ACCEPT = 1
    """Keep a drafted token or not."""
    RESIDUAL = 2
    """Choose the token that replaces a rejected draft."""


def philox4x32(counter: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Ten rounds. counter [N, 4], key [N, 2]: uint64 arrays that hold 32-bit words. Returns [N, 4], words below 2**32."""
    c0, c1, c2, c3 = (counter[:, i] for i in range(4))
    k0, k1 = key[:, 0], key[:, 1]
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> _SHIFT) ^ c1 ^ k0, p1 & _LOW, (p0 >> _SHIFT) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return np.stack((c0, c1, c2, c3), axis=1)


def uniform(
    seeds: NDArray[np.uint64], indices: NDArray[np.int64], positions: NDArray[np.int64], purpose: Purpose = Purpose.SAMPLE
) -> NDArray[np.float64]:
    """One number in [0, 1) with 53 random bits per row.

    seeds [N] (a negative seed enters as its two's complement), indices [N] sequence index within the request, positions [N] absolute
    position of the token being chosen, below 2**32.
    """
    counter = np.zeros((len(seeds), 4), dtype=np.uint64)
    counter[:, 0], counter[:, 1], counter[:, 2] = positions, indices, int(purpose)
    key = np.stack((seeds & _LOW, seeds >> _SHIFT), axis=1)
    words = philox4x32(counter, key)
    bits = ((words[:, 0] << _SHIFT) | words[:, 1]) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53
