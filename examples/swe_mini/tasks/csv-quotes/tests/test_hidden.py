import unittest

from rows import split_row


class HiddenTest(unittest.TestCase):
    def test_a_doubled_quote_is_a_quote(self):
        self.assertEqual(split_row('"say ""hi""",x'), ['say "hi"', "x"])

    def test_an_empty_field_in_quotes(self):
        self.assertEqual(split_row('a,"",b'), ["a", "", "b"])
