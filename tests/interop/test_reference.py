"""The converter: their names, our model, their numbers."""

import pytest
import torch

from adlm.convert import from_state_dict
from tests.goldens import HEADS, MASK, arrays, model, weights

POSSIBLE = -1e5  # below this an entry is the lineage's stand-in for minus infinity


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("time_conditioning", [False, True])
@pytest.mark.parametrize("kind", ["adlm", "mdlm"])
def test_forward_of_masked_models(kind, time_conditioning, folded):
    golden = arrays(f"forward_{kind}_gpt2like_tc{int(time_conditioning)}")
    ours = model(kind, time_conditioning)
    with torch.no_grad():
        anchor, log_probs = (ours.fold() if folded else ours).log_probs(
            golden["xt"], golden["sigma"]
        )
    possible = golden["log_probs"] > POSSIBLE
    torch.testing.assert_close(
        log_probs[possible], golden["log_probs"][possible], atol=1e-4, rtol=0
    )
    assert (log_probs[~possible] < POSSIBLE).all()
    if kind == "adlm":
        torch.testing.assert_close(
            anchor, golden["anchor_logits_raw"].log_softmax(-1), atol=1e-4, rtol=0
        )
    else:
        assert anchor is None


@pytest.mark.parametrize("time_conditioning", [False, True])
def test_every_layer_of_adlm(time_conditioning):
    golden = arrays(f"forward_adlm_gpt2like_tc{int(time_conditioning)}")
    ours, seen = model("adlm", time_conditioning), {}
    hooks = []
    for stage in ("anchor", "denoiser"):
        for i, layer in enumerate(getattr(ours, stage).layers):
            name = f"{stage}_block{i}"
            hooks.append(
                layer.register_forward_hook(
                    lambda _m, _i, out, name=name: seen.__setitem__(name, out)
                )
            )
    with torch.no_grad():
        features = ours(golden["xt"], golden["sigma"])
        crossed = ours.apply_bridge(features.anchor)
    for hook in hooks:
        hook.remove()
    assert len(seen) == 6
    for name, value in seen.items():
        torch.testing.assert_close(value, golden[name], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(crossed, golden["denoiser_vocab_embed"], atol=1e-4, rtol=1e-4)


def test_autoregressive():
    golden = arrays("ar_gpt2like")
    with torch.no_grad():
        _, log_probs = model("ar").log_probs(golden["input_tokens"])
    torch.testing.assert_close(log_probs, golden["log_probs"], atol=1e-4, rtol=1e-6)


def test_a_mask_id_inside_the_vocabulary():
    """BERT's mask is token 103 of 30,522: nothing may rest on the mask being last."""
    state = weights("adlm")
    order = torch.arange(MASK + 1)
    order[[7, MASK]] = order[[MASK, 7]]
    moved = {
        name: value[:, order] if name == "denoiser.vocab_embed.0.weight"
        else value[order] if "vocab_embed.embedding" in name or "output_layer.linear" in name
        else value
        for name, value in state.items()
    }  # fmt: skip
    golden = arrays("forward_adlm_gpt2like_tc0")
    with torch.no_grad():
        anchor, log_probs = from_state_dict(moved, heads=HEADS, mask_id=7).log_probs(
            order[golden["xt"]]
        )
        plain_anchor, plain = model("adlm").log_probs(golden["xt"])
    torch.testing.assert_close(anchor[..., order], plain_anchor, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(log_probs[..., order], plain, atol=1e-5, rtol=1e-5)


def test_an_older_name_of_the_denoiser():
    renamed = {
        name.replace("denoiser.", "replica."): value for name, value in weights("adlm").items()
    }
    ours = from_state_dict(renamed, heads=HEADS, mask_id=MASK)
    assert torch.equal(ours.head.weight, model("adlm").head.weight)


@pytest.mark.parametrize(
    ("change", "options", "error", "message"),
    [
        (
            {"backbone.extra": torch.zeros(1)},
            {},
            ValueError,
            r"keys of the state dict are not .*extra",
        ),
        ({"noise.sigma": torch.zeros(1)}, {}, ValueError, "keys of the state dict are not"),
        (
            {"denoiser.output_layer.linear.bias": None},
            {},
            ValueError,
            r"missing: denoiser\.output_layer\.linear\.bias",
        ),
        (
            {"backbone.vocab_embed.embedding": None},
            {},
            ValueError,
            r"no matrix 'backbone\.vocab_embed\.embedding'",
        ),
        ({}, {"heads": 2}, ValueError, "number of heads"),
        ({}, {"mask_id": 65}, ValueError, "an id of the vocabulary"),
    ],
)
def test_what_does_not_fit_is_refused(change, options, error, message):
    state = {name: value for name, value in (weights("adlm") | change).items() if value is not None}
    with pytest.raises(error, match=message):
        from_state_dict(state, **{"heads": HEADS, "mask_id": MASK} | options)
