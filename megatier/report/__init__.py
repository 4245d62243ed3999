"""The reports of a run: metrics, the live panel, pages and charts."""
