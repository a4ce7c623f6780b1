"""A trained model with its tokenizer: `load` one, then generate, fill in, stream and score text."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Unpack

import torch

from adlm.bundled import DEFAULT, MODELS, find_bundled_model
from adlm.convert import is_lineage, load_lineage
from adlm.data.hub import HUB_NAME, download_model
from adlm.devices import pick_device
from adlm.diffusion.categorical import SamplingParams
from adlm.diffusion.features import find_anchor_head
from adlm.diffusion.masking import ForwardProcess
from adlm.diffusion.objectives import OBJECTIVES, GivenObjective, choose_objective
from adlm.diffusion.plans import Plan
from adlm.diffusion.samplers import ByScore, LeftToRight, choose_sampler, refuse_samplers
from adlm.diffusion.sampling import Sampler, sample, sample_together
from adlm.errors import suggest_names
from adlm.likelihood import NatsSettings, RowNats, Texts, row_nats
from adlm.models import folder as model_folder
from adlm.models.evaluator import ModelEvaluator, build_evaluator
from adlm.models.network import NETWORKS, TRANSFORMER, GivenNetwork, choose_network
from adlm.settings import (
    DEFAULT_SAMPLER,
    INFILL_SAMPLER,
    SamplingArguments,
    SamplingSettings,
    SettingsError,
)
from adlm.text import generation
from adlm.text.generation import RowFormat, Templates, TextFrame, TextRow, show_frame
from adlm.text.templates import Layout, Template, classify_tokens
from adlm.view.trajectory import Trajectory, TrajectoryFrame

Prompts = str | Sequence[str]


class GenerationOutput(list[str]):
    """A list of texts, `n` for every prompt or template one after the other, and what they took."""

    def __init__(self, rows: Sequence[TextRow], settings: dict[str, Any], seconds: float) -> None:
        super().__init__(row.text for row in rows)
        self.rows = list(rows)
        self.settings = settings
        self.seconds = seconds
        self.nfe_each = [row.nfe for row in rows]
        self.nfe = max(self.nfe_each, default=0)  # network evaluations of the text that took most

    @property
    def texts(self) -> list[str]:
        return list(self)

    def __str__(self) -> str:
        return "\n\n".join(self)

    def as_dict(self) -> dict[str, Any]:
        """Return a dict for JSON."""
        return {
            name: getattr(self, name)
            for name in ("texts", "nfe", "seconds", "settings", "nfe_each")
        }


@dataclass(frozen=True)
class Score:
    """Nats per token of a text, its standard error over the noise, and bits per byte. A bound unless `is_exact`."""

    nll: float
    stderr: float
    tokens: int
    bits_per_byte: float
    is_exact: bool

    @property
    def ppl(self) -> float:
        return math.exp(self.nll) if self.nll < 700 else math.inf


class LM:
    """A trained model with its tokenizer, as `adlm.load` returns it.

    `max_new_tokens` counts the tokens after the prompt, `length` the prompt's too; by default a text is as long as the
    model allows. `SamplingSettings` has all settings, which are given as one object, by name, or both; the names of
    transformers, diffusers and LLaDA are taken too.
    """

    def __init__(
        self,
        loaded: model_folder.LoadedModel,
        name: str,
        *,
        device: str = "auto",
        deterministic: bool = False,
    ) -> None:
        if loaded.tokenizer is None:
            raise ValueError(
                f"{name} has no tokenizer.json, so its tokens cannot be read as text: copy the one that its data was "
                "prepared with (`adlm prepare` writes it into the data's folder), or convert a .ckpt with --tokenizer"
            )
        self.loaded = loaded
        self.model = loaded.model.eval()
        self.tokenizer = loaded.tokenizer
        self.objective = loaded.objective
        self.method = loaded.method
        self.step = loaded.step
        self.name = name
        self._check_parts()
        self.device = pick_device(device)
        self.deterministic = deterministic
        config = self.model.config
        is_framed = loaded.rows == "documents" and not config.is_causal
        self.row_format = RowFormat(self.tokenizer, config.length, is_framed, config.is_causal)

    def _check_parts(self) -> None:
        """Raise if model, tokenizer and objective do not belong together."""
        config = self.model.config
        largest = self.tokenizer.max_id
        if config.is_causal and self.tokenizer.bos_id is None:
            raise ValueError(
                f"{self.name}: its tokenizer has no BOS token, which a causal model reads first: name bos_token, or "
                "use `adlm reason ask` if it was trained to reason"
            )
        if not config.is_causal and config.mask_id != self.tokenizer.mask_id:
            raise ValueError(
                f"{self.name}: the model's mask is token {config.mask_id}, the tokenizer's {self.tokenizer.mask_id}: "
                "use the tokenizer.json that the model was trained with"
            )
        if self.objective.is_causal != config.is_causal or largest >= config.vocab_size:
            raise ValueError(
                f"{self.name}: its files do not belong together (method {self.method!r}, is_causal "
                f"{config.is_causal}; tokens up to {largest}, the model {config.vocab_size}): copy or download them "
                "again"
            )

    def __repr__(self) -> str:
        size = sum(parameter.numel() for parameter in self.model.parameters())
        return f"LM({self.name!r}, method={self.method!r}, parameters={size:,}, device={str(self.device)!r})"

    @cached_property
    def evaluator(self) -> ModelEvaluator:
        """The model, prepared for sampling."""
        fixed_batch = SamplingSettings().batch if self.deterministic else None
        return build_evaluator(self.model, self.device, fixed_batch=fixed_batch)

    def generate(
        self,
        prompt: Prompts = "",
        settings: SamplingSettings | None = None,
        **changes: Unpack[SamplingArguments],
    ) -> GenerationOutput:
        """Generate `n` texts that begin with the prompt, or with each of several prompts."""
        return self.fill_rows(self.layout_rows(prompt, settings, **changes))

    def infill(
        self,
        template: Templates,
        settings: SamplingSettings | None = None,
        **changes: Unpack[SamplingArguments],
    ) -> GenerationOutput:
        """Fill the holes of templates such as "The ___ sat on the ___{2}."; the settings are those of `generate`
        without lengths and stop."""
        return self.fill_rows(self.layout_rows("", settings, template=template, **changes))

    def layout_rows(
        self,
        prompt: str | Sequence[str | Layout] = "",
        settings: SamplingSettings | None = None,
        *,
        template: Templates | None = None,
        **changes: Unpack[SamplingArguments],
    ) -> list[TextRow]:
        """Check the arguments of `generate` or `infill` and lay out the rows, `n` for each text one after the other.

        A prompt that is laid out already is taken as it is.
        """
        if not isinstance(settings, SamplingSettings | None):
            expected = "expected SamplingSettings; give settings by name, such as n=5"
            raise SettingsError({"settings": settings}, expected)
        settings = SamplingSettings.parse("python", settings, **changes).draw_seed()
        chosen = None
        if template is None:
            layouts = [
                text
                if isinstance(text, Layout)
                else self.row_format.layout_prompt(text, settings.length, settings.max_new_tokens)
                for text in generation.as_list(prompt)
            ]
        elif prompt != "" or settings.length or settings.max_new_tokens or settings.stop:
            raise ValueError("a template sets all positions: leave prompt, lengths and stop out")
        else:
            # Raises before a network chooses the lengths of holes.
            chosen = self.choose_sampler(settings, default=INFILL_SAMPLER)
            evaluator = partial(getattr, self, "evaluator")  # made when a length is to be chosen
            templates = generation.as_list(template, "template")
            layouts = [self.row_format.layout_template(each, evaluator) for each in templates]
        if not layouts:
            raise ValueError(
                "there is nothing to generate: give a prompt (it may be empty) or a template, or a list"
            )
        if chosen is None or isinstance(chosen[0], ByScore):  # whose steps may be the hidden tokens
            hidden = max(layout.is_fixed.count(False) for layout in layouts)
            default = DEFAULT_SAMPLER if template is None else INFILL_SAMPLER
            chosen = self.choose_sampler(settings, default=default, hidden=hidden)
        sampler, described = chosen
        used = {
            "sampler": described.pop("sampler"),
            "steps": described.pop("steps", None),
            "options": described or None,
        }
        settings = settings.model_copy(update=used)
        assert settings.seed is not None
        sampling = SamplingParams.from_settings(settings)
        rows: list[TextRow] = []
        for layout in layouts:
            tokens = torch.tensor(layout.ids)
            is_fixed = torch.tensor(layout.is_fixed)
            kinds = torch.tensor(layout.kinds)
            for number in range(settings.n):
                row = TextRow(
                    tokens,
                    sampler,
                    is_fixed,
                    seed=settings.seed,
                    number=number,
                    block=settings.block,
                    sampling=sampling,
                    kinds=kinds,
                    layout=layout,
                    settings=settings,
                    index=len(rows),
                )
                rows.append(row)
        return rows

    def choose_sampler(
        self, settings: SamplingSettings, *, default: str = DEFAULT_SAMPLER, hidden: int = 1
    ) -> tuple[Plan | Sampler, dict[str, Any]]:
        """Build the sampler and describe it; a causal model has one."""
        if self.row_format.is_causal:
            refuse_samplers(settings)
            return LeftToRight(), {"sampler": "left_to_right"}
        return choose_sampler(settings, hidden=hidden, default=default, allow_import=True)

    def describe(self, rows: Sequence[TextRow]) -> dict[str, Any]:
        """Return what the texts of rows that were laid out together follow from."""
        settings = rows[0].settings
        steps = {} if settings.steps is None else {"steps": settings.steps}
        lengths = [sum(span.end - span.start for span in row.layout.spans) for row in rows]
        return {
            "model": self.name,
            "method": self.method,
            "sampler": settings.sampler,
            **steps,
            **(settings.options or {}),
            **settings.describe_texts(),
            "device": str(self.device),
            "length": max(lengths),
        }

    def fill_rows(self, rows: Sequence[TextRow]) -> GenerationOutput:
        """Sample rows that were laid out together, a batch at a time."""
        began = time.perf_counter()
        banned = classify_tokens(self.tokenizer).banned
        batch = rows[0].settings.batch
        for first in range(0, len(rows), batch):
            for _ in sample(self.evaluator, rows[first : first + batch], banned=banned):
                pass  # a row that is done has its tokens
        return GenerationOutput(rows, self.describe(rows), time.perf_counter() - began)

    def stream_rows(self, rows: Sequence[TextRow], guesses: int = 0) -> Iterator[TextFrame]:
        """Yield the texts of rows after every step, in one batch; step 0 is before the first."""
        classes = classify_tokens(self.tokenizer)
        known = int((~classes.special).sum())
        generation.check_whole_numbers(0, guesses=guesses)
        if guesses > known:
            raise ValueError(
                f"guesses must be between 0 and {known}, this model's vocabulary size; got {guesses}"
            )
        for row in rows:
            row.every_step = True

        def iterate() -> Iterator[TextFrame]:
            last: TextFrame | None = None
            for each in sample_together(self.evaluator, rows, banned=classes.banned):
                frame = TextFrame(**vars(each))
                show_frame(frame, last, self.evaluator, guesses)
                last = frame
                yield frame

        return iterate()

    def estimate_nats(
        self,
        rows: Sequence[Sequence[int]],
        is_scored: Sequence[Sequence[bool]],
        *,
        draws: int,
        seed: int,
        batch: int,
    ) -> RowNats:
        """Estimate the nats of the scored tokens of rows, the others given."""
        texts = Texts(rows, is_scored)
        settings = NatsSettings(draws, seed, batch=batch)
        return row_nats(self.model.to(self.device), texts, self.objective, settings)

    def build_trajectory(
        self,
        frames: Sequence[TrajectoryFrame],
        rows: Sequence[TextRow],
        *,
        title: str = "",
        seconds: float = 0.0,
    ) -> Trajectory:
        """Collect the frames of the first of some rows."""
        guesser = "anchor network" if find_anchor_head(self.model) else "network"
        title = title or f"{self.name} · {rows[0].settings.sampler}"
        return Trajectory(title, tuple(frames), seconds, self.describe(rows), guesser)

    def stream(
        self,
        prompt: Prompts = "",
        settings: SamplingSettings | None = None,
        *,
        template: Templates | None = None,
        guesses: int = 0,
        **changes: Unpack[SamplingArguments],
    ) -> Iterator[TextFrame]:
        """Yield the texts of `generate` or `infill` after every step, with the anchor network's likeliest tokens."""
        rows = self.layout_rows(prompt, settings, template=template, **changes)
        return self.stream_rows(rows, guesses)

    def record(
        self,
        prompt: str = "",
        settings: SamplingSettings | None = None,
        *,
        template: Template | None = None,
        title: str = "",
        guesses: int = 3,
        **changes: Unpack[SamplingArguments],
    ) -> Trajectory:
        """Record one text at every step, for a notebook, `adlm.write_player` or `adlm.write_gif`."""
        rows = self.layout_rows(prompt, settings, template=template, **changes)
        count = rows[0].settings.n
        if count > 1:
            raise SettingsError({"n": count}, "one text is recorded; leave it out")
        if len(rows) > 1:
            raise ValueError(
                f"there are {len(rows)} texts, and one text is recorded: give one, or use stream"
            )
        began = time.perf_counter()
        frames = [frame.trajectory_frame() for frame in self.stream_rows(rows, guesses)]
        seconds = time.perf_counter() - began
        return self.build_trajectory(frames, rows, title=title, seconds=seconds)

    def score(
        self, texts: Prompts, *, draws: int = 64, seed: int = 0, batch: int = 64
    ) -> list[Score]:
        """Return each text's nats per token (of a masked model an upper bound), its standard error, bits per byte."""
        generation.check_whole_numbers(1, draws=draws, batch=batch)
        generation.check_whole_numbers(0, seed=seed)
        layouts = [self.row_format.layout_text(text) for text in generation.as_list(texts)]
        if not layouts:
            raise ValueError("there is no text to score: give one, or a list of them")
        if draws < 2 and not self.row_format.is_causal:
            raise ValueError(
                f"draws must be at least 2, or there is no standard error; got {draws}: 64 is usual"
            )
        is_scored = [
            [any(x.start <= i < x.end for x in row.spans) for i in range(len(row))]
            for row in layouts
        ]
        estimate = self.estimate_nats(
            [row.ids for row in layouts], is_scored, draws=draws, seed=seed, batch=batch
        )
        columns = (estimate.nats, estimate.noise_variance.sqrt(), estimate.is_exact)
        scores = []
        for layout, nats, error, is_exact in zip(
            layouts, *(each.tolist() for each in columns), strict=True
        ):
            whole = layout.spans[0]
            tokens = len(whole.texts or ())
            bits_per_byte = nats / math.log(2) / len(whole.text.encode("utf-8"))
            scores.append(Score(nats / tokens, error / tokens, tokens, bits_per_byte, is_exact))
        return scores

    def save(self, folder: str | Path) -> Path:
        """Write config.json, model.safetensors and tokenizer.json, from which `adlm.load` makes an equal model."""
        return model_folder.export_model(self.loaded, Path(folder), is_quantized=False)


def load(
    model: str | Path = DEFAULT,
    *,
    device: str = "auto",
    deterministic: bool = False,
    verify: bool | None = None,
    network: GivenNetwork | None = None,
    objective: GivenObjective | None = None,
) -> LM:
    """Load a trained model: a bundled one by name, a run or checkpoint folder, or a checkpoint of the lineage by path
    or OWNER/NAME on the Hub (docs/convert.md).

    On a GPU a seed gives one text only if `deterministic`: every evaluation then has the same number of rows. A folder
    may name a network or an objective that is not built in. Nothing in it is imported: `network` and `objective` are
    then the class, the object, or `module:object`; for what is built in they are refused.
    """
    path = find_model(model)
    if is_lineage(path):
        choose_network(TRANSFORMER, network)  # a checkpoint of the lineage takes no other
        loaded = load_lineage(path)[0]
        process = ForwardProcess(loaded.model.config.mask_id)
        choose_objective(loaded.objective.name, process, objective)
    else:
        loaded = model_folder.load_model(path, verify=verify, network=network, objective=objective)
    return LM(loaded, str(model), device=device, deterministic=deterministic)


def load_models(
    models: Sequence[str],
    *,
    device: str = "auto",
    deterministic: bool = False,
    network: str | None = None,
    objective: str | None = None,
) -> Iterator[LM]:
    """Load models one by one; a network and an objective are for those of them that name one of their own."""
    own_network: set[str] = set()
    own_objective: set[str] = set()
    if network is not None or objective is not None:
        for name in models:
            path = find_model(name)
            if is_lineage(path):
                continue
            described = model_folder.read_config_json(path)
            if described.network not in NETWORKS:
                own_network.add(name)
            if described.objective_name not in OBJECTIVES:
                own_objective.add(name)
    for name in models:
        # Where none has an own one, the first model says that it takes none.
        yield load(
            name,
            device=device,
            deterministic=deterministic,
            network=network if name in own_network or not own_network else None,
            objective=objective if name in own_objective or not own_objective else None,
        )


def find_model(model: str | Path) -> Path:
    """Return the folder of a bundled model, a run's latest checkpoint or another model, or a checkpoint's file."""
    folder = (
        find_bundled_model(str(model)) if str(model) in MODELS else Path(model)
    )  # ./NAME is a folder of that name
    if not folder.exists() and HUB_NAME.fullmatch(str(model)):
        folder = download_model(str(model))
    if folder.suffix == ".ckpt" and folder.is_file():
        return folder
    if not folder.exists():
        hint = suggest_names(str(model), MODELS)
        known = f"give a run folder, a checkpoint's, or one of {', '.join(MODELS)}"
        raise FileNotFoundError(f"there is no model {str(model)!r}{hint}: {known}")
    return model_folder.find_model_folder(folder)
