"""A row's tokens follow from its seed and its number, not from neighbors, place or padding."""

from typing import Any

import pytest
import torch
from torch import Tensor

from adlm import LanguageModel
from tests.laws import adapter
from tests.laws.adapter import Draw, Frame
from tests.laws.commands import quick_options
from tests.laws.world import MASK, VOCAB, random_tokens, small_model

LENGTH, ROWS = 14, 8
NAMES = tuple(adapter.sampler_names())
# Of each kind of sampler one.
KINDS = ("remask_loop", "remask_conf", "first_hitting", "confidence")
LEARNED = small_model(positions="learned")
ROTARY = small_model()
TIMED = small_model(positions="learned", time_conditioning=True)
PARTS = ([[i] for i in range(ROWS)], [[0, 1, 2], [3, 4, 5], [6, 7]], [[6, 2, 0, 7, 1, 5, 3, 4]])


def make_templates(seed: int) -> Tensor:
    """Return rows with holes: all hidden, nothing hidden, a prompt, and holes of every density."""
    rng = torch.Generator().manual_seed(seed)
    density = torch.linspace(0.1, 1, ROWS)[:, None]
    is_hidden = torch.rand(ROWS, LENGTH, generator=rng) < density
    is_hidden[0], is_hidden[1], is_hidden[2] = True, False, torch.arange(LENGTH) >= 5
    return torch.where(is_hidden, MASK, random_tokens(ROWS, LENGTH, seed=seed))


def run(model: LanguageModel, xt: Tensor, name: str | None, **settings: Any) -> list[Frame]:
    """Return all frames of a sampler with few steps."""
    options = {} if name is None else quick_options(name)
    settings = {"seed": 3} | settings
    return list(adapter.sample_frames(model, xt, name, options, **settings))


@pytest.mark.parametrize("name", NAMES)
def test_given_tokens_stay_and_frames_say_what_happened(name: str) -> None:
    """The last frame has no mask; nothing changes unannounced; steps grow."""
    for seed in range(4):
        xt = make_templates(seed)
        given, before, was_hidden, step = xt != MASK, xt, xt == MASK, 0
        frames = run(LEARNED, xt, name, seed=seed, block=None if seed % 2 else 5)
        reveals = torch.zeros(ROWS, dtype=torch.int64)
        for frame in frames:
            assert frame.step > step
            assert torch.equal(frame.tokens[given], xt[given])
            assert torch.equal(frame.is_hidden, frame.tokens == MASK)
            assert torch.equal(frame.changed, was_hidden ^ frame.is_hidden)
            assert torch.equal(frame.tokens[~frame.changed], before[~frame.changed])
            reveals += (frame.changed & ~frame.is_hidden).any(-1).long()
            before, was_hidden, step = frame.tokens, frame.is_hidden, frame.step
        assert not frames[-1].is_hidden.any()
        assert frames[-1].tokens.max() < VOCAB
        # A row is evaluated only for a step that reveals something in it.
        assert torch.equal(frames[-1].nfe, reveals)


@pytest.mark.parametrize("name", ["first_hitting", "confidence", "margin"])
def test_the_number_of_evaluations_is_known_beforehand(name: str) -> None:
    xt = make_templates(1)
    hidden = (xt == MASK).sum(-1)
    expected = hidden if name == "first_hitting" else hidden.clamp(max=5)
    assert torch.equal(run(LEARNED, xt, name)[-1].nfe, expected)


@pytest.mark.parametrize("block", [None, 5])
@pytest.mark.parametrize("name", NAMES)
def test_a_rows_tokens_do_not_depend_on_its_neighbors(name: str, block: int | None) -> None:
    for seed, model in ((0, LEARNED), (1, TIMED)):
        xt, numbers = make_templates(seed), torch.arange(ROWS) * 1000 + 7
        same: dict[str, Any] = {"block": block, "draw": Draw(top_p=0.95)}
        whole = run(model, xt, name, rows=numbers, **same)[-1]
        for parts in PARTS[1:] if block else PARTS:
            for rows in parts:
                last = run(model, xt[rows], name, rows=numbers[rows], **same)[-1]
                assert torch.equal(last.tokens, whole.tokens[rows]), f"rows {rows}"
                assert torch.equal(last.nfe, whole.nfe[rows])
        other = run(model, xt, name, rows=numbers + 1, **same)[-1]
        assert not torch.equal(other.tokens, whole.tokens)


@pytest.mark.parametrize("name", NAMES)
def test_positions_that_predict_the_same_are_chosen_alike_in_every_batch(name: str) -> None:
    """All-hidden positions differ by rounding alone, which must not pick the order."""
    xt = torch.full((ROWS, LENGTH), MASK)
    whole = run(ROTARY, xt, name)[-1].tokens
    for rows in ([0], [3], [2, 1], [5, 6, 7, 0, 4]):
        last = run(ROTARY, xt[rows], name, rows=torch.tensor(rows))[-1]
        assert torch.equal(last.tokens, whole[rows])


@pytest.mark.parametrize("method", ["ar", "a2r"])
def test_causal_rows_do_not_depend_on_their_neighbors(method: str) -> None:
    model, xt = small_model(method), make_templates(0)
    xt[:, 0] = random_tokens(ROWS, 1)[:, 0]
    is_fixed, numbers, same = xt != MASK, torch.arange(ROWS) + 50, {"draw": Draw(top_k=6)}
    frames = run(model, xt, None, rows=numbers, is_fixed=is_fixed, **same)
    whole = frames[-1].tokens
    assert all(torch.equal(frame.tokens[is_fixed], xt[is_fixed]) for frame in frames)
    assert not (whole == MASK).any()
    for parts in PARTS:
        for rows in parts:
            settings = {"rows": numbers[rows], "is_fixed": is_fixed[rows], **same}
            part = run(model, xt[rows], None, **settings)[-1].tokens
            assert torch.equal(part, whole[rows]), f"rows {rows}"
    wide = torch.nn.functional.pad(xt, (0, 4), value=2)
    valid = torch.arange(LENGTH + 4).expand(ROWS, -1) < LENGTH
    last = run(
        model, wide, None, rows=numbers, is_fixed=(wide != MASK) & valid, valid=valid, **same
    )
    assert torch.equal(last[-1].tokens[:, :LENGTH], whole)
    assert (last[-1].tokens[:, LENGTH:] == 2).all()


@pytest.mark.parametrize("method", ["ar", "a2r"])
def test_a_causal_model_reads_all_that_is_before(method: str) -> None:
    """Greedy: every token is the likeliest by the whole row before it, cache or not."""
    model, start = small_model(method), random_tokens(5, 12, seed=9)
    is_fixed = torch.arange(12).expand(5, -1) < torch.tensor([1, 3, 4, 7, 11])[:, None]
    draw = Draw(temperature=0.0)
    last = run(model, start, None, is_fixed=is_fixed, draw=draw)[-1].tokens
    logits = adapter.predict(model, last)[1]
    logits[..., MASK] = -torch.inf
    expected = logits.argmax(-1)[:, :-1]
    is_drawn = ~is_fixed[:, 1:]
    assert torch.equal(last[:, 1:][is_drawn], expected[is_drawn])


@pytest.mark.parametrize("value", [0, 9])
@pytest.mark.parametrize("model", [LEARNED, TIMED], ids=["plain", "timed"])
@pytest.mark.parametrize("name", NAMES)
def test_padding_changes_no_tokens(name: str, model: LanguageModel, value: int) -> None:
    xt = make_templates(4)
    wide = torch.nn.functional.pad(xt, (0, 5), value=value)
    valid = torch.arange(LENGTH + 5).expand(ROWS, -1) < LENGTH
    for block in (None, 4):
        plain = run(model, xt, name, block=block)[-1]
        padded = run(model, wide, name, valid=valid, block=block)[-1]
        assert torch.equal(padded.tokens[:, :LENGTH], plain.tokens)
        assert (padded.tokens[:, LENGTH:] == value).all()
        assert torch.equal(padded.nfe, plain.nfe)


@pytest.mark.parametrize("name", ["remask_cap", "remask_rescale"])
@pytest.mark.parametrize("compat", [False, True])
def test_without_remasking_a_plan_is_ancestral(name: str, compat: bool) -> None:
    """The same tokens from the same seed."""
    xt = make_templates(5)
    options = {"steps": 7, "compat": compat}
    *_, one = adapter.sample_frames(LEARNED, xt, name, {**options, "eta": 0.0}, seed=3)
    *_, other = adapter.sample_frames(LEARNED, xt, "ancestral", options, seed=3)
    assert torch.equal(one.tokens, other.tokens)


def test_tokens_are_hidden_again_by_the_probability_of_their_last_draw() -> None:
    """Over many rows: the shares are softmax(-probability), and follow what was drawn."""
    table, rows = adapter.plan_table("remask_conf", steps=12), 1600
    assert table is not None
    before = torch.full((rows, LENGTH), MASK)
    drawn_with = torch.zeros(before.shape, dtype=torch.float64)
    excess = variance = 0.0
    for frame in adapter.sample_frames(LEARNED, before, "remask_conf", {"steps": 12}, seed=9):
        is_visible = before != MASK
        doubt = (-drawn_with).masked_fill(~is_visible, -torch.inf).softmax(-1).nan_to_num()
        chance = (table.remask_prob[frame.step - 1] * doubt)[is_visible]
        is_hidden_again = (frame.changed & frame.is_hidden)[is_visible]
        # Of the same row, tokens that were drawn with other probabilities.
        sizes = is_visible.sum(-1, keepdim=True).clamp(min=1)
        mean = torch.where(is_visible, drawn_with, 0.0).sum(-1, keepdim=True) / sizes
        apart = (drawn_with - mean)[is_visible]
        excess += float(((is_hidden_again.double() - chance) * apart).sum())
        variance += float((chance * (1 - chance) * apart**2).sum())
        logits = adapter.predict(LEARNED, before)[1].double()
        logits[..., MASK] = -torch.inf
        probs = logits.softmax(-1).gather(-1, frame.tokens[..., None])[..., 0]
        drawn_with = torch.where(frame.changed & ~frame.is_hidden, probs, drawn_with)
        before = frame.tokens
    assert abs(excess) < 4 * variance**0.5
    assert variance > 10


@pytest.mark.parametrize("draw", [Draw(temperature=0.0), Draw(top_k=1), Draw(top_p=1e-9)])
@pytest.mark.parametrize("name", ["confidence", "margin", "entropy_bounded"])
def test_without_chance_the_seed_does_not_matter(name: str, draw: Draw) -> None:
    """And the first tokens are the likeliest, at the places where the model is surest."""
    xt = make_templates(6)
    one, other = (run(LEARNED, xt, name, seed=seed, draw=draw) for seed in (1, 2))
    assert torch.equal(one[-1].tokens, other[-1].tokens)
    logits = adapter.predict(LEARNED, xt)[1].double()
    logits[..., MASK] = -torch.inf
    first = one[0]
    assert torch.equal(first.tokens[first.changed], logits.argmax(-1)[first.changed])
    best = logits.softmax(-1).sort(-1, descending=True).values
    score = {
        "confidence": best[..., 0],
        "margin": best[..., 0] - best[..., 1],
        "entropy_bounded": torch.where(best > 0, best * best.log(), 0.0).sum(-1),
    }[name]
    for row in range(ROWS):
        chosen, left = first.changed[row], (xt[row] == MASK) & ~first.changed[row]
        if chosen.any() and left.any():
            assert score[row][chosen].min() >= score[row][left].max() - 1e-6


@pytest.mark.parametrize("name", ["ancestral", "remask_loop", "remask_conf", "dfm", "ddpm"])
def test_many_steps_are_those_of_a_row_alone(name: str) -> None:
    """Steps that change nothing may be passed over, but each row keeps its own clock."""
    options = {**quick_options(name), "steps": 300}
    if "eta" in options:
        options["eta"] = 0.003
    xt = make_templates(2)[:3, :6]
    settings: dict[str, Any] = {"seed": 3, "block": 4}
    *_, whole = adapter.sample_frames(LEARNED, xt, name, options, **settings)
    for row in range(3):
        own = torch.tensor([row])
        *_, alone = adapter.sample_frames(LEARNED, xt[[row]], name, options, rows=own, **settings)
        assert torch.equal(alone.tokens[0], whole.tokens[row])
        assert alone.nfe[0] == whole.nfe[row]


@pytest.mark.parametrize("name", NAMES)
def test_there_is_always_a_frame(name: str) -> None:
    xt = torch.zeros(2, LENGTH, dtype=torch.long)
    for block in (None, 4):
        last = run(LEARNED, xt, name, block=block)[-1]
        assert torch.equal(last.tokens, xt)
        assert not last.nfe.any()


def test_what_is_fixed_must_be_text() -> None:
    with pytest.raises(ValueError, match="row 0, position 0"):
        run(LEARNED, make_templates(0), "ancestral", is_fixed=torch.ones(ROWS, LENGTH).bool())
