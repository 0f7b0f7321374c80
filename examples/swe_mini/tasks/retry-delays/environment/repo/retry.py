"""Delays between attempts."""


def delays(attempts, first=1.0, limit=30.0):
    """Return the seconds before each attempt but the first: doubled each time, at most `limit`."""
    return [min(first * 2**n, limit) for n in range(attempts)]


def call(function, attempts, sleep):
    """Call a function until it does not raise; after `attempts` calls its last error is raised."""
    for delay in delays(attempts):
        try:
            return function()
        except Exception:
            sleep(delay)
