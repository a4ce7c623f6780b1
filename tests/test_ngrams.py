"""The bigram baseline: a distribution everywhere, counted however rows come, better than the unigram on real text."""

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch

from adlm.data.batches import TensorRows
from adlm.data.shards import open_data
from adlm.likelihood import unigram_nll
from bundled import ngrams
from bundled.ngrams import Bigram, count_bigrams, estimate_heldout_nll
from tests.training.runs import data

VOCAB = 7  # of which 5 and 6 never occur, and 4 only at the end of a row


def make_rows(seed: int = 0, count: int = 40, length: int = 9) -> TensorRows:
    """Make padded rows in which a token is mostly followed by the next one."""
    rng = torch.Generator().manual_seed(seed)
    start = torch.randint(4, (count, 1), generator=rng)
    jumps = torch.randint(4, (count, length), generator=rng) * (
        torch.rand(count, length, generator=rng) < 0.3
    )
    tokens = (start + torch.arange(length) + jumps) % 4
    lengths = torch.randint(2, length + 1, (count,), generator=rng)
    tokens[torch.arange(count), lengths - 1] = 4
    tokens[torch.arange(length) >= lengths[:, None]] = 6  # padding: must not be counted
    return TensorRows(tokens, lengths)


TRAIN, VALID = make_rows(), make_rows(seed=1)


def table(model: Bigram) -> np.ndarray:
    before, after = np.divmod(np.arange(VOCAB * VOCAB), VOCAB)
    return model.probability(before, after).reshape(VOCAB, VOCAB)


@pytest.mark.parametrize("chunk", [30, 10**6])
def test_everything_is_counted_except_padding(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngrams, "TOKENS_PER_CHUNK", chunk)
    texts = [row[:n].tolist() for row, n in zip(TRAIN.tokens, TRAIN.lengths, strict=True)]
    pairs, seen = Counter(pair for text in texts for pair in pairwise(text)), []
    model = count_bigrams(TRAIN, VOCAB, on_rows=lambda done, total: seen.append((done, total)))
    assert (len(seen) > 10) == (chunk == 30) and seen[-1] == (40, 40)
    assert {
        divmod(int(code), VOCAB): int(n) for code, n in zip(model.pairs, model.counts, strict=True)
    } == pairs
    assert model.tokens.tolist() == [
        sum(text.count(token) for text in texts) for token in range(VOCAB)
    ]
    assert model.tokens[6] == 0


FEW = [TensorRows(torch.tensor(tokens)) for tokens in ([[0, 1]] * 3, [[0, 1, 0, 2, 0, 3]])]


@pytest.mark.parametrize("rows", [TRAIN, make_rows(count=2), *FEW])
def test_probabilities_are_positive_and_sum_to_one(rows: TensorRows) -> None:
    """After every token, also one that never occurs, and with too little text to estimate discounts."""
    model = count_bigrams(rows, VOCAB)
    assert table(model).sum(1) == pytest.approx(np.ones(VOCAB))
    assert (table(model) > 0).all()
    assert model.unigram.sum() == pytest.approx(1) and (model.unigram > 0).all()
    assert (model.discounts[1:] > 0).all() and (model.discounts <= np.arange(4)).all()


def test_the_formula() -> None:
    """P(w | v) by hand, for a pair that was seen and one that was not."""
    model = count_bigrams(
        TensorRows(torch.tensor([[0, 1, 0, 1, 0, 2]])), 4
    )  # too few for discounts: a half each
    continuation = np.array([1 + 1, 1 + 1, 1 + 1, 0 + 1]) / 7  # 0 behind 1; 1 behind 0; 2 behind 0
    before, after = np.array([0, 0, 0, 3]), np.array([1, 2, 3, 2])
    # 0 was followed three times, by two different tokens; 3 never.
    expected = [
        1.5 / 3 + 1 / 3 * continuation[1],
        0.5 / 3 + 1 / 3 * continuation[2],
        1 / 3 * continuation[3],
    ]
    assert model.probability(before, after) == pytest.approx([*expected, continuation[2]])


def test_discounts_follow_from_counts_of_counts() -> None:
    counts = np.repeat([1, 2, 3, 4, 9], [8, 4, 2, 1, 3])
    model = Bigram(10, np.ones(10, dtype=np.int64), np.arange(len(counts)), counts)
    y = 8 / (8 + 2 * 4)
    expected = [0, 1 - 2 * y * 4 / 8, 2 - 3 * y * 2 / 4, 3 - 4 * y * 1 / 2]
    assert model.discounts == pytest.approx(expected)


@pytest.mark.parametrize("chunk", [30, 10**6])
def test_the_first_token_has_the_unigram_probability_and_ends_can_be_free(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ngrams, "TOKENS_PER_CHUNK", chunk)
    model = count_bigrams(TRAIN, VOCAB)
    tokens, lengths = VALID.tokens.numpy(), VALID.lengths.numpy()
    nats = model.nll(tokens)
    assert nats[:, 0] == pytest.approx(-np.log(model.unigram[tokens[:, 0]]))
    assert nats[:, 1:] == pytest.approx(-np.log(table(model)[tokens[:, :-1], tokens[:, 1:]]))
    valid = np.arange(tokens.shape[1]) < lengths[:, None]
    estimate = estimate_heldout_nll(model.nll, VALID)
    assert estimate.tokens == lengths.sum() and estimate.nll == pytest.approx(nats[valid].mean())
    inner = valid & (np.arange(tokens.shape[1]) < lengths[:, None] - 1)
    inner[:, 0] = False
    free = estimate_heldout_nll(model.nll, VALID, ends_free=True)
    assert free.tokens == estimate.tokens and free.nll == pytest.approx(
        nats[inner].sum() / lengths.sum()
    )
    unigram = estimate_heldout_nll(model.unigram_nll, VALID)
    expected = unigram_nll(torch.from_numpy(model.tokens), VALID.tokens, torch.from_numpy(valid))
    assert unigram.tokens == estimate.tokens and unigram.nll == pytest.approx(expected)


@pytest.mark.parametrize("form", ["wrapped", "documents"])
def test_a_bigram_model_is_better_than_the_unigram_on_real_text(form: str) -> None:
    prepared = open_data(data(form))
    model = count_bigrams(prepared.rows("train"), prepared.vocab_size)
    assert np.array_equal(model.tokens, prepared.counts().numpy())
    valid = prepared.rows("valid")
    bigram, unigram = (
        estimate_heldout_nll(model.nll, valid),
        estimate_heldout_nll(model.unigram_nll, valid),
    )
    assert bigram.tokens == unigram.tokens
    assert bigram.nll < unigram.nll - 5 * unigram.stderr < math.log(prepared.vocab_size)
