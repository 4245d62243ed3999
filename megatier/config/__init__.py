"""The run's configuration: its schema, its file, its text and its values."""
