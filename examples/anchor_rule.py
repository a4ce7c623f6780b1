"""An anchor rule of one's own: the first occurrence of each token in a row is an anchor."""

from torch import Tensor

from adlm import AnchorRule


def first_occurrence(skip: int = 0) -> AnchorRule:
    """Return the rule; it leaves out the first `skip` positions."""

    def rule(tokens: Tensor, valid: Tensor | None) -> Tensor:
        is_equal = tokens[:, :, None] == tokens[:, None, :]
        is_repeated = is_equal.tril(diagonal=-1).any(-1)
        is_anchor = ~is_repeated
        is_anchor[:, :skip] = False
        return is_anchor if valid is None else is_anchor & valid

    return rule
