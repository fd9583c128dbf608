"""models.load: logits of transformers for every family, and one line for what it cannot load."""

import json
import shutil

import pytest
import torch
from conftest import complaint_of
from safetensors.torch import load_file, save_file

import models
from models import FULL, SLIDING

SIZES = dict(
    vocab_size=23, hidden_size=16, intermediate_size=20, num_hidden_layers=4, head_dim=6,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-5,
)  # fmt: skip
MOE = dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=6)
WINDOW = dict(use_sliding_window=True, sliding_window=3)
# A family, its settings, and what its config.json says in the older form.
CASES = {
    "llama": ("Llama", dict(rope_theta=500.0), {}),
    "llama with biases": ("Llama", dict(attention_bias=True, mlp_bias=True), {}),
    "llama tied": ("Llama", dict(tie_word_embeddings=True), {}),
    "mistral": ("Mistral", dict(sliding_window=3), {}),
    "mistral without window": ("Mistral", dict(sliding_window=None), {}),
    "qwen2": ("Qwen2", dict(sliding_window=3), {}),
    "qwen2 with windows": ("Qwen2", WINDOW | dict(max_window_layers=1), dict(layer_types=None)),
    "qwen3": ("Qwen3", dict(rope_theta=1e6), {}),
    "qwen3 tied": ("Qwen3", dict(tie_word_embeddings=True, attention_bias=True), {}),
    "qwen3 with windows": ("Qwen3", WINDOW | dict(max_window_layers=2), dict(layer_types=None)),
    "qwen3_moe": ("Qwen3Moe", MOE | dict(norm_topk_prob=True), {}),
    "qwen3_moe in steps": ("Qwen3Moe", MOE | dict(decoder_sparse_step=2), {}),
    "qwen3_moe with dense layers": ("Qwen3Moe", MOE | WINDOW | dict(mlp_only_layers=[0, 2]), {}),
    "gemma3_text": (
        "Gemma3", dict(sliding_window=3, query_pre_attn_scalar=9, sliding_window_pattern=3),
        dict(layer_types=None, sliding_window_pattern=3)),
}  # fmt: skip
GEMMA_ROPES = {FULL: dict(rope_type="default", rope_theta=2e4)}
GEMMA_ROPES |= {SLIDING: dict(rope_type="default", rope_theta=50.0)}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """checkpoint(name, old): a directory and its model in float64. old: as transformers 4 writes"""
    import transformers

    made = {}

    def make(name, old=False):
        if (name, old) in made:
            return made[name, old]
        family, settings, changed = CASES[name]
        theta = settings.get("rope_theta", 100.0)
        settings = SIZES | {key: x for key, x in settings.items() if key != "rope_theta"}
        is_gemma = family == "Gemma3"
        ropes = GEMMA_ROPES if is_gemma else dict(rope_type="default", rope_theta=theta)
        config_class = getattr(transformers, f"{family}{'Text' if is_gemma else ''}Config")
        torch.manual_seed(0)
        config = config_class(**settings, rope_parameters=ropes)
        config._experts_implementation = "eager"  # the others have no float64
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        for p in model.parameters():
            torch.nn.init.normal_(p, std=0.4)
        folder = tmp_path_factory.mktemp("checkpoint")
        model.save_pretrained(folder)
        if old:
            said = json.loads((folder / "config.json").read_text()) | changed
            said = {key: x for key, x in said.items() if key not in changed or x is not None}
            said.pop("rope_parameters")
            said |= dict(rope_theta=2e4, rope_local_base_freq=50.0) if is_gemma else {}
            said |= dict(rope_scaling=None) | ({} if is_gemma else dict(rope_theta=theta))
            (folder / "config.json").write_text(json.dumps(said))
        made[name, old] = folder, model.double()
        return made[name, old]

    return make


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(checkpoint, name, old):
    folder, theirs = checkpoint(name, old)
    ours = models.load(folder)
    assert {p.dtype for p in ours.parameters()} == {torch.float32}
    assert all(p.requires_grad for p in ours.parameters())
    tokens = torch.randint(23, (2, 12))
    with torch.no_grad():
        logits = ours.double().logits(ours.hidden(tokens))
        expected = theirs(tokens).logits
    error = ((logits - expected).norm() / expected.norm()).item()
    print(f"{name:30} {'old' if old else 'new'} {error:.1e}")
    assert error <= 2e-6  # transformers computes norms and angles in float32


def altered(folder, target, **said):
    """Copy a checkpoint, with other fields in its config.json."""
    shutil.copytree(folder, target)
    path = target / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | said))
    return target


LLAMA3 = dict(rope_type="llama3", factor=8.0, rope_theta=5e5)
REFUSED = [  # fields of config.json, and what the error names
    (dict(model_type="gpt2"), "gpt2"), (dict(model_type=None), "None"),
    (dict(rope_scaling=dict(type="linear", factor=2.0)), "linear"),
    (dict(rope_parameters=LLAMA3), "llama3"),
    (dict(quantization_config=dict(bits=4)), "quantization_config"),
    (dict(final_logit_softcapping=30.0), "final_logit_softcapping"),
    (dict(hidden_act="relu"), "relu"), (dict(hidden_size=None), "got None"),
    (dict(layer_types=["chunked_attention"] * 4), "chunked_attention"),
    (dict(layer_types=["full_attention"], model_type="qwen3"), "1 layer_types"),
    (dict(is_causal=False), "is_causal False"), (dict(head_dim=3), "heads (4, 2, 3)"),
    (dict(rms_norm_eps="1e-6"), "expected rms_norm_eps of type float, got '1e-6'"),
    (dict(tie_word_embeddings="false"), "expected tie_word_embeddings of type bool, got 'false'"),
    (dict(num_hidden_layers=2.0), "float"), (dict(rope_scaling="linear"), "'str'"),
    (dict(rope_parameters=None, rope_theta=None), "NoneType"),
    (dict(attention_bias=True), "model.layers.0.self_attn.q_proj.bias"),
    (dict(num_hidden_layers=3), "Unexpected key(s) in state_dict: \"model.layers.3."),
    (dict(vocab_size=24), "size mismatch for model.embed_tokens.weight"),
    (dict(num_key_value_heads=None), "size mismatch for model.layers.0.self_attn.k_proj.weight"),
]  # fmt: skip


@pytest.mark.parametrize("said, named", REFUSED)
def test_what_it_cannot_load_is_named_in_one_line(checkpoint, tmp_path, said, named):
    folder, _ = checkpoint("llama")
    assert named in complaint_of(models.load, altered(folder, tmp_path / "other", **said))


def test_a_stored_head_that_is_not_the_tied_embedding_is_refused(checkpoint, tmp_path):
    folder, _ = checkpoint("llama tied")
    target = altered(folder, tmp_path / "other")
    tensors = load_file(target / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    for head, is_copy in ((embedding, True), (embedding + 1, False), (embedding[1:], False)):
        save_file(tensors | {"lm_head.weight": head.clone()}, target / "model.safetensors")
        if is_copy:
            models.load(target)
        else:
            assert "lm_head.weight" in complaint_of(models.load, target)


def test_two_sets_of_weights_in_a_directory_are_refused(checkpoint, tmp_path):
    folder, _ = checkpoint("llama")
    target = altered(folder, tmp_path / "other")
    names = dict.fromkeys(load_file(target / "model.safetensors"), "model-1.safetensors")
    shutil.copy(target / "model.safetensors", target / "model-1.safetensors")
    assert "model-1.safetensors" in complaint_of(models.load, target)
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert "'model.safetensors'" in complaint_of(models.load, target)
    (target / "model.safetensors").unlink()
    models.load(target)


@pytest.mark.parametrize("name", ["llama tied", "qwen3_moe", "gemma3_text"])
def test_transformers_loads_what_save_writes(checkpoint, tmp_path, name):
    import transformers

    folder, _ = checkpoint(name)
    model = models.load(folder)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1
    models.save(dict(model.named_parameters()), tmp_path / "new", folder)
    eager = dict(experts_implementation="eager")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "new", **eager).eval()
    tokens = torch.randint(23, (2, 12))
    with torch.no_grad():
        logits, expected = model.logits(model.hidden(tokens)), theirs(tokens).logits
    assert (logits - expected).norm() <= 1e-5 * expected.norm()


def test_several_files_an_index_and_what_old_files_have_twice(checkpoint, tmp_path):
    folder, _ = checkpoint("qwen3_moe in steps")
    target = altered(folder, tmp_path / "other")
    tensors = load_file(target / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(3)
    (target / "model.safetensors").unlink()
    names = {name: f"model-{n % 2}.safetensors" for n, name in enumerate(tensors)}
    for file in set(names.values()):
        save_file({name: x for name, x in tensors.items() if names[name] == file}, target / file)
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    for a, b in zip(models.load(target).parameters(), models.load(folder).parameters()):
        assert a.equal(b)
