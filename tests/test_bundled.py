"""The models that come with the package: found by name from anywhere, small, and they write, fill in and score."""

from pathlib import Path

import pytest
import torch

import adlm
from adlm.bundled import DEFAULT, MODELS, find_bundled_model

MOST_BYTES = 30_000_000  # of everything that a wheel carries for them


@pytest.fixture(scope="module")
def bundled() -> adlm.LM:
    return adlm.load(device="cpu")


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_found_by_name_from_any_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = adlm.load(name, device="cpu")
    assert model.name == name and find_bundled_model(name).is_absolute()
    assert model.generate(length=4, steps=2).texts


def test_all_of_them_are_small() -> None:
    folder = find_bundled_model(DEFAULT).parent
    assert {path.name for path in folder.iterdir() if path.is_dir()} == set(MODELS)
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) <= MOST_BYTES


def test_the_default_is_the_first(bundled: adlm.LM) -> None:
    named = adlm.load(DEFAULT, device="cpu")
    assert DEFAULT == "adlm-prose" == bundled.name
    weights, others = (dict(model.model.named_parameters()) for model in (bundled, named))
    assert weights.keys() == others.keys()
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    one, other = (model.generate("The ", length=12, seed=1, steps=4).texts for model in (bundled, named))
    assert one == other


def test_it_is_what_it_says_it_is(bundled: adlm.LM) -> None:
    """An anchored model with a direct bridge, its own vocabulary of about 8K, and whole paragraphs as rows."""
    config = bundled.model.config
    assert bundled.method == "adlm" and config.anchor_layers > 0 and config.bridge == "direct"
    assert 7000 <= config.vocab_size == bundled.tokenizer.vocab_size <= 9000
    assert bundled.row_format.is_framed and bundled.row_format.longest >= 64


def test_it_gives_a_text_for_a_seed_in_every_batch(bundled: adlm.LM) -> None:
    prompts = ["The ", "It was a", ""]
    texts = bundled.generate(prompts, n=2, length=40, steps=32, seed=7).texts
    assert len(set(texts)) == 6
    for batch in (1, 4):
        assert bundled.generate(prompts, n=2, length=40, steps=32, seed=7, batch=batch).texts == texts
    *_, last = bundled.stream(prompts, n=2, length=40, steps=32, seed=7, guesses=3)
    assert last.texts == texts
    template = "The ___ sat on the ___{2}, and\n___."
    filled = bundled.infill([template, "A ___ night"], n=3, seed=7).texts
    assert filled[:3] == bundled.infill(template, n=3, seed=7, batch=2).texts
    assert filled[3:] == bundled.infill("A ___ night", n=3, seed=7).texts


def test_it_knows_english_from_noise(bundled: adlm.LM) -> None:
    text = "He looked at her for a long time, and then he went out of the room without a word."
    backwards = " ".join(reversed(text.rstrip(".").split())) + "."
    good, bad = bundled.score([text, backwards], draws=512)
    assert good.nll + 2 * good.stderr < bad.nll - 2 * bad.stderr
    assert good.bits_per_byte < 3


def test_a_folder_of_its_name_does_not_take_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / DEFAULT).mkdir()
    monkeypatch.chdir(tmp_path)
    assert adlm.load(device="cpu").step == adlm.load(find_bundled_model(DEFAULT), device="cpu").step
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        adlm.load(Path.cwd() / DEFAULT)
