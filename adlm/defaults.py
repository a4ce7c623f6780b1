"""Default settings of sampling; docs/generate.md says how they were chosen."""

DEFAULT_SAMPLER = "remask_loop"
INFILL_SAMPLER = "confidence"
DEFAULT_STEPS = 128  # of a plan
DEFAULT_TOP_P = 0.82
DEFAULT_TEMPERATURE = 1.0
