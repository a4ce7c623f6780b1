"""Adds tokens to a model's vocabulary."""

import torch
from torch import Tensor

from adlm.models.language_model import LanguageModel, build_on_meta, is_whole

# One row per token.
ROWS = ("embed.weight", "head.weight", "head.bias", "anchor_head.weight", "anchor_head.bias")


@torch.no_grad()
def extend_vocabulary(model: LanguageModel, count: int, init: int | None = None) -> LanguageModel:
    """Return a copy of a model with `count` more tokens, whose ids follow the old ones; old logits are unchanged.

    The embedding and the heads (a tied one stays tied) get the mean of the old rows without the mask's, or with `init`
    the row of that token. All old ids stay, the mask's too, so it is no longer
    the last id. A factored bridge gets zero columns: the denoiser's input is the same until training changes them.
    Extend a model before its optimizer and its EMA are made, for they hold the old parameters.
    """
    config, state = model.config, model.state_dict()
    vocab = config.vocab_size
    if not is_whole(count) or count < 1:
        raise ValueError(
            f"count is {count!r:.80}: expected a whole number of new tokens, at least 1"
        )
    if config.anchor_layers and config.bridge == "softmax":
        raise ValueError(
            "the model has bridge 'softmax', where new tokens take probability from the old ones: extend a model with "
            "the bridge 'factored' or 'direct'"
        )
    if init is not None and not (is_whole(init) and 0 <= init < vocab):
        raise ValueError(f"init is {init!r:.80}: expected a token below {vocab}")

    def make_rows(old: Tensor) -> Tensor:
        if init is not None:
            return old[[init] * count]
        kept = (
            torch.arange(vocab, device=old.device) != config.mask_id
            if config.mask_id is not None
            else slice(None)
        )
        return old[kept].double().mean(0, keepdim=True).to(old.dtype).expand(count, *old.shape[1:])

    state = {
        name: torch.cat([old, make_rows(old)]) if name in ROWS else old.clone()
        for name, old in state.items()
    }
    if config.anchor_layers and config.bridge == "factored":
        old = state["bridge.weight"]
        state["bridge.weight"] = torch.cat([old, old.new_zeros(len(old), count)], dim=1)
    extended = build_on_meta(config.replace(vocab_size=vocab + count))
    extended.load_state_dict(state, assign=True)
    if config.tied:
        extended.head.weight = extended.embed.weight
    return extended.train(model.training)
