"""The forward pass with fed-back hidden states, its capture in CUDA graphs, and the loss of every arm."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adlm.apps.reasoning.arms import ReasoningBatch
from adlm.diffusion.masking import NoisyBatch
from adlm.diffusion.objectives import Loss, diffusion_loss
from adlm.models.language_model import Features, LanguageModel, ModelConfig
from adlm.models.transformer import Layer, Norm

CAPTURED_LENGTHS = 16  # rows are padded to a multiple, so that a graph serves many batches


class StepDecoder(nn.Module):
    """SIM-CoT's decoder: a causal layer that reads a slot's hidden state and writes the step that the slot replaces."""

    def __init__(self, config: ModelConfig, *, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng([]):
            torch.default_generator.manual_seed(seed)
            shape = ModelConfig(
                vocab_size=config.vocab_size,
                mask_id=config.mask_id,
                dim=config.dim,
                heads=config.heads,
                is_causal=True,
                cond_dim=None,
                dropout=0.0,
            )
            self.layer = Layer(shape)
        self.norm = Norm(config.dim, bias=False)

    def forward(self, model: LanguageModel, states: Tensor, tokens: Tensor) -> Tensor:
        """Map states (N, dim) of slots and the rows (N, T) after them to features (N, T, dim)."""
        cos, sin = model.rotary(states.device)
        inputs = torch.cat([states[:, None], model.embed(tokens[:, 1:]).to(states.dtype)], 1)
        return self.norm(self.layer(inputs, (cos[: tokens.shape[1]], sin[: tokens.shape[1]])))


def feed_back(model: LanguageModel, batch: NoisyBatch) -> Tensor:
    """Return a batch's inputs; of slots that are fed back, the states before them after the final norm (Coconut)."""
    if not isinstance(batch, ReasoningBatch) or batch.slot is None:
        return batch.xt
    inputs = model.embed(batch.xt)
    for number, end in enumerate(batch.slot_ends, 1):  # a slot needs those before it
        before = model(inputs[:, :end]).final.to(inputs.dtype)
        shifted = F.pad(before, (0, 0, 1, inputs.shape[1] - end - 1))
        inputs = torch.where((batch.slot == number)[..., None], shifted, inputs)
    return inputs


def compute_features(model: LanguageModel, batch: NoisyBatch) -> Features:
    """Run a model on a batch: problems for a causal one, with the feedback of their slots, or rows with holes."""
    if isinstance(batch, ReasoningBatch):
        return model(feed_back(model, batch))
    return model(batch.xt, batch.noise_level, valid=batch.valid)


class _Pass(nn.Module):
    """The features of a batch whose fields with these names are given, as a module of the model's parameters."""

    def __init__(self, model: LanguageModel, batch: NoisyBatch, names: Sequence[str]) -> None:
        super().__init__()
        self.model, self.batch, self.names = model, batch, names

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        fields: dict[str, Any] = dict(zip(self.names, tensors, strict=True))
        features = compute_features(self.model, replace(self.batch, **fields))
        return tuple(stage for stage in features if stage is not None)


class CapturedFeatures:
    """`compute_features` of training batches by CUDA graphs, one for each shape and number of slots.

    For one process and a model without dropout, of which a graph would repeat one draw, and without a noise level. The
    next call with a shape overwrites the features of the last, whose backward pass is over by then.
    """

    def __init__(self) -> None:
        self.passes: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def __call__(self, model: LanguageModel, batch: NoisyBatch) -> Features:
        """Return the features of a batch; without gradients, not by a graph."""
        if not torch.is_grad_enabled():
            return compute_features(model, batch)
        names, ends = ["xt", *(["valid"] if batch.valid is not None else [])], tuple[int, ...]()
        if isinstance(batch, ReasoningBatch) and batch.slot is not None:
            prefix = max(batch.slot_ends, default=0) + 1
            prefix = min(prefix + -prefix % CAPTURED_LENGTHS, batch.xt.shape[1])
            names, ends = [*names, "slot"], (prefix - 1,) * len(batch.slot_ends)
            batch = replace(batch, slot_ends=ends)
        key, tensors = (
            (*batch.xt.shape, *ends, *names),
            tuple(getattr(batch, name) for name in names),
        )
        if key not in self.passes:
            device = batch.xt.device.type
            # The cast weights that autocast keeps would be those of the capture.
            with torch.autocast(
                device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device), False
            ):
                samples = tuple(tensor.clone() for tensor in tensors)
                network = _Pass(model, batch, names)
                self.passes[key] = torch.cuda.make_graphed_callables(
                    network, samples, allow_unused_input=True
                )
        stages = self.passes[key](*tensors)
        return Features(stages[0] if len(stages) > 1 else None, stages[-1])


def reasoning_loss(
    model: LanguageModel,
    batch: NoisyBatch,
    *,
    anchor_weight: float | Tensor | None = None,
    check: bool = True,
    run: Callable[[LanguageModel, NoisyBatch], Features] = compute_features,
    decoder: StepDecoder | None = None,
) -> Loss:
    """Compute the mean cross-entropy over tokens and labelled slots, or the NELBO of holes, and the anchor term."""
    term, means = None, batch
    if not isinstance(batch, ReasoningBatch) or batch.tokens.ndim == 0:
        features = run(model, batch)
    else:
        means = replace(batch, tokens=batch.tokens[0])
        if decoder is not None:
            features = run(model, batch)
            term = compute_step_loss(model, decoder, features.final, batch)
        else:
            inputs = feed_back(model, batch)
            with model.denoiser.collect_states() as states:
                features = model(inputs)
            term = compute_distillation_loss(model, states, batch)
    anchors: dict[str, Any] = {}
    if anchor_weight is not None:
        anchors = {
            "anchor": features.anchor,
            "anchor_head": model.anchor_head,
            "anchor_weight": anchor_weight,
        }
    loss = diffusion_loss(
        features.final, model.head, means, mask_id=model.config.mask_id, **anchors
    )
    if (
        term is not None
    ):  # of SIM-CoT (with a decoder) or CODI, with weight 1; reported like the anchor term
        loss = loss._replace(
            total=loss.total + term, anchor=term, row_anchor=loss.row_anchor + term.detach()
        )
    return loss.check() if check else loss


def compute_step_loss(
    model: LanguageModel, decoder: StepDecoder, features: Tensor, batch: ReasoningBatch
) -> Tensor:
    """Compute the mean cross-entropy of the steps that the decoder writes from the slots (SIM-CoT)."""
    steps = batch.auxiliary
    if steps is None:  # no row has a slot: zero, so that every parameter has its gradient
        return 0 * torch.stack([parameter.sum() for parameter in decoder.parameters()]).sum()
    written = decoder(model, features.flatten(0, 1)[batch.links], steps.xt)
    means = replace(steps, tokens=batch.tokens[1])
    return diffusion_loss(written, model.head, means, mask_id=model.config.mask_id).total


def compute_distillation_loss(
    model: LanguageModel, states: Sequence[Tensor], batch: ReasoningBatch
) -> Tensor:
    """Compute the cross-entropy of the written steps and the distance of the states before the answer (CODI)."""
    teacher = batch.auxiliary
    assert teacher is not None and teacher.links is not None
    with model.denoiser.collect_states() as targets:
        features = model(teacher.xt)
    means = replace(teacher, tokens=batch.tokens[1])
    nll = diffusion_loss(features.final, model.head, means, mask_id=model.config.mask_id).total
    mine = torch.stack([state.flatten(0, 1)[batch.links] for state in states]).float()
    theirs = torch.stack([state.detach().flatten(0, 1)[teacher.links] for state in targets]).float()
    # Smooth L1 from the states of the written row, divided by their standard deviation; a mean over rows and layers.
    distance = F.smooth_l1_loss(mine, theirs, reduction="none").mean(-1) / theirs.std(-1)
    return nll + distance.mean(0).sum() / batch.tokens[2]
