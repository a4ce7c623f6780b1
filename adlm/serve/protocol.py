"""The bodies of requests, in OpenAI's form and with our settings, and the text of answers."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from adlm.serve.engine import RowFrame
from adlm.text.generation import GenerationRequest
from adlm.text.lm import LM
from adlm.text.templates import MAX_HOLE_TOKENS, Hole, Layout, Span, Template, parse_template

MAX_LENGTHS = 32  # of a hole before a suffix, among which the model chooses
MAX_ALL_LENGTHS = 128  # of all holes of a request: each is tried with the network
MAX_GUESSES = 8
SETTINGS = ("n", "temperature", "top_p", "top_k", "seed", "sampler", "steps", "block")
OPTIONS = ("eta", "t_on", "t_off", "alpha_on", "bound", "compat")


class SamplingBody(BaseModel):
    """Settings of a text; those that are left out or null are `LM.generate`'s defaults, the seed a random one."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str | None = None
    n: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=1)
    seed: int | None = Field(None, ge=0, lt=2**63)
    sampler: str | None = None
    steps: int | None = Field(None, ge=1)
    block: int | None = Field(None, ge=1)
    eta: float | None = None
    t_on: float | None = None
    t_off: float | None = None
    alpha_on: float | None = None
    bound: float | None = None
    compat: bool | None = None
    user: str | None = None
    guesses: int | None = Field(None, ge=0, le=MAX_GUESSES)

    def read_settings(self) -> dict[str, Any]:
        """Return the settings that are given, with a seed."""
        given = {name: getattr(self, name) for name in (*SETTINGS, *OPTIONS) if getattr(self, name) is not None}
        return {"seed": secrets.randbits(32), **given}


class StreamOptions(BaseModel):
    """OpenAI's options of a stream."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None


class CompletionBody(SamplingBody):
    """The body of /v1/completions. With `suffix` the text between prompt and suffix is generated."""

    prompt: str | list[str] = ""
    suffix: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    min_tokens: int | None = Field(None, ge=1)
    stop: str | list[str] | None = None
    echo: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_mode: Literal["settled", "denoise"] | None = None
    best_of: int | None = Field(None, ge=1, le=1)
    presence_penalty: float | None = Field(None, ge=0, le=0)
    frequency_penalty: float | None = Field(None, ge=0, le=0)

    @property
    def stops(self) -> list[str]:
        """The sequences that end a text."""
        return [text for text in ([self.stop] if isinstance(self.stop, str) else self.stop or []) if text]

    @property
    def has_drafts(self) -> bool:
        """Whether every frame is wanted."""
        return self.stream_mode == "denoise"

    def build_request(self, lm: LM) -> GenerationRequest:
        """Check the settings and return what is to be sampled."""
        settings, prompts = self.read_settings(), [self.prompt] if isinstance(self.prompt, str) else self.prompt
        if not self.suffix:
            if self.min_tokens is not None:
                raise ValueError("min_tokens is the least length of a text before a suffix: leave it out, or give both")
            return lm.build_request(prompts, max_new_tokens=self.max_tokens, **settings)
        most = self.max_tokens or max(MAX_HOLE_TOKENS, self.min_tokens or 1)
        hole = Hole(self.min_tokens or max(1, most - MAX_LENGTHS + 1), most)
        templates: list[Template] = [[prompt, hole, self.suffix] for prompt in prompts]
        return lm.build_request(template=check_lengths(templates), **settings)


class InfillBody(SamplingBody):
    """The body of /v1/infill: templates such as "The ___ sat on the ___{2}."."""

    template: str | list[str]
    stream: bool | None = None

    @property
    def has_drafts(self) -> bool:
        """Whether every frame is wanted."""
        return bool(self.stream)

    def build_request(self, lm: LM) -> GenerationRequest:
        """Check the settings and return what is to be sampled."""
        templates = [self.template] if isinstance(self.template, str) else self.template
        return lm.build_request(template=check_lengths(templates), **self.read_settings())


class ScoreBody(BaseModel):
    """The body of /v1/score."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    text: str | list[str]
    draws: int = Field(64, ge=2, le=256)
    seed: int = Field(0, ge=0, lt=2**63)


def check_lengths(templates: Sequence[Template]) -> Sequence[Template]:
    """Return templates, whose holes must not have too many lengths for the model to choose from."""
    holes = [piece for each in templates for piece in parse_template(each) if isinstance(piece, Hole)]
    if (lengths := sum(hole.max_tokens - hole.min_tokens for hole in holes)) > MAX_ALL_LENGTHS:
        raise ValueError(
            f"the holes leave {lengths} lengths to choose from, at most {MAX_ALL_LENGTHS} are allowed: "
            "say how long holes are, such as ___{5} (with a suffix: min_tokens)"
        )
    return templates


def describe_draft(frame: RowFrame, request: GenerationRequest, guesses: int | None) -> dict[str, Any]:
    """Return a frame as a stream carries it: its tokens where guesses are wanted, the settings in the last one."""
    draft: dict[str, Any] = {"step": frame.step, "nfe": frame.nfe, "text": frame.layout.text(frame.ids)}
    if (tokens := frame.tokens) is not None:
        draft["tokens"] = [
            [each.state, each.text, each.is_anchor, [[text, round(p, 3)] for text, p in each.guesses[:guesses]]]
            for each in tokens
        ]
    return draft | ({"settings": request.settings} if frame.is_done else {})


class TextReader:
    """The text in a row's only hole that can no longer change: whole characters, up to the first stop sequence."""

    def __init__(self, layout: Layout, stops: list[str]) -> None:
        self.layout, self.stops, self.text = layout, stops, ""
        self.span = next(span for span in layout.spans if span.texts is None)
        self.position, self.sent, self.is_stopped = self.span.start, 0, False

    @property
    def tokens(self) -> int:
        """The tokens that the text has so far."""
        return self.position - self.span.start

    def read(self, frame: RowFrame) -> str:
        """Return the text that a frame adds; the last frame completes it."""
        layout, end = self.layout, max(self.position, min(frame.settled, self.span.end))
        eos_id, ids = layout.tokenizer.eos_id, frame.ids[self.position : end]
        is_ended = layout.may_end and self.span is layout.spans[-1] and eos_id in ids
        if is_ended and eos_id is not None:
            end = self.position + ids.index(eos_id)
        pieces = [text or "" for text in layout.decode_hole(Span(self.position, end), frame.ids)]
        if pieces and pieces[-1].endswith("\ufffd") and not (frame.is_done or is_ended):  # an incomplete character
            pieces.pop()
            while pieces and not pieces[-1]:
                pieces.pop()
        self.position += len(pieces)
        self.text += "".join(pieces)
        found = [at for stop in self.stops if (at := self.text.find(stop)) >= 0]
        self.is_stopped = is_ended or bool(found)
        if found:
            self.text = self.text[: min(found)]
        is_final = self.is_stopped or frame.is_done
        held = 0 if is_final else max((len(stop) - 1 for stop in self.stops), default=0)
        start, self.sent = self.sent, max(self.sent, len(self.text) - held)
        return self.text[start : self.sent]
