"""What only a GPU runs: the kernels, half precision, compiled graphs. `pytest -m gpu` where there is one."""

from dataclasses import replace

import pytest
import torch

import adlm
from adlm.data.batches import Batch
from adlm.diffusion.anchors import rare_in_sequence
from adlm.diffusion.categorical import SamplingParams, TokenLimits, draw
from adlm.diffusion.masking import ForwardProcess, corrupt
from adlm.diffusion.objectives import MaskedDiffusion, NextToken, training_loss
from adlm.diffusion.plans import remask_loop
from adlm.diffusion.rng import CounterRng
from adlm.diffusion.samplers import build_sampler
from adlm.diffusion.selected import compute_loss_and_grad
from adlm.generate import compile_for_sampling, stream_tokens
from adlm.models.language_model import LanguageModel
from adlm.models.methods import build_config
from adlm.models.transformer import unpad
from tests.world import compute_probs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
VOCAB, MASK = 9001, 17


def small_model(**changes):
    sizes = {
        "vocab_size": VOCAB,
        "mask_id": MASK,
        "length": 64,
        "dim": 128,
        "heads": 2,
        "dropout": 0.0,
    }
    config = build_config("adlm", "nano", **sizes, **changes)
    model, rng = LanguageModel(config), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modulation" in name or name.endswith("head.weight"):
                parameter.normal_(std=0.2, generator=rng)
    return model.eval()


def random_rows(rows, length=64):
    tokens = torch.randint(0, VOCAB - 1, (rows, length), generator=torch.Generator().manual_seed(1))
    return tokens + (tokens >= MASK)


@pytest.mark.parametrize("offset", [None, 9.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_kernel_is_the_formula(dtype, offset):
    rng = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(33, VOCAB, generator=rng)).to(dtype)
    logits[:, MASK] = -torch.inf
    target, weight = torch.randint(20, VOCAB, (33,), generator=rng), torch.rand(33, generator=rng)
    shift = None if offset is None else torch.tensor(offset)
    loss, slope = compute_loss_and_grad(
        logits.clone().float(), target, weight, shift
    )  # it overwrites its argument
    on_gpu = [None if x is None else x.cuda() for x in (logits, target, weight, shift)]
    gpu_loss, gpu_slope = compute_loss_and_grad(*on_gpu)
    torch.testing.assert_close(gpu_loss.cpu(), loss, atol=1e-4, rtol=1e-5)
    tolerance = 1e-6 if dtype == torch.float32 else 8e-3
    torch.testing.assert_close(gpu_slope.float().cpu(), slope, atol=1e-6, rtol=tolerance)


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("scale", [0.3, 3.8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_nucleus_kernel_inverts_the_distribution(dtype, scale, top_p):
    from adlm.diffusion.kernels import draw_nucleus

    logits = (
        (scale * torch.randn(256, VOCAB, generator=torch.Generator().manual_seed(0)))
        .to(dtype)
        .cuda()
    )
    logits[:, MASK] = -torch.inf
    u = torch.rand(256, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).cuda()
    u[0], u[1] = 0.0, 1 - 2**-53
    tokens, probs = draw_nucleus(logits, u, top_p)
    law = compute_probs(logits.float(), SamplingParams(top_p=top_p))
    total = law.cumsum(-1)
    expected = torch.searchsorted(total, (u * total[:, -1])[:, None], right=True)[:, 0].clamp(
        max=VOCAB - 1
    )
    # float32 sums may move a token across a boundary of the distribution function, or the nucleus by one token
    assert (tokens == expected).float().mean() > 0.98
    assert (law.gather(1, tokens[:, None]) > 0).float().mean() > 0.99
    same = tokens == expected
    torch.testing.assert_close(
        probs[same], law.gather(1, tokens[:, None])[:, 0][same], atol=1e-4, rtol=1e-3
    )


@pytest.mark.parametrize("top_p", [0.8, 1.0])
def test_least_probabilities_are_those_of_the_cpu(top_p):
    sampling = SamplingParams(top_p=top_p, min_p=0.2)
    logits = 3 * torch.randn(256, VOCAB, generator=torch.Generator().manual_seed(0))
    u = torch.rand(256, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    law = compute_probs(logits, sampling)
    tokens = draw(logits.cuda(), u.cuda(), sampling).tokens.cpu()
    assert (law.gather(1, tokens[:, None]) > 0).float().mean() > 0.99
    assert (tokens == draw(logits, u, sampling).tokens).float().mean() > 0.98


@pytest.mark.parametrize("bridge", ["factored", "direct", "softmax"])
def test_half_precision_training_agrees_with_float32(bridge):
    model = small_model(bridge=bridge)
    process = ForwardProcess(MASK, anchor_rule=rare_in_sequence(5), multiple=64)
    batch = corrupt(random_rows(8), process, CounterRng.from_seed(0, 8), 0)
    loss = training_loss(model, batch, anchor_weight=0.5)
    loss.total.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model.cuda().compile_layers()
    with torch.autocast("cuda", torch.bfloat16):
        gpu_loss = training_loss(model, batch.to("cuda"), anchor_weight=0.5)
    gpu_loss.total.backward()
    assert float(gpu_loss.total) == pytest.approx(float(loss.total), rel=1e-2)
    for name, parameter in model.named_parameters():
        error = (parameter.grad.cpu() - grads[name]).norm() / (grads[name].norm() + 1e-8)
        assert error < 0.05, f"{name}: relative error {float(error):.3f}"


@pytest.mark.parametrize("method", ["mdlm", "adlm", "ar", "a2r"])
def test_rows_without_padding_have_the_losses_and_gradients_of_padded_ones(method):
    sizes = {
        "vocab_size": VOCAB,
        "mask_id": MASK,
        "length": 256,
        "dim": 320,
        "heads": 5,
        "dropout": 0.0,
    }
    model, rng = (
        LanguageModel(build_config(method, "nano", **sizes)),
        torch.Generator().manual_seed(1),
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modulation" in name or name.endswith("head.weight"):
                parameter.normal_(std=0.05, generator=rng)
    model.cuda().compile_layers()
    lengths, number = torch.randint(1, 257, (64,), generator=rng), torch.arange(64)
    process = ForwardProcess(
        MASK, anchor_rule=rare_in_sequence(5) if model.anchor else None, multiple=64
    )
    text = Batch(random_rows(64, 256), lengths, number, number, 64, {})
    losses, gradients = [], []
    for is_unpadded in (False, True):
        arranged = replace(process, arrange_valid=unpad if is_unpadded else None)
        kind = NextToken if model.config.is_causal else MaskedDiffusion
        batch = kind(arranged).corrupt(text, 0, 0)
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = training_loss(
                model, batch.to("cuda"), anchor_weight=0.5 if model.anchor else None
            )
        loss.total.backward()
        losses.append(float(loss.total))
        gradients.append({name: p.grad.float() for name, p in model.named_parameters()})
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    for name, padded in gradients[0].items():
        error = (gradients[1][name] - padded).norm() / (padded.norm() + 1e-8)
        assert error < 0.03, f"{name}: relative error {float(error):.3f}"


@pytest.mark.parametrize(
    ("rows", "length", "dim"), [(32, 1024, 768), (128, 512, 512), (256, 128, 768)]
)
def test_compiled_gradients_are_those_of_eager_layers_at_real_sizes(rows, length, dim):
    gradients = []
    for is_compiled in (False, True):
        torch._dynamo.reset()
        sizes = {
            "vocab_size": 512,
            "mask_id": 511,
            "dim": dim,
            "heads": dim // 64,
            "denoiser_layers": 2,
        }
        model = LanguageModel(
            build_config("mdlm", "small", **sizes, length=length, dropout=0.0), seed=0
        )
        rng = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "modulation" in name or name == "head.weight":
                    parameter.normal_(std=0.2 if "modulation" in name else dim**-0.5, generator=rng)
        model.cuda()
        if is_compiled:
            model.compile_layers()
        x0 = torch.randint(511, (rows, length), generator=rng)
        batch = corrupt(x0, ForwardProcess(511, multiple=64), CounterRng.from_seed(0, rows), 0).to(
            "cuda"
        )
        with torch.autocast("cuda", torch.bfloat16):
            loss = training_loss(model, batch)
        loss.total.backward()
        gradients.append({name: p.grad.float() for name, p in model.named_parameters()})
    for name, eager in gradients[0].items():
        error = (gradients[1][name] - eager).norm() / (eager.norm() + 1e-8)
        assert error < 0.03, f"{name}: relative error {float(error):.3f}"


def test_a_graph_gives_the_features_of_the_model():
    model = small_model()
    predictor = compile_for_sampling(model, "cuda", torch.float32)
    for rows in (4, 3, 1):
        xt = random_rows(rows)
        xt[:, ::2] = MASK
        with torch.no_grad():
            expected = model.cpu()(xt).final
            ours = predictor.predict(xt.cuda(), torch.zeros(rows), None)
        torch.testing.assert_close(ours.cpu(), expected, atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize("name", ["remask_loop", "remask_conf", "first_hitting", "confidence"])
def test_rows_of_a_fixed_batch_do_not_depend_on_their_neighbours(name):
    options = {} if name == "first_hitting" else {"steps": 16}
    sampler, sampling = build_sampler(name, **options), SamplingParams(top_p=0.9)
    predictor = compile_for_sampling(small_model(), "cuda", fixed_batch=4)
    xt = torch.full((10, 64), MASK)
    *_, together = stream_tokens(predictor, xt, sampler, seed=1, sampling=sampling)
    assert not (together.tokens == MASK).any()
    for row in (0, 5):
        rows = torch.tensor([row])
        *_, alone = stream_tokens(predictor, xt[:1], sampler, seed=1, rows=rows, sampling=sampling)
        assert torch.equal(alone.tokens[0], together.tokens[row])


def test_prompts_are_kept():
    predictor = compile_for_sampling(small_model(), "cuda")
    xt = random_rows(4)
    xt[:, 20:50] = MASK
    *_, last = stream_tokens(
        predictor, xt, remask_loop(32, eta=0.5), seed=3, sampling=SamplingParams(top_p=0.9)
    )
    kept = xt != MASK
    assert torch.equal(last.tokens.cpu()[kept], xt[kept])
    assert not (last.tokens == MASK).any()


@pytest.mark.parametrize("sampler", ["remask_loop", "confidence"])
def test_banned_tokens_are_never_drawn_where_the_head_is_wider_than_the_vocabulary(sampler):
    allowed = torch.arange(100, 140)
    banned = torch.ones(2, VOCAB, dtype=torch.bool)
    banned[0, allowed], banned[1, allowed[0]] = False, False
    kind = torch.zeros(3, 32, dtype=torch.int64)
    kind[:, 5] = 1
    *_, frame = stream_tokens(
        compile_for_sampling(small_model(), "cuda"),
        torch.full((3, 32), MASK),
        build_sampler(sampler, steps=16),
        seed=0,
        sampling=SamplingParams(top_p=0.9),
        limits=TokenLimits(kind, banned),
    )
    tokens = frame.tokens.cpu()
    assert torch.isin(tokens, allowed).all() and (tokens[:, 5] == allowed[0]).all()


def test_texts_do_not_depend_on_the_batch_with_deterministic():
    lm = adlm.load(device="cuda", deterministic=True)
    texts = lm.generate("The old man ", length=48, n=5, seed=3, steps=24).texts
    assert lm.generate("The old man ", length=48, n=5, seed=3, steps=24, batch=2).texts == texts
    assert all(text.startswith("The old man ") for text in texts) and len(set(texts)) == 5
    assert lm.score(texts)[0].nll > 0


@pytest.mark.parametrize("arm", ["acot", "coconut", "mdlm"])
def test_captured_reasoning_passes_train_as_eager_ones(arm):
    from adlm.apps.reasoning.losses import (
        CAPTURED_LENGTHS,
        CapturedFeatures,
        compute_features,
        reasoning_loss,
    )
    from adlm.apps.reasoning.runs import build_reasoning_objective, build_shape
    from adlm.apps.reasoning.tasks import ItemBatches, open_task
    from adlm.config import load_config

    changes = [
        f"reasoning.arm={arm}",
        "reasoning.task=arithmetic",
        "reasoning.hops=2",
        "reasoning.stage_steps=2",
    ]
    changes += [
        "model.dim=64",
        "model.heads=4",
        "model.denoiser_layers=2",
        "model.dropout=0",
        "folder=run",
    ]
    config = load_config("reason", *changes, method="mdlm" if arm == "mdlm" else "ar")
    task = open_task(config.reasoning)
    objective = build_reasoning_objective(config, task, multiple=CAPTURED_LENGTHS)

    def train(run):
        model = LanguageModel(build_shape(config, task, None, 64)).cuda()
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
        for step, batch in zip(
            range(1, 9), ItemBatches(task, 16, seed=0)
        ):  # every stage, and shapes that come back
            loss = reasoning_loss(model, objective.corrupt(batch, 0, step).to("cuda"), run=run)
            optimizer.zero_grad()
            loss.total.backward()
            optimizer.step()
            losses.append(loss.total.item())
        return losses, list(model.parameters())

    captured = CapturedFeatures()
    (losses, weights), (expected, eager_weights) = train(captured), train(compute_features)
    assert captured.passes and losses[-1] < losses[0]
    torch.testing.assert_close(losses, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(weights, eager_weights, atol=1e-4, rtol=1e-3)
