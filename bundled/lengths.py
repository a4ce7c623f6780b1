"""How well are the lengths of holes found? Words are cut out of held-out passages, and their number of tokens asked.

    python bundled/lengths.py --data DATA MODEL --holes 200

A length that is always guessed alike, the best such, is what finding must beat.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter

from rich.console import Console
from rich.progress import track

import adlm
from adlm.text.hole_length import choose_hole_lengths
from adlm.text.templates import Hole, find_holes, parse_template

MOST = 8  # tokens of a hole
CONTEXT = 24  # words kept on each side


def cut_out(text: str, rng: random.Random) -> tuple[str, str, str] | None:
    """A passage with one to three of its words cut out: what is before them, they, what is after them."""
    words = text.split()
    if len(words) < 12:
        return None
    count = rng.randint(1, 3)
    at = rng.randint(4, len(words) - count - 4)
    before, after = words[max(0, at - CONTEXT) : at], words[at + count : at + count + CONTEXT]
    return " ".join(before) + " ", " ".join(words[at : at + count]), " " + " ".join(after)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("model", nargs="?", help="the bundled one unless told")
    parser.add_argument("--data", required=True, help="a folder that adlm prepare made")
    parser.add_argument("--holes", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    asked = parser.parse_args()
    lm = adlm.load(asked.model, device=asked.device) if asked.model else adlm.load(device=asked.device)
    data, rng = adlm.open_data(asked.data), random.Random(asked.seed)
    rows = data.rows("valid")
    truth: list[int] = []
    found: list[int] = []
    for number in track(rng.sample(range(len(rows)), min(4 * asked.holes, len(rows))), console=Console(stderr=True)):
        tokens, lengths = rows.fetch([number])
        row = tokens[0].tolist() if lengths is None else tokens[0, : int(lengths[0])].tolist()
        parts = cut_out(data.tokenizer.decode(row, skip_special=True), rng)
        if parts is None:
            continue
        before, words, after = parts
        length = len(lm.tokenizer.encode(" " + words))  # the hole brings the blank
        if length > MOST or len(lm.row_format.build_layout(parse_template((before, Hole.of_length(MOST), after)))) > lm.row_format.row:
            continue
        pieces = choose_hole_lengths(
            lambda: lm.predictor, parse_template((before, Hole(1, MOST), after)), MOST, build_layout=lm.row_format.build_layout
        )
        truth.append(length)
        found.append(find_holes(pieces)[0].min_tokens)
        if len(truth) == asked.holes:
            break
    if not truth:
        raise ValueError(f"no passage of {asked.data} could be used: they need 12 words, and to fit the model's rows")
    print(json.dumps(figures(truth, found) | {"model": lm.name, "seed": asked.seed, "most": MOST}))


def figures(truth: list[int], found: list[int]) -> dict[str, object]:
    """Shares of lengths found exactly and within one, the mean error, and those of the best single length."""

    def shares(guesses: list[int]) -> dict[str, float]:
        errors = [abs(a - b) for a, b in zip(truth, guesses, strict=True)]
        count = len(errors)
        exact, near = sum(error == 0 for error in errors) / count, sum(error <= 1 for error in errors) / count
        return {"exact": round(exact, 3), "within_one": round(near, 3), "mean_error": round(sum(errors) / count, 3)}

    best = max((shares([length] * len(truth)) for length in range(1, MOST + 1)), key=lambda each: each["exact"])
    lengths = dict(sorted(Counter(truth).items()))
    return {"holes": len(truth), "found": shares(found), "best_single_length": best, "lengths": lengths}


if __name__ == "__main__":
    main()
