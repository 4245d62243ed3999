"""What goes where and when. Planning is pure; only `player` and its `updates` move anything."""
