"""Writes `fixtures/`: what an earlier version wrote, which later ones must read.

It was run once, with the version that the ring began with (`python -m tests.laws.make_fixtures`,
then with `rows` and with `runs` as its argument). Running it again would replace the evidence by
what today's code writes: do not.
"""

import json
import os
import shutil
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import adlm
from tests.laws import adapter, commands

FOLDER = Path(__file__).parent / "fixtures"
METHODS = ("mdlm", "adlm", "ar", "a2r", "sedd")
SENTENCE = "the cat sat on a mat and dog ran by old log while rain fell all night in our quiet town"
WORDS = SENTENCE.split()
DIM = 8
# Loud enough for predictions to differ by context.
SCALE = 0.6
RECIPE = """\
# A recipe as it was written for the version that made these fixtures.
method: adlm
steps: 4
batch: 8
ema: 0.9
device: cpu
model:
  preset: nano
  dim: 8
  heads: 2
  anchor_layers: 1
  denoiser_layers: 1
  dropout: 0.1
objective:
  anchor_rule: rare_in_sequence
  max_count: 1
  anchor_weight: 0.1
  anchor_ramp: false
optimizer:
  lr: 1.0e-2
  warmup: 2
valid:
  every: 4
  rows: 16
checkpoint:
  every: 4
  keep: 1
log:
  every: 1
  show: false
"""


def write_text(path: Path, documents: int) -> None:
    """Write lines of words, each word by the one before it and a counter."""
    state, lines = 1, []
    for number in range(documents):
        words = []
        for _ in range(3 + number % 5):
            state = (state * 1103515245 + 12345) % 2**31
            words.append(WORDS[state // 65536 % len(WORDS)])
        lines.append(" ".join(words))
    path.write_text("\n".join(lines) + "\n", "utf-8")
    held_out = "\n<|endoftext|>\n".join(lines[:40])
    path.with_name("held-out.txt").write_text(held_out + "\n", "utf-8")


def method_changes(method: str) -> list[str]:
    """Return the settings of a run of a method."""
    changes = [f"method={method}"]
    if not adapter.has_two_stages(method):
        changes.append("model.anchor_layers=null")
    if not adapter.is_causal(method):
        changes.append("model.cond_dim=8")
    return changes


def make_models() -> dict[str, adlm.LM]:
    """Make models with random weights, by the names of their folders."""
    shape = {"dim": DIM, "heads": 2, "denoiser_layers": 1, "length": 64, "dropout": 0.0}
    models = {}
    for method in METHODS:
        rows = "documents" if method in ("adlm", "mdlm") else "wrapped"
        own: dict[str, Any] = {"vocab_size": 258, "mask_id": 257}
        own["anchor_layers"] = int(adapter.has_two_stages(method))
        if adapter.is_causal(method):
            own |= {"vocab_size": 257, "mask_id": None}
        else:
            own["cond_dim"] = 8
        model = adapter.make_model(method, seed=3, scale=SCALE, **shape, **own)
        models[method] = adapter.wrap_model(model, "bytes", method, rows)
    own = {"vocab_size": 258, "mask_id": 257, "anchor_layers": 1, "cond_dim": 8}
    own |= {"time_conditioning": True, "positions": "learned", "bridge": "direct"}
    timed = adapter.make_model("adlm", seed=5, scale=SCALE, **shape, **own)
    models["timed"] = adapter.wrap_model(timed, "bytes", "adlm", "wrapped")
    return models


def write_rows() -> None:
    """Write the tokens, evaluations and steps of rows of every sampler, whole and in blocks."""
    from tests.laws.test_running_batch import OLD_ROWS, masked_case

    if OLD_ROWS.exists():
        raise SystemExit(f"{OLD_ROWS} exists: it is evidence of an earlier version")
    torch.set_num_threads(1)
    lines = []
    for name in ("mdlm", "timed"):
        _, rows, alone = masked_case(name)
        for row, outcome in zip(rows, alone, strict=True):
            record = {"model": name, "sampler": row.sampler, **asdict(outcome)}
            lines.append(json.dumps(record) + "\n")
    OLD_ROWS.write_text("".join(lines), "utf-8")


def write_runs() -> None:
    """Write the metrics of runs with other settings than those of the recipe."""
    from tests.laws.test_training import OLD_RUNS, RECIPES, train

    if OLD_RUNS.exists():
        raise SystemExit(f"{OLD_RUNS} exists: it is evidence of an earlier version")
    torch.set_num_threads(1)
    lines = []
    for case, (method, changes, rows) in RECIPES.items():
        with tempfile.TemporaryDirectory() as place:
            shutil.copy(FOLDER / "recipe.yaml", place)
            shutil.copytree(FOLDER / f"data-{rows}", Path(place) / f"data-{rows}")
            os.chdir(place)
            train(method, "run", *changes, rows=rows)
            record = {"case": case, "metrics": commands.read_metrics(Path("run"))}
            lines.append(json.dumps(record) + "\n")
            os.chdir(FOLDER)
    OLD_RUNS.write_text("".join(lines), "utf-8")


def main() -> None:
    if FOLDER.exists():
        raise SystemExit(
            f"{FOLDER} exists: it is evidence of an earlier version and stays as it is"
        )
    FOLDER.mkdir()
    os.chdir(FOLDER)
    torch.set_num_threads(1)
    write_text(Path("text.txt"), 150)
    Path("recipe.yaml").write_text(RECIPE, "utf-8")
    for rows in ("wrapped", "documents"):
        adlm.prepare(
            "text.txt", f"data-{rows}", tokenizer="bytes", length=32, rows=rows,
            documents="line", valid_share=0.2, workers=1,
        )  # fmt: skip
    expected: dict[str, Any] = {"resumed": {}, "scores": {}, "texts": {}, "ppl": {}}
    for method in METHODS:
        changes = ["recipe.yaml", "data.path=data-wrapped", *method_changes(method)]
        adlm.train(*changes, f"folder=run-{method}")
        copied = shutil.copytree(f"run-{method}", f"copy-{method}", symlinks=True)
        adlm.train(*changes, f"folder={copied}", "steps=8")
        records = commands.read_metrics(Path(copied))
        expected["resumed"][method] = [each for each in records if each["step"] > 4]
        shutil.rmtree(copied)
    for name, lm in make_models().items():
        folder = adapter.save_model(lm, Path(f"model-{name}"))
        lm = adlm.load(folder, device="cpu")
        texts = ["the cat sat", "a"]
        expected["scores"][name] = [each.nll for each in lm.score(texts, draws=8, seed=1)]
        answer = commands.run_json(
            "eval", "ppl", folder, "--data", "held-out.txt", "--draws", 2, "--device", "cpu",
            "--count", "text", "--rows", "documents",
        )  # fmt: skip
        expected["ppl"][name] = {key: answer[key] for key in ("nll", "tokens", "bits_per_byte")}
        if not adapter.is_causal(lm.method):
            expected["texts"][name] = {}
            for sampler in adapter.sampler_names():
                settings = commands.quick_settings(sampler)
                output = adapter.generate(lm, "the", n=2, seed=7, max_new_tokens=9, **settings)
                expected["texts"][name][sampler] = {"texts": list(output), "nfe": output.nfe_each}
    Path("expected.json").write_text(json.dumps(expected, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    if sys.argv[1:] == ["rows"]:
        write_rows()
    elif sys.argv[1:] == ["runs"]:
        write_runs()
    else:
        main()
