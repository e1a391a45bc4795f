"""Tests what a person is told of a call's time at replicas: each case is named, with the stages that it met."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from headrace.core.errors import HeadraceError, InvalidRequest, Overloaded, SequenceFailed, Unavailable
from headrace.core.grammar import CANNOT_CONTINUE
from headrace.core.ids import RequestId
from headrace.core.load import AttemptCounts
from headrace.core.update import STAGES, FinishReason, SequenceUpdate, StageSeconds
from headrace.gateway.upstream.own.replica_health import ReplicaCircuit
from headrace.gateway.upstream.own.submissions import Submission, SubmissionResult, Submissions
from headrace.observe.finished_request import MAX_KEPT, AnswerHandling
from headrace.observe.timeline import ANSWER, REST, Span, StageMarks, stages_of
from headrace.policy.routing.choice import ONLY, ReplicaChoice, ReplicaId

pytestmark = pytest.mark.pure


class Call:
    """Submissions on a clock that the test sets, and the stages that they make of an answer from 0 to `end`."""

    def __init__(self, num_sequences: int) -> None:
        self.now = 0.0
        self.marks = StageMarks(lambda: self.now)
        self.marks.enter(ANSWER)
        self.circuit = ReplicaCircuit()
        self.submissions = Submissions(num_sequences, lambda: self.now)
        self.submissions.begin()

    def send(self, at: float, *indices: int) -> Submission:
        self.now = at
        attempt = self.circuit.send(None, lambda: self.now)
        return self.submissions.add(Submission(indices, ReplicaChoice(ReplicaId("r0"), ONLY), attempt))

    def read(self, submission: Submission, at: float, index: int, **fields: object) -> None:
        self.now = at
        submission.read([SequenceUpdate(RequestId("r"), 0, index, **fields)], lambda: self.now)  # type: ignore[arg-type]

    def stages(self, end: float) -> list[tuple[str, float, float]]:
        made = stages_of(self.marks.entered, self.submissions.handling().spans, end)
        return [(name, round(start_s, 3), round(start_s + seconds, 3)) for name, start_s, seconds in made]


def entered(*moments: tuple[str, float]) -> Sequence[tuple[int, float]]:
    return tuple((STAGES.index(name), at) for name, at in moments)


def test_an_engine_says_its_stages_at_the_end() -> None:
    call = Call(1)
    sent = call.send(1.0, 0)
    call.read(sent, 9.0, 0, stages=StageSeconds(2.0, 1.0, 4.0), entered=entered(("prefill", 2.0), ("decode", 3.0)))
    call.submissions.end_sequence(0, FinishReason.STOP)
    assert call.stages(9.5) == [("route", 0, 1), ("queue", 1, 3), ("prefill", 3, 4), ("decode", 4, 8), ("deliver", 8, 9.5)]


def test_a_client_that_leaves_before_the_first_token_waited_for_the_engine() -> None:
    call = Call(1)
    sent = call.send(0.0, 0)
    call.now = 30.0
    sent.end(30.0, SubmissionResult.CANCELLED)
    call.submissions.close()
    assert call.stages(30.0) == [("wait", 0, 30)]


def test_sequences_that_stop_strings_end_have_their_own_times() -> None:
    call = Call(2)
    sent = call.send(0.0, 0, 1)
    call.read(sent, 1.0, 0, token_ids=(1,), queue_time_s=0.5)
    call.read(sent, 5.0, 1, token_ids=(1,), queue_time_s=4.0)
    call.now = 4.5
    call.submissions.end_sequence(0, FinishReason.STOP)
    call.now = 6.0
    call.submissions.end_sequence(1, FinishReason.STOP)
    assert call.stages(6.0) == [("queue", 0, 0.5), ("prefill", 0.5, 1), ("decode", 1, 4.5), ("prefill", 4.5, 5), ("decode", 5, 6)]


def test_one_sequence_waits_in_vain_after_a_loss() -> None:
    call = Call(2)
    first = call.send(0.0, 0, 1)
    first.end(1.0, SubmissionResult.LOST)
    again = call.send(2.0, 0)
    call.read(again, 3.0, 0, stages=StageSeconds(0.0, 0.0, 1.0), entered=entered(("decode", 0.0)))
    call.submissions.end_sequence(0, FinishReason.STOP)
    again.end(3.0, SubmissionResult.ANSWERED)
    call.now = 60.0
    call.submissions.close()
    assert call.stages(60.0) == [("wait", 0, 1), ("resume", 1, 2), ("decode", 2, 3), ("resume", 3, 60)]


def test_nothing_of_a_call_reaches_beyond_its_end() -> None:
    """A foreign server answers from then on."""
    call = Call(1)
    call.send(0.0, 0).end(1.0, SubmissionResult.REJECTED)
    call.now = 2.0
    call.submissions.close()
    assert {span.end for span in call.submissions.handling().spans} == {1.0, 2.0}


@pytest.mark.parametrize("finish", list(FinishReason))
def test_only_an_answer_is_an_answer(finish: FinishReason) -> None:
    call = Call(1)
    call.submissions.end_sequence(0, finish)
    assert (call.submissions.result_of([0]) is SubmissionResult.ANSWERED) is finish.is_answer


def test_of_many_sequences_the_later_stages_are_one_and_none_of_their_time_is_lost() -> None:
    spans = [Span("decode" if number % 2 else "prefill", number, number + 1.0) for number in range(200)]
    bounded = AnswerHandling(spans=spans).bounded().spans
    assert len(bounded) == MAX_KEPT
    assert bounded[-1] == Span(REST, MAX_KEPT - 1, 200.0)
    assert sum(span.end - span.start for span in bounded) == 200


def test_the_time_to_the_first_token_is_counted_once() -> None:
    call = Call(1)
    sent = call.send(1.0, 0)
    call.read(sent, 1.5, 0)
    call.read(sent, 3.0, 0, token_ids=(7,))
    call.read(sent, 4.0, 0, token_ids=(8,), finish=FinishReason.STOP)
    sent.end(4.0, SubmissionResult.ANSWERED)
    assert call.circuit.attempts == AttemptCounts(num_sent=1, num_begun=1, ttft_s=2.0, ttft_s_squared=4.0)


@pytest.mark.parametrize(
    ("error", "counted"),
    [
        (InvalidRequest("seed", "a number"), AttemptCounts(1, num_refused=1)),
        (Overloaded("full"), AttemptCounts(1, num_rejected=1)),
        (Unavailable("leaves"), AttemptCounts(1, num_rejected=1)),
        (SequenceFailed("its fault"), AttemptCounts(1, num_failed=1)),
    ],
)
def test_a_rejection_is_counted_by_whose_fault_it_is(error: HeadraceError, counted: AttemptCounts) -> None:
    call = Call(1)
    sent = call.send(0.0, 0)
    sent.end(1.0, SubmissionResult.REJECTED, error)
    sent.end(2.0, SubmissionResult.CANCELLED)
    assert call.circuit.attempts == counted


def test_a_loss_an_engines_fault_and_a_grammar_without_a_next_token_are_counted_apart() -> None:
    call = Call(1)
    call.send(0.0, 0).end(1.0, SubmissionResult.LOST)
    failed = call.send(2.0, 0)
    call.read(failed, 3.0, 0, finish=FinishReason.ERROR, error="a kernel raised")
    failed.end(3.0, SubmissionResult.ERROR)
    refused = call.send(4.0, 0)
    call.read(refused, 5.0, 0, finish=FinishReason.ERROR, error=f"{CANNOT_CONTINUE} it allows no token")
    refused.end(5.0, SubmissionResult.ERROR)
    left = call.send(6.0, 0)
    left.end(6.5, SubmissionResult.CANCELLED)
    assert call.circuit.attempts == AttemptCounts(num_sent=4, num_lost=1, num_failed=1, num_refused=1)


def test_a_refusal_is_counted_once_for_all_sequences_of_a_request() -> None:
    call = Call(4)
    refused = call.send(0.0, *range(4))
    for index in range(4):
        call.read(refused, 1.0, index, finish=FinishReason.ERROR, error=f"{CANNOT_CONTINUE} it allows no token")
    refused.end(1.0, SubmissionResult.ERROR)
    assert call.circuit.attempts == AttemptCounts(num_sent=1, num_refused=1)
