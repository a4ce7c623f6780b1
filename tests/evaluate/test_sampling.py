"""Samples are the same set of texts, and have the same metrics, at once, resumed, and by several processes.

They are killed in tests/attacks/test_kills.py.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from adlm.evaluate import sample_metrics as sampling
from adlm.evaluate.cache import open_cache
from adlm.evaluate.results import EvalResult
from adlm.evaluate.sample_metrics import (
    cut_passages,
    read_texts,
    samples,
    select_texts,
    split_document,
)
from adlm.text.lm import LM, load
from tests.cli.terminal import trained
from tests.evaluate.scorers import PROSE, causal_folder, documents, needs, numbers
from tests.text.models import lm, rigged
from tests.training.runs import torchrun

SAMPLING: dict[str, Any] = {
    "length": 12,
    "steps": 8,
    "sampler": "ancestral",
    "seed": 5,
    "top_p": 1.0,
}
N, SIZE = 10, 200


def generate(
    folder: Path | None = None, model: LM | None = None, **changes: Any
) -> list[sampling.Sample]:
    model, on_progress = model or lm(), changes.pop("on_progress", lambda *_: None)
    rows = model.layout_rows(**({"n": N, "batch": 4} | SAMPLING | changes))
    cache = open_cache(folder)
    cache.on_progress = on_progress
    return sampling.generate_samples(model, rows, cache)


def evaluate(model: str, scorer: str | Path, out: Path | None, **changes: Any) -> EvalResult:
    settings = SAMPLING | {"length": 24, "mauve_seeds": 1, "n": N} | changes
    return samples(load(model, device="cpu"), scorer=scorer, reference=PROSE, out=out, **settings)


def test_samples_are_those_of_generate(tmp_path: Path) -> None:
    found, expected = generate(tmp_path), lm().generate("", n=N, **SAMPLING)
    assert [(each["text"], each["nfe"]) for each in found] == list(
        zip(expected.texts, expected.nfe_each, strict=True)
    )
    assert [(each["number"], each["seed"]) for each in found] == [
        (number, 5) for number in range(N)
    ]
    for batch in (1, 3, 16):
        assert generate(batch=batch) == found
    eos = lm().tokenizer.eos_id
    found = generate(model=rigged("adlm", {eos: 3.0}))  # ends texts early
    assert len({len(each["tokens"]) for each in found}) > 1
    for each in found:
        assert eos not in each["tokens"] and lm().tokenizer.decode(each["tokens"]) == each["text"]


def test_cached_samples_are_not_generated_again(tmp_path: Path) -> None:
    progress: list[tuple[str, int, int]] = []
    generate(tmp_path, n=3)
    assert generate(tmp_path, on_progress=lambda *each: progress.append(each)) == generate()
    assert progress == [("generating", done, N) for done in (3, 7, N)]
    assert generate(tmp_path, n=4) == generate()[:4]


@pytest.mark.parametrize(
    "changes", [{"seed": 6}, {"steps": 9}, {"top_p": 0.5}, {"prompt": "a"}, {"model": {3: 1.0}}]
)
def test_changed_settings_never_reuse_samples(tmp_path: Path, changes: dict[str, Any]) -> None:
    generate(tmp_path)
    if "model" in changes:
        changes = {"model": rigged("adlm", changes["model"])}
    assert generate(tmp_path, **changes) == generate(**changes) != generate(tmp_path)


@pytest.mark.slow  # test_scorer.py has the ranks, test_eval_ppl.py the processes
def test_two_processes_find_what_one_does(tmp_path: Path) -> None:
    needs("transformers", "mauve")
    model, scorer = trained(), causal_folder(positions=256)
    settings = SAMPLING | {
        "length": 24,
        "mauve_seeds": 1,
        "num_texts": N,
        "judge": scorer,
        "reference": PROSE,
    }
    settings |= {"out": tmp_path, "device": "cpu"}
    options = [
        word
        for name, value in settings.items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    done = torchrun(2, "-m", "adlm", "eval", "samples", model, *options, "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    assert numbers(json.loads(done.stdout)) == pytest.approx(
        numbers(evaluate(model, scorer, None)), abs=1e-5, rel=1e-6
    )
    progress: list[tuple[str, int, int]] = []
    evaluate(model, scorer, tmp_path, on_progress=lambda *each: progress.append(each))
    assert {stage: done for stage, done, _ in reversed(progress)} == {
        "generating": N,
        "scoring": 3 * N,
    }  # nothing new
    names = {"samples.json", ".lock", "cache.jsonl", "samples.jsonl"}
    assert {path.name for path in tmp_path.iterdir()} == names
    expected = generate(model=load(model, device="cpu"), length=24)
    assert read_texts(tmp_path / "samples.jsonl") == [each["text"] for each in expected]


def test_a_model_or_texts_are_measured() -> None:
    given: dict[str, Any] = {"scorer": "x", "reference": PROSE}
    with pytest.raises(ValueError, match="a model or texts: give one of them"):
        samples(**given)
    with pytest.raises(
        ValueError, match="texts are given, but steps, top_k set how to generate: leave them out"
    ):
        samples(texts=["a", "b"], steps=5, top_k=2, **given)


def test_texts_of_files(tmp_path: Path) -> None:
    path = tmp_path / "odd.jsonl"
    path.write_text(json.dumps({"text": "a\u2028b\nc"}, ensure_ascii=False) + "\n", "utf-8")
    assert read_texts(path) == ["a\u2028b\nc"]
    for line in ('{"words": 1}', '{"text": 1}'):
        path.write_text(line, "utf-8")
        with pytest.raises(ValueError, match="is not a list of texts"):
            read_texts(path)
    path = tmp_path / "texts.txt"
    path.write_text("\n<|endoftext|>\n".join("abcde") + "\n", "utf-8", newline="")
    for n, count in ((None, 5), (2, 2)):
        texts, about = select_texts(str(path), n)
        assert texts == list("abcde")[:count] and (about["n"], about["available_texts"]) == (
            count,
            5,
        )
        assert about["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    with pytest.raises(ValueError, match="n=6, but there are 5 texts"):
        select_texts(path, 6)
    with pytest.raises(ValueError, match="at least 2 texts, got 1"):
        select_texts(["one"], None)
    for few in (0, 1):  # of enough texts
        with pytest.raises(ValueError, match=f"at least 2 texts, got {few}"):
            select_texts(["one", "two", "three"], few)


# Passages.


def test_passages_are_pieces_of_documents_without_overlap() -> None:
    for document in documents()[:5]:
        at = 0
        for passage in split_document(document, SIZE):
            start = document.index(passage, at)
            assert start == 0 or document[start - 1] == "\n"
            assert 0 < len(passage) <= SIZE
            at = start + len(passage)
        assert at > len(document) / 3, "most of a document is left out"


def test_a_line_is_a_paragraph_only_in_documents_without_blank_lines() -> None:
    wrapped = "\n\n".join(
        "First words\nof a paragraph\nthat is wrapped at a width." for _ in range(30)
    )
    found = list(split_document(wrapped, 60))
    assert len(found) > 10 and all(passage.startswith("First words") for passage in found)
    lines = wrapped.replace("\n\n", "\n")
    assert {passage.split()[0] for passage in split_document(lines, 60)} == {"First", "of", "that"}
    assert next(split_document("  \n\n" + wrapped, 60)).startswith("First words")
    assert list(split_document("  A line.\n", SIZE)) == ["A line."] and not cut_passages(
        [" \n"], 0, SIZE
    )


def test_headings_are_not_passages() -> None:
    """A document of two words would truncate a sample to two words, too short for n-grams."""
    long = "A sentence that is long enough to be a passage of its own."
    assert cut_passages(["CHAPTER I.", long, "* * *", " \n"], 1, SIZE) == [long]
    with pytest.raises(
        ValueError, match="has 1 passages of 32 to 200 characters, but 2 are needed"
    ):
        cut_passages(["CHAPTER I.", long], 2, SIZE)
    assert sorted(cut_passages(["Short.", "Texts."], 2, 6)) == ["Short.", "Texts."]
    for characters, shortest in ((5, 1), (40, 10), (127, 31), (128, 32), (900, 32)):
        found = cut_passages(
            ["x" * size for size in range(1, characters + 1)], characters - shortest + 1, characters
        )
        assert min(map(len, found)) == shortest == sampling.min_passage(characters)


def test_the_seed_orders_passages() -> None:
    one, again, other = (cut_passages(documents(), 60, SIZE, seed=seed) for seed in (3, 3, 1))
    assert one == again != other and len(set(one)) == 60
    assert cut_passages(documents(), 20, SIZE, seed=3) == one[:20]
    even = cut_passages(documents(), 10, SIZE, seed=3, is_fit=lambda text: len(text) % 2 == 0)
    assert even == [text for text in one if len(text) % 2 == 0][:10]
    with pytest.raises(ValueError, match="has 0 passages"):
        cut_passages(documents(), 1, SIZE, is_fit=lambda text: False)
