"""What a run tells: metrics, the live panel, pages and charts."""
