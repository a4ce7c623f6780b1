"""The model: parameter counts of the paper, a build that leaves no trace, caches, casts and refusals."""

import itertools
import math
import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from adlm.data.batches import Batch, is_valid
from adlm.diffusion.anchors import rare_in_sequence
from adlm.diffusion.masking import ForwardProcess, shift_tokens
from adlm.diffusion.objectives import MaskedDiffusion, NextToken, training_loss
from adlm.interop.gpt2 import from_state_dict
from adlm.models.language_model import LanguageModel, ModelConfig
from adlm.models.methods import build_config
from adlm.models.transformer import UnpaddedRows, unpad
from tests.goldens import facts
from tests.world import (
    count_weights,
    open_windows,
    random_model,
    random_tokens,
    read_in_parts,
    shapes_only,
)

COUNTS = facts("param_counts")
TINY = {"dim": 512, "heads": 8, "anchor_layers": 8, "denoiser_layers": 4}  # the lineage's `tiny`


def stage_counts(stack, embed, head):
    """A stage as the lineage counts it: its input map, blocks, output layer and noise embedding."""
    parts = {
        "vocab_embed": count_weights(embed),
        "blocks": count_weights(stack.layers),
        "output_layer": count_weights(head, stack.norm, stack.modulation),
    }
    if stack.condition is not None:
        parts["sigma_map"] = count_weights(stack.condition)
    total = sum(parts.values())
    return parts | {
        "per_block": count_weights(stack.layers[0]),
        "n_blocks": len(stack.layers),
        "total": total,
    }


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_counts_are_the_authors(name):
    method, size, _ = name.split("_")
    expected = COUNTS[name]
    preset, changes = ("small", TINY) if size == "tiny" else (size, {})
    vocabulary = {"vocab_size": expected["vocab_size"], "mask_id": expected["mask_index"]}
    model = shapes_only(build_config(method, preset, **vocabulary, **changes))
    assert count_weights(model) == expected["total"]
    assert count_weights(model) - count_weights(model.embed) == expected["total_non_embedding"]
    if "denoiser" in expected:
        assert stage_counts(model.anchor, model.embed, model.anchor_head) == expected["backbone"]
        assert stage_counts(model.denoiser, model.bridge, model.head) == expected["denoiser"]
    else:
        assert stage_counts(model.denoiser, model.embed, model.head) == expected["backbone"]


@pytest.mark.parametrize("method", ["adlm", "ar"])
def test_building_follows_from_the_seed_alone(method):
    """The global generator is neither read nor moved."""
    config = build_config(method, "nano", vocab_size=30, mask_id=29, dim=16, heads=2)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = LanguageModel(config, seed=4)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    same, other = LanguageModel(config, seed=4), LanguageModel(config, seed=5)
    for (name, a), b, c in zip(
        one.named_parameters(), same.parameters(), other.parameters(), strict=True
    ):
        assert torch.isfinite(a).all() and torch.equal(a, b), name
        assert torch.equal(a, c) == bool((a == a.flatten()[0]).all() or "bridge" in name), name


def test_a_new_model_knows_nothing():
    """Heads start at zero: all tokens but the mask are equally likely; a direct bridge is the identity."""
    model = LanguageModel(
        build_config("adlm", "nano", vocab_size=30, mask_id=29, dim=16, heads=2, bridge="direct")
    )
    features = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
    assert torch.equal(model.apply_bridge(features), features)
    anchor, log_probs = model.log_probs(torch.full((1, 5), 29))
    torch.testing.assert_close(log_probs[..., :29], torch.full((1, 5, 29), -math.log(29)))
    torch.testing.assert_close(anchor, torch.full((1, 5, 30), -math.log(30)))


ZEROS, TIMED = torch.zeros(2, 3, dtype=torch.long), {"time_conditioning": True}
CAUSAL = {"vocab_size": 20, "mask_id": None, "dim": 16, "length": 13, "seed": 2, "scale": 0.6}


@pytest.mark.parametrize("changes", [{}, {"positions": "learned"}, {"cond_dim": 8}], ids=str)
@pytest.mark.parametrize("method", ["ar", "a2r"])
def test_cached_features_are_the_full_ones(method, changes):
    model = random_model(method, **(CAUSAL | {"denoiser_layers": 2} | changes))
    tokens = random_tokens(3, 13, 20)
    with torch.no_grad():
        full = model(tokens)
        for sizes in ([1] * 13, [13], [5, 1, 1, 6], [1, 12], [4, 4, 4, 1], [12, 1]):
            parts = read_in_parts(model, tokens, sizes)
            final = torch.cat([part.final for part in parts], 1)
            torch.testing.assert_close(final, full.final, atol=1e-5, rtol=1e-5)
            if method == "a2r":
                anchor = torch.cat([part.anchor for part in parts], 1)
                torch.testing.assert_close(anchor, full.anchor, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("method", ["mdlm", "adlm", "ar", "a2r"])
def test_causal_models_do_not_see_the_future_and_masked_ones_see_everything(method):
    is_causal = method in ("ar", "a2r")
    model = random_model(method, **(CAUSAL | ({} if is_causal else {"mask_id": 19})))
    tokens = random_tokens(2, 13, 19)
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 19
    with torch.no_grad():
        difference = (model(tokens).final - model(changed).final).abs()
    assert (difference[:, :7].amax() == 0) == is_causal
    assert difference[:, 7 if is_causal else 0 :].amax((0, 2)).min() > 1e-4


GPT2 = {
    "attn.c_attn": (24, 72),
    "attn.c_proj": (24, 24),
    "mlp.c_fc": (24, 96),
    "mlp.c_proj": (96, 24),
}
GPT2 |= {"ln_1": (24,), "ln_2": (24,)}


def test_gpt2_is_as_written_out():
    """tests/interop/test_gpt2.py compares with transformers, which may not be installed."""
    shapes = {
        "wte.weight": (40, 24),
        "wpe.weight": (16, 24),
        "ln_f.weight": (24,),
        "ln_f.bias": (24,),
    }
    for layer, (name, shape) in itertools.product(("h.0", "h.1"), GPT2.items()):
        shapes |= {f"{layer}.{name}.weight": shape, f"{layer}.{name}.bias": shape[-1:]}
    rng = torch.Generator().manual_seed(0)
    state = {name: torch.randn(shape, generator=rng) * 0.3 for name, shape in shapes.items()}
    tokens = random_tokens(3, 16, 40)

    def norm(x, name):
        return F.layer_norm(x, (24,), state[f"{name}.weight"], state[f"{name}.bias"])

    def conv(x, name):
        return x @ state[f"{name}.weight"] + state[f"{name}.bias"]

    x = state["wte.weight"][tokens] + state["wpe.weight"]
    for layer in ("h.0", "h.1"):
        qkv = conv(norm(x, f"{layer}.ln_1"), f"{layer}.attn.c_attn").split(24, -1)
        q, k, v = (y.unflatten(-1, (4, -1)).transpose(1, 2) for y in qkv)
        scores = (q @ k.mT / math.sqrt(6)).masked_fill(torch.ones(16, 16).triu(1) > 0, -torch.inf)
        x = x + conv((scores.softmax(-1) @ v).transpose(1, 2).flatten(2), f"{layer}.attn.c_proj")
        inner = F.gelu(conv(norm(x, f"{layer}.ln_2"), f"{layer}.mlp.c_fc"), approximate="tanh")
        x = x + conv(inner, f"{layer}.mlp.c_proj")
    expected = norm(x, "ln_f") @ state["wte.weight"].t()
    model = from_state_dict(state, heads=4, dropout=0.0)
    for ours in (model, model.fold()):
        assert ours.head.weight is ours.embed.weight
        with torch.no_grad():
            torch.testing.assert_close(
                ours.head(ours(tokens).final), expected, atol=1e-4, rtol=1e-4
            )
            loss = training_loss(ours, shift_tokens(tokens)).total
        plain = F.cross_entropy(expected[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        assert float(loss) == pytest.approx(float(plain), rel=1e-5)


def test_a_cast_keeps_the_angles_exact():
    """bfloat16 knows no angle of position 257: the rotary table stays float32 through casts and folds."""
    position = torch.arange(600, dtype=torch.float64)[:, None]
    angle = position * 10000.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    casts = (
        lambda m: m.bfloat16(),
        lambda m: m.bfloat16().fold(),
        lambda m: m.fold().to(torch.float16),
    )
    for cast in casts:
        model = cast(random_model(vocab_size=20, mask_id=19, dim=16, length=600))
        assert model.head.weight.dtype != torch.float32
        for table, expected in zip(
            model.rotary(torch.device("cpu")), (angle.cos(), angle.sin()), strict=True
        ):
            assert table.dtype == torch.float32
            torch.testing.assert_close(table.double(), expected, atol=1e-4, rtol=0)
        assert not any("rotary" in name for name in model.state_dict())


def test_half_precision_is_near_full():
    model = random_model(vocab_size=20, mask_id=19, dim=16, length=12, scale=0.3)
    xt = random_tokens(2, 12, 20)
    with torch.no_grad():
        full = model(xt).final
        half = model.bfloat16()(xt).final
    assert half.dtype == torch.bfloat16
    assert (half.float() - full).abs().mean() < 0.05 * full.abs().mean()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"dim": 10, "heads": 3}, "dim=10 and heads=3: expected dim to be a multiple of heads"),
        ({"dim": 9, "heads": 3}, "dim=9 and heads=3: expected dim / heads to be even"),
        ({"bridge": "cubic"}, "bridge='cubic': expected one of factored, direct, softmax, none"),
        ({"positions": "sinus"}, "expected one of rotary, learned"),
        (
            {"denoiser_layers": 0},
            "denoiser_layers=0: expected a whole number at least 1 and at most",
        ),
        ({"anchor_layers": -1}, "anchor_layers=-1: expected a whole number at least 0"),
        (
            {"length": 10**9},
            "length=1000000000: expected a whole number at least 1 and at most 131072",
        ),
        ({"length": -8}, "length=-8: expected"),
        ({"heads": "2"}, "heads='2': expected a whole number"),
        ({"vocab_size": True}, "vocab_size=True: expected a whole number"),
        ({"tied": 1}, "tied=1: expected true or false"),
        ({"dropout": "0"}, "dropout='0': expected a number at least 0 and below 1"),
        ({"mask_id": 20}, "mask_id=20 and vocab_size=20: expected an id of the vocabulary"),
        ({"mask_id": None}, "mask_id=None and is_causal=False: expected a mask_id"),
        ({"time_conditioning": True, "cond_dim": None}, "expected a cond_dim with it"),
        ({"depth": 4}, "depth=4: unknown name; expected one of vocab_size, mask_id"),
    ],
)
def test_impossible_shapes_are_refused(wrong, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ModelConfig.parse("json", **({"vocab_size": 20, "mask_id": 19} | wrong))


@pytest.mark.parametrize(
    ("method", "changes", "use", "message"),
    [
        (
            "adlm",
            {},
            lambda model: model(random_tokens(1, 4, 3)),
            "4 tokens are longer than this model's length of 3",
        ),
        (
            "adlm",
            {},
            lambda model: model.new_slot_cache(1, 3),
            "only causal models can use a key-value cache",
        ),
        (
            "ar",
            {},
            lambda model: model(ZEROS, valid=ZEROS == 0, cache=model.new_slot_cache(2, 3)),
            "`valid` and a cache were given",
        ),
        ("mdlm", {}, lambda model: model.anchor_features(ZEROS), "one stage and no anchor network"),
        ("mdlm", TIMED, lambda model: model(ZEROS), r"noise_level of shape \(2,\)"),
        (
            "mdlm",
            TIMED,
            lambda model: model(ZEROS, torch.tensor(0.5)),
            r"noise_level of shape \(2,\)",
        ),
        (
            "mdlm",
            TIMED,
            lambda model: model(ZEROS, torch.zeros(2, 1)),
            r"noise_level of shape \(2,\)",
        ),
    ],
)
def test_uses_that_make_no_sense_are_refused(method, changes, use, message):
    with pytest.raises(ValueError, match=message):
        use(random_model(method, **changes))


@pytest.mark.parametrize("method", ["ar", "a2r"])
def test_left_padding_changes_nothing_in_a_causal_model(method):
    model, tokens = random_model(method, length=12), random_tokens(2, 6, 3)
    valid = torch.arange(10) >= 4
    for pad in (0, 1):
        padded = torch.cat([torch.full((2, 4), pad), tokens], 1)
        with torch.no_grad():
            final, expected = (
                model(padded, valid=valid.expand(2, -1)).final[:, 4:],
                model(tokens).final,
            )
        torch.testing.assert_close(final, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("lengths", [[12, 1, 7, 9, 3], [12, 12, 12], [1], [5, 12] * 20])
@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("mdlm", {}),
        ("adlm", {}),
        ("adlm", {"bridge": "direct", "qk_norm": True}),
        ("mdlm", {"embed_norm": True}),
        ("ar", {}),
        ("a2r", {"bridge": "direct"}),
    ],
)
def test_layers_without_padding_compute_the_same(method, changes, lengths):
    """Features, losses and gradients; the rounding of the number of positions and padding's tokens change nothing."""
    model = random_model(
        method, vocab_size=20, mask_id=19, dim=16, length=12, denoiser_layers=2, **changes
    )
    tokens, valid = random_tokens(len(lengths), 12, 19), is_valid(torch.tensor(lengths), 12)
    rows = unpad(valid)
    assert len(rows.places) % 64 == 0 and int(rows.cu_seqlens[-1]) == len(rows.places)
    assert int(rows.cu_seqlens.diff().max()) <= 12
    padded, unpadded = model(tokens, valid=valid), model(tokens, valid=rows)
    torch.testing.assert_close(unpadded.final[valid], padded.final[valid], atol=5e-4, rtol=1e-3)
    assert not unpadded.final[~valid].any()

    process = ForwardProcess(19, anchor_rule=rare_in_sequence(1) if model.anchor else None)
    number = torch.arange(len(lengths))
    text = Batch(tokens, torch.tensor(lengths), number, number, len(lengths), {})
    losses, gradients = [], []
    if model.config.is_causal and max(lengths) == 1:
        with pytest.raises(ValueError, match="all positions of this batch are padding"):
            NextToken(process).corrupt(text, 0, 0)
        return
    for is_unpadded in (False, True):
        arranged = replace(process, arrange_valid=unpad if is_unpadded else None)
        kind = NextToken if model.config.is_causal else MaskedDiffusion
        batch = kind(arranged).corrupt(text, 0, 0)
        assert isinstance(batch.valid, UnpaddedRows) == is_unpadded
        model.zero_grad()
        losses.append(
            training_loss(model, batch.to("cpu"), anchor_weight=0.5 if model.anchor else None)
        )
        losses[-1].total.backward()
        gradients.append(
            {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        )
    torch.testing.assert_close(losses[1], losses[0], atol=1e-4, rtol=1e-4)
    for name, padded in gradients[0].items():
        assert (gradients[1][name] - padded).norm() <= 1e-3 * padded.norm() + 1e-5, name


def test_padding_may_be_anywhere():
    model = random_model("mdlm", vocab_size=20, mask_id=19, dim=16, length=8)
    valid = torch.tensor(
        [[0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 0, 1, 1, 0, 0, 1], [1, 0, 0, 0, 0, 0, 0, 0]]
    ).bool()
    tokens = random_tokens(3, 8, 19)
    padded, unpadded = model(tokens, valid=valid).final, model(tokens, valid=unpad(valid)).final
    torch.testing.assert_close(unpadded[valid], padded[valid], atol=5e-4, rtol=1e-3)


@pytest.mark.parametrize(
    ("method", "changes"), [("ar", {"positions": "learned"}), ("mdlm", {"time_conditioning": True})]
)
def test_models_that_need_whole_rows_refuse_unpadded_ones(method, changes):
    model, rows = random_model(method, **changes), unpad(torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="cannot leave padding out"):
        model(torch.zeros(2, 3, dtype=torch.long), torch.ones(2), valid=rows)


def test_unpadded_rows_and_a_cache_are_refused():
    model, rows = random_model("ar"), unpad(torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="`valid` and a cache were given"):
        model(torch.zeros(2, 3, dtype=torch.long), valid=rows, cache=model.new_slot_cache(2, 3))


def test_angles_made_for_inference_serve_training():
    model = random_model("mdlm")
    with torch.inference_mode():
        model(ZEROS)
    model(ZEROS).final.sum().backward()


@pytest.mark.parametrize("method", ["adlm", "a2r"])
def test_forward_is_the_composition_of_the_two_stages(method):
    """Bit for bit; with padding and (causal) a cache too."""
    model, tokens = (
        random_model(method, vocab_size=20, mask_id=19, dim=16, length=16),
        random_tokens(3, 12, 19),
    )
    valid = torch.arange(12) < torch.tensor([12, 7, 9])[:, None]
    for where in ({}, {"valid": valid}):
        whole, anchor = model(tokens, **where), model.anchor_features(tokens, **where)
        assert torch.equal(whole.anchor, anchor)
        assert torch.equal(whole.final, model.denoise_features(anchor, **where))
    if method == "a2r":
        cache, other = model.new_slot_cache(3, 12), model.new_slot_cache(3, 12)
        for start in (0, 4, 8):
            part = tokens[:, start : start + 4]
            open_windows([*cache, *other], len(part), start, 4)
            whole, anchor = model(part, cache=cache), model.anchor_features(part, cache=other)
            assert torch.equal(whole.final, model.denoise_features(anchor, cache=other))
