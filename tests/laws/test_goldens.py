"""Schedules, losses, gradients, bridges, samplers and their trajectories against the authors'."""

import math

import pytest
import torch
from torch import Tensor

from tests.laws import adapter
from tests.laws.adapter import Anchors, Batch, Draw, Table
from tests.laws.goldens import MASK, arrays, facts, model
from tests.laws.world import filter_probs

SCHEDULES = {
    "loglinear": ("loglinear", {}),
    "cosine": ("cosine", {}),
    "cosinesqr": ("cosine_squared", {}),
    "linear_1e-3_7": ("linear", {"low": 1e-3, "high": 7.0}),
    "geometric_1e-3_1": ("geometric", {"low": 1e-3, "high": 1.0}),
    "geometric_1e-4_20": ("geometric", {"low": 1e-4, "high": 20.0}),
}


@pytest.mark.parametrize("case", SCHEDULES)
def test_schedules(case: str) -> None:
    name, options = SCHEDULES[case]
    golden, schedule = arrays("noise_schedules"), adapter.make_schedule(name, **options)
    t = golden["t"]
    torch.testing.assert_close(schedule.alpha(t), golden[f"{case}/alpha"], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(
        schedule.noise_level(t), golden[f"{case}/sigma"], atol=1e-6, rtol=1e-5
    )
    # Below t = 0.05 their float32 loses 1 - alpha to cancellation.
    usable = t >= 0.05
    weight = schedule.loss_weight(t)[usable]
    expected = golden[f"{case}/loss_weight"][usable]
    torch.testing.assert_close(weight, expected, atol=1e-5, rtol=1e-4)
    rate = (-schedule.dalpha(t) / schedule.alpha(t))[usable]
    torch.testing.assert_close(rate, golden[f"{case}/dsigma"][usable], atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("case", SCHEDULES)
def test_dalpha_is_the_derivative_of_alpha(case: str) -> None:
    name, options = SCHEDULES[case]
    schedule = adapter.make_schedule(name, **options)
    t = torch.linspace(0.01, 0.99, 50, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(schedule.alpha(t).sum(), t)
    torch.testing.assert_close(schedule.dalpha(t), slope)


def test_times_are_stratified() -> None:
    golden = arrays("sample_t")
    times = adapter.stratified_times(golden["u"])
    torch.testing.assert_close(times, golden["t_anti1_imp0"])
    # The rows of one process among two get the times that they have in the whole batch.
    half = adapter.stratified_times(golden["u"][4:], index=torch.arange(4, 8), total=8)
    torch.testing.assert_close(half, golden["t_anti1_imp0"][4:])


def test_anchors_and_their_ramp() -> None:
    golden = arrays("loss_adlm_gpt2like")
    for max_count in (0, 1, 5, 10):
        anchors = Anchors("rare_in_sequence", {"max_count": max_count})
        is_anchor = adapter.find_anchors(anchors, golden["x0"])
        assert torch.equal(is_anchor.long(), golden[f"anchor_mask_th{max_count}"])
    for step, gamma in zip(golden["gamma_steps"].tolist(), golden["gamma"].tolist(), strict=True):
        assert adapter.anchor_ramp(step, 1_000_000) == pytest.approx(gamma, rel=1e-9)


def golden_batch(kind: str, multiple: int = 1) -> tuple[dict[str, Tensor], Batch]:
    """Return a golden file of losses and its batch, padding read as the authors read it."""
    golden, schedule = arrays(f"loss_{kind}_gpt2like"), adapter.make_schedule("loglinear")
    t = golden["t"]
    batch = adapter.known_rows(
        golden["x0"],
        golden["xt"],
        MASK,
        t=t,
        weight=schedule.loss_weight(t),
        noise_level=schedule.noise_level(t),
        valid=golden["attention_mask"].bool(),
        anchors=Anchors("rare_in_sequence", {"max_count": 5}),
        attend_padding=True,
        multiple=multiple,
    )
    return golden, batch


def read_gamma(case: str) -> float | None:
    """Return the weight of the anchor term that a golden case names."""
    if "gamma0.5" in case:
        return 0.5
    if "step" in case:
        return adapter.anchor_ramp(int(case.split("step")[1].split("_")[0]), 1_000_000)
    return None


KINDS = ("adlm", "mdlm")
CASES = [(kind, case) for kind in KINDS for case in facts(f"loss_{kind}_gpt2like")["losses"]]


@pytest.mark.parametrize("multiple", [1, 128])
@pytest.mark.parametrize(("kind", "case"), CASES)
def test_losses(kind: str, case: str, multiple: int) -> None:
    golden, batch = golden_batch(kind, multiple)
    ours = model(kind, case.endswith("tc1"))
    loss = adapter.compute_loss(ours, batch, gamma=read_gamma(case))
    torch.testing.assert_close(loss.total.detach(), golden[f"{case}/loss"], atol=1e-4, rtol=1e-5)
    validation = "val_" if kind == "adlm" else ""
    nelbo = golden[f"nelbo_{validation}{case[-3:]}/nlls"]
    mean = nelbo.sum() / golden["attention_mask"].sum()
    torch.testing.assert_close(loss.nll, mean, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(loss.row_nll, nelbo.sum(-1), atol=1e-3, rtol=1e-5)


def test_discrete_time() -> None:
    golden, _ = golden_batch("adlm")
    schedule = adapter.make_schedule("loglinear")
    t = adapter.discretize_times(golden["t"], 100)
    torch.testing.assert_close(t, golden["discrete_T100/t_used"])
    batch = adapter.known_rows(
        golden["x0"], golden["xt"], MASK, t=t,
        weight=schedule.discrete_loss_weight(t, 100), noise_level=golden["sigma"],
    )  # fmt: skip
    with torch.no_grad():
        loss = adapter.compute_loss(model("adlm"), batch)
    expected = golden["discrete_T100/per_token"].sum(-1)
    torch.testing.assert_close(loss.row_nll, expected, atol=1e-3, rtol=1e-4)


GRADIENTS = [
    ("adlm", "anelbo_gamma0.5_tc0"),
    ("adlm", "anelbo_step3000_tc0"),
    ("adlm", "nelbo_train_noanchor_tc0"),
    ("mdlm", "nelbo_tc0"),
]


@pytest.mark.parametrize(("kind", "case"), GRADIENTS)
def test_every_gradient(kind: str, case: str) -> None:
    golden = arrays(f"grads_{kind}_gpt2like_{case}")
    ours = model(kind)
    ours.zero_grad()
    adapter.compute_loss(ours, golden_batch(kind)[1], gamma=read_gamma(case)).total.backward()
    gradients = adapter.gradients_by_author(ours)
    assert gradients.keys() == golden.keys()
    for name, expected in golden.items():
        found = gradients[name]
        assert found is not None, name
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-3)
    ours.zero_grad()


def test_next_token_loss() -> None:
    golden = arrays("ar_gpt2like")
    batch = adapter.next_token_rows(golden["x0"], valid=golden["attention_mask"].bool())
    loss = adapter.compute_loss(model("ar"), batch)
    torch.testing.assert_close(loss.total.detach(), golden["loss"], atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(loss.row_nll, golden["nlls"].sum(-1), atol=1e-3, rtol=1e-5)


def test_the_factored_bridge_is_a_linear_map_of_the_anchor_logits() -> None:
    """Of the raw logits, without a softmax in between: the product of the two matrices."""
    ours = model("adlm")
    anchor_logits, read = adapter.bridge_tokens(ours, arrays("loss_adlm_gpt2like")["xt"])
    torch.testing.assert_close(
        read, adapter.bridge_logits(ours, anchor_logits), atol=1e-5, rtol=1e-5
    )


def test_a_validation_pass() -> None:
    golden, total, tokens = arrays("validation_pass"), 0.0, 0.0
    schedule = adapter.make_schedule("loglinear")
    for i in (0, 1):
        t = golden[f"t{i}"]
        batch = adapter.known_rows(
            golden["x0"], golden[f"xt{i}"], MASK, t=t, weight=schedule.loss_weight(t),
            noise_level=schedule.noise_level(t), valid=golden["attention_mask"].bool(),
            attend_padding=True,
        )  # fmt: skip
        with torch.no_grad():
            loss = adapter.compute_loss(model("adlm"), batch)
        total += float(loss.nll) * batch.tokens
        tokens += batch.tokens
    assert total / tokens == pytest.approx(float(golden["out_nll"]), rel=1e-5)
    assert math.exp(total / tokens) == pytest.approx(float(golden["out_ppl"]), rel=1e-4)


# Samplers

OPTIONS = {
    "mdlm": ("ancestral", {}),
    "forward-backward": ("forward_backward", {}),
    "remdm-cap": ("remask_cap", {"eta": 0.008}),
    "remdm-cap-eta0.3": ("remask_cap", {"eta": 0.3}),
    "remdm-rescale": ("remask_rescale", {"eta": 0.015}),
    "remdm-rescale-eta0.5": ("remask_rescale", {"eta": 0.5}),
    "remdm-conf": ("remask_conf", {}),
    "remdm-loop": ("remask_loop", {"eta": 0.02, "t_on": 0.55, "t_off": 0.05, "alpha_on": 0.9}),
    "ddpm": ("ddpm", {}),
}


def author_table(name: str, steps: int) -> Table:
    """Return the table of a sampler by its name in the authors' code, on their grid."""
    sampler, options = OPTIONS[name]
    table = adapter.plan_table(sampler, steps=steps, compat=True, **options)
    assert table is not None
    return table


def predict_probs(kind: str, is_timed: bool, xt: Tensor, level: Tensor, draw: Draw) -> Tensor:
    """Return p(x0 | xt) of every position after the nucleus."""
    _, logits = adapter.predict(model(kind, is_timed), xt, level)
    logits = logits.double()
    logits[..., MASK] = -torch.inf
    probs = logits.softmax(-1)
    flat = [filter_probs(each, draw) for each in probs.flatten(0, 1)]
    return torch.stack(flat).view(probs.shape)


def reverse_law(xt: Tensor, probs: Tensor, reveal: float, remask: Tensor) -> Tensor:
    """Return p(x_s | x_t) (B, L, V): revealed or hidden again, else as it was."""
    vocab = probs.shape[-1]
    mask = torch.nn.functional.one_hot(torch.tensor(MASK), vocab).double()
    stay = torch.nn.functional.one_hot(xt, vocab).double()
    hidden = reveal * probs + (1 - reveal) * mask
    visible = (1 - remask[..., None]) * stay + remask[..., None] * mask
    return torch.where((xt == MASK)[..., None], hidden, visible)


def share_remasking(table: Table, step: int, xt: Tensor, confidence: Tensor) -> Tensor:
    """Return each position's probability of being hidden again."""
    sigma = table.remask_prob[step]
    if not table.is_by_confidence:
        return sigma.expand(xt.shape)
    doubt = (-confidence).masked_fill(xt == MASK, -torch.inf).softmax(-1)
    return sigma * torch.nan_to_num(doubt)


def author_draw(table: Table, top_p: float) -> Draw:
    """Return the authors' nucleus, where the sampler has one."""
    return Draw(top_p=top_p if table.has_nucleus else 1.0, nucleus="lineage")


@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("name", OPTIONS)
def test_reverse_distributions(name: str, top_p: float) -> None:
    golden, table = arrays(f"reverse_adlm_p{top_p}"), author_table(name, 64)
    xt, confidence = golden["xt"], -golden["conf_in"].double()
    draw = author_draw(table, top_p)
    probs = predict_probs("adlm", False, xt, torch.zeros(len(xt)), draw)
    for i, t in enumerate(golden["t"].double()):
        step = int((table.t - t).abs().argmin())
        assert abs(table.t[step] - t) < 1e-5
        remask = share_remasking(table, step, xt, confidence)
        law = reverse_law(xt, probs, float(table.reveal_prob[step]), remask)
        if table.is_by_confidence:
            torch.testing.assert_close(
                remask.float(), golden[f"{name}/{i}/sigma"], atol=1e-5, rtol=0
            )
            # A hidden position has no share of the remasking.
            reveal = (table.alpha_s[step] - table.alpha_t[step]) / (1 - table.alpha_t[step])
            law = reverse_law(xt, probs, float(reveal), remask)
        torch.testing.assert_close(
            law.float(), golden[f"{name}/{i}/dist"].float(), atol=1e-4, rtol=0
        )


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_reverse_distributions_of_flow_matching(top_p: float) -> None:
    """Its steps depend on where it stands: the rule at each golden time, and the plan's steps."""
    golden = arrays(f"reverse_adlm_p{top_p}")
    xt, draw = golden["xt"], Draw(top_p=top_p, nucleus="lineage")
    probs = predict_probs("adlm", False, xt, torch.zeros(len(xt)), draw)
    for i, t in enumerate(golden["t"].double()):
        width, remask = adapter.flow_step(float(t), 64)
        reveal = (1 - t + width - (1 - remask) * (1 - t)) / t
        share = torch.full(xt.shape, remask, dtype=torch.float64)
        law = reverse_law(xt, probs, min(1.0, float(reveal)), share)
        torch.testing.assert_close(law.float(), golden[f"dfm/{i}/dist"].float(), atol=1e-4, rtol=0)
    table = adapter.plan_table("dfm", steps=64, compat=True)
    assert table is not None
    assert table.t[0] == 1
    for step in range(len(table.t) - 1):
        width, remask = adapter.flow_step(float(table.t[step]), 64)
        assert table.t[step + 1] == pytest.approx(float(table.t[step]) - width, abs=1e-12)
        assert table.remask_prob[step] == pytest.approx(remask, abs=1e-12)


RUNS = facts("trajectory_adlm")["runs"]


@pytest.mark.parametrize("run", RUNS)
def test_trajectories(run: str) -> None:
    """Their noise is a (B, L, V) slab a step, and its argmax includes the mask: drawn so here."""
    golden, info = arrays("trajectory_adlm"), RUNS[run]
    noise, table = arrays("trajectory_noise")["u"], author_table(run.split("_")[0], 32)
    draw, is_timed = author_draw(table, info["nucleus_p"]), info["time_conditioning"]
    xt = torch.full_like(golden[f"{run}/final"], MASK)
    confidence = torch.zeros(xt.shape, dtype=torch.float64)
    for step in range(32):
        level = table.noise_level[step].float().expand(len(xt))
        probs = predict_probs("adlm", is_timed, xt, level, draw)
        remask = share_remasking(table, step, xt, confidence)
        law = reverse_law(xt, probs, float(table.reveal_prob[step]), remask)
        if table.is_by_confidence:
            reveal = (table.alpha_s[step] - table.alpha_t[step]) / (1 - table.alpha_t[step])
            law = reverse_law(xt, probs, float(reveal), remask)
        drawn = (law / (1e-10 - torch.log(noise[step] + 1e-10))).argmax(-1)
        is_certain = law.gather(-1, xt[..., None])[..., 0] == 1
        xs = torch.where(is_certain, xt, drawn)
        revealed = (xt == MASK) & (xs != MASK)
        confidence[revealed] = probs.gather(-1, xs[..., None])[..., 0][revealed]
        xt = xs
        assert torch.equal(xt, golden[f"{run}/x"][step]), f"step {step}"
    level = torch.full((len(xt),), 1e-5)
    likeliest = predict_probs("adlm", is_timed, xt, level, Draw(temperature=0.0)).argmax(-1)
    assert torch.equal(torch.where(xt == MASK, likeliest, xt), golden[f"{run}/final"])


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_autoregressive_sampling(top_p: float) -> None:
    """Their Gumbel noise on our logits; they overwrite the last position by BOS, we never do."""
    golden, x = arrays(f"ar_sample_gpt2like_p{top_p}"), None
    x = golden["x"][:, :1]
    for i in range(14):
        logits = adapter.predict(model("ar"), x)[1][:, -1].double()
        if model("ar").config.mask_id is not None:
            logits[..., MASK] = -torch.inf
        draw = Draw(top_p=top_p, nucleus="lineage")
        law = torch.stack([filter_probs(each, draw) for each in logits.softmax(-1)])
        best = (law.log() + golden["gumbel"][:, i]).argmax(-1, keepdim=True)
        x = torch.cat([x, best], 1)
    assert torch.equal(x, golden["x"][:, :15])


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_the_authors_nucleus_is_drawn_from(top_p: float) -> None:
    """Equally spaced numbers give every token the share that the naive nucleus gives it."""
    golden, draw = arrays(f"reverse_adlm_p{top_p}"), Draw(top_p=top_p, nucleus="lineage")
    xt, n = golden["xt"], 4000
    _, logits = adapter.predict(model("adlm"), xt)
    logits = logits[0, :4].clone()
    logits[..., MASK] = -torch.inf
    u = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    for row in logits:
        tokens, _ = adapter.draw_tokens(row.expand(n, -1), u, draw)
        share = torch.bincount(tokens, minlength=len(row)).double() / n
        expected = filter_probs(row.double().softmax(-1), draw)
        torch.testing.assert_close(share, expected, atol=1.5 / n, rtol=0)
