"""Objectives: how a batch is corrupted, its loss in training, and the bound by which text is scored.

The losses below them (NELBO, ANELBO, next-token cross-entropy and score entropy) are functions of features, heads and a
batch.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn

from adlm.diffusion.anchors import anchor_weight
from adlm.diffusion.features import FeatureModel, compute_features, find_anchor_head, find_device
from adlm.diffusion.masking import (
    ForwardProcess,
    NoisyBatch,
    Selection,
    collect_batch,
    corrupt,
    shift_tokens,
)
from adlm.diffusion.rng import CounterRng
from adlm.diffusion.schedules import LogLinear, NoiseSchedule, missing_share
from adlm.diffusion.selected import Head, SelectedLoss, selected_loss
from adlm.registry import Registry
from adlm.settings import OptionValue, Settings

MAX_MISSING = 0.01  # of alpha(0) - alpha(1); a bound of a schedule that lacks more is log-linear


class ObjectiveSettings(Settings):
    """The training objective: noise schedule, anchors and their weight in the ANELBO."""

    name: str | None = None
    """The objective: masked, causal, score_entropy, or module:object; by default the method's."""
    schedule: str = "loglinear"
    """The noise schedule: loglinear, cosine, cosine_squared, linear, geometric."""
    schedule_options: dict[str, OptionValue] = Field(default_factory=dict)
    """The schedule's own options, such as eps."""
    anchor_rule: str = "rare_in_sequence"
    """Which tokens are anchors: rare_in_sequence, rare_in_corpus, tf_idf, listed, random, …"""
    max_count: int | None = 5
    """τ of rare_in_sequence and frequent_in_sequence: occurrences in a row."""
    max_fraction: float | None = None
    """Largest share of tokens: rare_in_sequence (with max_count=null), rare_in_corpus."""
    top_fraction: float | None = None
    """Share of anchors in a row: tf_idf."""
    fraction: float | None = None
    """Share of anchors in a row: random."""
    ids: list[int] | None = None
    """Token ids that are anchors: listed."""
    anchor_options: dict[str, OptionValue] = Field(default_factory=dict)
    """The options of an anchor rule of your own."""
    anchor_scope: str = "all"
    """Which anchors count: all, or only hidden ones."""
    anchor_weight: NonNegativeFloat = 3e-3
    """γ: weight of the anchor term."""
    anchor_ramp: bool = True
    """Let γ rise: min(anchor_weight, step / steps)."""
    attend_padding: bool = False
    """Mask padding and attend to it like text, as the lineage does on LM1B."""
    discrete_steps: PositiveInt | None = None
    """Steps of the discrete-time bound; null: continuous time."""
    time_std: PositiveFloat | None = None
    """Standard deviation of training times around 1/2, not of the reported NLL; null: uniform."""


class TrainingRows(Protocol):
    """The rows of a training batch; `adlm.data.batches.Batch` is one."""

    @property
    def tokens(self) -> Tensor: ...  # (n, L)
    @property
    def number(self) -> Tensor: ...  # (n,): row numbers, which key the noise
    @property
    def place(self) -> Tensor: ...  # (n,): positions in the global batch
    @property
    def total(self) -> int: ...  # rows of the global batch
    def valid(self) -> Tensor | None: ...  # (n, L), False at padding


@dataclass(frozen=True)
class ScoredRows:
    """Rows whose bound is evaluated under one noise each, which follows from a seed, their numbers and the draw."""

    x0: Tensor  # (n, L)
    number: Tensor  # (n,)
    place: Tensor  # (n,): their times among `total` strata of the unit interval
    total: int
    draw: int = 0
    valid: Tensor | None = None  # (n, L), False at padding
    is_given: Tensor | None = None  # (n, L): always visible, and not counted
    is_hidden: Tensor | None = None  # (n, L): these tokens are hidden, with weight 1; None: drawn
    is_padded_batch: bool = False  # padding is not the rows' own, and never read


class Loss(NamedTuple):
    """The optimized total = nll + anchor_weight · anchor, apart from the reported nll (the NELBO), in nats per token;
    times that are not uniform reweigh the total."""

    total: Tensor
    nll: Tensor
    anchor: Tensor
    row_nll: Tensor  # (B,), detached: each row's share of nll, summed over its tokens
    row_anchor: Tensor  # (B,), likewise of the anchor term

    def check(self) -> Self:
        """Raise if the loss is not finite, which waits for the device."""
        if not bool(torch.isfinite(self.total)):
            raise FloatingPointError(self.explain())
        return self

    def explain(self, rows: Tensor | None = None) -> str:
        """Name the rows of a loss that is not finite: their places in the batch, or their own numbers."""
        bad = (~torch.isfinite(self.row_nll + self.row_anchor)).nonzero()[:, 0].cpu()
        names = (bad if rows is None else rows.cpu()[bad]).tolist()
        return (
            f"the loss is {self.total.item()} (nll {self.nll.item()}, anchor {self.anchor.item()}); "
            f"rows {names} are not finite. Look at those rows' tokens, then at the learning rate"
        )


class Objective:
    """What a network is trained for. One of your own derives from this class, or from one of those below; a recipe
    makes it of a `ForwardProcess`, which holds the recipe's section `objective`.

    `loss` may run the network several times. `row_nats` must be a bound on -log p(x0), or be exact: perplexities are
    computed from nothing else.
    """

    is_causal: ClassVar[bool] = False  # every next token is predicted, and row_nats is exact
    takes_hidden_sets: ClassVar[bool] = False  # row_nats reads ScoredRows.is_hidden
    is_exact_of_one: ClassVar[bool] = False  # and of one hidden token it is the likelihood itself
    # Modules of the loss, which are trained and checkpointed with the model.
    modules: Mapping[str, nn.Module] = MappingProxyType({})

    @property
    def name(self) -> str:
        """The name in recipes and in a model's config.json: of OBJECTIVES, or `module:object`."""
        kind = type(self)
        names = [name for name, known in OBJECTIVES.items() if known is kind]
        return names[0] if names else f"{kind.__module__}:{kind.__qualname__}"

    @property
    def missing(self) -> float:
        """The share of log(V - 1) that the bound lacks for a network that predicts uniformly."""
        return 0.0

    @property
    def note(self) -> str:
        """What a reader of the bound must know about it; nothing by default."""
        return ""

    def corrupt(self, batch: Any, seed: int, step: int) -> NoisyBatch:
        """Make the network's input and targets of TrainingRows at a step of training."""
        raise NotImplementedError(f"{type(self).__name__} has no corrupt(batch, seed, step)")

    def loss(self, model: FeatureModel, batch: NoisyBatch) -> Loss:
        """Compute the loss of a batch of `corrupt`, without a check: the device is not waited for."""
        raise NotImplementedError(f"{type(self).__name__} has no loss(model, batch)")

    def row_nats(self, model: FeatureModel, rows: ScoredRows, seed: int) -> Tensor:
        """Return each row's nats (n,) under one draw of noise, summed over its counted tokens."""
        raise NotImplementedError(f"{type(self).__name__} has no row_nats(model, rows, seed)")


@dataclass(frozen=True)
class MaskedDiffusion(Objective):
    """The paper's: hidden tokens are restored (NELBO), with an anchor rule under the ANELBO."""

    process: ForwardProcess
    takes_hidden_sets: ClassVar[bool] = True
    is_exact_of_one: ClassVar[bool] = True

    @property
    def missing(self) -> float:
        """What the schedule of the bound leaves out: 1 - (alpha(0) - alpha(1))."""
        return missing_share(bound_schedule(self.process))

    @property
    def note(self) -> str:
        """Where the schedule of training cannot give the bound, and another one was taken."""
        share = missing_share(self.process.schedule)
        if share <= MAX_MISSING:
            return ""
        return f"evaluated log-linearly, because the schedule of training lacks {share:.0%}"

    def corrupt(self, batch: TrainingRows, seed: int, step: int) -> NoisyBatch:
        """Hide tokens at stratified times."""
        rng = CounterRng.from_seed(seed, batch.number)
        return corrupt(
            batch.tokens,
            self.process,
            rng,
            step,
            index=batch.place,
            total=batch.total,
            valid=batch.valid(),
        )

    def loss(self, model: FeatureModel, batch: NoisyBatch) -> Loss:
        """Compute the NELBO or the ANELBO."""
        return training_loss(model, batch, anchor_weight=batch.anchor_weight, check=False)

    def row_nats(self, model: FeatureModel, rows: ScoredRows, seed: int) -> Tensor:
        """Return each row's NELBO without an anchor term (Eq. 4)."""
        return self.bound(model, self.hide(rows, seed).to(find_device(model))).row_nll

    def bound(self, model: FeatureModel, batch: NoisyBatch) -> Loss:
        """Compute the loss whose expectation is the bound: the NELBO."""
        return training_loss(model, batch, check=False)

    def hide(self, rows: ScoredRows, seed: int) -> NoisyBatch:
        """Run the forward process of the bound on rows that are scored."""
        process = bound_process(self.process)
        if rows.is_padded_batch:
            process = replace(process, attend_padding=False)
        if rows.is_hidden is None:
            return corrupt(
                rows.x0,
                process,
                CounterRng.from_seed(seed, rows.number),
                rows.draw,
                index=rows.place,
                total=rows.total,
                valid=rows.valid,
                is_fixed=rows.is_given,
            )
        assert process.mask_id is not None
        xt = rows.x0.masked_fill(rows.is_hidden, process.mask_id)
        ones = torch.ones(len(xt))
        return collect_batch(
            rows.x0, xt, ones, ones, 0 * ones, process, valid=rows.valid, is_fixed=rows.is_given
        )


@dataclass(frozen=True)
class ScoreEntropy(MaskedDiffusion):
    """SEDD's: the absorbing score entropy, which is at least the NELBO."""

    is_exact_of_one: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.process.anchor_rule is not None:
            raise ValueError("score entropy has no anchor term: leave anchor_rule out")

    def loss(self, model: FeatureModel, batch: NoisyBatch) -> Loss:
        """Compute the score entropy."""
        return self.bound(model, batch)

    def bound(self, model: FeatureModel, batch: NoisyBatch) -> Loss:
        """Compute the score entropy, the bound that SEDD reports."""
        features = compute_features(model, batch.xt, batch.noise_level, valid=batch.valid)
        return score_entropy_loss(
            features.final,
            model.head,
            batch,
            mask_id=model.config.mask_id,
            vocab_size=model.config.vocab_size,
        )


@dataclass(frozen=True)
class NextToken(Objective):
    """AR's: every token is predicted from those before it, with an anchor rule A2R's anchors too."""

    process: ForwardProcess
    is_causal: ClassVar[bool] = True

    def corrupt(self, batch: TrainingRows, seed: int, step: int) -> NoisyBatch:
        """Make every next token a target; nothing is random."""
        process = self.process
        valid = batch.valid()
        noisy = shift_tokens(
            batch.tokens, anchor_rule=process.anchor_rule, valid=valid, multiple=process.multiple
        )
        inputs = None  # what comes after a token is not read, padding neither
        if valid is not None and process.arrange_valid is not None:
            inputs = process.arrange_valid(valid[:, 1:])  # of the tokens that have a next one
        gamma = None
        if process.anchor_rule is not None:
            gamma = anchor_weight(step, process.ramp_steps, process.anchor_weight)
        return replace(noisy, valid=inputs, anchor_weight=gamma)

    def loss(self, model: FeatureModel, batch: NoisyBatch) -> Loss:
        """Compute the cross-entropy of the next tokens, with anchors A2R's."""
        return training_loss(model, batch, anchor_weight=batch.anchor_weight, check=False)

    def row_nats(self, model: FeatureModel, rows: ScoredRows, seed: int) -> Tensor:
        """Return each row's exact nats; the first token is given."""
        counted = rows.valid
        if rows.is_given is not None:
            counted = ~rows.is_given if counted is None else counted & ~rows.is_given
        noisy = shift_tokens(rows.x0, valid=counted).to(find_device(model))
        return training_loss(model, noisy, check=False).row_nll


OBJECTIVES: Registry[Callable[[ForwardProcess], Objective]] = Registry(
    "objective",
    {"masked": MaskedDiffusion, "causal": NextToken, "score_entropy": ScoreEntropy},
)


GivenObjective = Objective | Callable[[ForwardProcess], Objective] | str  # or `module:object`


def choose_objective(
    name: str, process: ForwardProcess, given: GivenObjective | None = None
) -> Objective:
    """Return the objective that a model folder or a recipe names: built in, or from the caller."""
    if name in OBJECTIVES:
        if given is not None and given not in (name, OBJECTIVES[name]):
            raise ValueError(
                f"objective={given!r:.80} was given, and this model has the built-in objective "
                f"{name!r}: leave objective= out, or --objective on the command line"
            )
        return OBJECTIVES[name](process)
    if given is None:
        known = ", ".join(OBJECTIVES)
        raise ValueError(
            f"the objective {name!r:.80} is not built in (expected {known}), and a model folder "
            "imports nothing: if you trust its code, give objective=MODULE:OBJECT, "
            "or --objective MODULE:OBJECT on the command line"
        )
    found: Any = OBJECTIVES.resolve(given, allow_import=True) if isinstance(given, str) else given
    return found if isinstance(found, Objective) else found(process)


def default_objective(model: FeatureModel) -> Objective:
    """Return the paper's objective for a network that names none: next tokens, or hidden ones."""
    process = ForwardProcess(model.config.mask_id)
    return NextToken(process) if model.config.is_causal else MaskedDiffusion(process)


def bound_process(process: ForwardProcess) -> ForwardProcess:
    """Return the forward process under which text is scored: that of training, with uniform times and no anchors.

    The bound of continuous time does not depend on the schedule, if it ends where nothing is visible. One that lacks
    more than MAX_MISSING would be no bound, and is replaced by the log-linear one.
    """
    return replace(
        process,
        schedule=bound_schedule(process),
        anchor_rule=None,
        time_std=None,
        multiple=1,
        arrange_valid=None,
    )


def bound_schedule(process: ForwardProcess) -> NoiseSchedule:
    """Return the schedule under which text is scored."""
    return LogLinear() if missing_share(process.schedule) > MAX_MISSING else process.schedule


def training_loss(
    model: FeatureModel,
    batch: NoisyBatch,
    *,
    anchor_weight: float | Tensor | None = None,
    check: bool = True,
) -> Loss:
    """Compute a model's loss on a batch of `corrupt` (masked models) or `shift_tokens` (causal ones).

    `check` raises if the loss is not finite, which waits for the device.
    """
    if batch.is_causal != model.config.is_causal:
        raise ValueError(
            "a masked model learns from batches of `corrupt`, a causal one from batches of `shift_tokens`"
        )
    features = compute_features(model, batch.xt, batch.noise_level, valid=batch.valid)
    loss = diffusion_loss(
        features.final,
        model.head,
        batch,
        mask_id=model.config.mask_id,
        anchor=features.anchor,
        anchor_head=find_anchor_head(model),
        anchor_weight=anchor_weight,
    )
    return loss.check() if check else loss


def diffusion_loss(
    final: Tensor,
    head: Head,
    batch: NoisyBatch,
    *,
    mask_id: int | None,
    anchor: Tensor | None = None,
    anchor_head: Head | None = None,
    anchor_weight: float | Tensor | None = None,
    offset: float | None = None,
) -> Loss:
    """Compute the NELBO or, with an `anchor_weight` (gamma), the ANELBO: the mean over tokens of

        w(t) [ 1{hidden} · -log p_denoiser(x) + gamma · 1{anchor} · -log softmax(anchor logits)[x] ],

    w(t) = -alpha'(t) / (1 - alpha(t)). gamma = 0 gives the NELBO. The heads are applied only at those positions; a
    batch of `shift_tokens` gives the losses of AR and A2R.
    """
    total, nll, row_nll = _mean_loss(
        final, head, batch, batch.hidden, without=mask_id, offset=offset
    )
    mean_anchor, row_anchor = torch.zeros_like(nll), torch.zeros_like(row_nll)
    if anchor_weight is not None:
        if anchor is None or anchor_head is None or batch.anchors is None:
            raise ValueError(
                "anchor_weight needs a two-stage model (anchor features and head) and a batch made with an anchor_rule"
            )
        total_anchor, mean_anchor, row_anchor = _mean_loss(
            anchor, anchor_head, batch, batch.anchors
        )
        total = (
            total + anchor_weight * total_anchor
        )  # at weight 0 too: every parameter stays in the graph
    return Loss(total, nll, mean_anchor, row_nll, row_anchor)


def score_entropy_loss(
    final: Tensor,
    head: Head,
    batch: NoisyBatch,
    *,
    mask_id: int,
    vocab_size: int,
) -> Loss:
    """Compute SEDD's absorbing score entropy, for a head whose exp(logit) / (V - 1) is the score · (e^noise_level - 1).

    Its weighted form collapses to w(t) [ exp(lse - c) - z_x + c - 1 ] with c = log(V - 1): the NELBO's
    cross-entropy plus a penalty that holds the logits' mass at V - 1, where the two are equal.
    """
    offset = math.log(vocab_size - 1)
    return diffusion_loss(final, head, batch, mask_id=mask_id, offset=offset)


def token_nll(selected: SelectedLoss, selection: Selection, shape: torch.Size) -> Tensor:
    """Return each token's weighted loss (B, L), zero where nothing was selected."""
    weighted = torch.where(selection.weight > 0, selected.each * selection.weight, 0.0)
    flat = torch.zeros(shape.numel(), device=weighted.device, dtype=weighted.dtype)
    return flat.index_add_(0, selection.index, weighted).view(shape)


def _mean_loss(
    features: Tensor, head: Head, batch: NoisyBatch, where: Selection, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean over the batch's tokens of a head's loss at a selection, as it is optimized (weights not
    divided by the density of t) and as the NELBO has it, and the latter's sum over each row (detached)."""
    weight = where.weight
    if batch.density is not None:
        weight = weight * batch.density[where.index // batch.x0.shape[1]]
    share = Selection(where.index, weight / batch.tokens)
    loss = selected_loss(features, head, batch.x0, share, **options)
    rows = token_nll(loss, where, batch.x0.shape).sum(-1).detach()
    return loss.total, loss.total if weight is where.weight else rows.sum() / batch.tokens, rows
