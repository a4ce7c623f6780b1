"""Compare models with n-gram baselines on the held-out rows of prepared data.

    python bundled/measure.py --data DATA MODEL [MODEL …] --out baselines.json

Models see the same rows and noise, so their paired differences have smaller standard errors than their estimates.
`adlm eval report` measures everything else.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import adlm
from adlm.cli.output import print_table, progress_bar
from adlm.evaluate.ppl import describe_estimate
from adlm.evaluate.results import Estimate, Table, TableColumn, save_json
from bundled.ngrams import count_bigrams, estimate_heldout_nll


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "models", nargs="+", metavar="MODEL", help="name or folder that adlm.load accepts"
    )
    parser.add_argument("--data", required=True, help="folder written by adlm prepare")
    parser.add_argument("--out", required=True, type=Path, help="JSON file to write")
    parser.add_argument("--device", default="auto", help="[default: %(default)s]")
    parser.add_argument(
        "--draws", type=int, default=4, help="noise draws per row [default: %(default)s]"
    )
    parser.add_argument("--seed", type=int, default=0, help="[default: %(default)s]")
    options = parser.parse_args()
    models = [adlm.load(name, device=options.device) for name in options.models]
    data = adlm.open_data(options.data)
    with progress_bar() as on_progress:
        result = adlm.evaluate.perplexity(
            models, options.data, draws=options.draws, seed=options.seed, on_progress=on_progress
        )
        bigram = count_bigrams(
            data.rows("train"),
            data.vocab_size,
            on_rows=lambda done, total: on_progress("bigrams", done, total),
        )
    size = data.manifest.splits["valid"].bytes
    held_out = data.rows("valid")
    baselines = {
        "bigram, BOS and EOS given": estimate_heldout_nll(bigram.nll, held_out, ends_free=True),
        "bigram": estimate_heldout_nll(bigram.nll, held_out),
        "unigram": estimate_heldout_nll(bigram.unigram_nll, held_out),
    }
    save_json(
        options.out,
        result.as_dict()
        | {"baselines": {name: describe_estimate(nll, size) for name, nll in baselines.items()}},
    )
    for table in result.tables:
        print_table(table)
    columns = [
        TableColumn("baseline", is_text=True),
        TableColumn("nats/token", 4),
        TableColumn("perplexity", 2),
        TableColumn("bits/byte", 4),
    ]
    rows: list[list[Any]] = []
    for name, nll in baselines.items():
        rows.append([name, Estimate(nll.nll, nll.stderr), nll.ppl, nll.bits_per_byte(size)])
    print_table(Table(columns, rows))


if __name__ == "__main__":
    main()
