"""What is asked of a model, checked before anything runs: the rows to be written, the sampler, the settings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, cast

from adlm.data.tokenizers import Tokenizer
from adlm.diffusion.categorical import SamplingParams
from adlm.diffusion.orders import Order
from adlm.diffusion.plans import Plan
from adlm.methods import SAMPLERS, build_sampler, look_up
from adlm.text.templates import Hole, Layout, Pieces, Template, tokenize_piece, find_holes, build_layout, parse_template, set_hole_lengths

DEFAULT_STEPS = 128  # of a plan, unless told
SETTINGS = ("length", "n", "sampler", "temperature", "top_p", "top_k", "seed", "block", "batch")
Templates = Template | Sequence[Template]
Fit = Callable[[Pieces, int], Pieces]  # pieces and the tokens there is room for -> pieces with holes of one length


@dataclass(frozen=True)
class GenerationRequest:
    """What is to be written, and how."""

    layouts: list[Layout]
    n: int
    sampler: Plan | Order | None
    how: SamplingParams
    seed: int
    block: int | None
    batch: int
    settings: dict[str, Any]

    @property
    def rows(self) -> list[tuple[Layout, int]]:
        """Every row's layout and its number among the n of its prompt."""
        return [(layout, number) for layout in self.layouts for number in range(self.n)]

    @property
    def steps(self) -> int | None:
        """How many steps it takes, where that is known: block by block, every block takes its own."""
        if self.block is not None:
            return None
        return len(self.sampler) if isinstance(self.sampler, Plan) else self.settings.get("steps")


@dataclass(frozen=True)
class RowFormat:
    """What a model's rows look like.

    Where every document had a row of its own, a masked model is told where a text ends: all of its `length` tokens are
    text. Elsewhere a text may end early, where an end token is written.
    """

    tokenizer: Tokenizer
    row: int  # the model's length
    is_framed: bool
    is_causal: bool

    @property
    def longest(self) -> int:
        """The most tokens that a text can have; what begins and ends it is not counted."""
        ends = self.is_framed and self.tokenizer.eos_id is not None
        return self.row - int(self.tokenizer.bos_id is not None) - int(ends)

    def lay(self, pieces: Pieces) -> Layout:
        """Pieces as a row."""
        return build_layout(pieces, self.tokenizer, ends=self.is_framed, may_end=not self.is_framed)

    def given(self, text: str) -> Layout:
        """A whole text as a row."""
        if not isinstance(text, str):
            raise ValueError(f"a text is a string; got {text!r}: give one, or a list of them")
        tokens, least = len(tokenize_piece(self.tokenizer, text)[0]), 1
        why = ""
        if self.is_causal and self.tokenizer.bos_id is None:  # the first token is not asked for
            least, why = 2, " (this tokenizer has no token that begins one)"
        if tokens < least:
            raise ValueError(
                f"the text {shorten(text)} has {tokens} tokens, and a score takes at least {least}: "
                f"give more text{why}"
            )
        layout = self.lay((text,))
        self._require_room(len(layout), f"the text {shorten(text)}")
        return layout

    def asked(self, layout: Layout) -> tuple[int, int]:
        """Tokens and bytes of a given text that a model is asked for: all, or what follows the first token."""
        tokens, texts = len(layout.spans[0].texts or ()), layout.spans[0].texts or ()
        if self.is_causal and self.tokenizer.bos_id is None:
            tokens, texts = tokens - 1, texts[1:]
        return tokens, len("".join(texts).encode("utf-8"))

    def continuation(self, prompt: str, length: int | None) -> Layout:
        """A row that begins with the prompt."""
        if not isinstance(prompt, str):
            raise ValueError(f"a prompt is a string, or a list of strings; got {prompt!r}")
        length = self.longest if length is None else length
        if not isinstance(length, Integral) or not 1 <= length <= self.longest:
            raise ValueError(
                f"length must be a whole number between 1 and {self.longest}, got {length}: this model's rows have "
                f"{self.row} tokens, {self.row - self.longest} of which begin or end a text"
            )
        pieces = parse_template((prompt, Hole.of_length(1)))
        taken = sum(span.end - span.start for span in self.lay(pieces).spans) - 1
        if taken >= length:
            larger = f"make length larger (at most {self.longest}) or " if taken < self.longest else ""
            raise ValueError(
                f"the prompt {shorten(prompt)} has {taken} tokens and the text is to have {length} in all, the "
                f"prompt's among them: {larger}make the prompt shorter"
            )
        if self.is_causal and taken == 0 and self.tokenizer.bos_id is None:
            raise ValueError(
                f"the prompt {shorten(prompt)} has no tokens, and this causal model's tokenizer has none that "
                "begins a text: give a prompt to continue"
            )
        return self.lay(parse_template((prompt, Hole.of_length(length - taken))))

    def filling(self, template: Template, fit: Fit) -> Layout:
        """A row with holes, all of one length now."""
        pieces = parse_template(template)
        shown = shorten("".join(str(piece) for piece in pieces))
        if not find_holes(pieces):
            raise ValueError(
                f"the template {shown} has no hole: write ___ where something is to be filled in, "
                "___{5} for five tokens, ___{2,8} for two to eight, or give a list with adlm.Hole(…) in it"
            )
        if self.is_causal and any(isinstance(piece, Hole) for piece in pieces[:-1]):
            raise ValueError(
                f"the template {shown} has text after a hole, and a causal model sees only what is before it: "
                "fill in with a masked model (adlm, mdlm), or continue with generate(prompt=…)"
            )
        holes = find_holes(pieces)
        # Counted before it is laid out: a hole may be asked for that no memory holds.
        given = len(self.lay(set_hole_lengths(pieces, [1] * len(holes)))) - len(holes)
        least = given + sum(hole.least for hole in holes)
        self._require_room(least, f"the template {shown} with its holes as short as can be")
        room = self.row - given
        if self.is_causal:  # nothing stands after its hole: the text ends where it writes an end
            return self.lay(set_hole_lengths(pieces, [min(holes[0].most, room)]))
        return self.lay(fit(pieces, room))

    def _require_room(self, tokens: int, what: str) -> None:
        if tokens > self.row:
            raise ValueError(
                f"{what} takes {tokens} tokens with what begins and ends it; this model's rows have {self.row}: "
                "make it shorter, or take a model with longer rows"
            )


def choose_sampler(
    name: str | None, steps: int | None, options: dict[str, Any], *, is_causal: bool, fills: bool, hidden: int
) -> tuple[Plan | Order | None, dict[str, Any]]:
    """The sampler by name, and what to say of it. Unless told: the paper's for writing, the surest first for holes."""
    if is_causal:
        if name not in (None, "left_to_right") or steps is not None or options:
            said = name or ", ".join(["steps"] * (steps is not None) + list(options))
            raise ValueError(f"a causal model writes from left to right, a token a step: leave {said} out")
        return None, {"sampler": "left_to_right"}
    name = name or ("confidence" if fills else "remask_loop")
    if not isinstance(name, str):
        raise ValueError(f"sampler must be a name, one of {', '.join(SAMPLERS)}; got a {type(name).__name__}")
    factory = look_up(SAMPLERS, name, "sampler")
    own = inspect.signature(factory).parameters
    if unknown := [option for option in options if option not in own]:
        raise ValueError(
            f"there is no setting {', '.join(unknown)}: the sampler {name} has {', '.join(own) or 'none of its own'}; "
            f"all have {', '.join(SETTINGS)}"
        )
    if "steps" in own and steps is None:
        steps = hidden if factory in (SAMPLERS["confidence"], SAMPLERS["margin"]) else DEFAULT_STEPS
    if steps is not None:
        options = {"steps": steps, **options}
    return build_sampler(name, **options), {"sampler": name, **options}


def as_templates(template: Templates) -> list[Template]:
    """One template or a list of them: a list that has a Hole in it is one."""
    if isinstance(template, str):
        return [template]
    if not isinstance(template, Sequence):
        raise ValueError(f"a template is a string, or a list of strings and Holes; got {template!r}")
    if any(isinstance(piece, Hole) for piece in template):
        return [cast(Template, template)]
    return list(cast(Sequence[Template], template))


def check_whole_numbers(least: int, **values: int | None) -> None:
    """Every number that is given is a whole one, and not less than `least`."""
    for name, value in values.items():
        if value is not None and (not isinstance(value, Integral) or value < least):
            raise ValueError(f"{name} must be a whole number from {least} on, got {value!r}")


def shorten(text: str) -> str:
    """A text in an error: its beginning, quoted."""
    return repr(text if len(text) <= 60 else text[:57] + "…")
