"""How good the anchor network's guesses are: accuracy, likelihood and calibration, by how much is hidden."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from adlm.data.batches import RowDataset
from adlm.diffusion.anchors import AnchorRule
from adlm.diffusion.masking import NoisyBatch
from adlm.evaluate.tallies import calibration_error, ratio
from adlm.models.language_model import LanguageModel
from adlm.studies.noising import noised_rows, pieces

AT_ONCE = 1024  # positions whose logits exist at a time
RELIABILITY = 10  # bins of probability
RESAMPLES = 200  # of rows, for the error of the calibration error
HEADS = ("anchor", "final")


@dataclass(frozen=True)
class Guess:
    """One head at tokens of one kind, in rows of one range of mask rates. Errors are over rows."""

    head: str  # anchor: the anchor network's; final: the denoiser's
    state: str  # hidden, visible
    kind: str  # anchors, others, every
    mask_rate: tuple[float, float]
    tokens: int
    accuracy: float
    accuracy_se: float
    nll: float  # nats per token, each token weighing the same
    nll_se: float
    calibration_error: float  # expected: the mean distance of the highest probability from how often it is right
    calibration_error_se: float
    reliability: list[tuple[int, float, float]]  # by bins of the highest probability: tokens, its mean, accuracy

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class Tally:
    """Both heads' guesses of hidden tokens, the anchor network's of visible ones too; anchors and others by the rule.

    Tokens of `left_out` (V,) are not counted (what begins and ends a text). The denoiser is not asked for visible
    tokens: they are copied.
    """

    def __init__(
        self, model: LanguageModel, rule: AnchorRule, rows: int, *, left_out: Tensor | None = None, bins: int = 5
    ) -> None:
        if model.anchor is None or model.anchor_head is None or model.config.mask_id is None:
            raise ValueError("guesses of anchors take a masked two-stage model")
        self.rule, self.left_out, self.bins, self.mask_id = rule, left_out, bins, model.config.mask_id
        self.heads = (model.anchor_head, None), (model.head, self.mask_id)  # and the token that each may not name
        # (row, bin of the mask rate, hidden or visible, anchor or other, head, bin of probability) -> 4 sums
        self.sums = np.zeros((rows, bins, 2, 2, 2, RELIABILITY, 4))

    @torch.no_grad()
    def add(self, number: Tensor, noised: NoisyBatch, anchor: Tensor, final: Tensor) -> None:
        """Count rows by their numbers (n,), under a noise on the host, with both stages' features of them."""
        x0, is_hidden = noised.x0, noised.xt == self.mask_id
        counted = torch.ones_like(is_hidden) if noised.valid is None else noised.valid
        if self.left_out is not None:
            counted = counted & ~self.left_out[x0]
        time = (noised.t.double() * self.bins).long().clamp(max=self.bins - 1)
        is_anchor = self.rule(x0, noised.valid)
        places = (number[:, None], time[:, None], (~is_hidden).long(), (~is_anchor).long())
        asked = (anchor, counted), (final, counted & is_hidden)
        for head, ((found, where), (linear, without)) in enumerate(zip(asked, self.heads, strict=True)):
            index = where.flatten().nonzero()[:, 0]
            keys = [place.expand(x0.shape).flatten()[index].numpy() for place in places]
            _add(self.sums, keys, head, *_asked(found, linear, x0, index, without))

    def guesses(self, seed: int = 0) -> list[Guess]:
        """What was found; rows are resampled by the seed."""
        return _told(self.sums, self.bins, seed)


@torch.no_grad()
def measure_guesses(
    model: LanguageModel,
    rows: RowDataset,
    rule: AnchorRule,
    *,
    left_out: Tensor | None = None,
    draws: int = 1,
    seed: int = 0,
    batch: int = 32,
    bins: int = 5,
) -> list[Guess]:
    """The guesses of rows under the held-out bound's noise (see `Tally`)."""
    count, device, mask_id = len(rows), model.embed.weight.device, model.config.mask_id
    tally = Tally(model, rule, count, left_out=left_out, bins=bins)
    assert mask_id is not None
    for piece in pieces(rows, batch, device):
        for draw in range(draws):
            how: dict[str, Any] = {"draw": draw, "draws": draws, "seed": seed, "total": count}
            noised = noised_rows(piece.x0, piece.number, piece.valid, mask_id=mask_id, **how)
            at = noised.to(device)
            features = model(at.xt, at.noise_level, valid=at.valid)
            assert features.anchor is not None
            tally.add(piece.number, noised, features.anchor, features.final)
    return tally.guesses(seed)


def _asked(
    features: Tensor, head: nn.Linear, x0: Tensor, index: Tensor, without: int | None
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """At places of the flattened batch: nats of the true token, the highest probability, and whether it is right."""
    chosen, target = features.flatten(0, 1)[index.to(features.device)], x0.flatten()[index].to(features.device)
    parts = []
    for start in range(0, len(index), AT_ONCE):
        part = slice(start, start + AT_ONCE)
        logits = head(chosen[part]).float()
        if without is not None:
            logits[:, without] = -torch.inf
        logs = logits.log_softmax(-1)
        best, token = logs.max(-1)
        nll = -logs.gather(1, target[part, None])[:, 0]
        parts.append(torch.stack([nll.double(), best.double().exp(), (token == target[part]).double()]).cpu())
    found = torch.cat(parts, 1).numpy() if parts else np.zeros((3, 0))
    return found[0], found[1], found[2]


def _add(
    sums: NDArray[np.float64],
    keys: list[NDArray[Any]],
    head: int,
    nll: NDArray[np.float64],
    probability: NDArray[np.float64],
    hits: NDArray[np.float64],
) -> None:
    # Bins are (0, 0.1], (0.1, 0.2], …: a certain guess belongs to the last.
    place = np.clip(np.ceil(probability * RELIABILITY).astype(np.int64) - 1, 0, RELIABILITY - 1)
    flat = np.ravel_multi_index((*keys, np.full_like(place, head), place), sums.shape[:-1])
    each = np.stack([np.ones_like(nll), probability, hits, nll], axis=1)
    np.add.at(sums.reshape(-1, sums.shape[-1]), flat, each)


def _told(sums: NDArray[np.float64], bins: int, seed: int) -> list[Guess]:
    weights = np.random.default_rng(seed).multinomial(len(sums), np.full(len(sums), 1 / len(sums)), RESAMPLES)
    found = []
    ranges: list[tuple[slice, tuple[float, float]]] = [(slice(None), (0.0, 1.0))]
    ranges += [(slice(i, i + 1), (i / bins, (i + 1) / bins)) for i in range(bins)]
    kinds = {"anchors": slice(0, 1), "others": slice(1, 2), "every": slice(None)}
    for head, head_name in enumerate(HEADS):
        for state, state_name in enumerate(("hidden", "visible")):
            if head_name == "final" and state_name == "visible":
                continue
            for kind, chosen in kinds.items():
                for part, rate in ranges:
                    each = sums[:, part, state, chosen, head].sum((1, 2))  # (rows, RELIABILITY, 4)
                    found.append(_guess(head_name, state_name, kind, rate, each, weights))
    return found


def _guess(
    head: str, state: str, kind: str, rate: tuple[float, float], each: NDArray[np.float64], weights: NDArray[np.int64]
) -> Guess:
    counts, _, hits, nll = np.moveaxis(each.sum(1), -1, 0)
    pooled = each.sum(0)
    resampled = calibration_error(np.einsum("bn,nrk->brk", weights, each[..., :3]))
    reliability = [
        (int(n), float(p / n) if n else float("nan"), float(h / n) if n else float("nan")) for n, p, h, _ in pooled
    ]
    known = resampled[np.isfinite(resampled)]
    return Guess(
        head,
        state,
        kind,
        rate,
        int(counts.sum()),
        *ratio(hits, counts),
        *ratio(nll, counts),
        float(calibration_error(pooled[:, :3])),
        float(known.std(ddof=1)) if len(known) > 1 else float("nan"),
        reliability,
    )
