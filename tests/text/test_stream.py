"""A stream: trajectory frames agree with token frames, guesses are the network's, and streaming changes nothing."""

import math
from typing import Any

import pytest
import torch

from adlm import LM
from adlm.diffusion.anchors import rare_in_sequence
from adlm.text.generation import MAX_COUNT, TextFrame
from adlm.text.templates import BLOCK, classify_tokens
from adlm.view.trajectory import GIVEN, HIDDEN, REMASKED, REVEALED, VISIBLE
from tests.text.models import lm
from tests.world import SAMPLING

STATES = {
    (True, True): HIDDEN,
    (False, True): REMASKED,
    (True, False): REVEALED,
    (False, False): VISIBLE,
}
TEMPLATES = ["The ___{4} sat on\n___{9}.", "___{3}", " ___{2} ___{1}x"]
KINDS: list[tuple[str, str, str, dict[str, Any]]] = [
    ("adlm", "bytes", "documents", {}),
    ("adlm", "prose", "documents", {"bridge": "direct"}),
    ("mdlm", "bert-base-uncased", "wrapped", {}),
    ("adlm", "bytes", "wrapped", {"time_conditioning": True}),
    ("sedd", "bytes", "wrapped", {"vocab_size": 300}),  # ids to spare
    ("mdlm", "bytes", "documents", {"tied": True}),
]


def stream(model: LM, **settings: Any) -> list[TextFrame]:
    return list(model.stream(template=TEMPLATES, n=2, top_p=1.0, seed=4, **settings))


@pytest.mark.parametrize("name", SAMPLING)
def test_trajectory_frames_agree_with_token_frames(name: str) -> None:
    model = lm("adlm", "bytes", "documents")
    steps = stream(model, **SAMPLING[name])
    assert [step.step for step in steps] == list(range(len(steps)))
    rows = model.layout_rows(template=TEMPLATES, **SAMPLING[name])
    assert rows[0].planned_steps in (None, steps[-1].step)
    blockwise = model.layout_rows(template=TEMPLATES, block=4, **SAMPLING[name])
    assert blockwise[0].planned_steps is None, "a block takes all steps, so the whole takes more"
    seen = set()
    for row, layout in enumerate(row.layout for row in steps[0].rows):
        given = [piece for piece, is_given in layout.pieces(layout.ids) if is_given]
        was_masked, reveals = None, 0
        for step in steps:
            frame, ids = step.trajectory_frame(row), step.tokens[row].tolist()
            assert (frame.step, frame.nfe) == (step.step, step.nfe[row])
            places = [place for place, _ in layout.parts(ids)]
            is_masked = [
                place is not None and ids[place] == model.tokenizer.mask_id for place in places
            ]
            assert [token.is_masked for token in frame.tokens] == is_masked
            for place, token, before, now in zip(
                places, frame.tokens, was_masked or is_masked, is_masked, strict=True
            ):
                is_given = place is None or layout.is_fixed[place]
                assert token.state == (GIVEN if is_given else STATES[before, now])
                assert not (token.is_masked and token.text)
                seen.add(token.state)
            blocks = "".join(BLOCK if token.is_masked else token.text for token in frame.tokens)
            assert blocks == step.texts[row] and frame.text == blocks.replace(BLOCK, "")
            assert all(piece in frame.text for piece in given)
            was_masked, reveals = (
                is_masked,
                reveals + any(token.state == REVEALED for token in frame.tokens),
            )
        assert not any(was_masked or [True])
        assert steps[0].nfe[row] == 0 and steps[0].trajectory_frame(row).text == "".join(given)
        assert steps[-1].nfe[row] == reveals, (
            "every evaluation reveals something, and nothing is revealed without one"
        )
    assert seen >= {HIDDEN, REVEALED, VISIBLE, GIVEN}
    assert (REMASKED in seen) == (name.startswith("remask") or name in ("dfm", "forward_backward"))


def predict_row(model: LM, step: TextFrame, row: int) -> torch.Tensor:
    """The distribution of every position by the network that guesses, for a row alone and without folding."""
    tokens = step.tokens[row : row + 1, : len(step.rows[row].layout)]
    level = torch.tensor(
        [-math.log(1 - (1 - 1e-3) * float((tokens == model.tokenizer.mask_id).float().mean()))]
    )
    with torch.no_grad():
        features = model.model(tokens, level)
        head = model.model.head if features.anchor is None else model.model.anchor_head
        assert head is not None
        logits = head(features.final if features.anchor is None else features.anchor)[0].double()
    special = torch.ones(logits.shape[-1], dtype=torch.bool)
    special[: model.tokenizer.vocab_size] = classify_tokens(model.tokenizer).special
    return logits.masked_fill(special, -torch.inf).softmax(-1)


@pytest.mark.parametrize(("method", "words", "rows", "changes"), KINDS)
def test_guesses_are_the_networks_and_change_nothing(
    method: str, words: str, rows: str, changes: dict[str, Any]
) -> None:
    """The anchor network's where there is one, else the network's own: likeliest first, never a special token."""
    model = lm(method, words, rows, **changes)
    steps, plain = stream(model, guesses=4, steps=3), stream(model, steps=3)
    assert [(step.texts, step.nfe) for step in steps] == [(step.texts, step.nfe) for step in plain]
    assert all(step.guesses is None for step in plain)
    special, count = classify_tokens(model.tokenizer).special, 0
    for step in steps:
        assert step.guesses is not None
        for row, layout in enumerate(row.layout for row in step.rows):
            probs, ids = predict_row(model, step, row), step.tokens[row, : len(layout)]
            best = torch.where(ids == model.tokenizer.mask_id, probs.argmax(-1), ids)
            is_anchor = rare_in_sequence(MAX_COUNT)(best[None], None)[0]
            for (place, _), token in zip(
                layout.parts(ids.tolist()), step.trajectory_frame(row).tokens, strict=True
            ):
                assert len(token.guesses) == (4 if token.is_masked else 0)
                assert place is None or token.is_anchor == bool(is_anchor[place])
                if place is None or not token.is_masked:
                    continue
                count += 1
                guessed = step.guesses.tokens[row, place]
                assert not special[guessed].any()
                values = torch.tensor([prob for _, prob in token.guesses]).double()
                torch.testing.assert_close(
                    values, probs[place].topk(4).values, atol=1e-5, rtol=1e-4
                )
                torch.testing.assert_close(values, probs[place][guessed], atol=1e-5, rtol=1e-4)
                name = model.tokenizer.decode([int(guessed[0])])
                assert token.guesses[0][0] in (name, name.removeprefix(" "))
    assert count > 50
    trajectory = model.record(template=TEMPLATES[0], steps=3, top_p=1.0, seed=4)
    assert (trajectory.text, trajectory.nfe) == (plain[-1].texts[0], plain[-1].nfe[0])
    assert trajectory.guesser == ("anchor network" if method == "adlm" else "network")
    assert trajectory.settings["steps"] == 3 and model.name in trajectory.title


def test_a_guess_after_a_given_blank_is_shown_without_one() -> None:
    model = lm("adlm", "prose", "documents")
    (step, *_) = model.stream(template="The ___{1}___{1}", guesses=50)
    tokens = step.trajectory_frame().tokens
    assert tokens[0].text == "The " and not any(
        guess.startswith(" ") for guess, _ in tokens[-2].guesses
    )
    assert any(guess.startswith(" ") for guess, _ in tokens[-1].guesses)


@pytest.mark.parametrize("method", ["ar", "a2r"])
def test_a_causal_model_is_streamed_without_guesses(method: str) -> None:
    steps = list(lm(method).stream(["ab", "abcd"], length=9, guesses=3))
    assert all(step.guesses is None for step in steps)
    assert [step.trajectory_frame(0).tokens[-1].state for step in steps] == [HIDDEN] * 7 + [
        REVEALED
    ]
    assert steps[0].texts == ["ab" + BLOCK * 7, "abcd" + BLOCK * 5] and steps[-1].nfe == [7, 5]
    assert [token.state for token in steps[0].trajectory_frame(1).tokens] == [GIVEN] * 4 + [
        HIDDEN
    ] * 5


def test_a_notebook_shows_a_trajectory_as_a_player() -> None:
    with pytest.raises(ValueError, match="n=3: one text is recorded"):
        lm("adlm").record(length=9, steps=2, n=3)
    html = lm("adlm").record(length=9, steps=2)._repr_html_()
    assert html.startswith("<iframe srcdoc=") and "&lt;script" in html and "<script" not in html


def test_steps_without_a_change_share_what_is_drawn() -> None:
    steps = list(
        lm("adlm", "bytes", "documents").stream(
            length=6, sampler="ancestral", steps=300, guesses=2, seed=1
        )
    )
    frames = [step.trajectory_frame() for step in steps]
    assert [frame.step for frame in frames] == list(range(301))
    assert (
        len({id(frame.tokens) for frame in frames}) <= 14
    )  # before and after each of at most six changes
    assert len({id(step.guesses) for step in steps}) <= 14
