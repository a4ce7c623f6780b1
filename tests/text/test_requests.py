"""Requests: names of other libraries, what a call returns, and errors with value, expectation and remedy."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import adlm
from adlm import Hole
from adlm.diffusion.plans import ancestral
from adlm.diffusion.samplers import SAMPLERS, build_sampler
from adlm.models import folder as model_folder
from adlm.settings import (
    DEFAULT_SAMPLER,
    DEFAULT_TEMPERATURE,
    DEFAULT_TOP_P,
    SamplingSettings,
)
from adlm.text.lm import LM
from tests.text.models import lm, tokenizer, wrap

FRAMED, WRAPPED = lm("adlm", "bytes", "documents"), lm("mdlm", "bytes")


def assert_refused(call: Callable[[], object], *parts: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        call()
    for part in parts:
        assert part in str(caught.value), f"{part!r} is not in {caught.value}"


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ({"length": 63}, ("length=63", "at most 62", "64 tokens, 2 of which begin or end", "smaller")),
        ({"length": 9.5}, ("length=9.5", "a whole number above 0", "leave it out")),
        ({"prompt": "x" * 70}, ("'xxx", "has 70 tokens", "62 in all", "make the prompt shorter")),
        ({"prompt": "hello", "length": 5}, ("'hello'", "5 tokens", "make length larger (at most 62)")),
        ({"prompt": []}, ("nothing to generate", "give a prompt")),
        ({"prompt": 5}, ("a text is a string", "got 5")),
        ({"prompt": "a\ud800b"}, ("character 1", "\\ud800", "surrogate", "errors='replace'")),
        ({"sampler": "magic"}, ("unknown sampler 'magic'", ", ".join(SAMPLERS))),
        ({"sampler": Path("a.py")}, ("sampler=PosixPath('a.py')", "expected a text", "leave it out")),
        ({"sampler": ancestral(4), "steps": 8}, ("steps=8", "built already", "leave it out")),
        ({"sampler": ancestral(4), "options": {"a": 1}}, ("options={'a': 1}", "built already")),
        ({"temperature": -0.5}, ("temperature=-0.5", "a number at least 0", "default (1.0)")),
        ({"top_p": None}, ("top_p=None", "a number above 0 and at most 1")),
        ({"n": 0}, ("n=0", "a whole number above 0")),
        ({"steps": 2.0}, ("steps=2.0", "a whole number")),
        ({"block": 0}, ("block=0", "a whole number above 0")),
        ({"seed": -1}, ("seed=-1", "a whole number at least 0")),
        ({"eta": 0.1}, ("eta=0.1", "unknown name", "steps", "options={'eta': …}")),
        ({"temprature": 0.1}, ("temprature=0.1", "did you mean temperature?")),
        ({"sampler": "ancestral", "options": {"eta": 0.1}}, ("of ancestral, eta=0.1", "expected one of compat")),
        ({"options": {"eta": 0.1, "steps": 3}}, ("'steps': 3", "steps is a setting", "outside of options")),
        ({"options": {"t_om": 0.1}}, (f"of {DEFAULT_SAMPLER}, t_om=0.1", "did you mean t_on?")),
        ({"options": {"eta": "a"}}, ("eta='a'", "expected a number", "default (0.02)")),
        ({"options": {"eta": 2.0}}, ("eta must be between 0 and 1",)),
        ({"sampler": "first_hitting", "steps": 5}, ("steps=5", "first_hitting", "leave it out")),
        ({"sampler": "first_hitting", "options": {"a": 5}}, ("of first_hitting, a=5", "leave it out")),
        ({"prompt": "hello", "length": 9, "max_new_tokens": 4}, ("length=9", "max_new_tokens=4", "leave one out")),
        ({"prompt": "hello", "max_new_tokens": 58}, ("max_new_tokens=58", "at most 57", "at most 62", "smaller")),
        ({"max_new_tokens": 4, "gen_length": 5}, ("max_new_tokens=4 and gen_length=5", "leave the other out")),
    ],
)  # fmt: skip
def test_errors_of_generate(arguments: dict[str, Any], parts: tuple[str, ...]) -> None:
    assert_refused(lambda: FRAMED.generate(**arguments), *parts)
    assert_refused(
        lambda: FRAMED.stream(**arguments), *parts
    )  # at the call, not with the first step


@pytest.mark.parametrize(
    ("template", "parts"),
    [
        ("The cat sat.", ("'The cat sat.'", "no hole", "___{5}", "___{2,8}", "adlm.Hole")),
        (["a", "b"], ("'a'", "no hole")),
        ([], ("nothing to generate",)),
        (7, ("a template is a string", "got 7")),
        ([Hole(), 7], ("it holds 7", "strings and Holes")),
        ("a ___{0} b", ("at least 1 token", "___{0}", "remove the hole")),
        ("a ___{5,2} b", ("___{5,2}", "write ___{2,5}")),
        (
            "x" * 60 + "___{3}",
            ("takes 65 tokens", "rows have 64", "shortest holes", "make it shorter"),
        ),
        (
            "a ___{1000000000000}",
            ("takes 1000000000004 tokens", "rows have 64"),
        ),  # refused, not tried
    ],
)
def test_errors_of_infill(template: Any, parts: tuple[str, ...]) -> None:
    assert_refused(lambda: FRAMED.infill(template), *parts)


CAUSAL = lm("a2r")


@pytest.mark.parametrize(
    ("call", "parts"),
    [
        (lambda: FRAMED.stream("a", template="a ___"), ("leave prompt, lengths and stop out",)),
        (lambda: FRAMED.infill("a ___", stop="."), ("leave prompt, lengths and stop out",)),
        (lambda: FRAMED.record("a", n=2), ("n=2", "one text is recorded", "leave it out")),
        (lambda: FRAMED.stream(guesses=257), ("between 0 and 256", "got 257")),
        (lambda: FRAMED.stream(guesses="3"), ("guesses must be a whole number", "got '3'")),  # type: ignore[arg-type]
        (lambda: FRAMED.stream(guesses=1.5), ("guesses must be a whole number", "got 1.5")),  # type: ignore[arg-type]
        (lambda: FRAMED.record(["a", "b"]), ("2 texts", "one text is recorded", "give one")),  # type: ignore[arg-type]
        (lambda: FRAMED.generate("x", 5), ("settings=5", "SamplingSettings", "by name")),  # type: ignore[arg-type]
        (lambda: FRAMED.generate([3]), ("a text is a string", "got 3")),  # type: ignore[list-item]
        (lambda: FRAMED.generate(b"abc"), ("a text is a string", "got b'abc'")),  # type: ignore[arg-type]
        (lambda: FRAMED.infill([3]), ("a template is a string", "got 3")),  # type: ignore[list-item]
        (lambda: Hole(13), ("___{13,12}", "write ___{12,13}")),
        (lambda: CAUSAL.infill("The ___ sat"), ("'The ___{1,12} sat'", "text after a hole", "masked model")),
        (lambda: CAUSAL.infill("___ ___{2}"), ("text after a hole",)),
        (lambda: CAUSAL.generate(sampler="remask_loop"), ("sampler='remask_loop'", "left to right", "leave it out")),
        (lambda: CAUSAL.generate(steps=4), ("steps=4", "left to right", "leave it out")),
        (lambda: CAUSAL.generate(options={"eta": 0.1}), ("options={'eta': 0.1}", "leave it out")),
        (lambda: CAUSAL.generate(block=4), ("block=4", "left to right", "leave it out")),
        (lambda: lm("ar", "bare"), ("no BOS token", "name bos_token")),
        (lambda: FRAMED.score([]), ("no text to score", "give one")),
        (lambda: FRAMED.score(""), ("has 0 tokens", "give more text")),
        (lambda: lm("mdlm", "bert-base-uncased").score("\u200b\n"), ("has 0 tokens", "give more text")),
        (lambda: FRAMED.score("x" * 63), ("takes 65 tokens", "rows have 64", "make it shorter")),
        (lambda: FRAMED.score("a", draws=1), ("draws must be at least 2", "got 1")),
        (lambda: FRAMED.score("a", draws=2.5), ("draws must be a whole number", "2.5")),  # type: ignore[arg-type]
        (lambda: wrap(FRAMED.model, tokenizer("gpt2")), ("mask is token 257", "the tokenizer's 50257", "trained with")),
        (lambda: adlm.load(device="gpu"), ("'gpu'", "auto, cpu, cuda")),
        (lambda: adlm.load(device="mps"), ("'mps'", "sees no Apple GPU")),
    ],
)  # fmt: skip
def test_other_errors(call: Callable[[], object], parts: tuple[str, ...]) -> None:
    assert_refused(call, *parts)


def test_a_request_is_checked_before_a_network_chooses_lengths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LM, "evaluator", property(lambda self: pytest.fail("the network ran")))
    assert_refused(lambda: FRAMED.infill("a ___ b", sampler="magic"), "unknown sampler")


def test_what_a_causal_model_can_do() -> None:
    assert CAUSAL.infill("The ___").texts[0].startswith("The ")
    assert CAUSAL.generate(sampler="left_to_right", length=5).texts


def test_names_and_numbers_of_other_libraries_are_accepted() -> None:
    """transformers, diffusers and LLaDA: their names give the same texts as ours."""
    ours = FRAMED.generate(
        "hello", max_new_tokens=8, n=2, steps=4, block=4, temperature=0.0, seed=1
    )
    theirs = FRAMED.generate(
        "hello",
        gen_length=8,
        num_return_sequences=2,
        num_inference_steps=4,
        block_length=4,
        do_sample=False,
        seed=1,
    )
    assert ours.texts == theirs.texts and ours.settings == theirs.settings
    assert (
        ours.texts
        == FRAMED.generate("hello", length=13, n=2, steps=4, block=4, temperature=0.0, seed=1).texts
    )
    sampled = FRAMED.generate(
        "a", length=np.int64(9), steps=np.int64(2), seed=np.int64(0), do_sample=True
    )
    assert sampled.texts == FRAMED.generate("a", length=9, steps=2).texts


def test_the_output_is_a_sequence_of_texts_with_settings() -> None:
    given: dict[str, Any] = {"steps": 2, "seed": 3, "temperature": 0.5, "n": 2}
    own = {"eta": 0.1}
    output = FRAMED.generate(
        ["a", "b"], max_new_tokens=3, sampler="remask_loop", options=own, **given
    )
    assert len(output) == 4 and list(output) == output.texts and output[0] == output.texts[0]
    assert output[1:3] == output.texts[1:3] and output.texts[3] in output
    assert (
        output.nfe == max(output.nfe_each)
        and output.seconds > 0
        and str(output) == "\n\n".join(output.texts)
    )
    settings = given | own | {"sampler": "remask_loop", "top_p": DEFAULT_TOP_P, "length": 4}
    assert settings.items() <= output.settings.items()
    defaults = {
        "sampler": DEFAULT_SAMPLER,
        "temperature": DEFAULT_TEMPERATURE,
        "top_p": DEFAULT_TOP_P,
    }
    assert defaults.items() <= FRAMED.generate("a", length=4, steps=2).settings.items()
    assert output.as_dict().keys() == {"texts", "nfe", "seconds", "settings", "nfe_each"}
    assert lm("ar").generate("a", length=9).settings["sampler"] == "left_to_right"


def test_repr_and_save(tmp_path: Path) -> None:
    assert repr(FRAMED).startswith("LM('") and "device='cpu'" in repr(FRAMED)
    assert f"parameters={sum(p.numel() for p in FRAMED.model.parameters()):,}" in repr(FRAMED)
    folder = FRAMED.save(tmp_path / "saved")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in folder.iterdir()
    }
    again = adlm.load(folder, device="cpu", verify=True)
    assert again.model.config == FRAMED.model.config and again.row_format.is_framed
    for name, weight in FRAMED.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], weight)
    assert again.generate(length=9, steps=3).texts == FRAMED.generate(length=9, steps=3).texts


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def forget(path: Path) -> None:
    path.unlink()
    path.with_name("checksums.json").unlink()


def widen(path: Path) -> None:
    config = json.loads(path.read_text("utf-8"))
    config["model"]["dim"] = 32
    path.write_text(json.dumps(config), "utf-8")


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("config.json", cut, r"config\.json is not JSON"),
        ("tokenizer.json", cut, r"tokenizer\.json"),
        ("tokenizer.json", Path.unlink, r"tokenizer\.json is missing or was changed"),
        (
            "tokenizer.json",
            forget,
            r"has no tokenizer\.json.*copy the one that its data was prepared with",
        ),
        (
            "config.json",
            widen,
            r"does not fit model\.safetensors: embed\.weight is .*, expected float \(258, 32\)",
        ),
        ("model.safetensors", Path.unlink, r"model\.safetensors"),
    ],
)
def test_damaged_files_are_named(
    tmp_path: Path, name: str, damage: Callable[[Path], None], message: str
) -> None:
    folder = model_folder.export_model(
        model_folder.LoadedModel(WRAPPED.model, WRAPPED.tokenizer, "mdlm", 7), tmp_path / "a"
    )
    assert adlm.load(folder, verify=True).step == 7
    damage(folder / name)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        adlm.load(folder)


def test_settings_are_given_as_one_object_by_name_or_both() -> None:
    settings = SamplingSettings(length=9, steps=3, seed=5)
    by_name = FRAMED.generate("a", length=9, steps=3, seed=5)
    assert FRAMED.generate("a", settings).texts == by_name.texts
    assert FRAMED.generate("a", settings, seed=6, max_new_tokens=None).settings["seed"] == 6
    holes = FRAMED.infill("a ___{4} b", SamplingSettings(steps=2))
    assert holes.texts == FRAMED.infill("a ___{4} b", steps=2).texts
    *_, last = FRAMED.stream("a", settings)
    assert last.texts == by_name.texts
    assert FRAMED.record("a", settings).settings == by_name.settings


def test_a_seed_that_is_left_to_chance_is_told() -> None:
    first, second = (FRAMED.generate("a", length=20, steps=3, seed=None) for _ in range(2))
    assert first.settings["seed"] != second.settings["seed"]
    again = FRAMED.generate("a", length=20, steps=3, seed=first.settings["seed"])
    assert again.texts == first.texts


def test_a_sampler_may_be_built_already() -> None:
    by_name = FRAMED.generate("a", length=20, sampler="ancestral", steps=4)
    built = FRAMED.generate("a", length=20, sampler=ancestral(4))
    assert built.texts == by_name.texts and built.settings == by_name.settings
    order = FRAMED.generate("a", length=20, sampler=build_sampler("first_hitting"))
    assert order.texts == FRAMED.generate("a", length=20, sampler="first_hitting").texts


MINE = """
from adlm.diffusion.plans import ancestral

def halved(steps: int, *, sharpness: float = 1.0, is_compat: bool = False):
    return ancestral(max(1, int(steps * sharpness)), compat=is_compat)
"""


def test_a_sampler_of_a_users_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its options are checked by its parameters, as those of built-in samplers."""
    (tmp_path / "my_samplers.py").write_text(MINE, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    name = "my_samplers:halved"
    own = FRAMED.generate("a", length=20, sampler=name, steps=8, options={"sharpness": 0.5})
    assert own.texts == FRAMED.generate("a", length=20, sampler="ancestral", steps=4).texts
    assert own.settings["sampler"] == name and own.settings["sharpness"] == 0.5
    for options, part in (
        ({"sharpnes": 1.0}, "sharpnes=1.0: unknown name; did you mean sharpness?"),
        (
            {"sharpness": "a"},
            "sharpness='a': expected a number; leave it out for the default (1.0)",
        ),
        ({"is_compat": 1}, "is_compat=1: expected true or false"),
    ):
        settings: dict[str, Any] = {"sampler": name, "options": options}
        assert_refused(partial(FRAMED.generate, "a", **settings), part)


def test_a_text_ends_before_the_first_stop_text() -> None:
    prompts = ["hello", "a b"]
    whole = FRAMED.generate(prompts, max_new_tokens=30, n=4, steps=8)
    generated = [row.pieces[-1][0] for row in whole.rows]
    stop = [generated[0][7:9], generated[1][3], "hello"]  # the last is only in a prompt
    cut = FRAMED.generate(prompts, max_new_tokens=30, n=4, steps=8, stop=stop)
    shorter = 0
    for before, row, text in zip(generated, cut.rows, cut.texts, strict=True):
        prompt = row.pieces[0][0]
        places = [before.find(each) for each in stop if each in before]
        assert text == prompt + before[: min(places, default=None)]
        shorter += bool(places)
    assert shorter >= 2 and cut.settings["stop"] == tuple(stop)
    assert FRAMED.generate("hello", max_new_tokens=30, n=4, steps=8, stop="").texts == whole[:4]


def test_compat_has_the_nucleus_of_the_lineage_too() -> None:
    settings: dict[str, Any] = {"sampler": "ancestral", "steps": 8, "top_p": 0.5, "n": 2, "seed": 3}
    rows = WRAPPED.layout_rows(options={"compat": True}, **settings)
    sampling = replace(rows[0].sampling, nucleus="lineage")
    sampler = replace(rows[0].sampler, fill_argmax=False)  # nothing is left to fill here
    lineage = [replace(row, sampling=sampling) for row in rows]
    usual = [replace(row, sampler=sampler) for row in rows]
    own, same, other = (WRAPPED.fill_rows(each).texts for each in (rows, lineage, usual))
    assert own == same != other
