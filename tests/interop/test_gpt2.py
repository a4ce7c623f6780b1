"""GPT-2: transformers' weights, our model, their numbers."""

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from adlm.interop.gpt2 import from_state_dict

if os.environ.get("ADLM_ALL") == "1":
    import transformers
else:
    transformers = pytest.importorskip("transformers", reason="transformers comes with the extra eval")


def gpt2(seed: int = 0, **changes: int) -> Any:
    """A small one with random weights, none of them zero."""
    size = {"vocab_size": 61, "n_positions": 24, "n_embd": 16, "n_layer": 3, "n_head": 2} | changes
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**size)).eval()
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=rng))
    return model


def tokens(length: int = 24) -> Tensor:
    return torch.randint(61, (5, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("length", [1, 7, 24])
def test_it_says_what_theirs_says(length: int) -> None:
    theirs = gpt2()
    ours = from_state_dict(theirs.state_dict(), heads=2)
    with torch.no_grad():
        expected = theirs(tokens(length)).logits.log_softmax(-1)
        _, found = ours.log_probs(tokens(length))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert float(expected.exp().amax(-1).mean()) > 0.1  # it does say something


def test_names_with_and_without_the_head() -> None:
    theirs = gpt2()
    whole, bare = (from_state_dict(each.state_dict(), heads=2) for each in (theirs, theirs.transformer))
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), bare.parameters(), strict=True))
    old = theirs.state_dict() | {"transformer.h.0.attn.bias": torch.ones(1, 1, 24, 24)}
    assert from_state_dict(old, heads=2).config == whole.config
    assert whole.head.weight is whole.embed.weight


def test_what_does_not_fit_is_refused() -> None:
    state = gpt2().state_dict()
    with pytest.raises(ValueError, match=r"keys of the state dict are not .*extra"):
        from_state_dict(state | {"transformer.h.0.extra.weight": torch.zeros(1)}, heads=2)
    with pytest.raises(RuntimeError, match=r"denoiser\.norm\.bias"):
        from_state_dict({name: value for name, value in state.items() if name != "transformer.ln_f.bias"}, heads=2)
    with pytest.raises(ValueError, match=r"no 'wte.weight'"):
        from_state_dict({"model.weight": torch.zeros(1)}, heads=2)
    with pytest.raises(ValueError, match="convert a GPT-2 with tied embeddings"):
        from_state_dict(state | {"lm_head.weight": torch.zeros(61, 16)}, heads=2)
    with pytest.raises(ValueError, match="must be a multiple of heads 3"):
        from_state_dict(state, heads=3)
