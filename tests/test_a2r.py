"""The recipes of A2R and of AR: equal depth, and equal parameters."""

from pathlib import Path

from adlm.config import load_config
from adlm.models.costs import count_parameters
from adlm.models.language_model import ModelConfig
from adlm.models.methods import build_config

ROOT = Path(__file__).resolve().parent.parent
ARMS = ("mini-a2r", "mini-ar", "mini-ar-deep")


def shape(recipe: str) -> ModelConfig:
    config = load_config(ROOT / f"recipes/{recipe}.yaml", folder="run", **{"data.path": "data"})
    model = {
        key: value
        for key, value in vars(config.model).items()
        if value is not None and key != "preset"
    }
    assert config.method and config.model.preset
    return build_config(
        config.method, config.model.preset, vocab_size=50_258, mask_id=50_257, length=512, **model
    )


def test_the_recipes_are_of_equal_depth_and_of_equal_parameters() -> None:
    a2r, ar, deep = map(shape, ARMS)
    assert (
        a2r.anchor_layers + a2r.denoiser_layers == ar.denoiser_layers
        and a2r.cond_dim is ar.cond_dim is None
    )
    assert abs(count_parameters(deep) / count_parameters(a2r) - 1) < 0.01
    page = (ROOT / "docs/a2r.md").read_text("utf-8")
    for config, recipe in zip((a2r, ar, deep), ARMS, strict=True):
        count = f"{count_parameters(config):,}"
        assert count in page and count in (ROOT / f"recipes/{recipe}.yaml").read_text("utf-8")
    head = (a2r.dim + 1) * a2r.vocab_size
    assert f"{head:,}" in page and f"{head:,}" in (ROOT / "recipes/mini-a2r.yaml").read_text(
        "utf-8"
    )
    settings = [
        load_config(ROOT / f"recipes/{arm}.yaml", folder="x", **{"data.path": "y"}) for arm in ARMS
    ]
    for key in ("steps", "batch", "ema", "optimizer", "valid"):
        assert len({str(getattr(each, key)) for each in settings}) == 1, key
