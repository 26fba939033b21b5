"""What the end of a meeting teaches: about the partner, for the address book, and about the meeting, for the event log."""

from __future__ import annotations

from peer.events import MeetingDone
from peer.meeting import Meeting
from peer.meeting_events import Finish, MeetingOver
from peer.partners import REST_FAILED_S, AddressBook
from protocol.messages import Phase, RefusalCode
from protocol.transport import Stream

_NOT_YET = frozenset({RefusalCode.WRONG_PHASE, RefusalCode.NOT_READY})


def learn_from(book: AddressBook, meeting: Meeting, finish: Finish, stream: Stream, now_s: float) -> None:
    """Note in the book how a partner behaved. Own troubles (ABANDONED) and a busy partner say nothing about it."""
    partner, hello = stream.partner, meeting.partner_hello
    match finish:
        case Finish(over=MeetingOver.COMPLETED) if hello is not None:
            book.met(partner, now_s, hello.clock_steps, finished=hello.phase is Phase.FINISH)
        case Finish(over=MeetingOver.MISBEHAVED):
            book.ban(partner, now_s)
        case Finish(refusal=RefusalCode.LEAVING):
            book.leaves(partner, now_s)
        case Finish(refusal=code) if code in _NOT_YET:
            book.not_now(partner, now_s)
        case Finish(over=MeetingOver.GATED):
            book.refused(partner, now_s, REST_FAILED_S)
        case Finish(over=MeetingOver.REFUSED):
            book.refused(partner, now_s)
        case Finish(over=MeetingOver.FAILED):
            book.broke_off(partner, now_s)


def meeting_done(meeting: Meeting, finish: Finish, stream: Stream, seconds: float) -> MeetingDone:
    """Describe a meeting for the event log."""
    return MeetingDone(
        partner=str(stream.partner),
        fragment=meeting.fragment,
        outcome=finish.over.name.lower(),
        reason=finish.reason,
        lane=stream.lane,
        bytes_sent=stream.bytes_sent,
        bytes_received=stream.bytes_received,
        seconds=seconds,
    )
