"""Measure how often the lengths of holes are inferred correctly, with words cut out of held-out passages.

    python bundled/lengths.py --data DATA MODEL --holes 200

The baseline is the best constant length.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter

from rich.console import Console
from rich.progress import track

import adlm
from adlm.text.templates import Hole, parse_template

MAX_HOLE = 8  # tokens
CONTEXT = 24  # words kept on each side


def cut_out(text: str, rng: random.Random) -> tuple[str, str, str] | None:
    """Cut one to three words out of a passage: the text before, the words, the text after."""
    words = text.split()
    if len(words) < 12:
        return None
    count = rng.randint(1, 3)
    at = rng.randint(4, len(words) - count - 4)
    before, after = words[max(0, at - CONTEXT) : at], words[at + count : at + count + CONTEXT]
    return " ".join(before) + " ", " ".join(words[at : at + count]), " " + " ".join(after)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("model", nargs="?", help="name or folder [default: the bundled model]")
    parser.add_argument("--data", required=True, help="folder written by adlm prepare")
    parser.add_argument("--holes", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    lm = (
        adlm.load(options.model, device=options.device)
        if options.model
        else adlm.load(device=options.device)
    )
    data, rng = adlm.open_data(options.data), random.Random(options.seed)
    rows = data.rows("valid")
    truth: list[int] = []
    chosen: list[int] = []
    for number in track(
        rng.sample(range(len(rows)), min(4 * options.holes, len(rows))),
        console=Console(stderr=True),
    ):
        tokens, lengths = rows.fetch([number])
        row = tokens[0].tolist() if lengths is None else tokens[0, : int(lengths[0])].tolist()
        parts = cut_out(data.tokenizer.decode(row, skip_special=True), rng)
        if parts is None:
            continue
        before, words, after = parts
        length = len(lm.tokenizer.encode(" " + words))  # the hole begins with the space
        if (
            length > MAX_HOLE
            or len(
                lm.row_format.build_layout(
                    parse_template((before, Hole.of_length(MAX_HOLE), after))
                )
            )
            > lm.row_format.row
        ):
            continue
        layout = lm.row_format.layout_template(
            (before, Hole(1, MAX_HOLE), after), lambda: lm.evaluator
        )
        truth.append(length)
        chosen.append(next(span.end - span.start for span in layout.spans if span.texts is None))
        if len(truth) == options.holes:
            break
    if not truth:
        raise ValueError(
            f"no passage of {options.data} could be used: they need 12 words, and to fit the model's rows"
        )
    print(
        json.dumps(
            summarize(truth, chosen)
            | {"model": lm.name, "seed": options.seed, "max_hole": MAX_HOLE}
        )
    )


def summarize(truth: list[int], chosen: list[int]) -> dict[str, object]:
    """Shares of exact lengths and of errors of at most one, the mean error, and those of the best constant length."""

    def shares(guesses: list[int]) -> dict[str, float]:
        errors = [abs(a - b) for a, b in zip(truth, guesses, strict=True)]
        count = len(errors)
        exact, near = (
            sum(error == 0 for error in errors) / count,
            sum(error <= 1 for error in errors) / count,
        )
        return {
            "exact": round(exact, 3),
            "within_one": round(near, 3),
            "mean_error": round(sum(errors) / count, 3),
        }

    best = max(
        (shares([length] * len(truth)) for length in range(1, MAX_HOLE + 1)),
        key=lambda each: each["exact"],
    )
    lengths = dict(sorted(Counter(truth).items()))
    return {
        "holes": len(truth),
        "chosen": shares(chosen),
        "best_single_length": best,
        "lengths": lengths,
    }


if __name__ == "__main__":
    main()
