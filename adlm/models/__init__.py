"""Networks: one language model for MDLM, ADLM, AR and A2R, and what a network of your own is."""

from adlm.diffusion.features import FeatureModel
from adlm.models.language_model import Features, LanguageModel, ModelConfig
from adlm.models.methods import PRESETS
from adlm.models.network import NETWORKS, NetworkConfig

__all__ = [
    "NETWORKS",
    "PRESETS",
    "FeatureModel",
    "Features",
    "LanguageModel",
    "ModelConfig",
    "NetworkConfig",
]
