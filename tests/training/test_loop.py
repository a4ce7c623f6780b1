"""The loop: the same seed gives the same run, however it is cut; every method trains; the guard bites."""

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from adlm.config import OptimizerSettings, ParallelSettings
from adlm.data.batches import Batch, ShuffledBatches, TensorRows
from adlm.data.shards import open_data
from adlm.diffusion.anchors import every_token
from adlm.methods import METHODS
from adlm.models.language_model import LanguageModel
from adlm.training.distributed import DistributedContext, LossModule, parallelize
from adlm.training.ema import EMA
from adlm.training.guard import Diverged, LossGuard
from adlm.training.logging import MetricWindow, StepMetrics
from adlm.training.loop import train_steps
from adlm.training.objective import Objective
from adlm.training.optim import build_optimizers, find_muon_parameters, get_lr_multiplier
from tests.training.runs import curve, data, run, tiny_config

FAST = OptimizerSettings(lr=3e-3, betas=(0.9, 0.95))


def rows(padded: bool = False) -> TensorRows:
    prepared = open_data(data("documents" if padded else "wrapped")).rows("train")
    return TensorRows(*prepared.fetch(range(64)))


def tiny(method: str = "adlm", dropout: float = 0.0) -> LanguageModel:
    prepared = open_data(data())
    sizes = {"vocab_size": prepared.vocab_size, "mask_id": prepared.mask_id, "dim": 32, "heads": 2, "length": 32}
    return LanguageModel(tiny_config(method, **sizes, dropout=dropout), seed=1)


def take_steps(
    model: LanguageModel,
    *,
    seed: int = 0,
    steps: int = 6,
    padded: bool = False,
    task: dict[str, Any] | None = None,
    optimizers: list[Optimizer] | None = None,
    checkpoint_activations: bool = False,
    method: str = "adlm",
    **options: Any,
) -> list[StepMetrics]:
    """So many steps of 8 rows."""
    learner = LossModule(model, score_entropy=METHODS[method].score_entropy)
    shared = parallelize(
        learner,
        DistributedContext(torch.device("cpu")),
        ParallelSettings(checkpoint_activations=checkpoint_activations),
    )
    batches = iter(ShuffledBatches(rows(padded), 8, seed=seed))
    made = optimizers if optimizers is not None else build_optimizers(model, FAST)
    asked = Objective.for_model(model.config, **(task or {}))
    return list(train_steps(shared, asked, batches, made, steps=steps, seed=seed, **options))


def losses(seed: int, **options: Any) -> list[float]:
    return [record.loss for record in take_steps(tiny(dropout=0.1), seed=seed, **options)]


def plain_descent(model: LanguageModel) -> list[Optimizer]:
    """Steps proportional to the gradient, so that rounding stays rounding."""
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["peak"] = 0.1
    return [optimizer]


def awake(method: str = "adlm", dropout: float = 0.0) -> LanguageModel:
    """A model whose heads are not zero: the whole of it has gradients from the first step."""
    model = tiny(method, dropout)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
    return model


def assert_equal_runs(method: str, whole: dict[str, Any], cut: dict[str, Any], dropout: float = 0.0) -> None:
    """The same losses and weights to rounding."""
    one, other = awake(method, dropout), awake(method, dropout)
    first = take_steps(one, method=method, optimizers=plain_descent(one), **whole)
    second = take_steps(other, method=method, optimizers=plain_descent(other), **cut)
    figures = [torch.stack([record.values for record in records]) for records in (first, second)]
    torch.testing.assert_close(figures[1], figures[0], rtol=1e-5, atol=1e-6)
    moved = 0.0
    for (name, p), q, start in zip(one.named_parameters(), other.parameters(), awake(method).parameters()):
        torch.testing.assert_close(q, p, rtol=0, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
        moved = max(moved, float((p - start).detach().abs().max()))
    assert moved > 1e-3


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
    nlls = [record.nll for record in take_steps(model, method=method, steps=40)]
    assert sum(nlls[-10:]) < 0.95 * sum(nlls[:10])
    # The head is zero at first, so what lies below it moves from the second step on: nothing is left out.
    still = [name for name, p in model.named_parameters() if torch.equal(p, before[name])]
    assert not [name for name in still if ".condition." not in name], still


def test_records_count_steps_and_say_what_they_were() -> None:
    seen = take_steps(tiny(), steps=6, first_step=3, lr_multiplier=lambda step: step / 10)
    assert [record.step for record in seen] == [3, 4, 5, 6]
    assert [record.lr_multiplier for record in seen] == [0.3, 0.4, 0.5, 0.6]
    assert all(record.stall >= 0 and len(record.batch.tokens) == 8 for record in seen)
    assert float(seen[0].values[3]) > 0


def test_the_anchor_term_is_optimized_and_not_reported() -> None:
    record = take_steps(tiny(), steps=1, task={"anchor_rule": every_token(), "peak_anchor_weight": 0.05})[0]
    assert record.anchor_weight == 0.05
    assert record.loss > record.nll
    plain = take_steps(tiny(), steps=1, task={"peak_anchor_weight": 0.0})[0]
    assert plain.loss == plain.nll == record.nll


def test_the_anchor_weight_ramps() -> None:
    assert Objective.for_model(tiny("mdlm").config).anchor_weight(5, 10) is None
    weights = [r.anchor_weight for r in take_steps(tiny(), steps=4, task={"peak_anchor_weight": 0.6})]
    assert weights == [0.25, 0.5, 0.6, 0.6]
    flat = {"peak_anchor_weight": 0.6, "anchor_ramp": False}
    assert {r.anchor_weight for r in take_steps(tiny(), steps=4, task=flat)} == {0.6}


def test_the_average_follows_the_weights() -> None:
    model = tiny()
    ema = EMA(model)
    start: Tensor = ema.shadow["head.bias"].clone()
    take_steps(model, steps=5, ema=ema)
    end = model.head.bias.detach()
    assert ema.updates == 5
    assert 0 < float((ema.shadow["head.bias"] - start).norm()) < float((end - start).norm())


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("method", list(METHODS))
def test_a_batch_in_pieces_is_the_batch(method: str, padded: bool) -> None:
    """Accumulated gradients are those of the whole: padded pieces weigh by their tokens, not by their number."""
    for cut in (1, 3):
        assert_equal_runs(method, {"padded": padded}, {"padded": padded, "micro_batch": cut})


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_activations_may_be_computed_again(dropout: float) -> None:
    assert_equal_runs("adlm", {}, {"checkpoint_activations": True}, dropout)


def test_dropout_does_something() -> None:
    assert losses(3) != [record.loss for record in take_steps(tiny(), seed=3)]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("method", ["adlm", "a2r"])
def test_the_tokens_counted_are_the_tokens_asked_for(method: str, padded: bool) -> None:
    task = Objective.for_model(tiny(method).config)
    for batch in islice(ShuffledBatches(rows(padded), 8), 3):
        assert torch.equal(task.count_tokens(batch), task.corrupt(batch, 0, 1).tokens)


def test_the_rate_climbs_then_stays_or_falls() -> None:
    def rate(step: int, decay: str, **options: float) -> float:
        return get_lr_multiplier(step, 100, OptimizerSettings(warmup=10, decay=decay, **options))

    assert [rate(step, "constant") for step in (1, 5, 10, 100)] == [0.1, 0.5, 1.0, 1.0]
    assert rate(10, "cosine") == 1.0
    assert rate(55, "cosine") == pytest.approx(0.55)
    assert rate(100, "cosine") == pytest.approx(0.1)
    assert rate(100, "cosine", floor=0.3) == pytest.approx(0.3)
    falling = [rate(step, "cosine") for step in range(10, 101)]
    assert falling == sorted(falling, reverse=True)
    assert [rate(step, "wsd") for step in (5, 10, 81)] == [0.5, 1.0, 1.0]
    assert [rate(step, "wsd") for step in (82, 91, 100)] == pytest.approx([0.95, 0.5, 0.05])
    assert [rate(step, "wsd", decay_share=0.5) for step in (51, 52, 100)] == pytest.approx([1, 0.98, 0.02])
    assert get_lr_multiplier(1, 10, OptimizerSettings(warmup=0)) == 1.0
    with pytest.raises(ValueError, match="constant, cosine, wsd"):
        rate(11, "step")


def test_muon_has_the_layers_matrices_and_adamw_the_rest() -> None:
    model = tiny()
    adamw, muon = (
        optimizer.param_groups[0]["params"] for optimizer in build_optimizers(model, OptimizerSettings("muon"))
    )
    names = {parameter: name for name, parameter in model.named_parameters()}
    moved = {names[p] for p in muon}
    assert moved == set(find_muon_parameters(model))
    assert moved == {f"{n}" for n in names.values() if ".layers." in n and n.endswith(matrix_ends)}
    assert {names[p] for p in adamw} == set(names.values()) - moved
    assert len(build_optimizers(model)) == 1


matrix_ends = ("qkv.weight", "out.weight", "up.weight", "down.weight")


@pytest.mark.parametrize(("lr", "muon_lr"), [(0.0, 0.02), (3e-3, 0.0)])
def test_each_moves_its_own(lr: float, muon_lr: float) -> None:
    model = awake()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    take_steps(model, steps=2, optimizers=build_optimizers(model, OptimizerSettings("muon", lr=lr, muon_lr=muon_lr)))
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    matrices = set(find_muon_parameters(model))
    if lr == 0:
        assert moved == matrices
    else:
        assert not moved & matrices
        assert {"embed.weight", "head.weight"} <= moved


def test_logged_metrics_are_means_since_the_last_log(tmp_path: Path) -> None:
    run(tmp_path / "each", "log.every=1")
    run(tmp_path / "some", "log.every=4")
    each = [record for record in curve(tmp_path / "each") if "train/loss" in record]
    some = [record for record in curve(tmp_path / "some") if "train/loss" in record]
    assert [record["step"] for record in some] == [4, 8, 10]  # the last step is always told
    for told, part in zip(some, (each[0:4], each[4:8], each[8:10]), strict=True):
        for name in ("train/loss", "train/nll", "train/anchor", "train/grad_norm"):
            assert told[name] == pytest.approx(sum(record[name] for record in part) / len(part), rel=1e-12)
        assert told["tokens"] == told["step"] * 8 * 32
    assert [r for r in curve(tmp_path / "each") if "val/nll" in r] == [
        r for r in curve(tmp_path / "some") if "val/nll" in r
    ]


def make_metrics(step: int, figures: list[float]) -> StepMetrics:
    empty = torch.zeros(1, 1, dtype=torch.int64)
    batch = Batch(empty, None, torch.zeros(1), torch.zeros(1), 1, {})
    return StepMetrics(step, torch.tensor(figures), 1.0, 0.0, batch, 0.0)


@pytest.mark.parametrize("bad", [[1.0, float("nan"), 0.0, 1.0], [1.0, 1.0, 0.0, float("inf")]])
def test_a_loss_or_gradient_that_is_not_finite_stops_the_run_before_it_is_saved(bad: list[float]) -> None:
    window = MetricWindow(LossGuard(None, 4), DistributedContext(torch.device("cpu")))
    window.add(make_metrics(1, [1.0, 1.0, 0.0, 1.0]))
    window.read()
    window.add(bad_one := make_metrics(2, bad))
    with pytest.raises(Diverged, match="step 2") as caught:
        window.read()
    assert caught.value.step == 2 and caught.value.batch is bad_one.batch


def test_a_leap_is_told_from_noise() -> None:
    guard = LossGuard(spike=4.0, window=4)
    for step, loss in enumerate([9.0, 5.0, 5.1, 4.9, 5.0], 1):
        guard.check(step, loss)
    guard.check(6, 5.2)  # within four deviations
    with pytest.raises(Diverged, match=r"step 7 is 50.*guard\.spike=4"):
        guard.check(7, 50.0)
    calm = LossGuard(spike=None, window=4)
    for step, loss in enumerate([5.0, 5.1, 4.9, 5.0, 50.0], 1):
        calm.check(step, loss)


def test_weights_that_are_not_finite_stop_before_the_weights_move() -> None:
    model = awake()
    with torch.no_grad():
        model.head.bias[0] = torch.nan
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(Diverged, match="step 1") as caught:
        take_steps(model, steps=1)
    assert caught.value.batch is not None and len(caught.value.batch.tokens) == 8
    assert all(torch.equal(p.nan_to_num(), before[name].nan_to_num()) for name, p in model.named_parameters())
