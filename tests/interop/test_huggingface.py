"""Exported folders in transformers, with this package and without it, and on a stand-in of the Hub."""

import ast
import base64
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import adlm
from adlm import LM
from adlm.cli.main import app
from tests.text.models import lm as small_lm
from tests.world import SAMPLING

transformers = pytest.importorskip("transformers")
huggingface = import_module("adlm.interop.huggingface")

KINDS = [
    ("adlm", "bytes", "wrapped"),
    ("mdlm", "bert-base-uncased", "documents"),
    ("adlm", "prose", "documents"),
    ("adlm", "bare", "wrapped"),
    ("ar", "bytes", "wrapped"),
    ("a2r", "prose", "documents"),
]


def auto_class(lm: LM) -> Any:
    return (
        transformers.AutoModelForCausalLM
        if lm.row_format.is_causal
        else transformers.AutoModelForMaskedLM
    )


def expected_logits(
    lm: LM, tokens: torch.Tensor, valid: torch.Tensor | None = None
) -> torch.Tensor:
    """The logits of `adlm.load`, the mask's ruled out."""
    logits = lm.model.head(lm.model(tokens, valid=valid).final).detach()
    if lm.model.config.mask_id is not None:
        logits[..., lm.model.config.mask_id] = -1e6
    return logits


@pytest.fixture(scope="module", params=KINDS, ids="-".join)
def exported(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[LM, Path]:
    method, words, rows = request.param
    lm = small_lm(method, words, rows)
    return lm, huggingface.export(lm, tmp_path_factory.mktemp("export") / "model")


@pytest.fixture(scope="module")
def prose(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model."""
    return huggingface.export(
        adlm.load("adlm-prose"), tmp_path_factory.mktemp("prose") / "adlm-prose"
    )


def test_logits_are_equal_and_padding_changes_nothing(exported: tuple[LM, Path]) -> None:
    lm, folder = exported
    model = auto_class(lm).from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    both = tokenizer(["it was", "it was a dark night"], return_tensors="pt", padding=True)
    for each in (lm, adlm.load(folder, device="cpu")):
        logits = model(**both).logits
        expected = expected_logits(each, both.input_ids, both.attention_mask.bool())
        assert torch.allclose(logits, expected, atol=1e-5)
    alone = model(**tokenizer("it was", return_tensors="pt")).logits
    assert torch.allclose(model(**both).logits[0, both.attention_mask[0].bool()], alone, atol=1e-4)


def test_generate_gives_the_tokens_of_adlm(exported: tuple[LM, Path]) -> None:
    lm, folder = exported
    model = auto_class(lm).from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    names = [""] if lm.row_format.is_causal else ["", *SAMPLING]  # "": the default
    if len(names) > 1 and lm.model.config.vocab_size > 1000:  # small vocabularies try all
        names = ["remask_loop", "confidence"]
    again = adlm.load(folder, device="cpu")
    prompts = ["it was", "a dark and stormy"]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    for seed, name in enumerate(names):
        settings = {"max_new_tokens": 9, "seed": seed} | (SAMPLING[name] if name else {})
        expected = lm.generate(prompts, n=2, **settings)
        tokens = model.generate(**inputs, num_return_sequences=2, **settings)
        for row, ours in zip(tokens, expected.rows, strict=True):
            given = ours.layout.spans[-1].start
            new = ours.ids[given:]
            if (
                not lm.row_format.is_framed and (eos := lm.tokenizer.eos_id) in new
            ):  # padded after the end
                new = new[: new.index(eos)] + [model.config.pad_token_id] * (
                    len(new) - new.index(eos)
                )
            assert row[len(row) - len(ours.ids) :].tolist() == ours.ids[:given] + new
        assert again.generate(prompts, n=2, **settings).texts == expected.texts


def test_user_text_is_never_special(exported: tuple[LM, Path]) -> None:
    lm, folder = exported
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = "the [MASK] of <|mask|> and <|endoftext|>"
    assert tokenizer(
        text, add_special_tokens=False, split_special_tokens=True
    ).input_ids == lm.tokenizer.encode(text)
    assert adlm.load(folder, device="cpu").tokenizer.encode(text) == lm.tokenizer.encode(text)
    if lm.tokenizer.own_mask_id is None:
        typed = "the [MASK] stays text"
        assert tokenizer(typed, add_special_tokens=False).input_ids == lm.tokenizer.encode(typed)


def test_loss_trains_and_a_saved_model_loads(exported: tuple[LM, Path], tmp_path: Path) -> None:
    lm, folder = exported
    model = auto_class(lm).from_pretrained(folder)
    tokens = transformers.AutoTokenizer.from_pretrained(folder)(
        "it was", return_tensors="pt"
    ).input_ids
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    assert all(p.grad is not None for p in model.model.head.parameters())
    with torch.no_grad():
        model.model.embed.weight.add_(0.1)
    model.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    again = auto_class(lm).from_pretrained(tmp_path)
    assert torch.equal(again(tokens).logits, model(tokens).logits)
    assert torch.equal(
        adlm.load(tmp_path, device="cpu").model.embed.weight, model.model.embed.weight
    )


def test_a_model_from_a_config_is_initialized_as_ours(exported: tuple[LM, Path]) -> None:
    lm, folder = exported
    config = transformers.AutoConfig.from_pretrained(folder)
    assert (config.vocab_size, config.max_position_embeddings) == (
        lm.model.config.vocab_size,
        lm.model.config.length,
    )
    model, ours = auto_class(lm).from_config(config), adlm.LanguageModel(lm.model.config)
    assert all(
        torch.equal(p, ours.state_dict()[name]) for name, p in model.model.state_dict().items()
    )


@pytest.mark.parametrize(
    "changes", [{"time_conditioning": True}, {"tied": True}, {"bridge": "softmax"}], ids=str
)
def test_variants_of_the_model(changes: dict[str, Any], tmp_path: Path) -> None:
    lm = small_lm(**changes) if "tied" not in changes else small_lm(words="characters", tied=True)
    folder = huggingface.export(lm, tmp_path / "model")
    model = transformers.AutoModelForMaskedLM.from_pretrained(folder)
    settings = {"max_new_tokens": 8, "seed": 3, "steps": 6}
    prompt = transformers.AutoTokenizer.from_pretrained(folder)("it was", return_tensors="pt")
    assert torch.isfinite(model(**prompt).logits).all()
    (ours,) = lm.generate("it was", **settings).rows
    tokens, eos = model.generate(**prompt, **settings)[0].tolist(), lm.tokenizer.eos_id
    end = ours.ids.index(eos, 1) if eos in ours.ids[1:] else len(ours.ids)
    assert tokens[:end] == ours.ids[:end]


def test_bfloat16(tmp_path: Path) -> None:
    lm = small_lm()
    folder = huggingface.export(lm, tmp_path / "model", dtype="bfloat16")
    assert transformers.AutoModelForMaskedLM.from_pretrained(folder).dtype == torch.bfloat16
    weights = adlm.load(folder, device="cpu").model.state_dict()
    assert all(
        torch.equal(weights[name], p.bfloat16().float())
        for name, p in lm.model.state_dict().items()
    )


def test_holes_are_filled(prose: Path) -> None:
    model = transformers.AutoModelForMaskedLM.from_pretrained(prose)
    tokenizer = transformers.AutoTokenizer.from_pretrained(prose)
    prompt = tokenizer("It was a dark<|mask|><|mask|> night.", return_tensors="pt")
    (tokens,) = model.generate(**prompt, sampler="confidence", seed=1)
    kept = prompt.input_ids[0] != tokenizer.mask_token_id
    assert torch.equal(tokens[kept], prompt.input_ids[0][kept])
    assert tokenizer.mask_token_id not in tokens


def test_generate_without_new_tokens_only_fills_the_masks(exported: tuple[LM, Path]) -> None:
    lm, folder = exported
    model = auto_class(lm).from_pretrained(folder)
    if lm.row_format.is_causal:
        tokens = torch.ones(1, 3, dtype=torch.int64)
        with pytest.raises(ValueError, match="max_new_tokens=False: expected a whole number"):
            model.generate(tokens, max_new_tokens=False)
        return
    mask_id = model.model.config.mask_id
    tokens = torch.ones(1, 6, dtype=torch.int64)
    tokens[0, 2:4] = mask_id
    filled = model.generate(tokens, max_new_tokens=0, seed=3, steps=4)
    assert torch.equal(filled, model.generate(tokens, seed=3, steps=4))
    assert mask_id not in filled


def test_generate_refuses_wrong_settings(exported: tuple[LM, Path]) -> None:
    lm, folder = exported
    model, tokens = auto_class(lm).from_pretrained(folder), torch.ones(1, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"tau=0.5: unknown name; .* options={'tau': …}"):
        model.generate(tokens, max_new_tokens=2, tau=0.5)
    with pytest.raises(ValueError, match=r"tau=0.5: unknown name|a causal model generates"):
        model.generate(tokens, max_new_tokens=2, options={"tau": 0.5})
    with pytest.raises(ValueError, match=r"first_hitting chooses its own|a causal model generates"):
        model.generate(tokens, max_new_tokens=2, sampler="first_hitting", steps=3)
    with pytest.raises(
        ValueError, match=r"num_return_sequences=0: expected a whole number above 0"
    ):
        model.generate(tokens, num_return_sequences=0)
    with pytest.raises(ValueError, match=r"at most"):
        model.generate(tokens, max_new_tokens=1000)
    with pytest.raises(ValueError, match="must be shorter"):
        model.generate(torch.ones(1, 100, dtype=torch.int64))
    torch.manual_seed(1)
    first, second = (
        model.generate(tokens, max_new_tokens=9),
        model.generate(tokens, max_new_tokens=9),
    )
    torch.manual_seed(1)
    assert torch.equal(model.generate(tokens, max_new_tokens=9), first) and not torch.equal(
        first, second
    )


class Recorder(transformers.TextDiffusionStreamer):
    """Keeps what it is given."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self.drafts: list[torch.Tensor] = []

    def put_draft(self, value: torch.Tensor, **kwargs: Any) -> None:
        self.drafts.append(value)
        super().put_draft(value, **kwargs)


def test_the_streamer_shows_every_step(prose: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = transformers.AutoModelForMaskedLM.from_pretrained(prose)
    tokenizer = transformers.AutoTokenizer.from_pretrained(prose)
    streamer = Recorder(tokenizer)
    tokens = model.generate(
        **tokenizer("It was", return_tensors="pt"), max_new_tokens=6, steps=4, streamer=streamer
    )
    assert len(streamer.drafts) >= 4
    assert torch.equal(streamer.drafts[-1][0], tokens[0, -7:])
    assert tokenizer.decode(tokens[0, -7:-1]) in capsys.readouterr().out
    tokens = model.generate(
        **tokenizer("It<|mask|> a night.", return_tensors="pt"), streamer=streamer
    )
    assert torch.equal(streamer.drafts[-1][0], tokens[0, 2:])  # from the first mask on


# Runs in a process of its own: remote code is cached, and a registered class would hide it.
CHECK = """
import json, sys
if sys.argv[2] == "without":
    sys.modules["adlm"] = None  # importing it is an error
else:
    import adlm.interop.huggingface
import torch, transformers
code = {"trust_remote_code": True} if sys.argv[2] == "without" else {}
folder = sys.argv[1]
tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **code)
model = transformers.AutoModelForMaskedLM.from_pretrained(folder, **code)
prompt = tokenizer("It was", return_tensors="pt")
logits = model(**prompt).logits
tokens = model.generate(**prompt, max_new_tokens=12, seed=4, steps=16)
best = transformers.pipeline("fill-mask", model=model, tokenizer=tokenizer)("It was a<|mask|> night.")[0]["sequence"]
module = type(model).__module__
model.save_pretrained(sys.argv[3])
tokenizer.save_pretrained(sys.argv[3])
again = transformers.AutoModelForMaskedLM.from_pretrained(sys.argv[3], **code)
assert torch.equal(again(**prompt).logits, logits)
print(json.dumps([module, prompt.input_ids.tolist(), logits[0, :, :50].tolist(), tokens.tolist(), best]))
"""


@pytest.mark.parametrize("package", ["with", "without"])
def test_fresh_processes_give_the_same(package: str, prose: Path, tmp_path: Path) -> None:
    env = os.environ | {
        "HF_MODULES_CACHE": str(tmp_path),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", CHECK, str(prose), package, str(tmp_path / "saved")]
    root = Path(adlm.__file__).parents[1]
    cwd = root if package == "with" else tmp_path
    printed = subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, env=env, check=True
    ).stdout
    module, ids, logits, tokens, best = json.loads(printed.splitlines()[-1])
    assert module.startswith("adlm." if package == "with" else "transformers_modules.")
    lm = adlm.load(prose, device="cpu")
    assert (
        torch.tensor(logits) - expected_logits(lm, torch.tensor(ids))[0, :, :50]
    ).abs().max() < 1e-5
    assert tokens[0] == lm.generate("It was", max_new_tokens=12, seed=4, steps=16).rows[0].ids
    assert best.startswith("It was a") and best.endswith(" night.") and "<|" not in best
    saved = adlm.load(tmp_path / "saved", device="cpu")
    assert saved.generate("It was", max_new_tokens=12, seed=4, steps=16).rows[0].ids == tokens[0]
    assert (tmp_path / "saved" / "modeling_adlm.py").is_file() == (package == "without")


def test_a_folder_without_code_files_needs_the_package(prose: Path, tmp_path: Path) -> None:
    """As the classes of the package save it."""
    transformers.AutoModelForMaskedLM.from_pretrained(prose).save_pretrained(tmp_path)
    load_class = import_module("transformers.dynamic_module_utils").get_class_from_dynamic_module
    with pytest.raises(OSError, match=r"does not appear to have a file named modeling_adlm\.py"):
        load_class("modeling_adlm.AdlmForMaskedLM", tmp_path)
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        adlm.load(tmp_path)


def test_code_files_are_the_package(prose: Path) -> None:
    """What is defined is equal in the code files and in the package; only imports and an operator's name differ."""
    code = huggingface.collect_code(huggingface.MODELING)
    assert {
        path.stem: path.read_text("utf-8") for path in prose.glob("*.py")
    }.items() >= code.items()

    def definitions(source: str) -> list[str]:
        nodes = [
            node
            for node in ast.parse(source).body
            if isinstance(node, ast.ClassDef | ast.FunctionDef)
        ]
        imports = (ast.Import, ast.ImportFrom)
        for each in nodes:
            for node in ast.walk(each):
                if isinstance(body := getattr(node, "body", None), list):
                    node.body = [x for x in body if not isinstance(x, imports)]  # type: ignore[attr-defined]
        return [ast.dump(node) for node in nodes]

    assert len(code) > 10
    for name, source in code.items():
        module = source.split()[3]
        original = huggingface.find_source(module)
        expected = original.read_text("utf-8").replace(
            '"adlm::', '__name__.replace(".", "_") + "::'
        )
        assert definitions(source) == definitions(expected), name
        assert not re.search(r"^\s*(from|import) adlm\b", source, re.MULTILINE)


def test_the_command(tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = CliRunner().invoke(
        app, ["export", "mdlm-prose", "--out", str(out), "--dtype", "bfloat16", "--json"]
    )
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["folder"] == str(out)
    assert (
        len([*out.rglob("*.safetensors"), *out.rglob("*.bin")]) == 1
    )  # the weights are stored once
    card = (out / "README.md").read_text("utf-8")
    assert "mdlm-prose" in card and "bfloat16" in card and "trust_remote_code" in card
    assert CliRunner().invoke(app, ["export", "--out", str(out)]).exit_code == 2
    wrong = CliRunner().invoke(app, ["export", "--out", str(tmp_path / "new"), "--dtype", "int8"])
    assert wrong.exit_code == 2 and not (tmp_path / "new").exists()


def test_the_card_has_the_metrics_of_a_report(tmp_path: Path) -> None:
    report = Path(adlm.__file__).parents[1] / "docs" / "report"
    folder = huggingface.export(adlm.load("adlm-prose"), tmp_path / "out", report=report)
    card = import_module("huggingface_hub").ModelCard.load(folder / "README.md")
    metrics = {(each.metric_type, round(each.metric_value, 2)) for each in card.data.eval_results}
    assert ("perplexity", 41.33) in metrics and card.data.license == "apache-2.0"
    assert (
        card.text.startswith("# adlm-prose")
        and "\n# " not in card.text
        and "\n## Evaluation of" in card.text
    )
    assert {path.name for path in folder.glob("*.svg")} == {
        path.name for path in report.glob("*.svg")
    }
    with pytest.raises(ValueError, match="has no metrics of 'small adlm'"):
        huggingface.export(small_lm(), tmp_path / "other", report=report)
    assert not (tmp_path / "other").exists()


class HubHandler(BaseHTTPRequestHandler):
    """The part of the Hub's API that an upload uses; files are kept in memory."""

    files: dict[str, bytes]

    def log_message(self, *_: Any) -> None:
        """Print nothing."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        base = f"http://127.0.0.1:{self.server.server_address[1]}/owner/name"
        if self.path == "/api/repos/create":
            answer: Any = {"url": base, "private": True}
        elif self.path == "/api/validate-yaml":
            assert json.loads(body)["content"].startswith("---")
            answer = {"errors": [], "warnings": []}
        elif "/preupload/" in self.path:
            names = [each["path"] for each in json.loads(body)["files"]]
            answer = {
                "files": [
                    {"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in names
                ]
            }
        else:
            assert "/commit/" in self.path, self.path
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            answer = {
                "commitUrl": f"{base}/commit/1",
                "commitOid": "1" * 40,
                "hookOutput": "",
                "success": True,
            }
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, bytes]]:
    """A stand-in of the Hub on this machine."""
    HubHandler.files = {}
    server = ThreadingHTTPServer(("127.0.0.1", 0), HubHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(
        "huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}"
    )
    yield HubHandler.files
    server.shutdown()


def test_push_to_hub_uploads_every_file(hub: dict[str, bytes], tmp_path: Path) -> None:
    folder = huggingface.export(small_lm(), tmp_path / "model")
    address = huggingface.push_to_hub(folder, "owner/name")
    assert address.endswith("owner/name/commit/1")
    files = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
    assert hub == files
    with pytest.raises(ValueError, match="no exported model"):
        huggingface.push_to_hub(tmp_path, "owner/name")
