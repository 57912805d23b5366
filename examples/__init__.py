"""Examples. Run them from the root of the repository: python -m examples.demo."""
