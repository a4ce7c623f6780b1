"""The held-out bound: exact where it can be, the same for every batch size, without the anchor term."""

import math

import pytest
import torch

from adlm.evaluate.likelihood import held_out_bound, unigram_nll
from adlm.methods import METHODS, build_config
from adlm.models.language_model import LanguageModel

VOCAB = 50
ROWS = torch.randint(VOCAB - 1, (40, 16), generator=torch.Generator().manual_seed(0))


def tiny(method: str) -> LanguageModel:
    layers = {"anchor_layers": 1, "denoiser_layers": 1} if METHODS[method].two_stages else {"denoiser_layers": 1}
    config = build_config(method, "nano", vocab_size=VOCAB, mask_id=VOCAB - 1, dim=16, heads=2, length=16, **layers)
    return LanguageModel(config)


@pytest.mark.parametrize("method", ["ar", "a2r"])
def test_an_untrained_causal_model_knows_nothing_exactly(method: str) -> None:
    bound = held_out_bound(tiny(method), ROWS)
    assert bound.nll == pytest.approx(math.log(VOCAB - 1), abs=1e-5)
    assert bound.stderr == pytest.approx(0, abs=1e-6)
    assert bound.tokens == 40 * 15


@pytest.mark.parametrize("method", ["mdlm", "adlm"])
def test_an_untrained_masked_model_knows_nothing_within_its_error(method: str) -> None:
    bound = held_out_bound(tiny(method), ROWS, draws=64)
    assert bound.tokens == 40 * 16
    assert 0 < bound.stderr < 0.2
    assert abs(bound.nll - math.log(VOCAB - 1)) < 4 * bound.stderr
    assert bound.ppl == pytest.approx(math.exp(bound.nll))


def test_the_batch_size_changes_nothing_but_rounding() -> None:
    model = tiny("adlm")
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(1))
    whole, parts = held_out_bound(model, ROWS, batch=40, draws=2), held_out_bound(model, ROWS, batch=7, draws=2)
    assert parts == pytest.approx(whole, rel=1e-5)
    assert held_out_bound(model, ROWS, draws=2, seed=1).nll != pytest.approx(whole.nll, rel=1e-5)


def test_measuring_leaves_the_model_as_it_was() -> None:
    model = tiny("adlm").train()
    held_out_bound(model, ROWS)
    assert model.training
    assert all(p.grad is None for p in model.parameters())


def test_one_row_has_no_standard_error() -> None:
    with pytest.raises(ValueError, match="at least 2 rows"):
        held_out_bound(tiny("mdlm"), ROWS[:1])


def test_unigram_counts_with_one_added() -> None:
    counts_from, tokens = torch.tensor([0, 0, 1]), torch.tensor([[0, 1], [2, 2]])
    expected = -(math.log(3 / 6) + math.log(2 / 6) + 2 * math.log(1 / 6)) / 4
    assert unigram_nll(counts_from, tokens, 3) == pytest.approx(expected)
