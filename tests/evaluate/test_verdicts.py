"""Verdicts are those of transformers on each text alone, whatever stands beside it; windows judge every token once."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adlm.evaluate.judges import Judge, Piece
from adlm.evaluate.verdicts import judged, windows
from tests.evaluate.small_judges import causal, documents, encoder


def texts(judge: Judge, lengths: list[int]) -> list[Piece]:
    """Pieces of prose with so many tokens."""
    return [judge.encode([document[:400]])[0].cut(length) for document, length in zip(documents(), lengths)]


def alone(judge: Judge, ids: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Nats and last states of one row, without padding."""
    rows = torch.tensor([[*judge.ends[0], *ids, *judge.ends[1]]])
    with torch.no_grad():
        out = judge.model(rows, output_hidden_states=True)
    states = out.hidden_states[-1][0].numpy()
    if not judge.is_causal:
        return np.zeros(0), states
    logs = out.logits[0].double().log_softmax(-1)
    nats = -logs[:-1].gather(1, rows[0, 1:, None])[:, 0]
    return nats.numpy(), states


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("batch", [1, 2, 7])
def test_padding_and_batches_change_nothing(bos: bool, batch: int) -> None:
    judge = causal(bos)
    pieces = texts(judge, [5, 40, 12, 63, 1 + (not bos), 33, 7])
    found = judged(judge, pieces, with_features=True, batch=batch)
    assert found.features is not None
    for piece, nats, features in zip(pieces, found.nats, found.features, strict=True):
        expected, states = alone(judge, piece.ids)
        assert nats[not bos :] == pytest.approx(expected, abs=1e-5)
        assert bos or np.isnan(nats[0])
        assert features == pytest.approx(states[-1], abs=1e-5)


def test_features_alone_are_those_beside_nats() -> None:
    """Without nats the head is left out."""
    pieces = texts(causal(), [9, 30, 21])
    both = judged(causal(), pieces, with_features=True)
    only = judged(causal(), pieces, with_nats=False, with_features=True)
    assert only.nats == [] and only.features == pytest.approx(both.features, abs=1e-5)
    assert judged(causal(), pieces).features is None


@pytest.mark.parametrize("batch", [1, 5])
def test_an_encoders_features_are_the_mean_over_its_tokens(batch: int) -> None:
    pieces = texts(encoder(), [5, 46, 12, 33, 7])
    found = judged(encoder(), pieces, with_nats=False, with_features=True, batch=batch).features
    assert found is not None
    for piece, features in zip(pieces, found, strict=True):
        assert features == pytest.approx(alone(encoder(), piece.ids)[1].mean(0), abs=1e-5)


@given(st.lists(st.integers(1, 90), min_size=1, max_size=5), st.integers(2, 40))
def test_windows_judge_every_token_once(lengths: list[int], window: int) -> None:
    found = windows(lengths, 40, window)
    seen = [np.zeros(length, dtype=int) for length in lengths]
    for part in found:
        assert 0 <= part.start <= part.fresh < part.end <= lengths[part.text]
        assert part.end - part.start <= window
        # Behind the first window, at least half of one stands before a token that is judged.
        assert part.start == 0 or part.fresh - part.start >= window - window // 2
        seen[part.text][part.fresh : part.end] += 1
    assert all((each == 1).all() for each in seen)


@pytest.mark.parametrize("bos", [True, False])
def test_a_long_text_in_windows_is_judged_with_what_stands_in_them(bos: bool) -> None:
    judge = causal(bos)
    piece = judge.encode([documents()[0][:500]])[0]
    found = judged(judge, [piece, *texts(judge, [10, 16])], window=16, with_features=True)
    assert found.features is not None
    expected = np.full(len(piece), np.nan)
    for part in windows([len(piece)], 63, 16):
        nats, states = alone(judge, piece.ids[part.start : part.end])
        own = np.concatenate([[np.nan] * (not bos), nats])
        expected[part.fresh : part.end] = own[part.fresh - part.start :]
    assert found.nats[0] == pytest.approx(expected, abs=1e-5, nan_ok=True)
    assert np.isnan(found.nats[0]).sum() == (not bos)
    assert found.features[0] == pytest.approx(states[-1], abs=1e-5)


def test_an_encoder_counts_every_token_of_a_long_text_once() -> None:
    judge = encoder()
    piece = judge.encode([documents()[1][:600]])[0]
    total, count = np.zeros(32), 0
    for part in windows([len(piece)], 46, 20):
        states = alone(judge, piece.ids[part.start : part.end])[1]
        fresh = part.fresh - part.start
        total += states[0] + states[-1] + states[1 + fresh : -1].sum(0)
        count += 2 + part.end - part.fresh
    found = judged(judge, [piece], with_nats=False, with_features=True, window=20).features
    assert found is not None and found[0] == pytest.approx(total / count, abs=1e-5)


def test_what_is_done_is_told() -> None:
    told: list[tuple[int, int]] = []
    judged(causal(), texts(causal(), [5, 6, 7]), batch=2, on_texts=lambda *each: told.append(each))
    assert told == [(2, 3), (3, 3)]


def test_errors_teach() -> None:
    judge = causal()
    long = judge.encode([documents()[0][:500]])
    with pytest.raises(ValueError, match=r"1 of 2 texts are longer than the 63 tokens .*\(text 1 has .*--window"):
        judged(judge, [*texts(judge, [5]), *long])
    with pytest.raises(ValueError, match="at most the 63"):
        judged(judge, long, window=64)
    with pytest.raises(ValueError, match="1 of 2 texts are empty, text 1"):
        judged(judge, judge.encode(["a", ""]))
    with pytest.raises(ValueError, match="batch must be at least 1"):
        judged(judge, long, batch=0)
    with pytest.raises(ValueError, match="is an encoder"):
        judged(encoder(), encoder().encode(["a"]))


def test_what_is_not_finite_raises() -> None:
    judge = causal(positions=32)
    kept = judge.model.transformer.ln_f.weight.data.clone()
    try:
        judge.model.transformer.ln_f.weight.data.fill_(torch.nan)
        pieces = texts(judge, [5, 6])
        with pytest.raises(FloatingPointError, match="nats that are not finite in 2 of 2 texts"):
            judged(judge, pieces)
        with pytest.raises(FloatingPointError, match="features that are not finite in 2 of 2 texts"):
            judged(judge, pieces, with_nats=False, with_features=True)
    finally:
        judge.model.transformer.ln_f.weight.data.copy_(kept)
