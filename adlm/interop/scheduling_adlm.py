"""Our samplers as a scheduler of diffusers, which runs inside LLaDA2Pipeline; exported folders have a copy."""

import sys
from collections.abc import Iterator, Sequence
from typing import Any, Self, cast

import torch
from diffusers import BlockRefinementScheduler, ConfigMixin, SchedulerMixin
from diffusers.configuration_utils import register_to_config
from diffusers.schedulers.scheduling_block_refinement import BlockRefinementSchedulerOutput
from torch import Tensor

from adlm.diffusion.categorical import SamplingParams
from adlm.diffusion.samplers import choose_sampler, takes_steps
from adlm.diffusion.sampling import Frame, Row, sample_together
from adlm.settings import DEFAULT_SAMPLER, SamplingSettings

BLOCK_STRIDE = 1 << 32  # between the seeds of two blocks


class LogitsEvaluator:
    """Logits (B, L, V) that are there already, as the sampling loop sees a network."""

    max_length = sys.maxsize
    max_logit_rows = 4096

    def __init__(self, mask_id: int, device: torch.device) -> None:
        self.mask_id: int | None = mask_id
        self.device = device
        self.logits = torch.empty(0)

    def open(self) -> Self:
        return self

    def features(
        self, tokens: Tensor, noise_level: Tensor, valid: Any, rows: Sequence[Row], *_: Any
    ) -> Tensor:
        """Return the logits of some rows."""
        return self.logits[torch.tensor([row.number for row in rows], device=self.logits.device)]

    def logits_at(self, features: Tensor) -> Tensor:
        return features


class AdlmScheduler(SchedulerMixin, ConfigMixin):
    """A sampler by name with its options, run one step at a time on the logits of any masked model.

    The canvas changes where the output's `transfer_index | editing_transfer_index`; a token that is hidden again is an
    edit to the mask. `steps` comes before the number of steps that a pipeline sets. The seed is the generator's.
    """

    order = 1
    check_eos_finished = staticmethod(BlockRefinementScheduler.check_eos_finished)

    @register_to_config
    def __init__(
        self,
        sampler: str = DEFAULT_SAMPLER,
        steps: int | None = None,
        options: dict[str, Any] | None = None,
        block_length: int = 32,
        banned_token_ids: list[int] | None = None,
    ) -> None:
        takes_steps(sampler)  # raises if there is no such sampler
        self.set_timesteps(steps or 1)

    def set_timesteps(
        self,
        num_inference_steps: int,
        device: str | torch.device | None = None,
        block_length: int | None = None,
    ) -> None:
        """Start a new text, by default of `num_inference_steps` steps."""
        self.settings = cast(Any, self.config)
        self.num_inference_steps = self.settings.steps or num_inference_steps
        self.timesteps = torch.arange(self.num_inference_steps - 1, -1, -1, device=device)
        self.seed: int | None = None
        self.block, self.steps_done = -1, 0
        self.frames: Iterator[Frame[Row]] | None = None

    def step(
        self,
        model_output: Tensor,
        timestep: int | Tensor,
        sample: Tensor,
        *,
        mask_token_id: int,
        temperature: float = 1.0,
        top_p: float | None = None,
        top_k: int | None = None,
        sampling_method: str = "multinomial",
        prompt_mask: Tensor | None = None,
        generator: torch.Generator | None = None,
        return_dict: bool = True,
        **_: Any,
    ) -> Any:
        """Go one step further from the canvas `sample` (B, L) with its logits (B, L, V)."""
        if self.frames is None:
            greedy = sampling_method == "greedy"
            params = SamplingParams(
                0.0 if greedy else temperature, top_k, 1.0 if top_p is None else top_p
            )
            if self.seed is None:
                self.seed = (
                    int(torch.randint(2**62, ()))
                    if generator is None
                    else generator.initial_seed() % 2**63
                )
            self.frames = self._start(
                sample, model_output.shape[-1], mask_token_id, params, prompt_mask
            )
        self.evaluator.logits = model_output
        frame = next(self.frames)
        self.steps_done += 1
        tokens = frame.tokens.to(sample.device)
        is_changed, is_masked = tokens != sample, tokens == mask_token_id
        shown, hidden = is_changed & ~is_masked, is_changed & is_masked
        is_over = not bool((frame.is_hidden & self.is_free).any())
        is_over &= self.sampler.hides_until <= self.steps_done
        self.frames = None if is_over else self.frames
        probs = model_output.float().softmax(-1).gather(-1, tokens[..., None])[..., 0]
        output: Any = (tokens, shown, hidden, tokens, probs, model_output)
        return BlockRefinementSchedulerOutput(*output) if return_dict else output

    def _start(
        self,
        canvas: Tensor,
        vocab: int,
        mask_id: int,
        params: SamplingParams,
        prompt_mask: Tensor | None,
    ) -> Iterator[Frame[Row]]:
        """Start the sampler on a canvas; it asks for logits where a network would be run."""
        self.block, self.steps_done = self.block + 1, 0
        is_fixed = (canvas != mask_id) if prompt_mask is None else prompt_mask.expand(canvas.shape)
        self.is_free = ~is_fixed.cpu()
        name = self.settings.sampler
        settings = SamplingSettings(
            sampler=name,
            steps=self.num_inference_steps if takes_steps(name) else None,
            options=self.settings.options or None,
        )
        self.sampler, _ = choose_sampler(settings, hidden=int((canvas == mask_id).sum(-1).max()))
        banned = torch.zeros(1, vocab, dtype=torch.bool)
        banned[0, [*(self.settings.banned_token_ids or []), mask_id]] = True
        assert self.seed is not None
        self.evaluator = LogitsEvaluator(mask_id, canvas.device)
        seed = (self.seed + self.block * BLOCK_STRIDE) % 2**63
        rows = [
            Row(
                tokens,
                self.sampler,
                fixed,
                seed=seed,
                number=number,
                sampling=params,
                every_step=True,
            )
            for number, (tokens, fixed) in enumerate(zip(canvas, is_fixed, strict=True))
        ]
        frames = sample_together(self.evaluator, rows, banned=banned)
        next(frames)  # before the first step
        return frames

    def check_block_should_continue(self, **_: Any) -> bool:
        """Whether the sampler has another step, for LLaDA2Pipeline."""
        return self.frames is not None
