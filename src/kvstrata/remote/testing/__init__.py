"""For tests: two sides of a remote read over memory whose every byte is known."""
