"""The sampling loop: a row has the tokens, NFE and frames that it has alone, whoever joins and leaves and when."""

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import ClassVar

import numpy as np
import pytest
import torch

from adlm.diffusion import plans, samplers
from adlm.diffusion.categorical import DrawnTokens, SamplingParams
from adlm.diffusion.plans import Plan
from adlm.diffusion.sampling import (
    MAX_BLOCK_STEPS,
    Column,
    Move,
    Row,
    RowsError,
    RunningBatch,
    Sampler,
    View,
    list_changes,
    number_blocks,
    sample,
)
from adlm.models.evaluator import build_evaluator
from adlm.models.language_model import LanguageModel
from tests.world import (
    MASK,
    VOCAB,
    TinyWorld,
    chi_square_p,
    random_model,
    random_tokens,
    small_model,
)

LEARNED = build_evaluator(small_model(positions="learned"))
TIMED = build_evaluator(small_model(positions="learned", time_conditioning=True))
SAMPLERS = {
    "ancestral": lambda compat: plans.ancestral(6, compat=compat),
    "forward_backward": lambda compat: plans.forward_backward(6, compat=compat),
    "remask_cap": lambda compat: plans.remask_cap(6, eta=0.3, compat=compat),
    "remask_rescale": lambda compat: plans.remask_rescale(6, eta=0.3, compat=compat),
    "remask_loop": lambda compat: plans.remask_loop(8, eta=0.3, compat=compat),
    "remask_conf": lambda compat: samplers.remask_conf(6, compat=compat),
    "ddpm": lambda compat: plans.ddpm(6, compat=compat),
    "dfm": lambda compat: plans.dfm(4, compat=compat),
    "first_hitting": lambda compat: samplers.first_hitting(),
    "confidence": lambda compat: samplers.confidence(5),
    "margin": lambda compat: samplers.margin(5),
    "entropy_bounded": lambda compat: samplers.entropy_bounded(2.0),
    "left_to_right": lambda compat: samplers.LeftToRight(),
}


def templates(seed, rows=8, length=14):
    """Rows with holes: all hidden, nothing hidden, a prompt, and holes of every density."""
    rng = torch.Generator().manual_seed(seed)
    is_hidden = torch.rand(rows, length, generator=rng) < torch.linspace(0.1, 1, rows)[:, None]
    is_hidden[0], is_hidden[1], is_hidden[2] = True, False, torch.arange(length) >= 5
    return torch.where(is_hidden, MASK, random_tokens(rows, length, seed=seed))


@dataclass
class Outcome:
    """What becomes of a row: its tokens, NFE, frames, and every frame that changes something."""

    tokens: list[int] = field(default_factory=list)
    nfe: int = 0
    steps: int = 0
    changes: list[tuple] = field(default_factory=list)


def run(evaluator, rows, joins=None, leaves=None, banned=None):
    """Let every row join at its step, and some leave after so many steps; return the outcomes of those that finish."""
    batch = RunningBatch(evaluator, banned=banned)
    waiting = list(zip(joins or [0] * len(rows), rows, strict=True))
    outcomes, done = defaultdict(Outcome), {}
    for tick in itertools.count():
        batch.join(row for step, row in waiting if step <= tick)
        waiting = [(step, row) for step, row in waiting if step > tick]
        if not waiting and not batch.rows:
            return done
        if batch.rows:
            frame = batch.step()
            for i, row in enumerate(frame.rows):
                length, own = len(row.tokens), outcomes[row]
                tokens = frame.tokens[i, :length].tolist()
                hidden = frame.is_hidden[i, :length].tolist()
                assert not frame.is_hidden[i, length:].any() and not frame.changed[i, length:].any()
                if bool(frame.changed[i].any()):
                    changed = frame.changed[i, :length].tolist()
                    own.changes.append((frame.steps[i], frame.nfe[i], tokens, changed, hidden))
                if frame.is_done[i]:
                    done[row] = Outcome(tokens, frame.nfe[i], frame.steps[i], own.changes)
                    assert row.filled.tolist() == tokens and row.nfe == frame.nfe[i]
                    size = row.filled.numel() * row.filled.element_size()
                    assert row.filled.untyped_storage().nbytes() == size  # no view of the batch
        batch.leave([row for row in batch.rows if (leaves or {}).get(row, math.inf) <= tick])


def build_rows():
    """Rows of all samplers, with lengths, blocks, limits, seeds and sampling parameters of their own."""
    rng = random.Random(0)
    params = [
        SamplingParams(),
        SamplingParams(0.7, None, 0.8),
        SamplingParams(0.0),
        SamplingParams(1.2, 6),
    ]
    rows = []
    for build, compat, block in itertools.product(SAMPLERS.values(), (False, True), (None, 5)):
        sampler = build(compat)
        for x in templates(rng.randrange(9), rows=3, length=rng.randrange(6, 19)):
            options = {"seed": rng.randrange(9), "number": rng.randrange(99), "block": block}
            kinds = torch.tensor([rng.randrange(3) for _ in x])
            rows.append(Row(x, sampler, sampling=rng.choice(params), kinds=kinds, **options))
    return rows


def build_banned():
    banned = torch.zeros(3, VOCAB, dtype=torch.bool)
    banned[:, MASK] = banned[1, :5] = banned[2, 5:9] = True
    return banned


@pytest.mark.parametrize("evaluator", [LEARNED, TIMED], ids=["learned", "timed"])
def test_rows_with_all_samplers_share_a_batch(evaluator):
    rows, banned, rng = build_rows(), build_banned(), random.Random(1)
    alone = {row: run(evaluator, [row], banned=banned)[row] for row in rows}
    assert run(evaluator, rows, banned=banned) == alone
    joins = [rng.randrange(12) for _ in rows]
    leaves = {
        row: join + rng.randrange(4) for row, join in list(zip(rows, joins, strict=True))[::2]
    }
    together = run(evaluator, rows, joins, leaves, banned)
    assert set(rows) - set(leaves) <= set(together) and len(together) < len(rows)
    assert all(alone[row] == outcome for row, outcome in together.items())


def test_calls_of_a_fixed_batch_have_one_shape():
    """Whatever rows are in the batch: as many rows, each padded as its own length needs."""
    model, shapes = small_model(positions="learned", length=130), set()
    evaluator = build_evaluator(model, fixed_batch=3)
    evaluator.model.register_forward_pre_hook(
        lambda _, args, options: shapes.add((*args[0].shape, options["valid"] is None)),
        with_kwargs=True,
    )
    rows = [
        Row(torch.full((length,), MASK), plans.ancestral(4), seed=2, number=number)
        for number, length in enumerate((9, 64, 70, 128, 130, 12, 64))
    ]
    together = run(evaluator, rows)
    assert shapes == {
        (3, 64, False),
        (3, 64, True),
        (3, 128, False),
        (3, 128, True),
        (3, 130, True),
    }
    assert all(run(evaluator, [row])[row] == outcome for row, outcome in together.items())
    assert len(shapes) == 5


def test_steps_that_change_nothing_have_frames_where_they_are_wanted():
    """The same texts, NFE and changes, at the same steps."""
    for build in SAMPLERS.values():
        x = templates(2, rows=8, length=9)[7]
        outcomes, frames = [], []
        for every_step in (False, True):
            row = Row(x, build(False), seed=1, block=4, every_step=every_step)
            outcomes.append(run(LEARNED, [row])[row])
            frames.append(len(list(sample(LEARNED, [row]))))
        assert outcomes[0] == outcomes[1]
        assert frames[0] <= frames[1] == outcomes[1].steps


def test_many_steps_cost_little():
    row = Row(torch.full((6,), MASK), plans.ancestral(65_536))
    frames = list(sample(LEARNED, [row]))
    assert len(frames) <= 7 and row.nfe <= 6 and row.steps == 65_536


def test_settled_text_does_not_change():
    """What a frame calls settled is the beginning of the final tokens, for remasking plans too."""
    rows, early = build_rows(), set()
    final = {row: run(LEARNED, [row])[row].tokens for row in rows}
    for frame in sample(LEARNED, rows):
        for i, row in enumerate(frame.rows):
            settled, first = frame.settled[i], (row.tokens == MASK).long().argmax()
            assert frame.tokens[i, :settled].tolist() == final[row][:settled]
            assert not frame.is_done[i] or settled == len(row.tokens)
            if not frame.is_done[i] and settled > first and (row.tokens == MASK).any():
                early.add(getattr(row.sampler, "name", type(row.sampler).__name__))
    assert {"ancestral", "ddpm", "confidence", "first_hitting", "left_to_right"} <= early


@dataclass(frozen=True)
class ByToken(Sampler):
    """The position whose logit of a token is highest comes first."""

    token: int
    name: str = "mine"

    @property
    def score(self):
        return lambda logits: logits[:, self.token]

    def move(self, view):
        _, rank = samplers.rank_positions(view.scores, view.is_hidden)
        return Move((rank < 1) & view.is_hidden)


def test_samplers_are_told_apart_by_what_they_are():
    """Not by a name: two with one name and different scores stand in one batch."""
    x = torch.full((12,), MASK)
    rows = [Row(x, ByToken(token), seed=7, sampling=SamplingParams(0.5)) for token in (0, 4, 0)]
    alone = [run(LEARNED, [row])[row] for row in rows]
    together = run(LEARNED, rows)
    assert [together[row] for row in rows] == alone
    assert alone[0] == alone[2] != alone[1]
    running = RunningBatch(LEARNED, rows)
    assert [view.rows for view in running.move()[1].values()] == [[0, 2], [1]]


def test_rows_of_different_steps_and_bounds_share_a_call():
    rows = []
    for k in range(12):
        sampler = samplers.confidence(1 + k) if k % 2 else samplers.entropy_bounded(0.3 * k)
        rows.append(
            Row(templates(k % 5)[2 + k % 6], sampler, seed=3, number=k, block=(None, 4)[k % 2])
        )
    assert len(RunningBatch(LEARNED, rows).move()[1]) == 2
    alone = {row: run(LEARNED, [row])[row] for row in rows}
    assert run(LEARNED, rows) == alone


def test_plans_of_one_table_are_one_sampler():
    x = torch.full((12,), MASK)
    rows = [Row(x, samplers.remask_conf(steps), number=steps) for steps in (6, 6, 7)]
    alone = {row: run(LEARNED, [row])[row] for row in rows}
    assert run(LEARNED, rows) == alone
    assert len({row.sampler for row in rows}) == 2


@dataclass(frozen=True)
class Staircase(Sampler):
    """Reveals 1, 2, 3, … positions, the oldest first; checks that its columns are its own."""

    columns: ClassVar[dict[str, Column]] = {
        "steps": Column(0.0),
        "age": Column(7.0, per_position=True),
    }

    def move(self, view):
        steps, age = view.columns["steps"], view.columns["age"]
        assert torch.equal(steps, view.step.double()), "the row's column is not its own"
        expected = (7.0 + view.step.double())[:, None].expand_as(age)
        assert torch.equal(age[view.is_free], expected[view.is_free])
        _, rank = samplers.rank_positions(age + view.u, view.is_hidden)
        reveal = (rank < steps[:, None] + 1) & view.is_hidden
        return Move(reveal, columns={"steps": steps + 1, "age": age + 1})


def test_a_sampler_has_columns_of_its_own():
    rng, rows = random.Random(3), []
    for k in range(24):
        x = templates(k % 7, rows=3, length=rng.randrange(8, 19))[k % 3]
        rows.append(Row(x, Staircase(), seed=1, number=k, block=rng.choice([None, 3, 5])))
        other = list(SAMPLERS.values())[k % len(SAMPLERS)](False)
        rows.append(Row(x, other, seed=2, number=k))
    alone = {row: run(LEARNED, [row])[row] for row in rows}
    joins = [rng.randrange(10) for _ in rows]
    leaves = {row: join + 2 for row, join in list(zip(rows, joins, strict=True))[1::6]}
    together = run(LEARNED, rows, joins, leaves)
    assert all(alone[row] == outcome for row, outcome in together.items())
    assert set(rows) - set(leaves) <= set(together)
    row = Row(torch.full((12,), MASK), Staircase())
    assert [sum(changed) for _, _, _, changed, _ in run(LEARNED, [row])[row].changes] == [
        1,
        2,
        3,
        4,
        2,
    ]


def list_moves(row):
    """List (step, revealed, hidden again) of a row's plan before any evaluation, with the fill at its end."""
    is_hidden, moves, passed = (row.tokens == MASK).numpy(), [], 0
    (block_at,) = number_blocks([row], ~is_hidden[None])
    for block in sorted(set(block_at[is_hidden].tolist())):
        free = (block_at == block).nonzero()[0]
        hidden = set(free.tolist())
        keys = np.array([(row.seed, row.number, block * MAX_BLOCK_STEPS)])
        for _, change in list_changes(
            row.sampler, keys, np.zeros_like(free), free, is_hidden[free]
        ):
            reveal, hide = set(change.reveal.tolist()), set(change.hide.tolist())
            hidden = (hidden | hide) - reveal
            moves.append((passed + change.step + 1, reveal, hide))
        if hidden:
            moves.append((moves[-1][0] + 1, hidden, set()))
        passed = moves[-1][0]
    return [move for move in moves if move[1] or move[2]]


@pytest.mark.parametrize("block", [None, 5])
@pytest.mark.parametrize("compat", [False, True])
def test_what_a_plan_changes_is_known_before_any_evaluation(block, compat):
    for build in SAMPLERS.values():
        sampler = build(compat)
        if not isinstance(sampler, Plan):
            continue
        for number, x in enumerate(templates(4)):
            row = Row(x, sampler, seed=3, number=number, block=block)
            taken = []
            for step, _, _, changed, hidden in run(LEARNED, [row])[row].changes:
                where = {i for i, is_changed in enumerate(changed) if is_changed}
                hide = {i for i in where if hidden[i]}
                taken.append((step, where - hide, hide))
            assert list_moves(row) == taken


def is_allowed(tokens):
    """The grammar: neighbors differ."""
    return all(a != b for a, b in itertools.pairwise(tokens))


@cache
def list_choices(vocab, count):
    return torch.tensor(list(itertools.product(range(vocab), repeat=count)))


def draw_grammatical(*, tokens, hidden, logits, reveal, u, sampling):
    """Draw all hidden tokens from the product of the predictions, given the grammar; return those to be revealed."""
    probs = logits.double().softmax(-1)
    choices = list_choices(probs.shape[1], len(hidden))
    texts = tokens.repeat(len(choices), 1)
    texts[:, hidden] = choices
    weight = probs.gather(1, choices.T).prod(0) * (texts[:, 1:] != texts[:, :-1]).all(-1)
    total = weight.cumsum(0)
    drawn = texts[
        int(torch.searchsorted(total, u[0] * total[-1], right=True).clamp(max=len(texts) - 1))
    ]
    return DrawnTokens(drawn[reveal], torch.ones(len(reveal), dtype=torch.float64))


def joint_law(world, plan, block):
    """The law (S,) of a plan without remasking whose tokens are drawn jointly, by enumeration."""
    table = world.probs()
    here = {tuple(world.start().tolist()): 1.0}
    windows = world.windows(torch.ones(world.length, dtype=torch.bool), block)
    for window, step in itertools.product(windows, range(len(plan))):
        reveal, after = float(plan[step].reveal_prob), defaultdict(float)
        for state, mass in here.items():
            probs = table[world.number(torch.tensor(state))].tolist()
            hidden = [i for i, token in enumerate(state) if token == world.mask]
            joint = {}
            for tokens in itertools.product(range(world.vocab), repeat=len(hidden)):
                new = dict(zip(hidden, tokens, strict=True))
                if is_allowed([new.get(i, token) for i, token in enumerate(state)]):
                    joint[tokens] = math.prod(probs[i][token] for i, token in new.items())
            total = sum(joint.values())
            inside = [i for i in hidden if i in window]
            for shown in itertools.product((False, True), repeat=len(inside)):
                chance = math.prod(reveal if x else 1 - reveal for x in shown)
                chosen = {i for i, x in zip(inside, shown, strict=True) if x}
                for tokens, weight in joint.items():
                    new = {i: x for i, x in zip(hidden, tokens, strict=True) if i in chosen}
                    text = tuple(new.get(i, token) for i, token in enumerate(state))
                    after[text] += mass * chance * weight / total
        here = after
    return sum(mass * world.point(torch.tensor(state)) for state, mass in here.items())


@pytest.mark.parametrize(("block", "steps"), [(None, 3), (2, 2)])
def test_a_row_can_draw_all_hidden_tokens_jointly(block, steps):
    """Also across the border of a block: what is drawn in one depends on what is hidden in the next."""
    world = TinyWorld(random_model(seed=113, positions="learned"))
    evaluator, plan = build_evaluator(world.model), plans.ancestral(steps)
    law, count = joint_law(world, plan, block), 2000
    for draw in (draw_grammatical, None):
        options = {"seed": 5, "block": block, "draw": draw}
        rows = [Row(world.start(), plan, number=k, **options) for k in range(count)]
        for _ in sample(evaluator, rows):
            pass
        texts = world.number(torch.stack([row.filled for row in rows]))
        counts = torch.bincount(texts, minlength=len(law))
        if draw is None:
            assert counts[law <= 0].sum() > 0, "each token by itself breaks the grammar"
        else:
            assert chi_square_p(counts, law) > 1e-3


class Hides(Sampler):
    """Forgets to say that it hides."""

    def move(self, view):
        reveal = view.is_hidden & (view.is_hidden.cumsum(-1) == 1)
        return Move(reveal, hide=view.is_free & ~view.is_hidden)


class HidesLate(Sampler):
    """Hides in more steps than it says."""

    hides_until = 1

    def move(self, view):
        hide = view.is_free & ~view.is_hidden & (view.step > 0)[:, None]
        return Move(view.is_hidden & (view.is_hidden.cumsum(-1) == 1), hide=hide)


class RevealsAll(Sampler):
    """Reveals what is not hidden."""

    def move(self, view):
        return Move(torch.ones_like(view.is_hidden))


@dataclass(frozen=True)
class Moves(Sampler):
    """Returns a move of its own; it may hide in all steps."""

    make: Callable[[View], Move]
    hides_until: int = 9

    def move(self, view):
        return self.make(view)


@dataclass
class Unhashable(Sampler):
    """No frozen dataclass."""


XT = templates(4)[2]


@pytest.mark.parametrize(
    ("sampler", "options", "message"),
    [
        (Hides(), {}, "in step 1 of a block but has hides_until = 0: set hides_until"),
        (HidesLate(), {}, "in step 1 of a block but has hides_until = 1: set hides_until"),
        (RevealsAll(), {}, "combine with view.is_hidden"),
        (Unhashable(), {}, r"dataclass\(frozen=True\)"),
        ("ancestral", {}, r"build_sampler\(NAME\)"),
        (None, {}, r"build_sampler\(NAME\)"),
        (plans.ancestral(3), {"block": 0}, "block must be at least 1"),
        (plans.ancestral(3), {"seed": -1}, "seed must be between"),
        (plans.ancestral(3), {"number": 2**56}, "row numbers must be between"),
        (plans.ancestral(3), {"is_fixed": torch.ones(14).bool()}, "row 0, position 5 is fixed but"),
    ],
)
def test_wrong_rows_and_samplers_are_refused(sampler, options, message):
    with pytest.raises(ValueError, match=message):
        list(sample(LEARNED, [Row(XT, sampler, **options)]))


def first_hidden(view):
    return view.is_hidden & (view.is_hidden.cumsum(-1) == 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda v: Move(first_hidden(v), hide=~v.is_hidden), "hides position 0, which is hidden"),
        (
            lambda v: Move(v.is_hidden, hide=v.is_hidden),
            "hides position 5, .* combine with view.is_free & ~view.is_hidden",
        ),
        (lambda v: v.is_hidden, "expected a Move: return Move"),
        (lambda v: Move(v.is_hidden.long()), r"reveal of .* is torch.int64 of shape \(2, 14\)"),
        (lambda v: Move(v.is_hidden[:1]), r"reveal of .* expected torch.bool of shape \(2, 14\)"),
        (lambda v: Move(v.is_hidden.numpy()), "reveal of .* is array"),
        (lambda v: Move(v.is_hidden, hide=torch.zeros(2, 14)), "hide of .* is torch.float32"),
        (
            lambda v: Move(v.is_hidden, noise_level=torch.ones(1)),
            r"noise_level of .* expected real numbers of shape \(2,\)",
        ),
        (lambda v: Move(v.is_hidden, noise_level=1.0), "noise_level of .* is 1.0"),
        (lambda v: Move(v.is_hidden, is_last=v.step), "is_last of .* is torch.int64"),
        (lambda v: Move(v.is_hidden, columns=None), "columns of .* are None, expected a mapping"),
        (lambda v: Move(v.is_hidden, columns={"age": v.u}), r"no column 'age', only \[\]"),
    ],
)
def test_a_wrong_move_is_an_error_of_its_rows(make, message):
    """The other rows go on, and the text that was given stays."""
    good = Row(XT, plans.ancestral(3))
    alone = run(LEARNED, [good])[good]
    wrong = [Row(XT, Moves(make), number=k) for k in range(2)]
    batch = RunningBatch(LEARNED, [wrong[0], good, wrong[1]])
    before = batch.tokens
    with pytest.raises(RowsError, match=message) as error:
        batch.step()
    assert error.value.rows == wrong and isinstance(error.value.cause, ValueError)
    assert torch.equal(batch.tokens, before)
    batch.leave(wrong)
    while batch.rows:
        batch.step()
    assert good.filled.tolist() == alone.tokens and good.nfe == alone.nfe


@dataclass(frozen=True)
class WrongColumn(Staircase):
    """Gives one number for all rows."""

    def move(self, view):
        return Move(view.is_hidden, columns={"age": view.columns["steps"]})


def test_a_column_has_the_shape_that_it_is_declared_with():
    with pytest.raises(ValueError, match=r"column 'age' of .* of shape \(1, 14\) on cpu"):
        list(sample(LEARNED, [Row(XT, WrongColumn())]))


def test_a_sampler_that_hides_nothing_needs_no_hides_until():
    with_zeros = Moves(lambda v: Move(first_hidden(v), hide=torch.zeros_like(v.is_hidden)), 0)
    rows = [Row(XT, with_zeros, seed=2), Row(XT, samplers.LeftToRight(), seed=2)]
    done = run(LEARNED, rows)
    assert done[rows[0]] == done[rows[1]]
    by_confidence = samplers.RemaskByConfidence(plans.ancestral(6))
    rows = [Row(XT, by_confidence, seed=2), Row(XT, plans.ancestral(6), seed=2)]
    done = run(LEARNED, rows)
    assert done[rows[0]].tokens == done[rows[1]].tokens
    assert repr(by_confidence) == "RemaskByConfidence(ancestral, 6 steps)"


def draw_too_few(*, reveal, **_):
    return DrawnTokens(reveal[1:], torch.ones(len(reveal) - 1))


def draw_halves(*, reveal, **_):
    return DrawnTokens(reveal / 2, torch.ones(len(reveal)))


def draw_one_prob(*, reveal, **_):
    return DrawnTokens(reveal, torch.ones(1))


def draw_tokens_only(*, reveal, **_):
    return reveal


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (draw_too_few, r"tokens that are torch.int64 of shape \(8,\)"),
        (draw_halves, "tokens that are torch.float32"),
        (draw_one_prob, r"probs that are torch.float32 of shape \(1,\)"),
        (draw_tokens_only, r"return DrawnTokens\(tokens, probs\)"),
    ],
)
def test_a_wrong_joint_draw_is_an_error_of_its_row(draw, message):
    rows = [Row(XT, plans.ancestral(1), draw=draw), Row(XT, plans.ancestral(1))]
    batch = RunningBatch(LEARNED, rows)
    before = batch.tokens
    is_hidden = batch.is_hidden.copy()
    with pytest.raises(RowsError, match=message) as error:
        batch.step()
    assert error.value.rows == rows[:1]
    assert torch.equal(batch.tokens, before) and np.array_equal(batch.is_hidden, is_hidden)
    assert [slot.nfe for slot in batch.slots] == [0, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": XT[:0]}, r"of shape \(0,\) on cpu, expected a tensor \(L,\) of at least 1"),
        ({"tokens": XT[None]}, r"tokens of a row are torch.int64 of shape \(1, 14\)"),
        ({"tokens": [1, 2]}, r"tokens of a row are \[1, 2\]"),
        ({"is_fixed": XT != MASK, "tokens": XT[:9]}, r"is_fixed is torch.bool of shape \(14,\)"),
        ({"is_fixed": (XT != MASK)[:9]}, r"expected torch.bool of shape \(14,\): give a flag"),
        ({"is_fixed": (XT != MASK).long()}, "is_fixed is torch.int64"),
        ({"kinds": torch.zeros(2, 14).long()}, r"kinds are torch.int64 of shape \(2, 14\)"),
        ({"kinds": torch.zeros(14)}, r"expected integers of shape \(14,\): give a kind"),
    ],
)
def test_a_row_has_flags_and_kinds_of_its_own_length(options, message):
    with pytest.raises(ValueError, match=message):
        Row(**{"tokens": XT, "sampler": plans.ancestral(3), **options})


def test_a_join_that_fails_changes_nothing(monkeypatch):
    rows = [Row(XT, plans.ancestral(3), number=k) for k in range(2)]
    expected = run(LEARNED, rows)
    batch = RunningBatch(LEARNED, rows[:1])
    with pytest.raises(ValueError, match="this model's rows at most 20"):
        batch.join([rows[1], Row(torch.full((21,), MASK), plans.ancestral(3))])
    with monkeypatch.context() as patch:
        patch.setattr("adlm.diffusion.sampling.append_array", fail)
        with pytest.raises(MemoryError):
            batch.join([rows[1]])
    assert batch.rows == rows[:1] and len(batch.slots) == len(batch.tokens) == 1
    batch.join([rows[1]])
    while batch.rows:
        batch.step()
    assert [row.filled.tolist() for row in rows] == [expected[row].tokens for row in rows]


def fail(*_):
    raise MemoryError


def test_rows_longer_than_the_model_and_kinds_without_tokens_are_refused():
    with pytest.raises(ValueError, match="this model's rows at most 20"):
        list(sample(LEARNED, [Row(torch.full((21,), MASK), plans.ancestral(3))]))
    banned = torch.tensor([[False] * VOCAB, [True] * VOCAB])
    with pytest.raises(ValueError, match="kind 1 bans all tokens"):
        list(sample(LEARNED, [Row(XT, plans.ancestral(3))], banned=banned))


def causal_rows(seed=3, **options):
    """Rows of a causal model: prompts of all lengths, and given tokens between others."""
    xt = random_tokens(10, 14, seed=seed)
    is_fixed = torch.arange(14) < torch.tensor([4, 4, 7, 4, 7, 1, 14, 1, 2, 3])[:, None]
    is_fixed[7:] |= torch.rand(3, 14, generator=torch.Generator().manual_seed(seed)) < 0.3
    left_to_right = samplers.LeftToRight()
    return [
        Row(
            x[: 14 - k % 3],
            left_to_right,
            is_fixed=f[: 14 - k % 3],
            seed=seed,
            number=50 + k,
            **options,
        )
        for k, (x, f) in enumerate(zip(xt, is_fixed, strict=True))
    ]


@pytest.mark.parametrize("method", ["ar", "a2r"])
@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_causal_rows_join_at_different_times(method, positions):
    evaluator = build_evaluator(small_model(method, positions=positions))
    for sampling in (SamplingParams(), SamplingParams(0.0), SamplingParams(0.7, 6)):
        rows = causal_rows(sampling=sampling)
        alone = {row: run(evaluator, [row])[row] for row in rows}
        for row, outcome in alone.items():
            assert torch.tensor(outcome.tokens)[row.is_fixed].equal(row.tokens[row.is_fixed])
            assert outcome.nfe == int((~row.is_fixed).sum())
        assert run(evaluator, rows) == alone
        joins = [2 * k % 9 for k in range(len(rows))]
        together = run(evaluator, rows, joins, {rows[0]: 3, rows[3]: 7})
        assert all(alone[row] == outcome for row, outcome in together.items())


def test_causal_caches_give_the_features_of_the_whole_row():
    """In whatever order rows join and leave: to 1e-5."""
    model = small_model("a2r", positions="learned")
    evaluator, checked = build_evaluator(model).open(), 0
    features = evaluator.features

    def compare(tokens, level, valid, rows, next_position):
        nonlocal checked
        got = features(tokens, level, valid, rows, next_position)
        for k, position in enumerate(next_position.tolist()):
            expected = evaluator.model(tokens[k : k + 1, :position]).final[0, -1]
            torch.testing.assert_close(got[k, position], expected, atol=1e-5, rtol=1e-5)
            checked += 1
        return got

    evaluator.features, evaluator.open = compare, lambda: evaluator
    rows = causal_rows() + causal_rows(4)
    run(evaluator, rows, [k % 7 for k in range(len(rows))], {rows[1]: 4, rows[4]: 6})
    assert checked > 100


def test_causal_rows_that_arrive_one_a_step_share_calls():
    """16 rows of 20 tokens that arrive one a step take 35 steps; rows that have begun share one call."""
    evaluator = build_evaluator(small_model("ar", length=32))
    calls = 0

    def count(*_):
        nonlocal calls
        calls += 1

    evaluator.model.register_forward_hook(count)
    is_fixed = torch.arange(24) < 4
    rows = [
        Row(x, samplers.LeftToRight(), is_fixed=is_fixed, number=k)
        for k, x in enumerate(random_tokens(16, 24))
    ]
    done = run(evaluator, rows, list(range(16)))
    assert len(done) == 16 and calls <= 60


def test_a_causal_network_without_a_cache_gives_the_same_texts(monkeypatch):
    model, rows = small_model("ar"), causal_rows()
    cached = run(build_evaluator(model), rows)
    monkeypatch.delattr(LanguageModel, "new_slot_cache")
    assert run(build_evaluator(model), rows) == cached


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        (plans.ancestral(3), "the sampler ancestral reveals positions at random, and a causal"),
        (samplers.first_hitting(), "does not reveal exactly the first hidden position"),
        (samplers.confidence(2), "does not reveal exactly the first hidden position"),
        (samplers.remask_conf(4), r"RemaskByConfidence\(remask_conf, 4 steps\) does not reveal"),
        (Moves(lambda v: Move(v.is_hidden & False)), "does not reveal exactly the first hidden"),
        (
            Moves(lambda v: Move(first_hidden(v), hide=v.is_free & ~v.is_hidden)),
            "does not reveal exactly the first hidden position .* use LeftToRight",
        ),
        (
            Moves(lambda v: Move(first_hidden(v), is_last=v.step == 1)),
            "ends a block that has hidden positions",
        ),
    ],
)
def test_a_causal_model_goes_from_left_to_right(sampler, message):
    """Another sampler would read features of positions that the network has not predicted."""
    evaluator = build_evaluator(small_model("ar"))
    row = Row(torch.zeros(12).long(), sampler, is_fixed=torch.arange(12) < 3)
    with pytest.raises(ValueError, match=message):
        list(sample(evaluator, [row]))


def test_a_causal_row_begins_with_a_given_token():
    evaluator = build_evaluator(small_model("ar"))
    for is_fixed, message in (
        (None, "is_fixed is None"),
        (torch.arange(5) > 0, "position 0 of every row"),
    ):
        with pytest.raises(ValueError, match=message):
            list(
                sample(evaluator, [Row(torch.zeros(5), samplers.LeftToRight(), is_fixed=is_fixed)])
            )
