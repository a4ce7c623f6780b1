"""The one file of the laws that knows the package's modules. Names and meanings here are stable."""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import adlm
from adlm import LM, LanguageModel
from adlm.convert import map_names
from adlm.data.batches import TensorRows
from adlm.data.tokenizers import load_tokenizer
from adlm.diffusion import schedules
from adlm.diffusion.anchors import anchor_weight, apply_scope, build_anchor_rule
from adlm.diffusion.categorical import SamplingParams, draw
from adlm.diffusion.masking import (
    ForwardProcess,
    NoisyBatch,
    collect_batch,
    corrupt,
    shift_tokens,
    stratify_times,
)
from adlm.diffusion.objectives import MaskedDiffusion, ScoreEntropy, training_loss
from adlm.diffusion.plans import Plan, dfm_step
from adlm.diffusion.rng import philox
from adlm.diffusion.samplers import SAMPLERS, LeftToRight, RemaskByConfidence, build_sampler
from adlm.diffusion.sampling import Row, sample, sample_together
from adlm.diffusion.sampling import RunningBatch as Batching
from adlm.diffusion.schedules import SCHEDULES
from adlm.likelihood import NllEstimate, estimate_nll
from adlm.models import evaluator
from adlm.models.folder import LoadedModel
from adlm.models.methods import METHODS, build_config
from adlm.registry import build
from adlm.text.generation import TextRow
from adlm.text.templates import classify_tokens

Options = Mapping[str, Any]


# Models


def is_causal(method: str) -> bool:
    """Return whether a method generates from left to right."""
    return METHODS[method].is_causal


def has_two_stages(method: str) -> bool:
    """Return whether a method has an anchor network."""
    return METHODS[method].two_stages


def make_model(method: str, *, seed: int, scale: float = 1.0, **shape: Any) -> LanguageModel:
    """Make a model in which nothing is zero: predictions are not uniform and differ by context."""
    model = LanguageModel(build_config(method, "nano", **shape), seed=seed)
    rng = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=rng)
            if name.endswith("head.weight"):
                parameter.copy_(noise * 1.5 * scale / model.config.dim**0.5)
            elif name.startswith(("embed", "positions")) or "qkv" in name or "out" in name:
                parameter.copy_(noise * scale)
            else:
                parameter.add_(noise * 0.2 * scale)
    return model.eval()


def silence_mask_of_anchors(model: LanguageModel) -> None:
    """Let the anchor network never name the mask, and the denoiser not hear of it."""
    mask_id = model.config.mask_id
    assert model.anchor_head is not None and model.bridge is not None
    with torch.no_grad():
        model.anchor_head.bias[mask_id] = -1e4
        model.bridge.weight[:, mask_id] = 0


def predict(
    model: LanguageModel,
    tokens: Tensor,
    noise_level: Tensor | None = None,
    valid: Tensor | None = None,
) -> tuple[Tensor | None, Tensor]:
    """Return the logits (B, L, V) of the anchor network, or None, and of the model."""
    with torch.no_grad():
        features = model(tokens, noise_level, valid=valid)
        anchor = None if model.anchor_head is None else model.anchor_head(features.anchor)
        return anchor, model.head(features.final)


def bridge_logits(model: LanguageModel, anchor_logits: Tensor) -> Tensor:
    """Apply the bridge matrix, a linear map V -> dim, to logits of the anchor network."""
    assert model.bridge is not None
    with torch.no_grad():
        return model.bridge(anchor_logits)


def bridge_tokens(model: LanguageModel, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the anchor network's logits of tokens, and what the denoiser gets to read of them."""
    assert model.anchor_head is not None
    with torch.no_grad():
        anchor = model(tokens).anchor
        return model.anchor_head(anchor), model.apply_bridge(anchor)


def load_author_model(
    state: Mapping[str, Tensor], *, heads: int, mask_id: int, time_conditioning: bool = False
) -> LanguageModel:
    """Load weights in the names of the authors' code."""
    return adlm.from_state_dict(
        dict(state), heads=heads, mask_id=mask_id, time_conditioning=time_conditioning
    )


def gradients_by_author(model: LanguageModel) -> dict[str, Tensor | None]:
    """Return every parameter's gradient by its name in the authors' code."""
    parameters = dict(model.named_parameters())
    return {theirs: parameters.pop(ours).grad for theirs, ours in map_names(model.config).items()}


def wrap_model(model: LanguageModel, words: str, method: str, rows: str) -> LM:
    """Return a model with a tokenizer, as `adlm.load` does."""
    loaded = LoadedModel(model, load_tokenizer(words), method, 0, rows)
    return LM(loaded, f"{method}-{rows}", device="cpu")


# Samplers


@dataclass(frozen=True)
class Draw:
    """How a token is drawn; temperature 0 takes the likeliest one."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    nucleus: str = "usual"


@dataclass(frozen=True)
class Table:
    """The steps of a plan from t = 1 on, each column (steps,), and what else belongs to it."""

    t: Tensor
    alpha_t: Tensor
    alpha_s: Tensor
    remask_prob: Tensor
    reveal_prob: Tensor
    noise_level: Tensor
    is_by_confidence: bool
    has_nucleus: bool
    has_lineage_fill: bool  # the last step by argmax, the lineage's nucleus


@dataclass(frozen=True)
class Frame:
    """Rows after a step that was shown: tokens and what is hidden (B, L), evaluations (B,)."""

    step: int
    tokens: Tensor
    is_hidden: Tensor
    changed: Tensor
    nfe: Tensor


def sampler_names() -> list[str]:
    """Return the names of all samplers of masked models."""
    return list(SAMPLERS)


def plan_table(name: str, **options: Any) -> Table | None:
    """Return the table of a sampler that is a plan; None for the others."""
    sampler = build_sampler(name, **options)
    is_by_confidence = isinstance(sampler, RemaskByConfidence)
    plan = sampler.plan if isinstance(sampler, RemaskByConfidence) else sampler
    if not isinstance(plan, Plan):
        return None
    return Table(
        plan.t,
        plan.alpha_t,
        plan.alpha_s,
        plan.remask_prob,
        torch.stack([step.reveal_prob for step in plan]),
        plan.noise_level,
        is_by_confidence,
        plan.nucleus,
        plan.fill_argmax,
    )


def flow_step(t: float, steps: int) -> tuple[float, float]:
    """Return the width and the remasking probability of a step of flow matching at time t."""
    return dfm_step(t, steps)


def sample_frames(
    model: LanguageModel,
    xt: Tensor,
    sampler: str | None,
    options: Options | None = None,
    *,
    seed: int,
    rows: Tensor | None = None,
    draw: Draw | None = None,
    is_fixed: Tensor | None = None,
    valid: Tensor | None = None,
    block: int | None = None,
    banned: Tensor | None = None,
) -> Iterator[Frame]:
    """Fill the masks of xt (B, L), or what is not fixed of a causal model's rows.

    `rows` are the rows' own numbers, `banned` (B, L, V) the tokens that may not stand somewhere.
    """
    how = LeftToRight() if sampler is None else build_sampler(sampler, **(options or {}))
    sampling = SamplingParams(**vars(draw or Draw()))
    shared: dict[str, Any] = {"seed": seed, "block": block, "sampling": sampling}
    kinds = None
    if banned is not None:
        banned, kinds = banned.flatten(0, 1).unique(dim=0, return_inverse=True)
        kinds = kinds.view(xt.shape)
    numbers = range(len(xt)) if rows is None else rows.tolist()
    lengths = [xt.shape[1]] * len(xt) if valid is None else valid.sum(-1).tolist()
    texts = []
    for k, (number, length) in enumerate(zip(numbers, lengths, strict=True)):
        own = dict(shared, number=number)
        if is_fixed is not None:
            own["is_fixed"] = is_fixed[k, :length]
        if kinds is not None:
            own["kinds"] = kinds[k, :length]
        texts.append(Row(xt[k, :length], how, **own))
    if valid is not None:
        texts.append(_make_longer_row(model, xt.shape[1], how, shared))
    frames = sample_together(evaluator.build_evaluator(model), texts, banned=banned)
    next(frames)  # before the first step
    count = len(xt)
    for step, frame in enumerate(frames, start=1):
        tokens = frame.tokens[:count]
        if valid is not None:
            tokens = torch.where(valid, tokens, xt)
        nfe = torch.tensor(frame.nfe[:count])
        yield Frame(step, tokens, frame.is_hidden[:count], frame.changed[:count], nfe)
        if all(frame.is_done[:count]):
            break


def _make_longer_row(
    model: LanguageModel, length: int, sampler: Any, settings: dict[str, Any]
) -> Row:
    """Make a row of which nearly all is hidden: in a batch with it, shorter ones are padded."""
    mask_id = model.config.mask_id
    tokens = torch.full((length,), 0 if model.config.is_causal or mask_id is None else mask_id)
    tokens[0] = 0
    return Row(tokens, sampler, torch.arange(length) == 0, every_step=True, **settings)


@contextmanager
def small_vocabulary() -> Iterator[None]:
    """A context for worlds of few tokens, in which more rows of logits fit into memory.

    There are many rows, each with objects of its own: the collector would look for cycles among
    them again and again, a third of the time.
    """
    usual = evaluator.MAX_LOGIT_ROWS["cpu"]
    evaluator.MAX_LOGIT_ROWS["cpu"] = 4096
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        evaluator.MAX_LOGIT_ROWS["cpu"] = usual


def draw_tokens(logits: Tensor, u: Tensor, how: Draw) -> tuple[Tensor, Tensor]:
    """Draw from logits (N, V) with uniform numbers (N,): the tokens and their probabilities."""
    drawn = draw(logits, u, SamplingParams(**vars(how)))
    return drawn.tokens, drawn.probs


def random_words(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """Return the four words of the counter-based generator."""
    words = [torch.tensor([value]) for value in (*counter, *key)]
    return [int(word) for word in philox(tuple(words[:4]), tuple(words[4:]))]  # type: ignore[arg-type]


# Losses


@dataclass(frozen=True)
class Schedule:
    """A noise schedule and what follows from it, each a function of times."""

    alpha: Callable[[Tensor], Tensor]
    dalpha: Callable[[Tensor], Tensor]
    noise_level: Callable[[Tensor], Tensor]
    loss_weight: Callable[[Tensor], Tensor]
    discrete_loss_weight: Callable[[Tensor, int], Tensor]


@dataclass(frozen=True)
class Anchors:
    """An anchor rule by name, with its options, and the scope of its loss."""

    rule: str
    options: Options = field(default_factory=dict)
    scope: str = "all"


@dataclass(frozen=True)
class Loss:
    """The optimized total, the NELBO and the anchor term per token; the NELBO's sum of each row."""

    total: Tensor
    nll: Tensor
    anchor: Tensor
    row_nll: Tensor


@dataclass(frozen=True)
class Batch:
    """Rows after the forward process: x0, xt (B, L), t (B,), how many count; `raw` is opaque."""

    x0: Tensor
    xt: Tensor
    t: Tensor
    tokens: float
    raw: Any


def make_schedule(name: str, **options: Any) -> Schedule:
    """Make a noise schedule by name."""
    own = build(SCHEDULES, name, options)
    return Schedule(
        own.alpha,
        own.dalpha,
        lambda t: schedules.noise_level(own, t),
        lambda t: schedules.loss_weight(own, t),
        lambda t, steps: schedules.discrete_loss_weight(own, t, steps),
    )


def discretize_times(t: Tensor, steps: int) -> Tensor:
    """Return the ends of the steps into which times fall."""
    return schedules.discrete_time(t, steps)


def stratified_times(u: Tensor, index: Tensor | None = None, total: int | None = None) -> Tensor:
    """Return the times of rows by their uniform numbers (B,) and their places in a larger batch."""
    return stratify_times(u, index, total)


def find_anchors(anchors: Anchors, tokens: Tensor, valid: Tensor | None = None) -> Tensor:
    """Return which tokens (B, L) are anchors."""
    return build_anchor_rule(anchors.rule, **anchors.options)(tokens, valid)


def limit_anchors(is_anchor: Tensor, is_hidden: Tensor, scope: str) -> Tensor:
    """Return which of the anchors carry loss."""
    return apply_scope(is_anchor, is_hidden, scope)


def anchor_ramp(step: int, steps: int) -> float:
    """Return the weight of the anchor term at a step, as the paper ramps it."""
    return anchor_weight(step, steps)


def corrupt_rows(
    x0: Tensor,
    mask_id: int,
    *,
    seed: int,
    step: int,
    rows: Tensor | None = None,
    index: Tensor | None = None,
    total: int | None = None,
    valid: Tensor | None = None,
    is_fixed: Tensor | None = None,
    schedule: str = "loglinear",
    schedule_options: Options | None = None,
    anchors: Anchors | None = None,
    steps: int | None = None,
    time_std: float | None = None,
    attend_padding: bool = False,
) -> Batch:
    """Run the forward process on rows, whose noise follows from (seed, row, step)."""
    process = ForwardProcess(
        mask_id,
        schedule=build(SCHEDULES, schedule, schedule_options or {}),
        steps=steps,
        time_std=time_std,
        attend_padding=attend_padding,
        **_describe_anchors(anchors),
    )
    rng = adlm.CounterRng.from_seed(seed, len(x0) if rows is None else rows)
    places: dict[str, Any] = {"index": index, "total": total}
    return _describe_batch(
        corrupt(x0, process, rng, step, valid=valid, is_fixed=is_fixed, **places)
    )


def known_rows(
    x0: Tensor,
    xt: Tensor,
    mask_id: int,
    *,
    t: Tensor,
    weight: Tensor,
    noise_level: Tensor,
    valid: Tensor | None = None,
    is_fixed: Tensor | None = None,
    anchors: Anchors | None = None,
    attend_padding: bool = False,
    multiple: int = 1,
) -> Batch:
    """Make a batch of rows whose hidden tokens, times and weights are known."""
    process = ForwardProcess(
        mask_id, attend_padding=attend_padding, multiple=multiple, **_describe_anchors(anchors)
    )
    where = {"valid": valid, "is_fixed": is_fixed}
    return _describe_batch(collect_batch(x0, xt, t, weight, noise_level, process, **where))


def next_token_rows(
    x0: Tensor, *, valid: Tensor | None = None, anchors: Anchors | None = None
) -> Batch:
    """Make a causal model's batch: every next token is a target."""
    rule = _describe_anchors(anchors).get("anchor_rule")
    return _describe_batch(shift_tokens(x0, anchor_rule=rule, valid=valid))


def compute_loss(
    model: LanguageModel,
    batch: Batch,
    *,
    gamma: float | None = None,
    is_score_entropy: bool = False,
) -> Loss:
    """Compute a model's loss on a batch; gamma is the weight of the anchor term."""
    if is_score_entropy:
        loss = ScoreEntropy(ForwardProcess(model.config.mask_id)).bound(model, batch.raw)
    else:
        loss = training_loss(model, batch.raw, anchor_weight=gamma)
    return Loss(loss.total, loss.nll.detach(), loss.anchor.detach(), loss.row_nll)


def _describe_anchors(anchors: Anchors | None) -> dict[str, Any]:
    if anchors is None:
        return {}
    rule = build_anchor_rule(anchors.rule, **anchors.options)
    return {"anchor_rule": rule, "anchor_scope": anchors.scope}


def _describe_batch(noisy: NoisyBatch) -> Batch:
    return Batch(noisy.x0, noisy.xt, noisy.t, float(noisy.tokens), noisy)


# Likelihoods


def row_nats(
    model: LanguageModel,
    rows: Tensor,
    *,
    lengths: Tensor | None = None,
    order: str | None = None,
    steps: int | None = None,
    **options: Any,
) -> NllEstimate:
    """Estimate the nats of rows (n, L): `nll`, `stderr`, `noise_stderr`, `tokens`, `row_nats`.

    Options are batch, draws, seed, given_tokens, documents and, without an order, max_rows; `steps`
    are those of the bound of discrete time. Both likelihood and bound are sums over rows.
    """
    objective = None
    if steps is not None:
        objective = MaskedDiffusion(ForwardProcess(model.config.mask_id, steps=steps))
    return estimate_nll(model, TensorRows(rows, lengths), objective, order=order, **options)


# Texts


def plan_texts(
    lm: LM,
    prompt: str | Sequence[str] | None = None,
    *,
    template: Any = None,
    options: Options | None = None,
    **settings: Any,
) -> Any:
    """Check what is to be generated; `options` are those that only the sampler takes."""
    if template is not None:
        return lm.layout_rows(template=template, options=options, **settings)
    return lm.layout_rows(prompt or "", options=options, **settings)


def generate(
    lm: LM, prompt: str | Sequence[str] = "", *, options: Options | None = None, **settings: Any
) -> Any:
    """Generate texts: a list of them with `nfe_each` and `settings`."""
    return lm.generate(prompt, options=options, **settings)


def infill(lm: LM, template: Any, *, options: Options | None = None, **settings: Any) -> Any:
    """Fill the holes of templates: a list of texts with `nfe_each` and `settings`."""
    return lm.infill(template, options=options, **settings)


def fills(output: Any) -> list[list[str]]:
    """Return the generated pieces of each text of `infill`."""
    return [[text for text, is_given in row.pieces if not is_given] for row in output.rows]


def body_options(options: Options) -> dict[str, Any]:
    """Return how the body of a request has a sampler's own options."""
    return {"options": dict(options)}


@dataclass(frozen=True)
class Shown:
    """What a stream shows after a step: texts with blocks for hidden tokens, and evaluations."""

    texts: list[str]
    nfe: list[int]
    ids: list[list[int]]


def stream(
    lm: LM,
    prompt: str | Sequence[str] = "",
    *,
    template: Any = None,
    options: Options | None = None,
    **settings: Any,
) -> list[Shown]:
    """Return all steps of a stream of `generate` or, with a template, of `infill`."""
    steps = lm.stream(prompt, template=template, options=options, **settings)
    return [Shown(each.texts, each.nfe, each.tokens.tolist()) for each in steps]


def banned_tokens(lm: LM) -> list[int]:
    """Return the tokens that no text may hold: the mask and the special ones but for the end."""
    special = classify_tokens(lm.tokenizer).special.nonzero()[:, 0].tolist()
    return sorted({*special, lm.tokenizer.mask_id} - {lm.tokenizer.eos_id})


def hole_lengths(lm: LM, template: Any) -> list[int]:
    """Return the number of tokens that are chosen for each hole of a template."""
    (row,) = lm.layout_rows(template=template)
    return [span.end - span.start for span in row.layout.spans if span.texts is None]


# A running batch, which rows join and leave


@dataclass(frozen=True)
class Outcome:
    """A row when it is done."""

    ids: list[int]
    nfe: int
    steps: int


@dataclass(frozen=True)
class Progress:
    """A row after a step: its first `settled` tokens can no longer change."""

    row: int
    ids: list[int]
    settled: int
    is_done: bool
    nfe: int
    steps: int


def sample_alone(lm: LM, plan: Any) -> list[Outcome]:
    """Sample every row of `plan_texts` in a batch of its own."""
    outcomes = []
    for row in map(replace, plan):
        for _ in sample(lm.evaluator, [row], banned=classify_tokens(lm.tokenizer).banned):
            pass
        outcomes.append(Outcome(row.ids, row.nfe, row.steps))
    return outcomes


class RunningBatch:
    """A batch of a model; rows join and leave between two steps. A row is done in its last step."""

    def __init__(self, lm: LM) -> None:
        self._batch = Batching[TextRow](lm.evaluator, banned=classify_tokens(lm.tokenizer).banned)
        self._numbers: dict[TextRow, int] = {}

    @property
    def rows(self) -> list[int]:
        """The rows that are in the batch."""
        return [self._numbers[row] for row in self._batch.rows]

    def join(self, rows: Sequence[tuple[int, Any, int]]) -> None:
        """Let rows join: each a number of its own, what `plan_texts` returned, its place there."""
        joining = []
        for number, plan, place in rows:
            row = replace(plan[place])
            self._numbers[row] = number
            joining.append(row)
        self._batch.join(joining)

    def leave(self, rows: Sequence[int]) -> None:
        """Let rows leave before they are done."""
        self._batch.leave([row for row in self._batch.rows if self._numbers[row] in rows])

    def step(self) -> list[Progress]:
        """Take a step of all rows; those that are done leave."""
        frame = self._batch.step()
        progress = []
        for i, row in enumerate(frame.rows):
            ids = frame.tokens[i, : len(row.layout)].tolist()
            numbers = frame.settled[i], frame.is_done[i], frame.nfe[i], frame.steps[i]
            progress.append(Progress(self._numbers[row], ids, *numbers))
        return progress


# Files


def save_model(lm: LM, folder: Path) -> Path:
    """Write a model folder."""
    return lm.save(folder)


def with_weights(lm: LM, change: Callable[[LanguageModel], None]) -> LM:
    """Return a copy of a model whose weights a function has changed in place."""
    from copy import deepcopy

    model = deepcopy(lm.model)
    with torch.no_grad():
        change(model)
    return LM(replace(lm.loaded, model=model), lm.name, device="cpu")


def bias_token(model: LanguageModel, token: int, value: float) -> None:
    """Add to the logit of a token at every position."""
    model.head.bias[token] += value
