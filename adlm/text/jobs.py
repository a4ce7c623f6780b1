"""What is asked of a model, checked before anything runs: the rows to be written, the sampler, the settings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from adlm.data.tokenizers import Tokenizer
from adlm.diffusion.categorical import Draw
from adlm.diffusion.orders import Order
from adlm.diffusion.plans import Plan
from adlm.methods import SAMPLERS, build_sampler, named
from adlm.text.templates import Hole, Layout, Pieces, Template, cut, holes_of, lay_out, parsed

STEPS = 128  # of a plan, unless told
Templates = Template | Sequence[Template]
Fit = Callable[[Pieces, int], Pieces]  # pieces and the tokens there is room for -> pieces with holes of one length


@dataclass(frozen=True)
class Job:
    """What is to be written, and how."""

    layouts: list[Layout]
    n: int
    sampler: Plan | Order | None
    how: Draw
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
        """How many steps it takes, where that is known."""
        return len(self.sampler) if isinstance(self.sampler, Plan) else self.settings.get("steps")


@dataclass(frozen=True)
class Form:
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
        return lay_out(pieces, self.tokenizer, ends=self.is_framed, may_end=not self.is_framed)

    def given(self, text: str) -> Layout:
        """A whole text as a row."""
        if not cut(self.tokenizer, text)[0]:
            raise ValueError(f"{text!r} has no tokens: there is nothing to score")
        return self._fitting(self.lay((text,)), f"the text {shortened(text)}")

    def continuation(self, prompt: str, length: int | None) -> Layout:
        """A row that begins with the prompt."""
        if not isinstance(prompt, str):
            raise ValueError(f"a prompt is a string, or a list of strings; got {prompt!r}")
        length = self.longest if length is None else length
        if not 1 <= length <= self.longest:
            raise ValueError(
                f"length must be between 1 and {self.longest}, got {length}: this model's rows have {self.row} tokens, "
                f"{self.row - self.longest} of which begin or end a text"
            )
        pieces = parsed((prompt, Hole.of(1)))
        taken = sum(span.end - span.start for span in self.lay(pieces).spans) - 1
        if taken >= length:
            raise ValueError(
                f"the prompt {shortened(prompt)} has {taken} tokens and the text is to have {length} in all: "
                f"make length larger (at most {self.longest}) or the prompt shorter"
            )
        if self.is_causal and taken == 0 and self.tokenizer.bos_id is None:
            raise ValueError("a causal model continues text, and this tokenizer has no token that begins one: prompt")
        return self.lay(parsed((prompt, Hole.of(length - taken))))

    def filling(self, template: Template, fit: Fit) -> Layout:
        """A row with holes, all of one length now."""
        pieces = parsed(template)
        shown = shortened("".join(str(piece) for piece in pieces))
        if not holes_of(pieces):
            raise ValueError(
                f"the template {shown} has no hole: write ___ where something is to be filled in, "
                "___{5} for five tokens, ___{2,8} for two to eight, or give a list with adlm.Hole(…) in it"
            )
        if self.is_causal and any(isinstance(piece, Hole) for piece in pieces[:-1]):
            raise ValueError(
                f"the template {shown} has text after a hole, and a causal model sees only what is before it: "
                "fill in with a masked model (adlm, mdlm), or continue with generate(prompt=…)"
            )
        least = tuple(Hole.of(piece.least) if isinstance(piece, Hole) else piece for piece in pieces)
        shortest = self._fitting(self.lay(least), f"the template {shown} with its holes as short as can be")
        room = self.row - len(shortest) + sum(hole.least for hole in holes_of(pieces))
        return self.lay(fit(pieces, room))

    def _fitting(self, layout: Layout, what: str) -> Layout:
        if len(layout) > self.row:
            raise ValueError(
                f"{what} takes {len(layout)} tokens with what begins and ends it; this model's rows have {self.row}: "
                "make it shorter, or take a model with longer rows"
            )
        return layout


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
    takes_steps = "steps" in inspect.signature(named(SAMPLERS, name, "sampler")).parameters
    if takes_steps:
        steps = steps or (hidden if name in ("confidence", "margin") else STEPS)
    if steps is not None:
        options = {"steps": steps, **options}
    return build_sampler(name, **options), {"sampler": name, **options}


def batch_of(template: Templates) -> list[Template]:
    """One template or a list of them: a list that has a Hole in it is one."""
    if isinstance(template, str):
        return [template]
    if any(isinstance(piece, Hole) for piece in template):
        return [cast(Template, template)]
    return list(cast(Sequence[Template], template))


def shortened(text: str) -> str:
    """A text in an error: its beginning, quoted."""
    return repr(text if len(text) <= 60 else text[:57] + "…")
