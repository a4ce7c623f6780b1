"""Laws of sampling: prompts stay, frames say what happened, plans are probabilities, draws are exact."""

import pytest
import torch

from adlm.diffusion import plans, samplers
from adlm.diffusion.categorical import SamplingParams
from adlm.diffusion.plans import confidence_remask_prob
from adlm.diffusion.samplers import SAMPLERS, build_sampler
from adlm.diffusion.sampling import Row, sample, sample_together
from adlm.models.evaluator import build_evaluator
from tests.world import MASK, OPTIONS, VOCAB, compute_probs, fill, random_tokens, small_model

LENGTH, ROWS = 14, 8
NAMES = tuple(SAMPLERS)
LEARNED = build_evaluator(small_model(positions="learned"))
ROTARY = build_evaluator(small_model())
TIMED = build_evaluator(small_model(positions="learned", time_conditioning=True))


def templates(seed, rows=ROWS, length=LENGTH):
    """Rows with holes: all hidden, nothing hidden, a prompt, and holes of every density."""
    rng = torch.Generator().manual_seed(seed)
    is_hidden = torch.rand(rows, length, generator=rng) < torch.linspace(0.1, 1, rows)[:, None]
    is_hidden[0], is_hidden[1], is_hidden[2] = True, False, torch.arange(length) >= 5
    return torch.where(is_hidden, MASK, random_tokens(rows, length, seed=seed))


def build(sampler):
    """A sampler by its name has the options of tests.world."""
    return build_sampler(sampler, **OPTIONS[sampler]) if isinstance(sampler, str) else sampler


def run(evaluator, xt, sampler, seed=3, **options):
    """The frames of all rows, before the first step too."""
    sampler = build(sampler)
    rows = [
        Row(x, sampler, seed=seed, number=k, every_step=True, **options) for k, x in enumerate(xt)
    ]
    return list(sample_together(evaluator, rows))


def last_tokens(evaluator, xt, sampler, seed=3, **options):
    return fill(evaluator, xt, build(sampler), seed=seed, **options)


@pytest.mark.parametrize("name", NAMES)
def test_prompts_are_never_touched_and_frames_say_what_happened(name):
    """Over random templates: given tokens stand in every frame, the last has no mask, nothing changes unannounced."""
    for seed in range(6):
        xt = templates(seed)
        given, before, was_masked = xt != MASK, xt, xt == MASK
        frames = run(LEARNED, xt, name, seed, block=None if seed % 2 else 5)
        for number, frame in enumerate(frames):
            assert max(frame.steps) == number
            assert torch.equal(frame.tokens[given], xt[given])
            assert torch.equal(frame.is_hidden, frame.tokens == MASK)
            assert torch.equal(frame.changed, was_masked ^ frame.is_hidden)
            assert torch.equal(frame.tokens[~frame.changed], before[~frame.changed])
            before, was_masked = frame.tokens, frame.is_hidden
        assert not frames[-1].is_hidden.any() and all(frames[-1].is_done)
        assert frames[-1].tokens.max() < VOCAB


@pytest.mark.parametrize("name", NAMES)
def test_the_network_runs_only_where_something_is_revealed(name):
    """A row's nfe counts the frames that reveal something in it; a row that is given runs no network at all."""
    xt = templates(1)
    frames = run(LEARNED, xt, name)
    steps_with_reveal = sum((frame.changed & ~frame.is_hidden).any(-1).long() for frame in frames)
    nfe = torch.tensor(frames[-1].nfe)
    assert torch.equal(nfe, steps_with_reveal)
    assert nfe[1] == 0 and nfe[0] > 0
    if name == "first_hitting":
        assert torch.equal(nfe, (xt == MASK).sum(-1))
    if name in ("confidence", "margin"):
        assert torch.equal(nfe, (xt == MASK).sum(-1).clamp(max=5))


def test_the_number_of_steps_is_bounded():
    for name in ("ancestral", "remask_loop", "dfm", "confidence"):
        with pytest.raises(
            ValueError, match="at most 65,536, got 65,537: use fewer, or the sampler first_hitting"
        ):
            build_sampler(name, steps=65_537)


@pytest.mark.parametrize("name", NAMES)
def test_a_rows_text_is_that_of_its_number(name):
    """Alone and among others in another order, the same tokens for the same number, and other ones for another."""
    for seed, evaluator in ((0, LEARNED), (1, TIMED)):
        xt, numbers = templates(seed), torch.arange(ROWS) * 1000 + 7
        same = {"sampling": SamplingParams(top_p=0.95), "block": 5 if seed else None}
        whole = last_tokens(evaluator, xt, name, numbers=numbers, **same)
        for rows in ([6, 2, 0, 7, 1, 5, 3, 4], [3], [0, 4]):
            part = last_tokens(evaluator, xt[rows], name, numbers=numbers[rows], **same)
            assert torch.equal(part, whole[rows])
        assert not torch.equal(last_tokens(evaluator, xt, name, numbers=numbers + 1, **same), whole)


@pytest.mark.parametrize("name", NAMES)
def test_positions_that_predict_the_same_are_chosen_alike_in_every_batch(name):
    """Rotary positions are relative: all-hidden positions differ by rounding alone, which must not pick the order."""
    xt = torch.full((ROWS, LENGTH), MASK)
    whole = last_tokens(ROTARY, xt, name)
    for rows in ([0], [3], [2, 1], [5, 6, 7, 0, 4]):
        part = last_tokens(ROTARY, xt[rows], name, numbers=torch.tensor(rows))
        assert torch.equal(part, whole[rows])


def test_what_a_grid_leaves_to_the_fill_does_not_shift_other_rows(monkeypatch):
    """The lineage's grid ends before zero: whether a neighbour needs the fill must not move a row's next block."""
    monkeypatch.setattr(plans, "LINEAGE_END", 0.15)
    sampler, xt = build_sampler("ancestral", steps=3, compat=True), templates(3)
    whole = last_tokens(LEARNED, xt, sampler, block=4)
    for row in range(ROWS):
        alone = last_tokens(LEARNED, xt[[row]], sampler, numbers=torch.tensor([row]), block=4)
        assert torch.equal(alone[0], whole[row])


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
    xt, seen = templates(7)[2:], []

    def spy(remask_prob, confidence, is_hidden):
        seen.append(confidence.clone())
        return confidence_remask_prob(remask_prob, confidence, is_hidden)

    monkeypatch.setattr(samplers, "confidence_remask_prob", spy)
    sampling, before, compared = SamplingParams(temperature=1.3, top_k=4), xt, 0
    frames = run(LEARNED, xt, "remask_conf", sampling=sampling)
    for frame, confidence in zip(frames[1:], seen[1:], strict=False):
        with torch.no_grad():
            logits = LEARNED.logits_at(LEARNED.features(before, torch.zeros(len(xt))))
        law = compute_probs(logits.flatten(0, 1), sampling).view(logits.shape)
        revealed = frame.changed & ~frame.is_hidden
        expected = law.gather(-1, frame.tokens[..., None])[..., 0][revealed]
        torch.testing.assert_close(confidence[revealed], expected, atol=1e-5, rtol=0)
        before, compared = frame.tokens, compared + int(revealed.sum())
    assert compared > 20


def record_noise_levels(name, xt):
    """The noise levels that the network is given, (calls, B)."""
    evaluator, levels = build_evaluator(small_model(positions="learned")), []
    features = evaluator.features

    def spy(tokens, level, *others):
        levels.append(level.clone())
        return features(tokens, level, *others)

    evaluator.features = spy
    for _ in sample(evaluator, [Row(x, build(name), number=k) for k, x in enumerate(xt)]):
        pass
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
    first = run(LEARNED, xt, name, sampling=sampling)[1]
    with torch.no_grad():
        best = LEARNED.logits_at(LEARNED.features(xt, torch.zeros(ROWS))).argmax(-1)
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
        frames = run(LEARNED, xt, name, block=block)
        assert len(frames) > 1 and torch.equal(frames[-1].tokens, xt) and not any(frames[-1].nfe)


def test_models_that_cannot_be_sampled_are_refused():
    broken = small_model()
    broken.head.bias.data[0] = torch.nan
    with pytest.raises(ValueError, match=r"head.bias: training of this model has diverged"):
        build_evaluator(broken)
