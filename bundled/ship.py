"""Export a trained model for the package: `python bundled/ship.py RUN FOLDER`.

Modulations are folded into the matrices, which are stored as int8 with one scale per row.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from adlm.checkpoint import export_model, load_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("run", type=Path, help="run or checkpoint folder")
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    loaded = load_model(options.run)
    export_model(loaded, options.folder)
    size = sum(file.stat().st_size for file in options.folder.iterdir())
    parameters = sum(p.numel() for p in loaded.model.parameters())
    print(f"{options.folder}: step {loaded.step}, {parameters:,} parameters as trained, {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
