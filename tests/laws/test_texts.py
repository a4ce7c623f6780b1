"""Texts follow from their seed; given text stays to the byte; texts end where they should."""

import math
from typing import Any

import pytest
import torch

import adlm
from adlm import LM, Hole
from tests.laws import adapter
from tests.laws.commands import QUICK, quick_settings
from tests.laws.texts import CAUSAL, MASKED, model

PROMPTS = ["", "The cat ", "Once upon a time"]
TEMPLATES: list[Any] = [
    "The ___{3} sat on ___{4}.",
    "___{1}",
    ["a", Hole.of_length(5), "b_", Hole.of_length(2)],
]
CAUSAL_TEMPLATES: list[Any] = ["a ___{4}", "The cat ___{9}", ["x_", Hole.of_length(1)]]
BLOCKWISE = ("remask_loop", "remask_conf", "first_hitting", "confidence")
SAMPLERS = [*((name, None) for name in QUICK), *((name, 7) for name in BLOCKWISE)]


def assert_same_texts(lm: LM, kind: str, given: list[Any], **settings: Any) -> list[str]:
    """Compare every batch size, fewer texts, each prompt alone, and a stream; return the texts."""
    call = adapter.generate if kind == "prompt" else adapter.infill
    if kind == "prompt":
        settings["length"] = 22
    whole = call(lm, given, n=3, batch=16, **settings)
    assert len(whole) == 3 * len(given)
    for batch in (1, 7):
        other = call(lm, given, n=3, batch=batch, **settings)
        assert list(other) == list(whole)
        assert other.nfe_each == whole.nfe_each
    if kind == "prompt":
        shown = adapter.stream(lm, given, n=3, **settings)
    else:
        shown = adapter.stream(lm, template=given, n=3, **settings)
    assert shown[-1].texts == list(whole)
    assert shown[-1].nfe == whole.nfe_each
    for number, one in enumerate(given):
        alone, first = call(lm, one, n=5 if number == 1 else 1, **settings), 3 * number
        shared = min(3, len(alone))
        assert list(alone)[:shared] == list(whole)[first : first + shared]
        assert alone.nfe_each[:shared] == whole.nfe_each[first : first + shared]
    return list(whole)


@pytest.mark.parametrize(("name", "block"), SAMPLERS)
def test_a_text_follows_from_its_seed(name: str, block: int | None) -> None:
    lm, settings = model("adlm"), {**quick_settings(name), "block": block}
    texts = assert_same_texts(lm, "prompt", PROMPTS, seed=5, **settings)
    assert len(set(texts)) == len(texts), "texts of one prompt differ by their number"
    assert_same_texts(lm, "template", TEMPLATES, seed=5, **settings)
    other = adapter.generate(lm, PROMPTS, n=3, length=22, seed=6, **settings)
    assert not set(other) & set(texts), "another seed, other texts"


@pytest.mark.parametrize("name", ["mdlm", "sedd", "timed"])
def test_a_text_of_another_model_follows_from_its_seed(name: str) -> None:
    """Also with the default sampler, and with holes whose length the model chooses."""
    lm = model(name)
    assert_same_texts(lm, "prompt", PROMPTS, seed=2, steps=6)
    templates = [*TEMPLATES, "an ___ in a ___{1,4}"]
    assert_same_texts(lm, "template", templates, seed=2, temperature=0.7, top_p=1.0)


@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_text_follows_from_its_seed(name: str) -> None:
    lm = model(name)
    texts = assert_same_texts(lm, "prompt", PROMPTS, seed=5)
    assert len(set(texts)) == len(texts)
    assert_same_texts(lm, "template", CAUSAL_TEMPLATES, seed=5)
    assert not set(adapter.generate(lm, PROMPTS, n=3, length=22, seed=6)) & set(texts)


def test_names_and_numbers_of_other_libraries_are_accepted() -> None:
    lm = model("adlm")
    ours = lm.generate("hello", max_new_tokens=8, n=2, steps=4, block=4, temperature=0.0, seed=1)
    theirs = lm.generate(
        "hello", gen_length=8, num_return_sequences=2, num_inference_steps=4, block_length=4,
        do_sample=False, seed=1,
    )  # fmt: skip
    assert ours.texts == theirs.texts
    assert ours.texts == lm.generate(
        "hello", length=13, n=2, steps=4, block=4, temperature=0.0, seed=1
    )
    for other, name in {"remdm-cap": "remask_cap", "low_confidence": "confidence"}.items():
        one, two = (lm.generate("a", length=9, steps=3, sampler=each) for each in (other, name))
        assert one.texts == two.texts


@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize("sampler", list(QUICK))
def test_no_mask_and_no_special_token_is_generated(name: str, sampler: str) -> None:
    """However likely the model finds them: only the end may stand in a text that may end."""
    lm = model(name)
    banned = adapter.banned_tokens(lm)

    def prefer_banned(network: adlm.LanguageModel) -> None:
        for token in banned:
            adapter.bias_token(network, token, 30.0)

    eager = adapter.with_weights(lm, prefer_banned)
    settings = {**quick_settings(sampler), "n": 3, "seed": 2, "top_p": 1.0}
    *_, last = adapter.stream(eager, "ab", length=20, **settings)
    for ids in last.ids:
        assert not set(banned) & set(ids[1:-1])
    assert last.texts == list(adapter.generate(eager, "ab", length=20, **settings))


def prefer_end(lm: LM, bias: float) -> LM:
    """Return a model that finds the end likely everywhere."""
    end = lm.tokenizer.eos_id
    assert end is not None
    return adapter.with_weights(lm, lambda network: adapter.bias_token(network, end, bias))


@pytest.mark.parametrize("sampler", list(QUICK))
def test_a_document_has_the_requested_length(sampler: str) -> None:
    """Its beginning and end stand nowhere else, however likely the model finds an end."""
    lm, settings = prefer_end(model("adlm"), 30.0), quick_settings(sampler)
    end = lm.tokenizer.eos_id
    for length in (1, 9, 62):
        *_, last = adapter.stream(lm, "", length=length, n=2, **settings)
        for ids in last.ids:
            assert len(ids) == length + 2
            assert [place for place, token in enumerate(ids) if token == end] == [0, length + 1]


@pytest.mark.parametrize("name", ["sedd", "timed", "ar", "a2r"])
@pytest.mark.parametrize("bias", [2.0, 30.0])
def test_other_texts_end_at_the_first_end_token(name: str, bias: float) -> None:
    lm, prompt = prefer_end(model(name), bias), "ab "
    end = lm.tokenizer.eos_id
    settings: dict[str, Any] = {"length": 40, "n": 12, "top_p": 1.0, "seed": 3}
    *_, last = adapter.stream(lm, prompt, **settings)
    ends = [ids.index(end, 1) if end in ids[1:] else len(ids) for ids in last.ids]
    assert min(ends) >= 4, "the end is never inside the prompt"
    assert len(set(ends)) > 2 if bias == 2.0 else set(ends) == {4}
    for ids, place, text in zip(last.ids, ends, last.texts, strict=True):
        assert text == prompt + lm.tokenizer.decode(ids[4:place])
    assert last.texts == list(adapter.generate(lm, prompt, **settings))


def test_a_hole_ends_a_text_only_if_nothing_is_given_after_it() -> None:
    lm = prefer_end(model("sedd"), 30.0)
    end = lm.tokenizer.eos_id
    *_, last = adapter.stream(lm, template=["a___{3}b___{4}", "a___{3}b"], n=3)
    for ids in last.ids:
        assert end not in ids[1:6]
    for ids in last.ids[:3]:
        assert ids[6:10] == [end] * 4
    assert all(text.endswith("b") for text in last.texts)


@pytest.mark.parametrize("name", ["sedd", "ar"])
def test_the_name_of_the_end_token_in_a_prompt_is_only_text(name: str) -> None:
    lm, prompt = prefer_end(model(name), 30.0), "x<|endoftext|>y"
    assert list(adapter.generate(lm, prompt, length=30)) == [prompt]


GIVEN = [
    "___{3}",
    "Süß ___{1}, 東京 ___{2}\n\t🦊___{1}!  ",
    "a___{1}___{1}b",
    "  ___{2}",
    "<|endoftext|> ___{1} \u200b",
    "[MASK] ___{2}_",
    "e\u0301 \x00 ___{2}\r\n\ufeff",
]


@pytest.mark.parametrize("template", GIVEN)
@pytest.mark.parametrize("name", ["adlm", "sedd"])
def test_given_text_comes_back_to_the_byte(name: str, template: str) -> None:
    lm = model(name)
    output = adapter.infill(lm, template, n=2, seed=4)
    for text, filled in zip(output, adapter.fills(output), strict=True):
        expected, rest = "", template
        for piece in filled:
            before, _, rest = rest.partition("___")
            expected += before + piece
            rest = rest[rest.index("}") + 1 :]
        assert text == expected + rest


@pytest.mark.parametrize("prompt", ["naïve 漢字", "😀 x", "[MASK]", "a\nb\t", "___"])
@pytest.mark.parametrize("name", ["adlm", "ar"])
def test_a_text_begins_with_its_prompt_to_the_byte(name: str, prompt: str) -> None:
    assert adapter.generate(model(name), prompt, max_new_tokens=3)[0].startswith(prompt)


def test_infilling_reveals_one_token_per_step_by_default() -> None:
    assert adapter.infill(model("mdlm"), TEMPLATES).nfe_each == [7, 1, 7]
    assert adapter.infill(model("mdlm"), TEMPLATES, steps=2).nfe_each == [2, 1, 2]


def test_a_hole_has_a_length_within_its_limits_and_the_row() -> None:
    lm = model("adlm")
    assert adapter.hole_lengths(lm, "ab___{3}cd") == [3]
    assert 2 <= adapter.hole_lengths(lm, "ab___{2,5}cd")[0] <= 5
    shortest, fixed = adapter.hole_lengths(lm, "x" * 40 + "___{1,12}___{8}" + "y" * 12)
    assert (shortest in (1, 2), fixed) == (True, 8), "two positions are left"
    assert adapter.hole_lengths(lm, "x" * 61 + "___") == [1]
    assert adapter.hole_lengths(lm, "___{2,7}") == [7], "nothing is given: as long as allowed"
    assert adapter.hole_lengths(model("ar"), "x" * 60 + "___") == [3]


@pytest.mark.parametrize("name", ["adlm", "mdlm", "timed"])
@pytest.mark.parametrize(
    "template", ["the ___{1,6} sat", "a___{1,9}b", "in our ___{2,5}, the ___{1,4}"]
)
def test_a_hole_has_the_length_under_which_its_neighbors_are_likeliest(
    name: str, template: str
) -> None:
    """Each given token within four of the hole is hidden in turn; a prior favors short holes."""
    lm = model(name)
    chosen, pieces = adapter.hole_lengths(lm, template), template.split("___")
    bounds = [tuple(map(int, each[1 : each.index("}")].split(","))) for each in pieces[1:]]
    given = [pieces[0], *(each[each.index("}") + 1 :] for each in pieces[1:])]
    lengths = [low for low, _ in bounds]
    for number, (low, high) in enumerate(bounds):
        scores = {}
        for length in range(low, high + 1):
            lengths[number] = length
            scores[length] = score_hole(lm, given, lengths, number)
        best = max(scores, key=lambda length: scores[length])
        runner_up = max((value for length, value in scores.items() if length != best))
        if scores[best] - runner_up > 1e-4:
            assert chosen[number] == best, scores
        lengths[number] = chosen[number]


def score_hole(lm: LM, given: list[str], lengths: list[int], number: int) -> float:
    """Return the log-probability of the tokens next to a hole, and the prior of its length."""
    tokenizer, mask = lm.tokenizer, lm.tokenizer.mask_id
    ids = [tokenizer.bos_id]
    starts = []
    for place, text in enumerate(given):
        if place:
            starts.append(len(ids))
            ids += [mask] * lengths[place - 1]
        ids += tokenizer.encode(text)
    is_document = lm.name.endswith(("adlm", "mdlm"))
    if is_document:
        ids.append(tokenizer.eos_id)
    start, end = starts[number], starts[number] + lengths[number]
    before, after = tokenizer.encode(given[number]), tokenizer.encode(given[number + 1])
    neighbors = [*range(start - min(4, len(before)), start), *range(end, end + min(4, len(after)))]
    score = -2.0 * math.log(lengths[number])
    for position in neighbors:
        xt = torch.tensor([ids])
        xt[0, position] = mask
        share = float((xt == mask).double().mean())
        level = torch.tensor([-math.log(1 - 0.999 * share)])
        logits = adapter.predict(lm.model, xt, level)[1][0, position].double()
        logits[mask] = -torch.inf
        score += float(logits.log_softmax(-1)[ids[position]])
    return score


def test_what_cannot_be_is_refused_with_the_value() -> None:
    lm = model("adlm")
    refusals: list[tuple[dict[str, Any], str]] = [
        ({"sampler": "magic"}, "magic"),
        ({"temperature": -1.0}, "-1"),
        ({"top_p": 1.5}, "1.5"),
        ({"top_k": 0}, "0"),
        ({"steps": 0}, "0"),
        ({"seed": -1}, "-1"),
        ({"n": 0}, "0"),
        ({"length": 99}, "99"),
        ({"sampler": "remask_cap", "options": {"eta": 1.5}}, "1.5"),
        ({"sampler": "ancestral", "options": {"bound": 1.0}}, "bound"),
    ]
    for settings, message in refusals:
        with pytest.raises(ValueError, match=message):
            adapter.generate(lm, "a", **settings)
    with pytest.raises(ValueError, match="magic"):
        adapter.generate(model("ar"), "a", sampler="magic")


# A vocabulary of words

TEXT_OF_WORDS = "The children went down to the river – “late”, as always."


def test_bits_are_per_byte_where_tokens_are_words() -> None:
    """Of the bundled model, whose tokens are longer than a byte."""
    (score,) = adlm.load(device="cpu").score(TEXT_OF_WORDS, draws=2)
    size = len(TEXT_OF_WORDS.encode("utf-8"))
    assert score.tokens < size / 2
    bits = score.nll * score.tokens / math.log(2)
    assert score.bits_per_byte == pytest.approx(bits / size, rel=1e-6)


@pytest.mark.parametrize("template", ["The ___{2} sat on the ___{1}.", "It was ___{3}\n\n“___{1}”"])
def test_words_are_filled_in_between_given_text(template: str) -> None:
    """With the blanks that are given, and no others."""
    output = adapter.infill(adlm.load(device="cpu"), template, n=2, seed=1)
    for text, filled in zip(output, adapter.fills(output), strict=True):
        expected, rest = "", template
        for piece in filled:
            before, _, rest = rest.partition("___")
            expected += before + piece
            rest = rest[rest.index("}") + 1 :]
            assert not (before.endswith(" ") and piece.startswith(" "))
        assert text == expected + rest


# Scores


@pytest.mark.parametrize("name", ["mdlm", "adlm", "timed", "ar", "a2r", "sedd"])
def test_scores_do_not_depend_on_the_batch(name: str) -> None:
    lm, texts = model(name), ["the cat sat", "a", "naïve 😀", "in our quiet town"]
    whole = lm.score(texts, draws=8, seed=1)
    for batch in (1, 3):
        for one, other in zip(lm.score(texts, draws=8, seed=1, batch=batch), whole, strict=True):
            assert one.nll == pytest.approx(other.nll, rel=1e-5)
    for text, each in zip(texts, whole, strict=True):
        (alone,) = lm.score(text, draws=8, seed=1)
        assert alone.nll == pytest.approx(each.nll, rel=1e-5)
        size = len(text.encode("utf-8"))
        assert each.tokens == size, "a token of these models is a byte"
        assert each.bits_per_byte == pytest.approx(each.nll * each.tokens / math.log(2) / size)
        assert each.ppl == pytest.approx(math.exp(each.nll))


@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_score_is_exact(name: str) -> None:
    lm, text = model(name), "the cat sat"
    ids = torch.tensor([[lm.tokenizer.bos_id, *lm.tokenizer.encode(text)]])
    log_probs = adapter.predict(lm.model, ids)[1].double().log_softmax(-1)[0, :-1]
    nats = -float(log_probs.gather(-1, ids[0, 1:, None]).sum())
    (score,) = lm.score(text)
    assert score.nll == pytest.approx(nats / 11, rel=1e-5)
    assert score.is_exact
    assert score.stderr == 0


def test_a_masked_score_is_the_mean_over_orders() -> None:
    """Of a short text without time conditioning: all sets of hidden tokens, by hand."""
    lm, text = model("mdlm"), "cat"
    mask = lm.tokenizer.mask_id
    ids = [lm.tokenizer.bos_id, *lm.tokenizer.encode(text), lm.tokenizer.eos_id]
    nats = 0.0
    for pattern in range(1, 8):
        places = [1 + i for i in range(3) if pattern >> i & 1]
        xt = torch.tensor([ids])
        xt[0, places] = mask
        logits = adapter.predict(lm.model, xt)[1][0].double()
        logits[..., mask] = -torch.inf
        log_probs = logits.log_softmax(-1)
        cost = -sum(float(log_probs[place, ids[place]]) for place in places)
        nats += cost / (len(places) * math.comb(3, len(places)))
    (score,) = lm.score(text)
    assert score.nll == pytest.approx(nats / 3, rel=1e-5)
    assert not score.is_exact
