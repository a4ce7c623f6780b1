"""Prints the tables of docs/cluster.md: the cost of the paper's runs and of two larger models, by arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from adlm.models.costs import count_parameters, estimate_memory, flops_per_token, peak_flops
from adlm.models.language_model import ModelConfig
from adlm.models.methods import build_config

# One value is measured; the others are assumptions or follow from it.
MEASURED = 312_521  # tokens/s on one H200: ADLM small, length 1,024, batch 32 (bench/RECORDS.md)
EFFICIENCY = {8: 0.95, 64: 0.90}  # of 8 and 64 GPUs compared with one, assumed
MFU = {
    8: 0.40,
    64: 0.36,
}  # of the larger models, assumed; the measured MFU is 0.38 of the data sheet's peak
USABLE = 0.9  # of a card's memory: the estimate's error and what it leaves out
CARDS = {"80 GB": 79, "141 GB": 139}  # GiB that a program can have of it
GIB = 2**30
BATCH = 512  # rows of the paper's runs, over all GPUs


@dataclass(frozen=True)
class Corpus:
    """A corpus of the paper, with the share of anchors among tokens of English frequencies at this length."""

    name: str
    vocab_size: int
    mask_id: int
    length: int
    anchor_share: float
    methods: tuple[str, ...]


@dataclass(frozen=True)
class Larger:
    """A larger model that was not trained."""

    name: str
    config: ModelConfig
    anchor_share: float
    budget: float  # tokens


CORPORA = (
    Corpus("OWT", 50_258, 50_257, 1024, 0.6, ("adlm", "mdlm", "a2r", "ar")),
    Corpus("LM1B", 30_522, 103, 128, 0.86, ("adlm", "mdlm", "ar")),
)
SAME = ModelConfig(vocab_size=32_768, mask_id=32_767, bridge="direct", dropout=0.0)
LARGER = (
    Larger(
        "1B",
        SAME.replace(dim=2048, heads=16, anchor_layers=12, denoiser_layers=6, length=2048),
        0.51,
        budget=100e9,
    ),
    Larger(
        "7B",
        SAME.replace(dim=4096, heads=32, anchor_layers=22, denoiser_layers=11, length=4096),
        0.44,
        budget=500e9,
    ),
)


def build_paper_config(corpus: Corpus, method: str) -> ModelConfig:
    """The paper's small model of a method."""
    return build_config(
        method, "small", vocab_size=corpus.vocab_size, mask_id=corpus.mask_id, length=corpus.length
    )


def table(head: list[str], rows: list[list[str]]) -> str:
    """Markdown; the first column is text, the others are numbers."""
    rule = ["---"] + ["---:"] * (len(head) - 1)
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, rule, *rows]) + "\n"


def paper_table() -> str:
    """GPU-hours of the paper's runs, from the one measurement, scaled by FLOPs per token."""
    speed = MEASURED * flops_per_token(
        build_paper_config(CORPORA[0], "adlm"), length=1024
    )  # FLOP/s
    rows = []
    for corpus in CORPORA:
        for method in corpus.methods:
            cost = flops_per_token(
                build_paper_config(corpus, method),
                length=corpus.length,
                anchor_share=corpus.anchor_share,
            )
            is_measured = corpus is CORPORA[0] and method == "adlm"
            for steps in (
                (500_000, 1_000_000) if method in ("ar", "a2r") else (1_000_000, 2_000_000)
            ):
                tokens = steps * BATCH * corpus.length
                hours = tokens / (speed / cost) / 3600
                rows.append(
                    [
                        f"{corpus.name} {method.upper()}, {steps / 1e6:g}M steps",
                        f"{tokens / 1e9:,.0f}B",
                        f"{cost / 1e9:.3f}",
                        f"{MEASURED:,}" if is_measured else f"{speed / cost / 1e3:.0f}K *",
                        f"{hours:,.0f}",
                        *(f"{hours / n / share:.1f}" for n, share in EFFICIENCY.items()),
                    ]
                )
    wall = [f"hours on {n} at {share:.0%} †" for n, share in EFFICIENCY.items()]
    return table(["run", "tokens", "GFLOP/token", "tokens/s, one H200", "GPU-hours", *wall], rows)


def shape_table() -> str:
    """The larger models and their parameters."""
    rows = []
    for model in LARGER:
        shape, size = model.config, f"{count_parameters(model.config) / 1e9:.2f}B"
        layers = f"{shape.anchor_layers} + {shape.denoiser_layers}"
        rows.append(
            [model.name, f"{shape.dim:,}", f"{shape.heads}", layers, f"{shape.length:,}", size]
        )
    return table(["model", "dim", "heads", "layers", "length", "parameters"], rows)


def estimate_larger_memory(model: Larger, rows: int, shards: int, checkpoint: bool) -> int:
    """Estimate the memory of a larger model on one GPU, in bf16 with AdamW and an EMA."""
    return estimate_memory(
        model.config,
        rows=rows,
        length=model.config.length,
        bytes_per_activation=2,
        ema=True,
        shards=shards,
        checkpoint_activations=checkpoint,
        is_cuda=True,
    )


def memory_table() -> str:
    """What the larger models take on one GPU, and the largest micro-batch (a power of two) that fits each card."""
    rows = []
    for model in LARGER:
        for shards in EFFICIENCY:
            for checkpoint in (False, True):
                one, two = (estimate_larger_memory(model, n, shards, checkpoint) for n in (1, 2))
                totals = {
                    2**i: estimate_larger_memory(model, 2**i, shards, checkpoint) / GIB
                    for i in range(10)
                }
                cells = [f"{part / GIB:.1f}" for part in (2 * one - two, two - one)]
                for gib in CARDS.values():
                    fits = max((n for n in totals if totals[n] <= USABLE * gib), default=None)
                    cells.append("none" if fits is None else f"{fits} ({totals[fits]:.0f} GiB)")
                rows.append(
                    [f"{model.name}, {shards} shards", "yes" if checkpoint else "no", *cells]
                )
    cards = [f"micro-batch on {card}" for card in CARDS]
    return table(["model", "checkpointing", "whatever the rows, GiB", "a row, GiB", *cards], rows)


def time_table() -> str:
    """How long the larger models take on H100 SXM or H200 at the assumed MFU."""
    rows = []
    for model in LARGER:
        cost = flops_per_token(
            model.config, length=model.config.length, anchor_share=model.anchor_share
        )
        for gpus, mfu in MFU.items():
            speed = gpus * mfu * (peak_flops("NVIDIA H200") or 0) / cost
            days = model.budget / speed / 86400
            rows.append(
                [
                    f"{model.name} ({count_parameters(model.config) / 1e9:.2f}B parameters)",
                    f"{gpus}",
                    f"{cost / 1e9:.1f}",
                    f"{mfu:.0%}",
                    f"{speed / 1e3:,.0f}K",
                    f"{model.budget / 1e9:.0f}B",
                    f"{days:.1f}",
                    f"{days * 4 / 3:.1f}",  # the forward of the layers a second time
                ]
            )
    return table(
        ["model", "GPUs", "GFLOP/token", "MFU", "tokens/s", "tokens", "days", "days, checkpointed"],
        rows,
    )


if __name__ == "__main__":
    for make in (paper_table, shape_table, memory_table, time_table):
        print(make.__doc__, make(), sep="\n\n")
