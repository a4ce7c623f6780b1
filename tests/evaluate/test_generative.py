"""Gen-PPL: the authors' arithmetic, the two conventions about ends, errors of estimates that are real."""

import math

import numpy as np
import pytest
import torch

from adlm.evaluate.generative import aggregated, counted, gen_ppl_of, generative_perplexity
from adlm.evaluate.tallies import ratio
from adlm.evaluate.verdicts import judged, token_nats
from tests.evaluate.small_judges import END, causal, documents
from tests.goldens import arrays

TEXTS = [document[:120] for document in documents()[:9]]


def test_gen_ppl_is_the_authors() -> None:
    """Their judge's logits are given; targets are all tokens but the first."""
    golden, eos = arrays("generation_metrics"), 63
    nats = token_nats(golden["eval_logits"], golden["tokens"]).numpy()
    is_counted = [counted(row, eos)[1:] for row in golden["tokens"].numpy()]
    assert (np.stack(is_counted) == golden["token_mask"].numpy()).all()
    found = aggregated(list(nats), is_counted, [20] * 4)
    assert found.value == pytest.approx(float(golden["gen_ppl"]), rel=1e-5)
    assert found.tokens == int(golden["token_mask"].sum())


def test_which_tokens_count() -> None:
    row = [5, 9, 1, 9, 9, 2]
    assert counted(row, 9).tolist() == [True, True, True, False, False, True]  # the lineage's
    assert counted(row, 9, until_eos=True).tolist() == [True, True, False, False, False, False]
    assert counted(row, 3).all() and counted(row, None).all() and counted(row, 3, until_eos=True).all()
    assert counted([9, 9, 1], 9).tolist() == [True, False, True]


def test_what_follows_the_first_end_counts_or_does_not() -> None:
    """Until the end, a text with more behind its end is that text."""
    judge = causal()
    ended, more = [f"{text}{END}" for text in TEXTS], [f"{text}{END}{text[::-1]}" for text in TEXTS]
    how = {"window": 63}
    short = generative_perplexity(judge, ended, until_eos=True, **how)
    cut = generative_perplexity(judge, more, until_eos=True, **how)
    assert (cut.tokens, cut.characters) == (short.tokens, short.characters)
    lineage = generative_perplexity(judge, more, **how)
    assert lineage.tokens > cut.tokens and lineage.nll != pytest.approx(cut.nll, rel=1e-3)


@pytest.mark.parametrize("bos", [True, False])
def test_it_is_over_all_tokens_and_characters(bos: bool) -> None:
    judge = causal(bos)
    pieces = [piece.cut(40) for piece in judge.encode(TEXTS)]
    nats = judged(judge, pieces).nats
    found = gen_ppl_of(judge, pieces, nats)
    total = sum(float(np.nansum(each)) for each in nats)
    assert found.tokens == sum(map(len, pieces)) - (0 if bos else len(pieces))
    assert found.nll == pytest.approx(total / found.tokens)
    assert found.value == pytest.approx(math.exp(found.nll))
    characters = sum(len(piece.text) - (0 if bos else piece.ends[0]) for piece in pieces)
    assert found.characters == characters
    assert found.bits_per_character == pytest.approx(total / math.log(2) / characters)


@pytest.mark.parametrize("batch", [2, 5, 32])
def test_the_batch_changes_nothing(batch: int) -> None:
    one, other = (generative_perplexity(causal(), TEXTS, batch=size, window=63) for size in (1, batch))
    assert one.nll == pytest.approx(other.nll, abs=1e-5) and one.nll_stderr == pytest.approx(other.nll_stderr, abs=1e-5)
    assert one.tokens == other.tokens


def test_the_error_is_the_spread_over_sets() -> None:
    rng = np.random.default_rng(0)

    def drawn() -> tuple[float, float]:
        sizes = rng.integers(10, 60, 40)
        return ratio(sizes * rng.normal(4, 0.5, 40), sizes.astype(float))

    values, errors = zip(*(drawn() for _ in range(300)))
    assert np.mean(errors) == pytest.approx(np.std(values), rel=0.1)
    assert np.mean(values) == pytest.approx(4, abs=0.02)


def test_the_error_of_the_perplexity_follows() -> None:
    found = generative_perplexity(causal(), TEXTS, window=63)
    assert found.stderr == pytest.approx(math.exp(found.nll + found.nll_stderr) - found.value, rel=0.2)
    assert found.as_dict()["value"] == found.value and found.as_dict()["texts"] == len(TEXTS)


def test_errors_teach() -> None:
    with pytest.raises(ValueError, match="at least 2 texts, got 1"):
        generative_perplexity(causal(), ["one"])
    with pytest.raises(ValueError, match="1 of 2 texts are empty"):
        generative_perplexity(causal(), ["one", ""])
    whole = [torch.ones(2, dtype=torch.bool).numpy()] * 2
    with pytest.raises(FloatingPointError, match="not finite, text 1"):
        aggregated([np.ones(2), np.array([1, np.nan])], whole, [1, 1])
    with pytest.raises(ValueError, match="no token is scored"):
        aggregated([np.ones(2)] * 2, [~each for each in whole], [1, 1])
