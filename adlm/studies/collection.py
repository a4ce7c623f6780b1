"""Many samples into a folder: written as they come, gone on with after a kill, shared by processes.

`samples.jsonl` has a line for every text: its number, the seed, the text, its tokens, its network evaluations. A text
follows from the settings, the seed and its number, so the set is the same whoever wrote which of them: one process or
several, in one go or in pieces. `settings.json` says what it follows from; other settings take another folder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from adlm.data.shards import write_safely
from adlm.evaluate.zeroshot import weights_hash
from adlm.text.generation import GenerationRequest
from adlm.text.lm import LM, GeneratedRow, denoise_rows
from adlm.training.distributed import DistributedContext

SETTINGS, SAMPLES = "settings.json", "samples.jsonl"


@dataclass(frozen=True)
class Sample:
    """One text of a collection."""

    number: int
    seed: int
    text: str
    tokens: list[int]  # the model's, without what begins and ends a text
    nfe: int


def collect(
    lm: LM,
    folder: Path,
    job: GenerationRequest,
    *,
    world: DistributedContext | None = None,
    on_texts: Callable[[int, int], None] | None = None,
) -> list[Sample]:
    """A job's texts, which must be of one prompt, in `folder`; those that are there already are not written again.

    All processes of the world take part and must see the same folder; each has the whole set at the end.
    """
    world = world or DistributedContext(lm.device)
    if len(job.layouts) != 1:
        raise ValueError(f"a collection has one prompt, and this job {len(job.layouts)}: collect each into a folder")
    said = settings_of(lm, job)
    world.run_on_rank0(lambda: prepared(folder, said))
    there = {sample.number for sample in read(folder / SAMPLES)}
    world.wait()  # all must see the same before the first one writes into that file
    missing = [number for number in range(job.n) if number not in there]
    done = job.n - len(missing)
    if on_texts:
        on_texts(done, job.n)
    mine = missing[world.rank :: world.size]
    own = folder / (SAMPLES if world.is_first else f"samples.{world.rank}.jsonl")
    for samples in written(lm, job, mine):
        append(own, samples)
        # Of the others' work nothing is known before the end: they are taken to be as fast.
        done = min(done + len(samples) * world.size, job.n)
        if on_texts:
            on_texts(done, job.n)
    world.wait()
    world.run_on_rank0(lambda: merged(folder))
    return read(folder / SAMPLES)[: job.n]


def settings_of(lm: LM, job: GenerationRequest) -> dict[str, Any]:
    """What a text follows from, beside its number; more texts may be asked for later."""
    said = {name: value for name, value in job.settings.items() if name not in ("n", "model")}
    prompt = "".join(span.text for span in job.layouts[0].spans)
    said |= {"prompt": prompt, "weights_sha256": weights_hash(lm.model)}
    said |= {"tokenizer_sha256": lm.tokenizer.sha256, "deterministic": lm.deterministic}
    plain: dict[str, Any] = json.loads(json.dumps(said))
    return plain


def prepared(folder: Path, said: dict[str, Any]) -> None:
    """A folder for these settings: new, or one that was begun with the same."""
    path = folder / SETTINGS
    if path.exists():
        try:
            known = dict(json.loads(path.read_text("utf-8")))
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"{path} does not say of what the samples in its folder are ({error}): take another folder"
            ) from error
        names = [name for name in {**known, **said} if known.get(name) != said.get(name)]
        if names:
            shown = ", ".join(f"{name} {brief(known.get(name))}, now {brief(said.get(name))}" for name in sorted(names))
            raise ValueError(
                f"{folder} has samples of other settings ({shown}): take another folder, or delete this one"
            )
    elif folder.exists() and (folder / SAMPLES).exists():
        raise ValueError(f"{folder} has a {SAMPLES} and no {SETTINGS}, so nobody knows of what: take another folder")
    folder.mkdir(parents=True, exist_ok=True)
    write_safely(path, (json.dumps(said, indent=1) + "\n").encode())
    merged(folder)


def brief(value: Any) -> str:
    """A setting in an error."""
    text = json.dumps(value)
    return text if len(text) <= 24 else text[:21] + "…"


def written(lm: LM, job: GenerationRequest, numbers: Sequence[int]) -> Iterator[list[Sample]]:
    """The texts with these numbers, a batch at a time."""
    layout = job.layouts[0]
    for first in range(0, len(numbers), job.batch):
        part = list(numbers[first : first + job.batch])
        *_, frame = denoise_rows(lm.predictor, replace(job, n=max(part) + 1), [(layout, number) for number in part])
        rows = [
            GeneratedRow(layout, ids[: len(layout)], nfe) for ids, nfe in zip(frame.tokens.tolist(), frame.nfe.tolist())
        ]
        yield [Sample(number, job.seed, row.text, tokens_of(row), row.nfe) for number, row in zip(part, rows)]


def tokens_of(row: GeneratedRow) -> list[int]:
    """The tokens of a text, up to the end that it has."""
    found = [token for span in row.layout.spans for token in row.ids[span.start : span.end]]
    eos_id = row.layout.tokenizer.eos_id
    return found[: found.index(eos_id)] if row.layout.may_end and eos_id in found else found


def append(path: Path, samples: Sequence[Sample]) -> None:
    """Texts behind those that are there; on the disk when this returns."""
    with path.open("ab") as file:
        file.write(b"".join(json.dumps(asdict(sample), ensure_ascii=False).encode() + b"\n" for sample in samples))
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> list[Sample]:
    """The texts of a file in order, each once; a last line without an end was being written at a kill, and is left."""
    if not path.exists():
        return []
    content = path.read_bytes()
    found: dict[int, Sample] = {}
    for number, line in enumerate(content[: content.rfind(b"\n") + 1].split(b"\n")[:-1], 1):
        try:
            sample = Sample(**json.loads(line))
        except (ValueError, TypeError) as error:
            raise ValueError(f"line {number} of {path} is no sample ({error}): delete that line") from error
        found[sample.number] = sample
    return [found[number] for number in sorted(found)]


def merged(folder: Path) -> None:
    """Bring what processes left into one file, in order."""
    parts = sorted(folder.glob("samples.*.jsonl"))
    every = {sample.number: sample for path in (folder / SAMPLES, *parts) for sample in read(path)}
    lines = [json.dumps(asdict(every[number]), ensure_ascii=False).encode() + b"\n" for number in sorted(every)]
    write_safely(folder / SAMPLES, b"".join(lines))
    for path in parts:
        path.unlink()
