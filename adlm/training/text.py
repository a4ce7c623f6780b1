"""Training on text: its validation and the samples that a run writes."""

from typing import Annotated

from pydantic import Field, PositiveInt

from adlm.settings import DEFAULT_SAMPLER, DEFAULT_STEPS, DEFAULT_TOP_P, Settings, TopP


class ValidSettings(Settings):
    """Validation: the NELBO of held-out rows with fixed noise, exact for causal models."""

    every: PositiveInt = 5000
    """Steps between two validations."""
    rows: Annotated[int, Field(ge=2)] | None = 1024
    """The first rows, at least 2 for a standard error; null: all."""
    batch: PositiveInt | None = None
    """Rows per forward in a process; null: micro_batch."""
    draws: PositiveInt = 1
    """Noise draws per row."""


class SampleSettings(Settings):
    """Samples written during training."""

    every: PositiveInt | None = None
    """Steps between two files of samples; null: none."""
    rows: PositiveInt = 2
    """Texts in a file."""
    sampler: str = DEFAULT_SAMPLER
    """The sampler of a masked model."""
    steps: PositiveInt = DEFAULT_STEPS
    """Sampling steps."""
    top_p: TopP = DEFAULT_TOP_P
    """Nucleus: total probability of the tokens kept."""
