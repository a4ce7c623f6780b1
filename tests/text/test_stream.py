"""A text on its way: stills say what frames say, guesses are the network's, and watching changes nothing."""

import math
from typing import Any

import pytest
import torch

from adlm import LM
from adlm.diffusion.anchors import rare_in_sequence
from adlm.text.lm import MAX_COUNT, StreamStep
from adlm.text.templates import BLOCK, classify_tokens
from adlm.view.trajectory import GIVEN, HIDDEN, REMASKED, REVEALED, VISIBLE
from tests.text.models import lm
from tests.world import OPTIONS

STATES = {(True, True): HIDDEN, (False, True): REMASKED, (True, False): REVEALED, (False, False): VISIBLE}
TEMPLATES = ["The ___{4} sat on\n___{9}.", "___{3}", " ___{2} ___{1}x"]
KINDS: list[tuple[str, str, str, dict[str, Any]]] = [
    ("adlm", "bytes", "documents", {}),
    ("adlm", "prose", "documents", {"bridge": "direct"}),
    ("mdlm", "bert-base-uncased", "wrapped", {}),
    ("adlm", "bytes", "wrapped", {"time_conditioning": True}),
    ("sedd", "bytes", "wrapped", {"vocab_size": 300}),  # ids to spare
    ("mdlm", "bytes", "documents", {"tied": True}),
]


def shots_of(model: LM, **how: Any) -> list[StreamStep]:
    return list(model.stream(template=TEMPLATES, n=2, top_p=1.0, seed=4, **how))


@pytest.mark.parametrize("name", OPTIONS)
def test_stills_say_what_frames_say(name: str) -> None:
    model = lm("adlm", "bytes", "documents")
    shots = shots_of(model, sampler=name, **OPTIONS[name])
    assert [shot.step for shot in shots] == list(range(len(shots)))
    told = model.build_request(template=TEMPLATES, sampler=name, **OPTIONS[name])
    assert told.steps in (None, shots[-1].step)
    blockwise = model.build_request(template=TEMPLATES, sampler=name, block=4, **OPTIONS[name])
    assert blockwise.steps is None, "a block takes all of the steps, so the whole takes more"
    seen = set()
    for row, layout in enumerate(shots[0].layouts):
        given = [piece for piece, is_given in layout.pieces(layout.ids) if is_given]
        was_masked = None
        for shot in shots:
            still, ids = shot.trajectory_frame(row), shot.frame.tokens[row].tolist()
            assert (still.step, still.nfe) == (shot.step, shot.nfe[row])
            places = [place for place, _ in layout.parts(ids)]
            assert len(places) == len(still.tokens)
            is_masked = [place is not None and ids[place] == model.tokenizer.mask_id for place in places]
            assert [cell.is_masked for cell in still.tokens] == is_masked
            for place, cell, before, now in zip(places, still.tokens, was_masked or is_masked, is_masked, strict=True):
                is_given = place is None or layout.is_fixed[place]
                assert cell.state == (GIVEN if is_given else STATES[before, now])
                assert not (cell.is_masked and cell.text)
                seen.add(cell.state)
            blocks = "".join(BLOCK if cell.is_masked else cell.text for cell in still.tokens)
            assert blocks == shot.texts[row]
            assert still.text == blocks.replace(BLOCK, "")
            assert all(piece in still.text for piece in given)
            was_masked = is_masked
        assert not any(was_masked or [True])
        assert shots[0].nfe[row] == 0 and shots[0].trajectory_frame(row).text == "".join(given)
        # Every network evaluation reveals something, and nothing is revealed without one.
        reveals = sum(any(cell.state == REVEALED for cell in shot.trajectory_frame(row).tokens) for shot in shots)
        assert shots[-1].nfe[row] == reveals
    assert seen >= {HIDDEN, REVEALED, VISIBLE, GIVEN}
    assert (REMASKED in seen) == (name.startswith("remask") or name in ("dfm", "forward_backward"))


def by_hand(model: LM, shot: StreamStep, row: int) -> torch.Tensor:
    """The law of every position as the network that guesses gives it, for a row by itself and without folding."""
    length = len(shot.layouts[row])
    tokens = shot.frame.tokens[row : row + 1, :length]
    share = float((tokens == model.tokenizer.mask_id).sum()) / length
    level = torch.tensor([-math.log(1 - (1 - 1e-3) * share)])
    with torch.no_grad():
        features = model.model(tokens, level)
        head = model.model.head if features.anchor is None else model.model.anchor_head
        assert head is not None
        logits = head(features.final if features.anchor is None else features.anchor)[0].double()
    special = torch.ones(logits.shape[-1], dtype=torch.bool)
    special[: model.tokenizer.vocab_size] = classify_tokens(model.tokenizer).special
    return logits.masked_fill(special, -torch.inf).softmax(-1)


@pytest.mark.parametrize(("method", "words", "rows", "changes"), KINDS)
def test_guesses_are_the_networks(method: str, words: str, rows: str, changes: dict[str, Any]) -> None:
    """The anchor network's where there is one, else the network's own: likeliest first, never a mark."""
    model = lm(method, words, rows, **changes)
    shots = shots_of(model, guesses=4, steps=3)
    special = classify_tokens(model.tokenizer).special
    asked = 0
    for shot in shots:
        assert shot.guesses is not None
        for row, layout in enumerate(shot.layouts):
            law, ids = by_hand(model, shot, row), shot.frame.tokens[row, : len(layout)]
            best = torch.where(ids == model.tokenizer.mask_id, law.argmax(-1), ids)
            is_anchor = rare_in_sequence(MAX_COUNT)(best[None], None)[0]
            for (place, _), cell in zip(layout.parts(ids.tolist()), shot.trajectory_frame(row).tokens, strict=True):
                if place is None:
                    assert not cell.guesses
                    continue
                assert cell.is_anchor == bool(is_anchor[place])
                assert len(cell.guesses) == (4 if cell.is_masked else 0)
                if not cell.is_masked:
                    continue
                asked += 1
                tokens, probs = shot.guesses.tokens[row, place], [prob for _, prob in cell.guesses]
                assert probs == sorted(probs, reverse=True) and 0 < sum(probs) <= 1 + 1e-6
                assert not special[tokens].any()
                found = torch.tensor(probs).double()
                torch.testing.assert_close(found, law[place].topk(4).values, atol=1e-5, rtol=1e-4)
                torch.testing.assert_close(found, law[place][tokens], atol=1e-5, rtol=1e-4)
                name = model.tokenizer.decode([int(tokens[0])])
                assert cell.guesses[0][0] in (name, name.removeprefix(" "))
    assert asked > 50


@pytest.mark.parametrize(("method", "words", "rows", "changes"), KINDS)
def test_watching_changes_nothing(method: str, words: str, rows: str, changes: dict[str, Any]) -> None:
    model = lm(method, words, rows, **changes)
    watched, plain = shots_of(model, guesses=3, steps=3), shots_of(model, steps=3)
    assert [shot.texts for shot in watched] == [shot.texts for shot in plain]
    assert [shot.nfe for shot in watched] == [shot.nfe for shot in plain]
    assert all(shot.guesses is None for shot in plain)
    record = model.record(template=TEMPLATES[0], steps=3, top_p=1.0, seed=4)
    assert record.text == plain[-1].texts[0] == record.frames[-1].text and record.nfe == plain[-1].nfe[0]
    assert record.guesser == ("anchor network" if method == "adlm" else "network")
    assert record.settings["steps"] == 3 and model.name in record.title


def test_a_guess_after_a_given_blank_is_shown_without_one() -> None:
    model = lm("adlm", "prose", "documents")
    (shot, *_) = model.stream(template="The ___{1}___{1}", guesses=50)
    cells = shot.trajectory_frame().tokens
    assert cells[0].text == "The " and not any(guess.startswith(" ") for guess, _ in cells[-2].guesses)
    assert any(guess.startswith(" ") for guess, _ in cells[-1].guesses)


@pytest.mark.parametrize("method", ["ar", "a2r"])
def test_a_causal_model_is_watched_without_guesses(method: str) -> None:
    shots = list(lm(method).stream(["ab", "abcd"], length=9, guesses=3))
    assert all(shot.guesses is None for shot in shots)
    assert [shot.trajectory_frame(0).tokens[-1].state for shot in shots] == [HIDDEN] * 7 + [REVEALED]
    assert shots[0].texts == ["ab" + BLOCK * 7, "abcd" + BLOCK * 5]
    assert shots[-1].nfe == [7, 5]
    assert [cell.state for cell in shots[0].trajectory_frame(1).tokens] == [GIVEN] * 4 + [HIDDEN] * 5


def test_a_notebook_shows_a_record_as_a_player() -> None:
    html = lm("adlm").record(length=9, steps=2)._repr_html_()
    assert html.startswith("<iframe srcdoc=") and "&lt;script" in html and "<script" not in html
