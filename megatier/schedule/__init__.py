"""What goes where and when. Planning is pure; only `player` moves anything."""
