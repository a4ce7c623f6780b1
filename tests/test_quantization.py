"""Weights in a byte each: no weight moves by more than half a step, and a model still says the same."""

from pathlib import Path
from typing import Any

import pytest
import torch

import adlm
from adlm.models import folder as model_folder
from adlm.models.folder import INT8_MAX, SCALE, dequantize, quantize
from adlm.models.language_model import LanguageModel
from tests.text.models import tokenizer
from tests.world import random_model

ROUNDING = 4 * torch.finfo(torch.float32).eps


def weights(rows: int = 50, columns: int = 33, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows of very different size."""
    rng = torch.Generator().manual_seed(0)
    return (
        torch.randn(rows, columns, generator=rng) * 10.0 ** torch.linspace(-30, 30, rows)[:, None]
    ).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_weight_moves_by_more_than_half_a_step(dtype: torch.dtype) -> None:
    given = weights(dtype=dtype)
    stored = quantize({"w": given})
    assert stored["w"].dtype == torch.int8 and stored["w" + SCALE].dtype == torch.float32
    step = given.float().abs().amax(1) / INT8_MAX
    torch.testing.assert_close(stored["w" + SCALE], step, rtol=ROUNDING, atol=0)
    back = dequantize(stored)["w"]
    assert bool(((back - given.float()).abs() <= step[:, None] * (0.5 + 127 * ROUNDING)).all())
    largest = given.float().abs().argmax(1, keepdim=True)
    torch.testing.assert_close(
        back.gather(1, largest), given.float().gather(1, largest), rtol=ROUNDING, atol=0
    )
    assert int(stored["w"].min()) >= -INT8_MAX and int(stored["w"].abs().max()) == INT8_MAX


def test_zeros_stay_zeros() -> None:
    given = torch.zeros(3, 4)
    given[1] = torch.tensor([0.0, -2.0, 0.0, 1.0])
    given[2] = 1e-44  # too small for a step of its own
    back = dequantize(quantize({"w": given}))["w"]
    assert torch.equal(back[0], given[0]) and torch.equal(back[1] == 0, given[1] == 0)
    assert bool(torch.isfinite(back).all()) and float((back[2] - given[2]).abs().max()) <= 1e-44


def test_vectors_are_kept_as_they_are_and_twice_is_once() -> None:
    given = {"v": torch.randn(7).bfloat16(), "w": weights(5, 4)}
    stored = quantize(given)
    assert stored.keys() == {"v", "w", "w" + SCALE}
    assert stored["v"].dtype == torch.float32 and torch.equal(stored["v"], given["v"].float())
    once = dequantize(stored)
    torch.testing.assert_close(dequantize(quantize(once))["w"], once["w"], rtol=ROUNDING, atol=0)
    assert all(torch.equal(dequantize(once)[name], once[name]) for name in once)
    del stored["w" + SCALE]
    with pytest.raises(ValueError, match=r"w is int8 but has no w\.scale: the file is incomplete"):
        dequantize(stored)


def small_model(method: str, **changes: Any) -> LanguageModel:
    return random_model(
        method,
        **({"vocab_size": 258, "mask_id": 257, "dim": 64, "heads": 4, "length": 32} | changes),
    )


CASES: list[tuple[str, dict[str, Any]]] = [(method, {}) for method in ("adlm", "ar", "sedd")]
CASES += [
    ("adlm", {"bridge": "direct", "tied": True}),
    ("adlm", {"bridge": "softmax"}),
    ("a2r", {"tied": True}),
]
CASES += [("adlm", {"time_conditioning": True}), ("mdlm", {"positions": "learned"})]


@pytest.mark.parametrize(("method", "changes"), CASES)
def test_an_exported_model_says_about_the_same(
    method: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """A weight is off by a step / √12 in the mean, and a row's largest is about 3 of its standard deviations: 0.7% of
    a weight. That is each matrix's share, and of about 15 matrices one after the other: 0.7% · √15 = 3%."""
    words, model = tokenizer("bytes"), small_model(method, scale=0.3, **changes)
    loaded = model_folder.LoadedModel(model, words, method, 11, "documents")
    folder = model_folder.export_model(loaded, tmp_path / "given")
    back = model_folder.load_model(folder, verify=True)
    assert (back.method, back.step, back.rows, back.tokenizer) == (
        method,
        11,
        "documents",
        back.tokenizer,
    )
    assert back.tokenizer is not None and back.tokenizer.sha256 == words.sha256
    assert back.model.config == model.fold().config

    tokens = torch.randint(256, (8, 24), generator=torch.Generator().manual_seed(1))
    tokens[:, ::3] = 257
    level = torch.linspace(0.1, 2, 8)
    with torch.no_grad():
        was, now = (m.head(m(tokens, level).final) for m in (model, back.model))
        folded = model.fold()
        kept = dequantize(quantize(folded.state_dict()))
        folded.load_state_dict(
            kept | ({"head.weight": kept["embed.weight"]} if folded.config.tied else {})
        )
        same = folded.head(folded(tokens, level).final)
    assert torch.equal(same, now), "exporting and loading is rounding the weights, and nothing else"
    assert 0 < float((now - was).square().mean().sqrt() / was.square().mean().sqrt()) < 0.05
    # What is exported once more is the same to rounding: nothing is folded or rounded twice.
    again = model_folder.load_model(model_folder.export_model(back, tmp_path / "again"))
    with torch.no_grad():
        torch.testing.assert_close(
            again.model.head(again.model(tokens, level).final), now, rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("tied", [True, False])
def test_a_file_has_about_a_byte_a_parameter(tied: bool, tmp_path: Path) -> None:
    model = small_model("adlm", dim=128, tied=tied, bridge="direct")
    folder = model_folder.export_model(
        model_folder.LoadedModel(model, tokenizer("bytes"), "adlm", 0), tmp_path
    )
    count = sum(
        p.numel() for p in model.fold().parameters()
    )  # a tied head is one with the embedding
    size = (folder / "model.safetensors").stat().st_size
    assert count < size < 1.15 * count
    assert ("head.weight" in model_folder.read_weights(folder)) == (not tied)
    (folder / "README.md").write_text("a card", "utf-8")
    assert (
        adlm.load(folder, device="cpu", verify=True).infill("a ___{3} b").texts[0].startswith("a ")
    )
