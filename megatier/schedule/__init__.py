"""What goes where and when, as pure figures: sizes, slots, placement, the timeline, and how long a step takes."""
