"""Read and write the weights of Hugging Face's directories, of a model that ranks may share.

The factors of lora.py are written as PEFT does. Checks, audits and tests call `full_definition`,
which computes a model from its weights, token by token.

Letters:  S tokens   V vocabulary entries   E experts
"""

import contextlib
import dataclasses
import itertools
import json
import math
import shutil
from functools import reduce
from pathlib import Path
from typing import NamedTuple

import safetensors.torch
import torch
import torch.distributed as dist

import models
from full.model import deltanet
from full.model.config import ModelConfig, read_json, require_same_numbers
from full.model.lora import is_factor, matrix_of
from full.model.transformer import Critic, Transformer
from full.ranks.joining import errors_on_all_ranks
from full.ranks.places import TIED, local, part_of

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
INDEX = "model.safetensors.index.json"


class Stored(NamedTuple):
    """Store where a tensor is in a safetensors file. It is read by slicing `part`."""

    path: Path
    part: object  # safetensors' slice: get_shape(), get_dtype(), [ranges]


def open_checkpoint(directory) -> dict[str, Stored]:
    """Return the tensors of a checkpoint by name.

    Of a multimodal Gemma 3 they are the language model's, under a text model's names.
    """
    # As in `models.load`: transformers takes model.safetensors before an index, and adds an adapter
    # to its base by itself. vLLM without an index takes all files.
    files = sorted(Path(directory).glob("model*.safetensors"))
    names = [x.name for x in files + sorted(Path(directory).glob("adapter_*"))]
    tensors = {}
    count = 0
    for path in files:
        try:
            reader = safetensors.safe_open(path, framework="pt")
        except (safetensors.SafetensorError, OSError) as error:
            raise ValueError(f"{path} is truncated or not a safetensors file: {error}") from error
        tensors |= {name: Stored(path, reader.get_slice(name)) for name in reader.keys()}
        count += len(reader.keys())
    if len(names) > len(files) or not 0 < len(tensors) == count:
        raise ValueError(f"{directory}: expected one set of weights, got {names}; other programs "
                         f"would read another one")  # fmt: skip

    # Frequencies of RoPE, which Llama 2's files hold, follow from the config.
    # The layers of Qwen3.5 that predict further tokens are not a part of the model.
    text = {n: x for n, x in tensors.items()
            if not n.endswith("rotary_emb.inv_freq") and not n.startswith("mtp.")}  # fmt: skip
    if any("language_model." in name for name in text):
        names = {name: name.replace("language_model.", "") for name in text
                 if "language_model." in name or name == "lm_head.weight"}  # fmt: skip
        twice = [x for x in names.values() if [*names.values()].count(x) > 1]
        if twice:
            raise ValueError(f"{directory}: expected one {twice[0]} of the language model, got "
                             f"{[x for x in names if names[x] == twice[0]]}")  # fmt: skip
        text = {own: text[name] for name, own in names.items()}
    return text


class Source(NamedTuple):
    """Store where a part of one of our parameters is in a checkpoint."""

    name: str
    shape: tuple  # of the stored tensor
    expert: int | None = None  # the part is [expert]. None: all of the parameter
    row: int = 0  # its first row in the stored tensor, in the second to last dimension
    rows: torch.Tensor | None = None  # of the stored tensor, in our order. None: in that order


def rows_in_file(name, config):
    """Return the rows of a stored tensor in the order that our parameter has. None: in that order.
    """
    is_mixed = name.endswith(("linear_attn.in_proj_qkv.weight", "linear_attn.conv1d.weight"))
    return deltanet.rows_in_file(config) if is_mixed else None


def sources_of(name, shape, stored, config) -> list[Source]:
    """Return the sources of a parameter of this shape. stored: the names of a checkpoint."""
    # We have the experts of a layer in one parameter. Checkpoints of transformers 4 have one tensor
    # for each expert; later ones stack the experts, with the rows of gate first and then of up.
    path, _, leaf = name.rpartition(".")
    if not path.endswith(".experts") or name in stored:
        return [Source(name, tuple(shape), rows=rows_in_file(name, config))]
    E, rows, M = shape
    if f"{path}.gate_up_proj" in stored:
        first = rows if leaf == "up_proj" else 0
        return [Source(f"{path}.gate_up_proj", (E, 2 * rows, M), None, first)]
    return [Source(f"{path}.{e}.{leaf}.weight", (rows, M), e) for e in range(E)]


def in_file_order(name, x, config):
    """Return the rows of our parameter x, or of its factor B, as a file has them."""
    rows = rows_in_file(name, config)
    return x if rows is None else torch.empty_like(x).index_copy_(0, rows.to(x.device), x)


@torch.no_grad()
def load_hf(directory, *, model=None, dtype=None, device=None) -> Transformer:
    """Load a Hugging Face checkpoint directory, strictly: every tensor has a place and the reverse.

    model: fill this one as it is. If `parallelize` has made it, each rank reads its own part.
        All ranks must call, and an error of one rank is raised on all.
    dtype, device: of a new model. Default: the `dtype` of config.json, or the widest dtype that is
        stored if config.json does not say; the CPU.

    Names, shapes and dtypes are checked before anything is allocated or copied; then one tensor at
    a time is read. Weights that are not finite in the model's dtype are refused as they are read:
    then the weights of a given `model` are undefined, and after every other refusal untouched. A
    router's bias is set to zero, and so is a value head that the checkpoint does not have.
    """
    if model is not None and (dtype or device):
        raise ValueError("give load_hf a model to fill, or dtype and device of a new one, not both")
    directory = Path(directory)
    with errors_on_all_ranks(alone=getattr(model, "part", None) is None):
        config = ModelConfig.from_hf(directory)
        stored = open_checkpoint(directory)
        # Some writers store the head of a tied model next to the embedding.
        head = stored.pop("lm_head.weight", None) if config.tie_word_embeddings else None

        # A model on the meta device has shapes and no memory. Whatever sizes a damaged config asks
        # for, they are compared with the stored tensors before anything is allocated. A given model
        # may be a stage of a pipeline, have factors, or be a critic that starts from a policy.
        with torch.device("meta"):
            whole = Transformer(config)
        if model is not None:
            as_stored = dict(router_bias_rate=0.0)
            if isinstance(model, Critic):  # it leaves the head out
                as_stored["tie_word_embeddings"] = config.tie_word_embeddings
            require_same_numbers(config, dataclasses.replace(model.config, **as_stored), directory)
        sources = {name: sources_of(name, p.shape, stored, config)
                   for name, p in whole.named_parameters()}  # fmt: skip
        require_matching(sources, stored, directory)
        if head is not None:
            require_tied(head, stored[TIED])
        if model is None:
            dtype = dtype or checkpoint_dtype(directory, stored)
            model = whole.to(dtype).to_empty(device=device or "cpu")
        places = part_of(model).places
        for name, parameter in model.named_parameters():
            if name in sources:
                copy_part(local(parameter), places[name].region, sources[name], stored)
            else:
                parameter.zero_()
        for buffer in model.buffers():
            buffer.zero_()
        return model


def require_matching(sources, stored, directory) -> None:
    """Raise a ValueError unless a checkpoint has our parameters' tensors only, as floats.

    sources: {parameter: its Sources}. stored: of `open_checkpoint`.
    """
    expected = {source.name: source.shape for some in sources.values() for source in some}
    shapes = {name: tuple(x.part.get_shape()) for name, x in stored.items()}
    mismatched = sorted({name for name, _ in expected.items() ^ shapes.items()})
    if mismatched:
        lines = [f"{name} {shapes.get(name, 'missing')} for {expected.get(name, 'no parameter')}"
                 for name in mismatched[:8]]  # fmt: skip
        raise ValueError(f"{directory}: {len(mismatched)} tensors do not fit its config.json: "
                         f"{'; '.join(lines)}")  # fmt: skip

    # Quantized weights mean something only together with their scales, and integers are not
    # weights at all. A cast would train them all the same.
    for name, (path, part) in stored.items():
        if part.get_dtype() not in DTYPES:
            raise ValueError(f"{path}: {name} is stored as {part.get_dtype()}; expected one of "
                             f"{', '.join(DTYPES)}: convert the checkpoint")  # fmt: skip


def require_tied(head, embedding) -> None:
    """Raise a ValueError unless a stored head is the embedding, as a tied model's is."""
    shapes = [tuple(x.part.get_shape()) for x in (head, embedding)]
    starts = range(0, shapes[0][0], 1024)  # 1024 rows at a time
    if shapes[0] != shapes[1] or not all(
        torch.equal(*(x.part[n : n + 1024].to(torch.float64) for x in (head, embedding)))
        for n in starts
    ):
        raise ValueError(f"{head.path}: expected lm_head.weight {shapes[0]} to equal "
                         f"{TIED} {shapes[1]}, as tie_word_embeddings is true, got another matrix; "
                         f"to use it, set tie_word_embeddings to false in config.json")


def checkpoint_dtype(directory, stored):
    """Return the dtype that a checkpoint's config.json names, or the widest of its tensors."""
    raw = read_json(directory / "config.json")
    # Not the dtype of whichever tensor comes first: a checkpoint in bfloat16 may have a norm or a
    # router in float32.
    for part in (raw, raw.get("text_config") or {}):
        name = part.get("dtype") or part.get("torch_dtype")
        if name in [str(x).removeprefix("torch.") for x in DTYPES.values()]:
            return getattr(torch, name)
    return reduce(torch.promote_types, {DTYPES[x.part.get_dtype()] for x in stored.values()})


def copy_part(own, region, sources, stored):
    """Copy this rank's part of a parameter, and read no more of each stored tensor."""
    for source in sources:
        # Read `cut`, and write it into `into`. An expert's tensor goes into that expert's slice, if
        # this rank has it. Stacked gate and up begin at a row of their own.
        cut = list(region)
        into = own
        if source.expert is not None:
            experts, *cut = region
            if not experts.start <= source.expert < experts.stop:
                continue
            into = own[source.expert - experts.start]
        if source.row:
            cut[-2] = slice(cut[-2].start + source.row, cut[-2].stop + source.row)
        if into.numel():
            path, part = stored[source.name]
            into.copy_(part[tuple(cut)] if source.rows is None else part[:][source.rows[cut[0]]])
            # NUMERICS: extremes pass NaN and infinity on, and need no memory. Taken of what was
            # copied, so that a weight which the model's dtype cannot hold is seen as well. Pinned
            # by
            # tests/full/test_checkpoints.py::test_weights_that_are_not_finite_are_refused_by_name.
            if not torch.stack(torch.aminmax(into)).isfinite().all():
                raise ValueError(f"{path}: {source.name} has weights that are NaN, or not finite "
                                 f"in {into.dtype}")  # fmt: skip


@torch.no_grad()
def save_hf(
    model, directory, *, max_shard_bytes=5 * 10**9, tensors=None, untie=False,
) -> None:  # fmt: skip
    """Write a checkpoint, in the model's own dtype, for transformers and load_hf.

    max_shard_bytes: larger models are written to several files, with an index.
    tensors: yields (name, whole tensor) of each of the model's parameters, in their order. Every
        rank must call then, file n is written by rank n modulo their number, and the directory is
        new. Default: the model's own.
    untie: write a tied head as well, for a reader that keeps it apart.

    Of a model of `parallelize`, every rank must call: each tensor is gathered, and the first rank
    writes. At most one file's tensors are in memory. Weights of an older checkpoint in the
    directory are removed first. If the disk is full, all ranks raise an OSError.
    """
    part = part_of(model)
    if tensors is None and part.plan.pp > 1:
        raise ValueError(f"expected a model without pipeline stages, got one of plan {part.plan}: "
                         f"gather_weights joins them")  # fmt: skip
    if any(buffer.any() for buffer in model.buffers()):
        raise ValueError("no Hugging Face checkpoint holds a router bias: save the state dict")
    config = model.config.to_hf() | {"dtype": str(model.head_weight.dtype).removeprefix("torch.")}
    directory = Path(directory)
    places = part.places
    is_collective = tensors is not None or part.grid is not None
    rank = dist.get_rank() if is_collective else 0
    writers = 1 if tensors is None else dist.get_world_size()
    if tensors is None:
        tensors = ((name, places[name].gather(local(p))) for name, p in model.named_parameters())
    copies = {TIED: "lm_head.weight"} if untie and model.config.tie_word_embeddings else {}
    files = files_by_size(model, copies, max_shard_bytes)

    # A rank goes on to gather after a failed write, as the others wait for it.
    weight_map = {}  # tensor name -> file name
    write_error = None
    for n, sizes in enumerate(files):
        number = f"-{n + 1:05}-of-{len(files):05}" if len(files) > 1 else ""
        file = f"model{number}.safetensors"
        contents = {}
        for name, whole in itertools.islice(tensors, len(sizes)):
            stored = models.stored(name, in_file_order(name, whole, model.config))
            stored |= {copies[name]: whole} if name in copies else {}
            weight_map |= dict.fromkeys(stored, file)
            if n % writers == rank and write_error is None:
                contents |= {at: x.detach().cpu().contiguous().clone() for at, x in stored.items()}
        try:
            if contents and n == 0 and writers == 1:  # readers would take older weights too
                for old in [directory / INDEX, *directory.glob("model*.safetensors")]:
                    old.unlink(missing_ok=True)
            if contents:
                write_tensors(contents, directory / file)
        except OSError as error:
            write_error = error
    texts = {"config.json": config}
    if len(files) > 1:
        total = sum(sum(sizes.values()) for sizes in files)
        texts[INDEX] = {"metadata": {"total_size": total}, "weight_map": weight_map}
    with errors_on_all_ranks(alone=not is_collective):
        if write_error is not None:
            raise write_error
        for name in texts if rank == 0 else ():
            write_json(texts[name], directory / name)


def files_by_size(model, copies, most) -> list[dict]:
    """Return {parameter: its bytes} of each file, of at most so many bytes if it has several.

    copies: parameters that are stored twice.
    """
    files = [{}]
    for name, p in model.named_parameters():
        shape = part_of(model).places[name].shape
        size = math.prod(shape) * p.element_size() * (2 if name in copies else 1)
        if files[-1] and sum(files[-1].values()) + size > most:
            files.append({})
        files[-1][name] = size
    return files


def write_json(content, path) -> None:
    """Write one JSON file."""
    with naming_path(path):
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


@contextlib.contextmanager
def naming_path(path):
    """Name the path in an OSError of writing it."""
    try:
        yield
    except (safetensors.SafetensorError, OSError) as error:
        raise OSError(f"cannot write {path}: {error}") from error


def write_tensors(tensors, path) -> None:
    """Write one safetensors file."""
    with naming_path(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
        path.chmod(0o644)  # safetensors lets only us read it, and an engine may be another user


# The files of a checkpoint in addition to its weights and config.json: all that text.py needs, and
# how its authors sample. Some hold the same in an older form.
TEXT_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "generation_config.json",
    "additional_chat_templates/*.jinja",
)  # fmt: skip


def copy_text_files(source, target) -> list[str]:
    """Copy the text files of a checkpoint to another directory. Return the names copied."""
    paths = [path for name in TEXT_FILES for path in sorted(Path(source).glob(name))]
    names = [f"{path.relative_to(source)}" for path in paths]
    for name in names:
        own = Path(target) / name
        own.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(Path(source) / name, own)
    return names


# PEFT's files -----------------------------------------------------------------------------------
# adapter_config.json and adapter_model.safetensors, of dense layers.
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def save_factors(model, directory, base) -> None:
    """Write a whole model's factors as PEFT does. base: the directory of its base, or "".

    ValueError if experts have factors: their stacks have no name there.
    """
    tensors = {name: p.detach() for name, p in model.named_parameters() if is_factor(name)}
    for name, x in tensors.items():
        if name.endswith("lora_B"):  # its rows are those of its matrix
            tensors[name] = in_file_order(matrix_of(name), x, model.config)
    if any(".experts." in name for name in tensors):
        raise ValueError("PEFT's format has no factors of experts: write merged weights")
    # In a multimodal model the language model is a part.
    is_multimodal = bool(base and read_json(Path(base) / "config.json").get("text_config"))
    part = "model.language_model." if is_multimodal else "model."
    stored = {f"base_model.model.{name.replace('model.', part, 1)}.weight": p.cpu().contiguous()
              for name, p in tensors.items()}  # fmt: skip

    # PEFT adapts each matrix whose last name is listed. A vision tower has a q_proj too, so for a
    # multimodal base this is a pattern of whole names.
    targets = list(model.lora.targets)
    if is_multimodal:
        targets = rf"(model\.language_model\..*\.)?({'|'.join(targets)})"
    raw = dict(
        peft_type="LORA", task_type="CAUSAL_LM", base_model_name_or_path=base, r=model.lora.rank,
        lora_alpha=model.lora.alpha, target_modules=targets, lora_dropout=0.0,
        bias="none", fan_in_fan_out=False, inference_mode=True,
    )  # fmt: skip
    directory = Path(directory)
    write_tensors(stored, directory / ADAPTER_WEIGHTS)
    write_json(raw, directory / ADAPTER_CONFIG)


# The definition of a model ----------------------------------------------------------------------


class BiasedDefinition(models.Definition):
    """Compute `models.Definition` with YaRN's factor, and with a router's bias, which only selects.
    """

    def __init__(self, model):
        super().__init__(model)
        (self.factor,) = {factor for _, factor in model.rope.frequencies.values()}
        self.votes = {name.removesuffix("votes"): x_E for name, x_E in model.named_buffers()}

    def heads(self, name, x, angle_d):
        return self.factor * super().heads(name, x, angle_d)

    def choose(self, name, p):
        return super().choose(name, p + self.config.router_bias_rate * self.votes.get(name, 0))


def full_definition(model, tokens, /):
    """Return the logits (S, V) of the model token by token."""
    is_hybrid = model.config.attn_output_gate
    return (deltanet.HybridDefinition if is_hybrid else BiasedDefinition)(model).logits(tokens)
