"""Laws of losses, anchors and bridges: what must be equal, what must differ, what padding and neighbours may not do."""

import pytest
import torch

from adlm.diffusion.anchors import random_positions, rare_in_sequence, tf_idf
from adlm.diffusion.masking import ForwardProcess, collect_batch, corrupt, shift_tokens
from adlm.diffusion.objectives import Loss, diffusion_loss, training_loss
from adlm.diffusion.rng import CounterRng
from adlm.models.methods import METHODS
from bench.plain import plain_logits
from tests.world import MASK, VOCAB, random_tokens, small_model

LENGTH = 16
METHOD_NAMES = ("mdlm", "adlm", "ar", "a2r")


def build_batch(method, x0, *, rows=None, **where):
    """The batch of a method, with the tokens that occur once as anchors; `rows` are the rows' own numbers."""
    if METHODS[method].is_causal:
        return shift_tokens(x0, anchor_rule=rare_in_sequence(1), valid=where.get("valid"))
    rng = CounterRng.from_seed(5, len(x0) if rows is None else rows)
    return corrupt(x0, ForwardProcess(MASK, anchor_rule=rare_in_sequence(1)), rng, 2, **where)


def gradients(model, batch, anchor_weight):
    model.zero_grad()
    loss = training_loss(model, batch, anchor_weight=anchor_weight)
    loss.total.backward()
    return Loss(*(part.detach() for part in loss)), {
        name: p.grad for name, p in model.named_parameters()
    }


@pytest.mark.parametrize("bridge", ["factored", "direct", "softmax"])
@pytest.mark.parametrize("method", ["adlm", "a2r"])
def test_anchor_weight_zero_gives_the_nelbo(method, bridge):
    """In value and in every gradient; and every parameter stays in the graph, as distributed training wants."""
    model = small_model(method, bridge=bridge)
    batch = build_batch(method, random_tokens(4))
    plain, without = gradients(model, batch, None)
    zero, with_zero = gradients(model, batch, 0.0)
    anchored, with_anchor = gradients(model, batch, 0.5)
    assert float(plain.total) == float(zero.total) == float(zero.nll) == float(anchored.nll)
    assert float(zero.anchor) > 0 and float(plain.anchor) == 0
    assert float(anchored.total) == pytest.approx(
        float(anchored.nll + 0.5 * anchored.anchor), rel=1e-6
    )
    for name, grad in with_zero.items():
        assert grad is not None, f"{name} left the graph"
        expected = without[name]
        torch.testing.assert_close(
            grad, torch.zeros_like(grad) if expected is None else expected, msg=name
        )
    assert any(not torch.equal(with_anchor[name], with_zero[name]) for name in with_zero)


def test_the_anchor_term_sees_only_the_anchor_network():
    """No gradient of the anchor loss reaches the denoiser, its head or the bridge; one stage has no anchor loss."""
    model, batch = small_model(), build_batch("adlm", random_tokens(4))
    (_, low), (_, high) = (gradients(model, batch, weight) for weight in (0.0, 100.0))
    for name in low:
        is_same = torch.allclose(low[name], high[name], atol=1e-6)
        assert is_same == name.startswith(("denoiser", "head", "bridge")), name
    with pytest.raises(ValueError, match="two-stage"):
        training_loss(small_model("mdlm"), batch, anchor_weight=0.1)


def test_factored_bridge_is_the_linear_map_of_the_logits():
    """The product of the matrices equals Linear(V → dim) on raw logits; a softmax in between is another model."""
    xt = random_tokens(3)
    xt[:, ::3] = MASK
    factored, softmax = small_model(bridge="factored"), small_model(bridge="softmax")
    with torch.no_grad():
        anchor = factored(xt).anchor
        anchor_logits, logits = plain_logits(factored, xt)
        torch.testing.assert_close(
            factored.apply_bridge(anchor), factored.bridge(anchor_logits), atol=1e-5, rtol=0
        )
        torch.testing.assert_close(factored.head(factored(xt).final), logits, atol=1e-5, rtol=0)
        expected = softmax.bridge(softmax.anchor_head(anchor).softmax(-1))
        torch.testing.assert_close(softmax.apply_bridge(anchor), expected, atol=1e-5, rtol=0)
        assert (factored(xt).final - softmax(xt).final).abs().max() > 0.1


GPT2 = {"positions": "learned", "norm_bias": True, "attention_bias": True, "tied": True}
FOLDS = [(method, {}) for method in METHOD_NAMES]
FOLDS += [(method, {"time_conditioning": True, "cond_dim": 8}) for method in METHOD_NAMES]
FOLDS += [
    ("adlm", {"bridge": "direct"}),
    ("adlm", {"bridge": "softmax"}),
    ("a2r", {"bridge": "direct"}),
]
FOLDS += [
    ("mdlm", {"norm_bias": True, "attention_bias": True}),
    ("mdlm", {"tied": True}),
    ("ar", GPT2),
]
FOLDS += [("adlm", {"positions": "learned", "attention_bias": True}), ("a2r", {"cond_dim": 8})]


@pytest.mark.parametrize(("method", "changes"), FOLDS)
def test_folding_changes_nothing(method, changes):
    model, xt = small_model(method, **changes), random_tokens(3)
    level = torch.tensor([0.1, 0.9, 3.0])
    if not METHODS[method].is_causal:
        xt[:, 1::2] = MASK
    folded = model.fold()
    with torch.no_grad():
        before, after = model(xt, level), folded(xt, level)
        torch.testing.assert_close(after.final, before.final, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(
            folded.head(after.final), model.head(before.final), atol=2e-5, rtol=1e-5
        )
        if before.anchor is not None:
            torch.testing.assert_close(after.anchor, before.anchor, atol=1e-5, rtol=1e-5)
        reacts = (model(xt, level * 2).final - before.final).abs().max() > 1e-3
    assert bool(reacts) == model.config.time_conditioning
    assert not any(p.requires_grad for p in folded.parameters())
    assert folded.config.bridge != "factored" or not folded.config.anchor_layers
    # The original is untouched and shares nothing that a change of the folded one could reach.
    with torch.no_grad():
        for parameter in folded.parameters():
            parameter.add_(1.0)
        torch.testing.assert_close(model(xt, level).final, before.final, atol=0, rtol=0)


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_rows_do_not_see_each_other(method):
    """A batch's losses and features are those of its rows alone, wherever they stand."""
    model, x0, gamma = (
        small_model(method),
        random_tokens(8),
        0.3 if METHODS[method].two_stages else None,
    )

    @torch.no_grad()
    def run(numbers):
        rows = torch.tensor(numbers)
        batch = build_batch(method, x0[rows], rows=rows, index=rows, total=len(x0))
        return (
            batch,
            training_loss(model, batch, anchor_weight=gamma),
            model(batch.xt, batch.noise_level).final,
        )

    whole, losses, features = run(list(range(8)))
    total = 0.0
    for numbers in ([0], [1], [2, 3], [7, 5, 6, 4]):
        part, loss, final = run(numbers)
        assert torch.equal(part.xt, whole.xt[numbers])
        torch.testing.assert_close(loss.row_nll, losses.row_nll[numbers], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(final, features[numbers], atol=1e-5, rtol=1e-5)
        total += float(loss.total * part.tokens)
    assert total == pytest.approx(float(losses.total * whole.tokens), rel=1e-5)


def pad(x, extra, value):
    wide = torch.nn.functional.pad(x, (0, extra), value=value)
    return wide, torch.arange(wide.shape[1]).expand(len(x), -1) < x.shape[1]


RULES = {
    "rare_in_sequence": rare_in_sequence(1),
    "max_fraction": rare_in_sequence(max_fraction=0.2),
}
RULES |= {
    "tf_idf": tf_idf(torch.arange(VOCAB) * 3 + 1, 50, 0.3),
    "random": random_positions(0.5, seed=1),
}


@pytest.mark.parametrize("value", [0, 7])
@pytest.mark.parametrize("rule", RULES)
def test_padding_changes_no_anchor(rule, value):
    x0 = random_tokens(6, 10)
    wide, valid = pad(x0, 6, value)
    plain = RULES[rule](x0, None)
    assert plain.any() and not plain.all()
    is_anchor = RULES[rule](wide, valid)
    assert torch.equal(is_anchor[:, :10], plain) and not is_anchor[:, 10:].any()
    assert torch.equal(RULES[rule](x0, torch.ones_like(x0, dtype=torch.bool)), plain)


@pytest.mark.parametrize("value", [0, 7])
@pytest.mark.parametrize(
    ("method", "time_conditioning"),
    [
        ("mdlm", False),
        ("mdlm", True),
        ("adlm", False),
        ("adlm", True),
        ("ar", False),
        ("a2r", False),
    ],
)
def test_padding_changes_no_loss(method, time_conditioning, value):
    """Features and losses of a row padded to a longer length are those of the row."""
    model, x0 = small_model(method, time_conditioning=time_conditioning), random_tokens(4, 10)
    wide, valid = pad(x0, 6, value)
    gamma = 0.4 if METHODS[method].two_stages else None
    with torch.no_grad():
        short, long = build_batch(method, x0), build_batch(method, wide, valid=valid)
        length = short.xt.shape[1]
        assert torch.equal(long.xt[:, :length], short.xt)
        one, other = (training_loss(model, batch, anchor_weight=gamma) for batch in (short, long))
        for name in ("total", "nll", "anchor", "row_nll"):
            torch.testing.assert_close(
                getattr(other, name), getattr(one, name), atol=1e-5, rtol=1e-5, msg=name
            )
        features = model(long.xt, long.noise_level, valid=long.valid).final
        expected = model(short.xt, short.noise_level).final
        torch.testing.assert_close(features[:, :length], expected, atol=1e-5, rtol=1e-5)
        if not METHODS[method].is_causal:  # as the lineage does it, padding is read like text
            read = corrupt(
                wide,
                ForwardProcess(MASK, attend_padding=True),
                CounterRng.from_seed(5, 4),
                2,
                valid=valid,
            )
            assert read.valid is None and float(read.tokens) == 40
            assert not torch.allclose(training_loss(model, read).row_nll, one.row_nll, atol=1e-3)


def test_fixed_positions_are_neither_hidden_nor_counted():
    x0 = random_tokens(5)
    is_fixed = torch.arange(LENGTH).expand(5, -1) < 6
    batch = build_batch("adlm", x0, is_fixed=is_fixed)
    assert torch.equal(batch.xt[is_fixed], x0[is_fixed])
    assert float(batch.tokens) == 5 * (LENGTH - 6)
    for selection in (batch.hidden, batch.anchors):
        assert not is_fixed.flatten()[selection.index].any()


def test_a_nan_is_raised_and_its_row_named():
    model, x0 = small_model(), random_tokens(4)
    xt = torch.full_like(x0, MASK)
    process, ones = ForwardProcess(MASK, anchor_rule=rare_in_sequence(1)), torch.ones(4)
    batch = collect_batch(x0, xt, ones, ones, 0 * ones, process)
    features = model(xt)
    final = features.final.detach().clone()
    final[2, 5] = torch.nan
    with pytest.raises(FloatingPointError, match=r"rows \[2\]"):
        diffusion_loss(final, model.head, batch, mask_id=MASK).check()
    loss = diffusion_loss(final, model.head, batch, mask_id=MASK)
    assert "rows [102] are" in loss.explain(rows=torch.arange(100, 104))
    anchor = features.anchor.detach().clone()
    anchor[1] = torch.nan
    anchors = {"anchor": anchor, "anchor_head": model.anchor_head, "anchor_weight": 0.1}
    with pytest.raises(FloatingPointError, match=r"rows \[1\]"):
        diffusion_loss(features.final, model.head, batch, mask_id=MASK, **anchors).check()


def test_text_that_holds_the_mask_is_refused():
    x0 = random_tokens(3)
    x0[1, 4] = MASK
    with pytest.raises(ValueError, match=f"row 1 holds the mask id {MASK} as text at position 4"):
        corrupt(x0, ForwardProcess(MASK), CounterRng.from_seed(0, 3), 0)
