"""What a model's anchor network is good for: its guesses, what the rest does without them, when anchors are revealed.

The paper asks for this analysis and does not give it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from adlm.bundled import MODELS
from adlm.checkpoint import complete
from adlm.config import load_config
from adlm.data.batches import RowDataset
from adlm.diffusion.anchors import AnchorRule
from adlm.methods import ANCHOR_RULES, build_anchor_rule, named
from adlm.studies.guesses import Guess, Tally
from adlm.studies.perturbation import LEVELS, NONE, Change, Loss, changed_texts, perturbed_losses
from adlm.studies.reveals import Reveals, measure_reveals, reveals_of, watched
from adlm.studies.stages import require_two_stages
from adlm.studies.writing import Assessor, TextFigures, takes_steps
from adlm.text.lm import LM, GeneratedRow
from adlm.text.templates import classes_of

MAX_COUNT = 5  # the paper's tau, where a checkpoint does not say
RANDOM, SUREST = "ancestral", "confidence"
EVERY_TURN = Change("stale", 1)  # in sampling: features that are used once, as the model uses them
OnStage = Callable[[str, int, int], None]  # what is done, how much of it, of how much


@dataclass(frozen=True)
class Extent:
    """How much is measured, and how."""

    noise: tuple[float, ...] = (0.1, 0.3, 1.0)
    stale: tuple[int, ...] = (1, 2, 4, 8)
    draws: int = 4
    seed: int = 0
    batch: int = 32
    samples: int = 0  # texts for every change; 0: none
    length: int | None = None  # of a text
    sampler: str = RANDOM
    steps: int = LEVELS
    temperature: float = 1.0
    top_p: float = 0.9

    def __post_init__(self) -> None:
        if self.samples == 1 or self.samples < 0:
            raise ValueError(f"samples must be 0 or at least 2, for a standard error; got {self.samples}")
        for name, value in (("draws", self.draws), ("batch", self.batch), ("steps", self.steps)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.changes()  # what is wrong with them is said before anything runs

    @property
    def is_bare(self) -> bool:
        """Whether models are only measured as they are: what a correlation over them takes."""
        return not self.noise and not self.stale

    def changes(self) -> list[Change]:
        """What is done to the anchor features, the model as it is first; without any noise or delay nothing else."""
        if self.is_bare:
            return [NONE]
        blurred = [Change("noise", scale) for scale in self.noise]
        late = [Change("stale", steps) for steps in self.stale]
        return [NONE, *blurred, Change("permuted"), Change("other_row"), *late]

    def orders(self) -> list[str]:
        """The samplers whose order of reveals is looked at."""
        return [self.sampler] if self.is_bare else list(dict.fromkeys([self.sampler, SUREST, RANDOM]))

    def job(self, sampler: str) -> dict[str, Any]:
        """What `LM.job` is asked for."""
        steps = {"steps": self.steps} if takes_steps(sampler) else {}
        asked = {"n": self.samples, "length": self.length, "sampler": sampler, "temperature": self.temperature}
        return asked | steps | {"top_p": self.top_p, "seed": self.seed, "batch": self.batch}


@dataclass(frozen=True)
class Sample:
    """Texts that were written with a change of the anchor features."""

    change: str
    kind: str
    amount: float
    nfe: float
    quality: TextFigures

    @classmethod
    def of(cls, change: Change, rows: Sequence[GeneratedRow], assess: Assessor) -> Sample:
        """The figures of written rows."""
        nfe = float(np.mean([row.nfe for row in rows]))
        return cls(change.name, change.kind, change.amount, nfe, assess([row.text for row in rows]))

    def as_dict(self) -> dict[str, Any]:
        """Flat, for JSON."""
        found = asdict(self)
        return found | found.pop("quality")


@dataclass(frozen=True)
class Study:
    """What was found out about one model."""

    model: str
    method: str
    step: int
    guesses: list[Guess]
    losses: list[Loss]  # the first: as it is
    samples: list[Sample]  # likewise; empty where none was asked for
    reveals: list[Reveals]

    @property
    def run(self) -> str:
        """The run that a checkpoint is of; what is no checkpoint of a run's folder is one by itself."""
        path = Path(self.model)
        return str(path.parent.parent if path.parent.name == "checkpoints" else path)

    def guess(self, head: str = "anchor", state: str = "hidden", kind: str = "anchors") -> Guess:
        """A head's figures over all mask rates."""
        return next(
            guess
            for guess in self.guesses
            if (guess.head, guess.state, guess.kind, tuple(guess.mask_rate)) == (head, state, kind, (0.0, 1.0))
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        parts = {name: [each.as_dict() for each in getattr(self, name)] for name in PARTS}
        return {"model": self.model, "method": self.method, "step": self.step, **parts}

    @classmethod
    def of(cls, kept: dict[str, Any]) -> Study:
        """From what `asdict` made of one."""
        samples = [Sample(**(each | {"quality": TextFigures(**each["quality"])})) for each in kept["samples"]]
        guesses = [Guess(**(each | {"mask_rate": tuple(each["mask_rate"])})) for each in kept["guesses"]]
        losses = [Loss(**each) for each in kept["losses"]]
        reveals = [Reveals(**each) for each in kept["reveals"]]
        return cls(kept["model"], kept["method"], kept["step"], guesses, losses, samples, reveals)


PARTS = ("guesses", "losses", "samples", "reveals")


def study_anchors(
    lm: LM,
    rows: RowDataset,
    rule: AnchorRule,
    extent: Extent,
    assess: Assessor | None = None,
    on_stage: OnStage = lambda what, done, total: None,
) -> Study:
    """Everything about one model's anchors; texts are written and judged if there are `samples`."""
    require_two_stages(lm.model, lm.name)
    if extent.samples and assess is None:
        raise ValueError("samples need an assessor: Assessor(lm.tokenizer) measures entropy, with a judge Gen-PPL too")
    model = lm.model.to(lm.device)
    special = classes_of(lm.tokenizer).special
    left_out = torch.ones(model.config.vocab_size, dtype=torch.bool)
    left_out[: len(special)] = special
    tally = Tally(model, rule, len(rows), left_out=left_out)
    losses = perturbed_losses(
        model,
        rows,
        extent.changes(),
        draws=extent.draws,
        seed=extent.seed,
        batch=extent.batch,
        on_turn=lambda turn: tally.add(turn.piece.number, turn.corrupt, turn.own, turn.final),
        on_rows=lambda done, total: on_stage("rows", done, total),
    )
    samples, reveals = _texts(lm, rule, extent, assess, on_stage) if assess and extent.samples else ([], [])
    return Study(lm.name, lm.method, lm.step, tally.guesses(extent.seed), losses, samples, reveals)


def _texts(
    lm: LM, rule: AnchorRule, extent: Extent, assess: Assessor, on_stage: OnStage
) -> tuple[list[Sample], list[Reveals]]:
    """Texts with every change, and orders of reveals; the model's own texts are written once for both."""
    job, changes = (
        lm.build_request(**extent.job(extent.sampler)),
        [c for c in extent.changes() if c.kind != "other_row"],
    )
    own = watched(lm, job)
    samples = [Sample.of(NONE, [text.row for text in own], assess)]
    on_stage("texts", 1, len(changes))
    for change in changes[1:]:
        if change == EVERY_TURN:
            samples.append(replace(samples[0], change=change.name, kind=change.kind, amount=change.amount))
        else:
            samples.append(Sample.of(change, list(changed_texts(lm, job, change)), assess))
        on_stage("texts", len(samples), len(changes))
    reveals = [reveals_of(extent.sampler, own, rule)]
    for sampler in (orders := extent.orders())[1:]:
        on_stage("orders", len(reveals), len(orders))
        reveals.append(measure_reveals(lm, lm.build_request(**extent.job(sampler)), rule))
    on_stage("orders", len(orders), len(orders))
    return samples, reveals


def checkpoints_of(model: str) -> list[str]:
    """The checkpoints that a run has kept, oldest first; what is no run's folder is itself."""
    folder = Path(model) / "checkpoints"
    if model in MODELS or not folder.is_dir():
        return [model]
    kept = [str(path) for path in complete(folder)]
    if not kept:
        raise ValueError(f"{model} has no checkpoint yet: `adlm train` writes one at the latest at the end")
    return kept


def rule_of(lm: LM, max_count: int | None = None) -> tuple[AnchorRule, dict[str, Any]]:
    """The anchor rule that a model was trained with, and what to say of it; with `max_count` rare_in_sequence.

    Only a run's folder says what it was trained with; elsewhere it is the paper's, with a count of 5.
    """
    config = next((path / "config.yaml" for path in _above(lm.name) if (path / "config.yaml").is_file()), None)
    if max_count is not None or config is None:
        count = MAX_COUNT if max_count is None else max_count
        return build_anchor_rule("rare_in_sequence", max_count=count), {"rule": "rare_in_sequence", "max_count": count}
    run = load_config(config)
    asked, known = run.objective, inspect.signature(named(ANCHOR_RULES, run.objective.anchor_rule, "anchor rule"))
    given = {name: getattr(asked, name) for name in ("max_count", "max_fraction", "fraction", "ids")}
    options = {name: value for name, value in given.items() if name in known.parameters and value is not None}
    own = {"seed": run.seed, "vocab_size": lm.model.config.vocab_size}
    options |= {name: value for name, value in own.items() if name in known.parameters}
    if {"counts", "document_counts"} & known.parameters.keys():
        raise ValueError(
            f"{lm.name} was trained with anchors by {asked.anchor_rule}, which needs the counts of its training data: "
            "give --max-count for anchors that are rare in their row"
        )
    return build_anchor_rule(asked.anchor_rule, **options), {"rule": asked.anchor_rule, **options}


def _above(name: str) -> list[Path]:
    """Where the settings of a run may lie, seen from its own folder or from one of its checkpoints."""
    folder = Path(name)
    if name in MODELS or not folder.is_dir():
        return []
    return [folder, *folder.resolve().parents[1:2]]
