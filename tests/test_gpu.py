"""What only a GPU runs: the kernels, half precision, compiled graphs. `pytest -m gpu` where there is one."""

from dataclasses import replace

import pytest
import torch

import adlm
from adlm.data.batches import Batch
from adlm.diffusion.anchors import rare_in_sequence
from adlm.diffusion.categorical import SamplingParams, draw
from adlm.diffusion.masking import ForwardProcess, corrupt
from adlm.diffusion.objectives import MaskedDiffusion, NextToken, training_loss
from adlm.diffusion.plans import remask_loop
from adlm.diffusion.rng import CounterRng
from adlm.diffusion.samplers import LeftToRight, build_sampler
from adlm.diffusion.sampling import Row, RunningBatch, fill_rows
from adlm.diffusion.selected import compute_loss_and_grad
from adlm.likelihood import estimate_nll
from adlm.models.evaluator import build_evaluator
from adlm.models.language_model import LanguageModel
from adlm.models.methods import build_config
from adlm.models.network import build_network, compile_network
from adlm.models.transformer import unpad
from tests.models.networks import OneStage, SmallConfig, TwoStages, take_steps
from tests.world import compute_probs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
VOCAB, MASK = 9001, 17


def small_model(method="adlm", **changes):
    sizes = {
        "vocab_size": VOCAB,
        "mask_id": MASK,
        "length": 64,
        "dim": 128,
        "heads": 2,
        "dropout": 0.0,
    }
    config = build_config(method, "nano", **sizes, **changes)
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
    compile_network(model.cuda())
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
    compile_network(model.cuda())
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
            compile_network(model)
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


@pytest.mark.parametrize("is_compiled", [False, True])
def test_graphs_give_the_features_of_the_model(is_compiled):
    """In every bucket of rows and lengths, with padding and without, and again when a graph is used again."""
    model = small_model()
    evaluator = build_evaluator(model, "cuda", torch.float32, is_compiled=is_compiled)
    for rows, length in ((4, 64), (3, 64), (1, 64), (5, 40), (7, 64), (9, 33), (5, 40)):
        xt = random_rows(rows, length)
        xt[:, ::2] = MASK
        valid = torch.arange(length) < torch.arange(length - rows + 1, length + 1)[:, None]
        for padding in (None, valid):
            with torch.no_grad():
                expected = model.cpu()(xt, valid=padding).final
                ours = evaluator.features(xt.cuda(), torch.zeros(rows), padding)
            is_text = torch.ones_like(valid) if padding is None else valid
            ours = ours[:, :length].cpu()[is_text]
            torch.testing.assert_close(ours, expected[is_text], atol=5e-3, rtol=5e-3)
    captured = set(evaluator.graphs)
    evaluator.features(xt.cuda(), torch.zeros(rows), valid)
    assert set(evaluator.graphs) == captured, "a shape that comes back has its graph"


@pytest.mark.parametrize(("counts", "rows"), [((8, 1, 4, 1), {8, 4, 2}), ((1, 8, 1), {1, 8})])
def test_one_row_after_many_compiles_nothing(counts, rows):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    evaluator = build_evaluator(small_model(), "cuda", is_compiled=True)
    compiled = []
    for count in counts:
        evaluator.features(random_rows(count).cuda(), torch.zeros(count))
        compiled.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert {size for size, *_ in evaluator.graphs} == rows
    assert compiled[-1] == compiled[1 if counts[0] == 1 else 0], f"graphs after each: {compiled}"


def build_rows(count, sampler, length=64, numbers=None, **options):
    """Rows that are hidden everywhere."""
    hidden = torch.full((length,), MASK)
    return [
        Row(hidden, sampler, number=number, sampling=SamplingParams(top_p=0.9), **options)
        for number in numbers or range(count)
    ]


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("kind", [OneStage, TwoStages])
def test_a_network_of_ones_own_trains_scores_and_samples(kind, is_compiled):
    """In half precision, compiled, with graphs and without, as the built-in one."""
    torch._dynamo.reset()
    config = SmallConfig(vocab_size=VOCAB, mask_id=MASK, length=64, dim=128)
    model = build_network(kind, config, seed=0).cuda()
    if is_compiled:
        compile_network(model)
    rule = rare_in_sequence(5) if kind is TwoStages else None
    objective = MaskedDiffusion(ForwardProcess(MASK, anchor_rule=rule, multiple=64))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    metrics = take_steps(model, objective, random_rows(32), precision=torch.bfloat16)
    assert all(torch.isfinite(each.values).all() for each in metrics) and len(metrics) == 2
    assert not [name for name, p in model.named_parameters() if torch.equal(p, before[name])]

    plain = build_network(kind, config, seed=1)
    plain.load_state_dict(model.state_dict())
    rows = random_rows(6)
    on_gpu, on_cpu = (estimate_nll(each, rows, objective, draws=2) for each in (model, plain))
    torch.testing.assert_close(on_gpu.row_nats, on_cpu.row_nats, rtol=1e-3, atol=1e-2)

    xt = random_rows(5)
    xt[:, ::2] = MASK
    with torch.no_grad():
        expected = plain.eval()(xt).final
    for uses_graphs in (False, True):
        evaluator = build_evaluator(
            model, "cuda", torch.float32, is_compiled=is_compiled, uses_graphs=uses_graphs
        )
        features = evaluator.features(xt.cuda(), torch.zeros(5), None)
        torch.testing.assert_close(features.cpu(), expected, atol=5e-3, rtol=5e-3)
        assert bool(evaluator.graphs) == uses_graphs
        filled = fill_rows(evaluator, build_rows(5, build_sampler("remask_loop", steps=8)))
        assert not (torch.stack(filled) == MASK).any()


ALL = ["remask_loop", "ancestral", "remask_conf", "first_hitting", "confidence", "entropy_bounded"]


@pytest.mark.parametrize("name", ALL)
def test_rows_of_a_fixed_batch_do_not_depend_on_their_neighbors(name):
    options = {} if name in ("first_hitting", "entropy_bounded") else {"steps": 16}
    sampler = build_sampler(name, **options)
    evaluator = build_evaluator(small_model(), "cuda", fixed_batch=4)
    together = torch.stack(fill_rows(evaluator, build_rows(10, sampler, seed=1)))
    assert not (together == MASK).any()
    for number in (0, 5, 9):
        (alone,) = fill_rows(evaluator, build_rows(1, sampler, numbers=[number], seed=1))
        assert torch.equal(alone, together[number])


@pytest.mark.parametrize("method", ["ar", "a2r"])
def test_causal_rows_of_a_fixed_batch_do_not_depend_on_their_neighbors(method):
    model, is_fixed = small_model(method), torch.arange(64) < torch.arange(1, 11)[:, None]
    evaluator = build_evaluator(model, "cuda", fixed_batch=4)

    def make(number):
        tokens = random_rows(10)[number]
        fixed = is_fixed[number]
        return Row(tokens, LeftToRight(), fixed, number=number, sampling=SamplingParams(top_p=0.9))

    alone = [fill_rows(evaluator, [make(number)])[0] for number in range(10)]
    running, rows = RunningBatch(evaluator), [make(number) for number in range(10)]
    waiting = list(rows)
    while waiting or running.rows:
        running.join(waiting[:2])
        waiting = waiting[2:]
        running.step()
    for row, expected in zip(rows, alone, strict=True):
        assert torch.equal(row.filled, expected)


def test_causal_caches_give_the_features_of_the_whole_row():
    model = small_model("a2r")
    evaluator = build_evaluator(model, "cuda", torch.float32).open()
    rows = [Row(x, LeftToRight(), torch.arange(64) < 8) for x in random_rows(5)]
    xt = random_rows(5).cuda()
    for position in ([8, 8, 8, 8, 8], [9, 9, 9, 9, 9], [12, 10, 10, 30, 10]):
        at = torch.tensor(position)
        with torch.no_grad():
            ours = evaluator.features(xt, torch.zeros(5), None, rows, at.numpy())
            expected = evaluator.model(xt).final
        index = torch.arange(5)
        torch.testing.assert_close(ours[index, at], expected[index, at - 1], atol=5e-3, rtol=5e-3)


def test_a_running_batch_with_joins_reads_tokens_late_and_whole():
    """The server's texts on a GPU are those of `generate` where every evaluation has the same shape."""
    import asyncio

    from adlm.serve.engine import Engine, EngineLimits, fill_rows

    lm = adlm.load(device="cuda", deterministic=True)
    requests = [
        lm.layout_rows("The old man ", length=40 + seed, seed=seed, steps=12 + seed)
        for seed in range(6)
    ]

    offline = [lm.fill_rows([replace(row) for row in rows]).texts[0] for rows in requests]

    async def run(engine):
        await asyncio.gather(*(fill_rows(engine, rows) for rows in requests))

    with Engine(lm, EngineLimits(max_rows=4)) as engine:
        asyncio.run(run(engine))
    assert [row.text for (row,) in requests] == offline


def test_prompts_are_kept():
    evaluator = build_evaluator(small_model(), "cuda")
    xt = random_rows(4)
    xt[:, 20:50] = MASK
    rows = [
        Row(x, remask_loop(32, eta=0.5), number=k, sampling=SamplingParams(top_p=0.9))
        for k, x in enumerate(xt)
    ]
    last, kept = torch.stack(fill_rows(evaluator, rows)).cpu(), xt != MASK
    assert torch.equal(last[kept], xt[kept])
    assert not (last == MASK).any()


@pytest.mark.parametrize("sampler", ["remask_loop", "confidence"])
def test_banned_tokens_are_never_drawn_where_the_head_is_wider_than_the_vocabulary(sampler):
    allowed = torch.arange(100, 140)
    banned = torch.ones(2, VOCAB, dtype=torch.bool)
    banned[0, allowed], banned[1, allowed[0]] = False, False
    kinds = torch.zeros(32, dtype=torch.int64)
    kinds[5] = 1
    evaluator, plan = build_evaluator(small_model(), "cuda"), build_sampler(sampler, steps=16)
    rows = build_rows(3, plan, length=32, kinds=kinds)
    tokens = torch.stack(fill_rows(evaluator, rows, banned=banned)).cpu()
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
