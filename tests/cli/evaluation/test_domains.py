"""`adlm eval domains`: a line for each kind of text and model, the figures of `adlm eval ppl`; a file to go on from."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

import adlm
from adlm.checkpoint import described, write_json
from adlm.evaluate.zeroshot import weights_hash
from adlm.studies.code import standard_library
from tests.cli.evaluation.answers import answered
from tests.cli.terminal import assert_told, invoke, trained
from tests.training.runs import TEXT, torchrun

SMALL = ("--limit", 8, "--draws", 2, "--device", "cpu")
FIGURES = ("nll", "se", "se_noise", "ppl", "bits_per_byte", "bits_per_byte_se", "tokens")


def assert_same(found: list[Mapping[str, Any]], expected: list[Mapping[str, Any]]) -> None:
    """The same lines of the same rows with the same settings, their figures to 1e-5."""
    for mine, theirs in zip(found, expected, strict=True):
        for name in FIGURES:
            assert mine[name] == pytest.approx(theirs[name], rel=1e-5), name
        rest = [{key: value for key, value in line.items() if key not in FIGURES} for line in (mine, theirs)]
        assert rest[0] == rest[1]


def files(folder: Path) -> tuple[Path, Path]:
    prose, code = folder / "prose.txt", folder / "code.txt"
    prose.write_text(TEXT[:8000], "utf-8")
    code.write_text(standard_library()[0].text[:8000], "utf-8")
    return prose, code


@pytest.mark.parametrize("method", ["adlm", "ar"])
def test_a_domains_figures_are_those_of_ppl(method: str, tmp_path: Path) -> None:
    prose, code = files(tmp_path)
    found = answered("domains", trained(method), "--set", f"prose={prose}", "--set", f"code={code}", *SMALL)
    assert [row["domain"] for row in found["domains"]] == ["prose", "code"]
    for row, file in zip(found["domains"], (prose, code)):
        alone = answered("ppl", trained(method), "--data", file, *SMALL)
        for name in ("nll", "se", "ppl", "bits_per_byte", "tokens"):
            assert row[name] == pytest.approx(alone[name], rel=1e-5), name
        assert row["rows_hash"] == alone["rows_hash"] and row["is_bound"] is alone["is_bound"]
        assert row["bits_per_byte_se"] / row["bits_per_byte"] == pytest.approx(row["se"] / row["nll"])
    assert found["provenance"]["python"] and found["settings"]["draws"] == (1 if method == "ar" else 2)
    assert found["settings"]["model"] == found["domains"][0]["model"] == trained(method)
    (model,) = found["models"]
    assert model["weights_sha256"] == weights_hash(adlm.load(trained(method), device="cpu").model)


def test_several_models_are_each_alone(tmp_path: Path) -> None:
    """Text by text, so that lines that compare stand together."""
    models, sets = [trained(), trained("ar")], [f"--set={name}={file}" for name, file in zip("pc", files(tmp_path))]
    found = answered("domains", *models, *sets, *SMALL)
    assert [(line["domain"], line["model"]) for line in found["domains"]] == [(d, m) for d in "pc" for m in models]
    alone = {model: answered("domains", model, *sets, *SMALL) for model in models}
    for model, answer in alone.items():
        assert [line for line in found["domains"] if line["model"] == model] == answer["domains"]
    assert found["models"] == [each for answer in alone.values() for each in answer["models"]]
    assert "model" not in found["settings"] and found["settings"]["draws"] == 2
    header, *rows = invoke("eval", "domains", *models, *sets, *SMALL).stdout.splitlines()
    assert (
        header.split()[:2] == ["domain", "model"] and [row.split()[1] for row in rows[:4]] == ["run-adlm", "run-ar"] * 2
    )
    assert ["≤" in row for row in rows[:4]] == [True, False] * 2


def test_workers_and_batch_change_nothing(tmp_path: Path) -> None:
    words = ("domains", trained(), "--set", f"prose={files(tmp_path)[0]}", *SMALL)
    assert_same(answered(*words, "--workers", 4, "--batch", 3)["domains"], answered(*words)["domains"])


def test_two_processes_are_one(tmp_path: Path) -> None:
    """One answers and writes; what the file holds is known to both, and done by none."""
    prose, code = files(tmp_path)
    models, out = [trained(), trained("ar")], tmp_path / "domains.json"
    words = (*models, "--set", f"prose={prose}", "--set", f"code={code}", "--limit", 30, "--draws", 2, "--batch", 7)
    expected = answered("domains", *words, "--device", "cpu")
    known = answered("domains", *words[2:4], models[0], *words[6:], "--device", "cpu", "--out", out)["domains"]
    given = [*map(str, words), "--device", "cpu", "--out", str(out), "--json"]
    done = torchrun(2, "-m", "adlm", "eval", "domains", *given)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("\n") == 1 and done.stderr.count(": measured") == 3
    assert done.stderr.count("known from") == 1
    found = json.loads(done.stdout)
    assert found["provenance"]["processes"] == 2 and found["settings"] == expected["settings"]
    assert found["domains"][0] == known[0]
    assert_same(found["domains"], expected["domains"])
    stored = json.loads(out.read_text("utf-8"))
    assert stored == found | {"domains": stored["domains"]}
    assert sorted(map(str, stored["domains"])) == sorted(map(str, found["domains"]))


def test_finished_lines_are_not_done_again(tmp_path: Path) -> None:
    prose, code = files(tmp_path)
    out = tmp_path / "new" / "domains.json"
    words = (*SMALL, "--out", out, "--set", f"prose={prose}")
    first = answered("domains", trained(), *words)
    stored = json.loads(out.read_text("utf-8"))
    assert stored == first
    stored["domains"][0]["nll"] = -1.0
    out.write_text(json.dumps(stored), "utf-8")
    more = (*words, "--set", f"code={code}")
    again = invoke("eval", "domains", trained(), trained("ar"), *more, "--json")
    assert again.exit_code == 0, again.output
    assert [line["nll"] == -1 for line in json.loads(again.stdout)["domains"]] == [True, False, False, False]
    assert f"prose, {trained()}: known from" in again.stderr and f"code, {trained('ar')}: measured" in again.stderr
    # A model that is not asked for stays in the file; other rows under the same name are measured again.
    (line,) = answered("domains", trained(), *words, "--limit", 4)["domains"]
    stored = json.loads(out.read_text("utf-8"))
    assert line["nll"] > 0 and line["rows"] == 4 and len(stored["domains"]) == 4 and len(stored["models"]) == 2
    assert [each["rows"] for each in stored["domains"] if each["model"] == trained()] == [4, 8]
    # Another seed, another file; a causal model has no noise.
    result = invoke("eval", "domains", trained(), *words, "--seed", 1)
    assert_told(result, f"holds figures of {trained()} with seed 0, and 1 is asked for: give another name")
    assert answered("domains", trained("ar"), *words, "--seed", 1)["domains"][0]["settings"]["seed"] == 0


@pytest.mark.parametrize("content", ["not JSON", "[]", '{"format": 2, "models": [], "sets": []}'])
def test_a_file_of_something_else_is_not_written_over(content: str, tmp_path: Path) -> None:
    out = tmp_path / "mine.json"
    out.write_text(content, "utf-8")
    words = (trained(), "--set", f"prose={files(tmp_path)[0]}", *SMALL, "--out", out)
    assert_told(invoke("eval", "domains", *words), "is no file of this command: give another name")
    assert out.read_text("utf-8") == content


def test_the_table_says_what_json_says(tmp_path: Path) -> None:
    words = ("domains", trained(), "--set", f"prose={files(tmp_path)[0]}", *SMALL)
    (row,) = answered(*words)["domains"]
    result = invoke("eval", *words)
    header, line, few = result.stdout.splitlines()
    assert header.split()[:2] == ["domain", "bits/byte"]
    assert f"≤ {row['bits_per_byte']:.4f} ± {row['bits_per_byte_se']:.4f}" in line and row["rows_hash"][:8] in line
    assert few == f"prose: the error is over {row['error_units']} {row['error_over']} only, too few to lean on"
    assert "Bits per byte compare between domains" in result.stderr


@pytest.mark.parametrize("command", ["domains", "zeroshot"])
def test_weights_that_are_no_numbers_are_told(command: str, tmp_path: Path) -> None:
    lm = adlm.load(trained(), device="cpu")
    weights = {name: value.clone() for name, value in lm.model.state_dict().items()}
    weights["head.bias"][:] = math.nan
    lm.tokenizer.save(tmp_path)
    save_file(weights, tmp_path / "model.safetensors")
    write_json(tmp_path / "config.json", described(lm.model.config, "adlm", 0, "wrapped"))
    (tmp_path / "ptb.valid.txt").write_text(TEXT[:3000], "utf-8")
    words = ("--set", f"ptb={tmp_path / 'ptb.valid.txt'}", *SMALL)
    assert_told(invoke("eval", command, tmp_path, *words), "the loss is nan")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "there is nothing to measure on: give --set prose=FILE"),
        (("--set", "prose"), "--set 'prose' is not NAME=DATA"),
        (("--set", "a=x", "--set", "a=y"), "--set names a twice"),
        (("--set", "a=nowhere.txt"), "nowhere.txt"),
        (("--set", "a=x", "--rows", "odd"), "--rows is wrapped or documents"),
        (("--set", "a=x", "--out", "."), "is a folder: give the name of a file in it"),
        (("--set", "a=x", "--length", "64"), "--length 64 is more than the 32 tokens of"),
        (("nobody", "--set", "a=x"), "there is no model 'nobody'"),
    ],
)
def test_mistakes_are_told_in_a_line(words: tuple[str, ...], said: str) -> None:
    assert_told(invoke("eval", "domains", trained(), *words, "--json"), said)
