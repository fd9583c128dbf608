"""An engine for tests: the paths of vLLM that engine.py asks for, answered by `generate`.

A request is a thread. One turn is decoded at a time, by generate.py, in float64. vLLM makes
its draws from a turn's seed. The stub looks the seed up among those of the runs of tests, and so
draws what a run draws without an engine: its tokens must be the same, and its log-probs but for
rounding.
"""

import contextlib
import functools
import itertools
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch

import models
from full.learn.engine import FIRST_VERSION, VLLM
from full.learn.generate import generate
from full.model.hf import load_hf
from full.run.config import Config
from train_grpo import uniforms


@functools.cache
def draws_of_runs() -> dict:
    """Return {seed of a turn: its draws}, of every turn that a run of tests may ask for.

    Rollout r of group g of step s draws uniforms((seed, s, g, r)).
    """
    found = {}
    for key in itertools.product(range(2), range(8), range(8), range(8)):
        found |= turns_of(uniforms(key, Config.max_new_tokens))
    return found


def turns_of(draws) -> dict:
    """Return {seed of a turn: its draws}, of turns that may begin at any token of a rollout."""
    # The first draw of a turn is its seed: `Engine.turn`.
    return {int(u * 2**31): draws[t:] for t, u in enumerate(draws)}


class Stub(ThreadingHTTPServer):
    """Serves a directory at `url`. Each path's answer is a method of a request's body.

    spoil: spoil(handler, answer) sends another answer than this one, or none.
    """

    request_queue_size = 1024
    daemon_threads = True

    def __init__(self, directory, port=0):
        super().__init__(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.model = load_hf(directory, dtype=torch.float64).requires_grad_(False)
        self.version = FIRST_VERSION
        self.draws = dict(draws_of_runs())
        self.spoil = None
        self.going = threading.Event()  # not in a pause
        self.going.set()
        self.lock = threading.Lock()  # of the model
        self.answers = {
            VLLM.path: self.generate, VLLM.info: lambda body: {"weight_version": self.version},
            "/v1/models": self.models, "/pause": self.pause, "/update_weight_version": self.rename,
            "/collective_rpc": self.load, "/reset_prefix_cache": lambda body: {},
            "/resume": self.resume,
        }  # fmt: skip

    def begin(self):
        """Serve in a thread; return the stub."""
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def generate(self, body):
        """Decode a turn. A pause ends the turns that wait for the model, without a token."""
        how = body["sampling_params"]
        self.going.wait()
        with self.lock:
            if not self.going.is_set():
                return turn_of([], [], [])
            row = models.Row(body["token_ids"], self.draws.get(how["seed"], ()))
            given = dict(max_new_tokens=how["max_tokens"], temperature=how["temperature"])
            generate(self.model, [row], **given, end=how["stop_token_ids"], seed=how["seed"])
            return turn_of(row.tokens[-row.new :], row.logprobs[-row.new :], [self.version])

    def models(self, body):
        positions = self.model.config.max_position_embeddings
        return {"data": [{"id": "stub", "max_model_len": positions}]}

    def pause(self, body):
        with self.lock:
            self.going.clear()
        return {}

    def rename(self, body):
        self.version = body["new_version"]
        return {}

    def load(self, body):
        with self.lock:
            place = body["kwargs"]["weights_path"]
            self.model = load_hf(place, dtype=torch.float64).requires_grad_(False)
        return {}

    def resume(self, body):
        self.going.set()
        return {}

    def handle_error(self, request, client_address):
        """Say nothing of a client that has gone."""


def turn_of(tokens, logprobs, versions) -> dict:
    """Return a turn as vLLM answers it."""
    content = [{"logprob": logprob} for logprob in logprobs]
    choice = {"token_ids": tokens, "logprobs": {"content": content}}
    return {"choices": [choice | {"weight_versions": [{"version": name} for name in versions]}]}


class Handler(BaseHTTPRequestHandler):
    """Answers a request by the stub's method for its path."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        function = self.server.answers.get(self.path.partition("?")[0])
        if function is None:
            return self.send(404, {"error": "no such path"})
        try:
            answer = function(json.loads(body or "{}"))
        except Exception as error:
            return self.send(500, {"error": f"{error!r}"})
        (self.server.spoil or Handler.good)(self, answer)

    do_GET = do_POST

    def good(self, answer):
        self.send(200, answer)

    def send(self, code, answer):
        text = json.dumps(answer).encode()
        with contextlib.suppress(OSError):  # the client has gone
            self.send_response(code)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

    def log_message(self, *args):
        """Say nothing: a run makes thousands of requests."""
