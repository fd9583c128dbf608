"""Sample with inference servers: a client of vLLM and SGLang.

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

import contextlib
import datetime
import http.client
import itertools
import json
import math
import secrets
import shutil
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

import torch.distributed as dist

from full.learn.generate import Turns
from full.model.hf import save_hf
from full.model.parallelize import gather_weights
from full.ranks.joining import agree, errors_on_all_ranks, warn

THREADS = 256  # turns that a rank asks for at a time; vLLM and SGLang decode about this number
TRIES = 3  # how often a turn is asked for if the answer is wrong
FAILURES = 8  # answers 500, or without sense, in a row; with the pauses between them 18 seconds
MOST_BYTES = 2**24  # of a request or an answer: a turn of 100,000 tokens has 10 MB
FIRST_VERSION = "default"  # of the weights with which an engine starts

# Dialects: requests to an engine, and its answers ------------------------------------------------
# `info` is the path of a GET for the version of the weights, `path` of the POST of a turn.


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
    against it. It has the methods of `VLLM`.
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
    """An engine did not answer. is_failure: it answered with an error of its own, or nonsense."""

    def __init__(self, problem, is_failure=False):
        super().__init__(problem)
        self.is_failure = is_failure


# An engine is on this machine or on this network, so do not use HTTP_PROXY.
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
            reply = json.loads(text or "{}") if len(text) <= MOST_BYTES else None
            if not isinstance(reply, dict):
                raise ValueError(f"expected a JSON object, got {text[:80]!r}")
            return reply
    except urllib.error.HTTPError as error:
        with error:
            text = " ".join(error.read(300).decode(errors="replace").split())
        problem = f"{error.code} {text}"
        if error.code < 500 and error.code != 429:  # 429: too many requests
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
        names, positions = zip(*agree(lambda: [self.server_at(url) for url in self.urls]))
        if len({*names}) > 1:
            raise ValueError(f"expected engines of one kind, got {', '.join(names)}")
        self.positions = min(positions)  # that all of them have
        self.dialect = DIALECTS[names[0]]
        if config.head_dtype:
            warn("head_dtype float32: an engine does not tell in which dtype its head computes; "
                 "start it with the same (vllm: --hf-overrides '{\"head_dtype\": \"float32\"}', "
                 "sglang: --enable-fp32-lm-head)")

    @staticmethod
    def server_at(url):
        """Return the name of a server's dialect, and its positions."""
        problems = []
        for name, dialect in DIALECTS.items():
            try:
                ask_once(url + dialect.info)
                positions = ask_once(f"{url}/v1/models")["data"][0].get("max_model_len")
                return name, positions or math.inf
            except Unanswered as error:
                raise ValueError(f"expected an engine at {url}, got: {error}") from error
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                problems.append(f"{error}")
        raise ValueError(f"{url} is neither SGLang nor vLLM with VLLM_SERVER_DEV_MODE=1 and "
                         f"--enable-scale-out: {'; '.join(problems)}")  # fmt: skip

    def begin(self, folder):
        """Begin a run that writes its weights to a folder, which all engines can read."""

        def make_run_id():
            # No other process has the run's directory. Files in it are from before a resume.
            shutil.rmtree(folder, ignore_errors=True)
            Path(folder).mkdir(parents=True)
            return secrets.token_hex(4)

        self.run_id = agree(make_run_id)
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

        # COMM: rank 0 asks the engines, and the other ranks wait for it in a broadcast. Pinned by
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
            loaded = f"{self.call(url, self.dialect.info).get('weight_version')}"
            if loaded == self.version:
                return

            # A server that was restarted has its first weights. If it has weights of another run,
            # each of the two runs would sample with the other run's policy.
            if loaded != FIRST_VERSION and not loaded.startswith(f"{self.run_id}-"):
                if self.has_pushed:
                    raise ValueError(f"another run uses {url}: it has the weights {loaded} and not "
                                     f"{self.version}; give each run an engine")  # fmt: skip
                warn(f"{url} has the weights {loaded}, of a run that must have ended")
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
                verdict = f"failed {failures} times" if problem.is_failure else "does not answer"
                raise ConnectionError(f"the engine at {url}{path} {verdict}: {problem}"
                                      ) from problem
            if not self.has_warned:  # warn once, not in each thread
                self.has_warned = True
                print(f"waiting for the engine at {url}: {problem}", file=sys.stderr, flush=True)
            time.sleep(pause)
            pause = min(2 * pause, 5)

    # Rollouts ------------------------------------------------------------------------------------

    def start(self, function, *args) -> Future:
        """Return the Future of function(*args), which samples. Functions run one after another."""
        return self.worker.submit(function, *args)

    def generate(
        self, rows, /, *, max_new_tokens, temperature=1.0, end=(), ending=None, after=None,
        slots=None,
    ) -> list:  # fmt: skip
        """Ask for the turns of this rank's rows, many at a time, until each row has ended.

        Keywords: as in `Sampler.generate`.
        """
        # Row n of rank r asks server n + r.
        turns = Turns(max_new_tokens, ending, after)
        asked = {}  # Future of a turn -> (place, row)
        rank = dist.get_rank()
        pool = ThreadPoolExecutor(min(slots or THREADS, max(1, len(rows)), THREADS))

        def begin(place, row):
            url = self.urls[(rank + place[0]) % len(self.urls)]
            future = pool.submit(self.turn, url, row, max_new_tokens, temperature, set(end))
            asked[future] = place, row

        with errors_on_all_ranks(self.group), contextlib.ExitStack() as stack:
            stack.callback(pool.shutdown, wait=False, cancel_futures=True)
            for n, row in enumerate(rows):
                begin((n,), row)
            while asked:
                done = wait(asked, return_when=FIRST_COMPLETED).done
                entries = [asked.pop(future) for future in done]
                ended = [future.result() for future in done]
                for place, follower in itertools.chain(*turns.followers(entries, ended)):
                    begin(place, follower)
        return turns.rows()

    def turn(self, url, row, limit, temperature, end) -> bool:
        """Append the queued tokens, then a turn. Return whether an end token ended it."""
        while row.queue and row.new < limit:
            row.append(None, 0.0)
        if row.new == limit:
            return False

        # The seed is a function of the run's seed, step, group, rollout and place, as a draw is.
        seed = int(row.draws[row.new] * 2**31) if temperature else 0
        room = limit - row.new
        body = self.dialect.request(row.tokens, room, temperature, sorted(end), seed)
        # A load ends all turns in flight. After a restart each of two ranks may let the engine
        # load, and each load makes the other rank ask once more.
        tries = TRIES + dist.get_world_size()
        for _ in range(tries):
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
        raise ValueError(f"the engine at {url}, after {tries} attempts: {problem}")

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
