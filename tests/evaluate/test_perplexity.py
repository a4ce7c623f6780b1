"""Perplexity of several models on several texts: the estimates of `likelihood`, paired, and computed once."""

import json
import math
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from adlm.data.batches import is_valid
from adlm.diffusion.masking import ForwardProcess
from adlm.diffusion.objectives import OBJECTIVES
from adlm.evaluate import ppl
from adlm.evaluate.data import EvalDataset, count_row_bytes, load_eval_data
from adlm.evaluate.ppl import group_warnings, perplexity, warn_few_units
from adlm.evaluate.results import EvalResult
from adlm.evaluate.stats import estimate_ratio_difference
from adlm.likelihood import estimate_nll, row_nats
from adlm.models.methods import METHODS
from adlm.text.lm import LM
from tests.text.models import lm
from tests.training.runs import TEXT


def small(method: str = "adlm", name: str = "small", words: str = "bytes", **changes: Any) -> LM:
    """A model with random weights on rows of 32 tokens."""
    model = deepcopy(lm(method, words, dim=16, length=32, **changes))
    model.name = name
    return model


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, paths = tmp_path_factory.mktemp("texts"), {}
    for number, name in enumerate(("first", "second")):
        paths[name] = folder / f"{name}.txt"
        pieces = TEXT[3000 * number :][:1200].split(", ")
        paths[name].write_text("\n<|endoftext|>\n".join(pieces), "utf-8")
    paths["one"] = folder / "one.txt"
    paths["one"].write_text(" ".join(TEXT[:900].split()), "utf-8")
    return paths


def measure(
    models: LM | list[LM], texts: dict[str, Path], *names: str, **options: Any
) -> EvalResult:
    return perplexity(
        models, {name: texts[name] for name in names}, **{"draws": 2, "seed": 3, **options}
    )


def list_entries(result: EvalResult) -> list[dict[str, Any]]:
    """The entries without the time that they took."""
    entries = result.metrics.get("models") or [result.metrics | {"settings": result.settings}]
    return [{key: value for key, value in entry.items() if key != "seconds"} for entry in entries]


@pytest.mark.parametrize("rows", ["wrapped", "documents"])
@pytest.mark.parametrize("count", ["lineage", "text"])
@pytest.mark.parametrize("method", ["adlm", "ar", "sedd"])
def test_an_entry_is_the_estimate_of_the_nll(
    texts: dict[str, Path], method: str, count: str, rows: Any
) -> None:
    model = small(method)
    data = load_eval_data(texts["first"], model.tokenizer, 32, rows=rows)
    reads_padding = method == "adlm" and count == "text"
    found = measure(
        model, texts, "first", batch=7, count=count, rows=rows, attend_padding=reads_padding
    )
    frame = (model.tokenizer.bos_id, model.tokenizer.eos_id) if count == "text" else ()
    process = ForwardProcess(model.model.config.mask_id, attend_padding=reads_padding)
    expected = estimate_nll(
        model.model,
        data.rows,
        OBJECTIVES[METHODS[method].objective](process),
        given_tokens=[token for token in frame if token is not None],
        draws=2,
        seed=3,
        documents=data.documents,
    )
    assert found["nll"] == pytest.approx(expected.nll, abs=1e-5)
    assert found["se"] == pytest.approx(expected.stderr, abs=1e-5)
    assert found["se_noise"] == pytest.approx(expected.noise_stderr, abs=1e-5)
    tokens, lengths = data.rows.fetch(range(len(data.rows)))
    is_counted = (
        torch.ones_like(tokens, dtype=torch.bool) if lengths is None else is_valid(lengths, 32)
    )
    is_counted &= (
        ~torch.isin(tokens, torch.tensor(frame)) if frame else torch.arange(32) >= (method == "ar")
    )
    assert found["tokens"] == expected.tokens == int(is_counted.sum())
    assert found["ppl"] == pytest.approx(math.exp(found["nll"]))
    assert found["bits_per_byte"] == pytest.approx(expected.bits_per_byte(data.bytes), rel=1e-5)
    assert found["bits_per_byte_se"] / found["bits_per_byte"] == pytest.approx(
        found["se"] / found["nll"]
    )
    assert found["is_bound"] == (method != "ar") and found["rows"] == len(data.rows)
    assert found["se_unit"] == "documents" and found["se_count"] == len(data.documents.unique())
    assert (
        found["rows_hash"] == data.rows_hash
        and json.loads(json.dumps(found.as_dict())) == found.as_dict()
    )


def test_models_of_one_tokenizer_share_the_rows(
    texts: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a model's estimates do not depend on the other models and texts."""
    reads: list[str] = []

    def count(source: Path, tokenizer: Any, *args: Any, **options: Any) -> EvalDataset:
        reads.append(f"{source.stem} {tokenizer.name}")
        return load_eval_data(source, tokenizer, *args, **options)

    models, stages = [small(), small("mdlm", "one stage"), small(name="of words", words="gpt2")], []
    with monkeypatch.context() as patch:
        patch.setattr(ppl, "load_eval_data", count)
        found = measure(
            models, texts, "first", "second", on_progress=lambda stage, *_: stages.append(stage)
        )
    assert reads == ["first bytes", "first gpt2", "second bytes", "second gpt2"]
    assert [(each["data"], each["model"]) for each in found["models"]] == [
        (text, model.name) for text in ("first", "second") for model in models
    ]
    assert list(dict.fromkeys(stages))[:3] == ["first: reading", "first: small", "first: one stage"]
    alone = [entry for model in models for entry in list_entries(measure(model, texts, "first"))]
    assert list_entries(found)[:3] == alone
    assert alone[0]["rows_hash"] == alone[1]["rows_hash"] != alone[2]["rows_hash"]


def test_rows_depend_on_the_tokens_that_begin_and_end_a_text(texts: dict[str, Path]) -> None:
    models = [small(name=name, words="characters") for name in ("usual", "turned round", "again")]
    bos, eos = models[0].tokenizer.bos_id, models[0].tokenizer.eos_id
    for model, (first, last) in zip(models, ((bos, eos), (eos, bos), (bos, eos)), strict=True):
        model.tokenizer = replace(model.tokenizer, name=model.name, bos_id=first, eos_id=last)
    found = list_entries(measure(models, texts, "first"))
    assert found == [
        entry for model in models for entry in list_entries(measure(model, texts, "first"))
    ]
    assert found[0]["rows_hash"] == found[2]["rows_hash"] != found[1]["rows_hash"]
    assert [each["settings"]["data"]["tokenizer"] for each in found] == [
        "usual",
        "turned round",
        "again",
    ]


def test_two_masked_models_are_paired_in_nats_per_token(texts: dict[str, Path]) -> None:
    """Model minus the first one, over documents; by hand."""
    models = [small(), small("mdlm", "other")]
    (difference,) = measure(models, texts, "first")["differences"]
    data = load_eval_data(texts["first"], models[0].tokenizer, 32)
    first, other = (estimate_nll(model.model, data.rows, draws=2, seed=3) for model in models)
    assert (difference["model"], difference["baseline"], difference["unit"]) == (
        "other",
        "small",
        "nats/token",
    )
    assert difference["difference"] == pytest.approx(other.nll - first.nll, abs=1e-6)
    _, unit = data.documents.unique(return_inverse=True)
    apart = torch.zeros(int(unit.max()) + 1, dtype=torch.float64).index_add_(
        0, unit, other.row_nats - first.row_nats
    )
    tokens = torch.zeros_like(apart).index_add_(0, unit, first.row_tokens)
    pulls = (apart - apart.sum() / tokens.sum() * tokens) / tokens.sum()
    expected = math.sqrt(len(pulls) / (len(pulls) - 1) * float(pulls.square().sum()))
    assert difference["se"] == pytest.approx(expected, rel=1e-6) and difference["se_count"] == len(
        pulls
    )
    twins = measure([small(), small(name="twin")], texts, "one")  # one document: the units are rows
    (same,), entry = twins["differences"], twins["models"][0]
    assert same["difference"] == 0 == same["se"] and same["se_unit"] == entry["se_unit"] == "rows"
    assert entry["se_count"] == entry["rows"] == same["se_count"] and entry["se"] > 0


@pytest.mark.parametrize("rows", ["wrapped", "documents"])
def test_other_kinds_and_tokenizers_are_paired_in_bits_per_byte(
    texts: dict[str, Path], rows: Any
) -> None:
    models = [small(), small("ar", "causal"), small(name="of words", words="gpt2")]
    found = measure(models, texts, "first", rows=rows)
    first, causal, words = found["models"]
    for difference, entry in zip(found["differences"], (causal, words), strict=True):
        assert difference["unit"] == "bits/byte" and difference["se_unit"] == "documents"
        assert (
            difference["model"] == entry["model"]
            and 0 < difference["se"] < 2
            and difference["se_count"] > 1
        )
    expected = causal["bits_per_byte"] - first["bits_per_byte"]
    assert found["differences"][0]["difference"] == pytest.approx(expected, rel=1e-5)
    data = load_eval_data(texts["first"], models[0].tokenizer, 32, rows=rows)
    sizes = count_row_bytes(data, models[0].tokenizer)
    assert sizes.sum() == pytest.approx(data.bytes) and sizes.min() >= 0
    if rows == "documents":  # rows are documents, for every tokenizer
        assert found["differences"][1]["se_count"] == len(data.rows)
        estimates = [
            (estimate_nll(each.model, part.rows, draws=2, seed=3).row_nats.numpy() / math.log(2),
             count_row_bytes(part, each.tokenizer))
            for each in (models[2], models[0])
            for part in [load_eval_data(texts["first"], each.tokenizer, 32, rows=rows)]
        ]  # fmt: skip
        value, stderr = estimate_ratio_difference(*estimates[0], *estimates[1])
        assert found["differences"][1]["difference"] == pytest.approx(value, rel=1e-5)
        assert found["differences"][1]["se"] == pytest.approx(stderr, rel=1e-5)


def test_stored_estimates_are_not_computed_again(
    texts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names and places do not matter; seed, draws, weights and rows do."""
    calls: list[int] = []

    def count(*args: Any, **options: Any) -> Any:
        calls.append(1)
        return row_nats(*args, **options)

    monkeypatch.setattr(ppl, "row_nats", count)
    first = measure([small(), small("ar", "causal")], texts, "first", out=str(tmp_path))
    assert len(calls) == 2
    moved = tmp_path / "moved.txt"
    moved.write_bytes(texts["first"].read_bytes())
    renamed = [small(name="renamed"), small("ar", "too")]
    again = perplexity(renamed, {"elsewhere": moved}, draws=2, seed=3, batch=5, out=tmp_path)
    assert len(calls) == 2 and again["models"][0]["settings"]["data"]["source"] == str(moved)
    assert [entry["model"] for entry in again["models"]] == ["renamed", "too"]
    for old, new in zip(first["models"], again["models"], strict=True):
        assert all(
            old[key] == new[key] for key in ("nll", "se", "se_noise", "bits_per_byte", "rows_hash")
        )
    assert [each["se"] for each in first["differences"]] == [
        each["se"] for each in again["differences"]
    ]
    for number, change in enumerate(
        ({"seed": 4}, {"draws": 3}, {"limit": 3}, {"count": "text"}, {"steps": 5}), 3
    ):
        measure(small(), texts, "first", out=tmp_path, **change)
        assert len(calls) == number
    measure(small("ar"), texts, "first", out=tmp_path, seed=9)  # a causal model has no noise
    assert len(calls) == number


def test_errors_name_model_and_text(texts: dict[str, Path], tmp_path: Path) -> None:
    blank, broken = {"blank": tmp_path / "blank.jsonl"}, small()
    blank["blank"].write_text('{"text": ""}\n' * 100, "utf-8")
    with torch.no_grad():
        broken.model.head.bias[0] = math.nan
    for models, data, options, error in (
        (small(), texts, {"limit": 1}, r"small cannot be evaluated on second: a standard error needs more than 1 rows"),
        (small(), blank, {}, r"blank\.jsonl has 3 rows without any text: give another text"),
        (broken, texts, {}, r"small cannot be evaluated on second: the loss of rows \[0, "),
        ([small(), broken], texts, {}, "two different models are named 'small'"),
        ([], texts, {}, "models is empty"),
        ("adlm-prose", texts, {}, r"models has 'adlm-prose', which is no LM: give adlm.load\('adlm-prose'\)"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=error):
            measure(models, data, "blank" if data is blank else "second", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("marked", "which"),
    [("0123", "all"), ("0", "ptb (a)"), ("023", "ptb (a), lambada (a), lambada (b)")],
)
def test_a_warning_names_what_it_applies_to(marked: str, which: str) -> None:
    entries = [{"set": text, "model": model} for text in ("ptb", "lambada") for model in ("a", "b")]
    reasons = [["other rows"] * (str(number) in marked) for number in range(4)]
    assert group_warnings(reasons, entries, "set") == [f"{which}: other rows"]
    assert group_warnings([["other rows"]], entries[:1], "set") == ["other rows"]
    few: dict[str, Any] = {"se_count": 19, "se_unit": "documents"}
    assert warn_few_units(few) == ["standard error estimated from only 19 documents"]
    assert warn_few_units(few | {"se_count": 20}) == []
