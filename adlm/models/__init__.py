"""Networks: one language model for MDLM, ADLM, AR and A2R."""

from adlm.models.language_model import Features, LanguageModel, ModelConfig
from adlm.models.methods import PRESETS

__all__ = ["PRESETS", "Features", "LanguageModel", "ModelConfig"]
