"""The forward process q(xt | x0): every token is hidden with probability 1 - alpha(t), independently."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from adlm.diffusion import schedules
from adlm.diffusion.anchors import ANCHOR_SCOPES, AnchorRule, anchor_weight, apply_scope
from adlm.diffusion.rng import CounterRng, Purpose
from adlm.diffusion.schedules import LogLinear, NoiseSchedule
from adlm.errors import check_known

MIN_TIME = 1e-3


def stratify_times(
    u: Tensor, index: Tensor | None = None, total: int | None = None, eps: float = MIN_TIME
) -> Tensor:
    """Draw stratified (antithetic) times t_i = (u_i + i) / n mod 1, scaled to [eps, 1)."""
    # `index` and `total`: places in a larger batch, which is split over processes.
    n = total or u.shape[0]
    i = torch.arange(u.shape[0], device=u.device) if index is None else index
    return (1 - eps) * ((u / n + i / n) % 1) + eps


def draw_bell_times(t: Tensor, std: float, eps: float) -> tuple[Tensor, Tensor]:
    """Map uniform times in [eps, 1) to those of a normal around 1/2, cut to [eps, 1): the times and their density."""
    normal = torch.distributions.Normal(torch.tensor(0.5, dtype=torch.float64), std)
    low, high = normal.cdf(torch.tensor([eps, 1.0], dtype=torch.float64))
    times = normal.icdf(low + (t.double() - eps) / (1 - eps) * (high - low)).clamp(eps, 1.0)
    return times, normal.log_prob(times).exp() * (1 - eps) / (high - low)


def mask_tokens(
    x0: Tensor, hidden_prob: Tensor, u: Tensor, mask_id: int, is_fixed: Tensor | None = None
) -> Tensor:
    """Hide each token with its row's probability (B,), except at `is_fixed` positions (prompts, padding)."""
    is_hidden = u < hidden_prob[:, None]
    if is_fixed is not None:
        is_hidden &= ~is_fixed
    return torch.where(is_hidden, mask_id, x0)


@dataclass(frozen=True)
class Selection:
    """Positions of a flattened batch and their weights, padded (weight 0, position 0) to few sizes."""

    index: Tensor  # (N,)
    weight: Tensor  # (N,)


def select(is_selected: Tensor, weight: Tensor, multiple: int = 1) -> Selection:
    """Select the positions of a (B, L) mask with their row's weight (B,); their number is rounded up to a multiple."""
    index = is_selected.reshape(-1).nonzero()[:, 0]
    chosen = weight[index // is_selected.shape[1]]
    pad = -index.numel() % multiple
    return Selection(F.pad(index, (0, pad)), F.pad(chosen, (0, pad)))


@dataclass(frozen=True)
class NoisyBatch:
    """A batch after the forward process: the network's input, its targets and where they count."""

    x0: Tensor  # (B, L): the targets
    xt: Tensor  # (B, L): the network's input
    t: Tensor  # (B,)
    noise_level: Tensor  # (B,)
    hidden: Selection  # where the targets are predicted
    anchors: Selection | None
    tokens: Tensor  # (), float: how many tokens the mean is over; a loss of several means has as many counts
    valid: Any = None  # (B, L): what attention may read, or a tuple that the model takes instead; None is everything
    is_causal: bool = False  # for a causal model: xt is what comes before x0
    # (B,): of t, relative to uniform times; the weights are divided by it.
    density: Tensor | None = None
    anchor_weight: float | None = None  # gamma, in the loss of training; None: no anchor term

    def to(self, device: torch.device | str) -> Self:
        """Copy the batch to another device without waiting: to a GPU through page-locked memory."""

        def copy(value: Any) -> Any:
            if isinstance(value, NoisyBatch):
                return value.to(device)
            if isinstance(value, Selection):
                return Selection(copy(value.index), copy(value.weight))
            # A named tuple is one of tensors; a plain one has numbers.
            if isinstance(value, tuple) and hasattr(value, "_fields"):
                return type(value)(*map(copy, value))
            if not isinstance(value, Tensor):
                return value
            is_pinned = value.is_cpu and torch.device(device).type == "cuda"
            return (value.pin_memory() if is_pinned else value).to(device, non_blocking=True)

        return replace(self, **{f.name: copy(getattr(self, f.name)) for f in fields(self)})


@dataclass(frozen=True)
class ForwardProcess:
    """How text is corrupted (the paper's forward process) and which of its positions carry loss."""

    mask_id: int | None  # None: a causal model without a mask, whose batches `shift_tokens` makes
    schedule: NoiseSchedule = field(default_factory=LogLinear)
    anchor_rule: AnchorRule | None = None
    anchor_scope: str = "all"
    # The lineage's LM1B: padding is read, masked and counted for anchors like text.
    attend_padding: bool = False
    # Of discrete time (alpha must be 1 at time 0, or a reconstruction term is missing).
    steps: int | None = None
    time_std: float | None = None  # of times around 1/2; None: uniform times
    multiple: int = 1  # what the sizes of selections are rounded up to: GPUs like round sizes
    anchor_weight: float = 3e-3  # the peak of gamma, the weight of the anchor term
    ramp_steps: int | None = None  # gamma is at most step / ramp_steps; None: always at its peak
    # Makes what the network takes instead of `valid`.
    arrange_valid: Callable[[Tensor], Any] | None = None

    def __post_init__(self) -> None:
        check_known("anchor_scope", self.anchor_scope, ANCHOR_SCOPES)


def corrupt(
    x0: Tensor,
    process: ForwardProcess,
    rng: CounterRng,
    step: int,
    *,
    index: Tensor | None = None,
    total: int | None = None,
    valid: Tensor | None = None,
    is_fixed: Tensor | None = None,
) -> NoisyBatch:
    """Run the forward process q(xt | x0) on a batch (B, L): draw times, hide tokens, find where the losses look.

    Everything follows from (seed, row, step) and the row's place in the whole batch (`index` of `total`): the noise is
    the same however the batch is split.
    """
    mask_id, schedule = process.mask_id, process.schedule
    if mask_id is None:
        raise ValueError(
            "mask_id is None: hiding tokens needs a mask token; use shift_tokens for a causal model"
        )
    if x0.is_cuda:
        raise ValueError(
            "x0 is on a GPU: corrupt takes tokens on the CPU; move its result with .to(device)"
        )
    u = rng.uniform(step, 1, Purpose.TIME)[:, 0]
    density, eps = None, MIN_TIME if process.steps is None else 0.0
    times = stratify_times(u, index, total, eps)
    if process.time_std is not None:
        times, density = draw_bell_times(times, process.time_std, eps)
    if process.steps is None:
        t = times.float()
        weight = schedules.loss_weight(schedule, t)
    else:
        t = schedules.discrete_time(times, process.steps).float()
        weight = schedules.discrete_loss_weight(schedule, t, process.steps)
    weight = weight if density is None else (weight / density).float()
    u = rng.uniform(step, x0.shape[1], Purpose.MASK)
    unmaskable = is_fixed
    if valid is not None and not process.attend_padding:
        unmaskable = ~valid if is_fixed is None else is_fixed | ~valid
    xt = mask_tokens(x0, 1 - schedule.alpha(t.double()), u, mask_id, unmaskable)
    level = schedules.noise_level(schedule, t)
    batch = collect_batch(x0, xt, t, weight, level, process, valid=valid, is_fixed=is_fixed)
    gamma = None
    if process.anchor_rule is not None:
        gamma = anchor_weight(step, process.ramp_steps, process.anchor_weight)
    density = None if density is None else density.float()
    return replace(batch, density=density, anchor_weight=gamma)


def collect_batch(
    x0: Tensor,
    xt: Tensor,
    t: Tensor,
    weight: Tensor,
    level: Tensor,
    process: ForwardProcess,
    *,
    valid: Tensor | None = None,
    is_fixed: Tensor | None = None,
) -> NoisyBatch:
    """Make a batch of text whose hidden tokens are known: find the positions and weights of its losses."""
    is_mask: Tensor = x0 == process.mask_id  # type: ignore[assignment]
    is_hidden: Tensor = xt == process.mask_id  # type: ignore[assignment]
    if (is_mask := is_mask if valid is None else is_mask & valid).any():
        row, position = is_mask.nonzero()[0].tolist()
        raise ValueError(
            f"row {row} holds the mask id {process.mask_id} as text at position {position}: a hidden token would have "
            "no target. Give the model a mask id that the tokenizer never produces"
        )
    counted = torch.ones_like(is_hidden) if valid is None else valid
    if is_fixed is not None:
        counted = counted & ~is_fixed
    _require_tokens(counted)
    read: Any = None if process.attend_padding else valid
    anchors = None
    if process.anchor_rule is not None:
        is_anchor = apply_scope(process.anchor_rule(x0, read), is_hidden, process.anchor_scope)
        anchors = select(is_anchor & counted, weight, process.multiple)
    hidden = select(is_hidden & counted, weight, process.multiple)
    if read is not None and process.arrange_valid is not None:
        read = process.arrange_valid(read)
    return NoisyBatch(x0, xt, t, level, hidden, anchors, counted.sum().float(), valid=read)


def shift_tokens(
    x0: Tensor,
    *,
    anchor_rule: AnchorRule | None = None,
    valid: Tensor | None = None,
    multiple: int = 1,
) -> NoisyBatch:
    """Make the batch of a causal model: every next token is a target of weight 1."""
    ones = torch.ones(x0.shape[0], device=x0.device)
    counted = torch.ones_like(x0[:, 1:], dtype=torch.bool) if valid is None else valid[:, 1:]
    _require_tokens(counted)
    anchors = None
    if anchor_rule is not None:
        anchors = select(anchor_rule(x0, valid)[:, 1:] & counted, ones, multiple)
    hidden, tokens = select(counted, ones, multiple), counted.sum().float()
    return NoisyBatch(
        x0[:, 1:], x0[:, :-1], ones, 0 * ones, hidden, anchors, tokens, is_causal=True
    )


def _require_tokens(counted: Tensor) -> None:
    if not bool(counted.any()):
        raise ValueError(
            "all positions of this batch are padding or fixed: leave at least one token to predict"
        )
