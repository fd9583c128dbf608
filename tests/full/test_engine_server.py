"""The server of full/engine.py: turns at once are the turns one by one, whatever else it hears."""

import contextlib
import functools
import json
import math
import random
import re
import shutil
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from test_engine import model_of, same_turn, serve
from test_engine import directory, server  # noqa: F401, fixtures
from test_run import until

import models
from full import engine as engine_py
from full.engine import VLLM, ask_once
from full.generate import generate
from full.hf import save_hf

# The server ------------------------------------------------------------------------------------


def request_of(rng, size=12):
    """A turn that may be asked for."""
    limit = rng.randint(1, 40)
    how = dict(max_tokens=limit, temperature=rng.choice([0, 0.5, 1.0, 1.7]), seed=rng.randrange(99))
    how |= dict(ignore_eos=True, stop_token_ids=rng.sample(range(size), rng.randint(0, 2)))
    tokens = [rng.randrange(size) for _ in range(rng.randint(1, 30))]
    body = {"token_ids": tokens, "sampling_params": how}
    return body | ({"draws": [rng.random() for _ in range(limit)]} if rng.random() < 0.7 else {})


def asked(server, body):
    tokens, logprobs, _ = VLLM.read(ask_once(server.url + VLLM.path, body, 60))
    return tokens, logprobs


def test_turns_at_once_are_the_turns_one_by_one(directory, monkeypatch):
    server = serve(directory, directory)
    sizes, step = [], server.decoder.step

    def slowly(entering):
        time.sleep(0.002)  # so that turns meet
        sizes.append(len(server.decoder.rows) + len(entering))
        step(entering)

    rng = random.Random(0)
    bodies = [request_of(rng) for _ in range(64)]
    truth = [asked(server, body) for body in bodies]
    lengths = {len(tokens) for tokens, _ in truth}
    assert len(lengths) > 20 and any(tokens[-1:] == [t] for tokens, _ in truth for t in tokens[:-1])
    monkeypatch.setattr(server.decoder, "step", slowly)
    with ThreadPoolExecutor(64) as pool:
        rng.shuffle(order := list(range(64)))
        found = pool.map(functools.partial(asked, server), [bodies[n] for n in order])
        assert all(same_turn(turn, truth[n]) for turn, n in zip(found, order))
    assert max(sizes) > 16 and len(set(sizes)) > 10
    assert server.decoder.rows == [] and not server.decoder.cache.lengths
    server.shutdown()


def test_the_server_samples_what_generate_samples(server, tmp_path):
    model = model_of(9)
    server = serve(shutil.copytree(server.decoder.name_of_model, tmp_path / "copy"), tmp_path)
    rng = random.Random(1)
    for body in [request_of(rng) for _ in range(8)]:
        how = body["sampling_params"]
        row = models.Row(body["token_ids"], body.get("draws", ()))
        generate(model, [row], max_new_tokens=how["max_tokens"], temperature=how["temperature"],
                 end=how["stop_token_ids"], seed=how["seed"])  # fmt: skip
        first = len(body["token_ids"])
        assert same_turn(asked(server, body), (row.tokens[first:], row.logprobs[first - 1 :]))
    server.shutdown()


def sent(server, data):
    """What the server answers to these bytes: its code, and the JSON of its one line."""
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=60) as connection:
        with contextlib.suppress(OSError):  # it may have refused before it has heard all
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(65536):
                answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    assert re.match(rb"HTTP/1.0 \d{3} ", head), (data[:200], answer)
    assert body.count(b"\n") == 1 and body.endswith(b"\n") and len(body) < 1000, answer
    return int(head.split()[1]), json.loads(body)


def post(path, body, method="POST", **headers):
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content_Length": len(body)} | headers
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([f"{method} {path} HTTP/1.1", *lines, "", ""]).encode() + body


MANY = 10**400  # Python reads it, and no float holds it
NOT_INTS = None, True, "1", 1.5, [], {}, -1, MANY, math.nan, math.inf
WRONG_SAMPLING = {
    "max_tokens": (*NOT_INTS, 0, 32768), "seed": (*NOT_INTS, 2**63), "top_p": (0.9, 1),
    "temperature": (None, True, "1", [], {}, -0.1, math.nan, math.inf, -math.inf, MANY),
    "stop_token_ids": (None, 1, "1", {}, [12], [-1], [1.0], [True], [None], [[1]], [MANY]),
    "ignore_eos": (None, False, 1, "true", []), "n": (1, 2), "x" * 5000: (1,),
}  # fmt: skip
WRONG_FIELDS = {
    "token_ids": (None, 1, "123", {}, [], [12], [-1], [1.0], [True], [[1]], [MANY], [1] * 32768),
    "sampling_params": (None, 1, "x", [], [[]], {}), "stream": (True, False), "prompt": ("Hello",),
    "draws": (None, 1, "x", {}, [0.5] * 41, [-0.1], [1.0], [math.nan], [None], ["0.5"], [True]),
}  # fmt: skip
RPC = "/collective_rpc"
LOADS = [  # a path may be that of a symbolic link
    *({"method": "reload_weights", "kwargs": {"weights_path": path}}
      for path in ("/", "/etc", "..", "", "~", "\0", "x" * 5000, 5, None, ["x"], "LINK",
                   "FOLDER/..", "FOLDER/nothing", "FOLDER/../elsewhere")),
    *({"method": method, "kwargs": {"weights_path": "FOLDER"}}
      for method in ("exit", "__init__", None, 5, [])),
    *({"method": "reload_weights", "kwargs": kwargs} for kwargs in (None, 5, [], "x")), {},
]  # fmt: skip
OTHERS = [
    *(post(VLLM.path, body) for body in
      (b"", b"{", b"null", b"[1]", b"5", b'"x"', b"\xff\xfe", b"\0" * 99, b"[" * 99999,
       b'{"a":' * 9999, b"1" * 9999, b"{}{}", b"NaN", b'{"token_ids": [1, 2, 3')),
    *(post(VLLM.path, b"{}", Content_Length=length) for length in
      ("-1", "x", "1e3", "", "5, 5", "0x10", "+2", 99, 2**24 + 1, 10**9, 10**99, "\u0663")),
    *(post(VLLM.path, b"2\r\n{}\r\n0\r\n\r\n", **{"Transfer_Encoding": how}) for how in
      ("chunked", "gzip", "", "identity")),
    *(post(path, {}) for path in
      ("/", "//", "/generate", "/v1/completions", "/../../etc/passwd", "*", VLLM.path + "/",
       "/%2e%2e", "http://127.0.0.1:9/", "/" + "x" * 60000, "/pause/../generate", "?", "/stop")),
    *(post(VLLM.path, {}, method) for method in
      ("PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "CONNECT", "post", "\0", "__init__")),
    *(post("/update_weight_version", {"new_version": name}) for name in ("x", 5, None, [])),
    b"GET\r\n\r\n", b"x\r\n\r\n", b"\x16\x03\x01\x02\0\1\0\1\xfc\r\n\r\n",
    b"POST / HTTP/9.9\r\n\r\n", b"POST / HTTP/x\r\n\r\n", b"POST / FTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1 HTTP/1.1\r\n\r\n", b"GET /nothing\r\n\r\n", b"x" * 70000,
    b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n",
    b"GET / HTTP/1.1\r\na: " + b"x" * 70000 + b"\r\n\r\n",
]  # fmt: skip


def hostile_requests(rng, folder):
    """All of the above, in a random order and with a random turn around each wrong field."""
    for name, values in WRONG_SAMPLING.items():
        for value in values:
            body = request_of(rng)
            body["sampling_params"] |= {name: value}
            yield post(VLLM.path, body)
    for name, values in WRONG_FIELDS.items():
        for value in values:
            yield post(VLLM.path, request_of(rng) | {name: value})
    for body in LOADS:
        yield post(RPC, json.dumps(body).replace("FOLDER", f"{folder}")
                   .replace("LINK", f"{folder}/link").encode())  # fmt: skip
    yield from OTHERS


def test_hostile_requests_are_refused_and_change_nothing(directory, tmp_path):
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "link").symlink_to(directory)
    server = serve(directory, tmp_path / "below")
    rng = random.Random(2)
    bodies = [request_of(rng) for _ in range(4)]
    truth = [asked(server, body) for body in bodies]
    going, turns = True, []

    def normal():
        while going or len(turns) < 20:
            turns.append((len(turns) % 4, asked(server, bodies[len(turns) % 4])))

    requests = [data for _ in "12" for data in hostile_requests(rng, tmp_path / "below")]
    rng.shuffle(requests)
    halves = [data[: rng.randrange(len(data))] for data in rng.sample(requests, 60)]
    with ThreadPoolExecutor(1) as pool:
        client = pool.submit(normal)
        codes = []
        try:
            for n, data in enumerate(requests):
                if n < len(halves):  # a client that goes in the middle of its request
                    with socket.create_connection(("127.0.0.1", server.server_port)) as connection:
                        connection.sendall(halves[n])
                code, answer = sent(server, data)
                assert 400 <= code < 500 and list(answer) == ["error"], (data[:300], answer)
                codes.append(code)
        finally:
            going = False
        client.result(60)
    assert len(requests) + len(halves) >= 300 and {400, 404, 405, 409, 411, 413} < {*codes}
    assert all(same_turn(turn, truth[n]) for n, turn in turns)
    assert ask_once(server.url + VLLM.info)["weight_version"] == "default"
    until(lambda: server.places._value == 256, "a place is lost", 60)
    server.shutdown()


def test_a_load_needs_a_pause_and_leaves_the_old_weights_if_it_fails(directory, tmp_path):
    server = serve(directory, tmp_path)
    body = request_of(random.Random(3))
    truth = asked(server, body)
    save_hf(model_of(8), tmp_path / "new")
    load = {"method": "reload_weights", "kwargs": {"weights_path": f"{tmp_path / 'new'}"}}
    assert sent(server, post(RPC, load)) == (409, {"error": "expected /pause before new weights"})
    data = (tmp_path / "new/model.safetensors").read_bytes()
    (tmp_path / "new/model.safetensors").write_bytes(data[:-100])
    assert sent(server, post("/pause", {})) == (200, {})
    assert sent(server, post("/update_weight_version", {"new_version": "a-1"})) == (200, {})
    (tmp_path / "new/link").symlink_to("/")
    for path in ("/etc", f"{tmp_path}/..", f"{tmp_path}/new/link", f"{tmp_path}/../{directory}"):
        outside = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        found = {"error": f"expected a directory under --weights-under {tmp_path}"}
        assert sent(server, post(RPC, outside)) == (403, found)
    code, answer = sent(server, post(RPC, load))
    assert code == 400 and "model.safetensors" in answer["error"], answer
    assert sent(server, post("/resume", {})) == (200, {})
    assert same_turn(asked(server, body), truth)
    assert ask_once(server.url + VLLM.info)["weight_version"] != "a-1"

    # A turn that is asked for in a pause waits for its end, and is by the new weights.
    (tmp_path / "new/model.safetensors").write_bytes(data)
    assert sent(server, post("/pause", {})) == (200, {})
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(asked, server, body)
        assert sent(server, post("/update_weight_version", {"new_version": "a-2"})) == (200, {})
        assert sent(server, post(RPC, load)) == (200, {}) and not waiting.done()
        sent(server, post("/resume", {}))
        assert waiting.result(60) == asked(server, body) and waiting.result() != truth
    server.shutdown()


def test_a_server_survives_turns_that_a_new_model_cannot_decode(directory, tmp_path):
    server = serve(directory, tmp_path)
    save_hf(model_of(8, vocab_size=5), tmp_path / "smaller")
    load = {"method": "reload_weights", "kwargs": {"weights_path": f"{tmp_path / 'smaller'}"}}
    body = {"token_ids": [11, 1], "sampling_params": dict(max_tokens=3, ignore_eos=True)}
    sent(server, post("/pause", {}))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(sent, server, post(VLLM.path, body))
        until(lambda: server.places._value < 256, "it is not asked", 60)
        sent(server, post(RPC, load))
        sent(server, post("/resume", {}))
        code, answer = waiting.result(60)
    assert 400 <= code < 500 and "error" in answer, answer
    assert len(asked(server, body | {"token_ids": [4, 1]})[0]) == 3
    server.shutdown()


def test_at_most_so_many_requests_at_a_time(directory, tmp_path):
    server = serve(directory, tmp_path, most=2)
    sent(server, post("/pause", {}))
    body = request_of(random.Random(4))
    with ThreadPoolExecutor(2) as pool:
        turns = [pool.submit(asked, server, body) for _ in range(2)]
        until(lambda: not server.places._value, "they are not asked", 60)
        with pytest.raises(engine_py.Unanswered, match="^429"):
            ask_once(server.url + VLLM.info)
        server.decoder.between_tokens(server.decoder.resume)
        assert turns[0].result(60) == turns[1].result(60)
    until(lambda: server.places._value == 2, "a place is lost", 60)
    assert ask_once(server.url + VLLM.info)["draws"] is True
    server.shutdown()
