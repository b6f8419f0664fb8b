"""`putget serve` on CPU ranks, with clients at random: python -m tests.engines.serve_transformers FOLDER ROUNDS.

FOLDER/found.json has the clients' texts, beside those of the model alone. In ROUNDS servers of a Qwen3-MoE model a rank
is killed. If that is 1, DeepSeek-V3 serves well, and GPT-OSS without spare slots loses a rank behind the same requests.
If it is 0, a server of Qwen3-MoE gets PUTGET_TEST_REQUESTS requests.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import json
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers

from tests.engines.models import other_configs, save_architecture, save_model, save_tokenizer
from tests.engines.prompts import free_port

RANKS, EXPERTS, REQUESTS = 3, 10, 60
AT_ONCE, WARM = 24, 200
PATIENCE_S = 240.0
BALANCE = ("off", "online", "static")
LETTERS = "abcdefghijklmnopqrstuvwxyz ,.ABC123"


def questions() -> list[dict[str, Any]]:
    """Prompts of 1 to 40 characters, for 1 to 20 tokens, half of them streams."""
    rng = random.Random(1)
    return [
        {
            "prompt": "".join(rng.choices(LETTERS, k=rng.randint(1, 40))),
            "max_tokens": rng.randint(1, 20),
            "stream": rng.random() < 0.5,
        }
        for _ in range(REQUESTS)
    ]


def long_questions() -> list[dict[str, Any]]:
    """Prompts whose answers take so long that a rank is lost in the middle."""
    rng = random.Random(5)
    return [
        {"prompt": "".join(rng.choices(LETTERS, k=6)), "max_tokens": 100, "stream": number % 2 == 0}
        for number in range(12)
    ]


def save_and_answer(folder: Path) -> None:
    """Three models, and the texts of each in one process without putget: FOLDER/alone.json, FOLDER/NAME/alone.json."""
    save_model(folder, EXPERTS)
    for name, config in other_configs().items():
        save_architecture(folder, name, config)
    for model in (folder, *(folder / name for name in other_configs())):
        save_tokenizer(model)
        answer_alone(model, questions() + (long_questions() if model == folder else []))


def answer_alone(folder: Path, asked: list[dict[str, Any]]) -> None:
    """FOLDER/alone.json: the texts of the model in one process without putget."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    texts = []
    for question in asked:
        ids = tokenizer(question["prompt"], return_tensors="pt")["input_ids"]
        with torch.no_grad():
            tokens = model.generate(ids, max_new_tokens=question["max_tokens"], do_sample=False)[0, ids.shape[1] :]
        texts.append(tokenizer.decode(tokens, skip_special_tokens=True))
    folder.joinpath("alone.json").write_text(json.dumps(texts))


def program_of(command: int) -> int:
    """The process that runs a command: another one if Python is warm (tests/harness/warm.py)."""
    note = Path(sys.executable).with_name(f"{command}.pid")
    return int(note.read_text()) if note.exists() else command


class Server:
    """The command, and its ranks."""

    def __init__(self, folder: Path, *words: str, ranks: int = RANKS) -> None:
        self.port = free_port()
        self._log = (folder / "serve.log").open("w+")
        command = [sys.executable, "-m", "putget", "serve", str(folder), f"--ep_size={ranks}", "--device=cpu", *words]
        self.process = subprocess.Popen([*command, f"--port={self.port}"], stdout=self._log, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + PATIENCE_S
        while f"{ranks} ranks answer" not in self.log:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the server does not answer:\n{self.log}")
            time.sleep(0.05)
        children = psutil.Process(program_of(self.process.pid)).children()
        (server,) = [child for child in children if "forkserver" in " ".join(child.cmdline())]
        forked = psutil.Process(program_of(server.pid)).children()
        self.ranks = sorted(forked, key=lambda child: child.create_time())

    @property
    def log(self) -> str:
        """The output so far."""
        return Path(self._log.name).read_text()

    def ask(self, path: str, body: Any = None) -> tuple[int, bytes]:
        """Status and text of an answer; status 0 where the connection ended."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data, {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()
        except (OSError, http.client.HTTPException) as error:
            return 0, str(error).encode()

    def complete(self, question: dict[str, Any]) -> str:
        """The text of a completion, or why there is none."""
        status, answer = self.ask("/v1/completions", question)
        if status != 200:
            return f"status {status}: {answer.decode()}"
        if not question["stream"]:
            return str(json.loads(answer)["choices"][0]["text"])
        words = [json.loads(line[6:]) for line in answer.decode().splitlines() if line.startswith("data: {")]
        if any("error" in word for word in words):
            return f"status 200: {answer.decode()}"
        return "".join(word["choices"][0]["text"] for word in words)

    def wait_for_requests(self) -> None:
        """Until each rank has one under way, or answers slowly enough that most have."""
        seen: set[str] = set()
        deadline = time.monotonic() + 3.0
        while len(seen) < RANKS and time.monotonic() < deadline:
            text = self.ask("/metrics")[1].decode()
            seen.update(re.findall(r'putget_serve_requests\{rank="(\d)",state="active"\} [1-9]', text))

    def give_up(self, question: dict[str, Any], reads: int) -> None:
        """A client that goes away when it has read so many bytes of a stream; 0: before its answer begins."""
        body = json.dumps({**question, "stream": True, "max_tokens": 60}).encode()
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        with contextlib.suppress(OSError, http.client.HTTPException):  # where a rank is lost
            client.request("POST", "/v1/completions", body, {"content-type": "application/json"})
            if reads:
                client.getresponse().read(reads)
        client.close()

    def settled(self) -> dict[str, dict[str, float]]:
        """Requests that have ended on each rank, once it has none, and the threads, files and memory of its process."""
        found: dict[str, dict[str, float]] = {}
        deadline = time.monotonic() + PATIENCE_S
        while len(found) < RANKS and time.monotonic() < deadline:
            text = self.ask("/metrics")[1].decode()
            ends = re.findall(r'putget_serve_requests_total\{rank="(\d)",end="\w+"\} (\d+)', text)
            if len(ends) == 2 and len(re.findall(r'putget_serve_requests\{rank="\d",state="\w+"\} 0\n', text)) == 2:
                found[ends[0][0]] = {"ended": float(ends[0][1]) + float(ends[1][1])}
        if len(found) < RANKS:
            raise SystemExit(f"ranks still have requests: only {sorted(found)} have none")
        for rank, process in enumerate(self.ranks):
            files = [process.num_fds() for _ in range(5) if time.sleep(0.1) is None]  # connections that just end
            held = {"threads": process.num_threads(), "files": min(files), "bytes": process.memory_info().rss}
            found[str(rank)].update(held)
        return found

    def end(self) -> int | None:
        """Ends it; its exit code, None where it stayed."""
        self.process.terminate()
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            return None
        finally:
            for rank in self.ranks:
                with contextlib.suppress(psutil.NoSuchProcess):
                    rank.kill()
            self.process.kill()


@contextlib.contextmanager
def all_asked(server: Server, asked: list[dict[str, Any]], gives_up: bool = True) -> Iterator[list[str]]:
    """Clients that come at random moments; the texts are there behind it."""
    texts = [f"no answer in {PATIENCE_S:g} s"] * len(asked)
    rng = random.Random(2)

    def one(number: int, delay: float) -> None:
        time.sleep(delay)
        if gives_up and number % 4 == 3:
            server.give_up(asked[number], reads=20 * (number % 8 == 3))
        texts[number] = server.complete(asked[number])

    clients = [threading.Thread(target=one, args=(number, 2 * rng.random())) for number in range(len(asked))]
    for client in clients:
        client.start()
    yield texts
    for client in clients:
        client.join(PATIENCE_S)


def share_of_a_core(ranks: list[psutil.Process], seconds: float) -> float:
    """The busiest rank's use of a core while nobody asks."""
    before = [sum(rank.cpu_times()[:2]) for rank in ranks]
    time.sleep(seconds)
    after = [sum(rank.cpu_times()[:2]) for rank in ranks]
    return max(end - begin for begin, end in zip(before, after, strict=True)) / seconds


def load(server: Server, folder: Path) -> int | None:
    """Runs `putget serve-bench` in the environment that has what it draws with; its exit code, None without aiperf."""
    if "PUTGET_TEST_AIPERF" not in os.environ:
        return None
    settings = {**os.environ, "PATH": f"{os.environ['PUTGET_TEST_AIPERF']}:{os.environ['PATH']}"}
    command = (
        f"-m putget serve-bench --url http://127.0.0.1:{server.port} --rates 8 --requests 12 --prompt_tokens 20 "
        f"--prompt_stddev 8 --output_tokens 8 --output_file {folder}/bench.json --plot {folder}/bench.png"
    )
    with (folder / "bench.log").open("w") as log:
        python = os.environ["PUTGET_TEST_BENCH_PYTHON"]
        return subprocess.run([python, *command.split()], env=settings, stdout=log, stderr=log, check=False).returncode


def serve_well(folder: Path) -> dict[str, Any]:
    """Requests at random, clients that go away, a rank that stands still for a while, and an end."""
    server = Server(folder / "DeepseekV3", "--stream_interval=4")
    with all_asked(server, questions()[:8]) as texts:
        pass
    before = server.settled()
    with all_asked(server, questions()) as texts:
        time.sleep(1.0)
        server.ranks[1].send_signal(signal.SIGSTOP)
        time.sleep(1.5)
        server.ranks[1].send_signal(signal.SIGCONT)
        scraped = sorted({server.ask("/metrics")[0] for _ in range(30)})
    settled = [before, server.settled()]
    metrics = server.ask("/metrics")[1].decode()
    bench = load(server, folder)
    refused = server.ask("/v1/completions", {"prompt": "a" * 300, "max_tokens": 4})
    found = {
        "texts": texts,
        "metrics": metrics,
        "scraped": scraped,
        "settled": settled,
        "bench": bench,
        "refused": [refused[0], refused[1].decode()],
        "idle": share_of_a_core(server.ranks, 3.0),
        "healthy": server.ask("/health")[0],
    }
    found["exit"] = server.end()
    found["left"] = [rank.pid for rank in server.ranks if rank.is_running()]
    return found


def serve_many(folder: Path, count: int) -> dict[str, Any]:
    """Requests at random, many at once; one in five clients goes away. Texts that differ, and what the ranks hold."""
    server = Server(folder, "--stream_interval=2")
    asked, alone, rng = questions(), json.loads((folder / "alone.json").read_text()), random.Random(3)
    turns = [
        (rng.randrange(REQUESTS), rng.choice((0, 1, 20, 200)) if rng.random() < 0.2 else None)
        for _ in range(WARM + count)
    ]

    def one(turn: tuple[int, int | None]) -> str | None:
        number, reads = turn
        if reads is not None:
            server.give_up(asked[number], reads)
            return None
        said = server.complete(asked[number])
        return None if said == alone[number] else f"{number}: {said!r}, alone {alone[number]!r}"

    settled, wrong = [], []
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as clients:
        for part in (turns[:WARM], turns[WARM:]):
            wrong += [found for found in clients.map(one, part) if found is not None]
            settled.append(server.settled())
    whole = sum(reads is None for _, reads in turns)
    return {"wrong": wrong, "settled": settled, "sent": len(turns), "whole": whole, "exit": server.end()}


def lose_a_rank(folder: Path) -> dict[str, Any]:
    """A rank is killed while requests are under way: how long until all have ended, and what the others say then."""
    server = Server(folder / "GptOss", "--timeout_s=4")
    with all_asked(server, questions()) as before:
        pass
    asked = [{"prompt": "abc", "max_tokens": 100, "stream": number % 2 == 0} for number in range(12)]
    with all_asked(server, asked):
        time.sleep(1.0)
        server.ranks[2].kill()
        began = time.monotonic()
    seconds = time.monotonic() - began
    health = {server.ask("/health")[0] for _ in range(8)}
    return {"before": before, "seconds": seconds, "health": sorted(health), "exit": server.end(), "log": server.log}


def ask_until_back(server: Server) -> list[str]:
    """Texts of clients that ask all the time, until a new process of the lost rank answers."""
    texts: list[str] = []
    deadline = time.monotonic() + PATIENCE_S
    while "is back on" not in server.log:
        if time.monotonic() > deadline:
            raise SystemExit(f"the rank does not come back:\n{server.log}")
        with all_asked(server, long_questions(), gives_up=False) as found:
            pass
        texts += found
    return texts


def who_answers(server: Server) -> list[str]:
    """The ranks that connections come to, all of them soon."""
    seen: set[str] = set()
    deadline = time.monotonic() + PATIENCE_S
    while len(seen) < RANKS and time.monotonic() < deadline:
        seen.update(re.findall(r'putget_serve_members\{rank="(\d)"\} 3', server.ask("/metrics")[1].decode()))
    return sorted(seen)


def survive(folder: Path, rounds: int) -> dict[str, Any]:
    """A rank is killed while all have requests, and joins again: what these say, and requests that come later."""
    names = ("during", "meanwhile", "behind", "ranks", "health", "exits", "logs")
    found: dict[str, Any] = {name: [] for name in names}
    rng = random.Random(rounds)
    for number in range(rounds):
        server = Server(folder, f"--num_slots={5 * RANKS}", "--timeout_s=8", f"--balance={BALANCE[number % 3]}")
        with all_asked(server, long_questions(), gives_up=False) as texts:
            server.wait_for_requests()
            time.sleep(rng.random())
            if number % 2:
                server.ranks[0].send_signal(signal.SIGSTOP)  # for less than the deadline
                time.sleep(1.0)
                server.ranks[0].send_signal(signal.SIGCONT)
            server.ranks[rng.randrange(RANKS)].kill()
        found["during"].append(texts)
        found["meanwhile"] += ask_until_back(server)
        with all_asked(server, long_questions(), gives_up=False) as texts:
            pass
        found["behind"].append(texts)
        found["ranks"].append(who_answers(server))
        found["health"].append(sorted({server.ask("/health")[0] for _ in range(8)}))
        found["exits"].append(server.end())
        found["logs"].append(server.log)
    return found


def main(folder: Path, rounds: int) -> None:
    alone = multiprocessing.get_context("fork").Process(target=save_and_answer, args=(folder,))
    alone.start()
    alone.join()
    names = ("GptOss", "DeepseekV3")
    texts = {name: json.loads((folder / name / "alone.json").read_text()) for name in names}
    long = json.loads((folder / "alone.json").read_text())[REQUESTS:]
    found: dict[str, Any] = {"alone": texts, "long": long, "survived": survive(folder, rounds)}
    if rounds == 0:
        found["many"] = serve_many(folder, int(os.environ.get("PUTGET_TEST_REQUESTS", "1000")))
    if rounds == 1:
        found |= {"well": serve_well(folder), "lost": lose_a_rank(folder)}
    folder.joinpath("found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
