"""Make checkpoints as they are released: Llama 3, Qwen2.5, Qwen3, Qwen3-MoE and Gemma 3.

They are small and have random weights. make("qwen3", folder) has 8 to 16 M parameters, and
make("qwen3", folder, layers=2, width=64) 0.4 M. The config.json is that of PUBLISHED with smaller
sizes. The chat templates are the real ones, which the package trl
carries. The tokenizers are of the same kind, trained on made-up words.
"""

import dataclasses
import functools
import importlib.util
import json
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from full.model.config import ModelConfig
from full.model.hf import save_hf
from full.model.transformer import Transformer

# Released configurations, without most fields that no reader of a model asks for.
QWEN = dict(
    attention_dropout=0.0, bos_token_id=151643, hidden_act="silu", initializer_range=0.02,
    rms_norm_eps=1e-6, rope_theta=1000000.0, torch_dtype="bfloat16", use_sliding_window=False,
    vocab_size=151936,
)  # fmt: skip
QWEN3 = QWEN | dict(
    attention_bias=False, eos_token_id=151645, head_dim=128, max_position_embeddings=40960,
    model_type="qwen3", rope_scaling=None, sliding_window=None,
)  # fmt: skip
LLAMA = dict(
    attention_bias=False, hidden_act="silu", mlp_bias=False, model_type="llama", rms_norm_eps=1e-5,
    tie_word_embeddings=True, torch_dtype="bfloat16",
)  # fmt: skip
LLAMA3 = {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
          "original_max_position_embeddings": 8192, "rope_type": "llama3"}  # fmt: skip

PUBLISHED = {  # name -> config.json
    # A Llama in all but name.
    "SmolLM2-135M": LLAMA | dict(
        bos_token_id=0, eos_token_id=0, hidden_size=576, initializer_range=0.041666666666666664,
        intermediate_size=1536, max_position_embeddings=8192, num_attention_heads=9,
        num_hidden_layers=30, num_key_value_heads=3, rope_scaling=None, rope_theta=100000,
        vocab_size=49152),
    "Llama-3.2-1B": LLAMA | dict(
        attention_dropout=0.0, bos_token_id=128000, eos_token_id=128001, head_dim=64,
        hidden_size=2048, initializer_range=0.02, intermediate_size=8192,
        max_position_embeddings=131072, num_attention_heads=32, num_hidden_layers=16,
        num_key_value_heads=8, rope_scaling=LLAMA3, rope_theta=500000.0, vocab_size=128256),
    "Mistral-7B-v0.1": dict(
        bos_token_id=1, eos_token_id=2, hidden_act="silu", hidden_size=4096, initializer_range=0.02,
        intermediate_size=14336, max_position_embeddings=32768, model_type="mistral",
        num_attention_heads=32, num_hidden_layers=32, num_key_value_heads=8, rms_norm_eps=1e-5,
        rope_theta=10000.0, sliding_window=4096, tie_word_embeddings=False, torch_dtype="bfloat16",
        vocab_size=32000),
    "Qwen2.5-0.5B": QWEN | dict(
        eos_token_id=151643, hidden_size=896, intermediate_size=4864, max_position_embeddings=32768,
        max_window_layers=24, model_type="qwen2", num_attention_heads=14, num_hidden_layers=24,
        num_key_value_heads=2, sliding_window=32768, tie_word_embeddings=True, use_mrope=False),
    "Qwen3-0.6B": QWEN3 | dict(
        hidden_size=1024, intermediate_size=3072, max_window_layers=28, num_attention_heads=16,
        num_hidden_layers=28, num_key_value_heads=8, tie_word_embeddings=True),
    "Qwen3-30B-A3B": QWEN3 | dict(
        decoder_sparse_step=1, hidden_size=2048, intermediate_size=6144, max_window_layers=48,
        mlp_only_layers=[], model_type="qwen3_moe", moe_intermediate_size=768, norm_topk_prob=True,
        num_attention_heads=32, num_experts=128, num_experts_per_tok=8, num_hidden_layers=48,
        num_key_value_heads=4, output_router_logits=False, router_aux_loss_coef=0.001,
        tie_word_embeddings=False),
    "Gemma 3 1B": dict(
        attention_bias=False, attention_dropout=0.0, attn_logit_softcapping=None, bos_token_id=2,
        eos_token_id=[1, 106], final_logit_softcapping=None,
        head_dim=256, hidden_activation="gelu_pytorch_tanh", hidden_size=1152,
        initializer_range=0.02, intermediate_size=6912, max_position_embeddings=32768,
        model_type="gemma3_text", num_attention_heads=4, num_hidden_layers=26,
        num_key_value_heads=1, pad_token_id=0, query_pre_attn_scalar=256, rms_norm_eps=1e-6,
        rope_local_base_freq=10000, rope_scaling=None, rope_theta=1000000, sliding_window=512,
        sliding_window_pattern=6, torch_dtype="bfloat16", vocab_size=262144),
    # What it leaves out of text_config has the defaults of transformers' class.
    "Gemma 3 4B": dict(
        eos_token_id=[1, 106], initializer_range=0.02, model_type="gemma3", torch_dtype="bfloat16",
        vision_config=dict(hidden_size=1152, model_type="siglip_vision_model",
                           num_hidden_layers=27),
        text_config=dict(
            hidden_size=2560, intermediate_size=10240, model_type="gemma3_text",
            num_hidden_layers=34, rope_scaling={"factor": 8.0, "rope_type": "linear"},
            sliding_window=1024)),
}  # fmt: skip

FAMILIES = {  # the published model, and trl's name of its chat template
    "llama": ("Llama-3.2-1B", "llama3"), "qwen2": ("Qwen2.5-0.5B", "qwen2_5"),
    "qwen3": ("Qwen3-0.6B", "qwen3"), "qwen3_moe": ("Qwen3-30B-A3B", "qwen3"),
    "gemma3": ("Gemma 3 1B", "gemma3"),
}  # fmt: skip
VOCABULARY = 4000

# How Qwen cuts text into words before BPE: letters with one sign before them, single digits, signs,
# line breaks, spaces.
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA_WORDS = QWEN_WORDS.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)  # up to three digits

# Added tokens in the order of their ids. The tags are not "special": decoding keeps them.
LLAMA_MARKS = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>",
)  # fmt: skip
QWEN_MARKS = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_pad|>", "<|image_pad|>"
QWEN_TAGS = "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|repo_name|>"
QWEN3_TAGS = "<tool_response>", "</tool_response>", "<think>", "</think>"
GEMMA_MARKS = (
    "<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>",
    "<start_of_image>", "<end_of_image>",
)  # fmt: skip
GEMMA_SPACES = "\n", "\n\n", "\n\n\n", "\n\n\n\n", "▁▁", "▁▁▁", "▁▁▁▁"
ENDS = {  # the marks that begin a text, end a document, end a turn
    "gemma3": ("<bos>", "<eos>", "<end_of_turn>"), "llama": (*LLAMA_MARKS[:2], "<|eot_id|>"),
    "qwen": ("<|endoftext|>", "<|endoftext|>", "<|im_end|>"),
}  # fmt: skip
SAMPLING = {  # of generation_config.json: how its authors sample
    "llama": dict(temperature=0.6, top_p=0.9, max_length=4096),
    "gemma3": dict(top_k=64, top_p=0.95, cache_implementation="hybrid", pad_token_id=0),
    "qwen": dict(temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.1),
}
SETTINGS = {  # of tokenizer_config.json
    "gemma3": dict(
        add_bos_token=True, add_eos_token=False, bos_token="<bos>", eos_token="<eos>",
        boi_token="<start_of_image>", eoi_token="<end_of_image>", pad_token="<pad>",
        image_token="<image_soft_token>", tokenizer_class="GemmaTokenizer", unk_token="<unk>"),
    "llama": dict(
        bos_token="<|begin_of_text|>", clean_up_tokenization_spaces=True,
        tokenizer_class="PreTrainedTokenizerFast"),
    "qwen": dict(
        add_bos_token=False, add_prefix_space=False, bos_token=None, unk_token=None,
        additional_special_tokens=list(QWEN_MARKS[1:]), pad_token="<|endoftext|>",
        tokenizer_class="Qwen2Tokenizer"),
}  # fmt: skip


def kind_of(family):
    return family if family in ENDS else "qwen"


def make(family, directory, *, layers=4, width=384, template=True, seed=0) -> Path:
    """A checkpoint in the released form; the directory, which is made.

    family: one of FAMILIES. layers, width: 4 and 384 give 8 to 16 M parameters.
    template: whether it is a chat model. Without, it is a base model: no chat template, and one
        end, that of a document.
    """
    directory = Path(directory)
    if family == "gemma3":
        tokenizer = gemma_tokenizer()
    else:
        tokenizer = llama_tokenizer() if family == "llama" else qwen_tokenizer(family != "qwen2")
    raw = config_of(family, tokenizer, layers, width, template)
    config = dataclasses.replace(ModelConfig.from_hf(raw), initializer_range=0.08)
    model = Transformer(config).init_weights(seed)

    # Weights four times as large as a new model's change what passes through the layers, as a
    # trained model's do: without, a tied head repeats its last token for ever. Gemma scales its
    # embedding by 16 or so, and begins with a smaller one. Norms and biases are not neutral.
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:
                p += 0.1 * torch.randn(p.shape, generator=generator)
        if config.scale_embedding:
            model.model.embed_tokens.weight *= 0.25
    save_hf(model.to(torch.bfloat16), directory)

    def write(name, value):
        text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
        (directory / name).write_text(text, encoding="utf-8")

    write("config.json", raw)
    write("generation_config.json", generation_config_of(family, raw))
    write("tokenizer_config.json", tokenizer_config_of(family, tokenizer, template))
    (directory / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    return directory


def multimodal_gemma(**text):
    """Return transformers' Gemma 3 with a vision tower, small and random. text: sizes."""
    import transformers

    text = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8,
                num_attention_heads=4, num_key_value_heads=2, sliding_window=4,
                sliding_window_pattern=2, tie_word_embeddings=True) | text  # fmt: skip
    vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                  image_size=16, patch_size=8)  # fmt: skip
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4,
        tie_word_embeddings=text["tie_word_embeddings"])  # fmt: skip
    torch.manual_seed(0)
    return transformers.Gemma3ForConditionalGeneration(config).eval()


def corpus():
    """Lines of made-up words, numbers and marks: the same for ever, so that tests stay the same."""
    rng = np.random.default_rng(0)
    onsets = "b c d f g h k l m n p r s t v w th st pr Qu".split()
    syllables = [a + b + c for a in onsets for b in "aeiou" for c in ("", "n", "r", "s")]
    words = ["".join(rng.choice(syllables, rng.integers(1, 4))) for _ in range(5000)]
    words[:12] = ["What", "is", "and", "the", "answer", "End", "with", "####", "to", "a", "of", "+"]
    lines = ["End with '#### ' and the answer.\n"] * 50 + ["12 + 30 = 42, 日本語 é ü 🙂\n"] * 50
    for _ in range(4000):
        picked = np.minimum(rng.zipf(1.3, 12) - 1, len(words) - 1)
        lines.append(" ".join(words[n] for n in picked) + f", {rng.integers(1000)}.\n")
    return lines + words


@functools.cache
def byte_vocabulary(words, nfc=False) -> str:
    """Train byte-level BPE without any mark. Return the text of its tokenizer.json.

    words: regular expression. How text is cut into words before BPE.
    nfc: bool. Compose characters first. Default: False.
    """
    tokenizer = Tokenizer(BPE())
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(Regex(words), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False)  # fmt: skip
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer.to_str()


def llama_tokenizer():
    """Return Llama 3's kind of tokenizer: it begins each text with <|begin_of_text|>."""
    tokenizer = Tokenizer.from_str(byte_vocabulary(LLAMA_WORDS))
    tokenizer.add_special_tokens(list(LLAMA_MARKS))
    bos = LLAMA_MARKS[0]
    begin = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B",
        special_tokens=[(bos, tokenizer.token_to_id(bos))])  # fmt: skip
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(), begin])
    return tokenizer


def qwen_tokenizer(thinks):
    """With the marks behind the vocabulary, as in the released ones. thinks: those of Qwen3 too."""
    tokenizer = Tokenizer.from_str(byte_vocabulary(QWEN_WORDS, nfc=True))
    tokenizer.add_special_tokens(list(QWEN_MARKS))
    tokenizer.add_tokens([*QWEN_TAGS, *(QWEN3_TAGS if thinks else ())])
    return tokenizer


@functools.cache
def gemma_tokenizer():
    """BPE on characters, with a token for each byte that is used where a character has none."""
    # Marks, runs of spaces and bytes have the first ids; what is learnt comes behind them.
    first = [*GEMMA_MARKS, *GEMMA_SPACES, *(f"<0x{byte:02X}>" for byte in range(256))]
    learner = Tokenizer(BPE(unk_token="<unk>"))
    learner.normalizer = normalizers.Replace(" ", "▁")
    learner.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split("▁", behavior="merged_with_next"),
        pre_tokenizers.Split(Regex(r"\n+"), behavior="isolated"),
    ])  # fmt: skip
    trainer = BpeTrainer(vocab_size=VOCABULARY, special_tokens=first, show_progress=False)
    learner.train_from_iterator(corpus(), trainer)
    learnt = json.loads(learner.to_str())["model"]

    model = BPE(
        vocab=learnt["vocab"], merges=[tuple(pair) for pair in learnt["merges"]],
        unk_token="<unk>", fuse_unk=True, byte_fallback=True,
    )  # fmt: skip
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])  # fmt: skip
    bos = tokenizer.token_to_id("<bos>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", bos)])  # fmt: skip
    tokenizer.add_special_tokens(list(GEMMA_MARKS))
    tokenizer.add_tokens(list(GEMMA_SPACES))
    # The text models know one token less than their tokenizer: the place of an image.
    tokenizer.add_special_tokens(["<image_soft_token>"])
    return tokenizer


def config_of(family, tokenizer, layers, width, template) -> dict:
    """config.json: the published one with smaller sizes and with the tokenizer's ids.

    template: of a model without one, the end of a document is the only end.
    """
    raw = PUBLISHED[FAMILIES[family][0]] | dict(
        hidden_size=width, intermediate_size=3 * width, num_attention_heads=4,
        num_hidden_layers=layers, num_key_value_heads=2, max_window_layers=layers,
        vocab_size=tokenizer.get_vocab_size(), transformers_version="4.51.0",
    )  # fmt: skip
    if family == "gemma3":
        # The text model knows one token less than its tokenizer: the place of an image.
        raw |= dict(
            head_dim=width // 2, query_pre_attn_scalar=width // 2, num_key_value_heads=1,
            sliding_window=32, sliding_window_pattern=6 if layers >= 6 else 2,
            vocab_size=raw["vocab_size"] - 1, pad_token_id=tokenizer.token_to_id("<pad>"),
        )  # fmt: skip
    elif family == "llama":
        raw |= dict(head_dim=width // 4)
    else:
        raw |= dict(vocab_size=VOCABULARY + 96)  # rounded up: the last rows belong to no token
        raw |= {} if family == "qwen2" else dict(head_dim=width // 2)
        if family == "qwen3_moe":
            raw |= dict(moe_intermediate_size=3 * width // 4, num_experts=8, num_experts_per_tok=2)
    bos, document, turn = map(tokenizer.token_to_id, ENDS[kind_of(family)])
    ends = [document, turn] if family == "gemma3" else turn  # some files say one, some both
    return raw | dict(bos_token_id=bos, eos_token_id=ends if template else document)


def generation_config_of(family, raw) -> dict:
    """generation_config.json: how its authors sample, and where an answer ends."""
    ends = raw["eos_token_id"]
    document = raw["bos_token_id"] + (family == "llama")
    if isinstance(ends, int) and ends != document and family != "gemma3":
        ends = [document, ends] if family == "llama" else [ends, document]
    return dict(
        bos_token_id=raw["bos_token_id"], do_sample=True, eos_token_id=ends,
        transformers_version="4.51.0", **SAMPLING[kind_of(family)],
    )  # fmt: skip


def tokenizer_config_of(family, tokenizer, template) -> dict:
    """tokenizer_config.json, with the chat template."""
    flags = "content", "lstrip", "normalized", "rstrip", "single_word", "special"
    added = {f"{index}": {flag: getattr(token, flag) for flag in flags}
             for index, token in sorted(tokenizer.get_added_tokens_decoder().items())}
    _, document, turn = ENDS[kind_of(family)]
    settings = dict(added_tokens_decoder=added, clean_up_tokenization_spaces=False)
    settings |= dict(eos_token=turn if template else document) | SETTINGS[kind_of(family)]
    if template:
        (package,) = importlib.util.find_spec("trl").submodule_search_locations
        path = Path(package) / "chat_templates" / f"{FAMILIES[family][1]}.jinja"
        settings["chat_template"] = path.read_text(encoding="utf-8")
    return settings
