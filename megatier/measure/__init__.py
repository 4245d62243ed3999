"""What a machine's drives, links and processors do."""
