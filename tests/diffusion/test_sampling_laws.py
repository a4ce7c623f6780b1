"""Laws of sampling: prompts stay, neighbours and padding do not matter, frames say what happened, draws are exact."""

import pytest
import torch

from adlm.diffusion import denoising, plans
from adlm.diffusion.categorical import SamplingParams
from adlm.diffusion.denoising import SamplerState, denoise, reverse_step
from adlm.diffusion.plans import confidence_remask_prob
from adlm.diffusion.rng import CounterRng
from adlm.diffusion.samplers import SAMPLERS, build_sampler
from adlm.generate import compile_for_sampling, stream_tokens
from tests.world import MASK, OPTIONS, VOCAB, compute_probs, random_tokens, small_model

LENGTH, ROWS = 14, 8
NAMES = tuple(SAMPLERS)
LEARNED = compile_for_sampling(small_model(positions="learned"))
ROTARY = compile_for_sampling(small_model())
TIMED = compile_for_sampling(small_model(positions="learned", time_conditioning=True))


def templates(seed, rows=ROWS, length=LENGTH):
    """Rows with holes: all hidden, nothing hidden, a prompt, and holes of every density."""
    rng = torch.Generator().manual_seed(seed)
    is_hidden = torch.rand(rows, length, generator=rng) < torch.linspace(0.1, 1, rows)[:, None]
    is_hidden[0], is_hidden[1], is_hidden[2] = True, False, torch.arange(length) >= 5
    return torch.where(is_hidden, MASK, random_tokens(rows, length, seed=seed))


def run(predictor, xt, sampler=None, seed=3, **options):
    """All frames; a sampler by its name has the options of tests.world."""
    if isinstance(sampler, str):
        sampler = build_sampler(sampler, **OPTIONS[sampler])
    return list(stream_tokens(predictor, xt, sampler, seed=seed, **options))


def last_tokens(*args, **options):
    return run(*args, **options)[-1].tokens


@pytest.mark.parametrize("name", NAMES)
def test_prompts_are_never_touched_and_frames_say_what_happened(name):
    """Over random templates: given tokens stand in every frame, the last has no mask, nothing changes unannounced."""
    for seed in range(6):
        xt = templates(seed)
        given, before, was_masked = xt != MASK, xt, xt == MASK
        frames = run(LEARNED, xt, name, seed, block=None if seed % 2 else 5)
        for number, frame in enumerate(frames, 1):
            assert frame.step == number
            assert torch.equal(frame.tokens[given], xt[given])
            assert torch.equal(frame.is_masked, frame.tokens == MASK)
            assert torch.equal(frame.changed, was_masked ^ frame.is_masked)
            assert torch.equal(frame.tokens[~frame.changed], before[~frame.changed])
            before, was_masked = frame.tokens, frame.is_masked
        assert not frames[-1].is_masked.any()
        assert frames[-1].tokens.max() < VOCAB


@pytest.mark.parametrize("name", NAMES)
def test_the_network_runs_only_where_something_is_revealed(name):
    """A row's nfe counts the frames that reveal something in it; a row that is given runs no network at all."""
    xt = templates(1)
    frames = run(LEARNED, xt, name)
    steps_with_reveal = sum((frame.changed & ~frame.is_masked).any(-1).long() for frame in frames)
    assert torch.equal(frames[-1].nfe, steps_with_reveal)
    assert frames[-1].nfe[1] == 0 and frames[-1].nfe[0] > 0
    if name == "first_hitting":
        assert torch.equal(frames[-1].nfe, (xt == MASK).sum(-1))
    if name in ("confidence", "margin"):
        assert torch.equal(frames[-1].nfe, (xt == MASK).sum(-1).clamp(max=5))


@pytest.mark.parametrize("name", [name for name in NAMES if "steps" in OPTIONS[name]])
def test_steps_that_change_nothing_are_skipped_without_another_result(name, monkeypatch):
    """The same frames as step by step, also where random numbers are made in many parts."""
    options = OPTIONS[name] | {"steps": 300} | ({"eta": 0.003} if "eta" in OPTIONS[name] else {})
    sampler, xt = build_sampler(name, **options), templates(2, rows=3, length=6)
    monkeypatch.setattr(denoising, "MAX_RANDOM_NUMBERS", 18 * 50)
    skipping = run(LEARNED, xt, sampler, block=4)
    monkeypatch.setattr(denoising, "IDLE_STEPS", 0)
    for frame, expected in zip(skipping, run(LEARNED, xt, sampler, block=4), strict=True):
        assert frame.step == expected.step
        for part in ("tokens", "is_masked", "changed", "nfe"):
            assert torch.equal(getattr(frame, part), getattr(expected, part))


def test_the_number_of_steps_is_bounded_and_many_steps_cost_little():
    for name in ("ancestral", "remask_loop", "dfm", "confidence"):
        with pytest.raises(
            ValueError, match="at most 65,536, got 65,537: use fewer, or the sampler first_hitting"
        ):
            build_sampler(name, steps=65_537)
    frames = run(LEARNED, torch.full((1, 6), MASK), plans.ancestral(65_536))
    assert len(frames) == 65_536 and frames[-1].nfe <= 6
    assert (
        len({id(frame.tokens) for frame in frames}) <= 13
    )  # a frame without a change shares its tensors


PLACES = ([[i] for i in range(ROWS)], [[0, 1, 2], [3, 4, 5], [6, 7]], [[6, 2, 0, 7, 1, 5, 3, 4]])


BLOCKWISE = (
    "remask_loop",
    "remask_conf",
    "first_hitting",
    "confidence",
)  # of each kind of sampler one


@pytest.mark.parametrize(
    ("name", "block"), [*((name, None) for name in NAMES), *((name, 5) for name in BLOCKWISE)]
)
def test_a_rows_text_does_not_depend_on_its_neighbours(name, block):
    """Alone, among others, in another place: the same tokens for the same seed and row number, and the same nfe."""
    for seed, predictor in ((0, LEARNED), (1, TIMED)):
        xt, numbers = templates(seed), torch.arange(ROWS) * 1000 + 7
        same = {"block": block, "sampling": SamplingParams(top_p=0.95)}
        whole = run(predictor, xt, name, rows=numbers, **same)[-1]
        for place in PLACES:
            for rows in place:
                last = run(predictor, xt[rows], name, rows=numbers[rows], **same)[-1]
                assert torch.equal(last.tokens, whole.tokens[rows]), f"rows {rows}"
                assert torch.equal(last.nfe, whole.nfe[rows])
        other = last_tokens(predictor, xt, name, rows=numbers + 1, block=block)
        assert not torch.equal(other, whole.tokens)


@pytest.mark.parametrize("name", NAMES)
def test_positions_that_predict_the_same_are_chosen_alike_in_every_batch(name):
    """Rotary positions are relative: all-hidden positions differ by rounding alone, which must not pick the order."""
    xt = torch.full((ROWS, LENGTH), MASK)
    whole = last_tokens(ROTARY, xt, name)
    for rows in ([0], [3], [2, 1], [5, 6, 7, 0, 4]):
        assert torch.equal(
            last_tokens(ROTARY, xt[rows], name, rows=torch.tensor(rows)), whole[rows]
        )


def test_what_a_grid_leaves_to_the_fill_does_not_shift_other_rows(monkeypatch):
    """The lineage's grid ends before zero: whether a neighbour needs the fill must not move a row's next block."""
    monkeypatch.setattr(plans, "LINEAGE_END", 0.15)
    sampler, xt = build_sampler("ancestral", steps=3, compat=True), templates(3)
    whole = last_tokens(LEARNED, xt, sampler, block=4)
    for row in (0, 2, 3, 4, 5, 6, 7):
        assert torch.equal(
            last_tokens(LEARNED, xt[[row]], sampler, rows=torch.tensor([row]), block=4)[0],
            whole[row],
        )


@pytest.mark.parametrize("method", ["ar", "a2r"])
def test_causal_rows_do_not_depend_on_their_neighbours(method):
    predictor, xt = compile_for_sampling(small_model(method)), templates(0)
    xt[:, 0] = random_tokens(ROWS, 1)[:, 0]
    is_fixed, numbers, same = (
        xt != MASK,
        torch.arange(ROWS) + 50,
        {"sampling": SamplingParams(top_k=6)},
    )
    frames = run(predictor, xt, rows=numbers, is_fixed=is_fixed, **same)
    whole = frames[-1].tokens
    assert (
        all(torch.equal(frame.tokens[is_fixed], xt[is_fixed]) for frame in frames)
        and not (whole == MASK).any()
    )
    for place in PLACES:
        for rows in place:
            part = last_tokens(
                predictor, xt[rows], rows=numbers[rows], is_fixed=is_fixed[rows], **same
            )
            assert torch.equal(part, whole[rows]), f"rows {rows}"
    wide, valid = (
        torch.nn.functional.pad(xt, (0, 4), value=2),
        torch.arange(LENGTH + 4).expand(ROWS, -1) < LENGTH,
    )
    for where in ({"is_fixed": wide != MASK}, {"is_fixed": (wide != MASK) & valid, "valid": valid}):
        tokens = last_tokens(predictor, wide, rows=numbers, **same, **where)
        assert torch.equal(tokens[:, :LENGTH], whole) and (tokens[:, LENGTH:] == 2).all()


@pytest.mark.parametrize("value", [0, 9])
@pytest.mark.parametrize("predictor", [LEARNED, TIMED], ids=["learned", "timed"])
@pytest.mark.parametrize("name", NAMES)
def test_padding_changes_no_text(name, predictor, value):
    """A row padded to a longer length, with `valid`, gets the tokens of the row; the padding stays."""
    xt = templates(4)
    wide = torch.nn.functional.pad(xt, (0, 5), value=value)
    valid = torch.arange(LENGTH + 5).expand(ROWS, -1) < LENGTH
    for block in (None, 4):
        tokens = last_tokens(predictor, wide, name, valid=valid, block=block)
        assert torch.equal(tokens[:, :LENGTH], last_tokens(predictor, xt, name, block=block))
        assert (tokens[:, LENGTH:] == value).all()


@pytest.mark.parametrize("name", ["remask_cap", "remask_rescale"])
def test_no_remasking_is_ancestral(name):
    """η = 0: the same table, and the same tokens from the same seed."""
    for compat in (False, True):
        plan = build_sampler(name, steps=7, eta=0.0, compat=compat)
        plain = build_sampler("ancestral", steps=7, compat=compat)
        for field in ("t", "alpha_t", "alpha_s", "remask_prob", "noise_level"):
            assert torch.equal(getattr(plan, field), getattr(plain, field)), field
        assert torch.equal(
            last_tokens(LEARNED, templates(5), plan), last_tokens(LEARNED, templates(5), plain)
        )


def test_a_loop_without_eta_remasks_nothing():
    plan = build_sampler("remask_loop", steps=20, eta=0.0)
    assert not plan.remask_prob.any()
    assert not torch.equal(plan.alpha_t, build_sampler("ancestral", steps=20).alpha_t)
    inside = (plan.t <= 0.55) & (plan.t - 1 / 20 > 0.05)
    assert all(
        float(step.reveal_prob) < 1e-9
        for step, is_in in zip(plan, inside.tolist(), strict=True)
        if is_in
    )


@pytest.mark.parametrize("compat", [False, True])
@pytest.mark.parametrize(
    "name", ["ancestral", "forward_backward", "remask_cap", "remask_rescale", "remask_loop", "dfm"]
)
def test_tables_hold_probabilities_and_meet_at_their_ends(name, compat):
    """Every step starts where the last one ended (but for the lineage's loop, which leaps), from 0 to 1 visible."""
    for steps in (1, 2, 3, 10, 128):
        plan = build_sampler(name, steps=steps, compat=compat)
        leaps = (
            name == "remask_loop" and compat
        )  # the lineage's, even beyond 1 where the steps are few
        reveal = torch.stack([step.reveal_prob for step in plan])
        for x in (plan.alpha_t, plan.remask_prob, reveal, *([] if leaps else [plan.alpha_s])):
            assert ((x >= 0) & (x <= 1)).all() and x.dtype == torch.float64
        assert plan.alpha_t[0] == 0 and (plan.alpha_s >= plan.alpha_t - 1e-12).all()
        if not leaps:
            torch.testing.assert_close(plan.alpha_s[:-1], plan.alpha_t[1:], atol=1e-12, rtol=0)
        if not compat:
            assert plan.alpha_s[-1] == 1 and plan[-1].reveal_prob == 1
            assert plan.remask_prob[-1] == 0 or steps == 1
        # A time-conditioned network is given how much is visible, on the schedule that it was trained with.
        visible = 1 - plan.t if compat else plan.alpha_t
        torch.testing.assert_close(
            torch.exp(-plan.noise_level), 1e-3 + 0.999 * visible, atol=1e-12, rtol=0
        )


def test_confidence_is_the_probability_of_the_draw(monkeypatch):
    """conf remembers, for every visible token, what the network gave it in the state in which it was drawn."""
    xt, seen = templates(7), []

    def spy(remask_prob, confidence, is_hidden):
        seen.append(confidence.clone())
        return confidence_remask_prob(remask_prob, confidence, is_hidden)

    monkeypatch.setattr(denoising, "confidence_remask_prob", spy)
    sampling, before, compared = SamplingParams(temperature=1.3, top_k=4), xt, 0
    frames = run(LEARNED, xt, "remask_conf", sampling=sampling)
    for frame, confidence in zip(frames, seen[1:], strict=False):
        logits = LEARNED.logits_at(LEARNED.predict(before, torch.zeros(ROWS), None))
        law = compute_probs(logits.flatten(0, 1), sampling).view(logits.shape)
        revealed = frame.changed & ~frame.is_masked
        expected = law.gather(-1, frame.tokens[..., None])[..., 0][revealed]
        torch.testing.assert_close(confidence[revealed], expected, atol=1e-5, rtol=0)
        before, compared = frame.tokens, compared + int(revealed.sum())
    assert compared > 20


def record_noise_levels(name, xt):
    """The noise levels that the network is given, (calls, B)."""
    levels = []

    def predict(tokens, level, valid, places):
        levels.append(level.clone())
        return LEARNED.predict(tokens, level, valid)

    sampler, rng = build_sampler(name, **OPTIONS[name]), CounterRng.from_seed(0, len(xt))
    list(denoise(xt, sampler, predict, LEARNED.logits_at, mask_id=MASK, rng=rng))
    return torch.stack(levels)


@pytest.mark.parametrize("name", ["confidence", "margin"])
def test_the_noise_level_of_an_order_is_the_share_that_is_hidden(name):
    expected = -torch.log(1 - 0.999 * torch.tensor([[1.0], [0.8], [0.6], [0.4], [0.2]]))
    levels = record_noise_levels(name, torch.full((1, 10), MASK))
    torch.testing.assert_close(levels, expected, atol=1e-4, rtol=1e-5)


def test_first_hitting_times_are_those_of_uniform_arrivals():
    """The k-th of n reveals comes, on average, at t = (n + 1 - k) / (n + 1), and times fall."""
    rows, n = 4000, 4
    time = (
        1 - torch.exp(-record_noise_levels("first_hitting", torch.full((rows, n), MASK)).double())
    ) / 0.999
    assert (time[1:] < time[:-1]).all() and (time < 1).all() and (time > 0).all()
    expected = torch.arange(n, 0, -1, dtype=torch.float64) / (n + 1)
    error = (expected * (1 - expected) / (n + 2) / rows).sqrt()
    assert ((time.mean(1) - expected).abs() < 4 * error).all()


def test_a_row_that_is_all_hidden_shares_out_nothing():
    confidence = torch.tensor([[0.9, 0.1, 0.5], [0.0, 0.0, 0.0]], dtype=torch.float64)
    is_hidden = torch.tensor([[False, False, True], [True, True, True]])
    shared = confidence_remask_prob(torch.tensor(0.4, dtype=torch.float64), confidence, is_hidden)
    assert torch.equal(shared[1], torch.zeros(3, dtype=torch.float64))
    assert float(shared[0].sum()) == pytest.approx(0.4)
    assert shared[0, 1] > shared[0, 0] and shared[0, 2] == 0


@pytest.mark.parametrize("setting", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-9}], ids=str)
@pytest.mark.parametrize("name", ["confidence", "margin", "entropy_bounded"])
def test_without_chance_the_seed_does_not_matter(name, setting):
    xt, sampling = templates(6), SamplingParams(**setting)
    one, other = (last_tokens(LEARNED, xt, name, seed=seed, sampling=sampling) for seed in (1, 2))
    assert torch.equal(one, other)
    first = run(LEARNED, xt, name, sampling=sampling)[0]
    with torch.no_grad():
        best = LEARNED.logits_at(LEARNED.predict(xt, torch.zeros(ROWS), None)).argmax(-1)
    assert torch.equal(first.tokens[first.changed], best[first.changed])


def test_tokens_of_any_layout_and_type_are_taken():
    xt = templates(4)
    expected = last_tokens(LEARNED, xt, "ancestral")
    assert torch.equal(last_tokens(LEARNED, xt.t().contiguous().t(), "ancestral"), expected)
    assert torch.equal(last_tokens(LEARNED, xt.int(), "ancestral"), expected)


@pytest.mark.parametrize("name", NAMES)
def test_there_is_always_a_frame(name):
    xt = torch.zeros(2, LENGTH, dtype=torch.long)
    for block in (None, 4):
        last = run(LEARNED, xt, name, block=block)[-1]
        assert torch.equal(last.tokens, xt) and not last.nfe.any()
    last = run(compile_for_sampling(small_model("ar")), xt, is_fixed=torch.ones_like(xt).bool())[-1]
    assert torch.equal(last.tokens, xt) and not last.is_masked.any()


def test_rows_may_be_at_different_times():
    """A transition of (B, 1) columns gives every row what it gets alone with its own times."""
    plan, xt = build_sampler("remask_cap", steps=6, eta=0.3), templates(5)[:2]
    columns = [
        torch.stack([plan[2].__dict__[k], plan[4].__dict__[k]])[:, None] for k in plan[2].__dict__
    ]

    def step_once(rows, transition):
        x, rng, network = (
            xt[rows],
            CounterRng.from_seed(7, torch.tensor(rows)),
            (TIMED.predict, TIMED.logits_at, MASK),
        )
        state = SamplerState(
            x.clone(), x == MASK, torch.ones_like(x).bool(), *network, rng, SamplingParams()
        )
        return reverse_step(state, transition, SamplingParams()).tokens

    together = step_once([0, 1], plans.Transition(*columns))
    for row, step in ((0, 2), (1, 4)):
        assert torch.equal(step_once([row], plan[step])[0], together[row])


XT = templates(0)
ALL_FIXED = torch.ones_like(XT, dtype=torch.bool)


@pytest.mark.parametrize(
    ("xt", "changes", "message"),
    [
        (XT, {"is_fixed": ALL_FIXED}, "row 0, position 0 is fixed but holds the mask"),
        (XT, {"block": 0}, "block must be at least 1"),
        (XT, {"sampler": None}, "as a masked model needs"),
        (XT, {"sampler": "ancestral"}, "build_sampler"),
        (torch.full((1, 21), MASK), {}, "this model's rows at most 20"),
    ],
)
def test_wrong_arguments_are_refused(xt, changes, message):
    with pytest.raises(ValueError, match=message):
        next(stream_tokens(LEARNED, xt, **({"sampler": plans.ancestral(6), "seed": 0} | changes)))


def test_models_that_cannot_be_sampled_are_refused():
    broken = small_model()
    broken.head.bias.data[0] = torch.nan
    with pytest.raises(ValueError, match=r"head.bias: training of this model has diverged"):
        compile_for_sampling(broken)
