"""GPT-2: transformers' weights, our model, their numbers."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from adlm.data.tokenizers import END_OF_TEXT, load_tokenizer
from adlm.interop.gpt2 import from_state_dict, load

if os.environ.get("ADLM_ALL") == "1":
    import transformers
else:
    transformers = pytest.importorskip(
        "transformers", reason="transformers comes with the extra eval"
    )


def gpt2(seed: int = 0, **changes: int) -> Any:
    """A small one with random weights, none of them zero."""
    torch.manual_seed(seed)
    size = {"vocab_size": 61, "n_positions": 24, "n_embd": 16, "n_layer": 3, "n_head": 2} | changes
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**size)).eval()
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=rng))
    return model


def tokens(length: int = 24) -> Tensor:
    return torch.randint(61, (5, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("length", [1, 7, 24])
def test_it_says_what_theirs_says(length: int) -> None:
    theirs = gpt2()
    ours = from_state_dict(theirs.state_dict(), heads=2)
    with torch.no_grad():
        expected = theirs(tokens(length)).logits.log_softmax(-1)
        _, found = ours.log_probs(tokens(length))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert float(expected.exp().amax(-1).mean()) > 0.1  # it does say something


def test_names_with_and_without_the_head() -> None:
    theirs = gpt2()
    whole, bare = (
        from_state_dict(each.state_dict(), heads=2) for each in (theirs, theirs.transformer)
    )
    assert all(
        torch.equal(a, b) for a, b in zip(whole.parameters(), bare.parameters(), strict=True)
    )
    old = theirs.state_dict() | {"transformer.h.0.attn.bias": torch.ones(1, 1, 24, 24)}
    assert from_state_dict(old, heads=2).config == whole.config
    assert whole.head.weight is whole.embed.weight


def test_what_does_not_fit_is_refused() -> None:
    state = gpt2().state_dict()
    with pytest.raises(RuntimeError, match=r"Unexpected key.*extra"):
        from_state_dict(state | {"transformer.h.0.extra.weight": torch.zeros(1)}, heads=2)
    with pytest.raises(RuntimeError, match=r"denoiser\.norm\.bias"):
        from_state_dict(
            {name: value for name, value in state.items() if name != "transformer.ln_f.bias"},
            heads=2,
        )
    with pytest.raises(ValueError, match=r"no 'wte.weight'"):
        from_state_dict({"model.weight": torch.zeros(1)}, heads=2)
    with pytest.raises(ValueError, match="convert a GPT-2 with tied embeddings"):
        from_state_dict(state | {"lm_head.weight": torch.zeros(61, 16)}, heads=2)
    with pytest.raises(ValueError, match="heads=3: expected dim to be a multiple of heads"):
        from_state_dict(state, heads=3)


@pytest.mark.parametrize("size", ["1GB", "10KB"])
def test_a_folder_says_what_theirs_says(size: str, tmp_path: Path) -> None:
    theirs = gpt2(n_head=4)
    theirs.save_pretrained(tmp_path, max_shard_size=size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (size == "10KB")
    ours = load(tmp_path)
    assert (ours.config.vocab_size, ours.config.mask_id, ours.config.heads, ours.config.tied) == (
        61,
        None,
        4,
        True,
    )
    with torch.no_grad():
        expected = theirs(tokens()).logits.log_softmax(-1)
    torch.testing.assert_close(ours.log_probs(tokens())[1], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("setting", "value", "supported"),
    [
        ("model_type", "gptj", "supported is 'gpt2'"),
        ("n_head", None, "expected int"),
        ("n_head", 3, "must be divisible by num_heads"),
        ("activation_function", "relu", "supported is 'gelu_new'"),
        ("layer_norm_epsilon", 1e-6, "supported is 1e-05"),
        ("scale_attn_weights", False, "supported is True"),
        ("scale_attn_by_inverse_layer_idx", True, "supported is False"),
        ("reorder_and_upcast_attn", True, "supported is False"),
        ("add_cross_attention", True, "supported is False"),
        ("tie_word_embeddings", False, "supported is True"),
        ("n_inner", 32, "supported is 64"),
        ("n_layer", 2, r"unexpected_keys.*transformer\.h\.2"),
        ("vocab_size", 60, r"mismatched_keys.*wte.*\[61, 16\]"),
        ("resid_pdrop", 1.5, "has to be between 0 and 1"),
    ],
)
def test_another_setting_is_refused_in_one_line(
    setting: str, value: Any, supported: str, tmp_path: Path
) -> None:
    gpt2().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | {setting: value}), "utf-8")
    with pytest.raises(ValueError, match=supported) as caught:
        load(tmp_path)
    message = str(caught.value)
    assert (
        "\n" not in message
        and str(tmp_path) in message
        and str(value) in message.removeprefix(str(tmp_path))
    )


def test_a_config_with_the_defaults_left_out(tmp_path: Path) -> None:
    gpt2().save_pretrained(tmp_path)
    settings = {"model_type": "gpt2", "n_head": 2, "n_embd": 16, "n_inner": 64, "n_layer": 3}
    settings |= {"vocab_size": 61, "n_positions": 24}
    (tmp_path / "config.json").write_text(json.dumps(settings), "utf-8")
    assert load(tmp_path).config.heads == 2


def test_damaged_folders_are_refused_in_one_line(tmp_path: Path) -> None:
    def check(problem: str) -> None:
        with pytest.raises(
            ValueError, match=f"is no GPT-2 folder as transformers saves it.*{problem}"
        ) as caught:
            load(tmp_path)
        assert "\n" not in str(caught.value)

    check("model_type")
    gpt2().save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    state = load_file(weights)
    save_file(
        {name: value for name, value in state.items() if "ln_f.bias" not in name},
        weights,
        {"format": "pt"},
    )
    check(r"missing_keys.*ln_f\.bias")
    weights.write_bytes(b"not weights")
    check("header")
    weights.unlink()
    torch.save(gpt2().state_dict(), tmp_path / "pytorch_model.bin")  # nothing is unpickled
    check("no file named model.safetensors")


def test_the_tokenizer_of_a_folder(tmp_path: Path) -> None:
    text, expected = (
        "How many eggs does she sell? 16 - 3 - 4 = 9, she says; café.",
        load_tokenizer("gpt2"),
    )
    transformers.GPT2TokenizerFast(tokenizer_object=expected.bpe).save_pretrained(str(tmp_path))
    ours = load_tokenizer(tmp_path)
    assert ours.encode(text) == expected.encode(text) and ours.decode(ours.encode(text)) == text
    assert (
        ours.bpe.token_to_id(END_OF_TEXT) == ours.eos_id == ours.bos_id == 50256
        and ours.max_id == 50256
    )
    assert END_OF_TEXT not in [ours.bpe.id_to_token(token) for token in ours.encode(END_OF_TEXT)]
