"""Samples are the same set of texts, and have the same metrics, at once, after kills, and by several processes."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from adlm.evaluate import cache as caches
from adlm.evaluate.cache import open_cache
from adlm.evaluate.results import EvalResult
from adlm.evaluate.sampling import (
    SampledText,
    cut_passages,
    generate_samples,
    min_passage,
    read_texts,
    samples,
    select_texts,
    split_document,
)
from adlm.text.lm import LM, load
from adlm.training.distributed import init_distributed
from tests.cli.terminal import env_of, trained
from tests.evaluate.scorers import PROSE, causal_folder, documents, needs
from tests.text.models import lm, rigged
from tests.training.runs import ROOT, torchrun

SAMPLING: dict[str, Any] = {"length": 12, "steps": 8, "sampler": "ancestral", "seed": 5, "top_p": 1.0}
N, SIZE = 10, 200


def generate(folder: Path | None = None, model: LM | None = None, **changes: Any) -> list[SampledText]:
    model, on_progress = model or lm(), changes.pop("on_progress", lambda *_: None)
    request = model.build_request(**({"n": N, "batch": 4} | SAMPLING | changes))
    return generate_samples(model, request, cache=open_cache(folder), on_progress=on_progress)


def evaluate(model: str, scorer: str | Path, out: Path | None, **changes: Any) -> EvalResult:
    settings = SAMPLING | {"length": 24, "mauve_seeds": 1, "n": N} | changes
    return samples(load(model, device="cpu"), scorer=scorer, reference=PROSE, out=out, **settings)


def main(out: str, model: str, scorer: str, pause: str) -> None:
    """Run by other processes of these tests: text by text, slowly, each on the disk at once."""
    caches.FLUSH_SECONDS = 0.0
    with init_distributed("cpu") as context:
        slow = {"batch": 1, "scorer_batch": 1, "on_progress": lambda *_: time.sleep(float(pause))}
        evaluate(model, scorer, Path(out), context=context, **slow)


def numbers(result: EvalResult) -> dict[str, float]:
    return {
        f"{side} {name} {key}": value
        for side in ("samples", "reference")
        for name, metric in result[side].items()
        if isinstance(metric, dict)
        for key, value in metric.items()
        if isinstance(value, float)
    }


def test_samples_are_those_of_generate(tmp_path: Path) -> None:
    found, expected = generate(tmp_path), lm().generate("", n=N, **SAMPLING)
    assert [(each.text, each.nfe) for each in found] == list(zip(expected.texts, expected.nfe_each, strict=True))
    assert [(each.number, each.seed) for each in found] == [(number, 5) for number in range(N)]


def test_tokens_are_those_of_the_text() -> None:
    """Up to the end of a text: this model ends texts early."""
    eos = lm().tokenizer.eos_id
    found = generate(model=rigged("adlm", {eos: 3.0}))
    assert len({len(each.tokens) for each in found}) > 1
    for each in found:
        assert eos not in each.tokens and lm().tokenizer.decode(each.tokens) == each.text


@pytest.mark.parametrize("batch", [1, 3, 16])
def test_the_batch_changes_no_text(batch: int) -> None:
    assert generate(batch=batch) == generate()


def test_cached_samples_are_not_generated_again(tmp_path: Path) -> None:
    progress: list[tuple[str, int, int]] = []
    generate(tmp_path, n=3)
    assert generate(tmp_path, on_progress=lambda *each: progress.append(each)) == generate()
    assert progress == [("generating", done, N) for done in (3, 7, N)]
    assert generate(tmp_path, n=4) == generate()[:4]


@pytest.mark.parametrize("changes", [{"seed": 6}, {"steps": 9}, {"top_p": 0.5}, {"prompt": "a"}, {"model": {3: 1.0}}])
def test_changed_settings_never_reuse_samples(tmp_path: Path, changes: dict[str, Any]) -> None:
    generate(tmp_path)
    if "model" in changes:
        changes = {"model": rigged("adlm", changes["model"])}
    assert generate(tmp_path, **changes) == generate(**changes) != generate(tmp_path)


def test_samples_have_one_prompt() -> None:
    with pytest.raises(ValueError, match="samples have one prompt, got 2"):
        generate(prompt=["a", "b"])


@pytest.mark.parametrize("stage", ["sample", "score"])
def test_a_kill_changes_nothing(tmp_path: Path, stage: str) -> None:
    needs("transformers", "mauve")
    model, scorer, part = trained(), causal_folder(positions=256), tmp_path / "cache.0.jsonl"
    words = [sys.executable, "-m", "tests.evaluate.test_sampling", str(tmp_path), model, str(scorer), "0.15"]

    def count() -> int:
        return part.read_bytes().count(f'"key": "{stage}-'.encode()) if part.exists() else 0

    with subprocess.Popen(words, cwd=ROOT, env=env_of()) as process:
        while process.poll() is None and count() < 4:
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
    assert 4 <= count() < N, "the process was not killed in time: the test shows nothing"
    progress: list[tuple[str, int, int]] = []
    resumed = evaluate(model, scorer, tmp_path, on_progress=lambda *each: progress.append(each))
    done = {name: next(each[1] for each in progress if each[0] == name) for name in ("generating", "scoring")}
    assert 3 <= done["generating"] < N if stage == "sample" else done["generating"] == N and done["scoring"] >= 3
    assert numbers(resumed) == pytest.approx(numbers(evaluate(model, scorer, None)), abs=1e-5, rel=1e-6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache.jsonl", "samples.jsonl"]


def test_two_processes_find_what_one_does(tmp_path: Path) -> None:
    needs("transformers", "mauve")
    model, scorer = trained(), causal_folder(positions=256)
    done = torchrun(2, "-m", "tests.evaluate.test_sampling", str(tmp_path), model, str(scorer), "0")
    assert done.returncode == 0, done.stderr[-3000:]
    progress: list[tuple[str, int, int]] = []
    resumed = evaluate(model, scorer, tmp_path, on_progress=lambda *each: progress.append(each))
    assert progress == [("generating", N, N), ("scoring", 3 * N, 3 * N)], "the processes did not compute all"
    assert numbers(resumed) == pytest.approx(numbers(evaluate(model, scorer, None)), abs=1e-5, rel=1e-6)
    assert [each.text for each in generate(model=load(model, device="cpu"), length=24)] == [
        json.loads(line)["text"] for line in (tmp_path / "samples.jsonl").read_text("utf-8").splitlines()
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache.jsonl", "samples.jsonl"]


def test_a_model_or_texts_are_measured() -> None:
    given: dict[str, Any] = {"scorer": "x", "reference": PROSE}
    with pytest.raises(ValueError, match="a model or texts: give one of them"):
        samples(**given)
    with pytest.raises(ValueError, match="texts are given, but steps, top_k set how to generate: leave them out"):
        samples(texts=["a", "b"], steps=5, top_k=2, **given)


def test_texts_of_files(tmp_path: Path) -> None:
    path = tmp_path / "odd.jsonl"
    path.write_text(json.dumps({"text": "a\u2028b\nc"}, ensure_ascii=False) + "\n", "utf-8")
    assert read_texts(path) == ["a\u2028b\nc"]
    for line in ('{"words": 1}', '{"text": 1}'):
        path.write_text(line, "utf-8")
        with pytest.raises(ValueError, match=r'line 1 of .* is not an object with a "text"|"text" is 1, but must be'):
            read_texts(path)
    path = tmp_path / "texts.txt"
    path.write_text("\n<|endoftext|>\n".join("abcde") + "\n", "utf-8", newline="")
    for n, count in ((None, 5), (2, 2)):
        texts, about = select_texts(path, n)
        assert texts == list("abcde")[:count] and (about["n"], about["texts_in_the_file"]) == (count, 5)
        assert about["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    with pytest.raises(ValueError, match="n=6, but there are 5 texts"):
        select_texts(path, 6)
    with pytest.raises(ValueError, match="at least 2 texts, got 1"):
        select_texts(["one"], None)


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
    wrapped = "\n\n".join("First words\nof a paragraph\nthat is wrapped at a width." for _ in range(30))
    found = list(split_document(wrapped, 60))
    assert len(found) > 10 and all(passage.startswith("First words") for passage in found)
    lines = wrapped.replace("\n\n", "\n")
    assert {passage.split()[0] for passage in split_document(lines, 60)} == {"First", "of", "that"}
    assert next(split_document("  \n\n" + wrapped, 60)).startswith("First words")
    assert list(split_document("  A line.\n", SIZE)) == ["A line."] and list(split_document(" \n", SIZE)) == []


def test_headings_are_not_passages() -> None:
    """A document of two words would truncate a sample to two words, too short for n-grams."""
    long = "A sentence that is long enough to be a passage of its own."
    assert cut_passages(["CHAPTER I.", long, "* * *", " \n"], 1, SIZE) == [long]
    with pytest.raises(ValueError, match="has 1 passages of 32 to 200 characters, but 2 are needed"):
        cut_passages(["CHAPTER I.", long], 2, SIZE)
    assert sorted(cut_passages(["Short.", "Texts."], 2, 6)) == ["Short.", "Texts."]
    for characters in (5, 40, 127, 128, 900):
        shortest = min_passage(characters)
        assert shortest == (32 if characters >= 128 else characters // 4)
        found = cut_passages(["x" * size for size in range(1, characters + 1)], characters - shortest + 1, characters)
        assert min(map(len, found)) == shortest


def test_the_seed_orders_passages() -> None:
    one, again, other = (cut_passages(documents(), 60, SIZE, seed=seed) for seed in (3, 3, 1))
    assert one == again != other and len(set(one)) == 60
    assert cut_passages(documents(), 20, SIZE, seed=3) == one[:20]
    even = cut_passages(documents(), 10, SIZE, seed=3, is_fit=lambda text: len(text) % 2 == 0)
    assert even == [text for text in one if len(text) % 2 == 0][:10]
    with pytest.raises(ValueError, match="has 0 passages"):
        cut_passages(documents(), 1, SIZE, is_fit=lambda text: False)
    with pytest.raises(ValueError, match="both must be at least 1"):
        cut_passages(["short"], 1, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
