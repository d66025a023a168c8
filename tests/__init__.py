"""The tests mirror src; see the test command for the suites and what each needs."""
