"""Costs: counts equal the real model's, FLOPs equal torch's count, bytes are near the measured ones."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from adlm.diffusion import selected
from adlm.diffusion.masking import NoisyBatch, Selection
from adlm.diffusion.objectives import training_loss
from adlm.models import costs
from adlm.models.costs import count_parameters, estimate_memory, flops_per_token, peak_flops
from adlm.models.language_model import LanguageModel, ModelConfig
from adlm.models.methods import METHODS, build_config
from bench import costs as planned
from tests.world import count_weights, shapes_only

ROOT = Path(__file__).resolve().parents[2]
OPTIONS: list[dict[str, object]] = [
    {},
    {"bridge": "direct"},
    {"bridge": "softmax"},
    {"cond_dim": None},
]
OPTIONS += [{"cond_dim": 32, "time_conditioning": True}, {"positions": "learned", "length": 77}]
OPTIONS += [{"norm_bias": True}, {"attention_bias": True}, {"tied": True}]
OPTIONS += [{"bridge": "none"}, {"project_after": 1}]
OPTIONS += [{"positions": "learned", "norm_bias": True, "attention_bias": True, "tied": True}]


def small(method: str = "adlm", **changes: object) -> ModelConfig:
    return build_config(method, "small", vocab_size=50_258, mask_id=50_257, **changes)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(options) or "plain")
@pytest.mark.parametrize("method", METHODS)
def test_the_count_is_the_models(method: str, options: dict[str, object]) -> None:
    config = build_config(method, "nano", vocab_size=1003, mask_id=1002, **options)
    assert count_parameters(config) == count_weights(shapes_only(config))


@pytest.mark.parametrize(
    "changes",
    [{}, {"embed_norm": True, "qk_norm": True, "project_after": 1}],
    ids=["paper", "extended"],
)
@pytest.mark.parametrize("bridge", ["factored", "direct", "softmax", "none"])
@pytest.mark.parametrize("method", ["adlm", "mdlm", "a2r", "ar"])
def test_flops_are_what_torch_counts(method: str, bridge: str, changes: dict[str, object]) -> None:
    """Of a real step, forward and backward, with attention written out: all of it, and the bridge's product, if any."""
    rows, length, vocab, dim, share = 4, 32, 96, 64, 0.25
    shape = {
        "vocab_size": vocab,
        "mask_id": vocab - 1,
        "length": length,
        "dim": dim,
        "heads": 4,
        "bridge": bridge,
    }
    config = build_config(
        method, "nano", **shape, **changes, dropout=0.0, cond_dim=None
    )  # modulations are not counted
    model, tokens = LanguageModel(config), rows * length

    def some(part: float) -> Selection:
        index = torch.arange(int(part * tokens))
        return Selection(index, torch.ones(len(index)))

    x0, ones, two = (
        torch.zeros(rows, length, dtype=torch.int64),
        torch.ones(rows),
        config.anchor_layers > 0,
    )
    hidden, anchors = some(1.0 if config.is_causal else 0.5), some(share) if two else None
    batch = NoisyBatch(
        x0, x0, ones, ones, hidden, anchors, torch.tensor(float(tokens)), is_causal=config.is_causal
    )
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        training_loss(model, batch, anchor_weight=1.0 if two else None).total.backward()
    expected = tokens * flops_per_token(config, length=length, anchor_share=share)
    layers = config.anchor_layers + config.denoiser_layers
    if config.is_causal:  # written out, the half that a kernel skips is computed
        expected += 3 * tokens * layers * 2 * length * dim
    if two and bridge == "factored":
        expected += 3 * 2 * vocab * dim * dim
    assert counter.get_total_flops() == expected


TERAFLOPS = {
    "H200": 989,
    "H200 NVL": 835,
    "H100 80GB HBM3": 989,
    "H100 PCIe": 756,
    "H20": 148,
    "GB200": 2500,
}
TERAFLOPS |= {
    "A100-SXM4-80GB": 312,
    "L40S": 362,
    "L40": 181,
    "L4": 121,
    "AMD Instinct MI300X": 1307,
}
TERAFLOPS |= {
    "GeForce RTX 3090": 71,
    "GeForce RTX 3090 Ti": 80,
    "Tesla V100-PCIE-16GB": 112,
    "Tesla T4": 65,
}
UNKNOWN = (
    "x86_64 CPU",
    "",
    "A10G",
    "H2000",
    "H100 80GB HBM3 MIG 1g.10gb",
    "GeForce RTX 4090 Laptop GPU",
)


def test_peaks_are_found_by_name_and_never_guessed() -> None:
    peaks = {name: peak_flops(f"NVIDIA {name}") for name in (*TERAFLOPS, *UNKNOWN)}
    assert peaks == {name: tera * 1e12 for name, tera in TERAFLOPS.items()} | dict.fromkeys(UNKNOWN)


def estimate(config: ModelConfig, **changes: object) -> int:
    settings = {"rows": 32, "length": 1024, "bytes_per_activation": 2, "ema": True}
    return estimate_memory(config, **(settings | {"is_cuda": True} | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(("bridge", "gib"), [("factored", 24.3), ("direct", 23.1)])
def test_memory_is_near_what_an_h200_took(bridge: str, gib: float) -> None:
    """bench/RECORDS.md: ADLM small, batch 32 × 1,024, compiled layers, dropout 0.1, AdamW, EMA."""
    assert estimate(small(bridge=bridge)) / 2**30 == pytest.approx(gib, rel=0.1)


def test_memory_follows_its_parts() -> None:
    config = small()
    base, count = estimate(config), count_parameters(config)
    assert base - estimate(config, ema=False) == 4 * count
    assert 20 * count // 8 < base - estimate(config, shards=8) < 20 * count
    rows = [estimate(config, rows=n) for n in (32, 64, 96)]
    assert (
        rows[2] - rows[1] == rows[1] - rows[0] == 18 * 18 * 2 * 768 * 32 * 1024
    )  # no more logits than of a chunk
    assert estimate(config, checkpoint_activations=True) < base / 2
    assert {
        True: selected.MAX_LOGIT_ROWS["cuda"],
        False: selected.MAX_LOGIT_ROWS["cpu"],
    } == costs.MAX_LOGIT_ROWS


@pytest.mark.parametrize("qk_norm", [False, True])
def test_activations_are_what_a_layer_saves(qk_norm: bool) -> None:
    """Counted by saved-tensor hooks, in float32, within 2%: statistics of norms and rotary angles are not estimated."""
    rows, length, dim = 4, 256, 128
    shape = {
        "vocab_size": 64,
        "mask_id": 63,
        "dim": dim,
        "heads": 2,
        "length": length,
        "cond_dim": None,
    }
    config = ModelConfig(**shape, anchor_layers=0, denoiser_layers=1, dropout=0.0, qk_norm=qk_norm)  # type: ignore[arg-type]
    model, saved, x = (
        LanguageModel(config),
        list[Tensor](),
        torch.randn(rows, length, dim, requires_grad=True),
    )

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.denoiser.layers[0](x, model.rotary(x.device))
    weights = {p.data_ptr() for p in model.parameters()}
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in saved
    }
    counted = sum(size for address, size in storages.items() if address not in weights)
    settings = {"length": 1024, "bytes_per_activation": 4, "rows": 48}
    estimated = estimate(config, **settings) - estimate(
        config, **settings | {"rows": 32}
    )  # no more logits, 16 rows
    assert counted / (rows * length) == pytest.approx(estimated / (16 * 1024), rel=0.02)


STEPS = """
import json, sys
from pathlib import Path
import torch
torch.set_num_threads(2)  # what glibc keeps depends on it
from adlm.diffusion.anchors import rare_in_sequence
from adlm.diffusion.masking import ForwardProcess, corrupt
from adlm.diffusion.objectives import training_loss
from adlm.diffusion.rng import CounterRng
from adlm.models.language_model import LanguageModel, ModelConfig
from adlm.training.ema import EMA
from adlm.training.optim import build_optimizers, step_optimizers

def steps(config, rows):
    model = LanguageModel(config)
    optimizers, ema = build_optimizers(model), EMA(model, 0.9)
    process = ForwardProcess(config.mask_id, anchor_rule=rare_in_sequence(5))
    x0 = torch.randint(config.vocab_size - 1, (rows, config.length))
    for step in range(4):
        batch = corrupt(x0, process, CounterRng.from_seed(0, rows), step)
        training_loss(model, batch, anchor_weight=3e-3).total.backward()
        step_optimizers(model, optimizers, 1.0, ema)

def peak():  # of this program alone: ru_maxrss would count the process that started it
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024

steps(ModelConfig(vocab_size=64, mask_id=63, dim=16, heads=2, anchor_layers=1, denoiser_layers=1, length=16), 2)
before = peak()
steps(ModelConfig(**json.loads(sys.argv[1])), int(sys.argv[2]))
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and the estimate is of glibc")
def test_memory_is_near_what_a_cpu_took() -> None:
    """Real steps in a fresh process, within 35%: 30.5% was seen once on a busy machine."""
    rows, length, vocab = 32, 128, 4096
    shape = {"vocab_size": vocab, "mask_id": vocab - 1, "dim": 128, "heads": 4, "length": length}
    shape |= {"anchor_layers": 6, "denoiser_layers": 3}
    command = [sys.executable, "-c", STEPS, json.dumps(shape), str(rows)]
    process = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    real = {"rows": rows, "length": length, "bytes_per_activation": 4, "is_cuda": False}
    estimated = estimate(ModelConfig(**shape), **real)  # type: ignore[arg-type]
    assert estimated == pytest.approx(int(process.stdout), rel=0.35)


@pytest.mark.parametrize("name", ["paper_table", "shape_table", "memory_table", "time_table"])
def test_the_tables_of_the_document_are_computed(name: str) -> None:
    """`python -m bench.costs` prints them; a change of either must reach the other."""
    assert getattr(planned, name)() in (ROOT / "docs/cluster.md").read_text("utf-8")


def test_the_measured_speed_is_the_records() -> None:
    assert f"**{planned.MEASURED:,}**" in (ROOT / "bench/RECORDS.md").read_text("utf-8")
    document = (ROOT / "docs/cluster.md").read_text("utf-8")
    share = (
        planned.MEASURED * flops_per_token(small(), length=1024) / (peak_flops("NVIDIA H200") or 0)
    )
    assert (
        f"{planned.MEASURED:,} tokens/s" in document
        and f"{share:.0%} of the data sheet's" in document
    )
    # A checkpoint: weights, two moments and the average.
    sizes = [16 * count_parameters(config) / 1e9 for config in (small(), planned.LARGER[1].config)]
    assert f"about {sizes[0]:.1f} GB" in document and f"about {sizes[1]:.0f} GB" in document
