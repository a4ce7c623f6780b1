"""EleutherAI's harness (lm-eval) asks, a model of ours answers: `--model adlm`.

A log-likelihood is exact for a causal model and minus the bound for a masked one: below the truth, but for the error of
its draws. What is given stays visible, only what is asked for is hidden. The answers depend on the request and the seed
alone.

lm-eval finds the model by the entry point `lm_eval.models`. Releases up to 0.4.13 do not look there: for them
`python -m adlm.interop.lm_eval` (or the command `adlm-lm-eval`) is their command line with the model registered.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import entry_points
from itertools import islice
from typing import Any

import torch

from adlm.bundled import DEFAULT
from adlm.diffusion.categorical import SamplingParams
from adlm.diffusion.masking import corrupt, select, shift_tokens
from adlm.diffusion.orders import confidence
from adlm.diffusion.rng import CounterRng
from adlm.diffusion.schedules import LogLinear
from adlm.methods import METHODS, training_loss
from adlm.text.generation import GenerationRequest, choose_sampler, require_whole
from adlm.text.lm import LM, denoise_rows, load
from adlm.text.templates import TEXT, Hole, Layout, cut, parsed

NAME, GROUP = "adlm", "lm_eval.models"
AUTO = 16  # requests at a time where lm-eval says `auto`
GENERATED = 256  # tokens, unless the task says: the harness's own default
KNOWN = ("until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Asked:
    """A row of tokens, and which of them are asked for; the others are given."""

    ids: tuple[int, ...]
    is_asked: tuple[bool, ...]


def windows(total: int, start: int, room: int) -> Iterator[tuple[int, int, int]]:
    """Tokens `start` to `total` as windows (begin, end, first asked) of at most `room` tokens; each is asked for once.

    A window begins with at least one token that went before, the last one with as many as there is room for.
    """
    if room < 2:
        raise ValueError(f"windows of {room} tokens have no room for what went before: this model's rows are too short")
    begin, asked = max(0, start - 1), start
    if total - begin <= room:
        yield max(0, total - room), total, start
        return
    while asked < total:
        end = min(begin + room, total)
        yield (max(0, total - room) if end == total else begin), end, asked
        begin, asked = end - 1, end


def asked_rows(lm: LM, context: str, continuation: str) -> list[Asked]:
    """The rows that ask for a continuation after its context: several where both do not fit into one.

    Both are cut into tokens together. A token that ends after the context belongs to the continuation, and so do blanks
    at the context's end, as everywhere in the harness.
    """
    encoding = lm.tokenizer.bpe.encode(context + continuation, add_special_tokens=False)
    ids = tuple(encoding.ids)
    start = sum(end <= len(context.rstrip()) for _, end in encoding.offsets)
    first = () if lm.tokenizer.bos_id is None else (lm.tokenizer.bos_id,)
    last = (lm.tokenizer.eos_id,) if lm.row_format.is_framed and lm.tokenizer.eos_id is not None else ()
    rows = []
    for begin, end, asked in windows(len(ids), start, lm.row_format.longest) if start < len(ids) else ():
        is_asked = [False] * len(first) + [i >= asked for i in range(begin, end)] + [False] * len(last)
        if lm.row_format.is_causal:
            is_asked[0] = False  # nothing stands before it
        rows.append(Asked((*first, *ids[begin:end], *last), tuple(is_asked)))
    return rows


@torch.no_grad()
def nats_of(lm: LM, rows: Sequence[Asked], *, draws: int, seed: int, batch: int) -> list[float]:
    """Nats of what each row asks for: exact, or the bound's mean over `draws` noises with times spread evenly."""
    model, is_causal = lm.model.to(lm.device), lm.row_format.is_causal
    draws = 1 if is_causal else draws
    # Rows of like length together; a row's noise is its draw's, so the order changes nothing.
    order = sorted(range(len(rows)), key=lambda i: (len(rows[i].ids), i))
    numbers = [(row, draw) for row in order if any(rows[row].is_asked) for draw in range(draws)]
    nats = [[0.0] * draws for _ in rows]
    for start in range(0, len(numbers), batch):
        part = numbers[start : start + batch]
        lengths = torch.tensor([len(rows[row].ids) for row, _ in part])
        widest = int(lengths.max())
        x0 = torch.tensor([[*rows[row].ids, *[0] * (widest - len(rows[row].ids))] for row, _ in part])
        asked = torch.tensor([[*rows[r].is_asked, *[False] * (widest - len(rows[r].is_asked))] for r, _ in part])
        valid = torch.arange(widest) < lengths[:, None]
        if is_causal:
            noised = replace(shift_tokens(x0, valid=valid), hidden=select(asked[:, 1:], torch.ones(len(part))))
        else:
            assert model.config.mask_id is not None
            draw = torch.tensor([number for _, number in part])
            noised = corrupt(
                x0,
                LogLinear(),
                CounterRng.of(seed, draw),
                0,
                mask_id=model.config.mask_id,
                index=draw,
                total=draws,
                valid=valid,
                is_fixed=~asked,
            )
        loss = training_loss(model, noised.to(lm.device), score_entropy=METHODS[lm.method].score_entropy)
        for (row, number), value in zip(part, loss.row_nll.double().tolist(), strict=True):
            nats[row][number] = value
    return [math.fsum(each) / draws for each in nats]


def is_greedy(lm: LM, rows: Sequence[Asked], batch: int) -> list[bool]:
    """Whether each row's asked tokens are what decoding by the likeliest token writes there.

    A causal model decodes from left to right, a masked one a token a step, the surest first.
    """
    mask = lm.tokenizer.mask_id
    sampler = None if lm.row_format.is_causal else replace(confidence(1), steps=None)
    found = []
    for start in range(0, len(rows), batch):
        part = rows[start : start + batch]
        layouts = [
            Layout(
                lm.tokenizer,
                (),
                tuple(mask if asked else token for token, asked in zip(row.ids, row.is_asked, strict=True)),
                tuple(not asked for asked in row.is_asked),
                (TEXT,) * len(row.ids),
                may_end=False,
            )
            for row in part
        ]
        job = GenerationRequest(layouts, 1, sampler, SamplingParams(temperature=0), 0, None, batch, {})
        *_, frame = denoise_rows(lm.predictor, job, job.rows)
        found += [tuple(ids[: len(row.ids)]) == row.ids for row, ids in zip(part, frame.tokens.tolist(), strict=True)]
    return found


@dataclass(frozen=True)
class Wanted:
    """How a text is to go on."""

    context: str
    tokens: int  # to be written
    length: int  # the context's and these
    until: tuple[str, ...]
    temperature: float
    top_p: float
    top_k: int | None


class Answers:
    """What the harness asks of a model; with its class beside (`AdlmLM`), a model of the harness.

    `--model_args pretrained=NAME_OR_FOLDER,draws=64,sampler=NAME,steps=N,seed=0,device=cpu` and a sampler's own
    options, such as eta=0.02.
    """

    def __init__(
        self,
        pretrained: str = DEFAULT,
        draws: int = 64,
        sampler: str | None = None,
        steps: int | None = None,
        seed: int = 0,
        device: str = "auto",
        max_gen_toks: int = GENERATED,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.lm = load(str(pretrained), device=device)
        require_whole(1, draws=draws, steps=steps, max_gen_toks=max_gen_toks)
        require_whole(0, seed=seed)
        self.requests = AUTO if str(batch_size).startswith("auto") else int(batch_size)
        require_whole(1, batch_size=self.requests)
        self.draws, self.seed, self.max_gen_toks = 1 if self.lm.row_format.is_causal else draws, seed, max_gen_toks
        self.sampler, self.steps, self.options = sampler, steps, options
        choose_sampler(sampler, steps, options, is_causal=self.lm.row_format.is_causal, fills=False, hidden=1)

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None) -> Answers:
        """What model_args say goes before the command line's; its device is cuda:0 unless told, with or without one."""
        given = {name: value for name, value in (additional_config or {}).items() if value is not None}
        if given.get("device") == "cuda:0" and not torch.cuda.is_available():
            log.warning("this torch sees no CUDA device, which is lm-eval's default: the CPU computes")
            given["device"] = "cpu"
        return cls(**given | arg_dict)

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> Answers:
        """The same from `name=value,name=value`."""
        from lm_eval.utils import simple_parse_args_string

        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes beside its results."""
        kind = "exact" if self.lm.row_format.is_causal else "upper bound on the nll, mean over draws"
        return {
            "adlm": {
                "model": self.lm.name,
                "method": self.lm.method,
                "step": self.lm.step,
                "likelihood": kind,
                "draws": self.draws,
                "seed": self.seed,
                "sampler": self.sampler,
                "steps": self.steps,
                **self.options,
                "length": self.lm.row_format.row,
                "device": str(self.lm.device),
            }
        }

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """The log-likelihood of each continuation after its context, and whether greedy decoding writes it."""
        asked = [asked_rows(self.lm, *request.args) for request in requests]
        found = []
        for rows in _parts(asked, self.requests, "log-likelihoods", disable_tqdm):
            nats = self._sums(rows)
            flat = [row for each in rows for row in each]
            greedy = iter(is_greedy(self.lm, flat, self.requests))
            found += [(-value, all(list(islice(greedy, len(each))))) for value, each in zip(nats, rows, strict=True)]
        return found

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each whole text, window by window where it is longer than the model's rows."""
        asked = [asked_rows(self.lm, "", request.args[0]) for request in requests]
        parts = _parts(asked, self.requests, "whole texts", disable_tqdm)
        return [-value for rows in parts for value in self._sums(rows)]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """What each context is continued by, up to the first of its `until`; a repeated request gets another text."""
        places: dict[Wanted, list[int]] = defaultdict(list)
        for place, request in enumerate(requests):
            places[self._wanted(*request.args)].append(place)
        groups: dict[tuple[Any, ...], list[Wanted]] = defaultdict(list)  # texts that can share a job
        for each, where in places.items():
            groups[each.length, each.tokens, each.temperature, each.top_p, each.top_k, len(where)].append(each)
        texts = [""] * len(requests)
        size = self.requests
        parts = [group[i : i + size] for group in groups.values() for i in range(0, len(group), size)]
        for part in _shown(parts, "texts", disable_tqdm):
            written = iter(self._write(part, n=len(places[part[0]])))
            for each in part:
                for place in places[each]:
                    texts[place] = until_first(next(written), each.until)
        return texts

    def _sums(self, asked: Sequence[Sequence[Asked]]) -> list[float]:
        """Nats of each request, over its rows."""
        rows = [row for each in asked for row in each]
        batch = self.requests * self.draws
        nats = iter(nats_of(self.lm, rows, draws=self.draws, seed=self.seed, batch=batch))
        return [math.fsum(next(nats) for _ in each) for each in asked]

    def _wanted(self, context: str, how: dict[str, Any]) -> Wanted:
        if unknown := [name for name in how if name not in KNOWN]:
            raise ValueError(f"generation_kwargs {', '.join(unknown)}: an adlm model takes {', '.join(KNOWN)}")
        until = how.get("until") or ()
        until = (until,) if isinstance(until, str) else tuple(until)
        temperature = float(how.get("temperature") or 0.0) if how.get("do_sample", True) else 0.0
        tokens = int(how.get("max_gen_toks") or self.max_gen_toks)
        kept, tokens = fitted(self.lm, context, tokens)
        length = context_tokens(self.lm, kept) + tokens
        return Wanted(kept, tokens, length, until, temperature, float(how.get("top_p") or 1.0), how.get("top_k"))

    def _write(self, part: Sequence[Wanted], n: int) -> list[str]:
        """`n` texts for each, without their contexts."""
        first, sampler, steps = part[0], self.sampler, self.steps
        if not self.lm.row_format.is_causal:
            sampler = sampler or ("confidence" if first.temperature == 0 else None)
            if sampler in ("confidence", "margin") and steps is None:
                steps = first.tokens
        job = self.lm.build_request(
            [each.context for each in part],
            length=first.length,
            n=n,
            sampler=sampler,
            steps=steps,
            temperature=first.temperature,
            top_p=first.top_p,
            top_k=first.top_k,
            seed=self.seed,
            batch=self.requests,
            **self.options,
        )
        return [row.pieces[-1][0] for row in self.lm.generate_rows(job)]


def fitted(lm: LM, context: str, tokens: int) -> tuple[str, int]:
    """The context's end and the tokens to be written, both as many as fit into a row; a context keeps half at most."""
    longest = lm.row_format.longest
    taken = context_tokens(lm, context)
    if taken + tokens <= longest:
        return context, tokens
    written = min(tokens, max(longest - taken, longest // 2))
    pieces = cut(lm.tokenizer, context)[1]
    kept, keep = context, min(len(pieces), longest - written)
    while context_tokens(lm, kept) + written > longest:  # an end of a text may be cut into more tokens
        kept, keep = "".join(pieces[len(pieces) - keep :]) if keep else "", keep - 1
    log.warning(
        "a context of %d tokens and %d to be written do not fit into a row of %d: its last %d tokens and %d are",
        taken, tokens, longest, context_tokens(lm, kept), written,
    )  # fmt: skip
    return kept, written


def context_tokens(lm: LM, context: str) -> int:
    """Tokens of a context that goes on; a blank at its end is the next word's."""
    return sum(span.end - span.start for span in lm.row_format.lay(parsed((context, Hole.of(1)))).spans) - 1


def until_first(text: str, until: Sequence[str]) -> str:
    """The text up to where one of `until` begins first."""
    ends = [place for stop in until if stop and (place := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text


def _parts(asked: list[Any], size: int, title: str, is_quiet: bool) -> Iterator[list[Any]]:
    """So many requests at a time, with a progress bar."""
    return _shown([asked[i : i + size] for i in range(0, len(asked), size)], title, is_quiet)


def _shown(parts: list[Any], title: str, is_quiet: bool) -> Iterator[Any]:
    from rich.console import Console
    from rich.progress import track

    # lm-eval prints its results to stdout: what is said on the way goes to stderr.
    return iter(track(parts, description=title, console=Console(stderr=True), disable=is_quiet))


@cache
def harness_class() -> type[Any]:
    """The class that lm-eval makes a model of: `Answers` as one of its own."""
    try:
        from lm_eval.api.model import LM as Harness
    except ImportError as error:
        raise ImportError(f"lm-eval is not installed ({error}): pip install 'adlm[eval]'") from error
    return type("AdlmLM", (Answers, Harness), {"__module__": __name__, "__doc__": Answers.__doc__})


def __getattr__(name: str) -> Any:
    if name == "AdlmLM":  # made when asked for: this file is read where lm-eval is not installed, too
        return harness_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register() -> None:
    """Make `--model adlm` known to lm-eval, where it did not look for entry points itself."""
    harness_class()  # says what is missing
    import lm_eval.models  # noqa: F401 (its own models first: with any there, it does not look for them again)
    from lm_eval.api.registry import MODEL_REGISTRY, register_model

    if NAME not in MODEL_REGISTRY:
        found = [entry for entry in entry_points(group=GROUP) if entry.name == NAME]
        register_model(NAME)(found[0].load() if found else harness_class())


def main() -> None:
    """lm-eval's command line, with our model registered."""
    register()
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    from adlm.interop.lm_eval import main as imported  # one copy of this file, not two

    imported()
