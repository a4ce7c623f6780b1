"""What a run trains on: the shape of a `Task`, which text and the problems of an app have."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from adlm.config import Config
from adlm.data.batches import Batch
from adlm.data.tokenizers import Tokenizer
from adlm.diffusion.features import FeatureModel
from adlm.diffusion.objectives import Objective
from adlm.models.folder import MODEL_FORMAT, WRAPPED, ModelDescription, load_weights
from adlm.models.language_model import LanguageModel
from adlm.models.network import TRANSFORMER, NetworkClass, build_network, read_config
from adlm.training.distributed import ParallelModel


class Batches(Protocol):
    """An endless stream of a process's parts of global batches, which continues from a state."""

    def __iter__(self) -> Iterator[Batch]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class InitModel:
    """The model of `init`: its architecture and, for a run that does not resume, its weights."""

    method: str
    shape: Any  # the config of its network
    weights: dict[str, Tensor] | None = None
    sha256: str | None = None  # of the weights


class Task(ABC):
    """What a run trains on: it is opened from a recipe, `Task(config, context)`."""

    config: Config  # with the method of `init`
    network: NetworkClass = LanguageModel
    shape: Any  # the config of the network
    init: InitModel | None
    objective: Objective
    tokenizer: Tokenizer | None
    data_hash: str  # a run resumes only on the same data
    description: str
    length: int  # positions of a row
    row_tokens: float  # of a row on average, without padding
    rows: str = WRAPPED
    best_metric: str = "val/nll"  # its lowest value is the best checkpoint

    def build_model(self) -> FeatureModel:
        """Build the network, with the weights of `init`."""
        model = build_network(self.network, self.shape, self.config.seed)
        if self.init is not None and self.init.weights is not None:
            load_weights(model, self.init.weights)
        return model

    def describe(self, model: FeatureModel) -> ModelDescription:
        """Return the content of the config.json of a model that is trained on this task."""
        process = getattr(self.objective, "process", None)
        network = self.config.model.network or TRANSFORMER
        return ModelDescription(
            format=MODEL_FORMAT,
            method=self.config.method or network,
            step=0,
            rows=self.rows,
            network=network,
            objective=self.config.objective.name or self.objective.name,
            attend_padding=process is not None and process.attend_padding,
            schedule=None if self.objective.is_causal else self.config.objective.schedule,
            model=read_config(model),
        )

    @abstractmethod
    def open_batches(self) -> Batches:
        """Open this process's parts of the global batches."""

    @abstractmethod
    def validate(self, parallel: ParallelModel, batch: int) -> dict[str, float]:
        """Compute the metrics of held-out rows, in batches of so many rows; all ranks take part."""

    @abstractmethod
    def format_metrics(self, metrics: Mapping[str, float]) -> str:
        """Format the metrics of `validate` as a line."""

    @abstractmethod
    def sample(self, model: FeatureModel) -> str:
        """Write samples of the model."""
