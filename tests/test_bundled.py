"""The bundled models: found by name from any folder, small, deterministic."""

from pathlib import Path
from typing import Any

import pytest
import torch

import adlm
from adlm.bundled import DEFAULT, MODELS, find_bundled_model
from adlm.config import list_recipes

MAX_BYTES, MAX_PACKAGE_BYTES = (
    42_000_000,
    45_000_000,
)  # of all their files, and of all that a wheel installs


@pytest.fixture(scope="module")
def bundled() -> adlm.LM:
    return adlm.load(device="cpu")


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_found_by_name_from_any_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = adlm.load(name, device="cpu")
    assert model.name == name and find_bundled_model(name).is_absolute()
    assert model.generate(length=4, steps=2).texts


def count_bytes(folder: Path) -> int:
    files = (
        path for path in folder.rglob("*") if path.is_file() and path.parent.name != "__pycache__"
    )
    return sum(path.stat().st_size for path in files)


def test_all_models_are_small() -> None:
    folder = find_bundled_model(DEFAULT).parent
    assert {path.name for path in folder.iterdir() if path.is_dir()} == set(MODELS)
    assert count_bytes(folder) <= MAX_BYTES
    assert (
        count_bytes(folder.parent) + sum(path.stat().st_size for path in list_recipes().values())
        < MAX_PACKAGE_BYTES
    )


def test_the_default_is_an_anchored_model_with_framed_rows(bundled: adlm.LM) -> None:
    config = bundled.model.config
    assert DEFAULT == "adlm-prose" == bundled.name
    assert bundled.method == "adlm" and config.anchor_layers > 0 and config.bridge == "direct"
    assert 7000 <= config.vocab_size == bundled.tokenizer.vocab_size <= 9000
    assert bundled.row_format.is_framed and bundled.row_format.longest >= 64


def test_the_texts_of_a_seed_do_not_depend_on_the_batch(bundled: adlm.LM) -> None:
    prompts = ["The ", "It was a", ""]
    settings: dict[str, Any] = {"n": 2, "length": 32, "steps": 16, "seed": 7}
    texts = bundled.generate(prompts, **settings).texts
    assert len(set(texts)) == 6
    for batch in (1, 4):
        assert bundled.generate(prompts, **settings, batch=batch).texts == texts
    *_, last = bundled.stream(prompts, **settings, guesses=3)
    assert last.texts == texts
    template = "The ___ sat on the ___{2}, and\n___."
    filled = bundled.infill([template, "A ___ night"], n=3, seed=7, steps=16).texts
    assert filled[:3] == bundled.infill(template, n=3, seed=7, steps=16, batch=2).texts
    assert filled[3:] == bundled.infill("A ___ night", n=3, seed=7, steps=16).texts


def test_english_scores_better_than_its_words_reversed(bundled: adlm.LM) -> None:
    text = "He looked at her for a long time, and then he went out of the room without a word."
    backwards = " ".join(reversed(text.rstrip(".").split())) + "."
    good, bad = bundled.score([text, backwards], draws=512)
    assert good.nll + 2 * good.stderr < bad.nll - 2 * bad.stderr
    assert good.bits_per_byte < 3


def test_a_folder_of_the_same_name_does_not_hide_a_bundled_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bundled: adlm.LM
) -> None:
    (tmp_path / DEFAULT).mkdir()
    monkeypatch.chdir(tmp_path)
    weights, others = (
        dict(lm.model.named_parameters()) for lm in (bundled, adlm.load(DEFAULT, device="cpu"))
    )
    assert weights.keys() == others.keys() and all(
        torch.equal(weights[name], others[name]) for name in weights
    )
    with pytest.raises(FileNotFoundError, match="neither a run folder nor a model folder"):
        adlm.load(Path.cwd() / DEFAULT)
