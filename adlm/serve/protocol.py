"""The bodies of requests, in OpenAI's form and with our settings, and the text of answers."""

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, Field, create_model, model_validator

from adlm.diffusion.samplers import SAMPLERS, LeftToRight
from adlm.diffusion.sampling import TokenLogprob
from adlm.settings import (
    SamplingSettings,
    Settings,
    SettingsError,
    list_own_names,
    make_optional,
)
from adlm.text import templates
from adlm.text.generation import TextFrame, TextRow
from adlm.text.lm import LM
from adlm.text.templates import Hole, Layout, Span, Template, decode_tokens

MAX_LENGTHS = 32  # of a hole before a suffix, among which the model chooses
MAX_ALL_LENGTHS = 128  # of all holes of a request: each is tried with the network
MAX_LOGPROBS = 5  # OpenAI's
MAX_GUESSES = 8
MAX_STOPS = 16
MAX_SCORED_TEXTS = 64


class Body(Settings, defer_build=False):
    """The base of bodies, whose classes FastAPI reads when they are built."""

    elsewhere = SamplingSettings.elsewhere


def make_fields(name: str, *left_out: str) -> Any:
    """Return a class with the settings of sampling under OpenAI's names, all of them optional."""
    names = list_own_names(SamplingSettings, "openai")
    taken = {own: typed for own, typed in names.items() if typed not in left_out}
    return create_model(name, __base__=Body, **make_optional(SamplingSettings, taken))


CompletionFields: Any = make_fields("CompletionFields")
InfillFields: Any = make_fields("InfillFields", "max_tokens", "stop")


class ErrorBody(BaseModel):
    """An error in OpenAI's form."""

    error: dict[Literal["message", "type", "param", "code"], str | None]


class StreamOptions(Body):
    """OpenAI's options of a stream."""

    include_usage: bool | None = None


class SamplingBody(Body):
    """What completions and infilling have in common, besides the settings of sampling."""

    model: str | None = None
    user: str | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_mode: Literal["settled", "denoise"] | None = None
    guesses: int | None = Field(None, ge=0, le=MAX_GUESSES)

    def read_settings(self, *left_out: str) -> SamplingSettings:
        """Return the settings: what is left out or null is the default, the seed a random one."""
        given: dict[str, Any] = {"seed": None}
        for name in list_own_names(SamplingSettings, "openai").values():
            value = getattr(self, name, None)
            if value is not None and name not in left_out:
                given[name] = value
        settings = SamplingSettings.parse("openai", None, **given)
        is_own = settings.sampler == LeftToRight.name  # what answers of causal models name
        if isinstance(settings.sampler, str) and not is_own:
            SAMPLERS.resolve(settings.sampler)  # a request never imports one
        return settings

    @property
    def has_drafts(self) -> bool:
        """Whether every frame is wanted; without a stream nobody would read them."""
        is_asked = self.stream_mode == "denoise" or self.guesses is not None
        return bool(self.stream) and is_asked


class CompletionBody(SamplingBody, CompletionFields):
    """The body of /v1/completions. With `suffix` the text between prompt and suffix is generated."""

    prompt: str | list[str] | list[int] | list[list[int]] = ""
    suffix: str | None = None
    min_tokens: int | None = Field(None, ge=1)
    echo: bool | None = None
    best_of: int | None = Field(None, ge=1, le=1)
    presence_penalty: float | None = Field(None, ge=0, le=0)
    frequency_penalty: float | None = Field(None, ge=0, le=0)
    logit_bias: dict[str, float] | None = Field(None, max_length=0)

    @model_validator(mode="after")
    def check_stops(self) -> Self:
        """Refuse more stop texts than a stream can look for."""
        is_few = len(self.stop or ()) <= MAX_STOPS
        return self.require(is_few, f"at most {MAX_STOPS} texts; leave some out", "stop")

    @property
    def is_filling(self) -> bool:
        """Whether something follows the generated text."""
        return bool(self.suffix)

    @property
    def texts(self) -> list[str | list[int]]:
        """The prompts, each a text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        ids = [token for token in self.prompt if isinstance(token, int)]
        return [ids] if ids else [each for each in self.prompt if not isinstance(each, int)]

    def layout_rows(self, lm: LM) -> list[TextRow]:
        """Check the settings and return what is to be sampled."""
        texts = [prompt for prompt in self.texts if isinstance(prompt, str)]
        ids = [prompt for prompt in self.texts if not isinstance(prompt, str)]
        if self.is_filling:
            return self._layout_filling(lm, texts, ids)
        if self.min_tokens is not None:
            expected = (
                "expected a suffix with it, which the text comes before; give both, or neither"
            )
            raise SettingsError({"min_tokens": self.min_tokens}, expected)
        settings = self.read_settings()
        prompts = [layout_tokens(lm, prompt, self.max_tokens) for prompt in ids]
        return lm.layout_rows(prompts or texts, settings)

    def _layout_filling(
        self, lm: LM, texts: Sequence[str], ids: Sequence[Sequence[int]]
    ) -> list[TextRow]:
        if ids:
            raise ValueError("prompt has token ids, and a suffix is text: give the prompt as text")
        most = self.max_tokens or max(templates.MAX_HOLE_TOKENS, self.min_tokens or 1)
        hole = Hole(self.min_tokens or max(1, most - MAX_LENGTHS + 1), most)
        holes: list[Template] = [[text, hole, self.suffix or ""] for text in texts]
        return layout_filling(lm, holes, self.read_settings("max_tokens", "stop"))

    def make_reader(self, layout: Layout) -> "TextReader":
        """Return the reader of the generated text; with `echo`, of the prompt too."""
        hole = next(i for i, span in enumerate(layout.spans) if span.texts is None)
        spans = layout.spans[0 if self.echo else hole : hole + 1]
        return TextReader(layout, spans, self.stop or ())


class InfillBody(SamplingBody, InfillFields):
    """The body of /v1/infill: templates such as "The ___ sat on the ___{2}."."""

    template: str | list[str]
    is_filling: ClassVar[bool] = True

    @property
    def texts(self) -> list[str]:
        """The templates."""
        return [self.template] if isinstance(self.template, str) else self.template

    def layout_rows(self, lm: LM) -> list[TextRow]:
        """Check the settings and return what is to be sampled."""
        return layout_filling(lm, self.texts, self.read_settings())

    def make_reader(self, layout: Layout) -> "TextReader":
        """Return the reader of the whole text."""
        return TextReader(layout, layout.spans)


class ScoreBody(Body):
    """The body of /v1/score."""

    model: str | None = None
    text: str | Annotated[list[str], Field(min_length=1, max_length=MAX_SCORED_TEXTS)]
    draws: int = Field(64, ge=2, le=256)
    seed: int = Field(0, ge=0, lt=2**63)


def layout_tokens(lm: LM, ids: Sequence[int], max_tokens: int | None) -> Layout:
    """Lay a prompt of token ids out with a hole after it, by default as long as the model allows."""
    special = templates.classify_tokens(lm.tokenizer).special
    room = lm.row_format.longest - len(ids)
    count = room if max_tokens is None else max_tokens
    if not ids or count > room or room < 1:
        numbers = f"a prompt has {len(ids)} tokens and max_tokens is {max_tokens}"
        raise ValueError(
            f"{numbers}: give at least one token, and at most {lm.row_format.longest} in all"
        )
    wrong = [token for token in ids if not 0 <= token < len(special) or bool(special[token])]
    if wrong:
        raise ValueError(
            f"prompt has token {wrong[0]}: give ids of text tokens, from 0 to {len(special) - 1}"
        )
    plain = lm.row_format.build_layout((Hole.of_length(count),))
    start = plain.spans[0].start
    end = start + len(ids)
    given = Span(start, end, tuple(decode_tokens(lm.tokenizer, (), ids)))
    return replace(
        plain,
        spans=(given, Span(end, end + count)),
        ids=(*plain.ids[:start], *ids, *plain.ids[start:]),
        is_fixed=plain.is_fixed[:start] + (True,) * len(ids) + plain.is_fixed[start:],
        kinds=plain.kinds[:start] + (templates.TEXT,) * len(ids) + plain.kinds[start:],
    )


def layout_filling(lm: LM, texts: Sequence[Template], settings: SamplingSettings) -> list[TextRow]:
    """Check the number of holes and of their lengths in templates, and return what is to be sampled."""
    # Parsing more holes than fit would slow the batch down: both threads share Python's lock.
    counts = [len(re.findall("_{3,}", text)) for text in texts if isinstance(text, str)]
    most = max(counts, default=0)
    if most > lm.row_format.longest:
        raise ValueError(
            f"a template has {most} holes, a text at most {lm.row_format.longest} tokens: use fewer holes"
        )
    lengths = 0
    for text in texts:
        holes = [piece for piece in templates.parse_template(text) if isinstance(piece, Hole)]
        lengths += sum(hole.max_tokens - hole.min_tokens for hole in holes)
    if lengths > MAX_ALL_LENGTHS:
        numbers = f"the holes leave {lengths} lengths to choose from, at most {MAX_ALL_LENGTHS} are allowed"
        raise ValueError(
            f"{numbers}: say how long holes are, such as ___{{5}} (with a suffix: min_tokens)"
        )
    return lm.layout_rows(settings=settings, template=texts)


def describe_draft(frame: TextFrame, i: int) -> dict[str, Any]:
    """Return row `i` of a frame as a stream carries it, with its tokens where guesses are wanted."""
    row = frame.rows[i]
    text = row.layout.text(frame.ids[i])
    draft: dict[str, Any] = {"step": frame.steps[i], "nfe": frame.nfe[i], "text": text}
    if row.ticket.guesses is not None:
        draft["tokens"] = []
        for token in frame.trajectory_frame(i).tokens:
            guesses = [[guess, round(prob, 3)] for guess, prob in token.guesses]
            draft["tokens"].append([token.state, token.text, token.is_anchor, guesses])
    return draft


class TextReader:
    """The text of some spans of a row that can no longer change: whole characters, up to the first stop sequence."""

    def __init__(self, layout: Layout, spans: Sequence[Span], stops: Sequence[str] = ()) -> None:
        self.layout = layout
        self.spans = deque(spans)
        self.stops = stops
        self.text = ""
        self.position = 0  # the first that is not read
        self.generated = 0  # tokens
        self.given = 0  # characters before the first hole
        self.sent = 0  # characters
        self.is_stopped = False
        # Position in the row, offset and text, until logprobs are read.
        self.tokens = deque[tuple[int, int, str]]()

    def read(self, ids: Sequence[int], settled: int, *, is_done: bool) -> str:
        """Return the text that a step adds, by its tokens and how many of them are settled; the last completes it."""
        while self.spans and not self.is_stopped and self._read_span(self.spans[0], ids, settled):
            self.spans.popleft()
        ends = [self.text.find(stop, self.given) for stop in self.stops]
        end = min((at for at in ends if at >= 0), default=None)
        if end is not None:
            self.is_stopped = True
            self.text = self.text[:end]
        is_final = self.is_stopped or is_done
        held = 0 if is_final else max((len(stop) - 1 for stop in self.stops), default=0)
        start = self.sent
        self.sent = max(start, len(self.text) - held)
        return self.text[start : self.sent]

    def _read_span(self, span: Span, row_ids: Sequence[int], settled: int) -> bool:
        """Add the settled text of a span, and return whether that is all of it."""
        if span.texts is not None:
            self._add(range(span.start, span.end), span.texts)
            self.given += len(span.text) * (self.generated == 0)
            return True
        layout = self.layout
        start = max(self.position, span.start)
        end = max(start, min(settled, span.end))
        eos_id = layout.tokenizer.eos_id
        ids = row_ids[start:end]
        if layout.may_end and span is layout.spans[-1] and eos_id is not None and eos_id in ids:
            self.is_stopped = True
            end = start + ids.index(eos_id)
        pieces = [text or "" for text in layout.decode_hole(Span(start, end), row_ids)]
        is_whole = self.is_stopped or end == span.end
        if not is_whole and pieces and pieces[-1].endswith("\ufffd"):  # an incomplete character
            pieces.pop()
            while pieces and not pieces[-1]:
                pieces.pop()
        self.position = start + len(pieces)
        self._add(range(start, self.position), pieces)
        self.generated += len(pieces)
        return is_whole

    def _add(self, positions: Sequence[int], texts: Sequence[str]) -> None:
        """Add the texts of tokens; given text may have no token."""
        for position, text in zip_longest(positions, texts):
            if position is not None:
                self.tokens.append((position, len(self.text), text))
            self.text += text

    def _name_tokens(
        self, ids: Sequence[int], position: int, logprobs: Mapping[int, float]
    ) -> dict[str, float]:
        """Return log-probabilities by the texts of tokens, but for the one that was drawn."""
        is_word = self.layout.kinds[position] == templates.WORD  # the blank before it is given
        named = {}
        for token, logprob in logprobs.items():
            if token != ids[position]:
                (name,) = decode_tokens(self.layout.tokenizer, ids[:position], [token])
                named[name.removeprefix(" ") if is_word else name] = logprob
        return named

    def read_logprobs(
        self, ids: Sequence[int], logprobs: Mapping[int, TokenLogprob]
    ) -> dict[str, list[Any]]:
        """Return OpenAI's log-probabilities of the tokens that begin in the text read so far, each token once."""
        columns: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        while self.tokens and self.tokens[0][1] < self.sent:
            position, offset, text = self.tokens.popleft()
            drawn = logprobs.get(position)
            logprob = None
            top = None
            if drawn is not None:
                logprob = drawn.logprob
                top = self._name_tokens(ids, position, drawn.top) | {text: logprob}
            columns["tokens"].append(text)
            columns["token_logprobs"].append(logprob)
            columns["top_logprobs"].append(top)
            columns["text_offset"].append(offset)
        return columns
