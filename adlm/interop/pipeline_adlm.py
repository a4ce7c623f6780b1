"""A pipeline of diffusers for our masked models; exported folders have a copy."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Unpack

import torch
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from diffusers.utils import BaseOutput
from torch import Tensor

from adlm.settings import SamplingArguments, SamplingSettings


@dataclass
class AdlmPipelineOutput(BaseOutput):
    """Token rows, padded on the left, and their texts."""

    sequences: Tensor
    texts: list[str] | None = None


class AdlmPipeline(DiffusionPipeline):
    """Continues prompts and fills the mask tokens in them, with the sampler of its scheduler."""

    model: Any
    scheduler: Any
    tokenizer: Any
    _callback_tensor_inputs = ["canvas"]  # noqa: RUF012

    def __init__(self, model: Any, scheduler: Any, tokenizer: Any) -> None:
        super().__init__()
        self.register_modules(model=model, scheduler=scheduler, tokenizer=tokenizer)

    def save_pretrained(self, save_directory: Any, *_: Any, **__: Any) -> None:
        """Refuse to write a folder without the code files, which nothing could load."""
        remedy = "`adlm export` makes it a pipeline's folder"
        raise NotImplementedError(
            f"save pipe.model and pipe.tokenizer into {save_directory}; {remedy}"
        )

    def read_scheduler(self, generator: torch.Generator | None) -> SamplingSettings:
        """Return the settings that are the scheduler's, with the generator's seed."""
        config = self.scheduler.config
        return SamplingSettings(
            sampler=config.sampler,
            steps=config.steps,
            options=config.options or None,
            seed=None if generator is None else generator.initial_seed() % 2**63,
        )

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | list[str] = "",
        *,
        generator: torch.Generator | None = None,
        output_type: str = "text",
        return_dict: bool = True,
        callback_on_step_end: Callable[..., Any] | None = None,
        **changes: Unpack[SamplingArguments],
    ) -> AdlmPipelineOutput | tuple[Tensor, list[str] | None]:
        """Continue each prompt, or fill its mask tokens, by the generator's seed.

        The settings are those of `SamplingSettings` under diffusers' names; the scheduler has the sampler.
        `callback_on_step_end(pipeline, step, timestep, {"canvas": tokens})` sees the canvas (B, L) after every step.
        """
        settings = SamplingSettings.parse("diffusers", self.read_scheduler(generator), **changes)
        if output_type not in ("text", "seq"):
            raise ValueError(f"output_type is {output_type!r}: expected text or seq")
        call = callback_on_step_end

        def put_frame(frame: Any) -> None:
            if call is not None:
                step = max(frame.steps) - 1
                call(self, step, step, {"canvas": frame.tokens})

        inputs = self.tokenizer(
            [prompt] if isinstance(prompt, str) else prompt, return_tensors="pt", padding=True
        )
        sequences = self.model.generate(
            inputs.input_ids.to(self.model.device),
            attention_mask=inputs.attention_mask.to(self.model.device),
            streamer=None if call is None else SimpleNamespace(put_frame=put_frame),
            **settings.to_keywords("transformers"),
        )
        texts = (
            self.tokenizer.batch_decode(sequences, skip_special_tokens=True)
            if output_type == "text"
            else None
        )
        return (
            AdlmPipelineOutput(sequences=sequences, texts=texts)
            if return_dict
            else (sequences, texts)
        )
