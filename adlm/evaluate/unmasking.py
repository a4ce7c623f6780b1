"""Likelihood under an unmasking order: a second figure beside the NELBO, and never mixed with it.

A masked model that reveals tokens in an order that depends on nothing but what is visible has a likelihood that can be
computed: −log p(x) = Σ −log p(x_i | what is visible when i is revealed). It is exact, for the sampler that decodes in
this order from a row of known length, all hidden but the marks that are given: `denoise` with the order of this name,
temperature 1, no top-k, top-p or limits. Where several tokens are revealed in a step, that sampler draws them
independently of each other, and the sum is exact for it.

In a random order it is a bound: p(x) is a mean over orders, and the mean of −log p(x | order) is above −log of it. Of a
model that is not told the time its expectation is the NELBO of continuous time: it is no tighter, but less noisy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from adlm.data.batches import RowDataset
from adlm.diffusion import orders
from adlm.diffusion.masking import Selection
from adlm.diffusion.orders import Order, next_positions
from adlm.diffusion.plans import EPS
from adlm.diffusion.rng import CounterRng, Purpose
from adlm.diffusion.schedules import LogLinear, noise_level
from adlm.diffusion.selected import CHUNK, selected_loss
from adlm.evaluate.likelihood import Piece, Walk
from adlm.evaluate.metrics import Bound
from adlm.models.language_model import LanguageModel

LEFT_TO_RIGHT, RANDOM = "left_to_right", "random"
# The orders of the samplers; how many a step is said by `tokens_a_step`, not by steps or a bound on entropies.
SCORED = {
    order.name: replace(order, steps=None, entropy_bound=None)
    for order in (orders.confidence(1), orders.margin(1), replace(orders.entropy_bounded(), name="entropy"))
}
TIE = 1e-6  # scores that are no further apart are equal
ORDERS = (LEFT_TO_RIGHT, *SCORED, RANDOM)


@torch.no_grad()
def unmasking_likelihood(
    model: LanguageModel,
    rows: Tensor | RowDataset,
    order: str | Order | Tensor,
    *,
    tokens_a_step: int = 1,
    draws: int = 1,
    seed: int = 0,
    walk: Walk | None = None,
) -> Bound:
    """Nats per token of rows (n, L) that are revealed in an order: exact, or of a random order a bound.

    The order is a name of `ORDERS`, an `Order` with a score (with its own steps or entropy bound), or a permutation
    (L,): the positions in the order of their reveal. Scores are computed in float64, and where they are equal (to 1e-6)
    the left one comes first: rounding, and so the batch, has no say. A row of n hidden tokens takes
    ceil(n / tokens_a_step) steps of equal size, the larger ones first, as `denoise` does with so many steps. Of a
    random order, `draws` permutations a row, whose spread is the error from noise. `walk` says what counts (`marks`)
    and over what the error is; its batch is how many states are in the network at a time.
    """
    config, walk = model.config, walk or Walk()
    if config.is_causal or config.mask_id is None:
        raise ValueError("a causal model has one order, from left to right, in which its nll is exact already")
    if tokens_a_step < 1 or draws < 1:
        raise ValueError(f"tokens_a_step and draws must be at least 1, got {tokens_a_step} and {draws}")
    is_random = isinstance(order, str) and order == RANDOM
    scored = _scored(order) if not isinstance(order, Tensor) else None
    folded = model.fold() if scored is None else model.fold().double()
    permutation = _checked(order) if isinstance(order, Tensor) else None
    draws = draws if is_random else 1

    def nats_of(piece: Piece, _: int) -> Tensor:
        if scored is not None:
            return _by_score(folded, piece, scored, tokens_a_step)[:, None]
        width = piece.x0.shape[1]
        each = []
        for draw in range(draws):
            if is_random:
                place = CounterRng.of(seed, piece.number).uniform(draw, width, Purpose.ORDER)
            elif permutation is None:
                place = torch.arange(width).expand_as(piece.x0)
            else:
                if len(permutation) != width:
                    raise ValueError(f"the permutation is of {len(permutation)} positions, the rows have {width}")
                place = permutation.argsort().expand_as(piece.x0)
            each.append(_by_place(folded, piece, place, tokens_a_step, walk.batch))
        return torch.stack(each, dim=1)

    return walk.measure(rows, nats_of, draws=draws, is_exact=not is_random)


def _scored(order: str | Order) -> Order | None:
    """The order by its score; None where the places are known beforehand."""
    if isinstance(order, Order):
        if order.score is None:
            raise ValueError(f"{order.name!r} is at random: give the name {RANDOM!r}")
        return order
    if order not in ORDERS:
        raise ValueError(f"unknown order {order!r}; known: {', '.join(ORDERS)}, or a permutation of the positions")
    return SCORED.get(order)


def _checked(permutation: Tensor) -> Tensor:
    if not torch.equal(permutation.sort().values, torch.arange(permutation.numel())):
        raise ValueError(f"a permutation has every position from 0 on once, got {permutation.tolist()}")
    return permutation


def steps_of(hidden: Tensor, tokens_a_step: int) -> Tensor:
    """How many steps rows with so many hidden tokens take."""
    return -(-hidden // tokens_a_step)


def step_at(rank: Tensor, hidden: Tensor, steps: Tensor) -> Tensor:
    """In which of `steps` even steps, larger ones first, the token of each rank among `hidden` is revealed."""
    small, more = hidden // steps.clamp(min=1), hidden % steps.clamp(min=1)
    early = more * (small + 1)
    return torch.where(rank < early, rank // (small + 1), more + (rank - early) // small.clamp(min=1))


def _by_place(model: LanguageModel, piece: Piece, place: Tensor, tokens_a_step: int, batch: int) -> Tensor:
    """Nats of rows (n,) whose order is known beforehand, the lowest place (n, L) first: all states at once."""
    hidden = piece.counted.sum(1, keepdim=True)
    rank = torch.where(piece.counted, place.double(), torch.inf).argsort(stable=True, dim=1).argsort(1)
    steps = steps_of(hidden, tokens_a_step)
    when = torch.where(piece.counted, step_at(rank, hidden, steps), -1)  # marks and padding were always there
    row = torch.repeat_interleave(torch.arange(len(place)), steps[:, 0])
    step = torch.arange(len(row)) - (steps.cumsum(0) - steps)[row, 0]
    nats = torch.zeros(len(place), dtype=torch.float64)
    for states in torch.arange(len(row)).split(batch) if len(row) else ():
        mine, now = row[states], step[states, None]
        is_hidden, is_asked = when[mine] >= now, when[mine] == now
        index = is_asked.flatten().nonzero()[:, 0]
        features = _features(model, piece, mine, is_hidden)
        targets = piece.x0[mine].to(features.device)
        chosen = Selection(index.to(features.device), torch.ones(len(index), device=features.device))
        each = selected_loss(features, model.head, targets, chosen, without=model.config.mask_id).each
        nats.index_add_(0, mine[index // place.shape[1]], each.double().cpu())
    return nats


def _by_score(model: LanguageModel, piece: Piece, order: Order, tokens_a_step: int) -> Tensor:
    """Nats of rows (n,) whose next positions the network's own prediction decides, a step of all rows at a time."""
    is_hidden, nats = piece.counted.clone(), torch.zeros(len(piece.x0), dtype=torch.float64)
    steps = steps_of(is_hidden.sum(1), tokens_a_step)
    last = int(steps.max())
    if order.steps is None and order.entropy_bound is None:
        # Rows end together: a row of fewer steps begins later, and what is left to do is the same number for all.
        order = replace(order, steps=last)
        begins = last - steps
    else:
        begins = torch.zeros_like(steps)
    step = 0
    while bool(is_hidden.any()):
        active = (is_hidden.any(1) & (begins <= step)).nonzero()[:, 0]
        here = is_hidden[active]
        scores, losses = _at_hidden(model, piece, active, here, order)
        chosen = next_positions(order, levelled(scores, here), here, step)
        nats[active] += (losses * chosen).sum(1)
        is_hidden[active] = here & ~chosen
        step += 1
    return nats


def levelled(scores: Tensor, is_hidden: Tensor) -> Tensor:
    """The scores (n, L) of hidden positions, neighbours in rank that are equal (to `TIE`) made the same.

    In a row that is all hidden, a model that knows only distances says the same everywhere, up to rounding.
    """
    ranked, place = scores.masked_fill(~is_hidden, -torch.inf).sort(dim=1, descending=True, stable=True)
    is_lower = torch.ones_like(is_hidden)
    is_lower[:, 1:] = ranked[:, :-1] - ranked[:, 1:] > TIE
    leader = torch.where(is_lower, torch.arange(scores.shape[1]), 0).cummax(1).values
    return torch.empty_like(scores).scatter_(1, place, ranked.gather(1, leader))


def _at_hidden(
    model: LanguageModel, piece: Piece, rows: Tensor, is_hidden: Tensor, order: Order
) -> tuple[Tensor, Tensor]:
    """Score and nats of every hidden position of some rows of the piece, (n, L) each, zero elsewhere."""
    assert order.score is not None
    features = _features(model, piece, rows, is_hidden).flatten(0, 1)
    index = is_hidden.flatten().nonzero()[:, 0]
    targets = piece.x0[rows].flatten()[index].to(features.device)
    scores, losses = [], []
    for part, logits in _logits(model, features[index.to(features.device)]):
        scores.append(order.score(logits))
        losses.append(-logits.log_softmax(-1).gather(1, targets[part, None])[:, 0])
    score, loss = torch.cat(scores).cpu(), torch.cat(losses).cpu()
    scattered = [found.new_zeros(is_hidden.shape).masked_scatter_(is_hidden, found) for found in (score, loss)]
    return scattered[0], scattered[1]


def _features(model: LanguageModel, piece: Piece, rows: Tensor, is_hidden: Tensor) -> Tensor:
    """What the network says of some rows of the piece with these positions hidden; told, if at all, their share."""
    device, mask_id = model.embed.weight.device, model.config.mask_id
    assert mask_id is not None
    xt = torch.where(is_hidden, mask_id, piece.x0[rows])
    share = is_hidden.sum(1) / piece.counted[rows].sum(1).clamp(min=1)
    level = noise_level(LogLinear(EPS), share.double())
    valid = None if piece.valid is None else piece.valid[rows].to(device)
    final: Tensor = model(xt.to(device), level.to(device), valid=valid).final
    return final


def _logits(model: LanguageModel, features: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """The head at features (N, dim), some at a time, the mask ruled out."""
    size = CHUNK[features.device.type]
    for start in range(0, len(features), size):
        logits = model.head(features[start : start + size])
        logits[:, model.config.mask_id] = -torch.inf
        yield slice(start, start + size), logits
