"""Settings: what is read, what is refused, and in which words, under the names of each surface."""

import inspect
import json
import pickle
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import numpy as np
import pydantic
import pytest
import torch
from pydantic import Field

from adlm.diffusion.plans import ancestral
from adlm.models.language_model import ModelConfig
from adlm.settings import (
    SamplingArguments,
    SamplingSettings,
    Settings,
    SettingsError,
    derive_settings,
    list_names,
    list_own_names,
)

ROOT = Path(__file__).resolve().parent.parent


class Inner(Settings):
    """A section."""

    lr: Annotated[float, Field(gt=0)] = 3e-4
    """The learning rate."""
    warmup: int = 2500


class Outer(Settings):
    """Settings with a section and a required field."""

    folder: str
    """The run folder."""
    steps: Annotated[int, Field(ge=1)] = 10
    ema: Annotated[float, Field(ge=0, lt=1)] | None = 0.99
    inner: Inner = Inner()


def catch(settings: type[Settings], vocabulary: Any, **given: Any) -> str:
    """Return the one line of an error."""
    with pytest.raises(SettingsError) as caught:
        settings.parse(vocabulary, **given)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_all_names_give_the_same_settings() -> None:
    parse = SamplingSettings.parse
    ours = parse(
        "python", max_new_tokens=8, n=2, block=4, stop=["."], options={"a": 0.5, "b": True}
    )
    theirs = parse("python", ours, gen_length=8, num_return_sequences=2, block_length=4, stop=".")
    texts: dict[str, Any] = {"--max-new-tokens": "8", "--n": "2", "--block": "4", "--stop": ["."]}
    assert ours == theirs
    typed = parse("cli", **texts, **{"--option": ["a=0.5", "b=true"]})
    assert typed == ours.replace(options={"a": "0.5", "b": "true"})  # the sampler's types read them
    body: dict[str, Any] = {"max_tokens": 8, "n": 2, "block": 4, "stop": "."}
    assert ours == parse("openai", **body, options={"a": 0.5, "b": True})
    assert ours == SamplingSettings.model_validate_json(ours.model_dump_json())
    assert ours == pickle.loads(pickle.dumps(ours)) == parse("python", **ours.model_dump())
    assert ours == parse("python", **ours.to_keywords("python"))
    assert (
        parse("transformers", num_return_sequences=3).to_keywords("diffusers")[
            "num_texts_per_prompt"
        ]
        == 3
    )


def test_do_sample_false_is_temperature_0() -> None:
    assert SamplingSettings.parse("transformers", do_sample=False, temperature=0.5).temperature == 0
    assert SamplingSettings.parse("python", do_sample=True, temperature=0.5).temperature == 0.5


@pytest.mark.parametrize("scalar", [np.int64, np.array, torch.tensor])
def test_scalars_of_numpy_and_torch_are_numbers(scalar: Any) -> None:
    settings = SamplingSettings.parse("python", seed=scalar(2**62 + 1), n=scalar(3))
    assert (settings.seed, settings.n) == (2**62 + 1, 3)
    assert type(settings.seed) is int
    settings = SamplingSettings.parse("python", top_p=np.float32(0.5), options={"a": np.float32(2)})
    assert (settings.top_p, settings.options) == (0.5, {"a": 2.0})


def test_a_sampler_may_be_built_already() -> None:
    plan = ancestral(4)
    settings = SamplingSettings.parse("python", sampler=plan)
    assert settings.sampler is plan
    assert json.loads(settings.model_dump_json())["sampler"] == "ancestral"


@pytest.mark.parametrize(
    ("vocabulary", "given", "part"),
    [
        ("python", {"top_p": 2}, "top_p=2: expected a number above 0 and at most 1; leave it out for the default (0"),
        ("cli", {"--top-p": "2"}, "--top-p='2': expected a number above 0 and at most 1; leave"),
        ("cli", {"--steps": "x"}, "--steps='x': expected a whole number above 0; leave it out"),
        ("cli", {"--n": "1e6"}, "--n='1e6': expected a whole number above 0"),
        ("cli", {"--option": ["eta"]}, "--option=['eta']: expected name=value; write it as eta=0.04"),
        ("cli", {"--length": "9", "--max-new-tokens": "4"}, "--length=9 and --max-new-tokens=4: expected one"),
        ("cli", {"--num-return-sequences": "2"}, "unknown name; did you mean --n?"),
        ("openai", {"max_tokens": 0}, "max_tokens=0: expected a whole number above 0; leave it out"),
        ("openai", {"max_new_tokens": 5}, "max_new_tokens=5: unknown name; did you mean max_tokens?"),
        ("openai", {"steps": "64"}, "steps='64': expected a whole number above 0"),
        ("openai", {"stop": ["a", 3]}, "stop=['a', 3]: expected a text or a list"),
        ("python", {"gen_length": 0}, "gen_length=0: expected a whole number above 0"),
        ("transformers", {"num_return_sequences": 0}, "num_return_sequences=0: expected"),
        ("diffusers", {"num_inference_steps": 0}, "num_inference_steps=0: expected"),
        ("python", {"tempertaure": 1}, "tempertaure=1: unknown name; did you mean temperature?"),
        ("python", {"eta": 0.1}, "eta=0.1: unknown name; expected one of max_new_tokens, length, n, "),
        ("python", {"eta": 0.1}, "an option of a sampler is given as options={'eta': …}"),
        ("python", {"n": 2, "num_return_sequences": 3}, "n=2 and num_return_sequences=3: expected one name"),
        ("python", {"n": True}, "n=True: expected a whole number above 0"),
        ("python", {"top_p": True}, "top_p=True: expected a number above 0"),
        ("python", {"do_sample": 1}, "do_sample=1: expected true or false"),
        ("python", {"n": 1e6}, "n=1000000.0: expected a whole number above 0"),
        ("python", {"n": None}, "n=None: expected a whole number above 0; leave it out for the default (1)"),
        ("python", {"sampler": 3}, "sampler=3: expected a text; leave it out"),
        ("python", {"temperature": float("nan")}, "temperature=nan: expected a number at least 0"),
        ("python", {"temperature": float("inf")}, "temperature=inf: expected a number at least 0"),
        ("python", {"seed": 2**63}, "seed=9223372036854775808: expected a whole number at least 0 and below"),
        ("python", {"options": ["eta=1"]}, "options=['eta=1']: expected names with values"),
        ("openai", {"options": ["eta=1"]}, "options=['eta=1']: expected names with values"),
        ("python", {"options": {"eta": None}}, "expected names with values, not the value None of eta; leave"),
        ("python", {"options": {"a": [1]}}, "options={'a': [1]}: expected names with values"),
    ],
)  # fmt: skip
def test_errors(vocabulary: str, given: dict[str, Any], part: str) -> None:
    assert part in catch(SamplingSettings, vocabulary, **given)


def test_stop_may_be_none() -> None:
    assert SamplingSettings.parse("python", stop=None).stop == ()


def test_errors_of_constructors() -> None:
    with pytest.raises(SettingsError) as caught:
        SamplingSettings(top_p=2)
    assert "top_p=2: expected a number above 0 and at most 1; leave it out" in str(caught.value)
    with pytest.raises(SettingsError, match=r"gen_length=4: unknown name"):
        SamplingSettings(gen_length=4)  # type: ignore[call-arg]
    with pytest.raises(SettingsError, match=r"dim=10 and heads=4: expected dim to be a multiple"):
        ModelConfig(vocab_size=5, mask_id=4, dim=10, heads=4)


def test_errors_of_sections_and_texts() -> None:
    read = Outer.parse("recipe", folder="x", steps="20", inner={"lr": "1e-3"}, ema=None)
    assert read == Outer(folder="x", steps=20, inner=Inner(lr=1e-3), ema=None)
    for given, part in (
        ({}, "folder=None: expected a text; give the run folder"),
        ({"folder": "x", "inner": {"lr": "-1"}}, "inner.lr='-1': expected a number above 0; leave"),
        ({"folder": "x", "inner": {"warmpu": "1"}}, "inner.warmpu='1': unknown name; did you mean inner.warmup?"),
        ({"folder": "x", "inner": "3"}, "inner='3': expected names with values; leave it out"),
        ({"folder": "x", "steps": "1.5"}, "steps='1.5': expected a whole number at least 1"),
        ({"folder": "x", "ema": "1"}, "ema='1': expected a number at least 0 and below 1 or null"),
    ):  # fmt: skip
        assert part in catch(Outer, "recipe", **given)
    assert "steps='20': expected a whole number" in catch(Outer, "json", folder="x", steps="20")


def test_a_rule_over_several_fields_names_them_where_they_are() -> None:
    class Pair(Settings):
        low: int = 0
        high: int = 1

        @pydantic.model_validator(mode="after")
        def check_order(self) -> "Pair":
            return self.require(self.low < self.high, "low < high", "low", "high")

    class Pairs(Settings):
        first: Pair = Pair()

    assert catch(Pair, "json", low=3) == "low=3 and high=1: expected low < high"
    assert (
        catch(Pairs, "json", first={"low": 3})
        == "first.low=3 and first.high=1: expected low < high"
    )


def test_the_parameters_of_a_function_of_any_form() -> None:
    def takes_all(*rest: Any, eta: float = 0.1, **options: Any) -> None:
        """Take any option besides its own."""

    read = derive_settings(takes_all).parse("python", speed=3)
    assert read.model_dump() == {"eta": 0.1, "speed": 3}
    assert "eta='x': expected a number" in catch(derive_settings(takes_all), "python", eta="x")

    def takes_tensor(weights: torch.Tensor | None = None) -> None:
        """Take an object of a class that is not described here."""

    weights = torch.ones(2)
    assert derive_settings(takes_tensor).parse("python", weights=weights).weights is weights
    error = catch(derive_settings(takes_tensor), "python", weights=3)
    assert "weights=3: expected a value of the type" in error and "torch.Tensor | None" in error
    assert "unknown name" in catch(derive_settings(takes_tensor), "python", speed=3)


def test_an_error_of_inner_code_is_renamed_by_the_surface() -> None:
    deep = SettingsError({"max_new_tokens": 300}, "expected at most 246; shorten the prompt")
    copy = pickle.loads(pickle.dumps(deep))
    renamed = copy.rename(list_own_names(SamplingSettings, "openai"))
    assert str(renamed) == "max_tokens=300: expected at most 246; shorten the prompt"


def test_sampling_arguments_repeat_the_settings() -> None:
    """A type checker cannot derive them; the test prints the lines that are missing."""
    kinds = get_type_hints(SamplingSettings)
    written = get_type_hints(SamplingArguments)
    names = list_names(SamplingSettings, "python")
    missing = [
        f"{typed}: {inspect.formatannotation(kinds[field])}"
        for typed, field in names.items()
        if written.get(typed) != kinds[field]
    ]
    assert not missing, "\n".join(["add to SamplingArguments:", *missing])
    assert written.keys() == names.keys()


USER = """
from pathlib import Path

import adlm
from adlm import LM, SamplingSettings


def use(lm: LM) -> None:
    lm.generate("x", steps=64, num_return_sequences=2, stop=["."], options={"eta": 0.1}, seed=None)
    lm.generate(["x"], SamplingSettings(top_p=0.5, sampler="mine"), stop=".", top_p=1, max_tokens=3)
    lm.generate("x", sampler=adlm.build_sampler("ancestral", steps=4))
    lm.infill("a ___", SamplingSettings(), temperature=0)
    lm.generate("x", tempertaure=0.5)  # wrong
    lm.infill("x", steps="64")  # wrong
    lm.record("x", sampler=3)  # wrong
    lm.record("x", sampler=Path("a.py"))  # wrong
    lm.stream("x", eta=0.1)  # wrong
    SamplingSettings(topp=0.5)  # wrong
    SamplingSettings(top_p="x")  # wrong
"""
CHECKED = """
[mypy]
strict = true
ignore_missing_imports = true
[mypy-adlm.*]
ignore_errors = true
[mypy-torch.*,numpy.*,tokenizers.*]
follow_imports = skip
"""


def test_mypy_refuses_a_mistyped_keyword(tmp_path: Path) -> None:
    path, config = tmp_path / "user.py", tmp_path / "mypy.ini"
    path.write_text(USER, "utf-8")
    config.write_text(CHECKED, "utf-8")
    command = [sys.executable, "-m", "mypy", "--config-file", str(config)]
    command += ["--cache-dir", str(tmp_path / "cache"), str(path)]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    found = [line.split(":")[1] for line in printed.splitlines() if ": error: " in line]
    wrong = [n for n, line in enumerate(USER.splitlines(), 1) if line.endswith("# wrong")]
    assert sorted(map(int, found)) == wrong, printed


def test_the_docs_list_the_settings() -> None:
    write_settings = runpy.run_path(str(ROOT / "docs" / "write_settings.py"))
    pages = {name: write_settings["fill_page"](name) for name in write_settings["TABLES"]}
    for name, page in pages.items():
        current = (ROOT / "docs" / name).read_text("utf-8")
        assert current == page, "run python docs/write_settings.py"
    for name in SamplingSettings.model_fields:
        assert f"| `{name}` |" in pages["generate.md"]
    assert "| `optimizer.lr` \\* | Peak learning rate" in pages["training.md"]


def test_settings_import_no_torch() -> None:
    code = "import sys, adlm.settings; assert not {'torch', 'numpy', 'typer'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
