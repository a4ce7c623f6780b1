"""More tokens in a model's vocabulary: the old ones keep their ids and their logits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from adlm.models.folder import LoadedModel, export_model, load_model
from adlm.models.language_model import LanguageModel, ModelConfig
from adlm.models.vocabulary import ROWS, extend_vocabulary

SIZE: dict[str, Any] = {
    "vocab_size": 23,
    "mask_id": 22,
    "dim": 16,
    "heads": 2,
    "length": 8,
    "cond_dim": 8,
}
SIZE |= {"denoiser_layers": 2, "dropout": 0.0}
CAUSAL = {"mask_id": None, "is_causal": True, "cond_dim": None}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": CAUSAL
    | {"tied": True, "positions": "learned", "norm_bias": True, "attention_bias": True},
    "ar": CAUSAL,
    "a2r": CAUSAL | {"anchor_layers": 1, "bridge": "direct"},
    "mdlm": {},
    "adlm": {"anchor_layers": 1},
    "adlm, tied, direct": {"anchor_layers": 1, "bridge": "direct", "tied": True},
}


def make(name: str) -> LanguageModel:
    """A model with random weights, none of them zero."""
    model = LanguageModel(ModelConfig(**SIZE | MODELS[name])).eval()
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=rng))
    return model


def tokens(vocab: int = 23) -> Tensor:
    return torch.randint(vocab, (3, 8), generator=torch.Generator().manual_seed(2))


def compute_logits(model: LanguageModel) -> list[Tensor]:
    features = model(tokens())
    heads = [(model.head, features.final), (model.anchor_head, features.anchor)]
    return [head(each) for head, each in heads if head is not None]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("init", [None, 5])
def test_old_tokens_keep_their_rows_and_logits(name: str, init: Any) -> None:
    old = make(name)
    new = extend_vocabulary(old, 3, init)
    assert (new.config.vocab_size, new.config.mask_id) == (
        26,
        old.config.mask_id,
    ) and old.config.vocab_size == 23
    before, after = old.state_dict(), new.state_dict()
    for key in before:
        if key in ROWS:
            assert torch.equal(after[key][:23], before[key]), key
            kept = before[key] if old.config.mask_id is None else before[key][:22]
            rows = (
                kept.double().mean(0).float().expand(3, *kept.shape[1:])
                if init is None
                else before[key][init]
            )
            torch.testing.assert_close(
                after[key][23:], rows.expand_as(after[key][23:]), rtol=1e-6, atol=1e-7
            )
        elif key == "bridge.weight":
            assert torch.equal(after[key][:, : before[key].shape[1]], before[key])
            assert not after[key][:, before[key].shape[1] :].any()
        else:
            assert torch.equal(after[key], before[key]), key
    for theirs, ours in zip(compute_logits(old), compute_logits(new), strict=True):
        torch.testing.assert_close(ours[..., :23], theirs, rtol=1e-5, atol=1e-5)
    if init is None:  # log-odds among the old tokens
        theirs, ours = (each.log_probs(tokens())[1][..., :20] for each in (old, new))
        torch.testing.assert_close(
            ours - ours[..., :1], theirs - theirs[..., :1], rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("name", MODELS)
def test_new_tokens_train_and_the_old_model_does_not(name: str) -> None:
    old = make(name)
    before = {key: value.clone() for key, value in old.state_dict().items()}
    new = extend_vocabulary(old.train(), 2)
    assert new.training and all(parameter.requires_grad for parameter in new.parameters())
    assert (new.head.weight is new.embed.weight) == old.config.tied
    rows = {key: value.clone() for key, value in new.state_dict().items()}
    optimizer = torch.optim.SGD(new.parameters(), lr=0.1)
    x = torch.tensor([[1, 23, 24, 2]])
    features = new(x)
    losses = [new.head(features.final)] + (
        [] if new.anchor_head is None else [new.anchor_head(features.anchor)]
    )
    torch.stack(
        [logits.log_softmax(-1)[0, :, [23, 24]].sum() for logits in losses]
    ).sum().neg().backward()
    optimizer.step()
    for key in ROWS:
        if key in rows:
            assert not (new.state_dict()[key][23:] == rows[key][23:]).any(), key
    if new.bridge is not None and new.config.bridge == "factored":
        assert new.bridge.weight[:, 23:].abs().min() > 0
    assert all(torch.equal(value, before[key]) for key, value in old.state_dict().items())


@pytest.mark.parametrize("name", ["gpt2", "adlm"])
def test_an_extended_model_is_saved_and_loaded(name: str, tmp_path: Path) -> None:
    new = extend_vocabulary(make(name), 2, init=4)
    export_model(LoadedModel(new, None, "ar", 0), tmp_path, is_quantized=False)
    loaded = load_model(tmp_path).model
    assert loaded.config == new.config
    assert all(
        torch.equal(value, loaded.state_dict()[key]) for key, value in new.state_dict().items()
    )


def test_what_does_not_fit_is_refused() -> None:
    model = make("ar")
    with pytest.raises(ValueError, match="count is 0: expected"):
        extend_vocabulary(model, 0)
    for init in (23, -1, 2.5):
        with pytest.raises(ValueError, match=f"init is {init}: expected a token below 23"):
            extend_vocabulary(model, 2, init)  # type: ignore[arg-type]
    config = ModelConfig(**SIZE | {"anchor_layers": 1, "bridge": "softmax"})
    with pytest.raises(ValueError, match=r"bridge 'softmax'.*: extend a model with"):
        extend_vocabulary(LanguageModel(config), 1)
