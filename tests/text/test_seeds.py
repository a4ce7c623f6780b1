"""A text follows from its seed: not from the batch, the other texts, their number, or whether it is streamed."""

from typing import Any

import pytest
import torch

from adlm import LM, Hole, SamplingParams
from adlm.diffusion.categorical import draw
from adlm.diffusion.samplers import SAMPLERS
from tests.text.models import lm
from tests.world import SAMPLING

PROMPTS = ["", "The cat ", "Once upon a time"]
TEMPLATES: list[Any] = [
    "The ___{3} sat on ___{4}.",
    "___{1}",
    ["a", Hole.of_length(5), "b_", Hole.of_length(2)],
]
CAUSAL = ("ar", "a2r")


def assert_same_texts(model: LM, kind: str, given: list[Any], **sampling: Any) -> list[str]:
    """The same texts in every batch, for fewer of them, one by one, as a stream and as a trajectory."""
    call = model.generate if kind == "prompt" else model.infill
    sampling |= {"length": 22} if kind == "prompt" else {}
    whole = call(given, n=3, batch=16, **sampling)
    assert len(whole.texts) == 3 * len(given)
    for batch in (1, 7):
        other = call(given, n=3, batch=batch, **sampling)
        assert (other.texts, other.nfe_each, other.nfe) == (whole.texts, whole.nfe_each, whole.nfe)
    *_, last = model.stream(n=3, guesses=2, **{kind: given}, **sampling)
    assert (last.texts, last.nfe) == (whole.texts, whole.nfe_each)
    for number, one in enumerate(given):
        alone, first = call(one, n=5 if number == 1 else 1, **sampling), 3 * number
        shared = min(3, len(alone.texts))
        assert alone.texts[:shared] == whole.texts[first : first + shared]
        assert alone.nfe_each[:shared] == whole.nfe_each[first : first + shared]
    assert model.record(**{kind: given[1]}, **sampling).text == whole.texts[3]
    return whole.texts


BLOCKWISE = (
    "remask_loop",
    "remask_conf",
    "first_hitting",
    "confidence",
)  # of each kind of sampler one


@pytest.mark.parametrize(
    ("name", "block"), [*((name, None) for name in SAMPLERS), *((name, 7) for name in BLOCKWISE)]
)
def test_masked_models(name: str, block: int | None) -> None:
    sampling = {"block": block, **SAMPLING[name]}
    texts = assert_same_texts(lm("adlm"), "prompt", PROMPTS, seed=5, **sampling)
    assert len(set(texts)) == len(texts), "texts of one prompt differ by their number"
    assert_same_texts(lm("adlm"), "template", TEMPLATES, seed=5, **sampling)
    other = lm("adlm").generate(PROMPTS, n=3, length=22, seed=6, **sampling).texts
    assert not set(other) & set(texts), "another seed, other texts"


@pytest.mark.parametrize("method", CAUSAL)
def test_causal_models(method: str) -> None:
    texts = assert_same_texts(lm(method), "prompt", PROMPTS, seed=5)
    assert len(set(texts)) == len(texts)
    assert_same_texts(
        lm(method), "template", ["a ___{4}", "The cat ___{9}", ["x_", Hole.of_length(1)]], seed=5
    )
    assert not set(lm(method).generate(PROMPTS, n=3, length=22, seed=6).texts) & set(texts)


@pytest.mark.parametrize(
    ("method", "rows", "changes"),
    [
        ("mdlm", "documents", {}),
        ("adlm", "documents", {"positions": "learned"}),
        ("sedd", "wrapped", {}),
        ("adlm", "wrapped", {"time_conditioning": True}),
        ("mdlm", "documents", {"bridge": "direct", "tied": True}),
    ],
)
def test_other_masked_models(method: str, rows: str, changes: dict[str, Any]) -> None:
    """Also with the default sampler, and with holes whose length the model chooses."""
    model = lm(method, "bytes", rows, **changes)
    assert_same_texts(model, "prompt", PROMPTS, seed=2, steps=6)
    assert_same_texts(
        model, "template", [*TEMPLATES, "an ___ in a ___{1,4}"], seed=2, temperature=0.7, top_p=1.0
    )


@pytest.mark.parametrize("words", ["gpt2", "bert-base-uncased", "prose"])
def test_other_vocabularies(words: str) -> None:
    assert_same_texts(
        lm("adlm", words, "documents"), "template", TEMPLATES, seed=2, top_p=1.0, steps=3
    )


def test_infilling_reveals_one_token_per_step_by_default() -> None:
    model = lm("mdlm")
    assert model.infill(TEMPLATES).nfe_each == [7, 1, 7]
    assert model.infill(TEMPLATES, steps=2).nfe_each == [2, 1, 2]


def test_rounding_hardly_ever_changes_a_draw() -> None:
    """Noise like that of another batch size: what changes is in proportion to it, however dense the tail is."""
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(1000, 3000, generator=rng)
    u = torch.rand(1000, generator=rng, dtype=torch.float64)
    nudged = logits + 1e-5 * torch.randn(logits.shape, generator=rng)
    for sampling in (SamplingParams(top_p=0.9), SamplingParams(top_k=2000), SamplingParams()):
        changed = draw(logits, u, sampling).tokens != draw(nudged, u, sampling).tokens
        assert int(changed.sum()) <= 5, sampling
