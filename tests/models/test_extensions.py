"""Settings beyond the paper's models: each is off by default, changes the model, trains, and survives every change."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from adlm.convert import write_lightning
from adlm.diffusion.masking import ForwardProcess, corrupt, shift_tokens
from adlm.diffusion.objectives import default_objective, training_loss
from adlm.diffusion.rng import CounterRng
from adlm.distributed import DistributedContext
from adlm.models.costs import count_parameters
from adlm.models.folder import LoadedModel, export_model, load_model
from adlm.models.language_model import LanguageModel, ModelConfig
from adlm.models.transformer import Layer
from adlm.training.distributed import LossModule, ParallelSettings, parallelize
from tests.world import MASK, VOCAB, count_weights, random_tokens, read_in_parts, small_model

CHANGES: list[dict[str, Any]] = [
    {"embed_norm": True},
    {"qk_norm": True},
    {"project_after": 2},
    {"project_after": 4},
]
BRIDGE = {"bridge": "none"}


def make(method: str, change: dict[str, Any]) -> LanguageModel:
    """A model of four layers in each stage, without zeros."""
    depth = {"denoiser_layers": 4} | ({"anchor_layers": 3} if method in ("adlm", "a2r") else {})
    return small_model(method, scale=0.3, **depth, **change)


def compute_loss(model: LanguageModel) -> Tensor:
    tokens, config = random_tokens(4), model.config
    if config.is_causal:
        return training_loss(model, shift_tokens(tokens)).total
    return training_loss(
        model, corrupt(tokens, ForwardProcess(MASK), CounterRng.from_seed(0, 4), 0)
    ).total


def name_change(change: dict[str, Any]) -> str:
    return ",".join(f"{key}={value}" for key, value in change.items())


@pytest.mark.parametrize("change", CHANGES, ids=name_change)
@pytest.mark.parametrize("method", ["mdlm", "adlm"])
def test_a_setting_adds_to_the_same_start(method: str, change: dict[str, Any]) -> None:
    """Seeds are paired: what both models have starts equal; what is added starts neutral, where it can."""
    config = make(method, {}).config
    plain, changed = LanguageModel(config, seed=1), LanguageModel(config.replace(**change), seed=1)
    before, after = plain.state_dict(), changed.state_dict()
    for name, value in before.items():
        assert torch.equal(value, after[name]), name
    assert not any(after[name].any() for name in after.keys() - before.keys())
    if "project_after" in change:  # the matrix is added to the identity and starts at zero
        assert torch.equal(plain(random_tokens(2)).final, changed(random_tokens(2)).final)


@pytest.mark.parametrize("change", CHANGES, ids=name_change)
@pytest.mark.parametrize("method", ["mdlm", "adlm", "ar", "a2r"])
def test_a_setting_changes_the_model_and_all_of_it_learns(
    method: str, change: dict[str, Any]
) -> None:
    model, plain = make(method, change), make(method, {})
    assert (model(random_tokens(2)).final - plain(random_tokens(2)).final).abs().max() > 1e-3
    compute_loss(model).backward()
    for name, parameter in model.named_parameters():
        is_idle = name.startswith("anchor_head") and model.config.bridge == "direct"
        assert parameter.grad is not None and (
            parameter.grad.any() or is_idle or ".condition." in name
        ), name
    assert count_parameters(model.config) == count_weights(model)


@pytest.mark.parametrize("change", [*CHANGES, BRIDGE], ids=name_change)
@pytest.mark.parametrize("method", ["adlm", "a2r"])
def test_a_setting_survives_folding_saving_and_lightning_refuses_it(
    method: str, change: dict[str, Any], tmp_path: Path
) -> None:
    model, tokens = make(method, change), random_tokens(3)
    with torch.no_grad():
        expected = model.head(model(tokens).final)
        torch.testing.assert_close(
            model.fold().head(model.fold()(tokens).final), expected, atol=1e-4, rtol=1e-5
        )
    for is_quantized in (False, True):
        folder = tmp_path / str(is_quantized)
        export_model(LoadedModel(model, None, method, 0), folder, is_quantized=is_quantized)
        loaded = load_model(folder).model
        assert {key: getattr(loaded.config, key) for key in change} == change
        with torch.no_grad():
            difference = (loaded.head(loaded(tokens).final) - expected).abs().mean()
        assert difference <= (0.05 if is_quantized else 0) * expected.abs().mean()
    with pytest.raises(ValueError, match="lineage's code has no model with"):
        write_lightning(LoadedModel(model, None, method, 0), tmp_path / "model.ckpt")


@pytest.mark.parametrize("change", [*CHANGES, BRIDGE], ids=name_change)
def test_a_cache_gives_the_same_features(change: dict[str, Any]) -> None:
    model, tokens = make("a2r", change), random_tokens(2)
    with torch.no_grad():
        full = model(tokens).final
        parts = [part.final for part in read_in_parts(model, tokens, [5, 1, 1, 9])]
    torch.testing.assert_close(torch.cat(parts, 1), full, atol=1e-4, rtol=1e-4)


def test_all_at_once_compile_in_one_graph_and_recompute_their_activations() -> None:
    change = {"embed_norm": True, "qk_norm": True, "project_after": 1, "bridge": "none"}
    gradients = []
    for kind in ("plain", "compiled", "checkpointed"):
        model = make("adlm", change)
        if kind == "compiled":
            for layer in model.modules():
                if isinstance(layer, Layer):
                    layer.compile(fullgraph=True, backend="aot_eager")
        settings = ParallelSettings(checkpoint_activations=kind == "checkpointed")
        parallelize(
            LossModule(model, default_objective(model)),
            DistributedContext(torch.device("cpu")),
            settings,
        )
        compute_loss(model).backward()
        gradients.append(
            torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        )
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0], atol=1e-6, rtol=1e-5)


def test_times_around_one_half_change_the_gradient_and_not_what_is_reported() -> None:
    """The times are a normal's, and importance weights keep the reported NELBO unbiased."""
    model, tokens, reported = make("adlm", {}), random_tokens(4096), []
    for std in (None, 0.2):
        process = ForwardProcess(MASK, anchor_rule=lambda tokens, valid: tokens >= 0, time_std=std)
        batch = corrupt(tokens, process, CounterRng.from_seed(0, 4096), 0)
        with torch.no_grad():
            reported.append(training_loss(model, batch, anchor_weight=0.1))
    assert float(batch.t.mean()) == pytest.approx(0.5, abs=0.01)
    assert float(batch.t.std()) == pytest.approx(0.19, abs=0.01)  # the tails are cut
    uniform, bell = reported
    assert float(bell.nll) == pytest.approx(float(uniform.nll), rel=0.03)
    assert float(bell.anchor) == pytest.approx(float(uniform.anchor), rel=0.1)
    assert batch.density is not None
    expected = bell.row_nll @ batch.density + 0.1 * bell.row_anchor @ batch.density
    assert float(bell.total) == pytest.approx(float(expected / batch.tokens), rel=1e-4)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"embed_norm": 1}, "embed_norm=1: expected true or false"),
        ({"project_after": 5}, "project_after=5 and denoiser_layers=4: expected one of the layers"),
        ({"project_after": -1}, "project_after=-1: expected a whole number at least 0"),
    ],
)
def test_impossible_settings_are_refused(wrong: dict[str, Any], message: str) -> None:
    given = {"vocab_size": VOCAB, "mask_id": MASK, "denoiser_layers": 4} | wrong
    with pytest.raises(ValueError, match=message):
        ModelConfig.parse("json", **given)
