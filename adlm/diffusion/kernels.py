"""Triton kernels for the two places where a GPU reads a vocabulary row repeatedly: loss and nucleus draw.

Imported only with CUDA, because Triton comes with CUDA builds of torch alone.
"""

# mypy: ignore-errors
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

LOSS = {"BLOCK": 8192, "num_warps": 16}  # the fastest of those tried on an H200, at 50,304 columns
DRAW = {"BLOCK": 4096, "num_warps": 8}


@triton.jit
def _row(line, start, lane, vocab):
    """Load a piece of a row as float32, minus infinity beyond the vocabulary."""
    return tl.load(line + start + lane, mask=start + lane < vocab, other=float("-inf")).to(
        tl.float32
    )


@triton.jit
def _peak(line, lane, vocab, BLOCK: tl.constexpr):
    most = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, vocab, BLOCK):
        most = tl.maximum(most, _row(line, start, lane, vocab))
    return tl.max(most, 0)


@triton.jit
def _mass(line, lane, vocab, peak, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab, BLOCK):
        total += tl.exp(_row(line, start, lane, vocab) - peak)
    return tl.sum(total, 0)


@triton.jit
def _loss_and_grad(
    logits,
    target,
    weight,
    loss,
    offset,
    stride,
    vocab,
    HAS_OFFSET: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    line = logits + row.to(tl.int64) * stride
    lane = tl.arange(0, BLOCK)
    goal = tl.load(target + row)
    scale = tl.load(weight + row)
    picked = tl.load(line + goal).to(tl.float32)
    peak = _peak(line, lane, vocab, BLOCK)
    lse = tl.log(_mass(line, lane, vocab, peak, BLOCK)) + peak
    ratio = 1.0
    if HAS_OFFSET:
        shift = tl.load(offset)
        ratio = tl.exp(lse - shift)
        tl.store(loss + row, ratio - picked + shift - 1)
    else:
        tl.store(loss + row, lse - picked)
    for start in range(0, vocab, BLOCK):
        grad = tl.exp(_row(line, start, lane, vocab) - lse) * ratio - tl.where(
            start + lane == goal, 1.0, 0.0
        )
        tl.store(line + start + lane, grad * scale, mask=start + lane < vocab)


def compute_loss_and_grad(
    logits: Tensor, target: Tensor, weight: Tensor, offset: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return each row's loss and weight · d loss / d logits, as `selected.compute_loss_and_grad` does."""
    rows, vocab = logits.shape
    loss = torch.empty(rows, device=logits.device, dtype=torch.float32)
    _loss_and_grad[(rows,)](
        logits, target, weight, loss, weight if offset is None else offset, logits.stride(0), vocab,
        HAS_OFFSET=offset is not None, **LOSS,
    )  # fmt: skip
    return loss, logits


@triton.jit
def _order_key(z):
    """Map floats to integers of the same order, wide enough for their differences."""
    bits = z.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _draw(
    logits, u, tokens, probs, stride, vocab, top_p, floor, SHIFT: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    line = logits + row.to(tl.int64) * stride
    lane = tl.arange(0, BLOCK)
    peak = _peak(line, lane, vocab, BLOCK)
    total = _mass(line, lane, vocab, peak, BLOCK)

    # The highest key such that the tokens from it upwards hold the share top_p: each round cuts the range into four.
    # A half-precision logit has nothing in its lower 16 bits, so its keys are SHIFTed. All tokens that lie `floor` =
    # log(V / (1 - top_p)) below the likeliest hold less than 1 - top_p together: the range starts there.
    low = _order_key(peak - floor) >> SHIFT
    high = (_order_key(peak) >> SHIFT) + 1
    enough = top_p * total
    kept = total
    while high - low > 1:
        span = high - low
        key1, key2 = low + (span + 3) // 4, low + (span + 1) // 2
        key3 = low + tl.minimum((3 * span + 3) // 4, span - 1)
        sum1 = tl.zeros((BLOCK,), tl.float32)
        sum2 = tl.zeros((BLOCK,), tl.float32)
        sum3 = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, vocab, BLOCK):
            z = _row(line, start, lane, vocab)
            key, p = _order_key(z) >> SHIFT, tl.exp(z - peak)
            sum1 += tl.where(key >= key1, p, 0.0)
            sum2 += tl.where(key >= key2, p, 0.0)
            sum3 += tl.where(key >= key3, p, 0.0)
        mass1, mass2, mass3 = tl.sum(sum1, 0), tl.sum(sum2, 0), tl.sum(sum3, 0)
        if mass3 >= enough:
            low, kept = key3, mass3
        elif mass2 >= enough:
            low, high, kept = key2, key3, mass2
        elif mass1 >= enough:
            low, high, kept = key1, key2, mass1
        else:
            high = key1

    # The piece in which the distribution function passes u, then the token in it; sums in float64, as the draw is.
    goal = tl.load(u + row) * kept.to(tl.float64)
    passed = tl.full((), 0.0, tl.float64)
    before = tl.full((), 0.0, tl.float64)
    where = tl.full((), -1, tl.int32)
    for start in range(0, vocab, BLOCK):
        z = _row(line, start, lane, vocab)
        mass = tl.sum(
            tl.where((_order_key(z) >> SHIFT) >= low, tl.exp(z - peak), 0.0).to(tl.float64), 0
        )
        # Rounding may leave the goal just beyond the last piece with any mass: that piece then.
        here = ((where < 0) | (passed <= goal)) & (mass > 0)
        where = tl.where(here, start, where)
        before = tl.where(here, passed, before)
        passed += mass
    where = tl.maximum(where, 0)  # NaN logits have no mass anywhere
    z = _row(line, where, lane, vocab)
    share = tl.where((_order_key(z) >> SHIFT) >= low, tl.exp(z - peak), 0.0).to(tl.float64)
    first = tl.min(tl.where((tl.cumsum(share, 0) + before > goal) & (share > 0), lane, BLOCK), 0)
    last = tl.max(tl.where(share > 0, lane, 0), 0)
    found = tl.where(first < BLOCK, first, last)
    tl.store(tokens + row, (where + found).to(tl.int64))
    tl.store(probs + row, tl.sum(tl.where(lane == found, share, 0.0), 0) / passed)


def draw_nucleus(logits: Tensor, u: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """Draw tokens (N,) and return their probabilities within the nucleus, for logits (N, V) and numbers u (N,)."""
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    probs = torch.empty(rows, dtype=torch.float64, device=logits.device)
    _draw[(rows,)](
        logits, u, tokens, probs, logits.stride(0), vocab, top_p,
        math.log(vocab / (1 - top_p)), SHIFT=16 if logits.dtype == torch.bfloat16 else 0, **DRAW,
    )  # fmt: skip
    return tokens, probs
