"""The held-out bound: exact where it can be, the same however rows are shared out, without the anchor term."""

import math

import pytest
import torch
from torch import Tensor

from adlm.data.batches import TensorRows, is_valid
from adlm.diffusion.masking import Noised
from adlm.diffusion.objectives import Loss
from adlm.evaluate.likelihood import held_out_bound, unigram_nll
from adlm.methods import METHODS, build_config, training_loss
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


def padded(filler: int = 0) -> TensorRows:
    """Rows of 2 to 16 tokens; what stands behind them is nothing."""
    lengths = torch.arange(40) % 15 + 2
    return TensorRows(torch.where(is_valid(lengths, 16), ROWS, filler), lengths)


def awake(method: str) -> LanguageModel:
    """A model that predicts something."""
    model, rng = tiny(method), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=rng))
    return model


@pytest.mark.parametrize("method", ["mdlm", "adlm", "ar", "a2r"])
def test_padding_is_neither_read_nor_counted(method: str) -> None:
    model = awake(method)
    bound = held_out_bound(model, padded(), draws=2)
    assert bound == held_out_bound(model, padded(filler=7), draws=2)
    is_causal = METHODS[method].is_causal
    assert bound.tokens == sum(n % 15 + 2 - is_causal for n in range(40))
    assert held_out_bound(model, padded(), draws=2, batch=7) == pytest.approx(bound, rel=1e-5)


def test_a_padded_row_is_worth_its_tokens() -> None:
    """For a causal model the bound is exact, so every row can be asked by itself, without padding."""
    model, rows = awake("a2r"), padded()
    assert rows.lengths is not None
    nats = 0.0
    for tokens, length in zip(rows.tokens, rows.lengths.tolist()):
        nats += held_out_bound(model, tokens[:length].expand(2, length)).nll * (length - 1)
    bound = held_out_bound(model, rows)
    assert bound.nll == pytest.approx(nats / bound.tokens, rel=1e-5)


@pytest.mark.parametrize("method", ["adlm", "ar"])
@pytest.mark.parametrize("size", [2, 3, 7])
def test_the_number_of_processes_changes_nothing(method: str, size: int) -> None:
    """Each has its pieces, and asks as often as the others even where there are none left for it."""
    model, calls, parts = awake(method), [], []

    def loss_of(noised: Noised) -> Loss:
        calls.append(len(noised.x0))
        return training_loss(model, noised)

    def keep(sums: Tensor) -> Tensor:
        parts.append(sums.clone())
        return sums

    whole = held_out_bound(model, padded(), batch=9, draws=2)  # five pieces
    counts = set()
    for rank in range(size):
        calls.clear()
        held_out_bound(model, padded(), batch=9, draws=2, rank=rank, size=size, total=keep, loss_of=loss_of)
        counts.add(len(calls))
    assert len(counts) == 1
    added = torch.stack(parts).sum(0)
    shared = held_out_bound(model, padded(), batch=9, draws=2, rank=1, size=size, total=lambda sums: added)
    assert shared == pytest.approx(whole, rel=1e-6)


def test_the_first_rows_are_the_first_rows() -> None:
    model = awake("ar")
    assert held_out_bound(model, ROWS, first=10) == held_out_bound(model, ROWS[:10])
    assert held_out_bound(model, ROWS, first=1000) == held_out_bound(model, ROWS)


def test_unigram_counts_with_one_added() -> None:
    counts, tokens = torch.tensor([2, 1, 0]), torch.tensor([[0, 1], [2, 2]])
    expected = -(math.log(3 / 6) + math.log(2 / 6) + 2 * math.log(1 / 6)) / 4
    assert unigram_nll(counts, tokens) == pytest.approx(expected)


def test_unigram_leaves_padding_out() -> None:
    counts, tokens = torch.tensor([2, 1, 0]), torch.tensor([[0, 1], [2, 2]])
    valid = torch.tensor([[True, True], [True, False]])
    expected = -(math.log(3 / 6) + math.log(2 / 6) + math.log(1 / 6)) / 3
    assert unigram_nll(counts, tokens, valid) == pytest.approx(expected)
