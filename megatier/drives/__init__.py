"""Files on drives: block files, the engine that reads and writes them, and the way from them past RAM."""
