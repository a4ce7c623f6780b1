"""The samplers of Algorithm 1 as tables of (alpha_t, alpha_s, sigma_t), with sigma_t called remask_prob here.

Going from t to s, a hidden token is revealed with probability (alpha_s - (1 - sigma_t) alpha_t) / (1 - alpha_t), and
a visible token is hidden again with probability sigma_t (`sampling.list_changes`). A plan is the list of its
transitions: it can be printed, plotted and tested before any network runs.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from adlm.settings import BuiltSampler

EPS = 1e-3  # of the training schedule alpha = 1 - (1 - EPS) t
LINEAGE_END = 1e-5  # where the time grid of MDLM and ReMDM ends
MAX_STEPS = 65_536
DERIVED = ("table", "reveal_prob", "hides_until", "_content")  # what a plan keeps of its columns


@dataclass(frozen=True)
class Transition:
    """One step from t to s; each field is broadcastable to (B, L), so rows and tokens may differ."""

    t: Tensor
    alpha_t: Tensor
    alpha_s: Tensor
    remask_prob: Tensor
    noise_level: Tensor

    @property
    def reveal_prob(self) -> Tensor:
        """The probability (alpha_s - (1 - sigma_t) alpha_t) / (1 - alpha_t) that a hidden token is revealed."""
        reveal = (self.alpha_s - (1 - self.remask_prob) * self.alpha_t) / (1 - self.alpha_t)
        return torch.where(
            self.alpha_t < 1, reveal.clamp(0, 1), 1.0
        )  # where all should be visible, reveal all


@dataclass(frozen=True, eq=False)
class Plan(BuiltSampler):
    """A table of transitions, each column float64 (steps,), and how tokens are drawn."""

    reads_last_prob: ClassVar[bool] = False

    name: str
    t: Tensor
    alpha_t: Tensor
    alpha_s: Tensor
    remask_prob: Tensor
    noise_level: Tensor
    nucleus: bool = True  # whether top-k, top-p and min-p apply, not the temperature alone
    fill_argmax: bool = False  # compat: what is left hidden by argmax, and the lineage's nucleus

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and other._content == self._content

    def __hash__(self) -> int:
        return hash(self._content)

    def copy(self) -> Self:
        """Return an equal plan whose tensors are its own; what follows from them is computed once."""
        for name in DERIVED:
            getattr(self, name)
        copied = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                vars(copied)[name] = value.clone()
        return copied

    @cached_property
    def table(self) -> Tensor:
        """The columns of the transitions (5, steps)."""
        return torch.stack([getattr(self, column.name) for column in fields(Transition)])

    @cached_property
    def _content(self) -> tuple[object, ...]:
        return self.name, self.nucleus, self.fill_argmax, self.table.numpy().tobytes()

    @cached_property
    def reveal_prob(self) -> Tensor:
        """The probability (steps,) that a hidden token is revealed."""
        return self[torch.arange(len(self))].reveal_prob

    @cached_property
    def hides_until(self) -> int:
        """After how many steps nothing is hidden again."""
        return 1 + max(self.remask_prob.nonzero()[:, 0].tolist(), default=-1)

    def __len__(self) -> int:
        return len(self.t)

    def __getitem__(self, step: int | slice | Tensor) -> Transition:
        """Return one step, the steps of a tensor in its shape, or of a slice with fields of shape (k, 1, 1)."""
        columns = self.table[:, step]
        return Transition(*(columns[..., None, None] if isinstance(step, slice) else columns))

    def __iter__(self) -> Iterator[Transition]:
        return (self[step] for step in range(len(self)))

    def __str__(self) -> str:
        head = f"{self.name}: {len(self)} steps\n step      t  alpha_t  alpha_s  remask  reveal"
        rows = (
            f"{i:5d} {x.t:6.4f} {x.alpha_t:8.4f} {x.alpha_s:8.4f} {x.remask_prob:7.4f} {x.reveal_prob:7.4f}"
            for i, x in enumerate(self)
        )
        return "\n".join([head, *rows])


def ancestral(steps: int, *, compat: bool = False) -> Plan:
    """MDLM's ancestral sampler ("locked-in" in the paper): sigma = 0."""
    t, s = _grid(steps, compat)
    return _plan("ancestral", t, 1 - t, 1 - s, torch.zeros_like(t), compat)


def forward_backward(steps: int, *, compat: bool = False) -> Plan:
    """Forward-backward: sigma = (alpha_s - alpha_t) / alpha_t, which hides everything again in the second step."""
    t, s = _grid(steps, compat)
    alpha_t, alpha_s = 1 - t, 1 - s
    remask = torch.where(alpha_t > 0, ((alpha_s - alpha_t) / alpha_t).clamp(max=1), 1.0)
    return _plan("forward_backward", t, alpha_t, alpha_s, remask, compat)


def remask_cap(steps: int, *, eta: float = 0.008, compat: bool = False) -> Plan:
    """ReMDM cap: sigma = min(eta, (1 - alpha_s) / alpha_t)."""
    check_probability("eta", eta)
    t, s = _grid(steps, compat)
    return _plan(
        "remask_cap", t, 1 - t, 1 - s, max_remask_prob(1 - t, 1 - s).clamp(max=eta), compat
    )


def remask_rescale(steps: int, *, eta: float = 0.015, compat: bool = False) -> Plan:
    """ReMDM rescale: sigma = eta min(1, (1 - alpha_s) / alpha_t)."""
    check_probability("eta", eta)
    t, s = _grid(steps, compat)
    return _plan("remask_rescale", t, 1 - t, 1 - s, eta * max_remask_prob(1 - t, 1 - s), compat)


def remask_conf(steps: int, *, compat: bool = False) -> Plan:
    """ReMDM conf: sigma = min(1, (1 - alpha_s) / alpha_t), which `samplers.RemaskByConfidence` splits."""
    t, s = _grid(steps, compat)
    return _plan("remask_conf", t, 1 - t, 1 - s, max_remask_prob(1 - t, 1 - s), compat)


def remask_loop(
    steps: int,
    *,
    eta: float = 0.02,
    t_on: float = 0.55,
    t_off: float = 0.05,
    alpha_on: float = 0.9,
    compat: bool = False,
) -> Plan:
    """ReMDM loop, the paper's sampler: alpha rises to alpha_on at t_on, stays there with sigma = eta until t_off, and
    rises to 1."""
    for name, value in {"eta": eta, "t_on": t_on, "t_off": t_off, "alpha_on": alpha_on}.items():
        check_probability(name, value)
    if not t_off < t_on < 1:
        raise ValueError(f"the loop needs t_off < t_on < 1, got t_off = {t_off} and t_on = {t_on}")
    t, s = _grid(steps, compat)

    def alpha(time: Tensor, phase: Tensor) -> Tensor:
        before = (1 - time) * alpha_on / (1 - t_on)
        after = 1 - time * (1 - alpha_on) / t_off if t_off > 0 else torch.ones_like(time)
        return torch.where(phase > t_on, before, torch.where(phase <= t_off, after, alpha_on))

    in_loop = (t <= t_on) & (t > t_off)
    # The lineage takes both ends of a step from the phase that its start is in, and so leaps where phases meet.
    alpha_t, alpha_s = alpha(t, t), alpha(s, t if compat else s)
    remask = torch.where(in_loop, eta, 0.0).to(t.dtype)
    return _plan("remask_loop", t, alpha_t, alpha_s, remask, compat)


def ddpm(steps: int, *, compat: bool = False) -> Plan:
    """The lineage's `ddpm` sampler: ancestral with alpha = 1 - (1 - eps) t and without nucleus."""
    t, s = _grid(steps, compat)
    alpha_t, alpha_s = 1 - (1 - EPS) * t, 1 - (1 - EPS) * s
    return _plan("ddpm", t, alpha_t, alpha_s, torch.zeros_like(t), compat, nucleus=False)


def dfm(steps: int, *, compat: bool = False) -> Plan:
    """The corrector sampler of discrete flow matching, with alpha = 1 - t and steps that shrink near the ends."""
    check_steps(steps)
    rows, t = [], 1.0
    while t > (1 - LINEAGE_END) / steps:
        dt, remask = dfm_step(t, steps)
        rows.append((t, t - dt, remask))
        t -= dt
    if not compat and t > 0:
        rows.append((t, 0.0, 0.0))
    start, end, back = torch.tensor(rows, dtype=torch.float64).unbind(-1)
    return _plan("dfm", start, 1 - start, 1 - end, back, compat)


def dfm_step(t: float, steps: int) -> tuple[float, float]:
    """Return the width of dfm's step from t and its sigma: the rates are a = 10 t^¼ (1 - t)^¼ + 1 and b = a - 1."""
    if t == 1:
        return 1 / steps, 0.0
    a = 10 * t**0.25 * (1 - t) ** 0.25 + 1
    dt = min(1 / steps, 1 / (a / t + (a - 1) / (1 - t)))
    return dt, (a - 1) * dt / (1 - t)


def confidence_remask_prob(remask_prob: Tensor, confidence: Tensor, is_hidden: Tensor) -> Tensor:
    """Split sigma over a row's visible tokens: softmax of minus the probability that each was drawn with."""
    doubt = (-confidence).masked_fill(is_hidden, -torch.inf)
    return remask_prob * torch.nan_to_num(
        doubt.softmax(-1)
    )  # a row that is all hidden has no visible token


def reverse_distribution(xt: Tensor, probs: Tensor, step: Transition, mask_id: int) -> Tensor:
    """Return the distribution p(x_s | x_t) (B, L, V) of every position after one step, for tests and L_anchor.

    `probs` is the denoiser's prediction; with the anchor network's softmax in its place this is the anchor transition
    r(y_s | z_t, y_phi) (Algorithm 1, line 6).
    """
    is_hidden = (xt == mask_id)[..., None]
    vocab = probs.shape[-1]
    mask, stay = (
        F.one_hot(x, vocab).to(probs.dtype) for x in (torch.tensor(mask_id, device=xt.device), xt)
    )
    reveal, remask = (
        x if x.dim() == 0 else x[..., None] for x in (step.reveal_prob, step.remask_prob)
    )
    return torch.where(
        is_hidden, reveal * probs + (1 - reveal) * mask, (1 - remask) * stay + remask * mask
    )


def _plan(
    name: str,
    t: Tensor,
    alpha_t: Tensor,
    alpha_s: Tensor,
    remask: Tensor,
    compat: bool,
    **flags: bool,
) -> Plan:
    if compat:
        level = mean_noise_level(t)
    else:
        remask = torch.minimum(remask, max_remask_prob(alpha_t, alpha_s))
        level = -torch.log(EPS + (1 - EPS) * alpha_t)  # of the share that is visible
    return Plan(name, t, alpha_t, alpha_s, remask, level, fill_argmax=compat, **flags)


def mean_noise_level(hidden: Tensor) -> Tensor:
    """Return the noise level at which a share `hidden` of the tokens is hidden in training."""
    return -torch.log(1 - (1 - EPS) * hidden)


def max_remask_prob(alpha_t: Tensor, alpha_s: Tensor) -> Tensor:
    """Return the largest sigma_t that still leaves alpha_s visible: min(1, (1 - alpha_s) / alpha_t)."""
    return torch.where(alpha_t > 0, ((1 - alpha_s) / alpha_t).clamp(max=1), 1.0)


def _grid(steps: int, compat: bool) -> tuple[Tensor, Tensor]:
    """Return the times t and s of each step, from 1 to 0 (the lineage: to 1e-5, the rest by argmax)."""
    check_steps(steps)
    times = torch.linspace(1, LINEAGE_END if compat else 0, steps + 1, dtype=torch.float64)
    return times[:-1], times[1:]


def check_steps(steps: int) -> int:
    """Return a number of steps, which must be between 1 and MAX_STEPS."""
    if steps < 1 or steps % 1:
        raise ValueError(f"steps must be at least 1 and whole, got {steps}")
    if steps > MAX_STEPS:
        remedy = "use fewer, or the sampler first_hitting, which is the limit of many steps"
        raise ValueError(f"steps must be at most {MAX_STEPS:,}, got {steps:,}: {remedy}")
    return steps


def check_probability(name: str, value: float) -> None:
    """Raise if a value is not between 0 and 1."""
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must be between 0 and 1, got {value}")
