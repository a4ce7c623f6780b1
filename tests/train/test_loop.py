"""The loop: the same seed gives the same run, the loss falls, every method trains."""

from typing import Any

import pytest
import torch
from torch import Tensor

from adlm.data.packing import pack_rows
from adlm.data.sources import excerpt
from adlm.data.tokenizers import train_bpe
from adlm.diffusion.anchors import every_token
from adlm.methods import METHODS, build_config
from adlm.models.language_model import LanguageModel
from adlm.train.ema import EMA
from adlm.train.loop import learning_rate, shuffled, train_steps

TEXT = excerpt()[:30_000]
TOKENIZER = train_bpe([TEXT], 300)
ROWS = pack_rows(TOKENIZER.encode(TEXT), 32)
FAST: dict[str, Any] = {"lr": 3e-3, "warmup": 5, "batch": 8}


def tiny(method: str = "adlm", dropout: float = 0.0) -> LanguageModel:
    layers = {"anchor_layers": 1, "denoiser_layers": 1} if METHODS[method].two_stages else {"denoiser_layers": 1}
    config = build_config(
        method,
        "nano",
        vocab_size=TOKENIZER.vocab_size,
        mask_id=TOKENIZER.mask_id,
        dim=32,
        heads=2,
        length=32,
        dropout=dropout,
        **layers,
    )
    return LanguageModel(config, seed=1)


def losses(seed: int, steps: int = 6, **options: Any) -> list[float]:
    model = tiny(dropout=0.1)
    return [r.loss for r in train_steps(model, ROWS, steps=steps, seed=seed, **FAST, **options)]


def test_the_same_seed_gives_the_same_losses_bit_for_bit() -> None:
    first = losses(3)
    torch.rand(7)  # whatever the caller has drawn in between
    assert losses(3) == first
    assert losses(4) != first


def test_the_callers_generator_is_left_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    losses(3, steps=2)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("method", list(METHODS))
def test_every_method_trains(method: str) -> None:
    model = tiny(method)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    score_entropy = METHODS[method].score_entropy
    seen = list(train_steps(model, ROWS, steps=40, score_entropy=score_entropy, seed=0, **FAST))
    nlls = [record.nll for record in seen]
    assert sum(nlls[-10:]) < 0.95 * sum(nlls[:10])
    # The head is zero at first, so what lies below it moves from the second step on: nothing is left out.
    still = [name for name, p in model.named_parameters() if torch.equal(p, before[name])]
    assert not [name for name in still if ".condition." not in name], still


def test_records_count_steps_and_tokens() -> None:
    seen = list(train_steps(tiny(), ROWS, steps=4, seed=0, **FAST))
    assert [record.step for record in seen] == [1, 2, 3, 4]
    assert [record.tokens for record in seen] == [8 * 32 * n for n in (1, 2, 3, 4)]
    assert all(record.tokens_per_second > 0 for record in seen)


def test_the_anchor_term_is_optimised_and_not_reported() -> None:
    options = FAST | {"anchor_rule": every_token()}
    record = next(train_steps(tiny(), ROWS, steps=10, seed=0, peak_anchor_weight=0.05, **options))
    assert record.anchor_weight == 0.05
    assert record.loss > record.nll
    plain = next(train_steps(tiny(), ROWS, steps=10, seed=0, peak_anchor_weight=0.0, **FAST))
    assert plain.loss == plain.nll == record.nll


def test_the_average_follows_the_weights() -> None:
    model = tiny()
    ema = EMA(model)
    start: Tensor = ema.shadow["head.bias"].clone()
    list(train_steps(model, ROWS, steps=5, seed=0, ema=ema, **FAST))
    end = model.head.bias.detach()
    assert ema.updates == 5
    assert 0 < float((ema.shadow["head.bias"] - start).norm()) < float((end - start).norm())


def test_every_row_comes_once_before_any_comes_twice() -> None:
    order = shuffled(10, 4, torch.Generator().manual_seed(0))
    numbers = torch.cat([next(order) for _ in range(5)]).tolist()
    assert sorted(numbers[:10]) == sorted(numbers[10:]) == list(range(10))
    assert numbers[:10] != numbers[10:]


def test_the_rate_climbs_then_stays_or_falls() -> None:
    def rate(step: int, decay: str) -> float:
        return learning_rate(step, 100, peak=1.0, warmup=10, decay=decay)

    assert [rate(step, "constant") for step in (1, 5, 10, 100)] == [0.1, 0.5, 1.0, 1.0]
    assert rate(10, "cosine") == 1.0
    assert rate(100, "cosine") == pytest.approx(0.1)
    falling = [rate(step, "cosine") for step in range(10, 101)]
    assert falling == sorted(falling, reverse=True)
    with pytest.raises(ValueError, match="constant, cosine"):
        rate(1, "step")
