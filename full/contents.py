"""What a checkpoint holds: adds a report to `models.read_config` and the readers of hf.py.

    python -m full inspect DIR

It reads a Hugging Face directory without loading a weight, and says what `load_hf` would do.
"""

import argparse
import dataclasses
import json
from pathlib import Path

import torch

from full.hf import DTYPES, open_checkpoint, sources_of
from full.model_config import ModelConfig
from full.talk import is_run
from full.transformer import Transformer

WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


def inspect(directory) -> None:
    """Print a checkpoint's config, its tensors, and what `load_hf` would do with each.

    Of a directory that holds no weights, the config and how many parameters it asks for. A run's
    directory is refused by the name of the command that reads or writes its weights.
    """
    if (Path(directory) / "config.json").exists() and is_run(directory):
        hf = Path(directory) / "hf"
        command = f"inspect {hf}" if hf.exists() else f"export {directory} DIR"
        raise ValueError(f"{directory} is a run, and inspect reads Hugging Face's format: use "
                         f"python -m full {command}")  # fmt: skip
    config = ModelConfig.from_hf(directory)
    weights = [name for name in WEIGHTS if (Path(directory) / name).exists()]
    tensors, others = open_checkpoint(directory) if weights else ({}, 0)
    print(json.dumps(dataclasses.asdict(config), indent=2))

    # The number in front is exact: who reads it with a program need not round.
    count, active = parameters(config)
    size = f"{count:,} parameters"
    if config.num_experts:
        size += f", {active:,} of them for one token"
    if not weights:
        print(f"{size}; no weights: {directory} has no {' and no '.join(WEIGHTS)}")
        return

    # On the meta device a model has shapes and no memory.
    with torch.device("meta"):
        model = Transformer(config)
    wanted = {
        source.name: name
        for name, p in model.named_parameters()
        for source in sources_of(name, p.shape, tensors, config)
    }
    for name, stored in sorted(tensors.items()):
        part, into = stored.part, wanted.get(name, "not loaded")
        print(f"{name:60} {part.get_dtype():5} {part.get_shape()}  {stored.path.name}"
              + ("" if into == name else f"  -> {into}"))  # fmt: skip
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    dtypes = {x.part.get_dtype() for name, x in tensors.items() if name in wanted}
    for dtype in sorted(dtypes - DTYPES.keys()):
        print(f"refused: tensors of dtype {dtype}")
    print(f"{size}; missing {sorted(wanted.keys() - tensors.keys())}, "
          f"refused {sorted(tensors.keys() - wanted.keys() - tied)}, "
          f"not of the text model {others} tensors")  # fmt: skip


def parameters(config) -> tuple[int, int]:
    """Return the number of all parameters, and of those that one token meets (K of E experts)."""
    with torch.device("meta"):
        model = Transformer(config)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    idle = sum(size // config.num_experts * (config.num_experts - config.num_experts_per_tok)
               for name, size in sizes.items() if ".experts." in name)  # fmt: skip
    return sum(sizes.values()), sum(sizes.values()) - idle


def main(argv) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser("python -m full inspect", description=inspect.__doc__)
    parser.add_argument("directory")
    inspect(parser.parse_args(argv).directory)
    return 0
