"""A pipeline of diffusers for our masked models; exported folders have a copy."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from diffusers.utils import BaseOutput
from torch import Tensor

from adlm.defaults import DEFAULT_TEMPERATURE, DEFAULT_TOP_P


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

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | list[str] = "",
        max_new_tokens: int | None = None,
        num_inference_steps: int | None = None,
        generator: torch.Generator | None = None,
        num_texts_per_prompt: int = 1,
        temperature: float = DEFAULT_TEMPERATURE,
        top_p: float = DEFAULT_TOP_P,
        top_k: int | None = None,
        block_length: int | None = None,
        output_type: str = "text",
        return_dict: bool = True,
        callback_on_step_end: Callable[..., Any] | None = None,
    ) -> AdlmPipelineOutput | tuple[Tensor, list[str] | None]:
        """Continue each prompt, or fill its mask tokens, by the generator's seed; `callback_on_step_end(pipeline, step,
        timestep, {"canvas": tokens})` sees the canvas (B, L) after every step."""
        if output_type not in ("text", "seq"):
            raise ValueError(f"output_type is {output_type!r}: expected text or seq")
        config, call = self.scheduler.config, callback_on_step_end

        def put_frame(frame: Any) -> None:
            if call is not None:
                call(self, frame.step - 1, frame.step - 1, {"canvas": frame.tokens})

        inputs = self.tokenizer(
            [prompt] if isinstance(prompt, str) else prompt, return_tensors="pt", padding=True
        )
        sequences = self.model.generate(
            inputs.input_ids.to(self.model.device),
            max_new_tokens,
            attention_mask=inputs.attention_mask.to(self.model.device),
            sampler=config.sampler,
            steps=num_inference_steps or config.steps,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=None if generator is None else generator.initial_seed() % 2**63,
            block=block_length,
            num_return_sequences=num_texts_per_prompt,
            streamer=None if call is None else SimpleNamespace(put_frame=put_frame),
            **(config.options or {}),
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
