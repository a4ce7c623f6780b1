"""Anchor rules against loops that say what they mean."""

import math
from collections import Counter

import pytest
import torch

from adlm.diffusion import anchors
from adlm.diffusion.anchors import (
    anchor_weight,
    apply_scope,
    listed_tokens,
    random_positions,
    rare_in_sequence,
)
from adlm.diffusion.masking import ForwardProcess
from tests.world import random_tokens

VOCAB = 15
TOKENS = random_tokens(6, 20, VOCAB)
VALID = (
    torch.arange(20) < random_tokens(6, 1, 20) + 1
)  # rows of different lengths: True where there is text


def loop_counts(tokens, valid):
    counts = []
    for row, ok in zip(tokens.tolist(), valid.tolist(), strict=True):
        seen = Counter(token for token, is_text in zip(row, ok, strict=True) if is_text)
        counts.append([seen[token] for token in row])
    return torch.tensor(counts)


@pytest.mark.parametrize("seed", range(4))
def test_counts_by_a_loop(seed):
    tokens = random_tokens(6, 20, VOCAB, seed)
    assert torch.equal(anchors.count_in_row(tokens), loop_counts(tokens, torch.ones_like(VALID)))
    assert torch.equal(
        anchors.count_in_row(tokens, VALID)[VALID], loop_counts(tokens, VALID)[VALID]
    )
    assert torch.equal(
        anchors.count_in_row(tokens.t().contiguous().t()), anchors.count_in_row(tokens)
    )


@pytest.mark.parametrize("max_count", [0, 1, 2, 20])
def test_rare_by_count(max_count):
    expected = (loop_counts(TOKENS, VALID) <= max_count) & VALID
    assert torch.equal(rare_in_sequence(max_count)(TOKENS, VALID), expected)
    if max_count in (0, 20):
        assert rare_in_sequence(max_count)(TOKENS, None).all() == (max_count == 20)


@pytest.mark.parametrize("max_fraction", [0.05, 0.1, 0.5])
def test_rare_by_share_of_the_row(max_fraction):
    """The share is of the row's own text, however it is padded."""
    expected = (loop_counts(TOKENS, VALID) <= max_fraction * VALID.sum(-1, keepdim=True)) & VALID
    assert torch.equal(rare_in_sequence(max_fraction=max_fraction)(TOKENS, VALID), expected)
    # At length 20, at most 10 % is at most two.
    assert torch.equal(
        rare_in_sequence(max_fraction=0.1)(TOKENS, None), rare_in_sequence(2)(TOKENS, None)
    )


@pytest.mark.parametrize("max_count", [0, 1, 5])
def test_frequent_tokens_are_those_that_are_not_rare(max_count):
    frequent = anchors.frequent_in_sequence(max_count)(TOKENS, VALID)
    assert torch.equal(frequent, ~rare_in_sequence(max_count)(TOKENS, VALID) & VALID)


def test_rare_in_the_corpus():
    counts = torch.tensor([70, 20, 9, 1])
    tokens = torch.tensor([[0, 1, 2, 3, 3, 0]])
    assert anchors.rare_in_corpus(counts, 0.1)(tokens, None).tolist() == [
        [False, False, True, True, True, False]
    ]
    valid = torch.tensor([[True, True, True, True, False, False]])
    assert anchors.rare_in_corpus(counts, 0.09)(tokens, valid).tolist() == [
        [False, False, True, True, False, False]
    ]


@pytest.mark.parametrize("fraction", [0.0, 0.15, 0.5, 1.0])
def test_tf_idf_picks_its_share_of_the_highest_scores(fraction):
    documents, document_counts = 100, torch.arange(VOCAB) * 7
    rule, everything = anchors.tf_idf(document_counts, documents, fraction), torch.ones_like(VALID)
    idf = [math.log((1 + documents) / (1 + count)) + 1 for count in document_counts.tolist()]
    for valid in (everything, VALID):
        is_anchor = rule(TOKENS, valid)
        for row, length, chosen in zip(
            TOKENS.tolist(), valid.sum(-1).tolist(), is_anchor.tolist(), strict=True
        ):
            seen = Counter(row[:length])
            scores = [seen[token] * idf[token] for token in row[:length]]
            best = sorted(range(length), key=lambda i, scores=scores: (-round(scores[i], 9), i))
            share = round(fraction * length)
            assert {i for i, is_chosen in enumerate(chosen) if is_chosen} == set(best[:share])
    assert torch.equal(rule(TOKENS, None), rule(TOKENS, everything))


def test_listed_and_all_tokens():
    assert torch.equal(listed_tokens([3, 7], VOCAB)(TOKENS, None), (TOKENS == 3) | (TOKENS == 7))
    assert not listed_tokens([], VOCAB)(TOKENS, None).any()
    assert anchors.every_token()(TOKENS, None).all()
    assert torch.equal(anchors.every_token()(TOKENS, VALID), VALID)


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.6, 1.0])
def test_random_anchors_are_a_share_of_all_positions(fraction):
    tokens = random_tokens(400, 100, 1000)
    found = random_positions(fraction, seed=2)(tokens, None).double()
    error = math.sqrt(fraction * (1 - fraction) / found.numel())
    assert abs(float(found.mean()) - fraction) <= 4 * error
    # No position and no row is preferred, and rows are independent of each other.
    per_position, per_row = found.mean(0), found.mean(1)
    assert (per_position - fraction).abs().max() <= 5 * error * 10
    assert (per_row - fraction).abs().max() <= 5 * error * 20
    if 0 < fraction < 1:
        assert float((found[0] != found[1]).double().mean()) == pytest.approx(
            2 * fraction * (1 - fraction), abs=0.2
        )


def test_random_anchors_belong_to_the_row():
    """Wherever the row stands and whoever its neighbours are; another seed or another text has others."""
    rule, order = random_positions(0.5, seed=3), torch.tensor([4, 0, 5, 1, 3, 2])
    whole = rule(TOKENS, None)
    assert torch.equal(rule(TOKENS[order], None), whole[order])
    assert torch.equal(rule(TOKENS[2:3], None), whole[2:3])
    assert not torch.equal(random_positions(0.5, seed=4)(TOKENS, None), whole)
    changed = TOKENS.clone()
    changed[0, 5] = (changed[0, 5] + 1) % VOCAB
    assert not torch.equal(rule(changed, None)[0], whole[0])
    # 3·x[0] + 1·x[1] and the like: rows that a linear hash of tokens and positions cannot tell apart
    rows = torch.zeros(3, 24, dtype=torch.long)
    rows[range(3), range(3)] = torch.tensor([15, 5, 3])
    assert len({tuple(row) for row in rule(rows, None).tolist()}) == 3


def test_scopes_partition_the_anchors():
    rng = torch.Generator().manual_seed(0)
    is_anchor, is_hidden = (torch.rand(5, 30, generator=rng) < 0.5 for _ in range(2))
    everything, hidden, visible = (
        apply_scope(is_anchor, is_hidden, scope) for scope in anchors.ANCHOR_SCOPES
    )
    assert torch.equal(everything, is_anchor)
    assert torch.equal(hidden | visible, everything) and not (hidden & visible).any()
    assert (is_hidden[hidden]).all() and not is_hidden[visible].any()


def test_the_ramp_of_gamma():
    assert anchor_weight(0, 1000) == 0
    assert anchor_weight(1, 1000) == 1e-3
    assert anchor_weight(3, 1000) == anchor_weight(1000, 1000) == 3e-3
    assert anchor_weight(900, 1000, peak=2.0) == 0.9


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (
            lambda: listed_tokens([2, VOCAB, -1], VOCAB),
            r"\[15, -1\] are outside the vocabulary: use ids from 0 to 14",
        ),
        (
            lambda: ForwardProcess(0, anchor_scope="hidden"),
            "unknown anchor_scope 'hidden': expected one of all, mask",
        ),
        (lambda: rare_in_sequence(), "max_count is None and max_fraction None: give one of them"),
        (lambda: rare_in_sequence(2, 0.1), "max_count is 2 and max_fraction 0.1: give one of them"),
    ],
)
def test_wrong_arguments_are_refused(use, message):
    with pytest.raises(ValueError, match=message):
        use()
