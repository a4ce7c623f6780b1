"""The settings of training to reason (`adlm reason train`)."""

from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveInt

from adlm.config import Config
from adlm.data.batches import DataSettings
from adlm.settings import RESUMABLE, PathText, Settings


class ReasoningSettings(Settings):
    """Training to reason on the problems of a task instead of text."""

    task: str | None = None
    """The task: arithmetic, graphs, chains, sudoku, gsm8k, …"""
    arm: str = "cot"
    """Which tokens, labels and inputs a problem has: cot, acot, …"""
    path: PathText | None = None
    """Folder of the task's files; generated tasks use it for a second test."""
    tokenizer: str | None = None
    """The tokenizer of a text task; null: that of init."""
    hops: PositiveInt = 4
    """Generated tasks: training problems have 1 to this many."""
    stages: PositiveInt | None = None
    """Stages of the curriculum; null: those of the arm, else hops."""
    stage_steps: PositiveInt = 500
    """Optimizer steps of a stage."""
    slots_per_stage: PositiveInt = 1
    """Slots that a stage adds."""
    revisit: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Probability that a row is laid out as in an earlier stage."""
    label_weight: NonNegativeFloat = 1.0
    """Weight of a labelled slot in the loss; a token has 1."""
    tests: Annotated[PositiveInt, RESUMABLE] = 4000
    """Problems of each test set."""
    samplers: Annotated[list[str], RESUMABLE] = Field(default_factory=lambda: ["confidence"])
    """Samplers of the arms mdlm and adlm; the first one validates."""


class ProblemSettings(DataSettings):
    """Problems are in reasoning.path, or generated: no folder of text is needed."""

    path: Annotated[PathText, RESUMABLE] = ""
    """Not used."""


class ReasoningConfig(Config):
    """A training run on the problems of a task."""

    data: ProblemSettings = ProblemSettings()
    """How problems are loaded."""
    reasoning: ReasoningSettings = ReasoningSettings()
    """The task and the arm."""
