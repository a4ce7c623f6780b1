"""Counter-based randomness: the generator's published answers, uniform and independent numbers, no neighbours."""

import itertools

import pytest
import torch

from adlm.diffusion.rng import CounterRng, Purpose, philox, uniform_pair

FULL = 0xFFFFFFFF
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)  # its digits


def words(*values):
    return tuple(torch.tensor([value]) for value in values)


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((FULL,) * 4, (FULL,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (PI[:4], PI[4:], (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
)
def test_known_answers_of_random123(counter, key, answer):
    assert tuple(int(word) for word in philox(words(*counter), words(*key))) == answer


def test_numbers_are_the_words_in_their_order():
    """The first 53 of 64 bits of each half of the output, at the documented counter."""
    seed, row, step, position = 0x123456789ABC, 0x7FEDCBA98, 77, 5
    pair = uniform_pair(*(torch.tensor(x) for x in (seed, row, step, position)), Purpose.MASK)
    counter = (position, step, row & FULL, ((row >> 32) & 0xFFFFFF) << 8 | int(Purpose.MASK))
    w = [int(x) for x in philox(words(*counter), words(seed & FULL, seed >> 32))]
    for number, (high, low) in zip(pair, ((w[0], w[1]), (w[2], w[3])), strict=True):
        assert float(number) == ((high << 32 | low) >> 11) / 2**53 and number.dtype == torch.float64


def axes():
    """Many numbers along each argument, the others standing still."""
    many, one = torch.arange(40_000), torch.tensor(3)
    for place, name in enumerate(("seed", "row", "step", "position")):
        yield name, uniform_pair(*(many if i == place else one for i in range(4)), Purpose.SAMPLE)
    yield "high row", uniform_pair(one, many << 32, one, one, Purpose.SAMPLE)
    yield "high seed", uniform_pair(many << 32, one, one, one, Purpose.SAMPLE)


@pytest.mark.parametrize("axis", ["seed", "row", "step", "position", "high row", "high seed"])
def test_numbers_are_uniform_along_every_axis(axis):
    """Chi-square over 64 bins below its 0.1 % point, for either number; neighbours and partners uncorrelated."""
    limit, pair = 4 / 40_000**0.5, dict(axes())[axis]
    for u in pair:
        counts = torch.histc(u, 64, 0, 1)
        statistic = float(((counts - 625) ** 2 / 625).sum())
        assert 30 < statistic < 104, statistic  # 63 degrees of freedom
        assert u.unique().numel() == u.numel()
        assert abs(float(torch.corrcoef(torch.stack([u[:-1], u[1:]]))[0, 1])) < limit
    assert abs(float(torch.corrcoef(torch.stack(pair))[0, 1])) < limit


def test_no_two_axes_or_purposes_share_numbers():
    """All purposes, and all axes against each other: uncorrelated, and nothing occurs twice."""
    one, many = torch.tensor(3), torch.arange(10_000)
    streams = [uniform_pair(one, one, many, one, int(purpose))[0] for purpose in Purpose]
    # The axes meet where all arguments are 3, which is left out.
    streams += [numbers[10:10_010] for _, pair in axes() for numbers in pair]
    streams.pop(int(Purpose.SAMPLE))  # the axis of steps again
    for a, b in itertools.combinations(streams, 2):
        assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 5 / 100
    together = torch.cat(streams)
    assert together.unique().numel() == together.numel()


def test_a_rows_numbers_do_not_depend_on_the_batch():
    numbers = torch.tensor([5, 0, 2**40 + 5, 17])
    whole = CounterRng.from_seed(9, numbers)
    for purpose in Purpose:
        expected = whole.uniform(4, 11, purpose)
        for rows in ([0], [3], [2, 1], [3, 2, 1, 0]):
            part = CounterRng.from_seed(9, numbers[rows]).uniform(4, 11, purpose)
            assert torch.equal(part, expected[rows])
        assert torch.equal(whole.uniform(4, 30, purpose)[:, :11], expected)  # nor on the length
    assert not torch.equal(
        whole.uniform(4, 11, Purpose.MASK)[0], whole.uniform(4, 11, Purpose.MASK)[2]
    )
    counted, numbered = CounterRng.from_seed(9, 3), CounterRng.from_seed(9, torch.arange(3))
    assert torch.equal(counted.uniform(0, 2, Purpose.TIME), numbered.uniform(0, 2, Purpose.TIME))


def test_rows_and_steps_are_their_own():
    """Rows with seeds of their own have the numbers of each seed, a block of steps those of each step."""
    seeds, rows = torch.tensor([1, 2, 1]), torch.tensor([7, 7, 8])
    mixed, steps = CounterRng(seeds, rows), CounterRng(seeds, rows).pairs(10, 6, 4, Purpose.SAMPLE)
    for i in range(3):
        alone = CounterRng.from_seed(int(seeds[i]), rows[i : i + 1]).uniform(3, 5, Purpose.SAMPLE)
        assert torch.equal(mixed.uniform(3, 5, Purpose.SAMPLE)[i], alone[0])
    for i in range(6):
        one, other = mixed.pairs(10 + i, 1, 4, Purpose.SAMPLE)
        assert torch.equal(steps[0][i], one[0]) and torch.equal(steps[1][i], other[0])
        assert torch.equal(mixed.uniform(10 + i, 4, Purpose.SAMPLE), one[0])


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_seeds_out_of_range_are_refused(seed):
    with pytest.raises(ValueError, match="seed must be between 0"):
        CounterRng.from_seed(seed, 1)


def test_numbers_that_are_made_ahead_are_those_of_each_step():
    """Also of rows that have begun apart, and where a number that was handed out has been changed."""
    seed, rows = torch.tensor([3, 5, 3]), torch.tensor([0, 0, 7])
    for starts in ([4, 4, 4], [4, 20, 36], [4, 5, 6]):
        start = torch.tensor(starts)
        ahead = CounterRng(seed, rows, start, ahead=8)
        plain = CounterRng(seed, rows, start)
        assert ahead.is_ahead(5) and not plain.is_ahead(5) and not ahead.is_ahead(1000)
        for step in (0, 1, 2, 30, 3, 1, 0):
            for purpose in (Purpose.SAMPLE, Purpose.ORDER):
                made = ahead.pairs(step, 1, 5, purpose)
                expected = plain.pairs(step, 1, 5, purpose)
                assert torch.equal(made[0], expected[0]) and torch.equal(made[1], expected[1])
                made[0].zero_()
