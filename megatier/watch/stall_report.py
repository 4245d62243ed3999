"""The report of a run in which nothing moves on. It must not wait for anything."""

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
"""Moves in flight, or waited for, that a line of the report names."""
QUEUES_TITLE = "queues (a copy on a CUDA stream counts as in flight until its queue looks again):"


def describe_stall(player: Player, quiet_s: float) -> str:
    """Describe the work of every queue, of the gate, and of every Python thread but those of idle queues."""
    states = [queue.state() for queue in player.queues]
    lines = [f"megatier: nothing has moved on for {quiet_s:.0f} s", "", QUEUES_TITLE]
    for state in states:
        lines += describe_queue(state, player.busy.get(state.name))

    # The stack of an idle queue's thread says that it waits for work, as its line above does.
    idle = {f"megatier-{state.name}" for state in states if state.current is None}
    lines += ["", *describe_compute(player)]
    lines += ["", *describe_threads(idle), ""]
    return "\n".join(lines)


def describe_queue(state: QueueState, cause: str | None) -> Iterator[str]:
    """Yield lines about one queue.

    Args:
        state: what it is at.
        cause: what a queue of the player is busy with, while it has an item.
    """
    if state.current is None:
        yield f"  {state.name}: idle, after {state.num_begun} items"
    else:
        transfer, since_ns = state.current
        at = f" ({cause})" if cause is not None else ""
        yield f"  {state.name}: at {transfer.key}{at} for {format_age(since_ns)}; {state.num_waiting} wait behind it"
        for word, others in (("after", transfer.requires), ("behind", transfer.follows)):
            # What is done is no reason to wait. `seen_done` asks no device, since even that might hang now.
            pending = [other for other in others if not other.seen_done()]
            for line in list_first(pending):
                yield f"    {word} {line}"

    for line in list_first(state.in_flight):
        yield f"    in flight: {line}"


def list_first(transfers: Sequence[Transfer]) -> Iterator[str]:
    """Yield the first transfers, by queue, key and age, and how many more there are."""
    for transfer in transfers[:SHOWN_MAX]:
        since_ns, _ = transfer.span_ns()
        age = f"for {format_age(since_ns)}" if since_ns else "not started"
        yield f"{transfer.queue} {transfer.key}, {age}"
    if len(transfers) > SHOWN_MAX:
        yield f"{len(transfers) - SHOWN_MAX} more"


def describe_compute(player: Player) -> Iterator[str]:
    """Yield lines about the pass, and about who waits for compute."""
    # A copy: the training thread goes on, and would add to what is read here.
    entered = tuple(player.accesses)
    num_entered = len(entered)
    planned = player.timeline.accesses if player.timeline is not None else ()

    # A pass may take another course than planned, so what it has entered comes first.
    to_come = planned[num_entered:]
    names = [f"{access.unit} ({access.phase}, group {access.group})" for access in (*entered, *to_come)]
    last = f", the last is {names[num_entered - 1]}" if entered else ""
    yield f"compute: {num_entered} accesses begun{last}; {player.gate.count} are over"
    for count in player.gate.wanted:
        # Without a name if no plan has one for that access.
        wanted = ", ".join(names[count - 1 : count])
        yield f"  the gate: somebody waits for the end of access {count}, {wanted}"


def describe_threads(left_out: Container[str]) -> Iterator[str]:
    """Yield the stacks of Python threads, innermost call first.

    They have no source lines, because a drive that hangs may have the source.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    own = threading.get_ident()
    for number, frame in sys._current_frames().items():
        # A thread that was started by C code has no name here.
        name = names.get(number, str(number))
        if name in left_out or number == own:
            continue
        yield f"thread {name}:"
        for caller, line in traceback.walk_stack(frame):
            code = caller.f_code
            yield f"  {code.co_filename}:{line} in {code.co_name}"


def format_age(start_ns: int) -> str:
    """Return the time that has passed since a moment of time.perf_counter_ns."""
    return f"{(time.perf_counter_ns() - start_ns) / 1e9:.0f} s"
