"""Fake servers for the tests: one that plays every engine, and one that replays recorded answers.

    from tests.fakes import FakeServer, ReplayServer, Speculation, CASES, ENGINES

    with FakeServer("llama.cpp") as plain, FakeServer("vllm", speculation=Speculation(4, (4, 2, 0))) as drafting:
        ...                              # plain.url is "http://127.0.0.1:PORT/v1", plain.root the same without /v1
        drafting.truth.accepted          # Counts of all answers: requests, tokens, steps, drafted, accepted,
                                         # per_position (counts), rate, mean_length, plain_steps, ...
        drafting.given[1:]               # Counts of each answer, in order (given[0] is the warm-up, if there is one)
        sum_counts(drafting.given[1:])   # their sum; two Counts can also be added and subtracted
        plain.requests                   # [{"method", "path", "headers", "body", "at"}], headers in lower case,
                                         # body parsed, "at" a perf_counter() that orders requests across servers
        plain.chats                      # the chat requests among them

**Text.** A token is a word with the white space before it, so "one two three" is 3 tokens. `answers` is a
callable(prompt, n) where n counts from 0 how often that prompt was asked, or {prompt: text, or list of texts of which
the last repeats}; a prompt that is not in it, and None, give 32 words made from the prompt (`words=N` for another
number). In place of a text, {"reasoning": text, "content": text} makes the model think first. max_tokens cuts the
answer (finish_reason "length", else "stop"). An empty answer counts as one token, the end token.

**Speculation(chain, accepted)**: after the first token, which the prompt pass gives, each verification step drafts
`chain` tokens, accepts the next number of the pattern `accepted` (cycled, from its start in every answer) and adds
one token of its own; None in the pattern is a step without a draft. The last draft of an answer is cut to what is left
minus one, and a step that has room for no draft is plain, so that in every answer
    tokens = 1 + sum(accepted + 1 over verification steps) + plain steps.
sglang, lmdeploy and tgi count whole chains (drafted = chain x steps, no plain step at the end). `only_with="FIELD"`
drafts only for requests in which that field is true; `step_cost=1.5` makes a verification step sleep 1.5 times as long.

**Time.** Nothing sleeps unless asked: `first_delay_s` before the first token, `token_delay_s` in every step of the
target. Server timings (llama.cpp and kin, lm-studio) are clock readings; `claimed_step_s=0.01` makes them exactly
10 ms a step instead, without sleeping. `slots=1` serves one chat request at a time, the others count as waiting.

**Other options.** `model`, or several `models`; `check_model=True` answers 404 to a name that is not served;
`build`, `context`; `api_key` (401 without it, also for the metrics where the engine guards them);
`metrics=False` (501 or 404), `metrics=503` (that status); `usage=False` leaves usage out; `details=False` leaves out
all response fields about drafting and timing; `cached` = a number or callable(prompt, n): cached prompt tokens;
`strict=True` refuses unknown request fields (tensorrt-llm does so anyway); `reject={"seed": "no seed here"}`: 400 with
that message if the field is there; `gaps={7: (" other", 0.125)}` (or a callable(prompt) giving that): with logprobs
asked, token 7 is preferred to " other" by 0.125 nats (a negative gap: " other" is preferred), elsewhere the runner-up
is 5 nats away; `foreign=N`: with every answer N tokens of another client reach the counters;
`busy=(running, waiting)` is added to the gauges; `lag_reads=N`: N reads after an answer still show the old values;
`lag_s=S`: an answer is counted S seconds after it was sent, by `clock` (a callable; time.monotonic);
`counted_before=Counts(tokens=..., histogram=[...], drafts=[...])`: where the counters start;
`pages={"/props": {...}}`: other answers to GET: a JSON value, a text, or (status, content type, bytes).
Methods: `.generate(tokens)` adds foreign traffic, `.restart()` is a new process (counters at 0, new start time). All
options are attributes too and may be changed while the server runs.

**Faults.** `faults=["503", None, "stall"]`: the n-th chat request meets the n-th; after the list all is well, or with
`repeat_fault=True` the last one goes on. `page_faults={"/metrics": ["hang"]}`: the same for GET.
    "refuse"           closed without a byte     "hang"              no answer at all
    "stall"            half an answer, silence   "close-mid-body"    half an answer, closed inside an event
    "html"             200, a web page           "half-json"         200, JSON cut in the middle
    "huge-body"        300 MB on one line, made while sent (`.huge_sent`: bytes that went out)
    "error-in-stream"  half an answer, then an error event (500 if not streamed)
    "no-finish"        whole text and a clean end, but no finish_reason (streamed: nor usage, nor [DONE])
    "no-done"          all but [DONE]            "empty"             no text, one token
    "bad-utf8"         a byte 0xff in the text   "dribble-headers"   headers that never end, a byte at a time
    "redirect"         307 to `redirect_to` (default: /elsewhere here)
    "echo-key-error"   400 that quotes the Authorization header
    "503", "429", ...  any status, with an OpenAI error; with "-retry-after" it says `retry_after_s` (default 0)
A stream that a fault cuts short is not counted in truth and counters; whatever was generated to its end is.

    with ReplayServer("routes.json", CASES / "D05") as server: ...    # raw .http files, see ReplayServer
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
import re
import select
import socket
import socketserver
import struct
import sys
import threading
import time
import urllib.parse
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_STARTS = itertools.count()  # seconds between the starts of the servers played

DATA = pathlib.Path(__file__).resolve().parent / "data"
CASES = DATA / "cases"
PAGES = DATA / "pages"
HUGE_BYTES = 300_000_000


# ---- what is generated, and the count of it ----


@dataclass(frozen=True)
class Speculation:
    chain: int = 4
    accepted: tuple = (
        4,
        2,
        0,
    )  # accepted tokens of each verification step, cycled; None: a step without a draft
    only_with: str = ""  # draft only for requests in which this field is true
    step_cost: float = 1.0  # duration of a verification step, in plain steps


@dataclass
class Counts:
    """What was generated. histogram[j] = verification steps that accepted j tokens, drafts[j] = that drafted j."""

    requests: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    plain_steps: int = 0  # steps of the target without a draft, prompt pass not included
    mismatched: int = 0  # verification steps that ended in a rejection
    streamed_tokens: int = 0
    ended_by_length: int = 0
    prompt_s: float = 0.0
    decode_s: float = 0.0
    histogram: list = field(default_factory=list)
    drafts: list = field(default_factory=list)

    steps = property(lambda self: sum(self.histogram))
    accepted = property(lambda self: sum(j * n for j, n in enumerate(self.histogram)))
    drafted = property(lambda self: sum(j * n for j, n in enumerate(self.drafts)))
    per_position = property(lambda self: at_least(self.histogram))
    drafted_per_position = property(lambda self: at_least(self.drafts))
    rate = property(lambda self: self.accepted / self.drafted if self.drafted else None)
    mean_length = property(lambda self: 1 + self.accepted / self.steps if self.steps else None)

    def _plus(self, other, sign):
        def plus(a, b):
            if isinstance(a, list):
                return [x + sign * y for x, y in itertools.zip_longest(a, b, fillvalue=0)]
            return a + sign * b

        return Counts(
            **{
                f.name: plus(getattr(self, f.name), getattr(other, f.name))
                for f in dataclasses.fields(self)
            }
        )

    def __add__(self, other):
        return self._plus(other, 1)

    def __sub__(self, other):
        return self._plus(other, -1)


def at_least(histogram):
    """[how often 1 or more, how often 2 or more, ...]"""
    return [sum(histogram[i:]) for i in range(1, len(histogram))]


def no_counts(speculation):
    lengths = speculation.chain + 1 if speculation else 0
    return Counts(histogram=[0] * lengths, drafts=[0] * lengths)


def sum_counts(counts):
    return sum(counts, Counts())


@dataclass(frozen=True)
class Step:
    tokens: list  # [(field, text), ...], field is "content" or "reasoning"
    drafted: int = 0
    accepted: int = 0


def split_tokens(text):
    return re.findall(r"\s*\S+(?:\s+\Z)?", text) or ([text] if text else [])


def split_steps(tokens, speculation, whole_chains=False):
    """The steps that produce these tokens; the first is the prompt pass."""
    steps, left = [Step(tokens[:1])], tokens[1:]
    pattern = itertools.cycle(speculation.accepted if speculation else (None,))
    while left:
        wanted, drafted = next(pattern), 0
        if wanted is not None:
            drafted = speculation.chain if whole_chains else min(speculation.chain, len(left) - 1)
        accepted = min(wanted or 0, drafted, len(left) - 1)
        steps.append(Step(left[: accepted + 1], drafted, accepted))
        left = left[accepted + 1 :]
    return steps


def count_steps(steps, speculation, **more):
    counts = no_counts(speculation) + Counts(
        requests=1, tokens=max(1, sum(len(s.tokens) for s in steps)), **more
    )
    for step in steps[1:]:
        if step.drafted:
            counts.histogram[step.accepted] += 1
            counts.drafts[step.drafted] += 1
            counts.mismatched += step.accepted < step.drafted
        else:
            counts.plain_steps += 1
    return counts


def default_answer(prompt, words):
    digest = hashlib.sha256(prompt.encode("utf-8", "surrogatepass")).hexdigest()
    return " ".join("word%s%d" % (digest[i % 60 : i % 60 + 3], i) for i in range(words))


# ---- metrics pages: an engine's function gives [(family, type, [(suffix, labels, value), ...]), ...] ----


def python_number(value):
    """A value as Python's Prometheus client writes it."""
    text = repr(float(value))
    whole, _, decimals = text.partition(".")
    if "e" in text or len(whole) <= 6:
        return text
    digits = (whole + decimals).rstrip("0")
    return "%s%se+%02d" % (digits[0], "." + digits[1:] if digits[1:] else "", len(whole) - 1)


def llama_number(value):
    """Counters go through a double with 6 significant digits; per-position counts (str here) are exact."""
    return value if isinstance(value, str) else "%g" % value


def render(families, number):
    lines = []
    for name, kind, samples in families:
        lines += [
            "# HELP %s Fake %s." % (name, name.replace("_", " ")),
            "# TYPE %s %s" % (name, kind),
        ]
        for suffix, labels, value in samples:
            inside = ",".join(
                '%s="%s"' % (k, v.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n"))
                for k, v in labels.items()
            )
            lines.append(
                "%s%s%s %s" % (name, suffix, "{%s}" % inside if inside else "", number(value))
            )
    return "\n".join(lines) + "\n"


def counter(name, labels, value, created=None):
    families = [(name + "_total", "counter", [("", labels, value)])]
    return families + ([(name + "_created", "gauge", [("", labels, created)])] if created else [])


def gauge(name, labels, value):
    return [(name, "gauge", [("", labels, value)])]


def spec_families(prefix, labels, c, created):
    """The four counters that vLLM brought and LMDeploy took over."""
    position = [dict(labels, position=str(i)) for i in range(len(c.per_position))]
    name = prefix + ":spec_decode_num_accepted_tokens_per_pos"
    return (
        counter(prefix + ":spec_decode_num_drafts", labels, c.steps, created)
        + counter(prefix + ":spec_decode_num_draft_tokens", labels, c.drafted, created)
        + counter(prefix + ":spec_decode_num_accepted_tokens", labels, c.accepted, created)
        + [
            (name + "_total", "counter", [("", p, n) for p, n in zip(position, c.per_position)]),
            (name + "_created", "gauge", [("", p, created) for p in position]),
        ]
    )


def page_llama(server, c, spec_counters=True):
    families = (
        counter("llamacpp:prompt_tokens", {}, c.prompt_tokens)
        + counter("llamacpp:prompt_seconds", {}, c.prompt_s)
        + counter("llamacpp:tokens_predicted", {}, c.tokens)
        + counter("llamacpp:tokens_predicted_seconds", {}, c.decode_s)
        + counter("llamacpp:n_decode", {}, c.requests + c.steps + c.plain_steps)
        + [("llamacpp:n_tokens_max", "counter", [("", {}, 64)])]
        + gauge("llamacpp:predicted_tokens_seconds", {}, 0)
        + gauge("llamacpp:requests_processing", {}, server.running)
        + gauge("llamacpp:requests_deferred", {}, server.waiting)
    )
    if spec_counters:
        families += (
            counter("llamacpp:spec_decode_num_draft_tokens", {}, c.drafted)
            + counter("llamacpp:spec_decode_num_accepted_tokens", {}, c.accepted)
            + counter("llamacpp:spec_decode_num_drafts", {}, c.steps)
        )
        if c.drafted:
            families.append(
                (
                    "llamacpp:spec_decode_num_accepted_tokens_per_pos_total",
                    "counter",
                    [("", {"position": str(i)}, str(n)) for i, n in enumerate(c.per_position)],
                )
            )
    return families


def page_ik_llama(server, c):
    return page_llama(server, c, spec_counters=False)


def page_vllm(server, c):
    labels, created = {"engine": "0", "model_name": server.models[0]}, server.started
    reason = [
        dict(engine="0", finished_reason=r, model_name=server.models[0]) for r in ("stop", "length")
    ]
    passes = c.requests + c.steps + c.plain_steps
    return (
        gauge("process_start_time_seconds", {}, server.started)
        + (spec_families("vllm", labels, c, created) if server.speculation else [])
        + gauge("vllm:num_requests_running", labels, server.running)
        + gauge("vllm:num_requests_waiting", labels, server.waiting)
        + counter("vllm:prompt_tokens", labels, c.prompt_tokens, created)
        + counter("vllm:generation_tokens", labels, c.tokens, created)
        + [
            (
                "vllm:request_success_total",
                "counter",
                [
                    ("", reason[0], c.requests - c.ended_by_length),
                    ("", reason[1], c.ended_by_length),
                ],
            ),
            (
                "vllm:iteration_tokens_total",
                "histogram",
                [
                    ("_bucket", dict(engine="0", le="8.0", model_name=server.models[0]), passes),
                    ("_bucket", dict(engine="0", le="+Inf", model_name=server.models[0]), passes),
                    ("_count", labels, passes),
                    ("_sum", labels, c.prompt_tokens + c.tokens),
                ],
            ),
            ("vllm:iteration_tokens_total_created", "gauge", [("", labels, created)]),
        ]
    )


def page_vllm_old(server, c):
    labels = {"model_name": server.models[0]}
    families = (
        gauge("vllm:num_requests_running", labels, server.running)
        + gauge("vllm:num_requests_waiting", labels, server.waiting)
        + counter("vllm:generation_tokens", labels, c.tokens)
    )
    if server.speculation:
        families += (
            gauge("vllm:spec_decode_draft_acceptance_rate", labels, c.rate or 0)
            + gauge("vllm:spec_decode_efficiency", labels, 0.55)
            + counter("vllm:spec_decode_num_accepted_tokens", labels, c.accepted)
            + counter("vllm:spec_decode_num_draft_tokens", labels, c.drafted)
            + counter("vllm:spec_decode_num_emitted_tokens", labels, c.accepted + c.steps)
        )
    return families


def page_sglang(server, c):
    labels = {"engine_type": "unified", "model_name": server.models[0]}
    streaming = {
        flag: dict(engine_type="unified", is_streaming=flag, model_name=server.models[0])
        for flag in ("true", "false")
    }
    families = (
        gauge("sglang:num_running_reqs", labels, server.running)
        + gauge("sglang:num_queue_reqs", labels, server.waiting)
        + [
            (
                "sglang:generation_tokens_total",
                "counter",
                [
                    ("", streaming["true"], c.streamed_tokens),
                    ("", streaming["false"], c.tokens - c.streamed_tokens),
                ],
            )
        ]
    )
    if server.speculation:
        families += (
            counter("sglang:spec_verify_calls", labels, c.steps)
            + gauge("sglang:spec_accept_length", dict(labels, tp_rank="0"), c.mean_length or 0)
            + gauge("sglang:spec_accept_rate", dict(labels, tp_rank="0"), c.rate or 0)
        )
    return families


def page_tensorrt(server, c):
    labels = {"engine_type": "undefined", "model_name": "undefined"}
    families = (
        gauge("trtllm_num_requests_running", labels, server.running)
        + gauge("trtllm_num_requests_waiting", labels, server.waiting)
        + counter("trtllm_request_success", labels, c.requests)
        + counter("trtllm_generation_tokens", labels, c.tokens)
    )
    if server.speculation:
        positions = [dict(labels, token_position=str(i)) for i in range(len(c.per_position))]
        families += (
            counter("trtllm_spec_decode_num_draft_tokens", labels, c.drafted)
            + counter("trtllm_spec_decode_num_accepted_tokens", labels, c.accepted)
            + [
                (
                    "trtllm_spec_decode_drafted_tokens_total",
                    "counter",
                    [("", p, n) for p, n in zip(positions, c.drafted_per_position)],
                ),
                (
                    "trtllm_spec_decode_accepted_tokens_total",
                    "counter",
                    [("", p, n) for p, n in zip(positions, c.per_position)],
                ),
            ]
            + gauge("trtllm_spec_decode_acceptance_length", labels, c.mean_length or 0)
        )
    return families


def page_lmdeploy(server, c):
    labels = {"engine": "0", "model_name": server.models[0]}
    families = (
        gauge("process_start_time_seconds", {}, server.started)
        + gauge("lmdeploy:num_requests_running", labels, server.running)
        + gauge("lmdeploy:num_requests_waiting", labels, server.waiting)
        + counter("lmdeploy:prompt_tokens", labels, c.prompt_tokens, server.started)
        + counter("lmdeploy:generation_tokens", labels, c.tokens, server.started)
    )
    if server.speculation:
        families += (
            spec_families("lmdeploy", labels, c, server.started)
            + gauge("lmdeploy:spec_decode_mean_accept_rate", labels, c.rate or 0)
            + gauge("lmdeploy:spec_decode_mean_accept_length", labels, c.mean_length or 0)
        )
    return families


def page_tgi(server, c):
    """tgi_request_skipped_tokens records (tokens - 1) of every pass, the prompt pass included."""
    skipped = [
        n + (c.requests + c.plain_steps if j == 0 else 0) for j, n in enumerate(c.histogram or [0])
    ]
    le = [("_bucket", {"le": str(j)}, sum(skipped[: j + 1])) for j in range(len(skipped))]
    return (
        gauge("tgi_batch_current_size", {}, server.running)
        + gauge("tgi_queue_size", {}, server.waiting)
        + [
            ("tgi_request_success", "counter", [("", {}, c.requests)]),
            (
                "tgi_request_generated_tokens",
                "histogram",
                [
                    ("_bucket", {"le": "+Inf"}, c.requests),
                    ("_sum", {}, c.tokens),
                    ("_count", {}, c.requests),
                ],
            ),
            (
                "tgi_request_skipped_tokens",
                "histogram",
                le
                + [
                    ("_bucket", {"le": "+Inf"}, sum(skipped)),
                    ("_sum", {}, c.accepted),
                    ("_count", {}, sum(skipped)),
                ],
            ),
        ]
    )


# ---- what engines add to an answer: functions of the Answer `a` and its Counts `c` so far ----


def timings(a, c):
    first_s, decode_s = a.clock()
    out = {
        "cache_n": a.cached,
        "prompt_n": a.prompt_tokens - a.cached,
        "prompt_ms": first_s * 1000,
        "predicted_n": c.tokens,
        "predicted_ms": decode_s * 1000,
        "predicted_per_second": (c.tokens - 1) / decode_s if decode_s else 0.0,
    }
    if c.drafted:
        out.update(draft_n=c.drafted, draft_n_accepted=c.accepted)
        if a.server.engine == "mlx-vlm":
            out.update(draft_kind="dflash", draft_rounds=c.steps)
    if a.server.engine == "ik_llama.cpp":
        out.update(n_ctx=a.server.context, n_past=a.prompt_tokens + c.tokens)
    return {"timings": out}


def vllm_metrics(a, c):
    if not a.speculation:
        return {}
    return {
        "metrics": {
            "speculative_decoding": {
                "mean_acceptance_length": c.mean_length,
                "draft_acceptance_rate": c.rate,
                "acceptance_histogram": c.histogram,
                "num_spec_steps": c.steps,
                "num_accepted_draft_tokens": c.accepted,
                "num_draft_tokens": c.drafted,
                "num_spec_tokens": a.speculation.chain,
            }
        }
    }


def sglang_extension(a, c):
    if not a.speculation or not a.body.get("return_spec_tokens_details"):
        return {}
    return {
        "sglext": {
            "spec_tokens_details": {
                "spec_accept_rate": c.rate,
                "spec_accept_length": c.tokens / c.steps if c.steps else None,
                "spec_num_correct_drafts": c.accepted,
                "spec_num_proposed_drafts": c.drafted,
                "spec_verify_ct": c.steps,
                "spec_correct_drafts_histogram": c.histogram,
            }
        }
    }


def tensorrt_choice(a, c):
    out = {"avg_decoded_tokens_per_iter": c.tokens / (1 + c.steps + c.plain_steps)}
    if a.speculation:
        out["speculative_decoding"] = {
            "acceptance_rate": c.rate,
            "total_accepted_draft_tokens": c.accepted,
            "total_draft_tokens": c.drafted,
            "num_spec_steps": c.steps,
            "acceptance_histogram": c.histogram,
            "num_spec_tokens": a.speculation.chain,
        }
    return out


def lm_studio_stats(a, c):
    first_s, decode_s = a.clock()
    out = {
        "tokens_per_second": (c.tokens - 1) / decode_s if decode_s else 0.0,
        "time_to_first_token": first_s,
        "generation_time": first_s + decode_s,
        "stop_reason": {"length": "maxPredictedTokensReached"}.get(a.finish, "eosFound"),
    }
    if a.speculation:  # what was cut off the last chain was drafted and never verified
        total = a.speculation.chain * c.steps
        out.update(
            draft_model=a.body.get("draft_model") or "draft",
            total_draft_tokens_count=total,
            accepted_draft_tokens_count=c.accepted,
            rejected_draft_tokens_count=c.drafted - c.accepted,
            ignored_draft_tokens_count=total - c.drafted,
        )
    return {"stats": out}


def tabby_usage(a, c):
    if not a.speculation:
        return {}
    return {
        "completion_tokens_details": {
            "accepted_prediction_tokens": c.accepted,
            "rejected_prediction_tokens": c.drafted - c.accepted,
        }
    }


def nothing(a, c):
    return {}


@dataclass(frozen=True)
class Engine:
    build: str = "1.0"
    server: str = "uvicorn"  # the Server header; "" for none
    owned_by: str = ""
    reasoning: tuple = ("reasoning_content",)
    chunk_per_step: bool = False  # one chunk holds all tokens of a step; else one chunk a token
    finish_alone: bool = True  # finish_reason on a chunk of its own
    usage_every_chunk: bool = False
    usage_chunk_has_choices: bool = False
    whole_chains: bool = False  # drafted tokens are counted as chain x steps
    fakes_logprobs: bool = False  # verified tokens get logprob 0.0 and an empty list
    check_model: bool = False
    strict: bool = False
    page: object = None  # the metrics families, a function of (server, counts)
    page_path: str = "/metrics"
    number: object = python_number
    open_paths: str = "/health"  # regular expression: what needs no API key
    fingerprint: str = ""  # system_fingerprint, with the build as %s
    top: object = nothing  # fields beside "choices"
    choice: object = nothing  # fields inside the choice
    usage: object = nothing  # fields inside usage
    own_chunk: bool = False  # the `top` fields have a chunk of their own, before the usage chunk


ENGINES = {
    "llama.cpp": Engine(
        "b11434-1a2b3c4d",
        "llama.cpp",
        "llamacpp",
        page=page_llama,
        number=llama_number,
        fakes_logprobs=True,
        fingerprint="%s",
        top=timings,
    ),
    "ik_llama.cpp": Engine(
        "4321",
        "llama.cpp",
        "llamacpp",
        page=page_ik_llama,
        number=llama_number,
        usage_every_chunk=True,
        top=timings,
    ),
    "mlx-vlm": Engine("0.5.0", top=timings),
    "mlx-lm": Engine(
        "0.32.2",
        "BaseHTTP/0.6 Python/3.12.4",
        reasoning=("reasoning",),
        fingerprint="%s-0.31.0-macOS-15.5-arm64-applegpu_g14s",
    ),
    "vllm": Engine(
        "0.33.0",
        owned_by="vllm",
        reasoning=("reasoning",),
        chunk_per_step=True,
        finish_alone=False,
        check_model=True,
        page=page_vllm,
        open_paths="/(?!v1)",
        fingerprint="vllm-%s-0a1b2c3d",
        top=vllm_metrics,
    ),
    "vllm-old": Engine(
        "0.6.3",
        owned_by="vllm",
        chunk_per_step=True,
        finish_alone=False,
        check_model=True,
        page=page_vllm_old,
        open_paths="/(?!v1)",
    ),
    "sglang": Engine(
        "0.5.23",
        owned_by="sglang",
        chunk_per_step=True,
        whole_chains=True,
        page=page_sglang,
        open_paths="/metrics|/health",
        top=sglang_extension,
        own_chunk=True,
    ),
    "tensorrt-llm": Engine(
        "1.3.0",
        owned_by="tensorrt_llm",
        reasoning=("reasoning_content", "reasoning"),
        chunk_per_step=True,
        finish_alone=False,
        strict=True,
        page=page_tensorrt,
        page_path="/prometheus/metrics",
        choice=tensorrt_choice,
    ),
    "lmdeploy": Engine(
        "0.18.0",
        owned_by="lmdeploy",
        chunk_per_step=True,
        whole_chains=True,
        check_model=True,
        page=page_lmdeploy,
    ),
    "tgi": Engine(
        "3.3.4",
        "",
        whole_chains=True,
        page=page_tgi,
        number=lambda v: "%.15g" % v,
        fingerprint="%s-native",
    ),
    "lm-studio": Engine("0.4.2", "", "organization_owner", top=lm_studio_stats),
    "tabbyapi": Engine(
        "1.6.5", owned_by="tabbyAPI", usage_chunk_has_choices=True, usage=tabby_usage
    ),
    "koboldcpp": Engine("1.97.4", "ConcedoLlamaForKoboldServer", "koboldcpp"),
    "ollama": Engine(
        "0.14.1", "", "library", reasoning=("reasoning",), check_model=True, fingerprint="fp_ollama"
    ),
    "plain": Engine("", ""),
}

KNOWN_FIELDS = set(
    """model messages max_tokens max_completion_tokens temperature top_p seed stream stream_options stop
    n logprobs top_logprobs frequency_penalty presence_penalty logit_bias user response_format tools tool_choice
    ignore_eos min_tokens top_k min_p chat_template_kwargs""".split()
)


def engine_pages(server):
    """The engine's side pages: {path: value of `pages`}."""
    build, model, name = server.build, server.models[0], server.engine
    c, context = server.shown(), server.context
    pages = {"/health": "" if name.startswith("vllm") else {"status": "ok"}}
    if name in ("llama.cpp", "ik_llama.cpp"):
        pages["/props"] = {
            "default_generation_settings": {
                "n_ctx": context,
                "params": {"speculative.types": "none"},
            },
            "total_slots": 1,
            "model_alias": model,
            "model_path": "models/%s.gguf" % model,
        }
        if name == "llama.cpp":
            pages["/props"]["build_info"] = build
            pages["/slots"] = [
                {
                    "id": 0,
                    "n_ctx": context,
                    "speculative": bool(server.speculation),
                    "is_processing": server.running > 0,
                }
            ]
    elif name in ("vllm", "vllm-old", "tensorrt-llm"):
        pages["/version"] = {"version": build}
        if name == "tensorrt-llm":
            pages["/metrics"] = server.drain_iterations
    elif name == "sglang":
        pages["/"] = "SGLang is running"
        pages["/server_info"] = pages["/get_server_info"] = {
            "version": build,
            "model_path": model,
            "context_length": context,
            "internal_states": [{"avg_spec_accept_length": c.mean_length}]
            if server.speculation
            else [{}],
        }
    elif name == "tgi":
        pages["/info"] = {"model_id": model, "version": build, "max_total_tokens": context}
    elif name == "ollama":
        pages.update({"/": "Ollama is running", "/api/version": {"version": build}})
    elif name == "koboldcpp":
        last = server.given[-1] if server.given else Counts()
        pages["/api/extra/version"] = {"result": "KoboldCpp", "version": build}
        pages["/api/extra/perf"] = {
            "last_token_count": last.tokens,
            "last_draft_success": last.accepted,
            "last_draft_failed": last.mismatched,
            "total_gens": c.requests,
            "queue": server.waiting,
            "idle": int(not server.running),
        }
    return pages


def models_page(server):
    entries = []
    for model in server.models:
        entry = {"id": model, "object": "model", "created": 1795988116}
        if server.kind.owned_by or server.engine == "tgi":
            entry["owned_by"] = server.kind.owned_by or model
        if server.engine in ("vllm", "vllm-old", "sglang"):
            entry.update(root=model, max_model_len=server.context)
        elif server.engine == "llama.cpp":
            entry["meta"] = {
                "vocab_type": 2,
                "n_vocab": 49152,
                "n_ctx": server.context,
                "n_ctx_train": 8192,
                "n_embd": 576,
                "n_params": 134515008,
                "size": 89000000,
            }
        entries.append(entry)
    return {"object": "list", "data": entries}


# ---- one answer ----


class Answer:
    """The answer to one chat request: its steps, and the JSON that an engine makes of them."""

    def __init__(self, server, body, fault):
        self.server, self.kind, self.body = server, server.kind, body
        self.prompt = "\n".join(text_of(message) for message in body.get("messages") or [])
        with server.lock:
            nth = server.asked[self.prompt] = server.asked.get(self.prompt, -1) + 1
        answer = "" if fault == "empty" else server.text_for(self.prompt, nth)
        parts = answer if isinstance(answer, dict) else {"content": answer}
        tokens = [
            (key, token)
            for key in ("reasoning", "content")
            for token in split_tokens(parts.get(key) or "")
        ]
        limit = body.get("max_tokens") or body.get("max_completion_tokens") or len(tokens) + 1
        self.finish = "length" if limit <= len(tokens) else "stop"
        speculation = server.speculation
        self.speculation = (
            speculation
            if speculation and (not speculation.only_with or body.get(speculation.only_with))
            else None
        )
        self.steps = split_steps(tokens[:limit], self.speculation, self.kind.whole_chains)
        self.prompt_tokens = max(1, len(self.prompt.split()))
        self.cached = server.cached(self.prompt, nth) if callable(server.cached) else server.cached
        self.started = self.first_at = self.last_at = 0.0
        self.done_steps = 0
        self.envelope = {
            "id": "chatcmpl-%d" % (len(server.given) + 1),
            "created": 1795988107,
            "model": body.get("model") or server.models[0],
        }
        if self.kind.fingerprint:
            self.envelope["system_fingerprint"] = self.kind.fingerprint.replace("%s", server.build)

    def run(self):
        """Generate: yields each step once its time is over; after the last one the server has counted it all."""
        self.started = time.perf_counter()
        for number, step in enumerate(self.steps):
            delay = self.server.token_delay_s * (
                self.speculation.step_cost if step.drafted else 1.0
            )
            self.server.sleep(delay if number else self.server.first_delay_s + delay)
            self.last_at = time.perf_counter()
            if not number:
                self.first_at = self.last_at
            self.done_steps = number + 1
            if self.done_steps == len(self.steps):
                self.server.count(self, self.counts())
            yield step

    def counts(self):
        first_s, decode_s = self.clock()
        done = self.steps[: self.done_steps]
        counts = count_steps(
            done,
            self.speculation,
            prompt_tokens=self.prompt_tokens,
            prompt_s=first_s,
            decode_s=decode_s,
            ended_by_length=int(self.finish == "length"),
        )
        counts.streamed_tokens = counts.tokens if self.body.get("stream") else 0
        return counts

    def clock(self):
        """(seconds to the first token, seconds from the first to the last), measured or claimed."""
        claimed = self.server.claimed_step_s
        if claimed is None:
            return self.first_at - self.started, self.last_at - self.first_at
        done = self.steps[1 : self.done_steps]
        return claimed, claimed * sum(
            self.speculation.step_cost if s.drafted else 1.0 for s in done
        )

    def added(self, which):
        return which(self, self.counts()) if self.server.details else {}

    def usage(self, tokens=None):
        tokens = tokens or self.counts().tokens
        return dict(
            {
                "prompt_tokens": self.prompt_tokens,
                "completion_tokens": tokens,
                "total_tokens": self.prompt_tokens + tokens,
                "prompt_tokens_details": {"cached_tokens": self.cached},
            },
            **self.added(self.kind.usage),
        )

    def text_fields(self, tokens):
        """{"content": ...} and the engine's name or names for the reasoning."""
        out = {}
        for key, token in tokens:
            for name in self.kind.reasoning if key == "reasoning" else ("content",):
                out[name] = out.get(name, "") + token
        return out

    def logprobs(self, first, tokens, verified):
        """None, or the logprobs of these tokens, the first of which has index `first` in the answer."""
        if not self.body.get("logprobs"):
            return None
        gaps = (
            self.server.gaps(self.prompt) if callable(self.server.gaps) else self.server.gaps or {}
        )
        listed = self.body.get("top_logprobs") or 0
        content = []
        for index, (_, token) in enumerate(tokens, first):
            if verified and self.kind.fakes_logprobs:
                content.append(dict(logprob_entry(token, 0.0), top_logprobs=[]))
                continue
            other, gap = gaps.get(index, (" instead", 5.0))
            top = [(token, -2.25), (other, -2.25 - gap)] + [
                (" never%d" % i, -12.0 - i) for i in range(listed)
            ]
            top = sorted(top, key=lambda pair: -pair[1])[:listed]
            content.append(
                dict(
                    logprob_entry(token, -2.25), top_logprobs=[logprob_entry(*pair) for pair in top]
                )
            )
        return {"content": content}

    def plain(self):
        """The whole answer as one JSON object."""
        logprobs, index = [], 0
        for number, step in enumerate(self.run()):
            logprobs += (
                self.logprobs(index, step.tokens, number > 0 and step.drafted) or {"content": []}
            )["content"]
            index += len(step.tokens)
        message = dict(
            {"role": "assistant", "content": None},
            **self.text_fields([token for step in self.steps for token in step.tokens]),
        )
        if not index:
            message["content"] = ""
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": self.finish,
            "logprobs": {"content": logprobs} if self.body.get("logprobs") else None,
        }
        choice.update(self.added(self.kind.choice))
        out = dict(self.envelope, object="chat.completion", choices=[choice])
        if self.server.usage:
            out["usage"] = self.usage()
        return dict(out, **self.added(self.kind.top))

    def chunk(self, choices, **more):
        return dict(self.envelope, object="chat.completion.chunk", choices=choices, **more)

    def text_chunks(self):
        """The chunks that hold text; where the engine says so, the last one holds the finish_reason."""
        options, index = self.body.get("stream_options") or {}, 0
        usage_each = self.server.usage and (
            self.kind.usage_every_chunk or options.get("continuous_usage_stats")
        )
        for number, step in enumerate(self.run()):
            groups = (
                [step.tokens] if self.kind.chunk_per_step else [[token] for token in step.tokens]
            )
            for tokens in groups:
                choice = {
                    "index": 0,
                    "delta": self.text_fields(tokens),
                    "finish_reason": None,
                    "logprobs": self.logprobs(index, tokens, number > 0 and step.drafted),
                }
                index += len(tokens)
                if self.body.get("return_token_ids"):
                    choice["token_ids"] = [
                        int(hashlib.sha256(t.encode()).hexdigest()[:4], 16) for _, t in tokens
                    ]
                if (
                    not self.kind.finish_alone
                    and self.done_steps == len(self.steps)
                    and tokens is groups[-1]
                ):
                    choice.update(finish_reason=self.finish, **self.added(self.kind.choice))
                more = {"usage": self.usage(index)} if usage_each else {}
                if self.body.get("timings_per_token") and self.kind.top is timings:
                    more.update(self.added(timings))
                yield self.chunk([choice], **more)

    def chunks(self):
        nothing_yet = None if self.kind.server == "llama.cpp" else ""
        yield self.chunk(
            [
                {
                    "index": 0,
                    "delta": {"role": "assistant", "content": nothing_yet},
                    "finish_reason": None,
                }
            ]
        )
        yield from self.text_chunks()
        wants_usage = self.server.usage and bool(
            (self.body.get("stream_options") or {}).get("include_usage")
        )
        top = self.added(self.kind.top)
        finish = {"index": 0, "delta": {}, "finish_reason": self.finish}
        if self.kind.finish_alone:
            finish.update(self.added(self.kind.choice))
            last = not wants_usage and not self.kind.own_chunk
            yield self.chunk([finish], **(top if last else {}))
        if self.kind.own_chunk and top:
            yield self.chunk([], **top)
        if wants_usage:
            yield self.chunk(
                [finish] if self.kind.usage_chunk_has_choices else [],
                usage=self.usage(),
                **({} if self.kind.own_chunk else top),
            )


def logprob_entry(token, logprob):
    return {
        "token": token,
        "logprob": logprob,
        "bytes": list(token.encode("utf-8", "surrogatepass")),
    }


def text_of(message):
    content = message.get("content") or ""
    return (
        content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
    )


def to_json(value):
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(
        "utf-8", "surrogatepass"
    )


# ---- HTTP ----


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *args):
        pass

    def do_GET(self):
        self.answer_request(self.get)

    def do_POST(self):
        self.answer_request(self.post)

    def answer_request(self, respond):
        self.fake = self.server.fake
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            self.body = json.loads(raw) if raw else None
        except ValueError:
            self.body = None
        self.fake.requests.append(
            {
                "method": self.command,
                "path": self.path,
                "body": self.body,
                "headers": {k.lower(): v for k, v in self.headers.items()},
                "at": time.perf_counter(),
            }
        )
        self.bare_path = urllib.parse.urlsplit(self.path).path
        key = self.fake.api_key
        if (
            key
            and self.headers.get("Authorization") != "Bearer " + key
            and not re.match(self.fake.kind.open_paths, self.bare_path)
        ):
            self.error(401, "Invalid API Key")
        else:
            respond()

    def get(self):
        fake, path = self.fake, self.bare_path
        if path not in fake.page_faults or not self.misbehave(
            fake.next_fault(path, fake.page_faults[path])
        ):
            pages = dict(engine_pages(fake), **{"/v1/models": models_page(fake)})
            pages.update(fake.pages)
            if fake.kind.page and path == fake.kind.page_path and path not in fake.pages:
                self.metrics()
            elif self.path in pages or path in pages:
                page = pages.get(self.path, pages.get(path))
                self.send_page(page() if callable(page) else page)
            elif fake.engine == "lm-studio":
                self.send_page({"error": "Unexpected endpoint or method. (GET %s)" % path})
            else:
                self.error(404, "Not Found")

    def metrics(self):
        fake = self.fake
        if fake.metrics is not True:
            status = fake.metrics or (501 if fake.engine == "llama.cpp" else 404)
            return self.error(status, "This server does not support metrics endpoint.")
        text = render(fake.kind.page(fake, fake.read_counters()), fake.kind.number).encode()
        start = (
            {"Process-Start-Time-Unix": str(int(fake.started * 1e6) % 10**12)}
            if fake.engine == "llama.cpp"
            else {}
        )
        self.send(200, "text/plain; version=0.0.4; charset=utf-8", text, start)

    def post(self):
        fake, body = self.fake, self.body
        if self.bare_path != "/v1/chat/completions":
            return self.error(404, "Not Found")
        fault = fake.next_fault("chat", fake.faults)
        if self.misbehave(fault):
            return
        refusal = fake.refusal(body)
        if refusal:
            return self.error(*refusal)
        answer = Answer(fake, body, fault)
        with fake.at_work(answer):
            if body.get("stream"):
                self.stream(answer, fault)
            else:
                self.send_answer(to_json(answer.plain()), fault)

    def send_answer(self, data, fault):
        if fault == "error-in-stream":
            return self.error(500, "the engine failed while it generated")
        if fault == "bad-utf8":
            data = data.replace(b'"content":"', b'"content":"\xff', 1)
        if fault == "no-finish":
            data = re.sub(rb'"(finish_reason)":"\w+"', rb'"\1":null', data)
        half = fault in ("stall", "close-mid-body")
        self.send_head(200, "application/json", {"Content-Length": str(len(data))})
        self.wfile.write(data[: len(data) // 2] if half else data)
        if fault == "stall":
            self.idle()
        self.close_connection = half or self.close_connection

    def stream(self, answer, fault):
        self.send_head(
            200, "text/event-stream", {"Transfer-Encoding": "chunked", "Cache-Control": "no-cache"}
        )
        self.close_connection = True
        chunks = answer.text_chunks() if fault == "no-finish" else answer.chunks()
        if fault in ("stall", "close-mid-body", "error-in-stream"):
            half = answer.steps[: len(answer.steps) // 2]
            chunks = itertools.islice(
                chunks,
                1
                + (
                    len(half)
                    if answer.kind.chunk_per_step
                    else sum(len(step.tokens) for step in half)
                ),
            )
        for number, chunk in enumerate(chunks):
            if fault == "no-finish":
                chunk["choices"][0]["finish_reason"] = None
            data = to_json(chunk)
            if fault == "bad-utf8" and number == 1:
                data = data.replace(b'"content":"', b'"content":"\xff', 1)
            self.event(data)
        if fault == "stall":
            return self.idle()
        if fault == "close-mid-body":
            return self.write_chunk(b'data: {"id":"x","choices":[{"index":0,"del')
        if fault == "error-in-stream":
            self.event(
                to_json({"error": {"message": "the engine failed while it generated", "code": 500}})
            )
        if fault not in ("no-finish", "no-done"):
            self.event(b"[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def event(self, data):
        self.write_chunk(b"data: " + data + b"\n\n")

    def write_chunk(self, data):
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def send_page(self, page):
        if isinstance(page, tuple):
            self.send(*page)
        elif isinstance(page, str):
            self.send(200, "text/plain; charset=utf-8", page.encode())
        else:
            self.send(200, "application/json", to_json(page))

    def send_head(self, status, content_type, headers):
        self.send_response_only(status)
        if self.fake.kind.server:
            self.send_header("Server", self.fake.kind.server)
        for name, value in dict({"Content-Type": content_type}, **headers).items():
            self.send_header(name, value)
        self.end_headers()

    def send(self, status, content_type, data, headers=None):
        self.send_head(
            status, content_type, dict(headers or {}, **{"Content-Length": str(len(data))})
        )
        self.wfile.write(data)

    def error(self, status, message, headers=None):
        body = {"error": {"message": message, "type": "error_%d" % status, "code": status}}
        self.send(status, "application/json", to_json(body), headers)

    def misbehave(self, fault):
        """Do what a fault that replaces the whole answer says; False if this is none of them."""
        if fault == "refuse":
            at_once = struct.pack("hh" if os.name == "nt" else "ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
            self.close_connection = True
        elif fault == "hang":
            self.idle()
        elif fault == "html":
            self.send(200, "text/html", b"<!DOCTYPE html><html><body>It works!</body></html>")
        elif fault == "half-json":
            self.send(200, "application/json", b'{"id":"x","choices":[{"index":0,"mess')
        elif fault == "huge-body":
            self.huge_body()
        elif fault == "dribble-headers":
            self.dribble()
        elif fault == "redirect":
            self.error(
                307, "moved", {"Location": self.fake.redirect_to or self.fake.root + "/elsewhere"}
            )
        elif fault == "echo-key-error":
            self.error(
                400, "cannot read header Authorization: %s" % self.headers.get("Authorization")
            )
        elif fault and fault[:3].isdigit():
            wait = (
                {"Retry-After": str(self.fake.retry_after_s)}
                if fault.endswith("-retry-after")
                else {}
            )
            self.error(
                int(fault[:3]),
                "Loading model" if fault[:3] == "503" else "fault " + fault[:3],
                wait,
            )
        else:
            return False
        return True

    def idle(self):
        """Say nothing until the client or the test has gone."""
        self.close_connection = True
        while not self.fake.stopping.is_set():
            if select.select([self.connection], [], [], 0.02)[0] and not self.connection.recv(4096):
                return

    def huge_body(self):
        streaming = isinstance(self.body, dict) and bool(self.body.get("stream"))
        head = b'{"choices":[{"index":0,"%s":{"content":"' % (b"delta" if streaming else b"message")
        self.send_head(
            200, "text/event-stream" if streaming else "application/json", {"Connection": "close"}
        )
        self.close_connection = True
        self.wfile.write(b"data: " * streaming + head)
        piece = b"x" * 65536
        while self.fake.huge_sent < HUGE_BYTES and not self.fake.stopping.is_set():
            self.wfile.write(piece)
            self.fake.huge_sent += len(piece)

    def dribble(self):
        self.close_connection = True
        self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
        while not self.fake.stopping.wait(0.02):
            self.wfile.write(b"a")


class LoopbackServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def server_bind(self):  # without the name look-up of HTTPServer, which can take seconds
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]

    def handle_error(self, request, client_address):
        if not isinstance(
            sys.exc_info()[1], OSError
        ):  # a client that goes away is part of many tests
            super().handle_error(request, client_address)


class Loopback:
    """What both servers share: a context manager around a server thread on 127.0.0.1."""

    def __init__(self, handler):
        self.requests = []
        self.lock = threading.RLock()
        self.stopping = threading.Event()
        self._http = LoopbackServer(("127.0.0.1", 0), handler)
        self._http.fake = self
        self.port = self._http.server_address[1]
        self.root = "http://127.0.0.1:%d" % self.port
        self.url = self.root + "/v1"

    chats = property(
        lambda self: [r for r in self.requests if r["path"].endswith("/chat/completions")]
    )

    def __enter__(self):
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *exc):
        self.stopping.set()
        self._http.shutdown()
        self._http.server_close()


class FakeServer(Loopback):
    """One engine; see the top of this file for all options."""

    def __init__(
        self,
        engine="vllm",
        *,
        answers=None,
        words=32,
        speculation=None,
        model="fake-model",
        models=None,
        check_model=None,
        build=None,
        context=4096,
        api_key=None,
        metrics=True,
        usage=True,
        details=True,
        cached=0,
        strict=None,
        reject=None,
        gaps=None,
        foreign=0,
        busy=(0, 0),
        lag_reads=0,
        lag_s=0.0,
        clock=time.monotonic,
        counted_before=None,
        pages=None,
        faults=(),
        repeat_fault=False,
        page_faults=None,
        redirect_to=None,
        retry_after_s=0,
        token_delay_s=0.0,
        first_delay_s=0.0,
        claimed_step_s=None,
        slots=None,
    ):
        super().__init__(Handler)
        self.engine, self.kind = engine, ENGINES[engine]
        self.answers, self.words, self.speculation = answers, words, speculation
        self.models = list(models or [model])
        self.check_model = self.kind.check_model if check_model is None else check_model
        self.build = self.kind.build if build is None else build
        self.context, self.api_key = context, api_key
        self.metrics, self.usage, self.details, self.cached = metrics, usage, details, cached
        self.strict = self.kind.strict if strict is None else strict
        self.reject, self.gaps, self.foreign, self.busy = reject or {}, gaps, foreign, busy
        self.lag_reads, self.pages = lag_reads, dict(pages or {})
        self.lag_s, self.clock, self._late = lag_s, clock, []
        self.faults, self.repeat_fault, self.page_faults = (
            list(faults),
            repeat_fault,
            dict(page_faults or {}),
        )
        self.redirect_to, self.retry_after_s = redirect_to, retry_after_s
        self.token_delay_s, self.first_delay_s, self.claimed_step_s = (
            token_delay_s,
            first_delay_s,
            claimed_step_s,
        )
        self.slots = threading.Semaphore(slots) if slots else None
        self.counters = no_counts(speculation) + (
            counted_before or Counts()
        )  # what the page shows, if it lags not
        self.given = []  # Counts of each client answer, in order
        self.asked = {}  # prompt -> how often it was asked, from 0
        self.started = 1795988029.25 + next(
            _STARTS
        )  # of the process, in epoch seconds; no two servers share it
        self.huge_sent = 0
        self._met = {}  # faults met, by where
        self._inside, self._queued = set(), 0
        self._old, self._old_reads, self._drained = None, 0, 0

    truth = property(lambda self: sum_counts(self.given))
    running = property(lambda self: len(self._inside) + self.busy[0])
    waiting = property(lambda self: self._queued + self.busy[1])

    def generate(self, tokens):
        """Traffic of somebody else: one answer of so many tokens, in the counters but not in the truth."""
        steps = split_steps([("content", " x")] * tokens, self.speculation, self.kind.whole_chains)
        with self.lock:
            self.counters += count_steps(steps, self.speculation, prompt_tokens=1)

    def restart(self):
        """A new process: counters at zero, another start time."""
        with self.lock:
            self.counters, self._old, self._old_reads, self._drained = (
                no_counts(self.speculation),
                None,
                0,
                0,
            )
            self.started += 1000

    def text_for(self, prompt, nth):
        answers = self.answers
        if isinstance(answers, dict):
            answer = answers.get(prompt)
            if isinstance(answer, (list, tuple)):
                answer = answer[min(nth, len(answer) - 1)]
        else:
            answer = answers(prompt, nth) if answers else None
        return default_answer(prompt, self.words) if answer is None else answer

    def count(self, answer, counts):
        """An answer is generated; its last tokens are sent after this, so that the page never lags unless asked."""
        with self.lock:
            self._inside.discard(answer)
            if self.lag_reads:
                self._old, self._old_reads = (
                    self._old if self._old_reads else self.counters,
                    self.lag_reads,
                )
            if self.lag_s:
                self._late.append((self.clock() + self.lag_s, counts))
            else:
                self.counters += counts
            self.given.append(counts)
            if self.foreign:
                self.generate(self.foreign)

    def shown(self):
        with self.lock:
            while self._late and self._late[0][0] <= self.clock():
                self.counters += self._late.pop(0)[1]
        return self._old if self._old_reads else self.counters

    def read_counters(self):
        with self.lock:
            counts = self.shown()
            self._old_reads = max(0, self._old_reads - 1)
            return counts

    def drain_iterations(self):
        """TensorRT-LLM's /metrics: JSON, and gone once read."""
        with self.lock:
            new, self._drained = self.counters.steps - self._drained, self.counters.steps
        return [
            {"iter": i, "specDecodingStats": {"numRequestsWithDraftTokens": 1}} for i in range(new)
        ]

    def next_fault(self, where, faults):
        with self.lock:
            met = self._met[where] = self._met.get(where, -1) + 1
        if met < len(faults):
            return faults[met]
        return faults[-1] if faults and self.repeat_fault else None

    @contextlib.contextmanager
    def at_work(self, answer):
        """The waiting and running gauges around one answer."""
        slots = self.slots or contextlib.nullcontext()
        with self.lock:
            self._queued += 1
        with slots:
            with self.lock:
                self._queued -= 1
                self._inside.add(answer)
            try:
                yield
            finally:
                with self.lock:
                    self._inside.discard(answer)

    def sleep(self, seconds):
        if seconds > 0:
            self.stopping.wait(seconds)

    def refusal(self, body):
        """None, or (status, message) for a request that this server does not take."""
        if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
            return 400, "messages: field required"
        for name, message in self.reject.items():
            if name in body:
                return 400, message
        unknown = sorted(set(body) - KNOWN_FIELDS)
        if self.strict and unknown:
            return 400, "%s: Extra inputs are not permitted" % ", ".join(unknown)
        if self.strict and body.get("stream_options") and not body.get("stream"):
            return 400, "stream_options can only be set if stream is true"
        if self.check_model and body.get("model") not in self.models:
            return 404, "The model `%s` does not exist." % body.get("model")
        return None


# ---- recorded answers ----


class ReplayHandler(socketserver.StreamRequestHandler):
    def handle(self):
        head = []
        for line in iter(self.rfile.readline, b""):
            if line in (b"\r\n", b"\n"):
                break
            head.append(line.decode("latin-1").rstrip("\r\n"))
        if not head:
            return
        method, path = head[0].split(" ")[:2]
        headers = {
            name.strip().lower(): value.strip()
            for name, _, value in (line.partition(":") for line in head[1:])
        }
        raw = self.rfile.read(int(headers.get("content-length") or 0))
        try:
            body = json.loads(raw) if raw else None
        except ValueError:
            body = raw.decode("utf-8", "replace")
        fake = self.server.fake
        fake.requests.append(
            {
                "method": method,
                "path": path,
                "headers": headers,
                "body": body,
                "at": time.perf_counter(),
            }
        )
        entry = fake.next_entry(method, path)
        if entry is None:
            lost = b'{"error":{"message":"no such page","code":404}}'
            return self.wfile.write(
                b"HTTP/1.1 404 Not Found\r\nContent-Type: application/json\r\nConnection: close\r\n"
                b"Content-Length: %d\r\n\r\n%s" % (len(lost), lost)
            )
        data, start = (fake.folder / entry["file"]).read_bytes(), 0
        for end in list(entry.get("split", ())) + [len(data)]:
            if start:
                fake.stopping.wait(entry.get("delay_ms", 20) / 1000)
            self.wfile.write(data[start:end])
            start = end


class ReplayServer(Loopback):
    """Serves raw .http files and closes the connection after each.

    `routes` is a list of {method, path, file[, split, delay_ms]}, or the name of such a JSON file in `folder`. The n-th
    request for one method and path gets the n-th entry with it, the last one repeats; an entry whose path has the
    query string wins over one with the bare path; all else is 404. `split` = byte offsets at which to pause.
    """

    def __init__(self, routes, folder):
        super().__init__(ReplayHandler)
        self.folder = pathlib.Path(folder)
        self.routes = (
            json.loads((self.folder / routes).read_text("utf-8"))
            if isinstance(routes, str)
            else list(routes)
        )
        self._seen = {}

    def next_entry(self, method, path):
        for wanted in (path, path.partition("?")[0]):
            entries = [r for r in self.routes if (r["method"], r["path"]) == (method, wanted)]
            if entries:
                with self.lock:
                    nth = self._seen[method, wanted] = self._seen.get((method, wanted), -1) + 1
                return entries[min(nth, len(entries) - 1)]
        return None
