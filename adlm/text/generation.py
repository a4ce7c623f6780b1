"""Rows and frames of texts; how a model's rows are laid out, with a length for every hole."""

import math
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Integral
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from adlm.data.tokenizers import Tokenizer
from adlm.diffusion.anchors import rare_in_sequence
from adlm.diffusion.features import (
    FeatureModel,
    compute_anchor_features,
    compute_features,
    find_anchor_head,
)
from adlm.diffusion.plans import mean_noise_level
from adlm.diffusion.sampling import Frame, Row
from adlm.models.evaluator import ModelEvaluator
from adlm.settings import SamplingSettings, SettingsError
from adlm.text.templates import (
    WORD,
    Hole,
    Layout,
    Span,
    Template,
    build_layout,
    classify_tokens,
    parse_template,
    set_hole_lengths,
    tokenize_piece,
)
from adlm.view.trajectory import (
    GIVEN,
    HIDDEN,
    REMASKED,
    REVEALED,
    VISIBLE,
    TokenState,
    TrajectoryFrame,
)

Templates = Template | Sequence[Template]
MAX_NEIGHBORS = 4  # given tokens on each side of a hole that are scored
MAX_ROWS = 64  # evaluated at a time
MAX_POSITIONS = 1024  # whose logits exist at a time, for guesses
MAX_COUNT = 5  # the paper's tau: a token that occurs at most so often is shown as an anchor
# The prior of n tokens is n ** -LENGTH_PENALTY. Without it holes are too long: distant tokens say little about each
# other, so all long holes fit about equally well (docs/LOG.md).
LENGTH_PENALTY = 2.0


@dataclass(eq=False)
class TextRow(Row):
    """A row of tokens with what they mean.

    A row is sampled once; `dataclasses.replace(row)` is the same row before it is sampled.
    """

    layout: Layout = field(kw_only=True)
    settings: SamplingSettings = field(kw_only=True)  # with the seed, the sampler's name and steps
    index: int = 0  # among the rows that were laid out together

    ticket: Any = field(default=None, init=False)  # the request that it belongs to, in a server
    delivered: int = field(default=0, init=False)  # leading positions that were, and cannot change
    is_stopped: bool = field(default=False, init=False)  # the rest is not wanted: it leaves

    @property
    def planned_steps(self) -> int | None:
        """The number of steps, where it is known: block by block, every block takes its own."""
        if self.block is not None:
            return None
        return len(self.sampler) if isinstance(self.sampler, Sized) else self.settings.steps

    @cached_property
    def ids(self) -> list[int]:
        """The tokens, when the row is done."""
        assert self.filled is not None, "the row is not done"
        return [int(token) for token in self.filled.tolist()]

    @property
    def text(self) -> str:
        """The text, when the row is done."""
        return "".join(text for text, _ in self.pieces)

    @property
    def pieces(self) -> list[tuple[str, bool]]:
        """The pieces of the text, and whether each was given; together they are the text."""
        pieces = []
        for text, is_given in self.layout.pieces(self.ids):
            if not is_given:
                ends = [text.find(stop) for stop in self.settings.stop]
                text = text[: min((end for end in ends if end >= 0), default=len(text))]
            pieces.append((text, is_given))
        return pieces

    @property
    def fills(self) -> list[str]:
        """The texts of the holes, in their order."""
        return [text for text, is_given in self.pieces if not is_given]


@dataclass(frozen=True)
class Guesses:
    """A network's top predictions for every position, likeliest first."""

    tokens: Tensor  # (B, L, k)
    probs: Tensor  # (B, L, k)
    is_anchor: Tensor  # (B, L): rare in the predicted text


@dataclass
class TextFrame(Frame[TextRow]):
    """The texts after a step; step 0 is before the first."""

    guesses: Guesses | None = None
    states: dict[int, tuple[TokenState, ...]] = field(default_factory=dict, repr=False)  # by row

    @property
    def step(self) -> int:
        """The steps of the text that has taken most."""
        return max(self.steps)

    @cached_property
    def ids(self) -> list[list[int]]:
        """The tokens of each text."""
        tokens = self.tokens.tolist()
        return [ids[: len(row.layout)] for row, ids in zip(self.rows, tokens, strict=True)]

    @property
    def texts(self) -> list[str]:
        """The texts so far, hidden tokens as blocks."""
        return [row.layout.text(ids) for row, ids in zip(self.rows, self.ids, strict=True)]

    def trajectory_frame(self, row: int = 0) -> TrajectoryFrame:
        """Return one of the texts as terminal, player and GIF draw it."""
        if row not in self.states:
            self.states[row] = tuple(self._iterate_states(row))
        return TrajectoryFrame(self.step, self.nfe[row], self.states[row])

    def _iterate_states(self, row: int) -> Iterator[TokenState]:
        layout = self.rows[row].layout
        is_hidden = self.is_hidden[row].tolist()
        changed = self.changed[row].tolist()
        for position, text in layout.parts(self.ids[row]):
            if position is None:  # given text without a token
                yield TokenState(text or "", GIVEN)
                continue
            if is_hidden[position]:
                state = REMASKED if changed[position] else HIDDEN
            elif layout.is_fixed[position]:
                state = GIVEN
            else:
                state = REVEALED if changed[position] else VISIBLE
            guesses: list[tuple[str, float]] = []
            is_anchor = False
            if self.guesses is not None:
                is_anchor = bool(self.guesses.is_anchor[row, position])
                if is_hidden[position]:
                    guesses = self._list_guesses(row, position, self.guesses)
            yield TokenState(text or "", state, tuple(guesses), is_anchor)

    def _list_guesses(self, row: int, position: int, guesses: Guesses) -> list[tuple[str, float]]:
        """List the likeliest texts of a hidden position, with their probabilities."""
        layout = self.rows[row].layout
        tokens = guesses.tokens[row, position].tolist()
        names = [layout.tokenizer.decode([token]) for token in tokens]
        if layout.kinds[position] == WORD:  # the blank before it is given
            names = [name.removeprefix(" ") for name in names]
        return list(zip(names, guesses.probs[row, position].tolist(), strict=True))


def select_rows(frame: Frame[TextRow], places: Sequence[int]) -> TextFrame:
    """Return the frame of some of its rows."""
    rows = [frame.rows[i] for i in places]
    width = max(len(row.layout) for row in rows)
    index = torch.tensor(places)
    return TextFrame(
        rows=rows,
        tokens=frame.tokens[index, :width],
        is_hidden=frame.is_hidden[index, :width],
        changed=frame.changed[index, :width],
        steps=[frame.steps[i] for i in places],
        nfe=[frame.nfe[i] for i in places],
        settled=[frame.settled[i] for i in places],
        is_done=[frame.is_done[i] for i in places],
    )


def show_frame(
    frame: TextFrame, last: TextFrame | None, evaluator: ModelEvaluator, guesses: int
) -> None:
    """Add guesses to a frame, which a causal model has not; where nothing has changed since the last, share its own."""
    if last is None or last.rows != frame.rows or bool(frame.changed.any()):
        if guesses > 0 and evaluator.mask_id is not None:
            frame.guesses = predict_guesses(evaluator, frame, guesses)
        return
    frame.guesses = last.guesses
    if not bool(last.changed.any()):  # what was revealed there is no longer new
        frame.states = last.states


@torch.no_grad()
def predict_guesses(evaluator: ModelEvaluator, frame: TextFrame, count: int) -> Guesses:
    """Predict the likeliest tokens of a frame with the anchor network (one stage: the network), not counted as NFE."""
    model: FeatureModel = evaluator.model
    tokens = frame.tokens.to(evaluator.device)
    lengths = torch.tensor([len(row.layout) for row in frame.rows])
    valid = torch.arange(tokens.shape[1]) < lengths[:, None]
    level = mean_noise_level(frame.is_hidden.sum(-1) / lengths).to(tokens.device)
    padding = None if bool(valid.all()) else valid.to(tokens.device)
    head = find_anchor_head(model)
    if head is None:
        head = model.head
        features = compute_features(model, tokens, level, valid=padding).final
    else:
        features = compute_anchor_features(model, tokens, level, valid=padding)
    special = classify_tokens(frame.rows[0].layout.tokenizer).special
    special = F.pad(special, (0, model.config.vocab_size - len(special)), value=True)
    special = special.to(tokens.device)
    best = [
        head(part).float().masked_fill(special, -torch.inf).softmax(-1).topk(count, -1)
        for part in features.flatten(0, 1).split(MAX_POSITIONS)
    ]
    probs, ids = (torch.cat(part).unflatten(0, tokens.shape) for part in zip(*best))
    likeliest = torch.where(frame.is_hidden.to(tokens.device), ids[..., 0], tokens)
    return Guesses(ids.cpu(), probs.cpu(), rare_in_sequence(MAX_COUNT)(likeliest.cpu(), valid))


@dataclass(frozen=True)
class RowFormat:
    """The format of a model's rows (docs/generate.md, "Where a text ends")."""

    tokenizer: Tokenizer
    row: int  # the model's length
    is_framed: bool  # a text has exactly `length` tokens between BOS and EOS; else it may end early, at an EOS
    is_causal: bool

    @cached_property
    def longest(self) -> int:
        """The most tokens that a text can have; what begins and ends it is not counted."""
        return self.row - len(self.build_layout(()))

    def build_layout(self, pieces: tuple[str | Hole, ...]) -> Layout:
        """Lay pieces out as a row."""
        return build_layout(pieces, self.tokenizer, ends=self.is_framed, may_end=not self.is_framed)

    def layout_text(self, text: str) -> Layout:
        """Lay a whole text out, to be scored."""
        if not tokenize_piece(self.tokenizer, text)[0]:
            raise ValueError(
                f"the text {shorten(text)} has 0 tokens, a score takes at least 1: give more text"
            )
        layout = self.build_layout((text,))
        self._require_room(
            len(layout),
            f"the text {shorten(text)}",
            "measure it with `adlm eval ppl --data FILE`, ",
        )
        return layout

    def layout_prompt(
        self, prompt: str, length: int | None = None, max_new_tokens: int | None = None
    ) -> Layout:
        """Lay a prompt and the tokens after it out: `length` in all or `max_new_tokens`, by default as many as fit."""
        if length is not None and length > self.longest:
            ends = f"{self.row} tokens, {self.row - self.longest} of which begin or end a text"
            expected = f"expected at most {self.longest}, this model's rows have {ends}"
            raise SettingsError({"length": length}, f"{expected}; make it smaller")
        # A blank at the end of the prompt belongs to the first word after it.
        most = max(1, self.longest)
        layout = self.build_layout(parse_template((prompt, Hole(most, most))))
        hole = layout.spans[-1]
        taken = sum(span.end - span.start for span in layout.spans) - most
        length = self.longest if length is None else length
        if taken >= length:
            larger = (
                f"make length larger (at most {self.longest}) or " if taken < self.longest else ""
            )
            problem = f"the prompt {shorten(prompt)} has {taken} tokens and the text is to have {length} in all"
            raise ValueError(f"{problem}, the prompt's among them: {larger}make the prompt shorter")
        if max_new_tokens is not None and max_new_tokens > length - taken:
            expected = f"expected at most {length - taken} after the {taken} tokens of the prompt"
            problem = f"{expected} {shorten(prompt)}, this model's texts have at most {length}"
            raise SettingsError(
                {"max_new_tokens": max_new_tokens}, f"{problem}; make it smaller, or the prompt"
            )
        end = hole.start + (max_new_tokens or length - taken)
        return replace(
            layout,
            spans=(*layout.spans[:-1], Span(hole.start, end)),
            ids=layout.ids[:end] + layout.ids[hole.end :],
            is_fixed=layout.is_fixed[:end] + layout.is_fixed[hole.end :],
            kinds=layout.kinds[:end] + layout.kinds[hole.end :],
        )

    def layout_template(
        self, template: Template, get_evaluator: Callable[[], ModelEvaluator]
    ) -> Layout:
        """Lay a template out, with a length chosen for every hole."""
        pieces = parse_template(template)
        shown = shorten("".join(str(piece) for piece in pieces))
        holes = [piece for piece in pieces if isinstance(piece, Hole)]
        if not holes:
            remedy = "___{5} for five tokens, ___{2,8} for two to eight, or give a list with adlm.Hole(…) in it"
            problem = (
                f"the template {shown} has no hole: write ___ where something is to be filled in"
            )
            raise ValueError(f"{problem}, {remedy}")
        if self.is_causal and any(isinstance(piece, Hole) for piece in pieces[:-1]):
            problem = f"the template {shown} has text after a hole, and a causal model sees only what is before it"
            raise ValueError(f"{problem}: use a masked model (adlm, mdlm), or generate(prompt=…)")
        # Counted before it is laid out: a hole may be longer than any memory.
        room = (
            self.row
            + len(holes)
            - len(self.build_layout(set_hole_lengths(pieces, [1] * len(holes))))
        )
        lengths = [hole.min_tokens for hole in holes]
        self._require_room(
            self.row - room + sum(lengths), f"the template {shown} with its shortest holes"
        )
        for number, hole in enumerate(holes):  # from the left; those after it are at their shortest
            most = min(hole.max_tokens, room - sum(lengths) + lengths[number])
            if self.is_causal:  # nothing follows its hole: the text ends at an end token
                lengths[number] = most
            elif most > hole.min_tokens:
                layouts = {}
                for length in range(hole.min_tokens, most + 1):
                    lengths[number] = length
                    layouts[length] = self.build_layout(set_hole_lengths(pieces, lengths))
                lengths[number] = choose_hole_length(get_evaluator(), layouts, number)
        return self.build_layout(set_hole_lengths(pieces, lengths))

    def _require_room(self, tokens: int, name: str, remedy: str = "") -> None:
        if tokens > self.row:
            problem = (
                f"{name} takes {tokens} tokens with BOS and EOS; this model's rows have {self.row}"
            )
            raise ValueError(f"{problem}: make it shorter, {remedy}or use a model with longer rows")


@torch.no_grad()
def choose_hole_length(evaluator: ModelEvaluator, layouts: dict[int, Layout], number: int) -> int:
    """Choose the length of hole `number` under which the given tokens next to it are likeliest (docs/generate.md)."""
    # The length and the position that each row is for.
    targets = [
        (length, i) for length, layout in layouts.items() for i in find_neighbors(layout, number)
    ]
    if not targets:  # nothing is given: all lengths are equal
        return max(layouts)
    scores = {length: -LENGTH_PENALTY * math.log(length) for length in layouts}
    mask_id = evaluator.mask_id
    assert mask_id is not None
    for start in range(0, len(targets), MAX_ROWS):
        part = targets[start : start + MAX_ROWS]
        x0 = pad_sequence(
            [torch.tensor(layouts[length].ids) for length, _ in part], batch_first=True
        )
        valid = (
            torch.arange(x0.shape[1])
            < torch.tensor([len(layouts[length]) for length, _ in part])[:, None]
        )
        place = torch.arange(len(part)), torch.tensor([position for _, position in part])
        xt = x0.index_put(place, torch.tensor(mask_id))
        hidden = ((xt == mask_id) & valid).sum(-1) / valid.sum(-1)
        features = evaluator.features(xt.to(evaluator.device), mean_noise_level(hidden), valid)
        row, position = (each.to(evaluator.device) for each in place)
        logits = evaluator.logits_at(features[row, position])
        for (length, _), token, log_probs in zip(
            part, x0[place].tolist(), logits.float().log_softmax(-1).cpu()
        ):
            scores[length] += float(log_probs[token])
    return max(scores, key=lambda length: (scores[length], -length))


def find_neighbors(layout: Layout, number: int) -> list[int]:
    """Return the positions of given text next to hole `number`, on both sides up to the next hole."""
    at = [i for i, span in enumerate(layout.spans) if span.texts is None][number]
    neighbors: list[int] = []
    for span in layout.spans[max(0, at - 1) : at]:
        if span.texts is not None:
            neighbors += range(span.start, span.end)[-MAX_NEIGHBORS:]
    for span in layout.spans[at + 1 : at + 2]:
        if span.texts is not None:
            neighbors += range(span.start, span.end)[:MAX_NEIGHBORS]
    return neighbors


def as_list(value: Any, kind: str = "text") -> list[Any]:
    """Return one text or template, or several, as a list; a list that has a Hole in it is one template."""
    if not isinstance(value, Sequence) or isinstance(value, bytes):
        raise ValueError(f"a {kind} is a string, or there is a list of them; got {value!r}")
    is_one = isinstance(value, str) or any(isinstance(piece, Hole) for piece in value)
    several = [value] if is_one else list(value)
    kinds = str | Layout if kind == "text" else str | Sequence
    for each in several:
        if not isinstance(each, kinds) or isinstance(each, bytes):
            raise ValueError(f"a {kind} is a string, or there is a list of them; got {each!r:.80}")
    return several


def check_whole_numbers(least: int, **values: int | None) -> None:
    """Raise for a value that is given and is not a whole number from `least` on."""
    for name, value in values.items():
        if value is not None and (not isinstance(value, Integral) or value < least):
            raise ValueError(f"{name} must be a whole number from {least} on, got {value!r}")


def shorten(text: str) -> str:
    """Quote the beginning of a text, for an error."""
    return repr(text if len(text) <= 60 else text[:57] + "…")
