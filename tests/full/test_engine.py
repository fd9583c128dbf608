"""Generation behind a URL: `--engine` with the server of full/engine.py is the run without it.

The server is in this process, and the ranks are others. Real vLLM: test_vllm.py.
"""

import threading
from pathlib import Path

import pytest
import torch
from conftest import slow
from test_plan_run import SHAPE
from test_ranks import largest_difference, learns_something, trained
from test_ranks import run_of  # noqa: F401, a fixture

from full.engine import Decoder, Server
from full.hf import save_hf
from full.model_config import ModelConfig
from full.transformer import Transformer

# Of the shape of `guess`, and with other weights: an engine gets a run's own by the first push.
GUESS = dict(vocab_size=12, hidden_size=16, intermediate_size=48, num_hidden_layers=4,
             num_attention_heads=4, num_key_value_heads=2, head_dim=4)  # fmt: skip


def serve(directory, under, most=256):
    """Serve a directory in this process; return the Server, which has its Decoder."""
    decoder = Decoder(directory, torch.float64, Path(under))
    server = Server(("127.0.0.1", 0), decoder.answers(), most)
    server.decoder, server.url = decoder, f"http://127.0.0.1:{server.server_port}"
    decoder.start()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.getbasetemp()
    save_hf(Transformer(ModelConfig(**GUESS)).double().init_weights(9), folder / "other")
    server = serve(folder / "other", folder)
    yield server
    server.shutdown()


# Ranks, flags that must change nothing, and flags of the run of one process as well.
PLANS = [(1, "", "--minibatches 2"), (2, "--plan t2", "--staleness 1"),
         *slow((1, "", "--staleness 2"), (2, "--data-parallel fsdp", "--staleness 1"),
               (2, "--data-parallel zero1", ""), (2, "--plan p2", "--staleness 1"),
               (2, "--plan c2", ""),
               (1, "", "--forks 2 --fork-turns 1 --advantage per_branch"))]  # fmt: skip


@pytest.mark.parametrize("world, plan, more", PLANS)
def test_ranks_and_plans_push_and_sample_as_one_process(
    run_of, server, tmp_path, world, plan, more,  # noqa: F811
):  # fmt: skip
    flags = f"{SHAPE} --steps 3 --eval-every 2 {more}"
    truth = run_of(flags)
    assert learns_something(truth)
    found = trained(tmp_path, world, f"{flags} {plan} --engine {server.url}")
    assert largest_difference(found, truth) < 1e-12
