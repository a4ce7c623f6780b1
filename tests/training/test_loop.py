"""The loop: the same seed gives the same run in any micro-batches; every method trains; divergence stops it."""

import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, Optimizer

from adlm.config import OptimizerSettings, ParallelSettings
from adlm.data.batches import Batch, ShuffledBatches, TensorRows
from adlm.data.shards import open_data
from adlm.diffusion.anchors import AnchorRule, every_token, rare_in_sequence
from adlm.diffusion.masking import ForwardProcess, NoisyBatch
from adlm.diffusion.objectives import OBJECTIVES, MaskedDiffusion, Objective
from adlm.distributed import DistributedContext
from adlm.errors import Diverged
from adlm.models.language_model import LanguageModel
from adlm.models.methods import METHODS
from adlm.models.transformer import unpad
from adlm.training.distributed import LossModule, parallelize
from adlm.training.guard import GuardSettings, LossGuard, suggest_remedy
from adlm.training.logging import LoggedRun, LogSettings, RunLogger, StepMetrics
from adlm.training.optim import BatchedMuon, build_optimizers, get_lr_multiplier
from adlm.training.state import start_state
from adlm.training.train import corrupt_ahead, train_steps
from tests.training.runs import curve, data, run, tiny_config

FAST = OptimizerSettings(lr=3e-3, betas=(0.9, 0.95))


def rows(padded: bool = False) -> TensorRows:
    prepared = open_data(data("documents" if padded else "wrapped")).rows("train")
    return TensorRows(*prepared.fetch(range(64)))


def tiny(method: str = "adlm", dropout: float = 0.0) -> LanguageModel:
    prepared = open_data(data())
    sizes = {
        "vocab_size": prepared.vocab_size,
        "mask_id": prepared.mask_id,
        "dim": 32,
        "heads": 2,
        "length": 32,
    }
    return LanguageModel(tiny_config(method, **sizes, dropout=dropout), seed=1)


def build_objective(
    model: LanguageModel,
    anchor_rule: AnchorRule | None = None,
    method: str | None = None,
    ramp_steps: int | None = 6,
    **options: Any,
) -> Objective:
    """The paper's objective, or changes to it."""
    rule = anchor_rule or rare_in_sequence(max_count=5)
    process = ForwardProcess(
        model.config.mask_id,
        anchor_rule=rule if model.config.anchor_layers else None,
        ramp_steps=ramp_steps,
        **options,
    )
    name = "causal" if model.config.is_causal else "masked"
    return OBJECTIVES[METHODS[method].objective if method else name](process)


def take_steps(
    model: LanguageModel,
    *,
    seed: int = 0,
    steps: int = 6,
    padded: bool = False,
    objective: dict[str, Any] | None = None,
    optimizers: list[Optimizer] | None = None,
    checkpoint_activations: bool = False,
    method: str = "adlm",
    **options: Any,
) -> list[StepMetrics]:
    """Train for some steps of 8 rows."""
    built = build_objective(model, **{"method": method, "ramp_steps": steps} | (objective or {}))
    learner = LossModule(model, built)
    settings = ParallelSettings(checkpoint_activations=checkpoint_activations)
    parallel = parallelize(learner, DistributedContext(torch.device("cpu")), settings)
    batches = iter(ShuffledBatches(rows(padded), 8, seed=seed))
    optimizers = optimizers if optimizers is not None else build_optimizers(model, FAST)
    return list(
        train_steps(parallel, built, batches, optimizers, steps=steps, seed=seed, **options)
    )


def plain_descent(model: LanguageModel) -> list[Optimizer]:
    """Steps proportional to the gradient, so that rounding stays rounding."""
    return [SGD([{"params": list(model.parameters()), "peak": 0.1}], lr=0.1)]


def perturbed(method: str = "adlm", dropout: float = 0.0) -> LanguageModel:
    """A model whose heads are not zero: the whole of it has gradients from the first step."""
    model = tiny(method, dropout)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2))
            )
    return model


@pytest.mark.parametrize("micro_batch", [None, 3])
def test_batches_that_are_corrupted_in_a_thread_give_the_same_run(micro_batch: int | None) -> None:
    runs = []
    for in_background in (False, True):
        model = perturbed(dropout=0.1)
        metrics = take_steps(
            model, padded=True, micro_batch=micro_batch, in_background=in_background
        )
        runs.append([*(each.values for each in metrics), *model.state_dict().values()])
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


def test_an_error_in_the_thread_stops_the_run() -> None:
    model = tiny()
    model.config = model.config.replace(mask_id=int(rows().tokens[0, 0]))  # a token of the text
    with pytest.raises(ValueError, match="holds the mask id"):
        take_steps(model, steps=20, in_background=True)


def assert_equal_runs(
    method: str, whole: dict[str, Any], cut: dict[str, Any], dropout: float = 0.0
) -> None:
    one, other = perturbed(method, dropout), perturbed(method, dropout)
    first = take_steps(one, method=method, optimizers=plain_descent(one), **whole)
    second = take_steps(other, method=method, optimizers=plain_descent(other), **cut)
    values = [torch.stack([metrics.values for metrics in run]) for run in (first, second)]
    torch.testing.assert_close(values[1], values[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(other.state_dict(), one.state_dict(), rtol=0, atol=1e-6)
    start = perturbed(method).parameters()
    assert (
        max(
            float((p - q).detach().abs().max())
            for p, q in zip(one.parameters(), start, strict=True)
        )
        > 1e-3
    )


def test_the_same_seed_gives_the_same_losses_bit_for_bit() -> None:
    def losses(seed: int, dropout: float = 0.1) -> list[float]:
        return [
            float(metrics.values[0]) for metrics in take_steps(tiny(dropout=dropout), seed=seed)
        ]

    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = losses(3)
    assert torch.equal(torch.get_rng_state(), before)  # the caller's generator does not move
    torch.rand(7)  # and what the caller draws changes nothing
    assert losses(3) == first
    assert losses(4) != first and losses(3, dropout=0.0) != first


@pytest.mark.parametrize("method", list(METHODS))
def test_every_method_trains(method: str) -> None:
    model = tiny(method)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    nlls = [float(metrics.values[1]) for metrics in take_steps(model, method=method, steps=40)]
    assert sum(nlls[-10:]) < 0.95 * sum(nlls[:10])
    # The head is zero at first, so what lies below it moves from the second step on: nothing is left out.
    still = [name for name, p in model.named_parameters() if torch.equal(p, before[name])]
    assert not [name for name in still if ".condition." not in name], still


def test_metrics_have_the_step_and_its_settings() -> None:
    metrics = take_steps(tiny(), steps=6, first_step=3, lr_multiplier=lambda step: step / 10)
    assert [each.step for each in metrics] == [3, 4, 5, 6]
    assert [each.lr_multiplier for each in metrics] == [0.3, 0.4, 0.5, 0.6]
    assert all(each.stall >= 0 and len(each.batch.tokens) == 8 for each in metrics)
    assert float(metrics[0].values[3]) > 0


def test_a_slow_corruption_is_a_stall_in_the_background_and_elsewhere_a_part_of_the_step() -> None:
    class Slow(MaskedDiffusion):
        def corrupt(self, batch: Batch, seed: int, step: int) -> NoisyBatch:
            time.sleep(0.2)
            return super().corrupt(batch, seed, step)

    process = ForwardProcess(open_data(data()).mask_id)
    for in_background in (True, False):
        batches = iter(ShuffledBatches(rows(), batch=8, seed=3))
        ahead = corrupt_ahead(
            Slow(process),
            batches,
            range(1, 4),
            seed=3,
            micro_batch=None,
            in_background=in_background,
        )
        stalls = [stall for *_, stall in ahead]
        assert len(stalls) == 3
        assert all((stall >= 0.15) == in_background for stall in stalls), stalls


def test_the_anchor_term_is_optimized_and_not_reported() -> None:
    objective = {"anchor_rule": every_token(), "anchor_weight": 0.05}
    (anchored,) = take_steps(tiny(), steps=1, objective=objective)
    assert anchored.anchor_weight == 0.05
    assert anchored.values[0] > anchored.values[1]
    (plain,) = take_steps(tiny(), steps=1, objective={"anchor_weight": 0.0})
    assert plain.values[0] == plain.values[1] == anchored.values[1]


def test_the_anchor_weight_ramps() -> None:
    text = next(iter(ShuffledBatches(rows(), 8)))
    assert build_objective(tiny("mdlm")).corrupt(text, 0, 5).anchor_weight is None
    for ramp_steps, expected in ((4, [0.25, 0.5, 0.6, 0.6]), (None, [0.6] * 4)):
        objective = build_objective(tiny(), anchor_weight=0.6, ramp_steps=ramp_steps)
        weights = [objective.corrupt(text, 0, step).anchor_weight for step in (1, 2, 3, 4)]
        assert weights == expected


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("method", list(METHODS))
def test_a_batch_in_pieces_is_the_batch(method: str, padded: bool) -> None:
    """Accumulated gradients are those of the whole: padded pieces weigh by their tokens, not by their number."""
    for cut in (1, 3):
        whole = {"padded": padded, "steps": 3}
        assert_equal_runs(method, whole, whole | {"micro_batch": cut})


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_activations_may_be_computed_again(dropout: float) -> None:
    assert_equal_runs("adlm", {}, {"checkpoint_activations": True}, dropout)


def test_the_rate_climbs_then_stays_or_falls() -> None:
    def rate(step: int, decay: str, **options: float) -> float:
        return get_lr_multiplier(
            step, 100, OptimizerSettings(decay=decay, **{"warmup": 10, **options})
        )

    assert [rate(step, "constant") for step in (1, 5, 10, 100)] == [0.1, 0.5, 1.0, 1.0]
    assert [rate(step, "cosine") for step in (10, 55, 100)] == pytest.approx([1.0, 0.55, 0.1])
    assert rate(100, "cosine", floor=0.3) == pytest.approx(0.3)
    falling = [rate(step, "cosine") for step in range(10, 101)]
    assert falling == sorted(falling, reverse=True)
    assert [rate(step, "wsd") for step in (5, 10, 81)] == [0.5, 1.0, 1.0]
    assert [rate(step, "wsd") for step in (82, 91, 100)] == pytest.approx([0.95, 0.5, 0.05])
    assert [rate(step, "wsd", decay_share=0.5) for step in (51, 52, 100)] == pytest.approx(
        [1, 0.98, 0.02]
    )
    overlapping = [rate(step, "wsd", warmup=60, decay_share=1.0) for step in range(1, 101)]
    assert (
        max(abs(b - a) for a, b in pairwise(overlapping)) < 0.02 and 0.62 < max(overlapping) < 0.64
    )
    assert get_lr_multiplier(1, 10, OptimizerSettings(warmup=0)) == 1.0


@pytest.mark.parametrize("checkpoint_activations", [False, True])
def test_steps_without_padding_are_those_with_it(checkpoint_activations: bool) -> None:
    """In micro-batches of unequal size too; dropout aside, which draws for fewer positions."""
    runs = []
    for is_unpadded in (False, True):
        model = perturbed()
        options: dict[str, Any] = {
            "padded": True,
            "micro_batch": 3,
            "checkpoint_activations": checkpoint_activations,
        }
        options |= {
            "optimizers": plain_descent(model),
            "objective": {"arrange_valid": unpad if is_unpadded else None},
        }
        values = torch.stack([metrics.values for metrics in take_steps(model, **options)])
        runs.append((values, torch.cat([p.detach().flatten() for p in model.parameters()])))
    torch.testing.assert_close(runs[1], runs[0], atol=1e-4, rtol=1e-4)


def test_muon_moves_the_layers_matrices_and_adamw_the_rest() -> None:
    ends = ("qkv.weight", "out.weight", "up.weight", "down.weight")
    for still in (0, 1):
        model = perturbed()
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        matrices = {name for name in before if ".layers." in name and name.endswith(ends)}
        optimizers = build_optimizers(model, OptimizerSettings(name="muon", lr=3e-3))
        for group in optimizers[still].param_groups:
            group["peak"] = 0.0
        take_steps(model, steps=2, optimizers=optimizers)
        moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
        assert (
            moved == matrices
            if still == 0
            else moved.isdisjoint(matrices) and {"embed.weight", "head.weight"} <= moved
        )


def test_with_muon_only_its_matrices_decay() -> None:
    model = perturbed()
    adamw, muon = build_optimizers(model, OptimizerSettings(name="muon", weight_decay=0.1))
    assert (adamw.param_groups[0]["weight_decay"], muon.param_groups[0]["weight_decay"]) == (
        0.0,
        0.1,
    )
    (adamw,) = build_optimizers(model, OptimizerSettings(name="adamw", weight_decay=0.1))
    assert adamw.param_groups[0]["weight_decay"] == 0.1


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_batched_muon_is_torchs_muon(decay: float) -> None:
    results = []
    for kind in (torch.optim.Muon, BatchedMuon):
        rng = torch.Generator().manual_seed(0)
        shapes = [(48, 16), (16, 16), (64, 16), (16, 64), (16, 16), (48, 16)]
        matrices = [torch.nn.Parameter(0.1 * torch.randn(shape, generator=rng)) for shape in shapes]
        muon = kind(matrices, lr=0.02, momentum=0.9, weight_decay=decay)
        for _ in range(5):
            for matrix in matrices[:-1]:  # the last one has no gradient
                matrix.grad = torch.randn(matrix.shape, generator=rng)
            muon.step()
        results.append(
            [*matrices, *(muon.state[matrix]["momentum_buffer"] for matrix in matrices[:-1])]
        )
        assert not muon.state[matrices[-1]]
    for one, other in zip(*results, strict=True):
        assert (one - other).norm() <= 1e-3 * one.norm()  # the products are bfloat16


def test_muon_takes_queries_keys_and_values_as_three_matrices() -> None:
    rng = torch.Generator().manual_seed(0)
    whole = torch.nn.Parameter(torch.randn(48, 16, generator=rng))
    parts = [torch.nn.Parameter(part.clone()) for part in whole.detach().split(16)]
    muons = [BatchedMuon([whole], lr=0.02), BatchedMuon(parts, lr=0.02)]
    muons[0].param_groups[0]["split_qkv"] = True
    whole.grad = torch.randn(48, 16, generator=rng)
    for part, grad in zip(parts, whole.grad.split(16), strict=True):
        part.grad = grad
    for muon in muons:
        muon.step()
    torch.testing.assert_close(whole.detach(), torch.cat(list(parts)).detach())


def test_normalized_rows_of_muon_have_equal_size_at_the_same_norm() -> None:
    updates = []
    for beta2 in (None, 0.95):
        matrix = torch.nn.Parameter(torch.zeros(64, 16))
        muon = BatchedMuon([matrix], lr=1.0, weight_decay=0.0)
        muon.param_groups[0]["beta2"] = beta2
        matrix.grad = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
        muon.step()
        updates.append(matrix.detach())
    rows = updates[1].norm(dim=1)
    torch.testing.assert_close(rows, rows.mean().expand(64), rtol=1e-4, atol=0)
    torch.testing.assert_close(updates[1].norm(), updates[0].norm(), rtol=1e-4, atol=0)
    assert updates[0].norm(dim=1).std() > 0.05 * updates[0].norm(dim=1).mean()


def test_logged_metrics_are_means_since_the_last_log(tmp_path: Path) -> None:
    run(tmp_path / "each", "log.every=1")
    run(tmp_path / "some", "log.every=4")
    each, some = (
        [r for r in curve(tmp_path / name) if "train/loss" in r] for name in ("each", "some")
    )
    assert [record["step"] for record in some] == [4, 8, 10]  # the last step is always logged
    for logged, part in zip(some, (each[0:4], each[4:8], each[8:10]), strict=True):
        for name in ("train/loss", "train/nll", "train/anchor", "train/grad_norm"):
            assert logged[name] == pytest.approx(
                sum(record[name] for record in part) / len(part), rel=1e-12
            )
        assert logged["tokens"] == logged["step"] * 8 * 32
    valid = [
        [record for record in curve(tmp_path / name) if "val/nll" in record]
        for name in ("each", "some")
    ]
    assert valid[0] == valid[1]


BATCH = Batch(torch.zeros(1, 1, dtype=torch.int64), None, torch.zeros(1), torch.zeros(1), 1, {})


def open_logger(
    folder: Path, guard: GuardSettings, context: DistributedContext, exit_stack: ExitStack
) -> RunLogger:
    """The logger of a new run."""
    run = LoggedRun(folder, {}, steps=10, tokens_per_step=256, flops_per_token=1.0, lr=1e-3)
    state = start_state("data", None)
    return RunLogger(run, LogSettings(show=False), guard, state, context, exit_stack)


@pytest.mark.parametrize(
    "bad", [[float("nan"), float("nan"), 0.0, 1.0], [1.0, 1.0, 0.0, float("inf")]]
)
def test_a_loss_or_gradient_that_is_not_finite_stops_the_run_before_it_is_saved(
    bad: list[float], tmp_path: Path
) -> None:
    context = DistributedContext(torch.device("cpu"))
    with ExitStack() as exit_stack:
        logger = open_logger(tmp_path, GuardSettings(), context, exit_stack)
        logger.add(StepMetrics(1, torch.ones(4), 1.0, 0.0, BATCH, 0.0))
        logger.read()
        logger.add(StepMetrics(2, torch.tensor(bad), 1.0, 0.0, BATCH, 0.0))
        with pytest.raises(Diverged, match="step 2") as caught:
            logger.read()
    assert caught.value.step == 2 and caught.value.batch is BATCH


def test_a_spike_of_the_reported_nll_alone_stops_nothing(tmp_path: Path) -> None:
    """With times that are not uniform its estimate has rare large weights, which the optimized loss has not."""
    context = DistributedContext(torch.device("cpu"))
    with ExitStack() as exit_stack:
        guard = GuardSettings(window=3, spike=20)
        logger = open_logger(tmp_path, guard, context, exit_stack)
        for step, values in enumerate(
            ([5.0, 5.0], [5.1, 5.2], [4.9, 4.8], [5.0, 500.0], [500.0, 5.0]), 1
        ):
            logger.add(StepMetrics(step, torch.tensor([*values, 0.0, 1.0]), 1.0, 0.0, BATCH, 0.0))
        with pytest.raises(Diverged, match="the loss at step 5 is 500"):
            logger.read()


def test_a_spike_is_not_noise() -> None:
    guard, calm = LossGuard(spike=4.0, window=4), LossGuard(spike=None, window=4)
    for step, loss in enumerate(
        [9.0, 5.0, 5.1, 4.9, 5.0, 5.2], 1
    ):  # the last one is within four deviations
        guard.check(loss, 1.0, step, BATCH)
        calm.check(loss, 1.0, step, BATCH)
    calm.check(50.0, 1.0, 7, BATCH)
    with pytest.raises(Diverged, match=r"step 7 is 50.*guard\.spike=4"):
        guard.check(50.0, 1.0, 7, BATCH)


def test_the_remedy_fits_the_divergence() -> None:
    latest = Path("run/checkpoints/latest")
    for is_spike, step in ((False, 0), (False, 5), (True, 0), (True, 5)):
        remedy = suggest_remedy(Diverged("", 7, BATCH, is_spike=is_spike), latest, step)
        assert ("guard.spike" in remedy) == is_spike
        assert (f"folder=NEW and resume={latest}, which is from step 5" in remedy) == bool(step)
        assert ("resumes this run from step 5" in remedy) == (is_spike and step > 0)


def test_weights_that_are_not_finite_stop_before_the_weights_move() -> None:
    model = perturbed()
    with torch.no_grad():
        model.head.bias[0] = torch.nan
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(Diverged, match="step 1") as caught:
        take_steps(model, steps=1)
    assert len(caught.value.batch.tokens) == 8
    assert all(
        torch.equal(p.nan_to_num(), before[name].nan_to_num())
        for name, p in model.named_parameters()
    )
