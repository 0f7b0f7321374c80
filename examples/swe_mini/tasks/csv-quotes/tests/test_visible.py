import unittest

from rows import split_row


class RowsTest(unittest.TestCase):
    def test_plain_fields(self):
        self.assertEqual(split_row("a,b,,c"), ["a", "b", "", "c"])

    def test_a_comma_in_quotes(self):
        self.assertEqual(split_row('"a,b",c'), ["a,b", "c"])
