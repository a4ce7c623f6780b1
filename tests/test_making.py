"""How the bundled models are made: books to passages, a run to a small file, a model to its metrics."""

import gzip
import json
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import adlm
from adlm.data.batches import TensorRows
from adlm.data.sources import load_excerpt
from adlm.models.language_model import LanguageModel
from adlm.models.methods import build_config
from bundled.lengths import main as find_lengths
from bundled.lengths import summarize as summarize_lengths
from bundled.measure import main as measure
from bundled.passages import MAX_CHARACTERS, documents, is_prose, passages, sentences
from bundled.passages import main as write_passages
from bundled.ship import fit_logit_factor, scale_logits
from bundled.ship import main as ship
from bundled.train import METHODS, choose_steps, measure_seconds_per_step, train_all
from bundled.unfold import unfold

ROOT = Path(__file__).resolve().parent.parent
BOOK = load_excerpt()


@pytest.mark.parametrize("limit", [120, 440, MAX_CHARACTERS])
def test_passages_are_the_books_words_in_order(limit: int) -> None:
    parts = list(passages(BOOK, random.Random(0), limit))
    assert len(parts) > 20 and all(part and len(part) <= limit for part in parts)
    prose = " ".join(paragraph for paragraph in re.split(r"\n\s*\n", BOOK) if is_prose(paragraph))
    assert " ".join(parts).split() == prose.split()
    assert (
        list(passages(BOOK, random.Random(0), limit))
        == parts
        != list(passages(BOOK, random.Random(1), limit))
    )


def test_passages_have_many_lengths_and_end_with_sentences() -> None:
    parts = list(passages(BOOK, random.Random(0)))
    lengths = [len(part) for part in parts]
    assert min(lengths) < 300 and sum(
        length > 0.8 * MAX_CHARACTERS for length in lengths
    ) > 0.3 * len(parts)
    assert sum(part.rstrip("\"'”’)")[-1] in ".!?" for part in parts) > 0.95 * len(parts)


def test_sentences_and_prose() -> None:
    text = 'Mr. J. Smith came. "Is it you?" she said. Dr. Brown (who knew St. Ives) left!'
    assert sentences(text) == [
        "Mr. J. Smith came.",
        '"Is it you?" she said.',
        "Dr. Brown (who knew St. Ives) left!",
    ]
    assert not any(map(is_prose, ("THE NATURAL HISTORY OF SELBORNE.", "Chapter I.", "")))
    assert is_prose("It was the best of times, it was the worst of times.")


def test_books_are_separated(tmp_path: Path) -> None:
    path = tmp_path / "books.txt.gz"
    path.write_bytes(gzip.compress(b"One.\n\nTwo.\n<|endoftext|>\nThree.\n"))
    assert list(documents(path)) == ["One.\n\nTwo.\n", "Three.\n"]


def test_chosen_lengths_are_compared_with_the_best_single_one() -> None:
    shares = summarize_lengths([1, 2, 2, 5], [1, 3, 2, 2])
    assert shares["chosen"] == {"exact": 0.5, "within_one": 0.75, "mean_error": 1.0}
    assert shares["best_single_length"] == {"exact": 0.5, "within_one": 0.75, "mean_error": 1.0}


def test_an_unfolded_model_computes_the_same_and_its_dead_parts_are_reset() -> None:
    model = LanguageModel(
        build_config("adlm", "nano", vocab_size=64, mask_id=63, length=16, tied=True, dropout=0.0)
    )
    rng = torch.Generator().manual_seed(0)
    for parameter in model.parameters():  # modulations and heads are zero at first
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=rng)
    folded = model.fold()
    layer: Any = folded.denoiser.layers[0]
    layer.norm2.weight[:4] = 1e-3
    layer.up.weight[:, :4] *= 1e-3
    layer.up.weight[:8] = 0.0
    unfolded = unfold(folded, cond_dim=16)
    tokens = torch.randint(64, (2, 16), generator=rng)
    expected, actual = folded(tokens).final, unfolded(tokens).final
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(unfolded.fold()(tokens).final, expected, atol=1e-4, rtol=1e-4)
    actual.square().sum().backward()
    layer = unfolded.denoiser.layers[0]
    assert layer.norm2.weight[:4].eq(1).all() and layer.up.weight[:8].std() > 0.01
    assert layer.down.weight[:, :8].eq(0).all() and layer.down.weight.grad[:, :8].abs().min() > 0
    with pytest.raises(ValueError, match="expected a folded model"):
        unfold(model, cond_dim=16)


def test_a_model_that_was_made_underconfident_is_corrected() -> None:
    lm = adlm.load(device="cpu")
    rows = torch.tensor(
        [
            lm.tokenizer.encode(part)[:64]
            for part in passages(BOOK, random.Random(0))
            if len(part) > 500
        ]
    )
    before = lm.model.head(lm.model(rows[:1]).final)
    scale_logits(lm.model, 0.75)
    torch.testing.assert_close(lm.model.head(lm.model(rows[:1]).final), 0.75 * before)
    assert 1.08 <= fit_logit_factor(lm.model, TensorRows(rows[:4])) <= 1.28
    torch.testing.assert_close(
        lm.model.head(lm.model(rows[:1]).final), 0.75 * before
    )  # it only measures


def run(monkeypatch: pytest.MonkeyPatch, main: Callable[[], None], *options: str) -> None:
    monkeypatch.setattr(sys, "argv", ["x", *options])
    main()


def write_timings(run: Path, seconds: list[float]) -> None:
    """Write the metrics of a run whose first two records are of slow steps, in which torch compiles."""
    run.mkdir(parents=True)
    ends = [
        {"step": 25 * (i + 1), "lr": 1.0, "time": {"seconds": each}}
        for i, each in enumerate(seconds)
    ]
    lines = [
        json.dumps(each)
        for each in [*ends, {"step": 100, "val/nll": 4.0, "time": {"seconds": 9.0}}]
    ]
    (run / "metrics.jsonl").write_text("\n".join(lines), "utf-8")


def test_the_slowest_model_sets_the_number_of_steps(tmp_path: Path) -> None:
    for method, step in (("adlm", 0.06), ("mdlm", 0.05), ("ar", 0.03)):
        write_timings(tmp_path / f"{method}-0", [20.0, 30.0, 30 + 25 * step, 30 + 50 * step])
    assert choose_steps(METHODS, tmp_path, 1000) == 16_000  # 0.96 of it, in steps of 60 ms
    with pytest.raises(
        ValueError, match=r"4 s are left after the short runs, 100 steps take 6 s: raise --minutes"
    ):
        choose_steps(METHODS, tmp_path, 4)


@pytest.mark.slow
def test_all_bundled_models_train_at_once_and_a_failure_names_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("books.txt").write_text(BOOK[:60_000], "utf-8")
    adlm.prepare(
        "books.txt", "data", train_tokenizer=400, length=32, valid_share=0.2, documents="line"
    )
    small = {"batch": 4, "model.dim": 32, "model.heads": 2, "valid.rows": 8, "log.every": 1}
    train_all(METHODS, Path("probe"), "data", small | {"steps": 4})
    assert measure_seconds_per_step(Path("probe/ar-0")) > 0
    for _ in range(2):  # the second call has nothing to train
        train_all(METHODS, Path("runs"), "data", small | {"steps": 2})
    assert [adlm.load(f"runs/{method}-0").step for method in ("adlm", "mdlm", "ar")] == [2, 2, 2]
    with pytest.raises(
        RuntimeError, match=r"training failed: adlm-0, ar-0, mdlm-0; see bad.adlm-0.log\.txt"
    ):
        train_all(METHODS, Path("bad"), "data", small | {"steps": 2, "model.dim": 33})
    assert "33" in Path("bad/adlm-0/log.txt").read_text("utf-8")


def test_from_books_to_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commands of bundled/README.md, in small."""
    monkeypatch.chdir(tmp_path)
    half = len(BOOK) // 2
    for name, text in (("books", BOOK[:half]), ("held-out", BOOK[half : half + 15_000])):
        Path(f"{name}.txt.gz").write_bytes(gzip.compress(text.encode("utf-8")))
        run(
            monkeypatch,
            write_passages,
            f"{name}.txt.gz",
            "--max-characters",
            "200",
            "--out",
            f"{name}.jsonl",
        )
    adlm.prepare(
        "books.jsonl",
        "data",
        valid="held-out.jsonl",
        train_tokenizer=400,
        length=96,
        rows="documents",
    )
    small = {
        "batch": 4,
        "steps": 3,
        "model.dim": 32,
        "model.heads": 2,
        "device": "cpu",
        "log.show": False,
    }
    for method in ("adlm", "mdlm"):
        recipe = ROOT / f"recipes/bundled-{method}.yaml"
        adlm.train(recipe, **small, **{"data.path": "data", "valid.rows": 8, "folder": method})
    run(monkeypatch, ship, "adlm", "shipped", "--data", "data")
    assert adlm.load("shipped").row_format.is_framed
    options = ["--draws", "1", "--device", "cpu", "--out", "baselines.json"]
    run(monkeypatch, measure, "--data", "data", "shipped", "mdlm", *options)
    assert "bigram" in capsys.readouterr().out
    run(monkeypatch, find_lengths, "--data", "data", "shipped", "--holes", "5", "--device", "cpu")
    lengths = json.loads(capsys.readouterr().out)
    assert (
        lengths["holes"] == 5
        and 0 <= lengths["chosen"]["exact"] <= lengths["chosen"]["within_one"] <= 1
    )
    measured = json.loads(Path("baselines.json").read_text("utf-8"))
    assert [each["model"] for each in measured["models"]] == ["shipped", "mdlm"]
    assert measured["differences"][0]["se"] > 0
    assert measured["baselines"]["bigram"]["nll"] < measured["baselines"]["unigram"]["nll"]
