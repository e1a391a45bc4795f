"""Counter-based random numbers: a pure function of (seed, sequence index, position), so never of the batch or of history.

Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), vectorised. The key is the 64-bit seed; the counter
is (position, sequence index, 0, 0).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_KEY_STEPS = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_ROUNDS = np.arange(10, dtype=np.uint64)[:, None, None]


def philox4x32(counter: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Ten rounds. counter [4, N], key [2, N]: uint64 arrays that hold 32-bit words. Returns [4, N], words below 2**32.

    The even and the odd counter words travel as two [2, N] arrays, so that a round is five array operations.
    """
    even, odd = counter[0::2], counter[1::2]
    for round_key in (key + _ROUNDS * _KEY_STEPS) & _LOW:
        product = even * _MULTIPLIERS
        even, odd = (product >> _SHIFT)[::-1] ^ odd ^ round_key, (product & _LOW)[::-1]
    return np.stack((even[0], odd[0], even[1], odd[1]))


def uniform(seeds: NDArray[np.uint64], indices: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in [0, 1) with 53 random bits per row.

    seeds [N] (a negative seed enters as its two's complement), indices [N] sequence index within the request, positions [N] absolute
    position of the token being chosen, below 2**32.
    """
    counter = np.zeros((4, len(seeds)), dtype=np.uint64)
    counter[0], counter[1] = positions, indices
    words = philox4x32(counter, np.stack((seeds & _LOW, seeds >> _SHIFT)))
    bits = ((words[0] << _SHIFT) | words[1]) >> np.uint64(11)
    numbers: NDArray[np.float64] = bits.astype(np.float64) * 2.0**-53
    return numbers
