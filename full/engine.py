"""Generation behind a URL: adds vLLM, SGLang and a server of our own to `models.generate`.

    python -m full.engine serve MODEL_DIR --port 8100                  # generate.py as a server
    python -m full --model MODEL_DIR --engine http://127.0.0.1:8100 ..

A run asks an engine for one turn of one rollout: token ids go in, and token ids, their log-probs
and the version of the weights come out. Nothing is tokenized. Between two batches the ranks write
the new weights as a Hugging Face directory, and the engine loads it:

    run                                             engine
     |  load DIR, call it 9f3c51aa-12                |   no rollout is in flight meanwhile
     |---------------------------------------------->|
     |  [1 9 8 ..], at most 12 tokens, end 2, seed   |   many at once, from threads
     |---------------------------------------------->|
     |  [504 2], [-0.57 -0.01], 9f3c51aa-12          |   another version: the engine was restarted,
     |<----------------------------------------------|   so it loads DIR again and is asked again
"""

import argparse
import contextlib
import datetime
import http.client
import json
import math
import queue
import secrets
import shutil
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch
import torch.distributed as dist

import models
from full.exits import replacing_characters
from full.generate import KVCache, forward_with_cache, give_draws, prefill
from full.hf import load_hf, save_hf
from full.ranks import agree, errors_on_all_ranks, warn
from full.weights import gather_weights

THREADS = 256  # turns that a rank asks for at a time; vLLM and SGLang decode about as many
TRIES = 3  # how often a turn is asked for if the answer is wrong
FAILURES = 8  # answers 500, or without sense, in a row; with the pauses between them 18 seconds
MOST_BYTES = 2**24  # of a request or an answer: a turn of 100,000 tokens has 10 MB
FIRST_VERSION = "default"  # of the weights with which an engine starts

# Dialects: what an engine is asked, and what it answers ------------------------------------------
# `info` is the path of a GET that tells the version of the weights, `path` of the POST of a turn.


class VLLM:
    """VLLM_SERVER_DEV_MODE=1 vllm serve DIR --enable-scale-out --logprobs-mode processed_logprobs.

    Tried with vLLM 0.32.
    """

    info = "/weight_info"
    path = "/inference/v1/generate"

    @staticmethod
    def request(tokens, limit, temperature, end, seed):
        """Return the body of a request for one turn, of at most `limit` tokens."""
        # `logprobs` 0: of the sampled token alone. An end of text ends a turn only if it is in
        # `end`. top_p, top_k and penalties are off by default here, unlike in /v1/completions.
        sampling = dict(max_tokens=limit, temperature=temperature, seed=seed, logprobs=0)
        sampling |= dict(stop_token_ids=end, ignore_eos=True, detokenize=False)
        return {"token_ids": tokens, "sampling_params": sampling}

    @staticmethod
    def read(answer):
        """Return the tokens of a turn, their log-probs, and the set of versions that made them."""
        (choice,) = answer["choices"]
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"] or ()]
        spans = choice["weight_versions"] or ()  # none of a turn that was aborted at once
        # vLLM writes -9999 for a log-prob that is not finite.
        logprobs = [-math.inf if lp == -9999 else lp for lp in logprobs]
        return choice["token_ids"], logprobs, {span["version"] for span in spans}

    @staticmethod
    def load(directory, version):
        """Return the requests that let the engine load a directory, in order."""
        # The name comes before the weights. If the engine is killed in between and started again,
        # it has the name of its first weights, and no run takes these for the new ones. A cache of
        # old keys is emptied only while no request is in flight, hence the pause.
        reload = {"method": "reload_weights", "kwargs": {"weights_path": directory}}
        return [("/pause?mode=abort", {}), ("/update_weight_version", {"new_version": version}),
                ("/collective_rpc", reload), ("/reset_prefix_cache", {}),
                ("/resume", {})]  # fmt: skip


class SGLang:
    """python -m sglang.launch_server --model-path DIR --enable-deterministic-inference.

    Without that flag it ignores the seeds. Written from the source of SGLang 0.5.23, and never run
    against it. The methods are those of `VLLM`.
    """

    info = "/model_info"
    path = "/generate"

    @staticmethod
    def request(tokens, limit, temperature, end, seed):
        sampling = dict(max_new_tokens=limit, temperature=temperature, sampling_seed=seed)
        # `ignore_eos` would ignore `stop_token_ids`, too. Without it the model's own end of text
        # ends a turn, so it must be in `end`.
        sampling |= dict(stop_token_ids=end, top_p=1.0, top_k=-1)
        return {"input_ids": tokens, "sampling_params": sampling, "return_logprob": True}

    @staticmethod
    def read(answer):
        meta = answer["meta_info"]
        pairs = [entry[:2] for entry in meta["output_token_logprobs"]]
        spans = meta.get("weight_versions") or [{"version": meta["weight_version"]}]
        return [t for _, t in pairs], [lp for lp, _ in pairs], {span["version"] for span in spans}

    @staticmethod
    def load(directory, version):
        load = {"model_path": directory, "weight_version": version, "flush_cache": True}
        return [("/pause_generation", {"mode": "abort"}), ("/update_weights_from_disk", load),
                ("/continue_generation", {})]  # fmt: skip


DIALECTS = {"vLLM": VLLM, "SGLang": SGLang}


# The client --------------------------------------------------------------------------------------


class Unanswered(OSError):
    """An engine did not answer. is_failure: it did, but with an error of its own or no sense."""

    def __init__(self, problem, is_failure=False):
        super().__init__(problem)
        self.is_failure = is_failure


# An engine is on this machine or on this network, so HTTP_PROXY is not asked.
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def ask_once(url, body=None, timeout=10):
    """POST a JSON body, or GET without one; return the JSON object that is the answer.

    timeout: seconds. Raises Unanswered if asking again may help, and ValueError for a refusal.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with OPENER.open(request, timeout=timeout) as answer:
            text = answer.read(MOST_BYTES + 1)
            found = json.loads(text or "{}") if len(text) <= MOST_BYTES else None
            if not isinstance(found, dict):
                raise ValueError(f"expected a JSON object, got {text[:80]!r}")
            return found
    except urllib.error.HTTPError as error:
        with error:
            told = " ".join(error.read(300).decode(errors="replace").split())
        problem = f"{error.code} {told}"
        if error.code < 500 and error.code not in (409, 429):  # 409: another rank loads, too
            raise ValueError(f"the engine refuses {url}: {problem}") from error
        raise Unanswered(problem, error.code == 500) from error
    except (OSError, http.client.HTTPException) as error:
        raise Unanswered(f"{getattr(error, 'reason', error) or type(error).__name__}") from error
    except (ValueError, RecursionError) as error:
        raise Unanswered(f"{error}", is_failure=True) from error


class Engine:
    """Sample by servers behind URLs: a `Sampler` of rollouts.py.

    config: its engine, engine_timeout, timeout, rollout_dtype, head_dtype and staleness are read.
    model: Transformer on the meta device, in the dtype in which the engine gets its weights.

    ValueError if a server does not answer, or speaks no dialect. Collective, as all methods but
    `start` are.
    """

    def __init__(self, config, model):
        self.urls = [url.strip().rstrip("/") for url in config.engine.split(",")]
        self.model = model
        self.timeout = config.engine_timeout
        self.has_warned = False  # that an engine does not answer
        self.has_pushed = False  # to the engines, weights of this run
        self.run_id = self.folder = self.version = None
        self.locks = {url: threading.Lock() for url in self.urls}

        # Rollouts are asked for by one thread, while another one trains: their collectives are in a
        # group of their own. A rank may wait there for another one's engine.
        patience = datetime.timedelta(seconds=config.engine_timeout + config.timeout)
        self.group = dist.new_group(backend="gloo", timeout=patience)
        self.worker = ThreadPoolExecutor(1)
        name, self.takes_draws, self.positions = agree(self.recognize)
        self.dialect = DIALECTS[name]
        if config.head_dtype:
            warn("--head-dtype float32: an engine does not tell in which dtype its head computes; "
                 "start it with the same (vllm: --hf-overrides '{\"head_dtype\": \"float32\"}', "
                 "sglang: --enable-fp32-lm-head, full.engine serve: --head-dtype float32)")

    def recognize(self):
        """Return the name of all servers' dialect, whether they take draws, and their positions."""
        found = [self.server_at(url) for url in self.urls]
        if len({(name, draws) for name, draws, _ in found}) > 1:
            raise ValueError(f"--engine: expected servers of one kind, got {found}")
        return *found[0][:2], min(positions for _, _, positions in found)

    @staticmethod
    def server_at(url):
        """Return the name of a server's dialect, whether it takes draws, and its positions."""
        problems = []
        for name, dialect in DIALECTS.items():
            try:
                info = ask_once(url + dialect.info)
                positions = ask_once(f"{url}/v1/models")["data"][0].get("max_model_len")
                return name, "draws" in info, positions or math.inf
            except Unanswered as error:
                raise ValueError(f"expected an engine at {url}, got: {error}") from error
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                problems.append(f"{error}")
        raise ValueError(f"{url} is no SGLang, and no vLLM with VLLM_SERVER_DEV_MODE=1 and "
                         f"--enable-scale-out: {'; '.join(problems)}")  # fmt: skip

    def begin(self, folder):
        """Begin a run that writes its weights to a folder, which all engines can read."""

        def make():
            # No other process has the run's directory. What is there is of before a resume.
            shutil.rmtree(folder, ignore_errors=True)
            Path(folder).mkdir(parents=True)
            return secrets.token_hex(4)

        self.run_id = agree(make)
        self.folder = Path(folder).resolve()

    # Weights -------------------------------------------------------------------------------------

    def push(self, model, optimizer, version):
        """Write a policy's weights, each rank some of the files, and let all engines load them."""
        # One file for each rank, of at most 5 GB. The tied head is written too: vLLM keeps it apart
        # on a CPU.
        self.version = f"{self.run_id}-{version}"
        size = sum(p.numel() * p.element_size() for p in self.model.parameters())
        share = min(5 * 10**9, math.ceil(size / dist.get_world_size()))
        dtype = self.model.head_weight.dtype
        gathered = gather_weights(model, self.model, optimizer)
        tensors = ((name, x.to(dtype)) for name, x in gathered)
        place = self.folder / self.version
        save_hf(self.model, place, max_shard_bytes=share, tensors=tensors, untie=True)

        # COMM: rank 0 tells the engines, and the other ranks wait for it in a broadcast. Pinned by
        # tests/full/test_engine.py::test_ranks_and_plans_push_and_sample_as_one_process.
        agree(self.load, self.group)
        self.has_pushed = True

    def load(self):
        """Let all engines load the newest weights, then remove the older ones."""
        with ThreadPoolExecutor(len(self.urls)) as pool:
            list(pool.map(self.restore, self.urls))
        for place in self.folder.iterdir():
            if place.name != self.version:
                shutil.rmtree(place)

    def restore(self, url):
        """Let a server load the newest weights, unless it has them."""
        with self.locks[url]:
            found = f"{self.call(url, self.dialect.info).get('weight_version')}"
            if found == self.version:
                return

            # A server that was started again has its first weights. If it has another run's, each
            # of the two runs would sample with the other one's policy.
            if found != FIRST_VERSION and not found.startswith(f"{self.run_id}-"):
                if self.has_pushed:
                    raise ValueError(f"another run uses {url}: it has the weights {found} and not "
                                     f"{self.version}; give each run an engine")  # fmt: skip
                warn(f"{url} has the weights {found}, of a run that must have ended")
            self.call(url, *self.dialect.load(str(self.folder / self.version), self.version))

    def call(self, url, *requests):
        """Send requests, one after the other; return the last answer.

        requests: a path, or (path, body) for a POST. If one is not answered, they begin again with
        the first: a server that was started again has forgotten it.
        """
        until = time.monotonic() + self.timeout
        pause, failures = 0.25, 0
        while True:
            try:
                for request in requests:
                    path, body = request if isinstance(request, tuple) else (request, None)
                    answer = ask_once(url + path, body, self.timeout)
                    if answer.get("success") is False:
                        raise Unanswered(f"{path}: {answer}"[:300], is_failure=True)
                self.has_warned = False
                return answer
            except Unanswered as error:
                problem = error
            failures = failures + 1 if problem.is_failure else 0
            if failures == FAILURES or time.monotonic() + pause > until:
                how = f"failed {failures} times" if problem.is_failure else "does not answer"
                raise ConnectionError(f"the engine at {url}{path} {how}: {problem}") from problem
            if not self.has_warned:  # said once, and not by each thread
                self.has_warned = True
                print(f"waiting for the engine at {url}: {problem}", file=sys.stderr, flush=True)
            time.sleep(pause)
            pause = min(2 * pause, 5)

    # Rollouts ------------------------------------------------------------------------------------

    def start(self, function, *args) -> Future:
        """Return the Future of function(*args), which samples. Functions run one after another."""
        return self.worker.submit(function, *args)

    def generate(self, rows, /, **how) -> list:
        """Let engines decode this rank's rows. The keywords are those of `generate.generate`.

        `branches` changes nothing, because the cache is the engine's.
        """
        with errors_on_all_ranks(self.group):
            return self.decode(rows, **how)

    def decode(
        self, rows, *, max_new_tokens, temperature=1.0, end=(), ending=None, after=None,
        slots=None, branches=None,
    ):  # fmt: skip
        """Ask for the turns of all rows, many at a time, until each row has ended."""
        # A row's place among all rows is its number, and after each fork also the number of the
        # fork. Row n of rank r asks server n + r.
        done, turns = [], {}
        rank = dist.get_rank()
        pool = ThreadPoolExecutor(min(slots or THREADS, max(1, len(rows)), THREADS))

        def begin(place, row):
            url = self.urls[(rank + place[0]) % len(self.urls)]
            future = pool.submit(self.turn, url, row, max_new_tokens, temperature, set(end))
            turns[future] = place, row

        try:
            for n, row in enumerate(rows):
                begin((n,), row)
            while turns:
                # `ending` asks the task about all rows whose turn has ended, then `after` says
                # which rows go on: none, the row itself, or its forks.
                over = wait(turns, return_when=FIRST_COMPLETED).done
                over = [(*turns.pop(future), future.result()) for future in over]
                ended = [row for _, row, has_ended in over if has_ended]
                if ended and ending:
                    ending(ended)
                for place, row, has_ended in over:
                    going = [row]
                    if has_ended:
                        going = after(row) if after else []
                    if not going:
                        done.append((place, row))
                    for n, follower in enumerate(going):
                        follower.truncated = follower.new >= max_new_tokens
                        if follower.truncated:
                            done.append(((*place, n), follower))
                        else:
                            begin((*place, n), follower)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        return [row for _, row in sorted(done, key=lambda entry: entry[0])]

    def turn(self, url, row, limit, temperature, end) -> bool:
        """Append what is queued, then a turn. Return whether an end token ended it."""
        while row.queue and row.new < limit:
            row.append(None, 0.0)
        if row.new == limit:
            return False

        # The seed is a function of the run's seed, step, group, rollout and place, as a draw is.
        seed = int(row.draws[row.new] * 2**31) if temperature else 0
        room = limit - row.new
        body = self.dialect.request(row.tokens, room, temperature, sorted(end), seed)
        if temperature and self.takes_draws:
            body["draws"] = [float(u) for u in row.draws[row.new : limit]]
        # A load ends all turns in flight. After a restart each of two ranks may let the engine
        # load, and each load makes the other rank ask once more.
        for _ in range(TRIES + dist.get_world_size()):
            answer = self.call(url, (self.dialect.path, body))
            try:
                tokens, logprobs, versions = self.dialect.read(answer)
                problem = self.problem_of(tokens, logprobs, versions, room, end)
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                problem = f"expected a turn, got {type(error).__name__} {error} in {answer}"[:300]
            if not problem:
                for token, logprob in zip(tokens, logprobs):
                    row.append(token, logprob)
                return tokens[-1] in end
            self.restore(url)  # it may have been started again, or another run may use it
        raise ValueError(f"the engine at {url}, asked again and again: {problem}")

    def problem_of(self, tokens, logprobs, versions, room, end) -> str:
        """Return what is wrong with the answer of an engine, or an empty string."""
        size = self.model.config.vocab_size
        if versions != {self.version}:
            return f"expected tokens by the weights {self.version}, got {sorted(versions)}"
        if not 0 < len(tokens) <= room or len(tokens) != len(logprobs):
            return (f"expected 1 to {room} tokens, each with a log-prob, got {len(tokens)} and "
                    f"{len(logprobs)}")  # fmt: skip
        if not all(type(token) is int and 0 <= token < size for token in tokens):
            return f"expected token ids under {size}, got {tokens}"[:300]
        if not all(type(lp) in (int, float) and lp < math.inf for lp in logprobs):
            return f"expected log-probs that are numbers, got {logprobs}"[:300]
        is_short = tokens[-1] not in end and len(tokens) < room
        if is_short or any(token in end for token in tokens[:-1]):
            return f"expected {room} tokens, or up to one of {sorted(end)}, got {tokens}"[:300]
        return ""


# Our own server ----------------------------------------------------------------------------------
# What the client needs of vLLM's API, by generate.py, in one process. If you use vLLM or SGLang,
# skip it.


class Refused(ValueError):
    """A request that the server refuses. code: of HTTP, 400 to 499."""

    def __init__(self, code, problem):
        super().__init__(problem)
        self.code = code


class Turn(models.Row):
    """A turn that a request asks for. Raises Refused unless the request is whole and possible."""

    def __init__(self, body, config):
        how = body.pop("sampling_params", None)
        body |= how if isinstance(how, dict) else {}

        def take(name, expected, is_right, default=None):
            value = body.pop(name, default)
            if not is_right(value):
                raise Refused(400, f"{name}: expected {expected}")
            return value

        def is_int(x, below, first=0):
            return type(x) is int and first <= x < below

        def is_number(x, below):
            return type(x) in (int, float) and 0 <= x < below

        def are_ids(x):
            return isinstance(x, list) and all(is_int(token, config.vocab_size) for token in x)

        def are_draws(x):
            is_of_turn = isinstance(x, list) and len(x) in (0, limit)
            return is_of_turn and all(is_number(u, 1) for u in x)

        ids = f"ids under {config.vocab_size}"
        tokens = take("token_ids", ids, lambda x: are_ids(x) and x)
        room = config.max_position_embeddings - len(tokens)
        limit = take("max_tokens", f"1 to {room}", lambda x: is_int(x, room + 1, 1))
        tau = take("temperature", "0 or more", lambda x: is_number(x, math.inf), 1.0)
        end = take("stop_token_ids", ids, are_ids, [])
        seed = take("seed", "0 to 2**63 - 1", lambda x: is_int(x, 2**63), 0)
        draws = take("draws", "none, or max_tokens of them in [0, 1)", are_draws, [])
        take("ignore_eos", "true", lambda x: x is True)
        take("logprobs", "0", lambda x: is_int(x, 1), 0)
        take("detokenize", "false", lambda x: x is False, False)
        if body:
            raise Refused(400, f"expected no {', '.join(body)}")
        super().__init__(tokens, draws)
        self.limit, self.temperature, self.end = limit, float(tau), set(end)
        give_draws([self], limit if tau else 0, seed)
        self.versions = set()
        self.answer = Future()

    def finish(self):
        """Answer the request with the tokens so far."""
        first = len(self.tokens) - self.new
        content = [{"logprob": lp} for lp in self.logprobs[first - 1 :]]
        choice = {"token_ids": self.tokens[first:], "logprobs": {"content": content}}
        spans = [{"version": version} for version in self.versions]
        self.answer.set_result({"choices": [choice | {"weight_versions": spans}]})


class Decoder(threading.Thread):
    """Decodes all turns that are asked for, a token of each at a time.

    under: Path. Only directories below it are loaded.
    """

    def __init__(self, directory, dtype, under, head_dtype=None):
        super().__init__(daemon=True)
        self.dtype = dtype
        self.head_dtype = head_dtype
        self.under = under
        self.name_of_model = f"{directory}"
        self.model = self.model_in(directory)
        self.version = FIRST_VERSION
        self.paused = False
        self.inbox = queue.Queue()  # Turns, and functions to call between two tokens
        self.clear()

    def model_in(self, directory):
        """Return the model of a directory, in the dtypes of this server."""
        model = load_hf(directory, dtype=self.dtype).requires_grad_(False)
        model.head_dtype = self.head_dtype
        return model

    def clear(self):
        """Forget all turns, which have been answered, and their keys and values."""
        self.rows, self.logits_BV, self.cache = [], None, KVCache()

    def run(self):
        entering = []
        while True:
            # Take all that has come, and wait if there is nothing to decode.
            while self.paused or not (self.rows or entering) or not self.inbox.empty():
                item = self.inbox.get()
                if isinstance(item, Turn):
                    entering.append(item)
                else:
                    item()
            try:
                self.step(entering)
            except Exception as error:  # no memory, or a token that a new model does not have
                for row in {*self.rows, *entering}:
                    if not row.answer.done():
                        row.answer.set_exception(error)
                self.clear()
            entering = []

    @torch.inference_mode()
    def step(self, entering):
        """Let turns in, take a token of each, and answer those that have ended."""
        if entering:
            # A prompt that several turns have is computed once.
            number = {}
            at = [number.setdefault(tuple(row.tokens), len(number)) for row in entering]
            fresh, logits_RV = prefill(self.model, [list(prompt) for prompt in number])
            self.cache.begin(fresh, at)
            new_BV = logits_RV[at]
            self.logits_BV = torch.cat([self.logits_BV, new_BV]) if self.rows else new_BV
            self.rows = self.rows + entering

        # Each row has a temperature of its own.
        for tau in {row.temperature for row in self.rows}:
            here = [b for b, row in enumerate(self.rows) if row.temperature == tau]
            draws = [self.rows[b].draws[self.rows[b].new] if tau else 0.0 for b in here]
            uniform_B = torch.tensor(draws, dtype=torch.float64)
            drawn = models.sample(self.logits_BV[here], uniform_B, temperature=tau)
            for b, token, logprob in zip(here, *(x.tolist() for x in drawn)):
                self.rows[b].append(token, logprob)
                self.rows[b].versions.add(self.version)

        # Turns that go on keep their rows of the cache.
        going = []
        for b, row in enumerate(self.rows):
            if row.tokens[-1] in row.end or row.new == row.limit:
                row.finish()
            else:
                going.append(b)
        if not going:
            return self.clear()
        if len(going) < len(self.rows):
            self.cache.select(going)
        self.rows = [self.rows[b] for b in going]
        last_B1 = torch.tensor([row.tokens[-1:] for row in self.rows])
        self.logits_BV = forward_with_cache(self.model, self.cache, last_B1)

    # Answers to requests, in threads of theirs: functions of a request's body.

    def answers(self) -> dict:
        """Return {path: function}."""
        return {
            VLLM.path: self.generate, VLLM.info: self.weight_info, "/v1/models": self.models,
            "/pause": lambda body: self.between_tokens(self.pause),
            "/update_weight_version": self.rename, "/collective_rpc": self.load,
            "/reset_prefix_cache": lambda body: {},  # a pause has emptied it
            "/resume": lambda body: self.between_tokens(self.resume),
        }  # fmt: skip

    def generate(self, body):
        row = Turn(body, self.model.config)
        self.inbox.put(row)
        return row.answer.result()

    def weight_info(self, body):
        return {"weight_version": self.version, "draws": True}

    def models(self, body):
        positions = self.model.config.max_position_embeddings
        return {"data": [{"id": self.name_of_model, "max_model_len": positions}]}

    def between_tokens(self, function, *args):
        """Call a function in the decoder's thread; return {}, or raise its error."""
        future = Future()

        def call():
            try:
                function(*args)
                future.set_result({})
            except Exception as error:
                future.set_exception(error)

        self.inbox.put(call)
        return future.result()

    def pause(self):
        """Answer all turns in flight with the tokens that they have, and begin no other."""
        self.paused = True
        for row in self.rows:
            row.finish()
        self.clear()

    def resume(self):
        self.paused = False

    def change(self, name, value):
        """Set an attribute. The pause lets nothing be decoded between a name and its weights."""
        if not self.paused:
            raise Refused(409, "expected /pause before new weights")
        setattr(self, name, value)

    def rename(self, body):
        version = body.get("new_version")
        if not isinstance(version, str):
            raise Refused(400, "expected a string new_version")
        return self.between_tokens(self.change, "version", version)

    def load(self, body):
        """Load the weights of a directory, if they are below the one that was given."""
        given = body.get("kwargs")
        path = given.get("weights_path") if isinstance(given, dict) else None
        if body.get("method") != "reload_weights" or not isinstance(path, str):
            raise Refused(400, "expected the method reload_weights, and kwargs with a weights_path")
        try:
            place = Path(path).resolve()
            if not place.is_relative_to(self.under.resolve()):
                raise Refused(403, f"expected a directory under --weights-under {self.under}")
            model = self.model_in(place)
        except Exception:
            # The old weights stay, and the new name is not theirs.
            self.between_tokens(self.change, "version", FIRST_VERSION)
            raise
        return self.between_tokens(self.change, "model", model)


class Handler(BaseHTTPRequestHandler):
    """Answers a request by the functions of `Decoder.answers`, a refusal by one line."""

    timeout = 60  # seconds that a client may be silent in the middle of a request
    default_request_version = "HTTP/1.0"  # of a first line without one, which gets a code, too

    def do_POST(self):
        try:
            self.send(200, self.answered())
        except Refused as error:
            self.send(error.code, {"error": f"{error}"[:500]})
        except TimeoutError:
            self.send(408, {"error": "expected the rest of the request"})
        except Exception as error:  # of JSON that is too deep, or of files that are no weights
            self.send(400, {"error": f"{type(error).__name__}: {error}"[:300]})

    do_GET = do_POST

    def answered(self):
        """Return the answer to this request."""
        function = self.server.answers.get(self.path.partition("?")[0])
        if function is None:
            raise Refused(404, f"expected one of {', '.join(self.server.answers)}")
        size = self.headers.get("Content-Length", "0")
        if "Transfer-Encoding" in self.headers or not (size.isascii() and size.isdigit()):
            raise Refused(411, "expected a Content-Length")
        if len(size) > 9 or int(size) > MOST_BYTES:
            raise Refused(413, f"expected at most {MOST_BYTES} bytes")
        body = json.loads(self.rfile.read(int(size)) or "{}")
        if not isinstance(body, dict):
            raise Refused(400, "expected a JSON object")
        return function(body)

    def send(self, code, answer):
        text = json.dumps(answer).encode() + b"\n"
        with contextlib.suppress(OSError):  # the client has gone
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

    def send_error(self, code, message=None, explain=None):
        """Refuse what is not HTTP, or has another method."""
        self.close_connection = True
        self.send(code if code < 500 else 405, {"error": f"{message or 'not this'}"[:300]})

    def log_message(self, *args):
        """Say nothing: a run makes thousands of requests."""


class Server(ThreadingHTTPServer):
    """Answers requests in threads, `most` at a time."""

    request_queue_size = 1024
    daemon_threads = True

    def __init__(self, address, answers, most):
        super().__init__(address, Handler)
        self.answers = answers
        self.places = threading.Semaphore(most)

    def process_request(self, request, client_address):
        if self.places.acquire(blocking=False):
            return super().process_request(request, client_address)
        with contextlib.suppress(OSError):
            request.sendall(b"HTTP/1.0 429 too many requests\r\n\r\n")
        self.shutdown_request(request)

    def process_request_thread(self, request, client_address):
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.places.release()

    def handle_error(self, request, client_address):
        """Say nothing of a client that has gone."""


@replacing_characters()
def main(argv) -> int:
    """Serve a model until Ctrl-C."""
    parser = argparse.ArgumentParser("python -m full.engine", allow_abbrev=False)
    add = parser.add_argument
    add("command", choices=["serve"])
    add("model", metavar="DIR", help="Hugging Face directory")
    add("--port", type=int, default=8100, help="0: a free one [8100]")
    add("--host", default="127.0.0.1", help="whoever reaches it may use it")
    about = "load new weights only from directories below this one [runs]"
    add("--weights-under", default="runs", metavar="DIR", help=about)
    dtypes = "float32", "float64", "bfloat16"
    add("--dtype", default="", choices=dtypes, help="[as stored]")
    add("--head-dtype", default="", choices=("", "float32"), help="of the head's product [--dtype]")
    add("--requests", type=int, default=1024, help="at a time, at most [1024]")
    add("--threads", type=int, default=1, help="of torch [1]")
    given = parser.parse_args(argv)
    torch.set_num_threads(given.threads)
    dtype = getattr(torch, given.dtype) if given.dtype else None
    head_dtype = getattr(torch, given.head_dtype) if given.head_dtype else None
    try:
        decoder = Decoder(given.model, dtype, Path(given.weights_under), head_dtype)
        if head_dtype and decoder.model.head_weight.dtype != torch.bfloat16:
            raise ValueError(f"--head-dtype float32 needs weights in bfloat16, got "
                             f"{decoder.model.head_weight.dtype}")  # fmt: skip
        server = Server((given.host, given.port), decoder.answers(), given.requests)
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    decoder.start()
    print(f"serving {given.model} at http://{given.host}:{server.server_port}", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
