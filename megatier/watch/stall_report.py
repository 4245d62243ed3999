"""Describes a run that makes no progress: its queues, the gate, and the stacks of its threads.

The watchdog calls this on its own thread. Nothing here may wait, since whatever it waits for may hang.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Container, Iterator, Sequence

from megatier.play.player import Player
from megatier.store.queue import QueueState
from megatier.store.transfer import Transfer

SHOWN_MAX = 8
"""Most moves that a line of the report names."""
QUEUES_TITLE = "queues (a copy on a CUDA stream counts as in flight until its queue looks again):"


def describe_stall(player: Player, quiet_s: float) -> str:
    """Return the report: every queue, the gate, and every Python thread that does not belong to an idle queue."""
    states = [queue.state() for queue in player.queues]
    lines = [f"megatier: nothing has moved on for {quiet_s:.0f} s", "", QUEUES_TITLE]
    for state in states:
        lines += describe_queue(state, player.busy.get(state.name))

    # The stack of an idle queue would only repeat that it waits for work.
    idle = {f"megatier-{state.name}" for state in states if state.current is None}
    lines += ["", *describe_compute(player)]
    lines += ["", *describe_threads(idle), ""]
    return "\n".join(lines)


def describe_queue(state: QueueState, cause: str | None) -> Iterator[str]:
    """Yield the lines about one queue.

    Args:
        state: what the queue is working on.
        cause: the item of the timeline that the player's queue is working on, if any.
    """
    if state.current is None:
        yield f"  {state.name}: idle, after {state.num_begun} items"
    else:
        transfer, since_ns = state.current
        at = f" ({cause})" if cause is not None else ""
        yield f"  {state.name}: at {transfer.key}{at} for {format_age(since_ns)}; {state.num_waiting} wait behind it"
        for word, others in (("after", transfer.requires), ("behind", transfer.follows)):
            # Moves that are done hold nothing up. `seen_done` does not ask the device, which might hang as well.
            pending = [other for other in others if not other.seen_done()]
            for line in list_first(pending):
                yield f"    {word} {line}"

    for line in list_first(state.in_flight):
        yield f"    in flight: {line}"


def list_first(transfers: Sequence[Transfer]) -> Iterator[str]:
    """Yield a line for each of the first transfers, and one for the number of the others."""
    for transfer in transfers[:SHOWN_MAX]:
        since_ns, _ = transfer.span_ns()
        age = f"for {format_age(since_ns)}" if since_ns else "not started"
        yield f"{transfer.queue} {transfer.key}, {age}"
    if len(transfers) > SHOWN_MAX:
        yield f"{len(transfers) - SHOWN_MAX} more"


def describe_compute(player: Player) -> Iterator[str]:
    """Yield the lines about the pass, and about the queues that wait for compute."""
    # Copied, because the training thread may still add to it.
    entered = tuple(player.accesses)
    num_entered = len(entered)
    planned = player.timeline.accesses if player.timeline is not None else ()

    # A pass may take another course than planned, so the accesses that it has begun come first.
    to_come = planned[num_entered:]
    names = [f"{access.unit} ({access.phase}, group {access.group})" for access in (*entered, *to_come)]
    last = f", the last is {names[num_entered - 1]}" if entered else ""
    yield f"compute: {num_entered} accesses begun{last}; {player.gate.count} are over"
    for count in player.gate.wanted:
        # This is empty if the plan ends before that access.
        wanted = ", ".join(names[count - 1 : count])
        yield f"  the gate: somebody waits for the end of access {count}, {wanted}"


def describe_threads(left_out: Container[str]) -> Iterator[str]:
    """Yield the stacks of the Python threads, innermost call first.

    Source lines are left out, because the source may lie on the drive that hangs.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    this_thread = threading.get_ident()
    for number, frame in sys._current_frames().items():
        # Threads that C code has started have no name here.
        name = names.get(number, str(number))
        if name in left_out or number == this_thread:
            continue
        yield f"thread {name}:"
        for caller, line in traceback.walk_stack(frame):
            code = caller.f_code
            yield f"  {code.co_filename}:{line} in {code.co_name}"


def format_age(start_ns: int) -> str:
    """Return the seconds since a time of `time.perf_counter_ns`, as text."""
    return f"{(time.perf_counter_ns() - start_ns) / 1e9:.0f} s"
