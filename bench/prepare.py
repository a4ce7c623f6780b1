"""Text to packed shards, against the bare tokenizer: `python -m bench.prepare [TEXT] [--mb 100] [--tokenizer gpt2]`.

Bare is `encode_batch_fast` of the `tokenizers` library over the same documents, in memory, with as many threads. Ours
is all of `prepare`, from the file on disk to finished shards with checksums, the start of its processes included. Ours
looks up words it has met, so text that repeats itself flatters it: for a record, give a file of real text.
"""

from __future__ import annotations

import argparse
import gzip
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from adlm.data.prepare import count_cores, prepare
from adlm.data.shards import Manifest
from adlm.data.sources import load_excerpt, open_source
from adlm.data.tokenizers import Tokenizer, load_tokenizer
from bench.setting import describe_machine, print_report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "text", nargs="?", help="a source of documents; default: the excerpt, again and again"
    )
    parser.add_argument("--mb", type=float, default=20, help="megabytes of text")
    parser.add_argument("--tokenizer", default="gpt2")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--workers", type=int, default=count_cores())
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    os.environ["RAYON_NUM_THREADS"] = str(
        args.workers
    )  # read when the library first uses its threads
    os.environ["TOKENIZERS_PARALLELISM"] = "true"

    documents = choose_documents(args.text, int(args.mb * 1e6))
    size = sum(len(document.encode()) for document in documents)
    tokenizer = load_tokenizer(args.tokenizer)
    tokens = 0
    bare_runs, our_runs = [], []
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "text.txt.gz"
        file.write_bytes(gzip.compress("\n<|endoftext|>\n".join(documents).encode(), 6))
        for number in range(
            args.repeats
        ):  # in turn: what else the machine does falls on both alike
            bare_runs.append(time_call(lambda: bare(tokenizer, documents)))
            out = Path(place) / f"out-{number}"
            our_runs.append(time_call(lambda out=out: ours(file, out, args)))  # type: ignore[misc]
            manifest = ours(file, out, args)  # finished already: read again
            tokens = sum(split.tokens for split in manifest.splits.values())

    wall = {"bare": median(bare_runs, 0), "ours": median(our_runs, 0)}
    cpu = {"bare": median(bare_runs, 1), "ours": median(our_runs, 1)}
    table = [
        [
            name,
            f"{wall[name]:.2f}",
            f"{cpu[name]:.2f}",
            f"{size / wall[name] / 1e6:.2f}",
            f"{tokens / wall[name]:,.0f}",
        ]
        for name in ("bare", "ours")
    ]
    title = f"{args.tokenizer}, {size / 1e6:.1f} MB in {len(documents):,} documents, {args.workers} workers"
    record: dict[str, object] = {
        **describe_machine("prepare", "cpu"),
        "ratio": round(wall["bare"] / wall["ours"], 3),
        "cpu_ratio": round(cpu["bare"] / cpu["ours"], 3),
        "mb_per_s": round(size / wall["ours"] / 1e6, 2),
        "tokens_per_s": round(tokens / wall["ours"]),
        "seconds": {"bare": [run[0] for run in bare_runs], "ours": [run[0] for run in our_runs]},
        "mb": round(size / 1e6, 1),
        "documents": len(documents),
        "tokenizer": args.tokenizer,
        "workers": args.workers,
    }
    print_report(title, ["", "seconds", "CPU seconds", "MB/s", "tokens/s"], table, record)


def choose_documents(text: str | None, max_bytes: int) -> list[str]:
    """Choose documents with `max_bytes` in all; the last one may be cut."""
    documents: list[str] = []
    size, chapters = 0, [] if text else load_excerpt().split("\nCHAPTER ")
    while size < max_bytes:
        for document in (
            (document for document, _ in open_source(text).read()) if text else iter(chapters)
        ):
            documents.append(document[: max_bytes - size])
            size += len(documents[-1].encode())
            if size >= max_bytes:
                break
        if text:
            break
    return documents


def bare(tokenizer: Tokenizer, documents: list[str]) -> object:
    return tokenizer.bpe.encode_batch_fast(documents, add_special_tokens=False)


def ours(file: Path, out: Path, args: argparse.Namespace) -> Manifest:
    return prepare(file, out, tokenizer=args.tokenizer, length=args.length, workers=args.workers)


def time_call(work: Callable[[], object]) -> tuple[float, float]:
    """Return the wall-clock and CPU seconds of a call, including its child processes."""
    began, used = time.perf_counter(), cpu_seconds()
    result = work()
    taken = round(time.perf_counter() - began, 3), round(cpu_seconds() - used, 3)
    del result  # freeing it is not part of the work
    return taken


def cpu_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def median(runs: list[tuple[float, float]], which: int) -> float:
    return statistics.median(run[which] for run in runs)


if __name__ == "__main__":
    main()
