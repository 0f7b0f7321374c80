"""Numbers computed once with other programs, to compare with."""
