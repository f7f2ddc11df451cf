"""Ranges of a file on the Hub: what each answer of its servers means, against a server that gives it."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qconvert.checkpoint import hub_file, network
from qconvert.checkpoint.http_ranges import read_range
from qconvert.checkpoint.hub_file import HubFile
from qconvert.checkpoint.network import Aborted, Network
from qconvert.errors import SourceUnavailable
from tests.support.crashes import asked
from tests.support.fake_hub import Answer, FakeHub, Fault, running

BLOB = random.Random(0).randbytes(700_000)
FILE = "model.safetensors"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with running() as fake:
        fake.repos["org/m"] = {FILE: BLOB}
        monkeypatch.setattr(HubFile, "_url", f"{fake.url}/org/m/resolve/main/{FILE}")
        monkeypatch.setattr(network.random, "uniform", lambda a, b: 0.0)
        yield fake


def opened(hub: FakeHub, patience: float = 20.0) -> HubFile:
    return HubFile("org/m", "c0ffee", FILE, Network(4, patience))


def read(file: HubFile, offset: int = 1000, size: int = 600_000) -> bytes:
    buffer = bytearray(size)
    read_range(file, memoryview(buffer), offset, {})
    return bytes(buffer)


def once(answer: Answer, at: int = 0, times: int = 1) -> Fault:
    return lambda number: answer if at <= number < at + times else None


def test_ranges_come_over_one_connection_with_one_resolve(hub: FakeHub) -> None:
    file = opened(hub)
    for offset in range(0, 600_000, 100_000):
        assert read(file, offset, 100_000) == BLOB[offset : offset + 100_000]
    assert hub.sent() == 600_000
    assert len(hub.heads()) == 1
    assert (file.network.requests, file.network.nbytes, file.network.retries) == (6, 600_000, 0)


def test_the_token_goes_to_the_hub_alone(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_private")
    read(opened(hub))
    assert {asked.authorization for asked in hub.log if asked.server == "hub"} == {"Bearer hf_private"}
    assert {asked.authorization for asked in hub.log if asked.server == "cdn"} == {None}


PASSING = {
    "503 three times": once(Answer(503), times=3),
    "503 that names a time": once(Answer(503, {"Retry-After": "0"})),
    "429 by RateLimit": once(Answer(429, {"RateLimit": '"resolvers";r=0;t=1'})),
    "429 by Retry-After": once(Answer(429, {"Retry-After": "1"})),
    "408": once(Answer(408)),
    "short body": once(Answer(keep=150_000)),
    "reset": once(Answer(keep=300_000, reset=True), times=2),
    "no byte and a reset": once(Answer(keep=0, reset=True), times=3),
    "expired once": once(Answer(403, body=b"Request has expired")),
    "401": once(Answer(401)),
}


@pytest.mark.parametrize("fault", PASSING.values(), ids=PASSING)
def test_what_passes_is_waited_for(hub: FakeHub, fault: Fault) -> None:
    hub.fault = fault
    assert read(opened(hub)) == BLOB[1000:601_000]


def test_what_came_before_the_connection_was_lost_is_kept(hub: FakeHub) -> None:
    hub.fault = once(Answer(keep=400_000))
    read(opened(hub))
    # At most the piece that was under way is asked for again.
    assert hub.sent() <= 600_000 + (128 << 10)
    assert hub.log[-1].first is not None and hub.log[-1].first > 1000 + 200_000


def test_a_wait_that_is_asked_for_is_kept_by_all_threads(hub: FakeHub) -> None:
    hub.fault = once(Answer(429, {"Retry-After": "1"}))
    file, seen = opened(hub), []
    began = time.monotonic()

    def work(offset: int) -> None:
        read(file, offset, 1000)
        seen.append(time.monotonic() - began)

    work(0)
    assert seen[0] >= 1
    file.network.limit("cdn", 0.5)
    threads = [threading.Thread(target=work, args=(offset,)) for offset in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert min(seen[1:]) >= seen[0] + 0.45


def test_expired_addresses_are_renewed_once_for_all_threads(hub: FakeHub) -> None:
    hub.uses = 10
    file, found = opened(hub), {}

    def work(offset: int) -> None:
        found[offset] = read(file, offset, 10_000)

    for start in range(0, 600_000, 40_000):
        threads = [threading.Thread(target=work, args=(start + i * 10_000,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(found[offset] == BLOB[offset : offset + 10_000] for offset in range(0, 600_000, 10_000))
    # 60 ranges of 10 uses each; a burst of refusals costs one resolve.
    assert 6 <= len(hub.heads()) <= 8


def test_an_address_near_its_end_is_renewed_before_it_is_refused(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = opened(hub)
    now = time.monotonic()
    monkeypatch.setattr(hub_file.time, "monotonic", lambda: now + 0.81 * 3600)
    read(file)
    assert len(hub.heads()) == 2
    assert not [asked for asked in hub.log if asked.status == 403]


REFUSED = {
    "the whole file instead of a part": (
        Answer(200, whole=True),
        r"127\.0\.0\.1:\d+: org/m/model\.safetensors: answers a request for a part with all of it",
    ),
    "another range": (Answer(content_range="bytes 0-9/700000"), r"has changed while it was read"),
    "another size": (Answer(content_range="bytes 1000-600999/800000"), r"it gives bytes 1000-600999/800000"),
    "out of range": (Answer(416), r"it has no byte 1,000 now"),
    "compressed": (Answer(headers={"Content-Encoding": "gzip"}), r"compresses what should come as it is"),
    "refused for good": (
        Answer(
            403, body=b"<Error><Message>Not for you: https://a/b?X-Amz-Signature=secret</Message></Error>"
        ),
        r"refuses a new address too \(HTTP 403: Not for you: https://a/b\)",
    ),
    "too large for this door": (Answer(400, body=b"too large"), r"\(HTTP 400: too large\)"),
    "a redirect": (Answer(302, {"Location": "http://elsewhere/"}), r"sends the request elsewhere"),
    "a teapot": (Answer(418), r"answers HTTP 418"),
}


@pytest.mark.parametrize(("answer", "told"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_pass_is_one_error(hub: FakeHub, answer: Answer, told: str) -> None:
    hub.fault = lambda number: answer
    with pytest.raises(SourceUnavailable, match=told) as refused:
        read(opened(hub))
    assert "ignature" not in refused.value.fact and "secret" not in refused.value.fact
    assert "\n" not in refused.value.fact
    assert len([asked for asked in hub.log if asked.server == "cdn"]) <= 2


def test_another_etag_on_the_way_is_a_changed_file(hub: FakeHub) -> None:
    file, etags = opened(hub), {}
    read_range(file, memoryview(bytearray(10)), 0, etags)
    hub.fault = lambda number: Answer(headers={"ETag": '"another"'})
    with pytest.raises(SourceUnavailable, match="its ETag was"):
        read_range(file, memoryview(bytearray(10)), 0, etags)


def test_another_file_at_the_renewal_is_never_read(hub: FakeHub) -> None:
    file = opened(hub)
    hub.repos["org/m"][FILE] = BLOB[:-1] + b"x"
    hub.fault = once(Answer(403))
    with pytest.raises(SourceUnavailable, match=r"its ETag was [0-9a-f]{64}, 700,000 bytes, and is"):
        read(file)


@pytest.mark.parametrize(
    ("close", "told"),
    [
        (lambda hub: hub.closed_to.add("org/m"), "there is no such model on the Hub"),
        (lambda hub: hub.repos.__setitem__("org/m", {}), "download failed: 404 Client Error|EntryNotFound"),
    ],
)
def test_access_that_is_lost_ends_the_run(hub: FakeHub, close: Callable[[FakeHub], None], told: str) -> None:
    file = opened(hub)
    address = file.address().url
    close(hub)
    with pytest.raises(SourceUnavailable, match=told):
        file.address(refused=address)


def test_the_resolve_itself_is_tried_again(hub: FakeHub) -> None:
    wrong = {0: (503, {}), 1: (429, {"RateLimit": '"resolvers";r=0;t=1'}), 2: (500, {})}
    hub.resolve_fault = wrong.get
    assert read(opened(hub)) == BLOB[1000:601_000]
    assert hub.resolved == 4


def test_patience_ends_with_the_reason(hub: FakeHub) -> None:
    hub.fault = lambda number: Answer(503)
    with pytest.raises(SourceUnavailable, match=r"answers HTTP 503; no byte has come for 0.5 s"):
        read(opened(hub, patience=0.5))
    hub.fault = lambda number: Answer(429, {"Retry-After": "1"})
    with pytest.raises(SourceUnavailable, match=r"asks to wait, again and again; no byte has come for 1 s"):
        read(opened(hub, patience=1.0))


def test_a_stalled_connection_is_given_up(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "STALL", 0.3)
    silent = threading.Event()

    def stall(number: int) -> Answer | None:
        if number == 0:
            silent.wait(2)
        return None

    hub.fault = stall
    began = time.monotonic()
    assert read(opened(hub)) == BLOB[1000:601_000]
    assert time.monotonic() - began < 1.5
    silent.set()


def test_an_abort_wakes_a_transfer(hub: FakeHub) -> None:
    silent = threading.Event()
    hub.fault = lambda number: silent.wait(10) and None
    file, ended = opened(hub), []

    def work() -> None:
        try:
            read(file)
        except Aborted:
            ended.append(time.monotonic())

    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(0.3)
    began = time.monotonic()
    file.network.abort()
    thread.join(5)
    silent.set()
    assert ended and ended[0] - began < 1


FAULTS = (
    None, None, None, None, Answer(503), Answer(403), Answer(200, whole=True), Answer(416), Answer(408),
    Answer(keep=1), Answer(keep=90_000, reset=True), Answer(content_range="bytes 1-2/3"), Answer(500),
    Answer(headers={"ETag": '"other"'}), Answer(429, {"Retry-After": "0"}), Answer(headers={"ETag": 'W/"x"'}),
)  # fmt: skip


@settings(
    max_examples=len(asked(range(2000), range(80))),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    faults=st.lists(st.sampled_from(FAULTS), max_size=12),
    uses=st.integers(1, 6),
    sizes=st.lists(st.integers(1, 250_000), min_size=1, max_size=4),
)
def test_any_sequence_of_faults_ends_in_the_bytes_or_in_one_error(
    hub: FakeHub, faults: list[Answer | None], uses: int, sizes: list[int]
) -> None:
    hub.uses, hub.ranges = uses, 0
    hub.fault = lambda number: faults[number] if number < len(faults) else None
    file, etags, offset = opened(hub), {}, 0
    for size in sizes:  # at most 1,000,000 bytes of 700,000
        buffer = bytearray(min(size, len(BLOB) - offset))
        try:
            read_range(file, memoryview(buffer), offset, etags)
        except SourceUnavailable as error:
            assert re.match(r"127\.0\.0\.1:\d+: org/m/model\.safetensors: ", error.fact)
            assert "ignature" not in error.fact + error.hint
            return
        assert buffer == BLOB[offset : offset + len(buffer)]
        offset += len(buffer)
