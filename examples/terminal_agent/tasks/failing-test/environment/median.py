"""The median of a list of numbers."""


def median(numbers):
    ordered = sorted(numbers)
    return ordered[len(ordered) // 2]
