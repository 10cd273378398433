import numpy as np

from moelib.data.hashing import random_bits, random_permutation, random_uniform


def test_bits_are_those_of_splitmix64():
    # The first outputs of the published generator from state 0.
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert random_bits(3).tolist() == expected


def test_uniform_numbers_fill_the_unit_interval():
    uniform = random_uniform(100_000, 1, 2)
    counts = np.histogram(uniform, bins=10, range=(0, 1))[0]
    assert counts.sum() == 100_000
    assert abs(counts - 10_000).max() < 500  # Five standard deviations.


def test_permutation_is_one_and_depends_on_every_seed():
    orders = [random_permutation(1000, *seeds) for seeds in ((0, 1), (1, 0), (0, 1, 0), (-1, 1))]
    assert all(np.array_equal(np.sort(order), np.arange(1000)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    assert np.array_equal(orders[0], random_permutation(1000, 0, 1))
