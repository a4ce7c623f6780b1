"""What the commands answer about tiny models: the stuff of cards."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from tests.cli.terminal import invoke, trained
from tests.evaluate.test_programs import FILE, PROBLEMS
from tests.evaluate.test_zeroshot import write_sets
from tests.training.runs import TEXT, shelf

ONE = ("--seed", 0, "--device", "cpu", "--json")


@cache
def held_out() -> Path:
    path = shelf() / "card-held-out.txt"
    path.write_text(TEXT[:6000], "utf-8")
    return path


def answer(*words: object) -> dict[str, Any]:
    """A command's answer, in this process."""
    result = invoke(*words, *ONE)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@cache
def answers() -> dict[str, list[dict[str, Any]]]:
    """One of every kind, of a masked model with two stages and of a causal one."""
    two, causal, text = trained(), trained("ar"), held_out()
    sets = shelf() / "card-sets"
    sets.mkdir(exist_ok=True)
    few = ("--n", 3, "--length", 12, "--steps", "2,4", "--samplers", "ancestral", "--top-p", "1.0", "--repeats", 2)
    guesses = ("--limit", 6, "--draws", 1, "--samples", 2, "--length", 12, "--steps", 3, "--stale", 1, "--perturb", 1)
    candidates = shelf() / "card-candidates.jsonl"
    none = [{"task_id": each.task_id, "completion": "    return 0\n"} for each in PROBLEMS]
    candidates.write_text("".join(json.dumps(each) + "\n" for each in none), "utf-8")
    run = ("--problems", FILE, "--candidates", candidates, "--allow-code-execution")
    return {
        "ppl": [
            answer("eval", "ppl", two, "--data", text, "--limit", 6, "--order", "confidence"),
            answer("eval", "ppl", causal, "--data", text, "--limit", 6),
        ],
        "frontier": [answer("eval", "frontier", two, causal, "--reference", text, *few)],
        "anchors": [answer("eval", "anchors", two, "--data", text, *guesses)],
        "zeroshot": [answer("eval", "zeroshot", two, "--data-dir", write_sets(sets), "--sets", "ptb", "--limit", 6)],
        "domains": [answer("eval", "domains", two, "--set", f"prose={text}", "--limit", 6)],
        "code": [answer("eval", "code", *run)],
        "examples": [answer("sample", each, "--n", 2, "--length", 12) for each in (two, causal)],
    }


def sample_figures(model: str) -> dict[str, Any]:
    """What `adlm eval samples` prints, with made-up figures: a judge takes long."""

    def figures(scale: float) -> dict[str, Any]:
        shares = ("entropy", "distinct_1", "distinct_2", "distinct_3", "repetition_4", "self_bleu")
        found: dict[str, Any] = {
            name: {"value": scale + i / 7, "stderr": scale / 9, "texts": 8, "tokens": 96}
            for i, name in enumerate(shares)
        }
        found["gen_ppl"] = {"value": 123.456 * scale, "stderr": 7.89, "bits_per_character": 2.34}
        return found | {"mauve": {"value": 0.321, "low": 0.123, "high": 0.456, "warnings": ["few texts"]}}

    settings = {"judge": {"name": "small judge"}, "texts": 8, "tokens": 96, "reference": {"name": "held-out.txt"}}
    settings |= {"samples": {"model": model, "sampler": "ancestral", "steps": 32, "temperature": 1.0, "top_p": 0.9}}
    return {"samples": figures(1.5), "reference": figures(0.5), "settings": settings, "warnings": ["few texts"]}
