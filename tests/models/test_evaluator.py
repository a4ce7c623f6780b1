"""The shapes of the calls of a network on a GPU."""

import pytest

from adlm.models.evaluator import choose_rows


def list_sizes(counts, is_compiled):
    """Return the sizes of calls of so many rows, one after the other."""
    captured = set()
    sizes = []
    for count in counts:
        has_more = bool(captured - {1})
        size = choose_rows(count, is_compiled=is_compiled, has_one=1 in captured, has_more=has_more)
        captured.add(size)
        sizes.append(size)
    return sizes


@pytest.mark.parametrize(
    ("counts", "is_compiled", "sizes"),
    [
        ([32, 5, 1, 2, 1], True, [32, 6, 2, 2, 2]),
        ([32, 5, 1, 2, 1], False, [32, 6, 1, 2, 1]),
        ([1, 1], True, [1, 1]),
        ([1, 32, 1], True, [1, 32, 1]),
    ],
    ids=["compiled", "not compiled", "one row alone", "one row first"],
)
def test_one_row_is_computed_as_two_where_graphs_of_more_rows_exist(counts, is_compiled, sizes):
    assert list_sizes(counts, is_compiled) == sizes


@pytest.mark.parametrize("is_compiled", [False, True])
def test_few_sizes_hold_every_number_of_rows(is_compiled):
    sizes = list_sizes(range(256, 0, -1), is_compiled)
    assert all(size >= count for size, count in zip(sizes, range(256, 0, -1), strict=True))
    assert all(
        size <= 1.25 * count + 1 for size, count in zip(sizes, range(256, 0, -1), strict=True)
    )
    assert len(set(sizes)) <= 26
