"""What the client itself costs, and how true its clock is: `python3 -m tests.bench_client [--quick]`.

A stub in a process of its own sends a token every 5 ms, or a whole answer at once, and keeps the times at which it
really sent. CPU times are set against the smallest urllib loop that does the same, in interleaved runs. Exits 1 when
a bound is broken: CPU per request and per token at most 1.3 times that loop's, time to first token within 1 ms of the
stub's, decode rate within 0.5%, 120 MB for 5,000 prompts on two endpoints, 64 requests at a time not limited by the
client. A busy machine breaks bounds too: look at what else runs before blaming the client.
"""

import contextlib
import heapq
import json
import os
import pathlib
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

import measure_speculative
from tests.support import PROGRAM, Bounds, run_main

PACE_S, FIRST_S = 0.005, 0.02
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
HEAD = "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Type: %s\r\n%s\r\n"
STREAM_HEAD = HEAD % (
    "text/event-stream",
    "Transfer-Encoding: chunked\r\n",
)  # as all engines stream


# ---- the paced stub: one thread, absolute deadlines ----


def event(text, end=None, **more):
    body = {
        "id": "chatcmpl-0123456789abcdef",
        "object": "chat.completion.chunk",
        "created": 1700000000,
        "model": "stub",
        "choices": [
            {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": end}
        ],
    }
    return chunk(b"data: " + json.dumps(dict(body, **more)).encode() + b"\n\n")


def chunk(data):
    return b"%x\r\n%s\r\n" % (len(data), data)


def answer_events(tokens):
    usage = event(
        "",
        choices=[],
        usage={"prompt_tokens": 9, "completion_tokens": tokens, "total_tokens": tokens + 9},
    )
    events = [
        event(" word%d" % (n % 97), "length" if n == tokens - 1 else None) for n in range(tokens)
    ]
    events[-1] += usage + chunk(b"data: [DONE]\n\n") + chunk(b"")
    return events


def serve():
    """Serve until standard input ends. The field "pace_s" of a request is the time between its tokens, 0 for all at once."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    print(listener.getsockname()[1], flush=True)
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    known, arriving, due, times = {}, {}, [], []
    while True:
        wait_s = max(0.0, due[0][0] - time.perf_counter()) if due else None
        for ready in select.select([listener, *arriving], [], [], wait_s)[0]:
            if ready is listener:
                connection = listener.accept()[0]
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                arriving[connection] = b""
                continue
            arriving[ready] += ready.recv(65536)
            head, blank, body = arriving[ready].partition(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
            if not blank or len(body) < length:
                continue
            at = time.perf_counter()
            del arriving[ready]
            if not head.startswith(b"POST"):
                path, page = head.split()[1].decode(), None
                if path == "/v1/models":
                    page = {"object": "list", "data": [{"id": "stub"}]}
                elif path == "/times":
                    page, times = times, []
                answer = (
                    HEAD % ("application/json", "") + json.dumps(page)
                    if page is not None
                    else "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
                )
                with ready:
                    ready.sendall(answer.encode())
                continue
            asked = json.loads(body)
            tokens, pace_s = asked["max_tokens"], asked.get("pace_s", 0.0)
            events = known.setdefault(tokens, answer_events(tokens))
            if pace_s:
                ready.sendall(STREAM_HEAD.encode())
                heapq.heappush(due, (at + FIRST_S, ready.fileno(), ready, events, 0, pace_s, [at]))
                continue
            with ready:
                ready.sendall(STREAM_HEAD.encode() + b"".join(events))
        while due and due[0][0] <= time.perf_counter():
            when, number, connection, events, n, pace_s, sent = heapq.heappop(due)
            if n in (0, len(events) - 1):
                sent.append(time.perf_counter())
            with contextlib.suppress(OSError):
                connection.sendall(events[n])
            if n + 1 < len(events):
                heapq.heappush(
                    due, (when + pace_s, number, connection, events, n + 1, pace_s, sent)
                )
            else:
                connection.close()
                times.append([sent[0], sent[1], sent[-1]])


@contextlib.contextmanager
def stub():
    """The root URL of a stub."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.bench_client", "--stub"],
        cwd=PROGRAM.parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield "http://127.0.0.1:%s" % process.stdout.readline().strip()
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait()


def times_of(root):
    """[request read, first token sent, last token sent] of every paced answer since the last call, in order of their ends."""
    with OPENER.open(root + "/times", timeout=10) as response:
        return json.loads(response.read())


# ---- the two clients ----


def smallest_loop(url, body):
    """(text, usage, time to first token, latency) by the smallest urllib loop that finds them."""
    started, first, parts, usage = time.perf_counter(), None, [], None
    data = json.dumps(body).encode()
    with OPENER.open(
        urllib.request.Request(url, data, {"Content-Type": "application/json"}), timeout=60
    ) as response:
        for line in response:
            if line.startswith(b"data: {"):
                said = json.loads(line[6:])
                for choice in said["choices"]:
                    text = choice["delta"].get("content")
                    if text:
                        first = first or time.perf_counter()
                        parts.append(text)
                usage = said.get("usage") or usage
    return "".join(parts), usage, first - started, time.perf_counter() - started


def clients(root, tokens, pace_s):
    """(this program's client, the smallest loop) for one kind of request."""
    request = {"max_tokens": tokens, "temperature": 0.0, "top_p": 1.0, "seed": 0}
    if pace_s:
        request["pace_s"] = pace_s
    messages = [{"role": "user", "content": "Say a word."}]
    endpoint = measure_speculative.Endpoint("baseline", root + "/v1", root, "stub", request=request)
    body = dict(
        request,
        model="stub",
        messages=messages,
        stream=True,
        stream_options={"include_usage": True},
    )
    return (lambda: measure_speculative.complete(endpoint, messages)), (
        lambda: smallest_loop(root + "/v1/chat/completions", body)
    )


def cpu_seconds(ways, runs):
    """The CPU seconds of each way, run for run, interleaved with the order turned every time."""
    spent = [[] for _ in ways]
    for run in range(-2, runs):
        for number in sorted(range(len(ways)), reverse=run % 2 == 1):
            before = time.thread_time()
            ways[number]()
            if run >= 0:
                spent[number].append(time.thread_time() - before)
    return spent


def bench_cpu(root, bounds, quick):
    cost = {}
    for what, tokens, pace_s, runs in (
        ("1 token", 1, 0, 300),
        ("192 tokens at once", 192, 0, 200),
        ("64 tokens, 5 ms apart", 64, PACE_S, 40),
    ):
        ours, plain = cpu_seconds(clients(root, tokens, pace_s), runs // (4 if quick else 1))
        cost[what] = [statistics.median(ours), statistics.median(plain)]
        print(
            "CPU of a request, %s: %.0f us, smallest loop %.0f us"
            % (what, *(1e6 * value for value in cost[what]))
        )
    bounds.most("CPU per request (1 token), ratio", cost["1 token"][0] / cost["1 token"][1], 1.3)
    bounds.most(
        "CPU per request (192 tokens at once), ratio",
        cost["192 tokens at once"][0] / cost["192 tokens at once"][1],
        1.3,
    )
    for what, tokens in (("192 tokens at once", 192), ("64 tokens, 5 ms apart", 64)):
        each = [(whole - one) / (tokens - 1) for whole, one in zip(cost[what], cost["1 token"])]
        print(
            "CPU of a token, %s: %.1f us, smallest loop %.1f us"
            % (what, *(1e6 * value for value in each))
        )
        bounds.most("CPU per token (%s), ratio" % what, each[0] / each[1], 1.3)


def bench_clock(root, bounds, quick):
    late, plain_late, rate = [], [], []
    ours, plain = clients(root, 192, PACE_S)
    times_of(root)
    for _ in range(5 if quick else 20):
        answer = ours()
        plain_ttft_s = plain()[2]
        (read, first, last), (plain_read, plain_first, _) = times_of(root)
        late.append(answer.ttft_s - (first - read))
        plain_late.append(plain_ttft_s - (plain_first - plain_read))
        rate.append(answer.decode_tokens / answer.decode_s * (last - first) / 191 - 1)
    print(
        "time to first token, after the stub's: %.2f ms (smallest loop %.2f ms)"
        % (1000 * statistics.median(late), 1000 * statistics.median(plain_late))
    )
    bounds.most("time to first token, ms off the stub's", 1000 * abs(statistics.median(late)), 1.0)
    print(
        "tokens/s, error of each answer: median %+.3f%%, worst %+.3f%%"
        % (100 * statistics.median(rate), 100 * max(rate, key=abs))
    )
    bounds.most("tokens/s, % off the stub's", 100 * abs(statistics.median(rate)), 0.5)


def bench_levels(root, bounds, quick):
    """Requests in flight: how much of the stub's own pace arrives, and where the client becomes the limit."""
    tokens, levels, seen = 192, (1, 16, 64, 128), {}
    flags = [
        "--baseline-url",
        root,
        "--max-tokens",
        tokens,
        "--warmup",
        0,
        "--quiet",
        "--extra-body",
        json.dumps({"pace_s": PACE_S}),
    ]
    for _ in range(2 if quick else 5):
        for level in levels:
            times_of(root)
            cpu_s, started = time.process_time(), time.perf_counter()
            record = run_main(
                *flags, "--concurrency", level, prompts=["Say a word."] * min(level, 4)
            ).endpoint()
            busy = (time.process_time() - cpu_s) / (time.perf_counter() - started)
            stub_s = statistics.median(last - read for read, _, last in times_of(root))
            seen.setdefault(level, []).append(
                (stub_s / record["latency_s"]["p50"], record["output_tokens_per_s"], busy)
            )
    for level in levels:
        kept, rate, busy = max(seen[level])  # the round that other programs disturbed least
        print(
            "%3d at a time: requests take %.1f%% longer here than at the stub; %.0f of %.0f tokens/s, one processor %.0f%% busy"
            % (level, 100 * (1 / kept - 1), rate, level / PACE_S, 100 * busy)
        )
    bounds.least(
        "the client's limit: tokens/s at which it would need a whole processor",
        max(rate / busy for _, rate, busy in seen[64]),
        64 / PACE_S,
    )
    bounds.least("share of the stub's pace that arrives with 64 at a time", max(seen[64])[0], 0.9)


# ---- without a stub, or with one of its own ----


def bench_start(bounds, quick):
    ways = {
        "--help": [str(PROGRAM), "--help"],
        "imports alone": [
            "-c",
            "import argparse, json, urllib.request, dataclasses, subprocess, queue",
        ],
        "bare Python": ["-c", "pass"],
    }
    took = {name: [] for name in ways}
    for _ in range(5 if quick else 15):
        for name, command in ways.items():
            started = time.perf_counter()
            subprocess.run([sys.executable, *command], stdout=subprocess.DEVNULL, check=True)
            took[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(values) for name, values in took.items()}
    print(
        "start-up: "
        + ", ".join("%s %.0f ms" % (name, 1000 * value) for name, value in medians.items())
        + "; ratio to its imports %.1f" % (medians["--help"] / medians["imports alone"])
    )


def metrics_page():
    """One megabyte as vLLM writes it: mostly buckets of histograms."""
    lines, n = [], 0
    while len(lines) * 118 < 1 << 20:
        name = "vllm:request_time_%d_seconds" % n
        lines += ["# HELP %s Histogram of a time in seconds." % name, "# TYPE %s histogram" % name]
        lines += [
            '%s_bucket{engine="0",le="%s",model_name="meta-llama/Llama-3.1-8B-Instruct"} %d.0'
            % (name, 0.001 * 1.5**i, n * i)
            for i in range(40)
        ]
        lines += [
            '%s_%s{engine="0",model_name="meta-llama/Llama-3.1-8B-Instruct"} %d.0' % (name, part, n)
            for part in ("sum", "count")
        ]
        n += 1
    return "\n".join(lines) + "\n"


def bench_metrics(bounds, quick):
    page = metrics_page()

    def smallest():
        found = {}
        for line in page.splitlines():
            if line and line[0] != "#":
                name, _, value = line.rpartition(" ")
                found[name] = float(value)
        return found

    assert len(measure_speculative.parse_metrics(page)) == len(smallest())
    ours, plain = cpu_seconds(
        (lambda: measure_speculative.parse_metrics(page), smallest), 3 if quick else 10
    )
    print(
        "metrics page of %.2f MB: parsed in %.0f ms, ratio to splitting its lines %.1f"
        % (
            len(page) / 1e6,
            1000 * statistics.median(ours),
            statistics.median(a / b for a, b in zip(ours, plain)),
        )
    )


PEAK = """
import pathlib, sys
import measure_speculative
code = measure_speculative.main(sys.argv[1:])
status = pathlib.Path("/proc/self/status")
if status.exists():
    peak = int(status.read_text().split("VmHWM:")[1].split()[0]) * 1024
else:
    import resource
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
print(code, peak)
"""


def peak_bytes(root, prompts, environment):
    with tempfile.TemporaryDirectory() as folder, stub() as other:
        path = pathlib.Path(folder) / "prompts.jsonl"
        path.write_text(
            "".join(
                json.dumps({"prompt": "Question %d: %s" % (n, "why is the sky blue? " * 10)}) + "\n"
                for n in range(prompts)
            )
        )
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                PEAK,
                "--baseline-url",
                root,
                "--speculative-url",
                other,
                "--max-tokens",
                "192",
                "--prompts",
                str(path),
                "--quiet",
            ],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            check=True,
            text=True,
        )
    code, peak = map(int, done.stdout.split()[-2:])
    assert code == 0, code
    return peak


def bench_memory(root, bounds, quick):
    sizes = (100, 600) if quick else (500, 5000)
    environment = dict(os.environ, PYTHONPATH=str(PROGRAM.parent))
    few, many = (peak_bytes(root, prompts, environment) / 1e6 for prompts in sizes)
    each = (many - few) / (sizes[1] - sizes[0])
    print(
        "peak memory: %d prompts %.0f MB, %d prompts %.0f MB, so %.1f kB a prompt"
        % (sizes[0], few, sizes[1], many, 1000 * each)
    )
    bounds.most(
        "peak memory for 5,000 prompts x 192 tokens, MB", many + each * (5000 - sizes[1]), 120
    )


def main(argv):
    if argv == ["--stub"]:
        serve()
    quick, bounds = "--quick" in argv, Bounds()
    with stub() as root:
        for bench in (bench_cpu, bench_clock, bench_levels, bench_memory):
            bench(root, bounds, quick)
    bench_start(bounds, quick)
    bench_metrics(bounds, quick)
    return bounds.exit_code()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
