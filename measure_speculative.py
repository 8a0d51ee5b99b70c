#!/usr/bin/env python3
"""Does speculative decoding pay, for this model, on this machine, for this work?

The same prompts go to a server without speculation and to one with it, greedily and in turn; the
report says how much faster and how sure, why (acceptance, draft cost, break-even), and whether the
text stayed the same to the byte.  Every run is appended to a lab notebook.

usage: measure_speculative.py [measure] --baseline-url URL [--speculative-url URL] [options]

examples:
  measure_speculative.py --baseline-url http://127.0.0.1:8080/v1 \\
      --speculative-url http://127.0.0.1:8081/v1
  measure_speculative.py --baseline-url http://127.0.0.1:8080/v1 \\
      --prompts prompts/ --repeats 3 --label night
  measure_speculative.py --baseline-url http://127.0.0.1:8080/v1 \\
      --speculative-url k2=http://127.0.0.1:8081/v1 \\
      --speculative-url k4=http://127.0.0.1:8082/v1 --save-run tonight.jsonl

what to measure:
  --baseline-url URL            server without speculation, as http://127.0.0.1:8080/v1
  --speculative-url [NAME=]URL  server with speculation; may be repeated, to rank several settings
  --model MODEL                 model name (default: the one that the server lists)
  --speculative-model MODEL     its name on the speculative server, where it differs
  --prompt-set builtin|file     built-in prompts or --prompts (default builtin)
  --prompts PATH                text, .csv, .jsonl or .json file, or a folder of them; may be
                                repeated
  --max-tokens N                answer length (default 192)

how carefully:
  --repeats N                   measure each prompt N times (default 1, under load 4); more prompts
                                say more than more repeats, but under load
  --warmup N                    discarded requests for each server (default 1)
  --order paired|sequential     paired (the default) cancels drift; sequential finishes one
                                server first
  --concurrency LEVELS          requests at a time, as 1,4,10 (default 1)
  --seed N                      sent with every request (default 0)
  --timeout S                   limit for one whole request, in seconds (default 300)
  --triage N                    ask the baseline for log probabilities on up to N (default 10,
                                0: off) changed texts

where results go:
  --label LABEL                 name of this experiment in the notebook (default speculative-run)
  --labbook FILE                notebook to append to (default labbook.md)
  --min-gain G                  call it paying only above 1+G, as 0.05 for 5% (default 0)
  --fail-on WHAT                exit with 3 on any of slower, changed-text, regression,
                                did-not-run (comma list)
  --quiet                       print nothing but errors and --fail-on alarms
  --divergence-report FILE      write a bug report on changed text, in Markdown
  --include-prompts             put the prompts into it
  --save-run FILE               keep every answer, for `compare`; must not exist yet

unusual servers:
  --engine NAME                 engine name for the record (default: detected)
  --engine-version V            its version (default: detected)
  --api-key-env NAME            environment variable with the key (default SPEC_API_KEY)
  --no-stream                   ask for plain answers (no time to first token)
  --extra-body JSON             fields for the requests; null removes one
  --baseline-extra-body JSON, --speculative-extra-body JSON
                                fields for the requests of one arm
  --baseline-metrics-url URL, --speculative-metrics-url URL
                                metrics page, where it is not /metrics
  --help, --version (-h, -V)

other commands (each has its own --help):
  compare      the same comparison from saved runs, for machines that hold one server at a time
  report       tables and history from the lab notebook
  break-even   the arithmetic alone: which acceptance a draft needs, and the best chain length
  calibrate    no server needed: measures two servers of known truth and prints the errors

exit codes:
  0 measured, whatever the verdict     1 could not measure, or not keep it
  2 wrong command, input or server     3 a --fail-on condition holds
  130 interrupted (what was finished is reported and recorded)

It cannot tell you whether the text is *good*, nor how other prompts, another machine or a busier
server would behave: it measures what it was given, and says how far that carries.
"""

# The rooms, in reading order; each begins with a line that names it.
#
#   constants and errors   exit codes, errors, and FINDINGS: all that an audit can say
#   terminal and files     what is printed, whole reads, whole appends, locks
#   prompts                built-in set and prompt files
#   engines                one row for each engine: all that is known of it
#   arithmetic             tokens per step, speed-up, break-even, best draft length
#   statistics             paired log ratios, t intervals, verdict
#   HTTP client            one completion, timed; one GET
#   Prometheus scraper     a page of text into samples; growth of counters
#   acceptance             what became of the drafts, read as the engine's row says
#   servers                preflight: what a server is, before it is measured
#   timing loop            the plan, and the loop that carries it out
#   text comparison        byte-for-byte differences, and how close the decision was
#   comparison             runs -> arms -> comparisons, each figure found once
#   records, notebook      the schema of what is kept, and how it is read and written
#   measurement            settings in, levels measured
#   report                 terminal and Markdown, from the records alone
#   reference engine and calibration   two servers of known truth
#   command line           flags -> settings; main()
#
# prompts -> plan -> Reading -> Run -> Arm -> Comparison -> records -> terminal, notebook

from __future__ import annotations

import os
import sys

if sys.version_info < (3, 9):
    # an f-string would be a syntax error, and no words, where this is most wanted
    sys.stderr.write("measure_speculative needs Python 3.9, this is %d.%d\n" % sys.version_info[:2])
    sys.exit(2)

if __name__ == "__main__" and __doc__ and sys.argv[1:] in (["-h"], ["--help"]):
    # This text is all the help there is; it need not wait for what follows to be imported and torn
    # down again.
    try:
        os.write(1, __doc__.encode())
        os._exit(0)
    except OSError:
        pass  # the long way round says what is wrong

try:
    import signal
except KeyboardInterrupt:
    os._exit(130)

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until main() can handle it

import argparse
import contextlib
import csv
import datetime
import errno
import functools
import hashlib
import http.client
import io
import itertools
import json
import math
import queue
import re
import shlex
import socket
import stat
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import zlib
from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import asdict, dataclass, field, replace
from typing import (
    Any,
    BinaryIO,
    Literal,
    NamedTuple,
    NoReturn,
    Optional,
    TypedDict,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

# ---- constants and errors -----------------------------------------------------------------------

__version__ = "1.1.dev0"

LAB = "part-17/measure-speculative"

SCHEMA = 2

MEASURED, COULD_NOT_MEASURE, USAGE, FINDING, INTERRUPTED = 0, 1, 2, 3, 130

# A streamed answer takes about 300 bytes a token: this holds 200,000 tokens.
MAX_BODY_BYTES = 64 << 20

MAX_WAIT_S = 60.0  # for a server that answers 503 or 429, over one request, and once for each arm

MOST_FAILURES = 10  # in a row, of one arm; more would say nothing new

SIDE_TIMEOUT_S = 10.0  # model lists, versions and metrics pages

SETTLE_PAUSE_S, SETTLE_LIMIT_S = 0.2, 3.0  # some engines count an answer after they have sent it

# Counters may run this far above what was received: answers are cut at their end.
FOREIGN_SHARE = 0.01

CACHE_SHARE = 0.05  # of the prompt tokens: less is a template's beginning, not a cached prompt
MISCOUNT_SHARE = 0.02  # of the tokens: an end token counted or not is less
IMPLAUSIBLE_TTFT = 1.25  # times the other server's, on the same prompts without a cache
IMPLAUSIBLE_STEP = 0.9  # plain steps: verifying drafts cannot cost less than one
LEAST_DELAY_S = 0.005  # shorter differences between times to the first token are the network's

WAITING_S, WAITING_SHARE = 0.2, 0.2  # outside the server's clock, in seconds and of the answer
LEAST_STEP_S = 0.0002  # a shorter step is lost in the client's own time

# Times the median residual: 0.3 to 0.7% false alarms a run, and catches the larger stalls.
STALL_CUTOFF = 8

REPEATS_UNDER_LOAD = 4  # pairs of blocks of each kind of work

FEW_PROMPTS = 12  # below this no interval holds its 95% when the prompts are of mixed kinds

# A shorter key, like "local", is a placeholder: it may stand in any answer and stays there.
SECRET_LENGTH = 8

# Rounding moved gaps of a quantised model by 0.10 (median) to 0.50 (99th percentile);
# bf16 logits between 16 and 32 lie 0.125 apart, and a real pair of servers differed at exactly that
# gap.
NEAR_TIE_NATS = 0.5

TAIL_CHARACTERS = 60

LISTED_DIVERGENCES = 20

TABLE_COLUMNS = 100

LOCK_LIMIT_S = 30.0  # for the lock on the notebook, which other jobs hold for milliseconds

WORTH_TOKENS = 0.05  # draft positions that add less than this a step are pointed out

# Target steps; a verification reads the weights once, so a fit below this is noise.
PLAUSIBLE_VERIFICATION = 0.5

LONGEST_CHAIN = 1000  # a longer one stands in no server: its counters are wrong

LONGEST_ASKED = 10_000  # by the arithmetic alone

JSON = dict[str, Any]

Say = Callable[[str], None]  # takes one line for the user

Logs = Sequence[Sequence[float]]  # logarithms of ratios or rates: the repeats of each prompt

T = TypeVar("T")  # what a call that is handed in returns


class MeasureError(Exception):
    """Could not measure; the message says what happened, to what, and what to do.  Exit code 1."""

    exit_code = COULD_NOT_MEASURE


class UsageError(MeasureError):
    """The command, its input or its server cannot be used.  Exit code 2.

    It is said before the first measured request.
    """

    exit_code = USAGE


class RequestFailed(MeasureError):
    """One request brought no usable answer; `status` is the HTTP status, None where none came."""

    def __init__(
        self, message: str, status: Optional[int] = None, retry_after: Optional[str] = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


class GaveUp(MeasureError):
    """A server does nothing but fail: measuring ends, and what was measured is kept."""


@dataclass(frozen=True)
class Meaning:
    """What a finding of the audit stands for.

    A finding may carry its own `caveat`, with figures, in place of the general one here.
    """

    words: str
    caveat: Optional[str] = None  # said in the last line, after BUT
    withholds: Optional[str] = None  # why there is no verdict beside it


# All that an audit can say, in the order in which the last line says it.
FINDINGS = {
    "not-drafting": Meaning("nothing was drafted", withholds="did-not-run"),
    "same-server": Meaning("both arms are one server", withholds="same-server"),
    "model-differs": Meaning(
        "the servers hold different models, files of it, or names for it",
        withholds="model-differs",
    ),
    "quantization-differs": Meaning(
        "the servers tell different quantizations", withholds="model-differs"
    ),
    "counts-wrong": Meaning(
        "a server counts tokens wrong", caveat="token counts are wrong", withholds="counts-wrong"
    ),
    "failed-requests": Meaning("requests failed", caveat="requests failed"),
    "implausible": Meaning("something slowed the baseline", caveat="something slowed the baseline"),
    "repeats-differ": Meaning("repeats of a prompt are faster than new prompts"),
    "cache-differs": Meaning(
        "one server had more of the prompts in its cache",
        caveat="the servers' prompt caches differed",
    ),
    "conditions-differ": Meaning("compared by --force", caveat="the conditions differ (--force)"),
    "waiting": Meaning(
        "time outside the server's own clock: a model is loaded, or a queue",
        caveat="requests waited outside the server",
    ),
    "runs-apart": Meaning(
        "runs of different times, so that drift is not cancelled",
        caveat="the runs are of different times",
    ),
    "busy": Meaning("requests of others ran", caveat="a server was busy with requests of others"),
    "foreign-traffic": Meaning(
        "somebody else used the server", caveat="another client used a server"
    ),
    "counter-reset": Meaning("the server was restarted", caveat="a server was restarted"),
    "baseline-drafting": Meaning("the baseline drafts", caveat="the baseline drafts too"),
    "interrupted": Meaning("not all was measured", caveat="the measurement was interrupted"),
    "few-prompts": Meaning(
        "too few prompts for an interval, or for a sure one",
        caveat="there are few prompts",
    ),
    "stream-differs": Meaning("one server streamed and the other did not"),
    "timings-doubtful": Meaning("a server's own times contradict the answer's"),
    "metrics-unavailable": Meaning("no use could be made of the metrics page"),
    "sources-disagree": Meaning("answers and counters tell different drafts"),
    "rate-above-one": Meaning("more accepted than drafted"),
    "lifetime-only": Meaning("acceptance is told since the server's start only"),
    "queueing": Meaning("requests waited inside the server"),
    "waited": Meaning("requests waited for a 503 or 429"),
    "undecodable-text": Meaning("bytes that are no UTF-8"),
    "usage-missing": Meaning("no token counts of the server's own"),
    "context-differs": Meaning("the servers hold different context lengths"),
    "build-differs": Meaning("the servers are different builds"),
    "stalls": Meaning("repeats far from their prompt's median"),
}
# Findings that may be why texts differ.
DISTURBANCES = ("foreign-traffic", "counter-reset")


def as_dict(value: object) -> JSON:
    """The value if it is a JSON object, else {}: servers send null and worse where one belongs."""
    return value if isinstance(value, dict) else {}


def as_list(value: object) -> list[Any]:
    """The value if it is a JSON array, else []."""
    return value if isinstance(value, list) else []


def as_number(value: object) -> Optional[float]:
    """A number as a server sent it, else None.

    NaN, infinity and what is too large for any measurement are none.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if not abs(value) < 1e18:  # so written, it holds for NaN too
        return None
    return float(value)


def as_count(value: object) -> Optional[int]:
    """A count as a server sent it, None for what is not a whole number of at least 0."""
    number = as_number(value)
    if number is None or number < 0 or not number.is_integer():
        return None
    return int(number)


def ratio_of(numerator: Optional[float], denominator: Optional[float]) -> Optional[float]:
    """The quotient, or None where a side is unknown or the denominator is not above 0."""
    if numerator is None or denominator is None or denominator <= 0:
        return None
    return numerator / denominator


def sum_known(values: Iterable[Optional[int]]) -> Optional[int]:
    """The sum, None as soon as one value is unknown."""
    total = 0
    for value in values:
        if value is None:
            return None
        total += value
    return total


def copied(source: JSON, *names: str) -> JSON:
    """These entries of an object."""
    return {name: source[name] for name in names}


def fields_of(value: Any) -> JSON:
    """The fields of a dataclass, as they are."""
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def plural(count: int, words: str) -> str:
    """ "1 prompt", "2 prompts"."""
    if count == 1:
        return f"{count} {words}"
    return f"{count} {words}s"


def duration_words(seconds: float) -> str:
    """ "40 s", "12 min", "2.5 h", "3 days"."""
    for unit, words in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.3g} {words}"
    return f"{seconds:.0f} s"


def loads(text: str) -> Any:
    """JSON without NaN and Infinity; ValueError for everything that is not JSON, however deep."""
    try:
        return json.loads(text, parse_constant=finite, parse_float=finite)
    except RecursionError:
        raise ValueError("JSON nested too deep") from None


def finite(text: str) -> float:
    """The number that a text spells; ValueError where it is NaN or infinite."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a finite number")
    return number


# ---- terminal and files -------------------------------------------------------------------------


# All control characters but the line end.
_CONTROL_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(10), *range(11, 32), 127)}


def printable(text: str) -> str:
    """ASCII for any console or cron mail; other and control characters as backslash escapes."""
    plain = text.encode("ascii", "backslashreplace").decode("ascii")
    return plain.translate(_CONTROL_ESCAPES)


def one_printable_line(text: str) -> str:
    """The same with line ends escaped too: for table cells, sentences and messages."""
    return printable(text).replace("\n", "\\n")


def one_line(text: str, limit: int = 200) -> str:
    """Server text as it may be kept and shown: on one line, printable, at most `limit` characters.

    Whatever enters goes through here: a finish reason of 3 MB once made 9 MB of notebook.
    """
    folded = " ".join(text[: 9 * limit].split())
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in folded)
    if len(shown) > limit:
        shown = shown[: limit - 3] + "..."
    return shown


def say_on_stderr(words: str) -> None:
    """One line for the user beside the results."""
    with contextlib.suppress(OSError):
        sys.stderr.write(one_printable_line(words) + "\n")
        sys.stderr.flush()


def speaker(quiet: bool) -> Say:
    """What takes words for the user beside the results; nothing does where it has to be quiet."""
    if quiet:
        return lambda words: None
    return say_on_stderr


def print_lines(lines: Sequence[str]) -> None:
    """Results on standard output, ASCII only.

    A reader that has seen enough is no error; a full disk is, and raises MeasureError.
    """
    text = "".join(printable(line) + "\n" for line in lines)
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        with contextlib.suppress(OSError, ValueError):
            # what is still buffered must not fail again at the end
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise MeasureError(
                f"cannot write to standard output: {error.strerror}; what should stand there is "
                "lost"
            ) from None


PIPES = (stat.S_IFIFO, stat.S_IFSOCK)


def check_kind(path: str, refused: Sequence[int]) -> None:
    """OSError for a file of a refused kind, as `stat` numbers them.

    Pipes, and devices as input, would be waited for without end.
    """
    if not os.path.exists(path):
        return
    kind = stat.S_IFMT(os.stat(path).st_mode)
    if kind in refused:
        raise OSError(errno.EINVAL, "it is a pipe, socket or device, not a file")


def read_bytes(path: str, pipe_allowed: bool = False) -> bytes:
    """All of a file the user named.  UsageError where it cannot be read, or never ends."""
    refused = [stat.S_IFCHR]
    if not pipe_allowed:
        refused += PIPES
    try:
        check_kind(path, refused)
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None


def json_line(value: Mapping[str, object]) -> bytes:
    """One line of JSON in ASCII; ValueError rather than NaN or infinity."""
    return json.dumps(value, ensure_ascii=True, allow_nan=False).encode("ascii") + b"\n"


@contextlib.contextmanager
def locked(file: BinaryIO, say: Say) -> Iterator[None]:
    """Hold the file against other processes that append to it, where its file system can do that.

    OSError where another one holds it for LOCK_LIMIT_S.
    """
    if os.name == "nt":
        import msvcrt

        number = file.fileno()
        file.seek(0)
        msvcrt.locking(number, msvcrt.LK_LOCK, 1)  # type: ignore[attr-defined,unused-ignore]
        try:
            yield
        finally:
            file.seek(0)
            msvcrt.locking(number, msvcrt.LK_UNLCK, 1)  # type: ignore[attr-defined,unused-ignore]
    else:
        _wait_for_lock(file, say)
        yield  # closing the file releases it


def _wait_for_lock(file: BinaryIO, say: Say) -> None:
    import fcntl

    give_up = time.monotonic() + LOCK_LIMIT_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > give_up:
                raise OSError(errno.EAGAIN, "another program holds its lock") from None
            time.sleep(0.05)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP):
                raise
            say(f"{file.name} lies on a file system without locks; it is written to all the same")
            return


def append_records(
    path: str, records: Sequence[Mapping[str, object]], say: Say = say_on_stderr
) -> None:
    """Append whole lines in one write; an unfinished last line is ended first.

    OSError where that fails.  Bytes that are in the file stay as they are; a write that fails
    half-way is taken back.
    """
    data = b"".join(map(json_line, records))
    with open(path, "a+b", buffering=0) as file, locked(file, say):
        end = file.seek(0, os.SEEK_END)
        if end:
            file.seek(end - 1)
            if file.read(1) != b"\n":
                data = b"\n" + data
        try:
            write_whole(file, data)
        except OSError:
            with contextlib.suppress(OSError):  # what is no ordinary file cannot be shortened
                file.truncate(end)
            raise


def write_whole(file: BinaryIO, data: bytes) -> None:
    """One unbuffered write.  OSError also where only a part of it fits."""
    if file.write(data) != len(data):
        raise OSError(errno.ENOSPC, "no space left on device")


def check_appendable(path: str, what: str = "lab notebook", option: str = "--labbook") -> None:
    """UsageError if the file that will hold results cannot be written; before any work is done."""
    try:
        check_kind(path, PIPES)  # devices like /dev/null will do
        with open(path, "ab"):
            pass
        if os.path.isfile(path) and _is_run_file(path):
            raise UsageError(
                f"{path} is a run file of --save-run, which more lines would spoil; see {option}"
            )
    except OSError as error:
        raise UsageError(
            f"cannot write the {what} {path}: {error.strerror}; another path: {option} FILE"
        ) from None


def _is_run_file(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(14) == b'{"kind": "run"'


# ---- prompts ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prompt:
    """One request to be measured; `messages` are sent as they are."""

    id: str
    workload: str
    messages: tuple[JSON, ...]

    def digest(self) -> str:
        """A short hash of what is sent, to tell whether two runs had the same prompts."""
        sent = json.dumps(self.messages, sort_keys=True).encode()
        return hashlib.sha256(sent).hexdigest()[:16]


_BUILT_IN = {
    "copy": (
        "Rename the variable `t` to `total` everywhere and return the whole function, nothing "
        "else:\n\n"
        "def invoice_total(lines, vat=0.19):\n"
        "    t = 0\n"
        "    for line in lines:\n"
        "        t += line['price'] * line['count']\n"
        "    if t > 1000:\n"
        "        t = t * 0.97\n"
        "    t = t * (1 + vat)\n"
        "    return round(t, 2)\n",
        "Turn this list into a Markdown table with the columns Part, Count and Shelf. Keep the "
        "order.\n\n"
        "hex bolts M6, 240, A3\n"
        "washers M6, 500, A3\n"
        "lock nuts M6, 180, A4\n"
        "wood screws 4x40, 900, B1\n"
        "wood screws 5x60, 420, B1\n"
        "wall plugs 8 mm, 350, B2\n"
        "cable ties 200 mm, 1000, C5\n"
        "fuses 10 A, 60, C6",
        "Quote each sentence of this notice word for word as a bullet, and after each write in "
        "brackets what it means for a tenant:\n\n"
        "The water will be shut off on Tuesday from 8 to 12. Please fill a bucket beforehand. The "
        "stairwell light stays on. Bicycles left in the entrance will be moved to the yard. The "
        "next meter reading is in the first week of March.",
        "Extend this shell line so that it also skips *.tmp files, prints what it copies and stops "
        "at the first error. Show the old line, then the new line, then the new line once more "
        "split over several lines:\n\n"
        "rsync -a --delete --exclude '*.log' --exclude '.cache/' /srv/data/projects/ "
        "backup:/srv/mirror/projects/",
    ),
    "closed": (
        "List the months of the year in order, one per line, each with its number of days in a "
        "common year.",
        "What is 17 times 24? Show the steps of the multiplication, then the result on a line of "
        "its own.",
        "Name the planets of the solar system from the sun outwards, with one fact about each.",
        "Explain in three sentences what a prime number is, then list the prime numbers below 60.",
    ),
    "open": (
        "Write the opening of a story in which a lighthouse keeper finds a door at the foot of the "
        "stairs that was not there yesterday.",
        "Write a letter from a retired clockmaker to the apprentice who is about to open a shop of "
        "their own.",
        "Invent a festival for a town that is built on stilts over a lake: its food, its noise, "
        "its one strict rule, and what goes wrong this year.",
        "Describe a long night train journey through the mountains in winter, as a passenger who "
        "cannot sleep would tell it to a friend.",
    ),
}


def built_in_prompts() -> list[Prompt]:
    """The mixed set of 12: four that repeat material from the prompt, four closed, four open."""
    prompts = []
    for workload, texts in _BUILT_IN.items():
        for number, text in enumerate(texts, 1):
            message = {"role": "user", "content": text}
            prompts.append(Prompt(f"{workload}-{number}", workload, (message,)))
    return prompts


def load_prompts(paths: Sequence[str]) -> tuple[list[Prompt], list[str]]:
    """Prompts from files and folders, in order, and notes for the user.

    UsageError names file:line and reason.
    """
    prompts: list[Prompt] = []
    notes: list[str] = []
    first_turns = 0
    for file in itertools.chain.from_iterable(map(prompt_files, paths)):
        begun = len(prompts)
        for place, value in _prompt_entries(file):
            prompt, is_first_turn = _as_prompt(value, place, file, len(prompts) + 1)
            prompts.append(prompt)
            first_turns += is_first_turn
        if kind_of(file) == "text":
            notes += notes_on_lines(file, prompts[begun:])
    if not prompts:
        raise UsageError(
            f"no prompts in {', '.join(paths)}: write one prompt per line, or JSON Lines"
        )
    if first_turns == 1:
        notes.append("1 prompt has several turns; only the first turn is used")
    elif first_turns:
        notes.append(f"{first_turns} prompts have several turns; only the first turn is used")
    return prompts, notes


def notes_on_lines(path: str, prompts: Sequence[Prompt]) -> Iterator[str]:
    """What to say of a text file whose lines look like the parts of one longer text."""
    texts = [str(prompt.messages[0]["content"]) for prompt in prompts]
    count = len(texts)
    if 1 < count < 40 and sum(map(ends_a_sentence, texts)) * 2 < count:
        first = one_line(texts[0], TAIL_CHARACTERS)
        yield f'each of the {count} lines of {path} is a prompt; the first is sent as "{first}"'


def ends_a_sentence(text: str) -> bool:
    """Whether a text ends as a sentence does, perhaps with a quotation mark or bracket behind."""
    return text.rstrip("\"')]}*_`\u00bb\u201d\u2019").endswith(SENTENCE_ENDS)


# of Latin, Chinese, Arabic and Indian scripts; a colon announces what stands in no other line
SENTENCE_ENDS = (".", "!", "?", "\u2026", "\u3002", "\uff01", "\uff1f", "\u061f", "\u0964")

PROMPT_KINDS = {
    ".txt": "text",
    ".md": "text",
    "": "text",
    ".csv": "table",
    ".jsonl": "lines",
    ".ndjson": "lines",
    ".json": "array",
}


def kind_of(path: str) -> str:
    """How a prompt file is read, by the ending of its name.  UsageError for any other ending."""
    ending = os.path.splitext(path)[1]
    kind = PROMPT_KINDS.get(ending.lower())
    if kind:
        return kind
    known = ", ".join(filter(None, PROMPT_KINDS))
    raise UsageError(
        f"{path}: a prompt file is not called {ending}; known are {known}, or no ending (one "
        "prompt a line)"
    )


def prompt_files(path: str) -> list[str]:
    """The file itself, or the prompt files of a folder in the order of their names."""
    if not os.path.isdir(path):
        return [path]
    try:
        names = sorted(os.listdir(path))
    except OSError as error:
        raise UsageError(f"cannot read the folder {path}: {error.strerror}") from None
    names = [name for name in names if name.lower().endswith(IN_FOLDERS) and name[0] != "."]
    files = [os.path.join(path, name) for name in names]
    files = list(filter(os.path.isfile, files))
    if not files:
        raise UsageError(f"the folder {path} holds no prompt file ({', '.join(IN_FOLDERS)})")
    return files


# A README beside the prompts is none of them, though such a file may be named by itself.
IN_FOLDERS = tuple(ending for ending in PROMPT_KINDS if ending not in ("", ".md"))


def _prompt_entries(path: str) -> Iterator[tuple[str, object]]:
    """(place, text or JSON value) of each prompt of a file, read as its name says.

    `place` is file:line, or the item of an array.
    """
    kind = kind_of(path)
    text = _utf8_text(path)
    if kind == "array":
        for number, item in enumerate(_json_array(text, path), 1):
            yield f"{path}: item {number}", item
        return
    if kind == "table":
        yield from _table_entries(text, path)
        return
    read = loads if kind == "lines" else str.strip
    for number, line in enumerate(re.split(r"\r\n|\r|\n", text), 1):
        place = f"{path}:{number}"
        try:
            if line.strip():
                yield place, read(line)
        except ValueError as error:
            raise UsageError(f"{place}: not JSON: {error}") from None


def _table_entries(text: str, path: str) -> Iterator[tuple[str, object]]:
    """(file:line, object) of each row; the heading names its fields, an empty cell is absent."""
    csv.field_size_limit(2**31 - 1)  # long contexts are prompts too
    rows = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        heading = [name.strip().lower() for name in next(rows, ())]
        asked = next((name for name in ("prompt", "question", "text") if name in heading), None)
        if asked is None:
            raise UsageError(f"{path}:1: no column is called prompt, question or text")
        place = f"{path}:{rows.line_num + 1}"
        for cells in rows:
            if len(cells) > len(heading):
                raise UsageError(
                    f"{place}: more cells than the heading has; is a comma not in quotes?"
                )
            row = {name: cell for name, cell in zip(heading, cells) if cell.strip()}
            if row:
                row["prompt"] = row.pop(asked, "")
                yield place, {name: row[name] for name in row if name in TABLE_FIELDS}
            place = f"{path}:{rows.line_num + 1}"
    except csv.Error as error:
        raise UsageError(f"{path}:{rows.line_num}: not CSV: {error}") from None


TABLE_FIELDS = ("prompt", "id", "question_id", "workload", "category")


def _utf8_text(path: str) -> str:
    raw = read_bytes(path, pipe_allowed=True)
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line_ends = re.findall(rb"\r\n|\r|\n", raw[: error.start])
        place = f"{path}:{len(line_ends) + 1}"
        raise UsageError(
            f"{place}: not UTF-8 at byte offset {error.start}; save the file as UTF-8"
        ) from None


def _json_array(text: str, path: str) -> list[object]:
    hint = "; for one object per line name it .jsonl"
    try:
        items = loads(text)
    except ValueError as error:
        line = getattr(error, "lineno", 1)
        raise UsageError(f"{path}:{line}: not JSON: {error}{hint}") from None
    if not isinstance(items, list):
        raise UsageError(f"{path}:1: not a JSON array of prompts{hint}")
    return items


def _as_prompt(value: object, place: str, path: str, number: int) -> tuple[Prompt, bool]:
    """The prompt, and whether it is the first of several turns."""
    entry = {name: item for name, item in as_dict(value).items() if item is not None}
    if isinstance(value, str):
        entry = {"prompt": value}
    turns = _messages_of(entry, place)
    messages = _first_turn(turns)
    if scrubbed(messages, "", 50) != messages:
        raise UsageError(f'{place}: "messages" is nested too deep')
    if re.search("[\ud800-\udfff]", json.dumps(messages, ensure_ascii=False)):
        raise UsageError(f"{place}: holds half of a surrogate pair, which is no character")
    stem = os.path.splitext(os.path.basename(path))[0]
    identity = entry.get("id", entry.get("question_id", f"{stem}-{number}"))
    workload = entry.get("workload") or entry.get("category") or stem
    prompt = Prompt(str(identity), str(workload), tuple(messages))
    return prompt, len(messages) < len(turns)


def _messages_of(entry: JSON, place: str) -> list[JSON]:
    """The messages that a prompt of a file stands for, in all of its turns."""
    if "messages" in entry:
        messages: list[JSON] = entry["messages"]
        roles = [message.get("role") for message in objects_in(messages)]
        if not roles or not all(roles):
            raise UsageError(f'{place}: "messages" is not a list of objects with a role')
        return messages
    texts = entry.get("turns")
    if not isinstance(texts, list) or not texts:
        texts = [entry.get("prompt")]
    if not isinstance(texts[0], str) or not texts[0].strip():
        raise UsageError(f'{place}: no text under "prompt", "messages" or "turns"')
    return [{"role": "user", "content": text} for text in texts]


def _first_turn(messages: list[JSON]) -> list[JSON]:
    """The messages up to where a user speaks twice in a row.

    A client is meant to ask one after the other, and strict templates refuse them together.
    """
    before = None
    for number, message in enumerate(messages):
        if message["role"] == before == "user":
            return messages[:number]
        before = message["role"]
    return messages


# ---- engines ------------------------------------------------------------------------------------

# All that is known of an engine stands in its row.  A server is recognised by what it sends; but
# answers and metrics pages are read by their shape, whatever the engine is called, since proxies
# pass both through and some rename.


@dataclass(frozen=True)
class VersionPage:
    """A page that tells the version of an engine; a GET without side effects."""

    path: str
    field: str = "version"
    mark: str = ""  # a field that this engine's page has and the others' have not,
    marked: str = ""  # with this value, where the field alone is no mark
    names_engine: bool = True  # False: several engines answer alike, it tells the version only

    def is_told_by(self, page: Mapping[str, object]) -> bool:
        """Whether this JSON page tells a version, and is of this engine."""
        if self.field not in page or (self.mark and self.mark not in page):
            return False
        return not self.marked or page[self.mark] == self.marked


@dataclass(frozen=True)
class AnswerFields:
    """Where an answer tells what became of its drafts, by which names; "" for what it does not.

    The path leads through what AnswerBuilder keeps: fields of the event by their own names, and
    those of KEPT_APART.
    """

    path: tuple[str, ...]
    steps: str = ""
    drafted: str = ""
    accepted: str = ""
    rejected: str = ""  # tokens; drafted is then their sum with the accepted
    rejections: str = ""  # steps that ended in one
    histogram: str = ""  # h[j] steps had exactly j drafts accepted
    zeros_tell: bool = True  # False: it stands as zeros in answers of servers that never draft
    source: str = "response"


@dataclass(frozen=True)
class DraftCounters:
    """What an engine calls its counters of drafts: behind a stem, with `_total` or without.

    The names are those that vLLM brought and that LMDeploy and llama.cpp took over; "" for what
    there is not.
    """

    stem: str
    steps: str = "drafts"
    drafted: str = "draft_tokens"
    accepted: str = "accepted_tokens"
    positions: str = "accepted_tokens_per_pos"  # accepted tokens by draft position
    drafted_positions: str = ""  # drafted tokens by draft position, where no counter has the sum
    emitted: str = ""  # accepted tokens, and one of the target's own for each step
    sums_positions: bool = False  # accepted is the sum of the positions, where there are any
    needs: tuple[str, ...] = ()  # figures of an Acceptance without which these are not the counters
    derive: Optional[Callable[[DraftCounters, Sequence[Sample], int], Optional[Acceptance]]] = None

    def names(self) -> set[str]:
        """The whole names of the counters of drafts, without `_total`."""
        behind = {self.steps, self.drafted, self.accepted, self.positions, self.drafted_positions}
        return {self.stem + name for name in behind if name}


@dataclass(frozen=True, eq=False)
class Engine:
    """One row: how an engine is recognised, what is asked of it, how it tells of its drafts."""

    name: str

    # It is recognised by
    owners: tuple[str, ...] = ()  # `owned_by` of the models that it lists,
    banner: str = ""  # the beginning of its Server header,
    banner_is_common: bool = False  # (which counts only for a listed model without an owner)
    version: Optional[VersionPage] = None
    series: str = ""  # or the beginning of the names on its metrics page.

    # It is asked for
    asks: JSON = field(default_factory=dict)  # fields of requests with which its answers tell more;
    answer_page: str = ""  # a page on the last answer, read after each and kept as "perf";
    slots_page: str = ""  # a page with the context of each slot;
    metrics_page: str = "/metrics"
    metrics_hint: str = ""  # how it is started so that it has that page.

    # Its metrics page has
    generated: tuple[str, ...] = ()  # tokens made, to be compared with those received;
    # gauges of its requests, by the ends of their names, since gateways change the beginning;
    running: str = ""
    waiting: str = ""
    stale_gauges: bool = False  # they may show requests that have ended: ours, between two blocks;
    cache_info: str = ""  # the series that has the capacity of its cache as labels;
    counters: tuple[DraftCounters, ...] = ()
    counters_if_configured: bool = False  # no draft counters where speculation is not configured;
    six_digits: str = ""  # part of the names of counters that are written with six digits only;
    histograms: str = ""  # a pattern of the names of histograms, the parts of which are counters.

    answers: tuple[AnswerFields, ...] = ()  # what it tells in its answers


def accepted_from_generated(
    names: DraftCounters, samples: Sequence[Sample], answers: int
) -> Optional[Acceptance]:
    """For engines that count verification steps only.

    Every step gives its accepted drafts and one token more; the first token of each answer comes
    from the prompt pass.
    """
    steps = counted_by(samples, names.stem + names.steps)
    if steps is None:
        return None
    generated = counted_by(samples, names.stem + names.emitted)
    if generated is None or not answers or not steps:
        return Acceptance("metrics", steps)
    return Acceptance("metrics", steps, accepted=max(generated - answers - steps, 0))


def accepted_from_histogram(
    names: DraftCounters, samples: Sequence[Sample], answers: int
) -> Optional[Acceptance]:
    """For engines that record the accepted tokens of every step, and of every prompt pass."""
    count = counted_by(samples, names.stem + names.steps)
    total = counted_by(samples, names.stem + names.accepted)
    if count is None or total is None:
        return None
    buckets = [s for s in samples if s.name == names.stem + names.positions]
    below = {(s.label("le") or "").removesuffix(".0"): s.value for s in buckets}
    positions: list[int] = []
    while str(len(positions)) in below:
        positions.append(round(count - below[str(len(positions))]))
    if positions and positions[-1] == 0:
        positions.pop()  # le="k" holds every step of a chain of k
    if total == 0 and not positions:
        # every page has the histogram; without speculation only its zero bucket
        return Acceptance("metrics", steps=0, drafted=0, accepted=0)
    return Acceptance(
        source="metrics",
        steps=count - answers,
        accepted=total,
        per_position=tuple(positions) or None,
    )


UNKNOWN = Engine("unknown")

# The servers of `calibrate`: counters under vLLM's names, which are all there where they draft.
REFERENCE = Engine(
    name="reference",
    owners=("reference",),
    generated=("vllm:generation_tokens_total",),
    running="vllm:num_requests_running",
    counters=(DraftCounters("vllm:spec_decode_num_"),),
    counters_if_configured=True,
)

# Their order is the order in which version pages are asked for while the engine is unknown, and in
# which answers and pages are tried.
ENGINES: tuple[Engine, ...] = (
    Engine(
        name="llama.cpp",
        owners=("llamacpp",),
        banner="llama.cpp",
        # Its `speculative` settings there say "none" even where it drafts.  ik_llama.cpp tells no
        # build.  Fields of a request like speculative.n_max are ignored by the newest, with HTTP
        # 200, and obeyed by older ones and forks.
        version=VersionPage("/props", "build_info"),
        series="llamacpp:",
        slots_page="/slots",
        # Otherwise the page answers 501; with --api-key it is guarded.  A router wants ?model=NAME,
        # and loads that model.  Each read resets its gauges of tokens per second; n_tokens_max says
        # it is a counter and is a high-water mark.
        metrics_hint="llama-server with --metrics",
        # Lemonade, a gateway, re-exports llama.cpp's counters under the longer names.
        generated=("llamacpp:tokens_predicted_total", "lemonade_llamacpp_tokens_predicted_total"),
        running="requests_processing",
        waiting="requests_deferred",
        # A draft is counted where it is handed to verification, steps without one are not; accepted
        # is without the token that the target adds.  An answer is counted whole, at its end, before
        # the page can be read behind it.  All three stand as 0 with speculation off; the positions
        # only come with the first draft.  Recurrent models need two decodes for a counted step.
        counters=(
            DraftCounters("llamacpp:spec_decode_num_", sums_positions=True),
            DraftCounters("lemonade_llamacpp_spec_decode_num_", sums_positions=True),
            # forks and builds that were never merged
            DraftCounters(
                stem="llamacpp:",
                steps="draft_verify_steps",
                accepted="draft_tokens_accepted",
                positions="",
                needs=("drafted",),
            ),
            DraftCounters(
                stem="llamacpp:",
                steps="draft_verify_steps",
                drafted="spec_tokens_drafted",
                accepted="spec_tokens_accepted",
                positions="",
                needs=("drafted",),
            ),
        ),
        # Sums go through a stream of six digits (1234567 is written 1.23457e+06); positions are
        # whole numbers.
        six_digits="llamacpp",
        # ik_llama.cpp and many servers that copied its `timings` too; mlx-vlm alone tells its
        # rounds.  The two counts are left out where nothing was drafted.  Drafts are cut to what is
        # left of an answer; accepted tokens behind a stop are counted and not sent.
        answers=(
            AnswerFields(
                path=("timings",),
                steps="draft_rounds",
                drafted="draft_n",
                accepted="draft_n_accepted",
                source="timings",
            ),
        ),
    ),
    Engine(
        name="sglang",
        owners=("sglang",),
        version=VersionPage("/server_info"),  # wants the key, unlike its metrics page
        series="sglang:",
        asks={"return_spec_tokens_details": True},  # return_token_ids is an error when streaming
        metrics_hint="SGLang with --enable-metrics",
        generated=("sglang:generation_tokens_total",),
        running="num_running_reqs",
        waiting="num_queue_reqs",
        stale_gauges=True,  # as they were in a decode iteration, the last one up to 30 s ago
        # No counter of drafted or accepted tokens; those that there are count at the end of a
        # request and have no `_created`.  Its gauges spec_accept_length and spec_accept_rate are of
        # the last 40 decode iterations and stay stale on short runs: never to be summed.
        counters=(
            DraftCounters(
                stem="sglang:",
                steps="spec_verify_calls",
                drafted="",
                accepted="",
                positions="",
                emitted="generation_tokens",
                derive=accepted_from_generated,
            ),
        ),
        # Drafted is nominal: steps times the configured length, in a tree its nodes.  Its own
        # spec_accept_length is completion tokens by steps, the token of the prompt pass included,
        # so it is not read.
        answers=(
            AnswerFields(
                path=("sglext", "spec_tokens_details"),
                steps="spec_verify_ct",
                drafted="spec_num_proposed_drafts",
                accepted="spec_num_correct_drafts",
                histogram="spec_correct_drafts_histogram",
            ),
            # as its own route and older releases have them
            AnswerFields(
                path=("meta_info",),
                steps="spec_verify_ct",
                drafted="spec_num_proposed_drafts",
                accepted="spec_num_correct_drafts",
                histogram="spec_correct_drafts_histogram",
            ),
        ),
    ),
    Engine(
        name="vllm",
        owners=("vllm",),
        version=VersionPage("/version", names_engine=False),
        series="vllm:",
        asks={"return_token_ids": True},  # a chunk holds all tokens of a step: how many, these tell
        # Counted after truncation.  iteration_tokens_total beside it is a histogram in spite of its
        # name.
        generated=("vllm:generation_tokens_total",),
        running="requests_running",
        waiting="requests_waiting",
        cache_info="vllm:cache_config_info",
        # They count with every step, one series an engine: all are summed.  Steps without a draft
        # are not counted.  A full hit of the prefix cache is padded with a draft of dummies: one
        # step more, nothing accepted.  A last step may overshoot max_tokens: accepted, not sent.
        # Several API servers have one page each, which then is of a part only.  Before its rewrite
        # it told emitted tokens in place of steps.
        counters=(DraftCounters("vllm:spec_decode_num_", emitted="emitted_tokens"),),
        counters_if_configured=True,
        # With --per-request-spec-decode-metrics, on the usage chunk; a server without speculation
        # does not start with that flag.
        answers=(
            AnswerFields(
                path=("metrics", "speculative_decoding"),
                steps="num_spec_steps",
                drafted="num_draft_tokens",
                accepted="num_accepted_draft_tokens",
                histogram="acceptance_histogram",
            ),
        ),
    ),
    Engine(
        name="lmdeploy",
        owners=("lmdeploy",),
        series="lmdeploy:",
        generated=("lmdeploy:generation_tokens_total",),
        running="requests_running",
        waiting="requests_waiting",
        # Drafted is nominal, the configured length times the steps.  A task of its own counts, so
        # it may come late.  With API keys its page is guarded, whatever its documentation says.
        counters=(DraftCounters("lmdeploy:spec_decode_num_"),),
        counters_if_configured=True,
    ),
    Engine(
        name="tensorrt-llm",
        owners=("tensorrt_llm",),
        version=VersionPage("/version", names_engine=False),
        series="trtllm_",
        # /metrics is JSON there, and every read empties it.  Unknown request fields are an error.
        metrics_page="/prometheus/metrics",
        generated=("trtllm_generation_tokens_total",),
        running="requests_running",
        waiting="requests_waiting",
        # Two families count the same tokens at different moments, so one of them is used, never
        # both.  None has steps.  Label values may be the word "undefined".
        counters=(
            DraftCounters(
                stem="trtllm_spec_decode_",
                steps="",
                drafted="num_draft_tokens",
                accepted="num_accepted_tokens",
                positions="accepted_tokens",
                needs=("drafted",),
            ),
            DraftCounters(
                stem="trtllm_spec_decode_",
                steps="",
                drafted="",
                accepted="",
                positions="accepted_tokens",
                drafted_positions="drafted_tokens",
                sums_positions=True,
                needs=("drafted", "per_position"),
            ),
        ),
        # with per_request_spec_decode_stats, inside the choice
        answers=(
            AnswerFields(
                path=("choice",),
                steps="num_spec_steps",
                drafted="total_draft_tokens",
                accepted="total_accepted_draft_tokens",
                histogram="acceptance_histogram",
            ),
        ),
    ),
    Engine(
        name="lm-studio",
        owners=("organization_owner",),
        # Drafts that it ignored were never verified and do not count as drafted, although they are
        # in its total.
        answers=(
            AnswerFields(
                path=("stats",),
                accepted="accepted_draft_tokens_count",
                rejected="rejected_draft_tokens_count",
            ),
        ),
    ),
    Engine(
        name="tabbyapi",
        owners=("tabbyAPI",),
        # Gateways too.  Rejected is all that a mismatch left unresolved, so the sum is what was
        # drafted.  Many servers that never draft send both as 0; at OpenAI they mean predicted
        # outputs.
        answers=(
            AnswerFields(
                path=("usage_details",),
                accepted="accepted_prediction_tokens",
                rejected="rejected_prediction_tokens",
                zeros_tell=False,
            ),
        ),
    ),
    Engine(
        name="koboldcpp",
        owners=("koboldcpp",),
        version=VersionPage("/api/extra/version", mark="result", marked="KoboldCpp"),
        # Of its last generation only.  One failure is one round that ended in a rejection, not one
        # token, so their sum is not what was drafted.
        answer_page="/api/extra/perf",
        answers=(
            AnswerFields(
                path=("perf",),
                accepted="last_draft_success",
                rejections="last_draft_failed",
                zeros_tell=False,
            ),
        ),
    ),
    # It tells of its drafts in its log only, if at all.
    Engine(name="ollama", owners=("library",), version=VersionPage("/api/version")),
    Engine(
        name="tgi",
        version=VersionPage("/info", mark="model_id"),
        series="tgi_",
        generated=("tgi_request_generated_tokens_sum",),
        running="batch_current_size",
        waiting="queue_size",
        # No counter of drafted tokens.  le="i" holds the steps with up to i accepted; some builds
        # have no buckets, and then it is called a summary.
        counters=(
            DraftCounters(
                stem="tgi_request_skipped_tokens_",
                steps="count",
                drafted="",
                accepted="sum",
                positions="bucket",
                derive=accepted_from_histogram,
            ),
        ),
        histograms=r"tgi_|.*skipped_tokens",
    ),
    # Python's own web server, which says so.  It tells nothing of its drafts.  num_draft_tokens is
    # obeyed in a request, and 0 is off, but the draft still reads the prompt; another draft_model
    # loads it anew.
    Engine(name="mlx-lm", banner="BaseHTTP", banner_is_common=True),
    REFERENCE,
)

# What AnswerBuilder and take_reading keep under names of their own: a block of the choice, one of
# the usage, a page.
KEPT_APART = ("choice", "usage_details", "perf")

_SPECULATION = re.compile(
    r"(?!http)(?:.*[^a-z])?(?:spec_|specul|draft|skipped_tokens|accepted_|acceptance)"
)


class Known:
    """What all these rows together know of answers and of names on metrics pages, found once."""

    def __init__(self, rows: Sequence[Engine]) -> None:
        paths = [fields.path[0] for row in rows for fields in row.answers]
        statistics = [name for name in paths if name not in KEPT_APART]
        # fields of an answer that are kept as sent
        self.statistics = tuple(dict.fromkeys([*statistics, "timings", "system_fingerprint"]))
        counters = [each for row in rows for each in row.counters]
        self.counters = {name for each in counters for name in each.names()}
        # the only counts of which there may be more than tokens were made
        self.drafted = {each.stem + each.drafted for each in counters}
        self.drafted |= {each.stem + each.drafted_positions for each in counters}
        self.generated = {name for row in rows for name in row.generated}
        configured = [row for row in rows if row.counters_if_configured]
        self.generated_if_configured = {name for row in configured for name in row.generated}
        self.running = tuple(row.running for row in rows if row.running)
        self.waiting = tuple(row.waiting for row in rows if row.waiting)
        self.gauges = self.running + self.waiting
        self.live_gauges = tuple(
            name
            for row in rows
            if not row.stale_gauges
            for name in (row.running, row.waiting)
            if name
        )
        self.memory = {"process_resident_memory_bytes", *(row.cache_info for row in rows)}
        self.six_digits = [row.six_digits for row in rows if row.six_digits]
        histograms = [row.histograms for row in rows if row.histograms]
        self.histograms = re.compile("|".join(histograms))

    def reads(self, name: str) -> bool:
        """Whether this program reads the series of this name."""
        if name in self.generated or name in self.memory or _SPECULATION.match(name):
            return True
        return name.endswith(self.gauges) or name.removesuffix("_total") in self.counters


known_to = functools.cache(Known)  # of a table of rows, which is itself and no other


def recognised(banner: str, owner: Optional[str], is_listed: bool) -> Engine:
    """The row of a server with this Server header and owner of its model, which may have none."""
    for row in ENGINES:
        is_told = not row.banner_is_common or (is_listed and owner is None)
        if is_told and row.banner and banner.startswith(row.banner):
            return row
    return next((row for row in ENGINES if owner in row.owners), UNKNOWN)


def recognised_by_series(names: Iterable[str]) -> Engine:
    """The row of a server with a metrics page of these names."""
    seen = list(names)
    for row in ENGINES:
        if row.series and any(name.startswith(row.series) for name in seen):
            return row
    return UNKNOWN


# ---- arithmetic ---------------------------------------------------------------------------------


# Leviathan, Kalman, Matias: Fast Inference from Transformers via Speculative Decoding, 2023.
# alpha: probability that a tested draft is accepted; k: chain length; c: cost of one draft step in
# target steps.
def check_arithmetic(alpha: float = 0.0, k: int = 0, c: float = 0.0) -> None:
    """UsageError for what is not a probability, a chain length or a cost."""
    if not 0.0 <= alpha <= 1.0:
        raise UsageError(f"alpha {alpha:g} is not a probability between 0 and 1")
    if not 0 <= k <= LONGEST_ASKED:
        raise UsageError(f"chain length {k} is not between 0 and {LONGEST_ASKED}")
    if not 0.0 <= c < math.inf:
        raise UsageError(f"draft cost {c:g} is not a number of target steps, 0 or more")


def expected_tokens(alpha: float, k: int) -> float:
    """Tokens per verification step, (1 - alpha^(k+1)) / (1 - alpha): between 1 and k + 1.

    Leviathan et al., equation 1.
    """
    check_arithmetic(alpha, k)
    return math.fsum(alpha**i for i in range(k + 1))


def speedup(alpha: float, k: int, c: float) -> float:
    """Expected speed-up E / (1 + k c) where verification costs one target step.

    Leviathan et al., theorem 3.8.
    """
    check_arithmetic(alpha, k, c)
    return expected_tokens(alpha, k) / (1 + k * c)


def bisected(value_at: Callable[[float], float], wanted: float, low: float, high: float) -> float:
    """Where a growing function reaches `wanted`, to the last bits."""
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if value_at(middle) < wanted:
            low = middle
        else:
            high = middle
    return high


def alpha_needed(k: int, step_cost: float) -> tuple[str, Optional[float]]:
    """Which alpha pays for a step of this cost, in target steps, with k drafts.

    ("alpha", that alpha), or ("any", 0), or ("cannot-pay", None).
    """
    check_arithmetic(k=k)
    if step_cost <= 1.0:
        return "any", 0.0
    if step_cost > k + 1:
        return "cannot-pay", None
    return "alpha", _alpha_for_tokens(step_cost, k)


def alpha_for_accepted(accepted_per_step: float, k: int) -> Optional[float]:
    """The alpha with alpha + ... + alpha^k accepted drafts per step, None where there is none."""
    if not 0.0 <= accepted_per_step <= k:
        return None
    if accepted_per_step == 0.0:
        return 0.0
    return _alpha_for_tokens(1 + accepted_per_step, k)


def _alpha_for_tokens(tokens_per_step: float, k: int) -> float:
    return bisected(lambda alpha: expected_tokens(alpha, k), tokens_per_step, 0.0, 1.0)


def best_chain(alpha: float, c: float) -> tuple[Optional[int], float]:
    """(chain length, speed-up) with the highest expected speed-up.

    Length 0, no draft, where no speed-up is above 1.  The speed-up rises to one peak and falls.
    Where it never falls, longer is always better: (None, its limit).  Lengths up to LONGEST_ASKED
    are looked at.
    """
    check_arithmetic(alpha, 0, c)
    if alpha == 1.0 and c < 1.0:
        return None, 1 / c if c else math.inf
    if c == 0.0 and alpha > 0.0:
        return None, 1 / (1 - alpha)
    length, best, tokens = 0, 1.0, 1.0
    for k in range(1, LONGEST_ASKED + 1):
        tokens += alpha**k
        gain = tokens / (1 + k * c)
        if gain <= best:
            break
        length, best = k, gain
    return length, best


class ChainPrediction(TypedDict):
    """What one chain length would give, as it stands in the records."""

    chain: int
    predicted_speedup: float
    extrapolated: bool  # whether acceptance at its last positions was carried on, not measured


def predicted_by_chain(
    survivals: Sequence[float], step_cost: Callable[[int], float], longest: int
) -> list[ChainPrediction]:
    """Speed-up for each chain length up to `longest`: 1 + accepted per step, over a step's cost.

    `survivals` are unconditional acceptance rates by position; beyond the last the conditional rate
    is carried on, and the figure marked as extrapolated.  `step_cost` gives target steps; a length
    whose cost is not above 0 is left out.
    """
    rates = _carried_on(survivals, longest)
    predictions: list[ChainPrediction] = []
    for k in range(1, longest + 1):
        cost = step_cost(k)
        if cost > 0:
            predictions.append(
                {
                    "chain": k,
                    "predicted_speedup": (1 + math.fsum(rates[:k])) / cost,
                    "extrapolated": k > len(survivals),
                }
            )
    return predictions


def _carried_on(survivals: Sequence[float], length: int) -> list[float]:
    """The unconditional rates, continued with the last conditional one up to this length."""
    before, last = [1.0, *survivals][-2:]
    conditional = 0.0
    if before > 0:
        conditional = min(last / before, 1.0)
    rates = list(survivals)
    while len(rates) < length:
        rates.append(rates[-1] * conditional)
    return rates


def fitted_costs(points: Sequence[tuple[float, float]]) -> Optional[tuple[float, float]]:
    """(verification cost, draft cost) by least squares, both in target steps.

    `points` are (drafts per step, step cost) of several chain lengths; None for only one, which
    cannot separate the two.  Step cost = verification + drafts x draft cost.
    """
    lengths = {round(k, 3) for k, _ in points}
    if len(lengths) < 2:
        return None
    mean_k = mean([k for k, _ in points])
    mean_cost = mean([cost for _, cost in points])
    together = math.fsum((k - mean_k) * (cost - mean_cost) for k, cost in points)
    alone = math.fsum((k - mean_k) ** 2 for k, _ in points)
    draft_cost = together / alone
    return mean_cost - draft_cost * mean_k, draft_cost


def fit_error(points: Sequence[tuple[float, float]], costs: tuple[float, float]) -> Optional[float]:
    """Standard error of the fitted draft cost, in target steps; None for fewer than 3 points."""
    if len(points) < 3:
        return None
    verifying, drafting = costs
    mean_k = mean([k for k, _ in points])
    left = math.fsum((cost - verifying - drafting * k) ** 2 for k, cost in points)
    return math.sqrt(left / (len(points) - 2) / math.fsum((k - mean_k) ** 2 for k, _ in points))


# ---- statistics ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimate:
    """A ratio with its 95% interval (None where there is none) and the prompts it rests on."""

    ratio: float
    low: Optional[float]
    high: Optional[float]
    prompts: int


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean of at least one value."""
    return math.fsum(values) / len(values)


def median(values: Sequence[float]) -> float:
    """The middle value, or the mean of the two middle ones."""
    ranked = sorted(values)
    half = len(ranked) // 2
    return (ranked[half] + ranked[-1 - half]) / 2


def t_probability(t: float, df: int) -> float:
    """P(|T| <= t) for Student's t with whole degrees of freedom.

    Abramowitz and Stegun, 26.7.3 and 26.7.4.
    """
    theta = math.atan2(t, math.sqrt(df))
    sine = math.sin(theta)
    cosine = math.cos(theta)
    is_odd = df % 2
    term = cosine if is_odd else 1.0
    total = term
    for i in range(2 + is_odd, df - 1, 2):
        term *= cosine * cosine * (i - 1) / i
        total += term
    if not is_odd:
        return sine * total
    if df == 1:
        return 2 / math.pi * theta
    return 2 / math.pi * (theta + sine * total)


@functools.cache
def t_quantile(df: int, level: float = 0.95) -> float:
    """The t that a Student variable stays within, in absolute value, at this level."""
    return bisected(lambda t: t_probability(t, df), level, 0.0, 1e4)


def estimate(logs: Sequence[float], spread: Optional[float], df: int, prompts: int) -> Estimate:
    """exp of the mean log ratio, and its t interval.

    `spread` is the standard deviation of one log ratio with `df` degrees of freedom; without them
    there is no interval.
    """
    centre = mean(logs)
    if spread is None or df < 1:
        return Estimate(math.exp(centre), None, None, prompts)
    half = t_quantile(df) * spread / math.sqrt(len(logs))
    low = math.exp(max(centre - half, -700.0))  # exp overflows from 710 on
    high = math.exp(min(centre + half, 700.0))
    return Estimate(math.exp(centre), low, high, prompts)


def deviation(values: Sequence[float]) -> Optional[float]:
    """The sample standard deviation, None for fewer than two values."""
    if len(values) < 2:
        return None
    centre = mean(values)
    squares = math.fsum((value - centre) ** 2 for value in values)
    return math.sqrt(squares / (len(values) - 1))


def over_prompts(logs: Logs) -> Optional[Estimate]:
    """For prompts like these: repeats collapse to their median.

    Prompts are the sample, and repeats are not.
    """
    medians = [median(repeats) for repeats in logs]
    if not medians:
        return None
    return estimate(medians, deviation(medians), len(medians) - 1, len(medians))


def over_repeats(logs: Logs) -> Optional[Estimate]:
    """For exactly these prompts: the mean of all pairs, with the spread of repeats in prompts."""
    everything = [value for repeats in logs for value in repeats]
    if not everything:
        return None
    df = len(everything) - len(logs)
    within = math.fsum((deviation(repeats) or 0.0) ** 2 * (len(repeats) - 1) for repeats in logs)
    spread = math.sqrt(within / df) if df else None
    return estimate(everything, spread, df, len(logs))


def stall_count(logs: Logs) -> int:
    """Repeats far from their prompt's median, against the median residual of all.

    They are counted, never deleted.
    """
    residuals = []
    for repeats in logs:
        middle = median(repeats)
        residuals += [abs(value - middle) for value in repeats]
    moved = [residual for residual in residuals if residual > 0]
    if not moved:
        return 0
    limit = STALL_CUTOFF * median(moved)
    return sum(residual > limit for residual in moved)


def verdict_of(speed: Optional[Estimate], min_gain: float) -> str:
    """pays, does-not-pay or undecided.

    Only a whole interval on one side of 1 + min_gain decides.
    """
    if speed is None or speed.low is None or speed.high is None:
        return "undecided"
    if speed.low > 1 + min_gain:
        return "pays"
    if speed.high < 1 + min_gain:
        return "does-not-pay"
    return "undecided"


def more_prompts(logs: Logs, min_gain: float) -> Optional[str]:
    """How many more prompts might settle an undecided verdict, to one significant figure.

    ((1.96 + 0.84) s / distance)^2 prompts give 80% power at the 5% level.  None where unknowable.
    """
    medians = [median(repeats) for repeats in logs]
    spread = deviation(medians)
    if spread is None:
        return None
    distance = abs(mean(medians) - math.log1p(min_gain))
    needed = math.inf
    if distance > 0:
        needed = ((1.96 + 0.84) * spread / distance) ** 2 - len(medians)
    if needed > 100:
        return "more than 100"
    return f"{max(float(f'{needed:.1g}'), 1.0):.0f}"


# ---- HTTP client --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Endpoint:
    """One server as this run talks to it.

    `api` ends in /v1, `root` is what /metrics and /props hang on.
    """

    arm: str
    api: str
    root: str
    model: str = ""
    key: str = field(default="", repr=False)
    key_variable: str = ""
    request: JSON = field(default_factory=dict)
    stream: bool = True
    timeout_s: float = 300.0
    metrics_url: Optional[str] = None
    engine: Engine = UNKNOWN
    served: tuple[str, ...] = ()  # the models that it lists

    # a lambda, since the class comes later, and tests replace what sleeps
    patience: Patience = field(
        default_factory=lambda: Patience(),  # noqa: PLW0108
        compare=False,
        repr=False,
    )

    @property
    def name(self) -> str:
        """As messages call it."""
        return f"{self.arm} server {self.api}"

    @property
    def shown_model(self) -> str:
        """The model as messages and records may name it."""
        return redacted(self.model, self.key, SECRET_LENGTH)


@dataclass(frozen=True)
class Answer:
    """What one completed request brought.

    Times are in seconds, counts as the server gave them; None where unknown.
    """

    content: str
    reasoning: str
    finish_reason: Optional[str]
    latency_s: float
    ttft_s: Optional[float] = None
    decode_s: Optional[float] = None
    decode_tokens: Optional[int] = None
    decode_source: Optional[str] = None  # as in DecodeTime
    completion_tokens: Optional[int] = None
    prompt_tokens: Optional[int] = None
    cached_tokens: Optional[int] = None
    statistics: JSON = field(default_factory=dict)
    streamed: bool = False
    undecodable: bool = False
    silent_tokens: int = 0  # counted, told as no reasoning, and without any text
    timings_doubtful: bool = False  # the server's own times contradict latency or usage
    tool_calls: str = ""  # a JSON list of {"name", "arguments"}, arguments as they were sent

    @functools.cached_property
    def drafts(self) -> Optional[Acceptance]:
        """What it tells of its drafts, None where it tells nothing."""
        return acceptance_of_answer(self.statistics)

    @property
    def texts(self) -> tuple[str, str, str]:
        """(content, reasoning, tool calls)."""
        return self.content, self.reasoning, self.tool_calls


class _DeadlineSocket(socket.socket):
    """A connected socket whose reads all end at one deadline, however slowly the bytes drip in."""

    deadline = math.inf
    limit = math.inf  # of the whole exchange: no deadline is later

    def recv_into(self, *args: Any, **kwargs: Any) -> int:
        """As socket.recv_into; raises socket.timeout once the deadline has passed."""
        self.settimeout(max(0.001, self.deadline - time.perf_counter()))
        return super().recv_into(*args, **kwargs)


class Response(http.client.HTTPResponse):
    """The answer to a request; interim ones (102, 103) are none and are passed over."""

    def __init__(self, sock: _DeadlineSocket, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self.socket = sock

    def begin(self) -> None:
        """Read the head, as http.client calls it."""
        super().begin()
        while self.status < 200:
            self.headers = None  # type: ignore[assignment]
            super().begin()

    def end_within(self, seconds: float) -> None:
        """Let reads end so much later at most, with socket.timeout."""
        self.socket.deadline = min(self.socket.limit, time.perf_counter() + seconds)


def _connect(host: str, timeout: float, **options: Any) -> http.client.HTTPConnection:
    """A connection to which the whole exchange has `timeout` seconds."""
    deadline = time.perf_counter() + timeout
    connection = http.client.HTTPConnection(host, timeout=timeout, **options)
    connection.response_class = Response
    connection.connect()
    wrapped = _DeadlineSocket(fileno=connection.sock.detach())
    wrapped.settimeout(timeout)
    wrapped.deadline = wrapped.limit = deadline
    connection.sock = wrapped
    return connection


class _DeadlineHandler(urllib.request.HTTPHandler):
    """Plain http over connections that keep to a deadline."""

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        """As urllib calls it."""
        return self.do_open(_connect, req)  # type: ignore[arg-type]


@functools.cache
def _opener() -> urllib.request.OpenerDirector:
    """urllib without proxies and redirects: a request, and its key, reaches the named host only."""
    opener = urllib.request.OpenerDirector()
    for kind in (
        _DeadlineHandler,
        urllib.request.HTTPErrorProcessor,
        urllib.request.HTTPDefaultErrorHandler,
    ):
        opener.add_handler(kind())
    opener.addheaders = [("User-Agent", f"measure-speculative/{__version__}")]
    return opener


def checked_url(url: str, option: str, query_allowed: bool = False) -> urllib.parse.SplitResult:
    """The parts of a plain http URL; UsageError for anything else, without echoing credentials."""
    address = url
    if query_allowed:
        address = url.partition("?")[0]
    if "@" in address:
        raise UsageError(
            f"{option} holds credentials (not shown); put a key into the environment, "
            "see --api-key-env"
        )
    parts = _http_parts(url, option)
    if parts.fragment or (parts.query and not query_allowed):
        plain = re.split(r"[?#]", url)[0]
        raise UsageError(f"{option} {plain!r} has a query or fragment; give the plain base URL")
    is_ascii = (parts.path + parts.query).isascii()
    if not is_ascii or re.search(r"[\x00-\x20\x7f]", url.strip()):
        raise UsageError(
            f"{option} {url!r} holds a blank, control or non-ASCII character; write it as %XX"
        )
    return parts


def _http_parts(url: str, option: str) -> urllib.parse.SplitResult:
    try:
        parts = urllib.parse.urlsplit(url.strip())
        host, _ = parts.hostname, parts.port  # these may raise it too
    except ValueError:
        raise UsageError(f"{option} is not a URL, like http://127.0.0.1:8080/v1") from None
    if parts.scheme == "https":
        raise UsageError(
            f"{option} is https: encryption would be timed along with the server, so plain http "
            "only; measure on the server's own machine or through a tunnel to it "
            "(ssh -L 8080:127.0.0.1:8080 HOST)"
        )
    if parts.scheme != "http" or not host:
        raise UsageError(f"{option} {url!r} is not an http URL, like http://127.0.0.1:8080/v1")
    return parts


def base_urls(url: str, option: str) -> tuple[str, str]:
    """(API base, server root).

    http://h:8080, http://h:8080/ and http://h:8080/v1/ all mean the same server.
    """
    parts = checked_url(url, option)
    host = f"http://{parts.netloc}"
    path = re.sub(r"/chat/completions/*$", "", parts.path).rstrip("/")
    root = re.sub(r"/v\d+$", "", path)
    if root == path:
        path += "/v1"
    return host + path, host + root


def same_server(url: str, other: str) -> bool:
    """Whether two http URLs name the same host and port, as a key requires."""
    places = set()
    for each in (url, other):
        parts = urllib.parse.urlsplit(each)
        places.add((parts.hostname, parts.port or 80))
    return len(places) == 1


class Placeholder(str):
    """A key that is no secret, since it stands in the model's name: it is sent and may be shown."""


def redacted(text: str, key: str, least: int = 1) -> str:
    """The text without a key of `least` characters or more, however an echo has spelled it.

    For output alone: what goes into a request is never changed.
    """
    if not key or len(key) < least or isinstance(key, Placeholder):
        return text
    for spelling in _spellings(key):
        text = text.replace(spelling, "[key]")
    return text


def _spellings(key: str) -> list[str]:
    """A key as it is, in markup, URL and JSON; the longest first, since one may hold another."""
    markup = key.replace("&", "&amp;").replace("<", "&lt;")
    markup = markup.replace(">", "&gt;").replace('"', "&quot;")
    spellings = {key, markup, json.dumps(key)[1:-1], key.replace("/", "\\/")}
    for quoted in (urllib.parse.quote(key), urllib.parse.quote(key, safe="")):
        in_lower_case = re.sub("%..", lambda match: match[0].lower(), quoted)
        spellings.update((quoted, in_lower_case))
    return sorted(spellings, key=len, reverse=True)


def scrubbed(value: Any, key: str, levels: int = 20, shown: Callable[[str], str] = str) -> Any:
    """A JSON value as it may be kept.

    Without the key in its strings, these as `shown`, numbers finite, no deeper than `levels`.
    """
    if isinstance(value, str):
        return shown(redacted(value, key, SECRET_LENGTH))
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, list):
        return [scrubbed(item, key, levels - 1, shown) for item in value if levels]
    if not isinstance(value, dict):
        return value
    kept = {}
    if levels:
        for name, item in value.items():
            kept[shown(redacted(name, key, SECRET_LENGTH))] = scrubbed(item, key, levels - 1, shown)
    return kept


def _refusal(error: urllib.error.HTTPError, key: str) -> RequestFailed:
    """An HTTP error status in the server's own words."""
    text = _body_text(error) or error.reason
    if 300 <= error.code < 400:
        target = error.headers.get("Location")
        text = f"redirects to {target}; redirects are not followed, give the final URL"
    if error.code >= 500 and error.code != 503:
        text = f"{text}; see the server's log"
    said = one_line(redacted(f"HTTP {error.code}: {text}", key))
    return RequestFailed(said, error.code, error.headers.get("Retry-After"))


def _body_text(error: urllib.error.HTTPError) -> str:
    body = b""
    with error, contextlib.suppress(OSError, http.client.HTTPException, RequestFailed):
        for piece in body_pieces(cast(Response, error.fp)):
            body += piece
            if len(body) > PIECE_BYTES:
                break
    if _is_html(body):
        return "an HTML page"
    text = body.decode("utf-8", "replace")
    with contextlib.suppress(ValueError):
        text = said_in(loads(text))
    return text


def _is_html(body: bytes) -> bool:
    return body.lstrip().startswith(b"<")


def said_in(value: object) -> str:
    """The words of an error, as servers shape it."""
    error = as_dict(value).get("error") or value
    fields = as_dict(error)
    words = fields.get("message") or fields.get("detail") or error
    if isinstance(words, str):
        return words
    return json.dumps(scrubbed(words, "", 5))  # it may be nested deeper than can be written


def _connection_trouble(error: Exception, timeout_s: float, key: str) -> str:
    """What kept an exchange from its end, and what to do."""
    reason = getattr(error, "reason", error)
    if isinstance(error, UnicodeError):  # whose `reason` is a text
        reason = error
    if isinstance(reason, (socket.timeout, TimeoutError)):
        return f"no answer within {timeout_s:g} s; is it overloaded? A longer limit: --timeout"
    if isinstance(reason, ConnectionRefusedError):
        return "connection refused; is the server running, and is the port right?"
    if getattr(reason, "errno", None) in (errno.EMFILE, errno.ENFILE):
        return (
            "this machine allows no more open connections; lower --concurrency, or raise its "
            "limit (ulimit -n)"
        )
    if isinstance(reason, (socket.gaierror, UnicodeError)):
        return "the host name is not known"
    if isinstance(reason, (ConnectionError, http.client.IncompleteRead)):
        return (
            "the server closed the connection before its answer was complete; see the server's log"
        )
    return one_line(redacted(f"{type(reason).__name__}: {reason}; is this an HTTP server?", key))


PIECE_BYTES = 65536


def body_pieces(response: Response) -> Iterator[bytes]:
    """The body in pieces as they arrive, unpacked where it is gzip.

    IncompleteRead where it was cut, RequestFailed where it is too long or no gzip after all.
    """
    left, is_open_ended = response.length, False
    if left is None:  # chunked, or up to the end of the connection
        left, is_open_ended = sys.maxsize, True
    total, unpack = 0, None
    while left > 0:
        # read1 returns what has arrived; its own book-keeping of Content-Length differs between
        # versions.
        piece = response.read1(left if left < PIECE_BYTES else PIECE_BYTES)
        if not piece:
            break
        left -= len(piece)
        if not total and unpack is None and piece[:1] == b"\x1f":
            unpack = zlib.decompressobj(31)
        if unpack:
            try:
                piece = unpack.decompress(piece)
            except zlib.error as error:
                raise RequestFailed(f"sent a body that says gzip and is not: {error}") from None
        total += len(piece)
        if total > MAX_BODY_BYTES:
            raise RequestFailed(
                f"sent more than {MAX_BODY_BYTES >> 20} MiB; does its answer stop at --max-tokens?"
            )
        yield piece
    if (left > 0 and not is_open_ended) or (unpack and not unpack.eof):
        raise http.client.IncompleteRead(b"")


def exchange(
    url: str,
    key: str,
    timeout_s: float,
    read: Callable[[Response], T],
    body: Optional[JSON] = None,
) -> T:
    """What `read` makes of the response to a GET, or to a POST of `body`.

    RequestFailed says why there is none.
    """
    try:
        request = urllib.request.Request(url)
        if key:
            request.add_header("Authorization", f"Bearer {key}")
        if body is not None:
            request.data = json.dumps(body).encode()
            request.add_header("Content-Type", "application/json")
        with contextlib.closing(_opener().open(request, timeout=timeout_s)) as response:
            return read(response)
    except urllib.error.HTTPError as error:
        raise _refusal(error, key) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise RequestFailed(_connection_trouble(error, timeout_s, key)) from None


def whole_body(response: Response) -> bytes:
    """All of it, unpacked."""
    return b"".join(body_pieces(response))


def get_text(
    url: str, key: str = "", timeout_s: float = SIDE_TIMEOUT_S
) -> tuple[str, http.client.HTTPMessage]:
    """The text of a GET and its headers, key removed; RequestFailed otherwise."""
    text, sent = raw_text(url, key, timeout_s)
    headers = http.client.HTTPMessage()
    for name, value in sent.items():
        headers[name] = redacted(value, key, SECRET_LENGTH)
    return redacted(text, key, SECRET_LENGTH), headers


def raw_text(url: str, key: str, timeout_s: float) -> tuple[str, http.client.HTTPMessage]:
    """The same as they were sent, for what goes into a request."""
    body, headers = exchange(url, key, timeout_s, lambda sent: (whole_body(sent), sent.headers))
    return body.decode("utf-8-sig", "replace"), headers


def get_json(url: str, key: str, timeout_s: float) -> Any:
    """The JSON value of a GET, key removed.

    RequestFailed where there is no answer, ValueError where it is no JSON.
    """
    text, _ = get_text(url, key, timeout_s)
    return scrubbed(loads(text), key)


@dataclass
class Patience:
    """How long a server may still keep its arm waiting, after what its requests came to so far."""

    sleep: Callable[[float], None] = lambda seconds: time.sleep(seconds)  # noqa: PLW0108
    clock: Callable[[], float] = time.perf_counter
    in_vain_s: Optional[float] = None  # the whole wait for a busy server, once it was in vain
    timeouts: int = 0  # in a row
    failures: int = 0  # in a row, of whatever kind

    def limit_s(self, usual_s: float) -> float:
        """Of the next request: a server that let two in a row time out has a tenth of it."""
        if self.timeouts < 2:
            return usual_s
        return usual_s / 10

    def note_failure(self, took_s: float, limit_s: float) -> None:
        """Take in that a request failed, so many seconds after it was sent."""
        self.failures += 1
        self.timeouts += 1
        if took_s < limit_s:
            self.timeouts = 0

    def note_answer(self) -> None:
        """Take in that a request was answered."""
        self.failures = self.timeouts = 0


def patiently(call: Callable[[], T], say: Say, who: str, patience: Patience) -> tuple[T, float]:
    """(result, seconds waited): repeats `call` while the server answers 503 or 429.

    RequestFailed of any other status, and of these once the wait would be above MAX_WAIT_S; a
    server that was still busy after one whole wait is not waited for again.
    """
    waited, usual_pause, next_word = 0.0, 1.0, 0.0
    while True:
        try:
            return call(), waited
        except RequestFailed as error:
            if error.status not in (429, 503):
                raise
            pause = _pause_after(error, usual_pause)
            if patience.in_vain_s is None and waited + pause > MAX_WAIT_S:
                patience.in_vain_s = waited
            if patience.in_vain_s is not None:
                when = "the model is loaded" if error.status == 503 else "it is less busy"
                after = f"after waiting {patience.in_vain_s:.0f} s"
                words = f"{error} - still so {after}; try again when {when}"
                raise RequestFailed(words, error.status) from None
            if waited >= next_word:
                say(f"{who} answers {error}; waiting {pause:g} s, {MAX_WAIT_S:g} s at most")
                next_word = waited + 10
        patience.sleep(pause)
        waited += pause
        usual_pause = min(usual_pause * 2, 10.0)


def _pause_after(error: RequestFailed, usual: float) -> float:
    """Seconds to wait: as the server asks in its Retry-After, else as usual."""
    pause = usual
    with contextlib.suppress(ValueError):  # a date is allowed too; the usual pause is as good
        pause = finite(error.retry_after or "")
    return min(max(pause, 0.5), MAX_WAIT_S)


def complete(endpoint: Endpoint, messages: Sequence[JSON]) -> Answer:
    """One greedy completion, timed from the request to its last byte.

    RequestFailed where there is no whole answer.
    """
    extra: JSON = {"stream": endpoint.stream}
    if endpoint.stream:
        extra["stream_options"] = {"include_usage": True}
    builder = AnswerBuilder(time.perf_counter(), endpoint.key)
    return post_chat(endpoint, messages, extra, builder.read)


def post_chat(
    endpoint: Endpoint,
    messages: Sequence[JSON],
    extra: JSON,
    read: Callable[[Response], T],
) -> T:
    """What `read` makes of the answer to a chat request.

    The endpoint's own fields win, and a null removes one.
    """
    fields = {"model": endpoint.model, "messages": list(messages), **extra, **endpoint.request}
    body = {name: value for name, value in fields.items() if value is not None}
    url = endpoint.api + "/chat/completions"
    return exchange(url, endpoint.key, endpoint.timeout_s, read, body)


# Halves of a character that JSON escapes spelled, and that no other half stands beside.
_LONE_HALF = re.compile("[\ud800-\udc7f\udd00-\udfff]")


def whole_text(text: str) -> str:
    """The text with split characters joined, and what is none as U+FFFD.

    A character may come in two events, as two JSON escapes or as raw bytes; "surrogateescape" has
    kept these.
    """
    paired = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
    raw = _LONE_HALF.sub("\ufffd", paired).encode("utf-8", "surrogateescape")
    return raw.decode("utf-8", "replace")


class DecodeTime(NamedTuple):
    """The seconds in which so many tokens of an answer were made, and who says so."""

    seconds: Optional[float] = None
    tokens: Optional[int] = None
    source: Optional[str] = None  # "timings", "stream", or "stream-approximate"


SILENCE_S = 1.0  # after usage and a finish reason: what is still said has come by then
CLOCKS_APART_S = 0.05  # between a server's own clock and this one, besides 5%
WRONG_UNIT = 300.0  # so many times too short, a time is in another unit


@dataclass
class AnswerBuilder:
    """Puts one answer together from a stream of events, or from the one that a plain answer is.

    Times are those of perf_counter.
    """

    started: float
    key: str = field(default="", repr=False)
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    finish_reason: Optional[str] = None
    usage: JSON = field(default_factory=dict)
    statistics: JSON = field(default_factory=dict)
    first_at: Optional[float] = None  # when the first text came
    last_text_at: float = 0.0
    last_at: float = 0.0  # when the last event came
    told_at: float = math.inf  # when usage and finish reason had both come
    first_tokens: Optional[int] = None  # in the first text, where its event tells them
    # name and arguments of each, in the pieces in which they came, by its place
    tool_calls: dict[int, tuple[list[str], list[str]]] = field(default_factory=dict)
    response: Optional[Response] = None
    done: bool = False
    undecodable: bool = False
    several_choices: bool = False
    unreadable: bool = False  # some event was no JSON
    lacks_a_piece: bool = False  # such an event may have held some of the text

    def read(self, response: Response) -> Answer:
        """The answer of a response: a server may stream or not, whatever it was asked for."""
        pieces = body_pieces(response)
        first = next(pieces, b"")
        kind = response.headers.get("Content-Type") or ""
        as_events = re.match(rb"(\xef\xbb\xbf)?\s*(data|event|id|retry)?:", first)
        if as_events or "event-stream" in kind.lower():
            self.response = response
            self.add_stream(first, pieces)
            return self.answer(streamed=True)
        body = b"".join([first, *pieces])
        self._add_plain(body, time.perf_counter())
        return self.answer(streamed=False)

    def _add_plain(self, body: bytes, at: float) -> None:
        try:
            event = loads(body.decode("utf-8", "surrogateescape").lstrip("\ufeff"))
        except ValueError:
            kind = "no valid JSON"
            if _is_html(body):
                kind = "an HTML page"
            elif not body.strip():
                kind = "nothing"
            raise RequestFailed(
                f"answered with {kind}; is this the base URL of an OpenAI-compatible server?"
            ) from None
        self.add(event, at)
        self.done = bool(as_dict(event).get("choices"))

    def add_stream(self, first: bytes, pieces: Iterator[bytes]) -> None:
        """Read server-sent events up to [DONE] or the end; a cut connection just ends them.

        So does silence once usage and finish reason have come: some streams stay open, or go on.
        """
        try:
            self._add_events(_lines(first, pieces))
        except http.client.IncompleteRead:
            pass
        except (socket.timeout, ConnectionError):
            if self.told_at == math.inf:
                raise

    def _add_events(self, lines: Iterator[tuple[bytes, float]]) -> None:
        data: list[bytes] = []
        at, kind = 0.0, b""
        for line, at in lines:
            if line.startswith(b"data:"):
                data.append(line[5:])
            elif not line:
                if data:
                    self._dispatch(data, at, kind)
                if self.done or (self.finish_reason and at > self.told_at + SILENCE_S):
                    return
                data, kind = [], b""
            elif line.startswith(b"event:"):
                kind = line[6:].strip()
            elif line.startswith(b"error:"):
                kind = b"error"
                data.append(line[6:])
        if data:  # the blank line behind the last event may be missing although all was said
            self._dispatch(data, at, kind)

    def _dispatch(self, data: list[bytes], at: float, kind: bytes) -> None:
        """Take in the lines of one event, which may have a name."""
        text = b"\n".join(data).strip().decode("utf-8", "surrogateescape")  # see whole_text
        failed = kind == b"error"
        if text == "[DONE]" and not failed:
            self.done = True
            self.last_at = at
            return
        event = None
        try:
            event = json.loads(text)
        except (ValueError, RecursionError) as error:
            self._note_unreadable(text, error)
        if failed:
            self.add({"error": event or text or "no reason given"}, at)
        elif event is not None:
            self.add(event, at, kind)

    def _note_unreadable(self, text: str, error: Exception) -> None:
        self.unreadable |= bool(text)
        is_cut = isinstance(error, json.JSONDecodeError)
        looks_like_json = re.search(r"[{}\"]", text)  # a mere "ping" does not
        if self.finish_reason is None and ((is_cut and looks_like_json) or '"content"' in text):
            self.lacks_a_piece = True

    def add(self, event: object, at: float, kind: bytes = b"") -> None:
        """Take in one event; RequestFailed for an error object, whatever came before it.

        The message of a `kind` with a name of its own, as "ping", is no complaint.
        """
        fields = as_dict(event)
        self.last_at = at
        complaint = fields.get("error")
        if not complaint and "choices" not in fields and kind in (b"", b"message"):
            complaint = fields.get("message") or fields.get("detail")
        if complaint or "error" in (fields.get("object"), fields.get("type")):
            words = f"sent an error instead of an answer: {said_in(fields)}"
            said = one_line(redacted(words, self.key))
            raise RequestFailed(f"{said}; see the server's log")
        self.usage = as_dict(fields.get("usage")) or self.usage
        choices = fields.get("choices")
        if isinstance(choices, list):
            for choice in choices:
                self._add_choice(choice, at)
        for name in known_to(ENGINES).statistics:
            if fields.get(name):
                self.statistics[name] = fields[name]
        if self.finish_reason and self.usage and self.told_at == math.inf:
            self._tell(at)

    def _tell(self, at: float) -> None:
        """All was said at this time; what comes within the silence behind it is read on."""
        self.told_at = at
        if self.response:
            self.response.end_within(SILENCE_S)

    def _add_choice(self, choice: object, at: float) -> None:
        fields = as_dict(choice)
        if fields.get("index") not in (None, 0, "0"):
            self.several_choices = True
            return
        part = as_dict(fields.get("delta") or fields.get("message"))
        content = _text_of(part.get("content")) or _text_of(part.get("refusal"))
        reasoning = _text_of(part.get("reasoning_content") or part.get("reasoning"))
        calls = part.get("tool_calls")
        says_more = calls and self._add_tool_calls(calls)
        if content or reasoning or says_more:
            self.content.append(content)
            self.reasoning.append(reasoning)
            self.last_text_at = at
            if self.told_at < at:  # more was to come: its time counts, as its text does
                self._tell(at)
            if self.first_at is None:
                self.first_at = at
                self.first_tokens = self._tokens_at_first(fields.get("token_ids"))
        if fields.get("finish_reason") not in (None, "", "null"):
            reason = scrubbed(fields["finish_reason"], self.key, 2)
            self.finish_reason = one_line(str(reason))
        if isinstance(fields.get("speculative_decoding"), dict):
            self.statistics["choice"] = fields["speculative_decoding"]

    def _add_tool_calls(self, calls: object) -> bool:
        """Take in parts of tool calls; whether they say anything."""
        came = False
        for call in map(as_dict, as_list(calls)):
            function = as_dict(call.get("function"))
            name, arguments = _text_of(function.get("name")), function.get("arguments") or ""
            if not isinstance(arguments, str):
                arguments = json.dumps(scrubbed(arguments, ""))
            place = as_count(call.get("index"))
            if place is None:  # then a name begins a new one
                place = len(self.tool_calls) - (not name)
            names, pieces = self.tool_calls.setdefault(place, ([], []))
            names.append(name)
            pieces.append(arguments)
            came |= bool(name or arguments)
        return came

    def _tokens_at_first(self, token_ids: object) -> Optional[int]:
        """How many tokens the first text holds, where its event tells them."""
        if isinstance(token_ids, list):
            return len(token_ids)
        return as_count(self.usage.get("completion_tokens"))

    @property
    def latency_s(self) -> float:
        """From the request to the last event that is a part of the answer."""
        ended_at = self.last_at
        if not self.done:  # what a stream without [DONE] says behind its usage is no part of it
            ended_at = min(ended_at, self.told_at)
        return ended_at - self.started

    def answer(self, streamed: bool) -> Answer:
        """The answer so far; RequestFailed where it is not whole."""
        content = self._joined(self.content)
        reasoning = self._joined(self.reasoning)
        tool_calls = self._joined_calls()
        self._check_whole(len(content))
        details = as_dict(self.usage.get("completion_tokens_details"))
        if details:
            self.statistics["usage_details"] = details
        has_text = bool(content or reasoning or tool_calls)
        tokens, hidden = self._counts(has_text, content, reasoning)
        count = tokens or 0
        ttft_s = None
        decode = self._told_decode_time()
        doubtful = decode is not None and self._is_contradicted(tokens)
        if streamed and self.first_at is not None:
            ttft_s = self.first_at - self.started
            decode = decode or self._stream_decode_time(self.first_at, count, hidden)
        if decode is None or doubtful:
            decode = DecodeTime()
        silent = count - hidden
        if has_text or silent <= 2:  # an end token, and what stands around it
            silent = 0
        return Answer(
            content=content,
            reasoning=reasoning,
            finish_reason=self.finish_reason,
            latency_s=self.latency_s,
            ttft_s=ttft_s,
            decode_s=decode.seconds,
            decode_tokens=decode.tokens,
            decode_source=decode.source,
            completion_tokens=tokens,
            prompt_tokens=as_count(self.usage.get("prompt_tokens")),
            cached_tokens=self._cached_tokens(),
            statistics=scrubbed(self.statistics, self.key, shown=one_line),
            streamed=streamed,
            undecodable=self.undecodable,
            silent_tokens=silent,
            timings_doubtful=doubtful,
            tool_calls=tool_calls,
        )

    def _counts(self, has_text: bool, content: str, reasoning: str) -> tuple[Optional[int], int]:
        """(tokens of the answer, those of them that were thought and never sent).

        The first is None where the server does not tell it, or tells what cannot be.
        """
        tokens = as_count(self.usage.get("completion_tokens"))
        if self.several_choices or (tokens == 0 and has_text):  # a count of all choices, or none
            tokens = None
        details = as_dict(self.usage.get("completion_tokens_details"))
        thought = as_count(details.get("reasoning_tokens")) or 0
        if reasoning or "</think>" in content:
            thought = 0
        return tokens, min(thought, tokens or 0)

    def _joined(self, parts: list[str]) -> str:
        """The text, whatever the events in which it came; what is no character as U+FFFD."""
        text = redacted("".join(parts), self.key, SECRET_LENGTH)
        whole = whole_text(text)
        self.undecodable |= whole.count("\ufffd") > text.count("\ufffd")
        return whole

    def _joined_calls(self) -> str:
        """The tool calls in order, as one text to compare; "" where there are none."""
        if not self.tool_calls:
            return ""
        calls = []
        for _, (names, pieces) in sorted(self.tool_calls.items()):
            calls.append({"name": "".join(names), "arguments": "".join(pieces)})
        return self._joined([json.dumps(calls, ensure_ascii=False)])

    def _check_whole(self, characters: int) -> None:
        """RequestFailed where the answer did not end as an answer does."""
        if not (self.done or self.finish_reason):
            raise RequestFailed(
                "the answer ended without a finish reason and without [DONE] "
                f"({characters} characters had come); did the server stop or crash? See its log"
            )
        if self.lacks_a_piece:
            raise RequestFailed(
                "sent a stream with a damaged event, so its text lacks a piece; see the server's "
                "log"
            )
        if re.search(r"(?i)error|abort|cancel|timed?.?out|fail", self.finish_reason or ""):
            raise RequestFailed(
                f"gave up, with the finish reason {self.finish_reason}; see the server's log"
            )
        if self.unreadable and self.first_at is None:
            raise RequestFailed("sent a stream that cannot be read: no event of it is JSON")

    @property
    def timings(self) -> JSON:
        """The times and counts by the server's own clock, as llama.cpp tells them."""
        return as_dict(self.statistics.get("timings"))

    def _cached_tokens(self) -> Optional[int]:
        """Prompt tokens that the server did not have to compute, where it tells them."""
        details = as_dict(self.usage.get("prompt_tokens_details"))
        cached = as_count(details.get("cached_tokens"))
        if cached is None:
            cached = as_count(self.timings.get("cache_n"))
        return cached

    def _told_decode_time(self) -> Optional[DecodeTime]:
        """By the server's own clock, None where it does not tell it."""
        told_ms = as_number(self.timings.get("predicted_ms")) or 0.0
        told_tokens = as_count(self.timings.get("predicted_n")) or 0
        if not 1e-6 < told_ms < 1e12 or told_tokens < 2:
            return None
        rate = as_number(self.timings.get("predicted_per_second")) or 0.0
        # newer llama.cpp books the first token to the prompt, as its own rate shows; others book
        # it to this time
        is_without_first = abs(rate * told_ms / 1000 - (told_tokens - 1)) < 0.25
        return DecodeTime(told_ms / 1000, told_tokens - is_without_first, "timings")

    def _is_contradicted(self, tokens: Optional[int]) -> bool:
        """Whether the server's timings cannot be of this answer: too long, too short, other tokens.

        Seconds for milliseconds made 2000x, ten times the tokens of usage 20x.
        """
        told_s = (as_number(self.timings.get("predicted_ms")) or 0.0) / 1000
        if told_s > 1.05 * self.latency_s + CLOCKS_APART_S:
            return True
        told_tokens = as_count(self.timings.get("predicted_n")) or 0
        if tokens is not None and abs(told_tokens - tokens) > 2 + tokens / 10:
            return True
        seen_s = self.latency_s
        if self.first_at is not None and self.last_text_at > self.first_at:
            seen_s = self.last_text_at - self.first_at
        else:
            told_s += (as_number(self.timings.get("prompt_ms")) or 0.0) / 1000
        return seen_s > max(CLOCKS_APART_S, WRONG_UNIT * told_s)

    def _stream_decode_time(
        self, first_at: float, tokens: int, hidden: int
    ) -> Optional[DecodeTime]:
        """From the first text to the last, for the tokens after the first text.

        None also for more than twice the rate of the whole answer: a proxy held its text back, or
        tokens were made that nobody saw.
        """
        first_tokens = self.first_tokens or 1
        if first_tokens <= hidden:
            first_tokens += hidden
        later_tokens = tokens - first_tokens
        seconds = self.last_text_at - first_at
        if later_tokens < 1 or seconds <= 0:
            return None
        if later_tokens * self.latency_s > 2 * tokens * seconds:
            return None
        source = "stream" if self.first_tokens else "stream-approximate"
        return DecodeTime(seconds, later_tokens, source)


def _lines(first: bytes, pieces: Iterator[bytes]) -> Iterator[tuple[bytes, float]]:
    """Whole lines without their ends, which are LF, CRLF or CR, and when they came.

    The unfinished last one too.  Lines that came together have one time: a stream that a proxy held
    back must not look like fast decoding.
    """
    rest, after_return = bytearray(), False
    try:
        for arrived in itertools.chain([first.removeprefix(b"\xef\xbb\xbf")], pieces):
            at = time.perf_counter()
            piece = arrived
            if after_return and piece[:1] == b"\n":
                piece = piece[1:]
            after_return = piece[-1:] == b"\r"
            rest += piece
            if b"\n" in piece or b"\r" in piece:
                lines = bytes(rest).splitlines(keepends=True)
                rest = bytearray()
                if lines[-1][-1:] not in b"\r\n":
                    rest += lines.pop()
                for line in lines:
                    yield line.rstrip(b"\r\n"), at
    except http.client.IncompleteRead:
        yield bytes(rest), at
        raise
    yield bytes(rest), time.perf_counter()


def _text_of(value: object) -> str:
    """Text of a content field: a string, or a list of parts of which those of type text count."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        return ""
    texts = []
    for part in map(as_dict, value):
        if part.get("type") == "text":
            texts.append(str(part.get("text") or ""))
    return "".join(texts)


# ---- Prometheus scraper -------------------------------------------------------------------------


class Sample(NamedTuple):
    """One sample of a metrics page; a tuple, since pages hold thousands."""

    name: str
    labels: tuple[tuple[str, str], ...]  # sorted by label name
    value: float
    kind: str  # "counter", "gauge", "histogram", "summary" or "unknown"
    series: str  # name and labels as the server wrote them

    @property
    def identity(self) -> tuple[str, tuple[tuple[str, str], ...]]:
        """What tells a series from others."""
        return self.name, self.labels

    def label(self, *names: str) -> Optional[str]:
        """The value of the first of these labels that the sample has."""
        return next((value for name, value in self.labels if name in names), None)


# Both take time in proportion to the line, whatever it holds: no two parts that stand side by side
# can share out the same characters, and labels are matched one behind the other, not searched for.
_QUOTED = r"\"([^\"\\]*(?:\\.[^\"\\]*)*)\""

_SAMPLE = re.compile(
    r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?=[ \t{])[ \t]*"
    rf"(?:\{{([^\"}}]*(?:{_QUOTED}[^\"}}]*)*)\}}[ \t]*)?"
    r"([^\s#{]+)(?:[ \t]+[0-9.eE+-]+)?[ \t]*(?:#[ \t]*\{.*)?$"
)

_LABEL = re.compile(rf"([a-zA-Z_][a-zA-Z0-9_]*)[ \t]*=[ \t]*{_QUOTED}[ \t]*(?:,[ \t]*|$)")

_ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}

_PARTS = re.compile(r"_(?:total|bucket|sum|count|created)$")


def parse_metrics(text: str) -> list[Sample]:
    """Samples of a page in Prometheus text format 0.0.4 or OpenMetrics; other lines are skipped.

    https://prometheus.io/docs/instrumenting/exposition_formats/
    """
    samples = []
    kinds: dict[str, str] = {}
    # not splitlines: label values may hold other line ends
    for raw in text.lstrip("\ufeff").split("\n"):
        line = raw.strip(" \t\r")
        if line.startswith("#"):
            words = line.split(None, 3)
            if len(words) == 4 and words[1] == "TYPE":
                kinds[words[2]] = words[3].strip()
            continue
        try:
            samples.append(_sample_in(line, kinds))
        except ValueError:
            continue
    return samples


def _sample_in(line: str, kinds: Mapping[str, str]) -> Sample:
    """The sample of a line; ValueError where there is none.

    `kinds` are the types of families that the page has told so far.
    """
    match = _SAMPLE.match(line)
    if match is None:
        raise ValueError
    name, inside, _, number = match.groups("")
    labels = _labels_in(inside.strip())
    kind = kinds.get(name) or kinds.get(_PARTS.sub("", name), "unknown")
    series = line[: match.start(4)].strip()
    return Sample(name, tuple(sorted(labels)), float(number), kind, series)


def _labels_in(inside: str) -> Iterator[tuple[str, str]]:
    """The labels between the braces; ValueError where something else stands there."""
    end = 0
    while end < len(inside):
        match = _LABEL.match(inside, end)
        if match is None:
            raise ValueError
        yield match[1], _unescaped(match[2])
        end = match.end()


def _unescaped(raw: str) -> str:
    if "\\" not in raw:
        return raw
    return re.sub(r"\\[\\\"n]", lambda match: _ESCAPES[match.group()], raw)


# Why a metrics page told nothing, where another address may have it.
IS_JSON, WANTS_MODEL = "is JSON", "wants a model"


@dataclass(frozen=True)
class Snapshot:
    """What a metrics page said of speculation at one moment, or why it said nothing."""

    samples: Optional[tuple[Sample, ...]]
    unavailable: Optional[str] = None
    process: Optional[str] = None  # changes when the server is restarted
    reason: str = ""  # IS_JSON, WANTS_MODEL or "": `unavailable` as a value; not kept in files

    def total(self, endings: tuple[str, ...]) -> Optional[float]:
        """Sum over the samples whose name ends so, None where there are none."""
        values = [s.value for s in self.samples or () if s.name.endswith(endings)]
        return sum(values) if values else None

    def in_hand(self) -> float:
        """Requests that run or wait, where the gauges are of this moment."""
        return self.total(known_to(ENGINES).live_gauges) or 0.0

    def running(self) -> Optional[float]:
        """Requests that the server is working on."""
        return self.total(known_to(ENGINES).running)

    def waiting(self) -> Optional[float]:
        """Requests that wait for their turn."""
        return self.total(known_to(ENGINES).waiting)


@dataclass(frozen=True)
class Growth:
    """How far counters grew between two snapshots, or why that is unknown."""

    samples: Optional[tuple[Sample, ...]]  # with the growth as value
    void: Optional[str] = None
    reset: bool = False


def snapshot_of(text: str, headers: http.client.HTTPMessage, model: str) -> Snapshot:
    """The samples of a page that this program uses; of several models only the one measured."""
    beginning = text.lstrip()[:1]
    if beginning in ("[", "{"):
        return Snapshot(None, "the page is JSON, not Prometheus text", reason=IS_JSON)
    if beginning == "<":
        return Snapshot(None, "the page is HTML, not Prometheus text")
    page = parse_metrics(text)
    if not page:
        return Snapshot(None, "the page holds no Prometheus samples")
    reads = known_to(ENGINES).reads
    wanted = [s for s in page if as_number(s.value) is not None and reads(s.name)]
    models = set(filter(None, (s.label("model_name", "model") for s in wanted)))
    if len(models) > 1:
        if model not in models:
            listed = one_line(", ".join(sorted(models)))
            words = f"the page counts several models ({listed}), none named {model}"
            return Snapshot(None, words)
        wanted = [s for s in wanted if s.label("model_name", "model") in (None, model)]
    return Snapshot(tuple(wanted), process=_process_of(page, headers))


def _process_of(page: Sequence[Sample], headers: http.client.HTTPMessage) -> Optional[str]:
    """What tells this process of the server from its next."""
    # llama.cpp's header is in microseconds since no known moment: good for comparing only
    told = headers.get("Process-Start-Time-Unix")
    starts = (repr(s.value) for s in page if s.name == "process_start_time_seconds")
    return told or next(starts, told)


def metrics_snapshot(endpoint: Endpoint) -> Snapshot:
    """The metrics page now; what is not such a page is unavailable, never zero."""
    url = endpoint.metrics_url
    if url is None:
        return Snapshot(None, "no metrics page is known for this engine")
    key = ""
    if same_server(url, endpoint.api):
        key = endpoint.key
    where = redacted(url, endpoint.key).partition("?")[0]
    try:
        text, headers = get_text(url, key, min(endpoint.timeout_s, SIDE_TIMEOUT_S))
    except RequestFailed as error:
        return _refused_page(where, error)
    snapshot = snapshot_of(text, headers, endpoint.shown_model)
    if snapshot.unavailable:
        return replace(snapshot, unavailable=f"{where}: {snapshot.unavailable}")
    return snapshot


def _refused_page(where: str, error: RequestFailed) -> Snapshot:
    """Why there is no page, with what to do."""
    hint = "start " + ", ".join(row.metrics_hint for row in ENGINES if row.metrics_hint)
    if error.status in (401, 403):
        hint = "it wants a key, which goes to the server's own address only"
    reason = ""
    if error.status == 400 and "model" in str(error):  # in the words of the server
        reason = WANTS_MODEL
    return Snapshot(None, f"{where}: {error} ({hint})", reason=reason)


def is_counter(sample: Sample) -> bool:
    """Whether the sample only ever grows: counters and the parts of some histograms.

    `_created` is a gauge of seconds; means and rates are gauges of the server's lifetime or of its
    last steps: never to be differenced.
    """
    if sample.name.endswith("_created"):
        return False
    if known_to(ENGINES).histograms.match(sample.name):
        return sample.name.endswith(("_sum", "_count", "_bucket"))
    return sample.kind == "counter" or (sample.kind == "unknown" and sample.name.endswith("_total"))


def is_rounded(sample: Sample) -> bool:
    """Whether the counter has six digits only, so that a small growth is lost in the rounding."""
    if sample.value < 1e6 or position_of(sample) is not None:
        return False
    return any(part in sample.name for part in known_to(ENGINES).six_digits)


def counter_growth(before: Snapshot, after: Snapshot, received: Optional[int] = None) -> Growth:
    """What the counters grew by while so many tokens were received.

    Void where a page is missing, the server was restarted, or a counter that was not there before
    shows more than can have been counted since.
    """
    if before.samples is None or after.samples is None:
        return Growth(None, before.unavailable or after.unavailable)
    old = {key: s.value for key, s in counters_of(before).items()}
    new = counters_of(after)
    grown = tuple(_grown(s, old.get(key, 0.0)) for key, s in new.items())
    lost = any(value > 0 for key, value in old.items() if key not in new)
    if lost or any(s.value < 0 for s in grown) or _is_other_process(before, after):
        words = "counters were reset during the run: the server was restarted"
        return Growth(None, words, reset=True)
    if _is_born(before, grown, received):
        return Growth(grown)
    words = "counters appeared in the middle, and since when they count is not known"
    return Growth(None, words)


def _is_born(before: Snapshot, grown: Sequence[Sample], received: Optional[int]) -> bool:
    """Whether counters that were not there before can have begun at 0 meanwhile.

    Each step and each accepted token is one of the tokens made meanwhile.  Of drafts there may be
    more: they began with the others.
    """
    known = known_to(ENGINES)
    there = {s.name for s in before.samples or ()}
    old: list[Sample] = []
    drafted: list[float] = []
    others: list[float] = []
    for s in grown:
        name = s.name.removesuffix("_total")
        if not s.value:
            continue
        if s.name in there:
            old.append(s)
        elif name in known.drafted:
            drafted.append(s.value)
        elif name in known.counters or s.name in known.generated:
            others.append(s.value)
    limit = generated_tokens(Growth(tuple(old)))
    if limit is None:
        limit = received
    tested = others or drafted
    return not tested or (limit is not None and max(tested) <= limit)


def _is_other_process(before: Snapshot, after: Snapshot) -> bool:
    """Whether the server tells of another start, or a counter of another birth."""
    if before.process != after.process:
        return True
    born = {s.identity: s.value for s in before.samples or () if s.name.endswith("_created")}
    return any(born.get(s.identity, s.value) != s.value for s in after.samples or ())


def _grown(sample: Sample, before: float) -> Sample:
    kind = sample.kind
    if is_rounded(sample):
        kind = "rounded"
    return sample._replace(value=sample.value - before, kind=kind)


def block_growth(before: Snapshot, after: Snapshot, received: Optional[int]) -> Growth:
    """The growth around a block; void also where it cannot be that of the tokens received."""
    growth = counter_growth(before, after, received)
    generated = generated_tokens(growth)
    made = generated
    if made is None:
        made = received
    told = acceptance_of_counters(growth, 0)
    if told and made is not None and (told.accepted or 0) > made:
        words = f"counters show {told.accepted} draft tokens accepted where {made:.0f} were made"
        return Growth(None, words)
    if generated is None or received is None or generated >= received * (1 - FOREIGN_SHARE):
        return growth
    words = (
        f"counters were reset: they show {generated:.0f} tokens where {received} were received, so "
        "the server was restarted, or this is another process's page"
    )
    return Growth(None, words, reset=True)


def added_growth(parts: Sequence[Growth]) -> Growth:
    """Growth over several stretches; void if any of them is."""
    if not parts:
        return Growth(None, "no metrics were read")
    total: dict[object, Sample] = {}
    for part in parts:
        if part.samples is None:
            return part
        for s in part.samples:
            before = total.get(s.identity, s._replace(value=0.0))
            total[s.identity] = s._replace(value=before.value + s.value)
    return Growth(tuple(total.values()))


def position_of(sample: Sample) -> Optional[int]:
    """The draft position that a per-position series counts, 0-based."""
    text = sample.label("position", "token_position") or ""
    if not re.fullmatch("[0-9]{1,4}", text):
        return None
    return int(text)


def settled_snapshot(
    endpoint: Endpoint, before: Snapshot, received: Optional[int], failed: bool = False
) -> Snapshot:
    """The page once two reads agree and all tokens received are counted; after 3 s as it is.

    A request that `failed` may still run: until nothing does.
    """
    after = metrics_snapshot(endpoint)
    give_up = time.monotonic() + SETTLE_LIMIT_S
    while after.samples is not None and time.monotonic() < give_up:
        time.sleep(SETTLE_PAUSE_S)
        previous, after = after, metrics_snapshot(endpoint)
        growth = counter_growth(before, after, received)
        if growth.reset:
            break
        generated = generated_tokens(growth)
        is_counted = received is None or generated is None or generated >= received
        is_idle = not failed or not after.in_hand()
        if is_counted and is_idle and counters_of(previous) == counters_of(after):
            break
    return after


def counters_of(page: Snapshot) -> dict[object, Sample]:
    """The counters of a page as they stand, by their identity."""
    return {s.identity: s for s in page.samples or () if is_counter(s)}


def generated_tokens(growth: Growth) -> Optional[float]:
    """Tokens that the server says it generated meanwhile, None where its page does not tell."""
    names = known_to(ENGINES).generated
    found = [s for s in growth.samples or () if s.name in names]
    if not found or any(s.kind == "rounded" for s in found):
        return None
    return sum(s.value for s in found)


def _by_series(samples: Iterable[Sample]) -> dict[str, float]:
    """The values of the speculation series under the server's own names, positions by number."""
    kept = [s for s in samples if _SPECULATION.match(s.name)]
    kept.sort(key=lambda s: (s.name, position_of(s) or 0, s.series))
    told = {}
    for s in kept:
        told[one_line(s.series, 1000)] = int(s.value) if s.value == int(s.value) else s.value
    return told


def spec_delta(growth: Growth) -> Optional[dict[str, float]]:
    """Growth of every speculation counter."""
    return None if growth.samples is None else _by_series(growth.samples)


# ---- acceptance ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Acceptance:
    """What became of the drafted tokens, as counted by the server; None for what it does not tell.

    `per_position` counts how often the draft at position 1, 2, ... was accepted (not conditional on
    the one before).
    """

    source: str
    steps: Optional[int] = None  # verification steps that had a draft
    drafted: Optional[int] = None
    accepted: Optional[int] = None
    per_position: Optional[tuple[int, ...]] = None
    rejections: Optional[int] = None  # steps that ended in one; else derived from the positions
    tokens: Optional[int] = None  # of the answers in which they were drafted
    answers: int = 0
    each: tuple[Acceptance, ...] = ()  # the same of single answers, where these tell


def acceptance_in(fields: AnswerFields, statistics: Mapping[str, object]) -> Optional[Acceptance]:
    """What the statistics of an answer tell in these fields."""
    block: Mapping[str, object] = statistics
    for name in fields.path:
        block = as_dict(block.get(name))
    if not block:
        return None

    def count(name: str) -> Optional[int]:
        return as_count(block.get(name)) if name else None

    accepted = count(fields.accepted)
    drafted = count(fields.drafted)
    if fields.rejected:
        drafted = sum_known((accepted, count(fields.rejected)))
    found = Acceptance(
        source=fields.source,
        steps=count(fields.steps),
        drafted=drafted,
        accepted=accepted,
        rejections=count(fields.rejections),
    )
    if fields.histogram:
        found = replace(found, per_position=positions_in(block.get(fields.histogram)))
    return found if _is_told(fields, found) else None


def _is_told(fields: AnswerFields, found: Acceptance) -> bool:
    """Whether enough of the fields is there, and has been filled in."""
    if fields.histogram:
        return found.steps is not None or found.accepted is not None
    if found.accepted is None or (found.drafted is None and found.rejections is None):
        return False
    return fields.zeros_tell or bool(found.accepted or found.drafted or found.rejections)


def positions_in(histogram: object) -> Optional[tuple[int, ...]]:
    """h[j] steps had exactly j drafts accepted, so position i (1-based) has the sum over j >= i."""
    if not isinstance(histogram, list) or not 0 < len(histogram) <= LONGEST_CHAIN:
        return None
    counts = [as_count(n) or 0 for n in histogram]
    return tuple(sum(counts[i:]) for i in range(1, len(counts)))


def counted_by(samples: Sequence[Sample], name: str) -> Optional[int]:
    """Sum over the series of a counter; None where there are none, or one is rounded.

    Its name may stand with `_total` or without.
    """
    found = [s for s in samples if s.name in (name, name + "_total") and position_of(s) is None]
    if not found or any(s.kind == "rounded" for s in found):
        return None
    return round(sum(s.value for s in found))


def counted_by_position(samples: Sequence[Sample], name: str) -> Optional[tuple[int, ...]]:
    """Counts by draft position, positions in numeric order."""
    counts: dict[int, float] = {}
    for s in samples:
        position = position_of(s)
        if s.name in (name, name + "_total") and position is not None and position < LONGEST_CHAIN:
            counts[position] = counts.get(position, 0.0) + s.value
    if not counts:
        return None
    return tuple(round(counts.get(i, 0.0)) for i in range(max(counts) + 1))


def acceptance_of_names(
    names: DraftCounters, samples: Sequence[Sample], answers: int
) -> Optional[Acceptance]:
    """What counters of these names tell of the drafts of `answers` answers; None without them."""
    if names.derive:
        return names.derive(names, samples, answers)
    stem = names.stem
    if not any(s.name.startswith(stem) for s in samples):
        return None
    # what an engine lacks is called "" there, and no series has the stem alone as its name
    steps = counted_by(samples, stem + names.steps)
    drafted = counted_by(samples, stem + names.drafted)
    accepted = counted_by(samples, stem + names.accepted)
    positions = counted_by_position(samples, stem + names.positions)
    emitted = counted_by(samples, stem + names.emitted)
    if emitted is not None and accepted is not None:
        steps = emitted - accepted
    if positions and names.sums_positions:
        accepted = sum(positions)
    drafted_by_position = counted_by_position(samples, stem + names.drafted_positions)
    if drafted_by_position is not None:
        drafted = sum(drafted_by_position)
    found = Acceptance("metrics", steps, drafted, accepted, positions)
    is_whole = all(getattr(found, name) is not None for name in names.needs)
    return found if is_whole else None


def acceptance_of_answer(statistics: Mapping[str, object]) -> Optional[Acceptance]:
    """What one answer tells of its drafts, by the first row whose fields it has."""
    for row in ENGINES:
        for fields in row.answers:
            found = acceptance_in(fields, statistics)
            if found is not None:
                return found
    return None


def acceptance_of_counters(growth: Growth, answers: int) -> Optional[Acceptance]:
    """What counters tell of the drafts of `answers` answers, by the first row that they fit."""
    samples = growth.samples or ()
    for row in ENGINES:
        for names in row.counters:
            found = acceptance_of_names(names, samples, answers)
            if found is not None:
                return found
    told = known_to(ENGINES).generated_if_configured
    if spec_delta(growth) or not any(s.name in told for s in samples):
        return None
    return Acceptance("metrics", 0, 0, 0)


def added_acceptance(parts: Sequence[Acceptance]) -> Optional[Acceptance]:
    """The sum; a figure that one part lacks is unknown in the sum."""
    if not parts:
        return None
    columns = [part.per_position for part in parts if part.per_position is not None]
    positions = None
    if len(columns) == len(parts):
        positions = tuple(map(sum, itertools.zip_longest(*columns, fillvalue=0)))
    counts: JSON = {}
    for name in ("steps", "drafted", "accepted", "rejections"):
        counts[name] = sum_known(getattr(part, name) for part in parts)
    source = "+".join(dict.fromkeys(part.source for part in parts))
    return Acceptance(source, per_position=positions, **counts)


def joined_acceptance(
    answers: Optional[Acceptance], counters: Optional[Acceptance]
) -> tuple[Optional[Acceptance], Optional[str]]:
    """(the best of both, disagreement).

    Answers are immune to other clients; counters fill in what answers lack.
    """
    if answers is None or counters is None:
        return answers or counters, None
    for name in ("drafted", "accepted", "steps"):
        told = getattr(answers, name)
        counted = getattr(counters, name)
        if None in (told, counted):
            continue
        if abs(told - counted) > FOREIGN_SHARE * max(told, counted, 100):
            return answers, f"the answers tell {told} {name}, the counters {counted}"
    missing = {}
    for name in ("steps", "drafted", "per_position"):
        counted = getattr(counters, name)
        if getattr(answers, name) is None and counted is not None:
            missing[name] = counted
    if missing:
        missing["source"] = f"{answers.source}+{counters.source}"
    return replace(answers, **missing), None


def target_steps(acceptance: Acceptance) -> Optional[int]:
    """Steps of the target after each answer's first token, with a draft or without: N - R - A.

    That is too low where drafts were accepted beyond the end of an answer: the counted steps are
    the least.  None where a step would have given less than one token, or more than a whole draft
    and one.
    """
    if acceptance.tokens is None or acceptance.accepted is None:
        return None
    decoded = acceptance.tokens - acceptance.answers
    steps = max(decoded - acceptance.accepted, acceptance.steps or 0)
    most = decoded
    if acceptance.per_position:
        most = steps * (1 + len(acceptance.per_position))
    return steps if 0 < steps <= decoded <= most else None


def full_drafts(acceptance: Acceptance, steps: Optional[int]) -> Optional[int]:
    """The chain length k if every draft had it, but for those that the end of an answer cut short.

    Engines draft no more than is left of an answer: that touches about k / (tokens per step) drafts
    of each answer, by k / 2 on average.
    """
    drafted = acceptance.drafted
    if not steps or not drafted:
        return None
    reached = [i for i, count in enumerate(acceptance.per_position or (), 1) if count]
    k = max([math.ceil(drafted / steps), *reached])
    tokens_per_step = 1 + (acceptance.accepted or 0) / steps
    cut = k * acceptance.answers * max(1.0, k / (2 * tokens_per_step))
    if k > LONGEST_CHAIN or k * steps - drafted > cut:
        return None
    return k


def steps_with_draft(acceptance: Acceptance) -> Optional[int]:
    """Verification steps as counted, else as many as the target's steps if all had a draft.

    Those are one too few for each answer whose end token was itself an accepted draft: tried where
    nothing else fits.
    """
    if acceptance.steps is not None:
        return acceptance.steps
    targets = target_steps(acceptance)
    drafted = acceptance.drafted
    if targets is None or not drafted or full_drafts(acceptance, targets) is not None:
        return targets
    k = math.ceil(drafted / (targets + acceptance.answers))
    if k <= 1:
        return targets
    return max(targets, math.ceil(drafted / k))


def fixed_chain(acceptance: Acceptance) -> Optional[int]:
    """The chain length k if every draft had it and nearly every step of the target a draft."""
    targets = target_steps(acceptance)
    steps = steps_with_draft(acceptance)
    if targets is not None and steps is not None and targets - steps > acceptance.answers:
        return None
    k = full_drafts(acceptance, steps)
    if k is None or any(contradicts_chain(answer, k) for answer in acceptance.each):
        return None
    return k


def contradicts_chain(answer: Acceptance, k: int) -> bool:
    """Whether one answer cannot be of drafts of length k.

    Its end may cut its last drafts to k - 1, k - 2, ..., 0, and take the place of a target step.
    """
    steps = answer.steps
    if steps is None:
        steps = target_steps(answer)
    if steps is None or answer.drafted is None:
        return False
    return not k * (steps - max(1, k / 2)) <= answer.drafted <= k * (steps + 1)


def survival(acceptance: Acceptance) -> Optional[float]:
    """alpha, the probability that a *tested* draft is accepted; accepted/drafted is not that, and
    lower.

    Everything behind the first rejection of a step was drafted and never tested.
    """
    accepted = acceptance.accepted
    if accepted is None:
        return None
    if accepted == 0 and acceptance.drafted:
        return 0.0
    if acceptance.rejections is not None:
        return ratio_of(accepted, accepted + acceptance.rejections)
    if acceptance.steps and acceptance.per_position and acceptance.drafted != 0:
        return _survival_by_position(accepted, acceptance.steps, acceptance)
    chain = fixed_chain(acceptance)
    steps = steps_with_draft(acceptance)
    if chain is None or not steps:
        return None
    return alpha_for_accepted(accepted / steps, chain)


def _survival_by_position(accepted: int, steps: int, acceptance: Acceptance) -> Optional[float]:
    """alpha where every step ended in a rejection but those that accepted the whole chain."""
    positions = acceptance.per_position or ()
    k: Optional[int] = len(positions)
    if acceptance.drafted is not None:
        k = full_drafts(acceptance, steps)
    if k is None:  # a short draft may end without a rejection
        return None
    whole = sum(positions[k - 1 : k])
    return ratio_of(accepted, accepted + steps - whole)


def acceptance_record(acceptance: Optional[Acceptance]) -> Optional[AcceptanceRecord]:
    """The figures of the record: rates 0 to 1, lengths in tokens, None for what is unknown."""
    if acceptance is None:
        return None
    steps = acceptance.steps
    accepted = acceptance.accepted
    rate = ratio_of(accepted, acceptance.drafted)
    mean_length = per_target_step = per_position = None
    if steps and acceptance.per_position:
        per_position = [count / steps for count in acceptance.per_position]
    if steps and accepted is not None:
        mean_length = 1 + accepted / steps
    if acceptance.tokens is not None:
        decoded = acceptance.tokens - acceptance.answers
        per_target_step = ratio_of(decoded, target_steps(acceptance))
    return {
        "source": acceptance.source,
        "steps": steps,
        "drafted": acceptance.drafted,
        "accepted": accepted,
        "per_position": per_position,
        "rate": rate,
        "mean_length": mean_length,
        "tokens_per_target_step": per_target_step,
        "alpha": survival(acceptance),
    }


# ---- servers ------------------------------------------------------------------------------------


def set_key(variable: str) -> str:
    """The key as it is set in the environment."""
    return os.environ.get(variable, "").strip()


def check_secrets(words: Sequence[str]) -> None:
    """UsageError if the key stands in the command line, and so in messages and the notebook."""
    values: dict[str, list[str]] = {"--api-key-env": ["SPEC_API_KEY"]}
    for word, after in zip(words, [*words[1:], ""]):
        flag, _, value = word.partition("=")
        values.setdefault(flag, []).append(value or after)
    models = [*values.get("--model", ()), *values.get("--speculative-model", ())]
    for variable in values["--api-key-env"]:
        key = set_key(variable)
        if len(key) < SECRET_LENGTH or any(is_part(key, model) for model in models):
            continue
        if any(key in word for word in words):
            raise UsageError(
                f"the key in {variable} stands in the command line too, where every program can "
                "read it; leave it out there"
            )


def api_key(variable: str) -> str:
    """The key from the environment, "" where there is none.

    UsageError, without showing it, if it cannot be sent.
    """
    key = set_key(variable)
    if not re.fullmatch(r"[\x21-\x7e]*", key):
        raise UsageError(f"the key in {variable} holds a character that no HTTP header can carry")
    return key


def key_words(endpoint: Endpoint) -> str:
    """What became of the key, for a server that wants one."""
    fate = "was sent" if endpoint.key else "is not set"
    return f"it wants a key: {endpoint.key_variable} {fate} (another variable: --api-key-env)"


def refusal(endpoint: Endpoint, error: RequestFailed) -> Optional[str]:
    """What to do where the server refuses the request itself; None where asking again may help."""
    if error.status not in (400, 401, 403, 404, 405, 413, 415, 422):
        return None
    way_out = "a null removes a field from the request, as in --extra-body '{\"seed\": null}'"
    if endpoint.served and endpoint.shown_model not in endpoint.served:
        way_out = f"it lists these models: {', '.join(endpoint.served)}"
    elif error.status == 404:
        way_out = "check --model and the base URL"
    elif error.status in (401, 403):
        way_out = key_words(endpoint)
    return f"{endpoint.name} refuses the request: {error}; {way_out}"


@dataclass(frozen=True)
class Server:
    """A server that answered the preflight: how to talk to it, and what it tells of itself."""

    endpoint: Endpoint
    version: str
    about: About
    findings: list[Finding]
    snapshot: Snapshot


@dataclass(frozen=True)
class Listing:
    """The models that a server lists, as it sent them, and its Server header."""

    entries: tuple[JSON, ...] = ()
    banner: str = ""
    is_there: bool = False  # whether it has such a list at all

    def shown(self, key: str) -> Listing:
        """The same without the key."""
        entries = tuple(scrubbed(list(self.entries), key))
        return replace(self, entries=entries, banner=redacted(self.banner, key, SECRET_LENGTH))

    @property
    def served(self) -> tuple[str, ...]:
        """The names of the models; what is as long as a book is none."""
        names = [str(entry["id"]) for entry in self.entries if entry.get("id")]
        return tuple(name for name in names if len(name) <= 1000)

    def entry_of(self, model: str) -> JSON:
        """The entry of a model, or the only one, whatever it is called; {} where there is none."""
        for entry in self.entries:
            if entry.get("id") == model:
                return entry
        return self.entries[0] if len(self.entries) == 1 else {}


@dataclass(frozen=True)
class Identity:
    """What a server is: its engine, the version, and the page that told it ({} where none did)."""

    engine: Engine
    version: str = "unknown"
    page: JSON = field(default_factory=dict)


def preflight(arm: ArmSettings, settings: Settings, say: Say) -> Server:
    """Check one server before the first request.  UsageError if it cannot be measured."""
    endpoint = unasked_endpoint(arm, settings)
    as_sent = reached(endpoint, say)
    model = chosen_model(arm, as_sent, endpoint)
    endpoint = replace(endpoint, model=model, key=marked(endpoint.key, model))
    listing = as_sent.shown(endpoint.key)
    endpoint = replace(endpoint, served=listing.served)
    if listing.served and endpoint.shown_model not in listing.served:
        listed = ", ".join(listing.served)
        say(f"{endpoint.name} does not list the model {endpoint.shown_model}; it lists: {listed}")
    identity = identify(endpoint, listing)
    about = about_of(endpoint, identity, listing.entry_of(endpoint.shown_model))
    request = {**endpoint.request, **identity.engine.asks, **settings.body, **arm.body}
    endpoint = replace(endpoint, engine=identity.engine, request=request)
    endpoint, snapshot = find_metrics(endpoint)
    if endpoint.engine is UNKNOWN:
        endpoint = replace(endpoint, engine=_engine_of_page(snapshot))
    return Server(
        endpoint=endpoint,
        version=identity.version,
        about={**about, **memory_of(snapshot)},
        findings=findings_at_start(endpoint, snapshot, say),
        snapshot=snapshot,
    )


def unasked_endpoint(arm: ArmSettings, settings: Settings) -> Endpoint:
    """The server as the command line tells of it.

    UsageError for an address or a key that cannot be used.
    """
    option = "--speculative-url"
    if arm.name == "baseline":
        option = "--baseline-url"
    api, root = base_urls(arm.url, option)
    variable = settings.key_variable
    key = api_key(variable)
    request = {
        "max_tokens": settings.max_tokens,
        "temperature": 0.0,
        "top_p": 1.0,
        "seed": settings.seed,
    }
    return Endpoint(
        arm=arm.name,
        api=api,
        root=root,
        key=key,
        key_variable=variable,
        request=request,
        stream=settings.stream,
        timeout_s=settings.timeout_s,
        metrics_url=arm.metrics_url,
    )


def reached(endpoint: Endpoint, say: Say) -> Listing:
    """The models that the server lists, as it sent them; no entries where it has no such list.

    UsageError where it is out of reach, wants another key or stays busy.
    """
    url = endpoint.api + "/models"
    side_s = min(endpoint.timeout_s, SIDE_TIMEOUT_S)
    ask = functools.partial(raw_text, url, endpoint.key, side_s)
    try:
        (text, headers), _ = patiently(ask, say, endpoint.name, endpoint.patience)
        listed = as_dict(loads(text)).get("data")
    except RequestFailed as error:
        if error.status in (401, 403):
            raise UsageError(f"{endpoint.name}: {error}; {key_words(endpoint)}") from None
        if error.status is None or error.status in (429, 503) or 300 <= error.status < 400:
            raise UsageError(f"{endpoint.name}: {error}") from None
        return Listing()
    except ValueError:  # no list of models: the first request will tell
        return Listing()
    banner = headers.get("Server") or ""
    return Listing(tuple(objects_in(listed)), banner, is_there=isinstance(listed, list))


def chosen_model(arm: ArmSettings, listing: Listing, endpoint: Endpoint) -> str:
    """The model that the user named, else the only one listed.  UsageError where there is none."""
    if arm.model:
        return arm.model
    count = len(listing.served)
    if count == 1:
        return listing.served[0]
    if count:
        listed = ", ".join(listing.shown(endpoint.key).served)
        raise UsageError(f"{endpoint.name} lists {count} models; name one with --model: {listed}")
    if listing.is_there:
        raise UsageError(f"{endpoint.name} lists no models; load one, or name it with --model")
    raise UsageError(
        f"{endpoint.name}: this is no OpenAI-compatible server, it has no list of models under "
        f"{endpoint.api}/models; check host and port (where it is one without a list: --model)"
    )


def marked(key: str, model: Optional[str]) -> str:
    """The key, as a placeholder where it is a part of the model's name."""
    if is_part(key, model):
        return Placeholder(key)
    return key


def is_part(key: str, model: Optional[str]) -> bool:
    """Whether the key is a part of a model's name, but not all of it, which is an echo."""
    return key in (model or "") and key != model


def side_page(endpoint: Endpoint, path: str) -> object:
    """The JSON value of a page beside the API; None where it is guarded, off or not there."""
    with contextlib.suppress(RequestFailed, ValueError):
        side_s = min(endpoint.timeout_s, SIDE_TIMEOUT_S)
        page: object = get_json(endpoint.root + path, endpoint.key, side_s)
        return page
    return None


def identify(endpoint: Endpoint, listing: Listing) -> Identity:
    """The engine by what it sends; where that tells none, every version page is asked for."""
    entry = listing.entry_of(endpoint.model)
    owner = entry.get("owned_by")
    if owner is not None:
        owner = str(owner)
    engine = recognised(listing.banner, owner, is_listed=bool(entry))
    for row in ENGINES:
        version = row.version
        if version is None or engine not in (UNKNOWN, row):
            continue
        page = as_dict(side_page(endpoint, version.path))
        if version.is_told_by(page):
            if version.names_engine:
                engine = row
            return Identity(engine, one_line(str(page[version.field])), page)
    return Identity(engine)


def about_of(endpoint: Endpoint, identity: Identity, entry: JSON) -> About:
    """What a server tells of itself on its version page and in its list of models."""
    told = identity.page
    meta = as_dict(entry.get("meta"))
    settings = as_dict(told.get("default_generation_settings"))
    arguments = as_dict(told.get("server_args"))
    context = as_count(settings.get("n_ctx")) or as_count(entry.get("max_model_len"))
    context = context or as_count(meta.get("n_ctx"))
    quantization = told.get("model_ftype") or meta.get("ftype")
    quantization = quantization or told.get("quantization") or arguments.get("quantization")
    slots = as_count(told.get("total_slots"))
    cache_tokens = None
    if identity.engine.slots_page:
        each = objects_in(side_page(endpoint, identity.engine.slots_page))
        cache_tokens = sum_known(as_count(slot.get("n_ctx")) for slot in each)
    if not cache_tokens:
        cache_tokens = (context or 0) * (slots or 0) or None
    tensor_parallel = as_count(told.get("tp_size") or arguments.get("tp_size"))
    # tokens a verification step since the server was started, of the first of its processes
    processes = objects_in(told.get("internal_states")) or [{}]
    lifetime_accept_length = as_number(processes[0].get("avg_spec_accept_length"))
    file = model_file(told, as_dict(entry.get("status")).get("args"))
    model = {
        "model_file": file,
        "model_bytes": as_count(meta.get("size")),
        "parameters": as_count(meta.get("n_params")),
        "root": last_part(entry.get("root")),
    }
    about = {
        **model,
        "context": context,
        "quantization": quantization,
        "cache_tokens": cache_tokens,
        "slots": slots,
        "tensor_parallel": tensor_parallel,
        "lifetime_accept_length": lifetime_accept_length,
    }
    known = {name: value for name, value in about.items() if value is not None}
    return cast(About, scrubbed(known, "", shown=one_line))


def model_file(told: JSON, arguments: object) -> Optional[str]:
    """The name of the file that holds the model, without its folders.

    A router tells it among the arguments of each model's own server; its version page is its own.
    """
    if isinstance(arguments, list):
        for flag, path in zip(arguments, arguments[1:]):
            if flag in ("--model", "-m"):
                return last_part(path)
    if told.get("role") == "router":
        return None
    return last_part(told.get("model_path"))


def last_part(path: object) -> Optional[str]:
    """The last part of a path, of Windows too; None where there is none."""
    if not isinstance(path, str):
        return None
    return re.split(r"[/\\\\]", path.rstrip("/\\"))[-1] or None


def objects_in(value: object) -> list[JSON]:
    """The objects of a list as a server sent it; none where it is no list."""
    if not isinstance(value, list):
        return []
    return list(map(as_dict, value))


def memory_of(snapshot: Snapshot) -> About:
    """Cache capacity in tokens and resident memory in bytes, where the metrics page tells."""
    told: About = {}
    for sample in snapshot.samples or ():
        if sample.name == "process_resident_memory_bytes":
            told["resident_bytes"] = int(sample.value)
        elif sample.name in known_to(ENGINES).memory:
            size = f"{sample.label('num_gpu_blocks')} x {sample.label('block_size')}"
            found = re.fullmatch("([0-9]{1,9}) x ([0-9]{1,9})", size)
            if found:
                told["cache_tokens"] = told.get("cache_tokens", 0) + int(found[1]) * int(found[2])
    return told


def find_metrics(endpoint: Endpoint) -> tuple[Endpoint, Snapshot]:
    """The endpoint with the address of its metrics page, and what the page says."""
    if endpoint.metrics_url:
        return endpoint, metrics_snapshot(endpoint)
    page = endpoint.root + endpoint.engine.metrics_page
    endpoint = replace(endpoint, metrics_url=page)
    snapshot = metrics_snapshot(endpoint)
    others: list[str] = []
    if snapshot.reason == WANTS_MODEL:
        model = urllib.parse.quote(endpoint.model, safe="", errors="replace")
        others = [f"{page}?model={model}"]
    elif snapshot.reason == IS_JSON:
        paths = dict.fromkeys(row.metrics_page for row in ENGINES)
        others = [endpoint.root + path for path in paths if path != UNKNOWN.metrics_page]
    for url in others:
        second = replace(endpoint, metrics_url=url)
        found = metrics_snapshot(second)
        if found.samples is not None:
            return second, found
    return endpoint, snapshot


def _engine_of_page(snapshot: Snapshot) -> Engine:
    """The row of a server that only its metrics page tells of."""
    # The request is made up by now, so nothing more is asked for.
    engine = recognised_by_series(sample.name for sample in snapshot.samples or ())
    return replace(engine, asks={}) if engine.asks else engine


def findings_at_start(endpoint: Endpoint, snapshot: Snapshot, say: Say) -> list[Finding]:
    """What a server's metrics page gives to think of before the first request."""
    if snapshot.unavailable:
        return [finding("metrics-unavailable", snapshot.unavailable)]
    busy = (snapshot.running() or 0) + (snapshot.waiting() or 0)
    if busy <= 0:
        return []
    words = f"{busy:.0f} requests of somebody else's"
    say(f"{endpoint.name} is busy: {words} are running or waiting; figures will be disturbed")
    detail = f"the server had {words} running or waiting at the start"
    return [finding("busy", detail, requests=busy)]


@dataclass(frozen=True)
class WarmUp:
    """What came of one arm's discarded requests: the last answer, and what its server counted."""

    server: Server
    answer: Optional[Answer]
    received: Optional[int]  # tokens of all of them
    failed: bool  # whether one of them brought no answer
    after: Snapshot

    @functools.cached_property
    def growth(self) -> Growth:
        """What the counters grew by since the preflight."""
        return counter_growth(self.server.snapshot, self.after)

    @property
    def drafted(self) -> Optional[bool]:
        """Whether drafts were seen; None where neither the answer nor the counters tell."""
        if self.answer is None:
            return None
        counted = acceptance_of_counters(self.growth, 1)
        told = acceptance_told([self.answer], is_counted=counted is not None) or counted
        return None if told is None else bool(told.drafted or told.accepted)


def counted_warm_up(server: Server, readings: Sequence[Reading]) -> WarmUp:
    """What a server counted since its preflight, once its counters have settled."""
    answers = [reading.answer for reading in readings if reading.answer]
    received = sum_known(answer.completion_tokens for answer in answers)
    failed = len(answers) < len(readings)
    after = server.snapshot
    if after.samples is not None and received:
        after = settled_snapshot(server.endpoint, after, received, failed)
    last = answers[-1] if answers else None
    return WarmUp(server=server, answer=last, received=received, failed=failed, after=after)


def server_numbers(warm_ups: Sequence[WarmUp]) -> list[int]:
    """The same number for arms that are one server.

    They have one address and ask for one model, or their counters show both arms' warm-up.  An
    equal start alone proves nothing: it is told in hundredths of a second, and a script starts
    servers together.
    """
    numbers: list[int] = []
    for warm_up in warm_ups:
        same = [n for n, other in zip(numbers, warm_ups) if _is_one(other, warm_up)]
        numbers.append(same[0] if same else len(numbers))
    return numbers


def _is_one(a: WarmUp, b: WarmUp) -> bool:
    """Whether two arms have one server."""
    one, other = a.server.endpoint, b.server.endpoint
    if (one.api, one.model) == (other.api, other.model):
        return True
    process = a.after.process
    if b.after.process != process:
        return False
    both = (a.received or 0) + (b.received or 0)
    counted = [generated_tokens(warm_up.growth) or 0 for warm_up in (a, b)]
    is_like = process is not None or counted[0] == counted[1]
    return is_like and min(counted) > 0.75 * both > 0


# ---- timing loop --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shot:
    """One planned request: its arm, prompt and repeat (all 0-based), and its place in its pair."""

    arm: int
    prompt: int
    repeat: int
    place: int


@dataclass(frozen=True)
class Block:
    """Requests of one workload in one round, between two reads of the metrics.

    Above concurrency 1 they are all of one arm.
    """

    workload: str
    shots: tuple[Shot, ...]


@dataclass(frozen=True)
class Reading:
    """One request as it went: an answer, or the error that came instead of one."""

    arm: str
    prompt_index: int
    prompt_id: str
    workload: str
    repeat: int
    place: int
    answer: Optional[Answer] = None
    error: Optional[str] = None
    waited_s: float = 0.0

    @property
    def pair(self) -> tuple[int, int]:
        """What it is compared by: prompt i, repeat j with prompt i, repeat j."""
        return self.prompt_index, self.repeat


@dataclass(frozen=True)
class Counted:
    """What a server counted around one block, and what this program received from it meanwhile.

    The fields stand so in run files.
    """

    arm: str
    workload: str
    repeat: int
    before: Snapshot
    after: Snapshot
    tokens: Optional[int]  # received, with all arms that share the server; so the next two
    answers: int  # those that are not known to be empty
    failed: int
    elapsed_s: float
    waiting: Optional[float] = None  # the most requests seen queueing

    @functools.cached_property
    def growth(self) -> Growth:
        """What the counters grew by; void where that cannot be."""
        return block_growth(self.before, self.after, self.tokens)

    @property
    def key(self) -> BlockKey:
        """What the same block of another arm is found by."""
        return self.workload, self.repeat


# What threads hand over: a reading, or what went wrong in place of it, and when.
Done = queue.SimpleQueue[tuple[Union[Reading, BaseException], float]]
Pair = tuple[int, int]  # (prompt index, repeat), both 0-based
BlockKey = tuple[str, int]  # (workload, first repeat)


@dataclass(frozen=True)
class Run:
    """One arm, measured: its conditions, its readings in the order taken, its server's counters.

    `pairs`, and under load `blocks`, are those that all arms completed; None: compared with none.
    """

    arm: str
    conditions: Conditions
    readings: tuple[Reading, ...]
    counted: tuple[Counted, ...]
    interrupted: bool = False
    pairs: Optional[frozenset[Pair]] = None
    blocks: Optional[frozenset[BlockKey]] = None

    def only(self, workload: str) -> Run:
        """The run of one kind of work."""
        return replace(
            self,
            readings=tuple(r for r in self.readings if r.workload == workload),
            counted=tuple(block for block in self.counted if block.workload == workload),
        )

    @functools.cached_property
    def answers(self) -> dict[Pair, Answer]:
        """What was completed, by pair."""
        return {r.pair: r.answer for r in self.readings if r.answer}

    @functools.cached_property
    def shared(self) -> dict[Pair, Answer]:
        """The same, without what another arm did not complete."""
        if self.pairs is None:
            return self.answers
        return {pair: answer for pair, answer in self.answers.items() if pair in self.pairs}


Groups = dict[str, list[int]]  # workload -> the numbers of its prompts


def make_plan(
    workloads: Sequence[str], repeats: int, arms: int, order: str = "paired", concurrency: int = 1
) -> list[Block]:
    """The blocks in the order to be measured; `workloads` names the workload of each prompt.

    Paired: all arms back to back for each prompt, the order rotating at every pair, so that drift
    and the second place cancel instead of becoming a speed-up; each round starts one further, so
    no prompt keeps its order.
    """
    groups: Groups = {}
    for index, workload in enumerate(workloads):
        groups.setdefault(workload, []).append(index)
    blocks: list[Block] = []
    for round_ in range(repeats):
        if concurrency == 1:
            blocks += paired_round(groups, arms, round_)
        else:
            blocks += loaded_round(groups, arms, round_, concurrency)
    if order == "paired":
        return blocks
    parts = []
    for arm in range(arms):
        for block in blocks:
            shots = tuple(shot for shot in block.shots if shot.arm == arm)
            if shots:
                parts.append(Block(block.workload, shots))
    return parts


def rotated(arms: int, by: int) -> list[tuple[int, int]]:
    """(place, arm) of all arms in turn, beginning `by` further."""
    return [(place, (place + by) % arms) for place in range(arms)]


def paired_round(groups: Groups, arms: int, round_: int) -> list[Block]:
    """A block for each workload, in which the arms take turns at every prompt."""
    blocks = []
    pairs = itertools.count(round_)
    for workload, prompts in groups.items():
        shots = [
            Shot(arm, prompt, round_, place)
            for prompt in prompts
            for place, arm in rotated(arms, next(pairs))
        ]
        blocks.append(Block(workload, tuple(shots)))
    return blocks


def loaded_round(groups: Groups, arms: int, round_: int, concurrency: int) -> list[Block]:
    """A block for each workload and arm, the arms taking turns at every block.

    It holds its prompts so often that its requests are twice as many as are in flight, or more.
    """
    blocks = []
    for number, (workload, prompts) in enumerate(groups.items()):
        copies = math.ceil(max(len(prompts), 2 * concurrency) / len(prompts))
        repeats = range(round_ * copies, (round_ + 1) * copies)
        for place, arm in rotated(arms, number + round_):
            shots = [Shot(arm, prompt, repeat, place) for repeat in repeats for prompt in prompts]
            blocks.append(Block(workload, tuple(shots)))
    return blocks


@dataclass
class Recorder:
    """Where readings go as they are taken: kept, written to the run file, and shown as progress.

    `clock` gives seconds from any start; the loop times its blocks with it.
    """

    say: Say
    file: Optional[BinaryIO] = None
    show: bool = False
    clock: Callable[[], float] = time.perf_counter
    trouble: Optional[str] = None
    gave_up: bool = False
    answered: int = 0  # over all levels

    def __post_init__(self) -> None:
        self.begin((), 0)

    def begin(self, headers: Iterable[Conditions], total: int) -> None:
        """Start a level of `total` requests under these conditions."""
        self.readings: list[Reading] = []
        self.counted: list[Counted] = []
        self.headers = list(headers)
        self.total = total
        self.started = self.clock()

    def write(self, line: JSON) -> None:
        """One line of the run file, at once.

        A file that cannot be written any more does not stop the measurement.
        """
        if self.file is None:
            return
        try:
            write_whole(self.file, json_line(line))
        except OSError as error:
            self.file = None
            words = (
                f"the run file could not be written: {error.strerror}; measuring went on without it"
            )
            self.note_trouble(words)
            self.say(words)

    def note_trouble(self, words: str) -> None:
        """Keep what went wrong, for the end."""
        self.trouble = "; ".join(filter(None, (self.trouble, words)))

    def give_up(self, words: str) -> None:
        """No more is measured; the reason is told at the end."""
        self.gave_up = True
        self.note_trouble(words)

    def add(self, reading: Reading) -> None:
        """Keep one reading; the conditions of its level stand before it in the run file."""
        self.readings.append(reading)
        if reading.answer:
            self.answered += 1
        for header in self.headers:
            self.write({"kind": "run", **header})
        self.headers = []
        self.write(reading_to_json(reading))
        if self.show:
            self._overwrite(printable(self._progress(reading)))

    def add_counted(self, counted: Counted) -> None:
        """Keep what a server counted around a block."""
        self.counted.append(counted)
        self.write(counted_to_json(counted))

    def clear_progress(self) -> None:
        """Wipe the progress line."""
        if self.show:
            self._overwrite("", "\r")

    def _progress(self, last: Reading) -> str:
        done = len(self.readings)
        left_s = (self.clock() - self.started) / done * (self.total - done)
        remaining = f"{left_s / 60:.0f} min"
        if left_s < 120:
            remaining = f"{left_s:.0f} s"
        return f"{done}/{self.total}  {last.arm}  {last.prompt_id}  about {remaining} left"

    def _overwrite(self, line: str, end: str = "") -> None:
        with contextlib.suppress(OSError):  # the terminal may be gone
            sys.stderr.write("\r" + line[:78].ljust(78) + end)
            sys.stderr.flush()


def take_reading(
    endpoint: Endpoint, prompt: Prompt, shot: Shot, say: Say, is_first: bool = False
) -> Reading:
    """Send one planned request; whatever goes wrong becomes the reading's error.

    UsageError if it `is_first`, which costs nothing measured, and is refused as it is.
    """
    reading = Reading(
        arm=endpoint.arm,
        prompt_index=shot.prompt,
        prompt_id=prompt.id,
        workload=prompt.workload,
        repeat=shot.repeat,
        place=shot.place,
    )
    patience = endpoint.patience
    limit_s = patience.limit_s(endpoint.timeout_s)
    sent_at = 0.0

    def ask() -> Answer:
        nonlocal sent_at
        sent_at = patience.clock()
        return complete(replace(endpoint, timeout_s=limit_s), prompt.messages)

    try:
        answer, waited = patiently(ask, say, endpoint.name, patience)
        patience.note_answer()
    except RequestFailed as error:
        patience.note_failure(patience.clock() - sent_at, limit_s)
        refused = refusal(endpoint, error)
        if refused and is_first:
            raise UsageError(refused) from None
        return replace(reading, error=refused or f"{endpoint.name}: {error}")
    if endpoint.engine.answer_page:
        page = side_page(endpoint, endpoint.engine.answer_page)
        if page is not None:
            answer.statistics["perf"] = page
    return replace(reading, answer=answer, waited_s=waited)


def execute(
    plan: Sequence[Block],
    endpoints: Sequence[Endpoint],
    prompts: Sequence[Prompt],
    hosts: Sequence[int],
    recorder: Recorder,
    concurrency: int = 1,
    warmed: bool = True,
) -> bool:
    """Carry out the plan; True if it was interrupted, or given up as `recorder` then knows.

    `hosts` numbers the server behind each arm: where arms share one, its counters are of them all.
    Without `warmed`, the first request of an arm may find that its server refuses it (UsageError).
    """
    loop = Loop(
        endpoints=endpoints,
        prompts=prompts,
        hosts=hosts,
        recorder=recorder,
        concurrency=concurrency,
    )
    if warmed:
        loop.heard.update(range(len(endpoints)))
    try:
        for block in plan:
            loop.carry_out(block)
    except KeyboardInterrupt:
        return True
    except GaveUp as error:
        recorder.give_up(str(error))
        return True
    finally:
        recorder.clear_progress()
    return False


@dataclass
class Loop:
    """What sends the requests of a block, and reads the counters of its servers around them."""

    endpoints: Sequence[Endpoint]
    prompts: Sequence[Prompt]
    hosts: Sequence[int]
    recorder: Recorder
    concurrency: int = 1
    heard: set[int] = field(default_factory=set)  # arms that were sent a request before

    def carry_out(self, block: Block) -> None:
        """One block: its readings, and what each server counted meanwhile, go to the recorder."""
        recorder, endpoints = self.recorder, self.endpoints
        arms = dict.fromkeys(shot.arm for shot in block.shots)
        befores = {arm: metrics_snapshot(endpoints[arm]) for arm in arms}
        first = len(recorder.readings)
        started, waiting = recorder.clock(), None
        if self.concurrency > 1:
            finished, waiting = self.take_at_once(block.shots)
        else:
            finished = self.take_in_turn(block.shots)
        taken, elapsed_s = recorder.readings[first:], finished - started
        for arm, before in befores.items():
            same = {e.arm for e, host in zip(endpoints, self.hosts) if host == self.hosts[arm]}
            mine = [reading for reading in taken if reading.arm in same]
            counted = count_block(endpoints[arm], block, before, mine, elapsed_s, waiting)
            recorder.add_counted(counted)

    def take(self, shot: Shot, is_first: bool = False) -> Reading:
        """One planned request."""
        endpoint, prompt = self.endpoints[shot.arm], self.prompts[shot.prompt]
        return take_reading(endpoint, prompt, shot, self.recorder.say, is_first)

    def keep(self, reading: Reading, endpoint: Endpoint) -> None:
        """Record one reading.  GaveUp where its server does nothing but fail."""
        self.recorder.add(reading)
        if endpoint.patience.failures >= MOST_FAILURES:
            raise GaveUp(
                f"{endpoint.name}: {MOST_FAILURES} requests in a row failed, so measuring ended "
                f"here; the last error: {reading.error}"
            )

    def take_in_turn(self, shots: Sequence[Shot]) -> float:
        """One request at a time; when the last ended, by the recorder's clock."""
        for shot in shots:
            is_first = shot.arm not in self.heard and self.recorder.answered < len(self.endpoints)
            self.heard.add(shot.arm)
            self.keep(self.take(shot, is_first), self.endpoints[shot.arm])
        return self.recorder.clock()

    def take_at_once(self, shots: Sequence[Shot]) -> tuple[float, Optional[float]]:
        """A closed loop of `concurrency` requests in flight.

        Returns when the last ended, and the most requests that were seen queueing, None if unknown.
        """
        pending: queue.SimpleQueue[Shot] = queue.SimpleQueue()
        done: Done = queue.SimpleQueue()
        for shot in shots:
            pending.put(shot)

        def work() -> None:
            try:
                while True:
                    reading = self.take(pending.get_nowait())
                    done.put((reading, self.recorder.clock()))
            except queue.Empty:
                pass
            except BaseException as error:  # whatever it is: else its request would be waited for
                done.put((error, self.recorder.clock()))

        try:
            start_threads(work, self.concurrency)
            return self.collect(done, len(shots), self.endpoints[shots[0].arm])
        finally:  # after Ctrl-C, and where a thread could not start, nothing more is sent
            with contextlib.suppress(queue.Empty):
                while True:
                    pending.get_nowait()

    def collect(self, done: Done, left: int, endpoint: Endpoint) -> tuple[float, Optional[float]]:
        """Record what is `done` until none is left, and look meanwhile how many requests queue.

        What a thread could not handle is raised here.
        """
        clock = self.recorder.clock
        finished, look_at = 0.0, clock() + 0.3
        queued: list[float] = []
        while left:
            with contextlib.suppress(queue.Empty):
                reading, finished = done.get(timeout=0.1)
                if isinstance(reading, BaseException):
                    raise reading
                self.keep(reading, endpoint)
                left -= 1
            if clock() >= look_at and left >= self.concurrency:
                seen = metrics_snapshot(endpoint).waiting()
                if seen is not None:
                    queued.append(seen)
                look_at = clock() + 1.0
        return finished, max(queued, default=None)


def start_threads(work: Callable[[], None], count: int) -> None:
    """Run `work` in `count` threads.  MeasureError where the system has no room for them."""
    try:
        for _ in range(count):
            # daemons: Ctrl-C need not wait for them
            threading.Thread(target=work, daemon=True).start()
    except RuntimeError as error:
        raise MeasureError(
            f"this system does not let {count} requests run at once ({error}); lower --concurrency"
        ) from None


def count_block(
    endpoint: Endpoint,
    block: Block,
    before: Snapshot,
    taken: Sequence[Reading],
    elapsed_s: float,
    waiting: Optional[float],
) -> Counted:
    """What the server counted around a block, read once its counters have settled."""
    answers = [reading.answer for reading in taken if reading.answer]
    tokens = sum_known(answer.completion_tokens for answer in answers)
    failed = len(taken) - len(answers)
    after = before
    if before.samples is not None:
        after = settled_snapshot(endpoint, before, tokens, failed > 0)
    return Counted(
        arm=endpoint.arm,
        workload=block.workload,
        repeat=block.shots[0].repeat,
        before=before,
        after=after,
        tokens=tokens,
        answers=sum(answer.completion_tokens != 0 for answer in answers),
        failed=failed,
        elapsed_s=elapsed_s,
        waiting=waiting,
    )


def warm_up(endpoints: Sequence[Endpoint], count: int, say: Say) -> list[list[Reading]]:
    """The discarded requests of each endpoint.  UsageError where a server refuses the request.

    All arms get the same requests in the same order, the warm-up included: greedy text depends on
    a server's history.
    """
    readings: list[list[Reading]] = [[] for _ in endpoints]
    text = "Count from one to twenty in words, separated by commas."
    prompt = Prompt("warm-up", "warm-up", ({"role": "user", "content": text},))
    for _ in range(count):
        for endpoint, kept in zip(endpoints, readings):
            reading = take_reading(endpoint, prompt, Shot(0, 0, 0, 0), say, is_first=True)
            kept.append(reading)
            if reading.error:
                say(f"warm-up: {reading.error}")
    return readings


# ---- text comparison ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """Where two texts first differ: offsets 0-based, line and column 1-based, and both tails."""

    byte: int
    character: int
    line: int
    column: int
    baseline_tail: str
    speculative_tail: str


def first_difference(baseline: str, speculative: str) -> Optional[Difference]:
    """The first place where the UTF-8 bytes differ; the byte offset may lie inside a character."""
    a, b = baseline.encode("utf-8"), speculative.encode("utf-8")
    if a == b:
        return None
    shorter = min(len(a), len(b))
    byte = next((i for i in range(shorter) if a[i] != b[i]), shorter)
    # "ignore" drops the begun character, so that this ends where that one starts
    before = a[:byte].decode("utf-8", "ignore")
    start = len(before)
    return Difference(
        byte=byte,
        character=start,
        line=before.count("\n") + 1,
        column=start - before.rfind("\n"),
        baseline_tail=baseline[start : start + TAIL_CHARACTERS],
        speculative_tail=speculative[start : start + TAIL_CHARACTERS],
    )


@dataclass(frozen=True)
class Agreement:
    """How often a server repeated itself, and the prompts on which it did not.

    The first (cold) repeat is told apart from later (warm) ones: a prompt cache can change the
    batch shape.
    """

    compared: int = 0
    identical: int = 0
    warm_compared: int = 0
    warm_identical: int = 0
    unstable: frozenset[int] = frozenset()


def self_agreement(answers: dict[Pair, Answer]) -> Agreement:
    """Each repeat of a prompt against its first, and the warm ones against the first warm one."""
    by_prompt: dict[int, list[Pair]] = {}
    for pair in sorted(answers):
        by_prompt.setdefault(pair[0], []).append(pair)
    repeats, warm_repeats, unstable = [], [], set()  # of the first two: whether each was the same
    for prompt, (first, *later) in by_prompt.items():
        cold = answers[first].texts
        warm = first if first[1] > 0 or not later else later[0]
        for pair in later:
            texts = answers[pair].texts
            if not any(texts + cold):
                continue  # two empty answers are no evidence
            repeats.append(texts == cold)
            if texts != cold:
                unstable.add(prompt)
            if pair != warm:
                warm_repeats.append(texts == answers[warm].texts)
    return Agreement(
        compared=len(repeats),
        identical=sum(repeats),
        warm_compared=len(warm_repeats),
        warm_identical=sum(warm_repeats),
        unstable=frozenset(unstable),
    )


def divergence(
    reading: Reading, own: Answer, other: Answer, unstable: bool
) -> Optional[Divergence]:
    """How the other server's answer differs from the baseline's `own`; None where they agree."""
    for where in ("content", "reasoning", "tool_calls"):
        found = first_difference(getattr(own, where), getattr(other, where))
        if found is None:
            continue
        kind = difference_class(found)
        counts_agree = own.completion_tokens == other.completion_tokens is not None
        return {
            "prompt_index": reading.prompt_index,
            "prompt_id": reading.prompt_id,
            "workload": reading.workload,
            "repeat": reading.repeat,
            "where": where,
            "class": "unstable-baseline" if unstable else kind,
            "first_difference_at_char": found.character,
            "first_difference_at_byte": found.byte,
            "line": found.line,
            "column": found.column,
            "baseline_tail": found.baseline_tail,
            "speculative_tail": found.speculative_tail,
            "baseline_finish_reason": own.finish_reason and one_line(own.finish_reason),
            "speculative_finish_reason": other.finish_reason and one_line(other.finish_reason),
            "baseline_tokens": own.completion_tokens,
            "speculative_tokens": other.completion_tokens,
            # a text that stops early under an equal count: tokens were counted that never came
            "count_suspicious": kind.endswith("prefix") and counts_agree,
            "triage": None,
        }
    return None


def difference_class(found: Difference) -> str:
    """Whether one text only ends sooner, or they say different things."""
    if not found.speculative_tail:
        return "speculative-is-prefix"
    if not found.baseline_tail:
        return "baseline-is-prefix"
    return "different"


@dataclass
class Texts:
    """What became of the text, pair by pair: counts of pairs, and each pair that differs."""

    compared: int = 0
    identical: int = 0
    empty: int = 0  # both empty: no evidence, never counted as identical
    failed: int = 0  # a side is missing
    counts_differ: int = 0  # identical texts with different token counts
    sampled: bool = False  # drawn at random: texts that differ are no change
    divergences: list[Divergence] = field(default_factory=list)

    @property
    def unstable(self) -> int:
        """Pairs that differ where the baseline disagrees with itself too."""
        return sum(found["class"] == "unstable-baseline" for found in self.divergences)


def compare_texts(baseline: Run, candidate: Run, unstable: Collection[int]) -> Texts:
    """Pair by pair; `unstable` are the prompts on which the baseline disagrees with itself."""
    texts, theirs = Texts(), candidate.answers
    for reading in baseline.readings:
        own, other = reading.answer, theirs.get(reading.pair)
        if own is None or other is None:
            texts.failed += 1
            continue
        if not any(own.texts + other.texts):
            texts.empty += 1
            continue
        texts.compared += 1
        found = divergence(reading, own, other, reading.prompt_index in unstable)
        if found:
            texts.divergences.append(found)
            continue
        texts.identical += 1
        counts = {own.completion_tokens, other.completion_tokens} - {None}
        texts.counts_differ += len(counts) > 1
    return texts


UNKNOWN_GAP: Triage = {
    "finding": "not-known",
    "gap_nats": None,
    "baseline_token": None,
    "speculative_token": None,
}


def unknown_gap(reason: str) -> Triage:
    """Why the log probabilities do not tell."""
    return {**UNKNOWN_GAP, "reason": reason}


def ask_for_gap(
    baseline: Endpoint, prompt: Prompt, found: Divergence, own: Answer, other: Answer
) -> Triage:
    """Triage: the baseline's own log probabilities at the first difference, by one more request.

    Asked with its prompt cache as it is: a real server repeated its answer in 19 of 20 cases so,
    in 6 of 20 without.
    """
    if found["where"] == "tool_calls":
        return unknown_gap("no server tells log probabilities of tool calls")
    try:
        tokens = _logprobs(baseline, prompt)
    except RequestFailed as error:
        return unknown_gap(f"no log probabilities: {error}")
    text = getattr(own, found["where"]).encode("utf-8")
    rest = getattr(other, found["where"]).encode("utf-8")
    told = gap_finding(tokens, text, rest, found["first_difference_at_byte"])
    return cast(Triage, scrubbed(told, baseline.key, shown=lambda text: text[:200]))


def _logprobs(endpoint: Endpoint, prompt: Prompt) -> list[JSON]:
    """The chosen tokens with their alternatives, of which some servers give 10 or 5 at most."""
    for count in (20, 10):
        try:
            return _logprobs_of(endpoint, prompt, count)
        except RequestFailed as error:
            # mlx-lm closes the connection, others say what is wrong
            if error.status not in (400, 422, 500) and "closed the connection" not in str(error):
                raise
    return _logprobs_of(endpoint, prompt, 5)


def _logprobs_of(endpoint: Endpoint, prompt: Prompt, count: int) -> list[JSON]:
    extra = {"stream": False, "logprobs": True, "top_logprobs": count}
    try:
        answer = loads(post_chat(endpoint, prompt.messages, extra, whole_body).decode())
    except ValueError:
        raise RequestFailed("no valid JSON came back") from None
    first = next(iter(as_list(as_dict(answer).get("choices"))), None)
    told = as_dict(as_dict(first).get("logprobs"))
    content = as_list(told.get("content")) or _from_completions(told)
    if not content:
        raise RequestFailed("the server sends none")
    return cast("list[JSON]", scrubbed(content, "", 6))


def _from_completions(told: JSON) -> list[JSON]:
    """The same where it comes in the shape of text completions, as from llama-cpp-python."""
    names = ("tokens", "token_logprobs", "top_logprobs")
    entries = []
    for token, logprob, listed in zip(*[as_list(told.get(name)) for name in names]):
        options = [{"token": name, "logprob": value} for name, value in as_dict(listed).items()]
        entries.append({"token": token, "logprob": logprob, "top_logprobs": options})
    return entries


def _token_bytes(entry: JSON) -> bytes:
    raw = entry.get("bytes")
    if isinstance(raw, list):
        with contextlib.suppress(TypeError, ValueError):  # not all of them are bytes
            return bytes(raw)
    return str(entry.get("token") or "").encode("utf-8", "replace")


# Byte-level vocabularies spell a byte that cannot be printed as the character 256 + its number
# among those: \u0120 is a blank, \u010a a line end.  SentencePiece writes \u2581 for a blank.
_PRINTED_BYTES = {*range(33, 127), *range(161, 173), *range(174, 256)}
_OTHER_BYTES = [byte for byte in range(256) if byte not in _PRINTED_BYTES]
_VOCABULARY = {
    **{chr(byte): bytes([byte]) for byte in _PRINTED_BYTES},
    **{chr(256 + number): bytes([byte]) for number, byte in enumerate(_OTHER_BYTES)},
    "\u2581": b" ",
}
_VOCABULARY_MARK = re.compile("[\u0120\u010a\u2581]")


def _vocabulary_bytes(entry: JSON) -> bytes:
    """What a token stands for where the server shows it as its vocabulary spells it."""
    token = str(entry.get("token") or "")
    return b"".join(_VOCABULARY.get(c, c.encode("utf-8", "replace")) for c in token)


# How the tokens of a server are spelled: what makes bytes of an entry.
Spelling = Callable[[JSON], bytes]


def gap_finding(tokens: Sequence[JSON], own: bytes, other: bytes, offset: int) -> Triage:
    """near-tie, clear-preference or not-known, from the log probabilities of the answer `own`.

    `offset` is the byte at which `other` differs.  The gap, in nats, lies between the baseline's
    token there and the token with which the other text goes on; for one that is not listed it is
    at least the distance to the last listed.
    """
    tokens = list(map(as_dict, tokens))
    spelling = _token_bytes
    has_mark = _VOCABULARY_MARK.search
    if has_mark(str(tokens)) and not has_mark(own.decode("utf-8", "replace")):
        spelling = _vocabulary_bytes
    start = answer_start(b"".join(map(spelling, tokens)), own, offset)
    if start is None:
        return unknown_gap("its answer changed again")
    at = -start  # reasoning comes before the content
    for entry in tokens:
        size = len(spelling(entry))
        if at + size > offset or (at == offset and size == 0):
            return _gap_at(entry, other[max(at, 0) :], spelling)
        at += size
    return unknown_gap("the baseline's answer ends there")


def answer_start(spelled: bytes, own: bytes, offset: int) -> Optional[int]:
    """Where the answer begins in what its tokens spell; None where they spell another answer."""
    start, beginning = spelled.rfind(own), own[: offset + 1]
    if start < 0 and (spelled.startswith(beginning) or spelled.count(beginning) == 1):
        # the answer went on differently behind the place: that does no harm
        start = spelled.find(beginning)
    return start if start >= 0 else None


# An end token has no bytes, or is spelled like </s>.
_END_TOKEN = re.compile(rb"(<[^<>\s]{1,40}>)?")


@dataclass(frozen=True)
class Alternative:
    """A token that the baseline could have chosen; no log probability where none is told."""

    logprob: Optional[float]
    raw: bytes
    token: str
    is_readable: bool


def _gap_at(entry: JSON, rest: bytes, spelling: Spelling) -> Triage:
    """The gap between the token of this place and the one with which `rest` goes on."""
    chosen, listed = as_number(entry.get("logprob")), alternatives(entry, spelling)
    known = [option.logprob for option in listed if option.logprob is not None]
    if chosen is None or not known:
        return unknown_gap("the server lists no alternatives")
    if max(chosen, *known) > 0.001:
        return unknown_gap("the server sends probabilities in place of their logarithms")
    matching = [option for option in listed if goes_on(option, spelling(entry), rest)]
    found: Triage = {
        **UNKNOWN_GAP,
        "baseline_token": str(entry.get("token")),
        "at_least": not matching,
    }
    other_logprob: Optional[float] = min(known)
    if matching:
        found["speculative_token"] = matching[0].token
        other_logprob = matching[0].logprob
    elif not all(option.is_readable for option in listed):
        reason = "the other server's token may be one that cannot be read"
        return {**found, "at_least": False, "reason": reason}
    if other_logprob is None:
        return {**found, "reason": "the other server's token comes without its probability"}
    gap = chosen - other_logprob
    if abs(gap) > NEAR_TIE_NATS:
        return {**found, "gap_nats": gap, "finding": "clear-preference"}
    if not matching:
        return {**found, "reason": "the other server's token is not among those listed"}
    return {**found, "gap_nats": gap, "finding": "near-tie"}


def alternatives(entry: JSON, spelling: Spelling) -> list[Alternative]:
    """What is listed beside a token, likeliest first.

    Ollama shows every part of a character as U+FFFD; only an end token has no bytes, and says so.
    """
    known = []
    for option in map(as_dict, as_list(entry.get("top_logprobs"))):
        raw = spelling(option)
        is_readable = b"\xef\xbf\xbd" not in raw
        if not raw:
            is_readable = isinstance(option.get("bytes"), list)
        known.append(
            Alternative(
                logprob=as_number(option.get("logprob")),
                raw=raw,
                token=str(option.get("token")),
                is_readable=is_readable,
            )
        )
    known.sort(key=lambda each: (each.logprob is not None, each.logprob or 0.0), reverse=True)
    return known


def goes_on(option: Alternative, own: bytes, rest: bytes) -> bool:
    """Whether the other text goes on, or ends, with this alternative."""
    if option.raw == own:
        return False
    if not rest:
        return _END_TOKEN.fullmatch(option.raw) is not None
    return bool(option.raw) and rest.startswith(option.raw)


# ---- comparison ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drafts:
    """What is known of an arm's drafts."""

    acceptance: Optional[Acceptance]
    growth: Growth
    disagreement: Optional[str] = None

    @property
    def seen(self) -> Optional[bool]:
        """Whether the server drafted at all; None where nothing tells."""
        if self.acceptance is None:
            return None
        counts = (self.acceptance.steps, self.acceptance.drafted, self.acceptance.accepted)
        known = [count for count in counts if count is not None]
        return any(known) if known else None


def drafts_of(run: Run) -> Drafts:
    """Acceptance from the answers, completed by the counters where both speak of the same ones.

    Drafts of a failed request, and of another client, are in the counters and their tokens nowhere:
    such blocks do not count.
    """
    answers = run.answers.values()
    growth = added_growth([block.growth for block in run.counted])
    whole = [block for block in run.counted if not block.failed]
    ours = [block for block in whole if is_ours(block)]
    counted = acceptance_of_blocks(ours, growth if len(ours) == len(run.counted) else None)
    told = acceptance_told(answers, is_counted=counted is not None)
    if told is not None:
        with_tokens = sum(answer.completion_tokens != 0 for answer in answers)
        seen = None
        if sum(block.answers for block in whole) == with_tokens:
            seen = acceptance_of_blocks(whole, growth)
        best, disagreement = joined_acceptance(told, seen)
        if len(ours) < len(whole):
            best = told  # nothing is filled in from what is of others too
        received = sum_known(answer.completion_tokens for answer in answers)
        each = tuple(map(drafts_of_answer, answers))
        of_answers = best and replace(best, tokens=received, answers=with_tokens, each=each)
        return Drafts(of_answers, growth, disagreement)
    if counted is None:
        return Drafts(None, growth)
    tokens = sum_known(block.tokens for block in ours)
    if run.conditions["shared_server"] and run.conditions["arm_extras"]:
        tokens = None  # the drafts are of this arm alone, the tokens of another arm too
    of_blocks = replace(counted, tokens=tokens, answers=sum(block.answers for block in ours))
    return Drafts(of_blocks, growth)


def is_ours(block: Counted) -> bool:
    """Whether the counters around a block can be of its answers alone."""
    made = generated_tokens(block.growth)
    return made is None or block.tokens is None or made <= block.tokens * (1 + FOREIGN_SHARE)


def drafts_of_answer(answer: Answer) -> Acceptance:
    """What one answer tells beside others that tell: nothing at all where nothing was drafted."""
    told = answer.drafts or Acceptance("response", None, 0, 0)
    return replace(told, tokens=answer.completion_tokens, answers=1)


def acceptance_of_blocks(
    blocks: Sequence[Counted], growth: Optional[Growth]
) -> Optional[Acceptance]:
    """What the counters around these blocks tell; `growth` where it is known already."""
    if growth is None:
        growth = added_growth([block.growth for block in blocks])
    return acceptance_of_counters(growth, sum(block.answers for block in blocks))


def acceptance_told(answers: Collection[Answer], is_counted: bool) -> Optional[Acceptance]:
    """The acceptance that the answers themselves tell, summed; None where they tell none."""
    told = added_acceptance([answer.drafts for answer in answers if answer.drafts])
    if told is None and not is_counted and answers:
        timed = [as_dict(answer.statistics.get("timings")) for answer in answers]
        if all((as_count(timings.get("predicted_n")) or 0) > 1 for timings in timed):
            # engines that have the draft fields leave them out where nothing was drafted
            return Acceptance("timings", None, 0, 0)
    return told


def in_common(runs: Sequence[Run]) -> list[Run]:
    """The runs, each knowing what all of them completed: the speeds are made of that."""
    pairs = frozenset.intersection(*(frozenset(run.answers) for run in runs))
    blocks = None
    if all(run.conditions["concurrency"] > 1 for run in runs):
        blocks = frozenset.intersection(*(whole_blocks(run) for run in runs))
    return [replace(run, pairs=pairs, blocks=blocks) for run in runs]


def whole_blocks(run: Run) -> frozenset[BlockKey]:
    """The blocks in which every request of this arm was answered."""
    return frozenset(block.key for block in run.counted if not block.failed and block.answers)


class Unit(NamedTuple):
    """One measured speed: of a pair, in the group of its prompt; under load of a block alone."""

    group: Hashable
    tokens: Optional[int]
    seconds: Optional[float]
    clock: Optional[str] = None


Units = dict[tuple[Any, int], Unit]  # by pair, under load by block: the repeat stands second


def clock_of(source: Optional[str]) -> str:
    """The kind of clock behind a decode time: only times of one kind are compared."""
    return (source or "none").partition("-")[0]


def units_of(run: Run) -> Units:
    """What this arm's speed is made of: the pairs, or under load the blocks, of all arms."""
    if run.blocks is not None:
        blocks = [block for block in run.counted if block.key in run.blocks]
        return {block.key: Unit(block.key, block.tokens, block.elapsed_s) for block in blocks}
    return {
        pair: Unit(pair[0], answer.completion_tokens, answer.latency_s)
        for pair, answer in run.shared.items()
    }


def decode_units_of(run: Run) -> Units:
    """The same for decoding alone, which is timed in each answer, under load too."""
    return {
        pair: Unit(pair[0], answer.decode_tokens, answer.decode_s, clock_of(answer.decode_source))
        for pair, answer in run.shared.items()
    }


def log_rates(units: Units) -> list[list[float]]:
    """ln tokens/s of the units, by group."""
    groups: dict[Hashable, list[float]] = {}
    for unit in units.values():
        rate = ratio_of(unit.tokens, unit.seconds)
        if rate:
            groups.setdefault(unit.group, []).append(math.log(rate))
    return list(groups.values())


def log_ratios(baseline: Units, candidate: Units) -> list[list[float]]:
    """ln(candidate tokens/s) - ln(baseline tokens/s): the repeats of each group."""
    return list(log_ratios_by_group(baseline, candidate).values())


def log_ratios_by_group(baseline: Units, candidate: Units) -> dict[Hashable, list[float]]:
    """The same by group, where both had one kind of clock."""
    groups: dict[Hashable, list[float]] = {}
    for key, unit in candidate.items():
        other = baseline.get(key)
        if other is None or other.clock != unit.clock:
            continue
        rate, base = ratio_of(unit.tokens, unit.seconds), ratio_of(other.tokens, other.seconds)
        if rate and base:
            groups.setdefault(unit.group, []).append(math.log(rate) - math.log(base))
    return groups


def spread_of(values: Sequence[float]) -> Optional[Spread]:
    """p50, mean and max of times in seconds, None where there are none."""
    if not values:
        return None
    return {"p50": median(values), "mean": math.fsum(values) / len(values), "max": max(values)}


@dataclass(frozen=True)
class Figures:
    """Speeds of one arm over what all arms completed; None where a count or a time is unknown."""

    tokens_per_s: Optional[float]
    decode_tokens_per_s: Optional[float]
    decode_source: Optional[str]
    wall_s: float
    latency_s: Optional[Spread]
    ttft_s: Optional[Spread]


def figures_of(run: Run, units: Units, decode_units: Units) -> Figures:
    """tokens/s = tokens / time inside the requests; under load / elapsed time of the blocks."""
    answers = run.shared.values()
    wall_s = math.fsum(unit.seconds or 0.0 for unit in units.values())
    sources = {answer.decode_source for answer in answers if answer.decode_source}
    source = sources.pop() if len(sources) == 1 else None
    tokens = sum_known(unit.tokens for unit in units.values())
    ttft_s = [answer.ttft_s for answer in answers if answer.ttft_s is not None]
    return Figures(
        tokens_per_s=ratio_of(tokens, wall_s),
        decode_tokens_per_s=decode_rate(decode_units) if source else None,
        decode_source=source,
        wall_s=wall_s,
        latency_s=spread_of([answer.latency_s for answer in answers]),
        ttft_s=spread_of(ttft_s),
    )


def decode_rate(units: Units) -> Optional[float]:
    """Tokens per second of decoding, over the answers that tell both."""
    timed = [unit for unit in units.values() if unit.tokens and unit.seconds]
    seconds = math.fsum(unit.seconds or 0.0 for unit in timed)
    return ratio_of(sum(unit.tokens or 0 for unit in timed), seconds)


@dataclass(frozen=True)
class Arm:
    """A run with what follows from it, each found once; `parts` are the same by kind of work."""

    run: Run
    drafts: Drafts
    acceptance: Optional[AcceptanceRecord]
    units: Units
    decode_units: Units
    figures: Figures
    agreement: Agreement
    findings: tuple[Finding, ...] = ()
    parts: dict[str, Arm] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """baseline, speculative, or the candidate's own name."""
        return self.run.arm

    @property
    def conditions(self) -> Conditions:
        """What was said about this arm beside its readings."""
        return self.run.conditions


def arm_from(run: Run) -> Arm:
    """A run with all that follows from it, by kind of work too."""
    workloads = workloads_of(run)
    whole = part_from(run)
    parts = {name: part_from(run.only(name)) for name in workloads if len(workloads) > 1}
    if len(workloads) == 1:
        parts = {workloads[0]: whole}
    return replace(whole, parts=parts, findings=tuple(arm_findings(run, whole)))


def part_from(run: Run) -> Arm:
    """The same without findings, which are about whole runs."""
    drafts, units, decode_units = drafts_of(run), units_of(run), decode_units_of(run)
    return Arm(
        run=run,
        drafts=drafts,
        acceptance=acceptance_record(drafts.acceptance),
        units=units,
        decode_units=decode_units,
        figures=figures_of(run, units, decode_units),
        agreement=self_agreement(run.answers),
    )


def workloads_of(run: Run) -> list[str]:
    """The kinds of work in the order of the prompts."""
    return list(dict.fromkeys(prompt["workload"] for prompt in run.conditions["prompts"]))


def finding(name: str, detail: str, **numbers: Any) -> Finding:
    """One line of the audit; KeyError for a name that FINDINGS does not list."""
    FINDINGS[name]
    return cast(Finding, {"finding": name, "detail": detail, **numbers})


def arm_findings(run: Run, arm: Arm) -> Iterator[Finding]:
    """What must be known about one arm before its figures are believed."""
    yield from run.conditions["findings"]
    yield from counter_findings(run, arm.drafts)
    yield from acceptance_findings(run, arm)
    yield from count_findings(run, arm)
    yield from traffic_findings(run)
    yield from answer_findings(run)
    yield from waiting_findings(run)
    yield from failure_findings(run)
    if run.interrupted:
        requests = plural(len(run.readings), "request")
        yield finding("interrupted", f"interrupted after {requests} of this arm")


def failure_findings(run: Run) -> Iterator[Finding]:
    """A server that fails where it is slow looks fast in what is left."""
    failed, requests = sum(r.answer is None for r in run.readings), len(run.readings)
    if failed:
        words = f"{failed} of {requests} requests failed ({failed / requests:.0%})"
        yield finding("failed-requests", words, count=failed, caveat=f"{run.arm}: {words}")


def count_findings(run: Run, arm: Arm) -> Iterator[Finding]:
    """Token counts that cannot be: they would make a speed out of nothing."""
    answers = run.answers.values()
    total = sum(answer.completion_tokens or 0 for answer in answers)
    limit = as_count(run.conditions["request"].get("max_tokens"))
    above = [a.completion_tokens or 0 for a in answers] if limit is not None else []
    beyond = sum(count for count in above if count > (limit or 0) + 1)
    silent = sum(answer.silent_tokens for answer in answers)
    accepted = arm.drafts.acceptance.accepted if arm.drafts.acceptance else None
    received = arm.drafts.acceptance.tokens if arm.drafts.acceptance else None
    if beyond > MISCOUNT_SHARE * total:
        words = f"answers of more tokens than the {limit} asked for"
        yield finding("counts-wrong", words, caveat=f"{run.arm} counts {words}")
    if silent > MISCOUNT_SHARE * total:
        words = f"{silent} tokens counted in answers without text"
        yield finding("counts-wrong", words, caveat=f"{run.arm}: {words}")
    if accepted is not None and received is not None and accepted > received:
        words = f"{accepted} draft tokens accepted in {received} tokens received"
        yield finding("counts-wrong", words, caveat=f"{run.arm}: {words}")


def counter_findings(run: Run, drafts: Drafts) -> Iterator[Finding]:
    """Where the counters could not be used."""
    growth = whole = drafts.growth
    if run.counted:
        whole = counter_growth(run.counted[0].before, run.counted[-1].after)
    known = {entry["finding"] for entry in run.conditions["findings"]}
    if growth.reset or whole.reset:
        words = f"{whole.void or growth.void}; its figures and its cache are of two servers"
        yield finding("counter-reset", words)
    elif growth.samples is None and "metrics-unavailable" not in known:
        unread = "no metrics were read"
        if run.interrupted:
            unread = "interrupted before the counters were read"
        yield finding("metrics-unavailable", (run.counted and growth.void) or unread)
    elif drafts.acceptance is None and spec_delta(growth):
        words = "the page has speculation counters of an unknown kind; no rate is made of them"
        yield finding("metrics-unavailable", words)
    if drafts.disagreement:
        yield finding("sources-disagree", drafts.disagreement + "; the answers are believed")


def acceptance_findings(run: Run, arm: Arm) -> Iterator[Finding]:
    """Where the acceptance cannot be, or is not of this run."""
    rate = arm.acceptance["rate"] if arm.acceptance else None
    if rate is not None and rate > 1:
        words = f"more tokens accepted than drafted (rate {rate:.3f}): a server's count is wrong"
        yield finding("rate-above-one", words, rate=rate)
    lifetime = run.conditions["server"].get("lifetime_accept_length")
    if arm.acceptance is None and lifetime:
        words = (
            "acceptance is told only as a mean since the server's start "
            f"({lifetime:.2f} tokens per step); it is not of this run"
        )
        yield finding("lifetime-only", words, mean_length=lifetime)


def traffic_findings(run: Run) -> Iterator[Finding]:
    """Whom else the server worked for, and whether requests queued."""
    extra = foreign_tokens(run)
    if extra:
        words = (
            f"the server generated {extra} tokens more than this program received: another client "
            "used it, so speeds, counters and text may be disturbed"
        )
        yield finding("foreign-traffic", words, foreign_tokens=extra)
    running = [others_requests(block.before) for block in run.counted]
    disturbed = sum(count > 0 for count in running)
    if disturbed and 2 * disturbed >= len(running):
        words = (
            f"requests of others were running or waiting before {disturbed} of {len(running)} "
            f"blocks (up to {max(running):.0f} at once)"
        )
        yield finding("busy", words, count=disturbed, requests=max(running))
    peak = max((block.waiting or 0.0 for block in run.counted), default=0.0)
    if peak:
        words = (
            f"up to {plural(round(peak), 'request')} queued at the server: it holds fewer at once "
            f"than {run.conditions['concurrency']}, so this level measures the queue"
        )
        yield finding("queueing", words, waiting=peak)


def waiting_findings(run: Run) -> Iterator[Finding]:
    """Where a proxy loads a model at every switch, or lets requests queue; one at a time only."""
    timed = [answer for answer in run.answers.values() if own_time_s(answer) is not None]
    outside = [answer.latency_s - (own_time_s(answer) or 0.0) for answer in timed]
    late = [s for s, a in zip(outside, timed) if s > WAITING_S and s > WAITING_SHARE * a.latency_s]
    if late and 10 * len(late) >= len(timed) and run.conditions["concurrency"] == 1:
        words = (
            f"{len(late)} of {len(timed)} answers took {median(late):.1f} s (median) outside the "
            "server's own clock: a proxy that loads a model at every switch, or a queue; measure "
            "one server after the other (--save-run, then compare)"
        )
        yield finding("waiting", words, count=len(late))


def own_time_s(answer: Answer) -> Optional[float]:
    """The seconds that the server's own clock tells of an answer, prompt and tokens together."""
    timings = as_dict(answer.statistics.get("timings"))
    prompt_ms, predicted_ms = (as_number(timings.get(n)) for n in ("prompt_ms", "predicted_ms"))
    if predicted_ms is None or answer.timings_doubtful:
        return None
    return ((prompt_ms or 0.0) + predicted_ms) / 1000


def others_requests(page: Snapshot) -> float:
    """Requests that run or wait at a moment at which this program has none."""
    return page.in_hand()


def answer_findings(run: Run) -> Iterator[Finding]:
    """What was odd about the answers of one arm."""
    answers = run.answers.values()
    undecodable = sum(answer.undecodable for answer in answers)
    uncounted = sum(answer.completion_tokens is None for answer in answers)
    waited = sum(reading.waited_s > 0 for reading in run.readings)
    doubtful = sum(answer.timings_doubtful for answer in answers)
    rates = "rates are left out, never guessed"
    for name, count, words in (
        ("timings-doubtful", doubtful, "answers came with times that cannot be; they are not used"),
        ("undecodable-text", undecodable, "answers held bytes that are no UTF-8, shown as U+FFFD"),
        ("usage-missing", uncounted, f"answers came without a token count of their own; {rates}"),
        ("waited", waited, "requests had to wait for a 503 or 429 first (not timed)"),
    ):
        if count:
            yield finding(name, f"{count} {words}", count=count)


def foreign_tokens(run: Run) -> Optional[int]:
    """How many tokens more were generated than received; None where unknown, or where too few.

    A failed request may have brought up to `max_tokens` that were generated and not received.
    """
    received = sum_known(block.tokens for block in run.counted)
    if not run.counted or received is None or run.interrupted:
        return None
    failed = sum(reading.answer is None for reading in run.readings)
    limit = as_count(run.conditions["request"].get("max_tokens"))
    if failed and limit is None:
        return None
    whole = counter_growth(run.counted[0].before, run.counted[-1].after, received)
    if run.conditions["shared_server"]:  # between this arm's blocks the other arm used it
        whole = added_growth([counter_growth(b.before, b.after, b.tokens) for b in run.counted])
    generated = generated_tokens(whole)
    explained = received * (1 + FOREIGN_SHARE) + failed * (limit or 0)
    if generated is None or generated <= explained:
        return None
    return round(generated - received)


def spec_gauges(run: Run) -> Optional[dict[str, float]]:
    """Speculation gauges as last read: never differenced, being means of another time."""
    samples = run.counted[-1].after.samples if run.counted else None
    if samples is None:
        return None
    gauges = [s for s in samples if not is_counter(s) and not s.name.endswith("_created")]
    return _by_series(gauges)


@dataclass(frozen=True)
class Why:
    """Why drafting pays or not, in decode terms; None for what is unknown.

    L tokens per target step, X the cost of a step and c that of a draft token in target steps.
    """

    applies: str  # "alpha", "any", "cannot-pay", "varying-chain" or "no-acceptance"
    alpha: Optional[float] = None
    alpha_needed: Optional[float] = None
    tokens_per_step: Optional[float] = None
    step_cost: Optional[float] = None
    draft_cost: Optional[float] = None
    per_step: Optional[float] = None  # draft tokens per target step
    chain: Optional[float] = None  # mean draft length
    fixed: Optional[int] = None  # k, where every draft had it


def why_of(baseline: Arm, candidate: Arm) -> Why:
    """Tokens per target step L against the cost of a step X, alpha against the alpha needed.

    X = speculative decode seconds per target step / baseline decode seconds per token, so L / X is
    the measured decode ratio by construction; c = (X - 1) / draft tokens per target step.
    """
    acceptance, record = candidate.drafts.acceptance, candidate.acceptance
    if acceptance is None or record is None or not candidate.drafts.seen:
        return Why("no-acceptance")
    length = record["tokens_per_target_step"]
    cost = step_cost(baseline.figures, candidate.figures, length)
    per_step = ratio_of(acceptance.drafted, target_steps(acceptance))
    fixed = fixed_chain(acceptance)
    applies, needed = bar_of(fixed, cost)
    draft_cost = None  # also where it is below what can be measured
    if cost is not None and cost >= 1:
        draft_cost = ratio_of(cost - 1, per_step)
    return Why(
        applies=applies,
        alpha=record["alpha"],
        alpha_needed=needed,
        tokens_per_step=length,
        step_cost=cost,
        draft_cost=draft_cost,
        per_step=per_step,
        chain=fixed or ratio_of(acceptance.drafted, acceptance.steps) or per_step,
        fixed=fixed,
    )


def step_cost(baseline: Figures, candidate: Figures, length: Optional[float]) -> Optional[float]:
    """X: what a step of the drafting server takes, in steps of the plain one; same clocks only."""
    if clock_of(baseline.decode_source) != clock_of(candidate.decode_source) or length is None:
        return None
    pace = ratio_of(baseline.decode_tokens_per_s, candidate.decode_tokens_per_s)
    return None if pace is None else pace * length


def bar_of(fixed: Optional[int], cost: Optional[float]) -> tuple[str, Optional[float]]:
    """(what applies, the alpha needed): only a fixed draft length has an alpha to break even at."""
    if cost is None:
        return ("alpha" if fixed else "varying-chain"), None
    if fixed is not None:
        return alpha_needed(fixed, cost)
    return ("any", 0.0) if cost <= 1 else ("varying-chain", None)


def fit_of(comparison: Comparison, comparisons: Sequence[Comparison]) -> Optional[CostFit]:
    """Verification and draft cost apart, from fixed chains of different length of one draft.

    None under a candidate that is not one of them: another draft has another cost.
    """
    draft = draft_told(comparison.candidate.run)
    whys = [each.why for each in comparisons if draft_told(each.candidate.run) == draft]
    points, chains = [], set()
    for why in whys:
        if why.fixed and why.per_step is not None and why.step_cost is not None:
            points.append((why.per_step, why.step_cost))
            chains.add(why.fixed)
    costs = fitted_costs(points) if len(chains) > 1 else None
    if costs is None or comparison.why.fixed is None:
        return None
    verifying, drafting = costs
    if verifying < PLAUSIBLE_VERIFICATION or drafting < 0:
        return None
    return {
        "draft_cost": drafting,
        "verification_cost": verifying,
        "runs": len(points),
        "draft_cost_error": fit_error(points, costs),
    }


def draft_told(run: Run) -> tuple[object, ...]:
    """What a server tells of its draft and target, and its request: all but numbers, as lengths."""
    about = run.conditions["server"]
    target = about.get("model_file") or about.get("root") or run.conditions["model"]
    asked = {name: v for name, v in run.conditions["arm_extras"].items() if isinstance(v, str)}
    told = set()
    for answer in run.answers.values():
        kind = as_dict(answer.statistics.get("timings")).get("draft_kind")
        told.add((str(kind), str(as_dict(answer.statistics.get("stats")).get("draft_model"))))
    return run.conditions["engine"], target, asked, told


def predictions(
    why: Why, acceptance: Optional[AcceptanceRecord], fit: Optional[CostFit]
) -> Optional[list[ChainPrediction]]:
    """The predicted speed-up of each draft length up to twice the measured; None without costs."""
    if why.fixed is None or why.step_cost is None or acceptance is None:
        return None
    rates = acceptance["per_position"]
    if not rates and why.alpha is not None:
        rates = [why.alpha ** (i + 1) for i in range(why.fixed)]
    if fit:
        verifying, drafting = fit["verification_cost"], fit["draft_cost"]
    elif why.draft_cost is not None:
        verifying, drafting = 1.0, why.draft_cost
    else:
        return None
    if not rates:
        return None
    padding = [0.0] * why.fixed
    rates = (list(rates) + padding)[: why.fixed]
    longest = max(2 * why.fixed, 2)
    return predicted_by_chain(rates, lambda k: verifying + k * drafting, longest)


def best_prediction(predicted: Optional[list[ChainPrediction]]) -> Optional[ChainPrediction]:
    """The fastest draft length, 0 for none."""
    if predicted is None:
        return None
    off: ChainPrediction = {"chain": 0, "predicted_speedup": 1.0, "extrapolated": False}
    return max([off, *predicted], key=lambda entry: entry["predicted_speedup"])


def same_process(run: Run, other: Run) -> bool:
    """Whether two arms were one server, as `server_numbers` tells."""
    a, b = run.conditions, other.conditions
    return a["run_id"] == b["run_id"] and a["host_number"] == b["host_number"]


def noise_check(run: Run, other: Run) -> bool:
    """Whether two arms were one server that was asked the same: what differs is noise."""
    same_request = run.conditions["arm_extras"] == other.conditions["arm_extras"]
    return same_request and same_process(run, other)


def pair_findings(whole: Comparison) -> Iterator[Finding]:
    """What must be known before the two arms are compared."""
    baseline, candidate, judged = whole.baseline, whole.candidate, len(whole.judged)
    noise = noise_check(baseline.run, candidate.run)
    yield from drafting_findings(baseline, candidate, noise)
    if not noise:
        yield from cache_findings(baseline, candidate)
    yield from server_differences(baseline.conditions, candidate.conditions)
    yield from miscount_findings(baseline.run, candidate.run)
    yield from slow_baseline_findings(baseline, candidate, whole.why)
    yield from time_findings(baseline.conditions, candidate.conditions)
    yield from sample_findings(
        whole.logs, judged, under_load=baseline.conditions["concurrency"] > 1
    )
    for arm in (baseline, candidate):
        for entry in arm.findings:
            meaning = FINDINGS[entry["finding"]]
            # these belong to the comparison too; an interruption is told for both at once
            if meaning.caveat and entry["finding"] != "interrupted":
                yield {**entry, "detail": f"{arm.name}: {entry['detail']}"}
    if baseline.run.interrupted or candidate.run.interrupted:
        words = "the measurement was interrupted; this is what was finished"
        yield finding("interrupted", words)


def miscount_findings(baseline: Run, candidate: Run) -> Iterator[Finding]:
    """The same text has the same number of tokens, or one of the servers miscounts."""
    more = total = 0
    for pair, own in baseline.shared.items():
        other = candidate.shared.get(pair)
        if other is None or own.texts != other.texts or not any(own.texts):
            continue
        if own.completion_tokens is not None and other.completion_tokens is not None:
            more += abs(own.completion_tokens - other.completion_tokens)
            total += max(own.completion_tokens, other.completion_tokens)
    if more > MISCOUNT_SHARE * total:
        words = f"identical texts differ by {more / total:.0%} in their token counts"
        yield finding("counts-wrong", words, caveat=words)


def slow_baseline_findings(baseline: Arm, candidate: Arm, why: Why) -> Iterator[Finding]:
    """Reading a prompt costs both servers the same, verifying drafts no less than a plain step."""
    if baseline.conditions["concurrency"] > 1:
        return
    cost = why.step_cost
    if is_late(baseline.run, candidate.run) and caches_alike(baseline.run, candidate.run):
        mine, theirs = (1000 * median(first_ttft_s(arm.run)) for arm in (baseline, candidate))
        yield implausible(
            f"its first tokens came after {mine:.0f} ms, {candidate.name}'s after {theirs:.0f} ms, "
            "for the same prompts"
        )
    elif cost is not None and cost < IMPLAUSIBLE_STEP and is_sure_step(baseline, candidate, why):
        yield implausible(f"a step with drafts took {cost:.2f} of its plain steps")


def is_late(baseline: Run, candidate: Run) -> bool:
    """Whether the baseline's first tokens came later by more than chance.

    The medians alone were apart by chance in 6 to 24% of simulated equal pairs (6 and 12 prompts,
    scatter .3 to .5), so the interval of the paired ratio has to say it too: 2%.
    """
    mine, theirs = first_ttft_s(baseline), first_ttft_s(candidate)
    if not mine or len(mine) != len(theirs):
        return False
    apart = over_prompts([[math.log(a / b)] for a, b in zip(mine, theirs)])
    floor = max(IMPLAUSIBLE_TTFT * median(theirs), median(theirs) + LEAST_DELAY_S)
    is_sure = apart is not None and apart.low is not None and apart.low > 1
    return is_sure and median(mine) > floor


def is_sure_step(baseline: Arm, candidate: Arm, why: Why) -> bool:
    """Whether the whole interval of the decode ratio says that a step costs less than plain."""
    length = why.tokens_per_step
    decode = over_prompts(log_ratios(baseline.decode_units, candidate.decode_units))
    if not length or decode is None or not decode.low:
        return False
    pace = baseline.figures.decode_tokens_per_s
    is_measurable = pace is not None and pace * LEAST_STEP_S < 1
    return is_measurable and length / decode.low < 1


def implausible(words: str) -> Finding:
    """Something slowed the baseline, as this shows."""
    caveat = f"something slowed the baseline: {words}"
    return finding("implausible", f"{caveat}; the ratio is too high", caveat=caveat)


def first_ttft_s(run: Run) -> list[float]:
    """The times to the first token of the first repeats, in seconds, by prompt; where all tell."""
    first = [answer.ttft_s for (_, repeat), answer in sorted_pairs(run) if repeat == 0]
    known = [seconds for seconds in first if seconds]
    return known if len(known) == len(first) else []


def sorted_pairs(run: Run) -> list[tuple[Pair, Answer]]:
    """What all arms completed, in the order of the prompts."""
    return sorted(run.shared.items(), key=lambda item: item[0])


def caches_alike(baseline: Run, candidate: Run) -> bool:
    """Whether neither server had more of the prompts in its cache, as far as they tell."""
    gap = cache_gap(baseline, candidate)
    return gap is None or gap[0] <= CACHE_SHARE


def cache_gap(baseline: Run, candidate: Run) -> Optional[tuple[float, int, int]]:
    """(share of the prompt tokens, baseline's, candidate's): prompt tokens from the cache.

    An engine that leaves them out where there are none (vLLM) has 0 there, if any answer told some.
    """
    answers = [list(run.shared.values()) for run in (baseline, candidate)]
    if not any(answer.cached_tokens is not None for own in answers for answer in own):
        return None
    mine, theirs = (sum(answer.cached_tokens or 0 for answer in own) for own in answers)
    prompt = sum(answer.prompt_tokens or 0 for answer in answers[0])
    return (abs(mine - theirs) / prompt if prompt else 0.0), mine, theirs


def time_findings(a: Conditions, b: Conditions) -> Iterator[Finding]:
    """Runs of different times; and one arm streamed where the other was not."""
    if a["stream"] != b["stream"]:
        words = "one server was asked for streamed answers, the other was not"
        yield finding("stream-differs", words)
    if a["run_id"] == b["run_id"]:
        if a["order"] == "sequential":
            caveat = "one server was measured after the other"
            words = f"{caveat}; drift between them is not cancelled"
            yield finding("runs-apart", words, caveat=caveat)
        return
    try:
        times = [datetime.datetime.fromisoformat(side["recorded_at"]) for side in (a, b)]
        apart = abs((times[1] - times[0]).total_seconds())
    except (ValueError, TypeError):  # one without a zone, or no time at all
        apart = None
    words = "at different times"
    if apart is not None:
        words = f"{duration_words(apart)} apart"
    caveat = f"the runs were measured {words}"
    yield finding("runs-apart", f"{caveat}; drift between them is not cancelled", caveat=caveat)


def drafting_findings(baseline: Arm, candidate: Arm, noise: bool) -> Iterator[Finding]:
    """Where the two servers are one, or where the wrong one drafted."""
    if same_process(baseline.run, candidate.run):
        words = "only the request fields differ, and its counters are of both arms together"
        if noise:
            words = "this measures the noise, not speculation"
        found = finding("same-server", f"both arms are the same server: {words}", noise=noise)
        yield {**found, "withholds": noise}
    elif baseline.drafts.seen:
        words = "the baseline server drafts too, so this is no comparison with plain decoding"
        yield finding("baseline-drafting", words)
    if candidate.drafts.seen is False and not noise:
        words = (
            "speculation did not run: no draft was seen on the speculative server, so its speed "
            "says nothing about speculation"
        )
        yield finding("not-drafting", words)


def cache_findings(baseline: Arm, candidate: Arm) -> Iterator[Finding]:
    """Where one server had more of the prompts in its cache than the other."""
    gap = cache_gap(baseline.run, candidate.run)
    if gap is None or gap[0] <= CACHE_SHARE:
        return
    _, mine, theirs = gap
    words = (
        f"prompt tokens from the cache: baseline {mine}, {candidate.name} {theirs}; restart both "
        "servers, or switch the cache off (llama.cpp: --extra-body '{\"cache_prompt\": false}')"
    )
    yield finding("cache-differs", words, baseline=mine, speculative=theirs)


def server_differences(a: Conditions, b: Conditions) -> Iterator[Finding]:
    """Where the two servers differ in what they tell of themselves."""
    yield from model_findings(a, b)
    builds = [f"{side['engine']} {side['engine_version']}" for side in (a, b)]
    mine, theirs = a["server"], b["server"]
    sizes = mine.get("tensor_parallel"), theirs.get("tensor_parallel")
    for name, words, own, other in (
        ("context-differs", "context length", mine.get("context"), theirs.get("context")),
        ("build-differs", "tensor parallel size", *sizes),
        ("build-differs", "build", *builds),
    ):
        if own != other and own is not None and other is not None:
            yield difference_finding(name, words, own, other, b["arm"])


def difference_finding(
    name: str, words: str, own: object, other: object, arm: str, **more: Any
) -> Finding:
    """What the baseline tells, and what the candidate tells in its place."""
    detail = f"{words}: baseline {own}, {arm} {other}"
    return finding(name, detail, baseline=own, speculative=other, **more)


def model_findings(a: Conditions, b: Conditions) -> Iterator[Finding]:
    """Whether the servers hold one model, in three grades.

    Another model (quantization, or more than a tenth more parameters) leaves no verdict; another
    file may hold draft heads beside the same target; another name alone is a router's setting.
    """
    mine, theirs, arm = a["server"], b["server"], b["arm"]
    kinds = mine.get("quantization"), theirs.get("quantization")
    if None not in kinds and kinds[0] != kinds[1]:
        yield difference_finding("quantization-differs", "quantization", *kinds, arm)
    sizes = mine.get("parameters"), theirs.get("parameters")
    if sizes[0] and sizes[1] and max(sizes[0], sizes[1]) > 1.1 * min(sizes[0], sizes[1]):
        yield difference_finding("model-differs", "parameters", *sizes, arm, grade="model")
        return
    for key, words in MODEL_FILES:
        own, other = mine.get(key), theirs.get(key)
        if own != other and own is not None and other is not None:
            caveat = f"the model files differ ({own}, {other})"
            found = difference_finding("model-differs", words, own, other, arm, grade="file")
            yield {**found, "caveat": caveat, "withholds": False}
            return
    if a["model"] != b["model"]:
        found = difference_finding("model-differs", "name", a["model"], b["model"], arm)
        yield {**found, "grade": "name", "withholds": False}


# What tells one file of a model from another, the plainest first.
MODEL_FILES: tuple[tuple[Literal["model_file", "root", "parameters", "model_bytes"], str], ...] = (
    ("model_file", "model file"),
    ("root", "model root"),
    ("parameters", "parameters"),
    ("model_bytes", "size in bytes"),
)


def sample_findings(logs: Logs, judged: int, under_load: bool) -> Iterator[Finding]:
    """What the sample of prompts, or of pairs of blocks, does not allow to say."""
    units, advice = "prompts", ""
    if under_load:
        units, advice = "pairs of blocks", "; --repeats adds pairs of blocks"
    caveat = f"there are few {units}"
    if judged < 2:
        words = f"no interval: it takes at least two {units} measured on both servers{advice}"
        yield finding("few-prompts", words, prompts=judged, caveat=caveat)
    elif judged < FEW_PROMPTS:
        words = (
            f"the interval rests on {judged} {units}; below {FEW_PROMPTS} it is too narrow "
            "where kinds are mixed"
        )
        yield finding("few-prompts", words, prompts=judged, caveat=caveat)
    stalls = stall_count(logs)
    if stalls:
        words = f"{stalls} repeats lie far from their prompt's median (kept in the figures)"
        yield finding("stalls", words, count=stalls)


@dataclass(frozen=True)
class Comparison:
    """One candidate against the baseline, each figure found once; `parts` by kind of work."""

    baseline: Arm
    candidate: Arm
    logs: Logs  # of all repeats
    judged: dict[Hashable, list[float]]  # by group: the first repeats alone if a server remembered
    speed: Optional[Estimate]  # of what is judged
    verdict: Optional[str]  # None where it is withheld
    texts: Texts
    why: Why
    memory: Optional[Memory] = None  # what made repeats faster than new prompts
    withheld: Optional[str] = None
    findings: tuple[Finding, ...] = ()
    parts: dict[str, Comparison] = field(default_factory=dict)


@dataclass(frozen=True)
class Memory:
    """What a server remembered of prompts that it had answered before."""

    arm: str
    kind: str  # "prompt cache" or "drafter"


def halves_of(run: Run) -> tuple[list[Answer], list[Answer]]:
    """The answers of first and of later repeats, of the prompts that have both."""
    first: dict[int, Answer] = {}
    later: dict[int, list[Answer]] = {}
    for (prompt, repeat), answer in run.shared.items():
        if repeat == 0:
            first[prompt] = answer
        else:
            later.setdefault(prompt, []).append(answer)
    both = first.keys() & later.keys()
    return [first[prompt] for prompt in both], [a for prompt in both for a in later[prompt]]


def memory_of_repeats(run: Run) -> Optional[Memory]:
    """Whether a server remembered, told by what it did, never by testing the ratios.

    A test misses what stalls hide: with a memory worth 5 to 10% the interval then held the truth
    in 60 to 88% of simulated runs.
    """
    first, later = halves_of(run)
    if not first:
        return None
    cold, warm = (mean_accepted(half) for half in (first, later))
    if warm > 1.05 * cold and (warm - cold) * len(first) > 4:
        return Memory(run.arm, "drafter")
    return Memory(run.arm, "prompt cache") if is_cached(first, later) else None


def mean_accepted(answers: Sequence[Answer]) -> float:
    """Accepted draft tokens an answer; 0 where one does not tell: nothing follows from it."""
    told = [answer.drafts for answer in answers if answer.drafts]
    if len(told) < len(answers):
        return 0.0
    return (sum_known(each.accepted for each in told) or 0) / len(answers)


def shared_memory(mine: Optional[Memory], theirs: Optional[Memory]) -> Optional[Memory]:
    """What is said of the memories of both servers: a drafter's before a prompt cache."""
    if mine == theirs or mine is None or theirs is None:
        return mine or theirs
    if mine.kind == theirs.kind:
        return Memory("both servers", mine.kind)
    return mine if mine.kind == "drafter" else theirs


def is_cached(first: Sequence[Answer], later: Sequence[Answer]) -> bool:
    """Whether later repeats had their prompts in the cache, or started as if they had."""
    if any(answer.cached_tokens is not None for answer in (*first, *later)):
        cold, warm = (mean([a.cached_tokens or 0 for a in half]) for half in (first, later))
        return warm - cold > CACHE_SHARE * mean([a.prompt_tokens or 0 for a in first])
    before, after = ([a.ttft_s for a in half if a.ttft_s is not None] for half in (first, later))
    if not before or not after:
        return False
    saved_s = median(before) - median(after)
    return saved_s >= LEAST_DELAY_S and median(after) < 0.8 * median(before)


def memory_findings(comparison: Comparison, min_gain: float) -> Iterator[Finding]:
    """What a server remembered, with the ratio and the acceptance of first and of later repeats."""
    memory, candidate = comparison.memory, comparison.candidate
    later = {key: unit for key, unit in candidate.units.items() if key[1] > 0}
    warm = over_prompts(log_ratios(comparison.baseline.units, later))
    if memory is None or comparison.speed is None or warm is None:
        return
    sums = [added_acceptance([a.drafts for a in h if a.drafts]) for h in halves_of(candidate.run)]
    rates = [figure(ratio_of(each.accepted, each.drafted) if each else None) for each in sums]
    words = (
        f"the {memory.kind} of {memory.arm} remembers prompts: {comparison.speed.ratio:.2f}x the "
        f"first time, {warm.ratio:.2f}x in later repeats (acceptance {rates[0]} and {rates[1]}); "
        "the first repeats are judged"
    )
    found = finding("repeats-differ", words, memory=memory.kind.replace(" ", "-"))
    all_repeats = verdict_of(over_prompts(comparison.logs), min_gain)
    if memory.kind == "drafter" and all_repeats != comparison.verdict:
        found["caveat"] = f"repeats of a prompt are faster than new ones ({warm.ratio:.2f}x)"
    yield found


def compare(baseline: Arm, candidate: Arm, min_gain: float) -> Comparison:
    """Everything that is said about a candidate beside the baseline, by kind of work too."""
    memory = None
    if baseline.conditions["concurrency"] == 1:
        memory = shared_memory(memory_of_repeats(baseline.run), memory_of_repeats(candidate.run))
    whole = compare_part(baseline, candidate, memory, min_gain)
    findings = (
        *pair_findings(whole),
        *memory_findings(whole, min_gain),
    )
    withheld = withheld_by(findings)
    one_kind = len(baseline.parts) == 1 and list(baseline.parts) == list(candidate.parts)
    parts = {}
    for name, mine in baseline.parts.items():
        part = whole
        if not one_kind:  # where --force compares other prompts, the candidate may lack this kind
            other = candidate.parts.get(name) or part_from(candidate.run.only(name))
            part = compare_part(mine, other, memory, min_gain)
        idle = part.candidate.drafts.seen is False and withheld != "same-server"
        parts[name] = replace(part, verdict=None if withheld or idle else part.verdict)
    verdict = None if withheld else whole.verdict
    return replace(whole, parts=parts, findings=findings, verdict=verdict, withheld=withheld)


def withheld_by(findings: Sequence[Finding]) -> Optional[str]:
    """Why there is no verdict, None where there is one: the first reason as FINDINGS has them."""
    reasons = {
        entry["finding"]: FINDINGS[entry["finding"]].withholds
        for entry in findings
        if entry.get("withholds", True)
    }
    return next((reasons[name] for name in FINDINGS if reasons.get(name)), None)


def judged_texts(baseline: Arm, candidate: Arm) -> Texts:
    """What became of the text; sampled texts that differ are no change, of no class."""
    texts = compare_texts(baseline.run, candidate.run, baseline.agreement.unstable)
    if sampling_of(baseline.conditions) is None and sampling_of(candidate.conditions) is None:
        return texts
    return replace(texts, divergences=[], sampled=True)


def compare_part(
    baseline: Arm, candidate: Arm, memory: Optional[Memory], min_gain: float
) -> Comparison:
    """Speeds, verdict and texts of one kind of work, or of all."""
    judged_units = candidate.units
    if memory:
        judged_units = {key: unit for key, unit in judged_units.items() if key[1] == 0}
    judged = log_ratios_by_group(baseline.units, judged_units)
    speed = over_prompts(list(judged.values()))
    return Comparison(
        baseline=baseline,
        candidate=candidate,
        logs=log_ratios(baseline.units, candidate.units),
        judged=judged,
        speed=speed,
        verdict=verdict_of(speed, min_gain),
        texts=judged_texts(baseline, candidate),
        why=why_of(baseline, candidate),
        memory=memory,
    )


@dataclass(frozen=True)
class Level:
    """One concurrency level: the arms as measured, and each candidate against the baseline.

    Arms that completed nothing stay, as what is left of their failure; they are not compared.
    """

    arms: tuple[Arm, ...]
    comparisons: tuple[Comparison, ...]


def level_of(runs: Sequence[Run], min_gain: float) -> Level:
    """What follows from the runs of one level."""
    alive = [run for run in runs if run.answers]
    common = {run.arm: run for run in in_common(alive)} if alive else {}
    arms = [arm_from(common.get(run.arm) or in_common([run])[0]) for run in runs]
    compared = [arm for arm in arms if arm.name in common]
    if not compared or compared[0].name != "baseline":
        return Level(tuple(arms), ())
    baseline, *candidates = compared
    return Level(tuple(arms), tuple(compare(baseline, arm, min_gain) for arm in candidates))


def best_of(comparisons: Sequence[Comparison]) -> Optional[Comparison]:
    """The fastest candidate that drafted."""
    ran = [
        each
        for each in comparisons
        if each.speed and each.verdict and not noise_check(each.baseline.run, each.candidate.run)
    ]
    return max(ran, key=lambda each: each.speed.ratio if each.speed else 0.0, default=None)


# ---- records, notebook --------------------------------------------------------------------------
# What stands in the notebook and in run files, key by key.  JSON is checked against these shapes
# once, where it is read (`misfit`); behind that line every key is there and of its type.  Times in
# seconds, rates in tokens per second, shares from 0 to 1; None is unknown, never 0.


class Spread(TypedDict):
    """Times of requests, in seconds."""

    p50: float
    mean: float
    max: float


class Interval(TypedDict):
    """A ratio with its interval, None where there is none, and how many prompts it rests on."""

    ratio: float
    low: Optional[float]
    high: Optional[float]
    level: float
    prompts: int


class Speedup(Interval, total=False):
    """The ratio that is judged; since 1.1 `rests_on` is "all" repeats, or "first-repeats" alone."""

    rests_on: str


class SpeedInterval(TypedDict):
    """The same of a plain speed."""

    tokens_per_s: float
    low: Optional[float]
    high: Optional[float]
    level: float
    prompts: int


class AgainstBest(Interval):
    """The paired ratio of a candidate to the fastest one."""

    best: str


class AcceptanceRecord(TypedDict):
    """What became of the draft tokens."""

    source: str
    steps: Optional[int]
    drafted: Optional[int]
    accepted: Optional[int]
    per_position: Optional[list[float]]
    rate: Optional[float]
    mean_length: Optional[float]
    tokens_per_target_step: Optional[float]
    alpha: Optional[float]


class _NamedFinding(TypedDict):
    finding: str
    detail: str


class Finding(_NamedFinding, total=False):
    """One line of the audit, with the figures that it is about."""

    baseline: object
    count: int
    fields: list[str]
    caveat: str  # what the last line says, in place of the general words
    foreign_tokens: int
    grade: str
    mean_length: float
    memory: str
    noise: bool
    prompts: int
    rate: float
    requests: float
    speculative: object
    waiting: float
    withholds: bool


class About(TypedDict, total=False):
    """What a server tells of itself."""

    cache_tokens: int
    context: int
    lifetime_accept_length: float
    model_bytes: int
    model_file: str
    parameters: int
    quantization: object
    resident_bytes: int
    root: str
    slots: int
    tensor_parallel: int


class Host(TypedDict):
    """The machine that measured, without its name."""

    system: str
    machine: str
    python: str
    cpus: Optional[int]


class ArmFigures(TypedDict):
    """One server's figures, on one kind of work or on all."""

    completed: int
    output_tokens: Optional[int]
    output_tokens_per_s: Optional[float]
    decode_tokens_per_s: Optional[float]
    latency_s: Optional[Spread]
    ttft_s: Optional[Spread]
    acceptance: Optional[AcceptanceRecord]


class WorkloadFigures(ArmFigures):
    """The figures of one kind of work."""

    workload: str
    prompts: int


class RunFacts(TypedDict):
    """What both kinds of record say of the run that they are of."""

    lab: str
    schema: int
    run_id: str
    label: str
    engine: str
    engine_version: str
    model: str
    max_tokens: object  # request fields are as the user set them
    repeats: int
    prompt_count: int
    prompts_sha256: str
    order: str
    concurrency: int
    interrupted: bool
    simulated: bool
    context: Optional[int]
    cached_tokens: Optional[int]
    recorded_at: str


class _EndpointRecord(RunFacts, ArmFigures):
    kind: Literal["endpoint"]
    base_url: str
    requests: int
    failed: int
    first_error: Optional[str]
    wall_s: float
    decode_source: Optional[str]
    speed: Optional[SpeedInterval]
    tokens_counted_by_server: bool
    server_timings_sample: Optional[JSON]
    spec_metrics_delta: Optional[dict[str, float]]
    spec_metrics_gauges: Optional[dict[str, float]]
    workloads: list[WorkloadFigures]
    audit: list[Finding]
    server: About
    seed: object
    temperature: object
    stream: bool
    warmup: int
    host: Host
    tool_version: str


class EndpointRecord(_EndpointRecord, total=False):
    """What the notebook keeps of one arm; rates are over the pairs that all arms completed."""

    sampling: Optional[JSON]  # since 1.1


class SelfAgreement(TypedDict):
    """How often a server gave the same text again."""

    compared: int
    identical: int
    warm_compared: int
    warm_identical: int


class _Gap(TypedDict):
    finding: str
    gap_nats: Optional[float]
    baseline_token: Optional[str]
    speculative_token: Optional[str]


class Triage(_Gap, total=False):
    """What the baseline's log probabilities say of a difference."""

    at_least: bool
    reason: str


# A class cannot have a field named `class`.
Divergence = TypedDict(
    "Divergence",
    {
        "prompt_index": int,
        "prompt_id": str,
        "workload": str,
        "repeat": int,
        "where": str,
        "class": str,
        "first_difference_at_char": int,
        "first_difference_at_byte": int,
        "line": int,
        "column": int,
        "baseline_tail": str,
        "speculative_tail": str,
        "baseline_finish_reason": Optional[str],
        "speculative_finish_reason": Optional[str],
        "baseline_tokens": Optional[int],
        "speculative_tokens": Optional[int],
        "count_suspicious": bool,
        "triage": Optional[Triage],
    },
)


class TextCounts(TypedDict):
    """How many pairs of texts agree."""

    compared: int
    identical: int
    divergent: Optional[int]  # None where texts were sampled
    empty: int
    failed: int
    unstable: int
    counts_differ: int
    baseline_self: SelfAgreement
    speculative_self: SelfAgreement


class _TextComparison(TextCounts):
    divergences: list[Divergence]


class TextComparison(_TextComparison, total=False):
    """The same with the first of the pairs that differ, and how many part at a near tie."""

    near_ties: int
    sampled: bool


class _CostFit(TypedDict):
    draft_cost: float
    verification_cost: float
    runs: int


class CostFit(_CostFit, total=False):
    """Verification and draft cost, in target steps, fitted over so many candidates."""

    draft_cost_error: Optional[float]  # None for fewer than three; since 1.1


class BreakEven(TypedDict):
    """Why it pays or not: see `Why`."""

    applies: str
    alpha: Optional[float]
    alpha_needed: Optional[float]
    tokens_per_step: Optional[float]
    step_cost: Optional[float]
    draft_cost: Optional[float]
    chain: Optional[float]
    best_chain: Optional[ChainPrediction]
    predicted: Optional[list[ChainPrediction]]
    fit: Optional[CostFit]


class Compared(TypedDict):
    """The figures that a comparison has for each kind of work and for all."""

    baseline_tokens_per_s: Optional[float]
    speculative_tokens_per_s: Optional[float]
    speedup: Optional[Speedup]
    verdict: Optional[str]
    acceptance: Optional[AcceptanceRecord]


class WorkloadComparison(Compared):
    """A comparison on one kind of work."""

    workload: str
    prompts: int
    text_comparison: TextCounts


class Latencies(TypedDict):
    """The median time of a request on both servers."""

    baseline: Optional[float]
    speculative: Optional[float]


class _Comparison(RunFacts, Compared):
    kind: Literal["comparison"]
    baseline_run_id: str
    candidate: str
    speedup_these_prompts: Optional[Interval]
    decode_speedup: Optional[Interval]
    min_gain: float
    more_prompts: Optional[str]
    more_repeats: Optional[int]
    prompt_log_ratios: list[Optional[float]]
    verdict_withheld: Optional[str]
    workloads: list[WorkloadComparison]
    break_even: BreakEven
    latency_p50_s: Latencies
    text_comparison: TextComparison
    audit: list[Finding]
    baseline_engine_version: str
    against_best: Optional[AgainstBest]


class ComparisonRecord(_Comparison, total=False):
    """What the notebook keeps of one candidate against the baseline."""

    baseline_engine: str  # these two where they are not the candidate's
    baseline_model: str
    sampling: Optional[JSON]  # since 1.1: the candidate's, and the baseline's where it differs
    baseline_sampling: Optional[JSON]


Record = Union[EndpointRecord, ComparisonRecord]


class PromptRef(TypedDict):
    """A prompt of a run, without its text."""

    id: str
    workload: str
    sha256: str


class _Conditions(TypedDict):
    schema: int
    run_id: str
    arm: str
    base_url: str
    metrics_url: Optional[str]
    model: str
    engine: str
    engine_version: str
    server: About
    findings: list[Finding]
    request: JSON
    arm_extras: JSON
    stream: bool
    prompts: list[PromptRef]
    repeats: int
    warmup: int
    order: str
    concurrency: int
    simulated: bool
    tool_version: str
    recorded_at: str
    host: Host
    host_number: int
    shared_server: bool


class Conditions(_Conditions, total=False):
    """Everything that is said about an arm beside its readings: the header of its run."""

    sampling: Optional[JSON]  # since 1.1: the fields in force, None where greedy


class PlaceLine(TypedDict):
    """What was asked: the beginning of a reading's line."""

    arm: str
    prompt_index: int
    prompt_id: str
    workload: str
    repeat: int
    place: int
    waited_s: float
    error: Optional[str]


class _AnswerLine(TypedDict):
    content: str
    reasoning: str
    finish_reason: Optional[str]
    latency_s: float
    ttft_s: Optional[float]
    decode_s: Optional[float]
    decode_tokens: Optional[int]
    decode_source: Optional[str]
    completion_tokens: Optional[int]
    prompt_tokens: Optional[int]
    cached_tokens: Optional[int]
    statistics: JSON
    streamed: bool
    undecodable: bool


class AnswerLine(_AnswerLine, total=False):
    """What came back: the fields of `Answer`, where there was no error; the last ones since 1.1."""

    silent_tokens: int
    timings_doubtful: bool
    tool_calls: str


class SnapshotLine(TypedDict):
    """A metrics page: name, labels, value, kind and series of each sample."""

    samples: Optional[list[tuple[str, list[tuple[str, str]], float, str, str]]]
    unavailable: Optional[str]
    process: Optional[str]


class CountedLine(TypedDict):
    """A server's counters around one block."""

    arm: str
    workload: str
    repeat: int
    before: SnapshotLine
    after: SnapshotLine
    tokens: Optional[int]
    answers: int
    failed: int
    elapsed_s: float
    waiting: Optional[float]


class TriageLine(TypedDict):
    """What was found out about a text that differs."""

    arm: str
    prompt_index: int
    triage: Triage


class EndLine(TypedDict):
    """The last line of an arm."""

    arm: str
    interrupted: bool


_hints = functools.cache(get_type_hints)


# The Python types of a plain JSON value, by the type that a shape asks for.
_NONE = type(None)
_PLAIN: dict[Any, tuple[type, ...]] = {
    str: (str,),
    bool: (bool,),
    int: (int,),
    float: (float, int),
    Optional[str]: (str, _NONE),
    Optional[int]: (int, _NONE),
    Optional[float]: (float, int, _NONE),
}
# What is measured is below 1e18 (`as_number`), but what follows from it need not be: the interval
# of two prompts, one a thousand times as fast as the other, ends near 1e19, at most at e^700.
LARGEST = 1e305


def misfit(value: Any, shape: Any, where: str = "") -> Optional[str]:
    """The path of the first field of a JSON value that its shape does not allow, or None.

    Keys that the shape does not name are allowed: a later version may have written them.
    """
    kind, inner = get_origin(shape) or shape, get_args(shape)
    if kind in (object, Any):
        return None
    if shape in _PLAIN:
        return None if type(value) in _PLAIN[shape] and is_sane(value) else where
    if kind is Literal:
        return None if value in inner else where
    if kind is Union:  # in these shapes always Optional
        return None if value is None else misfit(value, inner[0], where)
    parts = _parts(value, kind, inner)
    if parts is None:
        return where or "no object"
    for name, part, part_shape in parts:
        # the quick way for what nearly all parts are: a run file has tens of thousands of them
        if type(part) in _PLAIN.get(part_shape, ()) and (not part or is_sane(part)):
            continue
        found = misfit(part, part_shape, f"{where}.{name}" if where else str(name))
        if found:
            return found
    return None


def is_sane(value: object) -> bool:
    """Whether a plain value can be: no number beyond all measure, no half of a character."""
    if isinstance(value, str):
        return value.isascii() or not re.search("[\ud800-\udfff]", value)
    return not isinstance(value, (int, float)) or -LARGEST < value < LARGEST


def _parts(value: Any, kind: Any, inner: tuple[Any, ...]) -> Optional[list[tuple[Any, Any, Any]]]:
    """(name, value, shape) of each part of a list or object; None where it is something else."""
    if kind in (list, tuple):
        if not isinstance(value, list):
            return None
        shapes = inner if kind is tuple else inner * len(value)
        return list(zip(itertools.count(), value, shapes)) if len(value) == len(shapes) else None
    if not isinstance(value, dict):
        return None
    if kind is dict:
        return [(name, part, inner[1]) for name, part in value.items()]
    missing = kind.__required_keys__ - value.keys()
    wanted = [(name, None, NoReturn) for name in sorted(missing)]
    hints = _hints(kind)
    return wanted + [(name, value[name], hints[name]) for name in hints if name in value]


def prompts_digest(conditions: Conditions) -> str:
    """One hash over all prompts of a run, in their order."""
    digests = "".join(prompt["sha256"] for prompt in conditions["prompts"])
    return hashlib.sha256(digests.encode()).hexdigest()[:16]


def interval_record(found: Optional[Estimate]) -> Optional[Interval]:
    """An estimate as it stands in the records."""
    if found is None:
        return None
    return {
        "ratio": found.ratio,
        "low": found.low,
        "high": found.high,
        "level": 0.95,
        "prompts": found.prompts,
    }


def speedup_record(comparison: Comparison) -> Optional[Speedup]:
    """The ratio that is judged, with the repeats that it rests on."""
    interval = interval_record(comparison.speed)
    if interval is None:
        return None
    return {**interval, "rests_on": "first-repeats" if comparison.memory else "all"}


def speed_record(found: Optional[Estimate]) -> Optional[SpeedInterval]:
    """The same statistics of a plain speed."""
    if found is None:
        return None
    return {
        "tokens_per_s": found.ratio,
        "low": found.low,
        "high": found.high,
        "level": 0.95,
        "prompts": found.prompts,
    }


def run_facts(arm: Arm, label: str) -> RunFacts:
    """What both kinds of record say of the run that they are of."""
    about = arm.conditions
    answers = arm.run.answers.values()
    return {
        "lab": LAB,
        "schema": SCHEMA,
        "run_id": about["run_id"],
        "label": label,
        "engine": about["engine"],
        "engine_version": about["engine_version"],
        "model": about["model"],
        "max_tokens": about["request"].get("max_tokens"),
        "repeats": about["repeats"],
        "prompt_count": len(about["prompts"]),
        "prompts_sha256": prompts_digest(about),
        "order": about["order"],
        "concurrency": about["concurrency"],
        "interrupted": arm.run.interrupted,
        "simulated": about["simulated"],
        "context": about["server"].get("context"),
        "cached_tokens": sum_known(answer.cached_tokens for answer in answers) if answers else None,
        "recorded_at": about["recorded_at"],
    }


def arm_figures(arm: Arm) -> ArmFigures:
    """One server's figures, on one kind of work or on all."""
    answers, figures = arm.run.answers.values(), arm.figures
    return {
        "completed": len(answers),
        "output_tokens": sum_known(answer.completion_tokens for answer in answers),
        "output_tokens_per_s": figures.tokens_per_s,
        "decode_tokens_per_s": figures.decode_tokens_per_s,
        "latency_s": figures.latency_s,
        "ttft_s": figures.ttft_s,
        "acceptance": arm.acceptance,
    }


def endpoint_record(arm: Arm, label: str) -> EndpointRecord:
    """What the lab notebook keeps of one arm."""
    run, about, answers = arm.run, arm.conditions, arm.run.answers.values()
    errors = [reading.error for reading in run.readings if reading.error]
    samples = [as_dict(answer.statistics.get("timings")) for answer in answers]
    counted = bool(answers) and all(answer.completion_tokens is not None for answer in answers)
    return {
        **run_facts(arm, f"{label}/{run.arm}"),
        **arm_figures(arm),
        "kind": "endpoint",
        "base_url": about["base_url"],
        "requests": len(run.readings),
        "failed": len(errors),
        "first_error": errors[0] if errors else None,
        "wall_s": arm.figures.wall_s,
        "decode_source": arm.figures.decode_source,
        "speed": speed_record(over_prompts(log_rates(arm.units))),
        "tokens_counted_by_server": counted,
        "server_timings_sample": next((sample for sample in samples if sample), None),
        "spec_metrics_delta": spec_delta(arm.drafts.growth),
        "spec_metrics_gauges": spec_gauges(run),
        "workloads": [workload_figures(name, part) for name, part in arm.parts.items()],
        "audit": list(arm.findings),
        "server": about["server"],
        "seed": about["request"].get("seed"),
        "temperature": temperature_in(sampling_of(about)),
        "sampling": sampling_of(about),
        "stream": about["stream"],
        "warmup": about["warmup"],
        "host": about["host"],
        "tool_version": about["tool_version"],
    }


def temperature_in(sampling: Optional[Mapping[str, object]]) -> object:
    """The temperature in force; None where it is the server's own."""
    return 0.0 if sampling is None else sampling.get("temperature")


def workload_figures(name: str, arm: Arm) -> WorkloadFigures:
    """The figures of one kind of work."""
    prompts = len({index for index, _ in arm.run.answers})
    return {"workload": name, "prompts": prompts, **arm_figures(arm)}


def agreement_record(own: Agreement) -> SelfAgreement:
    """A server against itself."""
    return {
        "compared": own.compared,
        "identical": own.identical,
        "warm_compared": own.warm_compared,
        "warm_identical": own.warm_identical,
    }


def text_counts(comparison: Comparison) -> TextCounts:
    """How many pairs of texts agree."""
    texts = comparison.texts
    return {
        "compared": texts.compared,
        "identical": texts.identical,
        "divergent": None if texts.sampled else len(texts.divergences),
        "empty": texts.empty,
        "failed": texts.failed,
        "unstable": texts.unstable,
        "counts_differ": texts.counts_differ,
        "baseline_self": agreement_record(comparison.baseline.agreement),
        "speculative_self": agreement_record(comparison.candidate.agreement),
    }


def text_comparison(comparison: Comparison, triage: dict[str, Triage]) -> TextComparison:
    """The same with the first of the pairs that differ, those on a stable baseline first."""
    found = sorted(
        comparison.texts.divergences, key=lambda each: each["class"] == "unstable-baseline"
    )
    listed = [with_triage(each, triage) for each in found[:LISTED_DIVERGENCES]]
    told = [with_triage(each, triage)["triage"] for each in found]
    near = sum(gap is not None and gap["finding"] == "near-tie" for gap in told)
    counts: _TextComparison = {**text_counts(comparison), "divergences": listed}
    return {**counts, "near_ties": near, "sampled": comparison.texts.sampled}


def with_triage(found: Divergence, triage: dict[str, Triage]) -> Divergence:
    """A difference with what was found out about it; nothing is asked on an unstable baseline."""
    if found["class"] == "unstable-baseline":
        return found
    return {**found, "triage": triage.get(str(found["prompt_index"]))}


def compared_record(comparison: Comparison) -> Compared:
    """What a comparison says of each kind of work, and of all."""
    return {
        "baseline_tokens_per_s": comparison.baseline.figures.tokens_per_s,
        "speculative_tokens_per_s": comparison.candidate.figures.tokens_per_s,
        "speedup": speedup_record(comparison),
        "verdict": comparison.verdict,
        "acceptance": comparison.candidate.acceptance,
    }


def workload_comparison(name: str, comparison: Comparison) -> WorkloadComparison:
    """The comparison on one kind of work."""
    return {
        "workload": name,
        "prompts": comparison.speed.prompts if comparison.speed else 0,
        **compared_record(comparison),
        "text_comparison": text_counts(comparison),
    }


def break_even_record(comparison: Comparison, fit: Optional[CostFit]) -> BreakEven:
    """Why it pays or not, and the best draft length; `fit` is over all candidates."""
    why = comparison.why
    predicted = predictions(why, comparison.candidate.acceptance, fit)
    return {
        "applies": why.applies,
        "alpha": why.alpha,
        "alpha_needed": why.alpha_needed,
        "tokens_per_step": why.tokens_per_step,
        "step_cost": why.step_cost,
        "draft_cost": why.draft_cost,
        "chain": why.chain,
        "best_chain": best_prediction(predicted),
        "predicted": predicted,
        "fit": fit,
    }


@dataclass(frozen=True)
class Judging:
    """How a level is told: under which label, above which gain it pays, what --force let pass."""

    label: str
    min_gain: float
    forced: tuple[str, ...] = ()


def comparison_record(
    comparison: Comparison, level: Level, judging: Judging, triage: dict[str, Triage]
) -> ComparisonRecord:
    """What the lab notebook keeps of one candidate against the baseline."""
    baseline, candidate = comparison.baseline, comparison.candidate
    about, base = candidate.conditions, baseline.conditions
    decode = over_prompts(log_ratios(baseline.decode_units, candidate.decode_units))
    judged = list(comparison.judged.values())
    # where requests waited, no number of further prompts would settle it
    waited = any(entry["finding"] == "waiting" for entry in comparison.findings)
    undecided = comparison.verdict == "undecided" and about["concurrency"] == 1 and not waited
    told: _Comparison = {
        **run_facts(candidate, comparison_label(judging.label, candidate.name)),
        **compared_record(comparison),
        "kind": "comparison",
        "baseline_run_id": base["run_id"],
        "candidate": candidate.name,
        "speedup_these_prompts": interval_record(over_repeats(comparison.logs)),
        "decode_speedup": interval_record(decode),
        "min_gain": judging.min_gain,
        "more_prompts": more_prompts(judged, judging.min_gain) if undecided else None,
        "more_repeats": more_repeats(comparison, judging.min_gain),
        "prompt_log_ratios": prompt_log_ratios(comparison),
        "verdict_withheld": comparison.withheld,
        "workloads": [workload_comparison(*part) for part in comparison.parts.items()],
        "break_even": break_even_record(comparison, fit_of(comparison, level.comparisons)),
        "latency_p50_s": {"baseline": median_s(baseline), "speculative": median_s(candidate)},
        "text_comparison": text_comparison(comparison, triage),
        "audit": [*comparison.findings, *forced_findings(judging.forced)],
        "interrupted": baseline.run.interrupted or candidate.run.interrupted,
        "baseline_engine_version": base["engine_version"],
        "against_best": against_best(comparison, best_of(level.comparisons)),
    }
    record = cast(ComparisonRecord, told)
    record["sampling"] = sampling_of(about)
    if sampling_of(base) != sampling_of(about):
        record["baseline_sampling"] = sampling_of(base)
    if base["engine"] != about["engine"]:
        record["baseline_engine"] = base["engine"]
    if base["model"] != about["model"]:
        record["baseline_model"] = base["model"]
    return record


def more_repeats(comparison: Comparison, min_gain: float) -> Optional[int]:
    """Under load: how many more repeats might settle it; each adds a pair of blocks a kind."""
    about = comparison.candidate.conditions
    if comparison.verdict != "undecided" or about["concurrency"] == 1:
        return None
    blocks = more_prompts(comparison.logs, min_gain)
    return math.ceil(int(blocks) / len(comparison.parts)) if blocks and blocks.isdigit() else None


def prompt_log_ratios(comparison: Comparison) -> list[Optional[float]]:
    """ln of each prompt's ratio, the median of its judged repeats, in prompt order; 4 digits."""
    about = comparison.baseline.conditions
    if about["concurrency"] > 1:
        return []
    found = [comparison.judged.get(index) for index in range(len(about["prompts"]))]
    return [round(median(logs), 4) if logs else None for logs in found]


def comparison_label(label: str, candidate: str) -> str:
    """LABEL/comparison, or LABEL/NAME/comparison of a candidate with a name."""
    return (
        f"{label}/comparison" if candidate == "speculative" else f"{label}/{candidate}/comparison"
    )


def median_s(arm: Arm) -> Optional[float]:
    """The median time of a request."""
    return arm.figures.latency_s["p50"] if arm.figures.latency_s else None


def forced_findings(fields: Sequence[str]) -> list[Finding]:
    """What --force let pass."""
    if not fields:
        return []
    words = f"compared by --force although these differ: {', '.join(fields)}"
    return [finding("conditions-differ", words, fields=list(fields))]


def against_best(comparison: Comparison, best: Optional[Comparison]) -> Optional[AgainstBest]:
    """The paired ratio to the fastest candidate, so that real differences can be told."""
    if best is None or comparison is best or comparison.verdict is None:
        return None
    fastest, units = best.candidate.units, comparison.candidate.units
    if best.memory or comparison.memory:  # as each is judged
        units = {key: unit for key, unit in units.items() if key[1] == 0}
    logs = log_ratios(fastest, units)
    behind = interval_record(over_prompts(logs))
    return {"best": best.candidate.name, **behind} if behind else None


@dataclass(frozen=True)
class Result:
    """One concurrency level as records, ready to print and append."""

    endpoints: list[EndpointRecord]
    comparisons: list[ComparisonRecord]

    def records(self) -> list[Record]:
        """All records in the order of the notebook."""
        return [*self.endpoints, *self.comparisons]


def result_of(level: Level, judging: Judging, triage: dict[str, dict[str, Triage]]) -> Result:
    """The records of one level; `triage` holds findings by arm and prompt index."""
    return Result(
        [endpoint_record(arm, judging.label) for arm in level.arms],
        [
            comparison_record(each, level, judging, triage.get(each.candidate.name, {}))
            for each in level.comparisons
        ],
    )


def read_json_lines(path: str, warn: Say) -> Iterator[tuple[int, JSON]]:
    """(line number, object) of each JSON object in a file; prose is skipped, damage named."""
    lines = read_bytes(path).lstrip(b"\xef\xbb\xbf").split(b"\n")
    for number, line in enumerate(lines, 1):
        # zero bytes are what a power cut leaves
        if not line.lstrip().startswith(b"{") and b"\0" not in line:
            continue
        try:
            yield number, as_dict(loads(line.decode("utf-8", "replace")))
        except ValueError:
            warn(f"{path}:{number}: damaged line skipped ({len(line)} bytes)")


RECORD_SHAPES: dict[object, Any] = {"endpoint": EndpointRecord, "comparison": ComparisonRecord}


# Keys of 1.1, as they are for a record of 1.0.
SINCE_1_0: dict[object, JSON] = {
    "endpoint": {},
    "comparison": {
        "verdict_withheld": None,
        "more_repeats": None,
        "prompt_log_ratios": [],
        "order": "paired",  # the rule; 1.0 does not tell here
    },
}


def read_records(path: str, warn: Say) -> list[Record]:
    """The sound records of a notebook; those that are damaged are named with their field."""
    records: list[Record] = []
    for number, line in read_json_lines(path, warn):
        if line.get("lab") != LAB or line.get("schema") != SCHEMA:
            continue
        kind = line.get("kind")
        shape = RECORD_SHAPES.get(kind) if isinstance(kind, str) else None
        if shape:
            missing = SINCE_1_0[kind].keys() - line.keys()
            line.update({name: SINCE_1_0[kind][name] for name in missing})
        wrong = misfit(line, shape) if shape else "kind"
        if wrong:
            which = f"the record {line.get('label')} of {line.get('recorded_at')}"
            warn(f"{path}:{number}: {which} is damaged and left out: {wrong}")
        else:
            records.append(cast(Record, line))
    return records


def reading_to_json(reading: Reading) -> JSON:
    """A line of the run file: the reading and its answer in one flat object."""
    answer = asdict(reading.answer) if reading.answer else {}
    return {
        "kind": "reading",
        "arm": reading.arm,
        "prompt_index": reading.prompt_index,
        "prompt_id": reading.prompt_id,
        "workload": reading.workload,
        "repeat": reading.repeat,
        "place": reading.place,
        **answer,
        "timings": as_dict(answer.get("statistics")).get("timings"),
        "waited_s": reading.waited_s,
        "error": reading.error,
    }


def reading_from_json(line: JSON) -> Reading:
    """The reading of a line that fits."""
    answer = None
    if line["error"] is None:
        fields = Answer.__dataclass_fields__
        answer = Answer(**{name: line[name] for name in fields if name in line})
    return Reading(
        arm=line["arm"],
        prompt_index=line["prompt_index"],
        prompt_id=line["prompt_id"],
        workload=line["workload"],
        repeat=line["repeat"],
        place=line["place"],
        answer=answer,
        error=line["error"],
        waited_s=line["waited_s"],
    )


_COUNTS = (
    "prompt_index",
    "repeat",
    "place",
    "decode_tokens",
    "completion_tokens",
    "prompt_tokens",
    "cached_tokens",
    "tokens",
    "answers",
    "failed",
)
_SECONDS = ("latency_s", "ttft_s", "decode_s", "waited_s", "elapsed_s")


def figures_misfit(line: JSON) -> Optional[str]:
    """The first count or time of a line, of the right type, that cannot have been measured."""
    for name in _COUNTS:
        count = line.get(name)
        if count is not None and not 0 <= count < 1e18:
            return name
    for name in _SECONDS:
        seconds = line.get(name)
        if seconds and not 1e-9 < seconds < 1e9:
            return name
    return None


def reading_misfit(line: JSON) -> Optional[str]:
    """The field in which a reading's line is damaged, None where it is sound."""
    wrong = misfit(line, PlaceLine)
    if not wrong and line["error"] is None:
        wrong = misfit(line, AnswerLine) or figures_misfit(line)
    return wrong


def counted_misfit(line: JSON) -> Optional[str]:
    """The field in which the line of a block is damaged, None where it is sound."""
    wrong = misfit(line, CountedLine) or figures_misfit(line)
    for name in ("before", "after"):
        if not wrong and any(abs(sample[2]) >= 1e18 for sample in line[name]["samples"] or []):
            wrong = f"{name}.samples"
    return wrong


def counted_to_json(counted: Counted) -> JSON:
    """A line of the run file with a server's counters before and after one block."""
    return {
        "kind": "counted",
        **fields_of(counted),
        "before": snapshot_to_json(counted.before),
        "after": snapshot_to_json(counted.after),
    }


def snapshot_to_json(snapshot: Snapshot) -> JSON:
    """A snapshot in a run file; why its page told nothing is kept in words only."""
    return copied(fields_of(snapshot), "samples", "unavailable", "process")


def counted_from_json(line: JSON) -> Counted:
    """The counters of a line that fits."""
    fields = {name: line[name] for name in Counted.__dataclass_fields__}
    fields["before"] = snapshot_from_json(line["before"])
    fields["after"] = snapshot_from_json(line["after"])
    return Counted(**fields)


def snapshot_from_json(page: SnapshotLine) -> Snapshot:
    """A metrics page as it was."""
    samples = page["samples"]
    if samples is None:
        return Snapshot(None, page["unavailable"], page["process"])
    read = tuple(
        Sample(name, tuple((label, text) for label, text in labels), value, kind, series)
        for name, labels, value, kind, series in samples
    )
    return Snapshot(read, page["unavailable"], page["process"])


@dataclass
class SavedRun:
    """A run as it is read line by line; one that was cut off has no closing line."""

    conditions: Conditions
    readings: list[Reading] = field(default_factory=list)
    counted: list[Counted] = field(default_factory=list)
    interrupted: bool = True

    def add(self, kind: str, line: JSON) -> None:
        """Take in a line of this run."""
        if kind == "reading":
            self.readings.append(reading_from_json(line))
        elif kind == "counted":
            self.counted.append(counted_from_json(line))
        else:
            self.interrupted = line["interrupted"]

    def run(self) -> Run:
        """The whole of it."""
        return Run(
            arm=self.conditions["arm"],
            conditions=self.conditions,
            readings=tuple(self.readings),
            counted=tuple(self.counted),
            interrupted=self.interrupted,
        )


LINE_SHAPES: dict[object, Any] = {
    "run": Conditions,
    "reading": PlaceLine,
    "triage": TriageLine,
    "end": EndLine,
}


def line_misfit(kind: object, line: JSON) -> Optional[str]:
    """The field in which a line of a run file is damaged, None where it is sound."""
    if kind == "reading":
        return reading_misfit(line)
    if kind == "counted":
        return counted_misfit(line)
    shape = LINE_SHAPES.get(kind) if isinstance(kind, str) else None
    return misfit(line, shape) if shape else "kind"


def read_runs(path: str, warn: Say) -> tuple[list[Run], dict[str, dict[str, Triage]]]:
    """The runs of a file in the order measured, and the triage findings by arm and prompt index.

    UsageError if it is no run file; a damaged line behind the conditions of its run costs that
    line, which is named with its field.
    """
    runs: dict[tuple[str, int], SavedRun] = {}
    level: dict[str, SavedRun] = {}
    triage: dict[str, dict[str, Triage]] = {}
    for number, line in read_json_lines(path, warn):
        kind = line.pop("kind", None)
        if kind == "triage":
            line["triage"] = {**UNKNOWN_GAP, **as_dict(line.get("triage"))}
        wrong = line_misfit(kind, line)
        if not wrong and kind != "run" and line["arm"] not in level:
            wrong = "arm"
        if wrong and (kind == "run" or not runs):
            raise UsageError(
                f"{path}:{number}: no line of a run file, or damaged: {wrong}; give a file of "
                "--save-run, or measure it again"
            )
        if wrong:
            warn(f"{path}:{number}: damaged line skipped: {wrong}")
        elif kind == "run":
            saved = SavedRun(cast(Conditions, line))
            level[line["arm"]] = runs[line["arm"], line["concurrency"]] = saved
        elif kind == "triage":
            triage.setdefault(line["arm"], {})[str(line["prompt_index"])] = line["triage"]
        else:
            level[line["arm"]].add(str(kind), line)
    if not runs:
        raise UsageError(f"{path} holds no run; give a file of --save-run")
    return [saved.run() for saved in runs.values()], triage


def differing_conditions(baseline: Run, candidate: Run) -> list[str]:
    """Names of the conditions that must be equal for two runs to be compared, and are not."""
    a, b = baseline.conditions, candidate.conditions
    mine, theirs = a["request"], b["request"]
    fields = ("temperature", "seed", "max_tokens")
    differ = [name for name in fields if mine.get(name) != theirs.get(name)]
    if [p["sha256"] for p in a["prompts"]] != [p["sha256"] for p in b["prompts"]]:
        differ.append("prompts")
    if without(mine, fields) != without(theirs, fields):
        differ.append("request extras")
    if a["concurrency"] != b["concurrency"]:
        differ.append("concurrency")
    if a["stream"] != b["stream"]:
        differ.append("stream")
    return differ


def without(request: JSON, fields: Collection[str]) -> JSON:
    """The other fields of a request."""
    return {name: value for name, value in request.items() if name not in fields}


# ---- measurement --------------------------------------------------------------------------------


@dataclass(frozen=True)
class ArmSettings:
    """One server to measure, as the command line names it."""

    name: str  # "baseline", "speculative", or the candidate's own name
    url: str
    model: Optional[str] = None  # None: the one that the server lists
    body: JSON = field(default_factory=dict)  # request fields of this arm alone; a null removes one
    metrics_url: Optional[str] = None


@dataclass(frozen=True)
class Settings:
    """What is measured and how; `measure` makes it from its command line, `calibrate` by itself."""

    arms: tuple[ArmSettings, ...]  # the baseline first, where there is one
    prompts: tuple[Prompt, ...]
    max_tokens: int = 192
    repeats: Optional[int] = None  # None: see `repeats_at`
    warmup: int = 1
    order: str = "paired"
    levels: tuple[int, ...] = (1,)  # requests at a time
    seed: int = 0
    timeout_s: float = 300.0
    triage: int = 10
    stream: bool = True
    body: JSON = field(default_factory=dict)  # request fields of all arms
    engine: str = "unknown"
    engine_version: str = "unknown"
    key_variable: str = "SPEC_API_KEY"
    simulated: bool = False
    own_fields: tuple[str, ...] = ()  # names in the bodies of arms, also of arms not measured now

    def repeats_at(self, level: int) -> int:
        """Rounds over the prompts; under load each is one pair of blocks, which are the sample."""
        if self.repeats is not None:
            return self.repeats
        if level == 1:
            return 1
        return REPEATS_UNDER_LOAD


@dataclass(frozen=True)
class Keeping:
    """Where results go, and how they are judged."""

    label: str
    labbook: str
    min_gain: float
    fail_on: Sequence[str]
    quiet: bool
    divergence_report: Optional[str]
    command: str  # the command line, redacted, for the bug report


@dataclass(frozen=True)
class Warmed:
    """The servers after their warm-up, and what it told of them."""

    servers: Sequence[Server]
    hosts: Sequence[int]  # the same number for arms that are one server
    warm_ups: Sequence[WarmUp]
    findings: list[Finding]


def conditions_of(
    warmed: Warmed, number: int, settings: Settings, level: int, run_id: str
) -> Conditions:
    """Everything that is said about one arm beside its readings: the header of its run.

    `request` is asked of all arms, `arm_extras` of this one alone: only the first has to be equal.
    """
    server, host = warmed.servers[number], warmed.hosts[number]
    endpoint = server.endpoint
    own = {*endpoint.engine.asks, *settings.own_fields}
    engine, version = endpoint.engine.name, server.version
    if settings.engine != "unknown":
        engine = one_line(settings.engine)
    if settings.engine_version != "unknown":
        version = one_line(settings.engine_version)
    return {
        "schema": SCHEMA,
        "run_id": run_id,
        "arm": endpoint.arm,
        "base_url": endpoint.api,
        "metrics_url": redacted(endpoint.metrics_url or "", endpoint.key) or None,
        "model": one_line(endpoint.shown_model),
        "engine": engine,
        "engine_version": version,
        "server": server.about,
        "findings": server.findings + warmed.findings,
        "request": without(endpoint.request, own),
        "arm_extras": settings.arms[number].body,
        "sampling": sampling_in(endpoint.request),
        "stream": endpoint.stream,
        "prompts": [prompt_ref(prompt) for prompt in settings.prompts],
        "repeats": settings.repeats_at(level),
        "warmup": settings.warmup,
        "order": settings.order,
        "concurrency": level,
        "simulated": settings.simulated,
        "tool_version": __version__,
        "recorded_at": local_time(),
        "host": this_host(),
        "host_number": host,
        "shared_server": warmed.hosts.count(host) > 1,
    }


# What a request says of how to choose among likely tokens.
SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "typical_p")


def sampling_in(request: JSON) -> Optional[JSON]:
    """The sampling fields of a request; None where it is greedy, by a temperature of 0.

    Without a temperature the server's own applies, which is rarely 0.
    """
    if as_number(request.get("temperature")) == 0:
        return None
    fields = {name: request.get(name) for name in SAMPLING_FIELDS}
    return {name: value for name, value in fields.items() if value is not None}


def sampling_of(about: Conditions) -> Optional[JSON]:
    """The same of an arm; a header of 1.0 holds the fields of its request."""
    if "sampling" in about:
        return about["sampling"]
    return sampling_in({"temperature": 0.0, **about["request"], **about["arm_extras"]})


def prompt_ref(prompt: Prompt) -> PromptRef:
    """A prompt as the header of a run names it."""
    return {"id": prompt.id, "workload": prompt.workload, "sha256": prompt.digest()}


def local_time() -> str:
    """Now, as 2026-11-30T22:15:00+01:00."""
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    return f"{stamp[:-2]}:{stamp[-2:]}"


def this_host() -> Host:
    """The machine that measures, without its name."""
    import platform

    return {
        "system": platform.system(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
    }


def warmed_up(settings: Settings, servers: Sequence[Server], say: Say) -> Warmed:
    """Send the discarded requests.  Where a stream carries no token count, nothing is streamed."""
    readings = warm_up([server.endpoint for server in servers], settings.warmup, say)
    warm_ups = list(map(counted_warm_up, servers, readings))
    hosts = server_numbers(warm_ups)
    answers = [warm.answer for warm in warm_ups]
    streamed = [answer for answer in answers if answer and answer.streamed]
    if all(answer.completion_tokens is not None for answer in streamed):
        return Warmed(servers, hosts, warm_ups, [])
    words = (
        "a server's streamed answers carry no token count, so all servers are measured without "
        "streaming"
    )
    say(words)
    plain = []
    for server in servers:
        endpoint = replace(server.endpoint, stream=False)
        plain.append(replace(server, endpoint=endpoint))
    return Warmed(plain, hosts, warm_ups, [finding("usage-missing", words)])


def await_counters(warmed: Warmed) -> None:
    """Wait until all that was asked before is counted, or it would be counted into what follows.

    Before the first level that is the warm-up.
    """
    for server, host in zip(warmed.servers, warmed.hosts):
        if server.snapshot.samples is None:
            continue
        own = [warm for warm, number in zip(warmed.warm_ups, warmed.hosts) if number == host]
        tokens = sum_known(warm.received for warm in own)
        failed = any(warm.failed for warm in own)
        settled_snapshot(server.endpoint, server.snapshot, tokens, failed)


def known_beforehand(planned: Sequence[Run], warm_ups: Sequence[WarmUp]) -> Iterator[str]:
    """What speaks against the comparison before anything of it is measured."""
    baseline, *candidates = planned
    plain, *others = (warm_up.drafted for warm_up in warm_ups)
    for run, drafted in zip(candidates, others):
        if noise_check(baseline, run):
            yield f"{run.arm} and {baseline.arm} are one server: this measures the noise"
        for found in model_findings(baseline.conditions, run.conditions):
            if found.get("grade") != "name":
                yield found["detail"]
        if plain and drafted is False:
            yield (
                f"{baseline.arm} drafted in the warm-up and {run.arm} did not: are their addresses "
                "swapped?"
            )


@dataclass(frozen=True)
class Measured:
    """What came of one level, with what is needed to judge it."""

    result: Result
    runs: list[Run]
    interrupted: bool


def measure_levels(
    settings: Settings,
    servers: Sequence[Server],
    recorder: Recorder,
    judging: Judging,
) -> list[Measured]:
    """Measure each level of concurrency; once all are measured, ask why texts differ, and judge.

    An interruption ends the last of those returned; a failure keeps those before.
    """
    warmed = warmed_up(settings, servers, recorder.say)
    measured: list[list[Run]] = []
    interrupted = False
    run_id = os.urandom(6).hex()
    for level in settings.levels:
        name = run_id
        if len(settings.levels) > 1:
            name = f"{run_id}-{level}"
        try:
            planned = planned_runs(settings, warmed, level, name)
            if not measured:
                for words in known_beforehand(planned, warmed.warm_ups):
                    recorder.say(words)
            interrupted = carry_out(settings, warmed, planned, recorder)
        except (KeyboardInterrupt, MeasureError) as error:
            if not measured:
                raise
            # the levels before it are kept
            interrupted = isinstance(error, KeyboardInterrupt)
            if not interrupted:
                recorder.note_trouble(str(error))
            break
        measured.append([recorded(run, recorder, interrupted) for run in planned])
        if interrupted:
            break
    return judged_levels(settings, warmed, measured, recorder, judging, interrupted)


def judged_levels(
    settings: Settings,
    warmed: Warmed,
    measured: Sequence[list[Run]],
    recorder: Recorder,
    judging: Judging,
    interrupted: bool,
) -> list[Measured]:
    """What came of the levels; where nothing interrupted them, with the triage of their texts."""
    levels = []
    for runs in measured:
        begun = [run for run in runs if run.readings or not run.interrupted]
        levels.append(level_of(begun, judging.min_gain))
    triage: list[dict[str, dict[str, Triage]]] = [{} for _ in levels]
    try:
        for level, known in zip(levels, triage):
            if not interrupted:
                triage_texts(level, warmed.servers[0].endpoint, settings, recorder, known)
    except KeyboardInterrupt:  # all is measured: it must not be lost
        interrupted = True
    told = []
    for level, known, runs in zip(levels, triage, measured):
        told.append(Measured(result_of(level, judging, known), runs, False))
    told[-1] = replace(told[-1], interrupted=interrupted and not recorder.gave_up)
    return told


def planned_runs(settings: Settings, warmed: Warmed, level: int, run_id: str) -> list[Run]:
    """The runs of one level with their conditions, and nothing measured yet."""
    runs = []
    for number, server in enumerate(warmed.servers):
        conditions = conditions_of(warmed, number, settings, level, run_id)
        runs.append(Run(server.endpoint.arm, conditions, (), ()))
    return runs


def carry_out(
    settings: Settings, warmed: Warmed, planned: Sequence[Run], recorder: Recorder
) -> bool:
    """Plan one level and take its readings; True if that was interrupted."""
    level = planned[0].conditions["concurrency"]
    endpoints = [server.endpoint for server in warmed.servers]
    workloads = [prompt.workload for prompt in settings.prompts]
    plan = make_plan(workloads, settings.repeats_at(level), len(endpoints), settings.order, level)
    headers = [run.conditions for run in planned]
    recorder.begin(headers, sum(len(block.shots) for block in plan))
    is_warm = settings.warmup > 0
    await_counters(warmed)
    interrupted = execute(plan, endpoints, settings.prompts, warmed.hosts, recorder, level, is_warm)
    if recorder.readings:
        for run in planned:
            recorder.write({"kind": "end", "arm": run.arm, "interrupted": interrupted})
    return interrupted


def recorded(run: Run, recorder: Recorder, interrupted: bool) -> Run:
    """The run with what was recorded of its arm."""
    readings = [reading for reading in recorder.readings if reading.arm == run.arm]
    counted = [counted for counted in recorder.counted if counted.arm == run.arm]
    return replace(run, readings=tuple(readings), counted=tuple(counted), interrupted=interrupted)


def triage_texts(
    level: Level,
    baseline: Endpoint,
    settings: Settings,
    recorder: Recorder,
    findings: dict[str, dict[str, Triage]],
) -> None:
    """Ask why texts differ from a stable baseline, and fill in findings by arm and prompt index.

    What was found before Ctrl-C stays so.  Over all arms no more than `settings.triage` are asked.
    """
    for comparison in level.comparisons:
        arm = comparison.candidate.name
        known = findings.setdefault(arm, {})
        own, others = comparison.baseline.run.answers, comparison.candidate.run.answers
        for entry in comparison.texts.divergences:
            if sum(map(len, findings.values())) >= settings.triage:
                return
            index = entry["prompt_index"]
            pair = index, entry["repeat"]
            if entry["class"] == "unstable-baseline" or str(index) in known:
                continue
            gap = ask_for_gap(baseline, settings.prompts[index], entry, own[pair], others[pair])
            known[str(index)] = gap
            recorder.write({"kind": "triage", "arm": arm, "prompt_index": index, "triage": gap})


@contextlib.contextmanager
def run_file(path: Optional[str]) -> Iterator[Optional[BinaryIO]]:
    """The run file, new and unbuffered, as long as the block lasts; None where no path is given.

    UsageError if it cannot be made, or exists and may hold a run.
    """
    if path is None:
        yield None
        return
    try:
        file = open(path, "xb", buffering=0)  # noqa: SIM115
    except FileExistsError:
        raise UsageError(
            f"{path} exists and may hold an earlier run; name a new file for --save-run"
        ) from None
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror}; another path for --save-run"
        ) from None
    try:
        with file:
            yield file
    finally:
        with contextlib.suppress(OSError):
            if not os.path.getsize(path):  # nothing was measured: the name is free for the next try
                os.remove(path)


def worth_keeping(level: Measured) -> bool:
    """Whether it was finished, or has a pair that all arms did, or two answers of an arm."""
    if not level.interrupted or any(len(run.answers) > 1 for run in level.runs):
        return True
    return bool(in_common(level.runs)[0].pairs)


# ---- report -------------------------------------------------------------------------------------
# All from the records alone, in four steps: words for a value, tables of cells that are text
# already, the cells of a record, and blocks of lines (for the terminal, for a bug report, for a
# whole notebook).  Whatever the schema allows can be told: each unknown is said, and stops nothing.


VERDICT_WORDS = {
    "pays": "PAYS",
    "does-not-pay": "DOES NOT PAY",
    "undecided": "UNDECIDED",
    None: "DID NOT RUN",
}

RATIO_NOTE = "Ratio: geometric mean of the paired ratios; tokens/s: all tokens over all time."

# What `more_prompts` holds in the records where no number of prompts is worth measuring.
TOO_MANY_PROMPTS = "more than 100"

NO_DIFFERENCE = 0.05  # an interval inside of 1 +- this shows that there is none to speak of

ENDPOINT_COLUMNS = (
    "Server",
    "URL",
    "Engine",
    "Completed",
    "Tokens/s",
    "Decode tokens/s",
    "First token ms",
)

WORKLOAD_COLUMNS = (
    "Workload",
    "Baseline tokens/s",
    "With draft tokens/s",
    "Ratio",
    "95% interval",
    "Verdict",
    "Acceptance",
    "Completions identical",
)

DRAFT_COLUMNS = (
    "Drafts",
    "Accepted / drafted",
    "alpha",
    "Tokens per draft step",
    "Tokens per target step",
    "Draft steps",
)

RANKING_COLUMNS = (
    "Candidate",
    "Ratio",
    "95% interval",
    "Verdict",
    "Against the first",
    "Difference",
)

CROSSOVER_COLUMNS = (
    "Load",
    "Baseline tokens/s",
    "With draft tokens/s",
    "Ratio",
    "95% interval",
    "Acceptance",
    "Baseline latency s",
    "Draft latency s",
    "Identical",
)

HISTORY_COLUMNS = (
    "Recorded",
    "Ratio change",
    "Ratio",
    "95% interval",
    "Acceptance",
    "Baseline tokens/s",
    "With draft tokens/s",
    "Identical",
    "Engine version",
    "Also changed",
)

CSV_COLUMNS = (
    "label",
    "recorded_at",
    "concurrency",
    "ratio",
    "low",
    "high",
    "verdict",
    "acceptance",
    "baseline_tokens_per_s",
    "speculative_tokens_per_s",
    "identical",
    "compared",
    "engine",
    "engine_version",
    "model",
)

Lines = Iterator[str]  # of a report, not yet folded or coloured

Cells = dict[str, str]  # what a table shows of one record, by the name of the column

Rows = Iterable[Sequence[str]]  # of a table, cells in the order of its columns

Comparisons = Sequence[ComparisonRecord]

Speed = Union[Interval, SpeedInterval, None]  # a ratio or tokens/s, where it is known


def comparisons_in(records: Iterable[Record]) -> list[ComparisonRecord]:
    """The records of one candidate against the baseline each."""
    return [record for record in records if record["kind"] == "comparison"]


def by_label(comparisons: Iterable[ComparisonRecord]) -> dict[str, list[ComparisonRecord]]:
    """The comparisons under each label, both in the order in which they were recorded."""
    groups: dict[str, list[ComparisonRecord]] = {}
    for record in comparisons:
        groups.setdefault(record["label"], []).append(record)
    return groups


def endpoint_arm(record: EndpointRecord) -> str:
    """The arm that an endpoint record is about: the end of its label; no field of 1.0 tells it."""
    return record["label"].rsplit("/", 1)[-1]


def is_noise_check(record: ComparisonRecord) -> bool:
    """Whether a comparison is of a server with itself, a check of the noise."""
    return any(
        entry["finding"] == "same-server" and entry.get("noise") for entry in record["audit"]
    )


def figure(value: Optional[float], digits: int = 2) -> str:
    """A figure for people; a dash where it is unknown."""
    if value is None:
        return "-"
    return f"{value:.{digits}f}"


def verdict_words(verdict: Optional[str]) -> str:
    """A verdict as it is quoted; one that only a later version knows as it is recorded."""
    return VERDICT_WORDS.get(verdict, str(verdict))


def limits_of(speed: Speed) -> Optional[tuple[float, float]]:
    """Both ends of an interval; None where it has not both."""
    if speed is None or speed["low"] is None or speed["high"] is None:
        return None
    return speed["low"], speed["high"]


def interval_of(speed: Speed) -> str:
    """ "1.71 to 1.98", or a dash where there is no interval."""
    limits = limits_of(speed)
    if limits is None:
        return "-"
    digits = 2
    if any(abs(limit - 1) < 0.01 for limit in limits):
        digits = 3  # which side of 1 matters
    return " to ".join(figure(limit, digits) for limit in limits)


def ratio_in(part: Compared) -> Optional[float]:
    """The speed-up of a comparison or of one kind of work in it."""
    return part["speedup"]["ratio"] if part["speedup"] else None


def rate_in(part: Compared) -> Optional[float]:
    """The share of drafted tokens that was accepted."""
    return part["acceptance"]["rate"] if part["acceptance"] else None


def speed_words(speed: Optional[Interval]) -> str:
    """ "1.84x (1.71 to 1.98)"."""
    if speed is None:
        return "ratio unknown"
    ratio = f"{speed['ratio']:.2f}x"
    if limits_of(speed) is None:
        return ratio
    return f"{ratio} ({interval_of(speed)})"


def load_words(level: int) -> str:
    """ " at 4 requests at a time"; nothing for one at a time, which is the rule."""
    if level <= 1:
        return ""
    return f" at {level} requests at a time"


def shortened(text: str, width: int) -> str:
    """A text of at most so many characters, with dots where it was cut."""
    if len(text) <= width:
        return text
    return text[: width - 3] + "..."


def text_table(header: Sequence[str], rows: Rows, left: int = 1) -> str:
    """Columns as wide as their cells: the first `left` columns left, the rest right-aligned.

    Headings are folded.  At most 100 columns: the widest of the left columns gives way.
    """
    cells = [[one_printable_line(cell) for cell in row] for row in rows]
    heads = list(folded_headings(header, cells))
    widths = column_widths([*heads, *cells], left)
    rule = ["-" * width for width in widths]
    return "\n".join(fitted_row(row, widths, left) for row in [*heads, rule, *cells])


def folded_headings(header: Sequence[str], rows: Rows) -> Rows:
    """The lines of the heading: a name wider than its column is folded, and ends at the bottom."""
    heads = []
    for name, *column in zip(header, *rows):
        fits = any(len(cell) >= len(name) for cell in column)
        heads.append([name] if fits else name.split())
    depth = max(map(len, heads))
    return zip(*([""] * (depth - len(head)) + head for head in heads))


def column_widths(rows: Rows, left: int) -> list[int]:
    """The width of each column; where that is too much, left columns are narrowed to 8 at least."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    room = TABLE_COLUMNS - 2 * (len(widths) - 1)
    while sum(widths) > room and max(widths[:left]) > 8:
        widths[widths.index(max(widths[:left]))] -= 1
    return widths


def fitted_row(row: Sequence[str], widths: Sequence[int], left: int) -> str:
    """One line of a table."""
    cells = []
    for i, width in enumerate(widths):
        text = shortened(row[i], width)
        cells.append(text.ljust(width) if i < left else text.rjust(width))
    return "  ".join(cells).rstrip()


_MARKDOWN_ESCAPES = str.maketrans({"<": "&lt;", "`": "\\`"})  # a ">" without "<" ends nothing


def markdown_words(text: str) -> str:
    """Words in Markdown: on one line, no tag, link or code of their own in them."""
    return one_printable_line(text).translate(_MARKDOWN_ESCAPES).replace("](", "]\\(")


def markdown_cell(text: str) -> str:
    """The same in a table."""
    escaped = " ".join(text.splitlines()).replace("\\", "\\\\").replace("|", "\\|")
    return markdown_words(escaped)


def markdown_table(header: Sequence[str], rows: Rows) -> str:
    """The same table as Markdown."""
    rule = ["---"] + ["---:"] * (len(header) - 1)
    body = [list(map(markdown_cell, row)) for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in [header, rule, *body])


def picked(columns: Sequence[str], rows: Iterable[Cells]) -> Rows:
    """Rows with these columns, in this order."""
    return [[row[name] for name in columns] for row in rows]


def cells_of(part: Union[WorkloadComparison, ComparisonRecord]) -> Cells:
    """What the tables show of a comparison, or of one kind of work in it."""
    identical = identical_words(part["text_comparison"])
    return {
        **speed_cells(part),
        "Verdict": verdict_cell(part),
        "Acceptance": figure(rate_in(part)),
        "Identical": identical,
        "Completions identical": identical,
    }


def verdict_cell(part: Compared) -> str:
    """The verdict in a table; a dash where it is withheld for another reason than idle drafts."""
    drafts = part["acceptance"]
    if part["verdict"] is None and (drafts is None or drafts["drafted"] != 0):
        return "-"
    return verdict_words(part["verdict"]).lower()


def speed_cells(part: Compared) -> Cells:
    """How fast both servers were, and the ratio."""
    return {
        "Baseline tokens/s": figure(part["baseline_tokens_per_s"]),
        "With draft tokens/s": figure(part["speculative_tokens_per_s"]),
        "Ratio": figure(ratio_in(part)),
        "95% interval": interval_of(part["speedup"]),
    }


def workload_rows(record: ComparisonRecord) -> Rows:
    """A row for each kind of work and, where there are several, one for all."""
    reached = [part for part in record["workloads"] if part["text_comparison"]["compared"]]
    rows = []
    for part in reached or record["workloads"]:
        cells = {"Workload": part["workload"], **cells_of(part)}
        if part["prompts"] == 0:
            cells["Verdict"] = "-"  # nothing of it was measured
        rows.append(cells)
    if len(rows) != 1:
        rows.append({"Workload": "all", **cells_of(record)})
    return picked(WORKLOAD_COLUMNS, rows)


def server_cells(record: EndpointRecord) -> Cells:
    """One server: who it is, how much of it came back, how fast."""
    first_token_ms = 1000 * record["ttft_s"]["p50"] if record["ttft_s"] else None
    engine = f"{record['engine']} {record['engine_version']}"
    completed = f"{record['completed']} of {record['requests']}"
    server = {
        "Label": record["label"],
        "Recorded": record["recorded_at"],
        "Server": endpoint_arm(record),
        "URL": record["base_url"],
        "Engine version": record["engine_version"],
    }
    return {
        **server,
        "Engine": engine.replace(" unknown", ""),
        "Completed": completed,
        "Tokens/s": figure(record["output_tokens_per_s"]),
        "Decode tokens/s": figure(record["decode_tokens_per_s"]),
        "First token ms": figure(first_token_ms, 0),
    }


def explanation_lines(record: ComparisonRecord) -> Lines:
    """Why it pays or not, in the terms of the field and in plain words."""
    why = record["break_even"]
    length, cost = why["tokens_per_step"], why["step_cost"]
    start = f"Why, as to decoding: {figure(length)} tokens per target step"
    if is_noise_check(record):
        yield "Why: both arms are the same server, so there is nothing to explain."
    elif record["verdict_withheld"] == "did-not-run":
        yield "Why: no draft was made."
    elif why["applies"] == "no-acceptance" and length is None:
        yield "Why: not known; neither the answers nor the metrics tell what became of the drafts."
    elif cost is None:
        yield (
            f"{start}; the cost of a step is unknown (both servers' decode times are needed, from "
            "the same kind of clock)."
        )
    else:
        gain = gain_words(record["decode_speedup"])
        yield f"{start}, and a step costs {cost:.2f} target steps: {gain}."
        for line in reason_lines(why, cost, record["acceptance"]):
            yield f"     {line}"


def gain_words(decoding: Optional[Interval]) -> str:
    """Whether decoding gains: only an interval on one side of 1 says so."""
    if decoding is None or not excludes_1(decoding):
        return "whether decoding gains is not sure"
    if decoding["ratio"] > 1:
        return "it brings more than it costs, so decoding gains"
    return "it brings less, so decoding does not gain"


def reason_lines(why: BreakEven, cost: float, acceptance: Optional[AcceptanceRecord]) -> Lines:
    """What acceptance pays for a step of this cost, what a draft costs, how long it should be."""
    yield bar_words(why, cost, acceptance)
    rejected = acceptance and acceptance["drafted"] and acceptance["accepted"] == 0
    if rejected and why["applies"] != "any":
        yield (
            "Nothing that was drafted was accepted: drafting only costs time. Check that draft and "
            "target share a tokenizer."
        )
    fit, draft_cost, predicted = why["fit"], why["draft_cost"], why["predicted"]
    if fit:
        spread = advice = ""
        error = fit.get("draft_cost_error")
        if error is not None:
            spread = f" (give or take {error:.3f})"
        if predicted:
            advice = "; the advice below rests on this fit"
        yield (
            f"Fitted over {fit['runs']} candidates: verifying costs {fit['verification_cost']:.2f} "
            f"target steps, each drafted token {fit['draft_cost']:.3f}{spread}{advice}."
        )
    elif draft_cost is not None:
        yield (
            f"A drafted token costs {draft_cost:.3f} target steps; one chain length cannot tell "
            "how much of that is the growth of the verification."
        )
    elif cost < 1:
        yield "What a drafted token costs is below what can be measured."
    if predicted:
        yield from chain_lines(predicted, why["best_chain"])


def bar_words(why: BreakEven, cost: float, acceptance: Optional[AcceptanceRecord]) -> str:
    """The acceptance that would be needed, or why there is no such figure."""
    applies, chain, needed = why["applies"], why["chain"], why["alpha_needed"]
    mean = ""
    if applies == "any":
        return (
            "A step costs no more than a plain one: any acceptance pays (check the timing if that "
            "surprises you)."
        )
    if chain is not None:
        if applies == "alpha" and needed is not None:
            alpha = figure(why["alpha"])
            return f"alpha {alpha}; {needed:.2f} is needed at chain length {chain} and this cost."
        if applies == "cannot-pay":
            return (
                f"A step can bring at most {chain + 1} tokens at chain length {chain} and costs "
                f"{cost:.2f}: it cannot pay at any acceptance."
            )
        # without S, steps without a draft count too
        each = "a draft" if acceptance and acceptance["steps"] else "a target step"
        mean = f" (mean {chain:.2f} {each})"
    return (
        f"Drafts vary in length{mean} or many steps have none, so the formula for a fixed chain is "
        "not applicable."
    )


def chain_lines(predicted: Sequence[ChainPrediction], best: Optional[ChainPrediction]) -> Lines:
    """The predicted speed-up of each chain length, and the best."""
    chains = ", ".join(f"k={each['chain']} {predicted_words(each, '*')}" for each in predicted[:12])
    yield f"Predicted by chain length: {chains} (* extrapolated)."
    if best:
        length = "none: plain decoding is faster than every chain predicted"
        if best["chain"]:
            length = f"{best['chain']} ({predicted_words(best, ', extrapolated')})"
        yield f"Best chain length: {length}."


def predicted_words(each: ChainPrediction, mark: str) -> str:
    """ "1.84x", marked where no draft was so long."""
    speed = f"{each['predicted_speedup']:.2f}x"
    if each["extrapolated"]:
        speed += mark
    return speed


def drafting_parts(record: Record) -> list[tuple[str, AcceptanceRecord]]:
    """(kind of work, what became of its drafts) where there were any; of several, all come last."""
    parts = [(part["workload"], part["acceptance"]) for part in record["workloads"]]
    if len(parts) > 1:
        parts.append(("all", record["acceptance"]))
    return [(name, drafts) for name, drafts in parts if drafts and drafts["drafted"] != 0]


def draft_lines(record: Record) -> Lines:
    """What became of the drafts of each kind of work: rates, lengths, a bar for each position."""
    rows, known = [], []
    for name, drafts in drafting_parts(record):
        shares = [figure(drafts["rate"]), figure(drafts["alpha"])]
        lengths = [figure(drafts["mean_length"]), figure(drafts["tokens_per_target_step"])]
        rows.append([name, *shares, *lengths, figure(drafts["steps"], 0)])
        if drafts["per_position"]:
            known.append((name, drafts["per_position"]))
    if not rows:
        return
    yield text_table(DRAFT_COLUMNS, rows)
    yield (
        "alpha: share of tested drafts that were accepted; accepted/drafted is another figure, "
        "never higher."
    )
    for first in range(0, len(known), 4):
        yield ""
        yield from position_lines(known[first : first + 4])
    yield ""


def position_lines(known: Sequence[tuple[str, Sequence[float]]]) -> Lines:
    """The share of steps in which each draft position was accepted, also given the one before."""
    yield (
        "Accepted by draft position: share of the draft steps, share given the position before, bar"
    )
    header = ["Position", *(shortened(name, 20) for name, _ in known)]
    longest = max(len(rates) for _, rates in known)
    worth = max(positions_worth(rates) for _, rates in known)
    rows = []
    for i in range(min(worth + 1, longest, 20)):
        rows.append([str(i + 1), *(position_cell(rates, i) for _, rates in known)])
    yield text_table(header, rows, 5)
    for name, rates in known:
        cut = positions_worth(rates)
        if cut < len(rates):
            yield f"{name}: position {cut + 1} onward adds {sum(rates[cut:]):.2f} tokens per step."


def position_cell(rates: Sequence[float], i: int) -> str:
    """One draft position, "0.60 0.75 ######    "; nothing beyond the last."""
    if i >= len(rates):
        return ""
    given = ratio_of(rates[i], rates[i - 1]) if i else rates[i]
    bar = "#" * round(10 * min(rates[i], 1.0))
    return f"{rates[i]:.2f} {figure(given):>4} {bar:<10}"


def positions_worth(rates: Sequence[float]) -> int:
    """How many positions add, with all behind them, WORTH_TOKENS or more; at least the first."""
    worth = sum(sum(rates[i:]) >= WORTH_TOKENS for i in range(len(rates)))
    return max(worth, 1)


def text_lines(record: ComparisonRecord) -> Lines:
    """What became of the text: each server against itself, against each other, the differences."""
    texts = record["text_comparison"]
    for line in itertools.chain(agreement_lines(record), suspicion_lines(record)):
        yield f"Text: {line}"
    shown = grouped_divergences(texts["divergences"])[:5]
    for group in shown:
        yield from divergence_lines(group)
    unshown = changed_pairs(texts) - sum(map(len, shown))
    if unshown > 0:
        yield (
            f"  ... and {plural(unshown, 'more pair')}; the record and --divergence-report list up "
            f"to {LISTED_DIVERGENCES}."
        )


def changed_pairs(texts: TextCounts) -> int:
    """How many pairs of texts differ; none of them where texts were sampled."""
    return texts["divergent"] or 0


def sampling_words(record: ComparisonRecord) -> str:
    """ " at temperature 0.8 (baseline 0)"; nothing where both were greedy."""
    own = record.get("sampling")
    other = record.get("baseline_sampling", own)
    if own is None and other is None:
        return ""
    words = f" at {temperature_words(own)}"
    if own != other:
        words += f" (baseline {temperature_words(other).removeprefix('temperature ')})"
    return words


def temperature_words(sampling: Optional[Mapping[str, object]]) -> str:
    """ "temperature 0.8"."""
    if sampling is None:
        return "temperature 0"
    if "temperature" not in sampling:
        return "the server's own temperature"
    return f"temperature {sampling['temperature']}"


def identical_words(counts: Union[TextCounts, SelfAgreement]) -> str:
    """ "3 of 4"."""
    return f"{counts['identical']} of {counts['compared']}"


def agreement_lines(record: ComparisonRecord) -> Lines:
    """Each server against itself, the servers against each other, counts that cannot be right."""
    texts, name = record["text_comparison"], record["candidate"]
    for arm, own in (("baseline", texts["baseline_self"]), (name, texts["speculative_self"])):
        warm = ""
        if own["warm_compared"]:
            warm = f" (warm repeats: {own['warm_identical']} of {own['warm_compared']})"
        if own["compared"]:
            yield f"{arm} against itself: {identical_words(own)} repeats identical{warm}."
    pairs = identical_words(texts)
    if texts.get("sampled"):
        yield f"sampled; the same seed gave the same sampled text in {pairs}."
        return
    pairs += " identical"
    if texts["empty"]:
        pairs += f", {texts['empty']} both empty (no evidence)"
    if texts["failed"]:
        pairs += f", {texts['failed']} not comparable"
    yield f"baseline against {name}: {pairs}."
    if texts["counts_differ"]:
        yield (
            f"{texts['counts_differ']} identical texts came with different token counts: a server "
            "miscounts, and its tokens/s with it."
        )


def suspicion_lines(record: ComparisonRecord) -> Lines:
    """What may have changed the text, and what speaks against speculation as the cause."""
    texts = record["text_comparison"]
    if not changed_pairs(texts):
        return
    if not texts["baseline_self"]["compared"]:
        yield (
            "the baseline was not compared with itself; with --repeats 2 it would show whether it "
            "is stable."
        )
    elif texts["unstable"]:
        yield (
            f"on {texts['unstable']} of the differing pairs the baseline disagrees with itself, so "
            "speculation is not the suspect there."
        )
    other = ""
    if any(entry["finding"] in DISTURBANCES for entry in record["audit"]):
        other = ", the other client or restart noted below"
    yield (
        f"numerics (another batch shape), a cache in another state{other} or a fault can do "
        "this; the texts alone cannot tell which."
    )


def grouped_divergences(divergences: Sequence[Divergence]) -> list[list[Divergence]]:
    """The differences, together those that are the same in several repeats of a prompt."""
    groups: dict[Hashable, list[Divergence]] = {}
    for each in divergences:
        key = (
            each["prompt_index"],
            each["where"],
            each["class"],
            each["baseline_tail"],
            each["speculative_tail"],
        )
        groups.setdefault(key, []).append(each)
    return list(groups.values())


def divergence_lines(group: Sequence[Divergence]) -> Lines:
    """One difference, in one or several repeats: where, what kind, how near a tie, both tails."""
    one = group[0]
    repeats = ", ".join(str(each["repeat"]) for each in group)
    name = f"{one_printable_line(one['prompt_id'])} repeat {repeats} ({one['where']})"
    place = f"byte {one['first_difference_at_byte']}, character {one['first_difference_at_char']}"
    place += f", line {one['line']} column {one['column']}"
    yield f"  {name}: {one['class']} at {place}{triage_words(one['triage'])}"
    end = f"({one['baseline_finish_reason']}, {one['baseline_tokens']} tokens)"
    yield f"    baseline:    {json.dumps(one['baseline_tail'])} {end}"
    end = f"({one['speculative_finish_reason']}, {one['speculative_tokens']} tokens)"
    yield f"    speculative: {json.dumps(one['speculative_tail'])} {end}"
    if one["count_suspicious"]:
        yield (
            "    One text ends early under an equal token count: tokens were counted that did not "
            "arrive, so a speed is too high."
        )


def triage_words(triage: Optional[Triage]) -> str:
    """What the baseline's log probabilities say of a difference; nothing where not asked."""
    if triage is None:
        return ""
    gap = triage.get("reason")
    if triage["gap_nats"] is not None:
        bound = "at least " if triage.get("at_least") else ""
        gap = f"{bound}{triage['gap_nats']:.3f} nats"
    return f"; {triage['finding']} ({gap})"


def audit_lines(records: Iterable[Record]) -> Iterable[str]:
    """The audit in plain words, each finding once, with the arm that it is about."""
    lines = []
    for record in records:
        arm = ""
        if record["kind"] == "endpoint":
            arm = f"{endpoint_arm(record)}: "
        lines += [f"Note: {arm}{each['detail']} [{each['finding']}]" for each in record["audit"]]
    return dict.fromkeys(map(one_printable_line, lines))


def caveats(record: ComparisonRecord) -> str:
    """What the line to quote must not be read without: what may have made the ratio what it is."""
    texts, doubts, told = record["text_comparison"], [], ""
    near = texts.get("near_ties", 0)
    changed = changed_pairs(texts) - texts["unstable"] - near
    if changed > 0:
        doubts.append(f"the text changed in {changed} of {texts['compared']}")
    for name, meaning in FINDINGS.items():
        entries = [entry for entry in record["audit"] if entry["finding"] == name]
        doubts += [entry.get("caveat") or meaning.caveat or "" for entry in entries]
    known = dict.fromkeys(filter(None, doubts))
    if known:
        told = f"; BUT {', '.join(known)}"
    if near:
        told += f"; {plural(near, 'text')} of {texts['compared']} part at a near tie"
    return told


def withheld_words(record: ComparisonRecord) -> Optional[str]:
    """What stands in the place of a verdict, None where there is one."""
    speed, reason = speed_words(record["speedup"]), record["verdict_withheld"]
    if reason == "same-server" or is_noise_check(record):
        return f"NOISE CHECK: {speed}, one server against itself"
    if reason == "model-differs":
        return f"NOT SPECULATION ALONE: {speed}; the models differ{differing_models(record)}"
    if reason == "counts-wrong":
        return f"NO VERDICT: {speed} rests on token counts that are wrong"
    if record["verdict"] is None:
        return "DID NOT RUN: no draft was seen, so nothing can be said about speculation"
    return None


def differing_models(record: ComparisonRecord) -> str:
    """ " (F32, Q4_1)"."""
    for entry in record["audit"]:
        is_told = entry["finding"] in ("quantization-differs", "model-differs")
        if is_told and entry.get("withholds", True):
            return f" ({entry.get('baseline')}, {entry.get('speculative')})"
    return ""


def sentence(record: ComparisonRecord) -> str:
    """One sentence to quote.

    Kinds of work whose verdicts differ are named one by one: a mean would hide a loser.
    """
    start = withheld_words(record)
    if start is None:
        parts = [part for part in record["workloads"] if part["prompts"]] or record["workloads"]
        if len({part["verdict"] for part in parts}) > 1:
            named = "; ".join(map(part_verdict, parts))
            start = f"{named}; over all {speed_words(record['speedup'])}{sampling_words(record)}"
        else:
            start = whole_verdict(record, parts)
    return one_printable_line(f"{start}{caveats(record)}.")


def part_verdict(part: WorkloadComparison) -> str:
    """The verdict on one kind of work among several."""
    verdict = f"{verdict_words(part['verdict'])} on {part['workload']}"
    if not part["verdict"]:
        return verdict
    return f"{verdict}: {speed_words(part['speedup'])}"


def whole_verdict(record: ComparisonRecord, parts: Sequence[WorkloadComparison]) -> str:
    """The verdict on all that was measured, with the prompts that it rests on."""
    where = "on prompts like these"
    if len(parts) == 1:
        where = f"on {parts[0]['workload']}"
    prompts = f"{plural(record['prompt_count'], 'prompt')} x {record['repeats']}"
    measured = sum(part["prompts"] for part in record["workloads"])
    if record["concurrency"] == 1 and measured < record["prompt_count"]:
        prompts = f"{measured} of {plural(record['prompt_count'], 'prompt')}"
    conditions = load_words(record["concurrency"]) + sampling_words(record)
    verdict = f"{verdict_words(record['verdict'])} {where}{conditions}"
    return f"{verdict}: {speed_words(record['speedup'])}, {prompts}"


def comparison_lines(record: ComparisonRecord) -> Lines:
    """The whole report on one candidate."""
    yield from ("", text_table(WORKLOAD_COLUMNS, workload_rows(record)), RATIO_NOTE, "")
    if record["concurrency"] == 1 or record["break_even"]["tokens_per_step"] is not None:
        yield from draft_lines(record)
        yield from explanation_lines(record)
    yield from text_lines(record)
    here, decoding = record["speedup_these_prompts"], record["decode_speedup"]
    if here and limits_of(here):
        yield f"On exactly these {here['prompts']} prompts: {speed_words(here)}."
    if decoding:
        yield f"Decoding alone: {speed_words(decoding)}."
    if record["more_prompts"]:
        yield settling_words(record["more_prompts"], record["speedup"])
    if record["more_repeats"]:
        yield f"About {record['more_repeats']} more --repeats might settle it."


def settling_words(more: str, speed: Optional[Interval]) -> str:
    """How many further prompts, as recorded, might settle an undecided verdict."""
    limits = limits_of(speed)
    if more == TOO_MANY_PROMPTS:
        words = "It would take more than 100 further prompts to settle it"
        if limits and limits[0] > 1 - NO_DIFFERENCE and limits[1] < 1 + NO_DIFFERENCE:
            words += ": treat it as no practical difference"
        return f"{words}."
    prompts = "prompt" if more == "1" else "prompts"
    return f"About {more} more {prompts} might settle it; more repeats would not."


def ranking_rows(ranked: Comparisons) -> Rows:
    """Several candidates, and which differences to the first are real."""
    return picked(RANKING_COLUMNS, map(ranking_cells, ranked))


def rank(record: ComparisonRecord) -> tuple[bool, float]:
    """What to sort candidates by: those that can be judged first, then by speed."""
    return withheld_words(record) is not None, -(ratio_in(record) or 0.0)


def winner_line(ranked: Comparisons) -> str:
    """Which of several candidates is the fastest, and whether its lead is real."""
    best, second = ranked[0], ranked[1]
    behind, other = second["against_best"], second["candidate"]
    if withheld_words(best):
        return "BEST: none, no candidate can be judged."
    if behind is None:
        return f"BEST: {best['candidate']}; no other candidate can be judged."
    lead = "too few prompts to tell it from the others"
    limits = limits_of(behind)
    if limits:
        lead = f"but no lead over {other} is shown"
        if limits[1] < 1:
            lead = f"faster than {other}, and the difference is real"
    speed = speed_words(best["speedup"])
    return one_printable_line(f"BEST: {best['candidate']} at {speed}, {lead}.")


def ranking_cells(record: ComparisonRecord) -> Cells:
    """One candidate, beside the fastest one."""
    behind = record["against_best"]
    place = "first"
    if behind:
        place = speed_words(behind)
    elif record["verdict"] is None:
        place = ""
    return {
        **cells_of(record),
        "Candidate": record["candidate"],
        "Against the first": place,
        "Difference": difference_words(behind),
    }


def difference_words(behind: Optional[AgainstBest]) -> str:
    """Whether a candidate truly differs from the fastest one."""
    if behind is None:
        return ""
    if excludes_1(behind):
        return "real"
    if limits_of(behind):
        return "no difference shown"
    return "too few prompts to tell"


def crossover_lines(comparisons: Comparisons) -> Lines:
    """How the gain changes under load, and between which levels it is lost."""
    levels = sorted(comparisons, key=lambda record: record["concurrency"])
    yield text_table(CROSSOVER_COLUMNS, picked(CROSSOVER_COLUMNS, map(crossover_cells, levels)))
    yield f"Crossover: {crossover_words(levels)}. Decide by the level your server usually runs at."
    loaded = [record for record in levels if record["concurrency"] > 1]
    if any(changed_pairs(record["text_comparison"]) for record in loaded):
        yield (
            "Texts under load may differ because the batch is composed differently; that is not "
            "speculation's doing alone."
        )


def crossover_cells(record: ComparisonRecord) -> Cells:
    """One concurrency level."""
    latency = record["latency_p50_s"]
    return {
        **cells_of(record),
        "Load": str(record["concurrency"]),
        "Baseline latency s": figure(latency["baseline"]),
        "Draft latency s": figure(latency["speculative"]),
    }


def crossover_words(levels: Comparisons) -> str:
    """Between which of the rising levels the ratio falls below 1, and whether that is sure."""
    known = [(record["concurrency"], record["speedup"]) for record in levels if record["speedup"]]
    lost = [speed["ratio"] < 1 for _, speed in known]
    deciding = known
    if not known:
        crossover = "not known"
    elif not any(lost):
        crossover = "within these levels the ratio does not fall below 1"
    elif lost[0]:
        crossover = f"the ratio is below 1 already at {known[0][0]} at a time"
        deciding = known[:1]
    else:
        first = lost.index(True)
        deciding = known[first - 1 : first + 1]
        above, below = (level for level, _ in deciding)
        crossover = f"the ratio falls below 1 between {above} and {below} requests at a time"
    if len(known) < len(levels) or not all(excludes_1(speed) for _, speed in deciding):
        crossover += " (not sure: an interval there holds 1, or is missing)"
    return crossover


def excludes_1(speed: Optional[Interval]) -> bool:
    """Whether a difference is shown: the whole interval lies on one side of 1."""
    limits = limits_of(speed)
    return limits is not None and not limits[0] <= 1 <= limits[1]


def result_lines(result: Result) -> Lines:
    """The terminal report of one level, the sentence to quote last."""
    several = len(result.comparisons) > 1
    servers = picked(ENDPOINT_COLUMNS, map(server_cells, result.endpoints))
    yield text_table(ENDPOINT_COLUMNS, servers, 3)
    for record in result.comparisons:
        if several:
            yield ""
            yield f"== {record['candidate']} =="
        yield from comparison_lines(record)
    if several:
        ranked = sorted(result.comparisons, key=rank)
        yield from ("", text_table(RANKING_COLUMNS, ranking_rows(ranked)))
    if not result.comparisons:
        for endpoint in result.endpoints:
            yield from single_lines(endpoint)
    for endpoint in result.endpoints:
        if endpoint["failed"]:
            yield f"{endpoint_arm(endpoint)}: {failure_words(endpoint)}"
    yield from memory_lines(result.endpoints)
    yield from audit_lines(result.records())
    yield ""
    yield from last_lines(result)


def last_lines(result: Result) -> Lines:
    """The lines to quote: of several candidates the best one, then each, best first."""
    ranked = sorted(result.comparisons, key=rank)
    if len(ranked) > 1:
        yield winner_line(ranked)
        for record in ranked:
            yield f"{record['candidate']}: {sentence(record)}"
    elif ranked:
        yield sentence(ranked[0])
    else:
        yield from map(single_sentence, result.endpoints)


def single_sentence(record: EndpointRecord) -> str:
    """The line to quote where one server was measured alone."""
    other, failed = "--baseline-url", ""
    if endpoint_arm(record) == "baseline":
        other = "--speculative-url"
    if record["failed"]:
        failed = f"; BUT {failure_words(record)}"
    return one_printable_line(
        f"ONE SERVER MEASURED: {figure(record['output_tokens_per_s'])} tokens/s, so the "
        f"speed-up is unknown (next: {other}, or compare with another --save-run){failed}."
    )


def failure_words(record: EndpointRecord) -> str:
    """How many requests of an arm failed, and why the first did."""
    failed = f"{record['failed']} of {record['requests']} requests failed"
    return f"{failed}; the first: {record['first_error']}"


def single_lines(record: EndpointRecord) -> Lines:
    """The report on one server measured alone."""
    rows = []
    for part in record["workloads"]:
        rates = figure(part["output_tokens_per_s"]), figure(part["decode_tokens_per_s"])
        rows.append([part["workload"], str(part["completed"]), *rates])
    yield ""
    yield text_table(("Workload", "Completed", "Tokens/s", "Decode tokens/s"), rows)
    judged = ": speculation did not run."
    if endpoint_arm(record) == "baseline":
        judged = ", as it should be on a baseline."
    if record["acceptance"] and record["acceptance"]["drafted"] == 0:
        yield f"No draft was seen{judged}"
    if drafting_parts(record):
        yield ""
    yield from draft_lines(record)


def levels_lines(results: Sequence[Result]) -> list[str]:
    """The report of every concurrency level; of several, also what load does to the gain."""
    if len(results) == 1:
        return list(result_lines(results[0]))
    lines, comparisons = [], []
    for result in results:
        level = result.endpoints[0]["concurrency"]
        lines += ["", f"=== {plural(level, 'request')} at a time ===", *result_lines(result)]
        comparisons += result.comparisons
    for levels in by_label(comparisons).values():
        if len(levels) > 1:
            lines += ["", *crossover_lines(levels)]
    return lines[1:]


def memory_lines(endpoints: Sequence[EndpointRecord]) -> Lines:
    """Cache and memory of the servers, where they tell: a draft is bought with cache."""
    servers = []
    for record in endpoints:
        about, sizes = record["server"], []
        if about.get("cache_tokens"):
            sizes.append(f"cache for {about['cache_tokens']} tokens")
        if about.get("resident_bytes"):
            sizes.append(f"{about['resident_bytes'] / 2**20:.0f} MiB resident")
        if sizes:
            servers.append(f"{endpoint_arm(record)} {', '.join(sizes)}")
    if servers:
        yield f"Memory: {'; '.join(servers)}."


def markdown_divergences(result: Result, prompts: Optional[Sequence[Prompt]], command: str) -> str:
    """A bug report to paste: what was run, where texts part, what the baseline thought there."""
    return "\n".join(divergence_report(result, prompts, command)) + "\n"


def divergence_report(result: Result, prompts: Optional[Sequence[Prompt]], command: str) -> Lines:
    """The lines of the bug report; the messages only where `prompts` holds them."""
    level = result.endpoints[0]["concurrency"]
    changed = any(changed_pairs(record["text_comparison"]) for record in result.comparisons)
    title = "Greedy text that changes" if changed else "No text changed"
    load = f", {level} requests at a time" if level > 1 else ""
    yield f"# {title} with speculative decoding{load}"
    yield ""
    yield from map(request_line, result.endpoints)
    yield f"- measured with: `{one_printable_line(command)}`"
    yield "- servers started with (fill in): baseline `...`, speculative `...`"
    for record in result.comparisons:
        yield from candidate_section(record)
        for group in grouped_divergences(record["text_comparison"]["divergences"]):
            yield from divergence_block(group)
            if prompts:
                messages = prompts[group[0]["prompt_index"]].messages
                yield from ("", "```json", json.dumps(list(messages)), "```")


def request_line(record: EndpointRecord) -> str:
    """What one server was asked for, in the bug report."""
    server = f"{endpoint_arm(record)}: {record['engine']} {record['engine_version']}"
    model = markdown_words(record["model"].replace("`", "'"))
    return (
        f"- {markdown_words(server)}, model `{model}`, POST /v1/chat/completions with temperature "
        f"{record['temperature']}, seed {record['seed']}, max_tokens {record['max_tokens']}"
    )


def candidate_section(record: ComparisonRecord) -> Lines:
    """The head of one candidate's differences in the bug report."""
    texts = record["text_comparison"]
    listed = len(texts["divergences"])
    own, rate = identical_words(texts["baseline_self"]), figure(rate_in(record))
    yield ""
    yield f"## {record['candidate']}: {texts['divergent']} of {texts['compared']} pairs differ"
    yield ""
    yield f"Baseline against itself: {own} repeats identical. Acceptance {rate}."
    if listed < changed_pairs(texts):
        yield (
            f"Listed are {listed} of these pairs, those on a baseline that agrees with itself "
            "first."
        )
    differences = [e["detail"] for e in record["audit"] if e["finding"] in SERVER_DIFFERENCES]
    if differences:
        yield ""
        yield f"The servers differ, too: {one_printable_line('; '.join(differences))}."


# Findings that name what one server is and the other is not.
SERVER_DIFFERENCES = (
    "model-differs",
    "quantization-differs",
    "context-differs",
    "build-differs",
    "stream-differs",
)


def divergence_block(group: Sequence[Divergence]) -> Lines:
    """One difference in the bug report, with the tokens that the baseline had to choose between."""
    triage = group[0]["triage"]
    yield from ("", f"Prompt index {group[0]['prompt_index']}:", "", "```text")
    yield from map(printable, divergence_lines(group))
    if triage is not None:
        own, other = json.dumps(triage["baseline_token"]), "not known"
        if triage["speculative_token"] is not None:
            other = json.dumps(triage["speculative_token"])
        yield f"    baseline token {own}, other token {other}"
    yield "```"


# What may explain a change from run to run: field of a record, and its name in a history.
CONDITIONS_TOLD = {
    "engine_version": "version",
    "baseline_engine_version": "baseline version",
    "engine": "engine",
    "model": "model",
    "prompts_sha256": "prompts",
    "max_tokens": "max_tokens",
    "concurrency": "concurrency",
    "repeats": "repeats",
    "context": "context length",
    "cached_tokens": "prompt tokens from the cache",
}


def changed_conditions(before: Record, now: Record) -> Lines:
    """What else changed between two records of a label, in words."""
    for field_name, name in CONDITIONS_TOLD.items():
        old, new = before.get(field_name), now.get(field_name)
        if old != new and name == "prompts":
            yield name  # two hashes would tell nobody anything
        elif old != new:
            yield f"{name} {old} -> {new}"


@dataclass(frozen=True)
class Watched:
    """A figure that should not fall from run to run: "1.80 (1.71 to 1.89)", and both limits."""

    record: Record
    name: str
    words: str
    limits: tuple[float, float]


def watched(record: Record) -> Optional[Watched]:
    """The ratio of a comparison, the baseline's own tokens/s.

    None for what is no reference: another arm, a run that was interrupted, or has no interval or
    no verdict.
    """
    speed: Speed
    if record["kind"] == "comparison":
        if record["verdict"] is None:  # withheld: its ratio is of something else
            return None
        name, value, speed = "speed-up", ratio_in(record), record["speedup"]
    elif record["speed"] and endpoint_arm(record) == "baseline":
        speed = record["speed"]
        name, value = "baseline tokens/s", speed["tokens_per_s"]
    else:
        return None
    limits = limits_of(speed)
    if limits is None or record["interrupted"]:
        return None
    return Watched(record, name, f"{figure(value)} ({interval_of(speed)})", limits)


# What two records must have in common for a fall between them to be a regression.
COMPARABLE = (
    "kind",
    "label",
    "order",
    "model",
    "baseline_model",
    "prompts_sha256",
    "max_tokens",
    "sampling",
    "baseline_sampling",
    "concurrency",
)


def comparable(old: Record, new: Record) -> bool:
    """Whether a fall between two records is a regression."""
    return all(old.get(name) == new.get(name) for name in COMPARABLE)


def regressions(earlier: Sequence[Record], now: Sequence[Record]) -> list[str]:
    """One line for each ratio or baseline speed that fell since comparable records.

    It fell where its interval lies wholly below that of the last one, or below the median of the
    lower ends of the last ten (five or more), so that a slow decline is seen.
    """
    alarms = []
    known = list(filter(None, map(watched, earlier)))
    for new in filter(None, map(watched, now)):
        past = [old for old in known if comparable(old.record, new.record)]
        if past:
            alarms += regression_lines(past, new)
    return alarms


def regression_lines(past: Sequence[Watched], new: Watched) -> list[str]:
    """The alarm of one record, if its figure fell."""
    old, high = past[-1], new.limits[1]
    floors = [each.limits[0] for each in past[-10:]]
    usual = median(floors)
    if high < floors[-1]:
        fall = f"from {old.words} to {new.words} since {old.record['recorded_at']}"
    elif len(floors) >= 5 and high < usual:
        runs = f"the last {len(floors)} runs (median of their lower ends {usual:.2f})"
        fall = f"slowly, to {new.words}, below {runs}"
    else:
        return []
    besides = "nothing else known changed"
    changes = ", ".join(changed_conditions(old.record, new.record))
    if changes:
        besides = f"also changed: {changes}"
    return [f"REGRESSION {new.record['label']}: {new.name} fell {fall}; {besides}"]


def history_rows(records: Comparisons) -> Rows:
    """One row for each run of a label, with what changed since the run before."""
    rows = []
    for before, record in zip([None, *records], records):
        changes = changed_conditions(before, record) if before else ()
        cells = {
            "Recorded": record["recorded_at"],
            "Ratio change": change_mark(before, record),
            "Engine version": record["engine_version"],
            "Also changed": "; ".join(changes),
        }
        rows.append({**cells_of(record), **cells})
    return picked(HISTORY_COLUMNS, rows)


def change_mark(before: Optional[ComparisonRecord], now: ComparisonRecord) -> str:
    """The change since the run before: v lower, ^ higher, = intervals overlap, ? one is missing."""
    if before is None:
        return ""
    old, new = limits_of(before["speedup"]), limits_of(now["speedup"])
    if old is None or new is None:
        return "?"
    if new[1] < old[0]:
        return "v"
    if new[0] > old[1]:
        return "^"
    return "="


def trend_marks(ratios: Sequence[Optional[float]]) -> str:
    """One character a run, `_.-=*#` from the lowest to the highest ratio; ? where unknown."""
    known = [ratio for ratio in ratios if ratio is not None]
    low = min(known, default=0.0)
    width = max(known, default=0.0) - low
    marks = ""
    for ratio in ratios:
        if ratio is None:
            marks += "?"
        elif width > 0.005:
            marks += "_.-=*#"[round(5 * (ratio - low) / width)]
        else:
            marks += "-"
    return marks


def markdown_report(records: Sequence[Record]) -> str:
    """The notebook as Markdown: latest tables, crossover under load and history of each label."""
    return "\n".join(notebook_lines(records))


def notebook_lines(records: Sequence[Record]) -> Lines:
    """The notebook's lines, some of them whole paragraphs; servers compared with nothing last."""
    comparisons = comparisons_in(records)
    yield "# Speculative decoding: what was measured\n"
    if not comparisons:
        yield "No comparison is recorded.\n"
    for label, group in by_label(comparisons).items():
        yield from label_lines(label, group)
    yield from ranking_section(comparisons)
    shown = {record["run_id"] for record in comparisons}
    shown |= {record["baseline_run_id"] for record in comparisons}
    singles = []
    for record in records:
        if record["kind"] == "endpoint" and record["run_id"] not in shown:
            singles.append(server_cells(record))
    if singles:
        header = ("Label", "Recorded", "Tokens/s", "Completed", "Engine version")
        table = markdown_table(header, picked(header, singles))
        yield "## Servers without a comparison here\n"
        yield printable(table) + "\n"


def ranking_section(comparisons: Comparisons) -> Lines:
    """The candidates of the last run in which there were several, best first."""
    runs: dict[str, dict[str, ComparisonRecord]] = {}
    for record in comparisons:
        runs.setdefault(record["run_id"], {})[record["candidate"]] = record
    several = [run.values() for run in runs.values() if len(run) > 1]
    if several:
        ranked = sorted(several[-1], key=rank)
        table = markdown_table(RANKING_COLUMNS, ranking_rows(ranked))
        yield f"## Ranking\n\n{printable(winner_line(ranked))}\n\n{printable(table)}\n"


def label_lines(label: str, group: Comparisons) -> Lines:
    """What a notebook holds under one label, the last run in full."""
    latest: dict[int, ComparisonRecord] = {}
    for record in group:
        if measurement_of(record) == measurement_of(group[-1]):
            latest[record["concurrency"]] = record  # measured, and perhaps compared once more
    levels = list(latest.values())
    yield f"## {markdown_words(label)}\n"
    yield from map(markdown_words, map(sentence, levels))
    yield f"\n{RATIO_NOTE}\n"
    for record in levels:
        if len(levels) > 1:
            yield f"Load {record['concurrency']}:\n"
        yield from latest_lines(record)
    if len(levels) > 1:
        yield from ("```text", *crossover_lines(levels), "```\n")
    for level in sorted({record["concurrency"] for record in group}):
        yield from history_lines([record for record in group if record["concurrency"] == level])


def measurement_of(record: ComparisonRecord) -> str:
    """What the levels of one measurement have in common: their run_id without the level behind."""
    return record["run_id"].removesuffix(f"-{record['concurrency']}")


def latest_lines(record: ComparisonRecord) -> Lines:
    """One comparison in the notebook's report: table, explanation, audit."""
    yield markdown_table(WORKLOAD_COLUMNS, workload_rows(record)) + "\n"
    for line in explanation_lines(record):
        yield markdown_words(line.strip())
    yield ""
    for line in audit_lines([record]):
        yield f"- {markdown_words(line)}"
    if record["audit"]:
        yield ""


def history_lines(past: Comparisons) -> Lines:
    """All runs of one label at one concurrency level, oldest first."""
    load, trend = load_words(past[0]["concurrency"]), trend_marks(list(map(ratio_in, past)))
    legend = "change: v lower, ^ higher, = no difference shown, ? unknown"
    yield f"History{load}, `{trend}` (lowest `_` to highest `#`; {legend}):\n"
    yield printable(markdown_table(HISTORY_COLUMNS, history_rows(past))) + "\n"


def csv_cell(value: object) -> object:
    """A cell that no spreadsheet takes for a formula; numbers stay numbers."""
    if not isinstance(value, str):
        return value
    shown = one_printable_line(value)
    if shown.startswith(("=", "+", "-", "@")):
        shown = "'" + shown
    return shown


def csv_report(records: Sequence[Record]) -> str:
    """The comparisons as comma-separated values, a row a record, columns named as its fields."""
    out = io.StringIO()
    writer = csv.DictWriter(out, CSV_COLUMNS, lineterminator="\n")
    writer.writeheader()
    for record in comparisons_in(records):
        values = {**record, **record["text_comparison"], **(record["speedup"] or {})}
        values["acceptance"] = rate_in(record)
        writer.writerow({name: csv_cell(values.get(name)) for name in CSV_COLUMNS})
    return out.getvalue().rstrip("\n")


# ---- reference engine and calibration -----------------------------------------------------------

# Two servers with known truth: a small explicit model, a real greedy speculative loop, modelled
# time.
_WORDS = tuple(
    " " + a + b
    for a in ("sa", "ten", "mo", "lir", "ka", "dov", "re", "pin")
    for b in ("ta", "rul", "ne", "gos", "mi", "bel", "fo", "han")
)


def coin(*parts: object) -> float:
    """A number in [0, 1) that depends on its arguments alone: the chance of the reference model."""
    digest = hashlib.blake2b("|".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2.0**64


def other_spelling(word: str) -> str:
    """A word of the same length that differs in its last byte."""
    last = "x"
    if word.endswith(last):
        last = "y"
    return word[:-1] + last


@dataclass(frozen=True)
class Reference:
    """One reference server; times in seconds.  `chain` 0 is plain decoding."""

    alpha: float = 0.8
    chain: int = 0
    draft_cost: float = 0.1
    step_s: float = 0.005
    prefill_s: float = 0.02
    seed: int = 0
    # (word in the prompt, token index) where this server, if it drafts, changes one byte
    planted: tuple[str, int] = ("", -1)
    planted_gap_nats: float = 0.1  # what the log probabilities say of the planted alternative
    flip: float = 0.0  # share of tokens that come out otherwise at random
    # tokens of a step that cost no more than one; beyond, its time grows with them
    capacity: float = 1e9

    def target_token(self, prompt: str, n: int) -> str:
        """The target's greedy choice for token n."""
        return _WORDS[int(coin("target", self.seed, prompt, n) * len(_WORDS))]

    def draft_token(self, prompt: str, n: int) -> str:
        """The draft's choice: the target's with probability alpha, independently at each place."""
        word = self.target_token(prompt, n)
        if coin("draft", self.seed, prompt, n) < self.alpha:
            return word
        return other_spelling(word)

    def steps(self, prompt: str, length: int) -> Iterator[tuple[list[str], int, int]]:
        """(tokens, drafted, accepted) of each step after the prefill: greedy, for real."""
        n = 1
        while n < length:
            drafted = min(self.chain, length - n - 1)
            tokens = [self.target_token(prompt, n)]
            # a draft that is what the target says lets it say one token more
            for place in range(n, n + drafted):
                if self.draft_token(prompt, place) != tokens[-1]:
                    break
                tokens.append(self.target_token(prompt, place + 1))
            yield tokens, drafted, len(tokens) - 1
            n += len(tokens)

    def spoken(self, prompt: str, n: int, word: str) -> str:
        """The token as this server says it: planted and random changes included."""
        where, at = self.planted
        is_planted = self.chain and n == at and where in prompt
        if is_planted or coin("flip", time.perf_counter_ns()) < self.flip:
            return other_spelling(word)
        return word

    def step_cost_s(self, drafted: int, active: int) -> float:
        """The time of one step with so many drafts, while so many requests are `active`."""
        load = max(1.0, active * (drafted + 1) / self.capacity)
        return self.step_s * (load + drafted * self.draft_cost)


@dataclass
class Served:
    """What one request truly took and brought; times as modelled, in seconds."""

    prompt: str
    tokens: int
    prefill_s: float
    positions: list[int]  # drafts accepted at each place of a chain, the first place first
    decode_s: float = 0.0
    steps: int = 0  # of the target, with drafts
    plain_steps: int = 0  # and without
    drafted: int = 0
    accepted: int = 0
    rejected: int = 0  # drafts that were tested and wrong: one a step at most

    def book(self, drafted: int, accepted: int, cost_s: float) -> None:
        """Add one step."""
        self.decode_s += cost_s
        self.drafted += drafted
        self.accepted += accepted
        if drafted:
            self.steps += 1
        else:
            self.plain_steps += 1
        if accepted < drafted:
            self.rejected += 1
        for place in range(accepted):
            self.positions[place] += 1


def total(log: Sequence[Served], count: str) -> int:
    """The sum of one of the counts of `Served` over all requests."""
    return sum(getattr(served, count) for served in log)


class ReferenceEngine:
    """A reference server without its HTTP: what it says, when, and what it has done so far."""

    def __init__(self, config: Reference) -> None:
        self.config = config
        self.lock = threading.Lock()
        self.active = 0
        self.log: list[Served] = []

    def generate(self, prompt: str, length: int, started: float) -> Iterator[list[str]]:
        """The tokens of each step, `length` in all, at their modelled times from `started` on.

        Waits end at absolute deadlines, so errors do not add up.
        """
        config = self.config
        served = Served(prompt, length, config.prefill_s, [0] * config.chain)
        with self.lock:
            self.active += 1
        try:
            due, n = started + config.prefill_s, 1
            time.sleep(max(0.0, due - time.perf_counter()))
            yield [config.spoken(prompt, 0, config.target_token(prompt, 0))]
            for tokens, drafted, accepted in config.steps(prompt, length):
                cost_s = config.step_cost_s(drafted, self.active)
                due += cost_s
                time.sleep(max(0.0, due - time.perf_counter()))
                yield [config.spoken(prompt, at, token) for at, token in enumerate(tokens, n)]
                n += len(tokens)
                served.book(drafted, accepted, cost_s)
        finally:
            with self.lock:
                self.active -= 1
                self.log.append(served)

    def events(self, prompt: str, length: int, started: float) -> Iterator[str]:
        """The events of a streamed answer, each chunk with its count of tokens."""
        left = length
        for tokens in self.generate(prompt, length, started):
            left -= len(tokens)
            choice = {
                "index": 0,
                "delta": {"content": "".join(tokens)},
                "token_ids": [0] * len(tokens),
                "finish_reason": None if left else "length",
            }
            yield f"data: {json.dumps({'choices': [choice]})}\n\n"
        usage = {"prompt_tokens": len(prompt.split()), "completion_tokens": length}
        yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"
        yield "data: [DONE]\n\n"

    def plain_answer(self, prompt: str, length: int, started: float, with_logprobs: bool) -> str:
        """A whole answer as JSON, with log probabilities of every token where asked for."""
        tokens = list(itertools.chain(*self.generate(prompt, length, started)))
        message = {"role": "assistant", "content": "".join(tokens)}
        choice: JSON = {"index": 0, "finish_reason": "length", "message": message}
        if with_logprobs:
            choice["logprobs"] = {"content": [self.spellings(token) for token in tokens]}
        usage = {"prompt_tokens": 1, "completion_tokens": length}
        return json.dumps({"choices": [choice], "usage": usage})

    def spellings(self, token: str) -> JSON:
        """The log probabilities of a token and of its other spelling, the planted gap below it."""
        top: list[JSON] = []
        for word in (token, other_spelling(token)):
            logprob = -0.1 - len(top) * self.config.planted_gap_nats
            top.append({"token": word, "bytes": list(word.encode()), "logprob": logprob})
        return {**top[0], "top_logprobs": top}

    def metrics_page(self) -> str:
        """Counters under vLLM's names; those of drafts where the server drafts."""
        log = list(self.log)
        page = PLAIN_METRICS.format(running=self.active, tokens=total(log, "tokens"))
        if self.config.chain:
            page += DRAFT_METRICS.format(
                drafted=total(log, "drafted"),
                accepted=total(log, "accepted"),
                steps=total(log, "steps"),
            )
        for place in range(self.config.chain):
            count = sum(served.positions[place] for served in log)
            page += PLACE_METRICS.format(place=place, accepted=count)
        return page

    def truth_page(self) -> str:
        """The whole log, as JSON: a list with an object for each request."""
        return json.dumps([asdict(served) for served in self.log])


REFERENCE_MODELS = '{"object": "list", "data": [{"id": "reference", "owned_by": "reference"}]}'

PLAIN_METRICS = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running {running}
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total {tokens}
"""

DRAFT_METRICS = """\
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total {drafted}
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total {accepted}
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total {steps}
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
"""

PLACE_METRICS = """\
vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{place}"}} {accepted}
"""


def reference_handler(engine: ReferenceEngine) -> type:
    """The request handler class of a reference server."""
    import http.server

    class Handler(http.server.BaseHTTPRequestHandler):
        """The HTTP of a real engine: models, metrics, both kinds of completion; and the truth."""

        disable_nagle_algorithm = True

        def log_message(self, *args: object) -> None:
            """Say nothing."""

        def reply(self, kind: str, parts: Iterable[str]) -> None:
            """One answer, which ends where the connection does."""
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.end_headers()
            for part in parts:
                self.wfile.write(part.encode())

        def do_GET(self) -> None:
            """Models, metrics and truth."""
            if self.path == "/v1/models":
                self.reply("application/json", [REFERENCE_MODELS])
            elif self.path == "/metrics":
                self.reply("text/plain; version=0.0.4", [engine.metrics_page()])
            elif self.path == "/truth":
                self.reply("application/json", [engine.truth_page()])
            else:
                self.send_error(404)

        def do_POST(self) -> None:
            """One completion."""
            started = time.perf_counter()
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            prompt, length = body["messages"][-1]["content"], body["max_tokens"]
            if body.get("stream"):
                self.reply("text/event-stream", engine.events(prompt, length, started))
            else:
                answer = engine.plain_answer(prompt, length, started, "logprobs" in body)
                self.reply("application/json", [answer])

    return Handler


def serve_reference(config: Reference) -> int:
    """Serve until standard input ends, which it does when the parent is gone, however it went."""
    import http.server

    # Ctrl-C is the parent's to handle, also where there are no sessions
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    http.server.ThreadingHTTPServer.request_queue_size = 128
    engine = ReferenceEngine(config)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), reference_handler(engine))
    server.handle_error = lambda *args: None  # type: ignore[method-assign]  # clients may leave
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with contextlib.suppress(OSError):  # a parent that is gone has ended our standard input too
        print(server.server_port, flush=True)
    sys.stdin.read()
    os._exit(0)  # requests in flight do not hold the process


@contextlib.contextmanager
def reference_server(config: Reference) -> Iterator[str]:
    """The base URL of a reference server in a process of its own.

    It ends with this block, whatever happens.  MeasureError where it does not start.
    """
    program = os.path.abspath(__file__)
    command = [sys.executable, program, "reference-server", json.dumps(asdict(config))]
    # a session of its own: Ctrl-C reaches this process alone, which then closes the server's
    # standard input
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout
        port = process.stdout.readline().strip()
        if not port:
            raise MeasureError(
                "the reference server did not start; run the command again, or from a folder this "
                "user may read"
            )
        yield f"http://127.0.0.1:{port}/v1"


def cpu_share(seconds: float = 0.25) -> float:
    """The share of a processor that this process gets if it asks for all: 1 on an idle machine."""
    started, used = time.perf_counter(), time.thread_time()
    while time.perf_counter() - started < seconds:
        pass
    return (time.thread_time() - used) / (time.perf_counter() - started)


@dataclass(frozen=True)
class Truth:
    """True figures of one reference server: speeds in tokens/s, times in seconds, exact counts."""

    tokens: int
    steps: int
    drafted: int
    accepted: int
    rejected: int
    positions: tuple[int, ...]
    decode_s: float
    tokens_per_s: float
    decode_tokens_per_s: float
    tokens_per_step: float
    step_s: float
    ttft_s: float
    request_s: dict[str, float]  # by prompt


def reference_truth(log: Sequence[Served]) -> Truth:
    """What a server's own log says, which must not be empty."""
    tokens = total(log, "tokens")
    steps = total(log, "steps")
    all_steps = steps + total(log, "plain_steps")
    decode_s = math.fsum(served.decode_s for served in log)
    prefill_s = math.fsum(served.prefill_s for served in log)
    decoded = tokens - len(log)  # the first token of an answer comes from the prompt pass
    positions = zip(*(served.positions for served in log))
    return Truth(
        tokens=tokens,
        steps=steps,
        drafted=total(log, "drafted"),
        accepted=total(log, "accepted"),
        rejected=total(log, "rejected"),
        positions=tuple(map(sum, positions)),
        decode_s=decode_s,
        tokens_per_s=tokens / (decode_s + prefill_s),
        decode_tokens_per_s=decoded / decode_s,
        tokens_per_step=decoded / all_steps,
        step_s=decode_s / all_steps,
        ttft_s=prefill_s / len(log),
        request_s={served.prompt: served.decode_s + served.prefill_s for served in log},
    )


REFERENCE_ARMS = ("baseline", "speculative")


def measure_reference(
    plain: Reference, drafting: Reference, length: int
) -> tuple[Measured, list[Truth]]:
    """Measure a reference pair, the built-in prompts with `length` tokens each; then the truth.

    KeyboardInterrupt where it was interrupted.
    """
    with reference_server(plain) as plain_url, reference_server(drafting) as drafting_url:
        settings = Settings(
            arms=tuple(map(ArmSettings, REFERENCE_ARMS, (plain_url, drafting_url))),
            prompts=tuple(built_in_prompts()),
            max_tokens=length,
            key_variable="MEASURE_SPECULATIVE_NO_KEY",
            simulated=True,
        )
        servers = [preflight(arm, settings, say_on_stderr) for arm in settings.arms]
        recorder = Recorder(say_on_stderr, show=sys.stderr.isatty())
        judging = Judging("calibrate", 0.0)
        (measured,) = measure_levels(settings, servers, recorder, judging)
        if measured.interrupted:
            raise KeyboardInterrupt
        return measured, [truth_told(server.endpoint, settings) for server in servers]


def truth_told(endpoint: Endpoint, settings: Settings) -> Truth:
    """What a reference server's log says of the measurement, without warm-up and triage."""
    page, _ = get_text(endpoint.root + "/truth")
    log = [Served(**entry) for entry in loads(page)]
    return reference_truth(log[settings.warmup : settings.warmup + len(settings.prompts)])


@dataclass(frozen=True)
class Calibrated:
    """One quantity: its true and its measured value, and whether that is within tolerance.

    `error` is in percent or in `unit`; None where that is "exact", or where nothing was measured.
    """

    quantity: str
    true: object  # a number, a list of numbers or a word
    measured: object
    error: Optional[float] = None
    unit: str = "exact"
    within: bool = False


def exactly(quantity: str, true: object, measured: object) -> Calibrated:
    """A quantity in which no error is allowed."""
    return Calibrated(quantity, true, measured, within=measured == true)


def within(
    tolerance: float, unit: str, quantity: str, true: float, measured: Optional[float]
) -> Calibrated:
    """A quantity that may be off by `tolerance`, which is in `unit`; "%" is relative."""
    error = None
    if measured is not None:
        error = measured - true
        if unit == "%":
            error *= 100 / true
    return Calibrated(
        quantity=quantity,
        true=true,
        measured=measured,
        error=error,
        unit=unit,
        within=error is not None and abs(error) <= tolerance,
    )


def calibration_rows(
    measured: Measured, truth: Sequence[Truth], drafting: Reference
) -> list[Calibrated]:
    """Each quantity that a measurement tells; the truth is that of baseline and candidate."""
    result = measured.result
    rows = list(calibrated_speeds(result, truth))
    rows += calibrated_drafts(result, truth[1], drafting)
    rows += calibrated_client(measured, truth)
    rows += calibrated_text(result, drafting)
    return rows


def calibrated_speeds(result: Result, truth: Sequence[Truth]) -> Iterator[Calibrated]:
    """Rates, and the ratio as the geometric mean of the prompts' ratios."""
    arms = list(zip(REFERENCE_ARMS, truth, result.endpoints))
    for name, true, told in arms:
        seen = told["output_tokens_per_s"]
        yield within(1.0, "%", f"{name} tokens/s", true.tokens_per_s, seen)
    plain_s, drafted_s = (true.request_s for true in truth)
    ratios = [plain_s[prompt] / drafted_s[prompt] for prompt in plain_s]
    ratio = math.prod(ratios) ** (1 / len(ratios))
    yield within(0.5, "%", "ratio", ratio, ratio_in(result.comparisons[0]))
    for name, true, told in arms:
        seen = told["decode_tokens_per_s"]
        yield within(0.5, "%", f"{name} decode tokens/s", true.decode_tokens_per_s, seen)


def calibrated_drafts(result: Result, true: Truth, drafting: Reference) -> Iterator[Calibrated]:
    """What the counters tell of drafts and steps, and what those cost in steps of the target."""
    told = as_dict(result.endpoints[1]["acceptance"])
    yield exactly("verification steps", true.steps, told.get("steps"))
    yield exactly("tokens drafted", true.drafted, told.get("drafted"))
    yield exactly("tokens accepted", true.accepted, told.get("accepted"))
    yield exactly("acceptance rate", true.accepted / true.drafted, told.get("rate"))
    alpha = true.accepted / (true.accepted + true.rejected)
    yield within(0.02, "absolute", "alpha", alpha, told.get("alpha"))
    positions = [count / true.steps for count in true.positions]
    yield exactly("accepted per position", positions, told.get("per_position"))
    yield exactly("tokens per step", true.tokens_per_step, told.get("tokens_per_target_step"))
    costs = result.comparisons[0]["break_even"]
    cost = true.step_s / drafting.step_s
    yield within(1.0, "%", "step cost, target steps", cost, costs["step_cost"])
    cost = drafting.draft_cost
    yield within(0.02, "absolute", "draft cost, target steps", cost, costs["draft_cost"])


def calibrated_client(measured: Measured, truth: Sequence[Truth]) -> Iterator[Calibrated]:
    """Times in ms that this program adds: before the first token, to a request, to a token."""
    late_s = 0.0
    for name, true, told in zip(REFERENCE_ARMS, truth, measured.result.endpoints):
        seen_ms = 1000 * told["ttft_s"]["mean"] if told["ttft_s"] else None
        yield within(2.0, "ms", f"{name} time to first token, ms", 1000 * true.ttft_s, seen_ms)
        late_s += told["wall_s"] - math.fsum(true.request_s.values())
    late_ms = 1000 * late_s / sum(len(true.request_s) for true in truth)
    yield within(3.0, "ms", "client time per request, ms", 0.0, late_ms)
    answers = measured.runs[0].answers.values()
    slow_s = math.fsum(answer.decode_s or 0.0 for answer in answers) - truth[0].decode_s
    yield within(0.05, "ms", "client time per token, ms", 0.0, 1000 * slow_s / truth[0].tokens)


def calibrated_text(result: Result, drafting: Reference) -> Iterator[Calibrated]:
    """The one planted difference: where it is, and what the log probabilities say of it."""
    spoken = built_in_prompts()[8].messages[0]["content"]
    before = [drafting.target_token(spoken, n) for n in range(drafting.planted[1] + 1)]
    found = result.comparisons[0]["text_comparison"]["divergences"]
    place = reason = None
    if len(found) == 1:
        place = found[0]["first_difference_at_byte"]
    if found:
        reason = as_dict(found[0]["triage"]).get("finding")
    yield exactly("planted difference, byte", len("".join(before)) - 1, place)
    yield exactly("planted near tie", "near-tie", reason)


@dataclass(frozen=True)
class Calibration:
    """A measured reference pair, and how far it is from the truth."""

    measured: Measured
    rows: Sequence[Calibrated]
    cpu_share: float  # of a processor that was there for it, 0 to 1

    @property
    def misfit(self) -> Optional[str]:
        """Why this machine, now, is not fit to measure on; None where it is."""
        if self.cpu_share < 0.9:
            return (
                "NOT FIT: other programs hold the processors (this one got "
                f"{self.cpu_share:.0%} of one when it asked for all); measure again when the "
                "machine is idle"
            )
        wrong = [row.quantity for row in self.rows if not row.within]
        if wrong:
            return (
                f"OUT OF TOLERANCE: {', '.join(wrong)}; most likely the machine is busy: see what "
                "else runs"
            )
        return None

    @property
    def good_to(self) -> float:
        """The largest error of a rate or ratio, in percent; no better than 0.05 is claimed."""
        errors = [abs(row.error or 0.0) for row in self.rows if row.unit == "%"]
        return max([0.05, *errors])


def calibrate(plain: Reference, drafting: Reference, length: int) -> Calibration:
    """Measure a reference pair, and hold it against the truth.

    The processor's share is the smaller one of before and after.  MeasureError where a server ends
    before its time.
    """
    share = cpu_share()
    try:
        measured, truth = measure_reference(plain, drafting, length)
    except (RequestFailed, UsageError) as error:
        raise MeasureError(
            f"a reference server ended before its time ({error}); run calibrate again"
        ) from None
    rows = calibration_rows(measured, truth, drafting)
    return Calibration(measured, rows, min(share, cpu_share()))


def calibration_lines(rows: Sequence[Calibrated]) -> list[str]:
    """The table of `calibrate`."""
    cells = [
        (row.quantity, value_words(row.true), value_words(row.measured), error_words(row))
        for row in rows
    ]
    return [text_table(("Quantity", "True", "Measured", "Error"), cells)]


def value_words(value: object) -> str:
    """A true or measured value; of a list the first four."""
    if value is None:
        return "unknown"
    if isinstance(value, list):
        shown = [value_words(each) for each in value[:4]]
        if len(value) > 4:
            shown.append("...")
        return " ".join(shown)
    if isinstance(value, float):
        return f"{round(value, 3) + 0.0:.3f}"  # + 0.0: no "-0.000"
    return str(value)


def error_words(row: Calibrated) -> str:
    """The error with its unit; what is out of tolerance has a mark."""
    words = "unknown"
    if row.unit == "exact":
        words = "none" if row.within else "WRONG"
    elif row.error is not None:
        unit = {"%": "%", "ms": " ms"}.get(row.unit, "")
        words = f"{round(row.error, 3) + 0.0:+.3f}{unit}"
    if not row.within:
        words += " !"
    return words


# ---- command line -------------------------------------------------------------------------------

FAIL_ON = ("slower", "changed-text", "regression", "did-not-run")

MOST_ASKED = 1_000_000  # of whatever a flag counts; more is a slip of the finger


class Parser(argparse.ArgumentParser):
    """argparse as this program speaks: errors in one line, help that says if it was not written."""

    def error(self, message: str) -> NoReturn:
        """What is wrong with a command line."""
        _, _, unknown = message.partition("unrecognized arguments: ")
        flag = unknown.partition(" ")[0].partition("=")[0]
        raise UsageError(f"{message}{meant(flag, self._option_string_actions)}; see --help")

    def _print_message(self, message: str, file: object = None) -> None:
        print_lines([message.rstrip()])


def meant(word: str, names: Iterable[str]) -> str:
    """A question for a misspelt word, "" where nothing is like it."""
    import difflib

    like = difflib.get_close_matches(word, list(names), 1)
    if not like:
        return ""
    return f"; did you mean {like[0]}?"


def _parser(
    command: str, description: Optional[str] = None, epilog: Optional[str] = None
) -> Parser:
    parser = Parser(
        prog=f"measure_speculative.py {command}",
        description=description,
        epilog=epilog,
        allow_abbrev=False,
        add_help=bool(description),  # without one the help page is the top of this file
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = f"measure_speculative {__version__}"
    parser.add_argument("-V", "--version", action="version", version=version)
    return parser


def _number(
    kind: Callable[[str], float], low: float, high: float, above: bool = False
) -> Callable[[str], float]:
    """What reads an int or float from `low` (or only above it) to `high`."""
    words = "whole number" if kind is int else "number"
    start = "above" if above else "from"

    def parse(text: str) -> float:
        with contextlib.suppress(ValueError):
            value = kind(text)
            if low <= value <= high and not (above and value == low):
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not a {words} {start} {low} to {high}")

    return parse


def _listed(each: Callable[[str], object]) -> Callable[[str], list[object]]:
    """What reads a comma list of such values."""
    return lambda text: [each(part.strip()) for part in text.split(",")]


def _alarm(text: str) -> str:
    if text not in FAIL_ON:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(FAIL_ON)}")
    return text


def _json_object(text: str) -> JSON:
    try:
        value = loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("not a JSON object, like '{\"ignore_eos\": true}'")
    return value


def _add_results(parser: Parser) -> None:
    """Flags that `measure` and `compare` share; keeping_of reads them."""
    add = parser.add_argument
    add(
        "--label",
        default="speculative-run",
        help="name of this experiment in the notebook (default %(default)s)",
    )
    add(
        "--labbook",
        default="labbook.md",
        metavar="FILE",
        help="notebook to append to (default %(default)s)",
    )
    add(
        "--min-gain",
        type=_number(float, -0.99, 100),
        default=0.0,
        metavar="G",
        help="call it paying only above 1+G, as 0.05 for 5%% (default 0)",
    )
    add(
        "--fail-on",
        type=_listed(_alarm),
        action="extend",
        default=[],
        metavar="WHAT",
        help=f"exit with 3 on any of {', '.join(FAIL_ON)} (comma list)",
    )
    add("--quiet", action="store_true", help="print nothing but errors and --fail-on alarms")
    add(
        "--divergence-report",
        metavar="FILE",
        help="write a bug report on changed text, in Markdown",
    )


def measure_parser() -> Parser:
    """The flags of `measure`; the top of this file says what they mean, and is the help page."""
    parser = _parser("measure")
    add = parser.add_argument
    for flag in ("--baseline-url", "--model", "--speculative-model", "--save-run"):
        add(flag)
    for flag in ("--baseline-metrics-url", "--speculative-metrics-url"):
        add(flag)
    for flag in ("--speculative-url", "--prompts"):
        add(flag, action="append", default=[])
    for flag in ("--include-prompts", "--no-stream"):
        add(flag, action="store_true")
    for flag in ("--extra-body", "--baseline-extra-body", "--speculative-extra-body"):
        add(flag, type=_json_object, default={})
    from_none, from_one = _number(int, 0, MOST_ASKED), _number(int, 1, MOST_ASKED)
    add("--warmup", type=from_none, default=Settings.warmup)
    add("--triage", type=from_none, default=Settings.triage)
    add("--max-tokens", type=from_one, default=Settings.max_tokens)
    add("--repeats", type=from_one, default=Settings.repeats)
    add("--engine", default=Settings.engine)
    add("--engine-version", default=Settings.engine_version)
    add("--api-key-env", default=Settings.key_variable)
    add("--prompt-set", choices=("builtin", "file"))
    add("--order", choices=("paired", "sequential"), default=Settings.order)
    add("--concurrency", type=_listed(_number(int, 1, 4096)), default=Settings.levels)
    add("--seed", type=int, default=Settings.seed)
    add("--timeout", type=_number(float, 0, 86400, above=True), default=Settings.timeout_s)
    _add_results(parser)
    return parser


def candidate_urls(texts: Sequence[str]) -> list[tuple[str, str]]:
    """(name, URL) of each --speculative-url.  UsageError for a name that fits no label."""
    urls = []
    unnamed = 0
    for text in texts:
        name, equals, url = text.partition("=")
        # a "=" behind a colon is the value's own: it stands in the query of a URL
        if not equals or ":" in name:
            unnamed += 1
            name, url = "speculative", text
            if unnamed > 1:
                name = f"speculative-{unnamed}"
        if not re.fullmatch(r"[A-Za-z0-9._-]+", name):
            raise UsageError(f"candidate name {name!r}: use letters, digits, '.', '_' and '-' only")
        urls.append((name, url))
    return urls


def check_flags(args: argparse.Namespace, names: Sequence[str]) -> None:
    """UsageError where flags contradict each other, or two of the servers have one name."""
    if args.prompts and args.prompt_set == "builtin":
        raise UsageError("--prompts and --prompt-set builtin contradict each other; leave one out")
    if args.prompt_set == "file" and not args.prompts:
        raise UsageError("--prompt-set file needs --prompts PATH")
    if not names:
        raise UsageError(
            "give --baseline-url, --speculative-url or both, as --baseline-url "
            "http://127.0.0.1:8080/v1"
        )
    if len(set(names)) < len(names):
        raise UsageError(
            "two servers have the same name; name the candidates apart, as --speculative-url "
            "k4=http://..."
        )
    if len(set(args.concurrency)) < len(args.concurrency):
        raise UsageError(
            "--concurrency names a level twice; for more pairs of blocks use --repeats"
        )
    if args.speculative_metrics_url and len(args.speculative_url) > 1:
        raise UsageError("--speculative-metrics-url fits one candidate only")
    pages = {"baseline": args.baseline_metrics_url, "speculative": args.speculative_metrics_url}
    for arm, url in pages.items():
        if url:
            checked_url(url, f"--{arm}-metrics-url", query_allowed=True)


def arms_of(args: argparse.Namespace) -> tuple[ArmSettings, ...]:
    """The servers to measure, the baseline first.  UsageError where flags contradict each other."""
    urls = candidate_urls(args.speculative_url)
    if args.baseline_url:
        urls.insert(0, ("baseline", args.baseline_url))
    check_flags(args, [name for name, _ in urls])
    arms = []
    for name, url in urls:
        model = args.model
        body, metrics_url = args.baseline_extra_body, args.baseline_metrics_url
        if name != "baseline":
            model = args.speculative_model or model
            body, metrics_url = args.speculative_extra_body, args.speculative_metrics_url
        arms.append(ArmSettings(name, url, model, body, metrics_url))
    return tuple(arms)


def settings_of(args: argparse.Namespace, say: Say) -> Settings:
    """What `measure` is to do, its prompts read.  UsageError for flags or prompt files at fault.

    `say` takes notes on the prompts.
    """
    arms = arms_of(args)
    prompts = built_in_prompts()
    if args.prompts:
        prompts, notes = load_prompts(args.prompts)
        for note in notes:
            say(note)
    named_alike = ("max_tokens", "repeats", "warmup", "order", "seed", "triage", "engine")
    return Settings(
        **copied(vars(args), *named_alike, "engine_version"),
        arms=arms,
        prompts=tuple(prompts),
        levels=tuple(args.concurrency),
        timeout_s=args.timeout,
        stream=not args.no_stream,
        body=args.extra_body,
        key_variable=args.api_key_env,
        own_fields=(*args.baseline_extra_body, *args.speculative_extra_body),
    )


def keeping_of(args: argparse.Namespace, command: str) -> Keeping:
    """Where `measure` and `compare` are to leave results; `command` must hold no key."""
    named_alike = ("label", "labbook", "min_gain", "fail_on", "quiet", "divergence_report")
    return Keeping(**copied(vars(args), *named_alike), command=command)


def check_outputs(keeping: Keeping, save_run: Optional[str], inputs: Sequence[str]) -> None:
    """UsageError if a file that will be written cannot be, or is read or written otherwise too."""
    if not keeping.label.strip() or not keeping.label.isprintable():
        raise UsageError(f"--label {keeping.label!r} is no name: one line of printable characters")
    taken = {file_identity(path): "an input" for path in inputs}
    report = keeping.divergence_report
    outputs = {"--labbook": keeping.labbook, "--divergence-report": report, "--save-run": save_run}
    for option, path in outputs.items():
        if path:
            other = taken.setdefault(file_identity(path), option)
            if other != option:
                raise UsageError(
                    f"{option} and {other} are the same file, {path}; give {option} another name"
                )
    check_appendable(keeping.labbook)
    if report:
        check_appendable(report, "report", "--divergence-report")
        check_overwritable(report)


def file_identity(path: str) -> Hashable:
    """What two names of one file have in common, be they links of either kind."""
    with contextlib.suppress(OSError):
        found = os.stat(path)
        return found.st_dev, found.st_ino
    with contextlib.suppress(OSError):  # the working folder may be gone
        return os.path.realpath(path)
    return path


REPORT_TITLES = (b"# Greedy text that changes with spec", b"# No text changed with spec")


def check_overwritable(path: str) -> None:
    """UsageError for a file that holds something else than an earlier report on changed text."""
    if not os.path.isfile(path):
        return
    beginning = read_bytes(path)[:80]
    if beginning and not beginning.startswith(REPORT_TITLES):
        raise UsageError(
            f"{path} is no earlier report on changed text, so it is not written over; "
            "--divergence-report wants a new file"
        )


def help_page() -> str:
    """The top of this file, also where Python was told to leave such texts out (-OO)."""
    if __doc__:
        return __doc__
    with open(__file__, encoding="utf-8") as file:
        _, page, _ = file.read().split('"""', 2)
    return page.replace("\\\\", "\\")


def measure_command(argv: Sequence[str]) -> int:
    """measure: prompts -> plan -> readings -> comparison -> notebook and terminal."""
    if "-h" in argv or "--help" in argv:
        print_lines([help_page().rstrip()])
        return MEASURED
    args = measure_parser().parse_args(argv)
    key = api_key(args.api_key_env)
    for model in (args.model, args.speculative_model):
        key = marked(key, model)
    command = redacted(shlex.join(["measure_speculative.py", *argv]), key)
    keeping = keeping_of(args, command)
    say = speaker(keeping.quiet)
    notes: list[str] = []
    settings = settings_of(args, notes.append)
    inputs = [file for path in args.prompts for file in prompt_files(path)]
    check_outputs(keeping, args.save_run, inputs)
    for note in notes:
        say(note)
    servers = [preflight(arm, settings, say) for arm in settings.arms]
    with run_file(args.save_run) as file:
        is_shown = sys.stderr.isatty() and not keeping.quiet
        recorder = Recorder(say, file, is_shown)
        judging = Judging(keeping.label, keeping.min_gain)
        measured = measure_levels(settings, servers, recorder, judging)
    shown = None
    if args.include_prompts:
        shown = settings.prompts
    return conclude(keeping, measured, recorder.trouble, shown)


class Step(NamedTuple):
    """What came of one step at the end: lines for the user, what went wrong, whether by Ctrl-C."""

    lines: list[str]
    trouble: Optional[str] = None
    interrupted: bool = False


def conclude(
    keeping: Keeping,
    measured: Sequence[Measured],
    trouble: Optional[str] = None,
    shown: Optional[Sequence[Prompt]] = None,
) -> int:
    """Append first, print then: nothing measured is lost to a closed pipe.  The exit code.

    `shown` are prompts for the report on changed text.
    """
    results = [level.result for level in measured if worth_keeping(level)]
    records = [record for result in results for record in result.records()]
    if not records:
        say_on_stderr("interrupted before the first pair was finished; nothing is recorded")
        return INTERRUPTED
    alarmed = look_for_alarms(keeping, records)
    appended = append_or_show(keeping.labbook, records, speaker(keeping.quiet))
    unwritten = write_divergences(keeping, results, shown)
    unprinted = print_report(keeping, results, appended)
    found = (trouble, alarmed.trouble, appended.trouble, unwritten, unprinted)
    troubles = [words for words in found if words]
    arms = [record for result in results for record in result.endpoints]
    dead = [dead_words(record) for record in arms if not record["completed"]]
    failing = []
    if keeping.quiet:
        failing = failing_arms(arms)
    for words in (*alarmed.lines, *dead, *failing, *troubles):
        say_on_stderr(words)
    interrupted = alarmed.interrupted or appended.interrupted
    if interrupted or any(level.interrupted for level in measured):
        return INTERRUPTED
    if dead or troubles:
        return COULD_NOT_MEASURE
    if alarmed.lines:
        return FINDING
    return MEASURED


def look_for_alarms(keeping: Keeping, records: Sequence[Record]) -> Step:
    """The alarms of --fail-on; looked for before the notebook holds these records too."""
    warn = speaker(keeping.quiet)
    try:
        return Step(alarms_of(keeping.fail_on, keeping.labbook, records, warn))
    except (MeasureError, KeyboardInterrupt) as error:
        trouble = f"--fail-on could not be checked: {error!r}"
        return Step([], trouble, isinstance(error, KeyboardInterrupt))


def append_or_show(path: str, records: Sequence[Record], say: Say = say_on_stderr) -> Step:
    """Append the records to the notebook.  Where that fails they are the lines to print."""
    try:
        append_records(path, records, say)
        return Step([])
    except (OSError, KeyboardInterrupt) as error:
        lines = [json_line(record).decode().rstrip() for record in records]
        reason = getattr(error, "strerror", "interrupted")
        trouble = f"cannot append to {path}: {reason}; the records go to standard output instead"
        return Step(lines, trouble, isinstance(error, KeyboardInterrupt))


def write_divergences(
    keeping: Keeping, results: Sequence[Result], shown: Optional[Sequence[Prompt]]
) -> Optional[str]:
    """Write the bug report on changed text where one is asked for; returns what went wrong."""
    path = keeping.divergence_report
    if not path:
        return None
    try:
        with open(path, "w", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
            parts = [markdown_divergences(result, shown, keeping.command) for result in results]
            file.write("\n".join(parts))
    except OSError as error:
        return f"cannot write {path}: {error.strerror}"
    return None


def print_report(keeping: Keeping, results: Sequence[Result], appended: Step) -> Optional[str]:
    """Print what was measured, behind records that no notebook took; returns what went wrong."""
    lines = list(appended.lines)
    if not keeping.quiet:
        if not lines:
            lines = [f"Recorded in {keeping.labbook}.", ""]
        lines += levels_lines(results)
    try:
        print_lines(lines)
    except MeasureError as error:
        return str(error)
    return None


def dead_words(record: EndpointRecord) -> str:
    """What is said of an arm that completed no request."""
    first = record["first_error"] or "none, none was sent"
    return f"{record['label']}: no request completed; the first error: {first}"


def failing_arms(arms: Sequence[EndpointRecord]) -> list[str]:
    """One line for each arm of which only some requests failed."""
    failing = [record for record in arms if record["failed"] and record["completed"]]
    return [f"{record['label']}: {failure_words(record)}" for record in failing]


def alarms_of(
    fail_on: Sequence[str], labbook: str, records: Sequence[Record], warn: Say
) -> list[str]:
    """One line for each --fail-on condition that holds; regressions are against the notebook."""
    alarms = []
    for record in records:
        if record["kind"] == "comparison":
            if "slower" in fail_on and record["verdict"] == "does-not-pay":
                alarms.append(f"SLOWER {record['label']}: {sentence(record)}")
            if "did-not-run" in fail_on and record["verdict_withheld"] == "did-not-run":
                alarms.append(f"DID NOT RUN {record['label']}: {sentence(record)}")
            if "changed-text" in fail_on:
                alarms += changed_text_alarm(record)
    if "regression" in fail_on and os.path.isfile(labbook):
        alarms += regressions(read_records(labbook, warn), records)
    return alarms


def changed_text_alarm(record: ComparisonRecord) -> list[str]:
    """A line where texts differ, but for those on which the baseline disagrees with itself."""
    texts = record["text_comparison"]
    blamed = changed_pairs(texts) - texts["unstable"]
    if not blamed:
        return []
    besides = where = ""
    if texts["unstable"]:
        besides = f" ({texts['unstable']} more where the baseline disagrees with itself)"
    checked = " on a baseline that agrees with itself"
    if not texts["baseline_self"]["compared"]:
        checked = "; the baseline was not compared with itself (--repeats 2 does that)"
    stable = [found for found in texts["divergences"] if found["class"] != "unstable-baseline"]
    if stable:
        byte = stable[0]["first_difference_at_byte"]
        where = f"; the first: {stable[0]['prompt_id']} at byte {byte}"
    return [
        f"CHANGED TEXT {record['label']}: {blamed} of {texts['compared']} completions "
        f"differ{checked}{besides}{where}"
    ]


def compare_parser() -> Parser:
    """The flags of `compare`."""
    parser = _parser(
        "compare",
        "Compare saved runs (measure --save-run): for machines that hold one server at a time.",
    )
    add = parser.add_argument
    add("baseline", help="run file with the baseline (and perhaps its candidates)")
    add("speculative", nargs="*", help="run files with one candidate each")
    _add_results(parser)
    add(
        "--force",
        action="store_true",
        help="compare although conditions differ, and mark the record",
    )
    return parser


def compare_command(argv: Sequence[str]) -> int:
    """compare: the same comparison from saved runs."""
    args = compare_parser().parse_args(argv)
    keeping = keeping_of(args, shlex.join(["measure_speculative.py", "compare", *argv]))
    say = speaker(keeping.quiet)
    levels, triage = runs_to_compare(args.baseline, args.speculative, say)
    check_outputs(keeping, None, [args.baseline, *args.speculative])
    measured = []
    for runs in levels:
        if len(runs) < 2:
            raise UsageError(
                f"{args.baseline} holds one run only; give the file of the other server too"
            )
        forced = forced_conditions(runs, args.force)
        if any(run.interrupted for run in runs):
            say("a run was interrupted; what was finished is compared")
        judging = Judging(keeping.label, keeping.min_gain, tuple(forced))
        result = result_of(level_of(runs, keeping.min_gain), judging, triage)
        measured.append(Measured(result, runs, False))
    return conclude(keeping, measured)  # a run file holds no prompts to show


def forced_conditions(runs: Sequence[Run], is_forced: bool) -> list[str]:
    """Names of the conditions in which runs differ.  UsageError where any do, if not forced."""
    differ: set[str] = set()
    for run in runs[1:]:
        differ.update(differing_conditions(runs[0], run))
    names = sorted(differ)
    if names and not is_forced:
        raise UsageError(
            f"the runs cannot be compared; these differ: {', '.join(names)}; --force does it anyway"
        )
    return names


def runs_to_compare(
    first: str, others: Sequence[str], say: Say
) -> tuple[list[list[Run]], dict[str, dict[str, Triage]]]:
    """For each level of the baseline its runs, the baseline first; and triage findings by arm."""
    runs, triage = read_runs(first, say)
    arms = [run.arm for run in runs]
    baseline = "baseline" if "baseline" in arms else arms[0]
    baselines = [replace(run, arm="baseline") for run in runs if run.arm == baseline]
    candidates = [run for run in runs if run.arm != baseline]
    for path in others:
        more, findings = read_runs(path, say)
        taken = {"baseline", *(run.arm for run in candidates)}
        names = candidate_names(path, more, taken, len(others) > 1)
        for arm, name in names.items():
            candidates += [replace(run, arm=name) for run in more if run.arm == arm]
            triage[name] = findings.get(arm, triage.get(name, {}))
    is_only = len(baselines) == 1
    return [[run, *at_level_of(run, candidates, is_only)] for run in baselines], triage


def candidate_names(
    path: str, runs: Sequence[Run], taken: set[str], are_several: bool
) -> dict[str, str]:
    """What the candidates of a run file are called, by their arm in it.

    It is their arm, or the stem of the file where that arm says nothing or is taken.  A baseline
    is a candidate where it is alone.
    """
    stem, _ = os.path.splitext(os.path.basename(path))
    arms = dict.fromkeys(run.arm for run in runs)
    if len(arms) > 1:
        arms.pop("baseline", None)
    names = {}
    for arm in arms:
        name = arm
        if arm in taken or (arm == "speculative" and are_several):
            name = stem
        numbers = itertools.count(2)
        while name in taken:
            name = f"{stem}-{next(numbers)}"
        names[arm] = name
    return names


def at_level_of(baseline: Run, candidates: Sequence[Run], is_only: bool) -> list[Run]:
    """The candidates that were measured at the level of this run of the baseline.

    One that was measured at one other level still stands here: its refusal names what differs.
    """
    level = baseline.conditions["concurrency"]
    arms = [run.arm for run in candidates]
    found = []
    for run in candidates:
        is_lone = is_only and arms.count(run.arm) == 1
        if is_lone or run.conditions["concurrency"] == level:
            found.append(run)
    return found


def report_command(argv: Sequence[str]) -> int:
    """report: tables and history from the notebook."""
    parser = _parser("report", "Print the tables and the history that a lab notebook holds.")
    add, formats = parser.add_argument, ("markdown", "csv", "json")
    add("labbook", help="notebook to read")
    add("--label", help="only this label")
    add("--format", choices=formats, default="markdown", help="json: the records, one a line")
    args = parser.parse_args(argv)
    records = read_records(args.labbook, say_on_stderr)
    if not records:
        say_on_stderr(
            f"{args.labbook} holds no record of this program; give a notebook that --labbook named"
        )
    elif args.label:
        records = labelled(records, args.label, args.labbook)
    if args.format == "json":
        lines = [json.dumps(record) for record in records]
    elif args.format == "csv":
        lines = [csv_report(records)]
    else:
        lines = [markdown_report(records)]
    print_lines(lines)
    return MEASURED


def labelled(records: Sequence[Record], label: str, path: str) -> list[Record]:
    """The records of a label and of what stands below it.  UsageError where there are none."""
    found = [record for record in records if f"{record['label']}/".startswith(f"{label}/")]
    if not found:
        labels = ", ".join(sorted({record["label"] for record in records}))
        raise UsageError(f"{path} has no label {label}; it has: {labels or 'none'}")
    return found


@dataclass(frozen=True)
class NeededAlpha:
    """The acceptance at which drafts of one length and cost pay; `applies` is from alpha_needed."""

    chain: int
    draft_cost: float
    alpha_needed: Optional[float]
    applies: str


@dataclass(frozen=True)
class ExpectedSpeedup:
    """What drafts of one length and cost bring at the acceptance that was given."""

    chain: int
    draft_cost: float
    speedup: float


@dataclass(frozen=True)
class BestChain:
    """The best length of drafts of one cost, None where longer is always better."""

    draft_cost: float
    chain: Optional[int]
    speedup: Optional[float]  # beside a chain of None its limit; None: without limit


@dataclass(frozen=True)
class MeasuredStep:
    """What a target step was seen to cost, in target steps, and to bring, in tokens."""

    step_cost: float
    tokens_per_step: float
    speedup: float


@dataclass(frozen=True)
class BreakEvenTable:
    """What `break-even` answers, for each chain length each draft cost; None was not asked for."""

    table: list[NeededAlpha]
    speedups: Optional[list[ExpectedSpeedup]] = None
    best: Optional[list[BestChain]] = None
    measured: Optional[MeasuredStep] = None


def break_even_parser() -> Parser:
    """The flags of `break-even`."""
    parser = _parser(
        "break-even",
        "Which acceptance does a draft need to pay, and which chain length is best?",
        "alpha is the probability that a tested draft is accepted (not accepted/drafted); a draft "
        "cost of 0.10 means\n"
        "that drafting one token takes a tenth of one step of the target.  Leviathan et al. 2023.",
    )
    add = parser.add_argument
    amount = _number(float, 1e-6, MOST_ASKED)
    add(
        "--chain",
        type=_listed(_number(int, 0, LONGEST_ASKED)),
        default=[2, 4, 8],
        metavar="K,...",
        help="chain lengths (default 2,4,8)",
    )
    add(
        "--draft-cost",
        type=_listed(_number(float, 0, MOST_ASKED)),
        default=[0.10, 0.20, 0.35],
        metavar="C,...",
        help="cost of one draft step in target steps (default 0.10,0.20,0.35)",
    )
    add(
        "--alpha",
        type=_number(float, 0, 1),
        metavar="A",
        help="also print the speed-up at this acceptance",
    )
    add(
        "--measured-step-cost",
        type=amount,
        metavar="X",
        help="what a step was seen to cost, in target steps",
    )
    add(
        "--tokens-per-step",
        type=amount,
        metavar="L",
        help="tokens that a target step was seen to bring",
    )
    add("--json", action="store_true", help="print JSON")
    return parser


def break_even_command(argv: Sequence[str]) -> int:
    """break-even: the arithmetic alone."""
    args = break_even_parser().parse_args(argv)
    cost, length = args.measured_step_cost, args.tokens_per_step
    if (cost is None) != (length is None):
        raise UsageError("--measured-step-cost and --tokens-per-step belong together; give both")
    told = break_even(args.chain, args.draft_cost, args.alpha)
    if cost is not None:
        step = MeasuredStep(cost, length, length / cost)
        told = replace(told, measured=step)
    if args.json:
        asked = {name: value for name, value in asdict(told).items() if value is not None}
        print_lines([json.dumps(asked)])
    else:
        print_lines(break_even_lines(told, args.chain, args.draft_cost, args.alpha))
    return MEASURED


def break_even(
    chains: Sequence[int], costs: Sequence[float], alpha: Optional[float]
) -> BreakEvenTable:
    """The alpha needed for each chain length and draft cost; given an alpha, what it brings too."""
    cells = [(k, c) for k in chains for c in costs]
    table = []
    for k, c in cells:
        applies, needed = alpha_needed(k, 1 + k * c)
        table.append(NeededAlpha(k, c, needed, applies))
    if alpha is None:
        return BreakEvenTable(table)
    speedups = [ExpectedSpeedup(k, c, speedup(alpha, k, c)) for k, c in cells]
    best = []
    for c in costs:
        chain, ratio = best_chain(alpha, c)
        limit = ratio if math.isfinite(ratio) else None
        best.append(BestChain(c, chain, limit))
    return BreakEvenTable(table, speedups, best)


def break_even_lines(
    told: BreakEvenTable, chains: Sequence[int], costs: Sequence[float], alpha: Optional[float]
) -> list[str]:
    """The tables of `break-even` as text."""
    lines = ["alpha needed to break even:"]
    lines += grid(chains, costs, map(needed_words, told.table))
    if told.speedups:
        lines.append(f"speed-up at alpha = {alpha:g}:")
        lines += grid(chains, costs, (f"{cell.speedup:.3f}" for cell in told.speedups))
    for best in told.best or ():
        lines.append(f"best chain length at c = {best.draft_cost:g}: {best_words(best)}")
    if told.measured:
        lines.append(measured_words(told.measured))
    return lines


def grid(chains: Sequence[int], costs: Sequence[float], cells: Iterator[str]) -> list[str]:
    """A table with a row for each chain length and a column for each draft cost."""
    header = ["chain", *(f"c={cost:g}" for cost in costs)]
    rows = [[f"k={k}", *itertools.islice(cells, len(costs))] for k in chains]
    return [text_table(header, rows), ""]


def needed_words(cell: NeededAlpha) -> str:
    """A cell of the table of alphas."""
    if cell.alpha_needed is None:
        return "cannot pay"
    return "any" if cell.applies == "any" else f"{cell.alpha_needed:.4f}"


def best_words(best: BestChain) -> str:
    """The best chain length and its speed-up."""
    if best.speedup is None:
        return "longer is always better, without limit"
    if best.chain is None:
        return f"longer is always better, towards {best.speedup:.3f}x"
    if best.chain == 0:
        return "none, no draft pays"
    return f"{best.chain} ({best.speedup:.3f}x)"


def measured_words(step: MeasuredStep) -> str:
    """What a measured step says: it pays where it brings more tokens than it costs target steps."""
    pays = "it pays" if step.speedup > 1 else "it does not pay"
    cost = f"{step.step_cost:g}"
    return (
        f"measured: {step.tokens_per_step:g} tokens per step at a cost of {cost} target steps: "
        f"{step.speedup:.3f}x; {pays}; more than {cost} tokens per step are needed"
    )


def calibrate_parser() -> argparse.ArgumentParser:
    """The flags of `calibrate`."""
    parser = _parser(
        "calibrate",
        "Measure two servers of known truth on this machine, and print the error of every figure.",
    )
    add = parser.add_argument
    add(
        "--alpha",
        type=_number(float, 0, 1),
        default=0.8,
        help="true acceptance of tested drafts (default 0.8)",
    )
    add("--chain", type=_number(int, 1, 64), default=4, help="true chain length (default 4)")
    add(
        "--draft-cost",
        type=_number(float, 0, 10),
        default=0.1,
        help="true cost of a draft step in target steps (default 0.1)",
    )
    add(
        "--step-ms",
        type=_number(float, 0.5, 1000),
        default=5.0,
        help="true time of a target step (default 5)",
    )
    add("--labbook", metavar="FILE", help="also append the records, marked as simulated")
    add("--json", action="store_true", help="print JSON")
    return parser


def calibrate_command(argv: Sequence[str]) -> int:
    """calibrate: measure two servers of known truth, and print the errors."""
    args = calibrate_parser().parse_args(argv)
    if args.labbook:
        check_appendable(args.labbook)
    length = 192
    if args.step_ms > 6:  # about a second for the answer of a slow server
        length = max(16, int(1100 / args.step_ms))
    step_s = args.step_ms / 1000
    plain = Reference(alpha=args.alpha, chain=0, draft_cost=args.draft_cost, step_s=step_s)
    drafting = replace(plain, chain=args.chain, planted=("lighthouse", length // 2))
    calibration = calibrate(plain, drafting, length)
    kept = Step([])
    if args.labbook:
        kept = append_or_show(args.labbook, calibration.measured.result.records())
    if kept.trouble:
        say_on_stderr(kept.trouble)
    print_lines([*calibration_page(calibration, args.json), *kept.lines])
    if kept.interrupted:
        return INTERRUPTED
    if calibration.misfit and not kept.trouble:
        say_on_stderr(calibration.misfit)
    if kept.trouble or calibration.misfit:
        return COULD_NOT_MEASURE
    return MEASURED


def calibration_page(calibration: Calibration, as_json: bool) -> list[str]:
    """What `calibrate` prints: the table and what it means, or all of it as one line of JSON."""
    if as_json:
        told = {
            "quantities": [asdict(row) for row in calibration.rows],
            "cpu_share": calibration.cpu_share,
            "fit": calibration.misfit is None,
        }
        return [json.dumps(told)]
    lines = calibration_lines(calibration.rows)
    if not calibration.misfit:
        lines += ["", f"On this machine, now, ratios are good to {calibration.good_to:.1f}%."]
    return lines


def reference_server_command(argv: Sequence[str]) -> int:
    """reference-server CONFIG: not for users; `calibrate` starts it."""
    told = None
    with contextlib.suppress(ValueError):
        told = loads("".join(argv[:1]))
    config = as_dict(told)
    if config.keys() != Reference.__dataclass_fields__.keys():
        raise UsageError("reference-server is not for users; see calibrate --help")
    return serve_reference(Reference(**config))


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "measure": measure_command,
    "compare": compare_command,
    "report": report_command,
    "break-even": break_even_command,
    "calibrate": calibrate_command,
    "reference-server": reference_server_command,
}


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run one command; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None:
        end_like_ctrl_c()
    with open(os.devnull, "w", encoding="utf-8", errors="backslashreplace") as nowhere:
        # a daemon may have closed them, and Python then has none
        sys.stdout = sys.stdout or nowhere
        sys.stderr = sys.stderr or nowhere
        return run_command(words)


def end_like_ctrl_c() -> None:
    """Let a stopped service or a lost terminal end a measurement as Ctrl-C does: all is kept.

    More of them within 10 s do nothing, so that an impatient hand does not lose what is just being
    recorded.
    """
    last = -math.inf

    def end(number: int, frame: object) -> None:
        nonlocal last
        if time.monotonic() - last > 10:
            last = time.monotonic()
            raise KeyboardInterrupt

    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number and signal.getsignal(number) != signal.SIG_IGN:  # not under nohup
            signal.signal(number, end)


def run_command(words: list[str]) -> int:
    """Run one command; the only place that turns errors into text."""
    command = "measure"
    if words and words[0] in COMMANDS:
        command = words.pop(0)
    try:
        check_secrets(words)
        if command == "measure" and words and not words[0].startswith("-"):
            shown = [name for name in COMMANDS if name != "reference-server"]
            known = f"; the commands are {', '.join(shown)}"
            raise UsageError(f"unknown command {words[0]}{meant(words[0], shown)}{known}")
        return COMMANDS[command](words)
    except SystemExit:  # argparse has printed a help or the version; an error raises UsageError
        return MEASURED
    except MeasureError as error:
        say_on_stderr(f"measure_speculative: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        say_on_stderr("interrupted")
        return INTERRUPTED


if __name__ == "__main__":
    try:
        code = main()
    except KeyboardInterrupt:  # before its first line, or behind its last
        code = INTERRUPTED
    os._exit(code)  # all is written; what Python would tear down now could only be interrupted
