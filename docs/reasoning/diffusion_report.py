"""Print the tables of docs/reasoning/diffusion.md and draw a Sudoku that a masked model fills by confidence.

    python docs/reasoning/diffusion_report.py collect RUNS/* --out docs/reasoning/diffusion.json
    python docs/reasoning/diffusion_report.py table docs/reasoning/diffusion.json
    python docs/reasoning/diffusion_report.py draw RUN PUZZLE SOLUTION --out docs/reasoning/sudoku.svg

The first takes folders that `adlm reason eval` has written to.
A puzzle has 81 digits, 0 for an empty cell.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from adlm.apps.reasoning.diffusion import HoleObjective
from adlm.apps.reasoning.runs import load_run
from adlm.diffusion.categorical import SamplingParams
from adlm.diffusion.samplers import build_sampler
from adlm.diffusion.sampling import Row, sample
from adlm.models.evaluator import build_evaluator

KEPT = (
    "task",
    "arm",
    "seed",
    "tests",
    "samplers",
    "parameters",
    "flops",
    "settings",
    "train_seconds",
)
METRICS = ("accuracy", "stderr", "cells", "passes", "problems")
CELL, MARGIN = 44, 6
Fill = tuple[int, str, int]  # cell, digit, number of the evaluation


def compact(result: Mapping[str, Any]) -> dict[str, Any]:
    """Keep what the tables read of a run's reasoning.json."""

    def keep(tests: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
        return {
            name: {key: test[key] for key in METRICS if key in test} for name, test in tests.items()
        }

    kept = {key: result[key] for key in KEPT if key in result} | {"tests": keep(result["tests"])}
    if "samplers" in result:
        kept["samplers"] = {name: keep(tests) for name, tests in result["samplers"].items()}
    return kept


def format_table(results: Mapping[str, Mapping[str, Any]], task: str) -> str:
    """Format the share of solved problems in percent by run, sampler and test set; on Sudoku, of right cells too."""
    chosen = {name: result for name, result in results.items() if result["task"] == task}
    columns = list(next(iter(chosen.values()))["tests"])
    lines = [
        f"| run | sampler | {' | '.join(columns)} | evaluations |",
        "|---" * (3 + len(columns)) + "|",
    ]
    for name, result in chosen.items():
        for sampler, tests in result.get(
            "samplers", {"left to right, greedy": result["tests"]}
        ).items():
            cells = [
                f"{100 * test['accuracy']:.1f}"
                + (f" ({100 * test['cells']:.1f})" if "cells" in test else "")
                for test in (tests[column] for column in columns)
            ]
            passes = " ".join(f"{tests[column]['passes']:.0f}" for column in columns)
            lines.append(f"| {name} | {sampler} | {' | '.join(cells)} | {passes} |")
    return "\n".join(lines)


def record_fills(folder: str | Path, puzzle: str) -> list[Fill]:
    """Fill a puzzle by confidence, one cell for each network evaluation, and return the cells in their order."""
    run = load_run(folder, device="cpu")
    assert isinstance(run.objective, HoleObjective), f"{folder} is no run of the arms mdlm or adlm"
    question = run.task.encode_question(" ".join(puzzle.replace("0", ".")))
    tokens = torch.tensor(run.objective.task.lay_out(question))
    is_hole, mask_id = tokens == run.objective.task.hole, run.task.tokenizer.mask_id
    fills: list[Fill] = []
    row = Row(
        tokens.masked_fill(is_hole, mask_id),
        build_sampler("confidence", steps=81),
        ~is_hole,
        sampling=SamplingParams(0.0),
    )
    for frame in sample(build_evaluator(run.model), [row]):
        for cell in frame.changed[0].nonzero()[:, 0].tolist():
            fills.append((cell, run.task.decode([int(frame.tokens[0, cell])]), frame.steps[0]))
    return fills


def draw_board(puzzle: str, solution: str, fills: Sequence[Fill]) -> str:
    """Draw a filled board as SVG: givens gray, the others from yellow (first) to blue (last), errors framed red."""
    size, last = 9 * CELL + 2 * MARGIN, max(step for _, _, step in fills)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size} {size}" width="{size}" height="{size}" '
    ]
    parts[0] += (
        'font-family="sans-serif" text-anchor="middle"><rect width="100%" height="100%" fill="white"/>'
    )
    by_cell = {cell: (digit, step) for cell, digit, step in fills}
    for cell in range(81):
        x, y = MARGIN + cell % 9 * CELL, MARGIN + cell // 9 * CELL
        digit, step = by_cell.get(cell, (puzzle[cell], 0))
        share = step / last
        color = f"hsl({55 + 165 * share:.0f},75%,{88 - 18 * share:.0f}%)" if step else "#e4e4e4"
        parts.append(
            f'<rect x="{x}" y="{y}" width="{CELL}" height="{CELL}" fill="{color}" stroke="#999"/>'
        )
        weight = "normal" if step else "bold"
        text = f'font-size="22" font-weight="{weight}">{digit}</text>'
        parts.append(f'<text x="{x + CELL / 2}" y="{y + 31}" {text}')
        if step:
            parts.append(
                f'<text x="{x + CELL - 9}" y="{y + 12}" font-size="9" fill="#444">{step}</text>'
            )
        if digit != solution[cell]:
            inner = f'x="{x + 2}" y="{y + 2}" width="{CELL - 4}" height="{CELL - 4}"'
            parts.append(f'<rect {inner} fill="none" stroke="#c00" stroke-width="3"/>')
    for line in range(0, 10, 3):
        at, end = MARGIN + line * CELL, MARGIN + 9 * CELL
        style = 'stroke="black" stroke-width="2"'
        parts.append(f'<line x1="{at}" y1="{MARGIN}" x2="{at}" y2="{end}" {style}/>')
        parts.append(f'<line y1="{at}" x1="{MARGIN}" y2="{at}" x2="{end}" {style}/>')
    return "\n".join([*parts, "</svg>\n"])


def main() -> None:
    """Run a command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    collect = commands.add_parser("collect")
    collect.add_argument("runs", nargs="+", type=Path)
    collect.add_argument("--out", type=Path, required=True)
    commands.add_parser("table").add_argument("results", type=Path)
    draw = commands.add_parser("draw")
    for name in ("run", "puzzle", "solution"):
        draw.add_argument(name)
    draw.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.command == "collect":
        found = {
            run.name: json.loads((run / "reasoning.json").read_text("utf-8")) for run in args.runs
        }
        results = {name: compact(result) for name, result in found.items()}
        args.out.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    elif args.command == "table":
        results = json.loads(args.results.read_text("utf-8"))
        for task in dict.fromkeys(result["task"] for result in results.values()):
            print(f"{format_table(results, task)}\n")
    else:
        board = draw_board(args.puzzle, args.solution, record_fills(args.run, args.puzzle))
        args.out.write_text(board, "utf-8")


if __name__ == "__main__":
    main()
