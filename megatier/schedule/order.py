"""The recorded order of a pass: what a later pass leaves out of it, or the error that it differs. Pure."""

from __future__ import annotations

from collections.abc import Container, Sequence, Set

from megatier.errors import TimelineError
from megatier.schedule.timeline import Access
from megatier.tier import Phase


def find_left_out(
    recorded: Sequence[Access],
    used: Sequence[Access],
    access: Access | None,
    left_out: Set[tuple[str, int]],
    trained: Container[str],
) -> list[Access]:
    """Return the accesses that a pass leaves out before its next one.

    A pass leaves out all accesses of a unit in a group. It may also leave out the backward of a frozen unit alone:
    without an image, no gradient passes through it.

    Args:
        recorded: the whole order.
        used: its beginning, as far as the pass has come.
        access: the next access of the pass; None: the pass ends.
        left_out: units that the pass has left out so far, each with its group.
        trained: units that have gradients.

    Raises:
        TimelineError: the order is another one.
    """
    repeats = False
    is_new = False
    if access is not None:
        was_left_out = (access.unit, access.group) in left_out
        repeats = access in used and not was_left_out

        # A use that step 1 never made is of a unit that it left out, wherever in the order it comes.
        is_new = access not in recorded

    skipped: list[Access] = []

    # A copy: if the order is refused, nothing was left out.
    gone = set(left_out)
    index = len(used)
    for other in recorded[index:]:
        # All accesses before it are left out, and the pass goes on as it was recorded.
        if other == access:
            return skipped

        # A unit that is left out stays left out in its group.
        skipped.append(other)
        if (other.unit, other.group) in gone:
            continue
        gone.add((other.unit, other.group))

        # Of any other unit neither a gradient may be missing, nor the second of two equal uses.
        loses_gradient = other.phase is Phase.BACKWARD and other.unit in trained
        is_second = other in used
        if loses_gradient or is_second:
            misses_use = is_second and not is_new
            raise _another_order(index, access, other, repeats=repeats or misses_use)

    if access is not None:
        raise _another_order(index, access, None, repeats=repeats)
    return skipped


def _another_order(index: int, access: Access | None, recorded: Access | None, *, repeats: bool) -> TimelineError:
    """Return the error that names the difference.

    Args:
        index: number of the access in the pass.
        access: the access of the pass; None: it ended.
        recorded: the access that was recorded; None: the one of the pass is not among those that follow.
        repeats: whether a unit was used in the pass before that comes once more, or no more.
    """
    if access is not None:
        use = f"{access.unit} ({access.phase}, group {access.group})"
        difference = f"use {index} of this pass is {use}, not what step 1 recorded"
    else:
        assert recorded is not None
        difference = (
            f"the pass ended before {recorded.unit} ({recorded.phase}, group {recorded.group}), which step 1 used"
        )

    if repeats:
        remedy = (
            "A unit runs as often as in the first step. A vision tower runs once for images and once for videos: give "
            "them in batches of their own, or both in each batch that has one of them."
        )
    else:
        remedy = (
            "A step may leave units out, such as a vision tower where there is no image, if the first one used them: "
            "put an image into each batch of the first step."
        )
    return TimelineError(f"{difference}. megatier needs the same order of units in every step. {remedy}")
