"""Quality: all figures together, of samples and of as much real text."""

import json
import random
from dataclasses import fields

import pytest

from adlm.evaluate.bleu import self_bleu
from adlm.evaluate.diversity import entropy
from adlm.evaluate.generative import generative_perplexity
from adlm.evaluate.passages import passages
from adlm.evaluate.quality import Figures, Quality, cut_together, quality, without_end
from tests.evaluate.small_judges import causal, documents, encoder, needs

N, TOKENS = 20, 40


def real_texts(count: int, seed: int = 0) -> list[str]:
    return passages(documents(), count, 6 * TOKENS, seed=seed)


def cut(texts: list[str], tokens: int = TOKENS) -> list[str]:
    return [piece.cut(tokens).text for piece in causal().encode(texts)]


def measured(samples: list[str], **how) -> Quality:
    needs("mauve")
    return quality(samples, real_texts(2 * len(samples), seed=1), causal(), seeds=(0, 1), **how)


def test_the_three_figures_are_not_to_be_had_apart() -> None:
    assert [field.name for field in fields(Figures)][:3] == ["gen_ppl", "mauve", "entropy"]
    assert all(field.default is field.default_factory for field in fields(Figures)), "none may be left out"
    assert {field.name for field in fields(Quality)} >= {"samples", "reference"}


def test_figures_are_those_of_the_parts() -> None:
    samples = cut(real_texts(N))
    found = measured(samples)
    pieces = [without_end(piece) for piece in causal().encode(samples)]
    alone = generative_perplexity(causal(), [piece.text for piece in pieces])
    assert found.samples.gen_ppl.nll == pytest.approx(alone.nll, abs=1e-5)
    rows = [piece.ids for piece in pieces]
    assert found.samples.entropy == entropy(rows) and found.samples.self_bleu == self_bleu(rows)
    assert found.samples.mauve.texts == (N, N)
    said = json.loads(json.dumps(found.as_dict()))
    assert set(said) == {"samples", "reference", "settings", "warnings"}
    assert set(said["samples"]) == set(said["reference"]) >= {"gen_ppl", "mauve", "entropy", "distinct_2", "self_bleu"}
    assert said["settings"]["judge"]["dtype"] == "float32" and said["settings"]["until_eos"] is False
    assert any("only 2 buckets" in each for each in said["warnings"])


def test_both_sides_have_equal_amounts() -> None:
    rng = random.Random(0)
    samples = [piece.cut(rng.randint(10, 60)).text for piece in causal().encode(real_texts(N))]
    found = measured(samples)
    for name in ("gen_ppl", "entropy", "repetition", "self_bleu"):
        mine, theirs = (getattr(side, name) for side in (found.samples, found.reference))
        assert (mine.texts, mine.tokens) == (theirs.texts, theirs.tokens)
    assert found.settings["share_of_samples_cut"] == pytest.approx(1 / 8, abs=0.05)


def test_how_texts_end_does_not_matter() -> None:
    """A model that is told where a text ends writes an end, passages have none: MAUVE must not be about that."""
    samples = cut(real_texts(N))
    ended = [f"{text}!!" for text in cut(samples, TOKENS - 2)]
    found, as_it_was = measured(ended).samples, measured(samples).samples
    assert found.mauve.value == pytest.approx(as_it_was.mauve.value) and found.entropy == as_it_was.entropy
    assert found.gen_ppl.nll == pytest.approx(as_it_was.gen_ppl.nll, abs=1e-5)


def test_three_sets_are_cut_to_one_shape() -> None:
    rng = random.Random(1)
    sets = [[piece.cut(rng.randint(4, 60)) for piece in causal().encode(real_texts(12, seed))] for seed in range(3)]
    after = cut_together(sets)
    shapes = [sorted(len(piece) for piece in pieces) for pieces in after]
    assert shapes[0] == shapes[1] == shapes[2]
    lengths = [sorted(len(piece) for piece in pieces) for pieces in sets]
    assert shapes[0] == [min(each) for each in zip(*lengths)], "no more is cut than must be"
    for whole, less in zip(sets, after, strict=True):
        assert all(one.text.startswith(other.text) for one, other in zip(whole, less, strict=True))


def test_repetition_shows_in_the_other_figures() -> None:
    """What one figure alone would praise."""
    looped = [(text[:20] + " ") * 8 for text in real_texts(N)]
    found = measured(cut(looped))
    assert found.samples.entropy.value < found.reference.entropy.value - 0.5
    assert found.samples.repetition.value > found.reference.repetition.value + 0.3


def test_features_of_another_judge() -> None:
    """They change MAUVE and nothing else; what the encoder cannot read at once is read in windows with the judge's."""
    samples = cut(real_texts(N), 30)
    found, own = (measured(samples, features=each) for each in (encoder(), None))
    assert found.samples.gen_ppl.nll == pytest.approx(own.samples.gen_ppl.nll, abs=1e-5)
    assert found.samples.entropy == own.samples.entropy
    assert found.samples.mauve.by_seed != own.samples.mauve.by_seed
    assert (found.settings["features"]["kind"], own.settings["features"]["kind"]) == ("encoder", "causal LM")
    windowed = measured(cut(real_texts(N), 60), features=encoder(), window=60)
    assert windowed.settings["stride"] == 30


def test_what_is_done_is_told_over_all_passes() -> None:
    for features, passes in ((None, 3), (encoder(), 5)):
        told: list[tuple[int, int]] = []
        measured(cut(real_texts(N), 20), features=features, on_texts=lambda *each, told=told: told.append(each))
        assert told[-1] == (passes * N, passes * N)
        assert [done for done, _ in told] == sorted(done for done, _ in told)


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        (["only one text, and a long one"], "at least 2 texts, got 1"),
        (["a text that is long enough", ""], "1 of 2 samples are empty, number 1 among them: leave such texts out"),
        (["a text that is long enough", " \n"], "1 of 2 samples are empty"),
        (["a text that is long enough", "no"], r"1 of 2 samples have fewer than 4 tokens \(number 1 has"),
        ([document[:900] for document in documents()[:2]], r"longer than the 63 tokens .*--window"),
    ],
)
def test_errors_teach(samples: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        quality(samples, [document[-900:] for document in documents()], causal())


def test_the_reference_must_be_twice_as_large() -> None:
    with pytest.raises(ValueError, match=r"20 samples need 40 texts of the reference.*there are 30"):
        quality(real_texts(20), real_texts(30), causal())
    with pytest.raises(ValueError, match="is an encoder"):
        quality(real_texts(20), real_texts(40), encoder())
