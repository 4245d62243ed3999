"""What goes where and when, as pure figures: sizes, slots, placement, moves, and the timeline."""
