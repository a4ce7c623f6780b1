"""`adlm eval domains`: a line for each kind of text, the same figures as `adlm eval ppl`."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

import adlm
from adlm.checkpoint import described, write_json
from adlm.studies.code import standard_library
from tests.cli.terminal import assert_told, invoke, trained
from tests.train.runs import TEXT

SMALL = ("--limit", 8, "--draws", 2, "--device", "cpu")


def answered(*words: object) -> dict[str, Any]:
    result = invoke("eval", *words, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


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


def test_the_table_says_what_json_says(tmp_path: Path) -> None:
    words = ("domains", trained(), "--set", f"prose={files(tmp_path)[0]}", *SMALL)
    (row,) = answered(*words)["domains"]
    result = invoke("eval", *words)
    assert f"≤ {row['bits_per_byte']:.4f} ± {row['bits_per_byte_se']:.4f}" in result.stdout
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
    ],
)
def test_mistakes_are_told_in_a_line(words: tuple[str, ...], said: str) -> None:
    assert_told(invoke("eval", "domains", trained(), *words, "--json"), said)
