"""What an earlier version wrote is read as before: models, runs, prepared data, a recipe."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import adlm
from tests.laws import adapter
from tests.laws.commands import QUICK, quick_settings, read_metrics, run_command, run_json
from tests.laws.texts import FIXTURES, MASKED, METHODS, folder, model

EXPECTED: dict[str, Any] = json.loads((FIXTURES / "expected.json").read_text("utf-8"))
NAMES = (*METHODS, "timed")
PLACES = ("data.path=data", "folder=run")


@pytest.mark.parametrize("name", NAMES)
def test_an_old_model_scores_texts_as_it_did(name: str) -> None:
    scores = [each.nll for each in model(name).score(["the cat sat", "a"], draws=8, seed=1)]
    assert scores == pytest.approx(EXPECTED["scores"][name], rel=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_an_old_model_is_evaluated_as_it_was(name: str) -> None:
    words = ("eval", "ppl", folder(name), "--data", FIXTURES / "held-out.txt", "--draws", 2)
    found = run_json(*words, "--device", "cpu", "--count", "text", "--rows", "documents")
    for key, value in EXPECTED["ppl"][name].items():
        assert found[key] == pytest.approx(value, rel=1e-4)


@pytest.mark.parametrize("sampler", list(QUICK))
@pytest.mark.parametrize("name", MASKED)
def test_a_seed_has_the_text_that_it_had(name: str, sampler: str) -> None:
    """Of masked models."""
    settings = quick_settings(sampler)
    output = adapter.generate(model(name), "the", n=2, seed=7, max_new_tokens=9, **settings)
    assert {"texts": list(output), "nfe": output.nfe_each} == EXPECTED["texts"][name][sampler]


@pytest.mark.parametrize("method", METHODS)
def test_an_old_run_is_a_model(method: str) -> None:
    """By its folder, its link and its checkpoint: the averaged weights, the same texts."""
    run = FIXTURES / f"run-{method}"
    places = (run, run / "checkpoints" / "latest", run / "checkpoints" / "step-00000004")
    texts = []
    for place in places:
        lm = adlm.load(place, device="cpu", verify=True)
        assert (lm.method, lm.step) == (method, 4)
        texts.append(lm.generate("the", max_new_tokens=8, seed=1).texts)
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("method", METHODS)
def test_an_old_run_goes_on_as_it_did(method: str, workplace: Callable[..., Path]) -> None:
    """From its checkpoint, with the old recipe and the old data."""
    place = workplace("recipe.yaml", "data-wrapped", f"run-{method}")
    changes = [f"method={method}", "data.path=data-wrapped", f"folder=run-{method}", "steps=8"]
    if not adapter.has_two_stages(method):
        changes.append("model.anchor_layers=null")
    if not adapter.is_causal(method):
        changes.append("model.cond_dim=8")
    answer = run_command("train", "recipe.yaml", *changes)
    assert answer.code == 0, answer.err
    records = [each for each in read_metrics(place / f"run-{method}") if each["step"] > 4]
    expected = EXPECTED["resumed"][method]
    assert [each.keys() for each in records] == [each.keys() for each in expected]
    for mine, theirs in zip(records, expected, strict=True):
        for key, value in theirs.items():
            assert mine[key] == pytest.approx(value, rel=2e-4, abs=1e-5), (mine["step"], key)


@pytest.mark.parametrize("rows", ["wrapped", "documents"])
def test_old_data_are_what_preparing_gives_again(rows: str, tmp_path: Path) -> None:
    """Row by row; the bytes of the text are all there."""
    old = adlm.open_data(FIXTURES / f"data-{rows}", verify=True)
    text = tmp_path / "text.txt"
    shutil.copy(FIXTURES / "text.txt", text)
    settings: dict[str, Any] = {"tokenizer": "bytes", "length": 32, "documents": "line"}
    adlm.prepare(text, tmp_path / "new", rows=rows, valid_share=0.2, workers=1, **settings)
    new = adlm.open_data(tmp_path / "new")
    written = b""
    for split in ("train", "valid"):
        mine, theirs = new.rows(split), old.rows(split)
        assert len(mine) == len(theirs)
        tokens, lengths = theirs.fetch(range(len(theirs)))
        again, lengths_again = mine.fetch(range(len(mine)))
        assert tokens.tolist() == again.tolist()
        if lengths is not None and lengths_again is not None:
            assert lengths.tolist() == lengths_again.tolist()
        for number, row in enumerate(tokens.tolist()):
            kept = row if lengths is None else row[: int(lengths[number])]
            written += bytes(token for token in kept if token < 256)
    documents = (FIXTURES / "text.txt").read_bytes().splitlines()
    if rows == "documents":
        # A document has its row, with a beginning and an end, and what does not fit is left out.
        assert written == b"".join(document[:30] for document in documents)
    else:
        lines = b"".join(documents)
        # A stream may lose less than a row at its end.
        assert lines.startswith(written)
        assert len(lines) - len(written) < 64


def test_an_old_recipe_is_read() -> None:
    config = adlm.load_config(FIXTURES / "recipe.yaml", *PLACES)
    assert (config.method, config.steps, config.batch, config.ema) == ("adlm", 4, 8, 0.9)
    assert (config.model.dim, config.optimizer.lr, config.objective.max_count) == (8, 1e-2, 1)
    changed = adlm.load_config(FIXTURES / "recipe.yaml", *PLACES, "optimizer.lr=0.5")
    assert changed.optimizer.lr == 0.5
    with pytest.raises(ValueError, match="optimizer"):
        adlm.load_config(FIXTURES / "recipe.yaml", *PLACES, "optimiser.lr=0.5")


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_model_is_the_model(name: str, tmp_path: Path) -> None:
    lm = model(name)
    again = adlm.load(adapter.save_model(lm, tmp_path / "saved"), device="cpu", verify=True)
    settings: dict[str, Any] = {"n": 2, "seed": 3, "max_new_tokens": 9}
    assert again.generate("the", **settings).texts == lm.generate("the", **settings).texts
    scores = [each.score("the cat", draws=4)[0].nll for each in (again, lm)]
    assert scores[0] == scores[1]


def test_a_changed_file_is_noticed(tmp_path: Path) -> None:
    copied = shutil.copytree(folder("adlm"), tmp_path / "model")
    weights = copied / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        adlm.load(copied, device="cpu")


def test_a_model_folder_runs_no_code_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names in its files are names, never imports."""
    copied = shutil.copytree(folder("adlm"), tmp_path / "model")
    (copied / "checksums.json").unlink()
    (tmp_path / "evil.py").write_text("open('evil-was-here', 'w').close()\nrun = 1\n", "utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    config = json.loads((copied / "config.json").read_text("utf-8"))
    names = [key for key, value in config.items() if isinstance(value, str)]
    model_names = [key for key, value in config["model"].items() if isinstance(value, str)]
    assert names
    assert model_names
    for is_model, name in [
        *((False, each) for each in names),
        *((True, each) for each in model_names),
    ]:
        changed = json.loads(json.dumps(config))
        (changed["model"] if is_model else changed)[name] = "evil:run"
        (copied / "config.json").write_text(json.dumps(changed), "utf-8")
        with pytest.raises(ValueError, match="evil"):
            adlm.load(copied, device="cpu")
        assert not os.path.exists("evil-was-here")
