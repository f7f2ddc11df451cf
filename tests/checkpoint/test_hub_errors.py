"""What is said of a connection that breaks: the words fit what was being done."""

from __future__ import annotations

from qconvert.checkpoint.hub_errors import explanation, refusal
from qconvert.errors import SourceUnavailable


def test_a_lost_connection_is_told_for_what_was_done() -> None:
    error = ConnectionError("downloading of the peer was reset")
    raised, fact, hint = explanation(error)
    assert raised is SourceUnavailable
    assert fact == "download failed: downloading of the peer was reset" and "no file is fetched twice" in hint
    fact, hint = refusal(error)  # whose own words stay as they are
    assert fact == "sending failed: downloading of the peer was reset" and "what was sent is kept" in hint
