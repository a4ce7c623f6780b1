"""A pipeline of diffusers for our masked models; exported folders have a copy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from diffusers.utils import BaseOutput
from torch import Tensor


@dataclass
class AdlmPipelineOutput(BaseOutput):
    """Token rows, padded on the left, and their texts."""

    sequences: Tensor
    texts: list[str] | None = None


class FrameCallback:
    """Calls a function with the canvas after every step, as a streamer of `generate`."""

    def __init__(self, pipeline: Any, function: Callable[..., Any]) -> None:
        self.pipeline, self.function = pipeline, function

    def put(self, value: Tensor) -> None:
        """Ignore the prompt and the result, which the canvas holds."""

    def put_frame(self, frame: Any) -> None:
        """Call the function with the state after a step."""
        self.function(self.pipeline, frame.step - 1, frame.step - 1, {"canvas": frame.tokens})

    def end(self) -> None:
        """Do nothing: the pipeline returns the text."""


class AdlmPipeline(DiffusionPipeline):
    """Continues prompts and fills the mask tokens in them, with the sampler of its scheduler."""

    model: Any
    scheduler: Any
    tokenizer: Any
    _callback_tensor_inputs = ["canvas"]  # noqa: RUF012

    def __init__(self, model: Any, scheduler: Any, tokenizer: Any) -> None:
        super().__init__()
        self.register_modules(model=model, scheduler=scheduler, tokenizer=tokenizer)

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | list[str] = "",
        max_new_tokens: int | None = None,
        num_inference_steps: int | None = None,
        generator: torch.Generator | None = None,
        num_texts_per_prompt: int = 1,
        temperature: float = 1.0,
        top_p: float = 0.9,
        top_k: int | None = None,
        block_length: int | None = None,
        output_type: str = "text",
        return_dict: bool = True,
        callback_on_step_end: Callable[..., Any] | None = None,
    ) -> AdlmPipelineOutput | tuple[Tensor, list[str] | None]:
        """Continue each prompt, or where it has mask tokens, fill them; the seed is the generator's.

        `callback_on_step_end(pipeline, step, timestep, {"canvas": tokens})` sees the canvas (B, L) after every step.
        """
        if output_type not in ("text", "seq"):
            raise ValueError(f"output_type is {output_type!r}: expected text or seq")
        config = self.scheduler.config
        steps = num_inference_steps or config.steps
        inputs = self.tokenizer([prompt] if isinstance(prompt, str) else prompt, return_tensors="pt", padding=True)
        sequences = self.model.generate(
            inputs.input_ids.to(self.model.device),
            max_new_tokens,
            attention_mask=inputs.attention_mask.to(self.model.device),
            sampler=config.sampler,
            steps=steps,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=None if generator is None else generator.initial_seed() % 2**63,
            block=block_length,
            num_return_sequences=num_texts_per_prompt,
            streamer=None if callback_on_step_end is None else FrameCallback(self, callback_on_step_end),
            **(config.options or {}),
        )
        texts = self.tokenizer.batch_decode(sequences, skip_special_tokens=True) if output_type == "text" else None
        return AdlmPipelineOutput(sequences=sequences, texts=texts) if return_dict else (sequences, texts)
