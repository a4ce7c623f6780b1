"""The model: parameter counts of the paper, a build that leaves no trace, caches, GPT-2, casts and refusals."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from adlm.diffusion.masking import shift_tokens
from adlm.diffusion.objectives import training_loss
from adlm.interop.gpt2 import from_state_dict
from adlm.methods import build_config
from adlm.models.language_model import LanguageModel, ModelConfig
from tests.goldens import facts
from tests.world import random_model

COUNTS = facts("param_counts")
TINY = {"dim": 512, "heads": 8, "anchor_layers": 8, "denoiser_layers": 4}  # the lineage's `tiny`


def shapes_only(config):
    """The model on the meta device: shapes without memory."""
    model = LanguageModel.__new__(LanguageModel)
    nn.Module.__init__(model)
    model.config = config
    with torch.device("meta"):
        model._build(config)
    return model


def count(*modules):
    return sum(p.numel() for module in modules if module is not None for p in module.parameters())


def stage_counts(stack, embed, head):
    """A stage as the lineage counts it: its input map, blocks, output layer and noise embedding."""
    norm_and_modulation = count(stack.norm, stack.modulation)
    found = {
        "vocab_embed": count(embed),
        "blocks": count(stack.layers),
        "per_block": count(stack.layers[0]),
        "n_blocks": len(stack.layers),
        "output_layer": count(head) + norm_and_modulation,
    }
    if stack.condition is not None:
        found["sigma_map"] = count(stack.condition)
    return found | {"total": sum(found.get(k, 0) for k in ("vocab_embed", "blocks", "output_layer", "sigma_map"))}


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_counts_are_the_authors(name):
    """In total and per part, for all eight sizes."""
    method, size, _ = name.split("_")
    expected = COUNTS[name]
    preset, changes = ("small", TINY) if size == "tiny" else (size, {})
    vocabulary = {"vocab_size": expected["vocab_size"], "mask_id": expected["mask_index"]}
    model = shapes_only(build_config(method, preset, **vocabulary, **changes))
    assert count(model) == expected["total"]
    assert count(model) - count(model.embed) == expected["total_non_embedding"]
    if "denoiser" in expected:
        assert stage_counts(model.anchor, model.embed, model.anchor_head) == expected["backbone"]
        assert stage_counts(model.denoiser, model.bridge, model.head) == expected["denoiser"]
    else:
        assert stage_counts(model.denoiser, model.embed, model.head) == expected["backbone"]


def test_all_eight_counts_are_there():
    assert len(COUNTS) == 8
    assert f"{COUNTS['adlm_small_gpt2']['total'] / 1e6:.1f}" == "293.2"


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
    for (name, a), b, c in zip(one.named_parameters(), same.parameters(), other.parameters(), strict=True):
        assert torch.isfinite(a).all() and torch.equal(a, b), name
        assert torch.equal(a, c) == bool((a == a.flatten()[0]).all() or "bridge" in name), name


def test_a_new_model_knows_nothing():
    """Heads start at zero: every token that is not the mask is as likely as any other."""
    model = LanguageModel(build_config("adlm", "nano", vocab_size=30, mask_id=29, dim=16, heads=2))
    anchor, log_probs = model.log_probs(torch.full((1, 5), 29))
    torch.testing.assert_close(log_probs[..., :29], torch.full((1, 5, 29), -math.log(29)))
    torch.testing.assert_close(anchor, torch.full((1, 5, 30), -math.log(30)))


CAUSAL = {"vocab_size": 20, "mask_id": None, "dim": 16, "length": 13, "seed": 2, "scale": 0.6}


@pytest.mark.parametrize("changes", [{}, {"positions": "learned"}, {"cond_dim": 8}], ids=str)
@pytest.mark.parametrize("method", ["ar", "a2r"])
def test_cached_features_are_the_full_ones(method, changes):
    """In chunks of any size, in any order of sizes."""
    model = random_model(method, **(CAUSAL | {"denoiser_layers": 2} | changes))
    tokens = torch.randint(20, (3, 13), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        full = model(tokens)
        for sizes in ([1] * 13, [13], [5, 1, 1, 6], [1, 12], [4, 4, 4, 1], [12, 1]):
            cache, start = model.new_cache(3), 0
            for size in sizes:
                part = model(tokens[:, start : start + size], cache=cache)
                torch.testing.assert_close(part.final, full.final[:, start : start + size], atol=1e-5, rtol=1e-5)
                if method == "a2r":
                    torch.testing.assert_close(part.anchor, full.anchor[:, start : start + size], atol=1e-5, rtol=1e-5)
                start += size
    with pytest.raises(ValueError, match="length of 13"):
        model(tokens[:, :1], cache=cache)


@pytest.mark.parametrize("method", ["mdlm", "adlm", "ar", "a2r"])
def test_causal_models_do_not_see_the_future_and_masked_ones_see_everything(method):
    is_causal = method in ("ar", "a2r")
    model = random_model(method, **(CAUSAL | ({} if is_causal else {"mask_id": 19})))
    tokens = torch.randint(19, (2, 13), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 19
    with torch.no_grad():
        difference = (model(tokens).final - model(changed).final).abs()
    assert (difference[:, :7].amax() == 0) == is_causal
    assert difference[:, 7 if is_causal else 0 :].amax((0, 2)).min() > 1e-4


GPT2 = {"heads": 4, "dim": 24, "layers": 3}


def plain_gpt2(state, tokens):
    """GPT-2 written out, so that the layout is checked where transformers is not installed."""
    heads, dim = GPT2["heads"], GPT2["dim"]
    x = state["wte.weight"][tokens] + state["wpe.weight"][: tokens.shape[1]]
    causal = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()

    def norm(x, name):
        return F.layer_norm(x, (dim,), state[f"{name}.weight"], state[f"{name}.bias"])

    def conv(x, name):
        return x @ state[f"{name}.weight"] + state[f"{name}.bias"]

    for i in range(GPT2["layers"]):
        q, k, v = conv(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn").split(dim, -1)
        q, k, v = (y.unflatten(-1, (heads, -1)).transpose(1, 2) for y in (q, k, v))
        scores = (q @ k.transpose(-1, -2) / math.sqrt(dim // heads)).masked_fill(~causal, -torch.inf)
        x = x + conv((scores.softmax(-1) @ v).transpose(1, 2).flatten(2), f"h.{i}.attn.c_proj")
        inner = conv(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc")
        inner = 0.5 * inner * (1 + torch.tanh(math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3)))
        x = x + conv(inner, f"h.{i}.mlp.c_proj")
    return norm(x, "ln_f") @ state["wte.weight"].t()


def random_gpt2():
    rng, dim = torch.Generator().manual_seed(0), GPT2["dim"]
    shapes = {"wte.weight": (40, dim), "wpe.weight": (16, dim), "ln_f.weight": (dim,), "ln_f.bias": (dim,)}
    matrices = {"attn.c_attn": (dim, 3 * dim), "attn.c_proj": (dim, dim)}
    matrices |= {"mlp.c_fc": (dim, 4 * dim), "mlp.c_proj": (4 * dim, dim), "ln_1": (dim,), "ln_2": (dim,)}
    for i in range(GPT2["layers"]):
        for name, shape in matrices.items():
            shapes |= {f"h.{i}.{name}.weight": shape, f"h.{i}.{name}.bias": shape[-1:]}
    return {name: torch.randn(shape, generator=rng) * 0.3 for name, shape in shapes.items()}


@pytest.mark.parametrize("folded", [False, True])
def test_gpt2_written_out(folded):
    """Logits and loss; tests/interop/test_gpt2.py compares with transformers."""
    state, tokens = random_gpt2(), torch.randint(40, (3, 16), generator=torch.Generator().manual_seed(1))
    model = from_state_dict(state, heads=GPT2["heads"], dropout=0.0).eval()
    model = model.fold() if folded else model
    assert model.head.weight is model.embed.weight
    with torch.no_grad():
        expected = plain_gpt2(state, tokens)
        torch.testing.assert_close(model.head(model(tokens).final), expected, atol=1e-4, rtol=1e-4)
        loss = training_loss(model, shift_tokens(tokens)).total
    plain = F.cross_entropy(expected[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    assert float(loss) == pytest.approx(float(plain), rel=1e-5)


def test_a_cast_keeps_the_angles_exact():
    """bfloat16 knows no angle of position 257: the rotary table stays float32 through casts and folds."""
    position = torch.arange(600, dtype=torch.float64)[:, None]
    angle = position * 10000.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    casts = (lambda m: m.bfloat16(), lambda m: m.bfloat16().fold(), lambda m: m.fold().to(torch.float16))
    for cast in casts:
        model = cast(random_model(vocab_size=20, mask_id=19, dim=16, length=600))
        assert model.head.weight.dtype != torch.float32
        for table, expected in zip(model.rotary(torch.device("cpu")), (angle.cos(), angle.sin()), strict=True):
            assert table.dtype == torch.float32
            torch.testing.assert_close(table.double(), expected, atol=1e-4, rtol=0)
        assert not any("rotary" in name for name in model.state_dict())


def test_half_precision_is_near_full():
    model = random_model(vocab_size=20, mask_id=19, dim=16, length=12, scale=0.3)
    xt = torch.randint(20, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        full = model(xt).final
        half = model.bfloat16()(xt).final
    assert half.dtype == torch.bfloat16
    assert (half.float() - full).abs().mean() < 0.05 * full.abs().mean()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"dim": 10, "heads": 3}, "dim 10 must be a multiple of heads 3"),
        ({"dim": 9, "heads": 3}, "must be even"),
        ({"bridge": "none"}, "factored, direct, softmax"),
        ({"positions": "sinus"}, "rotary, learned"),
        ({"denoiser_layers": 0}, "denoiser_layers must be at least 1"),
        ({"anchor_layers": -1}, "anchor_layers must not be negative"),
        ({"mask_id": 20}, "mask_id 20 is outside the vocabulary of 20"),
        ({"mask_id": None}, "needs a mask_id"),
        ({"time_conditioning": True, "cond_dim": None}, "needs a cond_dim"),
    ],
)
def test_impossible_shapes_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**({"vocab_size": 20, "mask_id": 19} | wrong))


def test_uses_that_make_no_sense_are_refused():
    model = random_model(length=3)
    with pytest.raises(ValueError, match="4 tokens are longer than this model's length of 3"):
        model(torch.zeros(1, 4, dtype=torch.long))
    with pytest.raises(ValueError, match="only causal models can use a key-value cache"):
        model.new_cache(1)
    causal = random_model("ar", **CAUSAL)
    cache = causal.new_cache(1, 2)
    with pytest.raises(ValueError, match="do not fit into a cache of 2"):
        causal(torch.zeros(1, 3, dtype=torch.long), cache=cache)


@pytest.mark.parametrize("method", ["ar", "a2r"])
def test_left_padding_changes_nothing_in_a_causal_model(method):
    model, rng = random_model(method, length=12), torch.Generator().manual_seed(0)
    tokens = torch.randint(3, (2, 6), generator=rng)
    valid = torch.arange(10) >= 4
    for pad in (0, 1):
        padded = torch.cat([torch.full((2, 4), pad), tokens], 1)
        with torch.no_grad():
            found, expected = model(padded, valid=valid.expand(2, -1)).final[:, 4:], model(tokens).final
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="`valid` or a cache, not both"):
        model(tokens, valid=torch.ones(2, 6).bool(), cache=model.new_cache(2))


def test_a_time_conditioned_model_must_be_told_the_noise_level():
    model = random_model("mdlm", length=6, time_conditioning=True)
    tokens = torch.zeros(2, 6, dtype=torch.long)
    for level in (None, torch.tensor(0.5), torch.zeros(2, 1)):
        with pytest.raises(ValueError, match=r"noise_level of shape \(2,\)"):
            model(tokens, level)


def test_angles_made_for_inference_serve_training():
    model, tokens = random_model("mdlm", length=6), torch.zeros(1, 6, dtype=torch.long)
    with torch.inference_mode():
        model(tokens)
    model(tokens).final.sum().backward()


@pytest.mark.parametrize("method", ["adlm", "a2r"])
def test_forward_is_the_composition_of_the_two_stages(method):
    """Bit for bit; with padding, a noise level and (causal) a cache too. A one-stage model has no anchor features."""
    config = build_config(method, "nano", vocab_size=97, mask_id=96, length=16, dim=32, heads=2, bridge="factored")
    model = LanguageModel(config, seed=1).eval()
    tokens = torch.randint(0, 96, (3, 12), generator=torch.Generator().manual_seed(0))
    valid = torch.arange(12) < torch.tensor([12, 7, 9])[:, None]
    for where in ({}, {"valid": valid}):
        whole, anchor = model(tokens, **where), model.anchor_features(tokens, **where)
        assert torch.equal(whole.anchor, anchor)
        assert torch.equal(whole.final, model.denoise_features(anchor, **where))
    if method == "a2r":
        cache, other = model.new_cache(3), model.new_cache(3)
        for part in tokens.split(5, 1):
            whole, anchor = model(part, cache=cache), model.anchor_features(part, cache=other)
            assert torch.equal(whole.final, model.denoise_features(anchor, cache=other))
    one_stage = LanguageModel(build_config("mdlm", "nano", vocab_size=97, mask_id=96, length=16, dim=32, heads=2))
    with pytest.raises(ValueError, match="one stage and no anchor network"):
        one_stage.anchor_features(tokens)
