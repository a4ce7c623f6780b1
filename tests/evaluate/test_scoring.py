"""Scores are those of transformers on each text alone; they resume, are shared by ranks, and are never mistaken."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adlm.evaluate import scoring
from adlm.evaluate.cache import Cache, open_cache
from adlm.evaluate.scorer import ScoringModel, TokenizedText
from adlm.evaluate.scoring import ScoringRequest, TextScores, score_texts, split_windows
from adlm.training.distributed import DistributedContext
from tests.evaluate.scorers import causal, documents, encoder

LENGTHS = [5, 40, 12, 33, 60, 7, 21]


def texts(scorer: ScoringModel, lengths: list[int]) -> list[TokenizedText]:
    """Texts with so many tokens."""
    return [scorer.encode([document[:400]])[0].truncate(length) for document, length in zip(documents(), lengths)]


def request(scorer: ScoringModel | None = None, **changes) -> ScoringRequest:
    scorer = scorer or causal()
    settings = {"with_nats": scorer.is_causal, "with_features": True} | changes
    return ScoringRequest(scorer, texts(scorer, LENGTHS), **settings)


def score(scorer: ScoringModel, given: list[TokenizedText], *, batch: int = 32, **settings) -> TextScores:
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


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("batch", [1, 2, 7])
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
def test_features_alone_are_those_with_nats_and_an_encoders_the_mean_over_tokens(batch: int) -> None:
    """Without nats the head is not applied."""
    both = score(causal(), texts(causal(), [9, 30, 21]), with_features=True, batch=batch)
    only = score(causal(), texts(causal(), [9, 30, 21]), with_nats=False, with_features=True, batch=batch)
    assert only.nats == [] and only.features == pytest.approx(both.features, abs=1e-5)
    given = texts(encoder(), [5, 46, 12, 33, 7])
    found = score(encoder(), given, with_nats=False, with_features=True, batch=batch).features
    expected = [alone(encoder(), text.ids)[1].mean(0) for text in given]
    assert found == pytest.approx(np.stack(expected), abs=1e-5)


@given(st.lists(st.integers(1, 90), min_size=1, max_size=5), st.integers(2, 40))
def test_windows_score_every_token_once(lengths: list[int], window: int) -> None:
    seen = [np.zeros(length, dtype=int) for length in lengths]
    for part in split_windows(lengths, 40, window):
        assert 0 <= part.start <= part.first_scored < part.end <= lengths[part.text]
        assert part.end - part.start <= window
        # After the first window, at least half of one comes before a token that is scored.
        assert part.start == 0 or part.first_scored - part.start >= window - window // 2
        seen[part.text][part.first_scored : part.end] += 1
    assert all((each == 1).all() for each in seen)


@pytest.mark.parametrize("bos", [True, False])
def test_a_long_text_is_scored_in_windows(bos: bool) -> None:
    scorer = causal(bos)
    text = scorer.encode([documents()[0][:500]])[0]
    found = score(scorer, [text, *texts(scorer, [10, 16])], window=16, with_features=True)
    assert found.features is not None
    expected = np.full(len(text), np.nan)
    for part in split_windows([len(text)], 63, 16):
        nats, states = alone(scorer, text.ids[part.start : part.end])
        own = np.concatenate([[np.nan] * (not bos), nats])
        expected[part.first_scored : part.end] = own[part.first_scored - part.start :]
    assert found.nats[0] == pytest.approx(expected, abs=1e-5, nan_ok=True)
    assert np.isnan(found.nats[0]).sum() == (not bos)
    assert found.features[0] == pytest.approx(states[-1], abs=1e-5)


def test_an_encoder_counts_every_token_of_a_long_text_once() -> None:
    scorer = encoder()
    text = scorer.encode([documents()[1][:600]])[0]
    total, count = np.zeros(32), 0
    for part in split_windows([len(text)], 46, 20):
        states = alone(scorer, text.ids[part.start : part.end])[1]
        total += states[0] + states[-1] + states[1 + part.first_scored - part.start : -1].sum(0)
        count += 2 + part.end - part.first_scored
    found = score(scorer, [text], with_nats=False, with_features=True, window=20).features
    assert found is not None and found[0] == pytest.approx(total / count, abs=1e-5)


def test_errors_name_value_and_remedy() -> None:
    scorer = causal()
    long = scorer.encode([documents()[0][:500]])
    for wrong, settings, message in [
        ([*texts(scorer, [5]), *long], {}, r"1 of 2 texts are longer than the 63 tokens .*\(text 1 has .*window"),
        (long, {"window": 64}, "window=64: give 2 to 63 tokens"),
        (scorer.encode(["a", ""]), {}, r"1 of 2 texts are empty \(text 1 first"),
        (long, {"batch": 0}, "batch must be at least 1, got 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            score(scorer, wrong, **settings)
    with pytest.raises(ValueError, match="is an encoder"):
        score(encoder(), encoder().encode(["a"]))


@pytest.mark.parametrize(("with_nats", "name"), [(True, "nats"), (False, "features")])
def test_scores_that_are_not_finite_raise(monkeypatch: pytest.MonkeyPatch, with_nats: bool, name: str) -> None:
    weight = causal().model.transformer.ln_f.weight
    monkeypatch.setattr(weight, "data", torch.full_like(weight, torch.nan))
    with pytest.raises(FloatingPointError, match=rf"{name} by .* are not finite"):
        score(causal(), texts(causal(), [5, 6]), with_nats=with_nats, with_features=True)


# The cache.


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("changes", [{}, {"with_features": False}, {"window": 16}])
def test_cached_texts_are_not_scored_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bos: bool, changes: dict[str, Any]
) -> None:
    whole = request(causal(bos), **changes)
    computed = score_texts([whole], cache=open_cache(tmp_path), batch=3)[0]
    assert_equal(score_texts([whole], batch=3)[0], computed)
    monkeypatch.setattr(scoring, "run_scorer", lambda *_: pytest.fail("a text was scored again"))
    assert_equal(score_texts([whole], cache=open_cache(tmp_path))[0], computed)
    part = score_texts([replace(whole, texts=whole.texts[2:5][::-1])], cache=open_cache(tmp_path))[0]
    features = None if computed.features is None else computed.features[2:5][::-1]
    assert_equal(part, TextScores(computed.nats[2:5][::-1], features))


@pytest.mark.parametrize("batch", [1, 7])
@pytest.mark.parametrize("size", [1, 3])
def test_ranks_and_batches_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int, size: int
) -> None:
    requests = [request(), request(with_nats=False), request(encoder(), window=20)]
    monkeypatch.setattr(Cache, "sync", lambda *_: None)  # no rank waits for the others in this process
    for rank in range(size):
        context = DistributedContext(torch.device("cpu"), rank, size)
        with suppress(TypeError):  # the scores of the other ranks are not there yet
            score_texts(requests, cache=Cache(tmp_path, rank=rank), context=context, batch=batch)
    monkeypatch.undo()
    resumed = open_cache(tmp_path)
    count = len(resumed.entries)
    for mine, whole in zip(score_texts(requests, cache=resumed), score_texts(requests), strict=True):
        assert_equal(mine, whole, abs=1e-5)
    assert len(resumed.entries) == count == 3 * len(LENGTHS)


def test_scores_before_an_error_are_kept(tmp_path: Path) -> None:
    whole, progress = request(), list[int]()

    def stop(stage: str, done: int, total: int) -> None:
        if done >= 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score_texts([whole], cache=open_cache(tmp_path), batch=2, on_progress=stop)
    cache = open_cache(tmp_path)
    resumed = score_texts([whole], cache=cache, batch=2, on_progress=lambda _, done, total: progress.append(done))
    assert progress[0] == 4 and progress[-1] == len(LENGTHS)
    assert_equal(resumed[0], score_texts([whole])[0], abs=1e-5)


def test_the_key_covers_everything_a_score_follows_from() -> None:
    first = request()
    others = [replace(first, **changes) for changes in ({"window": 16}, {"with_nats": False}, {"with_features": False})]
    others.append(replace(first, texts=[text.truncate(len(text) - 1) for text in first.texts]))
    others += [request(causal(bos=False)), request(causal(positions=256))]
    keys = [key for each in (first, *others) for key in each.keys]
    assert len(set(keys)) == len(keys) and request().keys == first.keys
    with pytest.raises(ValueError, match="2 processes exchange results in a folder"):
        open_cache(None, DistributedContext(torch.device("cpu"), 0, 2), is_shared=True)
