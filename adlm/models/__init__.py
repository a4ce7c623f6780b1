"""Networks: one language model for MDLM, ADLM, AR and A2R."""

from adlm.models.language_model import PRESETS, Features, LanguageModel, ModelConfig

__all__ = ["PRESETS", "Features", "LanguageModel", "ModelConfig"]
