"""Anchor rules, which choose the important tokens (B, L) -> is_anchor (B, L), and the weight of their loss."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from adlm.diffusion.plans import check_probability
from adlm.diffusion.rng import Purpose, philox, uniform_pair
from adlm.registry import Registry, build


class AnchorRule(Protocol):
    """Chooses the important tokens: (tokens (B, L), valid) -> is_anchor (B, L).

    `valid` is False at padding, which is neither counted nor an anchor, and None without padding.
    """

    def __call__(self, tokens: Tensor, valid: Tensor | None, /) -> Tensor: ...


ANCHOR_SCOPES = ("all", "masked", "visible")


def count_in_row(tokens: Tensor, valid: Tensor | None = None) -> Tensor:
    """Count how often each position's token occurs in its own row."""
    counted = (tokens if valid is None else torch.where(valid, tokens, -1)).contiguous()
    ordered = counted.sort(-1).values.contiguous()
    return torch.searchsorted(ordered, counted, right=True) - torch.searchsorted(ordered, counted)


def rare_in_sequence(max_count: int | None = None, max_fraction: float | None = None) -> AnchorRule:
    """Tokens that occur at most `max_count` (tau) times in their row (the authors' code), or make up at most a
    `max_fraction` of it (the paper)."""
    if (max_count is None) == (max_fraction is None):
        raise ValueError(
            f"max_count is {max_count} and max_fraction {max_fraction}: give one of them, a count or a share of the row"
        )
    if max_fraction is not None:
        check_probability("max_fraction", max_fraction)

    def rule(tokens: Tensor, valid: Tensor | None) -> Tensor:
        most = (
            (max_count or 0) if max_fraction is None else max_fraction * _row_lengths(tokens, valid)
        )
        return _zero_padding(count_in_row(tokens, valid) <= most, valid)

    return rule


def frequent_in_sequence(max_count: int) -> AnchorRule:
    """Tokens that occur more than `max_count` times in their row (a control: what `rare_in_sequence` leaves out)."""
    return lambda tokens, valid: _zero_padding(count_in_row(tokens, valid) > max_count, valid)


def rare_in_corpus(counts: Tensor, max_fraction: float) -> AnchorRule:
    """Tokens that make up at most `max_fraction` of a corpus with these `counts` (V,)."""
    check_probability("max_fraction", max_fraction)
    return _rule_from_table(counts <= max_fraction * counts.sum())


def tf_idf(document_counts: Tensor, documents: int, top_fraction: float) -> AnchorRule:
    """The positions of a row with the highest tf-idf; `document_counts` (V,) are the documents that hold a token."""
    check_probability("top_fraction", top_fraction)
    idf = torch.log((1 + documents) / (1 + document_counts.double())) + 1

    def rule(tokens: Tensor, valid: Tensor | None) -> Tensor:
        score = count_in_row(tokens, valid) * idf.to(tokens.device)[tokens]
        if valid is not None:
            score = score.masked_fill(~valid, -1)
        keep = (top_fraction * _row_lengths(tokens, valid)).round().long()
        # Position breaks ties, so that every row has exactly its share.
        rank = score.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
        return _zero_padding(rank < keep, valid)

    return rule


def listed_tokens(ids: Sequence[int], vocab_size: int) -> AnchorRule:
    """Tokens of a given list."""
    if wrong := [i for i in ids if not 0 <= i < vocab_size]:
        raise ValueError(
            f"anchor ids {wrong[:5]} are outside the vocabulary: use ids from 0 to {vocab_size - 1}"
        )
    table = torch.zeros(vocab_size, dtype=torch.bool)
    table[list(ids)] = True
    return _rule_from_table(table)


def random_positions(fraction: float, seed: int) -> AnchorRule:
    """A random fraction of all positions, the same whenever the row is (a control: anchors without importance)."""
    check_probability("fraction", fraction)

    def rule(tokens: Tensor, valid: Tensor | None) -> Tensor:
        position = torch.arange(tokens.shape[1], device=tokens.device)
        zero = torch.zeros((), dtype=torch.int64, device=tokens.device)
        # The row's key is its text: the sum of a hash of every (token, position) that is not padding.
        high, low, _, _ = philox(
            (tokens & 0xFFFFFFFF, position, zero, zero + Purpose.ANCHOR), (zero, zero)
        )
        row = _zero_padding((high << 32) | low, valid).sum(-1, keepdim=True)
        return _zero_padding(
            uniform_pair(zero + seed, row, zero, position, Purpose.ANCHOR)[0] < fraction, valid
        )

    return rule


def every_token() -> AnchorRule:
    """All positions."""
    return lambda tokens, valid: _zero_padding(torch.ones_like(tokens, dtype=torch.bool), valid)


def apply_scope(is_anchor: Tensor, is_hidden: Tensor, scope: str) -> Tensor:
    """Keep the anchors that carry loss: all (the authors' code), the hidden ones (the paper) or the visible ones."""
    assert scope in ANCHOR_SCOPES  # a ForwardProcess refuses others
    if scope == "all":
        return is_anchor
    return is_anchor & (is_hidden if scope == "masked" else ~is_hidden)


def anchor_weight(step: int, steps: int | None, peak: float = 3e-3) -> float:
    """Return gamma at a step: min(peak, step / steps); without a ramp (`steps` None) its peak."""
    if steps is None:
        return peak
    return min(peak, step / steps)


def _rule_from_table(table: Tensor) -> AnchorRule:
    return lambda tokens, valid: _zero_padding(table.to(tokens.device)[tokens], valid)


def _row_lengths(tokens: Tensor, valid: Tensor | None) -> Tensor:
    """Count the tokens of each row (B, 1)."""
    return (torch.ones_like(tokens, dtype=torch.bool) if valid is None else valid).sum(
        -1, keepdim=True
    )


def _zero_padding(values: Tensor, valid: Tensor | None) -> Tensor:
    """Set padding to False or 0."""
    return values if valid is None else values * valid


ANCHOR_RULES: Registry[Callable[..., AnchorRule]] = Registry(
    "anchor rule",
    {
        "rare_in_sequence": rare_in_sequence,
        "frequent_in_sequence": frequent_in_sequence,
        "rare_in_corpus": rare_in_corpus,
        "tf_idf": tf_idf,
        "listed": listed_tokens,
        "random": random_positions,
        "every": every_token,
    },
)


def build_anchor_rule(name: str, **options: Any) -> AnchorRule:
    """Build an anchor rule by name, with its own options (max_count, ids, …)."""
    return build(ANCHOR_RULES, name, options)
