"""Tests random numbers: the published test vectors, uniformity, and that a number depends on its key alone."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.tensor.sampling.philox import philox4x32, uniform

pytestmark = pytest.mark.pure

VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def draw(count: int, *, seed: int = 7) -> np.ndarray:
    seeds = np.full(count, seed & (2**64 - 1), dtype=np.uint64)
    return uniform(seeds, np.zeros(count, dtype=np.int64), np.arange(count))


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_published_vectors(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Known answers of the Random123 distribution, philox4x32 with 10 rounds."""
    words = philox4x32(np.array([counter, counter], dtype=np.uint64).T, np.array([key, key], dtype=np.uint64).T)
    assert words.T.tolist() == [list(expected)] * 2


def test_numbers_are_uniform_in_the_unit_interval() -> None:
    numbers = draw(200_000)
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    observed = np.bincount((numbers * 256).astype(int), minlength=256)
    chi_square = ((observed - 781.25) ** 2 / 781.25).sum()
    assert chi_square < 330.5, "255 degrees of freedom: above with probability 0.001"


def test_neighbouring_keys_are_uncorrelated() -> None:
    numbers, shifted = draw(100_000), draw(100_000, seed=8)
    for other in (np.roll(numbers, 1), shifted):
        assert abs(np.corrcoef(numbers, other)[0, 1]) < 0.0125, "4 standard errors"


def test_a_number_does_not_depend_on_the_batch() -> None:
    seeds = np.arange(50, dtype=np.uint64) * np.uint64(0x123456789ABCDEF)
    indices, positions = np.arange(50) % 3, np.arange(50) * 31
    together = uniform(seeds, indices, positions)
    order = np.random.default_rng(0).permutation(50)
    assert (uniform(seeds[order], indices[order], positions[order]) == together[order]).all()
    alone = [uniform(seeds[i : i + 1], indices[i : i + 1], positions[i : i + 1])[0] for i in range(50)]
    assert (together == alone).all()


def test_every_part_of_the_key_matters() -> None:
    def one(seed: int, index: int, position: int) -> float:
        return float(uniform(np.array([seed], dtype=np.uint64), np.array([index]), np.array([position]))[0])

    keys = [(seed, index, position) for seed in (1, 2, 1 << 32, 1 << 63) for index in (0, 1) for position in (0, 1)]
    assert len({one(*key) for key in keys}) == len(keys)
