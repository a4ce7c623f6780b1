"""The four models as transformers classes; `huggingface.py` copies this file into exported folders as remote code."""

import copy
from collections.abc import Iterator
from typing import Any, Unpack, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import MaskedLMOutput

from adlm.diffusion.categorical import SamplingParams
from adlm.diffusion.plans import Plan, mean_noise_level
from adlm.diffusion.samplers import LeftToRight, choose_sampler, refuse_samplers
from adlm.diffusion.sampling import Frame, Row, Sampler, sample_together
from adlm.models.evaluator import build_evaluator
from adlm.models.language_model import (
    NEG_INF,
    LanguageModel,
    ModelConfig,
    build_on_meta,
    is_whole,
)
from adlm.settings import SamplingArguments, SamplingSettings

UNSEEDED = SamplingSettings(seed=None)
STREAMER_METHODS = ("put", "put_draft", "put_frame", "end")
DEFAULTS = {
    "method": "adlm",
    "step": 0,
    "rows": "wrapped",
    "format": 1,
    "eos_token_id": None,
    "pad_token_id": None,
}
# Settings in transformers' words.
SHAPE_NAMES = {
    "vocab_size": ["vocab_size"],
    "hidden_size": ["dim"],
    "num_attention_heads": ["heads"],
}
SHAPE_NAMES |= {
    "num_hidden_layers": ["anchor_layers", "denoiser_layers"],
    "max_position_embeddings": ["length"],
}


class AdlmConfig(PreTrainedConfig):
    """The content of config.json, which `adlm.load` reads too: `model` has the settings of `ModelConfig`."""

    model_type = "adlm"

    def __init__(
        self,
        model: dict[str, Any] | None = None,
        special_token_ids: list[int] | None = None,
        **kwargs: Any,
    ) -> None:
        self.model = model or {}
        self.special_token_ids = special_token_ids or []  # never sampled, except the end token
        kwargs = {"tie_word_embeddings": self.model.get("tied", False)} | DEFAULTS | kwargs
        kwargs |= {
            name: sum(self.model.get(key, 0) for key in keys) for name, keys in SHAPE_NAMES.items()
        }
        super().__init__(**kwargs)


class AdlmPreTrainedModel(PreTrainedModel):
    """A `LanguageModel` that transformers loads, saves and generates with."""

    config_class = AdlmConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    _tied_weights_keys = {"model.head.weight": "model.embed.weight"}  # noqa: RUF012
    _no_split_modules = ["Layer"]  # noqa: RUF012
    _supports_sdpa = True

    def __init__(self, config: AdlmConfig) -> None:
        super().__init__(config)
        shape = ModelConfig.parse("json", **config.model)
        if torch.get_default_device().type == "meta":  # `from_pretrained`: the weights follow
            self.model = build_on_meta(shape)
        else:
            self.model = LanguageModel(shape)
            for module in self.model.modules():
                vars(module)["_is_hf_initialized"] = True  # transformers leaves them as they are
        self.post_init()

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.model.embed

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.model.head

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        noise_level: Tensor | None = None,
        **_: Any,
    ) -> MaskedLMOutput:
        """Return logits (B, L, V), the mask's as good as minus infinity, and with labels the mean cross-entropy."""
        shape, loss = self.model.config, None
        valid = (
            None if attention_mask is None or bool(attention_mask.all()) else attention_mask.bool()
        )
        if shape.time_conditioning and noise_level is None:
            counted = torch.ones_like(input_ids, dtype=torch.bool) if valid is None else valid
            noise_level = mean_noise_level(
                ((input_ids == shape.mask_id) & counted).sum(-1) / counted.sum(-1)
            )
        logits: Any = self.model.head(self.model(input_ids, noise_level, valid=valid).final)
        if shape.mask_id is not None:
            logits = logits.index_fill(
                -1, torch.tensor(shape.mask_id, device=logits.device), NEG_INF
            )
        if labels is not None:
            scored, targets = (
                (logits[:, :-1], labels[:, 1:]) if shape.is_causal else (logits, labels)
            )
            loss = F.cross_entropy(scored.flatten(0, 1).float(), targets.flatten())
        return MaskedLMOutput(loss=cast(Any, loss), logits=logits)

    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor,
        *,
        attention_mask: Tensor | None = None,
        streamer: Any = None,
        **changes: Unpack[SamplingArguments],
    ) -> Tensor:
        """Continue the rows of input_ids and fill their mask tokens; return them with the new tokens, padded left.

        The settings are those of `SamplingSettings` under transformers' names. By default a row is
        as long as the model allows, or where it has mask tokens, as it is: these alone are filled,
        as with max_new_tokens=0. Without a seed, one is drawn from torch's global generator. A
        model of whole documents puts the end token after the new tokens instead of after the
        prompt.
        """
        count = changes.get("max_new_tokens")
        only_fills = is_whole(count) and count == 0
        if only_fills:  # elsewhere 0 is refused
            del changes["max_new_tokens"]
        settings = SamplingSettings.parse("transformers", UNSEEDED, **changes)
        seed = int(torch.randint(2**62, ())) if settings.seed is None else settings.seed
        n = settings.n
        max_new_tokens = 0 if only_fills else settings.max_new_tokens
        shape, config = self.model.config, self.config
        eos, pad = config.eos_token_id, config.pad_token_id
        is_framed = config.rows == "documents" and not shape.is_causal and eos is not None
        masks = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        rows = [row[mask.bool()] for row, mask in zip(input_ids, masks, strict=True)]
        rows = [
            row[:-1] if is_framed and len(row) > 1 and int(row[-1]) == eos else row for row in rows
        ]
        if max_new_tokens is None:
            has_holes = shape.mask_id is not None and bool((input_ids == shape.mask_id).any())
            max_new_tokens = (
                0 if has_holes else shape.length - is_framed - max(len(row) for row in rows)
            )
        if max_new_tokens < 0:
            raise ValueError(
                f"max_new_tokens is {max_new_tokens}: a prompt must be shorter than {shape.length} tokens"
            )
        hole = input_ids.new_full((max_new_tokens,), 0 if shape.mask_id is None else shape.mask_id)
        end = input_ids.new_full((int(is_framed),), eos if is_framed else 0)
        rows = [torch.cat([row, hole, end]) for row in rows for _ in range(n)]
        positions = torch.arange(max(map(len, rows)))
        lengths = torch.tensor([len(row) for row in rows])[:, None]
        is_new = (positions >= lengths - len(hole) - len(end)) & (positions < lengths - len(end))
        xt = pad_sequence(
            rows, batch_first=True, padding_value=int(shape.mask_id == 0)
        )  # nothing reads the padding
        is_free = is_new if shape.is_causal else is_new | (xt.cpu() == shape.mask_id)
        sampler: Plan | Sampler = LeftToRight()
        if shape.is_causal:
            refuse_samplers(settings)
        else:
            sampler, _ = choose_sampler(settings, hidden=int(is_free.sum(-1).max()))
        kinds = is_free.long() if is_framed else torch.where(is_new, 2, 1)
        banned = torch.zeros(
            3, shape.vocab_size, dtype=torch.bool
        )  # none; special ones; all of these but the end
        banned[1:, config.special_token_ids] = True
        banned[2, [] if eos is None else [eos]] = False
        # In memory of its own: sums round by the alignment of their addresses, and so would tokens.
        model = copy.deepcopy(self.model).eval()
        evaluator = build_evaluator(model, self.device, self.dtype, uses_graphs=False)
        params = SamplingParams.from_settings(settings)
        texts = [
            Row(
                row.cpu(),
                sampler,
                ~is_free[i, : len(row)],
                seed=seed,
                number=i % n,
                block=settings.block,
                sampling=params,
                kinds=kinds[i, : len(row)],
                every_step=True,
            )
            for i, row in enumerate(rows)
        ]
        frames = sample_together(evaluator, texts, banned=banned)
        next(frames)  # before the first step
        tokens = show_frames(frames, rows[0][: int(is_free[0].long().argmax())], streamer).tokens
        if (
            not is_framed and eos is not None and bool(is_new.any())
        ):  # the text ends at the first end token
            is_new = is_new.to(tokens.device)
            is_end = ((tokens == eos) & is_new).long()
            tokens = torch.where(
                (is_end.cumsum(-1) > is_end) & is_new, eos if pad is None else pad, tokens
            )
        aligned = [
            F.pad(row[:n], (len(positions) - n, 0), value=pad or 0)
            for row, n in zip(tokens, lengths[:, 0])
        ]
        return torch.stack(aligned)


class AdlmForMaskedLM(AdlmPreTrainedModel):
    """MDLM and ADLM (and SEDD): predicts the mask tokens of a row from all the others."""


class AdlmForCausalLM(AdlmPreTrainedModel):
    """AR and A2R: predicts the next token."""


def show_frames(frames: Iterator[Frame[Row]], prompt: Tensor, streamer: Any) -> Frame[Row]:
    """Run the sampler, show a streamer the prompt, a draft per step and the result; return the last frame."""
    put, put_draft, put_frame, end = (
        getattr(streamer, name, lambda *_, **__: None) for name in STREAMER_METHODS
    )
    put(prompt.cpu())
    for frame in frames:
        if streamer is not None:
            put_draft(value=frame.tokens[:, len(prompt) :].cpu())
            put_frame(frame)
    put(frame.tokens[:, len(prompt) :].cpu())
    end()
    return frame
