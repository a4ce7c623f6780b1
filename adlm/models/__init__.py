"""Networks: one language model for MDLM, ADLM, AR and A2R."""

from adlm.models.language_model import Features, LanguageModel, ModelConfig
from adlm.models.presets import PRESETS, Preset

__all__ = ["PRESETS", "Features", "LanguageModel", "ModelConfig", "Preset"]
