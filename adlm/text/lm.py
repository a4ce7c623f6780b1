"""A trained model as a tool: `load` one, then write, fill in, watch and score text.

A text depends on the seed, on its number among the `n` of its prompt, and on its own prompt and settings: not on the
prompts beside it, on the batch, or on whether it is watched.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from adlm import checkpoint
from adlm.bundled import DEFAULT, MODELS, find_bundled_model
from adlm.diffusion.categorical import TokenLimits, SamplingParams
from adlm.diffusion.denoise import Frame
from adlm.generate import Predictor, compile_for_sampling, pick_device, stream_tokens
from adlm.text.generation import GenerationRequest, RowFormat, Templates, as_templates, choose_sampler, check_whole_numbers
from adlm.text.hole_length import choose_hole_lengths
from adlm.text.scoring import Score, score_rows
from adlm.text.stream import StreamStep, predict_guesses
from adlm.text.templates import Layout, Template, banned_tokens, classify_tokens
from adlm.trajectory import Trajectory, TrajectoryFrame

DEFAULT_BATCH = 16  # rows at a time, unless told
Prompts = str | Sequence[str]


@dataclass(frozen=True)
class GeneratedRow:
    """A text that is written, by its tokens."""

    layout: Layout
    ids: list[int]
    nfe: int

    @property
    def text(self) -> str:
        return self.layout.text(self.ids)

    @property
    def pieces(self) -> list[tuple[str, bool]]:
        """The pieces of the text, and whether each was given; together they are the text."""
        return self.layout.pieces(self.ids)


@dataclass(frozen=True)
class GenerationOutput:
    """Texts, `n` for every prompt or template one after the other, and what they took."""

    texts: list[str]
    nfe: int  # network evaluations of the text that took most
    seconds: float
    settings: dict[str, Any]
    nfe_each: list[int]

    @classmethod
    def of(cls, rows: Sequence[GeneratedRow], seconds: float, settings: dict[str, Any]) -> GenerationOutput:
        """The texts of rows that are written."""
        nfe = [row.nfe for row in rows]
        return cls([row.text for row in rows], max(nfe), seconds, settings, nfe)

    def __str__(self) -> str:
        return "\n\n".join(self.texts)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class LM:
    """A model with its tokenizer. `adlm.load` makes one."""

    def __init__(
        self, loaded: checkpoint.LoadedModel, name: str, *, device: str = "auto", deterministic: bool = False
    ) -> None:
        if loaded.tokenizer is None:
            raise ValueError(
                f"{name} has no tokenizer.json, and its tokens cannot be read as text without: put the one that its "
                "data was prepared with (`adlm prepare` keeps it beside the data) into the checkpoint's folder"
            )
        self.model, self.tokenizer, config = loaded.model.eval(), loaded.tokenizer, loaded.model.config
        if not config.is_causal and config.mask_id != self.tokenizer.mask_id:
            raise ValueError(
                f"{name}: the model's mask is token {config.mask_id}, the tokenizer's {self.tokenizer.mask_id}: this "
                "tokenizer.json is not the one that the model was trained with"
            )
        self.method, self.step, self.name = loaded.method, loaded.step, name
        self.device, self.deterministic = pick_device(device), deterministic
        is_framed = loaded.rows == "documents" and not config.is_causal
        self.row_format = RowFormat(self.tokenizer, config.length, is_framed, config.is_causal)

    @cached_property
    def predictor(self) -> Predictor:
        """The model ready to sample."""
        return compile_for_sampling(
            self.model, self.device, fixed_batch=DEFAULT_BATCH if self.deterministic else None, is_compiled=False
        )

    def generate(self, prompt: Prompts = "", *, length: int | None = None, n: int = 1, **how: Any) -> GenerationOutput:
        """Texts that begin with the prompt, `length` tokens long (the prompt counts; as long as can be unless told).

        `how`: steps, sampler and its own options, temperature, top_p, top_k, seed, block, batch.
        """
        return self.run_request(self.build_request(prompt, length=length, n=n, **how))

    def infill(self, template: Templates, *, n: int = 1, **how: Any) -> GenerationOutput:
        """The template with its holes filled, such as "The ___ sat on the ___{2}."; or a list of templates."""
        return self.run_request(self.build_request(template=template, n=n, **how))

    def stream(
        self, prompt: Prompts = "", *, template: Templates | None = None, guesses: int = 0, **how: Any
    ) -> Iterator[StreamStep]:
        """The texts of `generate` (with a template: of `infill`) step by step.

        With `guesses` a shot holds so many guesses of the anchor network for every position.
        """
        return self.stream_request(self.build_request(prompt, template=template, **how), guesses)

    def record(
        self, prompt: str = "", *, template: Template | None = None, title: str = "", guesses: int = 3, **how: Any
    ) -> Trajectory:
        """One text from its masks to its end, for `adlm.write_player` and `adlm.write_gif`."""
        job = self.build_request(prompt, template=template, **how)
        began = time.perf_counter()
        stills = [shot.trajectory_frame() for shot in self.stream_request(job, guesses)]
        return self.build_trajectory(stills, job, title=title, seconds=time.perf_counter() - began)

    def build_trajectory(
        self, stills: Sequence[TrajectoryFrame], job: GenerationRequest, *, title: str = "", seconds: float = 0.0
    ) -> Trajectory:
        """The stills of a job's first text as a recording."""
        guesser = "anchor network" if self.model.anchor is not None else "network"
        title = title or f"{self.name} · {job.settings['sampler']}"
        return Trajectory(title, stills[-1].text, tuple(stills), seconds, job.settings, guesser)

    def score(self, texts: Prompts, *, draws: int = 64, seed: int = 0, batch: int = 64) -> list[Score]:
        """How likely each text is: nats per token (of a masked model an upper bound), its error, bits per byte."""
        check_whole_numbers(1, draws=draws, batch=batch)
        check_whole_numbers(0, seed=seed)
        layouts = [self.row_format.given(text) for text in as_list(texts)]
        if not layouts:
            raise ValueError("there is no text to score: give one, or a list of them")
        asked = [self.row_format.asked(layout) for layout in layouts]
        model = self.model.to(self.device)
        return score_rows(model, layouts, asked, method=self.method, draws=draws, seed=seed, batch=batch)

    def build_request(
        self,
        prompt: Prompts = "",
        *,
        template: Templates | None = None,
        length: int | None = None,
        n: int = 1,
        steps: int | None = None,
        sampler: str | None = None,
        temperature: float = 1.0,
        top_p: float = 0.9,
        top_k: int | None = None,
        seed: int = 0,
        block: int | None = None,
        batch: int = DEFAULT_BATCH,
        **options: Any,
    ) -> GenerationRequest:
        """A request, checked: what is wrong with it is said before anything runs."""
        check_whole_numbers(1, n=n, batch=batch, steps=steps, block=block)
        check_whole_numbers(0, seed=seed)
        how = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
        is_causal, fills = self.row_format.is_causal, template is not None
        if is_causal and block is not None:
            raise ValueError(f"a causal model writes from left to right, a token a step: leave block={block} out")
        choose = partial(choose_sampler, sampler, steps, options, is_causal=is_causal, fills=fills)
        choose(hidden=1)  # what is wrong with it is said before a network looks for the lengths of holes
        if template is None:
            layouts = [self.row_format.continuation(text, length) for text in as_list(prompt)]
        elif prompt != "" or length is not None:
            raise ValueError("a template says where everything stands: leave prompt and length out")
        else:
            fit = partial(choose_hole_lengths, lambda: self.predictor, lay=self.row_format.lay)
            layouts = [self.row_format.filling(one, fit) for one in as_templates(template)]
        if not layouts:
            raise ValueError("there is nothing to write: give a prompt (it may be empty) or a template, or a list")
        hidden = max(len(layout) - sum(layout.is_fixed) for layout in layouts)
        made, said = choose(hidden=hidden)
        settings = {"model": self.name, "method": self.method, **said, "temperature": temperature, "top_p": top_p}
        settings |= {"top_k": top_k, "seed": seed, "n": n, "block": block, "device": str(self.device)}
        settings |= {"length": max(sum(span.end - span.start for span in layout.spans) for layout in layouts)}
        return GenerationRequest(layouts, n, made, how, seed, block, batch, settings)

    def stream_request(self, job: GenerationRequest, guesses: int = 0) -> Iterator[StreamStep]:
        """A job's texts step by step, all in one batch; step 0 is before the first."""
        known = int((~classify_tokens(self.tokenizer).special).sum())
        if not isinstance(guesses, Integral) or not 0 <= guesses <= known:
            raise ValueError(f"guesses must be a whole number between 0 and {known}, this model's words; got {guesses}")
        layouts = tuple(layout for layout, _ in job.rows)
        asked = guesses if not self.row_format.is_causal else 0
        return (
            StreamStep(frame.step, frame, layouts, predict_guesses(self.predictor, frame, layouts, asked) if asked else None)
            for frame in denoise_rows(self.predictor, job, job.rows, with_start=True)
        )

    def generate_rows(self, job: GenerationRequest, start: int = 0) -> Iterator[GeneratedRow]:
        """A job's texts from number `start` on, some at a time."""
        left = job.rows[start:]
        for first in range(0, len(left), job.batch):
            part = left[first : first + job.batch]
            *_, frame = denoise_rows(self.predictor, job, part)
            for (layout, _), ids, nfe in zip(part, frame.tokens.tolist(), frame.nfe.tolist(), strict=True):
                yield GeneratedRow(layout, ids[: len(layout)], nfe)

    def run_request(self, job: GenerationRequest) -> GenerationOutput:
        """A job's texts."""
        began = time.perf_counter()
        rows = list(self.generate_rows(job))
        return GenerationOutput.of(rows, time.perf_counter() - began, job.settings)


def denoise_rows(
    predictor: Predictor, job: GenerationRequest, rows: Sequence[tuple[Layout, int]], *, with_start: bool = False
) -> Iterator[Frame]:
    """Rows of a job, written together; with the start, the first frame is what they begin as."""
    widest = max(len(layout) for layout, _ in rows)

    def stack(values: Sequence[Sequence[int]], pad: int) -> Tensor:
        return torch.tensor([[*row, *[pad] * (widest - len(row))] for row in values])

    layouts = [layout for layout, _ in rows]
    any_text = int(layouts[0].tokenizer.mask_id == 0)  # what pads is read by nobody, but must not look hidden
    xt = stack([layout.ids for layout in layouts], any_text).to(predictor.device)
    is_fixed = stack([layout.is_fixed for layout in layouts], 1).bool()
    banned = banned_tokens(layouts[0].tokenizer)
    extra = predictor.config.vocab_size - banned.shape[1]  # a causal model may have no mask, others ids to spare
    limits = TokenLimits(stack([layout.kinds for layout in layouts], 0), F.pad(banned, (0, extra), value=True))
    valid = torch.arange(widest) < torch.tensor([len(layout) for layout in layouts])[:, None]
    if with_start:
        yield Frame(0, xt, ~is_fixed, torch.zeros_like(is_fixed), torch.zeros(len(rows), dtype=torch.int64))
    yield from stream_tokens(
        predictor,
        xt,
        job.sampler,
        seed=job.seed,
        rows=torch.tensor([number for _, number in rows]),
        sampling=job.how,
        is_fixed=is_fixed,
        valid=None if bool(valid.all()) else valid,
        limits=limits,
        block=job.block,
    )


def as_list(prompt: Prompts) -> list[str]:
    """One text or several."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, Sequence):
        raise ValueError(f"a text is a string, or there is a list of them; got {prompt!r}")
    return list(prompt)


def load(model: str | Path = DEFAULT, *, device: str = "auto", deterministic: bool = False, verify: bool = False) -> LM:
    """A trained model: one that comes with the package by name, a run's folder, or a checkpoint's.

    On a CPU in float32, a seed gives one text. On a GPU, whose kernels round by the size of a batch, that takes
    `deterministic`: every evaluation then has the same number of rows.
    """
    folder = find_bundled_model(str(model)) if str(model) in MODELS else Path(model)  # ./NAME is a folder of that name
    if not folder.exists():
        raise FileNotFoundError(
            f"there is no model {str(model)!r}: give a run's folder, a checkpoint's, or one of {', '.join(MODELS)}"
        )
    return LM(checkpoint.load_model(folder, verify=verify), str(model), device=device, deterministic=deterministic)
